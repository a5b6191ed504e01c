/* Continuous batching, first come first served. Pure: no clock, socket, thread or model; the same calls give the same batches.
 *
 * Each step takes every running sequence that is past its prompt with one token, then prompt chunks in order of arrival up to
 * chunk_tokens. A request is admitted only when pages for its prompt and all its new tokens can be reserved, so nothing that
 * runs ever has to give up; a later request never overtakes the head of the queue. One thread. */
#ifndef EPX_ENGINE_SCHED_SCHED_H
#define EPX_ENGINE_SCHED_SCHED_H

#include <stdint.h>

#include "base/status.h"
#include "engine/kv/pool.h"

typedef struct epx_sched epx_sched_t;

typedef struct {
    int32_t max_running;  /* >= 1 */
    int32_t chunk_tokens; /* >= 1 */
    int32_t max_context;  /* >= 1: prompt + new tokens of a request */
} epx_sched_config_t;

/* One request on its way. Owned by the scheduler from submit to release; the fields are for reading, but user is free to use. */
typedef struct epx_seq {
    uint64_t id;
    void *user;
    int32_t n_prompt, max_new;
    int32_t n_tokens;   /* prompt + generated so far */
    int32_t n_computed; /* whose KV is there */
    int32_t *pages;     /* block table, [n_pages]; filled from admission on */
    int32_t n_pages;
    int cancelled, admitted;
    struct epx_seq *next; /* in the queue */
} epx_seq_t;

/* A run of tokens of one sequence in this step. */
typedef struct {
    epx_seq_t *seq;
    int32_t first, n; /* positions [first, first + n) */
    int last;         /* 1: its last row yields the next token */
} epx_sched_item_t;

typedef struct {
    const epx_sched_item_t *items; /* [n_items], borrowed until the next call of epx_sched_next */
    int32_t n_items;
    int32_t n_rows, n_prefill_rows, n_decode_rows;
} epx_sched_batch_t;

/* pool is borrowed until destroy. */
epx_status_t epx_sched_create(const epx_sched_config_t *cfg, epx_kv_pool_t *pool, epx_sched_t **out_s);
/* Frees what is left, giving pages back; users are the caller's. */
void epx_sched_destroy(epx_sched_t *s);
/* Queue a request. EPX_ERR_ARG: n_prompt or max_new below 1, or the id is live. EPX_ERR_CAPACITY with the numbers: longer than
 * the context, or more pages than there are. */
epx_status_t epx_sched_submit(epx_sched_t *s, uint64_t id, int32_t n_prompt, int32_t max_new, void *user, epx_seq_t **out_seq);
/* Mark; epx_sched_take_cancelled hands it out at the next step border. Unknown ids are ignored. */
void epx_sched_cancel(epx_sched_t *s, uint64_t id);
/* A cancelled sequence that the caller must report and release, or NULL. */
epx_seq_t *epx_sched_take_cancelled(epx_sched_t *s);
/* Any live sequence, for ending them all; NULL when there is none. */
epx_seq_t *epx_sched_any(epx_sched_t *s);
/* The next batch, admitting from the queue. n_rows <= max_running + chunk_tokens; 0 only when no request is live. */
void epx_sched_next(epx_sched_t *s, epx_sched_batch_t *out_b);
/* After the batch ran: its tokens count as computed. */
void epx_sched_computed(epx_sched_t *s, const epx_sched_batch_t *b);
/* One token was drawn for the sequence. Returns 1 when it was the last one allowed. */
int epx_sched_token(epx_sched_t *s, epx_seq_t *seq);
/* The sequence is over: pages go back, the sequence is freed. */
void epx_sched_release(epx_sched_t *s, epx_seq_t *seq);
int32_t epx_sched_n_running(const epx_sched_t *s);
int32_t epx_sched_n_waiting(const epx_sched_t *s);

#endif
