/* The parameters that carry text: messages, prompt, stop, stop_token_ids. Pure. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/str.h"
#include "server/http/openai_parse.h"

static epx_status_t no_memory(epx_api_parse_t *p) { return epx_api_fail(p->err, 500, "internal_error", NULL, "out of memory"); }

/* Owned copy with its length and a NUL behind it; NULL without memory. */
static char *copy_string(const json_t *v, size_t *out_bytes) {
    size_t n = json_string_length(v);
    char *s = malloc(n + 1);
    if (!s) return NULL;
    memcpy(s, json_string_value(v), n + 1);
    *out_bytes = n;
    return s;
}

/* ---- messages ---- */

static epx_status_t append_part(epx_api_parse_t *p, const char *where, const json_t *part, epx_str_t *text) {
    const json_t *type = json_object_get(part, "type"), *t = json_object_get(part, "text");
    if (!json_is_object(part) || !json_is_string(type)) return epx_api_bad_value(p, where, part, "an object with a string type");
    if (strcmp(json_string_value(type), "text") != 0)
        return epx_api_bad_value(p, where, type, "a part of type \"text\" (no images, audio or files here)");
    if (!json_is_string(t) || json_object_size(part) != 2)
        return epx_api_bad_value(p, where, part, "{\"type\": \"text\", \"text\": string}");
    if (epx_str_append(text, json_string_value(t), json_string_length(t)) < 0) return no_memory(p);
    return EPX_OK;
}

/* *out: a new reference to the content as one string. */
static epx_status_t content_string(epx_api_parse_t *p, const char *where, const json_t *content, json_t **out) {
    epx_str_t text = {0};
    epx_status_t s = EPX_OK;
    if (json_is_string(content)) {
        *out = json_incref((json_t *)content);
        return EPX_OK;
    }
    if (!json_is_array(content)) return epx_api_bad_value(p, where, content, "a string or a list of text parts");
    for (size_t i = 0; i < json_array_size(content) && s >= 0; i++) s = append_part(p, where, json_array_get(content, i), &text);
    if (s >= 0 && !(*out = json_stringn(epx_str_z(&text), text.n_bytes))) s = no_memory(p);
    epx_str_fini(&text);
    return s;
}

static epx_status_t message_role(epx_api_parse_t *p, size_t idx, const json_t *role, json_t *out) {
    static const char *const known[] = {"system", "developer", "user", "assistant", "tool"};
    char where[64];
    snprintf(where, sizeof where, "messages[%zu].role", idx);
    for (int i = 0; json_is_string(role) && i < 5; i++) {
        if (strcmp(json_string_value(role), known[i]) != 0) continue;
        /* OpenAI renamed "system" to "developer"; templates know the old name. */
        json_object_set_new(out, "role", json_string(i == 1 ? "system" : known[i]));
        return EPX_OK;
    }
    if (!role) return epx_api_fail(p->err, 400, "missing_parameter", where, "%s: required", where);
    return epx_api_bad_value(p, where, role, "\"system\", \"developer\", \"user\", \"assistant\" or \"tool\"");
}

static int is_role(const json_t *out, const char *role) {
    return strcmp(json_string_value(json_object_get(out, "role")), role) == 0;
}

/* An answer that is only calls has no content. */
static int may_lack_content(const json_t *m) {
    const char *role = json_string_value(json_object_get(m, "role"));
    return role && strcmp(role, "assistant") == 0 && json_array_size(json_object_get(m, "tool_calls")) > 0;
}

/* Members other than role and content: strings that templates may use, or what clients send back of an earlier answer. */
static epx_status_t message_extra(epx_api_parse_t *p, size_t idx, const char *name, json_t *v, json_t *out) {
    static const char *const empty_only[] = {"refusal", "audio", "function_call", "annotations"};
    char where[96];
    snprintf(where, sizeof where, "messages[%zu].%.40s", idx, name);
    if (strcmp(name, "tool_calls") == 0) {
        if (json_is_null(v) || (json_is_array(v) && json_array_size(v) == 0)) return EPX_OK;
        if (!is_role(out, "assistant")) return epx_api_bad_value(p, where, v, "null or absent unless the role is assistant");
        return epx_api_message_calls(p, where, v, out);
    }
    if (strcmp(name, "name") == 0 || strcmp(name, "reasoning_content") == 0 ||
        (strcmp(name, "tool_call_id") == 0 && is_role(out, "tool"))) {
        if (json_is_null(v)) return EPX_OK;
        if (!json_is_string(v)) return epx_api_bad_value(p, where, v, "a string or null");
        json_object_set(out, name, v);
        return EPX_OK;
    }
    for (int i = 0; i < 4; i++) {
        if (strcmp(name, empty_only[i]) != 0) continue;
        if (json_is_null(v) || (json_is_array(v) && json_array_size(v) == 0)) return EPX_OK;
        return epx_api_bad_value(p, where, v, "null or absent (not supported here)");
    }
    return epx_api_fail(p->err, 400, "unknown_parameter", where,
                        "%s: unknown; accepted: role, content, name, reasoning_content, tool_calls, tool_call_id", where);
}

