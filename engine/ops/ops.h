/* The engine's numerical operations. Models call ops only through this table; engine/ops/<device>/ implements it.
 *
 * Row rule: the bits of an output row depend only on that row's own inputs, its KV and the weights: never on M, the row's
 * place in the batch, tile, thread count, or on where chunks were cut. Each output's reduction order is a function of the
 * reduction length alone; threads split rows and columns of the output, never a sum.
 * Activations are row-major: f32, and *operand rows* (void *: what norms and attention give to matrix products and the exchange
 * carries), which have epx_ops_row_type(): f32 in host memory, bf16 in device memory. Strides count elements. Buffers, KV pages
 * and weights lie in the memory of the ops (epx_ops_alloc); ids, rows and structs of arguments are host memory everywhere.
 * Ops of a device are queued and return at once; an error shows in epx_ops_sync() or a download. Weights are [N, K] row-major (or
 * transposed) as Hugging Face stores them, bf16, f32 or block-scaled e4m3, read in place: a narrow type is widened in registers,
 * never copied. No op allocates: call epx_ops_reserve() before the first one that reduces (linear, ffn, experts); a shape over
 * the reserved max_k or max_ffn is an assertion failure. More rows than max_rows are legal everywhere and are done in waves.
 * head_dim is even and at most EPX_OPS_MAX_HEAD_DIM. No op validates ids, shapes or
 * pointers: the model does. */
#ifndef EPX_ENGINE_OPS_OPS_H
#define EPX_ENGINE_OPS_OPS_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "epx/epx_device.h"

/* 512 + 64: the compressed key of multi-head latent attention. */
enum { EPX_OPS_MAX_HEAD_DIM = 576, EPX_OPS_MAX_THREADS = 255 };

typedef enum { EPX_W_F32 = 0, EPX_W_BF16 = 1, EPX_W_F8_E4M3 = 2 } epx_wtype_t;

enum { EPX_W_SCALE_BLOCK = 128 }; /* rows and columns of an e4m3 matrix that share one scale */

/* A weight matrix or vector, borrowed (a mapped checkpoint); alignment: that of its element. */
typedef struct {
    const void *data; /* NULL: absent */
    epx_wtype_t type;
    int64_t n, k;      /* [n, k]; a vector has n = 1 */
    int transposed;    /* 1: stored as [k, n], row-major */
    const void *scale; /* e4m3 only: one factor for each 128 x 128 block of the stored matrix, row-major, ragged at the edges.
                        * Element = e4m3 value * factor, rounded to f32. NaN codes do not occur in weights. */
    epx_wtype_t scale_type; /* f32 or bf16 */
} epx_weight_t;

/* What stands between gate and up of a feed-forward and its down. */
typedef enum {
    EPX_ACT_SILU_MUL = 0, /* silu(gate) * up */
    EPX_ACT_CLAMPED_GLU   /* g sigmoid(1.702 g) * (u + 1), g = min(gate, limit), u = up clamped to +-limit (gpt-oss) */
} epx_act_t;

/* One expert's feed-forward: down(act(gate(x), up(x))). gate, up [I, H]; down [H, I].
 * up absent: gate is [2 I, H] and holds both, rows gate 0, up 0, gate 1, up 1, ..; its bias likewise. */
typedef struct {
    epx_weight_t gate, up, down;
    epx_weight_t gate_bias, down_bias; /* may be absent; gate_bias only with both in gate */
    epx_act_t act;
    float act_limit;
} epx_expert_weights_t;

/* Where paged K and V of one layer lie. Position p of sequence s: page block_table[p / page_size], slot p % page_size.
 * One page: [page_size, n_kv_heads, head_dim] in the ops' row type. */
typedef struct {
    void *k_pages, *v_pages; /* [n_pages, page_size, n_kv_heads, head_dim] of this layer; may be the same pages */
    int32_t page_size;
    int32_t n_kv_heads, head_dim;
    int32_t v_dim; /* leading floats of a head's V that attention reads and sums; 0: head_dim */
} epx_kv_layer_t;

