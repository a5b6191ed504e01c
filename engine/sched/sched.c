/* Life of a scheduler and its queue. What runs next is in batch.c. See sched.h. */
#include "engine/sched/sched.h"

#include <stdlib.h>
#include <string.h>

#include "engine/sched/sched_internal.h"

/* SGLang's constants: share reserved at first, smallest part of it, steps of decay. */
static const double ratio_init = 0.7, ratio_floor = 0.14, ratio_steps = 600;

void epx_sched_config_init(epx_sched_config_t *cfg, int32_t max_running, int32_t chunk_tokens, int32_t max_context) {
    *cfg = (epx_sched_config_t){
        .max_running = max_running, .chunk_tokens = chunk_tokens, .max_context = max_context, .conservativeness = 1};
}

int32_t epx_sched_max_rows(const epx_sched_config_t *c) {
    if (c->mixed) return c->chunk_tokens + c->max_running;
    return c->chunk_tokens > c->max_running ? c->chunk_tokens : c->max_running;
}

static epx_status_t check_config(const epx_sched_config_t *c) {
    if (c->max_running < 1 || c->chunk_tokens < 1 || c->max_context < 1 || c->max_prefill_tokens < 0)
        return epx_fail(EPX_ERR_ARG,
                        "scheduler: max_running %d, chunk_tokens %d, max_context %d: each must be at least 1; "
                        "max_prefill_tokens %d: at least 0",
                        c->max_running, c->chunk_tokens, c->max_context, c->max_prefill_tokens);
    if (!(c->conservativeness > 0))
        return epx_fail(EPX_ERR_ARG, "scheduler: conservativeness is %g, expected more than 0", c->conservativeness);
    return EPX_OK;
}

epx_status_t epx_sched_create(const epx_sched_config_t *cfg, epx_kv_pool_t *pool, epx_sched_t **out_s) {
    epx_status_t st = EPX_OK;
    EPX_TRY(check_config(cfg));
    epx_sched_t *s = calloc(1, sizeof *s);
    if (!s) return epx_fail(EPX_ERR_NOMEM, "scheduler: no memory");
    s->cfg = *cfg;
    s->pool = pool;
    s->page_size = epx_kv_pool_page_size(pool);
    s->ratio_first = ratio_init * cfg->conservativeness < 1 ? ratio_init * cfg->conservativeness : 1;
    s->ratio_least = s->ratio_first * ratio_floor;
    s->ratio_step = (s->ratio_first - s->ratio_least) / ratio_steps;
    s->ratio = s->ratio_first;
    s->running = calloc((size_t)cfg->max_running, sizeof(epx_seq_t *));
    s->items = calloc((size_t)cfg->max_running, sizeof *s->items);
    if (!s->running || !s->items) st = epx_fail(EPX_ERR_NOMEM, "scheduler: no memory for %d requests", cfg->max_running);
    if (st >= 0 && cfg->prefix_cache) st = epx_prefix_create(pool, &s->prefix);
    if (st < 0) {
        epx_sched_destroy(s);
        return st;
    }
    *out_s = s;
    return EPX_OK;
}

void epx_sched_destroy(epx_sched_t *s) {
    if (!s) return;
    for (epx_seq_t *seq = epx_sched_any(s); seq; seq = epx_sched_any(s)) epx_sched_release(s, seq);
    epx_prefix_destroy(s->prefix);
    free(s->waiting);
    free(s->running);
    free(s->items);
    free(s);
}

/* ---- queue ---- */

static int goes_before(const epx_seq_t *a, const epx_seq_t *b) {
    return a->priority != b->priority ? a->priority > b->priority : a->arrival < b->arrival;
}

void epx_sched_enqueue(epx_sched_t *s, epx_seq_t *q) {
    int32_t lo = 0, hi = s->n_waiting;
    while (lo < hi) {
        int32_t mid = lo + (hi - lo) / 2;
        if (goes_before(q, s->waiting[mid])) hi = mid;
        else lo = mid + 1;
    }
    memmove(s->waiting + lo + 1, s->waiting + lo, (size_t)(s->n_waiting - lo) * sizeof s->waiting[0]);
    s->waiting[lo] = q;
    s->n_waiting++;
}

static void remove_at(epx_seq_t **list, int32_t *n, const epx_seq_t *q) {
    int32_t i = 0;
    while (list[i] != q) i++;
    memmove(list + i, list + i + 1, (size_t)(*n - i - 1) * sizeof list[0]);
    --*n;
}

void epx_sched_dequeue(epx_sched_t *s, const epx_seq_t *q) { remove_at(s->waiting, &s->n_waiting, q); }
void epx_sched_unlink_running(epx_sched_t *s, const epx_seq_t *q) { remove_at(s->running, &s->n_running, q); }

/* Room for every live sequence to wait, so that a retraction never needs memory. */
static int make_room(epx_sched_t *s) {
    int32_t cap = s->cap_waiting ? 2 * s->cap_waiting : 64;
    epx_seq_t **bigger;
    if (s->n_waiting + s->n_running < s->cap_waiting) return 1;
    bigger = realloc(s->waiting, (size_t)cap * sizeof s->waiting[0]);
    if (!bigger) return 0;
    s->waiting = bigger;
    s->cap_waiting = cap;
    return 1;
}

