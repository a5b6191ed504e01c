/* Configuration of a rank: legal values, defaults, and how much KV it gets. */
#include <errno.h>
#include <inttypes.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "engine/runtime/rank_internal.h"

enum { KV_SHARE_PERCENT = 40, KV_DEVICE_PERCENT = 80, KV_CONTEXT_CAP = 8192 };
static const uint64_t default_timeout_ns = UINT64_C(10000000000);

void epx_rank_config_init(epx_rank_config_t *cfg) {
    *cfg = (epx_rank_config_t){.size = sizeof *cfg,
                               .rank = 0,
                               .tp = 1,
                               .dp = 1,
                               .ep = 1,
                               .moe_a2a_backend = "auto",
                               .deepep_mode = "auto",
                               .combine = EPX_COMBINE_EXACT,
                               .load_format = "auto",
                               .device = "cpu",
                               .schedule_policy = "fcfs"};
}

uint64_t epx_rank_timeout_ns(const epx_rank_t *r) { return r->cfg.timeout_ns ? r->cfg.timeout_ns : default_timeout_ns; }

static int n_cores(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
    return CPU_COUNT(&set);
}

static epx_status_t check_parallel(const epx_rank_config_t *c) {
    if (c->tp < 1 || c->tp > EPX_RANK_MAX_TP) return epx_fail(EPX_ERR_ARG, "tp is %d, expected 1 to %d", c->tp, EPX_RANK_MAX_TP);
    if (c->rank < 0 || c->rank >= c->tp)
        return epx_fail(EPX_ERR_ARG, "rank is %d, expected 0 to tp - 1 = %d", c->rank, c->tp - 1);
    if (c->dp < 1 || c->tp % c->dp) return epx_fail(EPX_ERR_ARG, "dp is %d, expected a divisor of tp = %d", c->dp, c->tp);
    if (c->ep < 1 || c->tp % c->ep) return epx_fail(EPX_ERR_ARG, "ep is %d, expected a divisor of tp = %d", c->ep, c->tp);
    if (!epx_ep_fits(c->ep, c->tp / c->dp))
        return epx_fail(EPX_ERR_ARG, "ep is %d, expected a multiple or a divisor of the %d ranks that share attention", c->ep,
                        c->tp / c->dp);
    if (c->tp > 1 && (!c->allgather || !c->barrier))
        return epx_fail(EPX_ERR_ARG, "tp is %d, but the bootstrap callbacks are not set", c->tp);
    return EPX_OK;
}

static epx_status_t check_names(const epx_rank_config_t *c) {
    const char *b = c->moe_a2a_backend, *l = c->load_format;
    if (!c->model_path) return epx_fail(EPX_ERR_ARG, "model_path is not set");
    if (!epx_moe_preset(b))
        return epx_fail(EPX_ERR_ARG, "moe_a2a_backend is \"%s\", expected auto, none, pplx or deepep", b ? b : "(null)");
    if (!epx_moe_has_mode(epx_moe_preset(b), c->deepep_mode))
        return epx_fail(EPX_ERR_ARG, "deepep_mode is \"%s\", expected with moe_a2a_backend %s: auto, %s",
                        c->deepep_mode ? c->deepep_mode : "(null)", b, epx_moe_preset(b)->modes);
    if (!l || (strcmp(l, "auto") && strcmp(l, "dummy")))
        return epx_fail(EPX_ERR_ARG, "load_format is \"%s\", expected auto or dummy", l ? l : "(null)");
    if (!c->device || (strcmp(c->device, "auto") && strcmp(c->device, "cpu") && strcmp(c->device, "cuda")))
        return epx_fail(EPX_ERR_ARG, "device is \"%s\", expected auto, cpu or cuda", c->device ? c->device : "(null)");
    if (!c->schedule_policy || (strcmp(c->schedule_policy, "fcfs") && strcmp(c->schedule_policy, "lpm")))
        return epx_fail(EPX_ERR_ARG, "schedule_policy is \"%s\", expected fcfs or lpm",
                        c->schedule_policy ? c->schedule_policy : "(null)");
    if (!(c->conservativeness >= 0))
        return epx_fail(EPX_ERR_ARG, "conservativeness is %g, expected 0 or more", c->conservativeness);
    if (!(c->mem_fraction >= 0 && c->mem_fraction < 1))
        return epx_fail(EPX_ERR_ARG, "mem_fraction is %g, expected 0 (none) to below 1", c->mem_fraction);
    if (c->combine != EPX_COMBINE_EXACT && c->combine != EPX_COMBINE_PARTIAL)
        return epx_fail(EPX_ERR_ARG, "combine is %d, expected 0 (exact) or 1 (prereduced)", (int)c->combine);
    return EPX_OK;
}

static epx_status_t check_range(const char *field, int64_t value, int64_t hi) {
    if (value < 0 || value > hi)
        return epx_fail(EPX_ERR_ARG, "%s is %" PRId64 ", expected 0 (default) to %" PRId64, field, value, hi);
    return EPX_OK;
}

