/* Methods of str and dict, as Python has them, and the filters that are the same functions. */
#include <string.h>

#include <utf8proc.h>

#include "engine/tokenizer/jinja.h"
#include "engine/tokenizer/utf8.h"

/* ---- helpers ---- */

static json_t *want_string(jinja_run_t *r, const jinja_ex_t *at, json_t *v, const char *what) {
    if (jinja_kind(r, v) == KIND_STRING) return v;
    return jinja_fail(r, at->line, EPX_ERR_ARG, "%s: %s; a string expected", what, jinja_type_name(r, v));
}

/* Finish a string built in s. */
static json_t *take(jinja_run_t *r, int line, epx_str_t *s, epx_status_t st) {
    json_t *out = NULL;
    if (st < 0 && r->status == EPX_OK) r->status = st;
    if (r->status == EPX_OK) out = jinja_string(r, line, s->data, s->n_bytes);
    epx_str_fini(s);
    return out;
}

static int in_set(const json_t *chars, const char *c, size_t len) {
    const char *p = json_string_value(chars);
    size_t i, n, size = json_string_length(chars);
    for (i = 0; i < size; i += n) {
        epx_utf8_decode(p + i, &n);
        if (n == len && memcmp(p + i, c, len) == 0) return 1;
    }
    return 0;
}

enum { LEFT = 1, RIGHT = 2 };

/* chars NULL: white space. */
static json_t *strip(jinja_run_t *r, int line, json_t *s, const json_t *chars, int sides) {
    const char *p = json_string_value(s);
    size_t begin = 0, end = json_string_length(s), len;
    if (!jinja_spend(r, line, end / JINJA_BYTES_PER_STEP * (1 + json_string_length(chars) / 16))) return NULL;
    while ((sides & LEFT) && begin < end) {
        int32_t c = epx_utf8_decode(p + begin, &len);
        if (chars ? !in_set(chars, p + begin, len) : !jinja_is_space(c)) break;
        begin += len;
    }
    while ((sides & RIGHT) && begin < end) {
        size_t prev = epx_utf8_back(p, end);
        int32_t c = epx_utf8_decode(p + prev, &len);
        if (chars ? !in_set(chars, p + prev, len) : !jinja_is_space(c)) break;
        end = prev;
    }
    return jinja_string(r, line, p + begin, end - begin);
}

static json_t *strip_method(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot, int sides) {
    json_t *chars = slot[0] && jinja_kind(r, slot[0]) != KIND_NONE ? slot[0] : NULL;
    if (chars && want_string(r, at, chars, "strip") == NULL) return NULL;
    if (chars && json_string_length(chars) > 256)
        return jinja_fail(r, at->line, EPX_ERR_UNSUPPORTED, "strip: more than 256 bytes of characters");
    return strip(r, at->line, self, chars, sides);
}

static json_t *m_strip(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    return strip_method(r, at, self, slot, LEFT | RIGHT);
}
static json_t *m_lstrip(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    return strip_method(r, at, self, slot, LEFT);
}
static json_t *m_rstrip(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    return strip_method(r, at, self, slot, RIGHT);
}

/* ---- beginnings and ends ---- */

static int affix_is(const json_t *s, const json_t *affix, int at_end) {
    size_t n = json_string_length(s), m = json_string_length(affix);
    return m <= n && memcmp(json_string_value(s) + (at_end ? n - m : 0), json_string_value(affix), m) == 0;
}

/* affix: a string or a list (tuple) of them. */
static json_t *has_affix(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t *affix, int at_end) {
    size_t i;
    json_t *a;
    if (jinja_kind(r, affix) == KIND_LIST) {
        json_array_foreach(affix, i, a) {
            if (want_string(r, at, a, at->name) == NULL) return NULL;
            if (affix_is(self, a, at_end)) return json_true();
        }
        return json_false();
    }
    if (want_string(r, at, affix, at->name) == NULL) return NULL;
    return jinja_bool(affix_is(self, affix, at_end));
}

static json_t *m_startswith(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    return has_affix(r, at, self, slot[0], 0);
}
static json_t *m_endswith(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    return has_affix(r, at, self, slot[0], 1);
}

/* ---- split, replace, find, join ---- */

static int add_part(jinja_run_t *r, int line, json_t *list, const char *p, size_t n) {
    json_t *s = jinja_string(r, line, p, n);
    return s && jinja_list_add(r, line, list, s);
}

