/* Paged attention with grouped query heads, by matrix instructions on bf16 keys, values and probabilities, sums in f32.
 * Positions are cut at multiples of KV_SEGMENT: a segment is summed apart, in steps of KV_BLOCK positions, and segments are merged in
 * ascending order. Decode puts every segment on its own warp and merges with a second kernel; prefill keeps segments in registers:
 * the arithmetic of a row is the same in both, so its bits depend on its own past only.
 * A tile is 16 (row, head) pairs: the heads of one KV head, of as many rows as fit. */
#include <math_constants.h>

#include "engine/ops/cuda/cuda_ops.cuh"

namespace epx_cuda_ops {

enum { DECODE_WARPS = 2, DECODE_STAGES = 3, PREFILL_WARPS = 8, PREFILL_STAGES = 3, MAX_TILE_HEADS = 16 };

struct Attn {
    const float *q;
    int64_t ldq;
    __nv_bfloat16 *out;
    int64_t ldo;
    const __nv_bfloat16 *k, *v;
    Step step;
    int32_t first; /* row of the step that q begins with */
    int32_t n_heads, n_kv, group, tile_heads, head_tiles, page_size;
    float scale; /* of scores, for powers of two */
    float *partial;
    int32_t row0, row1, unit0, unit1; /* decode: rows and units of this wave */
    int32_t tile0, n_tiles;           /* prefill */
};

/* 32 keys (or values) of one head in shared memory: rows of D, their 16-byte chunks swizzled so that eight rows of one chunk lie in
 * different banks. */
template <int D> __device__ static inline uint32_t chunk_at(uint32_t base, int row, int chunk) {
    constexpr int CHUNKS = D / 8, MASK = (CHUNKS < 8 ? CHUNKS : 8) - 1, ROWS = CHUNKS < 8 ? 8 / CHUNKS : 1;
    return base + (uint32_t)(row * D * 2 + (chunk ^ ((row / ROWS) & MASK)) * 16);
}

/* 16 (row, head) pairs: a thread has columns 2 t, 2 t + 1 of every 8 of pair rows g and g + 8. */
template <int D> struct Sums {
    float o[D / 8][4], m[2], l[2];
    __device__ void clear() {
        for (int i = 0; i < D / 8; i++)
            for (int j = 0; j < 4; j++) o[i][j] = 0.0f;
        m[0] = m[1] = -CUDART_INF_F;
        l[0] = l[1] = 0.0f;
    }
};

__device__ static inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ static inline float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* The next KV_BLOCK positions, from `base` on, those above limit[] of a pair left out. */
template <int D>
__device__ static void attend(Sums<D> &s, const uint32_t (&q)[D / 16][4], uint32_t keys, uint32_t values, int base,
                              const int (&limit)[2], float scale, int lane) {
    float c[KV_BLOCK / 8][4] = {};
    const int t = lane % 4;
    for (int n = 0; n < KV_BLOCK / 8; n++) {
#pragma unroll
        for (int k = 0; k < D / 16; k += 2) {
            uint32_t b[4];
            ldmatrix4(b, chunk_at<D>(keys, n * 8 + lane % 8, k * 2 + lane / 8));
            mma(c[n], q[k], b[0], b[1]);
            mma(c[n], q[k + 1], b[2], b[3]);
        }
    }
    float most[2] = {s.m[0], s.m[1]}, alpha[2];
#pragma unroll
    for (int n = 0; n < KV_BLOCK / 8; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int position = base + n * 8 + 2 * t + j % 2;
            c[n][j] = position <= limit[j / 2] ? c[n][j] * scale : -CUDART_INF_F;
            most[j / 2] = fmaxf(most[j / 2], c[n][j]);
        }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        most[i] = quad_max(most[i]);
        const float base_of = most[i] == -CUDART_INF_F ? 0.0f : most[i];
        alpha[i] = exp2f(s.m[i] - base_of);
        s.m[i] = most[i];
        most[i] = base_of;
        s.l[i] *= alpha[i];
    }
#pragma unroll
    for (int n = 0; n < KV_BLOCK / 8; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            c[n][j] = exp2f(c[n][j] - most[j / 2]);
            s.l[j / 2] += c[n][j];
        }
    if (__any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) { /* times 1 changes no bit */
#pragma unroll
        for (int i = 0; i < D / 8; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) s.o[i][j] *= alpha[j / 2];
    }
#pragma unroll
    for (int k = 0; k < KV_BLOCK / 16; k++) {
        const uint32_t p[4] = {pack(c[2 * k][0], c[2 * k][1]), pack(c[2 * k][2], c[2 * k][3]),
                               pack(c[2 * k + 1][0], c[2 * k + 1][1]), pack(c[2 * k + 1][2], c[2 * k + 1][3])};
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            uint32_t b[4];
            ldmatrix4_trans(b, chunk_at<D>(values, k * 16 + lane % 16, i * 2 + lane / 16));
            mma(s.o[2 * i], p, b[0], b[1]);
            mma(s.o[2 * i + 1], p, b[2], b[3]);
        }
    }
}

