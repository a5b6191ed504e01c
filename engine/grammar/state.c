/* Where one answer is in its grammar: the mask of tokens that may come next, and going on. */
#include <stdlib.h>
#include <string.h>

#include "engine/grammar/grammar_internal.h"

/* m.tops [0, n_now) are the positions after everything accepted; what lies behind is scratch. */
struct epx_grammar_state {
    const epx_grammar_vocab_t *v;
    gf_machine_t m;
    int32_t n_now;
    int32_t *set_begin; /* owned [max_depth + 2]: where the positions of each depth of a walk begin */
    int32_t *n_frames;  /* owned [max_depth + 2]: frames to keep at each depth */
};

epx_status_t epx_grammar_state_create(const epx_grammar_t *g, const epx_grammar_vocab_t *v, epx_grammar_state_t **out_s) {
    epx_grammar_state_t *s = calloc(1, sizeof *s);
    if (!s) return epx_fail(EPX_ERR_NOMEM, "grammar: no memory");
    s->v = v;
    s->m.g = g;
    s->set_begin = calloc((size_t)v->max_depth + 3, sizeof *s->set_begin);
    s->n_frames = calloc((size_t)v->max_depth + 3, sizeof *s->n_frames);
    s->m.tops = malloc(256 * sizeof *s->m.tops);
    int32_t top = epx_grammar_push(&s->m, (gf_frame_t){.phase = GF_SEQUENCE, .node = g->root, .parent = -1});
    if (!s->set_begin || !s->n_frames || !s->m.tops || top < 0) {
        epx_grammar_state_destroy(s);
        return epx_fail(EPX_ERR_NOMEM, "grammar: no memory");
    }
    s->m.cap_tops = 256;
    s->m.tops[0] = top;
    s->m.n_tops = s->n_now = 1;
    *out_s = s;
    return EPX_OK;
}

void epx_grammar_state_destroy(epx_grammar_state_t *s) {
    if (!s) return;
    free(s->m.frames);
    free(s->m.tops);
    free(s->set_begin);
    free(s->n_frames);
    free(s);
}

/* ---- the mask ---- */

static void set_bit(uint32_t *bits, int32_t id) { bits[id / 32] |= 1u << (id % 32); }

/* Positions [from, to) by a byte, appended; how many. Too many: none, which only forbids the token. */
static int32_t step_set(gf_machine_t *m, int32_t from, int32_t to, uint8_t b) {
    int32_t before = m->n_tops;
    for (int32_t i = from; i < to; i++) {
        epx_grammar_step(m, m->tops[i], b);
        if (m->n_tops - before <= EPX_GRAMMAR_MAX_BRANCHES) continue;
        m->n_tops = before;
        return 0;
    }
    return m->n_tops - before;
}

/* Set the bits of the trie's tokens that fit behind position `top`. */
static void walk(epx_grammar_state_t *s, const gv_trie_t *t, int32_t top, uint32_t *bits) {
    gf_machine_t *m = &s->m;
    int32_t tops_before = m->n_tops, frames_before = m->n_frames;
    m->tops[m->n_tops++] = top; /* room for one more was made by epx_grammar_mask */
    s->set_begin[0] = tops_before;
    s->set_begin[1] = m->n_tops;
    s->n_frames[1] = m->n_frames;
    for (int32_t i = 0; i < t->n && !m->no_memory;) {
        const gv_node_t *n = &t->nodes[i];
        int d = n->depth;
        m->n_tops = s->set_begin[d];
        m->n_frames = s->n_frames[d];
        if (step_set(m, s->set_begin[d - 1], s->set_begin[d], n->byte) == 0) {
            i = n->end;
            continue;
        }
        for (int32_t id = n->token; id >= 0; id = s->v->same[id]) set_bit(bits, id);
        s->set_begin[d + 1] = m->n_tops;
        s->n_frames[d + 1] = m->n_frames;
        i++;
    }
    m->n_tops = tops_before;
    m->n_frames = frames_before;
}

/* Safe tokens of at most `room` characters; -1: any. */
static void add_safe(const epx_grammar_vocab_t *v, int32_t room, uint32_t *bits) {
    if (room < 0 || room >= 255) {
        for (int32_t i = 0; i < (v->n_vocab + 31) / 32; i++) bits[i] |= v->safe[i];
        return;
    }
    for (int32_t id = 0; id < v->n_vocab; id++)
        if (v->n_chars[id] && v->n_chars[id] <= room) set_bit(bits, id);
}

/* In a string most of the vocabulary fits; only the rest is walked. */
static void add_position(epx_grammar_state_t *s, int32_t top, uint32_t *bits) {
    if (top < 0) return;
    const gf_frame_t *f = &s->m.frames[top];
    if (!epx_grammar_in_text(f)) {
        walk(s, &s->v->all, top, bits);
        return;
    }
    const gn_node_t *n = f->node >= 0 ? &s->m.g->nodes[f->node] : NULL;
    int limited = n && n->max >= 0;
    add_safe(s->v, limited ? n->max - f->count : -1, bits);
    walk(s, &s->v->unsafe, top, bits);
}

static epx_status_t make_room(gf_machine_t *m) {
    if (m->n_tops < m->cap_tops) return EPX_OK;
    int32_t *grown = realloc(m->tops, 2 * (size_t)m->cap_tops * sizeof *grown);
    if (!grown) return epx_fail(EPX_ERR_NOMEM, "grammar: no memory");
    m->tops = grown;
    m->cap_tops *= 2;
    return EPX_OK;
}

static int32_t count_bits(const uint32_t *bits, int32_t n_words) {
    int32_t n = 0;
    for (int32_t i = 0; i < n_words; i++)
        for (uint32_t w = bits[i]; w; w &= w - 1) n++;
    return n;
}

