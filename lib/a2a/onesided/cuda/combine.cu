/* combine_send and combine_recv on the GPU, separate or fused in one launch.
 * Grid: n_blocks blocks of 4 groups of 128 threads; a unit is (row, segment), dealt round robin to groups, 8 channels a thread: 768 channels
 * as packets (96 threads), 1024 in bulk. Shared: home table [E], counts [W], one segment image a group. Tested on sm_90. */
#include "a2a/onesided/cuda/exchange.cuh"

namespace epx {

constexpr int SEG = EPX_GPU_SEG_C, BULK = EPX_GPU_BULK_C, AHEAD = 4; /* rows loaded before the first is added, while receiving */

struct Combine {
    const epx_gpu_plan_t &p;
    const epx_gpu_io_t &io;
    const uint32_t *home; /* shared */
    const uint4 *counts;  /* shared [W]: {n_tokens, mode} of each source */
    uint64_t epoch;
    uint32_t tag;
    int parity, fused;
    __device__ const char *ids(int src, int t) const {
        return p.base[p.rank] + p.l.ids_off + ((uint64_t)(parity * p.n_ranks + src) * p.max_tokens + t) * p.l.id_words * 16;
    }
    __device__ const char *weights(int src, int t) const {
        return p.base[p.rank] + p.l.weights_off + ((uint64_t)(parity * p.n_ranks + src) * p.max_tokens + t) * p.l.weight_words * 16;
    }
    __device__ char *row(int owner, int plane, int t) const {
        return p.base[owner] + p.l.c_off + ((uint64_t)plane * p.max_tokens + t) * p.l.c_row_bytes;
    }
    __device__ char *packets(int owner, int plane, int t) const {
        return p.base[owner] + p.l.cp_off + ((uint64_t)plane * p.packet_tokens + t) * p.l.c_packets * 16;
    }
    __device__ uint64_t *flag(int owner, int src) const {
        return (uint64_t *)(p.base[owner] + p.l.flag_c_off) + (uint64_t)src * p.n_blocks;
    }
};

/* Terms of a received token over a warp: places lane and lane + 32. */
template <int HALVES> struct Terms { /* HALVES: 1 for K <= 32, 2 up to 64 */
    epx_gpu_term_t t[HALVES];
    uint32_t valid[HALVES];
    __device__ bool any() const { return HALVES == 2 ? (valid[0] | valid[HALVES - 1]) != 0 : valid[0] != 0; }
};
/* Asks for them; look() before use. Places that do not exist, and units that are not on, have none. */
template <int HALVES> __device__ __forceinline__ Terms<HALVES> ask_terms(const Combine &c, int src, int t, bool on) {
    Terms<HALVES> r;
    const epx_gpu_term_t *at = c.p.terms + ((int64_t)src * c.p.max_tokens + t) * c.p.top_k;
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        int k = threadIdx.x % 32 + 32 * h;
        r.t[h].slot = -1, r.t[h].weight = 0.0f, r.valid[h] = 0;
        if (on && k < c.p.top_k) *(int2 *)&r.t[h] = *(const int2 *)(at + k);
    }
    return r;
}
template <int HALVES> __device__ __forceinline__ void look(Terms<HALVES> &r) {
#pragma unroll
    for (int h = 0; h < HALVES; h++) r.valid[h] = __ballot_sync(~0u, r.t[h].slot >= 0);
}
/* Place k's term, given to all lanes. */
template <int HALVES> __device__ __forceinline__ epx_gpu_term_t term_at(const Terms<HALVES> &r, int k) {
    epx_gpu_term_t t;
    t.slot = __shfl_sync(~0u, HALVES == 1 || k < 32 ? r.t[0].slot : r.t[HALVES - 1].slot, k % 32);
    t.weight = __shfl_sync(~0u, HALVES == 1 || k < 32 ? r.t[0].weight : r.t[HALVES - 1].weight, k % 32);
    return t;
}

template <int ED> __device__ __forceinline__ const char *expert_row(const Combine &c, int slot, int ch) {
    return (const char *)c.io.x + ((int64_t)(slot & ~EPX_GPU_REPEAT) * c.p.hidden + ch) * Elem<ED>::BYTES;
}

