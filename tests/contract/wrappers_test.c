/* The wrapping transports: "fault" plants what EPX_FAULT names, "trace" writes what the calls did. Usage: contract_wrappers */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/atomic.h"
#include "tests/harness/components.h"
#include "tests/harness/exchange.h"

enum { W = 3, AT = 3, N_STEPS = 6 };

typedef struct {
    const char *transport;
    epx_status_t wanted; /* of the ranks that live, at exchange AT; EPX_OK: nothing goes wrong */
    const char *word;    /* in their message */
} wrap_t;

typedef struct {
    epx_world_t *w;
    epx_group_t *g;
    epx_plan_t *p;
    th_case_t c;
} bench_t;

static int setup(th_rank_t *r, const char *transport, bench_t *b) {
    epx_world_config_t cfg;
    epx_plan_config_t pc;
    memset(b, 0, sizeof *b);
    b->c = (th_case_t){.backend = "onesided", .opts = TH_HALVES, .seed = 1, .timeout_ns = 500000000};
    b->c.shape = (th_shape_t){.n_ranks = W,
                              .max_tokens = 4,
                              .hidden = 32,
                              .top_k = 2,
                              .n_experts = 6,
                              .layout = EPX_LAYOUT_LISTS,
                              .mode = EPX_COMBINE_EXACT}; /* f32 */
    th_world_config(r, transport, &cfg);
    TH_OK(r, epx_world_create(&cfg, &b->w));
    TH_OK(r, epx_group_create(b->w, NULL, 0, -1, &b->g));
    th_plan_config(&b->c, &pc);
    TH_OK(r, epx_plan_create(b->g, &pc, &b->p));
    return 0;
}

static epx_status_t empty_exchange(epx_plan_t *p) {
    epx_io_t io;
    float x[4];
    epx_io_init(&io);
    io.x = x;
    epx_status_t s = epx_dispatch(p, &io);
    return s == EPX_OK ? epx_combine(p, &io) : s;
}

static int body(th_rank_t *r) {
    const wrap_t *f = r->arg;
    th_tally_t tally = {0};
    bench_t b;
    if (setup(r, f->transport, &b) != 0) return -1;
    for (int i = 1; i <= (f->wanted == EPX_OK ? N_STEPS : AT - 1); i++)
        if (th_step(r, b.p, &b.c, r->rank, TH_FULL, (uint64_t)i, &tally) != 0) return -1;
    epx_status_t s = EPX_OK;
    for (int i = 0; i < 3 && s == EPX_OK && f->wanted != EPX_OK; i++) s = empty_exchange(b.p);
    TH_CHECK(r, s == f->wanted || (s == EPX_ERR_ABORTED && f->wanted == EPX_ERR_TIMEOUT), "status %d: %s", (int)s,
             epx_last_error());
    TH_CHECK(r, s == EPX_OK || strstr(epx_last_error(), f->word), "message lacks %s: %s", f->word, epx_last_error());
    epx_plan_destroy(b.p);
    epx_group_destroy(b.g);
    epx_world_destroy(b.w);
    return 0;
}

static void a_dropped_flag_is_a_timeout(void **state) {
    (void)state;
    wrap_t f = {"fault", EPX_ERR_TIMEOUT, "rank 1"};
    for (int i = 0; i < 2; i++) {
        setenv("EPX_FAULT", i ? "drop=1:combine_send:3,seed=9" : "drop=1:dispatch_send:3", 1);
        assert_int_equal(th_launch(i ? TH_PROCESSES : TH_THREADS, W, body, &f, 20, NULL), 0);
    }
    unsetenv("EPX_FAULT");
}

/* A bit that turns over on the way is named by the reader, before a result is made of it. */
static int body_corrupt(th_rank_t *r) {
    const wrap_t *f = r->arg;
    th_tally_t tally = {0};
    bench_t b;
    epx_status_t s = EPX_OK;
    if (setup(r, f->transport, &b) != 0) return -1;
    for (int i = 1; i < AT; i++)
        if (th_step(r, b.p, &b.c, r->rank, TH_FULL, (uint64_t)i, &tally) != 0) return -1;
    float x[4 * 32] = {1, 2, 3}, weights[8] = {1, 1}, y[96 * 32] = {1, 2}, out[4 * 32];
    int32_t ids[8] = {0, 1, 2, 3, 4, 5, 0, 3};
    epx_io_t io;
    epx_io_init(&io);
    io.x = x, io.weights = weights, io.ids = ids, io.n_tokens = 4;
    s = epx_dispatch(b.p, &io);
    io.x = y, io.out_x = out;
    if (s == EPX_OK) s = epx_combine(b.p, &io);
    while (s == EPX_OK) s = epx_plan_poll(b.p); /* the others are told */
    TH_CHECK(r, s == EPX_ERR_ABORTED || (s == EPX_ERR_INTERNAL && r->rank != 1), "status %d: %s", (int)s, epx_last_error());
    TH_CHECK(r, s == EPX_ERR_ABORTED || (strstr(epx_last_error(), "checksum") && strstr(epx_last_error(), f->word)),
             "message: %s", epx_last_error());
    epx_fetch_add_u64(&th_words(r)[0], s == EPX_ERR_INTERNAL);
    TH_CHECK(r, th_barrier(r) == EPX_OK && epx_load_acquire_u64(&th_words(r)[0]) > 0, "%s", "nobody has named the damage");
    epx_plan_destroy(b.p);
    epx_group_destroy(b.g);
    epx_world_destroy(b.w);
    return 0;
}

