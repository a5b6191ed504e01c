/* From JSON Schema to nodes. Keywords that are not in the list are refused by name. See grammar.h. */
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/grammar/grammar_internal.h"

#define REFS_MAX 2000

typedef struct {
    const json_t *target;
    int32_t node;
} ref_t;

typedef struct {
    epx_grammar_t *g;
    const json_t *root; /* what "#" means */
    ref_t refs[REFS_MAX];
    int n_refs;
    int32_t one_of[REFS_MAX];
    int32_t n_one_of;
    int32_t any; /* node of any value, -1: not made yet */
    char path[200];
} compile_t;

static const char supported[] =
    "type, properties, required, additionalProperties, items, enum, const, minItems, maxItems, minLength, "
    "maxLength, anyOf, oneOf, $ref, $defs, definitions";
static const char *const annotations[] = {"title",      "description", "default",   "examples", "$schema",     "$id", "$comment",
                                          "deprecated", "readOnly",    "writeOnly", "$defs",    "definitions", NULL};
static const char *const assertions[] = {"type",     "properties", "required",  "additionalProperties",
                                         "items",    "enum",       "const",     "minItems",
                                         "maxItems", "minLength",  "maxLength", "anyOf",
                                         "oneOf",    "$ref",       NULL};

static epx_status_t refuse(const compile_t *c, const char *fmt, ...) EPX_PRINTF(2, 3);
static epx_status_t refuse(const compile_t *c, const char *fmt, ...) {
    char text[300];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return epx_fail(EPX_ERR_ARG, "%s: %s", c->path, text);
}

/* ---- growing ---- */

static epx_status_t grow(void **v, int32_t n, int32_t *cap, size_t size) {
    if (n < *cap) return EPX_OK;
    int32_t more = *cap ? 2 * *cap : 64;
    void *grown = realloc(*v, (size_t)more * size);
    if (!grown) return epx_fail(EPX_ERR_NOMEM, "schema: no memory");
    *v = grown;
    *cap = more;
    return EPX_OK;
}

static epx_status_t add_node(compile_t *c, int32_t *out) {
    epx_grammar_t *g = c->g;
    void *v = g->nodes;
    if (g->n_nodes == EPX_GRAMMAR_MAX_NODES) return refuse(c, "the schema has more than %d parts", EPX_GRAMMAR_MAX_NODES);
    EPX_TRY(grow(&v, g->n_nodes, &g->cap_nodes, sizeof *g->nodes));
    g->nodes = v;
    g->nodes[g->n_nodes] = (gn_node_t){.kind = GN_ANYOF, .child = -1, .max = -1, .depth = INT32_MAX};
    *out = g->n_nodes++;
    return EPX_OK;
}

static epx_status_t add_text(compile_t *c, const char *bytes, size_t n, int32_t *out) {
    epx_grammar_t *g = c->g;
    void *v = g->texts;
    EPX_TRY(grow(&v, g->n_texts, &g->cap_texts, sizeof *g->texts));
    g->texts = v;
    g->texts[g->n_texts] = (gn_text_t){g->bytes.n_bytes, n};
    EPX_TRY(epx_str_append(&g->bytes, bytes, n));
    *out = g->n_texts++;
    return EPX_OK;
}

/* Real numbers with as few digits as keep the value. */
static char *dump_value(const json_t *v) {
    static const size_t precision[] = {15, 16, 17};
    for (int i = 0; i < 3; i++) {
        char *text = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(precision[i]));
        json_t *back = text ? json_loads(text, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL) : NULL;
        int same = back && json_equal(back, v);
        json_decref(back);
        if (same || i == 2) return text;
        free(text);
    }
    return NULL;
}

static epx_status_t add_json_text(compile_t *c, const json_t *v, int32_t *out) {
    char *text = dump_value(v);
    if (!text) return epx_fail(EPX_ERR_NOMEM, "schema: no memory");
    epx_status_t s = add_text(c, text, strlen(text), out);
    free(text);
    return s;
}

/* Lists of kids are complete before they are added, because kids add lists of their own. */
static epx_status_t set_kids(compile_t *c, int32_t node, gn_kind_t kind, const int32_t *kids, int32_t n) {
    epx_grammar_t *g = c->g;
    g->nodes[node].kind = kind;
    g->nodes[node].first = g->n_kids;
    g->nodes[node].n = n;
    for (int32_t i = 0; i < n; i++) {
        void *v = g->kids;
        EPX_TRY(grow(&v, g->n_kids, &g->cap_kids, sizeof *g->kids));
        g->kids = v;
        g->kids[g->n_kids++] = kids[i];
    }
    return EPX_OK;
}

