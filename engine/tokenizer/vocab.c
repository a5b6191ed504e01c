/* Token strings: an open-addressing table from string to id, and the bytes each id stands for. */
#include "base/checked.h"
#include "engine/tokenizer/tokenizer_internal.h"
#include "engine/tokenizer/utf8.h"

#include <stdlib.h>
#include <string.h>

/* GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the other 68 are U+0100 and up in order. */
static int is_own_char(unsigned byte) { return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE; }

size_t epx_byte_char(unsigned char byte, char out[2]) {
    int32_t c = byte;
    unsigned b;
    if (!is_own_char(byte)) {
        c = 0x100;
        for (b = 0; b < byte; b++) c += !is_own_char(b);
    }
    return epx_utf8_encode(c, out);
}

/* The byte a character of the alphabet stands for, or -1. */
static int char_byte(int32_t c) {
    unsigned b;
    int32_t next = 0x100;
    if (c < 0x100) return is_own_char((unsigned)c) ? (int)c : -1;
    if (c >= 0x100 + 68) return -1;
    for (b = 0; b < 256; b++) {
        if (is_own_char(b)) continue;
        if (next++ == c) return (int)b;
    }
    return -1;
}

/* FNV-1a; vocabularies are files of the user, not an enemy's. */
static uint32_t hash_bytes(const char *p, size_t n) {
    uint64_t h = 0xCBF29CE484222325u;
    size_t i;
    for (i = 0; i < n; i++) h = (h ^ (unsigned char)p[i]) * 0x100000001B3u;
    return (uint32_t)(h ^ (h >> 32));
}

epx_status_t epx_vocab_init(epx_vocab_t *v, int32_t n_ids, size_t n_strings) {
    size_t n_slots = 16;
    while (n_slots < n_strings * 2) n_slots *= 2;
    v->n_ids = n_ids;
    v->mask = (uint32_t)(n_slots - 1);
    v->token = calloc((size_t)n_ids + 1, sizeof *v->token);
    v->slot = calloc(n_slots, sizeof *v->slot);
    if (v->token == NULL || v->slot == NULL) return epx_fail(EPX_ERR_NOMEM, "vocabulary of %d ids", (int)n_ids);
    return EPX_OK;
}

void epx_vocab_fini(epx_vocab_t *v) {
    epx_str_fini(&v->text);
    epx_str_fini(&v->raw);
    free(v->token);
    free(v->slot);
    *v = (epx_vocab_t){0};
}

/* Slot that holds text, or the empty one where it belongs. */
static uint32_t find_slot(const epx_vocab_t *v, const char *text, size_t n_bytes) {
    uint32_t i = hash_bytes(text, n_bytes) & v->mask;
    for (; v->slot[i]; i = (i + 1) & v->mask) {
        const epx_token_t *t = &v->token[v->slot[i] - 1];
        if (t->text_bytes == n_bytes && memcmp(v->text.data + t->text_off, text, n_bytes) == 0) break;
    }
    return i;
}

int32_t epx_vocab_find(const epx_vocab_t *v, const char *text, size_t n_bytes) {
    if (n_bytes == 0) return -1;
    return (int32_t)v->slot[find_slot(v, text, n_bytes)] - 1;
}

/* Append the bytes that text stands for; unchanged where a character is outside the alphabet, as the ByteLevel decoder does. */
static epx_status_t append_raw(epx_vocab_t *v, const char *text, size_t n_bytes, int literal) {
    size_t pos = 0, len, begin = v->raw.n_bytes;
    while (!literal && pos < n_bytes) {
        int b = char_byte(epx_utf8_decode(text + pos, &len));
        char byte = (char)b;
        if (b < 0) {
            v->raw.n_bytes = begin;
            literal = 1;
            break;
        }
        EPX_TRY(epx_str_append(&v->raw, &byte, 1));
        pos += len;
    }
    return literal ? epx_str_append(&v->raw, text, n_bytes) : EPX_OK;
}

epx_status_t epx_vocab_add(epx_vocab_t *v, int32_t id, const char *text, size_t n_bytes, int literal) {
    epx_token_t *t = &v->token[id];
    uint32_t at;
    if (t->flags) return epx_fail(EPX_ERR_FORMAT, "id %d is given to two tokens", (int)id);
    if (n_bytes == 0) return epx_fail(EPX_ERR_FORMAT, "id %d: the token is empty", (int)id);
    at = find_slot(v, text, n_bytes);
    if (v->slot[at]) return epx_fail(EPX_ERR_FORMAT, "ids %u and %d have the same token", v->slot[at] - 1, (int)id);
    t->text_off = (uint32_t)v->text.n_bytes;
    t->text_bytes = (uint32_t)n_bytes;
    EPX_TRY(epx_str_append(&v->text, text, n_bytes));
    t->raw_off = (uint32_t)v->raw.n_bytes;
    EPX_TRY(append_raw(v, text, n_bytes, literal));
    t->raw_bytes = (uint32_t)(v->raw.n_bytes - t->raw_off);
    t->flags = EPX_TOKEN_PRESENT;
    v->slot[at] = (uint32_t)id + 1;
    if (n_bytes > v->max_text_bytes) v->max_text_bytes = n_bytes;
    return EPX_OK;
}
