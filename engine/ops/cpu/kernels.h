/* The kernels of one instruction set, as a table. Each table comes from kernels_impl.h compiled with that set's flags.
 * Not here: threads, scratch ownership, argument checks (cpu.h and the op files).
 *
 * Packed rows: a reduction of length k is padded with zeros to a multiple of 2 * width floats. For bf16 weights [n, k] each group
 * of 2 * width holds the elements of even index, then those of odd index, because that is how a register of bf16 pairs
 * widens; for all other weights the order is natural. epx_pack_order() tells. */
#ifndef EPX_ENGINE_OPS_CPU_KERNELS_H
#define EPX_ENGINE_OPS_CPU_KERNELS_H

#include "engine/ops/ops.h"

enum {
    EPX_OPS_MAX_WIDTH = 16, /* floats of the widest register */
    EPX_OPS_N_CHUNK = 64,   /* output columns of one work item; a multiple of 2 * EPX_OPS_MAX_WIDTH */
    EPX_OPS_M_CHUNK = 64,   /* output rows of one work item */
    EPX_OPS_KV_BLOCK = 64,  /* attention cuts KV at multiples of this absolute position */
    EPX_OPS_Q_TILE = 32,    /* query vectors that share one pass over KV */
    EPX_OPS_MAX_EXPERTS = 16384,
    EPX_OPS_ROOF_FMAS = 10 /* registers of sums in fma_loop(): latency times units of the widest core we know */
};

/* out[i, j] = sum_k xp[i, k] w[n0 + j, k], i < m, j < n. */
typedef struct {
    const epx_weight_t *w;
    int64_t n0;
    int n, m;
    const float *xp; /* packed in epx_pack_order(w), 64-byte aligned rows */
    int64_t ldxp;
    float *out;
    int64_t ldo;
} epx_gemm_t;

/* Query vectors of one KV head: rows[0..n_rows) of one sequence, heads [head0, head0 + n_heads) of each; n_rows * n_heads
 * <= EPX_OPS_Q_TILE. q and out point at head 0 of rows[0]. */
typedef struct {
    const float *q;
    int64_t ldq;
    float *out;
    int64_t ldo;
    const epx_attn_row_t *rows;
    int n_rows, head0, n_heads, kv_head;
    const epx_attn_t *attn;
    const epx_kv_layer_t *kv;
    float *scratch; /* EPX_OPS_ATTN_FLOATS, 64-byte aligned */
} epx_attn_tile_t;

enum { EPX_OPS_ATTN_FLOATS = EPX_OPS_Q_TILE * (2 * EPX_OPS_MAX_HEAD_DIM + EPX_OPS_KV_BLOCK) };

typedef enum { EPX_PACK_NATURAL, EPX_PACK_EVEN_ODD } epx_pack_t;

static inline epx_pack_t epx_pack_order(const epx_weight_t *w) {
    return w->type == EPX_W_BF16 && !w->transposed ? EPX_PACK_EVEN_ODD : EPX_PACK_NATURAL;
}

typedef struct {
    const char *name;
    int width;
    /* dst[0 .. round_up(k, 2 * width)) = x packed in `order`. */
    void (*pack)(const float *x, int64_t k, epx_pack_t order, float *dst);
    void (*gemm)(const epx_gemm_t *g);
    /* dst = act(gate, up) of w packed for w->down; n <= EPX_OPS_N_CHUNK; gate is overwritten. */
    void (*act_pack)(float *gate, const float *up, int64_t n, const epx_expert_weights_t *w, float *dst);
    void (*attention)(const epx_attn_tile_t *t);
    void (*rmsnorm)(const float *x, const epx_weight_t *w, float eps, int64_t width, float *out);
    /* Rotate `dim` elements in place; cosine and sine [dim / 2]. */
    void (*rope)(float *x, const float *cosine, const float *sine, int dim, int interleaved);
    void (*add)(float *out, const float *add, int64_t n);
    /* out = row `row` of w as f32. */
    void (*widen_row)(const epx_weight_t *w, int64_t row, float *out);
    /* Softmax or sigmoid of n logits; out has room for n rounded up to width. */
    void (*scores)(epx_score_t score, const float *logits, int n, float *out);
    /* For roof.c: the sum of n floats, n a multiple of 64, read once in order; and `steps` times EPX_OPS_ROOF_FMAS independent
     * multiply-adds of a register. */
    float (*read_sum)(const float *x, int64_t n);
    float (*fma_loop)(int64_t steps);
} epx_cpu_kernels_t;

extern const epx_cpu_kernels_t epx_cpu_kernels_scalar;
extern const epx_cpu_kernels_t epx_cpu_kernels_avx2;
extern const epx_cpu_kernels_t epx_cpu_kernels_avx512;

/* The table named `isa`, or the best one for NULL; NULL when the name is unknown or this CPU lacks it. */
const epx_cpu_kernels_t *epx_cpu_kernels_find(const char *isa);

static inline int64_t epx_packed_len(int64_t k, int width) { return (k + 2 * width - 1) / (2 * width) * (2 * width); }

#endif
