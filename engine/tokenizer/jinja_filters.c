/* Filters, tests and global functions. Semantics of Jinja2 (Template Designer Documentation, "List of Builtin Filters" and
 * "List of Builtin Tests"); tojson, raise_exception and strftime_now as transformers defines them. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/tokenizer/jinja.h"
#include "engine/tokenizer/utf8.h"

static int given(const jinja_run_t *r, json_t *v) { return v != NULL && jinja_kind(r, v) != KIND_NONE; }

static json_t *wrong_type(jinja_run_t *r, const jinja_ex_t *at, const char *what, const json_t *v) {
    return jinja_fail(r, at->line, EPX_ERR_ARG, "%s: a value of type %s", what, jinja_type_name(r, v));
}

json_t *jinja_iterate(jinja_run_t *r, int line, json_t *v) {
    jinja_kind_t k = jinja_kind(r, v);
    json_t *list, *item;
    const char *key, *p;
    size_t i, len, n;
    if (k == KIND_LIST) return v;
    if (k != KIND_STRING && k != KIND_DICT && k != KIND_UNDEFINED)
        return jinja_fail(r, line, EPX_ERR_ARG, "a value of type %s cannot be iterated", jinja_type_name(r, v));
    list = jinja_pool(r, json_array());
    if (list == NULL || k == KIND_UNDEFINED) return list;
    if (k == KIND_DICT) {
        json_object_keylen_foreach(v, key, n, item) {
            json_t *s = jinja_string(r, line, key, n);
            if (s == NULL || !jinja_list_add(r, line, list, s)) return NULL;
        }
        return list;
    }
    p = json_string_value(v);
    for (i = 0, n = json_string_length(v); i < n; i += len) {
        epx_utf8_decode(p + i, &len);
        item = jinja_string(r, line, p + i, len);
        if (item == NULL || !jinja_list_add(r, line, list, item)) return NULL;
    }
    return list;
}

/* ---- filters ---- */

/* An int for json.dumps(indent=), or None. */
static int read_indent(jinja_run_t *r, const jinja_ex_t *at, json_t *v, jinja_json_style_t *style) {
    json_int_t n;
    if (!given(r, v)) return 1;
    if (!jinja_integer(r, v, &n) || n < 0 || n > 64) {
        jinja_fail(r, at->line, EPX_ERR_UNSUPPORTED, "tojson: indent other than an integer of 0 to 64");
        return 0;
    }
    style->indent = (int)n;
    style->item_sep = ",";
    return 1;
}

static int read_separators(jinja_run_t *r, const jinja_ex_t *at, json_t *v, jinja_json_style_t *style) {
    if (!given(r, v)) return 1;
    style->item_sep = json_string_value(json_array_get(v, 0));
    style->key_sep = json_string_value(json_array_get(v, 1));
    if (json_array_size(v) == 2 && style->item_sep && style->key_sep) return 1;
    jinja_fail(r, at->line, EPX_ERR_ARG, "tojson: separators other than two strings");
    return 0;
}

static json_t *f_tojson(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    jinja_json_style_t style = {.indent = -1, .item_sep = ", ", .key_sep = ": "};
    epx_str_t s = {0};
    json_t *out = NULL;
    style.ensure_ascii = slot[0] && jinja_truth(r, slot[0]);
    style.sort_keys = slot[3] && jinja_truth(r, slot[3]);
    if (!read_indent(r, at, slot[1], &style) || !read_separators(r, at, slot[2], &style)) return NULL;
    if (jinja_append_json(r, at->line, self, &style, &s) == EPX_OK) out = jinja_string(r, at->line, s.data, s.n_bytes);
    epx_str_fini(&s);
    return out;
}

static json_t *f_length(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    (void)slot;
    switch (jinja_kind(r, self)) {
    case KIND_UNDEFINED:
        return jinja_pool(r, json_integer(0));
    case KIND_STRING:
        if (!jinja_spend(r, at->line, json_string_length(self) / JINJA_BYTES_PER_STEP)) return NULL;
        return jinja_pool(r, json_integer((json_int_t)jinja_n_chars(self)));
    case KIND_LIST:
        return jinja_pool(r, json_integer((json_int_t)json_array_size(self)));
    case KIND_DICT:
        return jinja_pool(r, json_integer((json_int_t)json_object_size(self)));
    default:
        return wrong_type(r, at, "length", self);
    }
}

