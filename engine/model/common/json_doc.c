/* Typed, bounded reading of small JSON files. See json_doc.h. */
#include "engine/model/common/json_doc.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/str.h"

epx_status_t epx_json_doc_parse(const char *name, const char *text, size_t n_bytes, epx_json_doc_t *out_doc) {
    json_error_t e;
    json_t *root = json_loadb(text, n_bytes, JSON_REJECT_DUPLICATES, &e);
    if (!root) return epx_fail(EPX_ERR_FORMAT, "%s: line %d, column %d: not valid JSON: %s", name, e.line, e.column, e.text);
    if (!json_is_object(root)) {
        json_decref(root);
        return epx_fail(EPX_ERR_FORMAT, "%s: the top value is not a JSON object", name);
    }
    *out_doc = (epx_json_doc_t){name, root};
    return EPX_OK;
}

epx_status_t epx_json_doc_load(const char *path, epx_json_doc_t *out_doc) {
    char *text;
    size_t n_bytes;
    EPX_TRY(epx_read_file(path, EPX_JSON_FILE_MAX_BYTES, &text, &n_bytes));
    epx_status_t s = epx_json_doc_parse(path, text, n_bytes, out_doc);
    free(text);
    return s;
}

void epx_json_doc_fini(epx_json_doc_t *doc) {
    json_decref(doc->root);
    doc->root = NULL;
}

/* The value, NULL when absent or null. */
static const json_t *get(const epx_json_doc_t *doc, const char *key) {
    const json_t *v = json_object_get(doc->root, key);
    return json_is_null(v) ? NULL : v;
}

int epx_json_has(const epx_json_doc_t *doc, const char *key) { return get(doc, key) != NULL; }

/* The value as text for a message, cut at 80 bytes. */
static void show(const json_t *v, char out[84]) {
    size_t n = json_dumpb(v, out, 80, JSON_ENCODE_ANY | JSON_COMPACT);
    if (n > 80) memcpy(out + 77, "...", 3), n = 80;
    out[n] = 0;
}

static epx_status_t wrong(const epx_json_doc_t *doc, const char *key, const json_t *v, const char *expected) {
    char text[84];
    show(v, text);
    return epx_fail(EPX_ERR_FORMAT, "%s: %s is %s, expected %s", doc->name, key, text, expected);
}

epx_status_t epx_json_int(const epx_json_doc_t *doc, const char *key, int64_t lo, int64_t hi, int64_t *out) {
    if (!epx_json_has(doc, key))
        return epx_fail(EPX_ERR_FORMAT, "%s: %s is missing, expected an integer from %lld to %lld", doc->name, key, (long long)lo,
                        (long long)hi);
    return epx_json_int_or(doc, key, lo, hi, lo, out);
}

epx_status_t epx_json_int_or(const epx_json_doc_t *doc, const char *key, int64_t lo, int64_t hi, int64_t fallback, int64_t *out) {
    const json_t *v = get(doc, key);
    int64_t n = v ? (int64_t)json_integer_value(v) : fallback;
    if (v && (!json_is_integer(v) || n < lo || n > hi)) {
        char text[84];
        show(v, text);
        return epx_fail(EPX_ERR_FORMAT, "%s: %s is %s, expected an integer from %lld to %lld", doc->name, key, text,
                        (long long)lo, (long long)hi);
    }
    *out = n;
    return EPX_OK;
}

epx_status_t epx_json_real_or(const epx_json_doc_t *doc, const char *key, double lo, double hi, double fallback, double *out) {
    const json_t *v = get(doc, key);
    double d = v ? json_number_value(v) : fallback;
    if (v && (!json_is_number(v) || !(d >= lo && d <= hi))) {
        char text[84];
        show(v, text);
        return epx_fail(EPX_ERR_FORMAT, "%s: %s is %s, expected a number from %g to %g", doc->name, key, text, lo, hi);
    }
    *out = d;
    return EPX_OK;
}

epx_status_t epx_json_bool_or(const epx_json_doc_t *doc, const char *key, int fallback, int *out) {
    const json_t *v = get(doc, key);
    if (v && !json_is_boolean(v)) return wrong(doc, key, v, "true or false");
    *out = v ? json_is_true(v) : fallback;
    return EPX_OK;
}

epx_status_t epx_json_string_or(const epx_json_doc_t *doc, const char *key, const char *fallback, const char **out) {
    const json_t *v = get(doc, key);
    if (v && !json_is_string(v)) return wrong(doc, key, v, "a string");
    *out = v ? json_string_value(v) : fallback;
    return EPX_OK;
}

epx_status_t epx_json_eos(const epx_json_doc_t *doc, int64_t n_vocab, int32_t out_ids[EPX_MAX_EOS], int *out_n) {
    static const char key[] = "eos_token_id";
    const json_t *v = get(doc, key);
    if (!v) return EPX_OK;
    size_t n = json_is_array(v) ? json_array_size(v) : 1;
    if (n > EPX_MAX_EOS)
        return epx_fail(EPX_ERR_UNSUPPORTED, "%s: %s has %zu entries, at most %d", doc->name, key, n, EPX_MAX_EOS);
    int32_t ids[EPX_MAX_EOS];
    for (size_t i = 0; i < n; i++) {
        const json_t *e = json_is_array(v) ? json_array_get(v, i) : v;
        if (!json_is_integer(e) || json_integer_value(e) < 0 || json_integer_value(e) >= n_vocab)
            return epx_fail(EPX_ERR_FORMAT, "%s: %s: entry %zu is not a token id from 0 to %lld", doc->name, key, i,
                            (long long)n_vocab - 1);
        ids[i] = (int32_t)json_integer_value(e);
    }
    memcpy(out_ids, ids, n * sizeof ids[0]);
    *out_n = (int)n;
    return EPX_OK;
}

epx_status_t epx_json_refuse(const epx_json_doc_t *doc, const char *key, const char *why) {
    const json_t *v = get(doc, key);
    if (!v || json_is_false(v)) return EPX_OK;
    if (json_is_array(v) && json_array_size(v) == 0) return EPX_OK;
    if (json_is_object(v) && json_object_size(v) == 0) return EPX_OK;
    char text[84];
    show(v, text);
    return epx_fail(EPX_ERR_UNSUPPORTED, "%s: %s is %s: %s", doc->name, key, text, why);
}
