/* The header of a safetensors file: names, types, shapes and byte ranges, checked before anything is believed.
 * Format: 8 bytes little-endian header length, that many bytes of JSON, then the data; ranges cover the data without holes or
 * overlaps (https://github.com/huggingface/safetensors, README, "Format"). Pure: reads no file. */
#ifndef EPX_ENGINE_MODEL_LOAD_SAFETENSORS_H
#define EPX_ENGINE_MODEL_LOAD_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "engine/tensor/tensor.h"

enum { EPX_SAFETENSORS_MAX_HEADER_BYTES = 100 * 1000 * 1000 }; /* the limit of the reference implementation */

typedef struct {
    epx_tensor_t tensor; /* name owned by the header; data NULL */
    uint64_t file_off;   /* of the first byte, from the start of the file */
} epx_safetensors_entry_t;

typedef struct {
    epx_safetensors_entry_t *entries; /* owned, [n], ascending by name */
    size_t n;
} epx_safetensors_t;

/* From the first 8 bytes of a file of file_bytes: how long the header is. EPX_ERR_FORMAT when it cannot be one. */
epx_status_t epx_safetensors_header_bytes(const char *file, const uint8_t first[8], uint64_t file_bytes, uint64_t *out_bytes);
/* Parse and check a header. file: for messages. json [n_json] is borrowed during the call; file_bytes: of the whole file. */
epx_status_t epx_safetensors_parse(const char *file, const char *json, size_t n_json, uint64_t file_bytes,
                                   epx_safetensors_t *out);
/* NULL when there is no such tensor. */
const epx_safetensors_entry_t *epx_safetensors_find(const epx_safetensors_t *st, const char *name);
void epx_safetensors_fini(epx_safetensors_t *st);

/* "[2, 3]" into out, cut to n_out bytes; returns out. For messages. */
const char *epx_shape_text(const int64_t *shape, int n_dims, char *out, size_t n_out);

#endif