/* Filters that turn their input into a string and call the method of the same name. */
static json_t *as_method(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot, const char *name) {
    self = jinja_to_string(r, at->line, self);
    return self ? jinja_find_str_method(name)->call(r, at, self, slot) : NULL;
}
static json_t *f_trim(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    return as_method(r, at, self, slot, "strip");
}
static json_t *f_upper(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    return as_method(r, at, self, slot, "upper");
}
static json_t *f_lower(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    return as_method(r, at, self, slot, "lower");
}
static json_t *f_capitalize(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    return as_method(r, at, self, slot, "capitalize");
}
static json_t *f_replace(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    json_t *text[JINJA_MAX_ARGS] = {jinja_to_string(r, at->line, slot[0]), NULL, slot[2]};
    if (text[0]) text[1] = jinja_to_string(r, at->line, slot[1]);
    return text[1] ? as_method(r, at, self, text, "replace") : NULL;
}
static json_t *f_string(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    (void)slot;
    return jinja_to_string(r, at->line, self);
}

static json_t *f_default(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    int boolean = slot[1] && jinja_truth(r, slot[1]);
    if (jinja_kind(r, self) != KIND_UNDEFINED && !(boolean && !jinja_truth(r, self))) return self;
    return slot[0] ? slot[0] : jinja_string(r, at->line, "", 0);
}

static json_t *f_items(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    jinja_kind_t k = jinja_kind(r, self);
    if (k == KIND_UNDEFINED) return jinja_pool(r, json_array());
    if (k != KIND_DICT) return wrong_type(r, at, "items", self);
    return jinja_find_dict_method("items")->call(r, at, self, slot);
}

static json_t *f_first(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    json_t *items = jinja_iterate(r, at->line, self);
    (void)slot;
    if (items == NULL) return NULL;
    return json_array_size(items) ? json_array_get(items, 0) : r->undefined;
}

static json_t *f_last(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    json_t *items = jinja_iterate(r, at->line, self);
    (void)slot;
    if (items == NULL) return NULL;
    return json_array_size(items) ? json_array_get(items, json_array_size(items) - 1) : r->undefined;
}

static json_t *f_list(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    (void)slot;
    return jinja_iterate(r, at->line, self);
}

static json_t *f_reverse(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    json_t *items = jinja_iterate(r, at->line, self), *out = jinja_pool(r, json_array());
    epx_str_t s = {0};
    epx_status_t st = EPX_OK;
    size_t i;
    (void)slot;
    if (items == NULL || out == NULL) return NULL;
    for (i = json_array_size(items); i-- > 0;) {
        if (!jinja_list_add(r, at->line, out, json_array_get(items, i))) return NULL;
    }
    if (jinja_kind(r, self) != KIND_STRING) return out;
    for (i = 0; st == EPX_OK && i < json_array_size(out); i++) st = jinja_append_str(r, at->line, json_array_get(out, i), &s);
    out = st == EPX_OK ? jinja_string(r, at->line, s.data, s.n_bytes) : NULL;
    epx_str_fini(&s);
    return out;
}

static json_t *f_safe(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) { return f_string(r, at, self, slot); }

/* The whole of a string as a number; int() allows spaces around. */
static json_t *parse_int(jinja_run_t *r, const json_t *s, json_t *fallback) {
    const char *text = json_string_value(s);
    char *end;
    double d;
    long long v;
    if (json_string_length(s) == 0 || json_string_length(s) > 40 ||
        strspn(text, "0123456789+-. \t\n\reE") != json_string_length(s))
        return fallback;
    v = strtoll(text, &end, 10);
    if (end != text && end[strspn(end, " \t\n\r")] == 0 && v != INT64_MAX && v != INT64_MIN)
        return jinja_pool(r, json_integer(v));
    d = strtod(text, &end);
    if (end == text || end[strspn(end, " \t\n\r")] != 0 || !(fabs(d) < 9e18)) return fallback;
    return jinja_pool(r, json_integer((json_int_t)d));
}

