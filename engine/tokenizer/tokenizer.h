/* Byte-level BPE tokenizers from a Hugging Face tokenizer.json. Pure: no clock, socket or thread.
 * Reads are thread-safe after create (each call uses its own scratch). */
#ifndef EPX_ENGINE_TOKENIZER_TOKENIZER_H
#define EPX_ENGINE_TOKENIZER_TOKENIZER_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "base/str.h"

typedef struct epx_tokenizer epx_tokenizer_t;

/* path: a tokenizer.json. Unsupported kinds (another model type, normalizer, pre-tokenizer...) are EPX_ERR_UNSUPPORTED naming
 * the field and value; malformed files are EPX_ERR_FORMAT naming file and field. */
epx_status_t epx_tokenizer_create(const char *path, epx_tokenizer_t **out_tok);
/* The same from memory (fuzzing, tests). name: for messages. */
epx_status_t epx_tokenizer_create_from_memory(const char *name, const char *json, size_t n_bytes, epx_tokenizer_t **out_tok);
void epx_tokenizer_destroy(epx_tokenizer_t *tok);

/* text is UTF-8 of n_bytes and may hold NULs; invalid UTF-8 is EPX_ERR_ARG with the byte offset. Added tokens in the text are
 * recognised.
 * *out_ids is owned by the caller (free), NULL when *out_n is 0. Adds no special tokens. */
epx_status_t epx_tokenizer_encode(const epx_tokenizer_t *tok, const char *text, size_t n_bytes, int32_t **out_ids, size_t *out_n);
/* Append the bytes of the ids to out (special tokens skipped if asked). Unknown ids: EPX_ERR_ARG.
 * Raw bytes: may end inside a UTF-8 character; epx_utf8_* below help with that. */
epx_status_t epx_tokenizer_decode(const epx_tokenizer_t *tok, const int32_t *ids, size_t n, int skip_special, epx_str_t *out);
/* Bytes of one token, borrowed until destroy; NULL for an unknown id. */
const char *epx_tokenizer_token_bytes(const epx_tokenizer_t *tok, int32_t id, size_t *out_bytes);
int epx_tokenizer_is_special(const epx_tokenizer_t *tok, int32_t id);
/* Id of an exact token string such as "<|im_end|>", or -1. */
int32_t epx_tokenizer_id(const epx_tokenizer_t *tok, const char *token);
/* 1 + largest id. */
int32_t epx_tokenizer_n_vocab(const epx_tokenizer_t *tok);

/* Length of the longest prefix of data[0..n) that ends on a UTF-8 border: an incomplete last character is left out. Bytes that
 * can never begin or continue a character count as complete, so that output cannot stall. */
size_t epx_utf8_complete_prefix(const char *data, size_t n_bytes);
/* Append data with each invalid sequence replaced by U+FFFD. */
epx_status_t epx_utf8_append_lossy(epx_str_t *out, const char *data, size_t n_bytes);
/* 1 when valid UTF-8 (no surrogates, no overlongs); else 0 and *out_bad_off is the first bad byte. out_bad_off may be NULL. */
int epx_utf8_valid(const char *data, size_t n_bytes, size_t *out_bad_off);

#endif
