/* The front with real ranks: answers equal the stored reference with one and two ranks, also with many requests at once; deaths
 * in mid-generation; nothing left behind. Reference: greedy tokens of Hugging Face transformers in reference.json. */
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "base/clock.h"
#include "tests/server/front_util.h"

#define TINY EPX_SOURCE_DIR "/models/tinymoe-math"
#define REFERENCE EPX_REFERENCE_DIR "/qwen3_moe"

enum { MAX_PROMPTS = 8, MAX_PROMPT = 256, N_GREEDY = 24 };

typedef struct {
    int n;
    int32_t tokens[MAX_PROMPT];
    int32_t greedy[N_GREEDY];
} case_t;

extern char **environ;
static front_t f;
static case_t cases[MAX_PROMPTS];
static int n_cases;

static int read_ids(const json_t *list, int32_t *out, int max) {
    int n = (int)json_array_size(list);
    assert_true(n > 0 && n <= max);
    for (int i = 0; i < n; i++) out[i] = (int32_t)json_integer_value(json_array_get(list, (size_t)i));
    return n;
}

static int read_reference(void **state) {
    json_t *root = json_load_file(REFERENCE "/reference.json", 0, NULL);
    const json_t *prompts = json_object_get(root, "prompts"), *greedy = json_object_get(root, "greedy");
    (void)state;
    n_cases = (int)json_array_size(prompts);
    assert_true(n_cases > 0 && n_cases <= MAX_PROMPTS);
    for (int i = 0; i < n_cases; i++) {
        cases[i].n = read_ids(json_array_get(prompts, (size_t)i), cases[i].tokens, MAX_PROMPT);
        assert_int_equal(read_ids(json_array_get(greedy, (size_t)i), cases[i].greedy, N_GREEDY), N_GREEDY);
    }
    json_decref(root);
    return 0;
}

static void open_or_fail(const char *model, int n_ranks) {
    if (front_open(&f, model, n_ranks) < 0) fail_msg("create: %s", epx_error_message());
}

static void check_case(uint64_t id, const case_t *c) {
    const front_result_t *q = front_result(&f, id);
    assert_string_equal(q->error, "");
    assert_int_equal(q->finish, EPX_FINISH_LENGTH);
    assert_int_equal(q->n_tokens, N_GREEDY);
    assert_memory_equal(q->tokens, c->greedy, sizeof c->greedy);
}

static void check_reference(int n_ranks) {
    uint64_t ids[MAX_PROMPTS];
    int shm = front_shm_entries();
    open_or_fail(REFERENCE, n_ranks);
    assert_int_equal(front_shm_entries(), shm);
    for (int i = 0; i < n_cases; i++) {
        ids[i] = front_submit(&f, cases[i].tokens, cases[i].n, N_GREEDY, i % n_ranks);
        assert_true(front_wait_ends(&f, i + 1));
        check_case(ids[i], &cases[i]);
    }
    front_close(&f);
    assert_true(front_no_children());
    assert_int_equal(front_shm_entries(), shm);
}

static void test_reference(void **state) {
    (void)state;
    check_reference(1);
    check_reference(2);
}

/* Every row that was computed is counted at top_k experts in every layer; what the peers exchanged adds up. */
static void check_reports(int n_ranks) {
    epx_cluster_status_t st;
    epx_rank_stats_t stats[2], asked[2];
    epx_cluster_status(f.cluster, &st);
    size_t n_experts = (size_t)st.info.n_experts, n = (size_t)st.info.n_layers * n_experts;
    uint64_t *rows = calloc(n, sizeof *rows), n_rows = 0, pairs = 0;
    assert_int_equal(epx_cluster_stats(f.cluster, asked, n_ranks), EPX_OK); /* the ranks have gone idle */
    assert_int_equal(epx_cluster_reports(f.cluster, stats, rows, n_ranks), EPX_OK);
    for (int r = 0; r < n_ranks; r++) {
        assert_int_equal(stats[r].n_decode_tokens, asked[r].n_decode_tokens);
        assert_true(stats[r].n_generated_tokens > 0 &&
                    stats[r].n_prompt_tokens == stats[r].n_prefill_tokens + stats[r].n_cached_tokens);
        assert_true(stats[r].kv_tokens > 0 && stats[r].kv_used_tokens == 0);
        n_rows += stats[r].n_prefill_tokens + stats[r].n_decode_tokens;
        for (int d = 0; d < n_ranks; d++) pairs += stats[r].pairs_sent[d];
        for (int p = 0; p < EPX_N_PHASES; p++)
            assert_int_equal(epx_time_hist_count(&stats[r].wait[p]), epx_time_hist_count(&stats[0].wait[p]));
    }
    for (size_t i = 0; i < n; i += n_experts) {
        uint64_t sum = 0;
        for (size_t e = 0; e < n_experts; e++) sum += rows[i + e];
        assert_int_equal(sum, n_rows * (uint64_t)st.info.top_k);
    }
    assert_int_equal(pairs, n_rows * (uint64_t)st.info.top_k * (uint64_t)st.info.n_layers);
    free(rows);
}

