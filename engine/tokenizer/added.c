/* Added tokens: leftmost, longest match over a sorted list, then the white-space and
 * whole-word rules of the tokenizers package. */
#include "engine/tokenizer/tokenizer_internal.h"
#include "engine/tokenizer/utf8.h"

#include <stdlib.h>
#include <string.h>

epx_status_t epx_added_push(epx_added_set_t *set, const epx_added_t *token) {
    epx_added_t *p;
    if ((set->n & (set->n - 1)) == 0) { /* grows at powers of two */
        p = realloc(set->token, (set->n ? set->n * 2 : 1) * sizeof *p);
        if (p == NULL) return epx_fail(EPX_ERR_NOMEM, "%zu added tokens", set->n + 1);
        set->token = p;
    }
    set->token[set->n++] = *token;
    return EPX_OK;
}

static int by_text(const void *a, const void *b) {
    const epx_added_t *x = a, *y = b;
    size_t n = x->n_bytes < y->n_bytes ? x->n_bytes : y->n_bytes;
    int c = memcmp(x->text, y->text, n);
    if (c) return c;
    if (x->n_bytes != y->n_bytes) return x->n_bytes < y->n_bytes ? -1 : 1;
    return (x->id > y->id) - (x->id < y->id);
}

void epx_added_seal(epx_added_set_t *set) {
    size_t i;
    if (set->n) qsort(set->token, set->n, sizeof *set->token, by_text);
    for (i = 0; i < set->n; i++) set->starts[(unsigned char)set->token[i].text[0]] = 1;
}

void epx_added_fini(epx_added_set_t *set) {
    size_t i;
    for (i = 0; i < set->n; i++) free(set->token[i].text);
    free(set->token);
    *set = (epx_added_set_t){0};
}

/* First of token[lo..hi), which agree on `depth` bytes and are longer, whose byte there is >= c. */
static size_t lower_bound(const epx_added_set_t *set, size_t lo, size_t hi, size_t depth, int c) {
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if ((unsigned char)set->token[mid].text[depth] < c) lo = mid + 1;
        else hi = mid;
    }
    return lo;
}

/* Longest token that text begins with, or NULL. */
static const epx_added_t *longest(const epx_added_set_t *set, const char *text, size_t n_bytes) {
    const epx_added_t *best = NULL;
    size_t lo = 0, hi = set->n, depth;
    for (depth = 0; depth < n_bytes && lo < hi; depth++) {
        int c = (unsigned char)text[depth];
        lo = lower_bound(set, lo, hi, depth, c);
        hi = lower_bound(set, lo, hi, depth, c + 1);
        if (lo < hi && set->token[lo].n_bytes == depth + 1) best = &set->token[lo];
        while (lo < hi && set->token[lo].n_bytes == depth + 1) lo++;
    }
    return best;
}

static const epx_added_t *find_from(const epx_added_set_t *set, const char *text, size_t n_bytes, size_t *at) {
    for (; *at < n_bytes; (*at)++) {
        const epx_added_t *t;
        if (!set->starts[(unsigned char)text[*at]]) continue;
        t = longest(set, text + *at, n_bytes - *at);
        if (t) return t;
    }
    return NULL;
}

static int is_whole_word(const char *text, size_t n_bytes, size_t begin, size_t end) {
    size_t len;
    if (begin > 0 && epx_utf8_is_word(epx_utf8_decode(text + epx_utf8_back(text, begin), &len))) return 0;
    return end == n_bytes || !epx_utf8_is_word(epx_utf8_decode(text + end, &len));
}

static size_t skip_space_back(const char *text, size_t floor_off, size_t begin) {
    size_t len;
    while (begin > floor_off) {
        size_t prev = epx_utf8_back(text, begin);
        if (prev < floor_off || !epx_utf8_is_space(epx_utf8_decode(text + prev, &len))) break;
        begin = prev;
    }
    return begin;
}

static size_t skip_space(const char *text, size_t n_bytes, size_t end) {
    size_t len;
    while (end < n_bytes && epx_utf8_is_space(epx_utf8_decode(text + end, &len))) end += len;
    return end;
}

int epx_added_next(const epx_added_set_t *set, const char *text, size_t n_bytes, epx_added_cursor_t *cur, epx_span_t *out) {
    const epx_added_t *t;
    if (cur->has_held) {
        *out = cur->held;
        cur->has_held = 0;
        return 1;
    }
    while ((t = find_from(set, text, n_bytes, &cur->search_off)) != NULL) {
        size_t begin = cur->search_off, end = begin + t->n_bytes, plain = cur->text_off;
        cur->search_off = end;
        if (t->single_word && !is_whole_word(text, n_bytes, begin, end)) continue;
        if (t->lstrip) begin = skip_space_back(text, plain, begin);
        if (t->rstrip) end = skip_space(text, n_bytes, end);
        cur->text_off = end;
        *out = (epx_span_t){begin, end, t->id};
        if (plain < begin) {
            cur->held = *out;
            cur->has_held = 1;
            *out = (epx_span_t){plain, begin, -1};
        }
        return 1;
    }
    if (cur->text_off >= n_bytes) return 0;
    *out = (epx_span_t){cur->text_off, n_bytes, -1};
    cur->text_off = n_bytes;
    return 1;
}
