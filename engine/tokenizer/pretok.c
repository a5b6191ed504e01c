/* Pre-tokenizer: a chain of Split steps on PCRE2, each cutting the pieces of the one before.
 * A piece is matched alone: look-around does not see its neighbours, as in the tokenizers package. */
#include "engine/tokenizer/tokenizer_internal.h"
#include "engine/tokenizer/utf8.h"

#include <stdlib.h>
#include <string.h>

/* Bounds for a pattern that backtracks without end: an error instead of a hung server. */
#define MATCH_LIMIT 10000000u
#define HEAP_LIMIT_KIB 65536u

typedef struct {
    size_t begin, end;
    int drop;
} piece_t;

typedef struct {
    piece_t *v;
    size_t n, cap;
} pieces_t;

struct epx_pretok_scratch {
    pcre2_match_data *match;
    pcre2_match_context *context;
    pieces_t pieces[EPX_TOKENIZER_MAX_STEPS];
    epx_str_t prefixed;
};

/* ---- building ---- */

static epx_status_t new_step(epx_pretok_t *p, epx_pretok_step_t **out_step) {
    if (p->n_steps == EPX_TOKENIZER_MAX_STEPS)
        return epx_fail(EPX_ERR_UNSUPPORTED, "pre_tokenizer: more than %d steps", EPX_TOKENIZER_MAX_STEPS);
    *out_step = &p->step[p->n_steps++];
    **out_step = (epx_pretok_step_t){0};
    return EPX_OK;
}

static epx_status_t add_pattern(epx_pretok_t *p, const char *field, const char *pattern, size_t n_bytes, uint32_t options,
                                epx_split_behavior_t behavior, int invert) {
    epx_pretok_step_t *step = NULL;
    char text[128];
    int code;
    PCRE2_SIZE off;
    pcre2_compile_context *cc;
    EPX_TRY(new_step(p, &step));
    cc = pcre2_compile_context_create(NULL);
    if (cc == NULL) return epx_fail(EPX_ERR_NOMEM, "%s: no memory for the pattern", field);
    pcre2_set_newline(cc, PCRE2_NEWLINE_LF);
    step->re = pcre2_compile((PCRE2_SPTR)pattern, n_bytes, options | PCRE2_UTF, &code, &off, cc);
    pcre2_compile_context_free(cc);
    if (step->re == NULL) {
        p->n_steps--;
        pcre2_get_error_message(code, (PCRE2_UCHAR *)text, sizeof text);
        return epx_fail(EPX_ERR_FORMAT, "%s: not a pattern, at byte %zu: %s", field, (size_t)off, text);
    }
    step->jit = pcre2_jit_compile(step->re, PCRE2_JIT_COMPLETE) == 0;
    step->behavior = behavior;
    step->invert = invert;
    return EPX_OK;
}

epx_status_t epx_pretok_add_regex(epx_pretok_t *p, const char *field, const char *pattern, size_t n_bytes,
                                  epx_split_behavior_t behavior, int invert) {
    size_t off;
    const char *why = epx_pretok_dialect_check(pattern, n_bytes, &off);
    if (why)
        return epx_fail(EPX_ERR_UNSUPPORTED, "%s: the pattern has, at byte %zu, %s; its meaning differs between engines", field,
                        off, why);
    /* Ruby's ^ and $ always match at line borders. */
    return add_pattern(p, field, pattern, n_bytes, PCRE2_MULTILINE | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, behavior, invert);
}

epx_status_t epx_pretok_add_literal(epx_pretok_t *p, const char *field, const char *text, size_t n_bytes,
                                    epx_split_behavior_t behavior, int invert) {
    if (n_bytes == 0) return epx_fail(EPX_ERR_UNSUPPORTED, "%s: \"\" matches everywhere; give at least one character", field);
    return add_pattern(p, field, text, n_bytes, PCRE2_LITERAL, behavior, invert);
}

