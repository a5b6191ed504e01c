/* Scheduler: what each step must look like, and a random workload with its invariants. Seed: EPX_TEST_SEED. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/philox.h"
#include "engine/sched/sched.h"

typedef struct {
    epx_kv_pool_t *pool;
    epx_sched_t *s;
} rig_t;

static rig_t rig(int32_t max_running, int32_t chunk, int32_t context, int32_t pages, int32_t page_size) {
    rig_t r;
    epx_sched_config_t c = {max_running, chunk, context};
    assert_int_equal(epx_kv_pool_create(pages, page_size, &r.pool), EPX_OK);
    assert_int_equal(epx_sched_create(&c, r.pool, &r.s), EPX_OK);
    return r;
}

static void rig_end(rig_t *r) {
    epx_sched_destroy(r->s);
    assert_int_equal(epx_kv_pool_n_free(r->pool), epx_kv_pool_n_pages(r->pool));
    epx_kv_pool_destroy(r->pool);
}

static epx_seq_t *submit(rig_t *r, uint64_t id, int32_t n_prompt, int32_t max_new) {
    epx_seq_t *q;
    assert_int_equal(epx_sched_submit(r->s, id, n_prompt, max_new, NULL, &q), EPX_OK);
    return q;
}

/* Run a batch: every last row yields a token; full requests are released. */
static void advance(rig_t *r, const epx_sched_batch_t *b) {
    epx_seq_t *done[64];
    int n_done = 0;
    epx_sched_computed(r->s, b);
    for (int32_t i = 0; i < b->n_items; i++)
        if (b->items[i].last && epx_sched_token(r->s, b->items[i].seq)) done[n_done++] = b->items[i].seq;
    for (int i = 0; i < n_done; i++) epx_sched_release(r->s, done[i]);
}

static void expect_item(const epx_sched_batch_t *b, int32_t i, uint64_t id, int32_t first, int32_t n, int last) {
    assert_true(i < b->n_items);
    assert_int_equal(b->items[i].seq->id, id);
    assert_int_equal(b->items[i].first, first);
    assert_int_equal(b->items[i].n, n);
    assert_int_equal(b->items[i].last, last);
}

static void test_chunks_and_mixing(void **state) {
    (void)state;
    rig_t r = rig(4, 10, 100, 100, 4);
    epx_sched_batch_t b;
    submit(&r, 1, 7, 3);
    submit(&r, 2, 8, 1);
    epx_sched_next(r.s, &b); /* 7 of request 1, 3 of request 2 */
    assert_int_equal(b.n_items, 2);
    expect_item(&b, 0, 1, 0, 7, 1);
    expect_item(&b, 1, 2, 0, 3, 0);
    assert_int_equal(b.n_prefill_rows, 10);
    assert_int_equal(b.n_decode_rows, 0);
    advance(&r, &b);
    submit(&r, 3, 20, 2);
    epx_sched_next(r.s, &b); /* a decode of 1 does not take from the prefill budget */
    assert_int_equal(b.n_items, 3);
    expect_item(&b, 0, 1, 7, 1, 1);
    expect_item(&b, 1, 2, 3, 5, 1);
    expect_item(&b, 2, 3, 0, 5, 0);
    assert_int_equal(b.n_decode_rows, 1);
    advance(&r, &b); /* request 2 is full */
    epx_sched_next(r.s, &b);
    assert_int_equal(b.n_items, 2);
    expect_item(&b, 0, 1, 8, 1, 1);
    expect_item(&b, 1, 3, 5, 10, 0);
    advance(&r, &b);
    epx_sched_next(r.s, &b);
    assert_int_equal(b.n_items, 1);
    expect_item(&b, 0, 3, 15, 5, 1);
    advance(&r, &b);
    epx_sched_next(r.s, &b);
    expect_item(&b, 0, 3, 20, 1, 1);
    advance(&r, &b);
    epx_sched_next(r.s, &b);
    assert_int_equal(b.n_rows, 0);
    rig_end(&r);
}

static void test_refusals(void **state) {
    (void)state;
    rig_t r = rig(2, 8, 40, 9, 4); /* 36 tokens of KV */
    epx_seq_t *q;
    assert_int_equal(epx_sched_submit(r.s, 1, 0, 1, NULL, &q), EPX_ERR_ARG);
    assert_int_equal(epx_sched_submit(r.s, 1, 1, 0, NULL, &q), EPX_ERR_ARG);
    assert_int_equal(epx_sched_submit(r.s, 1, 31, 10, NULL, &q), EPX_ERR_CAPACITY);
    assert_non_null(strstr(epx_error_message(), "31"));
    assert_non_null(strstr(epx_error_message(), "41"));
    assert_non_null(strstr(epx_error_message(), "40"));
    assert_int_equal(epx_sched_submit(r.s, 1, 30, 7, NULL, &q), EPX_ERR_CAPACITY);
    assert_non_null(strstr(epx_error_message(), "KV pool has 36"));
    assert_int_equal(epx_sched_submit(r.s, 1, INT32_MAX, INT32_MAX, NULL, &q), EPX_ERR_CAPACITY);
    submit(&r, 1, 30, 6);
    assert_int_equal(epx_sched_submit(r.s, 1, 1, 1, NULL, &q), EPX_ERR_ARG);
    assert_non_null(strstr(epx_error_message(), "already live"));
    rig_end(&r);
}

