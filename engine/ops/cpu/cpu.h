/* The CPU op backend's object, shared by the op files of this folder. Threads and scratch live here, arithmetic in kernels.h. */
#ifndef EPX_ENGINE_OPS_CPU_CPU_H
#define EPX_ENGINE_OPS_CPU_CPU_H

#include "base/half.h"
#include "engine/ops/cpu/kernels.h"
#include "engine/ops/cpu/pool.h"
#include "engine/ops/ops_spi.h"

/* Rows [row0, row0 + n) of a list, all of one expert; rows count from the start of the present wave. */
typedef struct {
    int32_t expert, row0, n;
} epx_cpu_segment_t;

typedef struct {
    epx_ops_t base;
    const epx_cpu_kernels_t *k;
    epx_pool_t *pool;            /* owned */
    int64_t max_rows;            /* rows that `packed` and `mid` hold; more rows are done in waves */
    int64_t max_k, max_ffn;      /* reserved, padded to whole register pairs */
    float *packed;               /* owned, [max_rows, max_k] */
    float *mid;                  /* owned, [max_rows, max_ffn]: packed silu(gate) * up */
    epx_cpu_segment_t *segments; /* owned, [max_rows] */
    float *per_thread;           /* owned, [n_threads, thread_floats] */
    int64_t thread_floats;
} epx_cpu_ops_t;

static inline epx_cpu_ops_t *epx_cpu(epx_ops_t *ops) { return (epx_cpu_ops_t *)(void *)ops; }
static inline float *epx_cpu_scratch(const epx_cpu_ops_t *c, int thread) { return c->per_thread + thread * c->thread_floats; }
static inline int64_t epx_cpu_packed_len(const epx_cpu_ops_t *c, int64_t k) { return epx_packed_len(k, c->k->width); }
static inline int64_t epx_div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Whether a job of about this size pays for waking workers. One core: about 10 bytes and 100 operations a nanosecond. */
static inline int epx_cpu_worth(double bytes, double operations) { return bytes / 10.0 + operations / 100.0 > 12000.0; }

/* Bytes of one element of a weight. */
static inline int64_t epx_weight_bytes(epx_wtype_t type) { return type == EPX_W_F32 ? 4 : type == EPX_W_BF16 ? 2 : 1; }
/* Element i of a vector of f32 or bf16. */
static inline float epx_vector_at(const epx_weight_t *w, int64_t i) {
    return w->type == EPX_W_BF16 ? epx_bf16_to_f32(((const uint16_t *)w->data)[i]) : ((const float *)w->data)[i];
}
static inline int epx_present(const epx_weight_t *w) { return w != NULL && w->data != NULL; }

epx_status_t epx_ops_cpu_create(const epx_ops_config_t *cfg, epx_ops_t **out_ops);
epx_status_t epx_ops_cpu_available(void);
const char *epx_ops_cpu_isa_available(void);

/* out[i, c] += bias[n0 + c], i < m, c < n. */
void epx_cpu_add_bias(const epx_weight_t *bias, int64_t n0, int n, int m, float *out, int64_t ldo);

/* The functions of the table in ops_spi.h. */
epx_status_t epx_cpu_roofs(epx_ops_t *ops, epx_ops_roofs_t *out_roofs);
void epx_cpu_embed(epx_ops_t *ops, const epx_weight_t *table, const int32_t *ids, int64_t n_rows, float *out);
void epx_cpu_rmsnorm(epx_ops_t *ops, const float *x, const epx_weight_t *w, float eps, int64_t n_rows, int64_t width, void *out);
void epx_cpu_gather(epx_ops_t *ops, const float *x, const int32_t *rows, int64_t n_rows, int64_t width, float *out);
void epx_cpu_linears(epx_ops_t *ops, const void *x, int64_t ldx, const epx_linear_t *parts, int n, int64_t n_rows, int64_t ldo);
void epx_cpu_argmax(epx_ops_t *ops, const float *x, int64_t n_rows, int64_t width, int32_t *out);
void epx_cpu_add_rows(epx_ops_t *ops, float *out, const void *add, int64_t n_rows, int64_t width);
void epx_cpu_add(epx_ops_t *ops, float *out, const float *add, int64_t n_rows, int64_t width);
void epx_cpu_add_gated(epx_ops_t *ops, float *out, const float *add, const float *gate, int64_t n_rows, int64_t width);
void epx_cpu_qk_norm_rope_store(epx_ops_t *ops, float *q, float *k, const float *v, int64_t ldqkv, int n_heads,
                                const epx_weight_t *q_norm, const epx_weight_t *k_norm, float eps, const epx_rope_t *rope,
                                const epx_attn_row_t *rows, int64_t n_rows, const epx_kv_layer_t *kv);
void epx_cpu_attention(epx_ops_t *ops, const epx_attn_t *attn, const float *q, int64_t ldq, const epx_attn_row_t *rows,
                       int64_t n_rows, const epx_kv_layer_t *kv, void *out, int64_t ldo);
void epx_cpu_router(epx_ops_t *ops, const epx_router_t *router, const float *logits, int64_t n_rows, int32_t *out_ids,
                    float *out_weights);
void epx_cpu_experts(epx_ops_t *ops, const epx_lists_t *lists, const epx_expert_weights_t *experts, int64_t hidden, int64_t ffn,
                     void *out);
void epx_cpu_ffn(epx_ops_t *ops, const void *x, const epx_expert_weights_t *w, int64_t n_rows, int64_t hidden, int64_t ffn,
                 float *out);
/* memory.c */
epx_status_t epx_cpu_alloc(epx_ops_t *ops, size_t n_bytes, void **out);
void epx_cpu_free(epx_ops_t *ops, void *p, size_t n_bytes);
epx_status_t epx_cpu_copy(epx_ops_t *ops, void *to, const void *from, size_t n_bytes);
uint64_t epx_cpu_free_bytes(const epx_ops_t *ops);
void epx_cpu_random(epx_ops_t *ops, uint64_t seed, float half_width, size_t n, uint16_t *out);
void epx_cpu_fill(epx_ops_t *ops, uint16_t value, size_t n, uint16_t *out);

#endif
