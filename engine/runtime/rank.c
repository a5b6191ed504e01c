/* Life of a rank: create, feed, destroy. Stepping is in step.c. See rank.h. */
#include "engine/runtime/rank.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/runtime/rank_internal.h"

/* Fits EPX_GROUP_RECORD_BYTES. */
typedef struct {
    int32_t status;
    char message[EPX_GROUP_RECORD_BYTES - 4];
} status_record_t;

epx_status_t epx_rank_agree_status(epx_rank_t *r, epx_status_t mine, const char *what) {
    status_record_t rec = {.status = mine}, all[EPX_RANK_MAX_TP];
    char own[1024];
    snprintf(own, sizeof own, "%s", mine < 0 ? epx_error_message() : "");
    snprintf(rec.message, sizeof rec.message, "%.*s", (int)sizeof rec.message - 1, own);
    epx_status_t s = epx_group_allgather(r->group, &rec, sizeof rec, all, 0);
    if (mine < 0) return epx_fail(mine, "%s", own);
    if (s < 0) return epx_fail_context(s, "%s", what);
    for (int i = 0; i < r->cfg.tp; i++)
        if (all[i].status < 0)
            return epx_fail(EPX_ERR_PEER, "%s: rank %d failed: %.*s", what, i, (int)sizeof rec.message - 1, all[i].message);
    return EPX_OK;
}

static epx_status_t make_ops(epx_rank_t *r) {
    epx_ops_config_t oc = {.size = sizeof oc, .n_threads = r->cfg.n_threads, .isa = r->cfg.isa, .device = r->cfg.device};
    const int several = r->cfg.tp > 1 && !getenv("EPX_OPS_CUDA_RANKS");
    if (strcmp(oc.device, "auto") == 0) oc.device = !several && epx_ops_available("cuda") == EPX_OK ? "cuda" : "cpu";
    if (several && strcmp(oc.device, "cuda") == 0)
        return epx_fail(
            EPX_ERR_UNSUPPORTED,
            "device is \"cuda\" with tp %d; legal: tp 1 (several ranks on GPUs have not passed their test; the variable "
            "EPX_OPS_CUDA_RANKS tries them)",
            r->cfg.tp);
    if (strcmp(oc.device, "cuda") == 0) oc.device_idx = r->cfg.rank;
    return epx_ops_create(&oc, &r->ops);
}

static epx_status_t make_world(epx_rank_t *r) {
    epx_world_config_t wc;
    epx_world_config_init(&wc);
    wc.transports = r->cfg.transports;
    if (r->cfg.tp == 1) {
        wc.bootstrap = "self";
    } else {
        wc.rank = r->cfg.rank;
        wc.n_ranks = r->cfg.tp;
        wc.allgather = r->cfg.allgather;
        wc.barrier = r->cfg.barrier;
        wc.ctx = r->cfg.boot_ctx;
    }
    EPX_TRY(epx_world_create(&wc, &r->world));
    EPX_TRY(epx_group_create(r->world, NULL, 0, epx_ops_device_idx(r->ops), &r->group));
    return epx_rank_make_ep_groups(r);
}

/* Every rank makes all groups, as it must, and is in one. */
static epx_status_t make_attention_groups(epx_rank_t *r) {
    int ranks[EPX_RANK_MAX_TP];
    if (epx_model_attention_tp(r->model) == 1) return EPX_OK;
    for (int g = 0; g < r->cfg.dp; g++) {
        epx_group_t *made = NULL;
        for (int i = 0; i < r->attn_size; i++) ranks[i] = g * r->attn_size + i;
        EPX_TRY(epx_group_create(r->world, ranks, r->attn_size, -1, &made));
        if (made) r->attn_group = made;
    }
    return EPX_OK;
}

static epx_status_t make_attention_plan(epx_rank_t *r) {
    epx_plan_config_t pc;
    epx_plan_info_t pi = {.size = sizeof pi};
    epx_plan_config_init(&pc);
    if (!epx_model_attention_plan_config(r->model, &pc)) return EPX_OK;
    pc.timeout_ns = epx_rank_timeout_ns(r);
    EPX_TRY(epx_plan_create(r->attn_group, &pc, &r->attn_plan));
    EPX_TRY(epx_plan_info(r->attn_plan, &pi));
    r->info.exchange_bytes += pi.slab_bytes + pi.private_bytes;
    return EPX_OK;
}

