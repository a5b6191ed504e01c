/* One rank of the engine: its share of the model, its KV pool and its scheduler. All ranks run the same sequence of
 * collectives; a rank without tokens takes part with zero tokens. No sockets here: the caller feeds requests and takes events.
 *
 * Life of a rank: epx_rank_create (collective: loads weights, makes world, group and plan) -> loop { deliver requests
 * with epx_rank_submit/_cancel/_wake; epx_rank_step } -> epx_rank_destroy. One thread per rank calls all of it. */
#ifndef EPX_ENGINE_RUNTIME_RANK_H
#define EPX_ENGINE_RUNTIME_RANK_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "engine/model/model.h"
#include "engine/sample/sample.h"
#include "epx/epx.h"

typedef struct epx_rank epx_rank_t;

typedef struct {
    uint32_t size;
    const char *model_path;      /* directory of a Hugging Face checkpoint */
    int rank, tp;                /* world rank and size */
    int dp, ep;                  /* attention-DP groups: tp / dp consecutive ranks each, which run the same requests and share the
                                    heads of attention; expert-parallel ranks: tp / ep groups of
                                    consecutive ranks, each with all experts; one of ep and tp / dp divides the other */
    int first_dp_rank;           /* number of this world's first DP rank in log lines; 0 */
    int n_local;                 /* ranks of this host, of all replicas, which share its cores and memory; 0: tp */
    const char *moe_a2a_backend; /* "auto", "none", "pplx", "deepep" */
    const char *deepep_mode;     /* "auto", "low_latency", "normal": of pplx and deepep, see engine/runtime/presets.h */
    epx_combine_t combine;
    const char *load_format; /* "auto", "dummy" */
    uint64_t random_seed;    /* dummy weights */
    int n_threads;           /* of this rank's ops; 0: cores / n_local, at least 1 */
    const char *isa;         /* NULL: best */
    const char *device;      /* "cpu"; "cuda": GPU number `rank`; "auto": cuda when a GPU can be used, else cpu */
    int max_running;         /* requests in a batch of this rank; 0: 64 */
    int chunk_tokens;        /* prefill tokens of this rank per step; 0: 256; -1: whole prompts */
    int max_prefill_tokens;  /* of one step, unless one prompt alone is longer; 0: 16384 */
    int max_dispatch_tokens; /* of this rank in one step, which the exchange is sized for; 0: what the sizes above need */
    int mixed_chunk;         /* 1: steps with prompt chunks decode too */
    int two_batch_overlap;   /* 1: a step in which some rank has 2 tokens or more runs in two halves on all ranks; the exchange of
                                one half overlaps the computation of the other */
    int disable_prefix_cache;
    const char *schedule_policy; /* "fcfs", "lpm" */
    double conservativeness;     /* of admission, see engine/sched/sched.h; 0: 1 */
    double mem_fraction;     /* of the free memory at the start, shared by local ranks: weights + KV + exchange; 0: none is set */
    int watchdog_s;          /* for the process around the rank: longest step without progress; 0: 300 */
    int decode_log_interval; /* decode steps between two log lines; 0: 40 */
    int64_t max_total_tokens; /* KV capacity of this rank in tokens; 0: from free memory, see docs/models.md */
    int page_size;            /* KV page; 0: 16 */
    int max_context;          /* 0: max_position_embeddings */
    uint64_t timeout_ns;      /* of every wait for a peer; 0: 10 s */
    const char *transports;   /* allowed, as in epx_world_config_t; NULL: all */
    /* bootstrap, as in epx_world_config_t; NULL when tp == 1 */
    epx_status_t (*allgather)(void *ctx, const void *mine, size_t n_bytes, void *out_all);
    epx_status_t (*barrier)(void *ctx);
    void *boot_ctx;
    /* progress of loading, 0..1; may be NULL */
    void (*progress)(void *ctx, const char *what, double fraction);
    void *progress_ctx;
} epx_rank_config_t;

