/* Weighted sums of bf16 in vector registers, for files that are compiled for AVX-512 or AVX2 and FMA; for others this header is
 * empty and EPX_HAS_WIDE is not defined. Same bits as the functions of half.h with fmaf(). Pure. */
#ifndef EPX_BASE_HALF_WIDE_H
#define EPX_BASE_HALF_WIDE_H

#include "base/compiler.h"

#if defined(__AVX512BW__) || (defined(__AVX2__) && defined(__FMA__))
#define EPX_HAS_WIDE 1
#include <immintrin.h>
#endif

#if defined(__AVX512BW__)
/* 32 bf16 in a register: the even elements are its 32-bit words shifted up, the odd ones the same words with the low half
 * cleared. So nothing is permuted on the way in or out. */
enum { EPX_WIDE_ELEMS = 32 };
typedef struct {
    __m512 even, odd;
} epx_wide_t;

static inline epx_wide_t epx_wide_zero(void) { return (epx_wide_t){_mm512_setzero_ps(), _mm512_setzero_ps()}; }
static inline void epx_wide_fma(epx_wide_t *acc, float weight, const void *row) {
    __m512i v = _mm512_loadu_si512(row), top = _mm512_set1_epi32((int)0xFFFF0000u);
    __m512 w = _mm512_set1_ps(weight);
    acc->even = _mm512_fmadd_ps(w, _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)), acc->even);
    acc->odd = _mm512_fmadd_ps(w, _mm512_castsi512_ps(_mm512_and_si512(v, top)), acc->odd);
}
/* epx_f32_to_bf16() of 16 words but for NaN, in their upper halves. */
static inline __m512i epx_wide_round(__m512 f) {
    __m512i u = _mm512_castps_si512(f);
    __mmask16 is_odd = _mm512_test_epi32_mask(u, _mm512_set1_epi32(0x10000));
    u = _mm512_add_epi32(u, _mm512_set1_epi32(0x7FFF));
    return _mm512_mask_add_epi32(u, is_odd, u, _mm512_set1_epi32(1));
}
static inline void epx_wide_store(void *dst, const epx_wide_t *acc) {
    __m512i even = epx_wide_round(acc->even), odd = epx_wide_round(acc->odd);
    if (EPX_UNLIKELY(_mm512_cmp_ps_mask(acc->even, acc->odd, _CMP_UNORD_Q))) {
        __m512i nan = _mm512_set1_epi32(0x7FFF0000);
        even = _mm512_mask_mov_epi32(even, _mm512_cmp_ps_mask(acc->even, acc->even, _CMP_UNORD_Q), nan);
        odd = _mm512_mask_mov_epi32(odd, _mm512_cmp_ps_mask(acc->odd, acc->odd, _CMP_UNORD_Q), nan);
    }
    _mm512_storeu_si512(dst, _mm512_mask_blend_epi16(0xAAAAAAAAu, _mm512_srli_epi32(even, 16), odd));
}
#elif defined(__AVX2__) && defined(__FMA__)
enum { EPX_WIDE_ELEMS = 16 };
typedef struct {
    __m256 even, odd;
} epx_wide_t;

static inline epx_wide_t epx_wide_zero(void) { return (epx_wide_t){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline void epx_wide_fma(epx_wide_t *acc, float weight, const void *row) {
    __m256i v = _mm256_loadu_si256(row), top = _mm256_set1_epi32((int)0xFFFF0000u);
    __m256 w = _mm256_set1_ps(weight);
    acc->even = _mm256_fmadd_ps(w, _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)), acc->even);
    acc->odd = _mm256_fmadd_ps(w, _mm256_castsi256_ps(_mm256_and_si256(v, top)), acc->odd);
}
static inline __m256i epx_wide_round(__m256 f) {
    __m256i u = _mm256_castps_si256(f), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7FFF)), odd);
}
static inline void epx_wide_store(void *dst, const epx_wide_t *acc) {
    __m256i even = epx_wide_round(acc->even), odd = epx_wide_round(acc->odd);
    if (EPX_UNLIKELY(_mm256_movemask_ps(_mm256_cmp_ps(acc->even, acc->odd, _CMP_UNORD_Q)))) {
        __m256i nan = _mm256_set1_epi32(0x7FFF0000);
        even = _mm256_blendv_epi8(even, nan, _mm256_castps_si256(_mm256_cmp_ps(acc->even, acc->even, _CMP_UNORD_Q)));
        odd = _mm256_blendv_epi8(odd, nan, _mm256_castps_si256(_mm256_cmp_ps(acc->odd, acc->odd, _CMP_UNORD_Q)));
    }
    _mm256_storeu_si256(dst, _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xAA));
}
#endif

#endif
