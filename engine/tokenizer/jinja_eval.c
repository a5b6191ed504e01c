/* Evaluation of expressions. Results are borrowed (pool, variable, literal or part of a value); NULL means r->status is set. */
#include <math.h>
#include <string.h>

#include "engine/tokenizer/jinja.h"
#include "engine/tokenizer/utf8.h"

static json_t *type_error(jinja_run_t *r, int line, const char *what, const json_t *a, const json_t *b) {
    return jinja_fail(r, line, EPX_ERR_ARG, "%s does not work on %s and %s", what, jinja_type_name(r, a), jinja_type_name(r, b));
}

static const char *name_of(const jinja_ex_t *e) { return e->name ? e->name : "value"; }

/* ---- names, attributes, items ---- */

static json_t *eval_name(jinja_run_t *r, const jinja_ex_t *e) {
    const jinja_frame_t *f;
    size_t i;
    for (f = r->top; f; f = f->parent) {
        for (i = 0; i < f->n; i++) {
            if (strcmp(f->var[i].name, e->name) == 0) return f->var[i].value;
        }
        if (f->loop && strcmp(e->name, "loop") == 0)
            return jinja_fail(r, e->line, EPX_ERR_UNSUPPORTED, "loop as a value; loop.index and the like are supported");
    }
    return jinja_find_global(e->name) ? r->function : r->undefined;
}

static json_t *eval_loop(jinja_run_t *r, const jinja_ex_t *e) {
    const jinja_frame_t *f = r->top;
    json_int_t at, n;
    while (f && f->loop == NULL) f = f->parent;
    if (f == NULL) return jinja_fail(r, e->line, EPX_ERR_ARG, "'loop' is undefined");
    at = (json_int_t)f->loop->at;
    n = (json_int_t)json_array_size(f->loop->items);
    if (strcmp(e->name, "index0") == 0) return jinja_pool(r, json_integer(at));
    if (strcmp(e->name, "index") == 0) return jinja_pool(r, json_integer(at + 1));
    if (strcmp(e->name, "revindex0") == 0) return jinja_pool(r, json_integer(n - at - 1));
    if (strcmp(e->name, "revindex") == 0) return jinja_pool(r, json_integer(n - at));
    if (strcmp(e->name, "length") == 0) return jinja_pool(r, json_integer(n));
    if (strcmp(e->name, "first") == 0) return jinja_bool(at == 0);
    if (strcmp(e->name, "last") == 0) return jinja_bool(at == n - 1);
    if (strcmp(e->name, "previtem") == 0) return at ? json_array_get(f->loop->items, (size_t)at - 1) : r->undefined;
    if (strcmp(e->name, "nextitem") == 0) return at + 1 < n ? json_array_get(f->loop->items, (size_t)at + 1) : r->undefined;
    return jinja_fail(r, e->line, EPX_ERR_UNSUPPORTED, "loop.%s", e->name);
}

static json_t *member_or_undefined(jinja_run_t *r, const json_t *obj, const char *name, size_t n_bytes) {
    json_t *v = json_object_getn(obj, name, n_bytes);
    return v ? v : r->undefined;
}

json_t *jinja_get_attr(jinja_run_t *r, const jinja_ex_t *at, json_t *obj, const char *name) {
    switch (jinja_kind(r, obj)) {
    case KIND_UNDEFINED:
        return jinja_fail(r, at->line, EPX_ERR_ARG, "attribute '%.60s' of an undefined value", name);
    case KIND_DICT:
        if (jinja_is_dict_attribute(name)) return r->function;
        return member_or_undefined(r, obj, name, strlen(name));
    case KIND_NAMESPACE:
        return member_or_undefined(r, obj, name, strlen(name));
    case KIND_STRING:
        return jinja_find_str_method(name) ? r->function : r->undefined;
    default:
        return r->undefined;
    }
}

/* Character i of a string, counted from the end when negative. */
static json_t *char_at(jinja_run_t *r, int line, const json_t *s, json_int_t i) {
    const char *p = json_string_value(s);
    json_int_t n = (json_int_t)jinja_n_chars(s);
    size_t pos = 0, len;
    if (i < 0) i += n;
    if (i < 0 || i >= n) return r->undefined;
    if (!jinja_spend(r, line, (size_t)n / JINJA_BYTES_PER_STEP)) return NULL;
    for (;; i--) {
        epx_utf8_decode(p + pos, &len);
        if (i == 0) return jinja_string(r, line, p + pos, len);
        pos += len;
    }
}

