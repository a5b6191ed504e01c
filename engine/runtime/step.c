/* One step of a rank: agree, run, sample, report. And direct logits for tests. See rank.h.
 * Decisions that lead to collectives are taken from the agreed records only, never from local state. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/runtime/rank_internal.h"

/* What every rank tells the others before a step. */
typedef struct {
    uint64_t epoch, wake_seq;
    uint64_t n_orders, n_waiting_orders; /* of the rank's attention group: got since create; of these not in force */
    int32_t n_rows, n_prompt_rows;
    int32_t stop;
} step_record_t;

typedef enum { STEP_RUN, STEP_IDLE, STEP_AGAIN, STEP_STOP } verdict_t;

/* What the ranks have agreed on. */
typedef struct {
    verdict_t verdict;
    int in_halves; /* STEP_RUN: in two halves, on every rank */
    epx_exchange_t exchange;
} agreed_t;

enum { ROWS_FOR_HALVES = 2 }; /* of some rank; the exchange of a step in one piece holds less than that (engine/model/model.h) */

typedef struct {
    epx_event_fn fn;
    void *ctx;
} sink_t;

static void report(const sink_t *out, const epx_seq_t *q, const epx_rank_draw_t *d, epx_finish_t finish, const char *error) {
    epx_event_t ev = {.id = q->id,
                      .token = d ? d->token : -1,
                      .logprob = d ? d->logprob : 0.0f,
                      .top = d ? d->top : NULL,
                      .n_top = d ? d->n_top : 0,
                      .token_is_text = d ? d->is_text : 0,
                      .prompt_idx = d ? d->prompt_idx : 0,
                      .finish = finish,
                      .n_prompt = q->n_prompt,
                      .n_generated = q->n_tokens - q->n_prompt,
                      .n_cached = ((const epx_rank_request_t *)q->user)->n_cached,
                      .error = error};
    if (out->fn) out->fn(out->ctx, &ev);
}

static void end_request(epx_rank_t *r, epx_seq_t *q) {
    void *own = q->user;
    epx_sched_release(r->sched, q); /* looks at the tokens once more */
    epx_rank_request_free(own);
}

static void end_all(epx_rank_t *r, const sink_t *out, epx_finish_t finish, const char *error) {
    for (epx_seq_t *q = epx_sched_any(r->sched); q; q = epx_sched_any(r->sched)) {
        report(out, q, NULL, finish, error);
        end_request(r, q);
    }
}

/* The group is lost: remember why, end every request. A plan aborted by a peer is a lost peer to the caller. */
static epx_status_t lose(epx_rank_t *r, const sink_t *out, epx_status_t s) {
    int dead = epx_group_dead_rank(r->group);
    char why[400];
    snprintf(why, sizeof why, "%s", epx_error_message());
    if (dead >= 0) snprintf(r->failure, sizeof r->failure, "rank %d is gone: %s", dead, why);
    else snprintf(r->failure, sizeof r->failure, "%s", why);
    r->failed = s == EPX_ERR_TIMEOUT ? s : EPX_ERR_PEER;
    for (int i = 0; i < EPX_N_EXCHANGES; i++)
        if (r->plans[i]) epx_plan_abort(r->plans[i]);
    end_all(r, out, EPX_FINISH_ERROR, r->failure);
    return epx_fail(r->failed, "step %" PRIu64 ": %s", r->epoch, r->failure);
}