static json_t *f_int(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    json_t *fallback = slot[0] ? slot[0] : jinja_pool(r, json_integer(0));
    json_int_t i;
    double d;
    if (fallback == NULL) return NULL;
    if (jinja_integer(r, self, &i)) return jinja_pool(r, json_integer(i));
    if (jinja_number(r, self, &d)) {
        if (!(fabs(d) < 9e18)) return jinja_fail(r, at->line, EPX_ERR_UNSUPPORTED, "an integer beyond 64 bits");
        return jinja_pool(r, json_integer((json_int_t)d));
    }
    if (jinja_kind(r, self) == KIND_UNDEFINED) return wrong_type(r, at, "int", self);
    return jinja_kind(r, self) == KIND_STRING ? parse_int(r, self, fallback) : fallback;
}

static json_t *f_float(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    json_t *fallback = slot[0] ? slot[0] : jinja_pool(r, json_real(0.0));
    const char *text;
    char *end;
    double d;
    if (fallback == NULL) return NULL;
    if (jinja_number(r, self, &d)) return jinja_pool(r, json_real(d));
    if (jinja_kind(r, self) == KIND_UNDEFINED) return wrong_type(r, at, "float", self);
    if (jinja_kind(r, self) != KIND_STRING) return fallback;
    text = json_string_value(self);
    if (strspn(text, "0123456789+-. \t\n\reE") != json_string_length(self)) return fallback;
    d = strtod(text, &end);
    return end == text || end[strspn(end, " \t\n\r")] != 0 || isinf(d) ? fallback : jinja_pool(r, json_real(d));
}

static json_t *f_abs(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    json_int_t i;
    (void)slot;
    if (jinja_integer(r, self, &i) && i != INT64_MIN) return jinja_pool(r, json_integer(i < 0 ? -i : i));
    if (jinja_kind(r, self) == KIND_FLOAT) return jinja_pool(r, json_real(fabs(json_real_value(self))));
    return wrong_type(r, at, "abs", self);
}

/* a.b.0: attributes and items by dots. fallback NULL: undefined. */
static json_t *dotted(jinja_run_t *r, const jinja_ex_t *at, json_t *v, const json_t *path) {
    const char *p = json_string_value(path), *dot;
    char name[128];
    size_t n;
    for (; v; p = dot + 1) {
        dot = strchrnul(p, '.');
        n = (size_t)(dot - p);
        if (n >= sizeof name) return jinja_fail(r, at->line, EPX_ERR_UNSUPPORTED, "attribute name of %zu bytes", n);
        memcpy(name, p, n);
        name[n] = 0;
        if (jinja_kind(r, v) == KIND_UNDEFINED)
            return jinja_fail(r, at->line, EPX_ERR_ARG, "attribute '%s' of an undefined value", name);
        if (n && strspn(name, "0123456789") == n && json_is_array(v))
            v = n < 9 && (size_t)atoi(name) < json_array_size(v) ? json_array_get(v, (size_t)atoi(name)) : r->undefined;
        else if (json_is_object(v)) v = json_object_get(v, name) ? json_object_get(v, name) : r->undefined;
        else v = jinja_get_attr(r, at, v, name);
        if (*dot == 0) break;
    }
    return v;
}

static json_t *f_join(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    json_t *items = jinja_iterate(r, at->line, self), *v, *out = NULL;
    epx_str_t s = {0};
    size_t i;
    json_array_foreach(items, i, v) {
        if (i && slot[0] && jinja_append_str(r, at->line, slot[0], &s) < 0) break;
        if (slot[1] && json_is_string(slot[1]) && (v = dotted(r, at, v, slot[1])) == NULL) break;
        if (jinja_append_str(r, at->line, v, &s) < 0) break;
    }
    if (items && r->status == EPX_OK) out = jinja_string(r, at->line, s.data, s.n_bytes);
    epx_str_fini(&s);
    return out;
}

/* map(attribute=..., default=...) or map('filter', ...). */
static json_t *f_map(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    json_t *items = jinja_iterate(r, at->line, self), *out = jinja_pool(r, json_array()), *v;
    const jinja_fn_t *fn = NULL;
    size_t i;
    if (items == NULL || out == NULL) return NULL;
    if (slot[3] == NULL) {
        fn = json_is_string(slot[0]) ? jinja_find_filter(json_string_value(slot[0])) : NULL;
        if (fn == NULL)
            return jinja_fail(r, at->line, EPX_ERR_UNSUPPORTED, "map without attribute= or the name of a known filter");
    } else if (!json_is_string(slot[3])) {
        return wrong_type(r, at, "map: attribute", slot[3]);
    }
    json_array_foreach(items, i, v) {
        if (!jinja_spend(r, at->line, 1)) return NULL;
        v = fn ? jinja_call_values(r, at, fn, v, slot + 1, 2) : dotted(r, at, v, slot[3]);
        if (v && slot[4] && jinja_kind(r, v) == KIND_UNDEFINED) v = slot[4];
        if (v == NULL || !jinja_may_nest(r, at->line, v) || !jinja_list_add(r, at->line, out, v)) return NULL;
    }
    return out;
}