static void corrupt_rows_are_named_in_debug_mode(void **state) {
    (void)state;
    wrap_t f = {"fault", EPX_ERR_INTERNAL, "debug: dispatch epoch 3"};
    setenv("EPX_DEBUG", "1", 1);
    setenv("EPX_FAULT", "corrupt=1:dispatch_send:3", 1);
    assert_int_equal(th_launch(TH_THREADS, W, body_corrupt, &f, 20, NULL), 0);
    setenv("EPX_FAULT", "corrupt=1:combine_send:3", 1);
    f.word = "debug: combine epoch 3";
    assert_int_equal(th_launch(TH_PROCESSES, W, body_corrupt, &f, 20, NULL), 0);
    unsetenv("EPX_FAULT");
    unsetenv("EPX_DEBUG");
}

/* A rank writes behind its input region. */
static int body_canary(th_rank_t *r) {
    bench_t b;
    void *x = NULL;
    if (setup(r, NULL, &b) != 0) return -1;
    TH_OK(r, epx_plan_input(b.p, 0, &x));
    if (r->rank == 1) ((float *)x)[4 * 32] = 3.0f;
    epx_status_t s = empty_exchange(b.p);
    while (s == EPX_OK) s = epx_plan_poll(b.p);
    TH_CHECK(r, s == (r->rank == 1 ? EPX_ERR_INTERNAL : EPX_ERR_ABORTED), "status %d: %s", (int)s, epx_last_error());
    TH_CHECK(r, r->rank != 1 || strstr(epx_last_error(), "canary behind region x of channel 0 of rank 1"), "message: %s",
             epx_last_error());
    epx_plan_destroy(b.p);
    epx_group_destroy(b.g);
    epx_world_destroy(b.w);
    return 0;
}

static void stray_writes_are_named_in_debug_mode(void **state) {
    (void)state;
    setenv("EPX_DEBUG", "1", 1);
    assert_int_equal(th_launch(TH_THREADS, W, body_canary, NULL, 20, NULL), 0);
    unsetenv("EPX_DEBUG");
}

static void a_rank_dies_at_a_named_call(void **state) {
    (void)state;
    static const char *const calls[] = {"dispatch_send", "dispatch_recv", "combine_send", "combine_recv"};
    wrap_t f = {"fault", EPX_ERR_PEER, "rank 1"};
    for (int i = 0; i < 4; i++) {
        char text[64];
        th_outcome_t o[W];
        snprintf(text, sizeof text, "kill=1:%s:%d,delay=200", calls[i], AT);
        setenv("EPX_FAULT", text, 1);
        assert_int_equal(th_launch(TH_PROCESSES, W, body, &f, 20, o), 1);
        assert_int_equal(o[1], TH_KILLED);
    }
    unsetenv("EPX_FAULT");
}

static void bad_plans_are_named(void **state) {
    (void)state;
    static const char *const bad[] = {"dely=3", "drop=1", "drop=1:dispatch:3", "kill=x:dispatch_send:1", "seed=1,,"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        epx_world_config_t cfg;
        epx_world_t *w;
        epx_group_t *g = NULL;
        setenv("EPX_FAULT", bad[i], 1);
        epx_world_config_init(&cfg);
        cfg.bootstrap = "self";
        cfg.transports = "fault";
        assert_int_equal(epx_world_create(&cfg, &w), EPX_OK);
        assert_int_equal(epx_group_create(w, NULL, 0, -1, &g), EPX_ERR_ARG);
        assert_non_null(strstr(epx_last_error(), "EPX_FAULT"));
        epx_world_destroy(w);
    }
    unsetenv("EPX_FAULT");
}

static int n_found(const char *text, const char *what) {
    int n = 0;
    for (const char *at = text; (at = strstr(at, what)) != NULL; at++) n++;
    return n;
}

