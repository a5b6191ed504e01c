/* When a peer is late, gone or gives up: abort, timeout, SIGKILL in each of the four phases, and what is left behind.
 * Usage: contract_faults threads | processes (SIGKILL needs processes) */
#include <dirent.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/atomic.h"
#include "base/clock.h"
#include "tests/harness/components.h"
#include "tests/harness/exchange.h"

static th_mode_t mode = TH_THREADS;
static const uint64_t SECOND = 1000000000u;

typedef struct {
    epx_world_t *w;
    epx_group_t *g;
    epx_plan_t *p;
    th_case_t c;
} bench_t;

typedef struct {
    const char *backend;
    int phase;
} fault_t;

static int setup(th_rank_t *r, const char *backend, uint64_t timeout_ns, bench_t *b) {
    epx_world_config_t cfg;
    epx_plan_config_t pc;
    *b = (bench_t){.c = {.backend = backend, .opts = TH_HALVES, .seed = 1, .timeout_ns = timeout_ns}};
    b->c.shape = (th_shape_t){.n_ranks = r->n_ranks,
                              .max_tokens = 4,
                              .hidden = 32,
                              .top_k = 2,
                              .n_experts = 6,
                              .token = EPX_F32,
                              .wire = EPX_F32,
                              .expert = EPX_F32,
                              .combine = EPX_F32,
                              .layout = EPX_LAYOUT_LISTS,
                              .mode = EPX_COMBINE_EXACT};
    th_world_config(r, NULL, &cfg);
    TH_OK(r, epx_world_create(&cfg, &b->w));
    TH_OK(r, epx_group_create(b->w, NULL, 0, -1, &b->g));
    th_plan_config(&b->c, &pc);
    TH_OK(r, epx_plan_create(b->g, &pc, &b->p));
    th_tally_t tally = {0};
    if (th_step(r, b->p, &b->c, r->rank, TH_FULL, 1, &tally) != 0) return -1;
    TH_OK(r, th_barrier(r)); /* an abort may overtake what is still on its way to a third rank */
    return 0;
}

static void teardown(bench_t *b) {
    epx_plan_destroy(b->p);
    epx_group_destroy(b->g);
    epx_world_destroy(b->w);
}

/* One exchange of zero tokens in four calls; `at` is told before each (0 .. 3). Returns the first error. */
typedef void (*phase_fn_t)(th_rank_t *r, int phase, void *ctx);

static epx_status_t empty_exchange(th_rank_t *r, epx_plan_t *p, phase_fn_t at, void *ctx) {
    static epx_status_t (*const calls[4])(epx_plan_t *, const epx_io_t *) = {epx_dispatch_send, epx_dispatch_recv,
                                                                             epx_combine_send, epx_combine_recv};
    epx_io_t io;
    float nothing[4];
    epx_io_init(&io);
    io.x = nothing;
    for (int i = 0; i < 4; i++) {
        if (at) at(r, i, ctx);
        th_note(r, "call %d of an empty exchange", i);
        io.out_x = i == 3 ? nothing : NULL;
        epx_status_t s = calls[i](p, &io);
        if (s != EPX_OK) return s;
    }
    return EPX_OK;
}

static int has_all(const char *text, const char *const *words) {
    for (int i = 0; words[i]; i++)
        if (!strstr(text, words[i])) return 0;
    return 1;
}

/* ---- abort ---- */

static int body_abort(th_rank_t *r) {
    const fault_t *f = r->arg;
    bench_t b;
    if (setup(r, f->backend, 10 * SECOND, &b) != 0) return -1;
    if (r->rank == 0) {
        th_sleep_us(30000);
        TH_OK(r, epx_plan_abort(b.p));
    }
    uint64_t start = epx_now_ns();
    TH_STATUS(r, empty_exchange(r, b.p, NULL, NULL), EPX_ERR_ABORTED);
    TH_CHECK(r, epx_now_ns() - start < SECOND, "the abort was seen after %.3f s", (double)(epx_now_ns() - start) * 1e-9);
    TH_STATUS(r, epx_plan_poll(b.p), EPX_ERR_ABORTED);
    TH_STATUS(r, empty_exchange(r, b.p, NULL, NULL), EPX_ERR_ABORTED);
    teardown(&b);
    return 0;
}