/* Rotary embedding of a part of each head. */
typedef struct {
    const float *inv_freq; /* [dim / 2] */
    float scale;           /* of cosine and sine */
    int32_t first, dim;    /* elements first .. first + dim of the head; the others stay */
    int interleaved;       /* 0: pairs (i, i + dim / 2); 1: pairs (2 i, 2 i + 1) */
} epx_rope_t;

/* Attention of one layer. */
typedef struct {
    int n_heads;               /* query heads */
    float scale;               /* of q k^T */
    int32_t window;            /* 0: all positions; else the last `window` ones, the row's own included */
    const epx_weight_t *sinks; /* NULL, or [n_heads]: a logit per head that takes part in the softmax and has no value */
} epx_attn_t;

typedef enum { EPX_SCORE_SOFTMAX = 0, EPX_SCORE_SIGMOID } epx_score_t;

/* How experts are chosen from E logits. Choice: the top_k largest score + bias (ties: lower id) among the experts of the best
 * groups. Weight: the score without bias, divided by the sum over the chosen if `renormalize`, times factor. */
typedef struct {
    int n_experts, top_k;
    epx_score_t score;
    int renormalize;
    float factor;
    int n_groups, top_groups; /* E / n_groups consecutive experts a group; 1, 1: no groups */
    int group_best;           /* value of a group: sum of its group_best (1 or 2) largest score + bias */
    const epx_weight_t *bias; /* [E] f32 or bf16; NULL or absent: 0 */
} epx_router_t;

/* One query row of the step: which sequence's pages it reads and its absolute position (it attends to 0..position). */
typedef struct {
    const int32_t *block_table;
    int32_t position;
} epx_attn_row_t;

typedef struct epx_ops epx_ops_t;

typedef struct {
    uint32_t size;
    int n_threads;      /* 1 .. EPX_OPS_MAX_THREADS, the caller's thread included */
    const int *cpus;    /* [n_threads] or NULL: worker i is pinned to cpus[i]; cpus[0] is the caller's, who pins itself */
    const char *isa;    /* "avx512", "avx2", "scalar"; NULL: the best this CPU has. Unavailable: EPX_ERR_UNSUPPORTED */
    const char *device; /* "cpu", "cuda"; NULL: "cpu". Never another one than asked for */
    int device_idx;     /* which GPU; 0 for "cpu" */
} epx_ops_config_t;

/* What a model will ask of the ops; see epx_ops_accept(). */
typedef struct {
    int64_t hidden, moe_ffn, dense_ffn, shared_ffn; /* a size that is not used is 0 */
    int n_heads, n_kv_heads, head_dim, n_experts, top_k, n_groups;
    int latent_attention, sliding_window, fp8, attn_tp;
    epx_act_t act;
} epx_ops_needs_t;

/* The rows of a step, host memory, borrowed until the next epx_ops_begin(): later calls name them by the same pointers. */
typedef struct {
    int64_t n_rows;
    const int32_t *tokens;      /* [n_rows] */
    const epx_attn_row_t *rows; /* [n_rows] */
    int64_t n_logits;
    const int32_t *logit_rows; /* [n_logits] */
    int32_t page_size;
} epx_ops_step_t;

/* Matrices that share their input rows, for epx_ops_linears(). */
typedef struct {
    epx_weight_t w, bias;
    float *out;
} epx_linear_t;

/* Owned by the caller (epx_ops_destroy); calls on one object from one thread at a time.
 * Returns EPX_ERR_ARG: size or n_threads, or a CPU that cannot be pinned to; EPX_ERR_UNSUPPORTED: isa; EPX_ERR_NOMEM.
 */
