/* Create, destroy and scratch of the CPU op backend. */
#include "engine/ops/cpu/cpu.h"

#include <stdlib.h>

#include "base/checked.h"

enum { MIN_ROWS = 256 }; /* so that a wave of a small batch still has work for every thread */

static void cpu_destroy(epx_ops_t *ops) {
    epx_cpu_ops_t *c = epx_cpu(ops);
    epx_pool_destroy(c->pool);
    free(c->packed);
    free(c->mid);
    free(c->segments);
    free(c->per_thread);
    free(c);
}

static const char *cpu_isa(const epx_ops_t *ops) { return ((const epx_cpu_ops_t *)(const void *)ops)->k->name; }
static int cpu_n_threads(const epx_ops_t *ops) { return epx_pool_n_threads(((const epx_cpu_ops_t *)(const void *)ops)->pool); }

/* *out = a * b elements, 64-byte aligned; the old block is freed only on success. */
static epx_status_t grow(void **out, int64_t a, int64_t b, size_t elem_bytes) {
    size_t bytes;
    if (!epx_mul_size((size_t)a, (size_t)b, &bytes) || !epx_mul_size(bytes, elem_bytes, &bytes) ||
        !epx_round_up_size(bytes, 64, &bytes))
        return epx_fail(EPX_ERR_NOMEM, "ops scratch of %lld x %lld elements overflows", (long long)a, (long long)b);
    void *p = aligned_alloc(64, bytes);
    if (p == NULL) return epx_fail(EPX_ERR_NOMEM, "ops scratch: %zu bytes wanted", bytes);
    free(*out);
    *out = p;
    return EPX_OK;
}

static int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

static epx_status_t cpu_reserve(epx_ops_t *ops, int64_t max_rows, int64_t max_k, int n_heads, int64_t max_ffn) {
    epx_cpu_ops_t *c = epx_cpu(ops);
    (void)n_heads; /* attention works in tiles of fixed size */
    if (max_k > INT32_MAX || max_ffn > INT32_MAX || max_rows > INT32_MAX)
        return epx_fail(EPX_ERR_ARG, "epx_ops_reserve: max_rows %lld, max_k %lld, max_ffn %lld; legal: below 2^31",
                        (long long)max_rows, (long long)max_k, (long long)max_ffn);
    const int64_t rows = max_i64(c->max_rows, max_i64(max_rows, MIN_ROWS));
    const int64_t k = max_i64(c->max_k, epx_packed_len(max_i64(max_k, max_ffn), EPX_OPS_MAX_WIDTH));
    const int64_t ffn = max_i64(c->max_ffn, epx_packed_len(max_ffn, EPX_OPS_MAX_WIDTH));
    const int64_t per_thread = max_i64(2 * EPX_OPS_M_CHUNK * EPX_OPS_N_CHUNK, EPX_OPS_ATTN_FLOATS);
    EPX_TRY(grow((void **)&c->per_thread, epx_pool_n_threads(c->pool), per_thread, sizeof(float)));
    c->thread_floats = per_thread;
    EPX_TRY(grow((void **)&c->packed, rows, k, sizeof(float)));
    EPX_TRY(grow((void **)&c->mid, rows, ffn + 16, sizeof(float)));
    EPX_TRY(grow((void **)&c->segments, rows, 1, sizeof *c->segments));
    c->max_k = k;
    c->max_ffn = ffn;
    c->max_rows = rows;
    return EPX_OK;
}

/* Every model that can be loaded runs here, everything is done when a call returns, and arguments are read where they lie. */
static epx_status_t cpu_accept(epx_ops_t *ops, const epx_ops_needs_t *needs) {
    (void)ops, (void)needs;
    return EPX_OK;
}
static epx_status_t cpu_sync(epx_ops_t *ops) {
    (void)ops;
    return EPX_OK;
}
static epx_status_t cpu_begin(epx_ops_t *ops, const epx_ops_step_t *step) {
    (void)ops, (void)step;
    return EPX_OK;
}

static const epx_ops_vtbl_t g_vtbl = {
    .destroy = cpu_destroy,
    .isa = cpu_isa,
    .n_threads = cpu_n_threads,
    .accept = cpu_accept,
    .roofs = epx_cpu_roofs,
    .reserve = cpu_reserve,
    .alloc = epx_cpu_alloc,
    .free = epx_cpu_free,
    .upload = epx_cpu_copy,
    .download = epx_cpu_copy,
    .sync = cpu_sync,
    .free_bytes = epx_cpu_free_bytes,
    .random = epx_cpu_random,
    .fill = epx_cpu_fill,
    .begin = cpu_begin,
    .embed = epx_cpu_embed,
    .rmsnorm = epx_cpu_rmsnorm,
    .gather = epx_cpu_gather,
    .linears = epx_cpu_linears,
    .argmax = epx_cpu_argmax,
    .add = epx_cpu_add,
    .add_rows = epx_cpu_add_rows,
    .add_gated = epx_cpu_add_gated,
    .qk_norm_rope_store = epx_cpu_qk_norm_rope_store,
    .attention = epx_cpu_attention,
    .router = epx_cpu_router,
    .experts = epx_cpu_experts,
    .ffn = epx_cpu_ffn,
};

epx_status_t epx_ops_cpu_available(void) { return EPX_OK; }

epx_status_t epx_ops_cpu_create(const epx_ops_config_t *cfg, epx_ops_t **out_ops) {
    const epx_cpu_kernels_t *k = epx_cpu_kernels_find(cfg->isa);
    if (cfg->device_idx != 0) return epx_fail(EPX_ERR_ARG, "device_idx is %d; legal with device cpu: 0", cfg->device_idx);
    if (k == NULL)
        return epx_fail(EPX_ERR_UNSUPPORTED, "instruction set '%s' is not available; legal here: %s", cfg->isa,
                        epx_ops_cpu_isa_available());
    epx_cpu_ops_t *c = calloc(1, sizeof *c);
    if (c == NULL) return epx_fail(EPX_ERR_NOMEM, "ops object");
    c->base = (epx_ops_t){.v = &g_vtbl, .row_type = EPX_W_F32, .device_idx = -1};
    c->k = k;
    epx_status_t st = epx_pool_create(cfg->n_threads, cfg->cpus, &c->pool);
    if (st == EPX_OK) st = cpu_reserve(&c->base, MIN_ROWS, 1, 0, 0);
    if (st != EPX_OK) {
        cpu_destroy(&c->base);
        return st;
    }
    *out_ops = &c->base;
    return EPX_OK;
}
