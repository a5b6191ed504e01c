/* Deterministic inputs of the contract cases: tokens, routing and weights of every rank from one seed. Pure. */
#ifndef EPX_TESTS_HARNESS_BATCH_H
#define EPX_TESTS_HARNESS_BATCH_H

#include "tests/harness/oracle.h"

/* The edge set: what a step's routing looks like. */
typedef enum {
    TH_RANDOM,     /* uneven T, distinct ids */
    TH_ALL_EMPTY,  /* no tokens anywhere */
    TH_ONE_EMPTY,  /* one rank has none */
    TH_FULL,       /* T = max_tokens everywhere */
    TH_SOME_NONE,  /* a third of the ids are -1 */
    TH_ALL_NONE,   /* all ids are -1 */
    TH_REPEATS,    /* few experts, ids repeat within a token */
    TH_ONE_EXPERT, /* every id of every rank is the same expert */
    TH_ABSENT,     /* only every third expert is named */
    TH_ONE_RANK,   /* one rank has tokens, the others none */
    TH_SAME_K,     /* each token names one expert K times */
    TH_N_KINDS,
    TH_COUNTS =
        TH_N_KINDS /* not one of the rounds: bits 2r and 2r + 1 of the seed say whether rank r has 0, 1, T - 1 or T tokens */
} th_kind_t;

/* 64 well mixed bits of (seed, i). */
uint64_t th_mix(uint64_t seed, uint64_t i);
const char *th_kind_name(th_kind_t kind);
/* Fill batches[s->n_ranks]; 0, or -1 without memory. th_batches_fini() frees. */
int th_batches_make(const th_shape_t *s, th_kind_t kind, uint64_t seed, th_batch_t *out_batches);
void th_batches_fini(const th_shape_t *s, th_batch_t *batches);

#endif
