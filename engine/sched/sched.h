/* Continuous batching of one rank: which tokens run in the next step. Pure: no clock, socket, thread or model; the same calls
 * give the same batches. One thread.
 *
 * A step is prompt chunks up to chunk_tokens, or else one token of every running sequence; with `mixed` both. The head of the
 * queue (priority, then arrival; with EPX_SCHED_LPM the longest cached prefix) is admitted when the tokens that are certain and
 * an estimated share of those that may come fit into the KV pool. The estimate is optimistic, so the pool may run out: then the
 * sequences with the fewest generated tokens are retracted: their KV is dropped (or left to the prefix cache), they wait again in
 * their old place, and when admitted again their tokens so far are computed anew, which gives the same bits (engine/ops row
 * rule). The rules of estimate, retraction and chunking are SGLang's; where they differ it says so at the place. */
#ifndef EPX_ENGINE_SCHED_SCHED_H
#define EPX_ENGINE_SCHED_SCHED_H

#include <stdint.h>

#include "base/status.h"
#include "engine/kv/pool.h"
#include "engine/kv/prefix.h"

typedef struct epx_sched epx_sched_t;

typedef enum { EPX_SCHED_FCFS = 0, EPX_SCHED_LPM = 1 } epx_sched_policy_t;

typedef struct {
    int32_t max_running;        /* >= 1 */
    int32_t chunk_tokens;       /* >= 1: prompt tokens of a step */
    int32_t max_context;        /* >= 1: prompt + new tokens of a request */
    int32_t max_prefill_tokens; /* of one step, unless the first prompt of the step alone is longer; 0: no further limit */
    int mixed;                  /* 1: a step with prompt chunks also decodes */
    int prefix_cache;           /* 1: keep the KV of finished and retracted sequences for later prefixes */
    epx_sched_policy_t policy;  /* LPM counts as FCFS without prefix cache and while more than 128 requests wait */
    double conservativeness;    /* > 0; 1: 0.7 of the allowed new tokens are reserved at first */
} epx_sched_config_t;

/* Fields of a request; tokens is borrowed until release. */
typedef struct {
    uint64_t id;
    int32_t *tokens; /* [n_prompt + max_new], the first n_prompt set; epx_sched_token() adds to it */
    int32_t n_prompt, max_new;
    int32_t priority; /* the larger goes first */
    int whole_prompt; /* 1: every prompt token must be computed (someone wants its logits): no cached prefix */
    void *user;
} epx_sched_request_t;

/* One request on its way. Owned by the scheduler from submit to release; the fields are for reading, but user is free to use. */
typedef struct epx_seq {
    uint64_t id;
    void *user;
    int32_t *tokens; /* borrowed */
    int32_t n_prompt, max_new, priority;
    int whole_prompt;
    int32_t n_tokens;   /* prompt + generated so far */
    int32_t n_computed; /* whose KV is there */
    int32_t n_prefill;  /* tokens that are computed as prefill since the last admission */
    int32_t n_cached;   /* of these, taken from the prefix cache */
    int32_t n_retracted;
    int32_t *pages;         /* block table; [n_held] are valid */
    int32_t n_held, n_tree; /* pages held; of these the tree's: the leading ones */
    epx_prefix_node_t *node;
    uint64_t arrival;
    int cancelled, admitted;
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
    int32_t n_new, n_cached; /* requests admitted in this step, and their tokens from the prefix cache */
    int32_t n_retracted;
} epx_sched_batch_t;

typedef struct {
    int32_t n_running, n_waiting;
    uint64_t n_retracted;                      /* since create */
    uint64_t n_prefix_tokens, n_cached_tokens; /* of admissions since create: tokens looked up, tokens found */
    int32_t n_used_pages, n_evictable_pages;   /* in use by running sequences; kept only by the cache */
    double new_token_ratio;                    /* the present estimate */
} epx_sched_stats_t;

/* Everything off or unlimited but the three sizes; conservativeness 1, no prefix cache, not mixed, FCFS. */
void epx_sched_config_init(epx_sched_config_t *cfg, int32_t max_running, int32_t chunk_tokens, int32_t max_context);
/* pool is borrowed until destroy. */
epx_status_t epx_sched_create(const epx_sched_config_t *cfg, epx_kv_pool_t *pool, epx_sched_t **out_s);
/* Frees what is left, giving pages back; users are the caller's. */
void epx_sched_destroy(epx_sched_t *s);
/* Most rows that a step can have. */
int32_t epx_sched_max_rows(const epx_sched_config_t *cfg);
/* Queue a request. EPX_ERR_ARG: n_prompt or max_new below 1, or the id is live. EPX_ERR_CAPACITY with the numbers: longer than
 * the context, or more pages than there are. */
epx_status_t epx_sched_submit(epx_sched_t *s, const epx_sched_request_t *req, epx_seq_t **out_seq);
/* Mark; epx_sched_take_cancelled hands it out at the next step border. Unknown ids are ignored. */
void epx_sched_cancel(epx_sched_t *s, uint64_t id);
/* A cancelled sequence that the caller must report and release, or NULL. */
epx_seq_t *epx_sched_take_cancelled(epx_sched_t *s);
/* Any live sequence, for ending them all; NULL when there is none. */
epx_seq_t *epx_sched_any(epx_sched_t *s);
/* The next batch: admits from the queue, retracts when the pool has run out. n_rows <= epx_sched_max_rows(); 0 only when no
 * request is live. */
void epx_sched_next(epx_sched_t *s, epx_sched_batch_t *out_b);
/* After the batch ran: its tokens count as computed, and whole pages of prompts can be shared. */
void epx_sched_computed(epx_sched_t *s, const epx_sched_batch_t *b);
/* This token was drawn for the sequence. Returns 1 when it was the last one allowed. */
int epx_sched_token(epx_sched_t *s, epx_seq_t *seq, int32_t token);
/* The sequence is over: its KV goes to the prefix cache or back to the pool, the sequence is freed. */
void epx_sched_release(epx_sched_t *s, epx_seq_t *seq);
/* Take n pages for other uses, evicting what is only cached; 0 when there are not so many. Give them back to the pool. */
int epx_sched_take_pages(epx_sched_t *s, int32_t n, int32_t *out_pages);
/* Give back every page that only the prefix cache keeps. */
void epx_sched_flush_cache(epx_sched_t *s);
void epx_sched_stats(const epx_sched_t *s, epx_sched_stats_t *out);
int32_t epx_sched_n_running(const epx_sched_t *s);
int32_t epx_sched_n_waiting(const epx_sched_t *s);

#endif
