/* The next token of one request: logits of the model, changed as the request asks, then the sampler. The thread of the rank. */
#include <math.h>
#include <stdlib.h>

#include "base/checked.h"
#include "engine/runtime/rank_internal.h"

static int in_list(const int32_t *ids, int32_t n, int32_t id) {
    for (int32_t i = 0; i < n; i++)
        if (ids[i] == id) return 1;
    return 0;
}

static int is_end(const epx_rank_t *r, const epx_rank_request_t *q, int32_t token) {
    if (in_list(q->stop_ids, q->n_stop_ids, token)) return 1;
    return (!q->ignore_eos || q->grammar) && in_list(r->gen.eos_ids, r->gen.n_eos, token);
}

static void ban(float *logits, const int32_t *ids, int32_t n, int32_t n_vocab) {
    for (int32_t i = 0; i < n; i++)
        if (ids[i] >= 0 && ids[i] < n_vocab) logits[ids[i]] = -INFINITY;
}

/* The logits to draw from: the model's own, or a changed copy. */
static epx_status_t change(epx_rank_t *r, const epx_seq_t *seq, const float *logits, const float **out) {
    const epx_rank_request_t *q = seq->user;
    int is_early = seq->n_tokens - seq->n_prompt < q->min_new_tokens;
    *out = logits;
    if (!is_early && !q->grammar && epx_adjust_is_neutral(&q->adjust)) return EPX_OK;
    float *own = epx_sampler_copy(r->sampler, logits);
    epx_adjust_logits(r->sampler, &q->adjust, own, q->tokens, seq->n_prompt, seq->n_tokens);
    if (is_early) {
        ban(own, r->gen.eos_ids, r->gen.n_eos, r->info.vocab);
        ban(own, q->stop_ids, q->n_stop_ids, r->info.vocab);
    }
    *out = own;
    return q->grammar ? epx_rank_mask(r, q, own) : EPX_OK;
}

/* A grammar whose text can only end here needs no end token. */
static epx_status_t follow(const epx_rank_request_t *q, epx_rank_draw_t *d) {
    if (!q->grammar || d->is_end) return EPX_OK;
    EPX_TRY(epx_grammar_accept(q->grammar_state, d->token));
    d->is_end = d->is_text = epx_grammar_must_end(q->grammar_state);
    return EPX_OK;
}

/* ---- logprobs of the prompt ---- */

epx_status_t epx_rank_need_all_logits(epx_rank_t *r) {
    size_t n;
    if (r->has_all_logits) return EPX_OK;
    if (!epx_mul_size((size_t)r->max_rows, (size_t)r->info.vocab, &n) || !epx_mul_size(n, sizeof(float), &n))
        return epx_fail(EPX_ERR_CAPACITY, "logits of %d rows overflow", r->max_rows);
    float *grown = realloc(r->logits, n);
    if (!grown) return epx_fail(EPX_ERR_NOMEM, "logprobs of prompts need %zu bytes for logits", n);
    r->logits = grown;
    r->has_all_logits = 1;
    return EPX_OK;
}

int epx_rank_wants_row(const epx_seq_t *seq, int32_t position) {
    const epx_rank_request_t *q = seq->user;
    return q->want_prompt_logprobs && position >= q->n_prompt_told && position + 1 < seq->n_prompt;
}

void epx_rank_tell_prompt(epx_rank_t *r, const epx_seq_t *seq, int32_t position, const float *logits, epx_rank_draw_t *out) {
    epx_rank_request_t *q = seq->user;
    *out = (epx_rank_draw_t){.token = q->tokens[position + 1], .prompt_idx = position + 1};
    out->n_top = epx_logprobs(r->sampler, logits, out->token, &out->logprob, q->n_top, out->top);
    q->n_prompt_told = position + 1;
}

epx_status_t epx_rank_draw(epx_rank_t *r, const epx_seq_t *seq, const float *logits, epx_rank_draw_t *out) {
    const epx_rank_request_t *q = seq->user;
    const float *changed;
    *out = (epx_rank_draw_t){.token = -1};
    EPX_TRY(change(r, seq, logits, &changed));
    EPX_TRY(epx_sample(r->sampler, &q->sampling, changed, (uint64_t)(seq->n_tokens - seq->n_prompt), &out->token, NULL));
    if (q->want_logprobs) out->n_top = epx_logprobs(r->sampler, logits, out->token, &out->logprob, q->n_top, out->top);
    out->is_end = is_end(r, q, out->token);
    return follow(q, out);
}

int epx_rank_wants_best(const epx_seq_t *seq) {
    const epx_rank_request_t *q = seq->user;
    return q->sampling.temperature == 0.0f && !q->grammar && !q->want_logprobs && epx_adjust_is_neutral(&q->adjust) &&
           seq->n_tokens - seq->n_prompt >= q->min_new_tokens;
}

epx_status_t epx_rank_draw_best(epx_rank_t *r, const epx_seq_t *seq, int32_t token, epx_rank_draw_t *out) {
    const epx_rank_request_t *q = seq->user;
    *out = (epx_rank_draw_t){.token = token};
    if (token < 0) return epx_fail(EPX_ERR_INTERNAL, "a logit is NaN or infinite");
    out->is_end = is_end(r, q, token);
    return EPX_OK;
}
