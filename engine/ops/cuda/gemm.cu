/* Matrix products of operand rows (bf16) with [N, K] bf16 weights, f32 sums: dense, several matrices on the same rows, and grouped by
 * expert with rows gathered from the exchange's lists. Every output is summed over K ascending, 16 at a time, whatever the tile: its
 * bits depend on its row and column only. Tiles differ for few and many rows; there is no split of K.
 * Pipeline: cp.async into a ring of K steps of 64, chunks of 16 bytes swizzled by row; ldmatrix; mma.sync. */
#include "engine/ops/cuda/cuda_ops.cuh"

namespace epx_cuda_ops {

enum { BK = 64, ROW_BYTES = BK * 2, CHUNKS = BK / 8 };

/* ---- the tile ---- */

template <int BM_, int BN_, int WM_, int WN_, int STAGES_, int PARTS_> struct Shape {
    static constexpr int BM = BM_, BN = BN_, WM = WM_, WN = WN_, STAGES = STAGES_;
    static constexpr int PARTS = PARTS_; /* matrices side by side: 2 for gate and up, each with BN columns */
    static constexpr int WARPS_N = BN / WN, WARPS = BM / WM * WARPS_N, THREADS = WARPS * 32;
    static constexpr int MT = WM / 16, NT = WN / 8;
    static constexpr uint32_t A_BYTES = BM * ROW_BYTES, B_BYTES = BN * ROW_BYTES, STAGE = A_BYTES + PARTS * B_BYTES;
    static constexpr int A_COPIES = BM * CHUNKS / THREADS, B_COPIES = BN * CHUNKS / THREADS;
    static_assert(BM * CHUNKS % THREADS == 0 && BN * CHUNKS % THREADS == 0, "whole copies a thread");
};
/* Few rows are bound by the weights' way from memory: deep rings, and narrow tiles where there are few columns. More rows are bound by
 * the rows' way from the L2 cache, then by the matrix units: wide tiles. */
using FewThin = Shape<16, 16, 16, 8, 12, 1>;
using Few = Shape<16, 32, 16, 8, 8, 1>;
using SomeThin = Shape<64, 32, 32, 16, 6, 1>;
using Some = Shape<64, 64, 32, 32, 5, 1>;
using SomeWide = Shape<64, 128, 32, 64, 4, 1>;
using Mid = Shape<96, 128, 48, 64, 3, 1>;
using Many = Shape<128, 128, 64, 64, 3, 1>;
using FewPair = Shape<16, 32, 16, 8, 6, 2>;
using SomePair = Shape<64, 64, 32, 32, 4, 2>;
using MidPair = Shape<96, 64, 48, 32, 3, 2>;
using ManyPair = Shape<128, 64, 64, 32, 3, 2>;

__device__ static inline uint32_t chunk_at(uint32_t base, int row, int chunk) {
    return base + (uint32_t)(row * ROW_BYTES + ((chunk ^ (row & 7)) * 16));
}

/* What a tile multiplies. Rows of A by a functor: row(i) is NULL past the end. b[p]: first column of part p; n_valid columns. */
struct Weights {
    const __nv_bfloat16 *b[2];
    int n_valid;
    int64_t k;
};

template <class S, class Rows> struct Loader {
    const __nv_bfloat16 *a[S::A_COPIES], *b[S::PARTS][S::B_COPIES];
    const __nv_bfloat16 *any; /* an address for copies that read nothing */
    int64_t k;
    uint32_t shared;

    __device__ Loader(const Rows &rows, const Weights &w, uint32_t shared_) : any(w.b[0]), k(w.k), shared(shared_) {
        for (int i = 0; i < S::A_COPIES; i++) a[i] = rows((threadIdx.x + i * S::THREADS) / CHUNKS);
        for (int p = 0; p < S::PARTS; p++)
            for (int i = 0; i < S::B_COPIES; i++) {
                const int n = (threadIdx.x + i * S::THREADS) / CHUNKS;
                b[p][i] = n < w.n_valid ? w.b[p] + n * w.k : nullptr;
            }
    }
    /* Queue K step `step` into its place of the ring. */
    __device__ void load(int step) const {
        const uint32_t stage = shared + (uint32_t)(step % S::STAGES) * S::STAGE;
        const int chunk = threadIdx.x % CHUNKS; /* the same for every copy: THREADS is a multiple of CHUNKS */
        const int64_t at = (int64_t)step * BK + chunk * 8;
        const bool inside = at < k;
#pragma unroll
        for (int i = 0; i < S::A_COPIES; i++) {
            const bool there = inside && a[i] != nullptr;
            copy16(chunk_at(stage, (threadIdx.x + i * S::THREADS) / CHUNKS, chunk), there ? a[i] + at : any, there);
        }
#pragma unroll
        for (int p = 0; p < S::PARTS; p++)
#pragma unroll
            for (int i = 0; i < S::B_COPIES; i++) {
                const bool there = inside && b[p][i] != nullptr;
                copy16(chunk_at(stage + S::A_BYTES + p * S::B_BYTES, (threadIdx.x + i * S::THREADS) / CHUNKS, chunk),
                       there ? b[p][i] + at : any, there);
            }
    }
};

template <class S> struct Sum {
    float c[S::PARTS][S::MT][S::NT][4];
};

template <class S> __device__ static void multiply(Sum<S> &sum, uint32_t stage, int warp_m, int warp_n, int lane) {
#pragma unroll
    for (int ks = 0; ks < BK / 16; ks++) {
        uint32_t a[S::MT][4];
#pragma unroll
        for (int i = 0; i < S::MT; i++)
            ldmatrix4(a[i], chunk_at(stage, warp_m * S::WM + i * 16 + lane % 16, ks * 2 + lane / 16));
#pragma unroll
        for (int p = 0; p < S::PARTS; p++) {
            const uint32_t b_at = stage + S::A_BYTES + p * S::B_BYTES;
            if constexpr (S::NT == 1) {
                uint32_t b[2];
                ldmatrix2(b, chunk_at(b_at, warp_n * S::WN + lane % 8, ks * 2 + lane / 8 % 2));
#pragma unroll
                for (int i = 0; i < S::MT; i++) mma(sum.c[p][i][0], a[i], b[0], b[1]);
            }
#pragma unroll
            for (int j = 0; j + 1 < S::NT; j += 2) {
                uint32_t b[4];
                ldmatrix4(b, chunk_at(b_at, warp_n * S::WN + j * 8 + lane / 16 * 8 + lane % 8, ks * 2 + lane / 8 % 2));
#pragma unroll
                for (int i = 0; i < S::MT; i++) {
                    mma(sum.c[p][i][j], a[i], b[0], b[1]);
                    mma(sum.c[p][i][j + 1], a[i], b[2], b[3]);
                }
            }
        }
    }
}

/* The whole tile; out.put(m, n, sums) gets pairs of columns (n, n + 1) of row m, n even. Ends with a barrier, so that the
 * ring can be used again. */
template <class S, class Rows, class Out>
__device__ static void tile(const Rows &rows, const Weights &w, const Out &out, char *shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_m = warp / S::WARPS_N, warp_n = warp % S::WARPS_N;
    const Loader<S, Rows> loader(rows, w, smem_addr(shared));
    const int n_steps = (int)((w.k + BK - 1) / BK);
    Sum<S> sum = {};
    for (int s = 0; s < S::STAGES - 1; s++) {
        if (s < n_steps) loader.load(s);
        copy_commit();
    }
    for (int s = 0; s < n_steps; s++) {
        copy_wait<S::STAGES - 2>();
        __syncthreads();
        if (s + S::STAGES - 1 < n_steps) loader.load(s + S::STAGES - 1);
        copy_commit();
        multiply<S>(sum, loader.shared + (uint32_t)(s % S::STAGES) * S::STAGE, warp_m, warp_n, lane);
    }
#pragma unroll
    for (int i = 0; i < S::MT; i++)
#pragma unroll
        for (int j = 0; j < S::NT; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int m = warp_m * S::WM + i * 16 + lane / 4 + 8 * half, n = warp_n * S::WN + j * 8 + 2 * (lane % 4);
                float v[S::PARTS][2];
                for (int p = 0; p < S::PARTS; p++) v[p][0] = sum.c[p][i][j][2 * half], v[p][1] = sum.c[p][i][j][2 * half + 1];
                out.put(m, n, v);
            }
    copy_wait<0>();
    __syncthreads();
}

/* ---- dense ---- */

/* Rows of a matrix, from row0 on. */
struct PlainRows {
    const __nv_bfloat16 *x;
    int64_t ld;
    int n;
    __device__ const __nv_bfloat16 *operator()(int i) const { return i < n ? x + i * ld : nullptr; }
};

struct F32Out {
    float *out;
    int64_t ld;
    int n_rows, n_cols;
    Vector bias; /* of the tile's first column */
    int64_t bias0;
    __device__ void put(int m, int n, const float (&v)[1][2]) const {
        if (m >= n_rows) return;
        for (int i = 0; i < 2; i++)
            if (n + i < n_cols) out[m * ld + n + i] = bias.data ? v[0][i] + at(bias, bias0 + n + i) : v[0][i];
    }
};

struct Linears {
    const __nv_bfloat16 *x;
    int64_t ldx, ldo, k;
    int n_rows, n_parts, m_tiles;
    struct {
        const __nv_bfloat16 *w;
        Vector bias;
        float *out;
        int n, n_tiles;
    } parts[EPX_OPS_MAX_LINEARS];
};

/* Block: a tile; row tiles of the same columns follow each other. */
template <class S> __global__ void __launch_bounds__(S::THREADS) linears_kernel(const Linears l) {
    extern __shared__ __align__(128) char shared[];
    int col = (int)(blockIdx.x / (unsigned)l.m_tiles), p = 0;
    const int m0 = (int)(blockIdx.x % (unsigned)l.m_tiles) * S::BM;
    while (col >= l.parts[p].n_tiles) col -= l.parts[p++].n_tiles;
    const int n0 = col * S::BN, n_cols = l.parts[p].n - n0 < S::BN ? l.parts[p].n - n0 : S::BN;
    const int n_rows = l.n_rows - m0 < S::BM ? l.n_rows - m0 : S::BM;
    const PlainRows rows = {l.x + m0 * l.ldx, l.ldx, n_rows};
    const Weights w = {{l.parts[p].w + n0 * l.k, nullptr}, n_cols, l.k};
    const F32Out out = {l.parts[p].out + m0 * l.ldo + n0, l.ldo, n_rows, n_cols, l.parts[p].bias, n0};
    tile<S>(rows, w, out, shared);
}

template <class S> static constexpr uint32_t shared_bytes() { return S::STAGES * S::STAGE; }

template <class S> static void run_linears(Ops *o, Linears l) {
    unsigned tiles = 0;
    l.m_tiles = (int)div_up(l.n_rows, S::BM);
    for (int i = 0; i < l.n_parts; i++) tiles += (unsigned)(l.parts[i].n_tiles = (int)div_up(l.parts[i].n, S::BN));
    linears_kernel<S><<<tiles * (unsigned)l.m_tiles, S::THREADS, shared_bytes<S>(), o->stream>>>(l);
    launched(o, "linear");
}

void linears(epx_ops_t *ops, const void *x, int64_t ldx, const epx_linear_t *parts, int n, int64_t n_rows, int64_t ldo) {
    Ops *o = of(ops);
    int64_t n_all = 0;
    if (n_rows == 0) return;
    Linears l = {};
    l.x = (const __nv_bfloat16 *)x, l.ldx = ldx, l.ldo = ldo, l.k = parts[0].w.k;
    l.n_rows = (int)n_rows, l.n_parts = n;
    for (int i = 0; i < n; i++) {
        l.parts[i] = {(const __nv_bfloat16 *)parts[i].w.data, vector_of(&parts[i].bias), parts[i].out, (int)parts[i].w.n, 0};
        n_all += parts[i].w.n;
    }
    const int64_t m_tiles = div_up(n_rows, Some::BM), enough = o->n_sm;
    if (n_rows <= Few::BM && n_all >= Few::BN * enough) run_linears<Few>(o, l);
    else if (n_rows <= Few::BM) run_linears<FewThin>(o, l);
    else if (div_up(n_rows, Many::BM) * div_up(n_all, Many::BN) >= enough && n_rows > Some::BM) run_linears<Many>(o, l);
    else if (m_tiles * div_up(n_all, SomeWide::BN) >= enough) run_linears<SomeWide>(o, l);
    else if (m_tiles * div_up(n_all, Some::BN) >= enough) run_linears<Some>(o, l);
    else run_linears<SomeThin>(o, l);
}

/* ---- grouped by expert ---- */

/* Rows [first, first + n) of the lists. */
struct ListRows {
    const epx_list_entry_t *entries; /* of the first; NULL: rows lie one behind the other at base[0] */
    const void *const *base;
    uint64_t stride;
    int n;
    __device__ const __nv_bfloat16 *operator()(int i) const {
        if (i >= n) return nullptr;
        const epx_list_entry_t e = entries[i];
        return (const __nv_bfloat16 *)((const char *)base[e.src] + e.token * stride);
    }
};

struct SiluOut {
    __nv_bfloat16 *mid;
    int64_t ld;
    int n_rows, n_cols;
    __device__ void put(int m, int n, const float (&v)[2][2]) const {
        if (m >= n_rows) return;
        for (int i = 0; i < 2; i++)
            if (n + i < n_cols) mid[m * ld + n + i] = __float2bfloat16_rn(v[0][i] / (1.0f + expf(-v[0][i])) * v[1][i]);
    }
};

struct RowOut {
    __nv_bfloat16 *out;
    int64_t ld;
    int n_rows, n_cols;
    __device__ void put(int m, int n, const float (&v)[1][2]) const {
        if (m >= n_rows) return;
        if (n + 1 < n_cols) *(uint32_t *)(out + m * ld + n) = pack(v[0][0], v[0][1]);
        else if (n < n_cols) out[m * ld + n] = __float2bfloat16_rn(v[0][0]);
    }
};

struct Grouped {
    int n_experts, n_rows; /* n_rows: with one expert and expert_off NULL */
    const int32_t *expert_off;
    const epx_list_entry_t *entries;
    const void *const *row_base;
    uint64_t row_stride;
    const __nv_bfloat16 *x; /* entries NULL: rows of width k */
    const __nv_bfloat16 *w[2];
    int64_t expert_stride[2]; /* elements between the matrices of two experts */
    int64_t k, n;
    __nv_bfloat16 *out; /* [rows, n] */
    float *out_f32;     /* instead, when set */
};

/* first[e]: how many row tiles the experts before e have; by the whole block. */
__device__ static void count_tiles(const Grouped &g, int bm, int *first, int *rows_off) {
    for (int e = threadIdx.x; e <= g.n_experts; e += blockDim.x) rows_off[e] = g.expert_off ? g.expert_off[e] : e * g.n_rows;
    __syncthreads();
    if (threadIdx.x < 32) {
        int before = 0;
        for (int e0 = 0; e0 < g.n_experts; e0 += 32) {
            const int e = e0 + (int)threadIdx.x;
            int n = e < g.n_experts ? (rows_off[e + 1] - rows_off[e] + bm - 1) / bm : 0, upto = n;
            for (int d = 1; d < 32; d *= 2) {
                const int other = __shfl_up_sync(~0u, upto, d);
                if ((int)threadIdx.x >= d) upto += other;
            }
            if (e < g.n_experts) first[e] = before + upto - n;
            before += __shfl_sync(~0u, upto, 31);
        }
        if (threadIdx.x == 0) first[g.n_experts] = before;
    }
    __syncthreads();
}

/* The expert of a row tile. */
__device__ static inline int find_expert(const int *first, int n, int t) {
    int lo = 0, hi = n - 1;
    while (lo < hi) {
        const int mid = (lo + hi + 1) / 2;
        if (first[mid] <= t) lo = mid;
        else hi = mid - 1;
    }
    return lo;
}

template <class S> __device__ static void grouped_tile(const Grouped &g, int row, int n_rows, int e, int n0, char *shared) {
    const int n_cols = g.n - n0 < S::BN ? (int)(g.n - n0) : S::BN;
    Weights w = {{nullptr, nullptr}, n_cols, g.k};
    for (int p = 0; p < S::PARTS; p++) w.b[p] = g.w[p] + e * g.expert_stride[p] + n0 * g.k;
    const ListRows listed = {g.entries + row, g.row_base, g.row_stride, n_rows};
    const PlainRows plain = {g.x + row * g.k, g.k, n_rows};
    if constexpr (S::PARTS == 2) {
        const SiluOut out = {g.out + row * g.n + n0, g.n, n_rows, n_cols};
        if (g.entries) tile<S>(listed, w, out, shared);
        else tile<S>(plain, w, out, shared);
    } else if (g.out_f32) {
        const F32Out out = {g.out_f32 + row * g.n + n0, g.n, n_rows, n_cols, {nullptr, 0}, 0};
        tile<S>(plain, w, out, shared);
    } else {
        const RowOut out = {g.out + row * g.n + n0, g.n, n_rows, n_cols};
        tile<S>(plain, w, out, shared);
    }
}

/* Persistent blocks over (expert, columns, rows) tiles, rows fastest, so that a weight tile is read from memory once. */
template <class S> __global__ void __launch_bounds__(S::THREADS) grouped_kernel(const Grouped g) {
    extern __shared__ __align__(128) char shared[];
    __shared__ int first[MAX_EXPERTS + 1], rows_off[MAX_EXPERTS + 1];
    count_tiles(g, S::BM, first, rows_off);
    const int n_tiles = (int)((g.n + S::BN - 1) / S::BN);
    const int64_t total = (int64_t)first[g.n_experts] * n_tiles;
    for (int64_t t = blockIdx.x; t < total; t += gridDim.x) {
        const int e = find_expert(first, g.n_experts, (int)(t / n_tiles));
        const int m_tiles = first[e + 1] - first[e];
        const int64_t in_expert = t - (int64_t)first[e] * n_tiles;
        const int m0 = (int)(in_expert % m_tiles) * S::BM, n0 = (int)(in_expert / m_tiles) * S::BN;
        const int left = rows_off[e + 1] - rows_off[e] - m0;
        grouped_tile<S>(g, rows_off[e] + m0, left < S::BM ? left : S::BM, e, n0, shared);
    }
}

template <class S> static void run_grouped(Ops *o, const Grouped &g, const char *what) {
    static int per_sm = 0; /* the same for every device of one architecture */
    if (per_sm == 0) (void)cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, grouped_kernel<S>, S::THREADS, shared_bytes<S>());
    grouped_kernel<S><<<(unsigned)(o->n_sm * (per_sm > 0 ? per_sm : 1)), S::THREADS, shared_bytes<S>(), o->stream>>>(g);
    launched(o, what);
}