/* f = sum of weight * row over the token's local experts in ascending k, fused, from +0. All lanes of a warp call it. */
template <int ED, int HALVES> __device__ __forceinline__ void weighted_sum(const Combine &c, const Terms<HALVES> &r, int ch, bool on, float *f) {
#pragma unroll
    for (int i = 0; i < 8; i++) f[i] = 0.0f;
    constexpr int VECS = Elem<ED>::BYTES / 2, MANY = 4; /* rows loaded before the first is added */
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        uint32_t m = r.valid[h];
#pragma unroll 1
        while (m) {
            uint4 x[MANY][VECS];
            float w[MANY];
            int n = 0;
#pragma unroll
            for (int a = 0; a < MANY; a++) {
                if (m == 0) break;
                int k = __ffs(m) - 1;
                m &= m - 1;
                epx_gpu_term_t t = term_at(r, k + 32 * h);
                w[a] = t.weight;
                if (on)
#pragma unroll
                    for (int v = 0; v < VECS; v++) x[a][v] = ((const uint4 *)expert_row<ED>(c, t.slot, ch))[v];
                n = a + 1;
            }
#pragma unroll
            for (int a = 0; a < MANY; a++)
                if (a < n && on) {
                    float r[8];
                    Elem<ED>::widen8(x[a], r);
#pragma unroll
                    for (int i = 0; i < 8; i++) f[i] = __fmaf_rn(w[a], r[i], f[i]);
                }
        }
    }
}

/* Give every piece this rank sends for (src, t), whose terms are r: emit(plane, 16-byte vectors of 8 channels). All lanes call it together. */
template <int ED, int CD, int HALVES, class Emit>
__device__ __forceinline__ void pieces(const Combine &c, const Terms<HALVES> &r, int src, int t, int ch, bool on, const Emit &emit) {
    uint4 v[2];
    if (!r.any()) return;
    if (c.fused) {
        const uint4 *x = (const uint4 *)((const char *)c.io.x + (((int64_t)src * c.p.max_tokens + t) * c.p.hidden + ch) * Elem<CD>::BYTES);
        if (on) {
            v[0] = x[0];
            if (Elem<CD>::BYTES == 4) v[1] = x[1];
        }
        emit(c.p.rank, v);
        return;
    }
    float f[8];
    if (!c.p.exact) {
        weighted_sum<ED>(c, r, ch, on, f);
        Elem<CD>::put8(v, f);
        emit(c.p.rank, v);
        return;
    }
#pragma unroll
    for (int h = 0; h < HALVES; h++)
        for (uint32_t m = r.valid[h]; m; m &= m - 1) {
            int k = __ffs(m) - 1 + 32 * h;
            epx_gpu_term_t term = term_at(r, k);
            if (term.slot & EPX_GPU_REPEAT) continue;
            if (on) Elem<ED>::get8(expert_row<ED>(c, term.slot, ch), f, false);
            Elem<CD>::put8(v, f);
            emit(k, v);
        }
}

/* One unit of sending: the pieces of (src, t) in segment seg. */
struct Unit {
    int src, t, seg;
    bool packets, on;
};
template <int ED, int CD, int HALVES> __device__ __forceinline__ void send_unit(const Combine &c, const Unit &n, const Terms<HALVES> &r, char *image) {
    constexpr int B = Elem<CD>::BYTES, PACKETS = SEG * B / 12;
    int src = n.src, t = n.t, seg = n.seg;
    bool packets = n.packets;
    int lane = group_lane(), width = packets ? SEG : BULK, ch = seg * width + lane * 8, n_ch = min(width, c.p.hidden - seg * width);
    bool on = lane * 8 < n_ch;
    pieces<ED, CD, HALVES>(c, r, src, t, ch, on, [&](int plane, const uint4 *v) {
        uint4 *dst = (uint4 *)(packets ? image + lane * 8 * B : c.row(src, plane, t) + ch * B);
        if (on) {
            dst[0] = v[0];
            if (B == 4) dst[1] = v[1];
        }
        if (!packets) return;
        group_sync();
        const uint32_t *w = (const uint32_t *)image;
        char *out = c.packets(src, plane, t) + (uint64_t)seg * PACKETS * 16;
#pragma unroll 1
        for (int i = lane; i < (n_ch * B + 11) / 12; i += GROUP) {
            EPX_DELAY(10);
            store_word(out + i * 16, make_uint4(w[3 * i], w[3 * i + 1], w[3 * i + 2], c.tag));
        }
        group_sync();
    });
}

