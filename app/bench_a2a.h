/* `epx bench a2a`: what its parts share. Ranks are processes that meet in one mapped file (run_t): jobs go in, samples and
 * counters come out. A job is one shape, token count and skew; a variant is one way to do its exchange, or a bound on it.
 * The MPI peers (bench/peers) join the same run with more variants, so that all figures of a job come from one run.
 * Method: docs/benchmarks.md. */
#ifndef EPX_APP_BENCH_A2A_H
#define EPX_APP_BENCH_A2A_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/compiler.h"
#include "epx/epx.h"

enum {
    BENCH_MAX_RANKS = 16,
    BENCH_MAX_JOBS = 96,
    BENCH_MAX_VARIANTS = 64,
    BENCH_MAX_SAMPLES = 4000, /* of a variant and job */
    BENCH_BLOCK_ITERS = 400,
    BENCH_TABLES = 16, /* routing tables used in turn */
    BENCH_CHECKS = 3,
    BENCH_BLOB_BYTES = 4096,
    BENCH_SAME_CORE_NS = 60 /* a flag faster than this: both virtual cores are one physical core */
};

typedef enum { BENCH_UNIFORM, BENCH_ZIPF, BENCH_HOT } bench_skew_t;
typedef enum { BENCH_OURS, BENCH_PEER, BENCH_BOUND } bench_kind_t;

typedef struct {
    int n_experts, top_k, hidden, n_tokens;
    bench_skew_t skew;
    int flag_ns_before, flag_ns_after; /* out: one way */
    uint64_t logical_bytes;            /* out: most of any rank: one row out and one bf16 row back per (token, other rank) */
} bench_job_t;

/* What a variant is, and what came of it. */
typedef struct {
    char name[48];
    bench_kind_t kind;
    char backend[16], combine[16], layout[16], input[16], dtype[16]; /* ours */
    int checked;                                                     /* outputs equal the oracle's, bit for bit, on all ranks */
    int n_samples, n_blocks, n_dropped_blocks, quiet;                /* quiet: only undisturbed blocks count */
    double us_p50, us_p99;
    uint64_t buffer_bytes; /* of the plan, one rank */
    uint64_t wire_bytes;   /* of one exchange: most of any rank, by the library's counters */
} bench_result_t;

typedef struct {
    int n_ranks, n_jobs, n_cores, want_peers;
    int n_blocks;      /* undisturbed blocks wanted of each variant */
    uint64_t block_ns; /* aimed length of a block */
    uint64_t seed, peer_area_bytes, file_bytes;
    char backends[64], combines[64], layouts[64], inputs[64], dtypes[64]; /* comma separated */

    uint64_t n_arrived EPX_ALIGNED(64);
    uint32_t failed EPX_ALIGNED(64);
    char error[1024]; /* of the first rank that failed */
    uint64_t ping EPX_ALIGNED(64);
    uint64_t pong EPX_ALIGNED(64);
    int block_iters EPX_ALIGNED(64); /* set by rank 0 before each block; 0: this variant is done */
    char blob[2][BENCH_MAX_RANKS][BENCH_BLOB_BYTES];
    uint64_t flags[BENCH_MAX_RANKS][BENCH_MAX_RANKS][8]; /* of the process-copy bound: [to][from], a cache line each */
    uint64_t start_ns[BENCH_MAX_RANKS][BENCH_BLOCK_ITERS], end_ns[BENCH_MAX_RANKS][BENCH_BLOCK_ITERS];
    uint64_t cpu_ns[BENCH_MAX_RANKS], wall_ns[BENCH_MAX_RANKS], wire_bytes[BENCH_MAX_RANKS], logical_bytes[BENCH_MAX_RANKS];
    int checked[BENCH_MAX_RANKS];

    bench_job_t jobs[BENCH_MAX_JOBS];
    int n_results[BENCH_MAX_JOBS];
    bench_result_t results[BENCH_MAX_JOBS][BENCH_MAX_VARIANTS];
} bench_run_t; /* followed by peer_area_bytes for each rank */

/* The inputs of one rank and job. Owned by the rank. Values are small integers, so every sum is exact in bf16. */
typedef struct {
    uint16_t *rows;  /* [T + BENCH_TABLES, H] bf16; iteration i uses T rows from row i % BENCH_TABLES on */
    int32_t *ids;    /* [BENCH_TABLES, T, K] */
    float *weights;  /* [BENCH_TABLES, T, K] */
    int n_local_max; /* experts of the rank with most */
} bench_batch_t;

typedef struct {
    bench_run_t *run;
    int rank;
    uint64_t n_barriers;
    epx_world_t *world;
    epx_group_t *group;
    const bench_job_t *job;
    bench_batch_t batch;
} bench_rank_t;