static int default_threads(int n_local) {
    int n = n_cores() / n_local;
    return n < 1 ? 1 : n > EPX_OPS_MAX_THREADS ? EPX_OPS_MAX_THREADS : n;
}

epx_status_t epx_rank_check_config(epx_rank_config_t *c) {
    if (c->size != sizeof *c) return epx_fail(EPX_ERR_ARG, "rank config: size is %u, expected %zu", c->size, sizeof *c);
    EPX_TRY(check_parallel(c));
    EPX_TRY(check_names(c));
    EPX_TRY(check_range("n_local", c->n_local, 4096));
    EPX_TRY(check_range("n_threads", c->n_threads, EPX_OPS_MAX_THREADS));
    EPX_TRY(check_range("max_running", c->max_running, 65536));
    if (c->chunk_tokens != -1) EPX_TRY(check_range("chunk_tokens", c->chunk_tokens, 65536));
    EPX_TRY(check_range("max_prefill_tokens", c->max_prefill_tokens, INT32_MAX));
    EPX_TRY(check_range("max_dispatch_tokens", c->max_dispatch_tokens, 131072));
    EPX_TRY(check_range("watchdog_s", c->watchdog_s, 86400));
    EPX_TRY(check_range("decode_log_interval", c->decode_log_interval, INT32_MAX));
    EPX_TRY(check_range("max_total_tokens", c->max_total_tokens, (int64_t)1 << 40));
    EPX_TRY(check_range("page_size", c->page_size, 65536));
    EPX_TRY(check_range("max_context", c->max_context, INT32_MAX));
    if (!c->n_local) c->n_local = c->tp;
    if (!c->n_threads) c->n_threads = default_threads(c->n_local);
    if (!c->max_running) c->max_running = 64;
    if (!c->chunk_tokens) c->chunk_tokens = 256;
    if (!c->page_size) c->page_size = 16;
    if (!c->max_prefill_tokens) c->max_prefill_tokens = 16384;
    if (!(c->conservativeness > 0)) c->conservativeness = 1;
    if (!c->decode_log_interval) c->decode_log_interval = 40;
    return EPX_OK;
}

epx_status_t epx_rank_plan_steps(epx_rank_t *r) {
    epx_rank_config_t *c = &r->cfg;
    if (c->chunk_tokens == -1) c->chunk_tokens = r->info.max_context;
    epx_sched_config_init(&r->sched_cfg, c->max_running, c->chunk_tokens, r->info.max_context);
    r->sched_cfg.max_prefill_tokens = c->max_prefill_tokens;
    r->sched_cfg.mixed = c->mixed_chunk;
    r->sched_cfg.prefix_cache = !c->disable_prefix_cache;
    r->sched_cfg.policy = strcmp(c->schedule_policy, "lpm") == 0 ? EPX_SCHED_LPM : EPX_SCHED_FCFS;
    r->sched_cfg.conservativeness = c->conservativeness;
    r->max_rows = epx_sched_max_rows(&r->sched_cfg);
    if (c->max_dispatch_tokens && c->max_dispatch_tokens < r->max_rows)
        return epx_fail(EPX_ERR_ARG, "max_dispatch_tokens is %d, expected at least %d: chunk_tokens %d, max_running %d%s",
                        c->max_dispatch_tokens, r->max_rows, c->chunk_tokens, c->max_running, c->mixed_chunk ? ", mixed" : "");
    if (c->max_dispatch_tokens) r->max_rows = c->max_dispatch_tokens;
    r->info.chunk_tokens = c->chunk_tokens;
    r->info.max_running = c->max_running;
    r->info.max_tokens = r->max_rows;
    return EPX_OK;
}

/* Ranks that take their KV from the same memory. */
static uint64_t n_sharing(const epx_rank_t *r) {
    return epx_ops_reads_host(r->ops) ? (uint64_t)r->cfg.n_local : 1; /* every rank has its own GPU */
}

/* What --mem-fraction-static leaves to this rank's KV after weights and exchange. */
static epx_status_t fraction_bytes(const epx_rank_t *r, uint64_t free_bytes, uint64_t *out_bytes) {
    uint64_t share = (uint64_t)(r->cfg.mem_fraction * (double)free_bytes) / n_sharing(r), exchange = 0;
    uint64_t weights = epx_model_mapped_bytes(r->model);
    EPX_TRY(epx_rank_exchange_bytes(r, &exchange));
    if (weights + exchange >= share)
        return epx_fail(EPX_ERR_NOMEM,
                        "mem_fraction is %g: of %" PRIu64 " free bytes this rank, one of %d here, gets %" PRIu64
                        ", but its weights take %" PRIu64 " and its exchange %" PRIu64,
                        r->cfg.mem_fraction, free_bytes, r->cfg.n_local, share, weights, exchange);
    *out_bytes = share - weights - exchange;
    return EPX_OK;
}

