/* The object of the CUDA ops, shared by the files of this folder, and small device helpers. Built without contraction: a fused
 * multiply-add is always written out. One thread per object. Kernels are queued on the object's stream; the first error sticks. */
#ifndef EPX_ENGINE_OPS_CUDA_OPS_CUH
#define EPX_ENGINE_OPS_CUDA_OPS_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "engine/ops/cuda/api.h"

namespace epx_cuda_ops {

enum {
    KV_BLOCK = 32,    /* positions of one step of the softmax */
    KV_SEGMENT = 256, /* positions that are summed apart and merged in ascending order, whatever the batch is */
    MAX_EXPERTS = 1024,
    MAX_WAVE_UNITS = 8192 /* (row, segment) pairs of decode attention that scratch holds */
};

/* One (row, segment) of decode attention. */
struct Unit {
    int32_t row, segment;
};
/* Rows [row0, row0 + n) of one sequence, done together. */
struct Tile {
    int32_t row0, n;
};

/* The step's rows in device memory, from one staged copy. */
struct Step {
    const int32_t *tokens, *positions, *table_at, *logit_rows, *tables; /* tables + table_at[row]: the row's block table */
    const Unit *units;
    const int32_t *row_units; /* [n_rows + 1] of decode rows: first unit; equal to the next: a row of a tile */
    const Tile *tiles;
};

/* Decode rows are done in waves of at most MAX_WAVE_UNITS. */
struct Wave {
    int32_t row0, row1, unit0, unit1;
};

struct Ops {
    epx_ops_t base;
    epx_ops_cuda_fail_fn fail;
    int device, n_sm;
    char isa[16];
    cudaStream_t stream;
    cudaError_t error;
    char what[96]; /* where `error` was seen first */

    /* the step, host side */
    epx_ops_step_t now;
    char *pinned, *staged; /* host and device, staging_bytes each */
    size_t staging_bytes;
    Step step;
    int32_t n_tiles, tile_rows;
    Wave *waves;
    int32_t n_waves, cap_waves;
    int top_k; /* of the step's router */

    /* scratch */
    __nv_bfloat16 *mid; /* [mid_rows, mid_width] */
    int64_t mid_rows, mid_width;
    float *partial; /* attention: [MAX_WAVE_UNITS, partial_heads, head_dim + 2] */
};

static inline Ops *of(epx_ops_t *ops) { return (Ops *)(void *)ops; }
static inline const Ops *of(const epx_ops_t *ops) { return (const Ops *)(const void *)ops; }

/* Keep the first error. */
void note(Ops *o, cudaError_t e, const char *what);
static inline void launched(Ops *o, const char *what) { note(o, cudaGetLastError(), what); }
/* Fail with the object's first error, if any. */
epx_status_t status_of(Ops *o);

static inline int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* ---- memory.cu ---- */
epx_status_t memory_alloc(epx_ops_t *ops, size_t n_bytes, void **out);
void memory_free(epx_ops_t *ops, void *p, size_t n_bytes);
epx_status_t memory_upload(epx_ops_t *ops, void *to, const void *from, size_t n_bytes);
epx_status_t memory_download(epx_ops_t *ops, void *to, const void *from, size_t n_bytes);
epx_status_t sync(epx_ops_t *ops);
uint64_t free_bytes(const epx_ops_t *ops);
void random_values(epx_ops_t *ops, uint64_t seed, float half_width, size_t n, uint16_t *out);
void fill_values(epx_ops_t *ops, uint16_t value, size_t n, uint16_t *out);
epx_status_t begin(epx_ops_t *ops, const epx_ops_step_t *step);
epx_status_t grow_staging(Ops *o, size_t n_bytes);

/* ---- rows.cu ---- */
void embed(epx_ops_t *ops, const epx_weight_t *table, const int32_t *ids, int64_t n_rows, float *out);
void rmsnorm(epx_ops_t *ops, const float *x, const epx_weight_t *w, float eps, int64_t n_rows, int64_t width, void *out);
void gather(epx_ops_t *ops, const float *x, const int32_t *rows, int64_t n_rows, int64_t width, float *out);
void argmax(epx_ops_t *ops, const float *x, int64_t n_rows, int64_t width, int32_t *out);
void add(epx_ops_t *ops, float *out, const float *more, int64_t n_rows, int64_t width);
void add_rows(epx_ops_t *ops, float *out, const void *more, int64_t n_rows, int64_t width);
void add_gated(epx_ops_t *ops, float *out, const float *more, const float *gate, int64_t n_rows, int64_t width);
void qk_norm_rope_store(epx_ops_t *ops, float *q, float *k, const float *v, int64_t ldqkv, int n_heads,
                        const epx_weight_t *q_norm, const epx_weight_t *k_norm, float eps, const epx_rope_t *rope,
                        const epx_attn_row_t *rows, int64_t n_rows, const epx_kv_layer_t *kv);
/* ---- router.cu ---- */
void router(epx_ops_t *ops, const epx_router_t *r, const float *logits, int64_t n_rows, int32_t *out_ids, float *out_weights);
/* ---- attention.cu ---- */
void attention(epx_ops_t *ops, const epx_attn_t *attn, const float *q, int64_t ldq, const epx_attn_row_t *rows, int64_t n_rows,
               const epx_kv_layer_t *kv, void *out, int64_t ldo);
/* Query rows of one tile of a model with these heads. */
int attention_tile_rows(int n_heads, int n_kv_heads);
/* ---- gemm.cu ---- */
void linears(epx_ops_t *ops, const void *x, int64_t ldx, const epx_linear_t *parts, int n, int64_t n_rows, int64_t ldo);
void experts(epx_ops_t *ops, const epx_lists_t *lists, const epx_expert_weights_t *w, int64_t hidden, int64_t ffn, void *out);
void ffn(epx_ops_t *ops, const void *x, const epx_expert_weights_t *w, int64_t n_rows, int64_t hidden, int64_t ffn, float *out);
/* Shared memory sizes of the kernels are raised once per device. */
cudaError_t gemm_prepare();
cudaError_t attention_prepare();

/* ---- device helpers ---- */

/* A vector of f32 or bf16; data NULL: absent. */
struct Vector {
    const void *data;
    int is_f32;
};
static inline Vector vector_of(const epx_weight_t *w) {
    if (w == nullptr || w->data == nullptr) return {nullptr, 0};
    return {w->data, w->type == EPX_W_F32};
}
__device__ static inline float at(Vector v, int64_t i) {
    return v.is_f32 ? ((const float *)v.data)[i] : __bfloat162float(((const __nv_bfloat16 *)v.data)[i]);
}
__device__ static inline float warp_sum(float x) {
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
    return x;
}
__device__ static inline float warp_max(float x) {
    for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
    return x;
}
__device__ static inline uint32_t smem_addr(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
/* 16 bytes to shared memory; valid 0: zeros, and nothing is read. */
__device__ static inline void copy16(uint32_t to, const void *from, bool valid) {
    const int n = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(n));
}
__device__ static inline void copy_commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ static inline void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
__device__ static inline void ldmatrix4(uint32_t (&r)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}
__device__ static inline void ldmatrix4_trans(uint32_t (&r)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}
__device__ static inline void ldmatrix2(uint32_t (&r)[2], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(from) : "memory");
}
/* c [16, 8] += a [16, 16] b [16, 8]: the one matrix instruction of all kernels here, so that a row's bits do not depend on tiles. */
__device__ static inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ static inline uint32_t pack(float lo, float hi) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
    return *(const uint32_t *)&v;
}

} // namespace epx_cuda_ops

#endif
