/* A placement that changes while the plan is used: in force from a named epoch on every rank, with exchanges of the old one still
 * open; and what is refused. Usage: contract_placement threads | processes */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/harness/components.h"
#include "tests/harness/exchange.h"

static th_mode_t mode = TH_THREADS;

enum { E = 6, SLOTS = 9, W = 3 };

/* Three slots a rank; the second table moves experts and copies others, the third is the library's default. */
static const int rank_a[SLOTS] = {0, 0, 0, 1, 1, 1, 2, 2, 2}, expert_a[SLOTS] = {0, 1, 2, 3, 4, 5, 0, 0, 1};
static const int rank_b[SLOTS] = {2, 1, 0, 2, 1, 0, 2, 1, 0}, expert_b[SLOTS] = {5, 5, 4, 3, 3, 3, 2, 1, 0};

typedef struct {
    epx_world_t *w;
    epx_group_t *g;
    epx_plan_t *p;
    th_case_t c[3]; /* by placement */
} bench_t;

static void case_of(const char *backend, const int *slot_rank, const int *slot_expert, th_case_t *out) {
    *out = (th_case_t){.backend = backend, .opts = TH_HALVES | TH_HISTOGRAM, .n_channels = 2, .seed = th_seed()};
    out->shape = (th_shape_t){.n_ranks = W,
                              .max_tokens = 5,
                              .hidden = 24,
                              .top_k = 3,
                              .n_experts = E,
                              .n_slots = SLOTS,
                              .slot_rank = slot_rank,
                              .slot_expert = slot_expert,
                              .token = EPX_F32,
                              .wire = EPX_F32,
                              .expert = EPX_F32,
                              .combine = EPX_F32,
                              .layout = EPX_LAYOUT_EXPERT_MAJOR,
                              .mode = EPX_COMBINE_PARTIAL};
}

static int setup(th_rank_t *r, const char *backend, bench_t *b) {
    epx_world_config_t cfg;
    epx_plan_config_t pc;
    memset(b, 0, sizeof *b);
    case_of(backend, rank_a, expert_a, &b->c[0]);
    case_of(backend, rank_b, expert_b, &b->c[1]);
    case_of(backend, NULL, NULL, &b->c[2]);
    th_world_config(r, NULL, &cfg);
    TH_OK(r, epx_world_create(&cfg, &b->w));
    TH_OK(r, epx_group_create(b->w, NULL, 0, -1, &b->g));
    th_plan_config(&b->c[0], &pc);
    pc.placement_version = 10;
    TH_OK(r, epx_plan_create(b->g, &pc, &b->p));
    return 0;
}

static void teardown(bench_t *b) {
    epx_plan_destroy(b->p);
    epx_group_destroy(b->g);
    epx_world_destroy(b->w);
}

/* Exchanges n_from .. n_to of a channel under one placement. */
static int steps(th_rank_t *r, bench_t *b, int which, int channel, int from, int to) {
    th_tally_t tally = {0};
    b->c[which].channel = channel;
    for (int i = from; i <= to; i++)
        if (th_step(r, b->p, &b->c[which], r->rank, (th_kind_t)(i % TH_N_KINDS), (uint64_t)i, &tally) != 0) return -1;
    return 0;
}

static int version_is(th_rank_t *r, bench_t *b, uint64_t version) {
    epx_plan_info_t info = {.size = sizeof info};
    TH_OK(r, epx_plan_info(b->p, &info));
    TH_CHECK(r, info.placement_version == version, "placement version %llu, wanted %llu",
             (unsigned long long)info.placement_version, (unsigned long long)version);
    return 0;
}

static int body_changes(th_rank_t *r) {
    bench_t b;
    if (setup(r, r->arg, &b) != 0 || steps(r, &b, 0, 0, 1, 4) != 0 || version_is(r, &b, 10) != 0) return -1;
    TH_OK(r, epx_plan_set_placement(b.p, rank_b, expert_b, 11, 7)); /* two more under the old one */
    if (version_is(r, &b, 10) != 0 || steps(r, &b, 0, 0, 5, 6) != 0 || version_is(r, &b, 11) != 0) return -1;
    if (steps(r, &b, 1, 0, 7, 9) != 0) return -1;
    TH_STATUS(r, epx_plan_set_placement(b.p, NULL, NULL, 12, 20), EPX_ERR_STATE); /* channel 1 is not there yet */
    TH_CHECK(r, strstr(epx_last_error(), "channel 1"), "message: %s", epx_last_error());
    if (steps(r, &b, 0, 1, 1, 6) != 0 || steps(r, &b, 1, 1, 7, 8) != 0) return -1;
    TH_OK(r, epx_plan_set_placement(b.p, NULL, NULL, 12, 12));
    if (steps(r, &b, 1, 0, 10, 11) != 0 || steps(r, &b, 2, 0, 12, 22) != 0) return -1;
    if (steps(r, &b, 1, 1, 9, 11) != 0 || steps(r, &b, 2, 1, 12, 13) != 0) return -1;
    teardown(&b);
    return 0;
}

