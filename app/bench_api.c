/* Requests and answers of SGLang's and OpenAI's APIs as a client sees them. */
#include "app/bench_api.h"

#include <stdlib.h>
#include <string.h>

/* llama-server knows max_completion_tokens not. */
static const epx_api_t apis[] = {
    {"sglang", EPX_API_NATIVE, "/generate", 30000, "max_new_tokens"},
    {"sglang-native", EPX_API_NATIVE, "/generate", 30000, "max_new_tokens"},
    {"sglang-oai", EPX_API_TEXT, "/v1/completions", 30000, "max_tokens"},
    {"sglang-oai-chat", EPX_API_CHAT, "/v1/chat/completions", 30000, "max_completion_tokens"},
    {"vllm", EPX_API_TEXT, "/v1/completions", 8000, "max_tokens"},
    {"vllm-chat", EPX_API_CHAT, "/v1/chat/completions", 8000, "max_tokens"},
    {"lmdeploy", EPX_API_TEXT, "/v1/completions", 23333, "max_tokens"},
    {"lmdeploy-chat", EPX_API_CHAT, "/v1/chat/completions", 23333, "max_tokens"},
};

const epx_api_t *epx_api_of(const char *backend) {
    for (size_t i = 0; i < sizeof apis / sizeof apis[0]; i++)
        if (strcmp(apis[i].backend, backend) == 0) return &apis[i];
    return NULL;
}

/* ---- requests ---- */

static json_t *prompt_of(const epx_ask_t *a) {
    if (!a->ids) return json_stringn(a->text, a->n_text);
    json_t *list = json_array();
    for (int64_t i = 0; i < a->n_ids; i++) json_array_append_new(list, json_integer(a->ids[i]));
    return list;
}

static json_t *stops_of(const epx_ask_t *a) {
    json_t *list = json_array();
    for (size_t i = 0; i < a->n_stop; i++) json_array_append_new(list, json_string(a->stop[i]));
    return list;
}

static json_t *native_body(const epx_ask_t *a, json_t *prompt) {
    json_t *params = json_pack("{s:f, s:I, s:b}", "temperature", 0.0, "max_new_tokens", (json_int_t)a->max_tokens, "ignore_eos",
                               a->ignore_eos);
    if (a->n_stop) json_object_set_new(params, "stop", stops_of(a));
    return json_pack("{s:o, s:o, s:b, s:n, s:b, s:i}", a->ids ? "input_ids" : "text", prompt, "sampling_params", params, "stream",
                     a->stream, "lora_path", "return_logprob", a->return_logprob, "logprob_start_len", -1);
}

/* ignore_eos is left out when it is off: OpenAI's own API does not know it. */
static json_t *openai_body(const epx_ask_t *a, json_t *prompt) {
    int chat = a->api->kind == EPX_API_CHAT;
    json_t *o = json_pack("{s:s, s:f, s:b}", "model", a->model, "temperature", 0.0, "stream", a->stream);
    json_object_set_new(o, chat ? "messages" : "prompt",
                        chat ? json_pack("[{s:s, s:o}]", "role", "user", "content", prompt) : prompt);
    json_object_set_new(o, a->api->max_tokens, json_integer(a->max_tokens));
    if (a->ignore_eos) json_object_set_new(o, "ignore_eos", json_true());
    if (a->stream) json_object_set_new(o, "stream_options", json_pack("{s:b}", "include_usage", 1));
    if (a->n_stop) json_object_set_new(o, "stop", stops_of(a));
    if (a->return_logprob) json_object_set_new(o, "logprobs", chat ? json_true() : json_integer(0));
    return o;
}

epx_status_t epx_api_body(const epx_ask_t *a, char **out_body) {
    json_t *prompt = prompt_of(a);
    if (!prompt) return epx_fail(EPX_ERR_ARG, "a prompt is not valid UTF-8");
    json_t *o = a->api->kind == EPX_API_NATIVE ? native_body(a, prompt) : openai_body(a, prompt);
    if (o && a->extra) json_object_update(o, (json_t *)(uintptr_t)a->extra); /* it is only read */
    char *body = o ? json_dumps(o, JSON_COMPACT) : NULL;
    json_decref(o);
    if (!body) return epx_fail(EPX_ERR_NOMEM, "no memory for a request");
    *out_body = body;
    return EPX_OK;
}

/* ---- answers ---- */

