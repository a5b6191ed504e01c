/* Histograms and row counts of the meter. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine/model/meter.h"

static void test_buckets(void **state) {
    epx_time_hist_t h = {0};
    (void)state;
    for (int i = 1; i < EPX_TIME_BUCKETS; i++) assert_true(epx_time_hist_bound_ns(i) > epx_time_hist_bound_ns(i - 1));
    assert_true(epx_time_hist_bound_ns(EPX_TIME_BUCKETS - 1) == UINT64_MAX);
    epx_time_hist_add(&h, 0);
    epx_time_hist_add(&h, 1000); /* a bound belongs to its own bucket */
    epx_time_hist_add(&h, 1001);
    epx_time_hist_add(&h, 100000001);
    assert_int_equal(h.n[0], 2);
    assert_int_equal(h.n[1], 1);
    assert_int_equal(h.n[EPX_TIME_BUCKETS - 1], 1);
    assert_int_equal(h.sum_ns, 100002002);
    assert_int_equal(epx_time_hist_count(&h), 4);
}

static void test_rows(void **state) {
    epx_meter_t m;
    int32_t ids[6] = {0, 2, 2, -1, 1, 2};
    (void)state;
    assert_int_equal(epx_meter_init(&m, 2, 3), EPX_OK);
    epx_meter_add_rows(&m, 1, ids, 3, 2);
    epx_meter_add_rows(&m, 1, ids, 0, 2);
    epx_meter_add_rows(&m, 0, ids, 1, 2);
    const uint64_t want[6] = {1, 0, 1, 1, 1, 3};
    assert_memory_equal(m.expert_rows, want, sizeof want);
    epx_meter_fini(&m);
    epx_meter_fini(&m);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_buckets), cmocka_unit_test(test_rows)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
