/* A named, typed, shaped view of bytes: what a checkpoint gives and a model takes. No ownership. */
#ifndef EPX_ENGINE_TENSOR_TENSOR_H
#define EPX_ENGINE_TENSOR_TENSOR_H

#include <stddef.h>
#include <stdint.h>

/* X(name, safetensors spelling, bytes per element) */
/* clang-format off */
#define EPX_TENSOR_DTYPES(X)                                                                                            \
    X(F64, "F64", 8) X(F32, "F32", 4) X(F16, "F16", 2) X(BF16, "BF16", 2) X(F8_E4M3, "F8_E4M3", 1) X(F8_E5M2, "F8_E5M2", 1) \
    X(I64, "I64", 8) X(I32, "I32", 4) X(I16, "I16", 2) X(I8, "I8", 1) X(U64, "U64", 8) X(U32, "U32", 4) X(U16, "U16", 2) \
    X(U8, "U8", 1) X(BOOL, "BOOL", 1)
/* clang-format on */

typedef enum {
#define EPX_TENSOR_ENUM(name, text, n_bytes) EPX_TENSOR_##name,
    EPX_TENSOR_DTYPES(EPX_TENSOR_ENUM)
#undef EPX_TENSOR_ENUM
        EPX_TENSOR_DTYPE_COUNT
} epx_tensor_dtype_t;

enum { EPX_TENSOR_MAX_DIMS = 8 };

typedef struct {
    const char *name; /* borrowed */
    epx_tensor_dtype_t dtype;
    int n_dims;
    int64_t shape[EPX_TENSOR_MAX_DIMS];
    const void *data; /* borrowed; NULL when not mapped */
    uint64_t n_bytes;
} epx_tensor_t;

/* "BF16"; NULL out of range. */
const char *epx_tensor_dtype_name(epx_tensor_dtype_t t);
size_t epx_tensor_dtype_bytes(epx_tensor_dtype_t t);
/* -1 for an unknown spelling. */
int epx_tensor_dtype_from_name(const char *name);

#endif
