/* Inputs of the exchange bench: routing tables, rows, and the sums that must come out. Values are small integers (rows -7..7,
 * expert factors 1 and 2, weights 1 and 0.5), so every product and sum is exact in bf16 in any order, and fp8 codes are exact
 * too because each block of 128 channels holds a 7. Pure but for memory. */
#include <stdlib.h>
#include <string.h>

#include "app/bench_a2a.h"
#include "base/half.h"

static uint64_t mix(uint64_t *state) {
    uint64_t z = (*state += UINT64_C(0x9E3779B97F4A7C15)); /* splitmix64, Steele et al. 2014 */
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

int bench_first_expert(const bench_job_t *job, int n_ranks, int rank) {
    int each = job->n_experts / n_ranks, more = job->n_experts % n_ranks;
    return rank * each + (rank < more ? rank : more);
}

int bench_owner(const bench_job_t *job, int n_ranks, int expert) {
    int r = 0;
    while (expert >= bench_first_expert(job, n_ranks, r + 1)) r++;
    return r;
}

/* An expert by the job's skew; `n_drawn` experts of the token are there already. */
static int draw(const bench_job_t *job, int n_ranks, const double *cumulative, int n_drawn, uint64_t *state) {
    double u = (double)(mix(state) >> 11) * 0x1p-53;
    int n_hot = bench_first_expert(job, n_ranks, 1), lo = 0, hi = job->n_experts - 1;
    if (job->skew == BENCH_UNIFORM) return (int)(u * job->n_experts);
    if (job->skew == BENCH_HOT) return n_drawn < n_hot ? (int)(u * n_hot) : n_hot + (int)(u * (job->n_experts - n_hot));
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (cumulative[mid] < u) lo = mid + 1;
        else hi = mid;
    }
    return bench_first_expert(job, n_ranks, lo % n_ranks) + lo / n_ranks; /* the popular ones lie on all ranks */
}

static int has(const int32_t *ids, int n, int32_t id) {
    for (int i = 0; i < n; i++)
        if (ids[i] == id) return 1;
    return 0;
}

/* Zipf with exponent 1. */
static void zipf_table(double *cumulative, int n) {
    double sum = 0, total = 0;
    for (int e = 0; e < n; e++) total += 1.0 / (e + 1);
    for (int e = 0; e < n; e++) {
        sum += 1.0 / (e + 1) / total;
        cumulative[e] = sum;
    }
    cumulative[n - 1] = 2;
}

static void draw_tables(bench_rank_t *r, const double *cumulative, uint64_t *state) {
    const bench_job_t *j = r->job;
    size_t n = (size_t)BENCH_TABLES * (size_t)j->n_tokens, k_max = (size_t)j->top_k;
    for (size_t t = 0; t < n; t++) {
        int32_t *ids = r->batch.ids + t * k_max;
        for (int k = 0; k < j->top_k; k++) {
            do ids[k] = draw(j, r->run->n_ranks, cumulative, k, state);
            while (has(ids, k, ids[k]));
            r->batch.weights[t * k_max + (size_t)k] = j->top_k > 8 || mix(state) & 1 ? 1.0f : 0.5f;
        }
    }
}

int bench_batch_make(bench_rank_t *r) {
    const bench_job_t *j = r->job;
    bench_batch_t *b = &r->batch;
    size_t h = (size_t)j->hidden, t = (size_t)j->n_tokens, places = BENCH_TABLES * t * (size_t)j->top_k;
    uint64_t state = r->run->seed * 1000003u + (uint64_t)r->rank * 7919u + (uint64_t)(j - r->run->jobs);
    double *cumulative = malloc((size_t)j->n_experts * sizeof *cumulative);
    b->rows = bench_alloc_rows((t + BENCH_TABLES) * h * sizeof *b->rows);
    b->ids = malloc(places * sizeof *b->ids);
    b->weights = malloc(places * sizeof *b->weights);
    b->n_local_max = (j->n_experts + r->run->n_ranks - 1) / r->run->n_ranks;
    if (!cumulative || !b->rows || !b->ids || !b->weights) {
        free(cumulative);
        return bench_fail(r->run, "rank %d: no memory for the inputs", r->rank);
    }
    for (size_t i = 0; i < (t + BENCH_TABLES) * h; i++) {
        int v = i % h % 128 == 0 ? 7 : (int)(mix(&state) % 15) - 7;
        b->rows[i] = epx_f32_to_bf16((float)v);
    }
    zipf_table(cumulative, j->n_experts);
    draw_tables(r, cumulative, &state);
    free(cumulative);
    return 0;
}

void bench_batch_free(bench_batch_t *b) {
    free(b->rows);
    free(b->ids);
    free(b->weights);
    memset(b, 0, sizeof *b);
}

static size_t table_at(const bench_rank_t *r, int table) {
    return (size_t)(table % BENCH_TABLES) * (size_t)r->job->n_tokens * (size_t)r->job->top_k;
}
const int32_t *bench_ids(const bench_rank_t *r, int table) { return r->batch.ids + table_at(r, table); }
const float *bench_weights(const bench_rank_t *r, int table) { return r->batch.weights + table_at(r, table); }
const uint16_t *bench_rows(const bench_rank_t *r, int table) {
    return r->batch.rows + (size_t)(table % BENCH_TABLES) * (size_t)r->job->hidden;
}

uint64_t bench_remote_rows(const bench_rank_t *r, int table, int *to) {
    const bench_job_t *j = r->job;
    const int32_t *ids = bench_ids(r, table);
    int w = r->run->n_ranks, seen[BENCH_MAX_RANKS] = {0};
    uint64_t n = 0;
    for (int i = 0; to && i < w; i++) to[i] = 0;
    for (int t = 0; t < j->n_tokens; t++) {
        for (int k = 0; k < j->top_k; k++) {
            int owner = bench_owner(j, w, *ids++);
            if (seen[owner] == t + 1) continue;
            seen[owner] = t + 1;
            if (to) to[owner]++;
            n += owner != r->rank;
        }
    }
    return n;
}

int bench_is_right(const bench_rank_t *r, int table, const uint16_t *out) {
    const bench_job_t *j = r->job;
    const uint16_t *x = bench_rows(r, table);
    size_t h = (size_t)j->hidden;
    for (int t = 0; t < j->n_tokens; t++) {
        float scale = 0;
        for (int k = 0; k < j->top_k; k++) {
            size_t at = (size_t)t * (size_t)j->top_k + (size_t)k;
            scale += bench_weights(r, table)[at] * bench_factor(bench_ids(r, table)[at]);
        }
        for (size_t i = (size_t)t * h; i < ((size_t)t + 1) * h; i++)
            if (epx_bf16_to_f32(out[i]) != scale * epx_bf16_to_f32(x[i])) return 0;
    }
    return 1;
}
