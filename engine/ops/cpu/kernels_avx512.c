/* Kernels for AVX-512 (F, BW, VL) and FMA. Compiled with those flags; run only where isa.c has seen them. */
#include <immintrin.h>

#include "base/half.h"
#include "engine/ops/cpu/kernels.h"

#define VW 16
#define VISA avx512
#define MR_MAX 6 /* 32 registers: 24 sums, 4 weights, 1 activation, a mask */
typedef __m512 vf;
static inline vf v_zero(void) { return _mm512_setzero_ps(); }
static inline vf v_set1(float x) { return _mm512_set1_ps(x); }
static inline vf v_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void v_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
static inline __mmask16 v_mask(int n) { return (__mmask16)(n >= 16 ? 0xFFFFu : (1u << n) - 1u); }
static inline vf v_loadn(const float *p, int n) { return _mm512_maskz_loadu_ps(v_mask(n), p); }
static inline void v_storen(float *p, vf x, int n) { _mm512_mask_storeu_ps(p, v_mask(n), x); }
static inline vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); } /* b when either is NaN */
static inline vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
/* The sums of four registers; each adds lanes i and i + 8, then + 4, + 2, + 1. */
static inline __m128 v_sum4(vf a, vf b, vf c, vf d) {
    const vf ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
    const vf cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xEE));
    vf t = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
    t = _mm512_add_ps(t, _mm512_shuffle_ps(t, t, 0x4E));
    t = _mm512_add_ps(t, _mm512_shuffle_ps(t, t, 0xB1));
    return _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, t));
}
static inline void v_hsum4(vf a, vf b, vf c, vf d, float out[4]) { _mm_storeu_ps(out, v_sum4(a, b, c, d)); }
static inline float v_hsum(vf a) { return _mm_cvtss_f32(v_sum4(a, a, a, a)); }
static inline float v_hmax(vf a) { return _mm512_reduce_max_ps(a); }
static inline vf v_pow2(vf n) { /* n integral, -126 .. 127 */
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
static inline vf v_bf16_even(const uint16_t *p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
static inline vf v_bf16_odd(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32((int)0xFFFF0000u)));
}
/* e4m3 as f16 bits: the value divided by 256; unlike a shift to f32 bits this makes no denormals that multiply slowly. */
static inline vf v_f8(const uint8_t *p) {
    const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)p));
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x80)), 8);
    return _mm512_cvtph_ps(_mm256_or_si256(sign, _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x7F)), 7)));
}
static inline void v_unzip(vf a, vf b, vf *even, vf *odd) {
    const __m512i ie = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i io = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    *even = _mm512_permutex2var_ps(a, ie, b);
    *odd = _mm512_permutex2var_ps(a, io, b);
}

#include "engine/ops/cpu/kernels_impl.h"
