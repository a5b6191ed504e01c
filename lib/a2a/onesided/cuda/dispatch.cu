/* dispatch_send and dispatch_recv on the GPU, separate or fused in one launch (all sends of a block before its first wait).
 * Grid: n_blocks blocks of 4 groups of 128 threads. A unit is (row, segment of 1536 channels). Sending units are dealt round robin;
 * received units are split into contiguous runs, so a block works out the list positions of its own pairs only.
 * Shared: home table [E], ids of all pairs, histogram [El], places of the run, one segment image a group. Tested on sm_90. */
#include "a2a/onesided/cuda/exchange.cuh"
#include "spi/gpu_layout.h"

namespace epx {

constexpr int SEG = EPX_GPU_SEG_D, BULK = EPX_GPU_BULK_D;

struct Dispatch {
    const epx_gpu_plan_t &p;
    const epx_gpu_io_t &io;
    const uint32_t *home; /* shared */
    uint64_t epoch;
    uint32_t tag;
    int parity, n_tokens;
    __device__ int n_seg(int mode) const { return mode == EPX_GPU_PACKETS ? (p.hidden + SEG - 1) / SEG : (p.hidden + BULK - 1) / BULK; }
    __device__ char *count(int owner, int src) const { return p.base[owner] + p.l.count_off + (uint64_t)(parity * p.n_ranks + src) * 16; }
    __device__ char *ids(int owner, int src, int t) const {
        return p.base[owner] + p.l.ids_off + ((uint64_t)(parity * p.n_ranks + src) * p.max_tokens + t) * p.l.id_words * 16;
    }
    __device__ char *weights(int owner, int src, int t) const {
        return p.base[owner] + p.l.weights_off + ((uint64_t)(parity * p.n_ranks + src) * p.max_tokens + t) * p.l.weight_words * 16;
    }
    __device__ char *row(int owner, int src, int t) const {
        return p.base[owner] + p.l.d_off + ((uint64_t)(parity * p.n_ranks + src) * p.max_tokens + t) * p.l.d_row_bytes;
    }
    __device__ char *packets(int owner, int src, int t) const {
        return p.base[owner] + p.l.dp_off + ((uint64_t)(parity * p.n_ranks + src) * p.packet_tokens + t) * p.l.d_packets * 16;
    }
    __device__ uint64_t *flag(int owner, int src) const {
        return (uint64_t *)(p.base[owner] + p.l.flag_d_off) + (uint64_t)src * p.n_blocks;
    }
};

/* Does an earlier place of the token name the same expert? id[h]: places lane and lane + 32 of the warp's token. */
__device__ __forceinline__ void mark_repeats(int K, const int *id, uint32_t *wire) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t same = __match_any_sync(~0u, id[h]);
        wire[h] = id[h] < 0 ? (uint32_t)EPX_GPU_ID_MASK : (uint32_t)id[h] | (__ffs(same) - 1 != lane ? (uint32_t)EPX_GPU_ID_REPEAT : 0u);
    }
    if (K <= 32) return;
#pragma unroll 1
    for (int k = 0; k < 32; k++)
        if (int v = __shfl_sync(~0u, id[0], k); v >= 0 && v == id[1]) wire[1] |= EPX_GPU_ID_REPEAT;
}

/* Token counts, ids and weights to every rank: first, so that receivers build lists while rows travel. A warp takes a token. */
__device__ void send_routing(const Dispatch &d, int mode) {
    int n_id = d.p.l.id_words, per = n_id + d.p.l.weight_words, K = d.p.top_k, n_ranks = d.p.n_ranks, lane = threadIdx.x % 32;
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x < n_ranks)
        EPX_DELAY(0), store_word(d.count(threadIdx.x, d.p.rank), make_uint4(d.n_tokens, mode, 0, d.tag));
    /* from the last warp down: the first groups start on rows at once */
#pragma unroll 1
    for (int t = (THREADS / 32 - 1 - threadIdx.x / 32) * gridDim.x + blockIdx.x; t < d.n_tokens; t += gridDim.x * (THREADS / 32)) {
        int id[2];
        float weight[2];
        uint32_t wire[2], w[3] = {0, 0, 0};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int k = lane + 32 * h;
            id[h] = k < K ? d.io.ids[(int64_t)t * K + k] : -1, weight[h] = k < K ? d.io.weights[(int64_t)t * K + k] : 0.0f;
            if ((uint32_t)id[h] >= (uint32_t)d.p.n_experts) id[h] = -1;
        }
        mark_repeats(K, id, wire);
#pragma unroll
        for (int q = 0; q < 6; q++) { /* lane j packs places 6 j .. 6 j + 5 */
            int k = lane * 6 + q;
            uint32_t lo = __shfl_sync(~0u, wire[0], k % 32), hi = __shfl_sync(~0u, wire[1], k % 32), v = k >= K ? (uint32_t)EPX_GPU_ID_MASK : k < 32 ? lo : hi;
            w[q / 2] |= v << (q % 2 * 16);
        }
