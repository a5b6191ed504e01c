/* Ops whose work item is one row. */
#include <math.h>
#include <string.h>

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
    const float *gate;
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

void epx_cpu_rmsnorm(epx_ops_t *ops, const float *x, const epx_weight_t *w, float eps, int64_t n_rows, int64_t width, void *out) {
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

void epx_cpu_add_rows(epx_ops_t *ops, float *out, const void *add, int64_t n_rows, int64_t width) {
    epx_cpu_add(ops, out, add, n_rows, width);
}

void epx_cpu_argmax(epx_ops_t *ops, const float *x, int64_t n_rows, int64_t width, int32_t *out) {
    (void)ops;
    for (int64_t m = 0; m < n_rows; m++) {
        const float *row = x + m * width;
        int64_t best = 0, bad = 0;
        for (int64_t i = 0; i < width; i++) {
            bad |= !(row[i] < INFINITY);
            if (row[i] > row[best]) best = i;
        }
        out[m] = bad || row[best] == -INFINITY ? -1 : (int32_t)best;
    }
}

void epx_cpu_gather(epx_ops_t *ops, const float *x, const int32_t *rows, int64_t n_rows, int64_t width, float *out) {
    (void)ops;
    for (int64_t i = 0; i < n_rows; i++) memcpy(out + i * width, x + rows[i] * width, (size_t)width * sizeof(float));
}

static void add_gated_item(void *ctx, int64_t row, int thread) {
    const job_t *j = ctx;
    float factor[EPX_OPS_MAX_WIDTH], *out = j->out + row * j->width;
    (void)thread;
    j->k->scores(EPX_SCORE_SIGMOID, j->gate + row, 1, factor);
    for (int64_t i = 0; i < j->width; i++) out[i] += factor[0] * j->x[row * j->width + i];
}

void epx_cpu_add_gated(epx_ops_t *ops, float *out, const float *add, const float *gate, int64_t n_rows, int64_t width) {
    job_t j = {.k = epx_cpu(ops)->k, .x = add, .gate = gate, .out = out, .width = width};
    epx_pool_run(epx_cpu(ops)->pool, add_gated_item, &j, n_rows, epx_cpu_worth(8.0 * (double)(n_rows * width), 0));
}