static json_t *get_item(jinja_run_t *r, const jinja_ex_t *e, json_t *obj, json_t *key) {
    jinja_kind_t k = jinja_kind(r, obj);
    json_int_t i;
    if (k == KIND_UNDEFINED)
        return jinja_fail(r, e->line, EPX_ERR_ARG, "item of '%.60s', which is undefined", name_of(e->arg[0]));
    if (jinja_kind(r, key) == KIND_STRING) {
        if (k == KIND_DICT || k == KIND_NAMESPACE)
            return member_or_undefined(r, obj, json_string_value(key), json_string_length(key));
        return jinja_get_attr(r, e, obj, json_string_value(key));
    }
    if (!jinja_integer(r, key, &i)) return r->undefined;
    if (k == KIND_STRING) return char_at(r, e->line, obj, i);
    if (k != KIND_LIST) return r->undefined;
    if (i < 0) i += (json_int_t)json_array_size(obj);
    if (i < 0 || (size_t)i >= json_array_size(obj)) return r->undefined;
    return json_array_get(obj, (size_t)i);
}

static json_t *eval_item(jinja_run_t *r, const jinja_ex_t *e) {
    json_t *obj = jinja_eval(r, e->arg[0]), *key = obj ? jinja_eval(r, e->arg[1]) : NULL;
    return key ? get_item(r, e, obj, key) : NULL;
}

/* ---- slices ---- */

/* A bound of a slice; 0 when the error is set. *given stays 0 when left out or None. */
static int slice_bound(jinja_run_t *r, const jinja_ex_t *e, json_int_t *out, int *given) {
    json_t *v;
    *given = 0;
    if (e == NULL) return 1;
    v = jinja_eval(r, e);
    if (v == NULL) return 0;
    if (jinja_kind(r, v) == KIND_NONE) return 1;
    *given = 1;
    if (jinja_integer(r, v, out)) return 1;
    jinja_fail(r, e->line, EPX_ERR_ARG, "slice bound of type %s; an integer expected", jinja_type_name(r, v));
    return 0;
}

static json_int_t clamp(json_int_t i, json_int_t n, json_int_t lo, json_int_t hi) {
    if (i < 0) i = i < -n ? lo : i + n;
    return i < lo ? lo : i > hi ? hi : i;
}

/* Python's slice.indices(n): begin, end and step. 0 when the error is set. */
static int slice_range(jinja_run_t *r, const jinja_ex_t *e, json_int_t n, json_int_t at[3]) {
    int have_begin, have_end, have_step;
    json_int_t lo, hi;
    if (!slice_bound(r, e->arg[1], &at[0], &have_begin) || !slice_bound(r, e->arg[2], &at[1], &have_end) ||
        !slice_bound(r, e->arg[3], &at[2], &have_step))
        return 0;
    if (!have_step) at[2] = 1;
    if (at[2] == 0) {
        jinja_fail(r, e->line, EPX_ERR_ARG, "slice step is 0");
        return 0;
    }
    lo = at[2] < 0 ? -1 : 0;
    hi = at[2] < 0 ? n - 1 : n;
    at[0] = have_begin ? clamp(at[0], n, lo, hi) : at[2] < 0 ? hi : lo;
    at[1] = have_end ? clamp(at[1], n, lo, hi) : at[2] < 0 ? lo : hi;
    if (at[2] > n) at[2] = n + 1; /* one step leaves the list either way; keeps the sum in range */
    if (at[2] < -n) at[2] = -n - 1;
    return 1;
}

static json_t *join_chars(jinja_run_t *r, int line, const json_t *chars) {
    epx_str_t s = {0};
    json_t *c, *out = NULL;
    size_t i;
    epx_status_t st = EPX_OK;
    json_array_foreach(chars, i, c) {
        st = epx_str_append(&s, json_string_value(c), json_string_length(c));
        if (st < 0) break;
    }
    if (st < 0) r->status = st;
    else out = jinja_string(r, line, s.data, s.n_bytes);
    epx_str_fini(&s);
    return out;
}