epx_status_t epx_ops_create(const epx_ops_config_t *cfg, epx_ops_t **out_ops);
void epx_ops_destroy(epx_ops_t *ops);
/* "avx512", "avx2" or "scalar", or "sm_90": what runs. */
const char *epx_ops_isa(const epx_ops_t *ops);
/* The GPU that the ops run on; -1: the CPU. */
int epx_ops_device_idx(const epx_ops_t *ops);
/* cudaStream_t of the ops; NULL on the CPU. */
void *epx_ops_stream(const epx_ops_t *ops);
/* EPX_W_F32 on the CPU, else EPX_W_BF16; KV pages have it too. */
epx_wtype_t epx_ops_row_type(const epx_ops_t *ops);
size_t epx_ops_row_elem_bytes(const epx_ops_t *ops);
/* Can the ops of `device` be used here? EPX_OK; EPX_ERR_UNSUPPORTED with the reason; EPX_ERR_ARG: no such device. */
epx_status_t epx_ops_available(const char *device);
/* Make ready for a model; before its first step. EPX_ERR_UNSUPPORTED names what these ops lack for it, with the legal values. */
epx_status_t epx_ops_accept(epx_ops_t *ops, const epx_ops_needs_t *needs);

/* ---- memory ---- */

/* Zeroed, 64-byte aligned at least; host pages take memory only when they are used. EPX_ERR_NOMEM names the bytes. */
epx_status_t epx_ops_alloc(epx_ops_t *ops, size_t n_bytes, void **out);
/* n_bytes as at alloc. NULL allowed. */
void epx_ops_free(epx_ops_t *ops, void *p, size_t n_bytes);
/* Host to the ops' memory and back, after all work queued before; both wait until the bytes are there. */
epx_status_t epx_ops_upload(epx_ops_t *ops, void *to, const void *from, size_t n_bytes);
epx_status_t epx_ops_download(epx_ops_t *ops, void *to, const void *from, size_t n_bytes);
/* Wait for all queued work. EPX_ERR_OS: the first error of the device since create. */
epx_status_t epx_ops_sync(epx_ops_t *ops);
/* Bytes that epx_ops_alloc() could give now. */
uint64_t epx_ops_free_bytes(const epx_ops_t *ops);
/* 1: the ops read host memory, so that a mapped checkpoint is used in place. 0: weights must be brought by epx_ops_upload(). */
int epx_ops_reads_host(const epx_ops_t *ops);
/* Seeded bf16 values: uniform in +-half_width, the same on every device; and n times one value. out: the ops' memory. */
void epx_ops_random(epx_ops_t *ops, uint64_t seed, float half_width, size_t n, uint16_t *out);
void epx_ops_fill(epx_ops_t *ops, uint16_t value, size_t n, uint16_t *out);

/* ---- a step ---- */

/* Before the first op of a step that takes ids or rows. */
epx_status_t epx_ops_begin(epx_ops_t *ops, const epx_ops_step_t *step);
int epx_ops_n_threads(const epx_ops_t *ops);
/* Comma-separated ISA levels usable on this CPU, best first ("avx512,avx2,scalar"). Static string. */
const char *epx_ops_isa_available(void);
typedef struct {
    double flops;            /* f32 multiply-adds of all threads, two operations each, a second */
    double read_bytes_per_s; /* all threads reading memory that no cache holds */
} epx_ops_roofs_t;
/* Measure what the CPU can do at most, for benches: about a second, 1 GiB of memory for the while. EPX_ERR_NOMEM;
 * EPX_ERR_UNSUPPORTED on another device. */
epx_status_t epx_ops_roofs(epx_ops_t *ops, epx_ops_roofs_t *out_roofs);
/* Grow scratch for the largest shapes of a model: max_rows rows in a step, max_k the longest reduction, n_heads query heads,
 * max_ffn the largest I. */
epx_status_t epx_ops_reserve(epx_ops_t *ops, int64_t max_rows, int64_t max_k, int n_heads, int64_t max_ffn);

/* out[i, :] = f32(table[ids[i], :]). table [V, H]; 0 <= ids < V checked by the caller. */
void epx_ops_embed(epx_ops_t *ops, const epx_weight_t *table, const int32_t *ids, int64_t n_rows, float *out);
/* out[m, :] = x[m, :] / sqrt(mean(x^2) + eps) * w as operand rows. Rows of `width`; in place allowed on the CPU. */
void epx_ops_rmsnorm(epx_ops_t *ops, const float *x, const epx_weight_t *w, float eps, int64_t n_rows, int64_t width, void *out);
/* out[i, :] = x[rows[i], :]; rows are the step's logit_rows. */
void epx_ops_gather(epx_ops_t *ops, const float *x, const int32_t *rows, int64_t n_rows, int64_t width, float *out);
/* out[m, n] = sum_k x[m, k] w[n, k] (+ bias[n]); x operand rows. bias may be NULL. */
void epx_ops_linear(epx_ops_t *ops, const void *x, int64_t ldx, const epx_weight_t *w, const epx_weight_t *bias, int64_t n_rows,
                    float *out, int64_t ldo);