/* Unit u of all sources, dealt in turn: it belongs to the (u mod W)-th rank after this one, so the link and the own memory are busy
 * together, and few tokens spread over groups. */
__device__ __forceinline__ Unit unit_at(const Combine &c, int u, int n_units) {
    Unit n;
    int i = u / c.p.n_ranks;
    n.src = (c.p.rank + 1 + u % c.p.n_ranks) % c.p.n_ranks;
    n.packets = c.counts[n.src].y == EPX_GPU_PACKETS;
    int n_seg = n.packets ? (c.p.hidden + SEG - 1) / SEG : (c.p.hidden + BULK - 1) / BULK;
    n.t = i / n_seg, n.seg = i % n_seg, n.on = u < n_units && n.t < (int)c.counts[n.src].x;
    return n;
}

/* The terms of a unit are asked for while the unit before it is sent. */
template <int ED, int CD, int HALVES> __device__ void send(const Combine &c, char *image) {
    int most = 0, n_ranks = c.p.n_ranks, seg_packets = (c.p.hidden + SEG - 1) / SEG, seg_bulk = (c.p.hidden + BULK - 1) / BULK;
#pragma unroll 1
    for (int s = 0; s < n_ranks; s++) most = max(most, (int)c.counts[s].x * (c.counts[s].y == EPX_GPU_PACKETS ? seg_packets : seg_bulk));
    int n_units = most * n_ranks, step = gridDim.x * GROUPS, u = group_id() * gridDim.x + blockIdx.x;
    Unit now = unit_at(c, u, n_units);
    Terms<HALVES> r = ask_terms<HALVES>(c, now.src, now.t, now.on);
#pragma unroll 1
    for (; u < n_units; u += step) {
        Unit next = unit_at(c, u + step, n_units);
        Terms<HALVES> later = ask_terms<HALVES>(c, next.src, next.t, next.on);
        look(r);
        if (now.on) send_unit<ED, CD, HALVES>(c, now, r, image);
        now = next, r = later;
    }
    EPX_STAMP(c.p, 14);
    __syncthreads();
    if (threadIdx.x < n_ranks && c.counts[threadIdx.x].y != EPX_GPU_PACKETS) {
        EPX_DELAY(11);
        fence_release(); /* partner: load_flag() in wait_all() */
        EPX_DELAY(12);
        store_flag(c.flag(threadIdx.x, c.p.rank) + blockIdx.x, c.epoch);
    }
}

/* Rows that make up own token t, in the order of summation, over a warp: entry i of n is plane(i) with weight(i), sent by peer(i). */
template <int HALVES> struct Sum {
    int n, plane[HALVES], peer[HALVES];
    float weight[HALVES];
};
template <int HALVES> __device__ __forceinline__ Sum<HALVES> rows_of(const Combine &c, int t) {
    Sum<HALVES> s;
    TokenIds<HALVES> ids = ids_from_words<HALVES>(c.p, c.ids(c.p.rank, t));
    int lane = threadIdx.x % 32;
    if (!c.p.exact) {
        uint32_t m = ranks_of(ids, c.home);
        s.n = __popc(m);
#pragma unroll
        for (int h = 0; h < HALVES; h++) s.plane[h] = s.peer[h] = -1, s.weight[h] = 1.0f;
        /* lane i takes the i-th set bit: the lane whose own bit is set knows its number */
        int place = m >> lane & 1 ? __popc(m & ((1u << lane) - 1)) : -1;
#pragma unroll 1
        for (uint32_t left = m; left; left &= left - 1) {
            int q = __ffs(left) - 1, i = __shfl_sync(~0u, place, q);
            if (lane == i) s.plane[0] = s.peer[0] = q;
        }
        return s;
    }
    const char *words = c.weights(c.p.rank, t);
    s.n = c.p.top_k;
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        int k = lane + 32 * h;
        s.plane[h] = s.peer[h] = -1, s.weight[h] = 0.0f;
        if (ids.id[h] >= 0) {
            uint4 v = load_word(words + k / 3 * 16);
            s.weight[h] = c.io.weights ? c.io.weights[(int64_t)t * c.p.top_k + k] : __uint_as_float(k % 3 == 0 ? v.x : k % 3 == 1 ? v.y : v.z);
            s.plane[h] = k, s.peer[h] = (int)(c.home[ids.id[h]] >> 16);
        }
    }
