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
    int n_dims; /* 1 or 2 */
    int64_t shape[2];
    epx_weight_t *view; /* filled on success; borrowed from the caller */
} epx_want_t;

/* fraction 0..1 of the tensors. NULL: not wanted. */
typedef void (*epx_load_progress_fn)(void *ctx, const char *what, double fraction);

typedef struct {
    epx_load_progress_fn fn;
    void *ctx;
} epx_load_progress_t;

#endif