static epx_status_t load_model(epx_rank_t *r, const epx_model_config_t *mc) {
    epx_model_load_t load = {.size = sizeof load,
                             .dir = r->cfg.model_path,
                             .dummy = strcmp(r->cfg.load_format, "dummy") == 0,
                             .seed = r->cfg.random_seed,
                             .rank = r->cfg.rank % r->cfg.ep,
                             .n_ranks = r->cfg.ep,
                             .attn_tp = r->attn_size,
                             .attn_rank = r->attn_rank,
                             .max_rows = r->max_rows,
                             .halves = r->cfg.two_batch_overlap != 0,
                             .progress = {r->cfg.progress, r->cfg.progress_ctx}};
    return epx_model_create(mc, &load, r->ops, &r->model);
}

static epx_status_t read_context(epx_rank_t *r, const epx_model_config_t *mc) {
    if (r->cfg.max_context > mc->max_position)
        return epx_fail(EPX_ERR_ARG, "context length %d (max_context): legal: 1 to max_position_embeddings, %d",
                        r->cfg.max_context, mc->max_position);
    r->info.max_context = r->cfg.max_context ? r->cfg.max_context : mc->max_position;
    r->info.n_ranks = r->cfg.tp;
    r->info.n_layers = mc->n_layers;
    r->info.n_experts = mc->n_experts;
    r->info.top_k = mc->top_k;
    r->info.hidden = mc->hidden;
    r->info.vocab = mc->vocab;
    r->info.n_threads = r->cfg.n_threads;
    r->info.page_size = r->cfg.page_size;
    r->info.n_eos = r->gen.n_eos;
    memcpy(r->info.eos_ids, r->gen.eos_ids, sizeof r->info.eos_ids);
    return EPX_OK;
}

/* What needs no peer. */
static epx_status_t prepare(epx_rank_t *r, epx_model_config_t *out_mc) {
    EPX_TRY(epx_rank_check_config(&r->cfg));
    r->attn_size = r->cfg.tp / r->cfg.dp;
    r->attn_rank = r->cfg.rank % r->attn_size;
    r->model_dir = strdup(r->cfg.model_path);
    if (!r->model_dir) return epx_fail(EPX_ERR_NOMEM, "rank: no memory");
    EPX_TRY(epx_model_config_load(r->cfg.model_path, out_mc));
    EPX_TRY(epx_generation_defaults(r->cfg.model_path, &r->gen));
    EPX_TRY(read_context(r, out_mc));
    EPX_TRY(epx_rank_plan_steps(r));
    EPX_TRY(make_ops(r));
    snprintf(r->info.isa, sizeof r->info.isa, "%s", epx_ops_isa(r->ops));
    return EPX_OK;
}

/* All ranks take what the poorest can have, so that each accepts the same requests. */
static epx_status_t agree_kv(epx_rank_t *r) {
    int64_t mine = r->info.kv_tokens, all[EPX_RANK_MAX_TP];
    EPX_TRY(epx_group_allgather(r->group, &mine, sizeof mine, all, 0));
    for (int i = 0; i < r->cfg.tp; i++)
        if (all[i] < r->info.kv_tokens) r->info.kv_tokens = all[i];
    return EPX_OK;
}

epx_status_t epx_rank_create(const epx_rank_config_t *cfg, epx_rank_t **out_rank) {
    epx_status_t s;
    epx_model_config_t mc;
    epx_rank_t *r = calloc(1, sizeof *r);
    if (!r) return epx_fail(EPX_ERR_NOMEM, "rank: no memory");
    r->cfg = *cfg;
    r->attn_size = 1;
    EPX_TRY_GOTO(s, prepare(r, &mc), err_rank);
    EPX_TRY_GOTO(s, make_world(r), err_rank);
    EPX_TRY_GOTO(s, epx_rank_agree_status(r, load_model(r, &mc), "loading the model"), err_rank);
    EPX_TRY_GOTO(s, epx_rank_agree_status(r, epx_rank_size_kv(r), "sizing the KV cache"), err_rank);
    EPX_TRY_GOTO(s, agree_kv(r), err_rank);
    EPX_TRY_GOTO(s, epx_rank_agree_status(r, epx_rank_make_kv(r), "allocating the KV cache"), err_rank);
    EPX_TRY_GOTO(s, epx_rank_make_plans(r), err_rank);
    EPX_TRY_GOTO(s, make_attention_groups(r), err_rank);
    EPX_TRY_GOTO(s, make_attention_plan(r), err_rank);
    if (r->attn_plan) s = epx_model_set_attention_plan(r->model, r->attn_plan);
    EPX_TRY_GOTO(s, epx_rank_agree_status(r, s, "dividing attention"), err_rank);
    EPX_TRY_GOTO(s, epx_rank_self_test(r, 1), err_rank);
    r->info.attn_tp = epx_model_attention_tp(r->model);
    r->info.mapped_bytes = epx_model_mapped_bytes(r->model);
    *out_rank = r;
    return EPX_OK;
err_rank:
    epx_rank_destroy(r);
    return s;
}

