/* The front with ranks that have no model: bootstrap, order of events, cancelling, every way to die, nothing left behind. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/philox.h"
#include "server/front/facts.h"
#include "server/front/live.h"
#include "server/front/wire.h"
#include "tests/server/front_util.h"

static front_t f;

static void open_or_fail(const char *model, int n_ranks) {
    epx_status_t s = front_open(&f, model, n_ranks);
    if (s < 0) fail_msg("create: %s", epx_error_message());
}

static void pause_ms(long ms) { nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL); }

static void check_tokens(uint64_t id, int32_t first, int n) {
    const front_result_t *q = front_result(&f, id);
    assert_int_equal(q->n_tokens, n);
    assert_int_equal(q->n_ends, 1);
    for (int i = 0; i < n; i++) assert_int_equal(q->tokens[i], first + i);
}

static void test_status_and_stats(void **state) {
    epx_cluster_status_t st;
    epx_rank_stats_t stats[3];
    (void)state;
    open_or_fail("fake", 3);
    epx_cluster_status(f.cluster, &st);
    assert_int_equal(st.n_ranks, 3);
    assert_int_equal(st.failed, 0);
    assert_string_equal(st.info.backend, "fake");
    assert_int_equal(epx_cluster_stats(f.cluster, stats, 3), EPX_OK);
    for (int r = 0; r < 3; r++) {
        assert_int_equal(st.mapped_bytes[r], 1000 + r);
        assert_int_equal(stats[r].rows_sent[1], 10 * r + 1);
        assert_true(st.pids[r] > 0);
    }
    assert_int_equal(epx_cluster_stats(f.cluster, stats, 2), EPX_ERR_ARG);
    front_close(&f);
    for (int r = 0; r < 3; r++) assert_true(front_gone_within(st.pids[r], 0));
    assert_true(front_no_children());
}

/* Reports come unasked; a request whose end was seen is in them. */
static void test_reports(void **state) {
    epx_rank_stats_t stats[2];
    uint64_t rows[6] = {0};
    int32_t prompt[3] = {5, 5, 5};
    (void)state;
    open_or_fail("fake", 2);
    for (int i = 0; i < 4; i++) {
        uint64_t sum = 0;
        front_submit(&f, prompt, 3, 10, i % 2);
        assert_true(front_wait_ends(&f, i + 1));
        assert_int_equal(epx_cluster_reports(f.cluster, stats, NULL, 2), EPX_OK);
        for (int r = 0; r < 2; r++) sum += stats[r].n_decode_tokens;
        assert_int_equal(sum, 10 * (i + 1));
        assert_int_equal(stats[i % 2].n_decode_tokens, 10 * (i / 2 + 1));
    }
    assert_int_equal(epx_cluster_reports(f.cluster, stats, rows, 2), EPX_OK);
    for (int i = 0; i < 6; i++) assert_int_equal(rows[i], i == 4 ? 40 : 0);
    assert_int_equal(epx_cluster_reports(f.cluster, stats, NULL, 3), EPX_ERR_ARG);
    front_close(&f);
}

static void test_many_requests(void **state) {
    enum { N = 120 };
    uint64_t ids[N];
    epx_rank_stats_t stats[2];
    (void)state;
    open_or_fail("fake", 2);
    for (int i = 0; i < N; i++) {
        int32_t prompt[3] = {100 * i, 100 * i, 100 * i};
        ids[i] = front_submit(&f, prompt, 1 + i % 3, 1 + i % 17, -1);
        assert_true(ids[i] > 0);
    }
    assert_true(front_wait_ends(&f, N));
    for (int i = 0; i < N; i++) {
        check_tokens(ids[i], 100 * i, 1 + i % 17);
        assert_int_equal(front_result(&f, ids[i])->finish, EPX_FINISH_LENGTH);
    }
    assert_int_equal(epx_cluster_stats(f.cluster, stats, 2), EPX_OK);
    assert_true(stats[0].n_decode_tokens > 0 && stats[1].n_decode_tokens > 0);
    front_close(&f);
}