static json_t *eval_slice(jinja_run_t *r, const jinja_ex_t *e) {
    json_t *obj = jinja_eval(r, e->arg[0]), *items, *out;
    jinja_kind_t k;
    json_int_t at[3], i;
    if (obj == NULL) return NULL;
    k = jinja_kind(r, obj);
    if (k != KIND_LIST && k != KIND_STRING)
        return jinja_fail(r, e->line, EPX_ERR_ARG, "a slice of %s; list or str expected", jinja_type_name(r, obj));
    items = jinja_iterate(r, e->line, obj);
    if (items == NULL || !slice_range(r, e, (json_int_t)json_array_size(items), at)) return NULL;
    out = jinja_pool(r, json_array());
    for (i = at[0]; out && (at[2] > 0 ? i < at[1] : i > at[1]); i += at[2]) {
        if (!jinja_list_add(r, e->line, out, json_array_get(items, (size_t)i))) return NULL;
    }
    return out && k == KIND_STRING ? join_chars(r, e->line, out) : out;
}

/* ---- arithmetic ---- */

static json_t *overflow(jinja_run_t *r, int line) {
    return jinja_fail(r, line, EPX_ERR_UNSUPPORTED, "an integer beyond 64 bits");
}

static json_t *power(jinja_run_t *r, int line, json_int_t a, json_int_t b) {
    json_int_t v = 1;
    if (b < 0)
        return a ? jinja_pool(r, json_real(pow((double)a, (double)b)))
                 : jinja_fail(r, line, EPX_ERR_ARG, "0 to a negative power");
    if (a == 0 || a == 1) return jinja_pool(r, json_integer(b ? a : 1));
    if (a == -1) return jinja_pool(r, json_integer(b % 2 ? -1 : 1));
    for (; b > 0; b--) {
        if (__builtin_mul_overflow(v, a, &v)) return overflow(r, line);
    }
    return jinja_pool(r, json_integer(v));
}

/* Python rounds towards minus infinity, and the remainder has the sign of the divisor. */
static json_t *divide(jinja_run_t *r, int line, int op, json_int_t a, json_int_t b) {
    json_int_t q;
    if (b == 0) return jinja_fail(r, line, EPX_ERR_ARG, "division by zero");
    if (b == -1) {
        if (op == '%') return jinja_pool(r, json_integer(0));
        return a == INT64_MIN ? overflow(r, line) : jinja_pool(r, json_integer(-a));
    }
    q = a / b;
    if (a % b != 0 && ((a % b < 0) != (b < 0))) q--;
    return jinja_pool(r, json_integer(op == '%' ? a - q * b : q));
}

static json_t *integer_op(jinja_run_t *r, int line, int op, json_int_t a, json_int_t b) {
    json_int_t v = 0;
    int bad = 0;
    if (op == '+') bad = __builtin_add_overflow(a, b, &v);
    else if (op == '-') bad = __builtin_sub_overflow(a, b, &v);
    else if (op == '*') bad = __builtin_mul_overflow(a, b, &v);
    else if (op == JINJA_OP2('*', '*')) return power(r, line, a, b);
    else return divide(r, line, op, a, b);
    return bad ? overflow(r, line) : jinja_pool(r, json_integer(v));
}

static json_t *real(jinja_run_t *r, int line, double d) {
    if (isnan(d) || isinf(d)) return jinja_fail(r, line, EPX_ERR_UNSUPPORTED, "a number that is not finite");
    return jinja_pool(r, json_real(d));
}

static json_t *float_op(jinja_run_t *r, int line, int op, double a, double b) {
    double m;
    switch (op) {
    case '+':
        return real(r, line, a + b);
    case '-':
        return real(r, line, a - b);
    case '*':
        return real(r, line, a * b);
    case JINJA_OP2('*', '*'):
        return real(r, line, pow(a, b));
    default:
        break;
    }
    if (b == 0) return jinja_fail(r, line, EPX_ERR_ARG, "division by zero");
    if (op == '/') return real(r, line, a / b);
    m = fmod(a, b);
    if (m != 0 && (m < 0) != (b < 0)) m += b;
    return real(r, line, op == '%' ? m : floor((a - m) / b + 0.5));
}

