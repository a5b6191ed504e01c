/* The vocabulary as two tries, and the tokens that may stand in a JSON string as they are. See grammar_internal.h. */
#include <stdlib.h>
#include <string.h>

#include "engine/grammar/grammar_internal.h"

/* ---- tokens ---- */

/* Whole characters without quote, backslash or control character. */
static int is_safe(const char *bytes, int32_t n) {
    for (int32_t i = 0; i < n; i++)
        if ((uint8_t)bytes[i] < 0x20 || bytes[i] == '"' || bytes[i] == '\\') return 0;
    return epx_utf8_valid(bytes, (size_t)n, NULL);
}

static uint8_t count_chars(const char *bytes, int32_t n) {
    int32_t k = 0;
    for (int32_t i = 0; i < n; i++) k += ((uint8_t)bytes[i] & 0xc0) != 0x80;
    return k < 255 ? (uint8_t)k : 255;
}

static epx_status_t copy_token(epx_grammar_vocab_t *v, const epx_tokenizer_t *tok, int32_t id) {
    size_t n = 0;
    const char *bytes = epx_tokenizer_token_bytes(tok, id, &n);
    if (!bytes || n == 0 || n > 250 || epx_tokenizer_is_special(tok, id)) return EPX_OK; /* 250: a trie's depth is a byte */
    v->bytes[id] = malloc(n);
    if (!v->bytes[id]) return epx_fail(EPX_ERR_NOMEM, "grammar: no memory for the vocabulary");
    memcpy(v->bytes[id], bytes, n);
    v->n_bytes[id] = (int32_t)n;
    if ((int)n > v->max_depth) v->max_depth = (int)n;
    if (!is_safe(bytes, (int32_t)n)) return EPX_OK;
    v->safe[id / 32] |= 1u << (id % 32);
    v->n_chars[id] = count_chars(bytes, (int32_t)n);
    return EPX_OK;
}

/* ---- tries ---- */

typedef struct {
    const char *bytes;
    int32_t n, id;
} entry_t;

