/* The machine: what a byte does to a position. A position is a chain of frames; frames never change after they were pushed. */
#include <stdlib.h>
#include <string.h>

#include "engine/grammar/grammar_internal.h"

/* ---- storage ---- */

int32_t epx_grammar_push(gf_machine_t *m, gf_frame_t f) {
    if (m->n_frames == m->cap_frames) {
        int32_t cap = m->cap_frames ? 2 * m->cap_frames : 256;
        gf_frame_t *grown = realloc(m->frames, (size_t)cap * sizeof *grown);
        if (!grown) {
            m->no_memory = 1;
            return -1;
        }
        m->frames = grown;
        m->cap_frames = cap;
    }
    m->frames[m->n_frames] = f;
    return m->n_frames++;
}

static void emit(gf_machine_t *m, int32_t top) {
    if (m->no_memory) return;
    if (m->n_tops == m->cap_tops) {
        int32_t cap = m->cap_tops ? 2 * m->cap_tops : 256;
        int32_t *grown = realloc(m->tops, (size_t)cap * sizeof *grown);
        if (!grown) {
            m->no_memory = 1;
            return;
        }
        m->tops = grown;
        m->cap_tops = cap;
    }
    m->tops[m->n_tops++] = top;
}

static void push_and_emit(gf_machine_t *m, gf_frame_t f) { emit(m, epx_grammar_push(m, f)); }

static int fits(const gf_machine_t *m, int32_t node, int32_t depth) {
    int32_t d = m->g->nodes[node].depth;
    return d <= EPX_GRAMMAR_MAX_DEPTH && depth + d <= EPX_GRAMMAR_MAX_DEPTH;
}

static int is_space(uint8_t b) { return b == ' ' || b == '\n' || b == '\t' || b == '\r'; }

/* ---- the beginning of a value ---- */

static void begin(gf_machine_t *m, int32_t node, int32_t parent, int depth, uint8_t b);

static void step_literal(gf_machine_t *m, gf_frame_t f, uint8_t b) {
    const gn_text_t *t = &m->g->texts[f.text];
    if ((uint8_t)m->g->bytes.data[t->off + (size_t)f.pos] != b) return;
    if ((size_t)++f.pos == t->n_bytes) emit(m, f.parent);
    else push_and_emit(m, f);
}

static void begin_texts(gf_machine_t *m, const gn_node_t *n, gf_frame_t f, uint8_t b) {
    f.phase = GF_LITERAL;
    for (int32_t i = 0; i < n->n; i++) {
        f.text = n->first + i;
        step_literal(m, f, b);
    }
}

enum { AT_MINUS, AT_ZERO, AT_INT, AT_POINT, AT_FRACTION, AT_E, AT_SIGN, AT_EXPONENT };

static void begin_number(gf_machine_t *m, gf_frame_t f, uint8_t b) {
    f.phase = GF_NUMBER;
    if (b != '-' && (b < '0' || b > '9')) return;
    f.pos = b == '-' ? AT_MINUS : b == '0' ? AT_ZERO : AT_INT;
    f.count = 1;
    push_and_emit(m, f);
}

/* The frame behind the last part of a sequence is the sequence's own parent. */
static int32_t after_part(gf_machine_t *m, const gn_node_t *n, gf_frame_t f, int32_t next) {
    if (next == n->n) return f.parent;
    f.phase = GF_SEQUENCE;
    f.pos = next;
    return epx_grammar_push(m, f);
}

static void begin_part(gf_machine_t *m, gf_frame_t f, int32_t part, uint8_t b) {
    const gn_node_t *n = &m->g->nodes[f.node];
    begin(m, m->g->kids[n->first + part], after_part(m, n, f, part + 1), f.depth, b);
}

