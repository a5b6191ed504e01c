/* Run-time values of the chat templates: kinds, truth, equality, the pool, and limits. Python's rules. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/tokenizer/jinja.h"
#include "engine/tokenizer/utf8.h"

json_t *jinja_fail(jinja_run_t *r, int line, epx_status_t s, const char *fmt, ...) {
    char text[512];
    va_list ap;
    if (r->status < 0) return NULL; /* the first failure counts */
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    r->status = epx_fail(s, "chat template, line %d: %s", line, text);
    return NULL;
}

int jinja_spend(jinja_run_t *r, int line, size_t n) {
    if (n > (size_t)r->steps_left) {
        jinja_fail(r, line, EPX_ERR_CAPACITY, "more than %d evaluation steps", JINJA_MAX_STEPS);
        return 0;
    }
    r->steps_left -= (int64_t)n;
    return 1;
}

json_t *jinja_pool(jinja_run_t *r, json_t *value) {
    if (value && r->n_pool == r->cap_pool) {
        size_t cap = r->cap_pool ? r->cap_pool * 2 : 64;
        json_t **p = realloc(r->pool, cap * sizeof *p);
        if (p == NULL) {
            json_decref(value);
            value = NULL;
        } else {
            r->pool = p;
            r->cap_pool = cap;
        }
    }
    if (value == NULL) return jinja_fail(r, 0, EPX_ERR_NOMEM, "no memory for a value");
    return r->pool[r->n_pool++] = value;
}

static int is_namespace(const jinja_run_t *r, const json_t *v) {
    size_t i;
    for (i = 0; i < r->n_ns; i++) {
        if (r->ns[i] == v) return 1;
    }
    return 0;
}

jinja_kind_t jinja_kind(const jinja_run_t *r, const json_t *v) {
    if (v == r->undefined) return KIND_UNDEFINED;
    if (v == r->function) return KIND_FUNCTION;
    switch (json_typeof(v)) {
    case JSON_NULL:
        return KIND_NONE;
    case JSON_TRUE:
    case JSON_FALSE:
        return KIND_BOOL;
    case JSON_INTEGER:
        return KIND_INT;
    case JSON_REAL:
        return KIND_FLOAT;
    case JSON_STRING:
        return KIND_STRING;
    case JSON_ARRAY:
        return KIND_LIST;
    default:
        return is_namespace(r, v) ? KIND_NAMESPACE : KIND_DICT;
    }
}

const char *jinja_type_name(const jinja_run_t *r, const json_t *v) {
    static const char *const name[] = {"Undefined", "function", "NoneType", "bool", "int",
                                       "float",     "str",      "list",     "dict", "Namespace"};
    return name[jinja_kind(r, v)];
}

json_t *jinja_bool(int on) { return on ? json_true() : json_false(); }

json_t *jinja_string(jinja_run_t *r, int line, const char *text, size_t n_bytes) {
    if (n_bytes > JINJA_MAX_STRING_BYTES)
        return jinja_fail(r, line, EPX_ERR_CAPACITY, "string of %zu bytes; at most %zu", n_bytes, JINJA_MAX_STRING_BYTES);
    if (!jinja_spend(r, line, n_bytes / JINJA_BYTES_PER_STEP)) return NULL;
    return jinja_pool(r, json_stringn_nocheck(text ? text : "", n_bytes));
}

int jinja_truth(const jinja_run_t *r, const json_t *v) {
    switch (jinja_kind(r, v)) {
    case KIND_UNDEFINED:
    case KIND_NONE:
        return 0;
    case KIND_BOOL:
        return json_is_true(v);
    case KIND_INT:
        return json_integer_value(v) != 0;
    case KIND_FLOAT:
        return json_real_value(v) != 0.0;
    case KIND_STRING:
        return json_string_length(v) != 0;
    case KIND_LIST:
        return json_array_size(v) != 0;
    case KIND_DICT:
        return json_object_size(v) != 0;
    default:
        return 1;
    }
}

int jinja_integer(const jinja_run_t *r, const json_t *v, json_int_t *out) {
    jinja_kind_t k = jinja_kind(r, v);
    if (k != KIND_BOOL && k != KIND_INT) return 0;
    *out = k == KIND_BOOL ? json_is_true(v) : json_integer_value(v);
    return 1;
}