static epx_seq_t *find(const epx_sched_t *s, uint64_t id) {
    for (int32_t i = 0; i < s->n_running; i++)
        if (s->running[i]->id == id) return s->running[i];
    for (int32_t i = 0; i < s->n_waiting; i++)
        if (s->waiting[i]->id == id) return s->waiting[i];
    return NULL;
}

static epx_status_t check(const epx_sched_t *s, uint64_t id, int32_t n_prompt, int32_t max_new) {
    int64_t total = (int64_t)n_prompt + max_new, cap = (int64_t)epx_kv_pool_n_pages(s->pool) * s->page_size;
    if (n_prompt < 1) return epx_fail(EPX_ERR_ARG, "the prompt has %d tokens, at least 1", n_prompt);
    if (max_new < 1) return epx_fail(EPX_ERR_ARG, "max_new_tokens is %d, at least 1", max_new);
    if (find(s, id)) return epx_fail(EPX_ERR_ARG, "request id %llu is already live", (unsigned long long)id);
    if (total > s->cfg.max_context)
        return epx_fail(EPX_ERR_CAPACITY,
                        "the prompt has %d tokens and max_new_tokens is %d, together %lld, but the context has %d", n_prompt,
                        max_new, (long long)total, s->cfg.max_context);
    if (total > cap)
        return epx_fail(EPX_ERR_CAPACITY,
                        "the prompt has %d tokens and max_new_tokens is %d, together %lld, but the KV pool has %lld", n_prompt,
                        max_new, (long long)total, (long long)cap);
    return EPX_OK;
}

epx_status_t epx_sched_submit(epx_sched_t *s, const epx_sched_request_t *req, epx_seq_t **out_seq) {
    EPX_TRY(check(s, req->id, req->n_prompt, req->max_new));
    epx_seq_t *q = calloc(1, sizeof *q);
    int32_t n_pages = epx_kv_pool_pages_for(s->pool, (int64_t)req->n_prompt + req->max_new);
    if (!q || !make_room(s) || !(q->pages = calloc((size_t)n_pages, sizeof *q->pages))) {
        free(q);
        return epx_fail(EPX_ERR_NOMEM, "request: no memory for a table of %d pages", n_pages);
    }
    q->id = req->id;
    q->user = req->user;
    q->tokens = req->tokens;
    q->n_prompt = q->n_tokens = req->n_prompt;
    q->max_new = req->max_new;
    q->priority = req->priority;
    q->whole_prompt = req->whole_prompt;
    q->arrival = s->n_arrived++;
    epx_sched_enqueue(s, q);
    *out_seq = q;
    return EPX_OK;
}

/* ---- ends ---- */

void epx_sched_cancel(epx_sched_t *s, uint64_t id) {
    epx_seq_t *q = find(s, id);
    if (!q || q->cancelled) return;
    q->cancelled = 1;
    s->n_cancelled++;
}

epx_seq_t *epx_sched_take_cancelled(epx_sched_t *s) {
    if (s->n_cancelled == 0) return NULL;
    for (int32_t i = 0; i < s->n_running; i++)
        if (s->running[i]->cancelled) return s->running[i];
    for (int32_t i = 0; i < s->n_waiting; i++)
        if (s->waiting[i]->cancelled) return s->waiting[i];
    return NULL;
}

epx_seq_t *epx_sched_any(epx_sched_t *s) {
    if (s->n_running) return s->running[s->n_running - 1];
    return s->n_waiting ? s->waiting[s->n_waiting - 1] : NULL;
}

void epx_sched_drop_kv(epx_sched_t *s, epx_seq_t *q) {
    if (s->prefix) {
        /* Without memory the tree only keeps less. */
        (void)epx_prefix_insert(s->prefix, q->tokens, q->n_computed, q->pages, &q->node, &q->n_tree);
        epx_prefix_unlock(s->prefix, q->node);
    }
    epx_kv_pool_give(s->pool, q->pages + q->n_tree, q->n_held - q->n_tree);
    q->node = NULL;
    q->n_held = q->n_tree = q->n_computed = 0;
}

void epx_sched_release(epx_sched_t *s, epx_seq_t *q) {
    if (q->cancelled) s->n_cancelled--;
    if (q->admitted) {
        epx_sched_unlink_running(s, q);
        epx_sched_drop_kv(s, q);
    } else {
        epx_sched_dequeue(s, q);
    }
    free(q->pages);
    free(q);
}

void epx_sched_flush_cache(epx_sched_t *s) {
    if (s->prefix) epx_prefix_evict(s->prefix, epx_prefix_n_evictable(s->prefix));
}

void epx_sched_stats(const epx_sched_t *s, epx_sched_stats_t *out) {
    int32_t evictable = s->prefix ? epx_prefix_n_evictable(s->prefix) : 0;
    *out = (epx_sched_stats_t){.n_running = s->n_running,
                               .n_waiting = s->n_waiting,
                               .n_retracted = s->n_retracted,
                               .n_prefix_tokens = s->n_prefix_tokens,
                               .n_cached_tokens = s->n_cached_tokens,
                               .n_used_pages = epx_kv_pool_n_pages(s->pool) - epx_kv_pool_n_free(s->pool) - evictable,
                               .n_evictable_pages = evictable,
                               .new_token_ratio = s->ratio};
}

int32_t epx_sched_n_running(const epx_sched_t *s) { return s->n_running; }
int32_t epx_sched_n_waiting(const epx_sched_t *s) { return s->n_waiting; }
