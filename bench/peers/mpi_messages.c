/* Peers of `epx bench a2a` over MPI without Alltoallv.
 * "MPI Isend/Irecv": one message a peer and direction (number of rows, routing, rows; partial sums back), receives posted for the
 * largest size, no counts before; own rows stay and are worked on while messages are under way.
 * "MPI AG + RS": MPI_Allgather of all rows, f32 partial sums of all tokens, MPI_Reduce_scatter_block; every rank is given
 * everyone's routing before the time begins. */
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "bench/peers/mpi_peers.h"

enum { HEAD_BYTES = 64 };

/* ---- messages ---- */

static char *box(uint16_t *area, const mpi_t *m, int rank) { return (char *)area + (size_t)rank * m->box_bytes; }
static size_t meta_bytes(size_t n, size_t k_max) { return (n * k_max * sizeof(place_t) + 63) / 64 * 64; }

/* Returns the bytes of the message to `to`; row i of it is of token tokens[i]. */
static size_t pack_box(bench_rank_t *r, mpi_t *m, int table, int to) {
    const bench_job_t *j = r->job;
    const int32_t *ids = bench_ids(r, table);
    const float *weights = bench_weights(r, table);
    size_t h = (size_t)j->hidden, k_max = (size_t)j->top_k, t_max = (size_t)j->n_tokens;
    int lo = bench_first_expert(j, r->run->n_ranks, to), hi = bench_first_expert(j, r->run->n_ranks, to + 1);
    int *tokens = m->send_row_of + (size_t)to * t_max;
    char *msg = box(m->send, m, to);
    size_t n = 0;
    for (size_t t = 0; t < t_max; t++) {
        place_t *meta = (place_t *)(void *)(msg + HEAD_BYTES) + n * k_max;
        size_t used = 0;
        for (size_t at = t * k_max; at < (t + 1) * k_max; at++)
            if (ids[at] >= lo && ids[at] < hi) meta[used++] = (place_t){ids[at], weights[at]};
        if (used == 0) continue;
        if (used < k_max) meta[used].expert = -1;
        tokens[n++] = (int)t;
    }
    uint16_t *rows = (uint16_t *)(void *)(msg + HEAD_BYTES + meta_bytes(n, k_max));
    for (size_t i = 0; i < n; i++) bench_copy_row(rows + i * h, m->x + (size_t)tokens[i] * h, h);
    *(uint64_t *)(void *)msg = n;
    m->n_send[to] = (int)n;
    return HEAD_BYTES + meta_bytes(n, k_max) + n * h * sizeof *rows;
}

/* Partial sums of a message that has come, in place of its rows; returns their bytes. */
static size_t work_box(bench_rank_t *r, mpi_t *m, int from, uint16_t **out_rows) {
    size_t h = (size_t)r->job->hidden, k_max = (size_t)r->job->top_k;
    char *msg = box(m->recv, m, from);
    size_t n = *(uint64_t *)(void *)msg;
    const place_t *meta = (const place_t *)(const void *)(msg + HEAD_BYTES);
    uint16_t *rows = (uint16_t *)(void *)(msg + HEAD_BYTES + meta_bytes(n, k_max));
    for (size_t i = 0; i < n; i++) bench_expert_row(rows + i * h, rows + i * h, mpi_factor(meta + i * k_max, r->job->top_k), h);
    *out_rows = rows;
    return n * h * sizeof *rows;
}

/* Own partial sums into y, a row a token. */
static void work_own(bench_rank_t *r, mpi_t *m, int table) {
    size_t h = (size_t)r->job->hidden;
    for (size_t t = 0; t < (size_t)r->job->n_tokens; t++) {
        float factor = mpi_own_factor(r, table, t);
        if (factor > 0) bench_expert_row(m->y + t * h, m->x + t * h, factor, h);
    }
}

static void sum_back(bench_rank_t *r, mpi_t *m, int table) {
    int w = r->run->n_ranks, next[BENCH_MAX_RANKS] = {0};
    size_t h = (size_t)r->job->hidden, t_max = (size_t)r->job->n_tokens;
    for (size_t t = 0; t < t_max; t++) {
        const uint16_t *rows[BENCH_MAX_RANKS];
        int n = 0;
        for (int i = 0; i < w; i++) {
            if (i == r->rank || next[i] == m->n_send[i] || m->send_row_of[(size_t)i * t_max + (size_t)next[i]] != (int)t)
                continue;
            rows[n++] = (const uint16_t *)(const void *)box(m->back, m, i) + (size_t)next[i]++ * h;
        }
        if (mpi_own_factor(r, table, t) > 0) rows[n++] = m->y + t * h;
        bench_sum_rows(m->out + t * h, rows, NULL, n, h);
    }
}

static int step_messages(bench_rank_t *r, bench_variant_t *v, int table) {
    mpi_t *m = v->state;
    MPI_Request in[BENCH_MAX_RANKS], back[BENCH_MAX_RANKS], out[2 * BENCH_MAX_RANKS];
    MPI_Status done[2 * BENCH_MAX_RANKS];
    int w = r->run->n_ranks, n_out = 0, at, most = (int)m->box_bytes;
    in[r->rank] = back[r->rank] = MPI_REQUEST_NULL;
    for (int i = 1; i < w; i++) {
        int peer = (r->rank + i) % w;
        MPI_Irecv(box(m->recv, m, peer), most, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &in[peer]);
        MPI_Irecv(box(m->back, m, peer), most, MPI_BYTE, peer, 2, MPI_COMM_WORLD, &back[peer]);
    }
    for (int i = 1; i < w; i++) {
        int peer = (r->rank + i) % w, n = (int)pack_box(r, m, table, peer);
        MPI_Isend(box(m->send, m, peer), n, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &out[n_out++]);
    }
    work_own(r, m, table);
    for (int i = 1; i < w; i++) {
        uint16_t *rows;
        MPI_Waitany(w, in, &at, MPI_STATUS_IGNORE);
        int n = (int)work_box(r, m, at, &rows);
        MPI_Isend(rows, n, MPI_BYTE, at, 2, MPI_COMM_WORLD, &out[n_out++]);
    }
    MPI_Waitall(w, back, done); /* gcc 12 takes MPICH's MPI_STATUSES_IGNORE for a buffer */
    MPI_Waitall(n_out, out, done);
    sum_back(r, m, table);
    return 0;
}

