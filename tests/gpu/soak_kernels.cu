/* See soak_kernels.h. */
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "tests/gpu/soak_kernels.h"

/* Block (row, expert). */
__global__ void experts_kernel(const uint8_t *codes, const float *scales, const int32_t *counts, int row_cap, int hidden, __nv_bfloat16 *y) {
    int e = blockIdx.y, n_scales = (hidden + 127) / 128;
    for (int i = blockIdx.x; i < counts[e]; i += gridDim.x) {
        int64_t row = (int64_t)e * row_cap + i;
        for (int h = threadIdx.x; h < hidden; h += blockDim.x) {
            __nv_fp8_e4m3 q;
            q.__x = codes[row * hidden + h];
            y[row * hidden + h] = __float2bfloat16_rn(__fmul_rn((float)q, scales[row * n_scales + h / 128]));
        }
    }
}

__global__ void check_kernel(const uint32_t *words, const uint32_t *n_tokens, int words_a_row, const uint64_t *want, sk_found_t *found) {
    __shared__ unsigned long long sum;
    unsigned long long mine = 0;
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < *n_tokens * (uint32_t)words_a_row; i += blockDim.x) mine += sk_mix(words[i], i);
    atomicAdd(&sum, mine);
    __syncthreads();
    if (threadIdx.x != 0) return;
    found->n_checked++;
    found->n_bad += sum != *want;
}

__global__ void busy_kernel(int turns, float *out) {
    extern __shared__ float shared[];
    float a = (float)threadIdx.x, b = 1.0001f, c = (float)blockIdx.x;
    for (int i = 0; i < turns; i++) a = __fmaf_rn(a, b, c), c = __fmaf_rn(c, b, a), a = __fmaf_rn(a, 0.5f, c), c = __fmaf_rn(c, 0.5f, a);
    shared[threadIdx.x] = a;
    if (a == 0.12345f) out[threadIdx.x] = c + shared[threadIdx.x ^ 1];
}

extern "C" int sk_experts(const void *codes, const float *scales, const int32_t *counts, int n_local, int row_cap, int hidden, void *y, void *stream) {
    experts_kernel<<<dim3(4, (unsigned)n_local), 128, 0, (cudaStream_t)stream>>>((const uint8_t *)codes, scales, counts, row_cap, hidden, (__nv_bfloat16 *)y);
    return (int)cudaGetLastError();
}

extern "C" int sk_check(const void *result, const uint32_t *n_tokens, int hidden, const uint64_t *want, sk_found_t *found, void *stream) {
    check_kernel<<<1, 512, 0, (cudaStream_t)stream>>>((const uint32_t *)result, n_tokens, hidden / 2, want, found);
    return (int)cudaGetLastError();
}

extern "C" int sk_busy(int n_blocks, int shared_bytes, int turns, float *out, void *stream) {
    cudaError_t e = cudaFuncSetAttribute((const void *)busy_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (e != cudaSuccess) return (int)e;
    busy_kernel<<<n_blocks, 256, (size_t)shared_bytes, (cudaStream_t)stream>>>(turns, out);
    return (int)cudaGetLastError();
}
