/* Row loops of the exchange bench in bf16, compiled once for each instruction set (BENCH_ROWS_SET). Values are small integers, so
 * that no order of operations changes a bit. Pure. */
#include "app/bench_a2a_rows.h"
#include "base/half.h"
#include "base/half_wide.h"

#define CAT2(a, b) a##b
#define CAT(a, b) CAT2(a, b)

enum { AHEAD_BYTES = 512, NEAR_BYTES = 256, FAR_BYTES = 2048 };

static inline float weight_of(const float *weights, int r) { return weights ? weights[r] : 1.0f; }

void CAT(bench_sum_rows_, BENCH_ROWS_SET)(uint16_t *out, const uint16_t *const *rows, const float *weights, int n_rows,
                                          size_t n) {
    size_t i = 0;
#ifdef EPX_HAS_WIDE
    for (; i + EPX_WIDE_ELEMS <= n; i += EPX_WIDE_ELEMS) {
        epx_wide_t acc = epx_wide_zero();
        EPX_PREFETCH_W((char *)(out + i) + AHEAD_BYTES);
        for (int r = 0; r < n_rows; r++) {
            EPX_PREFETCH_R2((const char *)(rows[r] + i) + FAR_BYTES);
            EPX_PREFETCH_R((const char *)(rows[r] + i) + NEAR_BYTES);
            epx_wide_fma(&acc, weight_of(weights, r), rows[r] + i);
        }
        epx_wide_store(out + i, &acc);
    }
#endif
    for (; i < n; i++) {
        float acc = 0;
        for (int r = 0; r < n_rows; r++) acc += weight_of(weights, r) * epx_bf16_to_f32(rows[r][i]);
        out[i] = epx_f32_to_bf16(acc);
    }
}

void CAT(bench_scale_row_, BENCH_ROWS_SET)(float *restrict out, const uint16_t *restrict x, float factor, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = factor * epx_bits_f32((uint32_t)x[i] << 16);
}

void CAT(bench_round_row_, BENCH_ROWS_SET)(uint16_t *restrict out, const float *restrict x, size_t n) {
    for (size_t i = 0; i < n; i++) { /* no NaN here */
        uint32_t u = epx_f32_bits(x[i]);
        out[i] = (uint16_t)((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
    }
}