static void abort_is_seen_by_peers(void **state) {
    (void)state;
    const char *backends[TH_MAX_COMPONENTS];
    int n = th_components("backend", backends);
    for (int i = 0; i < n; i++) {
        if (mode == TH_PROCESSES && th_needs_one_process(backends[i])) continue;
        fault_t f = {backends[i], 0};
        assert_int_equal(th_launch(mode, 3, body_abort, &f, 20, NULL), 0);
    }
}

/* poll and abort are the two calls that another thread may make meanwhile. */
static void *watch(void *ctx) {
    bench_t *b = ctx;
    for (int i = 0; i < 300; i++)
        if (epx_plan_poll(b->p) != EPX_OK) return b;
    th_sleep_us(3000);
    epx_plan_abort(b->p);
    return epx_plan_poll(b->p) == EPX_ERR_ABORTED ? NULL : b;
}

static int body_watched(th_rank_t *r) {
    bench_t b;
    pthread_t watcher;
    void *bad = NULL;
    epx_status_t s = EPX_OK;
    if (setup(r, r->arg, 10 * SECOND, &b) != 0) return -1;
    TH_CHECK(r, r->rank != 0 || pthread_create(&watcher, NULL, watch, &b) == 0, "%s", "no thread");
    for (int i = 0; i < 1000000 && s == EPX_OK; i++) s = empty_exchange(r, b.p, NULL, NULL);
    if (r->rank == 0) pthread_join(watcher, &bad);
    TH_CHECK(r, s == EPX_ERR_ABORTED, "status %d: %s", (int)s, epx_last_error());
    TH_CHECK(r, bad == NULL, "%s", "poll in another thread told otherwise");
    teardown(&b);
    return 0;
}

static void another_thread_polls_and_aborts(void **state) {
    (void)state;
    assert_int_equal(th_launch(mode, 2, body_watched, NULL, 30, NULL), 0);
}

/* ---- timeout ---- */

static void wait_for_word(th_rank_t *r, int phase, void *ctx) {
    const fault_t *f = ctx;
    if (r->rank != 1 || phase != f->phase) return;
    while (epx_load_acquire_u64(&th_words(r)[0]) == 0) th_sleep_us(1000);
}

static int body_timeout(th_rank_t *r) {
    fault_t *f = r->arg;
    bench_t b;
    if (setup(r, f->backend, SECOND / 5, &b) != 0) return -1;
    uint64_t start = epx_now_ns();
    epx_status_t s = empty_exchange(r, b.p, wait_for_word, f);
    double took = (double)(epx_now_ns() - start) * 1e-9;
    epx_store_release_u64(&th_words(r)[0], 1);
    if (r->rank == 0) {
        const char *const words[] = {f->phase == 0 ? "dispatch" : "combine", "1", "epoch", "expected", "seen", NULL};
        TH_CHECK(r, s == EPX_ERR_TIMEOUT, "status %d: %s", (int)s, epx_last_error());
        TH_CHECK(r, has_all(epx_last_error(), words), "message lacks phase, peer, epoch, expected or seen: %s", epx_last_error());
        TH_CHECK(r, took > 0.15 && took < 2.0, "0.2 s took %.3f s", took);
        TH_CHECK(r, epx_plan_poll(b.p) < 0, "%s", "poll says all is well after a timeout");
    } else {
        TH_CHECK(r, s == EPX_ERR_ABORTED || s == EPX_ERR_TIMEOUT, "status %d: %s", (int)s, epx_last_error());
    }
    teardown(&b);
    return 0;
}

static void timeout_names_phase_and_peer(void **state) {
    (void)state;
    const char *backends[TH_MAX_COMPONENTS];
    int n = th_components("backend", backends);
    for (int i = 0; i < n; i++) {
        if (mode == TH_PROCESSES && th_needs_one_process(backends[i])) continue;
        for (int phase = 0; phase <= 2; phase += 2) {
            fault_t f = {backends[i], phase};
            assert_int_equal(th_launch(mode, 2, body_timeout, &f, 20, NULL), 0);
        }
    }
}

/* ---- a rank that leaves without a word ---- */

