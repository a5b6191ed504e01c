/* Opening a model for the commands. */
#include "app/session.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "app/node_facts.h"

static void pass_event(void *ctx, const epx_event_t *ev) {
    epx_session_t *s = ctx;
    pthread_mutex_lock(&s->lock);
    if (s->sink.on_event) s->sink.on_event(s->sink.ctx, ev);
    pthread_mutex_unlock(&s->lock);
}

static void pass_failure(void *ctx, const char *message) {
    epx_session_t *s = ctx;
    pthread_mutex_lock(&s->lock);
    snprintf(s->failure, sizeof s->failure, "%s", message);
    if (s->sink.on_failure) s->sink.on_failure(s->sink.ctx, message);
    pthread_mutex_unlock(&s->lock);
}

void epx_session_init(epx_session_t *s, const epx_settings_t *settings) {
    memset(s, 0, sizeof *s);
    s->settings = settings;
    pthread_mutex_init(&s->lock, NULL);
}

epx_status_t epx_session_load_text(epx_session_t *s) {
    const char *dir = s->settings->model_path;
    epx_str_t path = {0};
    epx_status_t st = epx_str_printf(&path, "%s/tokenizer.json", dir);
    if (st >= 0) st = epx_tokenizer_create(path.data, &s->tokenizer);
    epx_str_fini(&path);
    if (st < 0) return st;
    if (epx_chat_template_load(dir, &s->chat_template) < 0)
        snprintf(s->template_error, sizeof s->template_error, "%s", epx_error_message());
    return epx_generation_defaults(dir, &s->defaults);
}

static const double DP_CONSERVATIVENESS = 0.3; /* SGLang's factor under DP attention */

epx_rank_config_t epx_session_rank_config(const epx_settings_t *o) {
    epx_rank_config_t r;
    epx_rank_config_init(&r);
    r.model_path = o->model_path;
    r.tp = (int)o->tp;
    r.dp = epx_settings_n_dp(o);
    r.n_local = r.tp * epx_settings_n_replicas(o) / (int)o->nnodes;
    r.ep = (int)(o->ep ? o->ep : o->tp);
    r.moe_a2a_backend = o->moe_a2a_backend;
    r.deepep_mode = o->deepep_mode;
    r.combine = strcmp(o->a2a_combine, "prereduced") == 0 ? EPX_COMBINE_PARTIAL : EPX_COMBINE_EXACT;
    r.load_format = o->load_format;
    r.device = o->device;
    r.random_seed = (uint64_t)o->random_seed;
    r.n_threads = (int)o->threads;
    r.max_running = (int)(o->max_running_requests / r.dp); /* SGLang counts both over all DP ranks of a replica */
    r.chunk_tokens = (int)(o->chunked_prefill_size < 0 ? -1 : o->chunked_prefill_size / r.dp);
    r.max_prefill_tokens = (int)o->max_prefill_tokens;
    r.max_dispatch_tokens = (int)epx_settings_token_cap(NULL);
    r.mixed_chunk = o->enable_mixed_chunk;
    r.two_batch_overlap = o->enable_two_batch_overlap;
    r.disable_prefix_cache = o->disable_radix_cache;
    r.schedule_policy = o->schedule_policy;
    r.conservativeness = o->schedule_conservativeness * (r.dp > 1 ? DP_CONSERVATIVENESS : 1);
    r.mem_fraction = o->mem_fraction_static;
    r.transports = getenv("EPX_TRANSPORTS");
    r.decode_log_interval = (int)o->decode_log_interval;
    r.watchdog_s = (int)o->watchdog_timeout;
    r.timeout_ns = (uint64_t)o->watchdog_timeout * 1000000000u;
    r.max_total_tokens = o->max_total_tokens;
    r.page_size = (int)o->page_size;
    r.max_context = (int)o->context_length;
    return r;
}

static epx_balance_t balance_of(const char *name) {
    if (strcmp(name, "round_robin") == 0) return EPX_BALANCE_ROUND_ROBIN;
    return strcmp(name, "total_tokens") == 0 ? EPX_BALANCE_TOKENS : EPX_BALANCE_REQUESTS;
}

epx_status_t epx_session_nodes(const epx_settings_t *o, epx_str_t *facts, epx_nodes_config_t *out) {
    *out = (epx_nodes_config_t){.n_nodes = (int)o->nnodes,
                                .node = (int)o->node_rank,
                                .address = o->dist_init_addr,
                                .join_timeout_ns = (uint64_t)o->dist_timeout * 1000000000u};
    if (o->nnodes == 1) return EPX_OK;
    EPX_TRY(epx_node_facts(o, facts));
    out->facts = facts->data;
    return EPX_OK;
}

static void announce_wait(const epx_settings_t *o) {
    if (o->nnodes == 1) return;
    fprintf(stderr, "epx: node %d of %d: waiting at most %d s for the others at %s\n", (int)o->node_rank, (int)o->nnodes,
            (int)o->dist_timeout, o->dist_init_addr);
}

static epx_status_t start(epx_session_t *s, epx_str_t *facts) {
    epx_cluster_config_t cfg = {
        .size = sizeof cfg, .show_progress = isatty(2), .on_event = pass_event, .on_failure = pass_failure, .ctx = s};
    EPX_TRY(epx_session_nodes(s->settings, facts, &cfg.nodes));
    cfg.rank = epx_session_rank_config(s->settings);
    cfg.limit_queue = s->settings->max_queued_requests >= 0;
    cfg.max_queued = (int)s->settings->max_queued_requests;
    cfg.n_replicas = epx_settings_n_replicas(s->settings);
    cfg.balance = balance_of(s->settings->load_balance_method);
    announce_wait(s->settings);
    return epx_cluster_create(&cfg, &s->cluster);
}

epx_status_t epx_session_start(epx_session_t *s) {
    epx_str_t facts = {0};
    epx_status_t st = start(s, &facts);
    epx_str_fini(&facts);
    if (st >= 0) epx_cluster_status(s->cluster, &s->status);
    return st;
}

void epx_session_set_sink(epx_session_t *s, const epx_sink_t *sink) {
    pthread_mutex_lock(&s->lock);
    s->sink = sink ? *sink : (epx_sink_t){0};
    if (s->failure[0] && s->sink.on_failure) s->sink.on_failure(s->sink.ctx, s->failure);
    pthread_mutex_unlock(&s->lock);
}

int epx_session_failed(epx_session_t *s, char *out_why, size_t n_bytes) {
    int failed;
    pthread_mutex_lock(&s->lock);
    failed = s->failure[0] != 0;
    snprintf(out_why, n_bytes, "%s", s->failure);
    pthread_mutex_unlock(&s->lock);
    return failed;
}

void epx_session_stop(epx_session_t *s) {
    epx_cluster_destroy(s->cluster);
    s->cluster = NULL;
}

void epx_session_close(epx_session_t *s) {
    epx_session_stop(s);
    epx_chat_template_destroy(s->chat_template);
    epx_tokenizer_destroy(s->tokenizer);
    pthread_mutex_destroy(&s->lock);
}