/* The head of the queue waits for pages and nobody overtakes it. */
static void test_admission_in_order(void **state) {
    (void)state;
    rig_t r = rig(8, 100, 100, 10, 4);
    epx_sched_batch_t b;
    epx_seq_t *first = submit(&r, 1, 20, 4); /* 6 pages */
    submit(&r, 2, 20, 4);                    /* 6 pages: has to wait */
    submit(&r, 3, 1, 1);                     /* would fit */
    epx_sched_next(r.s, &b);
    assert_int_equal(b.n_items, 1);
    assert_int_equal(epx_sched_n_waiting(r.s), 2);
    epx_sched_computed(r.s, &b);
    epx_sched_release(r.s, first);
    epx_sched_next(r.s, &b);
    assert_int_equal(b.n_items, 2);
    expect_item(&b, 0, 2, 0, 20, 1);
    expect_item(&b, 1, 3, 0, 1, 1);
    rig_end(&r);
}

static void test_cancel(void **state) {
    (void)state;
    rig_t r = rig(1, 100, 100, 10, 4);
    epx_sched_batch_t b;
    submit(&r, 1, 5, 5);
    submit(&r, 2, 5, 5);
    submit(&r, 3, 5, 5);
    epx_sched_next(r.s, &b);
    advance(&r, &b);
    epx_sched_cancel(r.s, 99);
    assert_null(epx_sched_take_cancelled(r.s));
    epx_sched_cancel(r.s, 3); /* the tail of the queue */
    epx_sched_cancel(r.s, 1); /* running */
    epx_sched_cancel(r.s, 1);
    epx_seq_t *q = epx_sched_take_cancelled(r.s);
    assert_int_equal(q->id, 1);
    epx_sched_release(r.s, q);
    q = epx_sched_take_cancelled(r.s);
    assert_int_equal(q->id, 3);
    epx_sched_release(r.s, q);
    assert_null(epx_sched_take_cancelled(r.s));
    submit(&r, 4, 5, 5); /* the queue's tail is whole again */
    epx_sched_next(r.s, &b);
    expect_item(&b, 0, 2, 0, 5, 1);
    assert_int_equal(epx_sched_n_waiting(r.s), 1);
    rig_end(&r);
}

typedef struct {
    int32_t n_prompt, max_new, next_pos, n_out;
    int admitted;
} track_t;

/* One step of the random workload: limits hold, every sequence goes on exactly where it stopped, pages are distinct. */
static void check_step(const epx_sched_batch_t *b, track_t *t, int32_t max_running, int32_t chunk, int32_t page_size,
                       uint64_t *last_admitted) {
    int32_t prefill = 0, rows = 0;
    char page_seen[256] = {0};
    assert_true(b->n_items <= max_running);
    for (int32_t i = 0; i < b->n_items; i++) {
        const epx_sched_item_t *it = &b->items[i];
        track_t *q = &t[it->seq->id];
        if (!q->admitted) {
            assert_true(it->seq->id > *last_admitted || *last_admitted == 0); /* in order of arrival */
            *last_admitted = it->seq->id;
            q->admitted = 1;
        }
        assert_int_equal(it->first, q->next_pos);
        assert_true(it->n >= 1 && it->first + it->n <= q->n_prompt + q->n_out);
        assert_int_equal(it->last, it->first + it->n == q->n_prompt + q->n_out);
        if (it->first < q->n_prompt) prefill += it->n;
        else assert_int_equal(it->n, 1);
        assert_true(it->seq->n_pages * page_size >= q->n_prompt + q->max_new);
        for (int32_t p = 0; p < it->seq->n_pages; p++) {
            assert_false(page_seen[it->seq->pages[p]]);
            page_seen[it->seq->pages[p]] = 1;
        }
        q->next_pos += it->n;
        q->n_out += it->last;
        rows += it->n;
    }
    assert_true(prefill <= chunk);
    assert_int_equal(rows, b->n_rows);
    assert_int_equal(prefill, b->n_prefill_rows);
}

static void random_workload(uint64_t seed) {
    enum { N = 60 };
    track_t t[N + 1] = {{0}};
    uint64_t at = 0, last_admitted = 0;
#define DRAW(n) ((int32_t)(epx_philox_u32(seed, at++) % (uint32_t)(n)))
    int32_t max_running = 1 + DRAW(8), chunk = 1 + DRAW(30), page_size = 1 + DRAW(9), n_submitted = 0;
    rig_t r = rig(max_running, chunk, 60, 128 / page_size + 60 / page_size + 1, page_size);
    for (int step = 0; step < 100000; step++) {
        epx_sched_batch_t b;
        while (n_submitted < N && DRAW(3) == 0) {
            uint64_t id = (uint64_t)++n_submitted;
            t[id].n_prompt = 1 + DRAW(50);
            t[id].max_new = 1 + DRAW(10);
            submit(&r, id, t[id].n_prompt, t[id].max_new);
        }
        epx_sched_next(r.s, &b);
        if (b.n_rows == 0 && n_submitted == N) break;
        check_step(&b, t, max_running, chunk, page_size, &last_admitted);
        advance(&r, &b);
    }
#undef DRAW
    for (int i = 1; i <= N; i++) assert_int_equal(t[i].n_out, t[i].max_new); /* all finished, none lost */
    rig_end(&r);
}

static void test_random(void **state) {
    (void)state;
    const char *env = getenv("EPX_TEST_SEED");
    uint64_t seed = env ? strtoull(env, NULL, 10) : 1;
    print_message("seed %llu\n", (unsigned long long)seed);
    for (uint64_t i = 0; i < 200; i++) random_workload(seed * 1000 + i);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chunks_and_mixing),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_admission_in_order),
        cmocka_unit_test(test_cancel),
        cmocka_unit_test(test_random),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
