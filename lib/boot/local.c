/* Bootstrap of ranks that are threads of this process: they meet under one lock. Set-up path only. */
#include "boot/local.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/status.h"

typedef struct meeting meeting_t;

/* One rank's place; the ctx of its bootstrap. */
typedef struct {
    meeting_t *m;
    const void *mine; /* borrowed during an all-gather */
    size_t n_bytes;
} seat_t;

struct meeting {
    pthread_mutex_t lock;
    pthread_cond_t moved;
    uint64_t timeout_ns, round;
    int n_ranks, n_arrived, n_open;
    seat_t seats[]; /* [n_ranks] */
};

static struct timespec deadline_of(uint64_t timeout_ns) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    uint64_t ns = (uint64_t)t.tv_nsec + timeout_ns;
    t.tv_sec += (time_t)(ns / 1000000000u);
    t.tv_nsec = (long)(ns % 1000000000u);
    return t;
}

/* Lock held. Returns when all ranks have come, or takes this one back at the deadline. */
static epx_status_t arrive(meeting_t *m) {
    uint64_t round = m->round;
    if (++m->n_arrived == m->n_ranks) {
        m->n_arrived = 0;
        m->round++;
        pthread_cond_broadcast(&m->moved);
        return EPX_OK;
    }
    struct timespec end = deadline_of(m->timeout_ns);
    while (m->round == round) {
        if (pthread_cond_timedwait(&m->moved, &m->lock, &end) != ETIMEDOUT || m->round != round) continue;
        m->n_arrived--;
        return epx_fail(EPX_ERR_TIMEOUT, "ranks as threads: %d of %d came within %.3f s", m->n_arrived + 1, m->n_ranks,
                        (double)m->timeout_ns * 1e-9);
    }
    return EPX_OK;
}

static epx_status_t copy_all(const meeting_t *m, size_t n_bytes, void *out_all) {
    for (int r = 0; r < m->n_ranks; r++)
        if (m->seats[r].n_bytes != n_bytes)
            return epx_fail(EPX_ERR_MISMATCH, "all-gather of %zu bytes, and of %zu bytes on rank %d", n_bytes,
                            m->seats[r].n_bytes, r);
    for (int r = 0; n_bytes > 0 && r < m->n_ranks; r++) memcpy((char *)out_all + (size_t)r * n_bytes, m->seats[r].mine, n_bytes);
    return EPX_OK;
}

static epx_status_t local_allgather(void *ctx, const void *mine, size_t n_bytes, void *out_all) {
    seat_t *seat = ctx;
    meeting_t *m = seat->m;
    pthread_mutex_lock(&m->lock);
    seat->mine = mine;
    seat->n_bytes = n_bytes;
    epx_status_t s = arrive(m), copied = EPX_OK;
    if (s >= 0) copied = copy_all(m, n_bytes, out_all);
    if (s >= 0) s = arrive(m); /* `mine` stays valid until all have copied it */
    pthread_mutex_unlock(&m->lock);
    return copied < 0 ? copied : s;
}

static epx_status_t local_barrier(void *ctx) {
    seat_t *seat = ctx;
    pthread_mutex_lock(&seat->m->lock);
    epx_status_t s = arrive(seat->m);
    pthread_mutex_unlock(&seat->m->lock);
    return s;
}

static void meeting_free(meeting_t *m) {
    pthread_cond_destroy(&m->moved);
    pthread_mutex_destroy(&m->lock);
    free(m);
}

static void local_close(void *ctx) {
    meeting_t *m = ((seat_t *)ctx)->m;
    pthread_mutex_lock(&m->lock);
    int n_left = --m->n_open;
    pthread_mutex_unlock(&m->lock);
    if (n_left == 0) meeting_free(m);
}

epx_status_t epx_boot_local(int n_ranks, uint64_t timeout_ns, epx_boot_t *out_boots) {
    pthread_condattr_t attr;
    meeting_t *m = calloc(1, sizeof *m + (size_t)n_ranks * sizeof m->seats[0]);
    if (m == NULL) return epx_fail(EPX_ERR_NOMEM, "no memory for %d ranks", n_ranks);
    m->timeout_ns = timeout_ns;
    m->n_ranks = m->n_open = n_ranks;
    pthread_mutex_init(&m->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&m->moved, &attr);
    pthread_condattr_destroy(&attr);
    for (int r = 0; r < n_ranks; r++) {
        m->seats[r].m = m;
        epx_boot_t b = {r, n_ranks, local_allgather, local_barrier, &m->seats[r], local_close};
        out_boots[r] = b;
    }
    return EPX_OK;
}
