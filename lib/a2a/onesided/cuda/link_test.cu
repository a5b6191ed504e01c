/* Torture of the links between the ranks of a group, run once when the group is made: what the exchange relies on must hold on
 * this machine. Block q of rank r works with rank q; in each round both send 128 tagged 128-bit words and 128 flagged ones, check
 * what came, and tell each other that it was read.
 * Grid: n_ranks blocks of 128 threads, no shared memory. Tested on sm_90. Every wait ends at the deadline. */
#include <cuda_runtime.h>

#include "a2a/onesided/cuda/exchange.cuh"
#include "cuda/runtime.cuh"

namespace epx_cuda {

using namespace epx;

struct Bases {
    char *of[EPX_GPU_MAX_RANKS];
};
enum { ROWS = 128 * 16, FLAG = 2 * ROWS, ACK = FLAG + 8 };

__device__ __forceinline__ uint32_t mixed(uint32_t round, uint32_t lane, uint32_t src) { return (round * 2654435761u ^ lane * 40503u) + src * 97u; }

__device__ bool wait_until(uint64_t deadline, bool (*seen)(const char *, uint64_t), const char *at, uint64_t value) {
    for (uint32_t polls = 1; !seen(at, value); polls++)
        if ((polls & 1023u) == 0 && now_ns() > deadline) return false;
    return true;
}
__device__ bool flag_seen(const char *at, uint64_t v) { return load_flag((const uint64_t *)at) >= v; }
__device__ bool tag_seen(const char *at, uint64_t v) { return load_word(at).w == (uint32_t)v; }

/* bad: [n_ranks] in host memory, what block q found. */
__global__ void link_kernel(Bases bases, int rank, int rounds, uint64_t timeout_ns, uint32_t *bad) {
    __shared__ uint32_t wrong;
    int peer = blockIdx.x;
    uint32_t lane = threadIdx.x;
    char *theirs = bases.of[peer] + rank * EPX_CUDA_LINK_STRIDE, *mine = bases.of[rank] + peer * EPX_CUDA_LINK_STRIDE;
    uint64_t deadline = now_ns() + timeout_ns;
    if (lane == 0) wrong = 0;
    __syncthreads();
    for (uint32_t round = 1; round <= (uint32_t)rounds; round++) {
        uint32_t a = mixed(round, lane, rank), b = mixed(round, lane, peer), found = 0;
        store_word(theirs + lane * 16, make_uint4(a, a + 1, a + 2, round));
        *(uint4 *)(theirs + ROWS + lane * 16) = make_uint4(a, a ^ 1, a ^ 2, a ^ 3);
        __syncthreads();
        if (lane == 0) {
            fence_release(); /* partner: load_flag() in the peer's block */
            store_flag((uint64_t *)(theirs + FLAG), round);
        }
        if (!wait_until(deadline, tag_seen, mine + lane * 16, round)) found |= EPX_CUDA_LINK_TIMEOUT;
        uint4 v = load_word(mine + lane * 16);
        if (!found && (v.x != b || v.y != b + 1 || v.z != b + 2)) found |= EPX_CUDA_LINK_PACKETS;
        if (!wait_until(deadline, flag_seen, mine + FLAG, round)) found |= EPX_CUDA_LINK_TIMEOUT;
        v = load_row16(mine + ROWS + lane * 16);
        if (!found && (v.x != b || v.y != (b ^ 1) || v.z != (b ^ 2) || v.w != (b ^ 3))) found |= EPX_CUDA_LINK_FLAGS;
        if (found) atomicOr(&wrong, found);
        __syncthreads();
        if (lane == 0) { /* the peer may write the next round only when this one was read */
            fence_release();
            store_flag((uint64_t *)(theirs + ACK), round);
            if (!wait_until(deadline, flag_seen, mine + ACK, round)) atomicOr(&wrong, (uint32_t)EPX_CUDA_LINK_TIMEOUT);
        }
        __syncthreads();
        if (wrong) break;
    }
    if (lane == 0) *(volatile uint32_t *)&bad[peer] = wrong;
}

int link_test(int device, char *const *base, int rank, int n_ranks, int rounds, uint64_t timeout_ns, void *stream, uint32_t *out_bad) {
    Device current(device);
    cudaStream_t s = (cudaStream_t)stream;
    Bases bases;
    void *host = nullptr, *bad = nullptr;
    cudaFuncAttributes attributes;
    if (current.error) return current.error;
    for (int r = 0; r < n_ranks; r++) bases.of[r] = base[r];
    int e = cudaFuncGetAttributes(&attributes, link_kernel); /* loads it before anybody spins */
    if (e == 0) e = host_alloc(device, (uint64_t)n_ranks * sizeof *out_bad, &host, &bad);
    if (e != 0) return e;
    link_kernel<<<n_ranks, 128, 0, s>>>(bases, rank, rounds, timeout_ns, (uint32_t *)bad);
    e = cudaGetLastError();
    if (e == 0) e = cudaStreamSynchronize(s);
    *out_bad = 0;
    for (int r = 0; r < n_ranks; r++) *out_bad |= ((volatile uint32_t *)host)[r];
    (void)host_free(device, host);
    return e;
}

} // namespace epx_cuda
