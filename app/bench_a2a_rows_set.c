/* Row loops of the exchange bench in bf16, compiled once for each instruction set (BENCH_ROWS_SET). Values are small integers, so
 * that no order of operations changes a bit. Pure. */
#include "app/bench_a2a_rows.h"
#include "base/half.h"
#include "base/half_wide.h"

#define CAT2(a, b) a##b
#define CAT(a, b) CAT2(a, b)

enum { AHEAD_BYTES = 512 };

static inline float weight_of(const float *weights, int r) { return weights ? weights[r] : 1.0f; }

void CAT(bench_sum_rows_, BENCH_ROWS_SET)(uint16_t *out, const uint16_t *const *rows, const float *weights, int n_rows,
                                          size_t n) {
    size_t i = 0;
#ifdef EPX_HAS_WIDE
    for (; i + EPX_WIDE_ELEMS <= n; i += EPX_WIDE_ELEMS) {
        epx_wide_t acc = epx_wide_zero();
        EPX_PREFETCH_W((char *)(out + i) + AHEAD_BYTES);
        for (int r = 0; r < n_rows; r++) {
            EPX_PREFETCH_R((const char *)(rows[r] + i) + AHEAD_BYTES);
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