void epx_reply_init(epx_reply_t *r) { *r = (epx_reply_t){.n_tokens = -1, .n_prompt = -1}; }

static void note_count(const json_t *o, const char *name, int64_t *out) {
    const json_t *v = json_object_get(o, name);
    if (json_is_integer(v)) *out = json_integer_value(v);
}

static void note_finish(epx_reply_t *r, const json_t *reason) {
    const char *name = json_is_object(reason) ? json_string_value(json_object_get(reason, "type")) : json_string_value(reason);
    if (!name) return;
    r->is_end = 1;
    snprintf(r->finish, sizeof r->finish, "%s", name);
}

/* The text is the whole of what was generated so far. */
static epx_status_t take_native(epx_reply_t *r, const json_t *o) {
    const json_t *text = json_object_get(o, "text"), *meta = json_object_get(o, "meta_info");
    size_t before = r->text.n_bytes;
    note_count(meta, "completion_tokens", &r->n_tokens);
    note_count(meta, "prompt_tokens", &r->n_prompt);
    note_finish(r, json_object_get(meta, "finish_reason"));
    if (json_string_length(text) == 0) return EPX_OK;
    epx_str_clear(&r->text);
    r->n_new_bytes = json_string_length(text) > before ? json_string_length(text) - before : 0;
    return epx_str_append(&r->text, json_string_value(text), json_string_length(text));
}

static epx_status_t add_piece(epx_reply_t *r, const json_t *text) {
    size_t n = json_string_length(text);
    r->n_new_bytes += n;
    return n ? epx_str_append(&r->text, json_string_value(text), n) : EPX_OK;
}

/* A chunk, or a whole answer: "delta" or "message". What a model thinks is text too. */
static epx_status_t take_openai(epx_reply_t *r, const json_t *o) {
    const json_t *usage = json_object_get(o, "usage"), *choice = json_array_get(json_object_get(o, "choices"), 0);
    const json_t *part = json_object_get(choice, "delta");
    if (!part) part = json_object_get(choice, "message");
    note_count(usage, "completion_tokens", &r->n_tokens);
    note_count(usage, "prompt_tokens", &r->n_prompt);
    note_finish(r, json_object_get(choice, "finish_reason"));
    EPX_TRY(add_piece(r, json_object_get(choice, "text")));
    EPX_TRY(add_piece(r, json_object_get(part, "reasoning_content")));
    return add_piece(r, json_object_get(part, "content"));
}

/* {"error": {"message"}}, {"error": TEXT} or SGLang's {"object": "error", "message"}; NULL: none. */
static const char *error_of(const json_t *o) {
    const json_t *e = json_object_get(o, "error"), *kind = json_object_get(o, "object");
    if (json_is_string(e)) return json_string_value(e);
    if (json_is_object(e))
        return json_is_string(json_object_get(e, "message")) ? json_string_value(json_object_get(e, "message")) : "error";
    if (json_is_string(kind) && strcmp(json_string_value(kind), "error") == 0) {
        const char *m = json_string_value(json_object_get(o, "message"));
        return m ? m : "error";
    }
    return NULL;
}

epx_status_t epx_reply_take(epx_reply_t *r, epx_api_kind_t kind, const char *data, size_t n_bytes) {
    json_error_t e;
    r->n_new_bytes = 0;
    if (n_bytes == 6 && memcmp(data, "[DONE]", 6) == 0) {
        r->is_end = 1;
        return EPX_OK;
    }
    json_t *o = json_loadb(data, n_bytes, JSON_ALLOW_NUL, &e);
    const char *error = o ? error_of(o) : e.text;
    epx_status_t s = EPX_OK;
    if (error) snprintf(r->error, sizeof r->error, "%s%.200s", o ? "" : "an event is no JSON: ", error);
    else s = kind == EPX_API_NATIVE ? take_native(r, o) : take_openai(r, o);
    json_decref(o);
    return s;
}

void epx_reply_error(const char *data, size_t n_bytes, char *out, size_t n_out) {
    json_error_t e;
    json_t *o = json_loadb(data ? data : "", n_bytes, 0, &e);
    const char *error = error_of(o);
    if (error) snprintf(out, n_out, "%s", error);
    else snprintf(out, n_out, "%.*s", (int)(n_bytes < 200 ? n_bytes : 200), data ? data : "");
    for (char *p = out; *p; p++)
        if (*p == '\n' || *p == '\r') *p = ' ';
    json_decref(o);
}
