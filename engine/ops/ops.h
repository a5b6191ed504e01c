/* The engine's numerical operations. Models call ops only through this table; engine/ops/<device>/ implements it.
 *
 * Row rule: the bits of an output row depend only on that row's own inputs, its KV and the weights: never on M, the row's
 * place in the batch, tile, thread count, or on where chunks were cut. Each output's reduction order is a function of the
 * reduction length alone; threads split rows and columns of the output, never a sum.
 * All activations are f32, row-major. Weights are [N, K] row-major as Hugging Face stores them, bf16 or f32, read in place.
 * No op allocates: call epx_ops_reserve() before the first one that reduces (linear, ffn, experts); a shape over the reserved
 * max_k or max_ffn is an assertion failure. More rows than max_rows are legal everywhere and are done in waves.
 * head_dim is even and at most EPX_OPS_MAX_HEAD_DIM. No op validates ids, shapes or pointers: the model does. */
#ifndef EPX_ENGINE_OPS_OPS_H
#define EPX_ENGINE_OPS_OPS_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "epx/epx_device.h"

enum { EPX_OPS_MAX_HEAD_DIM = 512, EPX_OPS_MAX_THREADS = 255 };

typedef enum { EPX_W_F32 = 0, EPX_W_BF16 = 1 } epx_wtype_t;

/* A weight matrix or vector, borrowed (a mapped checkpoint); alignment: that of its element. */
typedef struct {
    const void *data; /* NULL: absent */
    epx_wtype_t type;
    int64_t n, k; /* [n, k]; a vector has n = 1 */
} epx_weight_t;

/* One expert's feed-forward: down(silu(gate(x)) * up(x)). gate, up [I, H]; down [H, I]. */
typedef struct {
    epx_weight_t gate, up, down;
} epx_expert_weights_t;

/* Where paged K and V of one layer lie. Position p of sequence s: page block_table[p / page_size], slot p % page_size.
 * One page: [page_size, n_kv_heads, head_dim] f32. */
typedef struct {
    float *k_pages, *v_pages; /* [n_pages, page_size, n_kv_heads, head_dim] of this layer */
    int32_t page_size;
    int32_t n_kv_heads, head_dim;
} epx_kv_layer_t;

/* One query row of the step: which sequence's pages it reads and its absolute position (it attends to 0..position). */
typedef struct {
    const int32_t *block_table;
    int32_t position;
} epx_attn_row_t;

typedef struct epx_ops epx_ops_t;

typedef struct {
    uint32_t size;
    int n_threads;   /* 1 .. EPX_OPS_MAX_THREADS, the caller's thread included */
    const int *cpus; /* [n_threads] or NULL: worker i is pinned to cpus[i]; cpus[0] is the caller's, who pins itself */
    const char *isa; /* "avx512", "avx2", "scalar"; NULL: the best this CPU has. Unavailable: EPX_ERR_UNSUPPORTED */
} epx_ops_config_t;

/* Owned by the caller (epx_ops_destroy); calls on one object from one thread at a time.
 * Returns EPX_ERR_ARG: size or n_threads, or a CPU that cannot be pinned to; EPX_ERR_UNSUPPORTED: isa; EPX_ERR_NOMEM.
 */
epx_status_t epx_ops_create(const epx_ops_config_t *cfg, epx_ops_t **out_ops);
void epx_ops_destroy(epx_ops_t *ops);
/* "avx512", "avx2" or "scalar": what runs. */
const char *epx_ops_isa(const epx_ops_t *ops);
int epx_ops_n_threads(const epx_ops_t *ops);
/* Comma-separated ISA levels usable on this CPU, best first ("avx512,avx2,scalar"). Static string. */
const char *epx_ops_isa_available(void);
/* Grow scratch for the largest shapes of a model: max_rows rows in a step, max_k the longest reduction, n_heads query heads,
 * max_ffn the largest I. */
epx_status_t epx_ops_reserve(epx_ops_t *ops, int64_t max_rows, int64_t max_k, int n_heads, int64_t max_ffn);

/* out[i, :] = f32(table[ids[i], :]). table [V, H]; 0 <= ids < V checked by the caller. */
void epx_ops_embed(epx_ops_t *ops, const epx_weight_t *table, const int32_t *ids, int64_t n_rows, float *out);
/* out[m, :] = x[m, :] / sqrt(mean(x^2) + eps) * w. Rows of `width`; in place allowed. */
void epx_ops_rmsnorm(epx_ops_t *ops, const float *x, const epx_weight_t *w, float eps, int64_t n_rows, int64_t width, float *out);
/* out[m, n] = sum_k x[m, k] w[n, k] (+ bias[n]). ldx, ldo in floats. bias may be NULL. */
void epx_ops_linear(epx_ops_t *ops, const float *x, int64_t ldx, const epx_weight_t *w, const epx_weight_t *bias, int64_t n_rows,
                    float *out, int64_t ldo);
/* In place: out[m, :] += add[m, :]. */
void epx_ops_add(epx_ops_t *ops, float *out, const float *add, int64_t n_rows, int64_t width);
/* Per-head RMSNorm of q and k (weights may be absent), then rotary embedding (split halves, inv_freq [head_dim / 2],
 * cos/sin scaled by rope_scale), then k and v written to their pages.
 * q [M, n_heads * head_dim] in place; k, v [M, n_kv_heads * head_dim]; rows[m].position gives the angle and the slot. */
void epx_ops_qk_norm_rope_store(epx_ops_t *ops, float *q, float *k, const float *v, int64_t ldqkv, int n_heads,
                                const epx_weight_t *q_norm, const epx_weight_t *k_norm, float eps, const float *inv_freq,
                                float rope_scale, const epx_attn_row_t *rows, int64_t n_rows, const epx_kv_layer_t *kv);
/* out[m, h, :] = softmax(q k^T * scale) v over positions 0..rows[m].position, grouped query heads.
 * Sums run over KV blocks cut at absolute positions (multiples of 64, whatever the page size), merged in ascending order. */
void epx_ops_attention(epx_ops_t *ops, const float *q, int64_t ldq, int n_heads, float scale, const epx_attn_row_t *rows,
                       int64_t n_rows, const epx_kv_layer_t *kv, float *out, int64_t ldo);
/* Softmax over E logits, the top_k largest (ties: lower id), renormalised to sum 1 if `renormalize`.
 * out_ids, out_weights [M, top_k], by descending probability. Softmax is over all E before the choice. */
void epx_ops_router_softmax_topk(epx_ops_t *ops, const float *logits, int64_t n_rows, int n_experts, int top_k, int renormalize,
                                 int32_t *out_ids, float *out_weights);
/* Expert feed-forward over dispatched lists, rows read in place (f32 rows of width hidden): for each local expert e and each
 * of its rows i: out[i, :] = down(silu(gate(x)) * up(x)). out [n_rows, hidden] in list order.
 * The bits of out[i] depend only on its row and expert. */
void epx_ops_experts(epx_ops_t *ops, const epx_lists_t *lists, const epx_expert_weights_t *experts, int64_t hidden, int64_t ffn,
                     float *out);
/* Dense feed-forward of the same form; x and out [n_rows, hidden]. */
void epx_ops_ffn(epx_ops_t *ops, const float *x, const epx_expert_weights_t *w, int64_t n_rows, int64_t hidden, int64_t ffn,
                 float *out);

#endif