enum { EPX_OPS_MAX_LINEARS = 4 };
/* epx_ops_linear() of each of n matrices of equal k on the same rows. */
void epx_ops_linears(epx_ops_t *ops, const void *x, int64_t ldx, const epx_linear_t *parts, int n, int64_t n_rows, int64_t ldo);
/* out[m] = the place of the largest of x[m, 0 .. width), the first of equal ones; -1 where one is NaN or infinite, or all are
 * minus infinity. out: the ops' memory. */
void epx_ops_argmax(epx_ops_t *ops, const float *x, int64_t n_rows, int64_t width, int32_t *out);
/* In place: out[m, :] += add[m, :]. */
void epx_ops_add(epx_ops_t *ops, float *out, const float *add, int64_t n_rows, int64_t width);
/* The same for operand rows, such as combine gives. */
void epx_ops_add_rows(epx_ops_t *ops, float *out, const void *add, int64_t n_rows, int64_t width);
/* In place: out[m, :] += sigmoid(gate[m]) * add[m, :]. */
void epx_ops_add_gated(epx_ops_t *ops, float *out, const float *add, const float *gate, int64_t n_rows, int64_t width);
/* RMSNorm of q and k, then rotary embedding, then k and v written to their pages.
 * A norm weight may be absent or NULL; one as long as all heads together (more than one) norms the row as a whole, else it norms
 * its length of the front of each head.
 * q [M, n_heads * head_dim] in place; k, v [M, n_kv_heads * head_dim]; v NULL: nothing is written as v (v_pages == k_pages).
 * rows[m].position gives the angle and the slot. */
void epx_ops_qk_norm_rope_store(epx_ops_t *ops, float *q, float *k, const float *v, int64_t ldqkv, int n_heads,
                                const epx_weight_t *q_norm, const epx_weight_t *k_norm, float eps, const epx_rope_t *rope,
                                const epx_attn_row_t *rows, int64_t n_rows, const epx_kv_layer_t *kv);
/* out[m, h, :] = softmax(q k^T * scale) v over positions 0..rows[m].position (or the window's), grouped query heads;
 * q [M, n_heads * head_dim], out [M, n_heads * v_dim] operand rows.
 * Sums run over KV blocks cut at absolute positions (multiples of 64, whatever the page size), merged in ascending order. */
void epx_ops_attention(epx_ops_t *ops, const epx_attn_t *attn, const float *q, int64_t ldq, const epx_attn_row_t *rows,
                       int64_t n_rows, const epx_kv_layer_t *kv, void *out, int64_t ldo);
/* Choose experts. logits [M, E]; out_ids, out_weights [M, top_k], by descending choice. E at most 16,384. */
void epx_ops_router(epx_ops_t *ops, const epx_router_t *router, const float *logits, int64_t n_rows, int32_t *out_ids,
                    float *out_weights);
/* Expert feed-forward over dispatched lists, operand rows of width hidden read in place: for each local expert e and each
 * of its rows i: out[i, :] = down(act(gate(x), up(x))). out [n_rows, hidden] operand rows in list order.
 * The bits of out[i] depend only on its row and expert. */
void epx_ops_experts(epx_ops_t *ops, const epx_lists_t *lists, const epx_expert_weights_t *experts, int64_t hidden, int64_t ffn,
                     void *out);
/* Dense feed-forward of the same form; x operand rows, out f32, both [n_rows, hidden]. */
void epx_ops_ffn(epx_ops_t *ops, const void *x, const epx_expert_weights_t *w, int64_t n_rows, int64_t hidden, int64_t ffn,
                 float *out);

#endif