static void check_trace(const char *path) {
    static char text[1 << 16];
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    text[n] = '\0';
    assert_true(n > 2 && text[0] == '[' && strcmp(text + n - 2, "]\n") == 0);
    static const char *const calls[] = {"dispatch_send", "dispatch_recv", "combine_send", "combine_recv"};
    for (int i = 0; i < 4; i++) {
        char name[64];
        snprintf(name, sizeof name, "\"name\":\"%s\"", calls[i]);
        assert_int_equal(n_found(text, name), N_STEPS);
    }
    assert_int_equal(n_found(text, "\"name\":\"copy\""), 4 * N_STEPS);
    assert_in_range(n_found(text, "\"name\":\"wait\""), 0, 2 * N_STEPS);
    assert_int_equal(n_found(text, "{\"name\""), n_found(text, "}}"));
}

static void a_trace_has_every_call(void **state) {
    (void)state;
    char dir[] = "/tmp/epx-trace-XXXXXX", path[128];
    wrap_t f = {"trace", EPX_OK, ""};
    assert_non_null(mkdtemp(dir));
    setenv("EPX_TRACE_DIR", dir, 1);
    assert_int_equal(th_launch(TH_THREADS, W, body, &f, 20, NULL), 0);
    int n_files = 0;
    for (int i = 0; i < W * W; i++) { /* rank, then a number that the process counts */
        snprintf(path, sizeof path, "%s/epx-trace-%d-%d-%d.json", dir, (int)getpid(), i / W, i % W);
        if (access(path, R_OK) != 0) continue;
        check_trace(path);
        unlink(path);
        n_files++;
    }
    unsetenv("EPX_TRACE_DIR");
    assert_int_equal(n_files, W);
    assert_int_equal(rmdir(dir), 0);
}

/* Sum of the durations of one kind of event, in microseconds. */
static double total_us(const char *text, const char *name) {
    double sum = 0;
    for (const char *at = text; (at = strstr(at, name)) != NULL; at++) sum += strtod(strstr(at, "\"dur\":") + 6, NULL);
    return sum;
}

enum { LATE_MS = 30 };

/* Rank 1 comes late to every exchange. */
static int body_late(th_rank_t *r) {
    bench_t b;
    if (setup(r, "trace", &b) != 0) return -1;
    for (int i = 0; i < 3; i++) {
        TH_CHECK(r, th_barrier(r) == EPX_OK, "%s", "barrier");
        if (r->rank == 1) th_sleep_us(LATE_MS * 1000);
        TH_OK(r, empty_exchange(b.p));
    }
    epx_plan_destroy(b.p);
    epx_group_destroy(b.g);
    epx_world_destroy(b.w);
    return 0;
}

static void waiting_for_a_late_rank_is_told_apart(void **state) {
    (void)state;
    static const char *const calls[] = {"\"dispatch_send\"", "\"dispatch_recv\"", "\"combine_send\"", "\"combine_recv\""};
    static char text[1 << 16];
    char dir[] = "/tmp/epx-trace-XXXXXX", path[128];
    int n_files = 0, n_waited = 0;
    assert_non_null(mkdtemp(dir));
    setenv("EPX_TRACE_DIR", dir, 1);
    assert_int_equal(th_launch(TH_THREADS, W, body_late, NULL, 20, NULL), 0);
    unsetenv("EPX_TRACE_DIR");
    for (int i = 0; i < W * 4 * W; i++) {
        snprintf(path, sizeof path, "%s/epx-trace-%d-%d-%d.json", dir, (int)getpid(), i % W, i / W);
        FILE *f = fopen(path, "r");
        if (f == NULL) continue;
        text[fread(text, 1, sizeof text - 1, f)] = '\0';
        fclose(f);
        unlink(path);
        double all = 0, wait = total_us(text, "\"wait\""), copy = total_us(text, "\"copy\"");
        for (int c = 0; c < 4; c++) all += total_us(text, calls[c]);
        assert_true(wait + copy > all - 1 && wait + copy < all + 1); /* rounded to nanoseconds */
        if (i % W != 1) n_waited += wait > 3 * (LATE_MS - 5) * 1000.0;
        n_files++;
    }
    assert_int_equal(n_files, W);
    assert_int_equal(n_waited, W - 1);
    assert_int_equal(rmdir(dir), 0);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_trace_has_every_call), /* first: the numbers of its files start at 0 */
        cmocka_unit_test(waiting_for_a_late_rank_is_told_apart),
        cmocka_unit_test(a_dropped_flag_is_a_timeout),
        cmocka_unit_test(corrupt_rows_are_named_in_debug_mode),
        cmocka_unit_test(stray_writes_are_named_in_debug_mode),
        cmocka_unit_test(a_rank_dies_at_a_named_call),
        cmocka_unit_test(bad_plans_are_named),
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