#pragma unroll
        for (int q = 0; q < 3; q++) { /* lane n_id + j packs weights 3 j .. 3 j + 2 */
            int k = (lane - n_id) * 3 + q;
            float lo = __shfl_sync(~0u, weight[0], k & 31), hi = __shfl_sync(~0u, weight[1], k & 31);
            if (lane >= n_id) w[q] = k < K ? __float_as_uint(k < 32 ? lo : hi) : 0u;
        }
        EPX_DELAY(1);
        if (lane >= per) continue; /* at most 11 + 22 words: the last word of K = 64 is below */
#pragma unroll 1
        for (int r = 1; r <= n_ranks; r++) {
            int q = d.p.rank + r < n_ranks ? d.p.rank + r : d.p.rank + r - n_ranks;
            char *dst = lane < n_id ? d.ids(q, d.p.rank, t) + lane * 16 : d.weights(q, d.p.rank, t) + (lane - n_id) * 16;
            store_word(dst, make_uint4(w[0], w[1], w[2], d.tag));
        }
        if (per > 32 && lane == 0) /* K = 64: weight 63 is the 33rd word */
#pragma unroll 1
            for (int q = 0; q < n_ranks; q++)
                store_word(d.weights(q, d.p.rank, t) + 21 * 16, make_uint4(__float_as_uint(d.io.weights[(int64_t)t * K + 63]), 0, 0, d.tag));
    }
}

/* x / s rounded as IEEE division does: with the rounded reciprocal r of a normal s, one residual step is exact rounding (Markstein, "Computation
 * of elementary functions on the IBM RISC System/6000", 1990); where the residual would underflow the quotient is far under the least
 * e4m3 step. Infinities and NaN take the plain product. */
__device__ __forceinline__ float quotient(float x, float s, float r) {
    float q = __fmul_rn(x, r), e = __fmaf_rn(-q, s, x);
    return fabsf(q) <= 1e30f && q != 0.0f ? __fmaf_rn(e, r, q) : q; /* a zero keeps its sign */
}

/* 16 channels of one lane in fp8 and the scale of the block of 8 lanes. Clamps of amax: docs/protocol.md. */
__device__ __forceinline__ uint4 quantise16(const float *f, bool ue8m0, float *out_scale) {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; i++) amax = fmaxf(amax, fabsf(f[i])); /* fmaxf drops NaN */
    for (int o = 1; o < 8; o *= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, o));
    amax = fminf(fmaxf(amax, 1e-12f), 3.402823466e+38f);
    float s = __fdiv_rn(amax, 448.0f);
    if (ue8m0) s = __uint_as_float((__float_as_uint(s) + 0x7FFFFFu) & 0x7F800000u); /* the least power of two not below */
    float r = __frcp_rn(s);
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        __nv_fp8x2_storage_t a = __nv_cvt_float2_to_fp8x2(make_float2(quotient(f[4 * i], s, r), quotient(f[4 * i + 1], s, r)), __NV_SATFINITE, __NV_E4M3);
        __nv_fp8x2_storage_t b = __nv_cvt_float2_to_fp8x2(make_float2(quotient(f[4 * i + 2], s, r), quotient(f[4 * i + 3], s, r)), __NV_SATFINITE, __NV_E4M3);
        w[i] = (uint32_t)a | (uint32_t)b << 16;
    }
    *out_scale = s;
    return make_uint4(w[0], w[1], w[2], w[3]);
}

/* 16 or 8 bytes; an odd number of 8 bytes in a row (fp8, H % 16 == 8) leaves rows on 8. */
__device__ __forceinline__ void put_bytes(char *dst, uint4 v, int n) {
    if (n == 16 && ((uintptr_t)dst & 8) == 0) {
        *(uint4 *)dst = v;
        return;
    }
    *(uint2 *)dst = make_uint2(v.x, v.y);
    if (n == 16) *(uint2 *)(dst + 8) = make_uint2(v.z, v.w);
}
__device__ __forceinline__ uint4 get_bytes(const char *src, int n) {
    if (n == 16 && ((uintptr_t)src & 8) == 0) return *(const uint4 *)src;
    uint2 a = *(const uint2 *)src, b = n == 16 ? *(const uint2 *)(src + 8) : make_uint2(0, 0);
    return make_uint4(a.x, a.y, b.x, b.y);
}

/* Channels of segment seg, its bytes of codes or elements, the words of its scales (first_word: in the row), and its packets. */
struct Segment {
    int c0, n_ch, n_bytes, n_words, first_word, first_packet, n_packets;
    __device__ Segment(const epx_gpu_plan_t &p, int seg, int width, int bytes, bool scales) {
        int a_word = p.ue8m0 ? 512 : 128; /* channels; segments are multiples of it */
        c0 = seg * width, n_ch = min(width, p.hidden - c0), n_bytes = n_ch * bytes, n_words = scales ? (n_ch + a_word - 1) / a_word : 0;
        first_word = c0 / a_word;
        first_packet = seg * ((SEG * bytes + (scales ? SEG / a_word * 4 : 0)) / 12), n_packets = (n_bytes + n_words * 4 + 11) / 12;
    }
};

/* The segment of token t in wire form: meanwhile() once the first loads are on their way, then put(offset of 16-byte piece in the segment's
 * elements, value, bytes), put_scale(word of the segment, value). All 128 threads of a group call it. */
