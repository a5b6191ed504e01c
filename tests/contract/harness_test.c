/* The harness itself: hangs, deaths and failures are reported; the oracle gives numbers worked out by hand; the pairwise
 * sets cover all pairs. No library call. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "tests/harness/batch.h"
#include "tests/harness/launch.h"
#include "tests/harness/pairwise.h"

static int body_outcomes(th_rank_t *r) {
    th_note(r, "expected by harness_test, not an error");
    if (r->rank == 1) return th_fail(r, "on purpose");
    if (r->rank == 2) raise(SIGKILL);
    while (r->rank == 3) th_sleep_us(1000);
    return 0;
}

static void outcomes_are_told_apart(void **state) {
    (void)state;
    th_outcome_t o[4];
    uint64_t start = epx_now_ns();
    assert_int_equal(th_launch(TH_PROCESSES, 4, body_outcomes, NULL, 1, o), 3);
    assert_true(epx_now_ns() - start < 5000000000u);
    assert_int_equal(o[0], TH_PASS);
    assert_int_equal(o[1], TH_FAIL);
    assert_int_equal(o[2], TH_KILLED);
    assert_int_equal(o[3], TH_HUNG);
}

static int body_meet(th_rank_t *r) {
    char mine[40000], all[4 * 40000];
    for (int i = 0; i < 20; i++) {
        size_t n = i % 2 ? sizeof mine : (size_t)i;
        memset(mine, i * 4 + r->rank, sizeof mine);
        TH_CHECK(r, th_allgather(r, mine, n, all) == EPX_OK, "round %d", i);
        for (size_t b = 0; b < n * (size_t)r->n_ranks; b++)
            TH_CHECK(r, all[b] == (char)(i * 4 + (int)(b / n)), "round %d byte %zu", i, b);
    }
    return 0;
}

static void ranks_meet(void **state) {
    (void)state;
    assert_int_equal(th_launch(TH_THREADS, 4, body_meet, NULL, 20, NULL), 0);
    assert_int_equal(th_launch(TH_PROCESSES, 4, body_meet, NULL, 20, NULL), 0);
}

static int body_leaves(th_rank_t *r) {
    if (r->rank == 1) return 0;
    TH_CHECK(r, th_barrier(r) == EPX_ERR_PEER, "%s", "a barrier without one rank");
    return 0;
}

static void a_gone_rank_ends_barriers(void **state) {
    (void)state;
    assert_int_equal(th_launch(TH_THREADS, 2, body_leaves, NULL, 20, NULL), 0);
}

/* Two ranks, three experts (0 and 1 on rank 0, 2 on rank 1), H 1, f32. Expert 0: 0.31 x - 0.02, 1: 0.48 x - 0.007, 2: 0.65 x +
 * 0.006. */
static void oracle_by_hand(void **state) {
    (void)state;
    th_shape_t s = {.n_ranks = 2, .max_tokens = 2, .hidden = 1, .top_k = 2, .n_experts = 3};
    float x0[] = {1.0f, 2.0f}, x1[] = {4.0f}, w0[] = {0.5f, 2.0f, 1.0f, 1.0f}, w1[] = {1.0f, 3.0f};
    int32_t ids0[] = {2, 0, 1, -1}, ids1[] = {1, 1};
    th_batch_t b[2] = {{2, x0, NULL, ids0, w0, NULL}, {1, x1, NULL, ids1, w1, NULL}};
    th_expect_t e;
    assert_int_equal(th_oracle(&s, b, 0, 0, &e), 0);
    assert_int_equal(e.n_local, 2);
    assert_int_equal(e.n_rows, 3); /* expert 0: (0, 0); expert 1: (0, 1), (1, 0) once though named twice */
    assert_int_equal(e.expert_off[1], 1);
    assert_true(e.entries[0].src == 0 && e.entries[0].token == 0);
    assert_true(e.entries[1].src == 0 && e.entries[1].token == 1);
    assert_true(e.entries[2].src == 1 && e.entries[2].token == 0);
    assert_true(th_load(EPX_F32, e.rows, 2) == 4.0f);
    assert_true(e.rows_sent[0] == 2 && e.rows_sent[1] == 1 && e.rows_received[0] == 2 && e.rows_received[1] == 1);
    assert_float_equal(th_load(EPX_F32, e.result, 0), 0.5f * 0.656f + 2.0f * 0.29f, 1e-6);
    assert_float_equal(th_load(EPX_F32, e.result, 1), 0.953f, 1e-6);
    th_expect_fini(&e);
    s.mode = EPX_COMBINE_PARTIAL;
    assert_int_equal(th_oracle(&s, b, 1, 0, &e), 0);
    assert_int_equal(e.n_rows, 1);
    assert_float_equal(th_load(EPX_F32, e.result, 0), 4.0f * 1.913f, 1e-5);
    assert_true(e.histogram[0] == 1 && e.histogram[1] == 2 && e.histogram[2] == 1);
    th_expect_fini(&e);
}

/* Golden vectors of the fp8 cast: scale = max(amax, 1e-12) / 448. */
static void quantise_by_hand(void **state) {
    (void)state;
    float x[130] = {448.0f, -448.0f, 1.0f, -0.0f, 0.001f, 16.5f, 17.5f}, scales[2];
    unsigned char q[130];
    x[128] = 896.0f;
    x[129] = 3.0f;
    th_quantise_row(x, 130, 128, EPX_SCALE_F32, q, scales);
    assert_true(scales[0] == 1.0f && scales[1] == 2.0f);
    static const unsigned char want[] = {0x7E, 0xFE, 0x38, 0x80,
                                         0x01, 0x58, 0x59}; /* 0.001 / 2^-9 rounds to 1; 16.5 -> 16, 17.5 -> 18 */
    assert_memory_equal(q, want, sizeof want);
    assert_true(q[128] == 0x7E && q[129] == 0x3C);
    memset(x, 0, sizeof x);
    th_quantise_row(x, 128, 128, EPX_SCALE_F32, q, scales);
    assert_true(scales[0] > 0.0f && scales[0] < 1e-14f && q[0] == 0);
    x[0] = 450.0f, x[1] = 3.0f;
    th_quantise_row(x, 2, 1, EPX_SCALE_UE8M0, q, scales);
    assert_true(scales[0] == 2.0f && scales[1] == 0x1p-7f && q[1] == 0x7C); /* 3 * 2^7 = 384 */
}

static void pairwise_covers(void **state) {
    (void)state;
    static const int sizes[7] = {5, 3, 6, 2, 2, 7, 8};
    static th_tuple_t t[200];
    int n = th_pairwise(7, sizes, t, 200);
    assert_in_range(n, 56, 90);
    assert_true(th_pairwise_covers(7, sizes, t, n));
    assert_false(th_pairwise_covers(7, sizes, t, n - 1));
    assert_int_equal(th_pairwise(7, sizes, t, 20), -1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(outcomes_are_told_apart),   cmocka_unit_test(ranks_meet),
        cmocka_unit_test(a_gone_rank_ends_barriers), cmocka_unit_test(oracle_by_hand),
        cmocka_unit_test(quantise_by_hand),          cmocka_unit_test(pairwise_covers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
