/* What must hold of a whole grammar: every part has finite values of bounded nesting, nothing goes round without a byte, and the
 * branches of oneOf exclude each other. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "engine/grammar/grammar_internal.h"

/* ---- nesting ---- */

static int32_t plus_one(int32_t d) { return d == INT32_MAX ? d : d + 1; }

static int32_t depth_of_object(const epx_grammar_t *g, const gn_node_t *n) {
    int32_t most = 0;
    for (int32_t i = 0; i < n->n; i++) {
        const gn_prop_t *p = &g->props[n->first + i];
        if (p->required && g->nodes[p->node].depth > most) most = g->nodes[p->node].depth;
    }
    return plus_one(most);
}

static int32_t depth_of_kids(const epx_grammar_t *g, const gn_node_t *n) {
    int32_t least = INT32_MAX, most = 0;
    for (int32_t i = 0; i < n->n; i++) {
        int32_t d = g->nodes[g->kids[n->first + i]].depth;
        if (d < least) least = d;
        if (d > most) most = d;
    }
    return n->kind == GN_ANYOF ? least : most;
}

static int32_t depth_of(const epx_grammar_t *g, const gn_node_t *n) {
    switch (n->kind) {
    case GN_OBJECT:
        return depth_of_object(g, n);
    case GN_ARRAY:
        return plus_one(n->min > 0 ? g->nodes[n->child].depth : 0);
    case GN_ANYOF:
    case GN_SEQUENCE:
        return depth_of_kids(g, n);
    default:
        return 0;
    }
}

/* Depths only fall and are known after as many rounds as the deepest of use; deeper ones stay unknown, which is "none". */
static void find_depths(epx_grammar_t *g) {
    int changed = 1;
    for (int round = 0; changed && round <= 2 * EPX_GRAMMAR_MAX_DEPTH; round++) {
        changed = 0;
        for (int32_t i = g->n_nodes - 1; i >= 0; i--) {
            int32_t d = depth_of(g, &g->nodes[i]);
            if (d >= g->nodes[i].depth) continue;
            g->nodes[i].depth = d;
            changed = 1;
        }
    }
}

/* ---- going round ---- */

enum { NEW, OPEN, CLOSED };

/* Nesting of anyOf is bounded by the schema's own, and by the number of referenced schemas. */
static int goes_round(const epx_grammar_t *g, int32_t node, uint8_t *state) {
    const gn_node_t *n = &g->nodes[node];
    if (state[node] != NEW) return state[node] == OPEN;
    state[node] = OPEN;
    for (int32_t i = 0; n->kind == GN_ANYOF && i < n->n; i++)
        if (goes_round(g, g->kids[n->first + i], state)) return 1;
    state[node] = CLOSED;
    return 0;
}

static epx_status_t check_rounds(const epx_grammar_t *g) {
    uint8_t *state = calloc((size_t)g->n_nodes, 1);
    int bad = 0;
    if (!state) return epx_fail(EPX_ERR_NOMEM, "grammar: no memory");
    for (int32_t i = 0; i < g->n_nodes && !bad; i++) bad = goes_round(g, i, state);
    free(state);
    return bad ? epx_fail(EPX_ERR_ARG, "schema: a $ref leads back to itself without anything in between") : EPX_OK;
}

/* ---- width ---- */

/* Ways in which a value may begin, at most one more than the limit. anyOf does not go round. */
static int32_t width_of(const epx_grammar_t *g, int32_t node) {
    const gn_node_t *n = &g->nodes[node];
    int32_t sum = n->kind == GN_TEXTS ? n->n : 1;
    if (n->kind == GN_ANYOF) sum = 0;
    for (int32_t i = 0; n->kind == GN_ANYOF && i < n->n && sum <= EPX_GRAMMAR_MAX_WIDTH; i++)
        sum += width_of(g, g->kids[n->first + i]);
    return sum <= EPX_GRAMMAR_MAX_WIDTH ? sum : EPX_GRAMMAR_MAX_WIDTH + 1;
}

static epx_status_t check_widths(const epx_grammar_t *g) {
    for (int32_t i = 0; i < g->n_nodes; i++) {
        if (g->nodes[i].kind == GN_OBJECT && g->nodes[i].n > EPX_GRAMMAR_MAX_WIDTH)
            return epx_fail(EPX_ERR_ARG, "schema: an object with %d properties; at most %d", g->nodes[i].n,
                            EPX_GRAMMAR_MAX_WIDTH);
        if (width_of(g, i) > EPX_GRAMMAR_MAX_WIDTH)
            return epx_fail(EPX_ERR_ARG, "schema: more than %d alternatives of enum and anyOf in one place",
                            EPX_GRAMMAR_MAX_WIDTH);
    }
    return EPX_OK;
}

/* ---- oneOf ---- */

