/* The inside of a rank, shared by the files of this room. */
#ifndef EPX_ENGINE_RUNTIME_RANK_INTERNAL_H
#define EPX_ENGINE_RUNTIME_RANK_INTERNAL_H

#include "engine/grammar/grammar.h"
#include "engine/kv/pool.h"
#include "engine/kv/store.h"
#include "engine/model/model.h"
#include "engine/runtime/generation.h"
#include "engine/runtime/presets.h"
#include "engine/runtime/rank.h"
#include "engine/runtime/rank_test.h"
#include "engine/sched/sched.h"

enum { EPX_RANK_MAX_TP = 64 };

/* What a request keeps besides its place in the scheduler. One allocation. */
typedef struct {
    epx_sampling_t sampling;
    epx_adjust_t adjust;
    int ignore_eos, want_logprobs, want_prompt_logprobs;
    int32_t n_prompt_told; /* leading prompt tokens whose logprobs were reported */
    int32_t min_new_tokens, n_top;
    int32_t n_stop_ids, n_cached;
    int32_t *stop_ids;      /* [n_stop_ids] */
    int32_t *tokens;        /* [n_prompt + max_new] */
    epx_grammar_t *grammar; /* owned; NULL: none */
    epx_grammar_state_t *grammar_state;
} epx_rank_request_t;

/* What was drawn for a request. */
typedef struct {
    int32_t token;
    int is_end;         /* an end token, or: */
    int is_text;        /* the last token of a grammar */
    int32_t prompt_idx; /* above 0: a token of the prompt */
    float logprob;
    int32_t n_top;
    epx_top_t top[EPX_SAMPLE_MAX_TOP];
} epx_rank_draw_t;

/* A request or cancellation that the other ranks of the attention group may not have yet. */
typedef struct epx_rank_order {
    struct epx_rank_order *next;
    epx_sched_request_t request; /* user: owned until it is in the scheduler; NULL: cancel request.id */
} epx_rank_order_t;

struct epx_rank {
    epx_rank_config_t cfg; /* defaults filled in; pointers of the caller only used during create */
    epx_generation_defaults_t gen;
    epx_sched_config_t sched_cfg;
    int max_rows; /* the most rows of a step */

    epx_ops_t *ops;
    epx_world_t *world;
    epx_group_t *group;
    epx_model_t *model;
    epx_group_t *ep_group; /* ep consecutive ranks, which hold all experts together; `group` when those are all ranks */
    epx_plan_t *plans[EPX_N_EXCHANGES];
    int attn_size, attn_rank; /* the attention group: tp / dp ranks, and this one's place */
    epx_group_t *attn_group;  /* NULL: attention is not divided */
    epx_plan_t *attn_plan;
    epx_rank_order_t *orders, **orders_tail;            /* not in force yet */
    uint64_t n_orders_got, n_orders_done, n_orders_all; /* the last: every rank of the group has this many */
    epx_kv_pool_t *pool;
    epx_kv_store_t *kv;
    epx_sched_t *sched;
    epx_sampler_t *sampler;

    int32_t *tokens;      /* [max_rows] */
    epx_attn_row_t *rows; /* [max_rows] */
    int32_t *logit_rows;  /* [max_rows] */
    int has_all_logits;   /* logits has max_rows rows */
    float *logits;        /* [max_running, vocab] */
    int32_t *best;        /* [max_running] */

    char *model_dir;                    /* owned */
    epx_grammar_vocab_t *grammar_vocab; /* made with the first grammar */
    uint32_t *grammar_bits;

    uint64_t epoch, wake_seq;
    int stop;
    uint64_t position; /* phase, rows and running number packed, for other threads; see position.c */
    uint64_t position_step;
    int n_decode_steps; /* since the last log line */
    uint64_t n_decode_log_tokens, decode_log_ns;
    epx_status_t failed; /* once negative the rank can only be destroyed */
    char failure[512];
    epx_rank_info_t info;
    epx_rank_stats_t stats;
    epx_rank_logits_hook_fn logits_hook;
    void *logits_hook_ctx;
};

/* All-gather a status with this thread's message: EPX_OK when every rank is well; else this rank's own error, or EPX_ERR_PEER
 * naming the first rank that failed and its message. Collective. `what` names the stage. */
