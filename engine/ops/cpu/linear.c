/* Matrix products: rows are packed once, then work items are blocks of the output. */
#include "base/status.h"
#include "engine/ops/cpu/cpu.h"

typedef struct {
    epx_cpu_ops_t *c;
    const float *x;
    int64_t ldx, ldxp;
    const epx_weight_t *w, *bias;
    int64_t n_rows, n_col_items;
    float *out;
    int64_t ldo;
} job_t;

static void pack_item(void *ctx, int64_t row, int thread) {
    const job_t *j = ctx;
    (void)thread;
    j->c->k->pack(j->x + row * j->ldx, j->w->k, epx_pack_order(j->w), j->c->packed + row * j->ldxp);
}

void epx_cpu_add_bias(const epx_weight_t *bias, int64_t n0, int n, int m, float *out, int64_t ldo) {
    for (int i = 0; i < m; i++)
        for (int c = 0; c < n; c++) out[i * ldo + c] += epx_vector_at(bias, n0 + c);
}

/* Item: EPX_OPS_N_CHUNK columns of EPX_OPS_M_CHUNK rows; row blocks of the same columns follow each other. */
static void gemm_item(void *ctx, int64_t item, int thread) {
    const job_t *j = ctx;
    const int64_t n_row_items = epx_div_up(j->n_rows, EPX_OPS_M_CHUNK);
    const int64_t n0 = item / n_row_items * EPX_OPS_N_CHUNK, m0 = item % n_row_items * EPX_OPS_M_CHUNK;
    const epx_gemm_t g = {.w = j->w,
                          .n0 = n0,
                          .n = (int)(j->w->n - n0 < EPX_OPS_N_CHUNK ? j->w->n - n0 : EPX_OPS_N_CHUNK),
                          .m = (int)(j->n_rows - m0 < EPX_OPS_M_CHUNK ? j->n_rows - m0 : EPX_OPS_M_CHUNK),
                          .xp = j->c->packed + m0 * j->ldxp,
                          .ldxp = j->ldxp,
                          .out = j->out + m0 * j->ldo + n0,
                          .ldo = j->ldo};
    (void)thread;
    j->c->k->gemm(&g);
    if (epx_present(j->bias)) epx_cpu_add_bias(j->bias, n0, g.n, g.m, g.out, g.ldo);
}

static void linear(epx_ops_t *ops, const float *x, int64_t ldx, const epx_weight_t *w, const epx_weight_t *bias, int64_t n_rows,
                   float *out, int64_t ldo) {
    epx_cpu_ops_t *c = epx_cpu(ops);
    const int64_t kp = epx_cpu_packed_len(c, w->k);
    EPX_ASSERT(kp <= c->max_k);
    for (int64_t r = 0; r < n_rows; r += c->max_rows) {
        job_t j = {.c = c, .x = x + r * ldx, .ldx = ldx, .ldxp = kp, .w = w, .bias = bias, .out = out + r * ldo, .ldo = ldo};
        j.n_rows = n_rows - r < c->max_rows ? n_rows - r : c->max_rows;
        const double weights = (double)w->n * (double)w->k;
        epx_pool_run(c->pool, pack_item, &j, j.n_rows, epx_cpu_worth(8.0 * (double)(j.n_rows * w->k), 0));
        epx_pool_run(c->pool, gemm_item, &j, epx_div_up(w->n, EPX_OPS_N_CHUNK) * epx_div_up(j.n_rows, EPX_OPS_M_CHUNK),
                     epx_cpu_worth(weights * (double)epx_weight_bytes(w->type), 2.0 * weights * (double)j.n_rows));
    }
}

void epx_cpu_linears(epx_ops_t *ops, const void *x, int64_t ldx, const epx_linear_t *parts, int n, int64_t n_rows, int64_t ldo) {
    for (int i = 0; i < n; i++) linear(ops, x, ldx, &parts[i].w, &parts[i].bias, n_rows, parts[i].out, ldo);
}