template <int TD, bool FP8, class Meanwhile, class Put, class PutScale>
__device__ __forceinline__ void wire_segment(const Dispatch &d, int t, const Segment &g, const Meanwhile &meanwhile, const Put &put, const PutScale &put_scale) {
    constexpr int B = Elem<TD>::BYTES;
    const char *src = (const char *)d.io.x + ((int64_t)t * d.p.hidden + g.c0) * B;
    int lane = group_lane();
    if constexpr (FP8) {
        int c = lane * 16;
        float f[16], s;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (c + 8 * h < g.n_ch) {
                Elem<TD>::get8(src + (c + 8 * h) * B, f + 8 * h, false);
            } else {
#pragma unroll
                for (int i = 0; i < 8; i++) f[8 * h + i] = 0.0f;
            }
        }
        meanwhile();
        uint4 q = quantise16(f, d.p.ue8m0, &s);
        if (c < g.n_ch) put(c, q, c + 8 < g.n_ch ? 16 : 8);
        if (d.p.ue8m0) { /* the four codes of a warp's 512 channels are one word */
            uint32_t code = c < g.n_ch ? __float_as_uint(s) >> 23 : 0u, w = 0;
#pragma unroll
            for (int b = 0; b < 4; b++) w |= __shfl_sync(~0u, code, 8 * b) << (8 * b);
            if (lane % 32 == 0 && c < g.n_ch) put_scale(lane / 32, w);
        } else if (lane % 8 == 0 && c < g.n_ch) {
            put_scale(lane / 8, __float_as_uint(s));
        }
        return;
    }
    int n = g.n_bytes - 16 * lane >= 16 ? 16 : 8;
    uint4 first = 16 * lane < g.n_bytes ? get_bytes(src + 16 * lane, n) : make_uint4(0, 0, 0, 0);
    meanwhile();
    if (16 * lane < g.n_bytes) put(16 * lane, first, n);
#pragma unroll 1
    for (int i = lane + GROUP; 16 * i < g.n_bytes; i += GROUP) {
        n = g.n_bytes - 16 * i >= 16 ? 16 : 8;
        put(16 * i, get_bytes(src + 16 * i, n), n);
    }
    if (TD == EPX_FP8_E4M3 && lane < g.n_words) put_scale(lane, d.io.x_scale[(int64_t)t * d.p.l.scale_words + g.first_word + lane]);
}

/* Ids as the caller gave them; nothing looks at them yet, so they travel together with the row that is loaded next. */
__device__ __forceinline__ TokenIds<2> ask_ids(const Dispatch &d, int t) {
    TokenIds<2> ids;
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int k = lane + 32 * h;
        ids.id[h] = k < d.p.top_k ? d.io.ids[(int64_t)t * d.p.top_k + k] : -1;
    }
    return ids;
}
__device__ __forceinline__ uint32_t owners(const Dispatch &d, TokenIds<2> ids) {
#pragma unroll
    for (int h = 0; h < 2; h++)
        if ((uint32_t)ids.id[h] >= (uint32_t)d.p.n_experts) ids.id[h] = -1;
    return ranks_of(ids, d.home);
}

/* Bulk: registers to every owner's row; then one flag a block and rank. */
template <int TD, bool FP8> __device__ void send_bulk(const Dispatch &d) {
    int n_seg = d.n_seg(EPX_GPU_BULK), n_units = d.n_tokens * n_seg, step = gridDim.x * GROUPS, n_ranks = d.p.n_ranks;
    constexpr int B = FP8 ? 1 : Elem<TD>::BYTES;
    constexpr bool SCALES = FP8 || TD == EPX_FP8_E4M3;
#pragma unroll 1
    for (int u = group_id() * gridDim.x + blockIdx.x; u < n_units; u += step) {
        int t = u / n_seg;
        Segment g(d.p, u % n_seg, BULK, B, SCALES);
        TokenIds<2> ids = ask_ids(d, t);
        uint32_t mask = 0;
        wire_segment<TD, FP8>(
            d, t, g, [&] { mask = owners(d, ids); },
            [&](int off, uint4 v, int n) {
#pragma unroll 1
                for (int r = 1; r <= n_ranks; r++) {
                    int q = d.p.rank + r < n_ranks ? d.p.rank + r : d.p.rank + r - n_ranks;
                    if (mask >> q & 1) put_bytes(d.row(q, d.p.rank, t) + g.c0 * B + off, v, n);
                }
            },
            [&](int b, uint32_t s) {
#pragma unroll 1
                for (int q = 0; q < n_ranks; q++)
                    if (mask >> q & 1) *(uint32_t *)(d.row(q, d.p.rank, t) + d.p.l.d_scale_off + (g.first_word + b) * 4) = s;
            });
    }
    EPX_STAMP(d.p, 9);
    __syncthreads();
    if (threadIdx.x < n_ranks) {
        EPX_DELAY(3);
        fence_release(); /* partner: load_flag() in wait_source() */
        EPX_DELAY(4);
        store_flag(d.flag(threadIdx.x, d.p.rank) + blockIdx.x, d.epoch);
    }
}

