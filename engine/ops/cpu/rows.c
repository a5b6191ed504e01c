/* Ops whose work item is one row. */
#include "base/status.h"
#include "engine/ops/cpu/cpu.h"

typedef struct {
    const epx_cpu_kernels_t *k;
    const epx_weight_t *w;
    const int32_t *ids;
    const float *x;
    float *out;
    int64_t width;
    float eps;
    int top_k, renormalize;
    int32_t *out_ids;
} job_t;

static void embed_item(void *ctx, int64_t row, int thread) {
    const job_t *j = ctx;
    (void)thread;
    j->k->widen_row(j->w, j->ids[row], j->out + row * j->w->k);
}

void epx_cpu_embed(epx_ops_t *ops, const epx_weight_t *table, const int32_t *ids, int64_t n_rows, float *out) {
    job_t j = {.k = epx_cpu(ops)->k, .w = table, .ids = ids, .out = out};
    epx_pool_run(epx_cpu(ops)->pool, embed_item, &j, n_rows, epx_cpu_worth(8.0 * (double)(n_rows * table->k), 0));
}

static void rmsnorm_item(void *ctx, int64_t row, int thread) {
    const job_t *j = ctx;
    (void)thread;
    j->k->rmsnorm(j->x + row * j->width, j->w, j->eps, j->width, j->out + row * j->width);
}

void epx_cpu_rmsnorm(epx_ops_t *ops, const float *x, const epx_weight_t *w, float eps, int64_t n_rows, int64_t width,
                     float *out) {
    job_t j = {.k = epx_cpu(ops)->k, .w = w, .x = x, .out = out, .width = width, .eps = eps};
    epx_pool_run(epx_cpu(ops)->pool, rmsnorm_item, &j, n_rows, epx_cpu_worth(8.0 * (double)(n_rows * width), 0));
}

static void add_item(void *ctx, int64_t row, int thread) {
    const job_t *j = ctx;
    (void)thread;
    j->k->add(j->out + row * j->width, j->x + row * j->width, j->width);
}

void epx_cpu_add(epx_ops_t *ops, float *out, const float *add, int64_t n_rows, int64_t width) {
    job_t j = {.k = epx_cpu(ops)->k, .x = add, .out = out, .width = width};
    epx_pool_run(epx_cpu(ops)->pool, add_item, &j, n_rows, epx_cpu_worth(8.0 * (double)(n_rows * width), 0));
}

static void router_item(void *ctx, int64_t row, int thread) {
    const job_t *j = ctx;
    (void)thread;
    j->k->router(j->x + row * j->width, (int)j->width, j->top_k, j->renormalize, j->out_ids + row * j->top_k,
                 j->out + row * j->top_k);
}

void epx_cpu_router(epx_ops_t *ops, const float *logits, int64_t n_rows, int n_experts, int top_k, int renormalize,
                    int32_t *out_ids, float *out_weights) {
    EPX_ASSERT(top_k >= 1 && top_k <= n_experts);
    job_t j = {.k = epx_cpu(ops)->k, .x = logits, .width = n_experts, .top_k = top_k, .renormalize = renormalize};
    j.out_ids = out_ids;
    j.out = out_weights;
    epx_pool_run(epx_cpu(ops)->pool, router_item, &j, n_rows, epx_cpu_worth(20.0 * (double)(n_rows * n_experts), 0));
}