/* Idle ranks are not stepped by anything but a wake: the fake rank reports it as an error, which would end the cluster. */
static void test_idle_ranks(void **state) {
    epx_rank_stats_t stats[2];
    int32_t prompt = 7;
    (void)state;
    open_or_fail("fake", 2);
    for (int i = 0; i < 20; i++) {
        uint64_t id;
        epx_cluster_cancel(f.cluster, 999);
        assert_int_equal(epx_cluster_stats(f.cluster, stats, 2), EPX_OK);
        id = front_submit(&f, &prompt, 1, 2, i % 2);
        assert_true(front_wait_ends(&f, i + 1));
        check_tokens(id, 7, 2);
        epx_cluster_cancel(f.cluster, id);
        if (i % 5 == 0) pause_ms(10);
    }
    assert_int_equal(f.n_failures, 0);
    front_close(&f);
    assert_int_equal(f.n_failures, 0);
}

static void test_cancel_and_refusal(void **state) {
    int32_t prompt[2] = {1, 1}, damaged[2] = {1, 2};
    uint64_t a, b, c;
    (void)state;
    open_or_fail("fake:slow", 2);
    a = front_submit(&f, prompt, 2, 500, 0);
    b = front_submit(&f, prompt, 2, 3, 0);
    c = front_submit(&f, damaged, 2, 3, 1);
    assert_true(front_wait_tokens(&f, a, 2));
    epx_cluster_cancel(f.cluster, a);
    assert_true(front_wait_ends(&f, 3));
    assert_int_equal(front_result(&f, a)->finish, EPX_FINISH_CANCELLED);
    assert_true(front_result(&f, a)->n_tokens < 500);
    check_tokens(b, 1, 3);
    assert_int_equal(front_result(&f, c)->finish, EPX_FINISH_ERROR);
    assert_non_null(strstr(front_result(&f, c)->error, "prompt[1]"));
    assert_int_equal(f.n_failures, 0);
    front_close(&f);
}

static void test_bad_submit(void **state) {
    int32_t prompt = 1;
    epx_request_t req = {.prompt = &prompt, .n_prompt = 0, .max_new_tokens = 1};
    uint64_t id;
    (void)state;
    open_or_fail("fake", 1);
    assert_int_equal(epx_cluster_submit(f.cluster, &req, -1, &id), EPX_ERR_ARG);
    req.n_prompt = 1;
    assert_int_equal(epx_cluster_submit(f.cluster, &req, 1, &id), EPX_ERR_ARG);
    assert_int_equal(epx_cluster_submit(f.cluster, &req, -2, &id), EPX_ERR_ARG);
    front_close(&f);
}

/* A rank that does not read must not block callers; large frames come through whole. */
static void test_stopped_rank(void **state) {
    enum { N = 12, LONG = 50000 };
    int32_t *prompt = malloc(sizeof *prompt * LONG);
    epx_cluster_status_t st;
    epx_rank_stats_t stats[2];
    uint64_t t0;
    (void)state;
    assert_non_null(prompt);
    for (int i = 0; i < LONG; i++) prompt[i] = 3;
    open_or_fail("fake", 2);
    epx_cluster_status(f.cluster, &st);
    kill(st.pids[0], SIGSTOP);
    t0 = epx_now_ns();
    for (int i = 0; i < N; i++) assert_true(front_submit(&f, prompt, LONG, 2, 0) > 0);
    assert_true(epx_now_ns() - t0 < 1000000000u);
    assert_int_equal(epx_cluster_stats(f.cluster, stats, 2), EPX_ERR_TIMEOUT);
    assert_non_null(strstr(epx_error_message(), "rank 0"));
    kill(st.pids[0], SIGCONT);
    assert_true(front_wait_ends(&f, N));
    for (uint64_t id = 1; id <= N; id++) check_tokens(id, 3, 2);
    front_close(&f);
    free(prompt);
}

/* Nobody else would ever notice: the others wait in the bootstrap without a deadline, one rank has no peer. */
static void test_rank_stays_stopped(void **state) {
    epx_cluster_status_t st;
    int32_t prompt = 1;
    (void)state;
    assert_int_equal(front_open_timeout(&f, "fake:halt", 3, 1), EPX_ERR_TIMEOUT);
    assert_non_null(strstr(epx_error_message(), "rank 1 (process "));
    assert_non_null(strstr(epx_error_message(), "stopped by a signal (SIGSTOP)"));
    assert_true(front_no_children());
    assert_int_equal(front_open_timeout(&f, "fake:slow", 1, 1), EPX_OK);
    epx_cluster_status(f.cluster, &st);
    pause_ms(50); /* the reader waits without a deadline */
    kill(st.pids[0], SIGSTOP);
    assert_true(front_submit(&f, &prompt, 1, 500, 0) > 0);
    assert_true(front_wait_failure(&f));
    assert_non_null(strstr(f.failure, "rank 0 (process "));
    assert_int_equal(f.n_ended, 1);
    front_close(&f);
    assert_true(front_no_children());
}

