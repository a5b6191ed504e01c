/* UTF-8: checking, decoding, borders and lossy repair (maximal subparts, as Unicode chapter 3.9 and Rust do it). */
#include "engine/tokenizer/utf8.h"

#include <string.h>

#include <utf8proc.h>

#include "engine/tokenizer/tokenizer.h"

/* Legal range of the second byte after `lead`, and the length of the whole sequence; 0 when no character starts so. */
static size_t lead_info(unsigned char lead, unsigned char *lo, unsigned char *hi) {
    *lo = 0x80;
    *hi = 0xBF;
    if (lead < 0x80) return 1;
    if (lead < 0xC2 || lead > 0xF4) return 0;
    if (lead < 0xE0) return 2;
    if (lead == 0xE0) *lo = 0xA0;
    if (lead == 0xED) *hi = 0x9F;
    if (lead == 0xF0) *lo = 0x90;
    if (lead == 0xF4) *hi = 0x8F;
    return lead < 0xF0 ? 3 : 4;
}

int epx_utf8_sequence(const char *p, size_t n, size_t *out_len) {
    const unsigned char *u = (const unsigned char *)p;
    unsigned char lo, hi;
    size_t i, want = lead_info(u[0], &lo, &hi);
    *out_len = 1;
    if (want == 0) return 0;
    for (i = 1; i < want; i++) {
        if (i == n) {
            *out_len = n;
            return -1;
        }
        if (u[i] < lo || u[i] > hi) {
            *out_len = i;
            return 0;
        }
        lo = 0x80;
        hi = 0xBF;
    }
    *out_len = want;
    return 1;
}

int32_t epx_utf8_decode(const char *p, size_t *out_len) {
    const unsigned char *u = (const unsigned char *)p;
    if (u[0] < 0x80) {
        *out_len = 1;
        return u[0];
    }
    if (u[0] < 0xE0) {
        *out_len = 2;
        return ((u[0] & 0x1F) << 6) | (u[1] & 0x3F);
    }
    if (u[0] < 0xF0) {
        *out_len = 3;
        return ((u[0] & 0x0F) << 12) | ((u[1] & 0x3F) << 6) | (u[2] & 0x3F);
    }
    *out_len = 4;
    return ((u[0] & 0x07) << 18) | ((u[1] & 0x3F) << 12) | ((u[2] & 0x3F) << 6) | (u[3] & 0x3F);
}

size_t epx_utf8_encode(int32_t c, char *out) { return (size_t)utf8proc_encode_char(c, (utf8proc_uint8_t *)out); }

size_t epx_utf8_back(const char *p, size_t end) {
    do {
        end--;
    } while (end > 0 && ((unsigned char)p[end] & 0xC0) == 0x80);
    return end;
}

int epx_utf8_is_space(int32_t c) {
    if (c < 0x80) return c == ' ' || (c >= 9 && c <= 13);
    return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
           c == 0x205F || c == 0x3000;
}

/* Alphabetic is L, Nl and Other_Alphabetic; the last is marks (counted anyway) and the circled and squared letters. */
static int is_enclosed_letter(int32_t c) {
    return (c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
           (c >= 0x1F170 && c <= 0x1F189);
}

int epx_utf8_is_word(int32_t c) {
    switch (utf8proc_category(c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
        return 1;
    default:
        return c == 0x200C || c == 0x200D || is_enclosed_letter(c);
    }
}

size_t epx_utf8_complete_prefix(const char *data, size_t n_bytes) {
    size_t back, len;
    for (back = 1; back <= 3 && back <= n_bytes; back++) {
        if (((unsigned char)data[n_bytes - back] & 0xC0) == 0x80) continue;
        return epx_utf8_sequence(data + n_bytes - back, back, &len) < 0 ? n_bytes - back : n_bytes;
    }
    return n_bytes;
}

epx_status_t epx_utf8_append_lossy(epx_str_t *out, const char *data, size_t n_bytes) {
    size_t pos = 0, good = 0, len;
    while (pos < n_bytes) {
        if (epx_utf8_sequence(data + pos, n_bytes - pos, &len) == 1) {
            pos += len;
            continue;
        }
        EPX_TRY(epx_str_append(out, data + good, pos - good));
        EPX_TRY(epx_str_append(out, "\xEF\xBF\xBD", 3));
        pos += len;
        good = pos;
    }
    return epx_str_append(out, data + good, pos - good);
}

int epx_utf8_valid(const char *data, size_t n_bytes, size_t *out_bad_off) {
    size_t pos = 0, len;
    uint64_t word;
    while (pos < n_bytes) {
        if (n_bytes - pos >= 8) {
            memcpy(&word, data + pos, 8);
            if ((word & 0x8080808080808080u) == 0) {
                pos += 8;
                continue;
            }
        }
        if (epx_utf8_sequence(data + pos, n_bytes - pos, &len) != 1) {
            if (out_bad_off) *out_bad_off = pos;
            return 0;
        }
        pos += len;
    }
    return 1;
}
