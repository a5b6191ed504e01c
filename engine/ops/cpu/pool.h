/* A small thread pool for one caller: run n items of a job on the caller and the workers.
 * Workers spin for a short time after a job, then park on a futex; a parked or descheduled worker never delays a job it has not
 * joined. Which thread runs which item is unspecified, so items must be independent. */
#ifndef EPX_ENGINE_OPS_CPU_POOL_H
#define EPX_ENGINE_OPS_CPU_POOL_H

#include <stdint.h>

#include "base/status.h"

typedef struct epx_pool epx_pool_t;
/* Do item `item`; `thread` in [0, n_threads) is this thread's index and may pick scratch. */
typedef void (*epx_pool_fn)(void *ctx, int64_t item, int thread);

/* n_threads - 1 workers are started; cpus [n_threads] or NULL: worker i is pinned to cpus[i] (the caller's own affinity is left
 * alone). 1 <= n_threads <= 255. */
epx_status_t epx_pool_create(int n_threads, const int *cpus, epx_pool_t **out_pool);
void epx_pool_destroy(epx_pool_t *pool);
int epx_pool_n_threads(const epx_pool_t *pool);
/* Returns when all items are done. One caller at a time. parallel = 0 keeps the job on the caller. */
void epx_pool_run(epx_pool_t *pool, epx_pool_fn fn, void *ctx, int64_t n_items, int parallel);

#endif
