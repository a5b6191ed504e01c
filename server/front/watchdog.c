/* Watches the rank of this process from a thread of its own: a step that stays in one phase for too long is said on standard
 * error with rank, step and phase, and ends the process, which the front sees. Reads only epx_rank_position(). */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "server/front/worker_impl.h"

enum { DEFAULT_S = 300, POLL_MS = 200, LET_OTHERS_SPEAK_MS = 500 };
static const uint64_t MOST_COUNTED_NS = 1000000000; /* between two looks: more means that the process was stopped */

struct epx_watchdog {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int stop; /* guarded by lock */
    const epx_rank_t *rank_object;
    int rank, seconds;
};

static void speak_and_end(const epx_watchdog_t *d, const epx_rank_position_t *p, double s) {
    fprintf(stderr,
            "epx: rank %d: watchdog: no progress for %.1f s: step %llu, phase \"%s\", %d tokens of this rank in the step\n",
            d->rank, s, (unsigned long long)p->step, p->phase, p->n_rows);
    fflush(stderr);
    nanosleep(&(struct timespec){0, LET_OTHERS_SPEAK_MS * 1000000L}, NULL);
    epx_worker_leave(EPX_WORKER_STUCK);
}

/* 1 when the watch is over. */
static int wait_a_little(epx_watchdog_t *d) {
    struct timespec until;
    int stop;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += POLL_MS * 1000000L;
    if (until.tv_nsec >= 1000000000L) until.tv_sec++, until.tv_nsec -= 1000000000L;
    pthread_mutex_lock(&d->lock);
    if (!d->stop) pthread_cond_timedwait(&d->changed, &d->lock, &until);
    stop = d->stop;
    pthread_mutex_unlock(&d->lock);
    return stop;
}

static void *watch(void *arg) {
    epx_watchdog_t *d = arg;
    epx_rank_position_t now, then = {0};
    uint64_t last = epx_now_ns(), stuck = 0;
    while (!wait_a_little(d)) {
        const uint64_t at = epx_now_ns();
        epx_rank_position(d->rank_object, &now);
        stuck += at - last < MOST_COUNTED_NS ? at - last : MOST_COUNTED_NS;
        if (now.is_idle || now.n_changes != then.n_changes) stuck = 0;
        else if (stuck > (uint64_t)d->seconds * 1000000000u) speak_and_end(d, &now, (double)stuck * 1e-9);
        then = now;
        last = at;
    }
    return NULL;
}

epx_status_t epx_watchdog_start(epx_worker_t *w, int rank, int seconds) {
    pthread_condattr_t attr;
    epx_watchdog_t *d = calloc(1, sizeof *d);
    int e;
    if (!d) return epx_fail(EPX_ERR_NOMEM, "watchdog: no memory");
    d->rank_object = w->rank;
    d->rank = rank;
    d->seconds = seconds > 0 ? seconds : DEFAULT_S;
    pthread_mutex_init(&d->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&d->changed, &attr);
    pthread_condattr_destroy(&attr);
    w->watchdog = d;
    e = pthread_create(&d->thread, NULL, watch, d);
    if (e == 0) return EPX_OK;
    pthread_cond_destroy(&d->changed);
    pthread_mutex_destroy(&d->lock);
    free(d);
    w->watchdog = NULL;
    return epx_fail_errno(EPX_ERR_OS, e, "starting the watchdog");
}

void epx_watchdog_stop(epx_worker_t *w) {
    epx_watchdog_t *d = w->watchdog;
    if (!d) return;
    pthread_mutex_lock(&d->lock);
    d->stop = 1;
    pthread_cond_signal(&d->changed);
    pthread_mutex_unlock(&d->lock);
    pthread_join(d->thread, NULL);
    pthread_cond_destroy(&d->changed);
    pthread_mutex_destroy(&d->lock);
    free(d);
    w->watchdog = NULL;
}