/* Few, some or many rows an expert: only speed depends on it. */
static void run_pair(Ops *o, const Grouped &g, int64_t rows_per_expert) {
    if (rows_per_expert <= 12) run_grouped<FewPair>(o, g, "experts, gate and up");
    else if (rows_per_expert <= 50) run_grouped<SomePair>(o, g, "experts, gate and up");
    else if (rows_per_expert <= 84) run_grouped<MidPair>(o, g, "experts, gate and up");
    else run_grouped<ManyPair>(o, g, "experts, gate and up");
}
static void run_single(Ops *o, const Grouped &g, int64_t rows_per_expert) {
    if (rows_per_expert <= 12) run_grouped<Few>(o, g, "experts, down");
    else if (rows_per_expert <= 50) run_grouped<SomeWide>(o, g, "experts, down");
    else if (rows_per_expert <= 84) run_grouped<Mid>(o, g, "experts, down");
    else run_grouped<Many>(o, g, "experts, down");
}

static int64_t stride_of(const epx_weight_t *a, const epx_weight_t *b) {
    return (const __nv_bfloat16 *)b->data - (const __nv_bfloat16 *)a->data;
}

/* Experts' matrices lie at equal distances, as the loader puts them. */
static bool is_regular(const epx_expert_weights_t *w, int n) {
    for (int e = 1; e < n; e++)
        if (stride_of(&w[0].gate, &w[e].gate) != e * stride_of(&w[0].gate, &w[1].gate) ||
            stride_of(&w[0].up, &w[e].up) != e * stride_of(&w[0].up, &w[1].up) ||
            stride_of(&w[0].down, &w[e].down) != e * stride_of(&w[0].down, &w[1].down))
            return false;
    return true;
}