/* A variant on one rank. */
typedef struct bench_variant bench_variant_t;
struct bench_variant {
    bench_result_t about;
    void *state;
    uint16_t *x;                                                 /* where the owner's rows go before an iteration: [T, H] bf16 */
    uint16_t *out;                                               /* results [T, H] bf16; NULL: a bound, nothing to check */
    int (*step)(bench_rank_t *r, bench_variant_t *v, int table); /* timed; 0 or -1 after bench_fail() */
    uint64_t (*wire)(bench_variant_t *v);                        /* bytes since create; NULL: not counted */
    void (*close)(bench_variant_t *v);
    double last_us;      /* rank 0's estimate */
    double *clean, *all; /* rank 0: samples in us */
    int n_clean, n_all;
};

/* Appends variants of a job to v[n]; returns the new count, or -1 after bench_fail(). Same order on all ranks. */
typedef int (*bench_adder_t)(bench_rank_t *r, bench_variant_t *v, int n);
int bench_add_ours(bench_rank_t *r, bench_variant_t *v, int n);
int bench_add_bounds(bench_rank_t *r, bench_variant_t *v, int n);

/* ---- run (bench_a2a_run.c) ---- */

/* Map the run file; NULL with a message of epx_fail() on failure. n_bytes 0: as the file says. */
bench_run_t *bench_run_map(int fd, size_t n_bytes);
char *bench_peer_area(bench_run_t *run, int rank);
/* The whole life of a rank. peers: variants of another library, or NULL. Returns the exit code. */
int bench_rank_main(bench_run_t *run, int rank, bench_adder_t peers);
/* Store the message of the first failure; every barrier then fails. Returns -1. */
int bench_fail(bench_run_t *run, const char *fmt, ...) EPX_PRINTF(2, 3);
/* All ranks; 0, or -1 when a rank has failed. */
int bench_barrier(bench_rank_t *r);

/* ---- batch (bench_a2a_batch.c) ---- */

/* First expert of a rank with an even split, and of the rank after the last: E. */
int bench_first_expert(const bench_job_t *job, int n_ranks, int rank);
int bench_owner(const bench_job_t *job, int n_ranks, int expert);
/* What expert e multiplies a row by. */
static inline float bench_factor(int expert) { return (float)(1 + (expert & 1)); }
/* 0, or -1 after bench_fail(). */
int bench_batch_make(bench_rank_t *r);
void bench_batch_free(bench_batch_t *b);
const int32_t *bench_ids(const bench_rank_t *r, int table);
const float *bench_weights(const bench_rank_t *r, int table);
const uint16_t *bench_rows(const bench_rank_t *r, int table);
/* (token, other rank) pairs of a table of this rank. to: the ranks' counts [W], own included, or NULL. */
uint64_t bench_remote_rows(const bench_rank_t *r, int table, int *to);
/* 1 when out is the sum that `table` gives. */
int bench_is_right(const bench_rank_t *r, int table, const uint16_t *out);

/* ---- rows (bench_a2a_rows.c): bf16, AVX-512, AVX2 or plain C, whichever this processor has ---- */

/* Memory for rows, on a cache line: malloc's large blocks start 16 bytes into one, and then every vector crosses two. free() it.
 */
void *bench_alloc_rows(size_t n_bytes);
/* y = bf16(factor * x). The expert of this bench. Both sides are asked for 512 bytes ahead. */
void bench_expert_row(uint16_t *y, const uint16_t *x, float factor, size_t n);
/* out = factor * x in f32; out = bf16(x). For the all-gather + reduce-scatter of peers. */
void bench_scale_row(float *out, const uint16_t *x, float factor, size_t n);
void bench_round_row(uint16_t *out, const float *x, size_t n);
/* out = bf16(sum of weight * row in order); weights NULL: plain sum. */
void bench_sum_rows(uint16_t *out, const uint16_t *const *rows, const float *weights, int n_rows, size_t n);
/* Copy one row, asking for source and target 512 bytes ahead. */
void bench_copy_row(uint16_t *dst, const uint16_t *src, size_t n);

/* ---- report (bench_a2a_report.c) ---- */

const char *bench_skew_name(bench_skew_t s);
const bench_result_t *bench_find(const bench_run_t *run, int job, const char *name);
/* One JSON object a line for every variant of a job. peers: "none", or which MPI the peers ran on. */
void bench_print_json(const bench_run_t *run, int job, const char *peers, FILE *out);
/* A table for people. */
void bench_print_table(const bench_run_t *run, int job, FILE *out);
/* "W ROW_BYTES TOKENS BACKEND" a job: collective where it is more than 3 % faster in every mode of the run, else onesided. 0, or
 * -1 with a message. */
int bench_write_tune(const bench_run_t *run, const char *path);
/* Time against tokens, a panel for each shape and skew. 0, or -1 with a message. */
int bench_write_svg(const bench_run_t *run, const char *path);

#endif
