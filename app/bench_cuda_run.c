/* Ranks of the CUDA bench: threads that meet at a barrier, time graphs, and go through the jobs together. */
#include <stdlib.h>
#include <string.h>

#include "app/bench_cuda.h"
#include "base/status.h"

int bc_agree(bc_rank_t *r, epx_status_t s) {
    bc_t *b = r->b;
    if (s < 0) {
        pthread_mutex_lock(&b->lock);
        if (!b->failed) snprintf(b->error, sizeof b->error, "%s", epx_last_error());
        b->failed = 1;
        pthread_mutex_unlock(&b->lock);
    }
    pthread_barrier_wait(&b->barrier);
    int failed = b->failed;
    pthread_barrier_wait(&b->barrier); /* nobody fails the next step while others read this one's outcome */
    return failed ? -1 : 0;
}

static epx_status_t replay_once(bc_rank_t *r, void *graph, void *from, void *to) {
    EPX_TRY(cu_graph_launch(graph, r->dev.stream)); /* brings the ranks to the same exchange */
    EPX_TRY(cu_event_record(from, r->dev.stream));
    EPX_TRY(cu_graph_launch(graph, r->dev.stream));
    EPX_TRY(cu_event_record(to, r->dev.stream));
    EPX_TRY(cu_sync(r->dev.stream));
    return cu_event_us(from, to, &r->b->us[r->rank]);
}

int bc_time(bc_rank_t *r, void *graph, double *out_us, int n) {
    void *from = NULL, *to = NULL;
    epx_status_t s = cu_event_create(&from);
    if (s >= 0) s = cu_event_create(&to);
    int rc = bc_agree(r, s);
    for (int i = -2; rc == 0 && i < n; i++) { /* two to warm up */
        rc = bc_agree(r, replay_once(r, graph, from, to));
        for (int q = 0; rc == 0 && i >= 0 && q < r->b->n_ranks; q++) {
            double us = r->b->us[q] / BC_EXCHANGES;
            out_us[i] = q == 0 || us > out_us[i] ? us : out_us[i];
        }
        if (rc == 0) rc = bc_agree(r, EPX_OK); /* us[] is read */
    }
    cu_event_destroy(from);
    cu_event_destroy(to);
    return rc;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void bc_summary(bc_result_t *out, int run, double *us, int n) {
    qsort(us, (size_t)n, sizeof *us, ascending);
    out->us_min[run] = us[0];
    out->us_p50[run] = us[n / 2];
    out->us_p99[run] = us[(n * 99 + 99) / 100 - 1];
    out->n_runs = run + 1;
}

/* ---- jobs ---- */

static int same_input(const bc_job_t *a, const bc_job_t *b) {
    return a->n_experts == b->n_experts && a->top_k == b->top_k && a->hidden == b->hidden && a->n_tokens == b->n_tokens &&
           a->hot == b->hot && a->fp8 == b->fp8;
}

static int run_job(bc_rank_t *r, int i) {
    bc_t *b = r->b;
    bc_result_t *out = &b->results[i];
    if (r->rank == 0) out->job = b->jobs[i], out->floor_us = bc_floor_us(b, &b->jobs[i], &out->link_bytes);
    if (i == 0 || !same_input(&b->jobs[i], &b->jobs[i - 1])) {
        bc_input_free(&b->in[r->rank]);
        if (bc_agree(r, bc_input_make(b, &b->jobs[i], r->rank, &b->in[r->rank])) != 0) return -1;
    }
    if (bc_agree(r, EPX_OK) != 0) return -1;
    return b->jobs[i].peer ? bc_nccl(r, out) : bc_ours(r, out);
}

/* A variant that this machine or build cannot run is left out with its reason; anything else ends the bench. */
static void *rank_main(void *arg) {
    bc_rank_t *r = arg;
    bc_t *b = r->b;
    int rc = bc_agree(r, cu_device_use(r->rank % b->n_devices, &r->dev));
    if (rc == 0) rc = bc_agree(r, epx_group_create(r->world, NULL, 0, r->rank % b->n_devices, &r->group));
    for (int i = 0; rc == 0 && i < b->n_jobs; i++) {
        rc = run_job(r, i);
        if (r->rank == 0 && rc == 0) bc_print(b, &b->results[i], stderr);
    }
    bc_nccl_close(r);
    epx_group_destroy(r->group);
    cu_device_done(&r->dev);
    return NULL;
}

int bc_run(bc_t *b) {
    epx_world_t *worlds[BC_MAX_RANKS] = {NULL};
    bc_rank_t ranks[BC_MAX_RANKS];
    pthread_t threads[BC_MAX_RANKS];
    memset(ranks, 0, sizeof ranks);
    if (epx_world_create_local(b->n_ranks, worlds) < 0) {
        snprintf(b->error, sizeof b->error, "%s", epx_last_error());
        return -1;
    }
    pthread_barrier_init(&b->barrier, NULL, (unsigned)b->n_ranks);
    pthread_mutex_init(&b->lock, NULL);
    for (int i = 0; i < b->n_ranks; i++) {
        ranks[i].b = b, ranks[i].rank = i, ranks[i].world = worlds[i];
        if (pthread_create(&threads[i], NULL, rank_main, &ranks[i]) != 0) {
            fprintf(stderr, "epx bench: cannot start a thread\n");
            exit(1); /* the others wait at the barrier for it */
        }
    }
    for (int i = 0; i < b->n_ranks; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < b->n_ranks; i++) epx_world_destroy(worlds[i]), bc_input_free(&b->in[i]);
    pthread_barrier_destroy(&b->barrier);
    pthread_mutex_destroy(&b->lock);
    return b->failed ? -1 : 0;
}
