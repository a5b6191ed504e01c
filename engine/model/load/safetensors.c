/* Safetensors headers. See safetensors.h. Any thread. */
#include "engine/model/load/safetensors.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

const char *epx_shape_text(const int64_t *shape, int n_dims, char *out, size_t n_out) {
    size_t at = (size_t)snprintf(out, n_out, "[");
    for (int i = 0; i < n_dims && at < n_out; i++)
        at += (size_t)snprintf(out + at, n_out - at, "%s%" PRId64, i ? ", " : "", shape[i]);
    if (at < n_out) snprintf(out + at, n_out - at, "]");
    return out;
}

epx_status_t epx_safetensors_header_bytes(const char *file, const uint8_t first[8], uint64_t file_bytes, uint64_t *out_bytes) {
    uint64_t n = 0;
    if (file_bytes < 8)
        return epx_fail(EPX_ERR_FORMAT, "%s: %" PRIu64 " bytes, a safetensors file has at least 10", file, file_bytes);
    for (int i = 7; i >= 0; i--) n = n << 8 | first[i];
    if (n < 2 || n > EPX_SAFETENSORS_MAX_HEADER_BYTES)
        return epx_fail(EPX_ERR_FORMAT, "%s: header length is %" PRIu64 " bytes, expected 2 to %d", file, n,
                        EPX_SAFETENSORS_MAX_HEADER_BYTES);
    if (n > file_bytes - 8)
        return epx_fail(EPX_ERR_FORMAT,
                        "%s: header length is %" PRIu64 " bytes, but only %" PRIu64 " bytes follow: the file is truncated", file,
                        n, file_bytes - 8);
    *out_bytes = n;
    return EPX_OK;
}

/* dtype and shape; the number of bytes they need goes to t->n_bytes. */
static epx_status_t parse_type(const char *file, const char *name, const json_t *v, epx_tensor_t *t) {
    const json_t *dtype = json_object_get(v, "dtype"), *shape = json_object_get(v, "shape");
    if (!json_is_string(dtype)) return epx_fail(EPX_ERR_FORMAT, "%s: tensor \"%s\": dtype is not a string", file, name);
    int d = epx_tensor_dtype_from_name(json_string_value(dtype));
    if (d < 0)
        return epx_fail(EPX_ERR_UNSUPPORTED, "%s: tensor \"%s\": dtype is \"%s\", not a known one", file, name,
                        json_string_value(dtype));
    if (!json_is_array(shape) || json_array_size(shape) > EPX_TENSOR_MAX_DIMS)
        return epx_fail(EPX_ERR_FORMAT, "%s: tensor \"%s\": shape is not an array of at most %d sizes", file, name,
                        EPX_TENSOR_MAX_DIMS);
    uint64_t n = epx_tensor_dtype_bytes((epx_tensor_dtype_t)d);
    t->dtype = (epx_tensor_dtype_t)d;
    t->n_dims = (int)json_array_size(shape);
    for (int i = 0; i < t->n_dims; i++) {
        const json_t *s = json_array_get(shape, (size_t)i);
        if (!json_is_integer(s) || json_integer_value(s) < 0)
            return epx_fail(EPX_ERR_FORMAT, "%s: tensor \"%s\": shape[%d] is not a size of 0 or more", file, name, i);
        t->shape[i] = json_integer_value(s);
        if (__builtin_mul_overflow(n, (uint64_t)t->shape[i], &n))
            return epx_fail(EPX_ERR_FORMAT, "%s: tensor \"%s\": the product of its shape overflows 64 bits", file, name);
    }
    t->n_bytes = n;
    return EPX_OK;
}

/* data_offsets, relative to the data; checked against the size that the shape needs and against the file. */
static epx_status_t parse_range(const char *file, const json_t *v, uint64_t data_bytes, epx_tensor_t *t, uint64_t *out_begin) {
    const json_t *off = json_object_get(v, "data_offsets"), *b = json_array_get(off, 0), *e = json_array_get(off, 1);
    if (!json_is_array(off) || json_array_size(off) != 2 || !json_is_integer(b) || !json_is_integer(e) ||
        json_integer_value(b) < 0 || json_integer_value(e) < json_integer_value(b))
        return epx_fail(EPX_ERR_FORMAT, "%s: tensor \"%s\": data_offsets is not [begin, end] with 0 <= begin <= end", file,
                        t->name);
    uint64_t begin = (uint64_t)json_integer_value(b), end = (uint64_t)json_integer_value(e);
    char shape[160];
    if (end - begin != t->n_bytes)
        return epx_fail(EPX_ERR_FORMAT,
                        "%s: tensor \"%s\": data_offsets [%" PRIu64 ", %" PRIu64 "] hold %" PRIu64
                        " bytes, shape %s of %s needs %" PRIu64,
                        file, t->name, begin, end, end - begin, epx_shape_text(t->shape, t->n_dims, shape, sizeof shape),
                        epx_tensor_dtype_name(t->dtype), t->n_bytes);
    if (end > data_bytes)
        return epx_fail(EPX_ERR_FORMAT,
                        "%s: tensor \"%s\": data ends at byte %" PRIu64 ", but the file has %" PRIu64
                        " data bytes: it is truncated",
                        file, t->name, end, data_bytes);
    *out_begin = begin;
    return EPX_OK;
}

