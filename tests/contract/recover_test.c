/* After a failure: recover with everybody, or without a rank that is gone. Results of masked exchanges against the oracle.
 * Usage: contract_recover threads | processes | wrapper:TRANSPORT (SIGKILL needs processes; a wrapper takes threads) */
#include <setjmp.h>
#include <signal.h>
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
static const char *transport; /* NULL: chosen */

enum { E = 7, W = 4, VICTIM = 1, N_VARIANTS = 4 };

typedef struct {
    const char *backend;
    int variant, phase;
} how_t;

typedef struct {
    epx_world_t *w;
    epx_group_t *g;
    epx_plan_t *p;
    th_case_t c;
} bench_t;

/* 0 plain exact; 1 partial, weights scaled; 2 copies of experts; 3 replicated tokens, contiguous, scaled. */
static void case_of(const how_t *h, th_case_t *out) {
    int v = h->variant;
    *out = (th_case_t){.backend = h->backend, .opts = TH_HALVES | TH_HISTOGRAM | TH_ADD, .n_channels = 2, .seed = th_seed()};
    out->timeout_ns = h->phase < 0 || mode == TH_PROCESSES ? 5000000000u : 800000000u; /* threads are lost by waiting in vain */
    out->shape = (th_shape_t){.n_ranks = W,
                              .max_tokens = 5,
                              .hidden = 24,
                              .top_k = 3,
                              .n_experts = E,
                              .n_slots = v == 2 ? E + 4 : E,
                              .replicate = v == 3 ? 2 : 1,
                              .renormalize = v % 2,
                              .token = EPX_BF16,
                              .wire = EPX_BF16,
                              .expert = EPX_BF16,
                              .combine = EPX_BF16,
                              .layout = v == 3 ? EPX_LAYOUT_CONTIGUOUS : EPX_LAYOUT_LISTS,
                              .align = v == 3 ? 4 : 1,
                              .mode = v % 2 ? EPX_COMBINE_PARTIAL : EPX_COMBINE_EXACT};
}

static int steps(th_rank_t *r, bench_t *b, int channel, int from, int to) {
    th_tally_t tally = {0};
    b->c.channel = channel;
    for (int i = from; i <= to; i++)
        if (th_step(r, b->p, &b->c, r->rank, (th_kind_t)(i % TH_N_KINDS), (uint64_t)i, &tally) != 0) return -1;
    return 0;
}

static int setup(th_rank_t *r, const how_t *h, bench_t *b) {
    epx_world_config_t cfg;
    epx_plan_config_t pc;
    memset(b, 0, sizeof *b);
    case_of(h, &b->c);
    th_world_config(r, transport, &cfg);
    TH_OK(r, epx_world_create(&cfg, &b->w));
    TH_OK(r, epx_group_create(b->w, NULL, 0, -1, &b->g));
    th_plan_config(&b->c, &pc);
    TH_OK(r, epx_plan_create(b->g, &pc, &b->p));
    return steps(r, b, 0, 1, TH_N_KINDS);
}

static void teardown(bench_t *b) {
    epx_plan_destroy(b->p);
    epx_group_destroy(b->g);
    epx_world_destroy(b->w);
}

/* Calls of an exchange without tokens, until `n_calls` are done or one fails. */
static epx_status_t empty_calls(bench_t *b, int channel, int n_calls) {
    static epx_status_t (*const calls[4])(epx_plan_t *, const epx_io_t *) = {epx_dispatch_send, epx_dispatch_recv,
                                                                             epx_combine_send, epx_combine_recv};
    static _Thread_local float nothing[65536];
    static _Thread_local int32_t counts[64];
    epx_status_t s = EPX_OK;
    for (int i = 0; i < n_calls && s == EPX_OK; i++) {
        epx_io_t io;
        int packed = b->c.shape.layout != EPX_LAYOUT_LISTS;
        epx_io_init(&io);
        io.channel = channel;
        io.x = nothing;
        io.out_x = i % 4 == 3 || packed ? nothing : NULL;
        io.out_counts = packed ? counts : NULL;
        s = calls[i % 4](b->p, &io);
    }
    return s;
}

/* Two ranks give up while the ranks are at different places of two channels; all go on together. */
static int body_abort(th_rank_t *r) {
    const how_t *h = r->arg;
    bench_t b;
    char mine = 1, all[W];
    if (setup(r, h, &b) != 0) return -1;
    for (int round = 0; round < 4; round++) {
        th_note(r, "round %d, variant %d", round, h->variant);
        TH_OK(r, th_barrier(r)); /* over messages an abort may overtake the data of the exchange before */
        int gives_up = r->rank == round || r->rank == (round + 2) % W;
        /* some have not begun, so that epochs differ for sure; some wait for others in dispatch_recv */
        (void)empty_calls(&b, 1, gives_up ? round % 2 : (r->rank + round) % 3);
        if (gives_up) epx_plan_abort(b.p); /* over messages one of the words may come late */
        epx_status_t s = empty_calls(&b, 0, r->rank * 4 + 4);
        while (s == EPX_OK) s = epx_plan_poll(b.p);
        TH_CHECK(r, s == EPX_ERR_ABORTED, "status %d: %s", (int)s, epx_last_error());
        TH_OK(r, epx_plan_recover(b.p));
        TH_OK(r, epx_plan_poll(b.p));
        TH_OK(r, epx_group_allgather(b.g, &mine, 1, all, 1000000000));
        if (steps(r, &b, 0, 1, 6) != 0 || steps(r, &b, 1, 1, 3) != 0) return -1;
    }
    teardown(&b);
    return 0;
}

