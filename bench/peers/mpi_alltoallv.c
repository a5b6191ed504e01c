/* Peers of `epx bench a2a`: the same exchange written with MPI, as variants of the same run. Usage: mpirun -n W mpi_peers
 * RUN_FILE (started by `epx bench a2a --peers mpi`, mpi-ucx or mpich). Here: MPI_Alltoallv. "per expert": counts, then one row
 * for each (token, expert), one row back for each, K rows summed at the source. "per rank": one row and the routing for each
 * (token, rank), one partial sum back. "own rows stay": the same, but rows for the own rank are read where they are. Packing and
 * counting are inside the time. For "per rank" the expert makes one pass a (token, rank), as for the library's fused variants. */
#include "bench/peers/mpi_peers.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

void mpi_close(bench_variant_t *v) {
    mpi_t *m = v->state;
    free(m->x);
    free(m->out);
    free(m->send);
    free(m->recv);
    free(m->y);
    free(m->back);
    free(m->send_row_of);
    free(m->send_meta);
    free(m->recv_meta);
    free(m->sums);
    free(m->factors);
    free(m);
}

/* Elements and displacements from row counts. Returns the sum of rows. */
static int spread(const int *rows, int w, int unit, int *counts, int *at) {
    int sum = 0;
    for (int i = 0; i < w; i++) {
        counts[i] = rows[i] * unit;
        at[i] = sum * unit;
        sum += rows[i];
    }
    return sum;
}

static void alltoallv(const void *send, const int *n_send, void *recv, const int *n_recv, int unit, MPI_Datatype type, int w) {
    int sc[BENCH_MAX_RANKS], sd[BENCH_MAX_RANKS], rc[BENCH_MAX_RANKS], rd[BENCH_MAX_RANKS];
    (void)spread(n_send, w, unit, sc, sd);
    (void)spread(n_recv, w, unit, rc, rd);
    MPI_Alltoallv(send, sc, sd, type, recv, rc, rd, type, MPI_COMM_WORLD);
}

/* ---- one row for each (token, expert) ---- */

/* Rows ordered by expert, which orders them by rank too. send_row_of[t * K + k]: where the row of a place lies. */
static void pack_experts(bench_rank_t *r, mpi_t *m, int table, int *count_of) {
    const bench_job_t *j = r->job;
    const int32_t *ids = bench_ids(r, table);
    size_t h = (size_t)j->hidden, n = (size_t)j->n_tokens * (size_t)j->top_k;
    int at[65537];
    memset(count_of, 0, (size_t)j->n_experts * sizeof *count_of);
    for (size_t i = 0; i < n; i++) count_of[ids[i]]++;
    at[0] = 0;
    for (int e = 0; e < j->n_experts; e++) at[e + 1] = at[e] + count_of[e];
    for (int i = 0; i < r->run->n_ranks; i++)
        m->n_send[i] = at[bench_first_expert(j, r->run->n_ranks, i + 1)] - at[bench_first_expert(j, r->run->n_ranks, i)];
    for (size_t i = 0; i < n; i++) {
        m->send_row_of[i] = at[ids[i]]++;
        bench_copy_row(m->send + (size_t)m->send_row_of[i] * h, m->x + i / (size_t)j->top_k * h, h);
    }
}