static epx_status_t parse_entry(const char *file, const char *name, const json_t *v, uint64_t data_off, uint64_t file_bytes,
                                epx_safetensors_entry_t *out) {
    uint64_t begin = 0;
    if (!json_is_object(v)) return epx_fail(EPX_ERR_FORMAT, "%s: tensor \"%s\": its entry is not an object", file, name);
    EPX_TRY(parse_type(file, name, v, &out->tensor));
    out->tensor.name = name;
    EPX_TRY(parse_range(file, v, file_bytes - data_off, &out->tensor, &begin));
    out->file_off = data_off + begin;
    return EPX_OK;
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const epx_safetensors_entry_t *)a)->tensor.name, ((const epx_safetensors_entry_t *)b)->tensor.name);
}

static int by_offset(const void *a, const void *b) {
    const epx_safetensors_entry_t *x = a, *y = b;
    if (x->file_off != y->file_off) return x->file_off < y->file_off ? -1 : 1;
    return x->tensor.n_bytes < y->tensor.n_bytes ? -1 : x->tensor.n_bytes > y->tensor.n_bytes;
}

/* Ranges must follow one another from the first data byte to the last. Sorts by offset. */
static epx_status_t check_cover(const char *file, epx_safetensors_t *st, uint64_t data_off, uint64_t file_bytes) {
    uint64_t at = data_off;
    qsort(st->entries, st->n, sizeof *st->entries, by_offset);
    for (size_t i = 0; i < st->n; i++) {
        const epx_safetensors_entry_t *e = &st->entries[i];
        if (e->file_off != at)
            return epx_fail(EPX_ERR_FORMAT, "%s: tensor \"%s\": data begins at byte %" PRIu64 ", expected %" PRIu64 ": %s", file,
                            e->tensor.name, e->file_off - data_off, at - data_off,
                            e->file_off < at ? "it overlaps the tensor before it" : "there is a hole before it");
        at += e->tensor.n_bytes;
    }
    if (at != file_bytes)
        return epx_fail(EPX_ERR_FORMAT, "%s: %" PRIu64 " bytes of data, the header describes %" PRIu64, file,
                        file_bytes - data_off, at - data_off);
    return EPX_OK;
}

static epx_status_t parse_all(const char *file, json_t *root, uint64_t data_off, uint64_t file_bytes, epx_safetensors_t *st) {
    const char *key;
    json_t *v;
    json_object_foreach(root, key, v) {
        if (strcmp(key, "__metadata__") == 0) {
            if (!json_is_object(v)) return epx_fail(EPX_ERR_FORMAT, "%s: __metadata__ is not an object", file);
            continue;
        }
        char *name = strdup(key);
        if (!name) return epx_fail(EPX_ERR_NOMEM, "%s: no memory for tensor names", file);
        st->entries[st->n].tensor.name = name;
        st->n++;
        EPX_TRY(parse_entry(file, name, v, data_off, file_bytes, &st->entries[st->n - 1]));
    }
    EPX_TRY(check_cover(file, st, data_off, file_bytes));
    qsort(st->entries, st->n, sizeof *st->entries, by_name);
    return EPX_OK;
}

epx_status_t epx_safetensors_parse(const char *file, const char *json, size_t n_json, uint64_t file_bytes,
                                   epx_safetensors_t *out) {
    json_error_t err;
    if (n_json > file_bytes || file_bytes - n_json < 8) return epx_fail(EPX_ERR_FORMAT, "%s: header longer than the file", file);
    json_t *root = json_loadb(json, n_json, JSON_REJECT_DUPLICATES, &err);
    if (!root) return epx_fail(EPX_ERR_FORMAT, "%s: header, byte %d: %s", file, err.position, err.text);
    epx_status_t s = EPX_OK;
    epx_safetensors_t st = {0};
    if (!json_is_object(root)) s = epx_fail(EPX_ERR_FORMAT, "%s: the header is not a JSON object", file);
    if (s == EPX_OK && !(st.entries = calloc(json_object_size(root) + 1, sizeof *st.entries)))
        s = epx_fail(EPX_ERR_NOMEM, "%s: no memory for %zu tensors", file, json_object_size(root));
    if (s == EPX_OK) s = parse_all(file, root, 8 + n_json, file_bytes, &st);
    json_decref(root);
    if (s < 0) {
        epx_safetensors_fini(&st);
        return s;
    }
    *out = st;
    return EPX_OK;
}

const epx_safetensors_entry_t *epx_safetensors_find(const epx_safetensors_t *st, const char *name) {
    epx_safetensors_entry_t key = {.tensor.name = name};
    return st->n ? bsearch(&key, st->entries, st->n, sizeof key, by_name) : NULL;
}

void epx_safetensors_fini(epx_safetensors_t *st) {
    for (size_t i = 0; i < st->n; i++) free((char *)st->entries[i].tensor.name);
    free(st->entries);
    *st = (epx_safetensors_t){0};
}