/* Tokens of KV for this rank: as asked, when they fit into free memory; else enough for max_running requests of the context (at
 * most KV_CONTEXT_CAP each), but no more than mem_fraction leaves or, without it, KV_SHARE_PERCENT of the rank's share of free
 * memory. */
static epx_status_t kv_tokens(const epx_rank_t *r, size_t token_bytes, int64_t *out_tokens) {
    uint64_t free_bytes = epx_ops_free_bytes(r->ops);
    int64_t per_request = r->info.max_context < KV_CONTEXT_CAP ? r->info.max_context : KV_CONTEXT_CAP;
    int64_t tokens = r->cfg.max_total_tokens ? r->cfg.max_total_tokens : r->cfg.max_running * per_request;
    const int percent = epx_ops_reads_host(r->ops) ? KV_SHARE_PERCENT : KV_DEVICE_PERCENT;
    uint64_t share = free_bytes / 100 * (uint64_t)percent / n_sharing(r);
    if (r->cfg.mem_fraction > 0) EPX_TRY(fraction_bytes(r, free_bytes, &share));
    if (r->cfg.max_total_tokens && (uint64_t)tokens > free_bytes / token_bytes)
        return epx_fail(EPX_ERR_NOMEM, "max_total_tokens is %" PRId64 ": %" PRIu64 " bytes wanted, %" PRIu64 " free", tokens,
                        (uint64_t)tokens * token_bytes, free_bytes);
    int bounded = !r->cfg.max_total_tokens || r->cfg.mem_fraction > 0;
    if (bounded && (uint64_t)tokens > share / token_bytes) tokens = (int64_t)(share / token_bytes);
    if (tokens < r->cfg.page_size)
        return epx_fail(EPX_ERR_NOMEM,
                        "KV: room for %" PRId64 " tokens of %zu bytes, expected at least one page of %d (%" PRIu64 " bytes free)",
                        tokens, token_bytes, r->cfg.page_size, free_bytes);
    *out_tokens = tokens;
    return EPX_OK;
}

static epx_kv_shape_t kv_shape(const epx_rank_t *r) {
    const epx_model_config_t *m = epx_model_config(r->model);
    return (epx_kv_shape_t){
        m->n_layers,   epx_model_kv_heads(r->model), m->head_dim, 0, r->cfg.page_size, (int32_t)epx_ops_row_elem_bytes(r->ops),
        m->mla.kv_lora};
}

epx_status_t epx_rank_size_kv(epx_rank_t *r) {
    epx_kv_shape_t shape = kv_shape(r);
    return kv_tokens(r, epx_kv_token_bytes(&shape), &r->info.kv_tokens);
}

static epx_status_t alloc_step(epx_rank_t *r) {
    size_t n_logits;
    size_t n = (size_t)r->max_rows;
    if (!epx_mul_size((size_t)r->cfg.max_running, (size_t)r->info.vocab, &n_logits) ||
        !epx_mul_size(n_logits, sizeof(float), &n_logits))
        return epx_fail(EPX_ERR_CAPACITY, "logits of %d requests overflow", r->cfg.max_running);
    r->tokens = calloc(n, sizeof *r->tokens);
    r->rows = calloc(n, sizeof *r->rows);
    r->logit_rows = calloc(n, sizeof *r->logit_rows);
    r->logits = malloc(n_logits);
    r->best = calloc((size_t)r->cfg.max_running, sizeof *r->best);
    if (!r->tokens || !r->rows || !r->logit_rows || !r->logits || !r->best)
        return epx_fail(EPX_ERR_NOMEM, "step arrays of %zu rows, logits of %zu bytes", n, n_logits);
    return epx_sampler_create(r->info.vocab, &r->sampler);
}

epx_status_t epx_rank_make_kv(epx_rank_t *r) {
    epx_kv_shape_t shape = kv_shape(r);
    int64_t n_pages = r->info.kv_tokens / shape.page_size;
    if (n_pages > INT32_MAX) return epx_fail(EPX_ERR_CAPACITY, "KV: %" PRId64 " pages, at most %d", n_pages, INT32_MAX);
    shape.n_pages = (int32_t)n_pages;
    EPX_TRY(epx_kv_pool_create(shape.n_pages, shape.page_size, &r->pool));
    EPX_TRY(epx_kv_store_create(r->ops, &shape, &r->kv));
    r->info.kv_tokens = n_pages * shape.page_size;
    r->info.kv_bytes = epx_kv_store_bytes(r->kv);
    if (r->info.kv_tokens < r->info.max_context) r->info.max_context = (int)r->info.kv_tokens;
    r->sched_cfg.max_context = r->info.max_context;
    EPX_TRY(epx_sched_create(&r->sched_cfg, r->pool, &r->sched));
    return alloc_step(r);
}