/* victims: a bit per rank. */
static void check_death(const char *model, int n_ranks, int victim, int sig, const char *sig_name) {
    epx_cluster_status_t st;
    int32_t prompt = 1;
    uint64_t ids[4], id, killed_ns;
    char who[64];
    open_or_fail(model, n_ranks);
    epx_cluster_status(f.cluster, &st);
    for (int i = 0; i < 4; i++) ids[i] = front_submit(&f, &prompt, 1, 500, i % n_ranks);
    for (int i = 0; i < 4; i++) assert_true(front_wait_tokens(&f, ids[i], 2));
    killed_ns = epx_now_ns();
    kill(st.pids[victim], sig);
    assert_true(front_wait_failure(&f));
    assert_true(f.failure_ns - killed_ns < 1000000000u);
    assert_int_equal(f.n_ended, 4);
    snprintf(who, sizeof who, "rank %d (process %d)", victim, st.pids[victim]);
    for (int i = 0; i < 4; i++) {
        const front_result_t *q = front_result(&f, ids[i]);
        assert_int_equal(q->finish, EPX_FINISH_ERROR);
        assert_int_equal(q->n_ends, 1);
        assert_non_null(strstr(q->error, who));
        assert_non_null(strstr(q->error, sig_name));
    }
    assert_non_null(strstr(f.failure, who));
    assert_int_equal(
        epx_cluster_submit(f.cluster, &(epx_request_t){.prompt = &prompt, .n_prompt = 1, .max_new_tokens = 1}, -1, &id),
        EPX_ERR_PEER);
    assert_non_null(strstr(epx_error_message(), who));
    epx_cluster_status(f.cluster, &st);
    assert_int_equal(st.failed, 1);
    assert_non_null(strstr(st.failure, who));
    for (int r = 0; r < n_ranks; r++) assert_true(front_gone_within(st.pids[r], 2000));
    front_close(&f);
    assert_int_equal(f.n_failures, 1);
    assert_true(front_no_children());
}

static void test_killed_rank(void **state) {
    (void)state;
    check_death("fake:slow", 2, 1, SIGKILL, "SIGKILL");
    check_death("fake:slow", 3, 0, SIGKILL, "SIGKILL");
    check_death("fake:slow", 1, 0, SIGABRT, "SIGABRT");
}

static void test_lost_peer(void **state) {
    int32_t prompt = 1;
    uint64_t id;
    (void)state;
    open_or_fail("fake:lost", 2);
    id = front_submit(&f, &prompt, 1, 500, 0);
    assert_true(front_wait_failure(&f));
    assert_non_null(strstr(f.failure, "rank 0: rank 1 does not answer"));
    assert_int_equal(front_result(&f, id)->finish, EPX_FINISH_ERROR);
    front_close(&f);
    assert_int_equal(f.n_failures, 1);
    assert_true(front_no_children());
}

static void test_start_failures(void **state) {
    static const struct {
        const char *model, *text;
        epx_status_t status;
    } cases[] = {{"fake:refuse", "rank 1: fake/model.safetensors: refused as asked", EPX_ERR_FORMAT},
                 {"fake:crash", "ended with exit code 42", EPX_ERR_PEER},
                 {"fake:uneven", "bootstrap: rank 1 gave 15 bytes, rank 0 gave 16", EPX_ERR_MISMATCH}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_int_equal(front_open(&f, cases[i].model, 3), cases[i].status);
        assert_non_null(strstr(epx_error_message(), cases[i].text));
        assert_int_equal(f.n_failures, 0);
        assert_true(front_no_children());
    }
}

static void test_no_program(void **state) {
    epx_cluster_config_t cfg = {.size = sizeof cfg, .program = "/nonexistent/epx", .on_event = (epx_event_fn)abort};
    epx_cluster_t *c;
    (void)state;
    epx_rank_config_init(&cfg.rank);
    assert_int_equal(epx_cluster_create(&cfg, &c), EPX_ERR_OS);
    assert_non_null(strstr(epx_error_message(), "/nonexistent/epx"));
    cfg.rank.tp = 65;
    assert_int_equal(epx_cluster_create(&cfg, &c), EPX_ERR_ARG);
}