static int body_allgather_timeout(th_rank_t *r) {
    bench_t b;
    char mine = 1, all[2];
    if (setup(r, NULL, 10 * SECOND, &b) != 0) return -1;
    if (r->rank == 0) {
        const char *const words[] = {"1", "expected", "seen", NULL};
        TH_STATUS(r, epx_group_allgather(b.g, &mine, 1, all, SECOND / 5), EPX_ERR_TIMEOUT);
        TH_CHECK(r, has_all(epx_last_error(), words), "message: %s", epx_last_error());
        epx_plan_abort(b.p);
        epx_store_release_u64(&th_words(r)[0], 1);
    }
    while (epx_load_acquire_u64(&th_words(r)[0]) == 0) th_sleep_us(1000);
    teardown(&b);
    return 0;
}

static void allgather_times_out(void **state) {
    (void)state;
    assert_int_equal(th_launch(mode, 2, body_allgather_timeout, NULL, 20, NULL), 0);
}

/* ---- destroy ---- */

/* The first to destroy a plan waits for the others, who may still read its rows. */
static int body_lagging(th_rank_t *r) {
    bench_t b;
    if (setup(r, NULL, 10 * SECOND, &b) != 0) return -1;
    if (r->rank == 1) th_sleep_us(150000);
    uint64_t start = epx_now_ns();
    epx_plan_destroy(b.p);
    double took = (double)(epx_now_ns() - start) * 1e-9;
    TH_CHECK(r, r->rank == 1 || (took > 0.1 && took < 5.0), "destroy of rank %d returned after %.3f s", r->rank, took);
    th_case_t again = b.c;
    again.n_steps = 3;
    if (th_case_run(r, b.g, &again) != 0) return -1;
    epx_group_destroy(b.g);
    epx_world_destroy(b.w);
    return 0;
}

static void destroy_waits_for_a_lagging_peer(void **state) {
    (void)state;
    assert_int_equal(th_launch(mode, 2, body_lagging, NULL, 30, NULL), 0);
}

/* A rank that gives up destroys its plan while the others are still in calls of it. */
static int body_give_up(th_rank_t *r) {
    fault_t f = {NULL, 0};
    bench_t b;
    epx_status_t s = EPX_OK;
    for (int i = 0; i < 10; i++) {
        if (setup(r, f.backend, 10 * SECOND, &b) != 0) return -1;
        if (r->rank == 0) epx_plan_abort(b.p);
        for (int k = 0; k < 50 && r->rank != 0 && s == EPX_OK; k++) s = empty_exchange(r, b.p, NULL, NULL);
        TH_CHECK(r, r->rank == 0 || s == EPX_ERR_ABORTED, "status %d: %s", (int)s, epx_last_error());
        s = EPX_OK;
        epx_plan_destroy(b.p);
        TH_CHECK(r, th_barrier(r) == EPX_OK, "%s", "barrier");
        epx_group_destroy(b.g);
        epx_world_destroy(b.w);
    }
    return 0;
}

static void destroy_of_an_aborted_plan_is_safe(void **state) {
    (void)state;
    assert_int_equal(th_launch(mode, 3, body_give_up, NULL, 30, NULL), 0);
}

/* ---- SIGKILL ---- */

enum { VICTIM = 1 };

static void die_at_phase(th_rank_t *r, int phase, void *ctx) {
    const fault_t *f = ctx;
    if (r->rank != VICTIM || phase != f->phase) return;
    th_sleep_us(20000); /* let the others reach their waits */
    epx_store_release_u64(&th_words(r)[0], epx_now_ns());
    raise(SIGKILL);
}

static int body_kill(th_rank_t *r) {
    fault_t *f = r->arg;
    bench_t b;
    epx_status_t s = EPX_OK;
    if (setup(r, f->backend, 8 * SECOND, &b) != 0) return -1;
    for (int i = 0; i < 3 && s == EPX_OK; i++) s = empty_exchange(r, b.p, die_at_phase, f);
    double after = (double)(epx_now_ns() - epx_load_acquire_u64(&th_words(r)[0])) * 1e-9;
    TH_CHECK(r, s == EPX_ERR_PEER, "status %d: %s", (int)s, epx_last_error());
    TH_CHECK(r, strstr(epx_last_error(), "rank 1"), "the message does not name rank 1: %s", epx_last_error());
    TH_CHECK(r, after < 1.0, "the death was named after %.3f s", after);
    TH_CHECK(r, epx_group_dead_rank(b.g) == VICTIM, "dead rank %d", epx_group_dead_rank(b.g));
    uint64_t start = epx_now_ns();
    teardown(&b);
    TH_CHECK(r, epx_now_ns() - start < SECOND, "%s", "destroy waited for the dead");
    return 0;
}

