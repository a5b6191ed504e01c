/* Ranks of the exchange bench: meeting, checking, timing. Variants of a job take turns in blocks; before every iteration the
 * owner rewrites its rows outside the time, and all ranks pass a barrier. The time of an iteration is the latest end minus the
 * earliest start. A block in which a rank lacked its core for more than 1.5 % of the time is dropped. One thread a rank. */
#include <errno.h>
#include <sched.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

#include "app/bench_a2a.h"
#include "base/atomic.h"
#include "base/clock.h"
#include "base/status.h"

enum { PING_TURNS = 2000, POLLS_PER_YIELD = 50, TURNS_PER_BLOCK = 4 };
#define BARRIER_TIMEOUT_NS UINT64_C(60000000000)
#define CPU_SHARE 0.985

/* ---- meeting ---- */

bench_run_t *bench_run_map(int fd, size_t n_bytes) {
    struct stat st;
    if (n_bytes == 0 && fstat(fd, &st) == 0) n_bytes = (size_t)st.st_size;
    void *p = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) {
        (void)epx_fail_errno(EPX_ERR_OS, errno, "mapping %zu bytes of the run file", n_bytes);
        return NULL;
    }
    return p;
}

char *bench_peer_area(bench_run_t *run, int rank) {
    return (char *)run + (sizeof *run + 4095) / 4096 * 4096 + (uint64_t)rank * run->peer_area_bytes;
}

int bench_fail(bench_run_t *run, const char *fmt, ...) {
    va_list ap;
    if (!epx_cas_u32(&run->failed, 0, 1)) return -1;
    va_start(ap, fmt);
    vsnprintf(run->error, sizeof run->error, fmt, ap);
    va_end(ap);
    epx_store_release_u32(&run->failed, 2);
    return -1;
}

/* Ranks beyond the cores yield, others only spin: as the library's waits do. */
static void relax(const bench_run_t *run, int *polls) {
    if (run->n_ranks > run->n_cores && ++*polls % POLLS_PER_YIELD == 0) sched_yield();
    else EPX_CPU_RELAX();
}

int bench_barrier(bench_rank_t *r) {
    bench_run_t *run = r->run;
    uint64_t wanted = ++r->n_barriers * (uint64_t)run->n_ranks, end = 0;
    int polls = 0;
    epx_fetch_add_u64(&run->n_arrived, 1);
    for (uint32_t i = 1; epx_load_acquire_u64(&run->n_arrived) < wanted; i++) {
        if (epx_load_relaxed_u32(&run->failed)) return -1;
        relax(run, &polls);
        if (i % 65536) continue;
        uint64_t now = epx_now_ns();
        if (end == 0) end = now + BARRIER_TIMEOUT_NS;
        if (now > end) return bench_fail(run, "rank %d waited 60 s for the others", r->rank);
    }
    return 0;
}

static epx_status_t world_allgather(void *ctx, const void *mine, size_t n_bytes, void *out_all) {
    bench_rank_t *r = ctx;
    int half = (int)(r->n_barriers & 1);
    if (n_bytes > BENCH_BLOB_BYTES) return EPX_ERR_ARG;
    memcpy(r->run->blob[half][r->rank], mine, n_bytes);
    if (bench_barrier(r)) return EPX_ERR_PEER;
    for (int i = 0; i < r->run->n_ranks; i++) memcpy((char *)out_all + (size_t)i * n_bytes, r->run->blob[half][i], n_bytes);
    return EPX_OK;
}

static epx_status_t world_barrier(void *ctx) { return bench_barrier(ctx) ? EPX_ERR_PEER : EPX_OK; }

static int join(bench_rank_t *r) {
    epx_world_config_t cfg;
    epx_world_config_init(&cfg);
    cfg.rank = r->rank;
    cfg.n_ranks = r->run->n_ranks;
    cfg.allgather = world_allgather;
    cfg.barrier = world_barrier;
    cfg.ctx = r;
    if (epx_world_create(&cfg, &r->world) < 0 || epx_group_create(r->world, NULL, 0, -1, &r->group) < 0)
        return bench_fail(r->run, "rank %d: %s", r->rank, epx_last_error());
    return 0;
}

static void pin(const bench_run_t *run, int rank) {
    cpu_set_t all, one;
    int want = rank % run->n_cores;
    if (sched_getaffinity(0, sizeof all, &all) != 0) return;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &all) || want-- > 0) continue;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        (void)sched_setaffinity(0, sizeof one, &one);
        return;
    }
}

/* ---- one iteration ---- */

static uint64_t thread_cpu_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* As the layer before would: the rows are written by this core right before the exchange. */
static void rewrite_rows(const bench_rank_t *r, const bench_variant_t *v, int table) {
    size_t n = (size_t)r->job->n_tokens * (size_t)r->job->hidden * sizeof(uint16_t);
    if (v->x) memcpy(v->x, bench_rows(r, table), n);
}

