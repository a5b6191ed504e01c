/* Rank launchers: see launch.h. Ranks meet in one shared anonymous mapping, the same for threads and processes. */
#include "tests/harness/launch.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#if TH_ASAN
#include <sanitizer/lsan_interface.h>
#endif

#include "base/atomic.h"
#include "base/clock.h"

enum { BLOB_BYTES = 16384, HUNG_EXIT_CODE = 99 };
static const uint64_t MEET_TIMEOUT_NS = 30000000000u;

typedef struct {
    uint32_t done, outcome;
    char note[TH_TEXT_BYTES], message[TH_TEXT_BYTES];
} rank_state_t;

struct th_meet {
    uint64_t n_arrived;
    uint32_t n_done;
    rank_state_t ranks[TH_MAX_RANKS];
    uint64_t words[TH_N_WORDS];
    char blob[2][TH_MAX_RANKS][BLOB_BYTES];
};

typedef struct {
    th_mode_t mode;
    int n_ranks;
    th_fn_t fn;
    th_meet_t *meet;
    th_rank_t ranks[TH_MAX_RANKS];
    pthread_t threads[TH_MAX_RANKS];
    pid_t pids[TH_MAX_RANKS];
} launch_t;

const char *th_mode_name(th_mode_t mode) { return mode == TH_THREADS ? "threads" : "processes"; }

void th_sleep_us(unsigned us) {
    struct timespec t = {us / 1000000u, (long)(us % 1000000u) * 1000};
    nanosleep(&t, NULL);
}

static int store_message(th_rank_t *r, const char *text) {
    char *m = r->meet->ranks[r->rank].message;
    if (!m[0]) snprintf(m, TH_TEXT_BYTES, "%s", text);
    return -1;
}

int th_fail(th_rank_t *r, const char *fmt, ...) {
    char text[TH_TEXT_BYTES];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return store_message(r, text);
}

int th_fail_at(th_rank_t *r, const char *file, int line, const char *what, const char *fmt, ...) {
    char text[TH_TEXT_BYTES], all[TH_TEXT_BYTES];
    const char *base = strrchr(file, '/');
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    snprintf(all, sizeof all, "%s:%d: %.200s: %.700s", base ? base + 1 : file, line, what, text);
    return store_message(r, all);
}

void th_note(th_rank_t *r, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(r->meet->ranks[r->rank].note, TH_TEXT_BYTES, fmt, ap);
    va_end(ap);
}

uint64_t *th_words(th_rank_t *r) { return r->meet->words; }

epx_status_t th_barrier(void *rank) {
    th_rank_t *r = rank;
    uint64_t wanted = ++r->n_meets * (uint64_t)r->n_ranks, end = epx_now_ns() + MEET_TIMEOUT_NS;
    epx_fetch_add_u64(&r->meet->n_arrived, 1);
    for (int i = 0; epx_load_acquire_u64(&r->meet->n_arrived) < wanted; i++) {
        int gone = epx_load_acquire_u32(&r->meet->n_done) != 0;
        if (gone && epx_load_acquire_u64(&r->meet->n_arrived) < wanted) return EPX_ERR_PEER;
        if (epx_now_ns() > end) return EPX_ERR_TIMEOUT;
        if (i < 200) sched_yield();
        else th_sleep_us(100);
    }
    return EPX_OK;
}

epx_status_t th_allgather(void *rank, const void *mine, size_t n_bytes, void *out_all) {
    th_rank_t *r = rank;
    for (size_t at = 0; at < n_bytes || at == 0; at += BLOB_BYTES) {
        size_t n = n_bytes - at < BLOB_BYTES ? n_bytes - at : BLOB_BYTES;
        int half = (int)(r->n_meets & 1); /* two halves: who writes the same half again has passed a later barrier */
        memcpy(r->meet->blob[half][r->rank], (const char *)mine + at, n);
        epx_status_t s = th_barrier(r);
        if (s != EPX_OK) return s;
        for (int p = 0; p < r->n_ranks; p++) memcpy((char *)out_all + (size_t)p * n_bytes + at, r->meet->blob[half][p], n);
    }
    return EPX_OK;
}