epx_status_t epx_pretok_add_prefix_space(epx_pretok_t *p) {
    epx_pretok_step_t *step;
    return new_step(p, &step);
}

void epx_pretok_fini(epx_pretok_t *p) {
    while (p->n_steps) pcre2_code_free(p->step[--p->n_steps].re);
}

epx_pretok_scratch_t *epx_pretok_scratch_create(void) {
    epx_pretok_scratch_t *s = calloc(1, sizeof *s);
    if (s == NULL) return NULL;
    s->match = pcre2_match_data_create(1, NULL);
    s->context = pcre2_match_context_create(NULL);
    if (s->match == NULL || s->context == NULL) {
        epx_pretok_scratch_destroy(s);
        return NULL;
    }
    pcre2_set_match_limit(s->context, MATCH_LIMIT);
    pcre2_set_heap_limit(s->context, HEAP_LIMIT_KIB);
    return s;
}

void epx_pretok_scratch_destroy(epx_pretok_scratch_t *s) {
    size_t i;
    if (s == NULL) return;
    for (i = 0; i < EPX_TOKENIZER_MAX_STEPS; i++) free(s->pieces[i].v);
    epx_str_fini(&s->prefixed);
    pcre2_match_data_free(s->match);
    pcre2_match_context_free(s->context);
    free(s);
}

/* ---- cutting ---- */

static epx_status_t push(pieces_t *l, size_t begin, size_t end, int drop) {
    if (l->n == l->cap) {
        size_t cap = l->cap ? l->cap * 2 : 64;
        piece_t *v = realloc(l->v, cap * sizeof *v);
        if (v == NULL) return epx_fail(EPX_ERR_NOMEM, "%zu pieces of text", cap);
        l->v = v;
        l->cap = cap;
    }
    l->v[l->n++] = (piece_t){begin, end, drop};
    return EPX_OK;
}

/* 1: found, [*out_begin, *out_end); 0: no match from pos on. */
static epx_status_t match_from(const epx_pretok_step_t *step, epx_pretok_scratch_t *s, const char *text, size_t n_bytes,
                               size_t pos, int *out_found, size_t *out_begin, size_t *out_end) {
    PCRE2_SPTR subject = (PCRE2_SPTR)text;
    PCRE2_SIZE *at = pcre2_get_ovector_pointer(s->match);
    int rc = PCRE2_ERROR_JIT_STACKLIMIT;
    if (step->jit) rc = pcre2_jit_match(step->re, subject, n_bytes, pos, PCRE2_NO_UTF_CHECK, s->match, s->context);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT)
        rc = pcre2_match(step->re, subject, n_bytes, pos, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, s->match, s->context);
    *out_found = 0;
    if (rc == PCRE2_ERROR_NOMATCH) return EPX_OK;
    if (rc < 0) return epx_fail(EPX_ERR_ARG, "the pre-tokenizer's pattern gives up on this text (PCRE2 error %d)", rc);
    if (at[0] > at[1] || at[0] < pos) return epx_fail(EPX_ERR_FORMAT, "the pre-tokenizer's pattern matches backwards");
    *out_found = 1;
    *out_begin = at[0];
    *out_end = at[1];
    return EPX_OK;
}

/* Matches and what lies between them, in order; an empty match directly behind a match does not count. drop: is a match. */
static epx_status_t find_all(const epx_pretok_step_t *step, epx_pretok_scratch_t *s, const char *text, size_t n_bytes,
                             pieces_t *out) {
    size_t pos = 0, done = 0, begin, end, len;
    int found, have_last = 0;
    out->n = 0;
    while (pos <= n_bytes) {
        EPX_TRY(match_from(step, s, text, n_bytes, pos, &found, &begin, &end));
        if (!found) break;
        if (begin == end && have_last && end == done) {
            len = 1;
            if (pos < n_bytes) epx_utf8_decode(text + pos, &len);
            pos += len;
            continue;
        }
        if (begin > done) EPX_TRY(push(out, done, begin, step->invert));
        EPX_TRY(push(out, begin, end, !step->invert));
        pos = done = end;
        have_last = 1;
    }
    return done < n_bytes ? push(out, done, n_bytes, step->invert) : EPX_OK;
}

