/* /generate, and /health_generate, which is a request of one token. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "server/http/native.h"

static int n_dp(epx_http_t *h) {
    epx_cluster_status_t st;
    epx_cluster_status(h->cluster, &st);
    return st.n_dp;
}

static epx_status_t no_memory(epx_api_error_t *err) { return epx_api_fail(err, 500, "internal_error", NULL, "out of memory"); }

/* Names for /abort_request and for the answer; choices without any token are done before they begin. */
static void prepare_choices(epx_call_t *c, epx_native_t *own) {
    epx_http_t *h = c->http;
    for (int i = 0; i < c->n_choices; i++) {
        epx_choice_t *ch = &c->choices[i];
        char *rid = own->choices[i].rid;
        int prompt = i / c->req.n, is_one = c->n_choices == 1;
        if (own->rids && c->req.n == 1) snprintf(rid, sizeof own->choices[i].rid, "%s", own->rids[prompt]);
        else if (own->rids) snprintf(rid, sizeof own->choices[i].rid, "%s-%d", own->rids[prompt], i % c->req.n);
        else snprintf(rid, sizeof own->choices[i].rid, is_one ? "%s" : "%s-%d", c->id, i);
        if (own->each[prompt].max_tokens == -1) {
            ch->done = 1;
            ch->finish_reason = "length";
        }
        pthread_mutex_lock(&h->lock);
        ch->rid = rid;
        ch->closed |= ch->done;
        pthread_mutex_unlock(&h->lock);
    }
    for (int i = 0; i < own->n_prompts; i++)
        if (own->each[i].max_tokens == -1) own->each[i].max_tokens = 1; /* what is checked of the length of its prompt */
}

static epx_call_t *make_call(epx_http_t *h, struct MHD_Connection *conn, epx_api_request_t *req, epx_native_t *own) {
    int n = req->n_prompts * req->n;
    own->choices = calloc((size_t)n, sizeof *own->choices);
    own->n_choices = n;
    if (!own->choices) {
        epx_native_free(own);
        epx_api_request_fini(req);
        return NULL;
    }
    epx_call_extra_t extra = {.format = &epx_native_format, .own = own, .each = own->each, .dp_rank_plus_1 = own->dp_rank_plus_1};
    epx_call_t *c = epx_call_create(h, conn, req, &extra);
    if (c) prepare_choices(c, own);
    return c;
}

static epx_status_t submit(epx_call_t *c, epx_call_t **out, epx_api_error_t *err) {
    epx_status_t s = epx_call_submit(c, err);
    if (s >= 0) {
        *out = c;
        return EPX_OK;
    }
    epx_call_detach(c);
    epx_call_unref(c);
    return s;
}

static epx_status_t start(epx_http_t *h, struct MHD_Connection *conn, const epx_str_t *body, epx_call_t **out,
                          epx_api_error_t *err) {
    epx_api_limits_t lim = {.model_name = h->model_name,
                            .default_sampling = h->cfg.default_sampling,
                            .n_vocab = h->cfg.n_vocab,
                            .max_context = h->max_tokens};
    epx_api_request_t req;
    epx_native_t *own;
    if (epx_http_unavailable(h, err)) return EPX_ERR_STATE;
    EPX_TRY(epx_native_parse(epx_str_z(body), body->n_bytes, &lim, n_dp(h), &req, &own, err));
    epx_call_t *c = make_call(h, conn, &req, own);
    return c ? submit(c, out, err) : no_memory(err);
}

EPX_NATIVE_HANDLER(epx_native_generate) {
    epx_api_error_t err;
    (void)url;
    if (start(h, conn, body, out_call, &err) < 0) return epx_http_respond_error(conn, &err);
    return epx_http_continue_call(*out_call);
}

/* ---- the probe ---- */

static epx_status_t ignore_tokens(epx_choice_t *ch, const epx_token_news_t *tokens, size_t n) {
    (void)ch, (void)tokens, (void)n;
    return EPX_OK;
}

static enum MHD_Result probe_answer(epx_call_t *c) {
    return epx_native_respond_text(c->conn, 200, "application/json", "{\"status\":\"ok\"}");
}

static const epx_call_format_t probe_format = {ignore_tokens, NULL, NULL, probe_answer, free};

static epx_status_t start_probe(epx_http_t *h, struct MHD_Connection *conn, epx_call_t **out, epx_api_error_t *err) {
    epx_api_request_t req = {.n = 1, .n_prompts = 1, .max_tokens = 1, .ignore_eos = 1};
    epx_call_extra_t extra = {.format = &probe_format, .timeout_ns = EPX_NATIVE_PROBE_S * UINT64_C(1000000000)};
    if (epx_http_unavailable(h, err)) return EPX_ERR_STATE;
    epx_sampling_init(&req.sampling);
    req.sampling.temperature = 0;
    req.prompts = calloc(1, sizeof *req.prompts);
    if (req.prompts) req.prompts[0].ids = calloc(1, sizeof *req.prompts[0].ids);
    if (!req.prompts || !req.prompts[0].ids) {
        epx_api_request_fini(&req);
        return no_memory(err);
    }
    req.prompts[0].n_ids = 1;
    epx_call_t *c = epx_call_create(h, conn, &req, &extra);
    return c ? submit(c, out, err) : no_memory(err);
}

/* A token of any request within the last second says what a probe would say, and a full queue cannot hide it. */
EPX_NATIVE_HANDLER(epx_native_health_generate) {
    epx_api_error_t err;
    (void)url, (void)body;
    pthread_mutex_lock(&h->lock);
    uint64_t last = h->metrics.last_token_ns;
    int is_well = !h->failed && !h->stopping && last && epx_now_ns() - last < 1000000000u;
    pthread_mutex_unlock(&h->lock);
    if (is_well) return epx_native_respond_text(conn, 200, "application/json", "{\"status\":\"ok\"}");
    if (start_probe(h, conn, out_call, &err) < 0) return epx_http_respond_error(conn, &err);
    return epx_http_continue_call(*out_call);
}
