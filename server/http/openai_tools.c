/* tools, tool_choice, and the messages that carry calls and their results. Pure. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/http/openai_parse.h"

enum { MAX_TOOLS = 128, MAX_NAME = 64 };

static int is_name(const json_t *v) {
    const char *s = json_string_value(v);
    size_t n = json_string_length(v);
    if (!s || n < 1 || n > MAX_NAME) return 0;
    return strspn(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.") == n;
}

static epx_status_t unknown_member(epx_api_parse_t *p, const char *where, const json_t *v, const char *const *known) {
    const char *member;
    json_t *m;
    json_object_foreach((json_t *)v, member, m) {
        int found = 0;
        for (int i = 0; known[i]; i++) found |= strcmp(known[i], member) == 0;
        if (!found) return epx_api_fail(p->err, 400, "unknown_parameter", where, "%s.%.60s: unknown", where, member);
    }
    return EPX_OK;
}

const json_t *epx_api_find_tool(const json_t *tools, const char *name) {
    for (size_t i = 0; i < json_array_size(tools); i++) {
        const json_t *f = json_object_get(json_array_get(tools, i), "function");
        const char *its = json_string_value(json_object_get(f, "name"));
        if (its && strcmp(its, name) == 0) return f;
    }
    return NULL;
}

static epx_status_t check_function(epx_api_parse_t *p, const char *where, const json_t *f) {
    static const char *const known[] = {"name", "description", "parameters", "strict", NULL};
    const json_t *description = json_object_get(f, "description"), *parameters = json_object_get(f, "parameters");
    const json_t *strict = json_object_get(f, "strict");
    if (!json_is_object(f)) return epx_api_fail(p->err, 400, "invalid_value", where, "%s.function: must be an object", where);
    EPX_TRY(unknown_member(p, where, f, known));
    if (!is_name(json_object_get(f, "name")))
        return epx_api_fail(p->err, 400, "invalid_value", where,
                            "%s.function.name: must be 1 to %d letters, digits, dots, dashes or underscores", where, MAX_NAME);
    if (description && !json_is_string(description) && !json_is_null(description))
        return epx_api_bad_value(p, where, description, "a string as description");
    if (parameters && !json_is_object(parameters) && !json_is_null(parameters))
        return epx_api_bad_value(p, where, parameters, "a JSON schema as parameters");
    if (strict && !json_is_boolean(strict) && !json_is_null(strict))
        return epx_api_bad_value(p, where, strict, "true or false as strict");
    return EPX_OK;
}

epx_status_t epx_api_parse_tools(epx_api_parse_t *p, const char *name, const json_t *v) {
    static const char *const known[] = {"type", "function", NULL};
    size_t n = json_array_size(v);
    if (json_is_null(v) || (json_is_array(v) && n == 0)) return EPX_OK;
    if (!json_is_array(v) || n > MAX_TOOLS) return epx_api_bad_value(p, name, v, "a list of at most 128 functions, or null");
    p->req->tools = json_array();
    for (size_t i = 0; i < n; i++) {
        json_t *tool = json_array_get(v, i), *f = json_object_get(tool, "function");
        const char *type = json_string_value(json_object_get(tool, "type"));
        char where[32];
        snprintf(where, sizeof where, "tools[%zu]", i);
        if (!type || strcmp(type, "function") != 0)
            return epx_api_bad_value(p, where, tool, "{\"type\": \"function\", \"function\": {...}}");
        EPX_TRY(unknown_member(p, where, tool, known));
        EPX_TRY(check_function(p, where, f));
        if (epx_api_find_tool(p->req->tools, json_string_value(json_object_get(f, "name"))))
            return epx_api_fail(p->err, 400, "invalid_value", where, "%s.function.name: given twice", where);
        json_array_append(p->req->tools, tool);
    }
    return EPX_OK;
}

epx_status_t epx_api_parse_tool_choice(epx_api_parse_t *p, const char *name, const json_t *v) {
    static const char *const words[] = {"auto", "none", "required"}, *const known[] = {"type", "function", NULL};
    const json_t *f = json_object_get(v, "function"), *type = json_object_get(v, "type");
    if (json_is_null(v)) return EPX_OK;
    for (int i = 0; i < 3; i++) {
        if (!json_is_string(v) || strcmp(json_string_value(v), words[i]) != 0) continue;
        p->has_tool_choice = 1;
        p->tool_choice = (epx_api_tool_choice_t)i;
        return EPX_OK;
    }
    if (!json_is_object(v) || !json_is_string(type) || strcmp(json_string_value(type), "function") != 0 ||
        !json_is_string(json_object_get(f, "name")) || json_object_size(f) != 1)
        return epx_api_bad_value(p, name, v,
                                 "\"none\", \"auto\", \"required\" or {\"type\": \"function\", \"function\": {\"name\": NAME}}");
    EPX_TRY(unknown_member(p, name, v, known));
    p->has_tool_choice = 1;
    p->tool_choice = EPX_API_TOOL_NAMED;
    p->tool_name = json_object_get(f, "name");
    return EPX_OK;
}

epx_status_t epx_api_parse_parallel_tool_calls(epx_api_parse_t *p, const char *name, const json_t *v) {
    if (json_is_null(v)) return EPX_OK;
    if (!json_is_boolean(v)) return epx_api_bad_value(p, name, v, "true, false or null");
    p->req->one_call = json_is_false(v);
    return EPX_OK;
}

/* ---- tools and tool_choice together ---- */