/* ---- all-gather and reduce-scatter ---- */

/* factors[table][source, token]: what the own experts multiply a row by. Known to every rank before the time begins. */
static void share_factors(bench_rank_t *r, mpi_t *m) {
    const bench_job_t *j = r->job;
    int w = r->run->n_ranks, places = j->n_tokens * j->top_k;
    int32_t *ids = malloc((size_t)w * (size_t)places * sizeof *ids);
    float *weights = malloc((size_t)w * (size_t)places * sizeof *weights);
    int lo = bench_first_expert(j, w, r->rank), hi = bench_first_expert(j, w, r->rank + 1);
    for (int table = 0; ids && weights && table < BENCH_TABLES; table++) {
        MPI_Allgather(bench_ids(r, table), places, MPI_INT32_T, ids, places, MPI_INT32_T, MPI_COMM_WORLD);
        MPI_Allgather(bench_weights(r, table), places, MPI_FLOAT, weights, places, MPI_FLOAT, MPI_COMM_WORLD);
        float *f = m->factors + (size_t)table * (size_t)w * (size_t)j->n_tokens;
        for (size_t i = 0; i < (size_t)w * (size_t)places; i++) {
            if (i % (size_t)j->top_k == 0) f[i / (size_t)j->top_k] = 0;
            if (ids[i] >= lo && ids[i] < hi) f[i / (size_t)j->top_k] += weights[i] * bench_factor(ids[i]);
        }
    }
    free(ids);
    free(weights);
}

static int step_gather(bench_rank_t *r, bench_variant_t *v, int table) {
    mpi_t *m = v->state;
    const bench_job_t *j = r->job;
    int w = r->run->n_ranks, part = j->n_tokens * j->hidden;
    size_t h = (size_t)j->hidden, n = (size_t)w * (size_t)j->n_tokens;
    const float *factors = m->factors + (size_t)(table % BENCH_TABLES) * n;
    float *mine = m->sums + n * h;
    MPI_Allgather(m->x, part, MPI_UINT16_T, m->recv, part, MPI_UINT16_T, MPI_COMM_WORLD);
    for (size_t t = 0; t < n; t++) bench_scale_row(m->sums + t * h, m->recv + t * h, factors[t], h);
    MPI_Reduce_scatter_block(m->sums, mine, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    for (size_t t = 0; t < (size_t)j->n_tokens; t++) bench_round_row(m->out + t * h, mine + t * h, h);
    return 0;
}

/* ---- set-up ---- */

static mpi_t *make(bench_rank_t *r, bench_variant_t *v, const char *name, int (*step)(bench_rank_t *, bench_variant_t *, int)) {
    size_t rows = (size_t)r->job->n_tokens * (size_t)r->job->hidden;
    mpi_t *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    v->state = m;
    v->close = mpi_close;
    v->x = m->x = bench_alloc_rows(rows * 2);
    v->out = m->out = bench_alloc_rows(rows * 2);
    v->step = step;
    v->about.kind = BENCH_PEER;
    memcpy(v->about.name, name, strlen(name) + 1);
    return m->x && m->out ? m : NULL;
}

int mpi_add_messages(bench_rank_t *r, bench_variant_t *v, int n) {
    const bench_job_t *j = r->job;
    size_t h = (size_t)j->hidden, t = (size_t)j->n_tokens, w = (size_t)r->run->n_ranks, k = (size_t)j->top_k;
    mpi_t *m = make(r, &v[n++], "MPI Isend/Irecv", step_messages);
    if (!m) return bench_fail(r->run, "rank %d: no memory for messages", r->rank);
    m->box_bytes = (HEAD_BYTES + meta_bytes(t, k) + t * h * 2 + 63) / 64 * 64;
    m->send = bench_alloc_rows(w * m->box_bytes);
    m->recv = bench_alloc_rows(w * m->box_bytes);
    m->back = bench_alloc_rows(w * m->box_bytes);
    m->y = bench_alloc_rows(t * h * 2);
    m->send_row_of = malloc(w * t * sizeof *m->send_row_of);
    if (!m->send || !m->recv || !m->back || !m->y || !m->send_row_of)
        return bench_fail(r->run, "rank %d: no memory for messages", r->rank);
    m = make(r, &v[n++], "MPI AG + RS", step_gather);
    if (!m) return bench_fail(r->run, "rank %d: no memory for the all-gather", r->rank);
    m->recv = bench_alloc_rows(w * t * h * 2);
    m->sums = (float *)(void *)bench_alloc_rows((w + 1) * t * h * sizeof *m->sums);
    m->factors = malloc(BENCH_TABLES * w * t * sizeof *m->factors);
    if (!m->recv || !m->sums || !m->factors) return bench_fail(r->run, "rank %d: no memory for the all-gather", r->rank);
    share_factors(r, m);
    return n;
}
