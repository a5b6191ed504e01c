/* Row loops of the exchange bench: the best set for this processor, chosen once. Bounds, peers and the bench's expert use them;
 * the library has its own. Pure. */
#include "app/bench_a2a_rows.h"

#include <stdlib.h>
#include <string.h>

#include "app/bench_a2a.h"

enum { AHEAD_BYTES = 512 };

typedef struct {
    void (*sum)(uint16_t *out, const uint16_t *const *rows, const float *weights, int n_rows, size_t n);
    void (*scale)(float *out, const uint16_t *x, float factor, size_t n);
    void (*round)(uint16_t *out, const float *x, size_t n);
} set_t;

#define SET(name) \
    { bench_sum_rows_##name, bench_scale_row_##name, bench_round_row_##name }

static const set_t *choose(void) {
    static const set_t scalar = SET(scalar);
#ifdef BENCH_ROWS_X86
    static const set_t avx2 = SET(avx2), avx512 = SET(avx512);
    int fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (fma && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return &avx512;
    if (fma) return &avx2;
#endif
    return &scalar;
}

static const set_t *set(void) {
    static const set_t *chosen; /* one thread a rank, ranks are processes */
    if (!chosen) chosen = choose();
    return chosen;
}

void *bench_alloc_rows(size_t n_bytes) { return aligned_alloc(64, (n_bytes + 64) / 64 * 64); }

void bench_sum_rows(uint16_t *out, const uint16_t *const *rows, const float *weights, int n_rows, size_t n) {
    set()->sum(out, rows, weights, n_rows, n);
}

void bench_scale_row(float *out, const uint16_t *x, float factor, size_t n) { set()->scale(out, x, factor, n); }
void bench_round_row(uint16_t *out, const float *x, size_t n) { set()->round(out, x, n); }

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
