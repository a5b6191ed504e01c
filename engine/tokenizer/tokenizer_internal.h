/* Inside of a byte-level BPE tokenizer: vocabulary, merges, added tokens, pre-tokenizer steps. Private to engine/tokenizer.
 * All of it is built once by tokenizer_load.c and read-only afterwards; scratch belongs to the call. */
#ifndef EPX_ENGINE_TOKENIZER_INTERNAL_H
#define EPX_ENGINE_TOKENIZER_INTERNAL_H

#include <stddef.h>
#include <stdint.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "engine/tokenizer/tokenizer.h"

/* Ids at or above this are refused: tables are indexed by id, and no published vocabulary comes near. */
#define EPX_TOKENIZER_MAX_IDS (1 << 22)
#define EPX_TOKENIZER_MAX_STEPS 32

/* ---- vocabulary: token strings as the file spells them, and the bytes they stand for ---- */

enum { EPX_TOKEN_PRESENT = 1, EPX_TOKEN_SPECIAL = 2 };

typedef struct {
    uint32_t text_off, text_bytes; /* in vocab.text */
    uint32_t raw_off, raw_bytes;   /* in vocab.raw */
    uint32_t flags;
} epx_token_t;

typedef struct {
    epx_str_t text, raw;
    epx_token_t *token; /* [n_ids] */
    int32_t n_ids;
    uint32_t *slot; /* id + 1, 0 when empty; open addressing over text */
    uint32_t mask;
    size_t max_text_bytes; /* of the longest token */
} epx_vocab_t;

/* Room for ids 0..n_ids-1 and at most n_strings strings. */
epx_status_t epx_vocab_init(epx_vocab_t *v, int32_t n_ids, size_t n_strings);
void epx_vocab_fini(epx_vocab_t *v);
/* Add a string under an id; literal: its bytes are its text, else the byte-level alphabet is undone where all characters belong
 * to it. Neither id nor text may be there yet: EPX_ERR_FORMAT. */
epx_status_t epx_vocab_add(epx_vocab_t *v, int32_t id, const char *text, size_t n_bytes, int literal);
/* Id of an exact token string, or -1. */
int32_t epx_vocab_find(const epx_vocab_t *v, const char *text, size_t n_bytes);
/* The byte-level alphabet of GPT-2: the character that stands for a byte, as UTF-8 of 1 or 2 bytes. Returns the length. */
size_t epx_byte_char(unsigned char byte, char out[2]);

/* ---- byte-pair merges ---- */

typedef struct {
    uint32_t left, right, rank, id;
} epx_merge_t;

typedef struct {
    epx_merge_t *slot; /* rank UINT32_MAX when empty */
    uint64_t mask;
    int32_t byte_id[256];    /* -1: no token for this byte */
    char byte_char[256][2];  /* the byte-level alphabet, */
    uint8_t char_bytes[256]; /* and its lengths */
    int ignore_merges;       /* a piece that is a token as a whole is that token */
} epx_bpe_t;

typedef struct {
    int32_t *v; /* owned */
    size_t n, cap;
} epx_ids_t;

epx_status_t epx_ids_push(epx_ids_t *ids, int32_t id);

typedef struct epx_bpe_scratch epx_bpe_scratch_t;

epx_status_t epx_bpe_init(epx_bpe_t *b, size_t n_merges);
void epx_bpe_fini(epx_bpe_t *b);
/* A pair seen before takes the new rank, as in the tokenizers package. */
void epx_bpe_add(epx_bpe_t *b, uint32_t left, uint32_t right, uint32_t rank, uint32_t id);
/* Scratch for one call of encode; destroy accepts NULL. */
epx_bpe_scratch_t *epx_bpe_scratch_create(void);
void epx_bpe_scratch_destroy(epx_bpe_scratch_t *s);
/* Append the ids of one piece. Cost n log n in its bytes. A byte without a token: EPX_ERR_ARG. */
epx_status_t epx_bpe_encode(const epx_bpe_t *b, const epx_vocab_t *v, epx_bpe_scratch_t *s, const char *piece, size_t n_bytes,
                            epx_ids_t *ids);

