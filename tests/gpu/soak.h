/* Parts of soak_gpu. */
#ifndef EPX_TESTS_GPU_SOAK_H
#define EPX_TESTS_GPU_SOAK_H

#include "tests/gpu/ranks.h"

typedef struct {
    int n_devices, n_replays, n_ranks;
    int shape; /* of replays: index of the table in soak_gpu.c */
} soak_args_t;

/* How much other work is slowed by an exchange that waits for a late rank: prints a line for each way to wait. */
int soak_waiting(th_rank_t *r, tg_rank_t *k);

#endif