/* A value of node at this depth begins with b; `parent` follows it. */
static void begin(gf_machine_t *m, int32_t node, int32_t parent, int depth, uint8_t b) {
    const gn_node_t *n = &m->g->nodes[node];
    gf_frame_t f = {.node = node, .parent = parent, .depth = (uint8_t)depth};
    if (m->no_memory || !fits(m, node, depth)) return;
    switch (n->kind) {
    case GN_OBJECT:
    case GN_ARRAY:
        f.phase = n->kind == GN_OBJECT ? GF_OBJ_OPEN : GF_ARR_OPEN;
        f.depth++;
        if (b == (n->kind == GN_OBJECT ? '{' : '[')) push_and_emit(m, f);
        return;
    case GN_STRING:
        f.phase = GF_STRING;
        if (b == '"') push_and_emit(m, f);
        return;
    case GN_NUMBER:
    case GN_INTEGER:
        begin_number(m, f, b);
        return;
    case GN_TEXTS:
        begin_texts(m, n, f, b);
        return;
    case GN_ANYOF:
        for (int32_t i = 0; i < n->n; i++) begin(m, m->g->kids[n->first + i], parent, depth, b);
        return;
    case GN_SEQUENCE:
        begin_part(m, f, 0, b);
        return;
    }
}

/* ---- strings ---- */

static int is_hex(uint8_t b) { return (b >= '0' && b <= '9') || (b >= 'a' && b <= 'f') || (b >= 'A' && b <= 'F'); }

/* escape: 1 behind the backslash, 2 to 5 before the 1st to 4th hex digit of \u, 6 before the 2nd behind a D (no surrogates). */
static void step_escape(gf_machine_t *m, gf_frame_t f, uint8_t b) {
    if (f.escape == 1) {
        if (b == 'u') f.escape = 2;
        else if (b && strchr("\"\\/bfnrt", b)) f.escape = 0;
        else return;
    } else {
        if (!is_hex(b) || (f.escape == 6 && b > '7')) return;
        if (f.escape == 2 && (b | 0x20) == 'd') f.escape = 6;
        else f.escape = f.escape == 6 ? 4 : f.escape == 5 ? 0 : (uint8_t)(f.escape + 1);
    }
    push_and_emit(m, f);
}

/* The first byte of a character of more than one; ranges of the second byte as in Unicode, table 3-7. */
static int lead_byte(gf_frame_t *f, uint8_t b) {
    if (b < 0xc2 || b > 0xf4) return 0;
    f->utf8_left = b < 0xe0 ? 1 : b < 0xf0 ? 2 : 3;
    f->utf8_lo = b == 0xe0 ? 0xa0 : b == 0xf0 ? 0x90 : 0x80;
    f->utf8_hi = b == 0xed ? 0x9f : b == 0xf4 ? 0x8f : 0xbf;
    return 1;
}

static void step_string(gf_machine_t *m, gf_frame_t f, uint8_t b) {
    const gn_node_t *n = f.node >= 0 ? &m->g->nodes[f.node] : NULL; /* NULL: a free name */
    int is_free = n == NULL || n->kind != GN_STRING;
    if (f.escape) {
        step_escape(m, f, b);
        return;
    }
    if (f.utf8_left) {
        if (b < f.utf8_lo || b > f.utf8_hi) return;
        f.utf8_left--;
        f.utf8_lo = f.utf8_left ? 0x80 : 0;
        f.utf8_hi = f.utf8_left ? 0xbf : 0;
        push_and_emit(m, f);
        return;
    }
    if (b == '"') {
        if (is_free || f.count >= n->min) emit(m, f.parent);
        return;
    }
    if (b < 0x20 || (!is_free && n->max >= 0 && f.count >= n->max)) return;
    if (b == '\\') f.escape = 1;
    else if (b >= 0x80 && !lead_byte(&f, b)) return;
    if (!is_free && f.count < INT32_MAX) f.count++;
    push_and_emit(m, f);
}

int epx_grammar_in_text(const gf_frame_t *f) { return f->phase == GF_STRING && !f->escape && !f->utf8_left; }

/* ---- numbers ---- */

static int number_is_whole(const gf_frame_t *f) {
    return f->pos == AT_ZERO || f->pos == AT_INT || f->pos == AT_FRACTION || f->pos == AT_EXPONENT;
}

