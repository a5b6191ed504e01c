/* Running the statements of a template. */
#include <stdlib.h>
#include <string.h>

#include "engine/tokenizer/jinja.h"

epx_status_t jinja_assign(jinja_run_t *r, const char *name, json_t *value) {
    jinja_frame_t *f = r->top;
    size_t i;
    for (i = 0; i < f->n && strcmp(f->var[i].name, name) != 0;) i++;
    if (i == f->cap) {
        size_t cap = f->cap ? f->cap * 2 : 8;
        jinja_var_t *v = realloc(f->var, cap * sizeof *v);
        if (v == NULL) return r->status = epx_fail(EPX_ERR_NOMEM, "chat template: no memory for a variable");
        f->var = v;
        f->cap = cap;
    }
    json_incref(value);
    if (i < f->n) json_decref(f->var[i].value);
    else f->n++;
    f->var[i] = (jinja_var_t){name, value};
    return EPX_OK;
}

static void clear_frame(jinja_frame_t *f) {
    while (f->n) json_decref(f->var[--f->n].value);
}

static void pop_frame(jinja_run_t *r, jinja_frame_t *f) {
    clear_frame(f);
    free(f->var);
    r->top = f->parent;
}

static void release(jinja_run_t *r, size_t mark) {
    while (r->n_pool > mark) json_decref(r->pool[--r->n_pool]);
}

/* ---- set ---- */

static epx_status_t assign_all(jinja_run_t *r, const jinja_st_t *s, json_t *v) {
    json_t *items;
    size_t i;
    if (s->n_names == 1) return jinja_assign(r, s->name[0], v);
    items = jinja_iterate(r, s->line, v);
    if (items == NULL) return r->status;
    if (json_array_size(items) != s->n_names) {
        jinja_fail(r, s->line, EPX_ERR_ARG, "%zu values for %zu names", json_array_size(items), s->n_names);
        return r->status;
    }
    for (i = 0; i < s->n_names; i++) EPX_TRY(jinja_assign(r, s->name[i], json_array_get(items, i)));
    return EPX_OK;
}

static epx_status_t set_attr(jinja_run_t *r, const jinja_st_t *s, json_t *v) {
    jinja_ex_t name = {.kind = EX_NAME, .line = s->line, .name = s->name[0]};
    json_t *ns = jinja_eval(r, &name);
    if (ns == NULL) return r->status;
    if (jinja_kind(r, ns) != KIND_NAMESPACE) {
        jinja_fail(r, s->line, EPX_ERR_ARG, "set %s.%s: %s is no namespace", s->name[0], s->attr, s->name[0]);
        return r->status;
    }
    if (!jinja_may_nest(r, s->line, v)) return r->status;
    if (json_object_set(ns, s->attr, v) < 0) jinja_fail(r, s->line, EPX_ERR_NOMEM, "no memory for a namespace");
    return r->status;
}

static epx_status_t exec_set(jinja_run_t *r, const jinja_st_t *s) {
    json_t *v = jinja_eval(r, s->expr);
    if (v == NULL) return r->status;
    return s->attr ? set_attr(r, s, v) : assign_all(r, s, v);
}

static epx_status_t exec_set_block(jinja_run_t *r, const jinja_st_t *s) {
    epx_str_t text = {0}, *outer = r->out;
    jinja_frame_t frame = {.parent = r->top};
    json_t *v = NULL;
    r->out = &text;
    r->top = &frame;
    if (jinja_exec(r, &s->body) == EPX_OK) v = jinja_string(r, s->line, text.data, text.n_bytes);
    pop_frame(r, &frame);
    r->out = outer;
    epx_str_fini(&text);
    if (v == NULL) return r->status;
    return s->attr ? set_attr(r, s, v) : jinja_assign(r, s->name[0], v);
}

/* ---- if and for ---- */

static epx_status_t exec_if(jinja_run_t *r, const jinja_st_t *s) {
    for (; s; s = s->elif) {
        json_t *c = jinja_eval(r, s->expr);
        if (c == NULL) return r->status;
        if (jinja_truth(r, c)) return jinja_exec(r, &s->body);
        if (s->elif == NULL) return jinja_exec(r, &s->other);
    }
    return EPX_OK;
}

