/* From a parsed request to requests of the cluster: chat template, tokens, limits, seeds. Runs on the MHD thread. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "server/http/call.h"
#include "server/http/chat_prompt.h"

/* n_bytes of text cannot be fewer tokens than this says; NFC may have made the text up to three times shorter. */
static int surely_too_long(const epx_http_t *h, size_t n_bytes) { return n_bytes / 3 / h->longest_token > (size_t)h->max_tokens; }

static epx_status_t too_long(const epx_call_t *c, epx_api_error_t *err, size_t n_prompt, int32_t n_new) {
    const char *param = c->req.is_chat ? "messages" : "prompt";
    if (c->req.max_tokens == 0)
        return epx_api_fail(err, 400, "context_length_exceeded", param,
                            "%s: the input is %zu tokens, which leaves no room for an answer in a context of %d tokens", param,
                            n_prompt, c->http->max_tokens);
    return epx_api_fail(err, 400, "context_length_exceeded", param,
                        "%s: %zu input tokens and max_tokens %d are %zu tokens, more than the context of %d tokens", param,
                        n_prompt, (int)n_new, n_prompt + (size_t)n_new, c->http->max_tokens);
}

static epx_status_t encode(const epx_call_t *c, const char *text, size_t n_bytes, epx_api_prompt_t *out, epx_api_error_t *err) {
    const char *param = c->req.is_chat ? "messages" : "prompt";
    if (surely_too_long(c->http, n_bytes))
        return epx_api_fail(err, 400, "context_length_exceeded", param,
                            "%s: %zu bytes of text are more than the context of %d tokens", param, n_bytes, c->http->max_tokens);
    epx_status_t s = epx_tokenizer_encode(c->http->cfg.tokenizer, text, n_bytes, &out->ids, &out->n_ids);
    if (s < 0) return epx_api_fail(err, s == EPX_ERR_ARG ? 400 : 500, "tokenizer", param, "%s: %s", param, epx_error_message());
    return EPX_OK;
}

/* The chat's messages become the only prompt. */
static epx_status_t render_chat(epx_call_t *c, epx_api_error_t *err) {
    epx_str_t text = {0};
    epx_status_t s = epx_chat_prompt(c->http->cfg.chat_template, &c->req, &text, err);
    if (s >= 0) {
        c->req.prompts = calloc(1, sizeof *c->req.prompts);
        c->req.n_prompts = c->req.prompts ? 1 : 0;
        s = c->req.prompts ? encode(c, epx_str_z(&text), text.n_bytes, &c->req.prompts[0], err)
                           : epx_api_fail(err, 500, "internal_error", NULL, "out of memory");
    }
    epx_str_fini(&text);
    return s;
}

static epx_status_t tokenize(epx_call_t *c, epx_api_error_t *err) {
    if (c->req.is_chat) return render_chat(c, err);
    for (int i = 0; i < c->req.n_prompts; i++) {
        epx_api_prompt_t *p = &c->req.prompts[i];
        if (p->text) EPX_TRY(encode(c, p->text, p->n_bytes, p, err));
    }
    return EPX_OK;
}

static uint64_t random_seed(void) {
    uint64_t seed = 0;
    while (getrandom(&seed, sizeof seed, 0) < 0 && errno == EINTR) continue;
    return seed;
}

/* The cluster's request of choice `idx`. */
static epx_status_t make_request(epx_call_t *c, int idx, epx_request_t *out, epx_api_error_t *err) {
    const epx_api_prompt_t *p = &c->req.prompts[idx / c->req.n];
    const epx_api_request_t *q = c->choices[idx].req;
    int64_t room = (int64_t)c->http->max_tokens - (int64_t)p->n_ids, n_new = q->max_tokens;
    if (p->n_ids == 0)
        return epx_api_fail(err, 400, "invalid_value", c->req.is_chat ? "messages" : "prompt", "the input has no tokens");
    int64_t usual = q->default_tokens ? q->default_tokens : EPX_HTTP_COMPLETION_TOKENS;
    if (n_new == 0) n_new = c->req.is_chat || room < usual ? room : usual;
    if (n_new < 1 || n_new > room) return too_long(c, err, p->n_ids, (int32_t)n_new);
    if (c->req.priority && !c->http->cfg.by_priority)
        return epx_api_fail(err, 400, "unsupported_parameter", "priority",
                            "priority: must be 0 or null; the server was started without --enable-priority-scheduling");
    if (q->min_tokens > n_new)
        return epx_api_fail(err, 400, "invalid_value", "min_tokens", "min_tokens: must be at most max_tokens (here %d), got %d",
                            (int)n_new, (int)q->min_tokens);
    *out = (epx_request_t){.prompt = p->ids,
                           .n_prompt = (int32_t)p->n_ids,
                           .max_new_tokens = (int32_t)n_new,
                           .sampling = q->sampling,
                           .ignore_eos = q->ignore_eos,
                           .stop_ids = q->stop_ids,
                           .n_stop_ids = q->n_stop_ids,
                           .adjust = q->adjust,
                           .min_new_tokens = q->min_tokens,
                           .priority = c->req.priority,
                           .want_logprobs = q->logprobs,
                           .n_top = q->n_top,
                           .want_prompt_logprobs = q->echo && q->logprobs,
                           .grammar = q->grammar,
                           .grammar_bytes = q->grammar ? strlen(q->grammar) : 0};
    out->sampling.seed = q->has_seed ? q->sampling.seed + (uint64_t)(idx % c->req.n) : random_seed();
    c->choices[idx].n_prompt = out->n_prompt;
    return EPX_OK;
}

