/* Arithmetic on rows, defined once for all backends (docs/protocol.md, "Arithmetic"). Vector versions give the same bits as
 * the scalar one: each element's operations are the same, in the same order. Pure; any thread. */
#ifndef EPX_SPI_ROWS_H
#define EPX_SPI_ROWS_H

#include <stddef.h>
#include <stdint.h>

#include "epx/epx.h"

enum { EPX_ROW_CHUNK = 512 }; /* elements kept in f32 at a time; also the largest scale block */

/* How rows lie in memory. With fp8 each block of channels has an f32 scale; the scales of a row start at scale_off. */
typedef struct {
    epx_dtype_t dtype;
    epx_scale_format_t format; /* rule that makes the scales */
    uint64_t scale_off, block;
} epx_row_form_t;

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
    /* One scale block of n values: scale, codes. UE8M0: the scale is rounded up to a power of two. */
    void (*quantise)(uint8_t *codes, float *scale, const float *src, size_t n, epx_scale_format_t format);
    /* dst = round(sum of [weight *] row over terms in order from +0, + add if not NULL); all rows bf16. */
    void (*sum_bf16)(void *dst, const epx_row_term_t *terms, int n_terms, const void *add, size_t n, int weighted);
    /* The same in f32. */
    void (*sum_f32)(void *dst, const epx_row_term_t *terms, int n_terms, const void *add, size_t n, int weighted);
} epx_row_kernels_t;

/* The best set for this CPU; chosen once. */
const epx_row_kernels_t *epx_row_kernels(void);
/* The set of that name ("scalar", "avx2", "avx512"), or NULL when this CPU or build lacks it. For tests. */
const epx_row_kernels_t *epx_row_kernels_named(const char *name);

/* A form without scales. */
static inline epx_row_form_t epx_row_form(epx_dtype_t dtype) { return (epx_row_form_t){dtype, EPX_SCALE_F32, 0, 0}; }

/* Copy a row, asking for both sides 512 bytes ahead: lines of another core's cache take long to come. No overlap. */
void epx_row_copy(void *dst, const void *src, size_t n_bytes);
/* dst = src (f32, bf16, f16), rounded once; fp8: quantised, scales behind. Equal dtypes: a copy of the bits. */
void epx_row_store(void *dst, const epx_row_form_t *to, const void *src, epx_dtype_t src_dtype, size_t n);
/* dst = round(sum of weight * row over terms in order, fused, from +0, then + add if not NULL (dtype of dst)). An element of an
 * fp8 row is code * scale, rounded to f32. */
void epx_row_weighted_sum(void *dst, const epx_row_form_t *to, const epx_row_term_t *terms, int n_terms,
                          const epx_row_form_t *from, const void *add, size_t n);
/* dst = round(plain sum of rows in order from +0, then + add if not NULL (dtype of dst)). Weights are ignored. */
void epx_row_plain_sum(void *dst, const epx_row_form_t *to, const epx_row_term_t *terms, int n_terms, const epx_row_form_t *from,
                       const void *add, size_t n);
/* Quantise a row to e4m3 with one scale per `block` channels; the last block may be short. scales: f32, or UE8M0 bytes padded
 * with zeros to a multiple of 4. */
void epx_row_quantise(uint8_t *codes, void *scales, const void *src, epx_dtype_t src_dtype, size_t n, size_t block,
                      epx_scale_format_t format);

#endif