static int iterate(bench_rank_t *r, bench_variant_t *v, int table, int slot) {
    rewrite_rows(r, v, table);
    if (bench_barrier(r)) return -1;
    uint64_t start = epx_now_ns();
    if (v->step(r, v, table)) return -1;
    r->run->end_ns[r->rank][slot] = epx_now_ns();
    r->run->start_ns[r->rank][slot] = start;
    return 0;
}

/* Outputs against the oracle, over poison, with tables that the timing uses too. */
static int check(bench_rank_t *r, bench_variant_t *v) {
    size_t n = (size_t)r->job->n_tokens * (size_t)r->job->hidden * sizeof(uint16_t);
    for (int i = 0; i < BENCH_CHECKS; i++) {
        if (v->out) memset(v->out, 0xA5, n);
        if (iterate(r, v, i * 5, 0)) return -1;
        if (v->out && !bench_is_right(r, i * 5, v->out))
            return bench_fail(r->run, "rank %d: wrong result of %s, E %d K %d H %d T %d", r->rank, v->about.name,
                              r->job->n_experts, r->job->top_k, r->job->hidden, r->job->n_tokens);
        if (bench_barrier(r)) return -1;
    }
    v->about.checked = v->out != NULL;
    return 0;
}

/* ---- blocks ---- */

/* Rank 0: samples of the block into the variant's lists. */
static void take_samples(bench_run_t *run, bench_variant_t *v, int n) {
    uint64_t cpu = 0, wall = 0;
    int w = run->n_ranks, busy = w < run->n_cores ? w : run->n_cores;
    for (int i = 0; i < w; i++) {
        cpu += run->cpu_ns[i];
        wall = run->wall_ns[i] > wall ? run->wall_ns[i] : wall;
    }
    int quiet = (double)cpu >= CPU_SHARE * (double)wall * busy;
    v->about.n_blocks += quiet;
    v->about.n_dropped_blocks += !quiet;
    for (int i = 0; i < n; i++) {
        uint64_t first = UINT64_MAX, last = 0;
        for (int k = 0; k < w; k++) {
            first = run->start_ns[k][i] < first ? run->start_ns[k][i] : first;
            last = run->end_ns[k][i] > last ? run->end_ns[k][i] : last;
        }
        double us = (double)(last - first) / 1000;
        v->last_us = us;
        if (v->n_all < BENCH_MAX_SAMPLES) v->all[v->n_all++] = us;
        if (quiet && v->n_clean < BENCH_MAX_SAMPLES) v->clean[v->n_clean++] = us;
    }
}

static int choose_iters(const bench_run_t *run, const bench_variant_t *v) {
    double n = v->last_us > 0 ? (double)run->block_ns / 1000 / (v->last_us + 2) : 20;
    return n < 3 ? 3 : n > BENCH_BLOCK_ITERS ? BENCH_BLOCK_ITERS : (int)n;
}

static int run_block(bench_rank_t *r, bench_variant_t *v, int serial) {
    bench_run_t *run = r->run;
    if (r->rank == 0) run->block_iters = choose_iters(run, v);
    if (bench_barrier(r)) return -1;
    int n = run->block_iters;
    for (int i = 0; i < 2; i++)
        if (iterate(r, v, serial + i, 0)) return -1;
    if (bench_barrier(r)) return -1;
    uint64_t cpu = thread_cpu_ns(), wall = epx_now_ns();
    for (int i = 0; i < n; i++)
        if (iterate(r, v, serial * 7 + i, i)) return -1;
    if (bench_barrier(r)) return -1;
    run->cpu_ns[r->rank] = thread_cpu_ns() - cpu;
    run->wall_ns[r->rank] = epx_now_ns() - wall;
    if (bench_barrier(r)) return -1;
    if (r->rank == 0) take_samples(run, v, n);
    return 0;
}

/* Rank 0 decides when a job has enough. */
static int job_done(const bench_run_t *run, const bench_variant_t *v, int n, int turn) {
    int enough = 1;
    for (int i = 0; i < n; i++) enough &= v[i].about.n_blocks >= run->n_blocks;
    return enough || turn >= TURNS_PER_BLOCK * run->n_blocks;
}

static int time_variants(bench_rank_t *r, bench_variant_t *v, int n) {
    for (int turn = 0;; turn++) {
        if (r->rank == 0) r->run->block_iters = job_done(r->run, v, n, turn) ? 0 : 1;
        if (bench_barrier(r)) return -1;
        if (r->run->block_iters == 0) return 0;
        if (bench_barrier(r)) return -1; /* everyone has read it before run_block() writes it */
        for (int i = 0; i < n; i++)
            if (run_block(r, &v[i], turn)) return -1;
    }
}

/* ---- flag time ---- */