/* Packets: the segment's image in shared memory, then 12 bytes at a time with the tag. */
template <int TD, bool FP8> __device__ void send_packets(const Dispatch &d, char *image) {
    int n_seg = d.n_seg(EPX_GPU_PACKETS), n_units = d.n_tokens * n_seg, step = gridDim.x * GROUPS, n_ranks = d.p.n_ranks;
#pragma unroll 1
    for (int u = group_id() * gridDim.x + blockIdx.x; u < n_units; u += step) {
        int t = u / n_seg;
        Segment g(d.p, u % n_seg, SEG, FP8 ? 1 : Elem<TD>::BYTES, FP8 || TD == EPX_FP8_E4M3);
        TokenIds<2> ids = ask_ids(d, t);
        uint32_t mask = 0;
        wire_segment<TD, FP8>(
            d, t, g, [&] { mask = owners(d, ids); }, [&](int off, uint4 v, int n) { put_bytes(image + off, v, n); },
            [&](int b, uint32_t s) { *(uint32_t *)(image + g.n_bytes + b * 4) = s; });
        group_sync();
        const uint32_t *w = (const uint32_t *)image;
#pragma unroll 1
        for (int i = group_lane(); i < g.n_packets; i += GROUP) {
            EPX_DELAY(2);
            uint4 v = make_uint4(w[3 * i], w[3 * i + 1], w[3 * i + 2], d.tag);
#pragma unroll 1
            for (int r = 1; r <= n_ranks; r++) {
                int q = d.p.rank + r < n_ranks ? d.p.rank + r : d.p.rank + r - n_ranks;
                if (mask >> q & 1) store_word(d.packets(q, d.p.rank, t) + (uint64_t)(g.first_packet + i) * 16, v);
            }
        }
        group_sync();
    }
}

/* Shared tables of the receiving half. */
struct Arrivals {
    int32_t *first; /* [W + 1] first pair of each source */
    int32_t *unit;  /* [W + 1] first unit of each source */
    int32_t *mode;  /* [W] */
    int32_t *bad;
    int32_t *hist;  /* [El] rows of each local expert before the run, then before the current pair */
    int32_t *start; /* [El + 1] lists: first output row of each expert */
    uint16_t *local; /* [pairs][K] local expert, with EPX_GPU_ID_REPEAT; EPX_GPU_ID_MASK: not ours */
    int32_t *place; /* [run][K] output row of each first place, -1 otherwise */
    int32_t *rows;  /* [run][K + 1] how many, then the output rows, without gaps */
    char *image;    /* of the group */
};

__device__ __forceinline__ int find(const int32_t *first, int i) {
    int s = 0;
#pragma unroll 1
    while (i >= first[s + 1]) s++;
    return s;
}

/* The id word that this thread will want first, asked for before the counts say whether it exists. */
struct Early {
    int source, token, word;
    uint4 v;
};
__device__ __forceinline__ Early ask_early(const Dispatch &d) {
    Early e;
    int per = d.p.packet_tokens * d.p.l.id_words;
    e.source = per > 0 ? (int)threadIdx.x / per : d.p.n_ranks;
    int i = per > 0 ? (int)threadIdx.x % per : 0;
    e.token = i / d.p.l.id_words, e.word = i % d.p.l.id_words;
    if (e.source < d.p.n_ranks) e.v = load_word(d.ids(d.p.rank, e.source, e.token) + e.word * 16);
    return e;
}

__device__ bool read_counts(const Dispatch &d, const Arrivals &a) {
    if (threadIdx.x == 0) *a.bad = 0;
#pragma unroll 1
    for (int e = threadIdx.x; e < d.p.n_local; e += THREADS) a.hist[e] = 0, a.start[e + 1] = 0;
    __syncthreads();
    if (threadIdx.x < d.p.n_ranks) {
        Wait w(d.p, d.epoch, 0);
        uint4 v;
        if (!wait_word(w, d.count(d.p.rank, threadIdx.x), d.tag, threadIdx.x, v)) *a.bad = 1;
        a.first[threadIdx.x + 1] = v.x;
        a.mode[threadIdx.x] = v.y;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        a.first[0] = a.unit[0] = a.start[0] = 0;
#pragma unroll 1
        for (int s = 0; s < d.p.n_ranks; s++) {
            a.unit[s + 1] = a.unit[s] + a.first[s + 1] * d.n_seg(a.mode[s]);
            a.first[s + 1] += a.first[s];
        }
    }
    __syncthreads();
    return !*a.bad;
}

/* Local experts of the six places in one id word. */
__device__ __forceinline__ void take_ids(const Dispatch &d, const Arrivals &a, int pair, int word, uint4 v) {
    uint32_t words[3] = {v.x, v.y, v.z};
    int K = d.p.top_k;
#pragma unroll
    for (int q = 0; q < 6; q++) {
        int k = word * 6 + q;
        uint32_t x = q % 2 ? words[q / 2] >> 16 : words[q / 2] & 0xFFFFu, id = x & EPX_GPU_ID_MASK;
        uint32_t h = id < (uint32_t)d.p.n_experts ? d.home[id] : ~0u;
        if (k < K) a.local[pair * K + k] = (uint16_t)(h >> 16 == (uint32_t)d.p.rank ? h & 0xFFFFu | x & EPX_GPU_ID_REPEAT : EPX_GPU_ID_MASK);
    }
}