epx_status_t epx_grammar_mask(epx_grammar_state_t *s, uint32_t *bits, int32_t *out_n) {
    int32_t n_words = (s->v->n_vocab + 31) / 32;
    memset(bits, 0, (size_t)n_words * sizeof *bits);
    EPX_TRY(make_room(&s->m));
    for (int32_t i = 0; i < s->n_now && !s->m.no_memory; i++) add_position(s, s->m.tops[i], bits);
    if (s->m.no_memory) return epx_fail(EPX_ERR_NOMEM, "grammar: no memory");
    *out_n = count_bits(bits, n_words);
    if (*out_n == 0 && !epx_grammar_can_end(s))
        return epx_fail(EPX_ERR_INTERNAL,
                        "grammar: no token of the vocabulary fits the text so far, or the schema has too many ways to go on");
    return EPX_OK;
}

/* ---- going on ---- */

/* Old frame to its only copy in the new list; parents first, equal frames once, so that equal positions become one. */
typedef struct {
    gf_frame_t *frames;
    int32_t n;
    int32_t *copy_of; /* [old n_frames] index + 1, 0: not copied */
    int32_t *table;   /* hash table of indices + 1 */
    uint32_t n_slots; /* a power of two */
} compaction_t;

static uint32_t hash_of(const gf_frame_t *f) {
    const uint8_t *b = (const uint8_t *)f;
    uint32_t h = 2166136261u; /* FNV-1a */
    for (size_t i = 0; i < sizeof *f; i++) h = (h ^ b[i]) * 16777619u;
    return h;
}

static int32_t intern(compaction_t *c, const gf_frame_t *f) {
    for (uint32_t at = hash_of(f);; at++) {
        int32_t *slot = &c->table[at & (c->n_slots - 1)];
        if (*slot == 0) {
            c->frames[c->n] = *f;
            *slot = ++c->n;
            return c->n - 1;
        }
        if (memcmp(&c->frames[*slot - 1], f, sizeof *f) == 0) return *slot - 1;
    }
}

/* Parents have lower indices than their children, so one pass upwards copies them in order. */
static int32_t copy_chain(compaction_t *c, const gf_frame_t *old, int32_t top) {
    int32_t chain[EPX_GRAMMAR_MAX_DEPTH * 2 + 8], n = 0, parent = -1;
    for (int32_t at = top; at >= 0; at = old[at].parent) {
        if (c->copy_of[at]) {
            parent = c->copy_of[at] - 1;
            break;
        }
        chain[n++] = at;
    }
    while (n > 0) {
        int32_t at = chain[--n];
        gf_frame_t f = old[at];
        f.parent = parent;
        parent = intern(c, &f);
        c->copy_of[at] = parent + 1;
    }
    return parent;
}

static int32_t keep_once(int32_t *tops, int32_t n) {
    int32_t kept = 0;
    for (int32_t i = 0; i < n; i++) {
        int32_t k = 0;
        while (k < kept && tops[k] != tops[i]) k++;
        if (k == kept) tops[kept++] = tops[i];
    }
    return kept;
}

/* Only the frames of the positions [from, from + n) stay; those become the positions. */
static epx_status_t compact(epx_grammar_state_t *s, int32_t from, int32_t n) {
    gf_machine_t *m = &s->m;
    compaction_t c = {.n_slots = 64};
    while (c.n_slots < 2 * (uint32_t)m->n_frames) c.n_slots *= 2;
    c.frames = malloc((size_t)m->cap_frames * sizeof *c.frames);
    c.copy_of = calloc((size_t)m->n_frames, sizeof *c.copy_of);
    c.table = calloc(c.n_slots, sizeof *c.table);
    int ok = c.frames && c.copy_of && c.table;
    if (ok) {
        for (int32_t i = 0; i < n; i++) m->tops[i] = m->tops[from + i] < 0 ? -1 : copy_chain(&c, m->frames, m->tops[from + i]);
        m->n_tops = s->n_now = keep_once(m->tops, n);
        free(m->frames);
        m->frames = c.frames;
        m->n_frames = c.n;
        c.frames = NULL;
    }
    free(c.frames);
    free(c.copy_of);
    free(c.table);
    return ok ? EPX_OK : epx_fail(EPX_ERR_NOMEM, "grammar: no memory");
}

epx_status_t epx_grammar_accept(epx_grammar_state_t *s, int32_t token) {
    gf_machine_t *m = &s->m;
    int32_t from = 0, n = s->n_now, frames_before = m->n_frames;
    if (token < 0 || token >= s->v->n_vocab || !s->v->bytes[token])
        return epx_fail(EPX_ERR_ARG, "grammar: token %d has no text", token);
    for (int32_t i = 0; i < s->v->n_bytes[token] && n > 0; i++) {
        int32_t next = m->n_tops;
        n = step_set(m, from, from + n, (uint8_t)s->v->bytes[token][i]);
        from = next;
    }
    if (n == 0 || m->no_memory) {
        m->n_tops = s->n_now;
        m->n_frames = frames_before;
        return m->no_memory ? epx_fail(EPX_ERR_NOMEM, "grammar: no memory")
                            : epx_fail(EPX_ERR_ARG, "grammar: token %d does not fit", token);
    }
    return compact(s, from, n);
}

int epx_grammar_can_end(const epx_grammar_state_t *s) {
    for (int32_t i = 0; i < s->n_now; i++)
        if (epx_grammar_frame_can_end(&s->m, s->m.tops[i])) return 1;
    return 0;
}

int epx_grammar_must_end(const epx_grammar_state_t *s) {
    for (int32_t i = 0; i < s->n_now; i++)
        if (s->m.tops[i] >= 0) return 0;
    return 1;
}
