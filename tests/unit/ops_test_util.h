/* Helpers of the ops tests: seeded data, one ops object for each ISA level and thread count, bf16 weights at odd addresses. */
#ifndef EPX_TESTS_UNIT_OPS_TEST_UTIL_H
#define EPX_TESTS_UNIT_OPS_TEST_UTIL_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>

#include <cmocka.h>

#include "base/half.h"
#include "base/philox.h"
#include "engine/ops/ops.h"

static uint64_t g_seed, g_draw;

static inline void seed_init(void) {
    const char *s = getenv("EPX_TEST_SEED");
    g_seed = s != NULL ? strtoull(s, NULL, 0) : 20261130u;
    printf("EPX_TEST_SEED=%llu\n", (unsigned long long)g_seed);
}
static inline float uniform(void) { return 2.0f * epx_philox_unit(g_seed, g_draw++) - 1.0f; }
static inline int below(int n) { return (int)(epx_philox_u32(g_seed, g_draw++) % (uint32_t)n); }

static inline void *must_alloc(size_t bytes) {
    void *p = malloc(bytes > 0 ? bytes : 1);
    assert_non_null(p);
    return p;
}
static inline float *random_floats(int64_t n) {
    float *x = must_alloc((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++) x[i] = uniform();
    return x;
}
static inline void shuffle(int *order, int n) {
    for (int i = n - 1; i > 0; i--) {
        const int j = below(i + 1), t = order[i];
        order[i] = order[j];
        order[j] = t;
    }
}

/* A weight and the block that holds it. Data starts one element past the allocation, so bf16 is only 2-byte aligned, and ends
 * with it, so that a sanitizer sees a read past the end. */
typedef struct {
    epx_weight_t w;
    void *block;
} test_weight_t;
static inline test_weight_t random_weight(int64_t n, int64_t k, epx_wtype_t type) {
    const size_t elem = type == EPX_W_BF16 ? 2 : 4;
    test_weight_t t = {.block = must_alloc((size_t)(n * k + 1) * elem)};
    for (int64_t i = 0; i <= n * k; i++) {
        if (type == EPX_W_BF16) ((uint16_t *)t.block)[i] = epx_f32_to_bf16(uniform());
        else ((float *)t.block)[i] = uniform();
    }
    t.w = (epx_weight_t){.data = (const char *)t.block + elem, .type = type, .n = n, .k = k};
    return t;
}
static inline double weight_at(const epx_weight_t *w, int64_t n, int64_t k) {
    const int64_t i = n * w->k + k;
    return w->type == EPX_W_BF16 ? epx_bf16_to_f32(((const uint16_t *)w->data)[i]) : ((const float *)w->data)[i];
}

enum { MAX_THREADS = 4 };
static epx_ops_t *g_ops[MAX_THREADS + 1];

static inline void open_ops(const char *isa, int n_threads) {
    const epx_ops_config_t cfg = {.size = sizeof cfg, .n_threads = n_threads, .isa = isa};
    if (epx_ops_create(&cfg, &g_ops[n_threads]) != EPX_OK) fail_msg("create %s: %s", isa, epx_error_message());
    assert_int_equal(epx_ops_reserve(g_ops[n_threads], 8, 2048, 8, 256), EPX_OK);
    assert_string_equal(epx_ops_isa(g_ops[n_threads]), isa);
}

/* Run `body` once for each ISA level of this CPU, with g_ops[1 .. MAX_THREADS] open. */
static inline void each_isa(void (*body)(void)) {
    char list[64];
    snprintf(list, sizeof list, "%s", epx_ops_isa_available());
    for (char *save = NULL, *isa = strtok_r(list, ",", &save); isa != NULL; isa = strtok_r(NULL, ",", &save)) {
        for (int t = 1; t <= MAX_THREADS; t++) open_ops(isa, t);
        printf("isa %s\n", isa);
        body();
        for (int t = 1; t <= MAX_THREADS; t++) epx_ops_destroy(g_ops[t]);
    }
}

#endif
