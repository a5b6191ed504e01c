/* JSON by jansson; a text that is not valid UTF-8 (a token sequence may be anything) is repaired with U+FFFD first. Pure. */
#include "server/http/openai_write.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/tokenizer/tokenizer.h"

json_t *epx_api_text(const char *text, size_t n_bytes) {
    json_t *v = n_bytes ? json_stringn(text, n_bytes) : json_string("");
    epx_str_t fixed = {0};
    if (v) return v;
    if (epx_utf8_append_lossy(&fixed, text, n_bytes) >= 0) v = json_stringn(epx_str_z(&fixed), fixed.n_bytes);
    epx_str_fini(&fixed);
    return v;
}

static json_t *string_or_null(const char *s) { return s && s[0] ? epx_api_text(s, strlen(s)) : json_null(); }

/* Takes the reference of root (NULL: no memory). */
static epx_status_t dump(json_t *root, const char *before, const char *after, epx_str_t *out) {
    char *text = root ? json_dumps(root, JSON_COMPACT) : NULL;
    epx_status_t s = text ? EPX_OK : epx_fail(EPX_ERR_NOMEM, "no memory for an answer");
    if (s >= 0) s = epx_str_append_z(out, before);
    if (s >= 0) s = epx_str_append_z(out, text);
    if (s >= 0) s = epx_str_append_z(out, after);
    free(text);
    json_decref(root);
    return s;
}

static json_t *head_json(const epx_api_head_t *h, const char *object) {
    json_t *o = json_object();
    json_object_set_new(o, "id", json_string(h->id));
    json_object_set_new(o, "object", json_string(object));
    json_object_set_new(o, "created", json_integer(h->created));
    json_object_set_new(o, "model", epx_api_text(h->model, strlen(h->model)));
    return o;
}

static json_t *usage_json(const epx_api_usage_t *u) {
    json_t *o = json_object();
    json_object_set_new(o, "prompt_tokens", json_integer(u->n_prompt));
    json_object_set_new(o, "completion_tokens", json_integer(u->n_completion));
    json_object_set_new(o, "total_tokens", json_integer(u->n_prompt + u->n_completion));
    return o;
}

/* Ids are unique within the server: the answer's own id, the choice and the number. */
static json_t *calls_json(const epx_api_head_t *h, const epx_api_choice_text_t *c, int with_index) {
    json_t *list = json_array();
    for (size_t i = 0; i < json_array_size(c->calls); i++) {
        const json_t *call = json_array_get(c->calls, i);
        char id[96];
        snprintf(id, sizeof id, "call_%.60s_%d_%zu", h->id, c->idx, (size_t)c->first_call + i);
        json_t *o = json_pack("{s:s,s:s,s:{s:O,s:O}}", "id", id, "type", "function", "function", "name",
                              json_object_get(call, "name"), "arguments", json_object_get(call, "arguments"));
        if (with_index) json_object_set_new(o, "index", json_integer((json_int_t)c->first_call + (json_int_t)i));
        json_array_append_new(list, o);
    }
    return list;
}

/* content under `key` ("message", "delta") for chat, as text for completions. content NULL: left out (chat). */
static json_t *choice_json(const epx_api_head_t *h, const epx_api_choice_text_t *c, const char *key, int with_role,
                           int with_text) {
    json_t *o = json_object(), *text = with_text ? epx_api_text(c->text, c->n_bytes) : NULL;
    json_object_set_new(o, "index", json_integer(c->idx));
    if (h->is_chat) {
        json_t *m = json_object();
        if (with_role) json_object_set_new(m, "role", json_string("assistant"));
        int only_calls = json_array_size(c->calls) > 0 && c->n_bytes == 0;
        if (text) json_object_set_new(m, "content", only_calls ? json_null() : json_incref(text));
        json_decref(text);
        if (json_array_size(c->calls) > 0) json_object_set_new(m, "tool_calls", calls_json(h, c, key[0] == 'd'));
        json_object_set_new(o, key, m);
    } else {
        json_object_set_new(o, "text", text ? text : json_string(""));
    }
    json_object_set_new(o, "logprobs", c->logprobs ? json_incref(c->logprobs) : json_null());
    json_object_set_new(o, "finish_reason", string_or_null(c->finish_reason));
    return o;
}

epx_status_t epx_api_write_answer(const epx_api_head_t *h, const epx_api_choice_text_t *choices, int n_choices,
                                  const epx_api_usage_t *usage, epx_str_t *out) {
    json_t *root = head_json(h, h->is_chat ? "chat.completion" : "text_completion"), *list = json_array();
    for (int i = 0; i < n_choices; i++) json_array_append_new(list, choice_json(h, &choices[i], "message", 1, 1));
    json_object_set_new(root, "choices", list);
    json_object_set_new(root, "usage", usage_json(usage));
    return dump(root, "", "", out);
}

static json_t *chunk_head(const epx_api_head_t *h) {
    return head_json(h, h->is_chat ? "chat.completion.chunk" : "text_completion");
}

epx_status_t epx_api_write_chunk(const epx_api_head_t *h, const epx_api_choice_text_t *c, int with_role, epx_str_t *out) {
    json_t *root = chunk_head(h), *list = json_array();
    int with_text = with_role || c->n_bytes > 0;
    json_array_append_new(list, choice_json(h, c, "delta", with_role, with_text));
    json_object_set_new(root, "choices", list);
    if (h->include_usage) json_object_set_new(root, "usage", json_null());
    return dump(root, "data: ", "\n\n", out);
}

epx_status_t epx_api_write_usage_chunk(const epx_api_head_t *h, const epx_api_usage_t *usage, epx_str_t *out) {
    json_t *root = chunk_head(h);
    json_object_set_new(root, "choices", json_array());
    json_object_set_new(root, "usage", usage_json(usage));
    return dump(root, "data: ", "\n\n", out);
}

static json_t *error_json(const epx_api_error_t *err) {
    json_t *root = json_object(), *e = json_object();
    json_object_set_new(e, "message", epx_api_text(err->message, strlen(err->message)));
    json_object_set_new(e, "type", json_string(err->type));
    json_object_set_new(e, "param", string_or_null(err->param));
    json_object_set_new(e, "code", string_or_null(err->code));
    json_object_set_new(root, "error", e);
    return root;
}

epx_status_t epx_api_write_error(const epx_api_error_t *err, epx_str_t *out) { return dump(error_json(err), "", "", out); }

epx_status_t epx_api_write_error_event(const epx_api_error_t *err, epx_str_t *out) {
    return dump(error_json(err), "data: ", "\n\n", out);
}

epx_status_t epx_api_write_model(const char *name, int64_t created, int max_context, int as_list, epx_str_t *out) {
    json_t *m = json_object();
    json_object_set_new(m, "id", epx_api_text(name, strlen(name)));
    json_object_set_new(m, "object", json_string("model"));
    json_object_set_new(m, "created", json_integer(created));
    json_object_set_new(m, "owned_by", json_string("epx"));
    json_object_set_new(m, "max_model_len", json_integer(max_context));
    if (!as_list) return dump(m, "", "", out);
    json_t *root = json_object(), *list = json_array();
    json_array_append_new(list, m);
    json_object_set_new(root, "object", json_string("list"));
    json_object_set_new(root, "data", list);
    return dump(root, "", "", out);
}