epx_status_t epx_rank_agree_status(epx_rank_t *r, epx_status_t mine, const char *what);
/* The group of ranks that hold all experts together; world and group are there (exchange.c, as the next ones). */
epx_status_t epx_rank_make_ep_groups(epx_rank_t *r);
/* Does this rank have an exchange of that kind? The same on all ranks. */
int epx_rank_has_exchange(const epx_rank_t *r, epx_exchange_t which);
/* The exchange that this rank will make; the model is loaded. */
void epx_rank_plan_config(const epx_rank_t *r, epx_exchange_t which, epx_plan_config_t *out);
/* Bytes that all exchanges will take, with the rows of experts. */
epx_status_t epx_rank_exchange_bytes(const epx_rank_t *r, uint64_t *out_bytes);
/* Collective: the plans, and the model's buffers for their rows. */
epx_status_t epx_rank_make_plans(epx_rank_t *r);
/* Add the counters of the exchanges. */
void epx_rank_exchange_stats(const epx_rank_t *r, epx_rank_stats_t *out);
/* How many tokens of KV this rank can have: info.kv_tokens (setup.c). */
epx_status_t epx_rank_size_kv(epx_rank_t *r);
/* KV pool, storage, scheduler and step arrays for info.kv_tokens (setup.c). */
epx_status_t epx_rank_make_kv(epx_rank_t *r);
/* Defaults and legal values of the configuration (setup.c). */
epx_status_t epx_rank_check_config(epx_rank_config_t *cfg);
/* What a request's grammar needs; EPX_ERR_ARG: the grammar's own message (constrain.c). */
epx_status_t epx_rank_begin_grammar(epx_rank_t *r, const epx_request_t *req, epx_rank_request_t *own);
/* Room for logits of every row of a step. */
epx_status_t epx_rank_need_all_logits(epx_rank_t *r);
/* Does the request want the logits of this row of its prompt? (draw.c) */
int epx_rank_wants_row(const epx_seq_t *seq, int32_t position);
/* The logprob of the prompt's token behind this position. */
void epx_rank_tell_prompt(epx_rank_t *r, const epx_seq_t *seq, int32_t position, const float *logits, epx_rank_draw_t *out);
/* Forbid in logits [vocab] what the grammar does not allow. */
epx_status_t epx_rank_mask(epx_rank_t *r, const epx_rank_request_t *q, float *logits);
/* NULL allowed. */
void epx_rank_request_free(epx_rank_request_t *q);
/* Is the next token of a request the largest of the model's logits, and nothing else asked of them? (draw.c) */
int epx_rank_wants_best(const epx_seq_t *seq);
/* As epx_rank_draw() for such a request; token: the place of the largest logit, or -1: they are not finite. */
epx_status_t epx_rank_draw_best(epx_rank_t *r, const epx_seq_t *seq, int32_t token, epx_rank_draw_t *out);
/* Draw the next token of a request from its logits (draw.c). Errors concern this request only. */
epx_status_t epx_rank_draw(epx_rank_t *r, const epx_seq_t *seq, const float *logits, epx_rank_draw_t *out);
/* Scheduler and rows of a step from the configuration; the context is known (setup.c). */
epx_status_t epx_rank_plan_steps(epx_rank_t *r);
typedef enum { EPX_AT_IDLE, EPX_AT_AGREE, EPX_AT_FORWARD, EPX_AT_SAMPLE } epx_rank_phase_t;
/* The rank enters a phase of a step with n_rows tokens (position.c). */
void epx_rank_enter(epx_rank_t *r, epx_rank_phase_t phase, int32_t n_rows);
/* SGLang's log lines of a batch that is about to run, and of retractions (position.c). */
void epx_rank_log_batch(epx_rank_t *r, const epx_sched_batch_t *b);
/* Keep an order for later (attn_size > 1), or let all that every rank of the group has take effect (orders.c). */
epx_status_t epx_rank_add_order(epx_rank_t *r, const epx_sched_request_t *request);
void epx_rank_apply_orders(epx_rank_t *r, void (*refused)(void *ctx, const epx_sched_request_t *q), void *ctx);
void epx_rank_drop_orders(epx_rank_t *r);
/* Wait limit of step agreement in ns. */
uint64_t epx_rank_timeout_ns(const epx_rank_t *r);

#endif