int jinja_number(const jinja_run_t *r, const json_t *v, double *out) {
    json_int_t i;
    if (jinja_kind(r, v) == KIND_FLOAT) {
        *out = json_real_value(v);
        return 1;
    }
    if (!jinja_integer(r, v, &i)) return 0;
    *out = (double)i;
    return 1;
}

static int equal_numbers(const jinja_run_t *r, const json_t *a, const json_t *b) {
    json_int_t i, j;
    double x, y;
    if (jinja_integer(r, a, &i) && jinja_integer(r, b, &j)) return i == j;
    return jinja_number(r, a, &x) && jinja_number(r, b, &y) && x == y;
}

static int equal_lists(jinja_run_t *r, const json_t *a, const json_t *b) {
    size_t i, n = json_array_size(a);
    if (n != json_array_size(b)) return 0;
    for (i = 0; i < n; i++) {
        if (!jinja_equal(r, json_array_get(a, i), json_array_get(b, i))) return 0;
    }
    return 1;
}

static int equal_dicts(jinja_run_t *r, const json_t *a, const json_t *b) {
    const char *key;
    size_t n;
    json_t *v, *w;
    if (json_object_size(a) != json_object_size(b)) return 0;
    json_object_keylen_foreach((json_t *)a, key, n, v) {
        w = json_object_getn(b, key, n);
        if (w == NULL || !jinja_equal(r, v, w)) return 0;
    }
    return 1;
}

int jinja_equal(jinja_run_t *r, const json_t *a, const json_t *b) {
    jinja_kind_t k = jinja_kind(r, a), l = jinja_kind(r, b);
    if (a == b) return 1;
    if (!jinja_spend(r, 0, 1 + (k == KIND_STRING ? json_string_length(a) / JINJA_BYTES_PER_STEP : 0))) return 0;
    if (k == KIND_BOOL || k == KIND_INT || k == KIND_FLOAT) return equal_numbers(r, a, b);
    if (k != l) return 0;
    if (k == KIND_STRING)
        return json_string_length(a) == json_string_length(b) &&
               memcmp(json_string_value(a), json_string_value(b), json_string_length(a)) == 0;
    if (k == KIND_LIST) return equal_lists(r, a, b);
    return k == KIND_DICT && equal_dicts(r, a, b);
}

size_t jinja_n_chars(const json_t *string) {
    const char *p = json_string_value(string);
    size_t i, n = 0, n_bytes = json_string_length(string);
    for (i = 0; i < n_bytes; i++) n += ((unsigned char)p[i] & 0xC0) != 0x80;
    return n;
}

int jinja_is_space(int32_t c) { return (c >= 0x1C && c <= 0x1F) || epx_utf8_is_space(c); }

/* Depth of v, at most `left` levels; -1 beyond. */
static int depth_within(jinja_run_t *r, const json_t *v, int left) {
    const char *key;
    json_t *w;
    size_t i;
    if (!json_is_array(v) && !json_is_object(v)) return 1;
    if (left == 0 || !jinja_spend(r, 0, 1)) return 0;
    if (json_is_array(v)) {
        json_array_foreach(v, i, w) {
            if (!depth_within(r, w, left - 1)) return 0;
        }
        return 1;
    }
    json_object_foreach((json_t *)v, key, w) {
        if (!depth_within(r, w, left - 1)) return 0;
    }
    return 1;
}

int jinja_may_nest(jinja_run_t *r, int line, const json_t *v) {
    if (jinja_kind(r, v) == KIND_NAMESPACE) {
        jinja_fail(r, line, EPX_ERR_UNSUPPORTED, "a namespace inside a list, dict or namespace");
        return 0;
    }
    if (depth_within(r, v, JINJA_MAX_VALUE_DEPTH)) return 1;
    jinja_fail(r, line, EPX_ERR_CAPACITY, "a value nested deeper than %d", JINJA_MAX_VALUE_DEPTH);
    return 0;
}

int jinja_list_add(jinja_run_t *r, int line, json_t *list, json_t *v) {
    if (!jinja_spend(r, line, 1)) return 0;
    if (json_array_size(list) >= JINJA_MAX_STRING_BYTES / 16) {
        jinja_fail(r, line, EPX_ERR_CAPACITY, "a list of more than %zu items", JINJA_MAX_STRING_BYTES / 16);
        return 0;
    }
    if (json_array_append(list, v) == 0) return 1;
    jinja_fail(r, line, EPX_ERR_NOMEM, "no memory for a list");
    return 0;
}