static void test_many_at_once(void **state) {
    enum { N = 40 };
    uint64_t ids[N];
    epx_rank_stats_t stats[2];
    (void)state;
    open_or_fail(REFERENCE, 2);
    for (int i = 0; i < N; i++) {
        const case_t *c = &cases[i % n_cases];
        ids[i] = front_submit(&f, c->tokens, c->n, N_GREEDY, -1);
        assert_true(ids[i] > 0);
    }
    assert_true(front_wait_ends(&f, N));
    for (int i = 0; i < N; i++) check_case(ids[i], &cases[i % n_cases]);
    assert_int_equal(epx_cluster_stats(f.cluster, stats, 2), EPX_OK);
    for (int r = 0; r < 2; r++) {
        assert_true(stats[r].n_decode_tokens > 0);
        for (int d = 0; d < 2; d++) assert_true(stats[r].rows_sent[d] > 0);
    }
    check_reports(2);
    front_close(&f);
}

/* One rank's work is the other's too: the idle rank must come along and go idle again. */
static void test_idle_and_cancel(void **state) {
    uint64_t id;
    (void)state;
    open_or_fail(REFERENCE, 2);
    id = front_submit(&f, cases[0].tokens, cases[0].n, 400, 1);
    assert_true(front_wait_tokens(&f, id, 3));
    epx_cluster_cancel(f.cluster, id);
    assert_true(front_wait_ends(&f, 1));
    assert_int_equal(front_result(&f, id)->finish, EPX_FINISH_CANCELLED);
    id = front_submit(&f, cases[1].tokens, cases[1].n, N_GREEDY, 0);
    assert_true(front_wait_ends(&f, 2));
    check_case(id, &cases[1]);
    id = front_submit(&f, cases[1].tokens, cases[1].n, 1 << 20, 0); /* longer than the context: refused by the rank */
    assert_true(front_wait_ends(&f, 3));
    assert_int_equal(front_result(&f, id)->finish, EPX_FINISH_ERROR);
    assert_true(front_result(&f, id)->error[0] != 0);
    assert_int_equal(f.n_failures, 0);
    front_close(&f);
}

static void check_killed_rank(const char *model, int victim) {
    int32_t prompt[2] = {5, 6};
    epx_cluster_status_t st;
    int shm = front_shm_entries();
    uint64_t ids[2], killed_ns;
    char who[64];
    open_or_fail(model, 2);
    epx_cluster_status(f.cluster, &st);
    for (int i = 0; i < 2; i++) ids[i] = front_submit(&f, prompt, 2, 1500, i);
    for (int i = 0; i < 2; i++) assert_true(front_wait_tokens(&f, ids[i], 3));
    killed_ns = epx_now_ns();
    kill(st.pids[victim], SIGKILL);
    assert_true(front_wait_failure(&f));
    assert_true(f.failure_ns - killed_ns < 1000000000u);
    snprintf(who, sizeof who, "rank %d (process %d) was killed by signal 9 (SIGKILL)", victim, st.pids[victim]);
    assert_non_null(strstr(f.failure, who));
    for (int i = 0; i < 2; i++) {
        assert_int_equal(front_result(&f, ids[i])->finish, EPX_FINISH_ERROR);
        assert_non_null(strstr(front_result(&f, ids[i])->error, who));
    }
    for (int r = 0; r < 2; r++) assert_true(front_gone_within(st.pids[r], 2000));
    front_close(&f);
    assert_int_equal(f.n_failures, 1);
    assert_true(front_no_children());
    assert_int_equal(front_shm_entries(), shm);
}

static void test_killed_rank(void **state) {
    (void)state;
    check_killed_rank(TINY, 1);
    check_killed_rank(REFERENCE, 0);
}

/* A rank that is alive and does not answer: its peer names it after the deadline, and it is killed although it is stopped. */
static void test_stopped_rank(void **state) {
    epx_cluster_status_t st;
    uint64_t id;
    (void)state;
    if (front_open_timeout(&f, REFERENCE, 2, 1000000000u) < 0) fail_msg("create: %s", epx_error_message());
    epx_cluster_status(f.cluster, &st);
    id = front_submit(&f, cases[0].tokens, cases[0].n, 1500, 0);
    assert_true(front_wait_tokens(&f, id, 3));
    kill(st.pids[1], SIGSTOP);
    assert_true(front_wait_failure(&f));
    assert_non_null(strstr(f.failure, "rank 0: "));
    assert_non_null(strstr(f.failure, "for rank 1"));
    assert_int_equal(front_result(&f, id)->finish, EPX_FINISH_ERROR);
    for (int r = 0; r < 2; r++) assert_true(front_gone_within(st.pids[r], 3000));
    front_close(&f);
    assert_true(front_no_children());
}