static epx_status_t submit_error(epx_api_error_t *err, epx_status_t s) {
    const char *why = epx_error_message();
    switch (s) {
    case EPX_ERR_ARG:
        return epx_api_fail(err, 400, "invalid_value", NULL, "%s", why);
    case EPX_ERR_CAPACITY:
        return epx_api_fail(err, 429, "queue_full", NULL, "%s", why);
    case EPX_ERR_PEER:
    case EPX_ERR_TIMEOUT:
    case EPX_ERR_ABORTED:
    case EPX_ERR_STATE:
        return epx_api_fail(err, 503, "engine_failure", NULL, "%s", why);
    default:
        return epx_api_fail(err, 500, "internal_error", NULL, "%s", why);
    }
}

/* Choices that the ranks have to answer. */
static int n_open(const epx_call_t *c) {
    int n = 0;
    for (int i = 0; i < c->n_choices; i++) n += !c->choices[i].done;
    return n;
}

static epx_status_t admit(epx_call_t *c, epx_api_error_t *err) {
    epx_http_t *h = c->http;
    pthread_mutex_lock(&h->lock);
    int full = h->n_live + n_open(c) > h->cfg.max_live;
    if (!full) h->n_live += n_open(c);
    pthread_mutex_unlock(&h->lock);
    if (full)
        return epx_api_fail(err, 429, "queue_full", NULL, "the queue is full: at most %d requests at a time", h->cfg.max_live);
    return EPX_OK;
}

static void give_back(epx_call_t *c, int n) {
    pthread_mutex_lock(&c->http->lock);
    c->http->n_live -= n;
    pthread_mutex_unlock(&c->http->lock);
}

static epx_status_t echo_first_token(epx_call_t *c, int idx) {
    epx_token_news_t first = {.token = c->req.prompts[idx / c->req.n].ids[0], .logprob = NAN, .is_prompt = 1};
    size_t n = 0;
    const char *bytes = epx_tokenizer_token_bytes(c->http->cfg.tokenizer, first.token, &n);
    return epx_logprobs_add_prompt(&c->choices[idx].logprobs, &first, bytes ? bytes : "", bytes ? n : 0);
}

/* The prompt is the beginning of every answer's text. Before the choice is submitted, so no other thread looks at it. */
static epx_status_t echo_prompt(epx_call_t *c, int idx, epx_api_error_t *err) {
    const epx_api_prompt_t *p = &c->req.prompts[idx / c->req.n];
    epx_str_t raw = {0};
    epx_status_t s = p->text ? epx_str_append(&raw, p->text, p->n_bytes)
                             : epx_tokenizer_decode(c->http->cfg.tokenizer, p->ids, p->n_ids, 0, &raw);
    if (s >= 0) s = epx_utf8_append_lossy(&c->choices[idx].text, epx_str_z(&raw), raw.n_bytes);
    epx_str_fini(&raw);
    if (s >= 0 && c->req.logprobs) s = echo_first_token(c, idx);
    if (s == EPX_ERR_ARG) return epx_api_fail(err, 400, "invalid_value", "prompt", "prompt: %s", epx_error_message());
    return s < 0 ? epx_api_fail(err, 500, "internal_error", NULL, "%s", epx_error_message()) : EPX_OK;
}

epx_status_t epx_call_submit(epx_call_t *c, epx_api_error_t *err) {
    epx_request_t req;
    EPX_TRY(tokenize(c, err));
    for (int i = 0; i < c->n_choices; i++) EPX_TRY(make_request(c, i, &req, err));
    for (int i = 0; c->req.echo && i < c->n_choices; i++) EPX_TRY(echo_prompt(c, i, err));
    EPX_TRY(admit(c, err));
    for (int i = 0, left = n_open(c); i < c->n_choices; i++) {
        if (c->choices[i].done) continue;
        epx_status_t s = make_request(c, i, &req, err);
        if (s >= 0 && (s = epx_call_submit_choice(&c->choices[i], &req)) < 0) s = submit_error(err, s);
        if (s >= 0) {
            left--;
            continue;
        }
        give_back(c, left);
        epx_call_cancel(c);
        return s;
    }
    return EPX_OK;
}
