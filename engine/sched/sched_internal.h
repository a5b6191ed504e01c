/* The inside of a scheduler, shared by sched.c (life, queue) and batch.c (what runs next). */
#ifndef EPX_ENGINE_SCHED_SCHED_INTERNAL_H
#define EPX_ENGINE_SCHED_SCHED_INTERNAL_H

#include "engine/sched/sched.h"

struct epx_sched {
    epx_sched_config_t cfg;
    epx_kv_pool_t *pool;  /* borrowed */
    epx_prefix_t *prefix; /* NULL: no prefix cache */
    int32_t page_size;
    epx_seq_t **running; /* [n_running of max_running], in order of admission */
    int32_t n_running;
    epx_seq_t **waiting; /* [n_waiting of cap_waiting], by priority and arrival */
    int32_t n_waiting, cap_waiting, n_cancelled;
    uint64_t n_arrived;
    epx_sched_item_t *items; /* [max_running] */
    double ratio, ratio_first, ratio_least, ratio_step;
    uint64_t n_retracted, n_prefix_tokens, n_cached_tokens;
};

/* ---- sched.c ---- */
/* Insert into the queue at its place. There is always room: submit makes it for every live sequence. */
void epx_sched_enqueue(epx_sched_t *s, epx_seq_t *q);
void epx_sched_dequeue(epx_sched_t *s, const epx_seq_t *q);
void epx_sched_unlink_running(epx_sched_t *s, const epx_seq_t *q);
/* Hand the sequence's pages to the cache or the pool; it holds none afterwards. */
void epx_sched_drop_kv(epx_sched_t *s, epx_seq_t *q);

#endif