static json_t *concat(jinja_run_t *r, int line, const json_t *a, const json_t *b) {
    size_t n = json_string_length(a), m = json_string_length(b);
    epx_str_t s = {0};
    json_t *out = NULL;
    epx_status_t st;
    if (n + m > JINJA_MAX_STRING_BYTES) return jinja_fail(r, line, EPX_ERR_CAPACITY, "a string of more than 16 MiB");
    st = epx_str_append(&s, json_string_value(a), n);
    if (st == EPX_OK) st = epx_str_append(&s, json_string_value(b), m);
    if (st < 0) r->status = st;
    else out = jinja_string(r, line, s.data, s.n_bytes);
    epx_str_fini(&s);
    return out;
}

static int extend(jinja_run_t *r, int line, json_t *out, const json_t *list) {
    size_t i;
    json_t *v;
    json_array_foreach(list, i, v) {
        if (!jinja_list_add(r, line, out, v)) return 0;
    }
    return 1;
}

static json_t *repeat(jinja_run_t *r, int line, json_t *v, json_int_t times) {
    json_t *out = jinja_kind(r, v) == KIND_LIST ? jinja_pool(r, json_array()) : NULL;
    epx_str_t s = {0};
    size_t n = json_string_length(v);
    if (out) {
        if (json_array_size(v) == 0) return out;
        for (; times > 0; times--) {
            if (!extend(r, line, out, v)) return NULL;
        }
        return out;
    }
    if (r->status < 0) return NULL;
    if (times > 0 && n > JINJA_MAX_STRING_BYTES / (size_t)times)
        return jinja_fail(r, line, EPX_ERR_CAPACITY, "a string of more than 16 MiB");
    if (n == 0) times = 0;
    for (; times > 0 && r->status == EPX_OK; times--) {
        epx_status_t st = epx_str_append(&s, json_string_value(v), n);
        if (st < 0) r->status = st;
    }
    out = r->status < 0 ? NULL : jinja_string(r, line, s.data, s.n_bytes);
    epx_str_fini(&s);
    return out;
}

static json_t *eval_binary(jinja_run_t *r, const jinja_ex_t *e) {
    json_t *a = jinja_eval(r, e->arg[0]), *b = a ? jinja_eval(r, e->arg[1]) : NULL, *out;
    jinja_kind_t k, l;
    json_int_t i, j;
    double x, y;
    char name[3] = {(char)(e->op > 255 ? e->op >> 8 : e->op), (char)(e->op > 255 ? e->op & 255 : 0), 0};
    if (b == NULL) return NULL;
    if (e->op == '~') {
        a = jinja_to_string(r, e->line, a);
        b = a ? jinja_to_string(r, e->line, b) : NULL;
        return b ? concat(r, e->line, a, b) : NULL;
    }
    k = jinja_kind(r, a);
    l = jinja_kind(r, b);
    if (k == KIND_UNDEFINED || l == KIND_UNDEFINED)
        return jinja_fail(r, e->line, EPX_ERR_ARG, "%s: '%.60s' is undefined", name,
                          name_of(e->arg[k == KIND_UNDEFINED ? 0 : 1]));
    if (e->op != '/' && jinja_integer(r, a, &i) && jinja_integer(r, b, &j)) return integer_op(r, e->line, e->op, i, j);
    if (jinja_number(r, a, &x) && jinja_number(r, b, &y)) return float_op(r, e->line, e->op, x, y);
    if (e->op == '+' && k == KIND_STRING && l == KIND_STRING) return concat(r, e->line, a, b);
    if (e->op == '+' && k == KIND_LIST && l == KIND_LIST) {
        out = jinja_pool(r, json_array());
        return out && extend(r, e->line, out, a) && extend(r, e->line, out, b) ? out : NULL;
    }
    if (e->op == '*' && (k == KIND_STRING || k == KIND_LIST) && jinja_integer(r, b, &j)) return repeat(r, e->line, a, j);
    if (e->op == '*' && (l == KIND_STRING || l == KIND_LIST) && jinja_integer(r, a, &i)) return repeat(r, e->line, b, i);
    if (e->op == '%' && k == KIND_STRING) return jinja_fail(r, e->line, EPX_ERR_UNSUPPORTED, "%% formatting of a string");
    return type_error(r, e->line, name, a, b);
}