static void test_stop_is_bounded(void **state) {
    epx_cluster_status_t st;
    int32_t prompt = 1;
    uint64_t id, t0;
    (void)state;
    open_or_fail("fake:stuck", 2);
    epx_cluster_status(f.cluster, &st);
    id = front_submit(&f, &prompt, 1, 5, 0);
    pause_ms(50);
    t0 = epx_now_ns();
    front_close(&f);
    assert_true(epx_now_ns() - t0 < 6500000000u);
    assert_int_equal(front_result(&f, id)->finish, EPX_FINISH_ERROR);
    assert_int_equal(f.n_failures, 0);
    for (int r = 0; r < 2; r++) assert_true(front_gone_within(st.pids[r], 0));
    assert_true(front_no_children());
}

/* A step that never ends is said and ended by the rank's own watchdog. */
static void test_watchdog(void **state) {
    epx_cluster_config_t cfg = {.size = sizeof cfg};
    int32_t prompt = 1;
    uint64_t id;
    (void)state;
    epx_rank_config_init(&cfg.rank);
    cfg.rank.watchdog_s = 1;
    assert_int_equal(front_open_with(&f, "fake:stuck", 2, &cfg), EPX_OK);
    id = front_submit(&f, &prompt, 1, 5, 1);
    assert_true(front_wait_failure(&f));
    assert_non_null(strstr(f.failure, "rank 1"));
    assert_non_null(strstr(f.failure, "made no progress"));
    assert_int_equal(front_result(&f, id)->finish, EPX_FINISH_ERROR);
    front_close(&f);
}

static int live_on(int rank) {
    epx_rank_stats_t stats[3];
    assert_int_equal(epx_cluster_stats(f.cluster, stats, 3), EPX_OK);
    return stats[rank].n_running;
}

/* Where requests go: in turn, to the fewest requests, to the fewest tokens. The first rank is loaded by hand. */
static void test_balance(void **state) {
    static const struct {
        epx_balance_t balance;
        int expect[3];
    } cases[] = {{EPX_BALANCE_ROUND_ROBIN, {4, 2, 2}}, {EPX_BALANCE_REQUESTS, {3, 3, 2}}, {EPX_BALANCE_TOKENS, {4, 2, 2}}};
    (void)state;
    for (int k = 0; k < 3; k++) {
        epx_cluster_config_t cfg = {.size = sizeof cfg, .balance = cases[k].balance};
        int32_t prompt[1] = {5}, longer[100];
        for (int i = 0; i < 100; i++) longer[i] = 5;
        epx_rank_config_init(&cfg.rank);
        assert_int_equal(front_open_with(&f, "fake:slow", 3, &cfg), EPX_OK);
        for (int i = 0; i < 2; i++) front_submit(&f, prompt, 1, 500, 0);
        if (cases[k].balance == EPX_BALANCE_TOKENS) /* 2 requests of 1 token weigh less than one of 100 */
            for (int r = 1; r < 3; r++) front_submit(&f, longer, 100, 500, r);
        for (int i = 0; i < (cases[k].balance == EPX_BALANCE_TOKENS ? 2 : 6); i++) front_submit(&f, prompt, 1, 500, -1);
        if (cases[k].balance == EPX_BALANCE_TOKENS)
            for (int r = 1; r < 3; r++) front_submit(&f, prompt, 1, 500, r);
        pause_ms(100);
        for (int r = 0; r < 3; r++) assert_int_equal(live_on(r), cases[k].expect[r]);
        front_close(&f);
    }
}

