/* Device primitives of the one-sided exchange: 128-bit system-scope words, flags, bounded waits, row arithmetic.
 * Not here: kernels. Tested on sm_90. Every wait ends: by its value, by the plan's stop word, or by the deadline. */
#ifndef EPX_ONESIDED_EXCHANGE_CUH
#define EPX_ONESIDED_EXCHANGE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

#include "epx/epx.h"
#include "a2a/onesided/cuda/launch.h"
#include "spi/gpu_plan.h"

namespace epx {

/* Let a kernel have more than 48 KB of shared memory. Always the device's whole limit: other plans launch the same kernel with other sizes, from
 * other threads, and a smaller setting of theirs must not refuse this launch. */
static inline cudaError_t allow_shared(const void *kernel, size_t bytes) {
    int device = 0, most = 0;
    cudaFuncAttributes a;
    if (bytes <= 48 * 1024) return cudaSuccess;
    cudaError_t e = cudaGetDevice(&device);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (e == cudaSuccess) e = cudaFuncGetAttributes(&a, kernel);
    return e == cudaSuccess ? cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most - (int)a.sharedSizeBytes) : e;
}

/* PTX: .b128 with .relaxed is one single-copy-atomic access (ISA 8.3+, sm_70+), so a word's tag vouches for its payload. */
__device__ __forceinline__ void store_word(void *p, uint4 v) {
    uint64_t lo = (uint64_t)v.y << 32 | v.x, hi = (uint64_t)v.w << 32 | v.z;
    asm volatile("{.reg .b128 q; mov.b128 q, {%1, %2}; st.relaxed.sys.global.b128 [%0], q;}" ::"l"(p), "l"(lo), "l"(hi) : "memory");
}
__device__ __forceinline__ uint4 load_word(const void *p) {
    uint64_t lo, hi;
    asm volatile("{.reg .b128 q; ld.relaxed.sys.global.b128 q, [%2]; mov.b128 {%0, %1}, q;}" : "=l"(lo), "=l"(hi) : "l"(p) : "memory");
    return make_uint4((uint32_t)lo, (uint32_t)(lo >> 32), (uint32_t)hi, (uint32_t)(hi >> 32));
}
/* Acquires: with the barrier that follows, all threads of the block see what was released before the flag. One load is cheaper than
 * a fence, which would also wait for this thread's own stores. Partner: fence_release() before store_flag(). */