/* A change while an exchange is open: it ends under the placement that it began with. */
static int body_open(th_rank_t *r) {
    bench_t b;
    th_open_t *o = NULL;
    th_tally_t tally = {0};
    if (setup(r, r->arg, &b) != 0 || steps(r, &b, 0, 0, 1, 2) != 0) return -1;
    if (th_step_open(r, b.p, &b.c[0], r->rank, TH_FULL, 5, &o) != 0) return -1;
    TH_OK(r, epx_plan_set_placement(b.p, rank_b, expert_b, 11, 4));
    if (th_step_close(r, b.p, &b.c[0], o, &tally) != 0 || steps(r, &b, 1, 0, 4, 6) != 0) return -1;
    teardown(&b);
    return 0;
}

static int body_refused(th_rank_t *r) {
    static const int crowded[SLOTS] = {0, 0, 0, 0, 1, 1, 1, 2, 2}, lost[SLOTS] = {0, 1, 2, 3, 4, 4, 0, 0, 1};
    static const int far[SLOTS] = {0, 0, 0, 1, 1, 1, 2, 2, 3};
    bench_t b;
    int odd = r->rank == 1;
    if (setup(r, NULL, &b) != 0 || steps(r, &b, 0, 0, 1, 3) != 0) return -1;
    TH_STATUS(r, epx_plan_set_placement(b.p, rank_b, expert_b, 10, 9), EPX_ERR_ARG);
    TH_CHECK(r, strstr(epx_last_error(), "version") && strstr(epx_last_error(), "10"), "message: %s", epx_last_error());
    TH_STATUS(r, epx_plan_set_placement(b.p, rank_b, expert_b, 11, 3), EPX_ERR_ARG);
    TH_CHECK(r, strstr(epx_last_error(), "epoch is 3"), "message: %s", epx_last_error());
    TH_STATUS(r, epx_plan_set_placement(b.p, crowded, expert_b, 11, 9), EPX_ERR_CAPACITY);
    TH_STATUS(r, epx_plan_set_placement(b.p, far, expert_b, 11, 9), EPX_ERR_ARG);
    TH_STATUS(r, epx_plan_set_placement(b.p, rank_b, lost, 11, 9), EPX_ERR_ARG);
    TH_CHECK(r, strstr(epx_last_error(), "expert 5"), "message: %s", epx_last_error());
    TH_STATUS(r, epx_plan_set_placement(b.p, odd ? far : rank_b, expert_b, 11, 9),
              EPX_ERR_ARG); /* one rank's mistake is known to all */
    TH_CHECK(r, odd || strstr(epx_last_error(), "rank 1"), "message: %s", epx_last_error());
    TH_STATUS(r, epx_plan_set_placement(b.p, odd ? rank_a : rank_b, expert_b, 11, 9), EPX_ERR_MISMATCH);
    TH_CHECK(r, strstr(epx_last_error(), "slot_rank"), "message: %s", epx_last_error());
    TH_STATUS(r, epx_plan_set_placement(b.p, rank_b, expert_b, odd ? 12 : 11, 9), EPX_ERR_MISMATCH);
    TH_STATUS(r, epx_plan_set_placement(b.p, rank_b, expert_b, 11, odd ? 8 : 9), EPX_ERR_MISMATCH);
    if (version_is(r, &b, 10) != 0 || steps(r, &b, 0, 0, 4, 9) != 0) return -1;
    teardown(&b);
    return 0;
}

static void on_each_backend(th_fn_t body) {
    const char *backends[TH_MAX_COMPONENTS];
    int n = th_components("backend", backends);
    for (int i = 0; i < n; i++) {
        if (mode == TH_PROCESSES && th_needs_one_process(backends[i])) continue;
        assert_int_equal(th_launch(mode, W, body, (void *)(uintptr_t)backends[i], 40, NULL), 0);
    }
}

static void in_force_from_an_epoch(void **state) {
    (void)state;
    on_each_backend(body_changes);
}

static void open_exchanges_keep_theirs(void **state) {
    (void)state;
    on_each_backend(body_open);
}

static void refusals(void **state) {
    (void)state;
    assert_int_equal(th_launch(mode, W, body_refused, NULL, 40, NULL), 0);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(in_force_from_an_epoch),
        cmocka_unit_test(open_exchanges_keep_theirs),
        cmocka_unit_test(refusals),
    };
    if (argc > 1 && strcmp(argv[1], "processes") == 0) mode = TH_PROCESSES;
    if (argc > 2) cmocka_set_test_filter(argv[2]);
    th_print_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