static void killed_rank_is_named(void **state) {
    (void)state;
    const char *backends[TH_MAX_COMPONENTS];
    int n = th_components("backend", backends);
    for (int i = 0; i < n; i++) {
        if (th_needs_one_process(backends[i])) continue;
        for (int phase = 0; phase < 4; phase++) {
            fault_t f = {backends[i], phase};
            th_outcome_t o[3];
            assert_int_equal(th_launch(mode, 3, body_kill, &f, 20, o), 1);
            assert_int_equal(o[VICTIM], TH_KILLED);
        }
    }
}

static int body_kill_allgather(th_rank_t *r) {
    bench_t b;
    char mine = 1, all[3];
    if (setup(r, NULL, 8 * SECOND, &b) != 0) return -1;
    if (r->rank == VICTIM) die_at_phase(r, 0, &(fault_t){NULL, 0});
    TH_STATUS(r, epx_group_allgather(b.g, &mine, 1, all, 0), EPX_ERR_PEER);
    double after = (double)(epx_now_ns() - epx_load_acquire_u64(&th_words(r)[0])) * 1e-9;
    TH_CHECK(r, strstr(epx_last_error(), "rank 1"), "the message does not name rank 1: %s", epx_last_error());
    TH_CHECK(r, after < 1.0, "the death was named after %.3f s", after);
    teardown(&b);
    return 0;
}

static void killed_rank_ends_allgather(void **state) {
    (void)state;
    th_outcome_t o[3];
    assert_int_equal(th_launch(mode, 3, body_kill_allgather, NULL, 20, o), 1);
    assert_int_equal(o[VICTIM], TH_KILLED);
}

/* ---- nothing is left behind ---- */

static int n_entries(const char *path) {
    DIR *d = opendir(path);
    int n = 0;
    if (!d) return -1;
    while (readdir(d)) n++;
    closedir(d);
    return n;
}

static int n_named_segments(void) {
    DIR *d = opendir("/dev/shm");
    struct dirent *e;
    int n = 0;
    if (!d) return 0;
    while ((e = readdir(d)))
        if (strstr(e->d_name, "epx")) n++;
    closedir(d);
    return n;
}

static int body_cycle(th_rank_t *r) {
    bench_t b;
    int counts = r->mode == TH_PROCESSES || r->rank == 0; /* thread ranks share one table of descriptors */
    int before = counts ? n_entries("/proc/self/fd") : 0;
    TH_CHECK(r, th_barrier(r) == EPX_OK, "%s", "barrier");
    for (int i = 0; i < 10; i++) {
        if (setup(r, NULL, 10 * SECOND, &b) != 0) return -1;
        TH_CHECK(r, !counts || n_named_segments() == 0, "%d named segments in /dev/shm", n_named_segments());
        teardown(&b);
        TH_CHECK(r, th_barrier(r) == EPX_OK, "%s", "barrier");
        int now = counts ? n_entries("/proc/self/fd") : 0;
        TH_CHECK(r, now == before, "cycle %d: %d descriptors, %d before", i, now, before);
        TH_CHECK(r, th_barrier(r) == EPX_OK, "%s", "barrier");
    }
    return 0;
}

static void nothing_is_left_behind(void **state) {
    (void)state;
    int before = n_entries("/proc/self/fd");
    assert_int_equal(th_launch(mode, 2, body_cycle, NULL, 40, NULL), 0);
    assert_int_equal(n_entries("/proc/self/fd"), before);
    assert_int_equal(n_named_segments(), 0);
}

/* ---- too little memory ---- */

static int try_huge(th_rank_t *r, bench_t *b, int max_tokens, int hidden) {
    epx_plan_config_t pc;
    epx_plan_t *p = NULL;
    th_plan_config(&b->c, &pc);
    pc.max_tokens = max_tokens;
    pc.hidden = hidden;
    epx_status_t s = epx_plan_create(b->g, &pc, &p);
    TH_CHECK(r, s == EPX_ERR_NOMEM || s == EPX_ERR_CAPACITY, "T %d, H %d: status %d: %s", max_tokens, hidden, (int)s,
             epx_last_error());
    TH_CHECK(r, s != EPX_ERR_NOMEM || strstr(epx_last_error(), "bytes"), "message lacks the bytes: %s", epx_last_error());
    TH_CHECK(r, p == NULL, "%s", "a handle was written by a failing call");
    return 0;
}

