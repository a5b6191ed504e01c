/* Threads as ranks for the library's own unit tests: an all-gather over a pthread barrier. Not a test by itself. */
#ifndef TESTS_UNIT_LIB_THREADS_H
#define TESTS_UNIT_LIB_THREADS_H

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "epx/epx.h"

enum { LIB_MAX_RANKS = 16 };

typedef struct {
    pthread_barrier_t barrier;
    int n_ranks;
    const void *blobs[LIB_MAX_RANKS];
} lib_team_t;

typedef struct {
    lib_team_t *team;
    int rank;
    void *arg;
    void (*body)(epx_world_t *w, int rank, void *arg);
    epx_status_t status;
} lib_member_t;

static inline epx_status_t lib_barrier(void *ctx) {
    pthread_barrier_wait(&((lib_member_t *)ctx)->team->barrier);
    return EPX_OK;
}

static inline epx_status_t lib_allgather(void *ctx, const void *mine, size_t n_bytes, void *out_all) {
    lib_member_t *m = ctx;
    m->team->blobs[m->rank] = mine;
    pthread_barrier_wait(&m->team->barrier);
    for (int r = 0; r < m->team->n_ranks; r++) memcpy((char *)out_all + (size_t)r * n_bytes, m->team->blobs[r], n_bytes);
    pthread_barrier_wait(&m->team->barrier);
    return EPX_OK;
}

static inline void *lib_member_main(void *arg) {
    lib_member_t *m = arg;
    epx_world_config_t cfg;
    epx_world_t *w = NULL;
    epx_world_config_init(&cfg);
    cfg.rank = m->rank;
    cfg.n_ranks = m->team->n_ranks;
    cfg.allgather = lib_allgather;
    cfg.barrier = lib_barrier;
    cfg.ctx = m;
    m->status = epx_world_create(&cfg, &w);
    if (m->status == EPX_OK) m->body(w, m->rank, m->arg);
    epx_world_destroy(w);
    return NULL;
}

/* Run body on n_ranks threads, each with its own world handle. Returns the first failing status of a world. */
static inline epx_status_t lib_run(int n_ranks, void (*body)(epx_world_t *w, int rank, void *arg), void *arg) {
    lib_team_t team = {.n_ranks = n_ranks};
    lib_member_t members[LIB_MAX_RANKS];
    pthread_t threads[LIB_MAX_RANKS];
    epx_status_t s = EPX_OK;
    pthread_barrier_init(&team.barrier, NULL, (unsigned)n_ranks);
    for (int r = 0; r < n_ranks; r++) {
        members[r] = (lib_member_t){&team, r, arg, body, EPX_OK};
        pthread_create(&threads[r], NULL, lib_member_main, &members[r]);
    }
    for (int r = 0; r < n_ranks; r++) {
        pthread_join(threads[r], NULL);
        if (s == EPX_OK) s = members[r].status;
    }
    pthread_barrier_destroy(&team.barrier);
    return s;
}

#endif
