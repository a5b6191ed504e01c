/* Groups and plans beyond the plain case: several, overlapping, permuted and subset groups, two worlds, plans with an
 * exchange open at once, the group all-gather, one global batch split over different W.
 * Usage: contract_groups threads | processes */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/atomic.h"
#include "tests/harness/components.h"
#include "tests/harness/exchange.h"

static th_mode_t mode = TH_THREADS;

static th_case_t plain_case(const char *backend, int n_ranks, uint64_t seed) {
    th_case_t c = {.backend = backend, .n_steps = TH_N_KINDS, .seed = seed};
    c.shape = (th_shape_t){.n_ranks = n_ranks,
                           .max_tokens = 4,
                           .hidden = 40,
                           .top_k = 3,
                           .n_experts = 11,
                           .token = EPX_F32,
                           .wire = EPX_F32,
                           .expert = EPX_F32,
                           .combine = EPX_F32,
                           .layout = EPX_LAYOUT_LISTS,
                           .mode = EPX_COMBINE_EXACT};
    return c;
}

static int open_world(th_rank_t *r, epx_world_t **out_w, epx_group_t **out_g) {
    epx_world_config_t cfg;
    th_world_config(r, NULL, &cfg);
    TH_OK(r, epx_world_create(&cfg, out_w));
    if (out_g) TH_OK(r, epx_group_create(*out_w, NULL, 0, -1, out_g));
    return 0;
}

typedef struct {
    int n, ranks[4];
} rank_list_t;

static const rank_list_t lists[] = {{4, {0, 1, 2, 3}}, {2, {0, 1}}, {2, {2, 3}}, {2, {2, 1}}, {3, {3, 1, 0}}, {1, {2}}};
enum { N_LISTS = sizeof lists / sizeof lists[0] };

static int place_in(const rank_list_t *l, int rank) {
    for (int i = 0; i < l->n; i++)
        if (l->ranks[i] == rank) return i;
    return -1;
}

static int body_several_groups(th_rank_t *r) {
    epx_world_t *w = NULL;
    epx_group_t *g[N_LISTS];
    if (open_world(r, &w, NULL) != 0) return -1;
    for (int i = 0; i < N_LISTS; i++) {
        th_note(r, "group %d", i);
        g[i] = (epx_group_t *)(uintptr_t)1;
        TH_OK(r, epx_group_create(w, lists[i].ranks, lists[i].n, -1, &g[i]));
        int me = place_in(&lists[i], r->rank);
        TH_CHECK(r, (g[i] != NULL) == (me >= 0), "group %d: rank %d got %p", i, r->rank, (void *)g[i]);
        if (!g[i]) continue;
        TH_CHECK(r, epx_group_rank(g[i]) == me && epx_group_size(g[i]) == lists[i].n, "group %d: rank %d of %d, wanted %d of %d",
                 i, epx_group_rank(g[i]), epx_group_size(g[i]), me, lists[i].n);
    }
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < N_LISTS; i++) {
            th_case_t c = plain_case(NULL, lists[i].n, (uint64_t)(100 * round + i));
            if (g[i] && th_case_run(r, g[i], &c) != 0) return -1;
        }
    }
    for (int i = 0; i < N_LISTS; i++) epx_group_destroy(g[i]);
    epx_world_destroy(w);
    return 0;
}

/* Ranks forked from a process that has used the library are still told apart (each checks its own process). */
static void use_library_before_fork(void) {
    epx_world_config_t cfg;
    epx_world_t *w = NULL;
    epx_world_config_init(&cfg);
    cfg.bootstrap = "self";
    assert_int_equal(epx_world_create(&cfg, &w), EPX_OK);
    epx_world_destroy(w);
}

static void several_groups(void **state) {
    (void)state;
    use_library_before_fork();
    assert_int_equal(th_launch(mode, 4, body_several_groups, NULL, 40, NULL), 0);
}