/* Join each match to its neighbour on one side: forward to the piece before, backward to the piece behind. */
static void merge_forward(pieces_t *l, int only_alike) {
    size_t i, n = 0;
    int prev = 0;
    for (i = 0; i < l->n; i++) {
        piece_t p = l->v[i];
        int joins = only_alike ? p.drop == prev : p.drop && !prev;
        prev = p.drop;
        p.drop = 0;
        if (joins && n) l->v[n - 1].end = p.end;
        else l->v[n++] = p;
    }
    l->n = n;
}

static void merge_backward(pieces_t *l) {
    size_t i, to = l->n;
    int prev = 0;
    for (i = l->n; i-- > 0;) {
        piece_t p = l->v[i];
        int joins = p.drop && !prev;
        prev = p.drop;
        p.drop = 0;
        if (joins && to < l->n) l->v[to].begin = p.begin;
        else l->v[--to] = p;
    }
    if (l->n > to) memmove(l->v, l->v + to, (l->n - to) * sizeof *l->v);
    l->n -= to;
}

static void apply_behavior(epx_split_behavior_t behavior, pieces_t *l) {
    size_t i;
    switch (behavior) {
    case EPX_SPLIT_ISOLATED:
        for (i = 0; i < l->n; i++) l->v[i].drop = 0;
        break;
    case EPX_SPLIT_REMOVED:
        break;
    case EPX_SPLIT_MERGED_WITH_PREVIOUS:
        merge_forward(l, 0);
        break;
    case EPX_SPLIT_MERGED_WITH_NEXT:
        merge_backward(l);
        break;
    case EPX_SPLIT_CONTIGUOUS:
        merge_forward(l, 1);
        break;
    }
}

typedef struct {
    const epx_pretok_t *p;
    epx_pretok_scratch_t *s;
    epx_piece_fn fn;
    void *ctx;
} walk_t;

static epx_status_t walk(const walk_t *w, size_t step_idx, const char *text, size_t n_bytes);

/* The space goes in front once: epx_pretok_run has one such step at most, so one buffer serves. */
static epx_status_t walk_prefixed(const walk_t *w, size_t step_idx, const char *text, size_t n_bytes) {
    epx_str_t *b = &w->s->prefixed;
    if (text[0] == ' ') return walk(w, step_idx + 1, text, n_bytes);
    epx_str_clear(b);
    EPX_TRY(epx_str_append(b, " ", 1));
    EPX_TRY(epx_str_append(b, text, n_bytes));
    return walk(w, step_idx + 1, b->data, b->n_bytes);
}

static epx_status_t walk(const walk_t *w, size_t step_idx, const char *text, size_t n_bytes) {
    const epx_pretok_step_t *step = &w->p->step[step_idx];
    pieces_t *l = &w->s->pieces[step_idx];
    size_t i;
    if (n_bytes == 0) return EPX_OK;
    if (step_idx == w->p->n_steps) return w->fn(w->ctx, text, n_bytes);
    if (step->re == NULL) return walk_prefixed(w, step_idx, text, n_bytes);
    EPX_TRY(find_all(step, w->s, text, n_bytes, l));
    apply_behavior(step->behavior, l);
    for (i = 0; i < l->n; i++) {
        if (!l->v[i].drop) EPX_TRY(walk(w, step_idx + 1, text + l->v[i].begin, l->v[i].end - l->v[i].begin));
    }
    return EPX_OK;
}

epx_status_t epx_pretok_run(const epx_pretok_t *p, epx_pretok_scratch_t *s, const char *text, size_t n_bytes, epx_piece_fn fn,
                            void *ctx) {
    walk_t w = {p, s, fn, ctx};
    return walk(&w, 0, text, n_bytes);
}
