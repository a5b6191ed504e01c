/* KV pool accounting against a plain model of it, and the layout of the storage. Seed: EPX_TEST_SEED. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/memory.h"
#include "base/philox.h"
#include "engine/kv/pool.h"
#include "engine/kv/store.h"

enum { PAGES = 50, HOLDERS = 8 };

static void test_pool_random(void **state) {
    (void)state;
    const char *env = getenv("EPX_TEST_SEED");
    uint64_t seed = env ? strtoull(env, NULL, 10) : 1;
    int32_t held[HOLDERS][PAGES], n_held[HOLDERS] = {0}, owner[PAGES], n_free = PAGES;
    epx_kv_pool_t *p;
    memset(owner, -1, sizeof owner);
    assert_int_equal(epx_kv_pool_create(PAGES, 16, &p), EPX_OK);
    for (uint64_t i = 0; i < 5000; i++) {
        int h = (int)(epx_philox_u32(seed, 2 * i) % HOLDERS);
        int32_t want = (int32_t)(epx_philox_u32(seed, 2 * i + 1) % 20);
        if (n_held[h]) {
            for (int32_t k = 0; k < n_held[h]; k++) owner[held[h][k]] = -1;
            epx_kv_pool_give(p, held[h], n_held[h]);
            n_free += n_held[h];
            n_held[h] = 0;
        } else {
            assert_int_equal(epx_kv_pool_take(p, want, held[h]), want <= n_free);
            if (want > n_free) continue;
            n_held[h] = want;
            n_free -= want;
            for (int32_t k = 0; k < want; k++) {
                assert_in_range(held[h][k], 0, PAGES - 1);
                assert_int_equal(owner[held[h][k]], -1); /* nobody else has it */
                owner[held[h][k]] = h;
            }
        }
        assert_int_equal(epx_kv_pool_n_free(p), n_free);
    }
    epx_kv_pool_destroy(p);
}

static void test_pool_arguments(void **state) {
    (void)state;
    epx_kv_pool_t *p;
    assert_int_equal(epx_kv_pool_create(0, 16, &p), EPX_ERR_ARG);
    assert_int_equal(epx_kv_pool_create(4, 0, &p), EPX_ERR_ARG);
    assert_int_equal(epx_kv_pool_create(4, 16, &p), EPX_OK);
    assert_int_equal(epx_kv_pool_pages_for(p, 0), 0);
    assert_int_equal(epx_kv_pool_pages_for(p, 1), 1);
    assert_int_equal(epx_kv_pool_pages_for(p, 16), 1);
    assert_int_equal(epx_kv_pool_pages_for(p, 17), 2);
    epx_kv_pool_destroy(p);
    epx_kv_pool_destroy(NULL);
}

/* Every K and V page of every layer is its own memory. */
static void test_store_layout(void **state) {
    (void)state;
    epx_kv_shape_t shape = {.n_layers = 3, .n_kv_heads = 2, .head_dim = 8, .n_pages = 5, .page_size = 4, .elem_bytes = 4};
    const epx_ops_config_t oc = {.size = sizeof oc, .n_threads = 1};
    epx_ops_t *ops;
    epx_kv_store_t *s;
    assert_int_equal(epx_kv_token_bytes(&shape), 3 * 2 * 2 * 8 * 4);
    assert_int_equal(epx_ops_create(&oc, &ops), EPX_OK);
    assert_int_equal(epx_kv_store_create(ops, &shape, &s), EPX_OK);
    assert_int_equal(epx_kv_store_bytes(s), 5 * 4 * epx_kv_token_bytes(&shape));
    const epx_kv_layer_t *l = epx_kv_store_layers(s);
    size_t half = 5 * 4 * 2 * 8;
    for (int i = 0; i < 3; i++)
        for (size_t k = 0; k < half; k++)
            ((float *)l[i].k_pages)[k] = (float)(2 * i), ((float *)l[i].v_pages)[k] = (float)(2 * i + 1);
    for (int i = 0; i < 3; i++) {
        const float *keys = l[i].k_pages, *values = l[i].v_pages;
        for (size_t k = 0; k < half; k++) assert_true(keys[k] == (float)(2 * i) && values[k] == (float)(2 * i + 1));
    }
    epx_kv_store_destroy(s);
    epx_ops_destroy(ops);
}

static void test_memory(void **state) {
    (void)state;
    uint64_t n = epx_memory_free_bytes();
    print_message("memory available: %llu bytes\n", (unsigned long long)n);
    assert_true(n > (1u << 20) && n < (uint64_t)1 << 50);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pool_random),
        cmocka_unit_test(test_pool_arguments),
        cmocka_unit_test(test_store_layout),
        cmocka_unit_test(test_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