/* ---- keywords ---- */

static int in(const char *const *list, const char *word) {
    for (; *list; list++)
        if (strcmp(*list, word) == 0) return 1;
    return 0;
}

static epx_status_t check_keywords(const compile_t *c, const json_t *s) {
    const char *name;
    json_t *v;
    json_object_foreach((json_t *)s, name, v) {
        if (!in(annotations, name) && !in(assertions, name))
            return refuse(c, "keyword \"%.60s\" is not supported; supported: %s", name, supported);
    }
    return EPX_OK;
}

/* Nothing but `keyword`, annotations and, when allowed, type. */
static epx_status_t check_alone(const compile_t *c, const json_t *s, const char *keyword, int with_type) {
    const char *name;
    json_t *v;
    json_object_foreach((json_t *)s, name, v) {
        if (in(annotations, name) || strcmp(name, keyword) == 0 || (with_type && strcmp(name, "type") == 0)) continue;
        return refuse(c, "\"%.60s\" beside \"%s\" is not supported", name, keyword);
    }
    return EPX_OK;
}

static epx_status_t read_count(const compile_t *c, const json_t *s, const char *name, int32_t absent, int32_t *out) {
    const json_t *v = json_object_get(s, name);
    *out = absent;
    if (!v) return EPX_OK;
    if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) > INT32_MAX)
        return refuse(c, "\"%s\" must be an integer from 0 to %d", name, INT32_MAX);
    *out = (int32_t)json_integer_value(v);
    return EPX_OK;
}

static epx_status_t read_range(const compile_t *c, const json_t *s, const char *min, const char *max, gn_node_t *out) {
    int32_t lo, hi;
    EPX_TRY(read_count(c, s, min, 0, &lo));
    EPX_TRY(read_count(c, s, max, -1, &hi));
    if (hi >= 0 && lo > hi) return refuse(c, "\"%s\" %d is more than \"%s\" %d", min, lo, max, hi);
    out->min = lo;
    out->max = hi;
    return EPX_OK;
}

static epx_status_t compile(compile_t *c, const json_t *s, int32_t *out);
static epx_status_t compile_into(compile_t *c, int32_t node, const json_t *s);

/* Compile with ".name" at the end of the path. */
static epx_status_t compile_at(compile_t *c, const json_t *s, const char *name, int32_t *out) {
    size_t n = strlen(c->path);
    snprintf(c->path + n, sizeof c->path - n, ".%.60s", name);
    epx_status_t st = compile(c, s, out);
    c->path[n] = '\0';
    return st;
}

/* ---- any value ---- */

static epx_status_t add_words(compile_t *c, int32_t node, const char *const *words) {
    epx_grammar_t *g = c->g;
    g->nodes[node].kind = GN_TEXTS;
    g->nodes[node].first = g->n_texts;
    for (; *words; words++) {
        int32_t t;
        EPX_TRY(add_text(c, *words, strlen(*words), &t));
        g->nodes[node].n++;
    }
    return EPX_OK;
}

static epx_status_t any_value(compile_t *c, int32_t *out) {
    static const char *const words[] = {"true", "false", "null", NULL};
    static const gn_kind_t kinds[] = {GN_OBJECT, GN_ARRAY, GN_STRING, GN_NUMBER};
    int32_t kids[5];
    if (c->any < 0) {
        EPX_TRY(add_node(c, &c->any));
        for (int i = 0; i < 5; i++) EPX_TRY(add_node(c, &kids[i]));
        for (int i = 0; i < 4; i++) c->g->nodes[kids[i]].kind = kinds[i];
        c->g->nodes[kids[0]].child = c->g->nodes[kids[1]].child = c->any;
        EPX_TRY(add_words(c, kids[4], words));
        EPX_TRY(set_kids(c, c->any, GN_ANYOF, kids, 5));
    }
    *out = c->any;
    return EPX_OK;
}

/* ---- types ---- */

