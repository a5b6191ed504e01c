/* What this CPU can do at most with the threads of an ops object: the bounds that `epx bench ops` prints beside each operation.
 * Not here: the operations themselves. */
#include <stdlib.h>

#include "base/clock.h"
#include "base/status.h"
#include "engine/ops/cpu/cpu.h"

enum { ITEMS_PER_THREAD = 4, FMA_STEPS = 4000000, REPEATS = 5 };
static const int64_t g_read_bytes = INT64_C(1) << 30; /* several times the largest cache of a socket that we know */

typedef struct {
    epx_cpu_ops_t *c;
    const float *data;
    int64_t n_floats; /* of one item */
    float *sink;      /* [n_threads * 16]: keeps the compiler from dropping the work; a cache line a thread */
} roof_t;

static void read_item(void *ctx, int64_t item, int thread) {
    const roof_t *r = ctx;
    r->sink[thread * 16] += r->c->k->read_sum(r->data + item * r->n_floats, r->n_floats);
}

static void fma_item(void *ctx, int64_t item, int thread) {
    const roof_t *r = ctx;
    (void)item;
    r->sink[thread * 16] += r->c->k->fma_loop(FMA_STEPS);
}

/* Shortest of REPEATS runs, seconds. */
static double best_s(roof_t *r, epx_pool_fn fn, int64_t n_items) {
    double best = 1e30;
    for (int i = 0; i < REPEATS; i++) {
        const uint64_t t0 = epx_now_ns();
        epx_pool_run(r->c->pool, fn, r, n_items, 1);
        const double s = (double)(epx_now_ns() - t0) * 1e-9;
        best = s < best ? s : best;
    }
    return best;
}

epx_status_t epx_cpu_roofs(epx_ops_t *ops, epx_ops_roofs_t *out_roofs) {
    epx_cpu_ops_t *c = epx_cpu(ops);
    const int64_t n_items = (int64_t)epx_pool_n_threads(c->pool) * ITEMS_PER_THREAD;
    roof_t r = {.c = c, .n_floats = g_read_bytes / 4 / n_items / 64 * 64};
    float *data = aligned_alloc(64, (size_t)g_read_bytes);
    r.sink = calloc((size_t)epx_pool_n_threads(c->pool) * 16, sizeof(float));
    if (data == NULL || r.sink == NULL) {
        free(data);
        free(r.sink);
        return epx_fail(EPX_ERR_NOMEM, "measuring the memory bandwidth: %lld bytes wanted", (long long)g_read_bytes);
    }
    for (int64_t i = 0; i < g_read_bytes / 4; i++) data[i] = 1.0f; /* real pages, not the zero page */
    r.data = data;
    out_roofs->read_bytes_per_s = (double)(r.n_floats * 4 * n_items) / best_s(&r, read_item, n_items);
    out_roofs->flops = (double)n_items * FMA_STEPS * EPX_OPS_ROOF_FMAS * 2.0 * c->k->width / best_s(&r, fma_item, n_items);
    free(data);
    free(r.sink);
    return EPX_OK;
}