static epx_status_t agree(epx_rank_t *r, const epx_sched_batch_t *sb, agreed_t *out) {
    step_record_t mine = {.epoch = r->epoch, .wake_seq = r->wake_seq, .n_rows = sb->n_rows, .stop = r->stop},
                  all[EPX_RANK_MAX_TP];
    mine.n_prompt_rows = sb->n_prefill_rows;
    mine.n_orders = r->n_orders_got;
    mine.n_waiting_orders = r->n_orders_got - r->n_orders_done;
    EPX_TRY(epx_group_allgather(r->group, &mine, sizeof mine, all, epx_rank_timeout_ns(r)));
    int n_busy = 0, n_prompt = 0, n_stop = 0, same_wake = 1, most = 0, first = r->cfg.rank - r->attn_rank;
    r->n_orders_all = all[first].n_orders;
    for (int i = 0; i < r->cfg.tp; i++) {
        if (all[i].epoch != mine.epoch)
            return epx_fail(EPX_ERR_INTERNAL, "step agreement: rank %d is in step %" PRIu64 ", rank %d in step %" PRIu64, i,
                            all[i].epoch, r->cfg.rank, mine.epoch);
        n_busy += all[i].n_rows > 0;
        n_prompt += all[i].n_prompt_rows > 0;
        if (all[i].n_rows > most) most = all[i].n_rows;
        n_stop += all[i].stop != 0;
        same_wake &= all[i].wake_seq == all[0].wake_seq && all[i].n_waiting_orders == 0;
        if (i >= first && i < first + r->attn_size && all[i].n_orders < r->n_orders_all) r->n_orders_all = all[i].n_orders;
        if (all[i].n_rows != all[i - i % r->attn_size].n_rows)
            return epx_fail(EPX_ERR_INTERNAL, "step agreement: ranks %d and %d of one attention group have %d and %d tokens",
                            i - i % r->attn_size, i, all[i - i % r->attn_size].n_rows, all[i].n_rows);
    }
    r->epoch++;
    out->exchange = n_prompt == 0 && epx_rank_has_exchange(r, EPX_EXCHANGE_DECODE) ? EPX_EXCHANGE_DECODE : EPX_EXCHANGE_MAIN;
    out->in_halves = r->cfg.two_batch_overlap && most >= ROWS_FOR_HALVES;
    if (n_stop == r->cfg.tp) out->verdict = STEP_STOP;
    else if (n_busy) out->verdict = STEP_RUN;
    else out->verdict = same_wake && n_stop == 0 ? STEP_AGAIN : STEP_IDLE; /* with a stop under way nobody may block */
    return EPX_OK;
}

static void add_rows(epx_rank_t *r, const epx_sched_item_t *it, int32_t at) {
    const epx_rank_request_t *q = it->seq->user;
    for (int32_t i = 0; i < it->n; i++) {
        r->tokens[at + i] = q->tokens[it->first + i];
        r->rows[at + i] = (epx_attn_row_t){it->seq->pages, it->first + i};
    }
}

static void make_batch(epx_rank_t *r, const epx_sched_batch_t *sb, epx_batch_t *out) {
    int32_t at = 0, n_logits = 0;
    for (int32_t i = 0; i < sb->n_items; i++) {
        const epx_sched_item_t *it = &sb->items[i];
        add_rows(r, it, at);
        for (int32_t k = 0; k < it->n; k++)
            if (epx_rank_wants_row(it->seq, it->first + k)) r->logit_rows[n_logits++] = at + k;
        at += it->n;
        if (it->last) r->logit_rows[n_logits++] = at - 1;
    }
    *out = (epx_batch_t){.n_rows = at,
                         .tokens = r->tokens,
                         .rows = r->rows,
                         .kv = epx_kv_store_layers(r->kv),
                         .n_logits = n_logits,
                         .logit_rows = r->logit_rows,
                         .logits = r->logits};
}

/* Draw one token from logits, or without them take the best one, and report it. */
static void draw_token(epx_rank_t *r, const sink_t *out, epx_seq_t *seq, const float *logits, int32_t best) {
    epx_rank_draw_t d;
    if (r->logits_hook) r->logits_hook(r->logits_hook_ctx, seq->id, seq->n_tokens - seq->n_prompt, logits, r->info.vocab);
    if ((logits ? epx_rank_draw(r, seq, logits, &d) : epx_rank_draw_best(r, seq, best, &d)) < 0) {
        report(out, seq, NULL, EPX_FINISH_ERROR, epx_error_message());
        end_request(r, seq);
        return;
    }
    int full = epx_sched_token(r->sched, seq, d.token);
    r->stats.n_generated_tokens++;
    if (seq->n_tokens == seq->n_prompt + 1) r->stats.n_prompt_tokens += (uint64_t)seq->n_prompt;
    epx_finish_t finish = d.is_end ? EPX_FINISH_STOP : full ? EPX_FINISH_LENGTH : EPX_FINISH_NONE;
    report(out, seq, &d, finish, NULL);
    if (finish != EPX_FINISH_NONE) end_request(r, seq);
}

/* What the first admission found in the prefix cache; later ones, after a retraction, find the request's own tokens. */
static void note_cached(const epx_sched_batch_t *sb) {
    for (int32_t i = 0; i < sb->n_items; i++) {
        const epx_seq_t *q = sb->items[i].seq;
        if (q->n_retracted == 0 && q->n_tokens == q->n_prompt) ((epx_rank_request_t *)q->user)->n_cached = q->n_cached;
    }
}

