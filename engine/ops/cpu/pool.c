/* Thread pool: see pool.h. One word, `gate`, carries the whole protocol, so its modification order is the only order needed:
 *   bits  0..7   workers inside the present job
 *   bits  8..15  workers parked (or woken and not yet joined)
 *   bit  16      job open: workers may join
 *   bit  17      stop
 *   bits 18..31  job number, so that a worker joins a job once
 * The caller publishes (release) after it has filled fn, ctx, n_items and next; a worker joins by compare-and-swap (acquire). The
 * caller closes the gate when no item is left to claim and waits until no worker is inside (acquire of the worker's leave). */
#include "engine/ops/cpu/pool.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/atomic.h"
#include "base/clock.h"

#define INSIDE(g) ((g)&0xFFu)
#define PARKED(g) (((g) >> 8) & 0xFFu)
#define ONE_INSIDE 1u
#define ONE_PARKED (1u << 8)
#define OPEN (1u << 16)
#define STOP (1u << 17)
#define ONE_JOB (1u << 18)
#define JOB(g) ((g) >> 18)

/* A futex wake costs about 40 us where the CPU halts, so spinning longer than that gains nothing. */
enum { SPIN_NS = 60000, PAUSES_BEFORE_YIELD = 32 };

struct epx_pool {
    EPX_ALIGNED(64) uint32_t gate;
    EPX_ALIGNED(64) uint64_t next; /* next item to claim */
    EPX_ALIGNED(64) epx_pool_fn fn;
    void *ctx;
    int64_t n_items;
    int n_threads, n_started;
    struct worker {
        epx_pool_t *pool;
        pthread_t thread;
        int idx;
    } * workers; /* owned, [n_threads - 1] */
};

static void claim_items(epx_pool_t *p, int thread) {
    for (;;) {
        int64_t i = (int64_t)epx_fetch_add_u64(&p->next, 1);
        if (i >= p->n_items) return;
        p->fn(p->ctx, i, thread);
    }
}

/* One step of waiting: pause mostly, and yield now and then for machines with more threads than CPUs. */
static void relax(unsigned *n) {
    EPX_CPU_RELAX();
    if (++*n % PAUSES_BEFORE_YIELD == 0) sched_yield();
}

static void leave(epx_pool_t *p) {
    uint32_t g = epx_load_relaxed_u32(&p->gate);
    while (!epx_cas_u32(&p->gate, g, g - ONE_INSIDE)) g = epx_load_relaxed_u32(&p->gate);
}

static void futex_wait(uint32_t *word, uint32_t seen) { syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0); }

/* Wait until a job can be joined or the pool stops. 1: joined; 0: stop. */
static int join_job(epx_pool_t *p, uint32_t *last_job) {
    uint64_t t0 = 0;
    int parked = 0;
    for (unsigned n = 0;;) {
        uint32_t g = epx_load_acquire_u32(&p->gate);
        if (g & STOP) return 0;
        if ((g & OPEN) && JOB(g) != *last_job) {
            if (!epx_cas_u32(&p->gate, g, g + ONE_INSIDE - (parked ? ONE_PARKED : 0))) continue;
            *last_job = JOB(g);
            return 1;
        }
        if (parked) {
            futex_wait(&p->gate, g);
        } else if (n % PAUSES_BEFORE_YIELD == 0 && t0 != 0 && epx_now_ns() - t0 > SPIN_NS) {
            parked = epx_cas_u32(&p->gate, g, g + ONE_PARKED);
        } else {
            if (t0 == 0) t0 = epx_now_ns();
            relax(&n);
        }
    }
}

static void *worker_main(void *arg) {
    struct worker *w = arg;
    uint32_t last_job = UINT32_MAX;
    while (join_job(w->pool, &last_job)) {
        claim_items(w->pool, w->idx);
        leave(w->pool);
    }
    return NULL;
}

/* Apply (g & keep) + add to the gate and wake parked workers if there are any. */
static void publish(epx_pool_t *p, uint32_t set, uint32_t add) {
    uint32_t g = epx_load_relaxed_u32(&p->gate);
    while (!epx_cas_u32(&p->gate, g, (g | set) + add)) g = epx_load_relaxed_u32(&p->gate);
    if (PARKED(g) > 0) syscall(SYS_futex, &p->gate, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static void close_gate(epx_pool_t *p) {
    uint32_t g = epx_load_relaxed_u32(&p->gate);
    while (!epx_cas_u32(&p->gate, g, g & ~OPEN)) g = epx_load_relaxed_u32(&p->gate);
    for (unsigned n = 0; INSIDE(epx_load_acquire_u32(&p->gate)) != 0;) relax(&n);
}

void epx_pool_run(epx_pool_t *p, epx_pool_fn fn, void *ctx, int64_t n_items, int parallel) {
    if (!parallel || p->n_threads == 1 || n_items < 2) {
        for (int64_t i = 0; i < n_items; i++) fn(ctx, i, 0);
        return;
    }
    p->fn = fn;
    p->ctx = ctx;
    p->n_items = n_items;
    epx_store_relaxed_u64(&p->next, 0);
    publish(p, OPEN, ONE_JOB);
    claim_items(p, 0);
    close_gate(p);
}

static epx_status_t start_worker(epx_pool_t *p, int i, const int *cpus) {
    struct worker *w = &p->workers[i - 1];
    pthread_attr_t attr;
    *w = (struct worker){.pool = p, .idx = i};
    int rc = pthread_attr_init(&attr);
    if (rc != 0) return epx_fail_errno(EPX_ERR_NOMEM, rc, "ops: thread attributes");
    if (cpus != NULL) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET((size_t)cpus[i], &set);
        rc = pthread_attr_setaffinity_np(&attr, sizeof set, &set);
    }
    if (rc == 0) rc = pthread_create(&w->thread, &attr, worker_main, w);
    pthread_attr_destroy(&attr);
    if (rc != 0 && cpus != NULL) return epx_fail_errno(EPX_ERR_ARG, rc, "ops: start worker %d on cpus[%d] = %d", i, i, cpus[i]);
    return rc == 0 ? EPX_OK : epx_fail_errno(EPX_ERR_NOMEM, rc, "ops: start worker %d", i);
}

epx_status_t epx_pool_create(int n_threads, const int *cpus, epx_pool_t **out_pool) {
    epx_status_t st = EPX_OK;
    epx_pool_t *p = aligned_alloc(64, sizeof *p);
    if (p == NULL) return epx_fail(EPX_ERR_NOMEM, "ops: thread pool of %d threads", n_threads);
    *p = (epx_pool_t){.n_threads = n_threads};
    p->workers = calloc((size_t)n_threads, sizeof *p->workers);
    if (p->workers == NULL) {
        st = epx_fail(EPX_ERR_NOMEM, "ops: thread pool of %d threads", n_threads);
        goto err_pool;
    }
    for (int i = 1; i < n_threads; i++, p->n_started++) EPX_TRY_GOTO(st, start_worker(p, i, cpus), err_pool);
    *out_pool = p;
    return EPX_OK;
err_pool:
    epx_pool_destroy(p);
    return st;
}

void epx_pool_destroy(epx_pool_t *p) {
    if (p == NULL) return;
    publish(p, STOP, 0);
    for (int i = 0; i < p->n_started; i++) pthread_join(p->workers[i].thread, NULL);
    free(p->workers);
    free(p);
}

int epx_pool_n_threads(const epx_pool_t *p) { return p->n_threads; }
