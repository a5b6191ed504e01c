/* A grammar's spec from the bytes up to the first NUL; the rest chooses tokens. Every mask must agree with accepting, and a text
 * that must end is JSON. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "engine/grammar/grammar.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static epx_tokenizer_t *tok;
static epx_grammar_vocab_t *vocab;
static int32_t n_vocab;
static uint32_t *bits;

static void set_up(void) {
    if (vocab) return;
    EPX_ASSERT(epx_tokenizer_create(EPX_SOURCE_DIR "/models/tinymoe-math/tokenizer.json", &tok) >= 0);
    n_vocab = epx_tokenizer_n_vocab(tok);
    EPX_ASSERT(epx_grammar_vocab_create(tok, n_vocab, &vocab) >= 0);
    bits = calloc((size_t)(n_vocab + 31) / 32, sizeof *bits);
    EPX_ASSERT(bits);
}

/* The k-th token of the mask. */
static int32_t pick(int32_t k) {
    for (int32_t id = 0; id < n_vocab; id++)
        if (((bits[id / 32] >> (id % 32)) & 1u) && k-- == 0) return id;
    return -1;
}

static void write_text(const epx_grammar_t *g, const uint8_t *choices, size_t n) {
    epx_grammar_state_t *s;
    epx_str_t text = {0};
    EPX_ASSERT(epx_grammar_state_create(g, vocab, &s) >= 0);
    for (size_t i = 0; i + 1 < n && i < 128 && !epx_grammar_must_end(s); i += 2) {
        int32_t n_allowed;
        EPX_ASSERT(epx_grammar_mask(s, bits, &n_allowed) >= 0);
        if (n_allowed == 0) break;
        int32_t id = pick((choices[i] | choices[i + 1] << 8) % n_allowed);
        EPX_ASSERT(epx_grammar_accept(s, id) >= 0);
        EPX_ASSERT(epx_tokenizer_decode(tok, &id, 1, 0, &text) >= 0);
    }
    if (epx_grammar_must_end(s)) {
        json_t *v = json_loadb(epx_str_z(&text), text.n_bytes, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
        EPX_ASSERT(v);
        json_decref(v);
    }
    epx_grammar_state_destroy(s);
    epx_str_fini(&text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    const uint8_t *end = memchr(data, 0, n_bytes);
    size_t n_spec = end ? (size_t)(end - data) : n_bytes;
    epx_grammar_t *g;
    epx_str_t spec = {0};
    set_up();
    if (epx_str_printf(&spec, "{\"schema\":%.*s}", (int)n_spec, (const char *)data) < 0) return 0;
    if (epx_grammar_create(epx_str_z(&spec), spec.n_bytes, &g) >= 0) {
        if (end) write_text(g, end + 1, n_bytes - n_spec - 1);
        epx_grammar_destroy(g);
    }
    epx_str_fini(&spec);
    return 0;
}
