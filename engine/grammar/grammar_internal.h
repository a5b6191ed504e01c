/* The inside of the grammar room: compiled nodes, frames of the machine, the vocabulary's tries. */
#ifndef EPX_ENGINE_GRAMMAR_INTERNAL_H
#define EPX_ENGINE_GRAMMAR_INTERNAL_H

#include <jansson.h>

#include "engine/grammar/grammar.h"

enum {
    EPX_GRAMMAR_MAX_NODES = 20000,
    EPX_GRAMMAR_MAX_INDENT = 20,     /* white space of a new line between two parts of a value */
    EPX_GRAMMAR_MAX_DIGITS = 15,     /* before the point, and behind it: exact in a double */
    EPX_GRAMMAR_MAX_EXPONENT = 2,    /* digits */
    EPX_GRAMMAR_MAX_WIDTH = 1000,    /* ways in which a value or a name may begin */
    EPX_GRAMMAR_MAX_BRANCHES = 4096, /* positions at once */
};

typedef enum {
    GN_OBJECT, /* props [first, n]; child: values of free names, -1: none */
    GN_ARRAY,  /* child: items; min, max: how many */
    GN_STRING, /* min, max: code points */
    GN_NUMBER,
    GN_INTEGER,
    GN_TEXTS,   /* one of texts [first, n] */
    GN_ANYOF,   /* one of kids [first, n] */
    GN_SEQUENCE /* kids [first, n] one after another */
} gn_kind_t;

typedef struct {
    gn_kind_t kind;
    int32_t first, n;
    int32_t child;
    int32_t min, max; /* max -1: no limit */
    int32_t depth;    /* least nesting of a value; INT32_MAX: there is none */
} gn_node_t;

typedef struct {
    int32_t text; /* the name as JSON, with quotes */
    int32_t node;
    int required;
} gn_prop_t;

typedef struct {
    size_t off, n_bytes; /* in bytes */
} gn_text_t;

struct epx_grammar {
    gn_node_t *nodes; /* owned, as all below */
    int32_t n_nodes, cap_nodes;
    gn_prop_t *props;
    int32_t n_props, cap_props;
    gn_text_t *texts;
    int32_t n_texts, cap_texts;
    int32_t *kids;
    int32_t n_kids, cap_kids;
    epx_str_t bytes;
    int32_t root;
};

/* Fill in nodes' depth; refuse a grammar without finite values, or that goes round without a byte; check the branches of oneOf,
 * given as node numbers. */
epx_status_t epx_grammar_analyse(epx_grammar_t *g, const int32_t *one_of, int32_t n_one_of);

/* ---- machine.c: a position is a chain of frames; a state is a set of positions ---- */

typedef enum {
    GF_LITERAL,  /* text, pos */
    GF_STRING,   /* count, utf8 and escape state */
    GF_NUMBER,   /* pos: part of the number, count: digits of the part */
    GF_ARR_OPEN, /* behind [ */
    GF_ARR_AFTER,
    GF_ARR_NEXT, /* behind a comma */
    GF_OBJ_OPEN, /* pos: next property */
    GF_OBJ_COLON,
    GF_OBJ_VALUE,
    GF_OBJ_AFTER,
    GF_OBJ_NEXT,
    GF_SEQUENCE /* pos: next part */
} gf_phase_t;

/* Without padding, so that frames compare as bytes. */
typedef struct {
    uint8_t phase, space, depth, escape; /* space: 0 none yet; 1 + indentation of a new line; else no more */
    uint8_t utf8_left, utf8_lo, utf8_hi, unused;
    int32_t node, pos, count, text;
    int32_t parent; /* -1: the text is complete behind this */
} gf_frame_t;

typedef struct {
    const epx_grammar_t *g;
    gf_frame_t *frames; /* owned */
    int32_t n_frames, cap_frames;
    int32_t *tops; /* owned: the sets of positions, one behind another; -1: complete */
    int32_t n_tops, cap_tops;
    int no_memory;
} gf_machine_t;

/* Append to m->tops every position reachable from `top` by byte b. */
void epx_grammar_step(gf_machine_t *m, int32_t top, uint8_t b);
/* The text may end here. */
int epx_grammar_frame_can_end(const gf_machine_t *m, int32_t top);
/* A string between two characters, without a half escape. */
int epx_grammar_in_text(const gf_frame_t *f);
/* Index of a new frame, -1 without memory. */
int32_t epx_grammar_push(gf_machine_t *m, gf_frame_t f);

/* ---- vocab.c ---- */

/* Tokens as a tree of bytes in preorder. */
typedef struct {
    int32_t end;         /* first node behind this subtree */
    int32_t token;       /* head of the list of tokens that end here, -1: none */
    uint8_t byte, depth; /* depth of the root's children: 1 */
} gv_node_t;

typedef struct {
    gv_node_t *nodes; /* owned */
    int32_t n, cap;
} gv_trie_t;

struct epx_grammar_vocab {
    int32_t n_vocab;
    char **bytes;     /* owned [n_vocab], NULL: never fits */
    int32_t *n_bytes; /* owned [n_vocab] */
    int32_t *same;    /* owned [n_vocab]: next token with the same bytes, -1 */
    gv_trie_t all;    /* every token */
    gv_trie_t unsafe; /* tokens that are not safe */
    uint32_t *safe;   /* owned bits: whole characters that may stand in a JSON string as they are */
    uint8_t *n_chars; /* owned [n_vocab]: of safe tokens, at most 255 */
    int max_depth;
};

#endif