/* Next part behind digit b, or -1. */
static int after_digit(const gf_frame_t *f, uint8_t b) {
    static const int next[] = {
        [AT_MINUS] = AT_INT,         [AT_ZERO] = -1,       [AT_INT] = AT_INT,       [AT_POINT] = AT_FRACTION,
        [AT_FRACTION] = AT_FRACTION, [AT_E] = AT_EXPONENT, [AT_SIGN] = AT_EXPONENT, [AT_EXPONENT] = AT_EXPONENT};
    int limit = f->pos >= AT_E ? EPX_GRAMMAR_MAX_EXPONENT : EPX_GRAMMAR_MAX_DIGITS;
    if (f->pos == next[f->pos] && f->count >= limit) return -1;
    return f->pos == AT_MINUS && b == '0' ? AT_ZERO : next[f->pos];
}

static int after_sign(const gf_machine_t *m, const gf_frame_t *f, uint8_t b) {
    if (m->g->nodes[f->node].kind == GN_INTEGER) return -1;
    if (b == '.') return f->pos == AT_ZERO || f->pos == AT_INT ? AT_POINT : -1;
    if (b == 'e' || b == 'E') return number_is_whole(f) && f->pos != AT_EXPONENT ? AT_E : -1;
    return (b == '+' || b == '-') && f->pos == AT_E ? AT_SIGN : -1;
}

static void step_number(gf_machine_t *m, gf_frame_t f, uint8_t b) {
    int is_digit = b >= '0' && b <= '9';
    int next = is_digit ? after_digit(&f, b) : after_sign(m, &f, b);
    if (next < 0) {
        if (number_is_whole(&f) && f.parent >= 0) epx_grammar_step(m, f.parent, b);
        return;
    }
    f.count = next == f.pos ? f.count + 1 : is_digit;
    f.pos = next;
    push_and_emit(m, f);
}

/* ---- arrays ---- */

static gf_frame_t in_phase(gf_frame_t f, gf_phase_t phase) {
    f.phase = (uint8_t)phase;
    f.space = 0;
    return f;
}

static void begin_item(gf_machine_t *m, gf_frame_t f, uint8_t b) {
    const gn_node_t *n = &m->g->nodes[f.node];
    if (!fits(m, n->child, f.depth)) return;
    int32_t child = n->child, depth = f.depth;
    f = in_phase(f, GF_ARR_AFTER);
    f.count += f.count < INT32_MAX;
    begin(m, child, epx_grammar_push(m, f), depth, b);
}

static void step_array(gf_machine_t *m, gf_frame_t f, uint8_t b) {
    const gn_node_t *n = &m->g->nodes[f.node];
    int more = (n->max < 0 || f.count < n->max) && fits(m, n->child, f.depth);
    if (b == ']') {
        if (f.phase != GF_ARR_NEXT && f.count >= n->min) emit(m, f.parent);
    } else if (f.phase == GF_ARR_AFTER) {
        if (b == ',' && more) push_and_emit(m, in_phase(f, GF_ARR_NEXT));
    } else if (more) {
        begin_item(m, f, b);
    }
}

/* ---- objects ---- */

/* The next property from `from` on that may come; n when there is none. */
static int32_t next_prop(const gf_machine_t *m, const gf_frame_t *f, int32_t from) {
    const gn_node_t *n = &m->g->nodes[f->node];
    while (from < n->n && !fits(m, m->g->props[n->first + from].node, f->depth)) from++;
    return from;
}

static int may_close(const gf_machine_t *m, const gf_frame_t *f) {
    const gn_node_t *n = &m->g->nodes[f->node];
    for (int32_t i = f->pos; i < n->n; i++)
        if (m->g->props[n->first + i].required) return 0;
    return 1;
}

static int has_free_names(const gf_machine_t *m, const gf_frame_t *f) {
    int32_t child = m->g->nodes[f->node].child;
    return child >= 0 && fits(m, child, f->depth);
}