/* ---- Ctrl-Z and fg: a front of its own, in a process group of its own ---- */

static const char group_argument[] = "--front-of-a-group";

/* Says 1 once it generates what it has generated before, then whether that was the same. */
static int group_main(void) {
    static front_result_t first;
    uint64_t id;
    if (front_open_timeout(&f, TINY, 2, 1000000000u) < 0) return 1;
    id = front_submit(&f, (int32_t[]){5, 6}, 2, FRONT_MAX_TOKENS, 0);
    if (!front_wait_ends(&f, 1)) return 2;
    first = *front_result(&f, id);
    id = front_submit(&f, (int32_t[]){5, 6}, 2, FRONT_MAX_TOKENS, 0);
    if (!front_wait_tokens(&f, id, 3)) return 3;
    printf("1\n");
    fflush(stdout);
    if (!front_wait_ends(&f, 2)) return 4;
    const front_result_t *q = front_result(&f, id);
    if (q->error[0]) fprintf(stderr, "%s\n", q->error);
    if (first.finish != EPX_FINISH_LENGTH || q->finish != EPX_FINISH_LENGTH || f.n_failures) return 5;
    front_close(&f);
    return memcmp(q->tokens, first.tokens, sizeof first.tokens) == 0 ? 0 : 6;
}

static int spawn_group(FILE **out_from) {
    char *argv[] = {(char *)(uintptr_t) "front", (char *)(uintptr_t)group_argument, NULL};
    posix_spawn_file_actions_t fa;
    posix_spawnattr_t attr;
    pid_t pid = -1;
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    posix_spawn_file_actions_init(&fa);
    posix_spawn_file_actions_adddup2(&fa, ends[1], 1);
    posix_spawn_file_actions_addclose(&fa, ends[0]);
    posix_spawnattr_init(&attr);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETPGROUP);
    assert_int_equal(posix_spawn(&pid, "/proc/self/exe", &fa, &attr, argv, environ), 0);
    posix_spawnattr_destroy(&attr);
    posix_spawn_file_actions_destroy(&fa);
    close(ends[1]);
    *out_from = fdopen(ends[0], "r");
    return (int)pid;
}

/* Stopped four times for longer than any deadline: the ranks go on, and the text is the same. */
static void test_stopped_group(void **state) {
    FILE *from = NULL;
    const int pid = spawn_group(&from);
    int ready = 0, status = -1;
    (void)state;
    assert_int_equal(fscanf(from, "%d", &ready), 1);
    for (int k = 0; k < 4; k++) {
        kill(-pid, SIGSTOP);
        nanosleep(&(struct timespec){1, 500000000}, NULL);
        kill(-pid, SIGCONT);
        nanosleep(&(struct timespec){0, 50000000}, NULL);
    }
    fclose(from);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

static void test_killed_front(void **state) {
    int pids[2], status, shm = front_shm_entries();
    int front = front_spawn_sacrifice(TINY, pids);
    (void)state;
    assert_true(front > 0 && pids[0] > 0 && pids[1] > 0);
    kill(front, SIGKILL);
    assert_int_equal(waitpid(front, &status, 0), front);
    for (int r = 0; r < 2; r++) assert_true(front_gone_within(pids[r], 2000) && front_reaped(pids[r]));
    assert_true(front_no_children());
    assert_int_equal(front_shm_entries(), shm);
}

static void test_bad_directory(void **state) {
    (void)state;
    for (int n = 1; n <= 2; n++) {
        assert_true(front_open(&f, "/nonexistent/model", n) < 0);
        assert_non_null(strstr(epx_error_message(), "rank "));
        assert_non_null(strstr(epx_error_message(), "/nonexistent/model/config.json"));
        assert_true(front_no_children());
    }
}

int main(int argc, char **argv) {
    static const struct CMUnitTest tests[] = {cmocka_unit_test(test_reference),       cmocka_unit_test(test_many_at_once),
                                              cmocka_unit_test(test_idle_and_cancel), cmocka_unit_test(test_killed_rank),
                                              cmocka_unit_test(test_stopped_rank),    cmocka_unit_test(test_stopped_group),
                                              cmocka_unit_test(test_killed_front),    cmocka_unit_test(test_bad_directory)};
    if (argc == 2 && strcmp(argv[1], group_argument) == 0) return group_main();
    int special = front_special_main(argc, argv);
    if (special >= 0) return special;
    return cmocka_run_group_tests(tests, read_reference, NULL);
}
