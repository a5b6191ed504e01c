/* Ops whose unit is a row or a head: embedding, norms, sums, rotary embedding with the KV write. Memory-bound. Every sum over a row
 * is taken in an order that depends on its length alone. */
#include <math_constants.h>

#include "engine/ops/cuda/cuda_ops.cuh"

namespace epx_cuda_ops {

enum { THREADS = 256, WARPS = THREADS / 32 };

/* Block: one row. */
__global__ void embed_kernel(const __nv_bfloat16 *table, const int32_t *ids, int64_t width, float *out) {
    const __nv_bfloat16 *row = table + (int64_t)ids[blockIdx.x] * width;
    for (int64_t i = threadIdx.x; i < width; i += THREADS) out[blockIdx.x * width + i] = __bfloat162float(row[i]);
}

void embed(epx_ops_t *ops, const epx_weight_t *table, const int32_t *ids, int64_t n_rows, float *out) {
    Ops *o = of(ops);
    if (n_rows == 0) return;
    const int32_t *staged = o->step.tokens + (ids - o->now.tokens);
    embed_kernel<<<(unsigned)n_rows, THREADS, 0, o->stream>>>((const __nv_bfloat16 *)table->data, staged, table->k, out);
    launched(o, "embed");
}

/* Sum over the block; the same in every thread. */
__device__ static float block_sum(float x) {
    __shared__ float part[WARPS];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.0f;
    for (int i = 0; i < WARPS; i++) sum += part[i];
    return sum;
}

/* Block: one row of `width`, ld apart. T bf16: operand rows; float: in place. */
template <class T>
__global__ void norm_kernel(const float *x, int64_t ld, Vector w, float eps, int64_t width, T *out, int64_t ldo) {
    const float *row = x + blockIdx.x * ld;
    float square = 0.0f;
    for (int64_t i = threadIdx.x; i < width; i += THREADS) square = fmaf(row[i], row[i], square);
    const float scale = 1.0f / sqrtf(block_sum(square) / (float)width + eps);
    for (int64_t i = threadIdx.x; i < width; i += THREADS) out[blockIdx.x * ldo + i] = (T)(row[i] * scale * at(w, i));
}

void rmsnorm(epx_ops_t *ops, const float *x, const epx_weight_t *w, float eps, int64_t n_rows, int64_t width, void *out) {
    Ops *o = of(ops);
    if (n_rows == 0) return;
    norm_kernel<<<(unsigned)n_rows, THREADS, 0, o->stream>>>(x, width, vector_of(w), eps, width, (__nv_bfloat16 *)out, width);
    launched(o, "rmsnorm");
}

__global__ void gather_kernel(const float *x, const int32_t *rows, int64_t width, float *out) {
    const float *row = x + (int64_t)rows[blockIdx.x] * width;
    for (int64_t i = threadIdx.x; i < width; i += THREADS) out[blockIdx.x * width + i] = row[i];
}

void gather(epx_ops_t *ops, const float *x, const int32_t *rows, int64_t n_rows, int64_t width, float *out) {
    Ops *o = of(ops);
    if (n_rows == 0) return;
    gather_kernel<<<(unsigned)n_rows, THREADS, 0, o->stream>>>(x, o->step.logit_rows + (rows - o->now.logit_rows), width, out);
    launched(o, "gather");
}

/* The first of equal ones; id -1: none. */
__device__ static inline void take_larger(float &v, int &id, float other, int other_id) {
    if (other_id >= 0 && (id < 0 || other > v || (other == v && other_id < id))) v = other, id = other_id;
}

/* Block: one row. */
__global__ void argmax_kernel(const float *x, int64_t width, int32_t *out) {
    __shared__ float values[WARPS];
    __shared__ int ids[WARPS];
    const float *row = x + blockIdx.x * width;
    float v = 0.0f;
    int id = -1, bad = 0;
    for (int64_t i = threadIdx.x; i < width; i += THREADS) {
        const float here = row[i];
        bad |= !(here < CUDART_INF_F);
        if (id < 0 || here > v) v = here, id = (int)i;
    }
    for (int d = 16; d > 0; d /= 2) take_larger(v, id, __shfl_xor_sync(~0u, v, d), __shfl_xor_sync(~0u, id, d));
    if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = v, ids[threadIdx.x / 32] = id;
    bad = __syncthreads_or(bad);
    if (threadIdx.x != 0) return;
    for (int i = 1; i < WARPS; i++) take_larger(v, id, values[i], ids[i]);
    out[blockIdx.x] = bad || v == -CUDART_INF_F ? -1 : id;
}

void argmax(epx_ops_t *ops, const float *x, int64_t n_rows, int64_t width, int32_t *out) {
    Ops *o = of(ops);
    if (n_rows == 0) return;
    argmax_kernel<<<(unsigned)n_rows, THREADS, 0, o->stream>>>(x, width, out);
    launched(o, "argmax");
}

__device__ static inline float widen(float x) { return x; }
__device__ static inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

/* Block: one row. gate NULL: 1. */
template <class T> __global__ void add_kernel(float *out, const T *more, const float *gate, int64_t width) {
    const float factor = gate ? 1.0f / (1.0f + expf(-gate[blockIdx.x])) : 1.0f;
    const int64_t row = blockIdx.x * width;
    for (int64_t i = threadIdx.x; i < width; i += THREADS) {
        const float x = widen(more[row + i]);
        out[row + i] = gate ? out[row + i] + factor * x : out[row + i] + x;
    }
}

template <class T> static void add_any(Ops *o, float *out, const T *more, const float *gate, int64_t n_rows, int64_t width) {
    if (n_rows == 0) return;
    add_kernel<<<(unsigned)n_rows, THREADS, 0, o->stream>>>(out, more, gate, width);
    launched(o, "add");
}

void add(epx_ops_t *ops, float *out, const float *more, int64_t n_rows, int64_t width) {
    add_any(of(ops), out, more, nullptr, n_rows, width);
}
void add_rows(epx_ops_t *ops, float *out, const void *more, int64_t n_rows, int64_t width) {
    add_any(of(ops), out, (const __nv_bfloat16 *)more, nullptr, n_rows, width);
}
void add_gated(epx_ops_t *ops, float *out, const float *more, const float *gate, int64_t n_rows, int64_t width) {
    add_any(of(ops), out, more, gate, n_rows, width);
}

/* ---- norms of heads, rotary embedding, KV write ---- */

struct Heads {
    float *q, *k;
    const float *v;
    int64_t ld;
    int n_q, n_kv, dim;
    Vector q_norm, k_norm;
    int norm_len; /* leading elements of a head that are normed; 0: none */
    int k_norm_len;
    float eps;
    const float *inv_freq;
    float rope_scale;
    int rope_first, rope_dim, interleaved;
    const int32_t *positions, *table_at, *tables;
    int page_size;
    __nv_bfloat16 *k_pages, *v_pages;
};

__device__ static void norm_head(float *x, Vector w, int n, float eps, int lane) {
    float square = 0.0f;
    for (int i = lane; i < n; i += 32) square = fmaf(x[i], x[i], square);
    const float scale = 1.0f / sqrtf(warp_sum(square) / (float)n + eps);
    for (int i = lane; i < n; i += 32) x[i] = x[i] * scale * at(w, i);
    __syncwarp();
}

__device__ static void turn(const Heads &h, float *x, int32_t position, int lane) {
    const int half = h.rope_dim / 2;
    float *r = x + h.rope_first;
    for (int i = lane; i < half; i += 32) {
        const float angle = (float)position * h.inv_freq[i];
        const float c = cosf(angle) * h.rope_scale, s = sinf(angle) * h.rope_scale;
        const int a = h.interleaved ? 2 * i : i, b = h.interleaved ? 2 * i + 1 : i + half;
        const float x0 = r[a], x1 = r[b];
        r[a] = x0 * c - x1 * s;
        r[b] = x1 * c + x0 * s;
    }
    __syncwarp();
}

/* Warp: one head of one row: query heads, then key heads, then value heads. Shared: a head for each warp. */
__global__ void heads_kernel(Heads h, int64_t n_items) {
    extern __shared__ float shared[];
    const int lane = threadIdx.x % 32, n_heads = h.n_q + 2 * h.n_kv;
    const int64_t item = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (item >= n_items) return;
    const int64_t row = item / n_heads;
    const int head = (int)(item % n_heads), kv = head - h.n_q;
    const int is_q = kv < 0, is_v = kv >= h.n_kv;
    float *x = shared + threadIdx.x / 32 * h.dim;
    const float *from = is_q ? h.q + row * h.ld + head * h.dim
                             : is_v ? h.v + row * h.ld + (kv - h.n_kv) * h.dim : h.k + row * h.ld + kv * h.dim;
    const int32_t position = h.positions[row];
    for (int i = lane; i < h.dim; i += 32) x[i] = from[i];
    __syncwarp();
    if (is_q && h.norm_len) norm_head(x, h.q_norm, h.norm_len, h.eps, lane);
    if (!is_q && !is_v && h.k_norm_len) norm_head(x, h.k_norm, h.k_norm_len, h.eps, lane);
    if (!is_v) turn(h, x, position, lane);
    if (is_q) {
        for (int i = lane; i < h.dim; i += 32) h.q[row * h.ld + head * h.dim + i] = x[i];
        return;
    }
    const int64_t slot = (int64_t)h.tables[h.table_at[row] + position / h.page_size] * h.page_size + position % h.page_size;
    __nv_bfloat16 *to = (is_v ? h.v_pages : h.k_pages) + (slot * h.n_kv + (is_v ? kv - h.n_kv : kv)) * h.dim;
    for (int i = lane; i < h.dim; i += 32) to[i] = __float2bfloat16_rn(x[i]);
}

/* A norm over all heads of a row comes first; returns what is left for the heads. */
static Vector norm_whole(Ops *o, float *x, int64_t ld, const epx_weight_t *w, float eps, int64_t n_rows, int dim, int *out_len) {
    Vector v = vector_of(w);
    *out_len = v.data ? (int)w->k : 0;
    if (!v.data || w->k <= dim) return v;
    norm_kernel<<<(unsigned)n_rows, THREADS, 0, o->stream>>>(x, ld, v, eps, w->k, x, ld);
    launched(o, "norm of all heads");
    *out_len = 0;
    return {nullptr, 0};
}

void qk_norm_rope_store(epx_ops_t *ops, float *q, float *k, const float *v, int64_t ldqkv, int n_heads,
                        const epx_weight_t *q_norm, const epx_weight_t *k_norm, float eps, const epx_rope_t *rope,
                        const epx_attn_row_t *rows, int64_t n_rows, const epx_kv_layer_t *kv) {
    Ops *o = of(ops);
    if (n_rows == 0) return;
    const int64_t first = rows - o->now.rows;
    Heads h = {};
    h.q = q, h.k = k, h.v = v, h.ld = ldqkv;
    h.n_q = n_heads, h.n_kv = kv->n_kv_heads, h.dim = kv->head_dim;
    h.q_norm = norm_whole(o, q, ldqkv, q_norm, eps, n_rows, h.dim, &h.norm_len);
    h.k_norm = norm_whole(o, k, ldqkv, k_norm, eps, n_rows, h.dim, &h.k_norm_len);
    h.eps = eps;
    h.inv_freq = rope->inv_freq, h.rope_scale = rope->scale;
    h.rope_first = rope->first, h.rope_dim = rope->dim, h.interleaved = rope->interleaved;
    h.positions = o->step.positions + first, h.table_at = o->step.table_at + first, h.tables = o->step.tables;
    h.page_size = kv->page_size;
    h.k_pages = (__nv_bfloat16 *)kv->k_pages, h.v_pages = (__nv_bfloat16 *)kv->v_pages;
    const int64_t items = n_rows * (n_heads + 2 * kv->n_kv_heads);
    heads_kernel<<<(unsigned)div_up(items, WARPS), THREADS, (size_t)WARPS * (size_t)h.dim * sizeof(float), o->stream>>>(h, items);
    launched(o, "rotary embedding and KV write");
}

} // namespace epx_cuda_ops
