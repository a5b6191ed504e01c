/* From tokens to text to stream events, for one call. Runs on the MHD thread of the connection. */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "server/http/call.h"

/* What arrived of one choice since the last look. */
typedef struct {
    epx_token_news_t *tokens; /* owned */
    size_t n_tokens;
    epx_finish_t finish;
    int end_token, aborted;
    char error[256];
} news_t;

static void take_news(epx_choice_t *ch, news_t *out) {
    pthread_mutex_lock(&ch->call->http->lock);
    out->tokens = ch->tokens;
    out->n_tokens = ch->n_tokens;
    out->finish = ch->finish;
    out->end_token = ch->end_token;
    out->aborted = ch->aborted && ch->finish == EPX_FINISH_CANCELLED;
    memcpy(out->error, ch->error, sizeof out->error);
    ch->n_taken += ch->n_tokens;
    ch->tokens = NULL;
    ch->n_tokens = ch->cap_tokens = 0;
    pthread_mutex_unlock(&ch->call->http->lock);
}

static void fail_call(epx_call_t *c, int status, const char *code, const char *message) {
    epx_api_fail(&c->error, status, code, NULL, "%s", message);
    c->has_error = 1;
    epx_call_cancel(c);
}

static void close_choice(epx_choice_t *ch, const char *reason) {
    epx_http_t *h = ch->call->http;
    ch->done = 1;
    ch->finish_reason = reason;
    pthread_mutex_lock(&h->lock);
    int runs = ch->finish == EPX_FINISH_NONE && !ch->cancel_sent;
    ch->cancel_sent |= runs;
    ch->stopped = runs;
    ch->closed = 1;
    pthread_mutex_unlock(&h->lock);
    if (runs) epx_cluster_cancel(h->cluster, ch->id); /* a stop string ended it, the ranks do not know */
}

static epx_status_t push_token(epx_choice_t *ch, epx_token_news_t *news) {
    const epx_tokenizer_t *tok = ch->call->http->cfg.tokenizer;
    size_t n_bytes = 0;
    const char *bytes = epx_tokenizer_token_bytes(tok, news->token, &n_bytes);
    if (news->is_prompt) return epx_logprobs_add_prompt(&ch->logprobs, news, bytes ? bytes : "", bytes ? n_bytes : 0);
    ch->n_completion++;
    int is_silent = !ch->req->keep_special && epx_tokenizer_is_special(tok, news->token);
    if (!bytes || is_silent) n_bytes = 0; /* no text, as an id of the padded vocabulary */
    if (ch->call->req.logprobs) EPX_TRY(epx_logprobs_add(&ch->logprobs, news, bytes ? bytes : "", n_bytes));
    return n_bytes ? epx_text_stream_push(&ch->stream, bytes, n_bytes, &ch->text) : EPX_OK;
}

static epx_status_t use_news(epx_choice_t *ch, const news_t *news) {
    size_t n_text = news->n_tokens - (size_t)(news->end_token && news->n_tokens > 0);
    for (size_t i = 0; i < n_text && !ch->stream.stopped; i++) EPX_TRY(push_token(ch, &news->tokens[i]));
    if (ch->stream.stopped) {
        close_choice(ch, "stop");
        return EPX_OK;
    }
    ch->n_completion += (int32_t)(news->n_tokens - n_text);
    if (news->finish == EPX_FINISH_STOP || news->finish == EPX_FINISH_LENGTH || news->aborted) {
        EPX_TRY(epx_text_stream_finish(&ch->stream, &ch->text));
        close_choice(ch, news->aborted ? "abort" : news->finish == EPX_FINISH_STOP ? "stop" : "length");
    }
    return EPX_OK;
}

/* Calls behind the first of an answer are left out. */
static void keep_first_call(epx_choice_t *ch) {
    while (ch->tool_calls.n_calls > 1) {
        json_array_remove(ch->calls, json_array_size(ch->calls) - 1);
        ch->tool_calls.n_calls--;
    }
}

static epx_status_t find_tools(epx_choice_t *ch, int is_last) {
    epx_str_t text = {0};
    if (!ch->req->tools) return EPX_OK;
    if (!ch->calls && !(ch->calls = json_array())) return epx_fail(EPX_ERR_NOMEM, "no memory for tool calls");
    epx_status_t s = epx_tool_calls_push(&ch->tool_calls, epx_str_z(&ch->text), ch->text.n_bytes, is_last, &text, ch->calls);
    epx_str_fini(&ch->text);
    ch->text = text;
    if (ch->req->one_call) keep_first_call(ch);
    return s;
}

/* With a call in the answer the reason says so; an answer that may have only one ends with it. */
static void end_with_call(epx_choice_t *ch) {
    if (ch->tool_calls.n_calls == 0) return;
    if (!ch->done && ch->req->one_call) close_choice(ch, "stop");
    if (ch->done && strcmp(ch->finish_reason, "stop") == 0) ch->finish_reason = "tool_calls";
}

/* Called with everything that arrived in ch->text. */
static epx_status_t take_tools(epx_choice_t *ch) {
    if (!ch->req->tools) return EPX_OK;
    EPX_TRY(find_tools(ch, ch->done));
    end_with_call(ch);
    return EPX_OK;
}