/* Replicas: each its own bootstrap and running number; DP ranks are counted over all. */
static void test_replicas(void **state) {
    epx_cluster_config_t cfg = {.size = sizeof cfg, .n_replicas = 3};
    epx_cluster_status_t st;
    epx_rank_stats_t stats[6];
    int32_t prompt[2] = {4, 4};
    uint64_t ids[12];
    (void)state;
    epx_rank_config_init(&cfg.rank);
    assert_int_equal(front_open_with(&f, "fake", 2, &cfg), EPX_OK);
    epx_cluster_status(f.cluster, &st);
    assert_int_equal(st.n_ranks, 6);
    assert_int_equal(st.n_replicas, 3);
    assert_int_equal(st.n_dp, 6);
    for (int i = 0; i < 12; i++) {
        ids[i] = front_submit(&f, prompt, 2, 5, i % 6);
        if (i % 5 == 0) pause_ms(20); /* some replicas are idle, others not */
    }
    assert_true(front_wait_ends(&f, 12));
    for (int i = 0; i < 12; i++) check_tokens(ids[i], 4, 5);
    assert_int_equal(epx_cluster_stats(f.cluster, stats, 6), EPX_OK);
    for (int r = 0; r < 6; r++) {
        assert_int_equal(stats[r].n_decode_tokens, 10);
        assert_int_equal(stats[r].rows_sent[1], 10 * (r % 2) + 1); /* the rank's number is that within its replica */
    }
    for (int i = 0; i < 6; i++) front_submit(&f, prompt, 2, 5, -1); /* spread over all of them */
    assert_true(front_wait_ends(&f, 18));
    assert_int_equal(epx_cluster_stats(f.cluster, stats, 6), EPX_OK);
    for (int r = 0; r < 6; r++) assert_int_equal(stats[r].n_decode_tokens, 15);
    assert_int_equal(epx_cluster_submit(f.cluster, &(epx_request_t){.prompt = prompt, .n_prompt = 1}, 6, ids), EPX_ERR_ARG);
    front_close(&f);
    assert_true(front_no_children());
}

/* The end of a rank is the end of its replica; requests of the others go on, new ones are refused by the dead rank's name. */
static void test_replica_lost(void **state) {
    epx_cluster_config_t cfg = {.size = sizeof cfg, .n_replicas = 3};
    epx_cluster_status_t st;
    int32_t prompt = 1;
    uint64_t ids[6], id;
    char who[80];
    (void)state;
    epx_rank_config_init(&cfg.rank);
    assert_int_equal(front_open_with(&f, "fake:slow", 2, &cfg), EPX_OK);
    epx_cluster_status(f.cluster, &st);
    for (int i = 0; i < 6; i++) ids[i] = front_submit(&f, &prompt, 1, i < 4 ? 40 : 500, i);
    for (int i = 0; i < 6; i++) assert_true(front_wait_tokens(&f, ids[i], 2));
    kill(st.pids[3], SIGKILL);
    assert_true(front_wait_failure(&f));
    snprintf(who, sizeof who, "replica 1 rank 1 (process %d) was killed by signal 9", st.pids[3]);
    assert_non_null(strstr(f.failure, who));
    for (int i = 2; i < 4; i++) assert_non_null(strstr(front_result(&f, ids[i])->error, who));
    assert_int_equal(
        epx_cluster_submit(f.cluster, &(epx_request_t){.prompt = &prompt, .n_prompt = 1, .max_new_tokens = 1}, 0, &id),
        EPX_ERR_PEER);
    assert_non_null(strstr(epx_error_message(), who));
    assert_true(front_wait_ends(&f, 4)); /* the first replica's come to their own end */
    for (int i = 0; i < 2; i++) check_tokens(ids[i], 1, 40);
    for (int r = 2; r < 4; r++) assert_true(front_gone_within(st.pids[r], 2000));
    kill(st.pids[4], SIGKILL); /* another one dies: its requests are told of its own death, the first reason stays */
    assert_true(front_wait_ends(&f, 6));
    for (int i = 4; i < 6; i++) assert_non_null(strstr(front_result(&f, ids[i])->error, "replica 2 rank 0 (process "));
    epx_cluster_status(f.cluster, &st);
    assert_non_null(strstr(st.failure, who));
    front_close(&f);
    assert_int_equal(f.n_failures, 1);
    assert_true(front_no_children());
}

static void test_replica_start_fails(void **state) {
    epx_cluster_config_t cfg = {.size = sizeof cfg, .n_replicas = 2};
    (void)state;
    epx_rank_config_init(&cfg.rank);
    assert_int_equal(front_open_with(&f, "fake:refuse", 2, &cfg), EPX_ERR_FORMAT);
    assert_non_null(strstr(epx_error_message(), " rank 1: fake/model.safetensors: refused as asked"));
    assert_true(front_no_children());
    cfg.n_replicas = 33;
    assert_int_equal(front_open_with(&f, "fake", 2, &cfg), EPX_ERR_ARG);
    assert_non_null(strstr(epx_error_message(), "n_replicas = 33; with tp = 2 0 to 32 are possible"));
}

