/* The wait in front of a receiving half that is launched on its own: one warp waits until every rank has begun to send, then the blocks
 * of the half are placed. So a peer that is late keeps one warp of one multiprocessor busy, and the rest of the device is free for
 * what the caller overlaps with the exchange. Grid: one block of 32 threads, no shared memory. Tested on sm_90. */
#include "a2a/onesided/cuda/exchange.cuh"

namespace epx {

/* words: [W] of the own slab, one of each source, that carry the epoch's tag once it has begun; half: index of epx_gpu_block_t.done. */
__global__ void gate_kernel(const __grid_constant__ epx_gpu_plan_t p, uint64_t words_off, int by_parity, int half) {
    after_previous();
    uint64_t epoch = p.blocks[0].done[half] + 1;
    const char *words = p.base[p.rank] + words_off + (by_parity ? (epoch & 1) * (uint64_t)p.n_ranks * 16 : 0);
    Wait w(p, epoch, half / 2);
    uint4 v;
    if (!*(volatile uint32_t *)p.stop && threadIdx.x < p.n_ranks) (void)wait_word(w, words + threadIdx.x * 16, (uint32_t)epoch, threadIdx.x, v);
    __syncwarp();
    let_next_start();
}

} // namespace epx

extern "C" int epx_gpu_gate(const epx_gpu_plan_t *p, int combine, void *stream) {
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    c.gridDim = dim3(1), c.blockDim = dim3(32), c.stream = (cudaStream_t)stream;
    c.attrs = &early, c.numAttrs = p->early_launch ? 1 : 0;
    return (int)cudaLaunchKernelEx(&c, epx::gate_kernel, *p, combine ? p->l.start_off : p->l.count_off, combine ? 0 : 1, combine ? 3 : 1);
}