typedef struct {
    uint64_t id;           /* chosen by the caller, unique among live requests of this rank */
    const int32_t *prompt; /* [n_prompt] borrowed during submit; n_prompt >= 1 */
    int32_t n_prompt;
    int32_t max_new_tokens; /* >= 1; prompt + max_new <= context */
    epx_sampling_t sampling;
    int ignore_eos;
    const int32_t *stop_ids; /* further end tokens, borrowed during submit */
    int32_t n_stop_ids;
    int32_t priority;         /* the larger is admitted first; 0 */
    epx_adjust_t adjust;      /* its list is borrowed during submit */
    int32_t min_new_tokens;   /* end tokens are not drawn before; 0: no minimum */
    int want_logprobs;        /* events carry the token's logprob and n_top of the most probable */
    int32_t n_top;            /* 0 to EPX_SAMPLE_MAX_TOP */
    int want_prompt_logprobs; /* with want_logprobs: events for the prompt's tokens too; its prefix is not taken from the cache */
    /* The text must follow this spec of engine/grammar/grammar.h; NULL: anything. Borrowed during submit. End tokens end it even
     * with ignore_eos. */
    const char *grammar;
    size_t grammar_bytes;
} epx_request_t;

typedef enum { EPX_FINISH_NONE = 0, EPX_FINISH_STOP, EPX_FINISH_LENGTH, EPX_FINISH_CANCELLED, EPX_FINISH_ERROR } epx_finish_t;

/* One event: a new token and / or the end of a request. */
typedef struct {
    uint64_t id;
    int32_t token;        /* -1: none (end without a token: cancelled, error) */
    float logprob;        /* of the model's logits, before penalties, bias, temperature and filters; 0 unless asked for */
    const epx_top_t *top; /* [n_top] borrowed during the callback */
    int32_t n_top;
    int32_t prompt_idx; /* above 0: no new token, but the logprob of this token of the prompt, once and in order; its first has
                           none */
    int token_is_text;  /* with EPX_FINISH_STOP: the token is the last of the text, because the grammar is complete */
    epx_finish_t finish;
    int32_t n_prompt, n_generated;
    int32_t n_cached;  /* prompt tokens that were found in the prefix cache when the request was first admitted */
    const char *error; /* EPX_FINISH_ERROR: why; borrowed during the callback */
    int32_t dp_rank;   /* which rank ran the request; set by the front */
} epx_event_t;
typedef void (*epx_event_fn)(void *ctx, const epx_event_t *ev);

typedef struct {
    int n_ranks, n_layers, n_experts, top_k, hidden, vocab;
    int max_context;
    int64_t kv_tokens;     /* capacity */
    uint64_t mapped_bytes; /* of checkpoint files mapped by this rank */
    uint64_t kv_bytes, exchange_bytes;
    int32_t eos_ids[8];
    int n_eos;
    epx_combine_t combine;
    int dispatch_row_bytes, combine_row_bytes; /* one token's row on the wire, there and back */
    char backend[32], transport[32], isa[16];
    int n_threads;
    int chunk_tokens, max_running;
    int attn_tp;    /* ranks that share the heads of a request; below tp / dp where the architecture's attention is not cut */
    int max_tokens; /* most tokens of this rank in one step, which the exchange is sized for */
    int n_local_experts, page_size;
    int ep;            /* ranks that hold all experts together */
    int contiguous;    /* the exchange brings rows in one run (deepep normal) */
    int decode_tokens; /* of a second exchange, for steps without prompt tokens (deepep low_latency); 0: there is none */
    int n_channels, channel_tokens; /* of the exchange: 2 with two_batch_overlap, and tokens of this rank that each holds */
} epx_rank_info_t;

typedef struct {
    uint64_t n_steps, n_prefill_tokens, n_decode_tokens;
    uint64_t n_decode_exchanges;                  /* steps that took the exchange for decoding */
    uint64_t n_halved_steps;                      /* of n_steps, in two halves */
    uint64_t n_prompt_tokens, n_generated_tokens; /* of prompts whose first token was drawn; tokens drawn */
    int n_running, n_waiting;
    int64_t kv_used_tokens, kv_tokens;         /* in use by live requests, capacity */
    int64_t kv_evictable_tokens;               /* kept only for the prefix cache */
    uint64_t n_lookup_tokens, n_cached_tokens; /* of admissions since create: looked up in the prefix cache, found there */
    uint64_t n_retracted;                      /* requests that had to wait again for KV */
    uint64_t rows_sent[64];  /* [tp] rows this rank sent to each rank since create (exchange statistics, tp <= 64) */
    uint64_t pairs_sent[64]; /* [tp] (token, expert) pairs of this rank whose expert lives on each rank */
    uint64_t dispatch_bytes, combine_bytes; /* that the exchange moved to other ranks, as libepx counts them */
    epx_time_hist_t wait[EPX_N_PHASES], copy[EPX_N_PHASES];
} epx_rank_stats_t;

