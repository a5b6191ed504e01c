/* See chat_prompt.h. That a template knows tools is seen by leaving them out and comparing. */
#include "server/http/chat_prompt.h"

#include <string.h>

static epx_status_t render(const epx_chat_template_t *t, const json_t *messages, const json_t *vars, epx_str_t *out,
                           epx_api_error_t *err) {
    if (epx_chat_template_render(t, messages, 1, vars, out) >= 0) return EPX_OK;
    return epx_api_fail(err, 400, "chat_template", "messages", "messages: the chat template failed: %s", epx_error_message());
}

/* The messages without their calls; NULL when none has one. */
static json_t *without_calls(const json_t *messages) {
    json_t *copy = json_array();
    int found = 0;
    for (size_t i = 0; i < json_array_size(messages); i++) {
        json_t *m = json_copy(json_array_get(messages, i));
        found |= json_object_del(m, "tool_calls") == 0;
        json_array_append_new(copy, m);
    }
    if (found) return copy;
    json_decref(copy);
    return NULL;
}

static int same_text(const epx_str_t *a, const epx_str_t *b) {
    return a->n_bytes == b->n_bytes && (a->n_bytes == 0 || memcmp(a->data, b->data, a->n_bytes) == 0);
}

/* 400 when rendering something else gives the same text. */
static epx_status_t must_differ(const epx_chat_template_t *t, const json_t *messages, const json_t *vars, const epx_str_t *text,
                                const char *what, epx_api_error_t *err) {
    epx_str_t other = {0};
    int same = epx_chat_template_render(t, messages, 1, vars, &other) >= 0 && same_text(&other, text);
    epx_str_fini(&other);
    if (!same) return EPX_OK;
    return epx_api_fail(err, 400, "unsupported_parameter", what, "%s: this model's chat template does not know tools", what);
}

static epx_status_t check_tools(const epx_chat_template_t *t, const epx_api_request_t *r, const json_t *vars,
                                const epx_str_t *text, epx_api_error_t *err) {
    json_t *bare = without_calls(r->messages);
    epx_status_t s = r->tools ? must_differ(t, r->messages, r->template_vars, text, "tools", err) : EPX_OK;
    if (s >= 0 && bare) s = must_differ(t, bare, vars, text, "messages", err);
    json_decref(bare);
    return s;
}

epx_status_t epx_chat_prompt(const epx_chat_template_t *t, const epx_api_request_t *r, epx_str_t *out, epx_api_error_t *err) {
    json_t *vars = r->template_vars ? json_copy(r->template_vars) : json_object();
    epx_str_t text = {0};
    if (!vars) return epx_api_fail(err, 500, "internal_error", NULL, "out of memory");
    if (r->tools) json_object_set(vars, "tools", r->tools);
    epx_status_t s = render(t, r->messages, vars, &text, err);
    if (s >= 0) s = check_tools(t, r, vars, &text, err);
    if (s >= 0 && epx_str_append(out, epx_str_z(&text), text.n_bytes) < 0)
        s = epx_api_fail(err, 500, "internal_error", NULL, "out of memory");
    epx_str_fini(&text);
    json_decref(vars);
    return s;
}