static void check_facts(const char *a, const char *b, const char *expect) {
    epx_str_t out = {0};
    assert_int_equal(epx_facts_compare(a, b, "node 1 (b)", &out), EPX_OK);
    assert_string_equal(epx_str_z(&out), expect);
    epx_str_fini(&out);
}

static void test_facts(void **state) {
    (void)state;
    check_facts("", "", "");
    check_facts("--tp\t2\nx\t\n", "x\t\n--tp\t2\n", "");
    check_facts("--tp\t2\n--dp\t1\n", "--tp\t4\n--dp\t1\n", "--tp is 2 on node 0 and 4 on node 1 (b)");
    check_facts(
        "a\t1\nb\t2\n", "a\t10\nc\t3\n",
        "a is 1 on node 0 and 10 on node 1 (b); b is 2 on node 0 and absent on node 1 (b); c is absent on node 0 and 3 on node 1 "
        "(b)");
    check_facts("no tab", "", "no tab is  on node 0 and absent on node 1 (b)");
}

static void test_hello(void **state) {
    epx_wire_hello_t hello = {"host", "/a b", "x\t1\n"}, back;
    epx_str_t s = {0};
    (void)state;
    assert_int_equal(epx_wire_put_hello(&s, &hello), EPX_OK);
    assert_int_equal(epx_wire_get_hello(s.data, s.n_bytes, &back), EPX_OK);
    assert_string_equal(back.host, "host");
    assert_string_equal(back.model_path, "/a b");
    assert_string_equal(back.facts, "x\t1\n");
    for (size_t n = 0; n < s.n_bytes; n++) assert_true(epx_wire_get_hello(s.data, n, &back) < 0);
    s.data[4]++; /* another size of the configuration: another build */
    assert_int_equal(epx_wire_get_hello(s.data, s.n_bytes, &back), EPX_ERR_MISMATCH);
    epx_str_fini(&s);
}

static void test_queue_limit(void **state) {
    epx_cluster_config_t cfg = {.size = sizeof cfg, .limit_queue = 1, .max_queued = 2};
    epx_request_t req = {.n_prompt = 1, .max_new_tokens = 500};
    int32_t prompt = 5;
    uint64_t id;
    (void)state;
    epx_rank_config_init(&cfg.rank);
    assert_int_equal(front_open_with(&f, "fake:slow", 1, &cfg), EPX_OK);
    req.prompt = &prompt; /* the played rank runs 1 request by its own word */
    for (int i = 0; i < 3; i++) assert_int_equal(epx_cluster_submit(f.cluster, &req, -1, &id), EPX_OK);
    assert_int_equal(epx_cluster_submit(f.cluster, &req, -1, &id), EPX_ERR_CAPACITY);
    assert_non_null(strstr(epx_error_message(), "rank 0 has 3 requests; 1 may run and 2 wait"));
    epx_cluster_cancel(f.cluster, 1);
    assert_true(front_wait_ends(&f, 1));
    assert_int_equal(epx_cluster_submit(f.cluster, &req, -1, &id), EPX_OK);
    front_close(&f);
}

static void test_stop_cancels(void **state) {
    int32_t prompt = 1;
    uint64_t id, t0;
    (void)state;
    open_or_fail("fake:slow", 2);
    id = front_submit(&f, &prompt, 1, 500, 1);
    assert_true(front_wait_tokens(&f, id, 1));
    t0 = epx_now_ns();
    front_close(&f);
    assert_true(epx_now_ns() - t0 < 1000000000u);
    assert_int_equal(front_result(&f, id)->finish, EPX_FINISH_CANCELLED);
}

static void test_killed_front(void **state) {
    int pids[2], shm = front_shm_entries(), status;
    int front = front_spawn_sacrifice("fake:slow", pids);
    (void)state;
    assert_true(front > 0 && pids[0] > 0 && pids[1] > 0);
    kill(front, SIGKILL);
    assert_int_equal(waitpid(front, &status, 0), front);
    for (int r = 0; r < 2; r++) assert_true(front_gone_within(pids[r], 2000) && front_reaped(pids[r]));
    assert_true(front_no_children());
    assert_int_equal(front_shm_entries(), shm);
}

