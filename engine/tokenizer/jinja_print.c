/* Values as text: str() and repr() as Python prints them, json.dumps as transformers calls it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

#include "engine/tokenizer/jinja.h"
#include "engine/tokenizer/utf8.h"

static epx_status_t check_size(jinja_run_t *r, int line, const epx_str_t *out) {
    if (out->n_bytes <= JINJA_MAX_STRING_BYTES) return EPX_OK;
    jinja_fail(r, line, EPX_ERR_CAPACITY, "more than %zu bytes of text", JINJA_MAX_STRING_BYTES);
    return r->status;
}

static epx_status_t spend(jinja_run_t *r, int line, size_t n_bytes) {
    return jinja_spend(r, line, 1 + n_bytes / JINJA_BYTES_PER_STEP) ? EPX_OK : r->status;
}

/* ---- floats ---- */

/* Shortest digits that read back as d, as "%.*e" writes them. */
static void shortest(double d, char *text, size_t cap) {
    int digits;
    for (digits = 0; digits < 17; digits++) {
        snprintf(text, cap, "%.*e", digits, d);
        if (strtod(text, NULL) == d) return;
    }
}

epx_status_t jinja_append_float(double d, epx_str_t *out) {
    char text[40], digit[32];
    const char *e;
    int exponent, n = 0, i;
    if (isnan(d)) return epx_str_append_z(out, "nan");
    if (isinf(d)) return epx_str_append_z(out, d < 0 ? "-inf" : "inf");
    if (signbit(d)) EPX_TRY(epx_str_append(out, "-", 1));
    shortest(fabs(d), text, sizeof text);
    e = strchr(text, 'e');
    exponent = atoi(e + 1);
    for (i = 0; text + i < e; i++) {
        if (text[i] >= '0' && text[i] <= '9') digit[n++] = text[i];
    }
    while (n > 1 && digit[n - 1] == '0') n--;
    if (exponent < -4 || exponent >= 16) {
        EPX_TRY(epx_str_append(out, digit, 1));
        if (n > 1) EPX_TRY(epx_str_printf(out, ".%.*s", n - 1, digit + 1));
        return epx_str_printf(out, "e%c%02d", exponent < 0 ? '-' : '+', abs(exponent));
    }
    if (exponent < 0) return epx_str_printf(out, "0.%.*s%.*s", -exponent - 1, "0000", n, digit);
    for (i = 0; i <= exponent; i++) EPX_TRY(epx_str_append(out, i < n ? &digit[i] : "0", 1));
    return exponent + 1 < n ? epx_str_printf(out, ".%.*s", n - exponent - 1, digit + exponent + 1) : epx_str_append(out, ".0", 2);
}

/* ---- str and repr ---- */

/* Python's str.isprintable(): not C and not Z, the space excepted. */
static int is_printable(int32_t c) {
    utf8proc_category_t k = utf8proc_category(c);
    if (c == ' ') return 1;
    return !(k == UTF8PROC_CATEGORY_CN || (k >= UTF8PROC_CATEGORY_ZS && k <= UTF8PROC_CATEGORY_CO));
}