/* A chunk with the text and the logprobs that are ready; at the end of the choice with its reason. */
static epx_status_t write_piece(epx_choice_t *ch, const char *finish_reason) {
    epx_call_t *c = ch->call;
    epx_api_choice_text_t piece = {
        .idx = ch->idx, .text = epx_str_z(&ch->text), .n_bytes = ch->text.n_bytes, .finish_reason = finish_reason};
    if (c->req.logprobs) piece.logprobs = epx_logprobs_take(&ch->logprobs, c->http->cfg.tokenizer, c->req.is_chat, &ch->stream);
    piece.calls = ch->calls;
    piece.first_call = ch->tool_calls.n_calls - (int)json_array_size(ch->calls);
    epx_status_t s = epx_api_write_chunk(&c->head, &piece, 0, &c->out);
    json_decref(piece.logprobs);
    epx_str_clear(&ch->text);
    json_array_clear(ch->calls);
    return s;
}

/* Text and end of a choice as events. */
static epx_status_t write_events(epx_choice_t *ch) {
    epx_call_t *c = ch->call;
    epx_api_choice_text_t role = {.idx = ch->idx, .text = ""};
    if (c->req.is_chat && !ch->role_sent) EPX_TRY(epx_api_write_chunk(&c->head, &role, 1, &c->out));
    ch->role_sent = 1;
    if (ch->text.n_bytes > 0 || json_array_size(ch->calls) > 0) EPX_TRY(write_piece(ch, NULL));
    return ch->done ? write_piece(ch, ch->finish_reason) : EPX_OK;
}

static epx_status_t write_news(epx_choice_t *ch) {
    const epx_call_format_t *f = ch->call->format;
    return f ? f->write_events(ch) : write_events(ch);
}

static void pump_choice(epx_choice_t *ch) {
    epx_call_t *c = ch->call;
    news_t news;
    take_news(ch, &news);
    int bad = news.finish == EPX_FINISH_ERROR || (news.finish == EPX_FINISH_CANCELLED && !news.aborted);
    int any = news.n_tokens > 0 || news.finish != EPX_FINISH_NONE;
    epx_status_t s = c->format && news.n_tokens ? c->format->on_tokens(ch, news.tokens, news.n_tokens) : EPX_OK;
    if (s >= 0) s = use_news(ch, &news);
    if (s >= 0 && (c->req.stream || ch->done)) s = take_tools(ch);
    if (s >= 0 && any && c->req.stream && (!bad || ch->text.n_bytes > 0)) s = write_news(ch);
    if (s < 0) fail_call(c, 500, "internal_error", epx_error_message());
    else if (bad && !ch->done)
        fail_call(c, 503, "engine_failure",
                  news.finish == EPX_FINISH_ERROR ? news.error : "the request was cancelled by the engine");
    epx_tokens_free(news.tokens, news.n_tokens);
}

int epx_call_all_done(const epx_call_t *c) {
    for (int i = 0; i < c->n_choices; i++)
        if (!c->choices[i].done) return 0;
    return 1;
}

void epx_call_usage(const epx_call_t *c, epx_api_usage_t *out) {
    memset(out, 0, sizeof *out);
    for (int i = 0; i < c->n_choices; i++) {
        if (i % c->req.n == 0) out->n_prompt += c->choices[i].n_prompt; /* a prompt counts once however many answers it gets */
        out->n_completion += c->choices[i].n_completion;
    }
}

static void end_stream(epx_call_t *c) {
    epx_api_usage_t usage;
    epx_status_t s = EPX_OK;
    epx_call_usage(c, &usage);
    if (c->format) s = c->format->write_end(c);
    else if (c->req.include_usage) s = epx_api_write_usage_chunk(&c->head, &usage, &c->out);
    if (s >= 0) s = epx_str_append_z(&c->out, "data: [DONE]\n\n");
    c->ended = 1;
    if (s < 0) fail_call(c, 500, "internal_error", epx_error_message());
}

void epx_call_pump(epx_call_t *c) {
    epx_http_t *h = c->http;
    size_t before = c->out.n_bytes;
    if (c->ended || c->has_error) return;
    pthread_mutex_lock(&h->lock);
    int tick = c->tick, stopping = h->stopping;
    c->tick = 0;
    c->client_left = c->gone;
    pthread_mutex_unlock(&h->lock);
    for (int i = 0; i < c->n_choices && !c->has_error; i++)
        if (!c->choices[i].done) pump_choice(&c->choices[i]);
    if (c->has_error) return;
    if (epx_call_all_done(c)) {
        if (c->req.stream) end_stream(c);
    } else if (stopping) {
        fail_call(c, 503, "shutting_down", "the server is shutting down");
    } else if (c->deadline_ns && epx_now_ns() >= c->deadline_ns) {
        fail_call(c, 503, "timeout", "the ranks did not answer in time");
    } else if (tick && c->out.n_bytes == before) {
        epx_str_append_z(&c->out, ": keep-alive\n\n");
    }
    c->wrote |= c->out.n_bytes > before;
}