static int is_required(const json_t *required, const char *name) {
    for (size_t i = 0; i < json_array_size(required); i++) {
        const json_t *v = json_array_get(required, i);
        if (json_is_string(v) && strcmp(json_string_value(v), name) == 0) return 1;
    }
    return 0;
}

static epx_status_t check_required(const compile_t *c, const json_t *required, const json_t *props) {
    if (required && !json_is_array(required)) return refuse(c, "\"required\" must be a list of names");
    for (size_t i = 0; i < json_array_size(required); i++) {
        const json_t *v = json_array_get(required, i);
        if (!json_is_string(v)) return refuse(c, "\"required\" must be a list of names");
        if (!json_object_get(props, json_string_value(v)))
            return refuse(c, "\"required\" names \"%.60s\", which is not in \"properties\"", json_string_value(v));
    }
    return EPX_OK;
}

/* Names that are not in properties: offered only when there are no properties. */
static epx_status_t free_names(compile_t *c, int32_t node, const json_t *extra, int has_props) {
    int32_t child = -1;
    if (extra && !json_is_boolean(extra) && !json_is_object(extra))
        return refuse(c, "\"additionalProperties\" must be true, false or a schema");
    if (json_is_false(extra) || has_props) return EPX_OK;
    if (json_is_object(extra)) EPX_TRY(compile_at(c, extra, "additionalProperties", &child));
    else EPX_TRY(any_value(c, &child));
    c->g->nodes[node].child = child;
    return EPX_OK;
}

static epx_status_t add_prop(compile_t *c, const char *name, int32_t kid, int required) {
    epx_grammar_t *g = c->g;
    void *v = g->props;
    json_t *text = json_string(name);
    gn_prop_t p = {.node = kid, .required = required};
    epx_status_t s = add_json_text(c, text, &p.text);
    json_decref(text);
    if (s >= 0) s = grow(&v, g->n_props, &g->cap_props, sizeof *g->props);
    g->props = v;
    if (s >= 0) g->props[g->n_props++] = p;
    return s;
}

/* Properties stand together in g->props, so their schemas are compiled first. */
static epx_status_t object_type(compile_t *c, int32_t node, const json_t *s) {
    const json_t *props = json_object_get(s, "properties"), *required = json_object_get(s, "required");
    const char *name;
    json_t *v;
    size_t n = json_object_size(props), i = 0;
    if (props && !json_is_object(props)) return refuse(c, "\"properties\" must be an object");
    EPX_TRY(check_required(c, required, props));
    EPX_TRY(free_names(c, node, json_object_get(s, "additionalProperties"), n > 0));
    int32_t *kids = calloc(n + 1, sizeof *kids);
    if (!kids) return epx_fail(EPX_ERR_NOMEM, "schema: no memory");
    epx_status_t st = EPX_OK;
    json_object_foreach((json_t *)props, name, v) {
        if (st >= 0) st = compile_at(c, v, name, &kids[i++]);
    }
    c->g->nodes[node].kind = GN_OBJECT;
    c->g->nodes[node].first = c->g->n_props;
    c->g->nodes[node].n = (int32_t)n;
    i = 0;
    json_object_foreach((json_t *)props, name, v) {
        if (st >= 0) st = add_prop(c, name, kids[i++], is_required(required, name));
    }
    free(kids);
    return st;
}

static epx_status_t array_type(compile_t *c, int32_t node, const json_t *s) {
    const json_t *items = json_object_get(s, "items");
    int32_t child = -1;
    if (json_is_array(items)) return refuse(c, "\"items\" must be a schema; a list of schemas is not supported");
    if (items) EPX_TRY(compile_at(c, items, "items", &child));
    else EPX_TRY(any_value(c, &child));
    c->g->nodes[node].kind = GN_ARRAY;
    c->g->nodes[node].child = child;
    return read_range(c, s, "minItems", "maxItems", &c->g->nodes[node]);
}