/* Local expert of every place of pairs [0, end). */
__device__ bool read_ids(const Dispatch &d, const Arrivals &a, const Early &early, int end) {
    int per = d.p.l.id_words;
    bool early_hit = early.source < d.p.n_ranks && early.v.w == d.tag && early.token < a.first[early.source + 1] - a.first[early.source];
    if (early_hit) take_ids(d, a, a.first[early.source] + early.token, early.word, early.v);
    bool all_early = d.p.n_ranks * d.p.packet_tokens * per <= THREADS;
#pragma unroll 1
    for (int i = threadIdx.x; i < end * per; i += THREADS) {
        int pair = i / per, j = i % per, s = find(a.first, pair), t = pair - a.first[s];
        if (all_early && t < d.p.packet_tokens) continue; /* its asker waits for it below */
        Wait w(d.p, d.epoch, 0);
        uint4 v;
        if (!wait_word(w, d.ids(d.p.rank, s, t) + j * 16, d.tag, s, v)) *a.bad = 1;
        take_ids(d, a, pair, j, v);
    }
    if (all_early && !early_hit && early.source < d.p.n_ranks && early.token < a.first[early.source + 1] - a.first[early.source]) {
        Wait w(d.p, d.epoch, 0);
        uint4 v;
        if (!wait_word(w, d.ids(d.p.rank, early.source, early.token) + early.word * 16, d.tag, early.source, v)) *a.bad = 1;
        take_ids(d, a, a.first[early.source] + early.token, early.word, v);
    }
    __syncthreads();
    return !*a.bad;
}

/* Are output rows of an expert placed after those of all experts before it? */
__device__ __forceinline__ bool needs_totals(const Dispatch &d) { return d.io.out_x == nullptr || d.p.contiguous; }

/* Rows of each local expert before the run; lists and contiguous rows need everybody's totals too. */
__device__ void count_before(const Dispatch &d, const Arrivals &a, int begin, int total) {
    int n = d.p.n_local, K = d.p.top_k;
    bool lists = needs_totals(d);
    if (!lists && begin == 0) return;
#pragma unroll 1
    for (int i = threadIdx.x; i < (lists ? total : begin) * K; i += THREADS) {
        int e = a.local[i];
        if (e >= EPX_GPU_ID_MASK) continue; /* not ours, or a repeat */
        if (i < begin * K) atomicAdd(&a.hist[e], 1);
        if (lists) atomicAdd(&a.start[e + 1], 1);
    }
    __syncthreads();
    if (!lists) return;
    if (threadIdx.x < 32)
#pragma unroll 1
        for (int base = 0, sum = 0; base < n; base += 32) {
            int e = base + threadIdx.x, v = e < n ? a.start[e + 1] : 0;
            v = (v + d.p.align - 1) / d.p.align * d.p.align;
#pragma unroll
            for (int o = 1; o < 32; o *= 2) {
                int u = __shfl_up_sync(~0u, v, o);
                if ((int)threadIdx.x >= o) v += u;
            }
            if (e < n) a.start[e + 1] = v + sum;
            sum += __shfl_sync(~0u, v, 31);
        }
    __syncthreads();
    if (blockIdx.x == 0 && d.io.out_expert_off)
#pragma unroll 1
        for (int e = threadIdx.x; e <= n; e += THREADS) d.io.out_expert_off[e] = a.start[e];
    if (blockIdx.x == 0 && d.io.out_row_base && threadIdx.x < d.p.n_ranks) {
        const char *row = d.row(d.p.rank, threadIdx.x, 0);
        d.io.out_row_base[threadIdx.x] = row;
        d.io.out_scale_base[threadIdx.x] = (const float *)(row + d.p.l.d_scale_off);
    }
}

/* Output rows of pairs [begin, end): lists are ordered by (expert, source, token). One warp. */
__device__ void build_places(const Dispatch &d, const Arrivals &a, int begin, int end) {
    int K = d.p.top_k, lane = threadIdx.x;
    bool lists = needs_totals(d);
    if (threadIdx.x < 32)
#pragma unroll 1
        for (int pair = begin; pair < end; pair++) {
            int32_t *place = a.place + (pair - begin) * K, *rows = a.rows + (pair - begin) * (K + 1), n = 0;
#pragma unroll 1
            for (int base = 0; base < K; base += 32) {
                int k = base + lane, e = k < K ? a.local[pair * K + k] : EPX_GPU_ID_MASK, row = -1;
                if (e < EPX_GPU_ID_MASK) row = (lists ? a.start[e] : e * d.p.row_cap) + a.hist[e]++; /* a token's first places differ */
                uint32_t m = __ballot_sync(~0u, row >= 0);
                if (k < K) place[k] = row;
                if (row >= 0) rows[1 + n + __popc(m & ((1u << lane) - 1))] = row;
                n += __popc(m);
            }
            if (lane == 0) rows[0] = n;
            __syncwarp();
        }
    __syncthreads();
}