/* select(test, arg), selectattr(attribute, test, arg) and their opposites; without a test, truth decides. */
static json_t *choose(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t *attr, json_t **test, int keep) {
    json_t *items = jinja_iterate(r, at->line, self), *out = jinja_pool(r, json_array()), *v, *w;
    const jinja_fn_t *fn = NULL;
    size_t i;
    if (items == NULL || out == NULL) return NULL;
    if (test[0]) {
        fn = json_is_string(test[0]) ? jinja_find_test(json_string_value(test[0])) : NULL;
        if (fn == NULL) return jinja_fail(r, at->line, EPX_ERR_UNSUPPORTED, "%s with an unknown test", at->fn->name);
    }
    if (attr && !json_is_string(attr)) return wrong_type(r, at, at->fn->name, attr);
    json_array_foreach(items, i, v) {
        if (!jinja_spend(r, at->line, 1)) return NULL;
        w = attr ? dotted(r, at, v, attr) : v;
        if (w && fn) w = jinja_call_values(r, at, fn, w, test + 1, 1);
        if (w == NULL) return NULL;
        if (jinja_truth(r, w) == keep && !jinja_list_add(r, at->line, out, v)) return NULL;
    }
    return out;
}
static json_t *f_select(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    return choose(r, at, self, NULL, slot, 1);
}
static json_t *f_reject(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    return choose(r, at, self, NULL, slot, 0);
}
static json_t *f_selectattr(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    return choose(r, at, self, slot[0], slot + 1, 1);
}
static json_t *f_rejectattr(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    return choose(r, at, self, slot[0], slot + 1, 0);
}

const jinja_fn_t *jinja_find_filter(const char *name) {
    static const jinja_fn_t table[] = {{"tojson", f_tojson, 0, {"ensure_ascii", "indent", "separators", "sort_keys"}},
                                       {"length", f_length, 0, {NULL}},
                                       {"count", f_length, 0, {NULL}},
                                       {"trim", f_trim, 0, {"chars"}},
                                       {"default", f_default, 0, {"default_value", "boolean"}},
                                       {"d", f_default, 0, {"default_value", "boolean"}},
                                       {"join", f_join, 0, {"d", "attribute"}},
                                       {"items", f_items, 0, {NULL}},
                                       {"upper", f_upper, 0, {NULL}},
                                       {"lower", f_lower, 0, {NULL}},
                                       {"capitalize", f_capitalize, 0, {NULL}},
                                       {"replace", f_replace, 2, {"old", "new", "count"}},
                                       {"string", f_string, 0, {NULL}},
                                       {"safe", f_safe, 0, {NULL}},
                                       {"first", f_first, 0, {NULL}},
                                       {"last", f_last, 0, {NULL}},
                                       {"list", f_list, 0, {NULL}},
                                       {"reverse", f_reverse, 0, {NULL}},
                                       {"int", f_int, 0, {"default"}},
                                       {"float", f_float, 0, {"default"}},
                                       {"abs", f_abs, 0, {NULL}},
                                       {"map", f_map, 0, {"filter", "argument", "argument_2", "attribute", "default"}},
                                       {"select", f_select, 0, {"test", "argument"}},
                                       {"reject", f_reject, 0, {"test", "argument"}},
                                       {"selectattr", f_selectattr, 1, {"attribute", "test", "argument"}},
                                       {"rejectattr", f_rejectattr, 1, {"attribute", "test", "argument"}}};
    size_t i;
    for (i = 0; i < sizeof table / sizeof *table; i++) {
        if (strcmp(table[i].name, name) == 0) return &table[i];
    }
    return NULL;
}

/* ---- tests ---- */

#define KIND_TEST(id, expr)                                                                    \
    static json_t *t_##id(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) { \
        jinja_kind_t k = jinja_kind(r, self);                                                  \
        (void)at;                                                                              \
        (void)slot;                                                                            \
        (void)k;                                                                               \
        return jinja_bool(expr);                                                               \
    }

