/* Kernels for AVX2 and FMA. Compiled with those flags; run only where isa.c has seen them. */
#include <immintrin.h>

#include "base/half.h"
#include "engine/ops/cpu/kernels.h"

#define VW 8
#define VISA avx2
#define MR_MAX 2 /* 16 registers: 8 sums, 4 weights, 1 activation */
typedef __m256 vf;
static inline vf v_zero(void) { return _mm256_setzero_ps(); }
static inline vf v_set1(float x) { return _mm256_set1_ps(x); }
static inline vf v_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void v_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
static inline __m256i v_mask(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline vf v_loadn(const float *p, int n) { return _mm256_maskload_ps(p, v_mask(n)); }
static inline void v_storen(float *p, vf x, int n) { _mm256_maskstore_ps(p, v_mask(n), x); }
static inline vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); } /* b when either is NaN */
static inline vf v_min(vf a, vf b) { return _mm256_min_ps(a, b); }
/* The sums ((a0+a1)+(a2+a3)) + ((a4+a5)+(a6+a7)) of four registers. */
static inline __m128 v_sum4(vf a, vf b, vf c, vf d) {
    vf t = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
}
static inline void v_hsum4(vf a, vf b, vf c, vf d, float out[4]) { _mm_storeu_ps(out, v_sum4(a, b, c, d)); }
static inline float v_hsum(vf a) { return _mm_cvtss_f32(v_sum4(a, a, a, a)); }
static inline float v_hmax(vf a) {
    __m128 t = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    t = _mm_max_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_max_ss(t, _mm_movehdup_ps(t)));
}
static inline vf v_pow2(vf n) { /* n integral, -126 .. 127 */
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
static inline vf v_bf16_even(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p), 16));
}
static inline vf v_bf16_odd(const uint16_t *p) {
    const __m256i high = _mm256_set1_epi32((int)0xFFFF0000u);
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i *)(const void *)p), high));
}
/* e4m3 as f16 bits: the value divided by 256; unlike a shift to f32 bits this makes no denormals that multiply slowly. */
static inline vf v_f8(const uint8_t *p) {
    const __m128i x = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(const void *)p));
    const __m128i sign = _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x80)), 8);
    return _mm256_cvtph_ps(_mm_or_si128(sign, _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x7F)), 7)));
}
static inline void v_unzip(vf a, vf b, vf *even, vf *odd) {
    const vf e = _mm256_shuffle_ps(a, b, 0x88), o = _mm256_shuffle_ps(a, b, 0xDD);
    *even = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(e), 0xD8));
    *odd = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(o), 0xD8));
}

#include "engine/ops/cpu/kernels_impl.h"
