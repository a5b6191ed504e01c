/* What runs next: decodes, prompt chunks, admission by estimated tokens, retraction. See sched.h.
 * At most one running sequence is in the middle of its prefill: only the last one admitted in a step can be cut. */
#include <stddef.h>

#include "engine/sched/sched_internal.h"

enum {
    NEW_TOKENS_CAP = 4096,    /* new tokens that the estimate takes into account, SGLang's clip_max_new_tokens */
    RETRACT_DECODE_STEPS = 20 /* steps that the estimate after a retraction looks ahead, SGLang's retract_decode_steps */
};
enum { LPM_MAX_WAITING = 128 };

/* ---- pages ---- */

static int32_t available_pages(const epx_sched_t *s) {
    return epx_kv_pool_n_free(s->pool) + (s->prefix ? epx_prefix_n_evictable(s->prefix) : 0);
}

int epx_sched_take_pages(epx_sched_t *s, int32_t n, int32_t *out_pages) {
    int32_t lack = n - epx_kv_pool_n_free(s->pool);
    if (n > available_pages(s)) return 0;
    if (lack > 0) epx_prefix_evict(s->prefix, lack);
    return epx_kv_pool_take(s->pool, n, out_pages);
}

static int32_t pages_lacking(const epx_sched_t *s, const epx_seq_t *q, int32_t n_tokens) {
    int32_t n = epx_kv_pool_pages_for(s->pool, n_tokens) - q->n_held;
    return n > 0 ? n : 0;
}

/* Room for the KV of its first n_tokens; 0: not enough pages, nothing taken. */
static int hold_pages(epx_sched_t *s, epx_seq_t *q, int32_t n_tokens) {
    int32_t n = pages_lacking(s, q, n_tokens);
    if (n && !epx_sched_take_pages(s, n, q->pages + q->n_held)) return 0;
    q->n_held += n;
    return 1;
}

/* ---- items ---- */

static int32_t left(const epx_seq_t *q) { return q->n_prefill - q->n_computed; }

static void add_item(epx_sched_t *s, epx_sched_batch_t *b, epx_seq_t *q, int32_t n) {
    s->items[b->n_items++] = (epx_sched_item_t){q, q->n_computed, n, q->n_computed + n == q->n_tokens};
    b->n_rows += n;
}

/* ---- retraction ---- */

/* Whose loss costs least: lowest priority, fewest generated tokens, longest prompt, latest. */
static int is_better_victim(const epx_seq_t *a, const epx_seq_t *b) {
    int32_t gen_a = a->n_tokens - a->n_prompt, gen_b = b->n_tokens - b->n_prompt;
    if (a->priority != b->priority) return a->priority < b->priority;
    if (gen_a != gen_b) return gen_a < gen_b;
    if (a->n_prompt != b->n_prompt) return a->n_prompt > b->n_prompt;
    return a->arrival > b->arrival;
}

static void retract_one(epx_sched_t *s, epx_sched_batch_t *b) {
    epx_seq_t *q = s->running[0];
    for (int32_t i = 1; i < s->n_running; i++)
        if (is_better_victim(s->running[i], q)) q = s->running[i];
    epx_sched_unlink_running(s, q);
    epx_sched_drop_kv(s, q);
    q->admitted = 0;
    q->n_retracted++;
    epx_sched_enqueue(s, q);
    s->n_retracted++;
    b->n_retracted++;
}

/* What the running sequences have shown: generated so far and a few steps more, against what they may generate. */
static void raise_ratio(epx_sched_t *s) {
    double done = 0, allowed = 0;
    for (int32_t i = 0; i < s->n_running; i++) {
        done += s->running[i]->n_tokens - s->running[i]->n_prompt + RETRACT_DECODE_STEPS;
        allowed += s->running[i]->max_new;
    }
    s->ratio = allowed > 0 && done < allowed ? done / allowed : 1;
}