#pragma unroll 1
    for (int k = c.p.top_k - 1; k >= 0; k--) { /* the first place with the same id sends the row */
        int id = __shfl_sync(~0u, HALVES == 1 || k < 32 ? ids.id[0] : ids.id[HALVES - 1], k % 32);
#pragma unroll
        for (int h = 0; h < HALVES; h++)
            if (id >= 0 && ids.id[h] == id) s.plane[h] = k;
    }
    return s;
}
template <int HALVES> __device__ __forceinline__ int sum_plane(const Sum<HALVES> &s, int i) {
    return __shfl_sync(~0u, HALVES == 1 || i < 32 ? s.plane[0] : s.plane[HALVES - 1], i % 32);
}
template <int HALVES> __device__ __forceinline__ int sum_peer(const Sum<HALVES> &s, int i) {
    return __shfl_sync(~0u, HALVES == 1 || i < 32 ? s.peer[0] : s.peer[HALVES - 1], i % 32);
}
template <int HALVES> __device__ __forceinline__ float sum_weight(const Sum<HALVES> &s, int i) {
    return __shfl_sync(~0u, HALVES == 1 || i < 32 ? s.weight[0] : s.weight[HALVES - 1], i % 32);
}

template <int CD> __device__ __forceinline__ void unpack_words(uint4 v, float *f) {
    if (CD == EPX_F32) {
        f[0] = __uint_as_float(v.x), f[1] = __uint_as_float(v.y), f[2] = __uint_as_float(v.z);
    } else if (CD == EPX_BF16) {
        f[0] = __uint_as_float(v.x << 16), f[1] = __uint_as_float(v.x & 0xFFFF0000u), f[2] = __uint_as_float(v.y << 16);
        f[3] = __uint_as_float(v.y & 0xFFFF0000u), f[4] = __uint_as_float(v.z << 16), f[5] = __uint_as_float(v.z & 0xFFFF0000u);
    } else {
        float2 a = __half22float2(*(const __half2 *)&v.x), b = __half22float2(*(const __half2 *)&v.y), e = __half22float2(*(const __half2 *)&v.z);
        f[0] = a.x, f[1] = a.y, f[2] = b.x, f[3] = b.y, f[4] = e.x, f[5] = e.y;
    }
}
template <int TD> __device__ __forceinline__ float load1(const void *p, int64_t i) {
    if (TD == EPX_F32) return ((const float *)p)[i];
    if (TD == EPX_BF16) return __bfloat162float(((const __nv_bfloat16 *)p)[i]);
    return __half2float(((const __half *)p)[i]);
}
template <int TD> __device__ __forceinline__ void store1(void *p, int64_t i, float v) {
    if (TD == EPX_F32) ((float *)p)[i] = v;
    else if (TD == EPX_BF16) ((__nv_bfloat16 *)p)[i] = __float2bfloat16_rn(v);
    else ((__half *)p)[i] = __float2half_rn(v);
}