static epx_status_t message_members(epx_api_parse_t *p, size_t idx, const json_t *m, json_t *out) {
    char where[64];
    const char *name;
    json_t *v, *content = NULL;
    EPX_TRY(message_role(p, idx, json_object_get(m, "role"), out));
    snprintf(where, sizeof where, "messages[%zu].content", idx);
    const json_t *given = json_object_get(m, "content");
    if ((!given || json_is_null(given)) && may_lack_content(m)) content = json_string("");
    else if (!given) return epx_api_fail(p->err, 400, "missing_parameter", where, "%s: required", where);
    else EPX_TRY(content_string(p, where, given, &content));
    json_object_set_new(out, "content", content);
    json_object_foreach((json_t *)m, name, v) {
        if (strcmp(name, "role") == 0 || strcmp(name, "content") == 0) continue;
        EPX_TRY(message_extra(p, idx, name, v, out));
    }
    return EPX_OK;
}

epx_status_t epx_api_parse_messages(epx_api_parse_t *p, const char *name, const json_t *v) {
    if (!json_is_array(v) || json_array_size(v) == 0) return epx_api_bad_value(p, name, v, "a non-empty array");
    p->req->messages = json_array();
    for (size_t i = 0; i < json_array_size(v); i++) {
        const json_t *m = json_array_get(v, i);
        json_t *out = json_object();
        char where[32];
        snprintf(where, sizeof where, "messages[%zu]", i);
        if (!out || json_array_append_new(p->req->messages, out) != 0) return no_memory(p);
        if (!json_is_object(m)) return epx_api_bad_value(p, where, m, "an object");
        EPX_TRY(message_members(p, i, m, out));
    }
    return EPX_OK;
}

/* ---- prompt ---- */

epx_status_t epx_api_parse_ids(epx_api_parse_t *p, const char *name, const json_t *v, int32_t **out_ids, size_t *out_n) {
    char legal[80];
    size_t n = json_array_size(v);
    snprintf(legal, sizeof legal, "a token id from 0 to %d", p->lim->n_vocab - 1);
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_array_get(v, i);
        if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) >= p->lim->n_vocab)
            return epx_api_bad_value(p, name, id, legal);
    }
    int32_t *ids = malloc((n ? n : 1) * sizeof *ids);
    if (!ids) return no_memory(p);
    for (size_t i = 0; i < n; i++) ids[i] = (int32_t)json_integer_value(json_array_get(v, i));
    *out_ids = ids;
    *out_n = n;
    return EPX_OK;
}

static epx_status_t one_prompt(epx_api_parse_t *p, const char *name, const json_t *v, epx_api_prompt_t *out) {
    if (json_is_string(v)) {
        out->text = copy_string(v, &out->n_bytes);
        return out->text ? EPX_OK : no_memory(p);
    }
    if (json_is_array(v) && json_array_size(v) > 0) return epx_api_parse_ids(p, name, v, &out->ids, &out->n_ids);
    return epx_api_bad_value(p, name, v, "a string, a non-empty list of strings, or non-empty token ids");
}

epx_status_t epx_api_parse_prompt(epx_api_parse_t *p, const char *name, const json_t *v) {
    const json_t *first = json_array_get(v, 0);
    int is_list = json_is_string(first) || json_is_array(first);
    size_t n = is_list ? json_array_size(v) : 1;
    if (n > EPX_API_MAX_CHOICES)
        return epx_api_fail(p->err, 400, "invalid_value", name, "prompt: at most %d prompts in a request, got %zu",
                            EPX_API_MAX_CHOICES, n);
    p->req->prompts = calloc(n, sizeof *p->req->prompts);
    if (!p->req->prompts) return no_memory(p);
    p->req->n_prompts = (int)n;
    for (size_t i = 0; i < n; i++) EPX_TRY(one_prompt(p, name, is_list ? json_array_get(v, i) : v, &p->req->prompts[i]));
    return EPX_OK;
}

/* ---- stop ---- */

static epx_status_t add_stop(epx_api_parse_t *p, const char *name, const json_t *v) {
    epx_api_request_t *r = p->req;
    if (!json_is_string(v) || json_string_length(v) == 0 || json_string_length(v) > EPX_API_MAX_STOP_BYTES)
        return epx_api_bad_value(p, name, v, "a string of 1 to 1024 bytes, or a list of at most 4 of them");
    r->stop[r->n_stop] = copy_string(v, &r->stop_bytes[r->n_stop]);
    if (!r->stop[r->n_stop]) return no_memory(p);
    r->n_stop++;
    return EPX_OK;
}

epx_status_t epx_api_parse_stop(epx_api_parse_t *p, const char *name, const json_t *v) {
    if (json_is_null(v)) return EPX_OK;
    if (!json_is_array(v)) return add_stop(p, name, v);
    if (json_array_size(v) > EPX_API_MAX_STOPS) return epx_api_bad_value(p, name, v, "at most 4 strings");
    for (size_t i = 0; i < json_array_size(v); i++) EPX_TRY(add_stop(p, name, json_array_get(v, i)));
    return EPX_OK;
}

epx_status_t epx_api_parse_stop_ids(epx_api_parse_t *p, const char *name, const json_t *v) {
    int32_t *ids = NULL;
    size_t n = 0;
    if (json_is_null(v)) return EPX_OK;
    if (!json_is_array(v) || json_array_size(v) > EPX_API_MAX_STOP_IDS)
        return epx_api_bad_value(p, name, v, "a list of at most 64 token ids, or null");
    EPX_TRY(epx_api_parse_ids(p, name, v, &ids, &n));
    memcpy(p->req->stop_ids, ids, n * sizeof *ids);
    p->req->n_stop_ids = (int)n;
    free(ids);
    return EPX_OK;
}
