/* Row kernels, compiled once per instruction set: the including file defines ROWS_SET (a name) and is built with its flags.
 * Loops are written so that the compiler vectorises them; no operation is reordered or contracted (-ffp-contract=off), so all
 * sets give the same bits. */
#include <math.h>
#include <string.h>

#include "base/compiler.h"
#include "base/half.h"
#include "base/half_wide.h"
#include "spi/rows.h"

#define CAT2(a, b) a##b
#define CAT(a, b) CAT2(a, b)
#define STR2(a) #a
#define STR(a) STR2(a)

/* amax is clamped to this range, so a scale is finite and normal. */
#define AMAX_FLOOR 1e-12f
#define AMAX_CEIL 3.402823466e+38f
#define E4M3_MAX 448.0f

static inline uint16_t load_u16(const void *p, size_t i) {
    uint16_t v;
    memcpy(&v, (const char *)p + 2 * i, 2);
    return v;
}
static inline float load_f32(const void *p, size_t i) {
    float v;
    memcpy(&v, (const char *)p + 4 * i, 4);
    return v;
}
/* Branch-free f16 -> f32, so that it vectorises: rescale by 2^112, which also normalises subnormals exactly. */
static inline float f16_value(uint16_t h) {
    uint32_t mag = (uint32_t)(h & 0x7FFFu) << 13, sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t special = mag >= 0x0F800000u ? mag + 0x70000000u : 0;
    uint32_t normal = epx_f32_bits(epx_bits_f32(mag) * 0x1p112f);
    return epx_bits_f32((special ? special : normal) | sign);
}
static inline uint16_t bf16_round(float f) {
    uint32_t u = epx_f32_bits(f), r = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    return (uint16_t)((u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : r);
}

/* Branch-free f32 -> f16: as epx_f32_to_f16(). The addend aligns the unit to 2^-24 for subnormal results. */
static inline uint16_t f16_round(float f) {
    uint32_t u = epx_f32_bits(f), sign = (u >> 16) & 0x8000u, m = u & 0x7FFFFFFFu;
    uint32_t normal = ((m + 0xFFFu + ((m >> 13) & 1u)) >> 13) - (112u << 10);
    uint32_t sub = epx_f32_bits(epx_bits_f32(m) + 0.5f) - 0x3F000000u;
    uint32_t code = m < 0x38800000u ? sub : normal;
    code = m >= 0x47800000u ? 0x7C00u : code;
    return (uint16_t)(m > 0x7F800000u ? 0x7FFFu : (code | sign));
}

static void widen(float *dst, epx_dtype_t dtype, const void *src, size_t n) {
    if (dtype == EPX_F32) {
        memcpy(dst, src, n * 4);
    } else if (dtype == EPX_BF16) {
        for (size_t i = 0; i < n; i++) dst[i] = epx_bf16_to_f32(load_u16(src, i));
    } else if (dtype == EPX_F16) {
        for (size_t i = 0; i < n; i++) dst[i] = f16_value(load_u16(src, i));
    } else {
        for (size_t i = 0; i < n; i++) dst[i] = epx_e4m3_to_f32(((const uint8_t *)src)[i]);
    }
}

static void narrow(void *dst, epx_dtype_t dtype, const float *src, size_t n) {
    uint16_t *d = dst;
    if (dtype == EPX_F32) {
        memcpy(dst, src, n * 4);
    } else if (dtype == EPX_BF16) {
        for (size_t i = 0; i < n; i++) d[i] = bf16_round(src[i]);
    } else {
        for (size_t i = 0; i < n; i++) d[i] = f16_round(src[i]);
    }
}

static void fma_row(float *acc, float weight, epx_dtype_t dtype, const void *row, size_t n) {
    if (dtype == EPX_F32) {
        for (size_t i = 0; i < n; i++) acc[i] = fmaf(weight, load_f32(row, i), acc[i]);
    } else if (dtype == EPX_BF16) {
        for (size_t i = 0; i < n; i++) acc[i] = fmaf(weight, epx_bf16_to_f32(load_u16(row, i)), acc[i]);
    } else {
        for (size_t i = 0; i < n; i++) acc[i] = fmaf(weight, f16_value(load_u16(row, i)), acc[i]);
    }
}

static void add_row(float *acc, epx_dtype_t dtype, const void *row, size_t n) {
    if (dtype == EPX_F32) {
        for (size_t i = 0; i < n; i++) acc[i] += load_f32(row, i);
    } else if (dtype == EPX_BF16) {
        for (size_t i = 0; i < n; i++) acc[i] += epx_bf16_to_f32(load_u16(row, i));
    } else {
        for (size_t i = 0; i < n; i++) acc[i] += f16_value(load_u16(row, i));
    }
}

/* Branch-free e4m3 rounding of |a| <= 448 after saturation. NaN -> 0x7F, sign of zero kept. */
static inline uint8_t e4m3_round(float f) {
    uint32_t u = epx_f32_bits(f), sign = (u >> 24) & 0x80u, m = u & 0x7FFFFFFFu;
    uint32_t nan = m > 0x7F800000u;
    m = m > 0x43E00000u ? 0x43E00000u : m; /* 448 */
    /* normal: keep 3 mantissa bits; subnormal: the addend aligns the unit to 2^-9 and the FPU rounds to even */
    uint32_t normal = ((m + 0x7FFFFu + ((m >> 20) & 1u)) >> 20) - (120u << 3);
    uint32_t sub = epx_f32_bits(epx_bits_f32(m) + 0x1p14f) - 0x46800000u;
    uint32_t code = m < 0x3C800000u ? sub : normal; /* 2^-6 */
    return (uint8_t)(nan ? 0x7Fu : (code | sign));
}

/* The smallest power of two that is not below s (normal and positive). */
static inline float power_of_two(float s) { return epx_bits_f32((epx_f32_bits(s) + 0x7FFFFFu) & 0x7F800000u); }

static void quantise(uint8_t *codes, float *scale, const float *src, size_t n, epx_scale_format_t format) {
    uint32_t top = 0; /* magnitudes of floats order as integers; NaN is left out */
    for (size_t i = 0; i < n; i++) {
        uint32_t m = epx_f32_bits(src[i]) & 0x7FFFFFFFu;
        m = m > 0x7F800000u ? 0 : m;
        top = m > top ? m : top;
    }
    float amax = epx_bits_f32(top);
    amax = amax < AMAX_FLOOR ? AMAX_FLOOR : amax;
    amax = amax > AMAX_CEIL ? AMAX_CEIL : amax;
    float s = amax / E4M3_MAX;
    if (format == EPX_SCALE_UE8M0) s = power_of_two(s);
    for (size_t i = 0; i < n; i++) codes[i] = e4m3_round(src[i] / s);
    *scale = s;
}

/* ---- sums that stay in registers: the same operations on each element, in the same order, as fma_row() (weight 1 is a plain
 * addition), add_row() and narrow(). Rows are asked for 512 bytes ahead (measured, docs/protocol.md), and so is the slot. ---- */

enum { AHEAD_BYTES = 512, NEAR_BYTES = 256, FAR_BYTES = 2048 };

static inline float term_weight(const epx_row_term_t *t, int weighted) { return weighted ? t->weight : 1.0f; }

static inline uint16_t sum_one_bf16(const epx_row_term_t *terms, int n_terms, const void *add, size_t i, int weighted) {
    float acc = 0;
    for (int t = 0; t < n_terms; t++)
        acc = fmaf(term_weight(&terms[t], weighted), epx_bf16_to_f32(load_u16(terms[t].row, i)), acc);
    if (add != NULL) acc += epx_bf16_to_f32(load_u16(add, i));
    return bf16_round(acc);
}

static void sum_bf16(void *dst, const epx_row_term_t *terms, int n_terms, const void *add, size_t n, int weighted) {
    uint16_t *d = dst;
    size_t i = 0;
#ifdef EPX_HAS_WIDE
    for (; i + EPX_WIDE_ELEMS <= n; i += EPX_WIDE_ELEMS) {
        epx_wide_t acc = epx_wide_zero();
        EPX_PREFETCH_W((char *)(d + i) + AHEAD_BYTES);
        for (int t = 0; t < n_terms; t++) {
            const char *row = (const char *)terms[t].row + 2 * i;
            EPX_PREFETCH_R2(row + FAR_BYTES);
            EPX_PREFETCH_R(row + NEAR_BYTES);
            epx_wide_fma(&acc, term_weight(&terms[t], weighted), row);
        }
        if (add != NULL) epx_wide_fma(&acc, 1.0f, (const char *)add + 2 * i);
        epx_wide_store(d + i, &acc);
    }
#endif
    for (; i < n; i++) d[i] = sum_one_bf16(terms, n_terms, add, i, weighted);
}

static inline float sum_one_f32(const epx_row_term_t *terms, int n_terms, const void *add, size_t i, int weighted) {
    float acc = 0;
    for (int t = 0; t < n_terms; t++) acc = fmaf(term_weight(&terms[t], weighted), load_f32(terms[t].row, i), acc);
    return add == NULL ? acc : acc + load_f32(add, i);
}

static void sum_f32(void *dst, const epx_row_term_t *terms, int n_terms, const void *add, size_t n, int weighted) {
    enum { BLOCK = 32 };
    float *d = dst;
    size_t i = 0;
    for (; i + BLOCK <= n; i += BLOCK) {
        float acc[BLOCK] = {0};
        for (size_t at = 0; at < sizeof acc; at += 64) EPX_PREFETCH_W((char *)(d + i) + AHEAD_BYTES + at);
        for (int t = 0; t < n_terms; t++) {
            const char *row = (const char *)terms[t].row + 4 * i;
            float weight = term_weight(&terms[t], weighted);
            for (size_t at = 0; at < sizeof acc; at += 64) EPX_PREFETCH_R(row + AHEAD_BYTES + at);
            for (size_t j = 0; j < BLOCK; j++) acc[j] = fmaf(weight, load_f32(row, j), acc[j]);
        }
        for (size_t j = 0; add != NULL && j < BLOCK; j++) acc[j] += load_f32(add, i + j);
        memcpy(d + i, acc, sizeof acc);
    }
    for (; i < n; i++) d[i] = sum_one_f32(terms, n_terms, add, i, weighted);
}

extern const epx_row_kernels_t CAT(epx_row_kernels_, ROWS_SET);
const epx_row_kernels_t CAT(epx_row_kernels_, ROWS_SET) = {STR(ROWS_SET), widen,    narrow,   fma_row,
                                                           add_row,       quantise, sum_bf16, sum_f32};