/* What combine will need, and the list entries, for pairs [begin, end). Not on the rows' critical path: one group does it. */
__device__ void write_terms(const Dispatch &d, const Arrivals &a, int base, int begin, int end) {
    int K = d.p.top_k;
#pragma unroll 1
    for (int i = begin * K + group_lane(); i < end * K; i += GROUP) {
        int pair = i / K, k = i % K, s = find(a.first, pair), t = pair - a.first[s], e = a.local[i];
        epx_gpu_term_t term = {-1, 0.0f};
        if (e != EPX_GPU_ID_MASK) {
            int first = k;
            if (e & EPX_GPU_ID_REPEAT)
                for (first = 0; a.local[pair * K + first] != (e & EPX_GPU_ID_MASK);) first++;
            int row = a.place[(pair - base) * K + first];
            Wait wait(d.p, d.epoch, 0);
            uint4 v;
            if (!wait_word(wait, d.weights(d.p.rank, s, t) + k / 3 * 16, d.tag, s, v)) return;
            term.slot = row | (first == k ? 0 : EPX_GPU_REPEAT);
            term.weight = __uint_as_float(k % 3 == 0 ? v.x : k % 3 == 1 ? v.y : v.z);
            if (first == k && d.io.out_entries) ((uint2 *)d.io.out_entries)[row] = make_uint2(s, t);
        }
        d.p.terms[((int64_t)s * d.p.max_tokens + t) * K + k] = term;
    }
}

/* The blocks that sent this group's units u, u + GROUPS, ... of bulk source s have flagged. A source's unit i came from its block
 * i % n_blocks (send_bulk), so a group asks for the flags of its own rows only, all at once. Every thread of a group calls it. */
__device__ bool wait_source(const Dispatch &d, const Arrivals &a, int s, int u, int u1) {
    int end = min(u1, a.unit[s + 1]);
#pragma unroll 1
    for (int v = u + group_lane() * GROUPS; v < end; v += GROUP * GROUPS) {
        Wait w(d.p, d.epoch, 0);
        if (!wait_flag(w, d.flag(d.p.rank, s) + (v - a.unit[s]) % d.p.n_blocks, d.epoch, s)) *a.bad = 1;
    }
    EPX_DELAY(5);
    group_sync();
    return !*(volatile int32_t *)a.bad;
}

/* Destinations of a received row: its places in the output, or (lists) its slot in the own slab. */
struct Target {
    const int32_t *row; /* [n] */
    int n;
    char *slot;           /* lists: the slab row; NULL otherwise */
};
__device__ __forceinline__ void write_rows(const Dispatch &d, const Target &to, int row_bytes, int off, uint4 v, int n) {
    if (to.slot) {
        put_bytes(to.slot + off, v, n);
        return;
    }
#pragma unroll 1
    for (int i = 0; i < to.n; i++) put_bytes((char *)d.io.out_x + (int64_t)to.row[i] * row_bytes + off, v, n);
}
__device__ __forceinline__ void write_scale(const Dispatch &d, const Target &to, int b, uint32_t v) {
    if (to.slot) {
        *(uint32_t *)(to.slot + d.p.l.d_scale_off + 4 * b) = v;
        return;
    }
#pragma unroll 1
    for (int i = 0; i < to.n; i++) {
        int64_t row = to.row[i], at = row * d.p.l.scale_words + b;
        if (d.p.scale_by_column) { /* one block of columns; expert-major: one for each expert */
            int64_t e = d.p.contiguous ? 0 : row / d.p.row_cap;
            at = (e * d.p.l.scale_words + b) * d.p.scale_gap + row - e * d.p.row_cap;
        }
        ((uint32_t *)d.io.out_scale)[at] = v;
    }
}

template <int B, bool FP8> __device__ void unpack_bulk(const Dispatch &d, int s, int t, const Segment &g, const Target &to) {
    const char *src = d.row(d.p.rank, s, t);
    int b = GROUP - 1 - group_lane();
    uint32_t scale = 0;
    if (FP8 && b < g.n_words) scale = *(volatile const uint32_t *)(src + d.p.l.d_scale_off + (g.first_word + b) * 4);
#pragma unroll 1
    for (int i = group_lane(); i < (g.n_bytes + 15) / 16; i += GROUP) {
        uint4 v = load_row16(src + g.c0 * B + 16 * i);
        write_rows(d, to, d.p.hidden * B, g.c0 * B + 16 * i, v, g.n_bytes - 16 * i >= 16 ? 16 : 8);
    }
    if (FP8 && b < g.n_words) write_scale(d, to, g.first_word + b, scale);
}

