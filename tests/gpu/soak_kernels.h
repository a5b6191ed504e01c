/* Kernels of soak_gpu: experts, the check of a result on the device, and other work for the multiprocessors. C ABI; 0: queued. */
#ifndef EPX_TESTS_GPU_SOAK_KERNELS_H
#define EPX_TESTS_GPU_SOAK_KERNELS_H

#include <stdint.h>

/* What a stream of checks has found, in device memory. */
typedef struct {
    uint64_t n_checked, n_bad;
} sk_found_t;

/* Order-independent hash of n words: the sum of mix(word, place). The same on both sides. */
#ifdef __CUDACC__
__host__ __device__
#endif
    static inline uint64_t
    sk_mix(uint32_t word, uint32_t place) {
    uint64_t x = ((uint64_t)place << 32 | word) + UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
    return x ^ x >> 31;
}

#ifdef __cplusplus
extern "C" {
#endif
/* y[e][i][h] = bf16(code * scale) of the rows that counts[e] names. codes [El, row_cap, H] e4m3, scales [El, row_cap, H / 128].
 */
int sk_experts(const void *codes, const float *scales, const int32_t *counts, int n_local, int row_cap, int hidden, void *y,
               void *stream);
/* Compare the hash of result [*n_tokens, H] bf16 with *want and count. */
int sk_check(const void *result, const uint32_t *n_tokens, int hidden, const uint64_t *want, sk_found_t *found, void *stream);
/* n_blocks blocks of 256 threads with shared_bytes each, every one of which computes for about `turns`. */
int sk_busy(int n_blocks, int shared_bytes, int turns, float *out, void *stream);
#ifdef __cplusplus
}
#endif

#endif
