/* The row loops of the exchange bench that exist for several instruction sets; bench_a2a_rows.c chooses. */
#ifndef EPX_APP_BENCH_A2A_ROWS_H
#define EPX_APP_BENCH_A2A_ROWS_H

#include <stddef.h>
#include <stdint.h>

/* As bench_sum_rows(). */
void bench_sum_rows_scalar(uint16_t *out, const uint16_t *const *rows, const float *weights, int n_rows, size_t n);
void bench_sum_rows_avx2(uint16_t *out, const uint16_t *const *rows, const float *weights, int n_rows, size_t n);
void bench_sum_rows_avx512(uint16_t *out, const uint16_t *const *rows, const float *weights, int n_rows, size_t n);
/* As bench_scale_row() and bench_round_row(). */
void bench_scale_row_scalar(float *out, const uint16_t *x, float factor, size_t n);
void bench_scale_row_avx2(float *out, const uint16_t *x, float factor, size_t n);
void bench_scale_row_avx512(float *out, const uint16_t *x, float factor, size_t n);
void bench_round_row_scalar(uint16_t *out, const float *x, size_t n);
void bench_round_row_avx2(uint16_t *out, const float *x, size_t n);
void bench_round_row_avx512(uint16_t *out, const float *x, size_t n);

#endif
