/* Grammar-constrained decoding: which tokens may come next so that the answer is JSON of a schema. Pure: no clock, socket,
 * thread. docs/json-schema.md lists the subset of JSON Schema.
 *
 * A grammar and a vocabulary do not change after create and may be shared by threads; a state belongs to one request. */
#ifndef EPX_ENGINE_GRAMMAR_GRAMMAR_H
#define EPX_ENGINE_GRAMMAR_GRAMMAR_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "engine/tokenizer/tokenizer.h"

typedef struct epx_grammar epx_grammar_t;
typedef struct epx_grammar_vocab epx_grammar_vocab_t;
typedef struct epx_grammar_state epx_grammar_state_t;

enum {
    EPX_GRAMMAR_MAX_DEPTH = 64,  /* nested objects and arrays of an answer */
    EPX_GRAMMAR_MAX_CALLS = 128, /* functions of a spec */
};

/* spec: JSON text, one of
 *   {"schema": SCHEMA, "prefix": STRING, "suffix": STRING}      prefix, a value of the schema, suffix; both may be absent
 *   {"calls": [{"name": STRING, "schema": SCHEMA}...], "prefix", "suffix"}   {"name": one of them, "arguments": its schema}
 * EPX_ERR_ARG: the message names the place in the schema and the keyword or value that is not supported. */
epx_status_t epx_grammar_create(const char *spec, size_t n_bytes, epx_grammar_t **out_g);
void epx_grammar_destroy(epx_grammar_t *g);

/* The tokens of tok as byte strings. Special tokens are left out: they never fit. n_vocab: of the model's logits, which may be
 * more than the tokenizer has; the rest never fits. tok is not used afterwards. */
epx_status_t epx_grammar_vocab_create(const epx_tokenizer_t *tok, int32_t n_vocab, epx_grammar_vocab_t **out_v);
/* The same from model_dir/tokenizer.json. */
epx_status_t epx_grammar_vocab_load(const char *model_dir, int32_t n_vocab, epx_grammar_vocab_t **out_v);
void epx_grammar_vocab_destroy(epx_grammar_vocab_t *v);

/* At the beginning of the grammar. Both are borrowed for the state's life. */
epx_status_t epx_grammar_state_create(const epx_grammar_t *g, const epx_grammar_vocab_t *v, epx_grammar_state_t **out_s);
void epx_grammar_state_destroy(epx_grammar_state_t *s);
/* Set the bit of every token that may come next: bit t % 32 of bits[t / 32], (n_vocab + 31) / 32 words. Returns how many, 0 only
 * when the text is complete. EPX_ERR_NOMEM; EPX_ERR_INTERNAL when no token fits an incomplete text. */
epx_status_t epx_grammar_mask(epx_grammar_state_t *s, uint32_t *bits, int32_t *out_n);
/* Go on by a token. EPX_ERR_ARG when it does not fit: the state stays. */
epx_status_t epx_grammar_accept(epx_grammar_state_t *s, int32_t token);
/* The text so far is whole; and nothing can follow. */
int epx_grammar_can_end(const epx_grammar_state_t *s);
int epx_grammar_must_end(const epx_grammar_state_t *s);

#endif