__device__ __forceinline__ uint64_t load_flag(const uint64_t *p) {
    uint64_t v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store_flag(uint64_t *p, uint64_t v) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
/* Partner: load_flag(). Also orders this thread's earlier reads before its later flag. */
__device__ __forceinline__ void fence_release() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ __forceinline__ uint64_t now_ns() {
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}
/* Rows in a slab are written by peers: never through the read-only path. */
__device__ __forceinline__ uint4 load_row16(const void *p) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

/* The slow path of a wait, every 256 polls: false when the launch must end. One copy in a kernel, so that waits stay small. */
static __device__ __noinline__ bool keep_waiting(uint32_t *stop, epx_gpu_error_t *error, uint64_t timeout_ns, uint64_t *start, int phase, int rank,
                                          int peer, uint64_t epoch, uint64_t seen) {
    if (*(volatile uint32_t *)stop) return false;
    uint64_t t = now_ns();
    if (*start == 0) *start = t;
    if (t - *start < timeout_ns) return true;
    if (atomicExch(stop, 1u) == 0) {
        error->phase = phase, error->rank = rank, error->peer = peer, error->epoch = epoch, error->seen = seen;
        __threadfence_system();
        *(volatile int32_t *)&error->code = EPX_ERR_TIMEOUT;
    }
    return false;
}

/* Bounded wait of one thread. */
struct Wait {
    const epx_gpu_plan_t &p;
    uint64_t epoch, start;
    int phase;
    uint32_t polls;
    __device__ __forceinline__ Wait(const epx_gpu_plan_t &plan, uint64_t e, int ph) : p(plan), epoch(e), start(0), phase(ph), polls(0) {}
    /* Call after a failed poll; false: give up. */
    __device__ __forceinline__ bool again(int peer, uint64_t seen) {
        return (++polls & 255u) != 0 || keep_waiting(p.stop, p.error, p.timeout_ns, &start, phase, p.rank, peer, epoch, seen);
    }
};

/* Words of row data with the tag of `epoch`; false: gave up. */
__device__ __forceinline__ bool wait_word(Wait &w, const void *p, uint32_t tag, int peer, uint4 &out) {
#pragma unroll 1
    for (;;) {
        out = load_word(p);
        if (out.w == tag) return true;
        if (!w.again(peer, out.w)) return false;
    }
}
__device__ __forceinline__ bool wait_flag(Wait &w, const uint64_t *p, uint64_t epoch, int peer) {
#pragma unroll 1
    for (;;) {
        uint64_t v = load_flag(p);
        if (v >= epoch) return true;
        if (!w.again(peer, v)) return false;
    }
}

#ifdef EPX_GPU_STAMPS
#define EPX_STAMP(p, i) do { if (threadIdx.x == 0) (p).stamps[blockIdx.x * 16 + (i)] = clock64(); } while (0)
#else
#define EPX_STAMP(p, i) ((void)0)
#endif

/* Launches that follow each other on a stream with the attribute of start(): the next one's blocks may be placed while this one's last
 * blocks end. after_previous() waits until the previous launch has ended and its writes are seen; nothing of the caller's or of an
 * earlier launch is touched before it. let_next_start() comes after a block's last wait for a peer, so a launch that is placed early
 * can never keep one out that somebody waits for. */
__device__ __forceinline__ void after_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
template <class... Args> static cudaError_t start(void (*kernel)(Args...), const epx_gpu_plan_t *p, size_t shared_bytes, cudaStream_t s, Args... args) {
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    c.gridDim = dim3((unsigned)p->n_blocks), c.blockDim = dim3(EPX_GPU_THREADS), c.dynamicSmemBytes = shared_bytes, c.stream = s;
    c.attrs = &early, c.numAttrs = p->early_launch ? 1 : 0;
    return cudaLaunchKernelEx(&c, kernel, args...);
}

/* Builds for tests only: every place where order matters takes a random time, from nothing to some microseconds, so that a missing
 * flag, tag or fence shows as a wrong result. */
#ifdef EPX_GPU_DELAYS
__device__ __noinline__ static void delay(int place) {
    uint32_t x = (uint32_t)clock64() * 2654435761u ^ (uint32_t)now_ns() * 40503u ^ (blockIdx.x * 97u + threadIdx.x / 32 * 13u + (uint32_t)place) * 2246822519u;
    x ^= x >> 15, x *= 2246822519u, x ^= x >> 13;
    if ((x & 7u) != 0) return;
    __nanosleep((x >> 8 & 15u) == 0 ? 8000 : x >> 12 & 1023u);
}
#define EPX_DELAY(place) delay(place)
#else
#define EPX_DELAY(place) ((void)0)
#endif

/* A block works as 4 groups of 128 threads; a group takes one (row, segment) unit at a time. */
constexpr int THREADS = EPX_GPU_THREADS, GROUP = 128, GROUPS = THREADS / GROUP;
__device__ __forceinline__ void group_sync() { asm volatile("bar.sync %0, 128;" ::"r"((int)threadIdx.x / GROUP + 1) : "memory"); }
__device__ __forceinline__ int group_id() { return threadIdx.x / GROUP; }
__device__ __forceinline__ int group_lane() { return threadIdx.x % GROUP; }

/* What a block reads first, all loads in flight together. */
struct Context {
    uint64_t epoch; /* of this launch */
    uint32_t stop;
    int n_tokens;
};
__device__ __forceinline__ void load_context(const epx_gpu_plan_t &p, const epx_gpu_io_t &io, int half, Context *shared_ctx, uint32_t *home) {
#pragma unroll 1
    for (int e = threadIdx.x; e < p.n_experts; e += THREADS) home[e] = p.home[e]; /* never changes */
    after_previous();
    if (threadIdx.x == 0) {
        uint64_t e = p.blocks[blockIdx.x].done[half];
        uint32_t stop = *(volatile uint32_t *)p.stop;
        int n = io.n_tokens_device ? (int)*io.n_tokens_device : io.n_tokens;
        shared_ctx->epoch = e + 1, shared_ctx->stop = stop, shared_ctx->n_tokens = n < p.max_tokens ? n : p.max_tokens;
    }
    __syncthreads();
}

/* Expert ids of one token, spread over a warp: lane holds places lane and lane + 32; -1: none. */
template <int HALVES> struct TokenIds { /* HALVES: 1 for K <= 32, 2 up to 64 */
    int id[HALVES];
};
/* From the words received from (or sent as) source s. */
template <int HALVES> __device__ __forceinline__ TokenIds<HALVES> ids_from_words(const epx_gpu_plan_t &p, const char *words) {
    TokenIds<HALVES> t;
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        int k = lane + 32 * h;
        t.id[h] = -1;
        if (k < p.top_k) {
            uint4 v = load_word(words + k / 6 * 16);
            uint32_t w = k % 6 < 2 ? v.x : k % 6 < 4 ? v.y : v.z, x = (k % 2 ? w >> 16 : w) & EPX_GPU_ID_MASK;
            t.id[h] = x == EPX_GPU_ID_MASK ? -1 : (int)x;
        }
    }
    return t;
}
template <int HALVES> __device__ __forceinline__ uint32_t ranks_of(const TokenIds<HALVES> &t, const uint32_t *home) {
    uint32_t m = 0;
#pragma unroll
    for (int h = 0; h < HALVES; h++)
        if (t.id[h] >= 0) m |= 1u << (home[t.id[h]] >> 16);
    return __reduce_or_sync(~0u, m);
}