/* Behind the quote that opens a name: each property up to the first that may not be skipped. */
static void begin_name(gf_machine_t *m, gf_frame_t f) {
    const gn_node_t *n = &m->g->nodes[f.node];
    gf_frame_t colon = in_phase(f, GF_OBJ_COLON), name = {.node = -1, .depth = f.depth};
    if (has_free_names(m, &f)) {
        name.phase = GF_STRING;
        name.parent = epx_grammar_push(m, colon);
        push_and_emit(m, name);
    }
    for (int32_t i = next_prop(m, &f, f.pos); i < n->n && !m->no_memory; i = next_prop(m, &f, i + 1)) {
        const gn_prop_t *p = &m->g->props[n->first + i];
        colon.pos = i + 1;
        name.phase = GF_LITERAL;
        name.text = p->text;
        name.pos = 1;
        name.parent = epx_grammar_push(m, colon);
        push_and_emit(m, name);
        if (p->required) return;
    }
}

static void begin_member(gf_machine_t *m, gf_frame_t f, uint8_t b) {
    const gn_node_t *n = &m->g->nodes[f.node];
    int32_t node = n->child >= 0 ? n->child : m->g->props[n->first + f.pos - 1].node, depth = f.depth;
    begin(m, node, epx_grammar_push(m, in_phase(f, GF_OBJ_AFTER)), depth, b);
}

static void step_object(gf_machine_t *m, gf_frame_t f, uint8_t b) {
    int between = f.phase == GF_OBJ_OPEN || f.phase == GF_OBJ_AFTER;
    if (f.phase == GF_OBJ_COLON) {
        if (b == ':') push_and_emit(m, in_phase(f, GF_OBJ_VALUE));
    } else if (f.phase == GF_OBJ_VALUE) {
        begin_member(m, f, b);
    } else if (b == '}') {
        if (between && may_close(m, &f)) emit(m, f.parent);
    } else if (b == ',') {
        int more = has_free_names(m, &f) || next_prop(m, &f, f.pos) < m->g->nodes[f.node].n;
        if (f.phase == GF_OBJ_AFTER && more) push_and_emit(m, in_phase(f, GF_OBJ_NEXT));
    } else if (b == '"' && f.phase != GF_OBJ_AFTER) {
        begin_name(m, f);
    }
}

/* ---- a byte ---- */

/* Between two parts: nothing, one blank, or one new line with an indentation. Models that are unsure would fill pages otherwise.
 */
static uint8_t after_space(uint8_t space, uint8_t b) {
    if (space == 0) return b == ' ' ? EPX_GRAMMAR_MAX_INDENT + 1 : b == '\n' ? 1 : 0;
    return (b == ' ' || b == '\t') && space <= EPX_GRAMMAR_MAX_INDENT ? (uint8_t)(space + 1) : 0;
}

void epx_grammar_step(gf_machine_t *m, int32_t top, uint8_t b) {
    if (top < 0 || m->no_memory) return;
    gf_frame_t f = m->frames[top]; /* a copy: pushing may move the frames */
    if (f.phase >= GF_ARR_OPEN && f.phase <= GF_OBJ_NEXT && is_space(b)) {
        f.space = after_space(f.space, b);
        if (f.space) push_and_emit(m, f);
        return;
    }
    switch ((gf_phase_t)f.phase) {
    case GF_LITERAL:
        step_literal(m, f, b);
        return;
    case GF_STRING:
        step_string(m, f, b);
        return;
    case GF_NUMBER:
        step_number(m, f, b);
        return;
    case GF_ARR_OPEN:
    case GF_ARR_AFTER:
    case GF_ARR_NEXT:
        step_array(m, f, b);
        return;
    case GF_SEQUENCE:
        begin_part(m, f, f.pos, b);
        return;
    default:
        step_object(m, f, b);
        return;
    }
}

int epx_grammar_frame_can_end(const gf_machine_t *m, int32_t top) {
    if (top < 0) return 1;
    const gf_frame_t *f = &m->frames[top];
    return f->phase == GF_NUMBER && number_is_whole(f) && f->parent < 0;
}
