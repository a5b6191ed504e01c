/* What the MPI peers of the exchange bench share. */
#ifndef EPX_BENCH_MPI_PEERS_H
#define EPX_BENCH_MPI_PEERS_H

#include <mpi.h>

#include "app/bench_a2a.h"

typedef struct {
    int32_t expert;
    float weight;
} place_t;

/* Buffers of a variant; rows are in rank order on both sides. Each variant uses some of them. */
typedef struct {
    uint16_t *x, *out, *send, *recv, *y, *back;
    int *send_row_of;
    place_t *send_meta, *recv_meta;
    float *sums;      /* all-gather: [W, T, H] */
    float *factors;   /* all-gather: [BENCH_TABLES][W, T] of the own experts */
    size_t box_bytes; /* messages: largest one */
    int n_send[BENCH_MAX_RANKS], n_recv[BENCH_MAX_RANKS];
} mpi_t;

/* Sum of weight * factor over the own experts of an own token; 0: none (weights are positive). */
float mpi_own_factor(bench_rank_t *r, int table, size_t t);
/* The same from the places that came with a row; the last may be -1. */
float mpi_factor(const place_t *meta, int top_k);
void mpi_close(bench_variant_t *v);
/* Isend/Irecv, and all-gather + reduce-scatter. As bench_adder_t. */
int mpi_add_messages(bench_rank_t *r, bench_variant_t *v, int n);

#endif
