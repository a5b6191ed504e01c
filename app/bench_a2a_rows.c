/* Row loops of the exchange bench: the best set for this processor, chosen once. Bounds, peers and the bench's expert use them;
 * the library has its own. Pure. */
#include "app/bench_a2a_rows.h"

#include <string.h>

#include "app/bench_a2a.h"

enum { AHEAD_BYTES = 512 };

typedef void (*sum_fn_t)(uint16_t *out, const uint16_t *const *rows, const float *weights, int n_rows, size_t n);

static sum_fn_t choose(void) {
#ifdef BENCH_ROWS_X86
    int fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (fma && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return bench_sum_rows_avx512;
    if (fma) return bench_sum_rows_avx2;
#endif
    return bench_sum_rows_scalar;
}

void bench_sum_rows(uint16_t *out, const uint16_t *const *rows, const float *weights, int n_rows, size_t n) {
    static sum_fn_t sum; /* one thread a rank, ranks are processes */
    if (!sum) sum = choose();
    sum(out, rows, weights, n_rows, n);
}

void bench_expert_row(uint16_t *y, const uint16_t *x, float factor, size_t n) { bench_sum_rows(y, &x, &factor, 1, n); }

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
