/* The thread pool: every item once, on a thread index in range, over many jobs with pauses long enough to park the workers. */
#include "tests/unit/ops_test_util.h"

#include <time.h>
#include <unistd.h>

#include "base/atomic.h"
#include "engine/ops/cpu/pool.h"

enum { MAX_ITEMS = 300 };
typedef struct {
    uint32_t n_done[MAX_ITEMS];
    uint64_t plain[MAX_ITEMS]; /* written without atomics: the end of a job must order it */
    int n_threads;
    uint64_t job;
} job_t;

static void item(void *ctx, int64_t i, int thread) {
    job_t *j = ctx;
    if (thread < 0 || thread >= j->n_threads) abort();
    epx_fetch_add_u32(&j->n_done[i], 1);
    j->plain[i] = j->job;
}

static void every_item_once(void **state) {
    (void)state;
    for (int threads = 1; threads <= 5; threads++) {
        epx_pool_t *pool;
        job_t j = {.n_threads = threads};
        assert_int_equal(epx_pool_create(threads, NULL, &pool), EPX_OK);
        for (j.job = 1; j.job <= 2000; j.job++) {
            const int n = below(MAX_ITEMS + 1);
            memset(j.n_done, 0, sizeof j.n_done);
            epx_pool_run(pool, item, &j, n, below(8) != 0);
            for (int i = 0; i < n; i++) assert_true(j.n_done[i] == 1 && j.plain[i] == j.job);
            for (int i = n; i < MAX_ITEMS; i++) assert_int_equal(j.n_done[i], 0);
            if (j.job % 200 == 0) usleep(2000);
        }
        epx_pool_destroy(pool);
    }
    epx_pool_destroy(NULL);
}

/* A pool at rest must not use CPU time: less than 5 ms of it in 100 ms. */
static void idle_pool_parks(void **state) {
    (void)state;
    epx_pool_t *pool;
    job_t j = {.n_threads = 4, .job = 1};
    struct timespec a, b;
    assert_int_equal(epx_pool_create(4, NULL, &pool), EPX_OK);
    epx_pool_run(pool, item, &j, 50, 1);
    usleep(20000);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &a);
    usleep(100000);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &b);
    const int64_t used_ns = (int64_t)(b.tv_sec - a.tv_sec) * 1000000000 + (b.tv_nsec - a.tv_nsec);
    assert_true(used_ns < 5000000);
    epx_pool_destroy(pool);
}

static void bad_cpu_is_named(void **state) {
    (void)state;
    epx_pool_t *pool = NULL;
    const int cpus[2] = {0, 1023};
    assert_int_equal(epx_pool_create(2, cpus, &pool), EPX_ERR_ARG);
    assert_non_null(strstr(epx_error_message(), "1023"));
    assert_null(pool);
}

int main(void) {
    seed_init();
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_item_once), cmocka_unit_test(idle_pool_parks),
                                       cmocka_unit_test(bad_cpu_is_named)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
