/* NFC on utf8proc's tables: decompose, order the marks, compose.
 * The ordering is our own counting sort: utf8proc_decompose sorts marks by exchanges, quadratic in a run of marks, and the text
 * comes from the network. */
#include "engine/tokenizer/nfc.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

#include "engine/tokenizer/utf8.h"

/* U+0300 is CC 80: below it no character combines, decomposes out of NFC or is excluded. */
int epx_nfc_is_plain(const char *text, size_t n_bytes) {
    size_t i;
    for (i = 0; i < n_bytes; i++) {
        if ((unsigned char)text[i] >= 0xCC) return 0;
    }
    return 1;
}

static int combining_class(int32_t c) { return (int)utf8proc_get_property(c)->combining_class; }

/* Stable counting sort of cp[0..n), all of class > 0, by class; tmp holds n. */
static void sort_marks(int32_t *cp, size_t n, int32_t *tmp) {
    size_t start[257] = {0}, i;
    int c;
    for (i = 0; i < n; i++) start[combining_class(cp[i]) + 1]++;
    for (c = 0; c < 256; c++) start[c + 1] += start[c];
    for (i = 0; i < n; i++) tmp[start[combining_class(cp[i])]++] = cp[i];
    memcpy(cp, tmp, n * sizeof *cp);
}

/* The usual run of one to four marks: insertion sort, without the counters. */
static void sort_few_marks(int32_t *cp, size_t n) {
    size_t i, j;
    for (i = 1; i < n; i++) {
        int32_t c = cp[i];
        int k = combining_class(c);
        for (j = i; j > 0 && combining_class(cp[j - 1]) > k; j--) cp[j] = cp[j - 1];
        cp[j] = c;
    }
}

static void order_marks(int32_t *cp, size_t n, int32_t *tmp) {
    size_t i = 0, begin;
    while (i < n) {
        if (combining_class(cp[i]) == 0) {
            i++;
            continue;
        }
        begin = i;
        while (i < n && combining_class(cp[i]) != 0) i++;
        if (i - begin > 16) sort_marks(cp + begin, i - begin, tmp);
        else sort_few_marks(cp + begin, i - begin);
    }
}

/* Canonical decomposition of one character is at most 4 code points (Unicode's own bound for all versions). */
#define MAX_DECOMPOSITION 4

static epx_status_t decompose(const char *text, size_t n_bytes, int32_t *cp, size_t *out_n) {
    size_t pos = 0, n = 0, len;
    while (pos < n_bytes) {
        int32_t c = epx_utf8_decode(text + pos, &len);
        utf8proc_ssize_t k = 1;
        pos += len;
        if (c < 0xC0) cp[n] = c;
        else k = utf8proc_decompose_char(c, cp + n, MAX_DECOMPOSITION, UTF8PROC_DECOMPOSE | UTF8PROC_STABLE, NULL);
        if (k < 0 || k > MAX_DECOMPOSITION) return epx_fail(EPX_ERR_INTERNAL, "NFC: U+%04X decomposes to %zd", (unsigned)c, k);
        n += (size_t)k;
    }
    *out_n = n;
    return EPX_OK;
}

static epx_status_t encode(const int32_t *cp, size_t n, epx_str_t *out) {
    char block[1024];
    size_t i, used = 0;
    for (i = 0; i < n; i++) {
        used += epx_utf8_encode(cp[i], block + used);
        if (used + 4 <= sizeof block) continue;
        EPX_TRY(epx_str_append(out, block, used));
        used = 0;
    }
    return epx_str_append(out, block, used);
}

epx_status_t epx_nfc(const char *text, size_t n_bytes, epx_str_t *out) {
    epx_status_t s = EPX_ERR_NOMEM;
    utf8proc_ssize_t n_composed;
    size_t n = 0;
    /* A character of two bytes or more gives at most 4 code points, one of one byte (ASCII) gives 1. The slack is decompose's
     * margin. */
    size_t cap = n_bytes * 2 + MAX_DECOMPOSITION;
    int32_t *cp = malloc(cap * sizeof *cp), *tmp = malloc(cap * sizeof *tmp);
    epx_str_clear(out);
    if (cp == NULL || tmp == NULL) {
        s = epx_fail(EPX_ERR_NOMEM, "NFC of %zu bytes", n_bytes);
        goto err_buffers;
    }
    EPX_TRY_GOTO(s, decompose(text, n_bytes, cp, &n), err_buffers);
    order_marks(cp, n, tmp);
    n_composed = utf8proc_normalize_utf32(cp, (utf8proc_ssize_t)n, UTF8PROC_COMPOSE | UTF8PROC_STABLE);
    if (n_composed < 0) s = epx_fail(EPX_ERR_INTERNAL, "NFC: utf8proc says %s", utf8proc_errmsg(n_composed));
    else s = encode(cp, (size_t)n_composed, out);
err_buffers:
    free(cp);
    free(tmp);
    return s;
}