/* Logits of an item's rows, in the order of make_batch. Returns those behind them. */
static const float *use_logits(epx_rank_t *r, const sink_t *out, const epx_sched_item_t *it, const float *logits) {
    epx_rank_draw_t d;
    for (int32_t k = 0; k < it->n; k++) {
        if (!epx_rank_wants_row(it->seq, it->first + k)) continue;
        epx_rank_tell_prompt(r, it->seq, it->first + k, logits, &d);
        report(out, it->seq, &d, EPX_FINISH_NONE, NULL);
        logits += r->info.vocab;
    }
    if (!it->last) return logits;
    draw_token(r, out, it->seq, logits, -1);
    return logits + r->info.vocab;
}

/* A device can choose the tokens itself when nobody wants to see logits. */
static int only_best(const epx_rank_t *r, const epx_sched_batch_t *sb) {
    if (epx_ops_reads_host(r->ops) || r->logits_hook) return 0;
    for (int32_t i = 0; i < sb->n_items; i++)
        if (sb->items[i].last && !epx_rank_wants_best(sb->items[i].seq)) return 0;
    for (int32_t i = 0; i < sb->n_items; i++) /* logprobs of a prompt */
        for (int32_t k = 0; k < sb->items[i].n; k++)
            if (epx_rank_wants_row(sb->items[i].seq, sb->items[i].first + k)) return 0;
    return 1;
}

static void use_best(epx_rank_t *r, const sink_t *out, const epx_sched_batch_t *sb) {
    const int32_t *best = r->best;
    for (int32_t i = 0; i < sb->n_items; i++)
        if (sb->items[i].last) draw_token(r, out, sb->items[i].seq, NULL, *best++);
}

static epx_status_t run(epx_rank_t *r, const sink_t *out, const epx_sched_batch_t *sb, const agreed_t *agreed) {
    epx_batch_t b;
    make_batch(r, sb, &b);
    b.in_halves = agreed->in_halves;
    b.exchange = agreed->exchange;
    b.best = only_best(r, sb) ? r->best : NULL;
    epx_rank_log_batch(r, sb);
    epx_rank_enter(r, EPX_AT_FORWARD, sb->n_rows);
    EPX_TRY(epx_model_forward(r->model, &b));
    epx_rank_enter(r, EPX_AT_SAMPLE, sb->n_rows);
    note_cached(sb);
    epx_sched_computed(r->sched, sb);
    r->stats.n_steps++;
    r->stats.n_halved_steps += (uint64_t)agreed->in_halves;
    r->stats.n_decode_exchanges += agreed->exchange == EPX_EXCHANGE_DECODE;
    r->stats.n_prefill_tokens += (uint64_t)sb->n_prefill_rows;
    r->stats.n_decode_tokens += (uint64_t)sb->n_decode_rows;
    if (b.best) {
        use_best(r, out, sb);
        return EPX_OK;
    }
    const float *logits = r->logits;
    for (int32_t i = 0; i < sb->n_items; i++) logits = use_logits(r, out, &sb->items[i], logits);
    return EPX_OK;
}

static void report_refused(void *ctx, const epx_sched_request_t *q) {
    const sink_t *out = ctx;
    epx_event_t ev = {
        .id = q->id, .token = -1, .finish = EPX_FINISH_ERROR, .n_prompt = q->n_prompt, .error = epx_error_message()};
    if (out->fn) out->fn(out->ctx, &ev);
}

epx_status_t epx_rank_step(epx_rank_t *r, epx_event_fn on_event, void *ctx) {
    const sink_t out = {r->attn_rank == 0 ? on_event : NULL, ctx}; /* the others of an attention group would say the same */
    epx_sched_batch_t sb;
    agreed_t agreed;
    if (r->failed < 0) return epx_fail(r->failed, "the rank has failed: %s", r->failure);
    epx_rank_apply_orders(r, report_refused, (void *)(uintptr_t)&out);
    for (epx_seq_t *q = epx_sched_take_cancelled(r->sched); q; q = epx_sched_take_cancelled(r->sched)) {
        report(&out, q, NULL, EPX_FINISH_CANCELLED, NULL);
        end_request(r, q);
    }
    epx_sched_next(r->sched, &sb);
    epx_rank_enter(r, EPX_AT_AGREE, sb.n_rows);
    epx_status_t s = agree(r, &sb, &agreed);
    if (s == EPX_OK && agreed.verdict == STEP_RUN) s = run(r, &out, &sb, &agreed);
    epx_rank_enter(r, EPX_AT_IDLE, 0);
    if (s < 0) return lose(r, &out, s);
    if (agreed.verdict == STEP_STOP) {
        end_all(r, &out, EPX_FINISH_CANCELLED, NULL);
        return epx_fail(EPX_ERR_ABORTED, "stopped as asked");
    }
    return agreed.verdict == STEP_AGAIN ? EPX_AGAIN : EPX_OK;
}

