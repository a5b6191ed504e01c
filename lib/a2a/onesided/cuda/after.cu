/* Small kernels behind a receiving half of dispatch, launched only when they have something to do. Tested on sm_90. */
#include "a2a/onesided/cuda/exchange.cuh"

namespace epx {

/* Zeros in the rows between an expert's count and its end, and in their scales. Block: local expert; 128 threads, no shared memory. */
__global__ void pads_kernel(const __grid_constant__ epx_gpu_plan_t p, const __grid_constant__ epx_gpu_io_t io, int row_bytes) {
    if (*(volatile uint32_t *)p.stop) return;
    int64_t from = io.out_expert_off[blockIdx.x] + io.out_counts[blockIdx.x], to = io.out_expert_off[blockIdx.x + 1];
    for (int64_t i = from * row_bytes / 8 + threadIdx.x; i < to * row_bytes / 8; i += blockDim.x) ((uint64_t *)io.out_x)[i] = 0;
    for (int64_t i = threadIdx.x; i < (to - from) * p.l.scale_words; i += blockDim.x) {
        int64_t row = from + i / p.l.scale_words, w = i % p.l.scale_words;
        ((uint32_t *)io.out_scale)[p.scale_by_column ? w * p.scale_gap + row : row * p.l.scale_words + w] = 0;
    }
}

/* (token, expert) rows of all ranks, from the ids that came with the rows. One block of 512 threads; shared: [E]. */
__global__ void histogram_kernel(const __grid_constant__ epx_gpu_plan_t p, int32_t *out) {
    extern __shared__ int32_t n[];
    if (*(volatile uint32_t *)p.stop) return;
    uint64_t parity = p.blocks[0].done[1] & 1; /* of the half that has just ended */
    for (int e = threadIdx.x; e < p.n_experts; e += blockDim.x) n[e] = 0;
    __syncthreads();
    for (int s = 0; s < p.n_ranks; s++) {
        uint64_t source = parity * p.n_ranks + s;
        int n_words = (int)load_word(p.base[p.rank] + p.l.count_off + source * 16).x * (int)p.l.id_words;
        const char *words = p.base[p.rank] + p.l.ids_off + source * p.max_tokens * p.l.id_words * 16;
        for (int i = threadIdx.x; i < n_words; i += blockDim.x) {
            uint4 v = load_word(words + (int64_t)i * 16);
            uint32_t w[3] = {v.x, v.y, v.z};
            for (int k = 0; k < 6; k++) {
                uint32_t id = w[k / 2] >> (k % 2 * 16) & 0xFFFFu;
                if (id < (uint32_t)p.n_experts && i % (int)p.l.id_words * 6 + k < p.top_k) atomicAdd(&n[id], 1); /* repeats have the top bit */
            }
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < p.n_experts; e += blockDim.x) out[e] = n[e];
}

} // namespace epx

using namespace epx;

extern "C" int epx_gpu_after(const epx_gpu_plan_t *p, const epx_gpu_io_t *io, void *stream) {
    cudaStream_t s = (cudaStream_t)stream;
    size_t bytes = (size_t)p->n_experts * 4;
    int row_bytes = p->hidden * (p->wire_dtype == EPX_F32 ? 4 : p->wire_dtype == EPX_FP8_E4M3 ? 1 : 2);
    cudaError_t e = cudaSuccess;
    if (p->contiguous && p->align > 1 && p->n_local > 0) {
        pads_kernel<<<p->n_local, 128, 0, s>>>(*p, *io, row_bytes);
        e = cudaGetLastError();
    }
    if (e != cudaSuccess || io->out_histogram == nullptr) return (int)e;
    e = allow_shared((const void *)histogram_kernel, bytes);
    if (e != cudaSuccess) return (int)e;
    histogram_kernel<<<1, THREADS, bytes, s>>>(*p, io->out_histogram);
    return (int)cudaGetLastError();
}