/* A function that may be called, with any object as arguments where it says nothing about them. */
static json_t *call_spec(const json_t *f) {
    json_t *schema = json_object_get(f, "parameters");
    if (json_is_object(schema)) return json_pack("{s:O,s:O}", "name", json_object_get(f, "name"), "schema", schema);
    return json_pack("{s:O,s:{s:s}}", "name", json_object_get(f, "name"), "schema", "type", "object");
}

/* The answer must be one call. */
static epx_status_t force_call(epx_api_parse_t *p) {
    json_t *calls = json_array();
    for (size_t i = 0; i < json_array_size(p->req->tools); i++) {
        const json_t *f = json_object_get(json_array_get(p->req->tools, i), "function");
        if (p->tool_choice == EPX_API_TOOL_NAMED && !json_equal(json_object_get(f, "name"), p->tool_name)) continue;
        json_array_append_new(calls, call_spec(f));
    }
    return epx_api_set_grammar(p, "tools",
                               json_pack("{s:o,s:s,s:s}", "calls", calls, "prefix", "<tool_call>\n", "suffix", "\n</tool_call>"));
}

epx_status_t epx_api_check_tools(epx_api_parse_t *p) {
    epx_api_request_t *r = p->req;
    if (!r->tools) {
        if (p->has_tool_choice && p->tool_choice >= EPX_API_TOOL_REQUIRED)
            return epx_api_fail(p->err, 400, "invalid_value", "tool_choice", "tool_choice: only allowed with tools");
        return EPX_OK;
    }
    if (p->has_tool_choice && p->tool_choice == EPX_API_TOOL_NONE) { /* as if there were none */
        json_decref(r->tools);
        r->tools = NULL;
        return EPX_OK;
    }
    if (r->grammar)
        return epx_api_fail(p->err, 400, "unsupported_parameter", "tools", "tools: not supported together with response_format");
    if (p->has_tool_choice && p->tool_choice == EPX_API_TOOL_NAMED &&
        !epx_api_find_tool(r->tools, json_string_value(p->tool_name)))
        return epx_api_fail(p->err, 400, "invalid_value", "tool_choice", "tool_choice: \"%.64s\" is not one of the tools",
                            json_string_value(p->tool_name));
    return p->has_tool_choice && p->tool_choice >= EPX_API_TOOL_REQUIRED ? force_call(p) : EPX_OK;
}

/* ---- messages ---- */

static epx_status_t message_call(epx_api_parse_t *p, const char *where, const json_t *v, json_t *out) {
    const json_t *f = json_object_get(v, "function"), *name = json_object_get(f, "name"), *text = json_object_get(f, "arguments");
    if (!json_is_object(v) || !json_is_string(name) || !json_is_string(text))
        return epx_api_bad_value(p, where, v,
                                 "{\"id\", \"type\": \"function\", \"function\": {\"name\", \"arguments\": string}}");
    json_t *arguments =
        json_loadb(json_string_value(text), json_string_length(text), JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, NULL);
    if (!json_is_object(arguments)) {
        json_decref(arguments);
        return epx_api_bad_value(p, where, text, "the text of a JSON object as arguments");
    }
    json_t *call = json_pack("{s:s,s:{s:O,s:o}}", "type", "function", "function", "name", name, "arguments", arguments);
    if (json_is_string(json_object_get(v, "id"))) json_object_set(call, "id", json_object_get(v, "id"));
    json_array_append_new(out, call);
    return EPX_OK;
}

epx_status_t epx_api_message_calls(epx_api_parse_t *p, const char *where, const json_t *v, json_t *out) {
    json_t *calls = json_array();
    if (!json_is_array(v)) {
        json_decref(calls);
        return epx_api_bad_value(p, where, v, "a list of calls or null");
    }
    json_object_set_new(out, "tool_calls", calls);
    for (size_t i = 0; i < json_array_size(v); i++) EPX_TRY(message_call(p, where, json_array_get(v, i), calls));
    return EPX_OK;
}