static void feed_forward(Ops *o, Grouped g, const epx_expert_weights_t *w, int64_t hidden, int64_t ffn, int64_t rows_per_expert,
                         void *out, float *out_f32) {
    const int many = g.n_experts > 1;
    g.w[0] = (const __nv_bfloat16 *)w->gate.data, g.w[1] = (const __nv_bfloat16 *)w->up.data;
    g.expert_stride[0] = many ? stride_of(&w[0].gate, &w[1].gate) : 0;
    g.expert_stride[1] = many ? stride_of(&w[0].up, &w[1].up) : 0;
    g.k = hidden, g.n = ffn, g.out = o->mid;
    run_pair(o, g, rows_per_expert);
    g.entries = nullptr, g.x = o->mid;
    g.w[0] = (const __nv_bfloat16 *)w->down.data;
    g.expert_stride[0] = many ? stride_of(&w[0].down, &w[1].down) : 0;
    g.k = ffn, g.n = hidden, g.out = (__nv_bfloat16 *)out, g.out_f32 = out_f32;
    run_single(o, g, rows_per_expert);
}

void experts(epx_ops_t *ops, const epx_lists_t *lists, const epx_expert_weights_t *w, int64_t hidden, int64_t ffn, void *out) {
    Ops *o = of(ops);
    if (lists->n_local_experts == 0) return;
    if (!is_regular(w, lists->n_local_experts)) {
        note(o, cudaErrorInvalidValue, "experts: weights of a layer are not at equal distances");
        return;
    }
    Grouped g = {};
    g.n_experts = lists->n_local_experts;
    g.expert_off = lists->expert_off, g.entries = lists->entries, g.row_base = lists->row_base;
    g.row_stride = lists->row_stride_bytes;
    feed_forward(o, g, w, hidden, ffn, div_up(o->now.n_rows * o->top_k, lists->n_local_experts), out, nullptr);
}