static int open_two_plans(th_rank_t *r, epx_group_t *g, th_case_t c[2], epx_plan_t *p[2]) {
    for (int i = 0; i < 2; i++) {
        epx_plan_config_t cfg;
        th_plan_config(&c[i], &cfg);
        TH_OK(r, epx_plan_create(g, &cfg, &p[i]));
    }
    return 0;
}

static int body_two_plans(th_rank_t *r) {
    const char *backend = r->arg;
    epx_world_t *w = NULL;
    epx_group_t *g = NULL;
    epx_plan_t *p[2];
    th_tally_t tally[2] = {{0}, {0}};
    th_case_t c[2] = {plain_case(backend, r->n_ranks, 1), plain_case(backend, r->n_ranks, 2)};
    c[1].shape.layout = EPX_LAYOUT_EXPERT_MAJOR;
    c[1].shape.hidden = 17;
    c[1].opts = TH_REGISTERED | TH_HALVES | TH_DELAYS;
    if (open_world(r, &w, &g) != 0 || open_two_plans(r, g, c, p) != 0) return -1;
    for (int i = 0; i < 30; i++) {
        th_open_t *o[2];
        int first = i & 1, kind = i % TH_N_KINDS;
        for (int k = 0; k < 2; k++)
            if (th_step_open(r, p[k ^ first], &c[k ^ first], r->rank, (th_kind_t)kind, (uint64_t)i, &o[k ^ first]) != 0)
                return -1;
        for (int k = 0; k < 2; k++)
            if (th_step_close(r, p[k], &c[k], o[k], &tally[k]) != 0) return -1;
    }
    for (int k = 0; k < 2; k++)
        if (th_check_stats(r, p[k], &c[k], &tally[k]) != 0) return -1;
    epx_plan_destroy(p[1]);
    epx_plan_destroy(p[0]);
    epx_group_destroy(g);
    epx_world_destroy(w);
    return 0;
}

static void two_plans_at_once(void **state) {
    (void)state;
    const char *backends[TH_MAX_COMPONENTS];
    int n = th_components("backend", backends);
    for (int i = 0; i < n; i++) {
        if (mode == TH_PROCESSES && th_needs_one_process(backends[i])) continue;
        assert_int_equal(th_launch(mode, 3, body_two_plans, (void *)(uintptr_t)backends[i], 40, NULL), 0);
    }
}

static int body_two_worlds(th_rank_t *r) {
    epx_world_t *w[2] = {NULL, NULL};
    epx_group_t *g[2] = {NULL, NULL};
    for (int i = 0; i < 2; i++)
        if (open_world(r, &w[i], &g[i]) != 0) return -1;
    for (int i = 0; i < 4; i++) {
        th_case_t c = plain_case(NULL, r->n_ranks, (uint64_t)i);
        if (th_case_run(r, g[i & 1], &c) != 0) return -1;
    }
    for (int i = 0; i < 2; i++) {
        epx_group_destroy(g[i]);
        epx_world_destroy(w[i]);
    }
    return 0;
}

static void two_worlds(void **state) {
    (void)state;
    assert_int_equal(th_launch(mode, 2, body_two_worlds, NULL, 40, NULL), 0);
}

/* Worlds made by one thread for all: rank 0 hands them out. */
static int body_local_worlds(th_rank_t *r) {
    epx_world_t *worlds[3] = {NULL, NULL, NULL}, *mine;
    epx_group_t *g = NULL;
    if (r->rank == 0) {
        TH_STATUS(r, epx_world_create_local(0, worlds), EPX_ERR_ARG);
        TH_STATUS(r, epx_world_create_local(EPX_MAX_RANKS + 1, worlds), EPX_ERR_ARG);
        TH_STATUS(r, epx_world_create_local(3, NULL), EPX_ERR_ARG);
        TH_CHECK(r, worlds[0] == NULL, "%s", "a handle was written by a failing call");
        TH_OK(r, epx_world_create_local(3, worlds));
        for (int i = 0; i < 3; i++) epx_store_release_u64(&th_words(r)[i], (uint64_t)(uintptr_t)worlds[i]);
    }
    TH_CHECK(r, th_barrier(r) == EPX_OK, "%s", "barrier");
    mine = (epx_world_t *)(uintptr_t)epx_load_acquire_u64(&th_words(r)[r->rank]);
    TH_CHECK(r, epx_world_rank(mine) == r->rank && epx_world_size(mine) == 3, "rank %d of %d", epx_world_rank(mine),
             epx_world_size(mine));
    for (int i = 0; i < 3; i++) {
        static const int turned[] = {2, 0, 1};
        th_case_t c = plain_case(NULL, 3, (uint64_t)i);
        TH_OK(r, epx_group_create(mine, i == 1 ? turned : NULL, i == 1 ? 3 : 0, -1, &g));
        if (th_case_run(r, g, &c) != 0) return -1;
        epx_group_destroy(g);
    }
    epx_world_destroy(mine);
    return 0;
}