/* The first two packets of a thread, asked for early; tag checked later. */
struct EarlyPackets {
    uint4 v[2];
};
template <int B, bool FP8> __device__ bool unpack_packets(const Dispatch &d, const Arrivals &a, int s, int t, const Segment &g, const Target &to,
                                                          EarlyPackets *early) {
    const char *src = d.packets(d.p.rank, s, t) + (uint64_t)g.first_packet * 16;
    uint32_t *w = (uint32_t *)a.image;
#pragma unroll 1
    for (int i = group_lane(); i < g.n_packets; i += GROUP) {
        Wait wait(d.p, d.epoch, 0);
        uint4 v = i < GROUP ? early->v[0] : early->v[1];
        if ((i >= 2 * GROUP || v.w != d.tag) && !wait_word(wait, src + i * 16, d.tag, s, v)) *a.bad = 1;
        w[3 * i] = v.x, w[3 * i + 1] = v.y, w[3 * i + 2] = v.z;
    }
    group_sync();
    if (*(volatile int32_t *)a.bad) return false;
#pragma unroll 1
    for (int i = group_lane(); i < (g.n_bytes + 15) / 16; i += GROUP)
        write_rows(d, to, d.p.hidden * B, g.c0 * B + 16 * i, *(const uint4 *)(a.image + 16 * i), g.n_bytes - 16 * i >= 16 ? 16 : 8);
    int b = GROUP - 1 - group_lane();
    if (FP8 && b < g.n_words) write_scale(d, to, g.first_word + b, *(const uint32_t *)(a.image + g.n_bytes + 4 * b));
    group_sync();
    return true;
}

/* Rows of units [u0, u1), whose first pair is `base`. */
template <int B, bool FP8> __device__ EarlyPackets ask_packets(const Dispatch &d, const Arrivals &a, int u, int u1) {
    EarlyPackets e;
    e.v[0] = e.v[1] = make_uint4(0, 0, 0, d.tag - 1); /* a tag that cannot be this epoch's */
    if (u >= u1) return e;
    int s = find(a.unit, u), n_seg = d.n_seg(a.mode[s]), i = u - a.unit[s];
    if (a.mode[s] != EPX_GPU_PACKETS) return e;
    Segment g(d.p, i % n_seg, SEG, B, FP8);
    const char *src = d.packets(d.p.rank, s, i / n_seg) + (uint64_t)g.first_packet * 16;
#pragma unroll
    for (int h = 0; h < 2; h++)
        if (group_lane() + h * GROUP < g.n_packets) e.v[h] = load_word(src + (group_lane() + h * GROUP) * 16);
    return e;
}

template <int B, bool FP8> __device__ bool move_rows(const Dispatch &d, const Arrivals &a, int base, int u0, int u1, EarlyPackets early) {
    int ready = -1, K = d.p.top_k;
    bool lists = d.io.out_x == nullptr;
#pragma unroll 1
    for (int u = u0 + group_id(); u < u1; u += GROUPS) {
        int s = find(a.unit, u), n_seg = d.n_seg(a.mode[s]), i = u - a.unit[s], t = i / n_seg, seg = i % n_seg;
        const int32_t *rows = a.rows + (a.first[s] + t - base) * (K + 1);
        Target to = {rows + 1, rows[0], lists ? d.row(d.p.rank, s, t) : nullptr};
        bool any = to.n > 0;
        if (a.mode[s] == EPX_GPU_PACKETS) {
            if (any && !unpack_packets<B, FP8>(d, a, s, t, Segment(d.p, seg, SEG, B, FP8), to, &early)) return false;
            early = ask_packets<B, FP8>(d, a, u + GROUPS, u1);
            continue;
        }
        if (ready != s && !wait_source(d, a, s, u, u1)) return false;
        ready = s;
        if (any && !lists) unpack_bulk<B, FP8>(d, s, t, Segment(d.p, seg, BULK, B, FP8), to);
    }
    return true;
}

__device__ __forceinline__ int pair_of(const Dispatch &d, const Arrivals &a, int u) {
    int s = find(a.unit, u);
    return a.first[s] + (u - a.unit[s]) / d.n_seg(a.mode[s]);
}

template <int B, bool FP8> __device__ void receive(const Dispatch &d, Arrivals &a) {
    Early early = ask_early(d);
    EPX_DELAY(6);
    if (!read_counts(d, a)) return;
    EPX_STAMP(d.p, 4);
    int total = a.first[d.p.n_ranks], n_units = a.unit[d.p.n_ranks], per = (n_units + gridDim.x - 1) / gridDim.x;
    int u0 = min((int)blockIdx.x * per, n_units), u1 = min(u0 + per, n_units);
    bool last = u1 == n_units && (u0 < u1 || (n_units == 0 && blockIdx.x == 0)); /* it ends the lists: it knows the totals */
    if (u0 >= u1 && !last && blockIdx.x != 0) return;
    EarlyPackets packets = ask_packets<B, FP8>(d, a, u0 + group_id(), u1);
    int begin = u0 < u1 ? pair_of(d, a, u0) : total, end = u0 < u1 ? pair_of(d, a, u1 - 1) + 1 : total;
    if (!read_ids(d, a, early, needs_totals(d) ? total : end)) return;
    EPX_STAMP(d.p, 5);
    count_before(d, a, begin, total);
    build_places(d, a, begin, end);
    EPX_STAMP(d.p, 6);
    if (last && d.io.out_counts)
#pragma unroll 1
        for (int e = threadIdx.x; e < d.p.n_local; e += THREADS) d.io.out_counts[e] = a.hist[e];
    bool shared_pair = u0 > 0 && u0 < u1 && pair_of(d, a, u0 - 1) == begin; /* the block before writes it */
    if (group_id() == GROUPS - 1) write_terms(d, a, begin, shared_pair ? begin + 1 : begin, end);
    move_rows<B, FP8>(d, a, begin, u0, u1, packets);
    EPX_STAMP(d.p, 7);
}