/* ---- added tokens ---- */

typedef struct {
    char *text; /* owned; normalized where the token asks for it */
    size_t n_bytes;
    int32_t id;
    int single_word, lstrip, rstrip;
} epx_added_t;

/* A set matched leftmost, longest first. */
typedef struct {
    epx_added_t *token; /* sorted by text */
    size_t n;
    unsigned char starts[256]; /* 1 where some token begins with this byte */
} epx_added_set_t;

/* Takes ownership of text on success. */
epx_status_t epx_added_push(epx_added_set_t *set, const epx_added_t *token);
/* Sort and index after the last push. */
void epx_added_seal(epx_added_set_t *set);
void epx_added_fini(epx_added_set_t *set);

typedef struct {
    size_t begin, end;
    int32_t id; /* -1: ordinary text */
} epx_span_t;

typedef struct {
    size_t search_off, text_off; /* where to look on; where ordinary text not yet handed out begins */
    epx_span_t held;             /* a token found behind ordinary text, to be handed out next */
    int has_held;
} epx_added_cursor_t;

/* Next span of text, cursor zeroed at first; 0 at the end. single_word, lstrip and rstrip act as in the tokenizers package. */
int epx_added_next(const epx_added_set_t *set, const char *text, size_t n_bytes, epx_added_cursor_t *cur, epx_span_t *out);

/* ---- pre-tokenizer ---- */

typedef enum {
    EPX_SPLIT_ISOLATED,
    EPX_SPLIT_REMOVED,
    EPX_SPLIT_MERGED_WITH_PREVIOUS,
    EPX_SPLIT_MERGED_WITH_NEXT,
    EPX_SPLIT_CONTIGUOUS
} epx_split_behavior_t;

typedef struct {
    pcre2_code *re; /* NULL: this step puts a space in front of a piece that has none */
    int jit;        /* compiled to machine code */
    int invert;
    epx_split_behavior_t behavior;
} epx_pretok_step_t;

typedef struct {
    epx_pretok_step_t step[EPX_TOKENIZER_MAX_STEPS];
    size_t n_steps;
} epx_pretok_t;

/* field: for messages, such as pre_tokenizer.pretokenizers[0].pattern.Regex. Patterns whose meaning differs between Oniguruma
 * (which the tokenizers package uses) and PCRE2 are EPX_ERR_UNSUPPORTED with the construct and its offset. */
epx_status_t epx_pretok_add_regex(epx_pretok_t *p, const char *field, const char *pattern, size_t n_bytes,
                                  epx_split_behavior_t behavior, int invert);
epx_status_t epx_pretok_add_literal(epx_pretok_t *p, const char *field, const char *text, size_t n_bytes,
                                    epx_split_behavior_t behavior, int invert);
epx_status_t epx_pretok_add_prefix_space(epx_pretok_t *p);
void epx_pretok_fini(epx_pretok_t *p);

typedef epx_status_t (*epx_piece_fn)(void *ctx, const char *piece, size_t n_bytes);
typedef struct epx_pretok_scratch epx_pretok_scratch_t;
/* Per call; NULL when memory is short. */
epx_pretok_scratch_t *epx_pretok_scratch_create(void);
void epx_pretok_scratch_destroy(epx_pretok_scratch_t *s);
/* Call fn with every piece of valid UTF-8 text, in order; a negative status of fn ends the walk and is returned. */
epx_status_t epx_pretok_run(const epx_pretok_t *p, epx_pretok_scratch_t *s, const char *text, size_t n_bytes, epx_piece_fn fn,
                            void *ctx);
/* NULL when the pattern means the same to both engines, else what does not, and *out_off. */
const char *epx_pretok_dialect_check(const char *pattern, size_t n_bytes, size_t *out_off);

/* ---- the whole ---- */

struct epx_tokenizer {
    epx_vocab_t vocab;
    epx_bpe_t bpe;
    epx_added_set_t added_plain, added_normalized; /* matched before and after normalization */
    int nfc;
    epx_pretok_t pretok;
};

#endif