static void local_worlds(void **state) {
    (void)state;
    assert_int_equal(th_launch(TH_THREADS, 3, body_local_worlds, NULL, 40, NULL), 0);
}

static int check_gather(th_rank_t *r, epx_group_t *g, int i) {
    unsigned char mine[EPX_GROUP_RECORD_BYTES], all[4 * EPX_GROUP_RECORD_BYTES];
    int me = epx_group_rank(g), n = epx_group_size(g);
    size_t n_bytes = 1 + (size_t)(th_mix(3, (uint64_t)i) % EPX_GROUP_RECORD_BYTES);
    if (th_mix(17, (uint64_t)i * 8 + (uint64_t)me) % 16 == 0) th_sleep_us(200);
    for (size_t b = 0; b < n_bytes; b++) mine[b] = (unsigned char)th_mix((uint64_t)i * 8 + (uint64_t)me, b);
    TH_OK(r, epx_group_allgather(g, mine, n_bytes, all, 10000000000u));
    for (int q = 0; q < n; q++)
        for (size_t b = 0; b < n_bytes; b++)
            TH_CHECK(r, all[(size_t)q * n_bytes + b] == (unsigned char)th_mix((uint64_t)i * 8 + (uint64_t)q, b),
                     "round %d: byte %zu of rank %d is wrong", i, b, q);
    return 0;
}

static int body_allgather(th_rank_t *r) {
    static const int order[] = {2, 0, 3, 1};
    epx_world_t *w = NULL;
    epx_group_t *g = NULL, *turned = NULL;
    if (open_world(r, &w, &g) != 0) return -1;
    TH_OK(r, epx_group_create(w, order, 4, -1, &turned));
    unsigned char big[4 * 257];
    TH_STATUS(r, epx_group_allgather(g, big, EPX_GROUP_RECORD_BYTES + 1, big, 0), EPX_ERR_ARG);
    TH_CHECK(r, strstr(epx_last_error(), "n_bytes") && strstr(epx_last_error(), "257"), "message: %s", epx_last_error());
    for (int i = 0; i < 500; i++) {
        th_note(r, "all-gather round %d", i);
        if (check_gather(r, i % 3 == 0 ? turned : g, i) != 0) return -1;
    }
    epx_group_destroy(turned);
    epx_group_destroy(g);
    epx_world_destroy(w);
    return 0;
}

static void group_allgather(void **state) {
    (void)state;
    assert_int_equal(th_launch(mode, 4, body_allgather, NULL, 40, NULL), 0);
}

/* A rank that stays away from a group with numbers of its own is named by both numbers. */
static int body_names(th_rank_t *r) {
    static const int ranks[] = {2, 1};
    epx_world_t *w = NULL;
    epx_group_t *g = NULL;
    char mine = 0, all[2];
    if (open_world(r, &w, NULL) != 0) return -1;
    TH_OK(r, epx_group_create(w, ranks, 2, -1, &g));
    if (r->rank == 1) {
        TH_STATUS(r, epx_group_allgather(g, &mine, 1, all, 50000000), EPX_ERR_TIMEOUT);
        TH_CHECK(r, strstr(epx_last_error(), "rank 0 (world rank 2, pid "), "message: %s", epx_last_error());
    }
    TH_CHECK(r, th_barrier(r) == EPX_OK, "%s", "barrier");
    epx_group_destroy(g);
    epx_world_destroy(w);
    return 0;
}

