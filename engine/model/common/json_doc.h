/* Typed, bounded reading of small JSON files (config.json, generation_config.json): every error names file, field, value and the
 * legal values. Not a general JSON library: jansson does the parsing. Pure but for epx_json_doc_load(). */
#ifndef EPX_ENGINE_MODEL_COMMON_JSON_DOC_H
#define EPX_ENGINE_MODEL_COMMON_JSON_DOC_H

#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

#include "base/status.h"

enum { EPX_JSON_FILE_MAX_BYTES = 16 << 20, EPX_MAX_EOS = 8 };

typedef struct {
    const char *name; /* for messages; borrowed */
    json_t *root;     /* owned object */
} epx_json_doc_t;

/* Parse an object. name is borrowed for the life of the document. Duplicate keys are refused. EPX_ERR_FORMAT names the line. */
epx_status_t epx_json_doc_parse(const char *name, const char *text, size_t n_bytes, epx_json_doc_t *out_doc);
/* The same from a file of at most 16 MiB; path is borrowed as the name. */
epx_status_t epx_json_doc_load(const char *path, epx_json_doc_t *out_doc);
void epx_json_doc_fini(epx_json_doc_t *doc);

/* 1 when the key is there and not null. */
int epx_json_has(const epx_json_doc_t *doc, const char *key);
/* An integer in [lo, hi]; missing, null, another type or out of range: EPX_ERR_FORMAT. */
epx_status_t epx_json_int(const epx_json_doc_t *doc, const char *key, int64_t lo, int64_t hi, int64_t *out);
/* The same; missing or null gives `fallback`. */
epx_status_t epx_json_int_or(const epx_json_doc_t *doc, const char *key, int64_t lo, int64_t hi, int64_t fallback, int64_t *out);
/* A finite number (integer or real) in [lo, hi]; missing or null gives `fallback`. */
epx_status_t epx_json_real_or(const epx_json_doc_t *doc, const char *key, double lo, double hi, double fallback, double *out);
epx_status_t epx_json_bool_or(const epx_json_doc_t *doc, const char *key, int fallback, int *out);
/* A string; missing or null gives `fallback`. *out is borrowed from the document. */
epx_status_t epx_json_string_or(const epx_json_doc_t *doc, const char *key, const char *fallback, const char **out);
/* eos_token_id: an integer, a list of at most EPX_MAX_EOS, or null / absent (*out_n stays as it was then). */
epx_status_t epx_json_eos(const epx_json_doc_t *doc, int64_t n_vocab, int32_t out_ids[EPX_MAX_EOS], int *out_n);
/* EPX_ERR_UNSUPPORTED naming file, key and value unless the key is absent, null, false, or an empty array or object. */
epx_status_t epx_json_refuse(const epx_json_doc_t *doc, const char *key, const char *why);

#endif