/* Merge factors of a running sum (m, l) with the next segment's; the running m and l are replaced. An empty segment changes nothing. */
__device__ static inline void merge_factors(float &m, float &l, float next_m, float next_l, float &keep, float &add) {
    keep = 1.0f, add = 0.0f;
    if (next_m == -CUDART_INF_F) return;
    const float most = fmaxf(m, next_m);
    keep = exp2f(m - most);
    add = exp2f(next_m - most);
    m = most;
    l = fmaf(next_l, add, l * keep);
}

/* Slot of a position of the row's sequence. */
__device__ static inline int64_t slot_of(const Attn &a, const int32_t *table, int position) {
    return (int64_t)table[position / a.page_size] * a.page_size + position % a.page_size;
}

/* The pairs of this warp's tile as the left operand. row[i] < 0: no such pair. */
template <int D>
__device__ static void load_q(const Attn &a, uint32_t (&q)[D / 16][4], const int (&row)[2], const int (&head)[2], int lane) {
    const int t = lane % 4;
    for (int k = 0; k < D / 16; k++)
        for (int j = 0; j < 4; j++) {
            const int i = j % 2;
            float2 x = {0.0f, 0.0f};
            if (row[i] >= 0)
                x = *(const float2 *)(a.q + (int64_t)(row[i] - a.first) * a.ldq + head[i] * D + k * 16 + j / 2 * 8 + 2 * t);
            q[k][j] = pack(x.x, x.y);
        }
}

/* ---- decode: one warp for (unit, KV head, tile of heads) ---- */

/* Queue block `block` of the unit's segment; lane r knows the slot of position r. */
template <int D>
__device__ static void load_block(const Attn &a, const int32_t *table, int base, int last, int kv_head, uint32_t to, int lane) {
    constexpr int CHUNKS = D / 8;
    const int position = base + lane <= last ? base + lane : last;
    const int64_t slot = slot_of(a, table, position);
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        const int row = (i * 32 + lane) / CHUNKS, chunk = (i * 32 + lane) % CHUNKS;
        const int64_t from = (__shfl_sync(~0u, slot, row) * a.n_kv + kv_head) * D + chunk * 8;
        copy16(chunk_at<D>(to, row, chunk), a.k + from, true);
        copy16(chunk_at<D>(to + KV_BLOCK * D * 2, row, chunk), a.v + from, true);
    }
}

template <int D> __device__ static void write_partial(const Attn &a, Sums<D> &s, int unit, const int (&head)[2], int lane) {
    const int t = lane % 4;
    for (int i = 0; i < 2; i++) {
        const float l = quad_sum(s.l[i]);
        if (head[i] < 0) continue;
        float *to = a.partial + ((int64_t)(unit - a.unit0) * a.n_heads + head[i]) * (D + 2);
        for (int n = 0; n < D / 8; n++) *(float2 *)(to + n * 8 + 2 * t) = {s.o[n][2 * i], s.o[n][2 * i + 1]};
        if (t == 0) to[D] = s.m[i], to[D + 1] = l;
    }
}