static json_t *split_space(jinja_run_t *r, int line, json_t *list, const char *p, size_t n, json_int_t max) {
    size_t i = 0, begin, len;
    while (i < n) {
        if (jinja_is_space(epx_utf8_decode(p + i, &len))) {
            i += len;
            continue;
        }
        begin = i;
        if (max-- == 0) return add_part(r, line, list, p + begin, n - begin) ? list : NULL;
        while (i < n && !jinja_is_space(epx_utf8_decode(p + i, &len))) i += len;
        if (!add_part(r, line, list, p + begin, i - begin)) return NULL;
    }
    return list;
}

static json_t *split_at(jinja_run_t *r, int line, json_t *list, const char *p, size_t n, const json_t *sep, json_int_t max) {
    size_t m = json_string_length(sep);
    const char *end = p + n, *hit;
    while (max-- != 0 && (hit = memmem(p, (size_t)(end - p), json_string_value(sep), m)) != NULL) {
        if (!add_part(r, line, list, p, (size_t)(hit - p))) return NULL;
        p = hit + m;
    }
    return add_part(r, line, list, p, (size_t)(end - p)) ? list : NULL;
}

static json_t *m_split(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    json_t *list = jinja_pool(r, json_array());
    json_int_t max = -1;
    const char *p = json_string_value(self);
    size_t n = json_string_length(self);
    if (list == NULL) return NULL;
    if (slot[1] && !jinja_integer(r, slot[1], &max)) return jinja_fail(r, at->line, EPX_ERR_ARG, "split: maxsplit is no integer");
    if (!jinja_spend(r, at->line, n / JINJA_BYTES_PER_STEP)) return NULL;
    if (slot[0] == NULL || jinja_kind(r, slot[0]) == KIND_NONE) return split_space(r, at->line, list, p, n, max < 0 ? -1 : max);
    if (want_string(r, at, slot[0], "split") == NULL) return NULL;
    if (json_string_length(slot[0]) == 0) return jinja_fail(r, at->line, EPX_ERR_ARG, "split: empty separator");
    return split_at(r, at->line, list, p, n, slot[0], max < 0 ? -1 : max);
}

/* An empty `from` matches before every character and at the end. */
static epx_status_t replace(epx_str_t *out, const json_t *s, const json_t *from, const json_t *to, json_int_t count) {
    const char *p = json_string_value(s), *end = p + json_string_length(s), *hit;
    size_t m = json_string_length(from), len;
    while (count-- != 0) {
        hit = m ? memmem(p, (size_t)(end - p), json_string_value(from), m) : p;
        if (hit == NULL) break;
        EPX_TRY(epx_str_append(out, p, (size_t)(hit - p)));
        EPX_TRY(epx_str_append(out, json_string_value(to), json_string_length(to)));
        if (out->n_bytes > JINJA_MAX_STRING_BYTES) return epx_fail(EPX_ERR_CAPACITY, "chat template: replace makes over 16 MiB");
        p = hit + m;
        if (m == 0) {
            if (p == end) return EPX_OK;
            epx_utf8_decode(p, &len);
            EPX_TRY(epx_str_append(out, p, len));
            p += len;
        }
    }
    return epx_str_append(out, p, (size_t)(end - p));
}

static json_t *m_replace(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    epx_str_t s = {0};
    json_int_t count = -1;
    if (want_string(r, at, slot[0], "replace") == NULL || want_string(r, at, slot[1], "replace") == NULL) return NULL;
    if (slot[2] && jinja_kind(r, slot[2]) != KIND_NONE && !jinja_integer(r, slot[2], &count))
        return jinja_fail(r, at->line, EPX_ERR_ARG, "replace: count is no integer");
    if (!jinja_spend(r, at->line, json_string_length(self) / JINJA_BYTES_PER_STEP)) return NULL;
    return take(r, at->line, &s, replace(&s, self, slot[0], slot[1], count < 0 ? -1 : count));
}

static json_t *m_find(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    const char *p = json_string_value(self), *hit, *q;
    json_int_t n = 0;
    if (want_string(r, at, slot[0], "find") == NULL) return NULL;
    if (!jinja_spend(r, at->line, json_string_length(self) / JINJA_BYTES_PER_STEP)) return NULL;
    hit = memmem(p, json_string_length(self), json_string_value(slot[0]), json_string_length(slot[0]));
    if (hit == NULL) return jinja_pool(r, json_integer(-1));
    for (q = p; q < hit; q++) n += ((unsigned char)*q & 0xC0) != 0x80;
    return jinja_pool(r, json_integer(n));
}

/* sep.join(list); every item must be a string. */
static json_t *m_join(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    json_t *items = jinja_iterate(r, at->line, slot[0]), *v;
    epx_str_t s = {0};
    epx_status_t st = EPX_OK;
    size_t i;
    json_array_foreach(items, i, v) {
        if (want_string(r, at, v, "join") == NULL) break;
        if (i) st = jinja_append_str(r, at->line, self, &s);
        if (st == EPX_OK) st = jinja_append_str(r, at->line, v, &s);
        if (st < 0) break;
    }
    if (items == NULL) return NULL;
    return take(r, at->line, &s, st);
}