static int step_expert(bench_rank_t *r, bench_variant_t *v, int table) {
    static int count_of[65536], recv_count[65536], rows_of[BENCH_MAX_RANKS];
    mpi_t *m = v->state;
    const bench_job_t *j = r->job;
    const uint16_t *rows[EPX_MAX_TOP_K];
    int w = r->run->n_ranks, first = bench_first_expert(j, w, r->rank), el = bench_first_expert(j, w, r->rank + 1) - first,
        row = 0;
    size_t h = (size_t)j->hidden, k_max = (size_t)j->top_k;
    int sc[BENCH_MAX_RANKS], sd[BENCH_MAX_RANKS], rc[BENCH_MAX_RANKS], rd[BENCH_MAX_RANKS];
    pack_experts(r, m, table, count_of);
    for (int i = 0; i < w; i++) {
        sd[i] = bench_first_expert(j, w, i);
        sc[i] = bench_first_expert(j, w, i + 1) - sd[i];
        rc[i] = el;
        rd[i] = i * el;
    }
    MPI_Alltoallv(count_of, sc, sd, MPI_INT, recv_count, rc, rd, MPI_INT, MPI_COMM_WORLD);
    for (int i = 0; i < w; i++) {
        rows_of[i] = 0;
        for (int e = 0; e < el; e++) rows_of[i] += recv_count[i * el + e];
    }
    alltoallv(m->send, m->n_send, m->recv, rows_of, j->hidden, MPI_UINT16_T, w);
    for (int i = 0; i < w * el; i++)
        for (int c = 0; c < recv_count[i]; c++, row++)
            bench_expert_row(m->y + (size_t)row * h, m->recv + (size_t)row * h, bench_factor(first + i % el), h);
    alltoallv(m->y, rows_of, m->back, m->n_send, j->hidden, MPI_UINT16_T, w);
    for (size_t t = 0; t < (size_t)j->n_tokens; t++) {
        for (size_t k = 0; k < k_max; k++) rows[k] = m->back + (size_t)m->send_row_of[t * k_max + k] * h;
        bench_sum_rows(m->out + t * h, rows, bench_weights(r, table) + t * k_max, j->top_k, h);
    }
    return 0;
}

/* ---- one row for each (token, rank) ---- */

/* Rows and routing for the ranks; with own_stay not for the own one. n_send: their numbers. */
static void pack_ranks(bench_rank_t *r, mpi_t *m, int table, int own_stay) {
    const bench_job_t *j = r->job;
    const int32_t *ids = bench_ids(r, table);
    const float *weights = bench_weights(r, table);
    size_t h = (size_t)j->hidden, k_max = (size_t)j->top_k;
    int n = 0, w = r->run->n_ranks;
    for (int to = 0; to < w; to++) {
        int lo = bench_first_expert(j, w, to), hi = bench_first_expert(j, w, to + 1), from = n;
        for (size_t t = 0; !(own_stay && to == r->rank) && t < (size_t)j->n_tokens; t++) {
            place_t *meta = m->send_meta + (size_t)n * k_max;
            size_t used = 0;
            for (size_t k = 0; k < k_max; k++)
                if (ids[t * k_max + k] >= lo && ids[t * k_max + k] < hi)
                    meta[used++] = (place_t){ids[t * k_max + k], weights[t * k_max + k]};
            m->send_row_of[t * (size_t)w + (size_t)to] = used ? n : -1;
            if (!used) continue;
            if (used < k_max) meta[used].expert = -1;
            bench_copy_row(m->send + (size_t)n++ * h, m->x + t * h, h);
        }
        m->n_send[to] = n - from;
    }
}

float mpi_own_factor(bench_rank_t *r, int table, size_t t) {
    const bench_job_t *j = r->job;
    int w = r->run->n_ranks, lo = bench_first_expert(j, w, r->rank), hi = bench_first_expert(j, w, r->rank + 1);
    float sum = 0;
    for (size_t at = t * (size_t)j->top_k; at < (t + 1) * (size_t)j->top_k; at++) {
        int32_t id = bench_ids(r, table)[at];
        if (id >= lo && id < hi) sum += bench_weights(r, table)[at] * bench_factor(id);
    }
    return sum;
}

float mpi_factor(const place_t *meta, int top_k) {
    float sum = 0;
    for (int k = 0; k < top_k && meta[k].expert >= 0; k++) sum += meta[k].weight * bench_factor(meta[k].expert);
    return sum;
}