enum { OBJECTS = 1, ARRAYS = 2, STRINGS = 4, NUMBERS = 8, BOOLEANS = 16, NULLS = 32 };

static const char *text_of(const epx_grammar_t *g, int32_t t) { return g->bytes.data + g->texts[t].off; }

static int kind_of_text(char first) {
    switch (first) {
    case '{':
        return OBJECTS;
    case '[':
        return ARRAYS;
    case '"':
        return STRINGS;
    case 't':
    case 'f':
        return BOOLEANS;
    case 'n':
        return NULLS;
    default:
        return NUMBERS;
    }
}

static int kinds_of(const epx_grammar_t *g, int32_t node) {
    static const int plain[] = {
        [GN_OBJECT] = OBJECTS, [GN_ARRAY] = ARRAYS, [GN_STRING] = STRINGS, [GN_NUMBER] = NUMBERS, [GN_INTEGER] = NUMBERS};
    const gn_node_t *n = &g->nodes[node];
    int kinds = 0;
    if (n->kind <= GN_INTEGER) return plain[n->kind];
    for (int32_t i = 0; i < n->n; i++)
        kinds |= n->kind == GN_TEXTS ? kind_of_text(*text_of(g, n->first + i)) : kinds_of(g, g->kids[n->first + i]);
    return kinds;
}

/* Through references and the like to what is meant. */
static const gn_node_t *meant(const epx_grammar_t *g, int32_t node) {
    while (g->nodes[node].kind == GN_ANYOF && g->nodes[node].n == 1) node = g->kids[g->nodes[node].first];
    return &g->nodes[node];
}

static int same_value(const epx_grammar_t *g, int32_t a, int32_t b) {
    const gn_text_t *x = &g->texts[a], *y = &g->texts[b];
    if (kind_of_text(*text_of(g, a)) == NUMBERS && kind_of_text(*text_of(g, b)) == NUMBERS) return 1; /* 1 and 1.0 are the same */
    return x->n_bytes == y->n_bytes && memcmp(text_of(g, a), text_of(g, b), x->n_bytes) == 0;
}

static int share_text(const epx_grammar_t *g, const gn_node_t *a, const gn_node_t *b) {
    for (int32_t i = 0; i < a->n; i++)
        for (int32_t k = 0; k < b->n; k++)
            if (same_value(g, a->first + i, b->first + k)) return 1;
    return 0;
}

/* Two objects that both need a property whose values differ. */
static int have_discriminator(const epx_grammar_t *g, const gn_node_t *a, const gn_node_t *b) {
    for (int32_t i = 0; i < a->n; i++) {
        const gn_prop_t *p = &g->props[a->first + i];
        for (int32_t k = 0; k < b->n; k++) {
            const gn_prop_t *q = &g->props[b->first + k];
            if (!p->required || !q->required || !same_value(g, p->text, q->text)) continue;
            const gn_node_t *x = meant(g, p->node), *y = meant(g, q->node);
            if (x->kind == GN_TEXTS && y->kind == GN_TEXTS && !share_text(g, x, y)) return 1;
        }
    }
    return 0;
}

static int exclude_each_other(const epx_grammar_t *g, int32_t a, int32_t b) {
    const gn_node_t *x = meant(g, a), *y = meant(g, b);
    if ((kinds_of(g, a) & kinds_of(g, b)) == 0) return 1;
    if (x->kind == GN_TEXTS && y->kind == GN_TEXTS) return !share_text(g, x, y);
    return x->kind == GN_OBJECT && y->kind == GN_OBJECT && have_discriminator(g, x, y);
}

static epx_status_t check_one_of(const epx_grammar_t *g, int32_t node) {
    const gn_node_t *n = &g->nodes[node];
    for (int32_t i = 0; i < n->n; i++)
        for (int32_t k = 0; k < i; k++)
            if (!exclude_each_other(g, g->kids[n->first + i], g->kids[n->first + k]))
                return epx_fail(
                    EPX_ERR_ARG,
                    "schema: oneOf[%d] and oneOf[%d] may match the same value; supported: branches of different types, "
                    "different constants, or objects with a required property that has different constants; or anyOf",
                    k, i);
    return EPX_OK;
}

epx_status_t epx_grammar_analyse(epx_grammar_t *g, const int32_t *one_of, int32_t n_one_of) {
    EPX_TRY(check_rounds(g));
    EPX_TRY(check_widths(g));
    find_depths(g);
    if (g->nodes[g->root].depth > EPX_GRAMMAR_MAX_DEPTH)
        return epx_fail(EPX_ERR_ARG, "schema: every value is infinite or nests deeper than %d levels", EPX_GRAMMAR_MAX_DEPTH);
    for (int32_t i = 0; i < n_one_of; i++) EPX_TRY(check_one_of(g, one_of[i]));
    return EPX_OK;
}