static void on_each(th_fn_t body, int phase) {
    const char *backends[TH_MAX_COMPONENTS];
    int n = th_components("backend", backends);
    for (int i = 0; i < n; i++) {
        if ((mode == TH_PROCESSES || transport != NULL) && th_needs_one_process(backends[i])) continue;
        for (int v = 0; v < N_VARIANTS; v++) {
            if (phase >= 0 && mode == TH_THREADS && v != 2 && !th_needs_one_process(backends[i])) continue; /* processes do it */
            how_t h = {backends[i], v, phase};
            th_outcome_t o[W];
            int bad = th_launch(mode, W, body, &h, 40, o);
            assert_int_equal(bad, phase >= 0 && mode == TH_PROCESSES);
            if (bad) assert_int_equal(o[VICTIM], TH_KILLED);
        }
    }
}

static void abort_and_recover(void **state) {
    (void)state;
    on_each(body_abort, -1);
}

/* Move the experts to the living, the copies to the dead: nothing is missing any more. */
static int move_experts(th_rank_t *r, bench_t *b) {
    static const int slot_rank[E + 4] = {0, 0, 0, 2, 2, 2, 3, VICTIM, VICTIM, VICTIM, 3};
    epx_plan_info_t info = {.size = sizeof info};
    if (th_n_slots(&b->c.shape) != E + 4) return 0;
    TH_OK(r, epx_plan_info(b->p, &info));
    TH_OK(r, epx_plan_set_placement(b->p, slot_rank, NULL, 5, info.epoch + 2));
    if (steps(r, b, 0, 7, 7) != 0) return -1;
    b->c.shape.slot_rank = slot_rank;
    th_tally_t tally = {0};
    for (int i = 0; i < TH_N_KINDS; i++) {
        th_open_t *o = NULL;
        int n_missing = -1;
        b->c.channel = 0;
        if (th_step_open(r, b->p, &b->c, r->rank, (th_kind_t)i, (uint64_t)i, &o) != 0) return -1;
        TH_OK(r, epx_plan_missing(b->p, 0, &n_missing, NULL));
        if (th_step_close(r, b->p, &b->c, o, &tally) != 0) return -1;
        TH_CHECK(r, n_missing == 0, "%d tokens still miss an expert", n_missing);
    }
    return 0;
}

/* The victim goes at a given call of an exchange: killed, or (threads) it just stays away. */
static int body_lose(th_rank_t *r) {
    const how_t *h = r->arg;
    bench_t b;
    char mine = 1, all[W];
    if (setup(r, h, &b) != 0) return -1;
    TH_OK(r, th_barrier(r));
    if (r->rank == VICTIM) {
        TH_OK(r, empty_calls(&b, 0, h->phase));
        if (mode == TH_PROCESSES) raise(SIGKILL);
        epx_fetch_add_u64(&th_words(r)[1], 1); /* it has stopped, and the others know */
        while (epx_load_acquire_u64(&th_words(r)[0]) < W - 1) th_sleep_us(1000);
        teardown(&b);
        return 0;
    }
    epx_status_t s = EPX_OK;
    for (int i = 0; i < 3 && s == EPX_OK; i++) s = empty_calls(&b, 0, 4);
    TH_CHECK(r, s < 0, "%s", "exchanges went on without the lost rank");
    if (mode == TH_PROCESSES) TH_STATUS(r, epx_plan_recover(b.p), EPX_ERR_PEER); /* not masked yet */
    while (mode == TH_THREADS && epx_load_acquire_u64(&th_words(r)[1]) == 0) th_sleep_us(1000);
    TH_OK(r, epx_group_mask(b.g, VICTIM, 0));
    TH_OK(r, epx_plan_recover(b.p));
    b.c.shape.dead = 1u << VICTIM;
    TH_OK(r, epx_group_allgather(b.g, &mine, 1, all, 1000000000));
    TH_CHECK(r, all[VICTIM] == 0 && all[0] == 1, "%s", "records after the loss");
    if (steps(r, &b, 0, 1, 2 * TH_N_KINDS) != 0 || steps(r, &b, 1, 1, 3) != 0 || move_experts(r, &b) != 0) return -1;
    TH_OK(r, epx_group_mask(b.g, VICTIM, 1));
    TH_STATUS(r, epx_plan_recover(b.p), EPX_ERR_ARG); /* it cannot come back */
    TH_OK(r, epx_group_mask(b.g, VICTIM, 0));
    epx_fetch_add_u64(&th_words(r)[0], 1);
    teardown(&b);
    return 0;
}

static void masked_exchanges(void **state) {
    (void)state;
    for (int phase = 0; phase < (mode == TH_PROCESSES ? 4 : 1); phase++) on_each(body_lose, phase);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(abort_and_recover),
        cmocka_unit_test(masked_exchanges),
    };
    if (argc > 1 && strcmp(argv[1], "processes") == 0) mode = TH_PROCESSES;
    if (argc > 1 && strncmp(argv[1], "wrapper:", 8) == 0) transport = argv[1] + 8;
    if (argc > 2) cmocka_set_test_filter(argv[2]);
    th_print_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