void th_world_config(th_rank_t *r, const char *transports, epx_world_config_t *out_cfg) {
    epx_world_config_init(out_cfg);
    out_cfg->rank = r->rank;
    out_cfg->n_ranks = r->n_ranks;
    out_cfg->allgather = th_allgather;
    out_cfg->barrier = th_barrier;
    out_cfg->ctx = r;
    out_cfg->transports = transports;
}

static void rank_done(th_rank_t *r, th_outcome_t outcome) {
    rank_state_t *st = &r->meet->ranks[r->rank];
    epx_store_relaxed_u32(&st->outcome, (uint32_t)outcome);
    epx_store_release_u32(&st->done, 1);
    __atomic_fetch_add(&r->meet->n_done, 1, __ATOMIC_ACQ_REL);
}

typedef struct {
    launch_t *l;
    int rank;
} thread_arg_t;

static void *thread_main(void *p) {
    thread_arg_t *a = p;
    th_rank_t *r = &a->l->ranks[a->rank];
    rank_done(r, a->l->fn(r) == 0 ? TH_PASS : TH_FAIL);
    return NULL;
}

static void report(launch_t *l, int rank, const char *what) {
    const rank_state_t *st = &l->meet->ranks[rank];
    fprintf(stderr, "  rank %d of %d (%s) %s: %s\n", rank, l->n_ranks, th_mode_name(l->mode), what, st->message);
    if (st->note[0]) fprintf(stderr, "    at: %s\n", st->note);
}

static void report_hung(launch_t *l) {
    for (int i = 0; i < l->n_ranks; i++)
        if (!epx_load_acquire_u32(&l->meet->ranks[i].done)) report(l, i, "HUNG");
        else if (l->meet->ranks[i].outcome != TH_PASS) report(l, i, "failed");
}

/* Wait for all ranks; 1 when one is not done at the deadline. */
static int wait_done(launch_t *l, uint64_t end) {
    for (int i = 0; i < l->n_ranks; i++) {
        while (!epx_load_acquire_u32(&l->meet->ranks[i].done)) {
            if (epx_now_ns() > end) return 1;
            th_sleep_us(200);
        }
    }
    return 0;
}

static void run_threads(launch_t *l, uint64_t end) {
    thread_arg_t args[TH_MAX_RANKS];
    for (int i = 0; i < l->n_ranks; i++) {
        args[i] = (thread_arg_t){l, i};
        if (pthread_create(&l->threads[i], NULL, thread_main, &args[i]) != 0) {
            fprintf(stderr, "th_launch: cannot start thread %d\n", i);
            _exit(HUNG_EXIT_CODE);
        }
    }
    if (wait_done(l, end)) {
        report_hung(l);
        fflush(NULL);
        _exit(HUNG_EXIT_CODE);
    }
    for (int i = 0; i < l->n_ranks; i++) pthread_join(l->threads[i], NULL);
}

static void child_main(launch_t *l, int rank) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    th_rank_t *r = &l->ranks[rank];
    int rc = l->fn(r);
#if TH_ASAN
    if (rc == 0 && __lsan_do_recoverable_leak_check()) rc = th_fail(r, "memory leaked, see the report above");
#endif
    rank_done(r, rc == 0 ? TH_PASS : TH_FAIL);
    fflush(NULL);
    _exit(0);
}

