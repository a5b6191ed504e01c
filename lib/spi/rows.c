/* Row operations over the kernel set of this CPU. */
#include "spi/rows.h"

#include <string.h>

#include "base/compiler.h"
#include "spi/layout.h"

enum { PREFETCH_BYTES = 512 }; /* measured: 1.0-1.4x in row loops (docs/protocol.md) */

extern const epx_row_kernels_t epx_row_kernels_scalar;
#ifdef EPX_ROWS_X86
extern const epx_row_kernels_t epx_row_kernels_avx2, epx_row_kernels_avx512;
#endif

const epx_row_kernels_t *epx_row_kernels_named(const char *name) {
    if (strcmp(name, "scalar") == 0) return &epx_row_kernels_scalar;
#ifdef EPX_ROWS_X86
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (strcmp(name, "avx2") == 0 && avx2) return &epx_row_kernels_avx2;
    if (strcmp(name, "avx512") == 0 && avx512) return &epx_row_kernels_avx512;
#endif
    return NULL;
}

const epx_row_kernels_t *epx_row_kernels(void) {
    static const epx_row_kernels_t *chosen;
    const epx_row_kernels_t *k = __atomic_load_n(&chosen, __ATOMIC_RELAXED);
    if (EPX_LIKELY(k != NULL)) return k;
    k = epx_row_kernels_named("avx512");
    if (k == NULL) k = epx_row_kernels_named("avx2");
    if (k == NULL) k = &epx_row_kernels_scalar;
    __atomic_store_n(&chosen, k, __ATOMIC_RELAXED); /* every thread finds the same set */
    return k;
}

static size_t chunk_of(size_t n, size_t at) { return n - at < EPX_ROW_CHUNK ? n - at : EPX_ROW_CHUNK; }

static const char *at_elem(const void *row, epx_dtype_t dtype, size_t i) {
    return (const char *)row + i * epx_dtype_bytes(dtype);
}

static void prefetch_ahead(const char *p, size_t bytes) {
    for (size_t i = 0; i < bytes && i < PREFETCH_BYTES; i += 64) EPX_PREFETCH_R(p + bytes + i);
}

/* Ask for the lines of a slot in another rank's slab before its sum is ready. */
static void prefetch_slot(const char *p, size_t bytes) {
    for (size_t i = 0; i < bytes && i < PREFETCH_BYTES; i += 64) EPX_PREFETCH_W(p + i);
}

void epx_row_convert(void *dst, epx_dtype_t dst_dtype, const void *src, epx_dtype_t src_dtype, size_t n) {
    const epx_row_kernels_t *k = epx_row_kernels();
    float f[EPX_ROW_CHUNK];
    if (dst_dtype == src_dtype) {
        memcpy(dst, src, n * epx_dtype_bytes(dst_dtype));
        return;
    }
    for (size_t i = 0; i < n; i += EPX_ROW_CHUNK) {
        size_t m = chunk_of(n, i);
        k->widen(f, src_dtype, at_elem(src, src_dtype, i), m);
        k->narrow((char *)dst + i * epx_dtype_bytes(dst_dtype), dst_dtype, f, m);
    }
}

static void sum_rows(void *dst, epx_dtype_t dst_dtype, const epx_row_term_t *terms, int n_terms, epx_dtype_t row_dtype,
                     const void *add, size_t n, int weighted) {
    const epx_row_kernels_t *k = epx_row_kernels();
    float acc[EPX_ROW_CHUNK];
    for (size_t i = 0; i < n; i += EPX_ROW_CHUNK) {
        size_t m = chunk_of(n, i);
        memset(acc, 0, m * sizeof *acc);
        prefetch_slot((const char *)dst + i * epx_dtype_bytes(dst_dtype), m * epx_dtype_bytes(dst_dtype));
        for (int t = 0; t < n_terms; t++) {
            const char *row = at_elem(terms[t].row, row_dtype, i);
            if (i + m < n) prefetch_ahead(row, m * epx_dtype_bytes(row_dtype));
            if (weighted) k->fma(acc, terms[t].weight, row_dtype, row, m);
            else k->add(acc, row_dtype, row, m);
        }
        if (add != NULL) k->add(acc, dst_dtype, at_elem(add, dst_dtype, i), m);
        k->narrow((char *)dst + i * epx_dtype_bytes(dst_dtype), dst_dtype, acc, m);
    }
}

void epx_row_weighted_sum(void *dst, epx_dtype_t dst_dtype, const epx_row_term_t *terms, int n_terms, epx_dtype_t row_dtype,
                          const void *add, size_t n) {
    sum_rows(dst, dst_dtype, terms, n_terms, row_dtype, add, n, 1);
}

void epx_row_plain_sum(void *dst, epx_dtype_t dst_dtype, const epx_row_term_t *terms, int n_terms, epx_dtype_t row_dtype,
                       const void *add, size_t n) {
    sum_rows(dst, dst_dtype, terms, n_terms, row_dtype, add, n, 0);
}

void epx_row_quantise(uint8_t *codes, float *scales, const void *src, epx_dtype_t src_dtype, size_t n, size_t block) {
    const epx_row_kernels_t *k = epx_row_kernels();
    float f[EPX_ROW_CHUNK];
    for (size_t i = 0; i < n; i += block) {
        size_t m = n - i < block ? n - i : block;
        k->widen(f, src_dtype, at_elem(src, src_dtype, i), m);
        k->quantise(codes + i, scales + i / block, f, m);
    }
}
