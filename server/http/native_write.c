/* Answers and events of /generate. The text of a stream is cumulative, as SGLang's clients expect. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "server/http/native.h"

static epx_native_choice_t *own_of(const epx_choice_t *ch) { return &((epx_native_t *)ch->call->own)->choices[ch->idx]; }

static epx_status_t append_json(epx_str_t *out, json_t *v) {
    char *text = v ? json_dumps(v, JSON_COMPACT | JSON_ENCODE_ANY | JSON_REAL_PRECISION(9)) : NULL;
    epx_status_t s = text ? epx_str_append_z(out, text) : epx_fail(EPX_ERR_NOMEM, "no memory for an answer");
    free(text);
    json_decref(v);
    return s;
}

static json_t *finish_reason(const epx_choice_t *ch) {
    const epx_native_choice_t *own = own_of(ch);
    const epx_api_request_t *q = ch->req;
    json_t *o = json_object();
    if (!ch->done) {
        json_decref(o);
        return json_null();
    }
    json_object_set_new(o, "type", json_string(ch->finish_reason));
    if (strcmp(ch->finish_reason, "length") == 0) json_object_set_new(o, "length", json_integer(ch->n_completion));
    else if (strcmp(ch->finish_reason, "abort") == 0) json_object_set_new(o, "message", json_string("aborted by a request"));
    else if (ch->stream.stopped)
        json_object_set_new(o, "matched", json_stringn(q->stop[ch->stream.stopped_by], q->stop_bytes[ch->stream.stopped_by]));
    else if (own->n_ids) json_object_set_new(o, "matched", json_integer(own->ids[own->n_ids - 1]));
    return o;
}

static int32_t n_cached(const epx_choice_t *ch) {
    pthread_mutex_lock(&ch->call->http->lock);
    int32_t n = ch->n_cached;
    pthread_mutex_unlock(&ch->call->http->lock);
    return n;
}

static json_t *meta_info(const epx_choice_t *ch) {
    json_t *m = json_object();
    json_object_set_new(m, "id", json_string(own_of(ch)->rid));
    json_object_set_new(m, "finish_reason", finish_reason(ch));
    json_object_set_new(m, "prompt_tokens", json_integer(ch->n_prompt));
    json_object_set_new(m, "completion_tokens", json_integer(ch->n_completion));
    json_object_set_new(m, "cached_tokens", json_integer(n_cached(ch)));
    json_object_set_new(m, "weight_version", json_string("default"));
    if (ch->done) json_object_set_new(m, "e2e_latency", json_real((double)(epx_now_ns() - ch->call->started_ns) * 1e-9));
    return m;
}

static epx_status_t append_ids(const epx_choice_t *ch, epx_str_t *out) {
    const epx_native_choice_t *own = own_of(ch);
    size_t n = own->n_ids < (size_t)ch->n_completion ? own->n_ids : (size_t)ch->n_completion;
    EPX_TRY(epx_str_append_z(out, "["));
    for (size_t i = 0; i < n; i++) EPX_TRY(epx_str_printf(out, i ? ",%" PRId32 : "%" PRId32, own->ids[i]));
    return epx_str_append_z(out, "]");
}

epx_status_t epx_native_write_choice(const epx_choice_t *ch, int with_index, epx_str_t *out) {
    EPX_TRY(epx_str_append_z(out, "{\"text\":"));
    EPX_TRY(append_json(out, json_stringn(epx_str_z(&ch->text), ch->text.n_bytes)));
    EPX_TRY(epx_str_append_z(out, ",\"output_ids\":"));
    EPX_TRY(append_ids(ch, out));
    EPX_TRY(epx_str_append_z(out, ",\"meta_info\":"));
    EPX_TRY(append_json(out, meta_info(ch)));
    if (with_index) EPX_TRY(epx_str_printf(out, ",\"index\":%d", ch->idx));
    return epx_str_append_z(out, "}");
}

static epx_status_t on_tokens(epx_choice_t *ch, const epx_token_news_t *tokens, size_t n) {
    epx_native_choice_t *own = own_of(ch);
    if (own->n_ids + n > own->cap_ids) {
        size_t cap = 2 * (own->n_ids + n);
        int32_t *grown = realloc(own->ids, cap * sizeof *grown);
        if (!grown) return epx_fail(EPX_ERR_NOMEM, "no memory for %zu token ids", cap);
        own->ids = grown;
        own->cap_ids = cap;
    }
    for (size_t i = 0; i < n; i++) own->ids[own->n_ids++] = tokens[i].token;
    return EPX_OK;
}

static epx_status_t write_events(epx_choice_t *ch) {
    epx_call_t *c = ch->call;
    EPX_TRY(epx_str_append_z(&c->out, "data: "));
    EPX_TRY(epx_native_write_choice(ch, c->n_choices > 1, &c->out));
    own_of(ch)->end_written = ch->done;
    return epx_str_append_z(&c->out, "\n\n");
}

/* Choices that were done before they began have had no event yet. */
static epx_status_t write_end(epx_call_t *c) {
    for (int i = 0; i < c->n_choices; i++)
        if (!own_of(&c->choices[i])->end_written) EPX_TRY(write_events(&c->choices[i]));
    return EPX_OK;
}

static epx_status_t write_all(epx_call_t *c, epx_str_t *out) {
    int is_list = ((epx_native_t *)c->own)->is_list || c->n_choices > 1;
    if (is_list) EPX_TRY(epx_str_append_z(out, "["));
    for (int i = 0; i < c->n_choices; i++) {
        if (i) EPX_TRY(epx_str_append_z(out, ","));
        EPX_TRY(epx_native_write_choice(&c->choices[i], 0, out));
    }
    return is_list ? epx_str_append_z(out, "]") : EPX_OK;
}

static enum MHD_Result answer(epx_call_t *c) {
    epx_str_t body = {0};
    if (write_all(c, &body) >= 0) return epx_http_respond_json(c->conn, 200, &body);
    epx_str_fini(&body);
    return MHD_NO;
}

const epx_call_format_t epx_native_format = {on_tokens, write_events, write_end, answer, epx_native_free};