static json_t *eval_sign(jinja_run_t *r, const jinja_ex_t *e) {
    json_t *v = jinja_eval(r, e->arg[0]);
    json_int_t i;
    if (v == NULL) return NULL;
    if (jinja_integer(r, v, &i)) return integer_op(r, e->line, e->kind == EX_NEG ? '-' : '+', 0, i);
    if (jinja_kind(r, v) == KIND_FLOAT)
        return jinja_pool(r, json_real(e->kind == EX_NEG ? -json_real_value(v) : json_real_value(v)));
    return jinja_fail(r, e->line, EPX_ERR_ARG, "a sign before a value of type %s", jinja_type_name(r, v));
}

/* ---- comparison ---- */

static int compare_strings(const json_t *a, const json_t *b) {
    size_t n = json_string_length(a), m = json_string_length(b);
    int c = memcmp(json_string_value(a), json_string_value(b), n < m ? n : m);
    return c ? c : (n > m) - (n < m);
}

static json_t *contains(jinja_run_t *r, int line, json_t *needle, json_t *hay) {
    jinja_kind_t k = jinja_kind(r, hay);
    json_t *v;
    size_t i;
    if (k == KIND_UNDEFINED) return json_false();
    if (k == KIND_STRING) {
        if (jinja_kind(r, needle) != KIND_STRING) return type_error(r, line, "in", needle, hay);
        if (!jinja_spend(r, line, json_string_length(hay) / JINJA_BYTES_PER_STEP)) return NULL;
        return jinja_bool(memmem(json_string_value(hay), json_string_length(hay), json_string_value(needle),
                                 json_string_length(needle)) != NULL);
    }
    if (k == KIND_DICT)
        return jinja_bool(json_is_string(needle) &&
                          json_object_getn(hay, json_string_value(needle), json_string_length(needle)) != NULL);
    if (k != KIND_LIST) return type_error(r, line, "in", needle, hay);
    json_array_foreach(hay, i, v) {
        if (jinja_equal(r, v, needle)) return json_true();
        if (r->status < 0) return NULL;
    }
    return json_false();
}

json_t *jinja_compare(jinja_run_t *r, int line, int op, json_t *a, json_t *b) {
    double x, y;
    json_int_t i, j;
    int c;
    if (op == JINJA_OP2('=', '=') || op == JINJA_OP2('!', '=')) {
        c = jinja_equal(r, a, b);
        return r->status < 0 ? NULL : jinja_bool(c == (op == JINJA_OP2('=', '=')));
    }
    if (op == JINJA_OP_IN) return contains(r, line, a, b);
    if (op == JINJA_OP_NOT_IN) {
        a = contains(r, line, a, b);
        return a ? jinja_bool(!json_is_true(a)) : NULL;
    }
    if (jinja_integer(r, a, &i) && jinja_integer(r, b, &j)) {
        c = (i > j) - (i < j);
    } else if (jinja_number(r, a, &x) && jinja_number(r, b, &y)) {
        c = (x > y) - (x < y);
    } else if (jinja_kind(r, a) == KIND_STRING && jinja_kind(r, b) == KIND_STRING) {
        if (!jinja_spend(r, line, json_string_length(a) / JINJA_BYTES_PER_STEP)) return NULL;
        c = compare_strings(a, b);
    } else {
        return type_error(r, line, "order comparison", a, b);
    }
    if (op == '<') return jinja_bool(c < 0);
    if (op == '>') return jinja_bool(c > 0);
    return jinja_bool(op == JINJA_OP2('<', '=') ? c <= 0 : c >= 0);
}

static json_t *eval_compare(jinja_run_t *r, const jinja_ex_t *e) {
    json_t *left = jinja_eval(r, e->arg[0]), *right, *v = NULL;
    size_t i;
    for (i = 0; left && i + 1 < e->n_args; i++) {
        right = jinja_eval(r, e->arg[i + 1]);
        if (right == NULL) return NULL;
        v = jinja_compare(r, e->line, e->ops[i], left, right);
        if (v == NULL || !json_is_true(v)) return v;
        left = right;
    }
    return left ? v : NULL;
}

/* ---- calls and the rest ---- */