static int32_t decode_pages(const epx_sched_t *s) {
    int32_t n = 0;
    for (int32_t i = 0; i < s->n_running; i++)
        if (left(s->running[i]) <= 0) n += pages_lacking(s, s->running[i], s->running[i]->n_tokens);
    return n;
}

/* The last running sequence always fits: submit has checked it against the whole pool. */
static void retract_until_decodes_fit(epx_sched_t *s, epx_sched_batch_t *b) {
    while (s->n_running > 1 && decode_pages(s) > available_pages(s)) retract_one(s, b);
    if (b->n_retracted) raise_ratio(s);
}

static void add_decodes(epx_sched_t *s, epx_sched_batch_t *b) {
    retract_until_decodes_fit(s, b);
    for (int32_t i = 0; i < s->n_running; i++) {
        epx_seq_t *q = s->running[i];
        if (left(q) > 0) continue;
        EPX_ASSERT(hold_pages(s, q, q->n_tokens));
        add_item(s, b, q, 1);
        b->n_decode_rows++;
    }
    if (b->n_decode_rows == 0) return;
    if (!b->n_retracted) s->ratio = s->ratio - s->ratio_step > s->ratio_least ? s->ratio - s->ratio_step : s->ratio_least;
}

/* ---- prefill ---- */

/* Tokens that may be computed for prompts in this step. */
typedef struct {
    int32_t chunk, input;
    double reserved; /* of the pool, for what admitted sequences will probably need */
} budget_t;

static int32_t may_come(const epx_seq_t *q) {
    int32_t n = q->max_new - (q->n_tokens - q->n_prompt);
    return n < NEW_TOKENS_CAP ? n : NEW_TOKENS_CAP;
}

static void add_prefill(epx_sched_t *s, epx_sched_batch_t *b, budget_t *left_over, epx_seq_t *q, int32_t n) {
    add_item(s, b, q, n);
    b->n_prefill_rows += n;
    left_over->chunk -= n;
    left_over->input -= n;
}

/* The sequence that was cut in an earlier step. With little room it goes on with fewer tokens. */
static void go_on(epx_sched_t *s, epx_sched_batch_t *b, budget_t *budget, epx_seq_t *q) {
    int64_t fits = ((int64_t)q->n_held + available_pages(s)) * s->page_size - q->n_computed;
    int32_t n = left(q) < budget->chunk ? left(q) : budget->chunk;
    if (n > fits) n = (int32_t)fits;
    if (n > 0 && hold_pages(s, q, q->n_computed + n)) add_prefill(s, b, budget, q, n);
}

static void take_prefix(epx_sched_t *s, epx_seq_t *q) {
    int32_t n = 0;
    q->n_cached = 0;
    if (!s->prefix || q->whole_prompt) return;
    /* The last token is computed in any case: its logits are wanted. Without memory for a split nothing counts as cached. */
    if (epx_prefix_lock(s->prefix, q->tokens, q->n_tokens - 1, q->pages, &n, &q->node) < 0) return;
    q->n_cached = n;
    q->n_held = q->n_tree = n / s->page_size;
}

static void undo_prefix(epx_sched_t *s, epx_seq_t *q) {
    if (s->prefix) epx_prefix_unlock(s->prefix, q->node);
    q->node = NULL;
    q->n_held = q->n_tree = q->n_cached = 0;
}

