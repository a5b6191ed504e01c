/* What an exchange costs by arithmetic: bytes that leave a rank, memory, and times over a link. Uniform routing, distinct
 * experts. The bytes are those that libepx counts (epx_plan_stats); tests/server/plan_test.py compares them with measured ones.
 * Pure. */
#ifndef EPX_APP_PLAN_MODEL_H
#define EPX_APP_PLAN_MODEL_H

#include "epx/epx.h"

typedef struct {
    int n_experts, top_k, hidden, n_tokens, n_ranks;
    int fp8, exact;              /* dispatch wire fp8 + f32 scale per 128 channels, else bf16; combine exact, else prereduced */
    double link_gbs, latency_us; /* each way and rank; of one phase */
    double overhead_us;          /* expected beyond that, of one phase */
    double efficiency;           /* share of the link that a real exchange reaches */
} epx_cost_in_t;

typedef struct {
    double ranks_reached;                    /* other ranks that a token goes to, mean */
    double dispatch_bytes, combine_bytes;    /* leaving a rank, mean over ranks; dispatch with routing tables */
    double gather_bytes;                     /* all-gather of all rows and tables + reduce-scatter */
    double floor_us, expected_us, gather_us; /* gather_us: expected too */
    size_t buffer_bytes;                     /* epx_plan_bytes(), one channel; 0: a plan of this size is refused */
    double major_bytes;                      /* the caller's [El, W * T, H] for EXPERT_MAJOR */
} epx_cost_t;

/* Other ranks that own one of a token's K distinct experts, mean over tokens of all ranks. */
double epx_cost_ranks_reached(int n_experts, int top_k, int n_ranks);
void epx_cost(const epx_cost_in_t *in, epx_cost_t *out);

#endif