static void test_wire(void **state) {
    epx_rank_config_t cfg, back;
    epx_str_t s = {0};
    epx_event_t ev = {.id = 9, .token = 4, .error = "why"}, ev2;
    (void)state;
    epx_rank_config_init(&cfg);
    cfg.model_path = "a/b";
    cfg.isa = NULL;
    cfg.moe_a2a_backend = "";
    assert_int_equal(epx_wire_put_config(&s, &cfg, 5), EPX_OK);
    assert_int_equal(epx_wire_get_config(s.data, s.n_bytes, &back), EPX_OK);
    assert_int_equal(back.rank, 5);
    assert_string_equal(back.model_path, "a/b");
    assert_string_equal(back.moe_a2a_backend, "");
    assert_null(back.isa);
    for (size_t n = 0; n < s.n_bytes; n += 8) assert_int_equal(epx_wire_get_config(s.data, n, &back), EPX_ERR_FORMAT);
    s.data[0] ^= 1;
    assert_int_equal(epx_wire_get_config(s.data, s.n_bytes, &back), EPX_ERR_MISMATCH);
    epx_str_clear(&s);
    assert_int_equal(epx_wire_put_event(&s, &ev), EPX_OK);
    epx_wire_reader_t r = {s.data, s.n_bytes, 0};
    assert_int_equal(epx_wire_get_event(&r, &ev2), EPX_OK);
    assert_string_equal(ev2.error, "why");
    assert_int_equal(epx_wire_get_event(&r, &ev2), EPX_AGAIN);
    r = (epx_wire_reader_t){s.data, s.n_bytes - 8, 0};
    assert_int_equal(epx_wire_get_event(&r, &ev2), EPX_ERR_FORMAT);
    epx_str_fini(&s);
}

/* Against a plain array: adds, finds and removals in a fixed pseudo-random order. */
static void test_live_table(void **state) {
    enum { IDS = 300, ROUNDS = 20000 };
    epx_live_table_t t = {0};
    int32_t rank_of[IDS + 1] = {0}; /* 0: absent */
    uint64_t seed = 20261130, n = 0;
    (void)state;
    print_message("seed %lu\n", (unsigned long)seed);
    for (uint64_t i = 0; i < ROUNDS; i++) {
        uint64_t id = 1 + epx_philox_u32(seed, i) % IDS;
        const epx_live_t *at = epx_live_find(&t, id);
        assert_int_equal(at ? at->rank : 0, rank_of[id]);
        if (at) {
            epx_live_remove(&t, id);
            rank_of[id] = 0;
            n--;
        } else {
            rank_of[id] = 1 + (int32_t)(i % 1000);
            assert_int_equal(epx_live_add(&t, &(epx_live_t){.id = id, .rank = rank_of[id]}), EPX_OK);
            n++;
        }
        assert_int_equal(t.n, n);
    }
    epx_live_remove(&t, IDS + 5);
    assert_int_equal(t.n, n);
    epx_live_fini(&t);
    assert_null(epx_live_find(&t, 1));
}

int main(int argc, char **argv) {
    static const struct CMUnitTest tests[] = {cmocka_unit_test(test_wire),
                                              cmocka_unit_test(test_live_table),
                                              cmocka_unit_test(test_status_and_stats),
                                              cmocka_unit_test(test_many_requests),
                                              cmocka_unit_test(test_idle_ranks),
                                              cmocka_unit_test(test_cancel_and_refusal),
                                              cmocka_unit_test(test_bad_submit),
                                              cmocka_unit_test(test_stopped_rank),
                                              cmocka_unit_test(test_rank_stays_stopped),
                                              cmocka_unit_test(test_killed_rank),
                                              cmocka_unit_test(test_lost_peer),
                                              cmocka_unit_test(test_start_failures),
                                              cmocka_unit_test(test_no_program),
                                              cmocka_unit_test(test_stop_is_bounded),
                                              cmocka_unit_test(test_watchdog),
                                              cmocka_unit_test(test_balance),
                                              cmocka_unit_test(test_queue_limit),
                                              cmocka_unit_test(test_replicas),
                                              cmocka_unit_test(test_replica_lost),
                                              cmocka_unit_test(test_replica_start_fails),
                                              cmocka_unit_test(test_facts),
                                              cmocka_unit_test(test_hello),
                                              cmocka_unit_test(test_stop_cancels),
                                              cmocka_unit_test(test_killed_front),
                                              cmocka_unit_test(test_reports)};
    int special = front_special_main(argc, argv);
    if (special >= 0) return special;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