/* ---- case: one character to one character (the simple mapping of Unicode) ---- */

typedef int32_t (*map_fn)(int32_t);

static epx_status_t map_case(epx_str_t *out, const json_t *s, map_fn first, map_fn rest) {
    const char *p = json_string_value(s);
    size_t i, len, n = json_string_length(s);
    char text[4];
    for (i = 0; i < n; i += len) {
        int32_t c = epx_utf8_decode(p + i, &len);
        EPX_TRY(epx_str_append(out, text, epx_utf8_encode((i ? rest : first)(c), text)));
    }
    return EPX_OK;
}

static json_t *change_case(jinja_run_t *r, const jinja_ex_t *at, json_t *self, map_fn first, map_fn rest) {
    epx_str_t s = {0};
    return take(r, at->line, &s, map_case(&s, self, first, rest));
}

static json_t *m_upper(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    (void)slot;
    return change_case(r, at, self, utf8proc_toupper, utf8proc_toupper);
}
static json_t *m_lower(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    (void)slot;
    return change_case(r, at, self, utf8proc_tolower, utf8proc_tolower);
}
static json_t *m_capitalize(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    (void)slot;
    return change_case(r, at, self, utf8proc_totitle, utf8proc_tolower);
}

/* ---- dict ---- */

static json_t *m_keys(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    (void)slot;
    return jinja_iterate(r, at->line, self);
}

static json_t *m_values(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    json_t *list = jinja_pool(r, json_array()), *v;
    const char *key;
    (void)slot;
    if (list == NULL) return NULL;
    json_object_foreach(self, key, v) {
        if (!jinja_list_add(r, at->line, list, v)) return NULL;
    }
    return list;
}

static json_t *m_items(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    json_t *list = jinja_pool(r, json_array()), *v, *pair;
    const char *key;
    (void)slot;
    if (list == NULL || !jinja_may_nest(r, at->line, self)) return NULL;
    json_object_foreach(self, key, v) {
        pair = jinja_pool(r, json_pack("[s, O]", key, v));
        if (pair == NULL || !jinja_list_add(r, at->line, list, pair)) return NULL;
    }
    return list;
}

static json_t *m_get(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot) {
    json_t *v = NULL;
    (void)r;
    (void)at;
    if (json_is_string(slot[0])) v = json_object_getn(self, json_string_value(slot[0]), json_string_length(slot[0]));
    return v ? v : slot[1] ? slot[1] : json_null();
}

/* ---- tables ---- */

static const jinja_fn_t *find(const jinja_fn_t *table, size_t n, const char *name) {
    size_t i;
    for (i = 0; i < n; i++) {
        if (strcmp(table[i].name, name) == 0) return &table[i];
    }
    return NULL;
}

const jinja_fn_t *jinja_find_str_method(const char *name) {
    static const jinja_fn_t table[] = {{"startswith", m_startswith, 1, {"prefix"}},
                                       {"endswith", m_endswith, 1, {"suffix"}},
                                       {"strip", m_strip, 0, {"chars"}},
                                       {"lstrip", m_lstrip, 0, {"chars"}},
                                       {"rstrip", m_rstrip, 0, {"chars"}},
                                       {"split", m_split, 0, {"sep", "maxsplit"}},
                                       {"replace", m_replace, 2, {"old", "new", "count"}},
                                       {"find", m_find, 1, {"sub"}},
                                       {"join", m_join, 1, {"iterable"}},
                                       {"upper", m_upper, 0, {NULL}},
                                       {"lower", m_lower, 0, {NULL}},
                                       {"capitalize", m_capitalize, 0, {NULL}}};
    return find(table, sizeof table / sizeof *table, name);
}

const jinja_fn_t *jinja_find_dict_method(const char *name) {
    static const jinja_fn_t table[] = {{"items", m_items, 0, {NULL}},
                                       {"keys", m_keys, 0, {NULL}},
                                       {"values", m_values, 0, {NULL}},
                                       {"get", m_get, 1, {"key", "default"}}};
    return find(table, sizeof table / sizeof *table, name);
}

int jinja_is_dict_attribute(const char *name) {
    static const char *const known[] = {"items", "keys",    "values", "get",        "pop",     "copy",
                                        "clear", "popitem", "update", "setdefault", "fromkeys"};
    size_t i;
    for (i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(known[i], name) == 0) return 1;
    }
    return 0;
}