/* 1: admitted, with its first chunk in the batch. */
static int admit(epx_sched_t *s, epx_sched_batch_t *b, budget_t *budget, epx_seq_t *q) {
    take_prefix(s, q);
    int32_t rest = q->n_tokens - q->n_cached, n = rest < budget->chunk ? rest : budget->chunk;
    double room = (double)available_pages(s) * s->page_size - budget->reserved;
    int fits = s->n_running == 0 || (double)rest + may_come(q) <= room; /* alone it has the whole pool */
    if (!fits || (b->n_prefill_rows > 0 && n > budget->input) || !hold_pages(s, q, q->n_cached + n)) {
        undo_prefix(s, q);
        return 0;
    }
    epx_sched_dequeue(s, q);
    q->admitted = 1;
    q->n_prefill = q->n_tokens;
    q->n_computed = q->n_cached;
    s->running[s->n_running++] = q;
    s->n_prefix_tokens += (uint64_t)q->n_tokens;
    s->n_cached_tokens += (uint64_t)q->n_cached;
    b->n_new++;
    b->n_cached += q->n_cached;
    budget->reserved += may_come(q) + (rest - n);
    add_prefill(s, b, budget, q, n);
    return 1;
}

/* By policy, among those of the highest priority that waits. */
static epx_seq_t *choose(const epx_sched_t *s) {
    epx_seq_t *best = s->waiting[0];
    int32_t best_len = -1;
    if (s->cfg.policy != EPX_SCHED_LPM || !s->prefix || s->n_waiting > LPM_MAX_WAITING) return best;
    for (int32_t i = 0; i < s->n_waiting && s->waiting[i]->priority == s->waiting[0]->priority; i++) {
        int32_t len = epx_prefix_length(s->prefix, s->waiting[i]->tokens, s->waiting[i]->n_tokens - 1);
        if (len <= best_len) continue;
        best = s->waiting[i];
        best_len = len;
    }
    return best;
}

static double reserved(const epx_sched_t *s) {
    double sum = 0;
    for (int32_t i = 0; i < s->n_running; i++)
        sum += may_come(s->running[i]) * s->ratio + (left(s->running[i]) > 0 ? left(s->running[i]) : 0);
    return sum;
}

static void add_prefills(epx_sched_t *s, epx_sched_batch_t *b) {
    budget_t budget = {s->cfg.chunk_tokens, s->cfg.max_prefill_tokens ? s->cfg.max_prefill_tokens : INT32_MAX, 0};
    for (int32_t i = 0; i < s->n_running; i++) {
        epx_seq_t *q = s->running[i];
        if (left(q) <= 0) continue;
        go_on(s, b, &budget, q);
        if (b->n_prefill_rows < left(q)) return; /* still not through: nobody else begins */
    }
    if (b->n_retracted || !s->n_waiting || s->n_running == s->cfg.max_running) return;
    budget.reserved = reserved(s);
    while (budget.chunk > 0 && s->n_waiting && s->n_running < s->cfg.max_running && admit(s, b, &budget, choose(s))) continue;
}

/* ---- public ---- */

void epx_sched_next(epx_sched_t *s, epx_sched_batch_t *out_b) {
    epx_sched_batch_t b = {.items = s->items};
    if (s->n_running == 0) s->ratio = s->ratio_first;
    if (s->cfg.mixed) add_decodes(s, &b);
    add_prefills(s, &b);
    if (!s->cfg.mixed && b.n_prefill_rows == 0) add_decodes(s, &b);
    *out_b = b;
}

/* Whole pages of a prompt are offered to others as soon as they are computed; without memory for that they stay private. */
static void share(epx_sched_t *s, epx_seq_t *q) {
    (void)epx_prefix_insert(s->prefix, q->tokens, q->n_computed, q->pages, &q->node, &q->n_tree);
}

void epx_sched_computed(epx_sched_t *s, const epx_sched_batch_t *b) {
    for (int32_t i = 0; i < b->n_items; i++) {
        epx_seq_t *q = b->items[i].seq;
        int was_prefill = left(q) > 0;
        q->n_computed += b->items[i].n;
        if (s->prefix && was_prefill) share(s, q);
    }
}

int epx_sched_token(epx_sched_t *s, epx_seq_t *q, int32_t token) {
    (void)s;
    q->tokens[q->n_tokens++] = token;
    return q->n_tokens - q->n_prompt >= q->max_new;
}
