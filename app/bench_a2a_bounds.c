/* Bounds of the exchange bench: what this machine takes for the same bytes or the same arithmetic without a library.
 * process copy: each rank copies the rows that leave it into the peers' shared memory, flags, the peers copy them out, flag
 * back: one phase of two. memcpy: the same rows out and back between private buffers. arithmetic: expert and sums alone, one pass
 * a (token, rank) or, "rows", one a (token, expert). */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "app/bench_a2a.h"
#include "base/atomic.h"

typedef struct {
    uint16_t *x, *to, *back, *y;
    uint64_t epoch;
    int counts[BENCH_TABLES][BENCH_MAX_RANKS];
} bound_t;

static void close_bound(bench_variant_t *v) {
    bound_t *b = v->state;
    free(b->x);
    free(b->to);
    free(b->back);
    free(b->y);
    free(b);
}

static int step_memcpy(bench_rank_t *r, bench_variant_t *v, int table) {
    bound_t *b = v->state;
    size_t bytes = 0;
    for (int i = 0; i < r->run->n_ranks; i++)
        if (i != r->rank) bytes += (size_t)b->counts[table % BENCH_TABLES][i] * (size_t)r->job->hidden * sizeof *b->x;
    size_t most = (size_t)r->job->n_tokens * (size_t)r->job->hidden * sizeof *b->x;
    for (size_t at = 0; at < bytes; at += most) {
        size_t n = bytes - at < most ? bytes - at : most;
        memcpy(b->to, b->x, n);
        memcpy(b->back, b->to, n);
    }
    return 0;
}

/* Area of `to` is cut into one part for each source. */
static uint16_t *part(bench_rank_t *r, int to, int from) {
    size_t rows = (size_t)r->job->n_tokens * (size_t)r->job->hidden;
    return (uint16_t *)(void *)bench_peer_area(r->run, to) + (size_t)from * rows;
}

static void copy_rows(uint16_t *dst, const uint16_t *src, int n_rows, size_t h) {
    for (int i = 0; i < n_rows; i++) bench_copy_row(dst + (size_t)i * h, src + (size_t)i * h, h);
}

static int wait_flag(bench_run_t *run, const uint64_t *flag, uint64_t value) {
    for (uint32_t polls = 1; epx_load_acquire_u64(flag) < value; polls++) {
        if (epx_load_relaxed_u32(&run->failed)) return -1;
        EPX_CPU_RELAX();
        if (run->n_ranks > run->n_cores && polls % 20 == 0) sched_yield();
    }
    return 0;
}

/* How many rows come from each rank is read beside the flag, which carries the count in its low bits. */
static int step_copy(bench_rank_t *r, bench_variant_t *v, int table) {
    bound_t *b = v->state;
    bench_run_t *run = r->run;
    size_t h = (size_t)r->job->hidden;
    int w = run->n_ranks, me = r->rank;
    b->epoch++;
    for (int i = 1; i < w; i++) {
        int to = (me + i) % w, n = b->counts[table % BENCH_TABLES][to];
        copy_rows(part(r, to, me), b->x, n, h);
        run->flags[to][me][1] = (uint64_t)n;
        epx_store_release_u64(&run->flags[to][me][0], b->epoch);
    }
    for (int i = 1; i < w; i++) {
        int from = (me + i) % w;
        if (wait_flag(run, &run->flags[me][from][0], b->epoch)) return -1;
        copy_rows(b->to, part(r, me, from), (int)run->flags[me][from][1], h);
        epx_store_release_u64(&run->flags[from][me][2], b->epoch);
    }
    for (int i = 1; i < w; i++)
        if (wait_flag(run, &run->flags[me][(me + i) % w][2], b->epoch)) return -1;
    return 0;
}

/* Rows of a token's experts at `owner`, each made by a pass of the expert into y; returns their number. */
static int expert_rows(bench_rank_t *r, bound_t *b, int table, size_t t, int owner, const uint16_t **rows, float *weights) {
    const bench_job_t *j = r->job;
    size_t h = (size_t)j->hidden, k_max = (size_t)j->top_k;
    int n = 0, lo = bench_first_expert(j, r->run->n_ranks, owner), hi = bench_first_expert(j, r->run->n_ranks, owner + 1);
    for (size_t k = 0; k < k_max; k++) {
        int32_t id = bench_ids(r, table)[t * k_max + k];
        if (id < lo || id >= hi) continue;
        uint16_t *y = b->y + (t * k_max + k) * h;
        bench_expert_row(y, b->x + t * h, bench_factor(id), h);
        weights[n] = bench_weights(r, table)[t * k_max + k];
        rows[n++] = y;
    }
    return n;
}