KIND_TEST(defined, k != KIND_UNDEFINED)
KIND_TEST(undefined, k == KIND_UNDEFINED)
KIND_TEST(none, k == KIND_NONE)
KIND_TEST(string, k == KIND_STRING)
KIND_TEST(number, k == KIND_INT || k == KIND_FLOAT || k == KIND_BOOL)
KIND_TEST(integer, k == KIND_INT)
KIND_TEST(float, k == KIND_FLOAT)
KIND_TEST(boolean, k == KIND_BOOL)
KIND_TEST(true, json_is_true(self))
KIND_TEST(false, json_is_false(self))
KIND_TEST(mapping, k == KIND_DICT)
KIND_TEST(sequence, k == KIND_LIST || k == KIND_STRING || k == KIND_DICT || k == KIND_UNDEFINED)
KIND_TEST(iterable, k == KIND_LIST || k == KIND_STRING || k == KIND_DICT || k == KIND_UNDEFINED)
KIND_TEST(callable, k == KIND_FUNCTION || k == KIND_UNDEFINED)

/* Identity: of JSON's constants and of the very same value. Equal strings and small numbers are one object in Python at times,
 * and never surely: here they are the same only as constants are. */
static json_t *t_sameas(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    (void)r;
    (void)at;
    return jinja_bool(self == slot[0]);
}

#define COMPARE_TEST(id, op)                                                                   \
    static json_t *t_##id(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) { \
        return jinja_compare(r, at->line, op, self, slot[0]);                                  \
    }

COMPARE_TEST(eq, JINJA_OP2('=', '='))
COMPARE_TEST(ne, JINJA_OP2('!', '='))
COMPARE_TEST(lt, '<')
COMPARE_TEST(gt, '>')
COMPARE_TEST(le, JINJA_OP2('<', '='))
COMPARE_TEST(ge, JINJA_OP2('>', '='))
COMPARE_TEST(in, JINJA_OP_IN)

static json_t *remainder_is(jinja_run_t *r, const jinja_ex_t *at, const json_t *self, json_int_t by, int wanted) {
    json_int_t i;
    if (!jinja_integer(r, self, &i)) return wrong_type(r, at, "a test of divisibility", self);
    if (by == 0) return jinja_fail(r, at->line, EPX_ERR_ARG, "division by zero");
    if (by == -1) by = 1;
    return jinja_bool((i % by == 0) == wanted);
}
static json_t *t_even(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    (void)slot;
    return remainder_is(r, at, self, 2, 1);
}
static json_t *t_odd(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    (void)slot;
    return remainder_is(r, at, self, 2, 0);
}
static json_t *t_divisibleby(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    json_int_t by;
    if (!jinja_integer(r, slot[0], &by)) return wrong_type(r, at, "divisibleby", slot[0]);
    return remainder_is(r, at, self, by, 1);
}

const jinja_fn_t *jinja_find_test(const char *name) {
    static const jinja_fn_t table[] = {{"defined", t_defined, 0, {NULL}},
                                       {"undefined", t_undefined, 0, {NULL}},
                                       {"none", t_none, 0, {NULL}},
                                       {"string", t_string, 0, {NULL}},
                                       {"number", t_number, 0, {NULL}},
                                       {"integer", t_integer, 0, {NULL}},
                                       {"float", t_float, 0, {NULL}},
                                       {"boolean", t_boolean, 0, {NULL}},
                                       {"true", t_true, 0, {NULL}},
                                       {"false", t_false, 0, {NULL}},
                                       {"mapping", t_mapping, 0, {NULL}},
                                       {"sequence", t_sequence, 0, {NULL}},
                                       {"iterable", t_iterable, 0, {NULL}},
                                       {"callable", t_callable, 0, {NULL}},
                                       {"sameas", t_sameas, 1, {"other"}},
                                       {"equalto", t_eq, 1, {"other"}},
                                       {"eq", t_eq, 1, {"other"}},
                                       {"==", t_eq, 1, {"other"}},
                                       {"ne", t_ne, 1, {"other"}},
                                       {"!=", t_ne, 1, {"other"}},
                                       {"lt", t_lt, 1, {"other"}},
                                       {"lessthan", t_lt, 1, {"other"}},
                                       {"<", t_lt, 1, {"other"}},
                                       {"gt", t_gt, 1, {"other"}},
                                       {"greaterthan", t_gt, 1, {"other"}},
                                       {">", t_gt, 1, {"other"}},
                                       {"le", t_le, 1, {"other"}},
                                       {"<=", t_le, 1, {"other"}},
                                       {"ge", t_ge, 1, {"other"}},
                                       {">=", t_ge, 1, {"other"}},
                                       {"in", t_in, 1, {"seq"}},
                                       {"even", t_even, 0, {NULL}},
                                       {"odd", t_odd, 0, {NULL}},
                                       {"divisibleby", t_divisibleby, 1, {"num"}}};
    size_t i;
    for (i = 0; i < sizeof table / sizeof *table; i++) {
        if (strcmp(table[i].name, name) == 0) return &table[i];
    }
    return NULL;
}