/* Add the next AHEAD rows of a packet: all loads leave before meanwhile() and before the first is looked at. false: gave up. */
template <int CD, int HALVES, class Meanwhile>
__device__ __forceinline__ bool add_packets(const Combine &c, const Sum<HALVES> &s, int t, int i0, uint64_t off, bool on, float *acc, const Meanwhile &meanwhile) {
    constexpr int PER = CD == EPX_F32 ? 3 : 6;
    uint4 v[AHEAD];
    int plane[AHEAD], peer[AHEAD];
    float weight[AHEAD], f[6];
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
        plane[a] = -1;
        if (i0 + a >= s.n) continue;
        plane[a] = sum_plane(s, i0 + a), peer[a] = sum_peer(s, i0 + a), weight[a] = sum_weight(s, i0 + a);
        if (plane[a] >= 0 && on) v[a] = load_word(c.packets(c.p.rank, plane[a], t) + off);
    }
    meanwhile();
    if (!on) return true;
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
        if (plane[a] < 0) continue;
        Wait w(c.p, c.epoch, 1);
        if (v[a].w != c.tag && !wait_word(w, c.packets(c.p.rank, plane[a], t) + off, c.tag, peer[a], v[a])) return false;
        unpack_words<CD>(v[a], f);
#pragma unroll
        for (int e = 0; e < PER; e++) acc[e] = c.p.exact ? __fmaf_rn(weight[a], f[e], acc[e]) : __fadd_rn(acc[e], f[e]);
    }
    return true;
}

template <int TD, int CD, int HALVES> __device__ void receive_packets(const Combine &c, int n_tokens, Sum<HALVES> s) {
    constexpr int PER = CD == EPX_F32 ? 3 : 6, PACKETS = SEG * Elem<CD>::BYTES / 12, TURNS = PACKETS / GROUP;
    int n_seg = (c.p.hidden + SEG - 1) / SEG, step = gridDim.x * GROUPS;
#pragma unroll 1
    for (int u = group_id() * gridDim.x + blockIdx.x; u < n_tokens * n_seg; u += step) {
        int t = u / n_seg, seg = u % n_seg, n_ch = min(SEG, c.p.hidden - seg * SEG);
        Sum<HALVES> next = s;
        bool asked = u + step >= n_tokens * n_seg;
        auto ask = [&] { /* all lanes: what the next unit adds */
            if (!asked) next = rows_of<HALVES>(c, (u + step) / n_seg);
            asked = true;
        };
#pragma unroll 1
        for (int turn = 0; turn < TURNS; turn++) {
            int i = turn * GROUP + group_lane();
            bool on = i * PER < n_ch;
            float acc[6] = {0, 0, 0, 0, 0, 0};
            bool ok = true;
#pragma unroll 1
            for (int j = 0; j < s.n; j += AHEAD) ok &= add_packets<CD>(c, s, t, j, (uint64_t)(seg * PACKETS + i) * 16, on && ok, acc, ask);
            if (!ok || !on) continue;
#pragma unroll
            for (int e = 0; e < PER; e++) {
                int ch = i * PER + e;
                int64_t o = (int64_t)t * c.p.hidden + seg * SEG + ch;
                if (ch >= n_ch) break;
                if (c.io.add) acc[e] = __fadd_rn(acc[e], load1<TD>(c.io.add, o));
                store1<TD>(c.io.out_x, o, acc[e]);
            }
        }
        ask();
        s = next;
    }
}

/* The blocks that send rows of this group's own units have flagged. Rank q sends unit i of this rank as its unit i * W + j, where this rank
 * is the j-th after it, from its block (i * W + j) % n_blocks (send()). Every thread of a group calls it; false: gave up. */
__device__ bool wait_units(const Combine &c, int n_units, int *bad) {
    int first = group_id() * gridDim.x + blockIdx.x, step = gridDim.x * GROUPS, n_ranks = c.p.n_ranks;
    int mine = first < n_units ? (n_units - first + step - 1) / step : 0;
#pragma unroll 1
    for (int i = group_lane(); i < mine * n_ranks; i += GROUP) {
        int u = first + i / n_ranks * step, q = i % n_ranks, j = (c.p.rank - q - 1 + n_ranks) % n_ranks;
        Wait w(c.p, c.epoch, 1);
        if (!wait_flag(w, c.flag(c.p.rank, q) + ((int64_t)u * n_ranks + j) % c.p.n_blocks, c.epoch, q)) *(volatile int *)bad = 1;
    }
    EPX_DELAY(13);
    group_sync();
    return !*(volatile int *)bad;
}