/* Place of argument i of e among fn's parameters; -1 and the error set when there is none. */
static int slot_of(jinja_run_t *r, const jinja_ex_t *e, size_t i, size_t position) {
    const jinja_fn_t *fn = e->fn;
    const char *keyword = e->keyword ? e->keyword[i] : NULL;
    int k;
    for (k = 0; k < JINJA_MAX_ARGS && fn->param[k]; k++) {
        if (keyword ? strcmp(keyword, fn->param[k]) == 0 : (size_t)k == position) return k;
    }
    if (keyword) jinja_fail(r, e->line, EPX_ERR_UNSUPPORTED, "%s: argument %.60s", fn->name, keyword);
    else jinja_fail(r, e->line, EPX_ERR_UNSUPPORTED, "%s: more than %d arguments", fn->name, k);
    return -1;
}

static int bind(jinja_run_t *r, const jinja_ex_t *e, size_t first, json_t **slot) {
    size_t i;
    int k;
    for (i = first; i < e->n_args; i++) {
        k = slot_of(r, e, i, i - first);
        if (k < 0) return 0;
        if (slot[k]) {
            jinja_fail(r, e->line, EPX_ERR_ARG, "%s: argument %s given twice", e->fn->name, e->fn->param[k]);
            return 0;
        }
        if ((slot[k] = jinja_eval(r, e->arg[i])) == NULL) return 0;
    }
    for (k = 0; k < e->fn->n_required; k++) {
        if (slot[k]) continue;
        jinja_fail(r, e->line, EPX_ERR_ARG, "%s: argument %s is missing", e->fn->name, e->fn->param[k]);
        return 0;
    }
    return 1;
}

/* namespace(a=1) and dict(a=1): any keyword. */
static json_t *eval_keywords(jinja_run_t *r, const jinja_ex_t *e) {
    json_t *o = jinja_pool(r, json_object()), *v;
    size_t i;
    for (i = 0; o && i < e->n_args; i++) {
        if (e->keyword[i] == NULL)
            return jinja_fail(r, e->line, EPX_ERR_UNSUPPORTED, "%s: arguments without a name", e->fn->name);
        v = jinja_eval(r, e->arg[i]);
        if (v == NULL || !jinja_may_nest(r, e->line, v)) return NULL;
        if (json_object_set(o, e->keyword[i], v) < 0) return jinja_fail(r, e->line, EPX_ERR_NOMEM, "no memory for a dict");
    }
    return o;
}

static json_t *eval_call(jinja_run_t *r, const jinja_ex_t *e) {
    json_t *slot[JINJA_MAX_ARGS] = {NULL}, *self = NULL;
    if (e->fn->param[0] && strcmp(e->fn->param[0], "**") == 0) {
        self = eval_keywords(r, e);
        return self ? e->fn->call(r, e, self, slot) : NULL;
    }
    return bind(r, e, 0, slot) ? e->fn->call(r, e, NULL, slot) : NULL;
}

static json_t *eval_method(jinja_run_t *r, const jinja_ex_t *e) {
    json_t *slot[JINJA_MAX_ARGS] = {NULL}, *self = jinja_eval(r, e->arg[0]);
    const jinja_fn_t *fn;
    jinja_ex_t call;
    jinja_kind_t k;
    if (self == NULL) return NULL;
    k = jinja_kind(r, self);
    if (k == KIND_UNDEFINED)
        return jinja_fail(r, e->line, EPX_ERR_ARG, "method %s of '%.60s', which is undefined", e->name, name_of(e->arg[0]));
    fn = k == KIND_STRING ? jinja_find_str_method(e->name) : k == KIND_DICT ? jinja_find_dict_method(e->name) : NULL;
    if (fn == NULL) return jinja_fail(r, e->line, EPX_ERR_ARG, "%s has no method %s", jinja_type_name(r, self), e->name);
    call = *e;
    call.fn = fn;
    return bind(r, &call, 1, slot) ? fn->call(r, e, self, slot) : NULL;
}

static json_t *eval_piped(jinja_run_t *r, const jinja_ex_t *e) {
    json_t *slot[JINJA_MAX_ARGS] = {NULL}, *self = jinja_eval(r, e->arg[0]);
    if (self == NULL || !bind(r, e, 1, slot)) return NULL;
    return e->fn->call(r, e, self, slot);
}

