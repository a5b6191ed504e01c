/* What a rank wants from a checkpoint: a list of names and shapes with the place where the weight view goes.
 * Built from an architecture's table; served by checkpoint.c (mapped files) or dummy.c (random weights). */
#ifndef EPX_ENGINE_MODEL_LOAD_WANT_H
#define EPX_ENGINE_MODEL_LOAD_WANT_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "engine/ops/ops.h"

typedef struct {
    char name[160];
    int n_dims; /* 1 to 3 */
    int64_t shape[3];
    int sliced; /* 1: only element `slice` of the first dimension; the view has one dimension less */
    int64_t slice;
    int transposed;     /* a matrix of the file is [k, n] */
    int allow_f8;       /* e4m3 with NAME_scale_inv beside it is accepted; a matrix, not sliced */
    epx_weight_t *view; /* filled on success; borrowed from the caller */
} epx_want_t;

/* The view that a want asks for, without data. */
static inline epx_weight_t epx_want_view(const epx_want_t *w) {
    const int64_t *d = w->shape + w->sliced, matrix = w->n_dims - w->sliced == 2;
    epx_weight_t v = {.n = matrix ? d[0] : 1, .k = matrix ? d[1] : d[0]};
    if (matrix && w->transposed) v = (epx_weight_t){.n = d[1], .k = d[0], .transposed = 1};
    return v;
}

/* fraction 0..1 of the tensors. NULL: not wanted. */
typedef void (*epx_load_progress_fn)(void *ctx, const char *what, double fraction);

typedef struct {
    epx_load_progress_fn fn;
    void *ctx;
} epx_load_progress_t;

#endif