/* Sum over a token's experts at `owner` of weight * factor; 0: none are there (weights are positive). */
static float factor_at(bench_rank_t *r, int table, size_t t, int owner) {
    const bench_job_t *j = r->job;
    size_t k_max = (size_t)j->top_k;
    int lo = bench_first_expert(j, r->run->n_ranks, owner), hi = bench_first_expert(j, r->run->n_ranks, owner + 1);
    float sum = 0;
    for (size_t at = t * k_max; at < (t + 1) * k_max; at++) {
        int32_t id = bench_ids(r, table)[at];
        if (id >= lo && id < hi) sum += bench_weights(r, table)[at] * bench_factor(id);
    }
    return sum;
}

/* The expert's passes and the sums of as many rows as this rank's own tokens cause in all: the mean load of a rank. by_rows: a
 * pass for each (token, expert), then the weighted sum for each (token, rank); else one pass for each (token, rank), as a fused
 * expert layer leaves it. */
static int arithmetic(bench_rank_t *r, bench_variant_t *v, int table, int by_rows) {
    bound_t *b = v->state;
    size_t h = (size_t)r->job->hidden;
    int w = r->run->n_ranks;
    for (size_t t = 0; t < (size_t)r->job->n_tokens; t++) {
        const uint16_t *partial[BENCH_MAX_RANKS], *rows[EPX_MAX_TOP_K];
        float weights[EPX_MAX_TOP_K], factor;
        int n_partial = 0, n;
        for (int owner = 0; owner < w; owner++) {
            uint16_t *out = b->back + (t * (size_t)w + (size_t)owner) * h;
            if (by_rows && (n = expert_rows(r, b, table, t, owner, rows, weights)) > 0) bench_sum_rows(out, rows, weights, n, h);
            else if (!by_rows && (factor = factor_at(r, table, t, owner)) > 0) bench_expert_row(out, b->x + t * h, factor, h);
            else continue;
            partial[n_partial++] = out;
        }
        bench_sum_rows(b->to + t * h, partial, NULL, n_partial, h);
    }
    return 0;
}

static int step_arithmetic(bench_rank_t *r, bench_variant_t *v, int table) { return arithmetic(r, v, table, 0); }
static int step_arithmetic_rows(bench_rank_t *r, bench_variant_t *v, int table) { return arithmetic(r, v, table, 1); }

static int add(bench_rank_t *r, bench_variant_t *v, const char *name, int (*step)(bench_rank_t *, bench_variant_t *, int)) {
    size_t row = (size_t)r->job->hidden * sizeof(uint16_t), t = (size_t)r->job->n_tokens, w = (size_t)r->run->n_ranks;
    bound_t *b = calloc(1, sizeof *b);
    if (!b) return bench_fail(r->run, "rank %d: no memory", r->rank);
    v->state = b;
    v->close = close_bound;
    b->x = bench_alloc_rows(t * row);
    b->to = bench_alloc_rows(t * row);
    b->back = bench_alloc_rows(t * row * w);
    b->y = bench_alloc_rows(t * row * (size_t)r->job->top_k);
    if (!b->x || !b->to || !b->back || !b->y) return bench_fail(r->run, "rank %d: no memory for the bounds", r->rank);
    for (int i = 0; i < BENCH_TABLES; i++) (void)bench_remote_rows(r, i, b->counts[i]);
    v->x = b->x;
    v->step = step;
    v->about.kind = BENCH_BOUND;
    memcpy(v->about.name, name, strlen(name) + 1);
    return 0;
}

int bench_add_bounds(bench_rank_t *r, bench_variant_t *v, int n) {
    for (int i = 0; i < BENCH_MAX_RANKS; i++) memset(r->run->flags[r->rank][i], 0, sizeof r->run->flags[0][0]);
    if (bench_barrier(r)) return -1;
    if (add(r, &v[n++], "arithmetic", step_arithmetic) || add(r, &v[n++], "arithmetic rows", step_arithmetic_rows) ||
        add(r, &v[n++], "memcpy", step_memcpy))
        return -1;
    if (r->run->n_ranks > 1 && add(r, &v[n++], "process copy", step_copy)) return -1;
    return n;
}
