/* Continuous batching, first come first served. See sched.h. */
#include "engine/sched/sched.h"

#include <stdlib.h>
#include <string.h>

struct epx_sched {
    epx_sched_config_t cfg;
    epx_kv_pool_t *pool; /* borrowed */
    epx_seq_t **running; /* [n_running], in order of admission */
    int32_t n_running;
    epx_seq_t *head, **tail; /* waiting */
    int32_t n_waiting, n_cancelled;
    epx_sched_item_t *items; /* [max_running] */
};

epx_status_t epx_sched_create(const epx_sched_config_t *cfg, epx_kv_pool_t *pool, epx_sched_t **out_s) {
    if (cfg->max_running < 1 || cfg->chunk_tokens < 1 || cfg->max_context < 1)
        return epx_fail(EPX_ERR_ARG, "scheduler: max_running %d, chunk_tokens %d, max_context %d: each must be at least 1",
                        cfg->max_running, cfg->chunk_tokens, cfg->max_context);
    epx_sched_t *s = calloc(1, sizeof *s);
    if (!s) return epx_fail(EPX_ERR_NOMEM, "scheduler: no memory");
    s->cfg = *cfg;
    s->pool = pool;
    s->tail = &s->head;
    s->running = calloc((size_t)cfg->max_running, sizeof(epx_seq_t *));
    s->items = calloc((size_t)cfg->max_running, sizeof *s->items);
    if (!s->running || !s->items) {
        epx_sched_destroy(s);
        return epx_fail(EPX_ERR_NOMEM, "scheduler: no memory for %d requests", cfg->max_running);
    }
    *out_s = s;
    return EPX_OK;
}

void epx_sched_destroy(epx_sched_t *s) {
    if (!s) return;
    for (epx_seq_t *seq = epx_sched_any(s); seq; seq = epx_sched_any(s)) epx_sched_release(s, seq);
    free(s->running);
    free(s->items);
    free(s);
}

static epx_seq_t *find(const epx_sched_t *s, uint64_t id) {
    for (int32_t i = 0; i < s->n_running; i++)
        if (s->running[i]->id == id) return s->running[i];
    for (epx_seq_t *q = s->head; q; q = q->next)
        if (q->id == id) return q;
    return NULL;
}

static epx_status_t check(const epx_sched_t *s, uint64_t id, int32_t n_prompt, int32_t max_new) {
    int64_t total = (int64_t)n_prompt + max_new, cap = (int64_t)epx_kv_pool_n_pages(s->pool) * epx_kv_pool_page_size(s->pool);
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

epx_status_t epx_sched_submit(epx_sched_t *s, uint64_t id, int32_t n_prompt, int32_t max_new, void *user, epx_seq_t **out_seq) {
    EPX_TRY(check(s, id, n_prompt, max_new));
    epx_seq_t *q = calloc(1, sizeof *q);
    int32_t n_pages = epx_kv_pool_pages_for(s->pool, (int64_t)n_prompt + max_new);
    if (!q || !(q->pages = calloc((size_t)n_pages, sizeof *q->pages))) {
        free(q);
        return epx_fail(EPX_ERR_NOMEM, "request: no memory for a table of %d pages", n_pages);
    }
    q->id = id;
    q->user = user;
    q->n_prompt = n_prompt;
    q->max_new = max_new;
    q->n_tokens = n_prompt;
    q->n_pages = n_pages;
    *s->tail = q;
    s->tail = &q->next;
    s->n_waiting++;
    *out_seq = q;
    return EPX_OK;
}

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
    for (epx_seq_t *q = s->head; q; q = q->next)
        if (q->cancelled) return q;
    return NULL;
}

epx_seq_t *epx_sched_any(epx_sched_t *s) { return s->n_running ? s->running[s->n_running - 1] : s->head; }

/* Move the head of the queue to the running ones; 0 when it has to wait. */
static int admit(epx_sched_t *s) {
    epx_seq_t *q = s->head;
    if (!q || s->n_running == s->cfg.max_running || !epx_kv_pool_take(s->pool, q->n_pages, q->pages)) return 0;
    s->head = q->next;
    if (!s->head) s->tail = &s->head;
    q->next = NULL;
    q->admitted = 1;
    s->n_waiting--;
    s->running[s->n_running++] = q;
    return 1;
}

static void add_item(epx_sched_t *s, epx_sched_batch_t *b, epx_seq_t *q, int32_t n) {
    s->items[b->n_items++] = (epx_sched_item_t){q, q->n_computed, n, q->n_computed + n == q->n_tokens};
    b->n_rows += n;
}

static int32_t left(const epx_seq_t *q) { return q->n_tokens - q->n_computed; }

void epx_sched_next(epx_sched_t *s, epx_sched_batch_t *out_b) {
    epx_sched_batch_t b = {.items = s->items};
    int32_t budget = s->cfg.chunk_tokens;
    for (int32_t i = 0; i < s->n_running; i++)
        if (s->running[i]->n_computed >= s->running[i]->n_prompt) add_item(s, &b, s->running[i], 1);
    b.n_decode_rows = b.n_rows;
    for (int32_t i = 0; budget > 0 && (i < s->n_running || admit(s)); i++) {
        epx_seq_t *q = s->running[i];
        if (q->n_computed >= q->n_prompt) continue;
        int32_t n = left(q) < budget ? left(q) : budget;
        add_item(s, &b, q, n);
        budget -= n;
    }
    b.n_prefill_rows = b.n_rows - b.n_decode_rows;
    *out_b = b;
}

void epx_sched_computed(epx_sched_t *s, const epx_sched_batch_t *b) {
    (void)s;
    for (int32_t i = 0; i < b->n_items; i++) b->items[i].seq->n_computed += b->items[i].n;
}

int epx_sched_token(epx_sched_t *s, epx_seq_t *seq) {
    (void)s;
    seq->n_tokens++;
    return seq->n_tokens - seq->n_prompt >= seq->max_new;
}

static void unlink_running(epx_sched_t *s, const epx_seq_t *seq) {
    int32_t i = 0;
    while (s->running[i] != seq) i++;
    memmove(s->running + i, s->running + i + 1, (size_t)(s->n_running - i - 1) * sizeof s->running[0]);
    s->n_running--;
}

static void unlink_waiting(epx_sched_t *s, const epx_seq_t *seq) {
    epx_seq_t **at = &s->head;
    while (*at != seq) at = &(*at)->next;
    *at = seq->next;
    if (!*at) s->tail = at;
    s->n_waiting--;
}

void epx_sched_release(epx_sched_t *s, epx_seq_t *seq) {
    if (seq->cancelled) s->n_cancelled--;
    if (seq->admitted) {
        unlink_running(s, seq);
        epx_kv_pool_give(s->pool, seq->pages, seq->n_pages);
    } else {
        unlink_waiting(s, seq);
    }
    free(seq->pages);
    free(seq);
}

int32_t epx_sched_n_running(const epx_sched_t *s) { return s->n_running; }
int32_t epx_sched_n_waiting(const epx_sched_t *s) { return s->n_waiting; }
