/* Arithmetic on rows, defined once for all backends (docs/protocol.md, "Arithmetic"). Vector versions give the same bits as
 * the scalar one: each element's operations are the same, in the same order. Pure; any thread. */
#ifndef EPX_SPI_ROWS_H
#define EPX_SPI_ROWS_H

#include <stddef.h>
#include <stdint.h>

#include "epx/epx.h"

enum { EPX_ROW_CHUNK = 512 }; /* elements kept in f32 at a time */

/* One term of a weighted sum. */
typedef struct {
    const void *row;
    float weight;
} epx_row_term_t;

/* A set of kernels for one instruction set. */
typedef struct {
    const char *name;
    /* n elements of dtype -> f32. fp8 gives the bare code value. */
    void (*widen)(float *dst, epx_dtype_t dtype, const void *src, size_t n);
    /* Round to nearest even to f32 (copy), bf16 or f16. */
    void (*narrow)(void *dst, epx_dtype_t dtype, const float *src, size_t n);
    /* acc[i] = fma(weight, row[i], acc[i]). */
    void (*fma)(float *acc, float weight, epx_dtype_t dtype, const void *row, size_t n);
    /* acc[i] += row[i]. */
    void (*add)(float *acc, epx_dtype_t dtype, const void *row, size_t n);
    /* One scale block of n values: scale, codes. */
    void (*quantise)(uint8_t *codes, float *scale, const float *src, size_t n);
} epx_row_kernels_t;

/* The best set for this CPU; chosen once. */
const epx_row_kernels_t *epx_row_kernels(void);
/* The set of that name ("scalar", "avx2", "avx512"), or NULL when this CPU or build lacks it. For tests. */
const epx_row_kernels_t *epx_row_kernels_named(const char *name);

/* dst (dst_dtype: f32, bf16, f16) = src (src_dtype), rounded once. Equal dtypes: a copy of the bits. */
void epx_row_convert(void *dst, epx_dtype_t dst_dtype, const void *src, epx_dtype_t src_dtype, size_t n);
/* dst = round(sum of weight * row over terms in order, fused, from +0, then + add if not NULL (dtype of dst)). */
void epx_row_weighted_sum(void *dst, epx_dtype_t dst_dtype, const epx_row_term_t *terms, int n_terms, epx_dtype_t row_dtype,
                          const void *add, size_t n);
/* dst = round(plain sum of rows in order from +0, then + add if not NULL (dtype of dst)). Weights are ignored. */
void epx_row_plain_sum(void *dst, epx_dtype_t dst_dtype, const epx_row_term_t *terms, int n_terms, epx_dtype_t row_dtype,
                       const void *add, size_t n);
/* Quantise a row to e4m3 with one f32 scale per `block` channels; the last block may be short. */
void epx_row_quantise(uint8_t *codes, float *scales, const void *src, epx_dtype_t src_dtype, size_t n, size_t block);

#endif