template <int TD, int CD, int HALVES> __device__ void receive_bulk(const Combine &c, int n_tokens, Sum<HALVES> s, int *bad) {
    int lane = group_lane(), n_seg = (c.p.hidden + BULK - 1) / BULK, step = gridDim.x * GROUPS;
    if (!wait_units(c, n_tokens * n_seg, bad)) return;
    constexpr int VECS = Elem<CD>::BYTES / 2;
#pragma unroll 1
    for (int u = group_id() * gridDim.x + blockIdx.x; u < n_tokens * n_seg; u += step) {
        int t = u / n_seg, seg = u % n_seg, ch = seg * BULK + lane * 8;
        bool on = ch < c.p.hidden, asked = u + step >= n_tokens * n_seg;
        float acc[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        Sum<HALVES> next = s;
#pragma unroll 1
        for (int j = 0; j < s.n; j += AHEAD) {
            uint4 x[AHEAD][VECS];
            float weight[AHEAD];
            int plane[AHEAD];
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                plane[a] = -1;
                if (j + a >= s.n) continue;
                plane[a] = sum_plane(s, j + a), weight[a] = sum_weight(s, j + a);
                if (plane[a] >= 0 && on)
#pragma unroll
                    for (int v = 0; v < VECS; v++) x[a][v] = load_row16(c.row(c.p.rank, plane[a], t) + ch * Elem<CD>::BYTES + 16 * v);
            }
            if (!asked) next = rows_of<HALVES>(c, (u + step) / n_seg); /* while the rows are on their way */
            asked = true;
#pragma unroll
            for (int a = 0; a < AHEAD; a++)
                if (plane[a] >= 0 && on) {
                    float f[8];
                    Elem<CD>::widen8(x[a], f);
#pragma unroll
                    for (int e = 0; e < 8; e++) acc[e] = c.p.exact ? __fmaf_rn(weight[a], f[e], acc[e]) : __fadd_rn(acc[e], f[e]);
                }
        }
        if (!asked) next = rows_of<HALVES>(c, (u + step) / n_seg);
        s = next;
        if (!on) continue;
        int64_t o = (int64_t)t * c.p.hidden + ch;
        if (c.io.add) {
            float f[8];
            Elem<TD>::get8((const char *)c.io.add + o * Elem<TD>::BYTES, f, false);
#pragma unroll
            for (int e = 0; e < 8; e++) acc[e] = __fadd_rn(acc[e], f[e]);
        }
        uint4 v[2];
        Elem<TD>::put8(v, acc);
        uint4 *dst = (uint4 *)((char *)c.io.out_x + o * Elem<TD>::BYTES);
        dst[0] = v[0];
        if (Elem<TD>::BYTES == 4) dst[1] = v[1];
    }
}

__host__ __device__ inline size_t align16(size_t n) { return (n + 15) / 16 * 16; }