/* Grid: items over DECODE_WARPS warps. Shared: DECODE_STAGES blocks of keys and values for each warp. */
template <int D> __global__ void __launch_bounds__(DECODE_WARPS * 32) decode_kernel(Attn a) {
    extern __shared__ __align__(128) char shared[];
    constexpr uint32_t STAGE = 2 * KV_BLOCK * D * 2;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int item = blockIdx.x * DECODE_WARPS + warp, per_unit = a.n_kv * a.head_tiles;
    const int unit = a.unit0 + item / per_unit;
    if (unit >= a.unit1) return;
    const int kv_head = item % per_unit / a.head_tiles, head_tile = item % a.head_tiles;
    const Unit u = a.step.units[unit];
    const int position = a.step.positions[u.row], first = u.segment * KV_SEGMENT;
    const int last = position < first + KV_SEGMENT - 1 ? position : first + KV_SEGMENT - 1;
    const int n_blocks = (last - first) / KV_BLOCK + 1;
    const int32_t *table = a.step.tables + a.step.table_at[u.row];
    const uint32_t ring = smem_addr(shared) + (uint32_t)warp * DECODE_STAGES * STAGE;
    int row[2], head[2];
    for (int i = 0; i < 2; i++) {
        const int h = head_tile * MAX_TILE_HEADS + lane / 4 + 8 * i;
        const bool valid = lane / 4 + 8 * i < a.tile_heads && h < a.group;
        row[i] = valid ? u.row : -1;
        head[i] = valid ? kv_head * a.group + h : -1;
    }
    for (int b = 0; b < DECODE_STAGES - 1; b++) {
        if (b < n_blocks) load_block<D>(a, table, first + b * KV_BLOCK, last, kv_head, ring + b * STAGE, lane);
        copy_commit();
    }
    uint32_t q[D / 16][4];
    Sums<D> s;
    load_q<D>(a, q, row, head, lane);
    s.clear();
    const int limit[2] = {position, position};
    for (int b = 0; b < n_blocks; b++) {
        copy_wait<DECODE_STAGES - 2>();
        __syncwarp();
        const int next = b + DECODE_STAGES - 1;
        if (next < n_blocks)
            load_block<D>(a, table, first + next * KV_BLOCK, last, kv_head, ring + next % DECODE_STAGES * STAGE, lane);
        copy_commit();
        const uint32_t keys = ring + b % DECODE_STAGES * STAGE;
        attend<D>(s, q, keys, keys + KV_BLOCK * D * 2, first + b * KV_BLOCK, limit, a.scale, lane);
        __syncwarp();
    }
    write_partial<D>(a, s, unit, head, lane);
}

/* Warp: one (row, head) of the wave: its segments in ascending order. */
template <int D> __global__ void merge_kernel(Attn a, int n_items) {
    const int item = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (item >= n_items) return;
    const int row = a.row0 + item / a.n_heads, head = item % a.n_heads;
    float o[D / 32] = {}, m = -CUDART_INF_F, l = 0.0f;
    for (int u = a.step.row_units[row]; u < a.step.row_units[row + 1]; u++) {
        const float *from = a.partial + ((int64_t)(u - a.unit0) * a.n_heads + head) * (D + 2);
        float keep, more;
        merge_factors(m, l, from[D], from[D + 1], keep, more);
        for (int i = 0; i < D / 32; i++) o[i] = fmaf(from[i * 32 + lane], more, o[i] * keep);
    }
    if (a.step.row_units[row] == a.step.row_units[row + 1]) return;
    for (int i = 0; i < D / 32; i++)
        a.out[(int64_t)(row - a.first) * a.ldo + head * D + i * 32 + lane] = __float2bfloat16_rn(o[i] / l);
}

/* ---- prefill: one block for (tile of rows, KV head, tile of heads) ---- */