static int compare(const void *a, const void *b) {
    const entry_t *x = a, *y = b;
    int32_t n = x->n < y->n ? x->n : y->n;
    int c = memcmp(x->bytes, y->bytes, (size_t)n);
    if (c) return c;
    if (x->n != y->n) return x->n < y->n ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

static epx_status_t add_node(gv_trie_t *t, uint8_t byte, int depth) {
    if (t->n == t->cap) {
        int32_t cap = t->cap ? 2 * t->cap : 1024;
        gv_node_t *grown = realloc(t->nodes, (size_t)cap * sizeof *grown);
        if (!grown) return epx_fail(EPX_ERR_NOMEM, "grammar: no memory for the vocabulary");
        t->nodes = grown;
        t->cap = cap;
    }
    t->nodes[t->n++] = (gv_node_t){.end = 0, .token = -1, .byte = byte, .depth = (uint8_t)depth};
    return EPX_OK;
}

static int32_t shared_prefix(const entry_t *a, const entry_t *b) {
    int32_t n = 0;
    while (n < a->n && n < b->n && a->bytes[n] == b->bytes[n]) n++;
    return n;
}

/* Subtrees end where a node of their own depth or less comes. */
static void find_ends(gv_trie_t *t) {
    int32_t open[256], n_open = 0;
    for (int32_t i = 0; i <= t->n; i++) {
        int depth = i < t->n ? t->nodes[i].depth : 0;
        while (n_open > 0 && t->nodes[open[n_open - 1]].depth >= depth) t->nodes[open[--n_open]].end = i;
        if (i < t->n) open[n_open++] = i;
    }
}

/* From sorted entries; same chains tokens of the same bytes. */
static epx_status_t build(gv_trie_t *t, const entry_t *e, int32_t n, int32_t *same) {
    for (int32_t i = 0; i < n; i++) {
        int32_t k = i ? shared_prefix(&e[i - 1], &e[i]) : 0;
        if (i && k == e[i].n) { /* the same bytes */
            same[e[i].id] = t->nodes[t->n - 1].token;
            t->nodes[t->n - 1].token = e[i].id;
            continue;
        }
        for (; k < e[i].n; k++) EPX_TRY(add_node(t, (uint8_t)e[i].bytes[k], k + 1));
        t->nodes[t->n - 1].token = e[i].id;
        same[e[i].id] = -1;
    }
    find_ends(t);
    return EPX_OK;
}

static epx_status_t build_tries(epx_grammar_vocab_t *v) {
    entry_t *e = malloc(((size_t)v->n_vocab + 1) * sizeof *e);
    int32_t n = 0, n_unsafe = 0;
    if (!e) return epx_fail(EPX_ERR_NOMEM, "grammar: no memory for the vocabulary");
    for (int32_t id = 0; id < v->n_vocab; id++)
        if (v->bytes[id]) e[n++] = (entry_t){v->bytes[id], v->n_bytes[id], id};
    qsort(e, (size_t)n, sizeof *e, compare);
    epx_status_t s = build(&v->all, e, n, v->same);
    for (int32_t i = 0; i < n; i++)
        if (!((v->safe[e[i].id / 32] >> (e[i].id % 32)) & 1u)) e[n_unsafe++] = e[i];
    if (s >= 0) s = build(&v->unsafe, e, n_unsafe, v->same); /* equal bytes are equally safe: the same chains */
    free(e);
    return s;
}

epx_status_t epx_grammar_vocab_create(const epx_tokenizer_t *tok, int32_t n_vocab, epx_grammar_vocab_t **out_v) {
    epx_grammar_vocab_t *v = calloc(1, sizeof *v);
    size_t n = (size_t)n_vocab;
    if (!v) return epx_fail(EPX_ERR_NOMEM, "grammar: no memory for the vocabulary");
    epx_status_t s = EPX_OK;
    v->n_vocab = n_vocab;
    v->bytes = calloc(n, sizeof *v->bytes);
    v->n_bytes = calloc(n, sizeof *v->n_bytes);
    v->same = calloc(n, sizeof *v->same);
    v->safe = calloc((n + 31) / 32, sizeof *v->safe);
    v->n_chars = calloc(n, 1);
    if (!v->bytes || !v->n_bytes || !v->same || !v->safe || !v->n_chars)
        s = epx_fail(EPX_ERR_NOMEM, "grammar: no memory for a vocabulary of %d", n_vocab);
    for (int32_t id = 0; s >= 0 && id < n_vocab && id < epx_tokenizer_n_vocab(tok); id++) s = copy_token(v, tok, id);
    if (s >= 0) s = build_tries(v);
    if (s < 0) epx_grammar_vocab_destroy(v);
    else *out_v = v;
    return s;
}

epx_status_t epx_grammar_vocab_load(const char *model_dir, int32_t n_vocab, epx_grammar_vocab_t **out_v) {
    epx_tokenizer_t *tok = NULL;
    epx_str_t path = {0};
    epx_status_t s = epx_str_printf(&path, "%s/tokenizer.json", model_dir);
    if (s >= 0) s = epx_tokenizer_create(epx_str_z(&path), &tok);
    if (s >= 0) s = epx_grammar_vocab_create(tok, n_vocab, out_v);
    epx_tokenizer_destroy(tok);
    epx_str_fini(&path);
    return s;
}

void epx_grammar_vocab_destroy(epx_grammar_vocab_t *v) {
    if (!v) return;
    for (int32_t i = 0; v->bytes && i < v->n_vocab; i++) free(v->bytes[i]);
    free(v->bytes);
    free(v->n_bytes);
    free(v->same);
    free(v->safe);
    free(v->n_chars);
    free(v->all.nodes);
    free(v->unsafe.nodes);
    free(v);
}