/* Items for which the condition behind the loop holds. */
static json_t *filter_items(jinja_run_t *r, const jinja_st_t *s, json_t *items) {
    jinja_frame_t frame = {.parent = r->top};
    json_t *out = jinja_pool(r, json_array()), *v, *c;
    size_t i;
    int ok = out != NULL;
    r->top = &frame;
    for (i = 0; ok && i < json_array_size(items); i++) {
        v = json_array_get(items, i);
        ok = assign_all(r, s, v) == EPX_OK && (c = jinja_eval(r, s->filter)) != NULL &&
             (!jinja_truth(r, c) || jinja_list_add(r, s->line, out, v));
    }
    pop_frame(r, &frame);
    return ok ? out : NULL;
}

static epx_status_t run_loop(jinja_run_t *r, const jinja_st_t *s, json_t *items) {
    jinja_loop_t loop = {.items = items};
    jinja_frame_t frame = {.parent = r->top, .loop = &loop};
    epx_status_t st = EPX_OK;
    size_t mark = r->n_pool;
    r->top = &frame;
    for (; st == EPX_OK && loop.at < json_array_size(items); loop.at++) {
        clear_frame(&frame);
        st = assign_all(r, s, json_array_get(items, loop.at));
        if (st == EPX_OK) st = jinja_exec(r, &s->body);
        release(r, mark);
        if (r->flow == JINJA_BREAK) break;
        r->flow = JINJA_GO_ON;
    }
    r->flow = JINJA_GO_ON;
    pop_frame(r, &frame);
    return st;
}

static epx_status_t exec_else(jinja_run_t *r, const jinja_st_t *s) {
    jinja_frame_t frame = {.parent = r->top};
    epx_status_t st;
    r->top = &frame;
    st = jinja_exec(r, &s->other);
    pop_frame(r, &frame);
    return st;
}

static epx_status_t exec_for(jinja_run_t *r, const jinja_st_t *s) {
    json_t *v = jinja_eval(r, s->expr), *items = v ? jinja_iterate(r, s->line, v) : NULL;
    if (items && s->filter) items = filter_items(r, s, items);
    if (items == NULL || jinja_pool(r, json_incref(items)) == NULL) return r->status;
    if (json_array_size(items) == 0) return exec_else(r, s);
    return run_loop(r, s, items);
}

/* ---- output ---- */

static epx_status_t emit(jinja_run_t *r, const jinja_st_t *s) {
    epx_status_t st;
    if (!jinja_spend(r, s->line, s->n_bytes / JINJA_BYTES_PER_STEP)) return r->status;
    st = epx_str_append(r->out, s->text, s->n_bytes);
    if (st < 0) return r->status = st;
    if (r->out->n_bytes > JINJA_MAX_STRING_BYTES)
        jinja_fail(r, s->line, EPX_ERR_CAPACITY, "more than %zu bytes of text", JINJA_MAX_STRING_BYTES);
    return r->status;
}

static epx_status_t exec_output(jinja_run_t *r, const jinja_st_t *s) {
    json_t *v = jinja_eval(r, s->expr);
    return v ? jinja_append_str(r, s->line, v, r->out) : r->status;
}

static epx_status_t exec_one(jinja_run_t *r, const jinja_st_t *s) {
    switch (s->kind) {
    case ST_DATA:
        return emit(r, s);
    case ST_OUTPUT:
        return exec_output(r, s);
    case ST_IF:
        return exec_if(r, s);
    case ST_FOR:
        return exec_for(r, s);
    case ST_SET:
        return exec_set(r, s);
    case ST_SET_BLOCK:
        return exec_set_block(r, s);
    case ST_GROUP:
        return jinja_exec(r, &s->body);
    default:
        r->flow = s->kind == ST_BREAK ? JINJA_BREAK : JINJA_CONTINUE;
        return EPX_OK;
    }
}

epx_status_t jinja_exec(jinja_run_t *r, const jinja_body_t *body) {
    size_t i, mark = r->n_pool;
    for (i = 0; i < body->n && r->flow == JINJA_GO_ON; i++) {
        if (!jinja_spend(r, body->v[i]->line, 1)) return r->status;
        EPX_TRY(exec_one(r, body->v[i]));
        release(r, mark);
    }
    return EPX_OK;
}