/* ---- direct logits ---- */

typedef struct {
    const int32_t *tokens;
    int32_t n, max_n;
    int32_t *pages;
    float *out;
} direct_t;

static epx_status_t take_pages(epx_rank_t *r, direct_t *d, int32_t *out_n) {
    int32_t n = epx_kv_pool_pages_for(r->pool, d->n);
    if (d->n < 0 || d->n > d->max_n || d->n > r->info.max_context)
        return epx_fail(EPX_ERR_ARG, "n is %d, expected 0 to max_n = %d and at most the context of %d", d->n, d->max_n,
                        r->info.max_context);
    for (int32_t i = 0; i < d->n; i++)
        if (d->tokens[i] < 0 || d->tokens[i] >= r->info.vocab)
            return epx_fail(EPX_ERR_ARG, "tokens[%d] is %d, expected 0 to %d", i, d->tokens[i], r->info.vocab - 1);
    d->pages = calloc((size_t)n + 1, sizeof *d->pages);
    if (!d->pages) return epx_fail(EPX_ERR_NOMEM, "logits: no memory for a table of %d pages", n);
    if (!epx_sched_take_pages(r->sched, n, d->pages))
        return epx_fail(EPX_ERR_CAPACITY, "logits: %d KV pages wanted, %d free", n, epx_kv_pool_n_free(r->pool));
    *out_n = n;
    return EPX_OK;
}

/* As many rows as a step that only decodes can have take its exchange. */
static epx_exchange_t direct_exchange(const epx_rank_t *r, int32_t most) {
    return most <= r->cfg.max_running && epx_rank_has_exchange(r, EPX_EXCHANGE_DECODE) ? EPX_EXCHANGE_DECODE : EPX_EXCHANGE_MAIN;
}

static epx_status_t run_direct(epx_rank_t *r, const direct_t *d) {
    int32_t chunk = r->cfg.chunk_tokens;
    for (int32_t first = 0; first < d->max_n; first += chunk) {
        int32_t n = d->n - first < 0 ? 0 : d->n - first < chunk ? d->n - first : chunk;
        for (int32_t i = 0; i < n; i++) {
            r->rows[i] = (epx_attn_row_t){d->pages, first + i};
            r->logit_rows[i] = i;
        }
        epx_batch_t b = {.n_rows = n,
                         .tokens = d->tokens + (n ? first : 0),
                         .rows = r->rows,
                         .kv = epx_kv_store_layers(r->kv),
                         .n_logits = n,
                         .logit_rows = r->logit_rows,
                         .logits = d->out + (n ? (size_t)first * (size_t)r->info.vocab : 0),
                         .exchange = direct_exchange(r, d->max_n - first < chunk ? d->max_n - first : chunk),
                         .in_halves =
                             r->cfg.two_batch_overlap && d->max_n - first >= ROWS_FOR_HALVES && chunk >= ROWS_FOR_HALVES};
        EPX_TRY(epx_model_forward(r->model, &b));
    }
    return EPX_OK;
}

epx_status_t epx_rank_logits(epx_rank_t *r, const int32_t *tokens, int32_t n, int32_t max_n, float *out_logits) {
    direct_t d = {tokens, n, max_n, NULL, out_logits};
    int32_t n_pages = 0;
    if (r->failed < 0) return epx_fail(r->failed, "the rank has failed: %s", r->failure);
    epx_status_t s = epx_rank_agree_status(r, take_pages(r, &d, &n_pages), "logits");
    if (s == EPX_OK && (s = run_direct(r, &d)) < 0) s = lose(r, &(sink_t){0}, s);
    if (n_pages) epx_kv_pool_give(r->pool, d.pages, n_pages);
    free(d.pages);
    return s;
}
