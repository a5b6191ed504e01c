/* The POST endpoints that generate: parse, submit, then answer once or stream. Runs on MHD's threads. */
#include <stdlib.h>

#include "server/http/call.h"
#include "server/http/http_impl.h"

static epx_status_t start_call(epx_http_t *h, struct MHD_Connection *conn, int is_chat, const epx_str_t *body, epx_call_t **out,
                               epx_api_error_t *err) {
    epx_api_limits_t lim = {.model_name = h->model_name,
                            .default_sampling = h->cfg.default_sampling,
                            .n_vocab = h->cfg.n_vocab,
                            .max_context = h->max_tokens};
    epx_api_request_t req;
    if (epx_http_unavailable(h, err)) return EPX_ERR_STATE;
    EPX_TRY(epx_api_parse(epx_str_z(body), body->n_bytes, is_chat, &lim, &req, err));
    if (is_chat && !h->cfg.chat_template) {
        epx_api_request_fini(&req);
        return epx_api_fail(err, 400, "no_chat_template", "messages",
                            "messages: this model has no chat template; use /v1/completions with a prompt");
    }
    epx_call_t *c = epx_call_create(h, conn, &req, &(epx_call_extra_t){0});
    if (!c) return epx_api_fail(err, 500, "internal_error", NULL, "out of memory");
    epx_status_t s = epx_call_submit(c, err);
    if (s < 0) {
        epx_call_detach(c);
        epx_call_unref(c);
        return s;
    }
    *out = c;
    return EPX_OK;
}

static enum MHD_Result post(epx_http_t *h, struct MHD_Connection *conn, int is_chat, const epx_str_t *body,
                            epx_call_t **out_call) {
    epx_api_error_t err;
    if (start_call(h, conn, is_chat, body, out_call, &err) < 0) return epx_http_respond_error(conn, &err);
    return epx_http_continue_call(*out_call);
}

enum MHD_Result epx_http_post_chat(epx_http_t *h, struct MHD_Connection *conn, const char *url, const epx_str_t *body,
                                   epx_call_t **out_call) {
    (void)url;
    return post(h, conn, 1, body, out_call);
}

enum MHD_Result epx_http_post_completions(epx_http_t *h, struct MHD_Connection *conn, const char *url, const epx_str_t *body,
                                          epx_call_t **out_call) {
    (void)url;
    return post(h, conn, 0, body, out_call);
}

static enum MHD_Result answer(epx_call_t *c) {
    epx_api_choice_text_t *texts = calloc((size_t)c->n_choices, sizeof *texts);
    epx_api_usage_t usage;
    epx_str_t body = {0};
    if (!texts) return MHD_NO;
    for (int i = 0; i < c->n_choices; i++) {
        epx_choice_t *ch = &c->choices[i];
        texts[i] = (epx_api_choice_text_t){
            .idx = i, .text = epx_str_z(&ch->text), .n_bytes = ch->text.n_bytes, .finish_reason = ch->finish_reason};
        texts[i].calls = ch->calls;
        if (c->req.logprobs)
            texts[i].logprobs = epx_logprobs_take(&ch->logprobs, c->http->cfg.tokenizer, c->req.is_chat, &ch->stream);
    }
    epx_call_usage(c, &usage);
    epx_status_t s = epx_api_write_answer(&c->head, texts, c->n_choices, &usage, &body);
    for (int i = 0; i < c->n_choices; i++) json_decref(texts[i].logprobs);
    free(texts);
    if (s >= 0) return epx_http_respond_json(c->conn, 200, &body);
    epx_str_fini(&body);
    return MHD_NO;
}

/* The status line waits for the first event, so that an error before it still has its own status. */
enum MHD_Result epx_http_continue_call(epx_call_t *c) {
    for (;;) {
        epx_call_pump(c);
        if (c->client_left) return MHD_NO;
        if (c->has_error && c->out.n_bytes == 0) return epx_http_respond_error(c->conn, &c->error);
        if (c->req.stream && (c->out.n_bytes > 0 || c->has_error)) return epx_http_respond_stream(c->conn, c);
        if (!c->req.stream && epx_call_all_done(c)) return c->format ? c->format->answer(c) : answer(c);
        if (epx_call_suspend(c)) return MHD_YES;
    }
}