static void free_requests(epx_rank_t *r) {
    for (epx_seq_t *q = r->sched ? epx_sched_any(r->sched) : NULL; q; q = epx_sched_any(r->sched)) {
        void *own = q->user;
        epx_sched_release(r->sched, q);
        epx_rank_request_free(own);
    }
}

void epx_rank_destroy(epx_rank_t *r) {
    if (!r) return;
    free_requests(r);
    epx_sched_destroy(r->sched);
    epx_sampler_destroy(r->sampler);
    epx_rank_drop_orders(r);
    epx_plan_destroy(r->attn_plan);
    for (int i = 0; i < EPX_N_EXCHANGES; i++) epx_plan_destroy(r->plans[i]);
    epx_model_destroy(r->model);
    epx_group_destroy(r->attn_group);
    if (r->ep_group != r->group) epx_group_destroy(r->ep_group);
    epx_group_destroy(r->group);
    epx_world_destroy(r->world);
    epx_kv_store_destroy(r->kv);
    epx_kv_pool_destroy(r->pool);
    epx_ops_destroy(r->ops);
    free(r->tokens);
    free(r->rows);
    free(r->logit_rows);
    free(r->logits);
    free(r->best);
    epx_grammar_vocab_destroy(r->grammar_vocab);
    free(r->grammar_bits);
    free(r->model_dir);
    free(r);
}

void epx_rank_info(const epx_rank_t *r, epx_rank_info_t *out_info) { *out_info = r->info; }

void epx_rank_stats(const epx_rank_t *r, epx_rank_stats_t *out_stats) {
    const epx_meter_t *m = epx_model_meter(r->model);
    *out_stats = r->stats;
    epx_rank_exchange_stats(r, out_stats);
    memcpy(out_stats->wait, m->wait, sizeof m->wait);
    memcpy(out_stats->copy, m->copy, sizeof m->copy);
    out_stats->kv_tokens = r->info.kv_tokens;
    epx_sched_stats_t ss;
    epx_sched_stats(r->sched, &ss);
    out_stats->n_running = ss.n_running;
    out_stats->n_waiting = ss.n_waiting;
    out_stats->kv_used_tokens = (int64_t)ss.n_used_pages * r->cfg.page_size;
    out_stats->kv_evictable_tokens = (int64_t)ss.n_evictable_pages * r->cfg.page_size;
    out_stats->n_lookup_tokens = ss.n_prefix_tokens;
    out_stats->n_cached_tokens = ss.n_cached_tokens;
    out_stats->n_retracted = ss.n_retracted;
    if (r->attn_rank == 0) return;
    /* The group's first rank counts requests for all of them. */
    out_stats->n_running = out_stats->n_waiting = 0;
    out_stats->n_prompt_tokens = out_stats->n_generated_tokens = out_stats->n_prefill_tokens = out_stats->n_decode_tokens = 0;
    out_stats->n_lookup_tokens = out_stats->n_cached_tokens = out_stats->n_retracted = 0;
}

const epx_meter_t *epx_rank_meter(const epx_rank_t *r) { return epx_model_meter(r->model); }

static epx_status_t check_ids(const epx_rank_t *r, const char *what, const int32_t *ids, int32_t n) {
    for (int32_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= r->info.vocab)
            return epx_fail(EPX_ERR_ARG, "%s[%d] is %d, expected a token id from 0 to %d", what, i, ids[i], r->info.vocab - 1);
    return EPX_OK;
}