static int body_huge(th_rank_t *r) {
    bench_t b;
    th_tally_t tally = {0};
    if (setup(r, NULL, 10 * SECOND, &b) != 0) return -1;
    if (try_huge(r, &b, 1 << 20, 1 << 20) != 0) return -1;
    if (try_huge(r, &b, 0x3FFFFFFF, 0x3FFFFFFF) != 0) return -1;
    if (th_step(r, b.p, &b.c, r->rank, TH_FULL, 9, &tally) != 0) return -1;
    teardown(&b);
    return 0;
}

static void absurd_capacity_is_an_error(void **state) {
    (void)state;
    assert_int_equal(th_launch(mode, 2, body_huge, NULL, 30, NULL), 0);
}

/* One rank alone cannot take its memory or descriptor: all ranks get an error, none hangs, none dies, and the group goes on. */
static int body_limited(th_rank_t *r) {
    const int *resource = r->arg;
    bench_t b;
    th_tally_t tally = {0};
    struct rlimit old, low;
    epx_plan_config_t pc;
    epx_plan_t *p = NULL;
    if (setup(r, NULL, 10 * SECOND, &b) != 0) return -1;
    th_plan_config(&b.c, &pc);
    pc.max_tokens = 4096;
    pc.hidden = 4096; /* 64 MiB a region */
    getrlimit(*resource, &old);
    low = old;
    low.rlim_cur = *resource == RLIMIT_AS ? 32u << 20 : 3; /* below what is in use already */
    if (r->rank == 1) setrlimit(*resource, &low);
    epx_status_t s = epx_plan_create(b.g, &pc, &p);
    if (r->rank == 1) setrlimit(*resource, &old);
    TH_CHECK(r, s < 0 && p == NULL, "a plan was made without memory: %d", (int)s);
    TH_CHECK(r, r->rank != 1 || s == EPX_ERR_NOMEM || s == EPX_ERR_OS, "status %d: %s", (int)s, epx_last_error());
    if (th_step(r, b.p, &b.c, r->rank, TH_FULL, 9, &tally) != 0) return -1;
    teardown(&b);
    return 0;
}

static void descriptor_limit_is_an_error(void **state) {
    (void)state;
    int resource = RLIMIT_NOFILE;
    assert_int_equal(th_launch(mode, 2, body_limited, &resource, 30, NULL), 0);
}

#if !TH_ASAN && !TH_TSAN /* they need the address space themselves */
static void address_space_limit_is_an_error(void **state) {
    (void)state;
    int resource = RLIMIT_AS;
    assert_int_equal(th_launch(mode, 2, body_limited, &resource, 30, NULL), 0);
}
#endif

int main(int argc, char **argv) {
    const struct CMUnitTest any[] = {
        cmocka_unit_test(abort_is_seen_by_peers),           cmocka_unit_test(another_thread_polls_and_aborts),
        cmocka_unit_test(timeout_names_phase_and_peer),     cmocka_unit_test(allgather_times_out),
        cmocka_unit_test(destroy_waits_for_a_lagging_peer), cmocka_unit_test(destroy_of_an_aborted_plan_is_safe),
        cmocka_unit_test(nothing_is_left_behind),           cmocka_unit_test(absurd_capacity_is_an_error),
    };
    const struct CMUnitTest processes_only[] = {
        cmocka_unit_test(killed_rank_is_named),
        cmocka_unit_test(killed_rank_ends_allgather),
        cmocka_unit_test(descriptor_limit_is_an_error),
#if !TH_ASAN && !TH_TSAN
        cmocka_unit_test(address_space_limit_is_an_error),
#endif
    };
    if (argc > 1 && strcmp(argv[1], "processes") == 0) mode = TH_PROCESSES;
    if (argc > 2) cmocka_set_test_filter(argv[2]);
    int n_failed = cmocka_run_group_tests(any, NULL, NULL);
    if (mode == TH_PROCESSES) n_failed += cmocka_run_group_tests(processes_only, NULL, NULL);
    return n_failed;
}
