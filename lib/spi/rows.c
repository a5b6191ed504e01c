/* Row operations over the kernel set of this CPU. */
#include "spi/rows.h"

#include <string.h>

#include "base/compiler.h"
#include "base/half.h"
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

static const char *at_elem(const void *row, epx_dtype_t dtype, size_t i) {
    return (const char *)row + i * epx_dtype_bytes(dtype);
}

void epx_row_copy(void *dst, const void *src, size_t n_bytes) {
    size_t i = 0;
    for (; n_bytes - i > PREFETCH_BYTES; i += PREFETCH_BYTES) {
        for (size_t at = PREFETCH_BYTES; at < 2 * PREFETCH_BYTES; at += 64) {
            EPX_PREFETCH_R((const char *)src + i + at);
            EPX_PREFETCH_W((char *)dst + i + at);
        }
        memcpy((char *)dst + i, (const char *)src + i, PREFETCH_BYTES);
    }
    memcpy((char *)dst + i, (const char *)src + i, n_bytes - i);
}

static void prefetch_ahead(const char *p, size_t bytes) {
    for (size_t i = 0; i < bytes && i < PREFETCH_BYTES; i += 64) EPX_PREFETCH_R(p + bytes + i);
}

/* Ask for the lines of a slot in another rank's slab before its sum is ready. */
static void prefetch_slot(const char *p, size_t bytes) {
    for (size_t i = 0; i < bytes && i < PREFETCH_BYTES; i += 64) EPX_PREFETCH_W(p + i);
}

/* Elements that are worked on at a time: whole scale blocks where there are scales. */
static size_t step_of(const epx_row_form_t *a, const epx_row_form_t *b) {
    size_t block = a->dtype == EPX_FP8_E4M3 ? a->block : b != NULL && b->dtype == EPX_FP8_E4M3 ? b->block : 1;
    return EPX_ROW_CHUNK / block * block;
}

/* m elements from element i on, f32 -> the row's form. i starts a block. */
static void narrow_part(const epx_row_kernels_t *k, void *dst, const epx_row_form_t *to, const float *src, size_t i, size_t m) {
    if (to->dtype != EPX_FP8_E4M3) {
        k->narrow((char *)dst + i * epx_dtype_bytes(to->dtype), to->dtype, src, m);
        return;
    }
    for (size_t at = 0; at < m; at += to->block) {
        float scale;
        k->quantise((uint8_t *)dst + i + at, &scale, src + at, m - at < to->block ? m - at : to->block, to->format);
        memcpy((char *)dst + to->scale_off + (i + at) / to->block * sizeof scale, &scale, sizeof scale);
    }
}

void epx_row_store(void *dst, const epx_row_form_t *to, const void *src, epx_dtype_t src_dtype, size_t n) {
    const epx_row_kernels_t *k = epx_row_kernels();
    float f[EPX_ROW_CHUNK];
    if (to->dtype == src_dtype) {
        epx_row_copy(dst, src, n * epx_dtype_bytes(src_dtype));
        return;
    }
    for (size_t i = 0, step = step_of(to, NULL); i < n; i += step) {
        size_t m = n - i < step ? n - i : step;
        prefetch_slot((const char *)dst + i * epx_dtype_bytes(to->dtype), m * epx_dtype_bytes(to->dtype));
        k->widen(f, src_dtype, at_elem(src, src_dtype, i), m);
        narrow_part(k, dst, to, f, i, m);
    }
}

/* acc += [weight *] the elements i .. i + m of an fp8 row. */
static void add_scaled(const epx_row_kernels_t *k, float *acc, const epx_row_term_t *term, const epx_row_form_t *from, size_t i,
                       size_t m, int weighted) {
    float f[EPX_ROW_CHUNK], scale;
    k->widen(f, EPX_FP8_E4M3, (const char *)term->row + i, m);
    for (size_t at = 0; at < m; at += from->block) {
        size_t end = m - at < from->block ? m : at + from->block;
        memcpy(&scale, (const char *)term->row + from->scale_off + (i + at) / from->block * sizeof scale, sizeof scale);
        for (size_t j = at; j < end; j++) f[j] *= scale;
    }
    if (weighted) k->fma(acc, term->weight, EPX_F32, f, m);
    else k->add(acc, EPX_F32, f, m);
}

static void sum_rows(void *dst, const epx_row_form_t *to, const epx_row_term_t *terms, int n_terms, const epx_row_form_t *from,
                     const void *add, size_t n, int weighted) {
    const epx_row_kernels_t *k = epx_row_kernels();
    float acc[EPX_ROW_CHUNK];
    if (to->dtype == EPX_BF16 && from->dtype == EPX_BF16) {
        k->sum_bf16(dst, terms, n_terms, add, n, weighted);
        return;
    }
    if (to->dtype == EPX_F32 && from->dtype == EPX_F32) {
        k->sum_f32(dst, terms, n_terms, add, n, weighted);
        return;
    }
    for (size_t i = 0, step = step_of(to, from); i < n; i += step) {
        size_t m = n - i < step ? n - i : step;
        memset(acc, 0, m * sizeof *acc);
        prefetch_slot((const char *)dst + i * epx_dtype_bytes(to->dtype), m * epx_dtype_bytes(to->dtype));
        for (int t = 0; t < n_terms; t++) {
            const char *row = at_elem(terms[t].row, from->dtype, i);
            if (i + m < n) prefetch_ahead(row, m * epx_dtype_bytes(from->dtype));
            if (from->dtype == EPX_FP8_E4M3) add_scaled(k, acc, &terms[t], from, i, m, weighted);
            else if (weighted) k->fma(acc, terms[t].weight, from->dtype, row, m);
            else k->add(acc, from->dtype, row, m);
        }
        if (add != NULL) k->add(acc, to->dtype, at_elem(add, to->dtype, i), m);
        narrow_part(k, dst, to, acc, i, m);
    }
}

void epx_row_weighted_sum(void *dst, const epx_row_form_t *to, const epx_row_term_t *terms, int n_terms,
                          const epx_row_form_t *from, const void *add, size_t n) {
    sum_rows(dst, to, terms, n_terms, from, add, n, 1);
}

void epx_row_plain_sum(void *dst, const epx_row_form_t *to, const epx_row_term_t *terms, int n_terms, const epx_row_form_t *from,
                       const void *add, size_t n) {
    sum_rows(dst, to, terms, n_terms, from, add, n, 0);
}

void epx_row_quantise(uint8_t *codes, void *scales, const void *src, epx_dtype_t src_dtype, size_t n, size_t block,
                      epx_scale_format_t format) {
    const epx_row_kernels_t *k = epx_row_kernels();
    float f[EPX_ROW_CHUNK], scale;
    size_t n_blocks = 0;
    for (size_t i = 0; i < n; i += block, n_blocks++) {
        size_t m = n - i < block ? n - i : block;
        k->widen(f, src_dtype, at_elem(src, src_dtype, i), m);
        k->quantise(codes + i, &scale, f, m, format);
        if (format == EPX_SCALE_F32) memcpy((float *)scales + n_blocks, &scale, sizeof scale);
        else ((uint8_t *)scales)[n_blocks] = (uint8_t)(epx_f32_bits(scale) >> 23);
    }
    for (; format == EPX_SCALE_UE8M0 && n_blocks % 4 != 0; n_blocks++) ((uint8_t *)scales)[n_blocks] = 0;
}
