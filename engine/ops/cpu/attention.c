/* Attention and what comes before it: per-head norms, rotary embedding, KV store. Work items are independent rows or tiles. */
#include <math.h>
#include <string.h>

#include "base/status.h"
#include "engine/ops/cpu/cpu.h"

typedef struct {
    epx_cpu_ops_t *c;
    float *q, *k;
    const float *v;
    int64_t ldqkv;
    int n_heads;
    const epx_weight_t *q_norm, *k_norm;
    float eps;
    const epx_rope_t *rope;
    const epx_attn_row_t *rows;
    const epx_kv_layer_t *kv;
} rope_job_t;

static void norm_rope_heads(const rope_job_t *j, float *x, int n_heads, const epx_weight_t *norm, const float *cosine,
                            const float *sine) {
    const int dim = j->kv->head_dim, whole = epx_present(norm) && norm->k > dim;
    if (whole) j->c->k->rmsnorm(x, norm, j->eps, norm->k, x);
    for (int h = 0; h < n_heads; h++) {
        if (epx_present(norm) && !whole) j->c->k->rmsnorm(x + h * dim, norm, j->eps, norm->k, x + h * dim);
        j->c->k->rope(x + h * dim + j->rope->first, cosine, sine, j->rope->dim, j->rope->interleaved);
    }
}

static void rope_item(void *ctx, int64_t row, int thread) {
    const rope_job_t *j = ctx;
    const epx_kv_layer_t *kv = j->kv;
    const int32_t position = j->rows[row].position;
    float *cosine = epx_cpu_scratch(j->c, thread), *sine = cosine + j->rope->dim / 2;
    for (int i = 0; i < j->rope->dim / 2; i++) {
        const float angle = (float)position * j->rope->inv_freq[i];
        cosine[i] = cosf(angle) * j->rope->scale;
        sine[i] = sinf(angle) * j->rope->scale;
    }
    float *k = j->k + row * j->ldqkv;
    norm_rope_heads(j, j->q + row * j->ldqkv, j->n_heads, j->q_norm, cosine, sine);
    norm_rope_heads(j, k, kv->n_kv_heads, j->k_norm, cosine, sine);
    const int64_t width = (int64_t)kv->n_kv_heads * kv->head_dim;
    const int64_t slot = (int64_t)j->rows[row].block_table[position / kv->page_size] * kv->page_size + position % kv->page_size;
    memcpy((float *)kv->k_pages + slot * width, k, (size_t)width * sizeof(float));
    if (j->v != NULL) memcpy((float *)kv->v_pages + slot * width, j->v + row * j->ldqkv, (size_t)width * sizeof(float));
}

void epx_cpu_qk_norm_rope_store(epx_ops_t *ops, float *q, float *k, const float *v, int64_t ldqkv, int n_heads,
                                const epx_weight_t *q_norm, const epx_weight_t *k_norm, float eps, const epx_rope_t *rope,
                                const epx_attn_row_t *rows, int64_t n_rows, const epx_kv_layer_t *kv) {
    rope_job_t j = {epx_cpu(ops), q, k, v, ldqkv, n_heads, q_norm, k_norm, eps, rope, rows, kv};
    EPX_ASSERT(kv->head_dim <= EPX_OPS_MAX_HEAD_DIM && kv->head_dim % 2 == 0);
    const double values = (double)n_rows * (n_heads + 2 * kv->n_kv_heads) * kv->head_dim;
    epx_pool_run(j.c->pool, rope_item, &j, n_rows, epx_cpu_worth(0, 100.0 * values));
}

typedef struct {
    epx_cpu_ops_t *c;
    epx_attn_tile_t tile; /* of the whole call; items narrow it */
    int64_t n_rows;
    int rows_per_tile, heads_per_tile, tiles_per_group; /* a group: the query heads of one KV head */
    int group;
} attn_job_t;

/* Run consecutive rows of one sequence through the kernel; rows of another sequence start another run. */
static void attn_runs(const attn_job_t *j, epx_attn_tile_t t, int64_t row0, int64_t row1) {
    for (int64_t r = row0, n; r < row1; r += n) {
        n = 1;
        while (r + n < row1 && j->tile.rows[r + n].block_table == j->tile.rows[r].block_table) n++;
        t.rows = j->tile.rows + r;
        t.n_rows = (int)n;
        t.q = j->tile.q + r * t.ldq;
        t.out = j->tile.out + r * t.ldo;
        j->c->k->attention(&t);
    }
}

static void attn_item(void *ctx, int64_t item, int thread) {
    const attn_job_t *j = ctx;
    const int64_t tiles_per_row = (int64_t)j->tile.kv->n_kv_heads * j->tiles_per_group;
    const int64_t row0 = item / tiles_per_row * j->rows_per_tile, in_row = item % tiles_per_row;
    const int64_t row1 = row0 + j->rows_per_tile < j->n_rows ? row0 + j->rows_per_tile : j->n_rows;
    epx_attn_tile_t t = j->tile;
    t.kv_head = (int)(in_row / j->tiles_per_group);
    const int first = (int)(in_row % j->tiles_per_group) * j->heads_per_tile;
    t.head0 = t.kv_head * j->group + first;
    t.n_heads = j->group - first < j->heads_per_tile ? j->group - first : j->heads_per_tile;
    t.scratch = epx_cpu_scratch(j->c, thread);
    attn_runs(j, t, row0, row1);
}

void epx_cpu_attention(epx_ops_t *ops, const epx_attn_t *attn, const float *q, int64_t ldq, const epx_attn_row_t *rows,
                       int64_t n_rows, const epx_kv_layer_t *kv, void *out, int64_t ldo) {
    const int n_heads = attn->n_heads;
    EPX_ASSERT(kv->head_dim <= EPX_OPS_MAX_HEAD_DIM && n_heads % kv->n_kv_heads == 0);
    attn_job_t j = {.c = epx_cpu(ops), .n_rows = n_rows, .group = n_heads / kv->n_kv_heads};
    j.tile = (epx_attn_tile_t){.q = q, .ldq = ldq, .out = out, .ldo = ldo, .rows = rows, .attn = attn, .kv = kv};
    j.heads_per_tile = j.group < EPX_OPS_Q_TILE ? j.group : EPX_OPS_Q_TILE;
    j.tiles_per_group = (int)epx_div_up(j.group, j.heads_per_tile);
    j.rows_per_tile = EPX_OPS_Q_TILE / j.heads_per_tile;
    double positions = 0;
    for (int64_t r = 0; r < n_rows; r++) positions += rows[r].position + 1;
    epx_pool_run(j.c->pool, attn_item, &j, epx_div_up(n_rows, j.rows_per_tile) * kv->n_kv_heads * j.tiles_per_group,
                 epx_cpu_worth(0, 8.0 * positions * n_heads * kv->head_dim));
}