/* ---- global functions ---- */

static json_t *g_namespace(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    json_t **p;
    (void)slot;
    if (r->n_ns == JINJA_MAX_NAMESPACES)
        return jinja_fail(r, at->line, EPX_ERR_CAPACITY, "more than %d namespaces", JINJA_MAX_NAMESPACES);
    if (r->n_ns == r->cap_ns) {
        p = realloc(r->ns, (r->cap_ns * 2 + 4) * sizeof *p);
        if (p == NULL) return jinja_fail(r, at->line, EPX_ERR_NOMEM, "no memory for a namespace");
        r->ns = p;
        r->cap_ns = r->cap_ns * 2 + 4;
    }
    return r->ns[r->n_ns++] = json_incref(self);
}

static json_t *g_dict(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    (void)r;
    (void)at;
    (void)slot;
    return self;
}

static json_t *g_range(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    json_int_t n[3] = {0, 0, 1}, i;
    json_t *out = jinja_pool(r, json_array()), *v;
    int k;
    (void)self;
    for (k = 0; k < 3; k++) {
        if (slot[k] && !jinja_integer(r, slot[k], &n[k])) return wrong_type(r, at, "range", slot[k]);
        if (n[k] > (1 << 30) || n[k] < -(1 << 30)) return jinja_fail(r, at->line, EPX_ERR_CAPACITY, "range beyond 2**30");
    }
    if (slot[1] == NULL) {
        n[1] = n[0];
        n[0] = 0;
    }
    if (n[2] == 0) return jinja_fail(r, at->line, EPX_ERR_ARG, "range: step is 0");
    for (i = n[0]; out && (n[2] > 0 ? i < n[1] : i > n[1]); i += n[2]) {
        v = jinja_pool(r, json_integer(i));
        if (v == NULL || !jinja_list_add(r, at->line, out, v)) return NULL;
    }
    return out;
}

static json_t *g_raise(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    (void)self;
    if (jinja_kind(r, slot[0]) == KIND_STRING) {
        if (r->status == EPX_OK) r->status = epx_fail(EPX_ERR_ARG, "chat template: %s", json_string_value(slot[0]));
        return NULL;
    }
    return jinja_fail(r, at->line, EPX_ERR_ARG, "raise_exception");
}

/* The one look at a clock: local time, as datetime.now().strftime() gives it. */
static json_t *g_strftime_now(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    char text[256];
    struct tm tm;
    time_t now = time(NULL);
    size_t n;
    (void)self;
    if (jinja_kind(r, slot[0]) != KIND_STRING) return wrong_type(r, at, "strftime_now", slot[0]);
    if (localtime_r(&now, &tm) == NULL) return jinja_fail(r, at->line, EPX_ERR_OS, "no local time");
    n = strftime(text, sizeof text, json_string_value(slot[0]), &tm);
    if (n == 0 && json_string_length(slot[0])) return jinja_fail(r, at->line, EPX_ERR_CAPACITY, "strftime_now: over 255 bytes");
    return jinja_string(r, at->line, text, n);
}

const jinja_fn_t *jinja_find_global(const char *name) {
    static const jinja_fn_t table[] = {{"namespace", g_namespace, 0, {"**"}},
                                       {"dict", g_dict, 0, {"**"}},
                                       {"range", g_range, 1, {"start", "stop", "step"}},
                                       {"raise_exception", g_raise, 1, {"message"}},
                                       {"strftime_now", g_strftime_now, 1, {"format"}}};
    size_t i;
    for (i = 0; i < sizeof table / sizeof *table; i++) {
        if (strcmp(table[i].name, name) == 0) return &table[i];
    }
    return NULL;
}