/* A process that ended without saying so was killed; its death also ends barriers. */
static void reap(launch_t *l, int rank, int status) {
    rank_state_t *st = &l->meet->ranks[rank];
    l->pids[rank] = 0;
    if (epx_load_acquire_u32(&st->done)) return;
    char text[64];
    snprintf(text, sizeof text, WIFSIGNALED(status) ? "ended by signal %d" : "ended with code %d",
             WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    store_message(&l->ranks[rank], text);
    rank_done(&l->ranks[rank], WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL ? TH_KILLED : TH_FAIL);
}

static int reap_some(launch_t *l) {
    int n_left = 0;
    for (int i = 0; i < l->n_ranks; i++) {
        int status;
        if (l->pids[i] > 0 && waitpid(l->pids[i], &status, WNOHANG) == l->pids[i]) reap(l, i, status);
        n_left += l->pids[i] > 0;
    }
    return n_left;
}

static void kill_left(launch_t *l) {
    for (int i = 0; i < l->n_ranks; i++) {
        if (l->pids[i] <= 0) continue;
        kill(l->pids[i], SIGKILL);
        waitpid(l->pids[i], NULL, 0);
        epx_store_relaxed_u32(&l->meet->ranks[i].outcome, TH_HUNG);
        epx_store_release_u32(&l->meet->ranks[i].done, 1);
    }
}

static void run_processes(launch_t *l, uint64_t end) {
    fflush(NULL);
    for (int i = 0; i < l->n_ranks; i++) {
        l->pids[i] = fork();
        if (l->pids[i] == 0) child_main(l, i);
        if (l->pids[i] < 0) {
            fprintf(stderr, "th_launch: fork: %s\n", strerror(errno));
            break;
        }
    }
    while (reap_some(l)) {
        if (epx_now_ns() > end) {
            report_hung(l);
            kill_left(l);
            return;
        }
        th_sleep_us(200);
    }
}

int th_launch(th_mode_t mode, int n_ranks, th_fn_t fn, void *arg, unsigned timeout_s, th_outcome_t *out_outcome) {
    launch_t *l = calloc(1, sizeof *l);
    th_meet_t *meet = mmap(NULL, sizeof *meet, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (!l || meet == MAP_FAILED || n_ranks > TH_MAX_RANKS) {
        fprintf(stderr, "th_launch: no memory, or more than %d ranks\n", TH_MAX_RANKS);
        _exit(HUNG_EXIT_CODE);
    }
    *l = (launch_t){.mode = mode, .n_ranks = n_ranks, .fn = fn, .meet = meet};
    for (int i = 0; i < n_ranks; i++)
        l->ranks[i] = (th_rank_t){.rank = i, .n_ranks = n_ranks, .mode = mode, .arg = arg, .meet = meet};
    uint64_t end = epx_now_ns() + timeout_s * 1000000000ull;
    if (mode == TH_THREADS) run_threads(l, end);
    else run_processes(l, end);
    int n_bad = 0;
    for (int i = 0; i < n_ranks; i++) {
        th_outcome_t o = (th_outcome_t)meet->ranks[i].outcome;
        n_bad += o != TH_PASS;
        if (out_outcome) out_outcome[i] = o;
        if (o == TH_FAIL) report(l, i, "failed");
    }
    munmap(meet, sizeof *meet);
    free(l);
    return n_bad;
}

int th_run_alone(int rank, int n_ranks, th_fn_t fn, void *arg) {
    launch_t *l = calloc(1, sizeof *l);
    th_meet_t *meet = calloc(1, sizeof *meet);
    if (!l || !meet || n_ranks > TH_MAX_RANKS || rank < 0 || rank >= n_ranks) {
        fprintf(stderr, "th_run_alone: no memory, or rank %d of %d\n", rank, n_ranks);
        _exit(HUNG_EXIT_CODE);
    }
    *l = (launch_t){.mode = TH_PROCESSES, .n_ranks = n_ranks, .fn = fn, .meet = meet};
    th_rank_t r = {.rank = rank, .n_ranks = n_ranks, .mode = TH_PROCESSES, .arg = arg, .meet = meet};
    int rc = fn(&r);
    if (rc != 0) report(l, rank, "failed");
    free(meet);
    free(l);
    return rc != 0;
}