__device__ __forceinline__ size_t align16(size_t n) { return (n + 15) / 16 * 16; }
__device__ __forceinline__ size_t image_bytes(int wire_bytes) { return align16((size_t)SEG * wire_bytes + SEG / 128 * 4 + 16); }
template <int TD, bool FP8>
__global__ void __launch_bounds__(THREADS, 2) dispatch_kernel(const __grid_constant__ epx_gpu_plan_t p, const __grid_constant__ epx_gpu_io_t io, int halves, int run_pairs) {
    extern __shared__ __align__(16) char shared[];
    __shared__ Context ctx;
    __shared__ int32_t bad;
    EPX_STAMP(p, 0);
    constexpr int B = FP8 ? 1 : Elem<TD>::BYTES;
    char *at = shared + GROUPS * image_bytes(B);
    uint32_t *home = (uint32_t *)at;
    at += align16((size_t)p.n_experts * 4);
    load_context(p, io, halves & EPX_GPU_SEND ? 0 : 1, &ctx, home);
    EPX_STAMP(p, 1);
    if (ctx.stop) return;
    Dispatch d = {p, io, home, ctx.epoch, (uint32_t)ctx.epoch, (int)(ctx.epoch & 1), ctx.n_tokens};
    char *image = shared + group_id() * image_bytes(B);
    if (halves & EPX_GPU_SEND) {
        int mode = d.n_tokens <= p.packet_tokens ? EPX_GPU_PACKETS : EPX_GPU_BULK;
        send_routing(d, mode);
        EPX_STAMP(p, 2);
        if (mode == EPX_GPU_PACKETS) send_packets<TD, FP8>(d, image);
        else send_bulk<TD, FP8>(d);
        EPX_STAMP(p, 3);
        if (threadIdx.x == 0) p.blocks[blockIdx.x].done[0] = d.epoch;
    }
    if (halves & EPX_GPU_RECV) {
        Arrivals a;
        a.bad = &bad, a.image = image;
        a.first = (int32_t *)at, at += align16((size_t)(p.n_ranks + 1) * 4);
        a.unit = (int32_t *)at, at += align16((size_t)(p.n_ranks + 1) * 4);
        a.mode = (int32_t *)at, at += align16((size_t)p.n_ranks * 4);
        a.hist = (int32_t *)at, at += align16((size_t)p.n_local * 4);
        a.start = (int32_t *)at, at += align16((size_t)(p.n_local + 1) * 4);
        a.place = (int32_t *)at, at += align16((size_t)run_pairs * p.top_k * 4);
        a.rows = (int32_t *)at, at += align16((size_t)run_pairs * (p.top_k + 1) * 4);
        a.local = (uint16_t *)at;
        __syncthreads();
        receive<B, FP8 || TD == EPX_FP8_E4M3>(d, a);
        EPX_STAMP(p, 8);
        EPX_DELAY(7);
        if (threadIdx.x == 0) p.blocks[blockIdx.x].done[1] = d.epoch;
    }
    __syncthreads(); /* no wait of this block is left */
    let_next_start();
}

} // namespace epx

using namespace epx;

template <int TD, bool FP8> static int launch(const epx_gpu_plan_t *p, const epx_gpu_io_t *io, int halves, cudaStream_t s) {
    size_t bytes = epx_gpu_dispatch_shared(p); /* sized for E local experts, so that ranks agree */
    cudaError_t e = allow_shared((const void *)dispatch_kernel<TD, FP8>, bytes);
    if (e != cudaSuccess) return (int)e;
    e = start(dispatch_kernel<TD, FP8>, p, bytes, s, *p, *io, halves, epx_gpu_run_pairs(p));
    return e == cudaSuccess && halves & EPX_GPU_RECV ? epx_gpu_after(p, io, s) : (int)e;
}

extern "C" int epx_gpu_dispatch(const epx_gpu_plan_t *p, const epx_gpu_io_t *io, int halves, void *stream) {
    cudaStream_t s = (cudaStream_t)stream;
    bool fp8 = p->wire_dtype == EPX_FP8_E4M3;
    int e = halves == EPX_GPU_RECV ? epx_gpu_gate(p, 0, stream) : 0;
    if (e != 0) return e;
    if (p->token_dtype == EPX_FP8_E4M3) return launch<EPX_FP8_E4M3, false>(p, io, halves, s);
    if (p->token_dtype == EPX_BF16) return fp8 ? launch<EPX_BF16, true>(p, io, halves, s) : launch<EPX_BF16, false>(p, io, halves, s);
    if (p->token_dtype == EPX_F16) return fp8 ? launch<EPX_F16, true>(p, io, halves, s) : launch<EPX_F16, false>(p, io, halves, s);
    return fp8 ? launch<EPX_F32, true>(p, io, halves, s) : launch<EPX_F32, false>(p, io, halves, s);
}