template <int D>
__device__ static void load_shared_block(const Attn &a, const int32_t *table, int base, int last, int kv_head, uint32_t to) {
    constexpr int CHUNKS = D / 8, THREADS = PREFILL_WARPS * 32;
    for (int i = threadIdx.x; i < KV_BLOCK * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const int position = base + row <= last ? base + row : last;
        const int64_t from = (slot_of(a, table, position) * a.n_kv + kv_head) * D + chunk * 8;
        copy16(chunk_at<D>(to, row, chunk), a.k + from, true);
        copy16(chunk_at<D>(to + KV_BLOCK * D * 2, row, chunk), a.v + from, true);
    }
}

/* A finished segment into the running sums. */
template <int D> __device__ static void merge(Sums<D> &all, Sums<D> &segment) {
    for (int i = 0; i < 2; i++) {
        const float l = quad_sum(segment.l[i]);
        float keep, more;
        merge_factors(all.m[i], all.l[i], segment.m[i], l, keep, more);
        if (segment.m[i] == -CUDART_INF_F) continue;
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            for (int j = 2 * i; j < 2 * i + 2; j++) all.o[n][j] = fmaf(segment.o[n][j], more, all.o[n][j] * keep);
    }
    segment.clear();
}

template <int D> __device__ static void write_rows(const Attn &a, const Sums<D> &s, const int (&row)[2], const int (&head)[2], int lane) {
    for (int i = 0; i < 2; i++) {
        if (row[i] < 0) continue;
        __nv_bfloat16 *to = a.out + (int64_t)(row[i] - a.first) * a.ldo + head[i] * D + 2 * (lane % 4);
        for (int n = 0; n < D / 8; n++) *(uint32_t *)(to + n * 8) = pack(s.o[n][2 * i] / s.l[i], s.o[n][2 * i + 1] / s.l[i]);
    }
}

/* Grid: (tiles, KV heads * head tiles). Shared: PREFILL_STAGES blocks of keys and values. */
template <int D> __global__ void __launch_bounds__(PREFILL_WARPS * 32, 1) prefill_kernel(Attn a) {
    extern __shared__ __align__(128) char shared[];
    constexpr uint32_t STAGE = 2 * KV_BLOCK * D * 2;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Tile tile = a.step.tiles[a.tile0 + blockIdx.x];
    const int kv_head = blockIdx.y / a.head_tiles, head_tile = blockIdx.y % a.head_tiles;
    const int32_t *table = a.step.tables + a.step.table_at[tile.row0];
    const int position0 = a.step.positions[tile.row0], last = position0 + tile.n - 1, n_blocks = last / KV_BLOCK + 1;
    const uint32_t ring = smem_addr(shared);
    int row[2], head[2], limit[2];
    for (int i = 0; i < 2; i++) {
        const int pair = warp * 16 + lane / 4 + 8 * i, r = pair / a.tile_heads;
        const int h = head_tile * MAX_TILE_HEADS + pair % a.tile_heads;
        const bool valid = r < tile.n && h < a.group;
        row[i] = valid ? tile.row0 + r : -1;
        head[i] = valid ? kv_head * a.group + h : -1;
        limit[i] = valid ? position0 + r : -1;
    }
    for (int b = 0; b < PREFILL_STAGES - 1; b++) {
        if (b < n_blocks) load_shared_block<D>(a, table, b * KV_BLOCK, last, kv_head, ring + b * STAGE);
        copy_commit();
    }
    uint32_t q[D / 16][4];
    Sums<D> segment, all;
    load_q<D>(a, q, row, head, lane);
    segment.clear();
    all.clear();
    for (int b = 0; b < n_blocks; b++) {
        copy_wait<PREFILL_STAGES - 2>();
        __syncthreads();
        const int next = b + PREFILL_STAGES - 1;
        if (next < n_blocks) load_shared_block<D>(a, table, next * KV_BLOCK, last, kv_head, ring + next % PREFILL_STAGES * STAGE);
        copy_commit();
        const uint32_t keys = ring + b % PREFILL_STAGES * STAGE;
        attend<D>(segment, q, keys, keys + KV_BLOCK * D * 2, b * KV_BLOCK, limit, a.scale, lane);
        if ((b + 1) % (KV_SEGMENT / KV_BLOCK) == 0 || b + 1 == n_blocks) merge(all, segment);
    }
    write_rows<D>(a, all, row, head, lane);
}