template <int TD, int ED, int CD, int HALVES>
__global__ void __launch_bounds__(THREADS, 2)
    combine_kernel(const __grid_constant__ epx_gpu_plan_t p, const __grid_constant__ epx_gpu_io_t io, int halves, int fused_rows) {
    extern __shared__ __align__(16) char shared[];
    __shared__ Context ctx;
    __shared__ int bad;
    constexpr size_t IMAGE = (size_t)SEG * Elem<CD>::BYTES + 16;
    uint32_t *home = (uint32_t *)(shared + GROUPS * IMAGE);
    uint4 *counts = (uint4 *)((char *)home + align16((size_t)p.n_experts * 4));
    int half = halves & EPX_GPU_SEND ? 2 : 3;
    EPX_STAMP(p, 10);
    if (threadIdx.x == 0) bad = 0;
    after_previous();
    if (threadIdx.x < p.n_ranks * 2) /* both parities, before the epoch is known */
        counts[threadIdx.x] = load_word(p.base[p.rank] + p.l.count_off + (uint64_t)threadIdx.x * 16);
    load_context(p, io, half, &ctx, home);
    EPX_STAMP(p, 11);
    if (ctx.stop) return;
    int parity = (int)(ctx.epoch & 1);
    Combine c = {p, io, home, counts + parity * p.n_ranks, ctx.epoch, (uint32_t)ctx.epoch, parity, fused_rows};
    uint4 own = c.counts[p.rank];
    bool own_packets = own.y == EPX_GPU_PACKETS;
    int first_unit = group_id() * gridDim.x + blockIdx.x, n_seg = own_packets ? (p.hidden + SEG - 1) / SEG : (p.hidden + BULK - 1) / BULK;
    Sum<HALVES> sum; /* of the first own token this group will add: looked up before anything is waited for */
    if (halves & EPX_GPU_RECV && first_unit < (int)own.x * n_seg) sum = rows_of<HALVES>(c, first_unit / n_seg);
    if (halves & EPX_GPU_SEND) {
        if (blockIdx.x == gridDim.x - 1 && threadIdx.x < p.n_ranks) /* the gate of the other half */
            store_word(p.base[threadIdx.x] + p.l.start_off + p.rank * 16, make_uint4(0, 0, 0, c.tag));
        send<ED, CD, HALVES>(c, shared + group_id() * IMAGE);
        EPX_STAMP(p, 12);
        if (threadIdx.x == 0) p.blocks[blockIdx.x].done[2] = c.epoch;
    }
    if (halves & EPX_GPU_RECV) {
        if (own_packets) receive_packets<TD, CD, HALVES>(c, own.x, sum);
        else receive_bulk<TD, CD, HALVES>(c, own.x, sum, &bad);
        EPX_STAMP(p, 13);
        EPX_DELAY(14);
        if (threadIdx.x == 0) p.blocks[blockIdx.x].done[3] = c.epoch;
    }
    __syncthreads(); /* no wait of this block is left */
    let_next_start();
}

} // namespace epx

using namespace epx;

template <int TD, int ED, int CD, int HALVES> static int launch_halves(const epx_gpu_plan_t *p, const epx_gpu_io_t *io, int halves, int fused, cudaStream_t s) {
    size_t bytes = GROUPS * ((size_t)SEG * Elem<CD>::BYTES + 16) + align16((size_t)p->n_experts * 4) + 32 * (size_t)p->n_ranks;
    cudaError_t e = allow_shared((const void *)combine_kernel<TD, ED, CD, HALVES>, bytes);
    if (e != cudaSuccess) return (int)e;
    return (int)start(combine_kernel<TD, ED, CD, HALVES>, p, bytes, s, *p, *io, halves, fused);
}

template <int TD, int ED, int CD> static int launch(const epx_gpu_plan_t *p, const epx_gpu_io_t *io, int halves, int fused, cudaStream_t s) {
    return p->top_k <= 32 ? launch_halves<TD, ED, CD, 1>(p, io, halves, fused, s) : launch_halves<TD, ED, CD, 2>(p, io, halves, fused, s);
}

/* Expert outputs and combine rows in the result's dtype or f32. */
template <int TD> static int pick(const epx_gpu_plan_t *p, const epx_gpu_io_t *io, int halves, int fused, cudaStream_t s) {
    if (p->expert_dtype == EPX_F32)
        return p->combine_dtype == EPX_F32 ? launch<TD, EPX_F32, EPX_F32>(p, io, halves, fused, s) : launch<TD, EPX_F32, TD>(p, io, halves, fused, s);
    return p->combine_dtype == EPX_F32 ? launch<TD, TD, EPX_F32>(p, io, halves, fused, s) : launch<TD, TD, TD>(p, io, halves, fused, s);
}

extern "C" int epx_gpu_combine(const epx_gpu_plan_t *p, const epx_gpu_io_t *io, int halves, int fused_rows, void *stream) {
    cudaStream_t s = (cudaStream_t)stream;
    int e = halves == EPX_GPU_RECV ? epx_gpu_gate(p, 1, stream) : 0;
    if (e != 0) return e;
    if (p->result_dtype == EPX_BF16) return pick<EPX_BF16>(p, io, halves, fused_rows, s);
    if (p->result_dtype == EPX_F16) return pick<EPX_F16>(p, io, halves, fused_rows, s);
    return launch<EPX_F32, EPX_F32, EPX_F32>(p, io, halves, fused_rows, s);
}