/* 8 elements of a row <-> f32. */
template <int D> struct Elem;
template <> struct Elem<EPX_FP8_E4M3> { /* given as fp8: only moved */
    enum { BYTES = 1 };
};
template <> struct Elem<EPX_BF16> {
    enum { BYTES = 2 };
    static __device__ __forceinline__ void get8(const void *p, float *f, bool slab) {
        uint4 v = slab ? load_row16(p) : *(const uint4 *)p;
        widen8(&v, f);
    }
    static __device__ __forceinline__ void widen8(const uint4 *v, float *f) {
        uint32_t w[4] = {v->x, v->y, v->z, v->w};
#pragma unroll
        for (int i = 0; i < 4; i++) f[2 * i] = __uint_as_float(w[i] << 16), f[2 * i + 1] = __uint_as_float(w[i] & 0xFFFF0000u);
    }
    static __device__ __forceinline__ void put8(uint4 *out, const float *f) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            __nv_bfloat162 h = __floats2bfloat162_rn(f[2 * i], f[2 * i + 1]);
            w[i] = *(uint32_t *)&h;
        }
        *out = make_uint4(w[0], w[1], w[2], w[3]);
    }
};
template <> struct Elem<EPX_F16> {
    enum { BYTES = 2 };
    static __device__ __forceinline__ void get8(const void *p, float *f, bool slab) {
        uint4 v = slab ? load_row16(p) : *(const uint4 *)p;
        widen8(&v, f);
    }
    static __device__ __forceinline__ void widen8(const uint4 *v, float *f) {
        uint32_t w[4] = {v->x, v->y, v->z, v->w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 g = __half22float2(*(__half2 *)&w[i]);
            f[2 * i] = g.x, f[2 * i + 1] = g.y;
        }
    }
    static __device__ __forceinline__ void put8(uint4 *out, const float *f) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            __half2 h = __floats2half2_rn(f[2 * i], f[2 * i + 1]);
            w[i] = *(uint32_t *)&h;
        }
        *out = make_uint4(w[0], w[1], w[2], w[3]);
    }
};
template <> struct Elem<EPX_F32> {
    enum { BYTES = 4 };
    static __device__ __forceinline__ void get8(const void *p, float *f, bool slab) {
        uint4 v[2] = {slab ? load_row16(p) : ((const uint4 *)p)[0], slab ? load_row16((const char *)p + 16) : ((const uint4 *)p)[1]};
        widen8(v, f);
    }
    static __device__ __forceinline__ void widen8(const uint4 *v, float *f) {
        uint4 a = v[0], b = v[1];
        f[0] = __uint_as_float(a.x), f[1] = __uint_as_float(a.y), f[2] = __uint_as_float(a.z), f[3] = __uint_as_float(a.w);
        f[4] = __uint_as_float(b.x), f[5] = __uint_as_float(b.y), f[6] = __uint_as_float(b.z), f[7] = __uint_as_float(b.w);
    }
    static __device__ __forceinline__ void put8(uint4 *out, const float *f) {
        out[0] = make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]), __float_as_uint(f[3]));
        out[1] = make_uint4(__float_as_uint(f[4]), __float_as_uint(f[5]), __float_as_uint(f[6]), __float_as_uint(f[7]));
    }
};

} // namespace epx

#endif