static void ranks_of_groups_are_named(void **state) {
    (void)state;
    assert_int_equal(th_launch(mode, 3, body_names, NULL, 40, NULL), 0);
}

/* Only one rank refuses, the others must not wait for it: every refusal here is found from the arguments alone. */
static int body_bad_groups(th_rank_t *r) {
    static const struct { int n, ranks[3]; } bad[] = {{2, {0, 0}}, {2, {0, 2}}, {2, {0, -1}}, {3, {0, 1, 1}}, {-1, {0}}};
    epx_world_t *w = NULL;
    epx_group_t *g = NULL;
    if (open_world(r, &w, NULL) != 0) return -1;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        TH_STATUS(r, epx_group_create(w, bad[i].ranks, bad[i].n, -1, &g), EPX_ERR_ARG);
        TH_CHECK(r, strstr(epx_last_error(), "ranks"), "message names no field: %s", epx_last_error());
    }
    TH_STATUS(r, epx_group_create(w, NULL, 0, 0, &g), EPX_ERR_UNSUPPORTED);
    TH_CHECK(r, strstr(epx_last_error(), "device"), "message names no field: %s", epx_last_error());
    TH_OK(r, epx_group_create(w, NULL, 0, -1, &g));
    th_case_t c = plain_case(NULL, r->n_ranks, 5);
    if (th_case_run(r, g, &c) != 0) return -1;
    epx_group_destroy(g);
    epx_world_destroy(w);
    return 0;
}

static void bad_groups(void **state) {
    (void)state;
    assert_int_equal(th_launch(mode, 2, body_bad_groups, NULL, 40, NULL), 0);
}

/* The same 12 tokens on 1, 2, 3, 4, 6 ranks: the oracle's exact results do not depend on W (and the library's equal the
 * oracle's, bit for bit, in the matrix). */
static void exact_results_do_not_depend_on_w(void **state) {
    (void)state;
    enum { N = 12 };
    static const int ws[] = {1, 2, 3, 4, 6};
    th_case_t c = plain_case(NULL, 1, 0);
    c.shape.max_tokens = N;
    th_batch_t whole[1];
    th_expect_t want;
    assert_int_equal(th_batches_make(&c.shape, TH_FULL, th_seed(), whole), 0);
    assert_int_equal(th_oracle(&c.shape, whole, 0, 0, &want), 0);
    for (size_t i = 1; i < sizeof ws / sizeof ws[0]; i++) {
        th_shape_t s = c.shape;
        th_batch_t part[8];
        int n = N / ws[i], h = s.hidden, k = s.top_k;
        s.n_ranks = ws[i];
        for (int q = 0; q < ws[i]; q++)
            part[q] = (th_batch_t){.n_tokens = n,
                                   .x = (char *)whole[0].x + (size_t)(q * n * h) * 4,
                                   .ids = whole[0].ids + q * n * k,
                                   .weights = whole[0].weights + q * n * k};
        for (int q = 0; q < ws[i]; q++) {
            th_expect_t got;
            assert_int_equal(th_oracle(&s, part, q, 0, &got), 0);
            assert_memory_equal(got.result, want.result + (size_t)(q * n * h) * 4, (size_t)(n * h) * 4);
            th_expect_fini(&got);
        }
    }
    th_expect_fini(&want);
    th_batches_fini(&c.shape, whole);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(several_groups), cmocka_unit_test(two_plans_at_once),
        cmocka_unit_test(two_worlds),     cmocka_unit_test(group_allgather),
        cmocka_unit_test(local_worlds),   cmocka_unit_test(ranks_of_groups_are_named),
        cmocka_unit_test(bad_groups),     cmocka_unit_test(exact_results_do_not_depend_on_w),
    };
    if (argc > 1 && strcmp(argv[1], "processes") == 0) mode = TH_PROCESSES;
    th_print_seed();
    if (argc > 2) cmocka_set_test_filter(argv[2]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
