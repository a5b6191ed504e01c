/* `epx bench a2a --device cuda`: what its parts share. Ranks are threads of this process, rank r on device r % n_devices. A job
 * is one variant of the exchange at one shape; its answers are compared with the oracle first, then graphs of BC_EXCHANGES
 * exchanges, each with its own routing, are timed. Method: docs/benchmarks.md. */
#ifndef EPX_APP_BENCH_CUDA_H
#define EPX_APP_BENCH_CUDA_H

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>

#include "app/cuda_driver.h"
#include "base/compiler.h"
#include "epx/epx.h"

enum { BC_MAX_RANKS = 8, BC_EXCHANGES = 16, BC_MAX_REPLAYS = 64, BC_MAX_RUNS = 9, BC_MAX_JOBS = 512, BC_TEXT = 512 };

typedef struct {
    int n_experts, top_k, hidden, n_tokens;
    int hot;          /* every token goes to experts of rank 0 */
    int fp8;          /* wire: fp8 with f32 scales of 128 channels; else bf16 */
    int exact;        /* combine: exact, else prereduced */
    int fused;        /* experts give one weighted row per (source, token), rows stay in place; else expert-major rows */
    int separate;     /* four calls, else two */
    int n_blocks;     /* 0: the library's choice */
    int overlap;      /* also beside a matrix product */
    const char *peer; /* not the library: "nccl" */
} bc_job_t;

typedef struct {
    bc_job_t job;
    int checked, n_blocks, n_runs;
    double us_p50[BC_MAX_RUNS], us_p99[BC_MAX_RUNS], us_min[BC_MAX_RUNS];
    double alone_us, beside_us, gemm_alone_us, gemm_beside_us; /* overlap: an exchange, a product; 0: not measured */
    double floor_us, link_bytes;                               /* that leave a rank in one exchange: rows, scales */
    uint64_t buffer_bytes;
    char skipped[BC_TEXT]; /* why there is no figure */
} bc_result_t;

/* One rank's inputs of a shape, on the host. Owned. */
typedef struct {
    uint16_t *x;       /* [T + BC_EXCHANGES, H] bf16; exchange i uses T rows from row i on */
    int32_t *ids;      /* [BC_EXCHANGES, T, K] distinct */
    float *weights;    /* [BC_EXCHANGES, T, K] */
    uint8_t *wire;     /* [T] rows of exchange 0 as they travel: codes then scales, or bf16 */
    uint16_t *seen;    /* [T, H] the same as the experts see them, bf16 */
    size_t wire_bytes; /* of a row */
} bc_input_t;

typedef struct {
    int n_ranks, n_devices, n_runs, n_replays;
    uint64_t seed;
    char device[96], nccl_text[96];
    pthread_barrier_t barrier;
    pthread_mutex_t lock;
    int failed;
    char error[BC_TEXT];
    bc_input_t in[BC_MAX_RANKS];
    double us[BC_MAX_RANKS]; /* of the last replay */
    uint8_t nccl_id[128];
    bc_job_t jobs[BC_MAX_JOBS];
    bc_result_t results[BC_MAX_JOBS];
    int n_jobs;
} bc_t;

typedef struct {
    bc_t *b;
    int rank;
    epx_world_t *world;
    epx_group_t *group;
    cu_device_t dev;
    void *nccl; /* communicator */
} bc_rank_t;

/* Run all jobs; results in b->results. 0, or -1 with b->error. */
int bc_run(bc_t *b);
/* Every rank calls it with its own status; 0 when all are well, else -1, and b->error has the first message. */
int bc_agree(bc_rank_t *r, epx_status_t s);
/* The graph of a job on this rank, timed: n_replays times, largest of all ranks, microseconds of one exchange, into out (rank 0).
 * Collective. */
int bc_time(bc_rank_t *r, void *graph, double *out_us, int n);
void bc_summary(bc_result_t *out, int run, double *us, int n);

/* ---- inputs and the oracle (bench_cuda_oracle.c) ---- */
epx_status_t bc_input_make(const bc_t *b, const bc_job_t *j, int rank, bc_input_t *out);
void bc_input_free(bc_input_t *in);
int bc_first_expert(const bc_job_t *j, int n_ranks, int rank);
int bc_owner(const bc_job_t *j, int n_ranks, int expert);
/* Result row of token t of exchange 0 of `rank`, [H] bf16. scratch: [2 H] floats. */
void bc_result_row(const bc_t *b, const bc_job_t *j, int rank, int t, uint16_t *out, float *scratch);
/* What rank `owner` gives back for token t of `src` in the fused case; 0 when none of its experts has it. */
int bc_partial_row(const bc_t *b, const bc_job_t *j, int owner, int src, int t, uint16_t *out, float *scratch);
/* The expert of this bench: odd ones change the sign. */
static inline uint16_t bc_expert(int e, uint16_t v) { return e % 2 ? v ^ 0x8000u : v; }
double bc_floor_us(const bc_t *b, const bc_job_t *j, double *out_link_bytes);

/* ---- exchanges of the library (bench_cuda_ours.c) and of peers (bench_cuda_nccl.c) ---- */
int bc_ours(bc_rank_t *r, bc_result_t *out);
int bc_nccl(bc_rank_t *r, bc_result_t *out);
/* Before the threads start: EPX_OK and a new communicator's id, or EPX_ERR_UNSUPPORTED with the reason. */
epx_status_t bc_nccl_open(bc_t *b);
void bc_nccl_close(bc_rank_t *r);

/* ---- a matrix product meanwhile (bench_cuda_overlap.c) ---- */
/* exchange: a graph of BC_EXCHANGES exchanges. Collective; fills the four figures of out on rank 0. EPX_ERR_UNSUPPORTED without
 * cuBLAS. */
epx_status_t bc_overlap(bc_rank_t *r, void *exchange, bc_result_t *out);

/* ---- report (bench_cuda_report.c) ---- */
void bc_print(const bc_t *b, const bc_result_t *r, FILE *text);
void bc_print_json(const bc_t *b, const bc_result_t *r, FILE *out);

/* `epx bench a2a --device cuda ...` */
int epx_command_bench_cuda(int argc, char **argv);

#endif