static epx_status_t one_type(compile_t *c, int32_t node, const json_t *s, const char *type) {
    static const char *const booleans[] = {"true", "false", NULL}, *const null[] = {"null", NULL};
    if (strcmp(type, "object") == 0) return object_type(c, node, s);
    if (strcmp(type, "array") == 0) return array_type(c, node, s);
    if (strcmp(type, "boolean") == 0) return add_words(c, node, booleans);
    if (strcmp(type, "null") == 0) return add_words(c, node, null);
    if (strcmp(type, "string") == 0) {
        c->g->nodes[node].kind = GN_STRING;
        return read_range(c, s, "minLength", "maxLength", &c->g->nodes[node]);
    }
    if (strcmp(type, "number") == 0 || strcmp(type, "integer") == 0) {
        c->g->nodes[node].kind = type[0] == 'n' ? GN_NUMBER : GN_INTEGER;
        return EPX_OK;
    }
    return refuse(c, "unknown type \"%.60s\"; legal: object, array, string, number, integer, boolean, null", type);
}

static epx_status_t type_list(compile_t *c, int32_t node, const json_t *s, const json_t *types) {
    int32_t kids[7];
    size_t n = json_array_size(types);
    if (n < 1 || n > 7) return refuse(c, "\"type\" must be a name or a list of 1 to 7 names");
    for (size_t i = 0; i < n; i++) {
        const json_t *t = json_array_get(types, i);
        if (!json_is_string(t)) return refuse(c, "\"type\" must be a name or a list of names");
        EPX_TRY(add_node(c, &kids[i]));
        EPX_TRY(one_type(c, kids[i], s, json_string_value(t)));
    }
    return set_kids(c, node, GN_ANYOF, kids, (int32_t)n);
}

/* Without a type the keywords say which is meant. */
static const char *implied_type(const json_t *s) {
    if (json_object_get(s, "properties") || json_object_get(s, "required") || json_object_get(s, "additionalProperties"))
        return "object";
    if (json_object_get(s, "items") || json_object_get(s, "minItems") || json_object_get(s, "maxItems")) return "array";
    if (json_object_get(s, "minLength") || json_object_get(s, "maxLength")) return "string";
    return NULL;
}

/* ---- enum and const ---- */

static int has_type(const json_t *v, const char *type) {
    if (strcmp(type, "integer") == 0) return json_is_number(v) && floor(json_number_value(v)) == json_number_value(v);
    if (strcmp(type, "number") == 0) return json_is_number(v);
    if (strcmp(type, "string") == 0) return json_is_string(v);
    if (strcmp(type, "boolean") == 0) return json_is_boolean(v);
    if (strcmp(type, "null") == 0) return json_is_null(v);
    if (strcmp(type, "object") == 0) return json_is_object(v);
    return strcmp(type, "array") == 0 && json_is_array(v);
}

static int fits_type(const json_t *v, const json_t *type) {
    if (!type) return 1;
    if (json_is_string(type)) return has_type(v, json_string_value(type));
    for (size_t i = 0; i < json_array_size(type); i++) {
        const json_t *t = json_array_get(type, i);
        if (json_is_string(t) && has_type(v, json_string_value(t))) return 1;
    }
    return 0;
}

static epx_status_t values(compile_t *c, int32_t node, const json_t *s, const char *keyword) {
    const json_t *list = json_object_get(s, keyword), *type = json_object_get(s, "type");
    int is_enum = keyword[0] == 'e';
    size_t n = is_enum ? json_array_size(list) : 1;
    EPX_TRY(check_alone(c, s, keyword, 1));
    if (n == 0) return refuse(c, "\"enum\" must be a non-empty list");
    c->g->nodes[node].kind = GN_TEXTS;
    c->g->nodes[node].first = c->g->n_texts;
    for (size_t i = 0; i < n; i++) {
        const json_t *v = is_enum ? json_array_get(list, i) : list;
        int32_t t;
        if (!fits_type(v, type)) continue;
        EPX_TRY(add_json_text(c, v, &t));
        c->g->nodes[node].n++;
    }
    if (c->g->nodes[node].n == 0) return refuse(c, "no value of \"%s\" has the type of \"type\"", keyword);
    return EPX_OK;
}

/* ---- anyOf, oneOf, $ref ---- */