static epx_rank_request_t *copy_request(const epx_request_t *q) {
    size_t n_tokens = (size_t)q->n_prompt + (size_t)q->max_new_tokens, n_stop = (size_t)q->n_stop_ids;
    size_t bias_bytes = (size_t)q->adjust.n_bias * sizeof(epx_bias_t);
    epx_rank_request_t *own = malloc(sizeof *own + bias_bytes + (n_tokens + n_stop) * sizeof(int32_t));
    if (!own) return NULL;
    *own = (epx_rank_request_t){.sampling = q->sampling,
                                .adjust = q->adjust,
                                .ignore_eos = q->ignore_eos,
                                .want_logprobs = q->want_logprobs,
                                .want_prompt_logprobs = q->want_logprobs && q->want_prompt_logprobs,
                                .min_new_tokens = q->min_new_tokens,
                                .n_top = q->n_top,
                                .n_stop_ids = q->n_stop_ids};
    epx_bias_t *bias = (epx_bias_t *)(own + 1);
    own->tokens = (int32_t *)(bias + q->adjust.n_bias);
    own->stop_ids = own->tokens + n_tokens;
    memcpy(own->tokens, q->prompt, (size_t)q->n_prompt * sizeof(int32_t));
    if (n_stop) memcpy(own->stop_ids, q->stop_ids, n_stop * sizeof(int32_t));
    if (bias_bytes) memcpy(bias, q->adjust.bias, bias_bytes);
    own->adjust.bias = bias;
    return own;
}

static epx_status_t check_request(const epx_rank_t *r, const epx_request_t *req) {
    if (req->n_prompt < 1 || !req->prompt) return epx_fail(EPX_ERR_ARG, "the prompt has %d tokens, at least 1", req->n_prompt);
    if (req->n_stop_ids < 0 || (req->n_stop_ids && !req->stop_ids))
        return epx_fail(EPX_ERR_ARG, "n_stop_ids is %d without a list", req->n_stop_ids);
    if (req->min_new_tokens < 0 || req->min_new_tokens > req->max_new_tokens)
        return epx_fail(EPX_ERR_ARG, "min_new_tokens is %d, expected 0 to max_new_tokens = %d", req->min_new_tokens,
                        req->max_new_tokens);
    if (req->n_top < 0 || req->n_top > EPX_SAMPLE_MAX_TOP)
        return epx_fail(EPX_ERR_ARG, "n_top is %d, expected 0 to %d", req->n_top, EPX_SAMPLE_MAX_TOP);
    EPX_TRY(check_ids(r, "prompt", req->prompt, req->n_prompt));
    EPX_TRY(epx_adjust_validate(&req->adjust, r->info.vocab));
    return epx_sampling_validate(&req->sampling);
}

epx_status_t epx_rank_submit(epx_rank_t *r, const epx_request_t *req) {
    epx_seq_t *seq;
    if (r->failed < 0) return epx_fail(EPX_ERR_STATE, "the rank has failed: %s", r->failure);
    EPX_TRY(check_request(r, req));
    epx_sched_request_t sr = {.id = req->id,
                              .n_prompt = req->n_prompt,
                              .max_new = req->max_new_tokens,
                              .priority = req->priority,
                              .whole_prompt = req->want_prompt_logprobs};
    epx_rank_request_t *own = copy_request(req);
    if (!own) return epx_fail(EPX_ERR_NOMEM, "request: no memory for %d + %d tokens", req->n_prompt, req->max_new_tokens);
    epx_status_t s = own->want_prompt_logprobs ? epx_rank_need_all_logits(r) : EPX_OK;
    if (s >= 0) s = epx_rank_begin_grammar(r, req, own);
    sr.user = own;
    sr.tokens = own->tokens;
    if (s >= 0) s = r->attn_size > 1 ? epx_rank_add_order(r, &sr) : epx_sched_submit(r->sched, &sr, &seq);
    if (s < 0) epx_rank_request_free(own);
    return s;
}

void epx_rank_cancel(epx_rank_t *r, uint64_t id) {
    if (r->attn_size == 1) epx_sched_cancel(r->sched, id);
    else epx_rank_add_order(r, &(epx_sched_request_t){.id = id}); /* without memory the request runs to its end */
}

void epx_rank_flush_cache(epx_rank_t *r) { epx_sched_flush_cache(r->sched); }

void epx_rank_wake(epx_rank_t *r, uint64_t wake_seq) {
    if (wake_seq > r->wake_seq) r->wake_seq = wake_seq;
}

void epx_rank_stop(epx_rank_t *r) { r->stop = 1; }

void epx_rank_set_logits_hook(epx_rank_t *r, epx_rank_logits_hook_fn fn, void *ctx) {
    r->logits_hook = fn;
    r->logits_hook_ctx = ctx;
}

void epx_rank_watch_layers(epx_rank_t *r, epx_model_probe_fn fn, void *ctx) { epx_model_set_probe(r->model, fn, ctx); }

epx_model_t *epx_rank_model(epx_rank_t *r) { return r->model; }