void ffn(epx_ops_t *ops, const void *x, const epx_expert_weights_t *w, int64_t n_rows, int64_t hidden, int64_t size, float *out) {
    Ops *o = of(ops);
    if (n_rows == 0) return;
    Grouped g = {};
    g.n_experts = 1, g.n_rows = (int)n_rows, g.x = (const __nv_bfloat16 *)x;
    feed_forward(o, g, w, hidden, size, n_rows, nullptr, out);
}

/* ---- set-up ---- */

template <class S, class K> static cudaError_t raise(K kernel, cudaError_t before) {
    if (before != cudaSuccess) return before;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes<S>());
}

cudaError_t gemm_prepare() {
    cudaError_t e = raise<FewThin>(linears_kernel<FewThin>, cudaSuccess);
    e = raise<Few>(linears_kernel<Few>, e);
    e = raise<SomeThin>(linears_kernel<SomeThin>, e);
    e = raise<Some>(linears_kernel<Some>, e);
    e = raise<SomeWide>(linears_kernel<SomeWide>, e);
    e = raise<Many>(linears_kernel<Many>, e);
    e = raise<Few>(grouped_kernel<Few>, e);
    e = raise<SomeWide>(grouped_kernel<SomeWide>, e);
    e = raise<Mid>(grouped_kernel<Mid>, e);
    e = raise<Many>(grouped_kernel<Many>, e);
    e = raise<FewPair>(grouped_kernel<FewPair>, e);
    e = raise<SomePair>(grouped_kernel<SomePair>, e);
    e = raise<MidPair>(grouped_kernel<MidPair>, e);
    return raise<ManyPair>(grouped_kernel<ManyPair>, e);
}

} // namespace epx_cuda_ops