static epx_status_t branches(compile_t *c, int32_t node, const json_t *s, const char *keyword) {
    const json_t *list = json_object_get(s, keyword);
    size_t n = json_array_size(list);
    char name[40];
    epx_status_t st = EPX_OK;
    EPX_TRY(check_alone(c, s, keyword, 0));
    if (n == 0) return refuse(c, "\"%s\" must be a non-empty list of schemas", keyword);
    int32_t *kids = calloc(n, sizeof *kids);
    if (!kids) return epx_fail(EPX_ERR_NOMEM, "schema: no memory");
    for (size_t i = 0; i < n && st >= 0; i++) {
        snprintf(name, sizeof name, "%s[%zu]", keyword, i);
        st = compile_at(c, json_array_get(list, i), name, &kids[i]);
    }
    if (st >= 0) st = set_kids(c, node, GN_ANYOF, kids, (int32_t)n);
    free(kids);
    if (st < 0 || keyword[0] == 'a') return st;
    if (c->n_one_of == REFS_MAX) return refuse(c, "more than %d uses of \"oneOf\"", REFS_MAX);
    c->one_of[c->n_one_of++] = node;
    return EPX_OK;
}

/* "#", "#/$defs/NAME" or "#/definitions/NAME"; ~0 and ~1 as in JSON pointers. */
static const json_t *find_ref(const compile_t *c, const char *ref) {
    static const char *const places[] = {"$defs", "definitions"};
    char name[256];
    size_t n = 0;
    if (strcmp(ref, "#") == 0) return c->root;
    for (int i = 0; i < 2; i++) {
        size_t k = strlen(places[i]);
        if (strncmp(ref, "#/", 2) != 0 || strncmp(ref + 2, places[i], k) != 0 || ref[2 + k] != '/') continue;
        for (const char *p = ref + 3 + k; *p && n < sizeof name - 1; p++) {
            if (*p == '/') return NULL;
            name[n++] = *p != '~' ? *p : p[1] == '1' ? '/' : '~';
            p += *p == '~' && p[1];
        }
        name[n] = '\0';
        return json_object_get(json_object_get(c->root, places[i]), name);
    }
    return NULL;
}

static epx_status_t reference(compile_t *c, int32_t node, const json_t *s) {
    const json_t *ref = json_object_get(s, "$ref");
    EPX_TRY(check_alone(c, s, "$ref", 0));
    const json_t *target = json_is_string(ref) ? find_ref(c, json_string_value(ref)) : NULL;
    if (!target)
        return refuse(c, "$ref \"%.80s\" is not found; \"#\", \"#/$defs/NAME\" and \"#/definitions/NAME\" are supported",
                      json_is_string(ref) ? json_string_value(ref) : "?");
    for (int i = 0; i < c->n_refs; i++)
        if (c->refs[i].target == target) return set_kids(c, node, GN_ANYOF, &c->refs[i].node, 1);
    if (c->n_refs == REFS_MAX) return refuse(c, "more than %d referenced schemas", REFS_MAX);
    int32_t kid;
    EPX_TRY(add_node(c, &kid));
    c->refs[c->n_refs++] = (ref_t){target, kid};
    EPX_TRY(set_kids(c, node, GN_ANYOF, &kid, 1));
    return compile_into(c, kid, target);
}

static epx_status_t compile_into(compile_t *c, int32_t node, const json_t *s) {
    int32_t any;
    const json_t *type = json_object_get(s, "type");
    if (json_is_false(s)) return refuse(c, "the schema false matches nothing");
    if (!json_is_true(s) && !json_is_object(s)) return refuse(c, "a schema must be an object or true");
    if (json_is_object(s)) EPX_TRY(check_keywords(c, s));
    if (json_object_get(s, "$ref")) return reference(c, node, s);
    if (json_object_get(s, "enum")) return values(c, node, s, "enum");
    if (json_object_get(s, "const")) return values(c, node, s, "const");
    if (json_object_get(s, "anyOf")) return branches(c, node, s, "anyOf");
    if (json_object_get(s, "oneOf")) return branches(c, node, s, "oneOf");
    if (json_is_string(type)) return one_type(c, node, s, json_string_value(type));
    if (type) return type_list(c, node, s, type);
    if (implied_type(s)) return one_type(c, node, s, implied_type(s));
    EPX_TRY(any_value(c, &any));
    return set_kids(c, node, GN_ANYOF, &any, 1);
}

static epx_status_t compile(compile_t *c, const json_t *s, int32_t *out) {
    EPX_TRY(add_node(c, out));
    return compile_into(c, *out, s);
}

/* ---- the whole ---- */

/* A schema with references of its own. */
static epx_status_t document(compile_t *c, const json_t *schema, const char *name, int32_t *out) {
    c->root = schema;
    c->n_refs = 0;
    snprintf(c->path, sizeof c->path, "%.100s", name);
    EPX_TRY(add_node(c, out));
    c->refs[c->n_refs++] = (ref_t){schema, *out};
    return compile_into(c, *out, schema);
}

