/* Encode and decode: added tokens, normalization, pre-tokenizer, merges, in the order of the tokenizers package. */
#include "engine/tokenizer/tokenizer_internal.h"

#include <stdlib.h>
#include <string.h>

#include "engine/tokenizer/nfc.h"

typedef struct {
    const epx_tokenizer_t *tok;
    epx_bpe_scratch_t *bpe;
    epx_pretok_scratch_t *pretok;
    epx_str_t normalized;
    epx_ids_t ids;
} encoder_t;

static epx_status_t encode_piece(void *ctx, const char *piece, size_t n_bytes) {
    encoder_t *e = ctx;
    return epx_bpe_encode(&e->tok->bpe, &e->tok->vocab, e->bpe, piece, n_bytes, &e->ids);
}

/* Text free of plain added tokens: normalize it, take out the others, cut and merge the rest. */
static epx_status_t encode_text(encoder_t *e, const char *text, size_t n_bytes) {
    epx_added_cursor_t cur = {0};
    epx_span_t span;
    if (e->tok->nfc && !epx_nfc_is_plain(text, n_bytes)) {
        EPX_TRY(epx_nfc(text, n_bytes, &e->normalized));
        text = epx_str_z(&e->normalized);
        n_bytes = e->normalized.n_bytes;
    }
    while (epx_added_next(&e->tok->added_normalized, text, n_bytes, &cur, &span)) {
        if (span.id >= 0) EPX_TRY(epx_ids_push(&e->ids, span.id));
        else EPX_TRY(epx_pretok_run(&e->tok->pretok, e->pretok, text + span.begin, span.end - span.begin, encode_piece, e));
    }
    return EPX_OK;
}

static epx_status_t encode_all(encoder_t *e, const char *text, size_t n_bytes) {
    epx_added_cursor_t cur = {0};
    epx_span_t span;
    while (epx_added_next(&e->tok->added_plain, text, n_bytes, &cur, &span)) {
        if (span.id >= 0) EPX_TRY(epx_ids_push(&e->ids, span.id));
        else EPX_TRY(encode_text(e, text + span.begin, span.end - span.begin));
    }
    return EPX_OK;
}

epx_status_t epx_tokenizer_encode(const epx_tokenizer_t *tok, const char *text, size_t n_bytes, int32_t **out_ids,
                                  size_t *out_n) {
    encoder_t e = {.tok = tok};
    epx_status_t s;
    size_t bad;
    if (n_bytes > INT32_MAX / 2) return epx_fail(EPX_ERR_ARG, "text: %zu bytes; at most %d", n_bytes, INT32_MAX / 2);
    if (!epx_utf8_valid(text, n_bytes, &bad)) return epx_fail(EPX_ERR_ARG, "text: invalid UTF-8 at byte %zu", bad);
    e.bpe = epx_bpe_scratch_create();
    e.pretok = epx_pretok_scratch_create();
    if (e.bpe == NULL || e.pretok == NULL) s = epx_fail(EPX_ERR_NOMEM, "tokenizer scratch");
    else s = encode_all(&e, text, n_bytes);
    if (s == EPX_OK) {
        *out_ids = e.ids.v;
        *out_n = e.ids.n;
    } else {
        free(e.ids.v);
    }
    epx_str_fini(&e.normalized);
    epx_pretok_scratch_destroy(e.pretok);
    epx_bpe_scratch_destroy(e.bpe);
    return s;
}

static const epx_token_t *token_of(const epx_tokenizer_t *tok, int32_t id) {
    if (id < 0 || id >= tok->vocab.n_ids || !(tok->vocab.token[id].flags & EPX_TOKEN_PRESENT)) return NULL;
    return &tok->vocab.token[id];
}

epx_status_t epx_tokenizer_decode(const epx_tokenizer_t *tok, const int32_t *ids, size_t n, int skip_special, epx_str_t *out) {
    size_t i;
    for (i = 0; i < n; i++) {
        const epx_token_t *t = token_of(tok, ids[i]);
        if (t == NULL)
            return epx_fail(EPX_ERR_ARG, "ids[%zu]: %d is no token (0 to %d)", i, (int)ids[i], (int)tok->vocab.n_ids - 1);
        if (skip_special && (t->flags & EPX_TOKEN_SPECIAL)) continue;
        EPX_TRY(epx_str_append(out, tok->vocab.raw.data + t->raw_off, t->raw_bytes));
    }
    return EPX_OK;
}

const char *epx_tokenizer_token_bytes(const epx_tokenizer_t *tok, int32_t id, size_t *out_bytes) {
    const epx_token_t *t = token_of(tok, id);
    if (t == NULL) return NULL;
    *out_bytes = t->raw_bytes;
    return tok->vocab.raw.data + t->raw_off;
}

int epx_tokenizer_is_special(const epx_tokenizer_t *tok, int32_t id) {
    const epx_token_t *t = token_of(tok, id);
    return t != NULL && (t->flags & EPX_TOKEN_SPECIAL) != 0;
}

int32_t epx_tokenizer_id(const epx_tokenizer_t *tok, const char *token) {
    return epx_vocab_find(&tok->vocab, token, strlen(token));
}

int32_t epx_tokenizer_n_vocab(const epx_tokenizer_t *tok) { return tok->vocab.n_ids; }