/* ---- host ---- */

static int tile_heads(int group) { return group < MAX_TILE_HEADS ? group : MAX_TILE_HEADS; }

int attention_tile_rows(int n_heads, int n_kv_heads) { return PREFILL_WARPS * 16 / tile_heads(n_heads / n_kv_heads); }

template <int D> static uint32_t decode_bytes() { return DECODE_WARPS * DECODE_STAGES * 2 * KV_BLOCK * D * 2; }
template <int D> static uint32_t prefill_bytes() { return PREFILL_STAGES * 2 * KV_BLOCK * D * 2; }

template <int D> static cudaError_t prepare() {
    cudaError_t e = cudaFuncSetAttribute(decode_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)decode_bytes<D>());
    if (e != cudaSuccess) return e;
    return cudaFuncSetAttribute(prefill_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)prefill_bytes<D>());
}
cudaError_t attention_prepare() {
    cudaError_t e = prepare<32>();
    if (e == cudaSuccess) e = prepare<64>();
    return e == cudaSuccess ? prepare<128>() : e;
}

template <int D> static void run(Ops *o, Attn a) {
    for (int32_t i = 0; i < o->n_waves; i++) {
        const Wave w = o->waves[i];
        a.row0 = w.row0, a.row1 = w.row1, a.unit0 = w.unit0, a.unit1 = w.unit1;
        const int64_t items = (int64_t)(w.unit1 - w.unit0) * a.n_kv * a.head_tiles;
        decode_kernel<D><<<(unsigned)div_up(items, DECODE_WARPS), DECODE_WARPS * 32, decode_bytes<D>(), o->stream>>>(a);
        launched(o, "attention, decode");
        const int n_merges = (w.row1 - w.row0) * a.n_heads;
        merge_kernel<D><<<(unsigned)div_up(n_merges, 8), 256, 0, o->stream>>>(a, n_merges);
        launched(o, "attention, merge");
    }
    if (o->n_tiles == 0) return;
    const dim3 grid((unsigned)o->n_tiles, (unsigned)(a.n_kv * a.head_tiles));
    prefill_kernel<D><<<grid, PREFILL_WARPS * 32, prefill_bytes<D>(), o->stream>>>(a);
    launched(o, "attention, prefill");
}

void attention(epx_ops_t *ops, const epx_attn_t *attn, const float *q, int64_t ldq, const epx_attn_row_t *rows, int64_t n_rows,
               const epx_kv_layer_t *kv, void *out, int64_t ldo) {
    Ops *o = of(ops);
    if (n_rows == 0) return;
    Attn a = {};
    a.q = q, a.ldq = ldq, a.out = (__nv_bfloat16 *)out, a.ldo = ldo;
    a.k = (const __nv_bfloat16 *)kv->k_pages, a.v = (const __nv_bfloat16 *)kv->v_pages;
    a.step = o->step;
    a.first = (int32_t)(rows - o->now.rows);
    a.n_heads = attn->n_heads, a.n_kv = kv->n_kv_heads, a.group = attn->n_heads / kv->n_kv_heads;
    a.tile_heads = tile_heads(a.group);
    a.head_tiles = (int32_t)div_up(a.group, MAX_TILE_HEADS);
    a.page_size = kv->page_size;
    a.scale = attn->scale * 1.44269504f; /* log2(e) */
    a.partial = o->partial;
    if (kv->head_dim == 32) run<32>(o, a);
    else if (kv->head_dim == 64) run<64>(o, a);
    else run<128>(o, a);
}

} // namespace epx_cuda_ops
