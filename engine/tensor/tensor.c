/* Element types of checkpoints. Any thread. */
#include "engine/tensor/tensor.h"

#include <string.h>

static const struct {
    const char *name;
    size_t n_bytes;
} table[] = {
#define ROW(name, text, n_bytes) {text, n_bytes},
    EPX_TENSOR_DTYPES(ROW)
#undef ROW
};

const char *epx_tensor_dtype_name(epx_tensor_dtype_t t) { return (unsigned)t < EPX_TENSOR_DTYPE_COUNT ? table[t].name : NULL; }

size_t epx_tensor_dtype_bytes(epx_tensor_dtype_t t) { return (unsigned)t < EPX_TENSOR_DTYPE_COUNT ? table[t].n_bytes : 0; }

int epx_tensor_dtype_from_name(const char *name) {
    for (int i = 0; i < EPX_TENSOR_DTYPE_COUNT; i++)
        if (strcmp(table[i].name, name) == 0) return i;
    return -1;
}