static int exchange_ranks(bench_rank_t *r, mpi_t *m, int table, int own_stay) {
    const bench_job_t *j = r->job;
    int w = r->run->n_ranks, n_recv = 0;
    size_t h = (size_t)j->hidden, k_max = (size_t)j->top_k, t_max = (size_t)j->n_tokens;
    uint16_t *own = m->recv + t_max * (size_t)w * h; /* partial sum of an own token; the buffer has a row more */
    pack_ranks(r, m, table, own_stay);
    MPI_Alltoall(m->n_send, 1, MPI_INT, m->n_recv, 1, MPI_INT, MPI_COMM_WORLD);
    alltoallv(m->send_meta, m->n_send, m->recv_meta, m->n_recv, j->top_k * (int)sizeof(place_t), MPI_BYTE, w);
    alltoallv(m->send, m->n_send, m->recv, m->n_recv, j->hidden, MPI_UINT16_T, w);
    for (int i = 0; i < w; i++) n_recv += m->n_recv[i];
    uint16_t *partials = m->send + t_max * (size_t)w * h;
    for (int i = 0; i < n_recv; i++)
        bench_expert_row(partials + (size_t)i * h, m->recv + (size_t)i * h,
                         mpi_factor(m->recv_meta + (size_t)i * k_max, j->top_k), h);
    alltoallv(partials, m->n_recv, m->back, m->n_send, j->hidden, MPI_UINT16_T, w);
    for (size_t t = 0; t < t_max; t++) {
        const uint16_t *rows[BENCH_MAX_RANKS];
        int n = 0;
        for (int i = 0; i < w; i++) {
            int row = own_stay && i == r->rank ? -1 : m->send_row_of[t * (size_t)w + (size_t)i];
            if (row >= 0) rows[n++] = m->back + (size_t)row * h;
        }
        float factor = own_stay ? mpi_own_factor(r, table, t) : 0;
        if (factor > 0) {
            bench_expert_row(own, m->x + t * h, factor, h);
            rows[n++] = own;
        }
        bench_sum_rows(m->out + t * h, rows, NULL, n, h);
    }
    return 0;
}

static int step_rank(bench_rank_t *r, bench_variant_t *v, int table) { return exchange_ranks(r, v->state, table, 0); }
static int step_own(bench_rank_t *r, bench_variant_t *v, int table) { return exchange_ranks(r, v->state, table, 1); }

static int add(bench_rank_t *r, bench_variant_t *v, const char *name, int (*step)(bench_rank_t *, bench_variant_t *, int)) {
    const bench_job_t *j = r->job;
    size_t h = (size_t)j->hidden, t = (size_t)j->n_tokens, w = (size_t)r->run->n_ranks, k = (size_t)j->top_k;
    size_t per = step == step_expert ? k : 2, n = t * w * per + 1;
    mpi_t *m = calloc(1, sizeof *m);
    if (!m) return bench_fail(r->run, "rank %d: no memory", r->rank);
    v->state = m;
    v->close = mpi_close;
    m->x = bench_alloc_rows(t * h * 2);
    m->out = bench_alloc_rows(t * h * 2);
    m->send = bench_alloc_rows(n * h * 2);
    m->recv = bench_alloc_rows(n * h * 2);
    m->y = bench_alloc_rows((step == step_expert ? n : k) * h * 2);
    m->back = bench_alloc_rows(n * h * 2);
    m->send_row_of = malloc(t * (w + k) * sizeof *m->send_row_of);
    m->send_meta = malloc(t * w * k * sizeof *m->send_meta);
    m->recv_meta = malloc(t * w * k * sizeof *m->recv_meta);
    if (!m->x || !m->out || !m->send || !m->recv || !m->y || !m->back || !m->send_row_of || !m->send_meta || !m->recv_meta)
        return bench_fail(r->run, "rank %d: no memory for %s", r->rank, name);
    v->x = m->x;
    v->out = m->out;
    v->step = step;
    v->about.kind = BENCH_PEER;
    snprintf(v->about.name, sizeof v->about.name, "%s", name);
    return 0;
}

static int add_peers(bench_rank_t *r, bench_variant_t *v, int n) {
    if (add(r, &v[n++], "MPI_Alltoallv per expert", step_expert) || add(r, &v[n++], "MPI_Alltoallv per rank", step_rank) ||
        add(r, &v[n++], "MPI_Alltoallv own rows stay", step_own))
        return -1;
    return mpi_add_messages(r, v, n);
}

int main(int argc, char **argv) {
    int rank = 0, fd = argc == 2 ? open(argv[1], O_RDWR | O_CLOEXEC) : -1, rc;
    bench_run_t *run = fd < 0 ? NULL : bench_run_map(fd, 0);
    if (!run) {
        fprintf(stderr, "usage: mpi_peers RUN_FILE (of epx bench a2a)\n");
        return 2;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* ranks that wait for a lost peer would spin for ever */
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) (void)unlink(argv[1]); /* everyone has mapped it: nothing is left behind whatever happens */
    rc = bench_rank_main(run, rank, add_peers);
    if (rc) MPI_Abort(MPI_COMM_WORLD, 1);
    MPI_Finalize();
    return rc;
}
