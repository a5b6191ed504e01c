/* Row loops of the exchange bench in bf16, for AVX-512 where the processor has it. Bounds, peers and the bench's expert use
 * them; the library has its own. Pure. */
#include "app/bench_a2a.h"

#include <string.h>

#include "base/half.h"

enum { AHEAD_BYTES = 512, CHUNK = 512 };

#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#if defined(__clang__) /* it has no such setting here and chooses the width itself */
#define WIDE __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#else
#define WIDE __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")))
#endif
#define HAS_WIDE() \
    (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
#else
#define WIDE
#define HAS_WIDE() 0
#endif
#define INLINE static inline __attribute__((always_inline))

/* Without NaN: the bench has none. */
INLINE uint16_t narrow(float f) {
    uint32_t u = epx_f32_bits(f);
    return (uint16_t)((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

INLINE void expert_row(uint16_t *restrict y, const uint16_t *restrict x, float factor, size_t n) {
    for (size_t i = 0; i < n; i += CHUNK) {
        size_t end = i + CHUNK < n ? i + CHUNK : n;
        for (size_t b = i; b < end; b += 32) EPX_PREFETCH_R((const char *)(x + b) + AHEAD_BYTES);
        for (size_t c = i; c < end; c++) y[c] = narrow(factor * epx_bits_f32((uint32_t)x[c] << 16));
    }
}

INLINE void sum_rows(uint16_t *restrict out, const uint16_t *const *rows, const float *weights, int n_rows, size_t n) {
    float acc[CHUNK];
    for (size_t i = 0; i < n; i += CHUNK) {
        size_t m = i + CHUNK < n ? CHUNK : n - i;
        for (size_t b = 0; b < m; b += 32) EPX_PREFETCH_W((char *)(out + i + b) + AHEAD_BYTES);
        memset(acc, 0, sizeof acc);
        for (int r = 0; r < n_rows; r++) {
            const uint16_t *restrict x = rows[r] + i;
            float w = weights ? weights[r] : 1.0f;
            for (size_t b = 0; b < m; b += 32) EPX_PREFETCH_R((const char *)(x + b) + AHEAD_BYTES);
            for (size_t c = 0; c < m; c++) acc[c] += w * epx_bits_f32((uint32_t)x[c] << 16);
        }
        for (size_t c = 0; c < m; c++) out[i + c] = narrow(acc[c]);
    }
}

WIDE static void expert_row_wide(uint16_t *y, const uint16_t *x, float f, size_t n) { expert_row(y, x, f, n); }
WIDE static void sum_rows_wide(uint16_t *out, const uint16_t *const *rows, const float *w, int n_rows, size_t n) {
    sum_rows(out, rows, w, n_rows, n);
}

static int wide(void) {
    static int known; /* 0: not asked, 1: no, 2: yes */
    if (!known) known = HAS_WIDE() ? 2 : 1;
    return known == 2;
}

void bench_expert_row(uint16_t *y, const uint16_t *x, float factor, size_t n) {
    if (wide()) expert_row_wide(y, x, factor, n);
    else expert_row(y, x, factor, n);
}

void bench_sum_rows(uint16_t *out, const uint16_t *const *rows, const float *weights, int n_rows, size_t n) {
    if (wide()) sum_rows_wide(out, rows, weights, n_rows, n);
    else sum_rows(out, rows, weights, n_rows, n);
}

void bench_copy_row(uint16_t *dst, const uint16_t *src, size_t n) {
    size_t step = AHEAD_BYTES / sizeof *src;
    for (size_t i = 0; i < n; i += step) {
        size_t m = n - i < step ? n - i : step;
        for (size_t b = 0; b < m; b += 32) {
            EPX_PREFETCH_R((const char *)(src + i + b) + AHEAD_BYTES);
            EPX_PREFETCH_W((char *)(dst + i + b) + AHEAD_BYTES);
        }
        memcpy(dst + i, src + i, m * sizeof *src);
    }
}