static epx_status_t repr_char(const char *p, size_t len, int32_t c, char quote, epx_str_t *out) {
    if (c == '\n') return epx_str_append_z(out, "\\n");
    if (c == '\r') return epx_str_append_z(out, "\\r");
    if (c == '\t') return epx_str_append_z(out, "\\t");
    if (c == '\\' || c == quote) return epx_str_printf(out, "\\%c", (int)c);
    if (is_printable(c)) return epx_str_append(out, p, len);
    return epx_str_printf(out, c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x", (unsigned)c);
}

static epx_status_t repr_string(const char *p, size_t n, epx_str_t *out) {
    char quote = memchr(p, '\'', n) && !memchr(p, '"', n) ? '"' : '\'';
    size_t i, len;
    EPX_TRY(epx_str_append(out, &quote, 1));
    for (i = 0; i < n; i += len) {
        int32_t c = epx_utf8_decode(p + i, &len);
        EPX_TRY(repr_char(p + i, len, c, quote, out));
    }
    return epx_str_append(out, &quote, 1);
}

static epx_status_t repr(jinja_run_t *r, int line, const json_t *v, epx_str_t *out);

static epx_status_t repr_list(jinja_run_t *r, int line, const json_t *v, epx_str_t *out) {
    size_t i;
    json_t *w;
    EPX_TRY(epx_str_append(out, "[", 1));
    json_array_foreach(v, i, w) {
        if (i) EPX_TRY(epx_str_append(out, ", ", 2));
        EPX_TRY(repr(r, line, w, out));
    }
    return epx_str_append(out, "]", 1);
}

static epx_status_t repr_dict(jinja_run_t *r, int line, const json_t *v, epx_str_t *out) {
    const char *key, *comma = "";
    size_t n;
    json_t *w;
    EPX_TRY(epx_str_append(out, "{", 1));
    json_object_keylen_foreach((json_t *)v, key, n, w) {
        EPX_TRY(epx_str_append_z(out, comma));
        EPX_TRY(repr_string(key, n, out));
        EPX_TRY(epx_str_append(out, ": ", 2));
        EPX_TRY(repr(r, line, w, out));
        comma = ", ";
    }
    return epx_str_append(out, "}", 1);
}

static epx_status_t repr(jinja_run_t *r, int line, const json_t *v, epx_str_t *out) {
    jinja_kind_t k = jinja_kind(r, v);
    EPX_TRY(spend(r, line, k == KIND_STRING ? json_string_length(v) : 0));
    EPX_TRY(check_size(r, line, out));
    if (k == KIND_STRING) return repr_string(json_string_value(v), json_string_length(v), out);
    if (k == KIND_LIST) return repr_list(r, line, v, out);
    if (k == KIND_DICT) return repr_dict(r, line, v, out);
    if (k == KIND_UNDEFINED) return epx_str_append_z(out, "Undefined");
    return jinja_append_str(r, line, v, out);
}

static epx_status_t append_str(jinja_run_t *r, int line, const json_t *v, epx_str_t *out) {
    switch (jinja_kind(r, v)) {
    case KIND_UNDEFINED:
        return EPX_OK;
    case KIND_NONE:
        return epx_str_append_z(out, "None");
    case KIND_BOOL:
        return epx_str_append_z(out, json_is_true(v) ? "True" : "False");
    case KIND_INT:
        return epx_str_printf(out, "%lld", (long long)json_integer_value(v));
    case KIND_FLOAT:
        return jinja_append_float(json_real_value(v), out);
    case KIND_STRING:
        EPX_TRY(spend(r, line, json_string_length(v)));
        return epx_str_append(out, json_string_value(v), json_string_length(v));
    case KIND_LIST:
        return repr_list(r, line, v, out);
    case KIND_DICT:
        return repr_dict(r, line, v, out);
    default:
        jinja_fail(r, line, EPX_ERR_UNSUPPORTED, "a %s as text", jinja_type_name(r, v));
        return r->status;
    }
}

epx_status_t jinja_append_str(jinja_run_t *r, int line, const json_t *v, epx_str_t *out) {
    epx_status_t s = append_str(r, line, v, out);
    if (s < 0 && r->status == EPX_OK) r->status = s;
    return s < 0 ? s : check_size(r, line, out);
}

json_t *jinja_to_string(jinja_run_t *r, int line, json_t *v) {
    epx_str_t s = {0};
    json_t *j = NULL;
    if (jinja_kind(r, v) == KIND_STRING) return v;
    if (jinja_append_str(r, line, v, &s) == EPX_OK) j = jinja_string(r, line, s.data, s.n_bytes);
    epx_str_fini(&s);
    return j;
}

/* ---- JSON ---- */

typedef struct {
    jinja_run_t *r;
    int line;
    const jinja_json_style_t *style;
    epx_str_t *out;
} dump_t;

static epx_status_t dump(const dump_t *d, const json_t *v, int depth);

static epx_status_t dump_char(const dump_t *d, const char *p, size_t len, int32_t c) {
    static const char from[] = "\"\\\n\r\t\f\b", to[] = "\"\\nrtfb";
    const char *k = c > 0 && c < 0x80 ? strchr(from, (int)c) : NULL;
    if (k) return epx_str_printf(d->out, "\\%c", to[k - from]);
    if (c < 0x20 || (d->style->ensure_ascii && c >= 0x7F && c < 0x10000 && c != 0x7F))
        return epx_str_printf(d->out, "\\u%04x", (unsigned)c);
    if (d->style->ensure_ascii && c >= 0x10000)
        return epx_str_printf(d->out, "\\u%04x\\u%04x", 0xD7C0u + ((unsigned)c >> 10), 0xDC00u + ((unsigned)c & 0x3FF));
    return epx_str_append(d->out, p, len);
}

static epx_status_t dump_string(const dump_t *d, const char *p, size_t n) {
    size_t i, len;
    EPX_TRY(epx_str_append(d->out, "\"", 1));
    for (i = 0; i < n; i += len) {
        int32_t c = epx_utf8_decode(p + i, &len);
        EPX_TRY(dump_char(d, p + i, len, c));
    }
    return epx_str_append(d->out, "\"", 1);
}

static epx_status_t new_line(const dump_t *d, int depth) {
    int i;
    if (d->style->indent < 0) return EPX_OK;
    EPX_TRY(spend(d->r, d->line, (size_t)depth * (size_t)d->style->indent));
    EPX_TRY(epx_str_append(d->out, "\n", 1));
    for (i = 0; i < depth; i++) EPX_TRY(epx_str_printf(d->out, "%*s", d->style->indent, ""));
    return EPX_OK;
}

static epx_status_t dump_list(const dump_t *d, const json_t *v, int depth) {
    size_t i;
    json_t *w;
    EPX_TRY(epx_str_append(d->out, "[", 1));
    json_array_foreach(v, i, w) {
        if (i) EPX_TRY(epx_str_append_z(d->out, d->style->item_sep));
        EPX_TRY(new_line(d, depth + 1));
        EPX_TRY(dump(d, w, depth + 1));
    }
    if (i) EPX_TRY(new_line(d, depth));
    return epx_str_append(d->out, "]", 1);
}

static int by_key(const void *a, const void *b) { return strcmp(*(const char *const *)a, *(const char *const *)b); }

/* Keys of an object, sorted if asked; owned by the caller. */
static const char **keys_of(const json_t *v, int sorted) {
    const char **keys = malloc((json_object_size(v) + 1) * sizeof *keys), *key;
    size_t n = 0;
    json_t *w;
    if (keys == NULL) return NULL;
    json_object_foreach((json_t *)v, key, w) keys[n++] = key;
    if (sorted && n) qsort(keys, n, sizeof *keys, by_key);
    return keys;
}

static epx_status_t dump_member(const dump_t *d, const char *key, const json_t *v, int first, int depth) {
    if (!first) EPX_TRY(epx_str_append_z(d->out, d->style->item_sep));
    EPX_TRY(new_line(d, depth));
    EPX_TRY(dump_string(d, key, strlen(key)));
    EPX_TRY(epx_str_append_z(d->out, d->style->key_sep));
    return dump(d, v, depth);
}

/* JSON with NULs in keys does not reach us: jansson refuses it when parsing. */
static epx_status_t dump_dict(const dump_t *d, const json_t *v, int depth) {
    const char **keys = keys_of(v, d->style->sort_keys);
    epx_status_t s = keys ? epx_str_append(d->out, "{", 1) : epx_fail(EPX_ERR_NOMEM, "chat template: keys of a dict");
    size_t i, n = json_object_size(v);
    for (i = 0; s == EPX_OK && i < n; i++) s = dump_member(d, keys[i], json_object_get(v, keys[i]), i == 0, depth + 1);
    free(keys);
    EPX_TRY(s);
    if (n) EPX_TRY(new_line(d, depth));
    return epx_str_append(d->out, "}", 1);
}

static epx_status_t dump_float(const dump_t *d, double x) {
    if (isnan(x)) return epx_str_append_z(d->out, "NaN");
    if (isinf(x)) return epx_str_append_z(d->out, x < 0 ? "-Infinity" : "Infinity");
    return jinja_append_float(x, d->out);
}

static epx_status_t dump(const dump_t *d, const json_t *v, int depth) {
    jinja_kind_t k = jinja_kind(d->r, v);
    EPX_TRY(spend(d->r, d->line, k == KIND_STRING ? json_string_length(v) : 0));
    EPX_TRY(check_size(d->r, d->line, d->out));
    switch (k) {
    case KIND_NONE:
        return epx_str_append_z(d->out, "null");
    case KIND_BOOL:
        return epx_str_append_z(d->out, json_is_true(v) ? "true" : "false");
    case KIND_INT:
        return epx_str_printf(d->out, "%lld", (long long)json_integer_value(v));
    case KIND_FLOAT:
        return dump_float(d, json_real_value(v));
    case KIND_STRING:
        return dump_string(d, json_string_value(v), json_string_length(v));
    case KIND_LIST:
        return dump_list(d, v, depth);
    case KIND_DICT:
        return dump_dict(d, v, depth);
    default:
        jinja_fail(d->r, d->line, EPX_ERR_ARG, "tojson: a value of type %s is not JSON", jinja_type_name(d->r, v));
        return d->r->status;
    }
}

epx_status_t jinja_append_json(jinja_run_t *r, int line, const json_t *v, const jinja_json_style_t *style, epx_str_t *out) {
    dump_t d = {r, line, style, out};
    epx_status_t s = dump(&d, v, 0);
    if (s < 0 && r->status == EPX_OK) r->status = s;
    return s;
}