json_t *jinja_call_values(jinja_run_t *r, const jinja_ex_t *at, const jinja_fn_t *fn, json_t *self, json_t **value, size_t n) {
    json_t *slot[JINJA_MAX_ARGS] = {NULL};
    size_t i;
    for (i = 0; i < n && value[i]; i++) {
        if (i == JINJA_MAX_ARGS || fn->param[i] == NULL)
            return jinja_fail(r, at->line, EPX_ERR_ARG, "%s: more than %zu arguments", fn->name, i);
        slot[i] = value[i];
    }
    if (i < (size_t)fn->n_required)
        return jinja_fail(r, at->line, EPX_ERR_ARG, "%s: argument %s is missing", fn->name, fn->param[i]);
    return fn->call(r, at, self, slot);
}

static json_t *eval_list(jinja_run_t *r, const jinja_ex_t *e) {
    json_t *list = jinja_pool(r, json_array()), *v;
    size_t i;
    for (i = 0; list && i < e->n_args; i++) {
        v = jinja_eval(r, e->arg[i]);
        if (v == NULL || !jinja_may_nest(r, e->line, v) || !jinja_list_add(r, e->line, list, v)) return NULL;
    }
    return list;
}

static json_t *eval_dict(jinja_run_t *r, const jinja_ex_t *e) {
    json_t *o = jinja_pool(r, json_object()), *key, *v;
    size_t i;
    for (i = 0; o && i + 1 < e->n_args; i += 2) {
        key = jinja_eval(r, e->arg[i]);
        v = key ? jinja_eval(r, e->arg[i + 1]) : NULL;
        if (v == NULL || !jinja_may_nest(r, e->line, v)) return NULL;
        if (jinja_kind(r, key) != KIND_STRING)
            return jinja_fail(r, e->line, EPX_ERR_UNSUPPORTED, "a dict key of type %s; str expected", jinja_type_name(r, key));
        if (memchr(json_string_value(key), 0, json_string_length(key)))
            return jinja_fail(r, e->line, EPX_ERR_UNSUPPORTED, "a dict key with a NUL character");
        if (json_object_set_nocheck(o, json_string_value(key), v) < 0)
            return jinja_fail(r, e->line, EPX_ERR_NOMEM, "no memory for a dict");
    }
    return o;
}

static json_t *eval_logic(jinja_run_t *r, const jinja_ex_t *e) {
    json_t *v = jinja_eval(r, e->arg[0]);
    if (v == NULL) return NULL;
    if (e->kind == EX_NOT) return jinja_bool(!jinja_truth(r, v));
    return jinja_truth(r, v) == (e->kind == EX_OR) ? v : jinja_eval(r, e->arg[1]);
}

static json_t *eval_cond(jinja_run_t *r, const jinja_ex_t *e) {
    json_t *c = jinja_eval(r, e->arg[1]);
    if (c == NULL) return NULL;
    if (jinja_truth(r, c)) return jinja_eval(r, e->arg[0]);
    return e->arg[2] ? jinja_eval(r, e->arg[2]) : r->undefined;
}

static json_t *eval_attr(jinja_run_t *r, const jinja_ex_t *e) {
    json_t *obj = jinja_eval(r, e->arg[0]);
    if (obj == NULL) return NULL;
    if (jinja_kind(r, obj) == KIND_UNDEFINED)
        return jinja_fail(r, e->line, EPX_ERR_ARG, "attribute '%.60s' of '%.60s', which is undefined", e->name,
                          name_of(e->arg[0]));
    return jinja_get_attr(r, e, obj, e->name);
}

json_t *jinja_eval(jinja_run_t *r, const jinja_ex_t *e) {
    static json_t *(*const eval[])(jinja_run_t *, const jinja_ex_t *) = {
        [EX_NAME] = eval_name,   [EX_LOOP_ATTR] = eval_loop, [EX_ATTR] = eval_attr,      [EX_ITEM] = eval_item,
        [EX_SLICE] = eval_slice, [EX_CALL] = eval_call,      [EX_METHOD] = eval_method,  [EX_FILTER] = eval_piped,
        [EX_TEST] = eval_piped,  [EX_LIST] = eval_list,      [EX_DICT] = eval_dict,      [EX_NEG] = eval_sign,
        [EX_POS] = eval_sign,    [EX_NOT] = eval_logic,      [EX_AND] = eval_logic,      [EX_OR] = eval_logic,
        [EX_COND] = eval_cond,   [EX_BINARY] = eval_binary,  [EX_COMPARE] = eval_compare};
    if (!jinja_spend(r, e->line, 1)) return NULL;
    return e->kind == EX_LITERAL ? e->literal : eval[e->kind](r, e);
}