/* One rank, "auto" backend, exact combine, every size by default. */
void epx_rank_config_init(epx_rank_config_t *cfg);
/* Collective. *cfg and its strings are borrowed during the call, boot_ctx until destroy. EPX_ERR_ARG, _UNSUPPORTED, _FORMAT,
 * _NOT_FOUND, _NOMEM name field or file, value and legal values; EPX_ERR_PEER: another rank failed, with its message. */
epx_status_t epx_rank_create(const epx_rank_config_t *cfg, epx_rank_t **out_rank);
/* Fixed facts of the rank. */
void epx_rank_info(const epx_rank_t *r, epx_rank_info_t *out_info);
/* Counters since create and the present load. */
void epx_rank_stats(const epx_rank_t *r, epx_rank_stats_t *out_stats);
/* Rows by expert and times of the exchange; borrowed, changed by epx_rank_step(). */
const epx_meter_t *epx_rank_meter(const epx_rank_t *r);
/* Queue a request (copied). With tp / dp > 1 every rank of the group gets the same requests and cancellations in the same order;
 * they take effect in the first step after all have them, and only the group's first rank reports events. EPX_ERR_ARG /
 * EPX_ERR_CAPACITY say what is wrong with it; nothing else is affected. */
epx_status_t epx_rank_submit(epx_rank_t *r, const epx_request_t *req);
/* Ends at the next step border with EPX_FINISH_CANCELLED. Unknown ids are ignored. */
void epx_rank_cancel(epx_rank_t *r, uint64_t id);
/* Forget the prefixes of earlier requests; those of running ones stay. Concerns this rank only. */
void epx_rank_flush_cache(epx_rank_t *r);
/* A request for any rank was submitted: every rank gets a wake with the same running number, so that idle ranks join again. */
void epx_rank_wake(epx_rank_t *r, uint64_t wake_seq);
/* What the rank is doing, for a watchdog: any thread. n_changes grows with every change of phase. */
typedef struct {
    const char *phase; /* static: "idle", "agreeing on the step", "forward pass", "sampling" */
    uint64_t step, n_changes;
    int n_rows;  /* tokens of this rank in the step */
    int is_idle; /* between steps */
} epx_rank_position_t;
void epx_rank_position(const epx_rank_t *r, epx_rank_position_t *out);
/* Ask for an orderly stop; ranks leave together once all were asked. */
void epx_rank_stop(epx_rank_t *r);
/* One step, collective: agree on the step record, run the batch, sample, report events.
 * Returns EPX_OK; EPX_AGAIN when all ranks are idle and have seen the same wakes: block for the next message, then call again;
 * EPX_ERR_ABORTED after an agreed stop; EPX_ERR_PEER / _TIMEOUT when a peer is lost: every live request has been ended with
 * EPX_FINISH_ERROR and the rank can only be destroyed. */
epx_status_t epx_rank_step(epx_rank_t *r, epx_event_fn on_event, void *ctx);
/* Ends live requests without events. Waits at most the timeout for peers that still use this rank's memory. NULL allowed. */
void epx_rank_destroy(epx_rank_t *r);

/* ---- direct use, for tests and `epx eval`: logits of a token sequence, collective over the ranks ---- */

/* Run `n` tokens (n may be 0 on some ranks) from position 0, cut into chunks of chunk_tokens as serving would, and write logits
 * of every position, [n, vocab]. Uses no live request's KV. max_n: the largest n over all ranks (the same value on all). */
epx_status_t epx_rank_logits(epx_rank_t *r, const int32_t *tokens, int32_t n, int32_t max_n, float *out_logits);

/* From now on hand every layer's routing and residual stream to fn, on the thread that steps; NULL ends it. Slows nothing else.
 */
void epx_rank_watch_layers(epx_rank_t *r, epx_model_probe_fn fn, void *ctx);

#endif