static int cmp_u64(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Median one-way time of a flag between ranks 0 and 1 in ns; other ranks only pass the barriers. 0 with one rank. */
static int flag_time(bench_rank_t *r, int *out_ns) {
    static uint64_t turns[PING_TURNS];
    bench_run_t *run = r->run;
    int polls = 0;
    if (r->rank == 0) run->ping = run->pong = 0;
    if (bench_barrier(r)) return -1;
    for (uint64_t i = 1; r->rank < 2 && run->n_ranks > 1 && i <= PING_TURNS; i++) {
        uint64_t start = epx_now_ns();
        if (r->rank == 0) epx_store_release_u64(&run->ping, i);
        while (epx_load_acquire_u64(r->rank == 0 ? &run->pong : &run->ping) < i) relax(run, &polls);
        if (r->rank == 1) epx_store_release_u64(&run->pong, i);
        turns[i - 1] = epx_now_ns() - start;
    }
    if (run->n_ranks > 1) qsort(turns, PING_TURNS, sizeof turns[0], cmp_u64);
    if (r->rank == 0) *out_ns = (int)(turns[PING_TURNS / 2] / 2);
    return bench_barrier(r);
}

/* ---- a job ---- */

static int cmp_double(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Rank 0. With too few undisturbed blocks all samples count, and the result says so. */
static void summarise(bench_variant_t *v) {
    bench_result_t *a = &v->about;
    a->quiet = a->n_blocks >= 2;
    double *s = a->quiet ? v->clean : v->all;
    a->n_samples = a->quiet ? v->n_clean : v->n_all;
    qsort(s, (size_t)a->n_samples, sizeof *s, cmp_double);
    a->us_p50 = s[a->n_samples / 2];
    a->us_p99 = s[(a->n_samples - 1) * 99 / 100];
}

/* Bytes of one round of all tables, by the library's counters: most of any rank. */
static int count_wire(bench_rank_t *r, bench_variant_t *v) {
    bench_run_t *run = r->run;
    uint64_t before = v->wire ? v->wire(v) : 0, most = 0;
    for (int i = 0; v->wire && i < BENCH_TABLES; i++)
        if (iterate(r, v, i, 0)) return -1;
    run->wire_bytes[r->rank] = v->wire ? (v->wire(v) - before) / BENCH_TABLES : 0;
    if (bench_barrier(r)) return -1;
    for (int i = 0; i < run->n_ranks; i++) most = run->wire_bytes[i] > most ? run->wire_bytes[i] : most;
    v->about.wire_bytes = most;
    return bench_barrier(r);
}

static int count_logical(bench_rank_t *r, bench_job_t *job) {
    bench_run_t *run = r->run;
    uint64_t rows = 0, most = 0;
    for (int i = 0; i < BENCH_TABLES; i++) rows += bench_remote_rows(r, i, NULL);
    run->logical_bytes[r->rank] = rows * (uint64_t)job->hidden * 4 / BENCH_TABLES;
    if (bench_barrier(r)) return -1;
    for (int i = 0; i < run->n_ranks; i++) most = run->logical_bytes[i] > most ? run->logical_bytes[i] : most;
    if (r->rank == 0) job->logical_bytes = most;
    return 0;
}

static int measure(bench_rank_t *r, bench_variant_t *v, int n, bench_job_t *job) {
    int ns[2] = {0, 0};
    for (int i = 0; i < n; i++) {
        if (r->rank == 0) {
            v[i].all = malloc(BENCH_MAX_SAMPLES * sizeof *v[i].all);
            v[i].clean = malloc(BENCH_MAX_SAMPLES * sizeof *v[i].clean);
            if (!v[i].all || !v[i].clean) return bench_fail(r->run, "no memory for samples");
        }
        if (check(r, &v[i]) || count_wire(r, &v[i])) return -1;
    }
    if (count_logical(r, job) || flag_time(r, &ns[0]) || time_variants(r, v, n) || flag_time(r, &ns[1])) return -1;
    for (int i = 0; r->rank == 0 && i < n; i++) {
        summarise(&v[i]);
        r->run->results[job - r->run->jobs][i] = v[i].about;
    }
    if (r->rank == 0) {
        job->flag_ns_before = ns[0];
        job->flag_ns_after = ns[1];
        r->run->n_results[job - r->run->jobs] = n;
    }
    return bench_barrier(r);
}

static int run_job(bench_rank_t *r, bench_job_t *job, bench_adder_t peers) {
    static bench_variant_t v[BENCH_MAX_VARIANTS];
    int n = 0, rc = -1;
    memset(v, 0, sizeof v);
    r->job = job;
    if (bench_batch_make(r) == 0) n = bench_add_ours(r, v, 0);
    if (n >= 0 && r->batch.weights) n = bench_add_bounds(r, v, n);
    if (n >= 0 && peers) n = peers(r, v, n);
    if (n > 0) rc = measure(r, v, n, job);
    for (int i = 0; i < BENCH_MAX_VARIANTS; i++) {
        if (v[i].close) v[i].close(&v[i]);
        free(v[i].all);
        free(v[i].clean);
    }
    bench_batch_free(&r->batch);
    return rc;
}

int bench_rank_main(bench_run_t *run, int rank, bench_adder_t peers) {
    bench_rank_t r = {.run = run, .rank = rank};
    int rc;
    pin(run, rank);
    rc = join(&r);
    for (int i = 0; rc == 0 && i < run->n_jobs; i++) rc = run_job(&r, &run->jobs[i], peers);
    epx_group_destroy(r.group);
    epx_world_destroy(r.world);
    return rc != 0;
}