/* {"name": NAME, "arguments": value of the schema} */
static epx_status_t call(compile_t *c, const json_t *spec, int32_t *out) {
    int32_t name, arguments, text;
    const json_t *n = json_object_get(spec, "name");
    if (!json_is_string(n)) return epx_fail(EPX_ERR_ARG, "calls: a name is missing");
    EPX_TRY(document(c, json_object_get(spec, "schema"), json_string_value(n), &arguments));
    EPX_TRY(add_node(c, &name));
    c->g->nodes[name].kind = GN_TEXTS;
    EPX_TRY(add_json_text(c, n, &text));
    c->g->nodes[name].first = text;
    c->g->nodes[name].n = 1;
    EPX_TRY(add_node(c, out));
    c->g->nodes[*out].kind = GN_OBJECT;
    c->g->nodes[*out].first = c->g->n_props;
    c->g->nodes[*out].n = 2;
    EPX_TRY(add_prop(c, "name", name, 1));
    return add_prop(c, "arguments", arguments, 1);
}

static epx_status_t value_of(compile_t *c, const json_t *spec, int32_t *out) {
    const json_t *calls = json_object_get(spec, "calls");
    int32_t kids[EPX_GRAMMAR_MAX_CALLS];
    size_t n = json_array_size(calls);
    if (!calls) return document(c, json_object_get(spec, "schema"), "schema", out);
    if (n < 1 || n > EPX_GRAMMAR_MAX_CALLS) return epx_fail(EPX_ERR_ARG, "calls: 1 to %d", EPX_GRAMMAR_MAX_CALLS);
    for (size_t i = 0; i < n; i++) EPX_TRY(call(c, json_array_get(calls, i), &kids[i]));
    EPX_TRY(add_node(c, out));
    return set_kids(c, *out, GN_ANYOF, kids, (int32_t)n);
}

static epx_status_t fixed_text(compile_t *c, const json_t *text, int32_t *kids, int32_t *n) {
    int32_t t;
    if (!json_is_string(text) || json_string_length(text) == 0) return EPX_OK;
    EPX_TRY(add_node(c, &kids[*n]));
    c->g->nodes[kids[*n]].kind = GN_TEXTS;
    EPX_TRY(add_text(c, json_string_value(text), json_string_length(text), &t));
    c->g->nodes[kids[*n]].first = t;
    c->g->nodes[kids[*n]].n = 1;
    ++*n;
    return EPX_OK;
}

static epx_status_t whole(compile_t *c, const json_t *spec) {
    int32_t kids[3], n = 0;
    EPX_TRY(fixed_text(c, json_object_get(spec, "prefix"), kids, &n));
    EPX_TRY(value_of(c, spec, &kids[n]));
    n++;
    EPX_TRY(fixed_text(c, json_object_get(spec, "suffix"), kids, &n));
    EPX_TRY(add_node(c, &c->g->root));
    EPX_TRY(set_kids(c, c->g->root, GN_SEQUENCE, kids, n));
    return epx_grammar_analyse(c->g, c->one_of, c->n_one_of);
}

epx_status_t epx_grammar_create(const char *spec, size_t n_bytes, epx_grammar_t **out_g) {
    json_error_t e;
    json_t *root = json_loadb(spec, n_bytes, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &e);
    compile_t *c = calloc(1, sizeof *c);
    epx_grammar_t *g = calloc(1, sizeof *g);
    epx_status_t s = EPX_OK;
    if (!c || !g) s = epx_fail(EPX_ERR_NOMEM, "grammar: no memory");
    else if (!root) s = epx_fail(EPX_ERR_ARG, "grammar: not valid JSON: %s", e.text);
    if (s >= 0) {
        c->g = g;
        c->any = -1;
        s = whole(c, root);
    }
    json_decref(root);
    free(c);
    if (s < 0) epx_grammar_destroy(g);
    else *out_g = g;
    return s;
}

void epx_grammar_destroy(epx_grammar_t *g) {
    if (!g) return;
    free(g->nodes);
    free(g->props);
    free(g->texts);
    free(g->kids);
    epx_str_fini(&g->bytes);
    free(g);
}
