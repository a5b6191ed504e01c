/* The body as a whole: JSON within limits, then parameter by parameter, then what concerns several of them. Pure. */
#include "server/http/openai_parse.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/tokenizer/tokenizer.h"

epx_status_t epx_api_fail(epx_api_error_t *err, int status, const char *code, const char *param, const char *fmt, ...) {
    va_list ap;
    memset(err, 0, sizeof *err);
    err->status = status;
    err->type = status >= 500   ? "server_error"
                : status == 429 ? "rate_limit_error"
                : status == 401 ? "authentication_error"
                                : "invalid_request_error";
    err->code = code;
    snprintf(err->param, sizeof err->param, "%s", param ? param : "");
    va_start(ap, fmt);
    vsnprintf(err->message, sizeof err->message, fmt, ap);
    va_end(ap);
    return EPX_ERR_ARG;
}

const char *epx_api_show(const json_t *v, char buf[EPX_API_SHOW_BYTES]) {
    char *text = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT);
    size_t n = text ? strlen(text) : 0;
    if (n < EPX_API_SHOW_BYTES) {
        snprintf(buf, EPX_API_SHOW_BYTES, "%s", text ? text : "?");
    } else {
        n = epx_utf8_complete_prefix(text, EPX_API_SHOW_BYTES - 4);
        snprintf(buf, EPX_API_SHOW_BYTES, "%.*s...", (int)n, text);
    }
    free(text);
    return buf;
}

epx_status_t epx_api_bad_value(epx_api_parse_t *p, const char *name, const json_t *v, const char *legal) {
    char shown[EPX_API_SHOW_BYTES];
    return epx_api_fail(p->err, 400, "invalid_value", name, "%s: must be %s, got %s", name, legal, epx_api_show(v, shown));
}

/* jansson parses nested values recursively: refuse depth before it does. Counts brackets outside strings. */
static int depth_within(const char *s, size_t n, int max) {
    int depth = 0, in_string = 0;
    for (size_t i = 0; i < n; i++) {
        if (in_string && s[i] == '\\') i++;
        else if (s[i] == '"') in_string = !in_string;
        else if (!in_string && (s[i] == '{' || s[i] == '[') && ++depth > max) return 0;
        else if (!in_string && (s[i] == '}' || s[i] == ']')) depth--;
    }
    return 1;
}

epx_status_t epx_api_load_body(const char *body, size_t n_bytes, json_t **out_root, epx_api_error_t *err) {
    json_error_t je;
    size_t bad_off;
    if (n_bytes == 0) return epx_api_fail(err, 400, "invalid_json", NULL, "the request body is empty; a JSON object is needed");
    if (!epx_utf8_valid(body, n_bytes, &bad_off))
        return epx_api_fail(err, 400, "invalid_json", NULL, "the request body is not valid UTF-8 at byte %zu", bad_off);
    if (!depth_within(body, n_bytes, EPX_API_MAX_DEPTH))
        return epx_api_fail(err, 400, "invalid_json", NULL, "the request body nests deeper than %d levels", EPX_API_MAX_DEPTH);
    json_t *root = json_loadb(body, n_bytes, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | JSON_DECODE_ANY, &je);
    if (!root)
        return epx_api_fail(err, 400, "invalid_json", NULL, "the request body is not valid JSON: line %d, column %d: %s", je.line,
                            je.column, je.text);
    if (!json_is_object(root)) {
        json_decref(root);
        return epx_api_fail(err, 400, "invalid_json", NULL, "the request body must be a JSON object");
    }
    *out_root = root;
    return EPX_OK;
}

static epx_status_t merge_max_tokens(epx_api_parse_t *p) {
    epx_api_request_t *r = p->req;
    if (p->max_completion_tokens == 0) return EPX_OK;
    if (r->max_tokens != 0 && r->max_tokens != p->max_completion_tokens)
        return epx_api_fail(p->err, 400, "invalid_value", "max_completion_tokens",
                            "max_completion_tokens: %lld contradicts max_tokens %d; give one of them",
                            (long long)p->max_completion_tokens, (int)r->max_tokens);
    r->max_tokens = (int32_t)p->max_completion_tokens;
    return EPX_OK;
}

static epx_status_t check_together(epx_api_parse_t *p) {
    epx_api_request_t *r = p->req;
    EPX_TRY(merge_max_tokens(p));
    if (p->has_stream_options && !r->stream)
        return epx_api_fail(p->err, 400, "invalid_value", "stream_options", "stream_options: only allowed when stream is true");
    if (p->has_best_of && p->best_of != r->n)
        return epx_api_fail(p->err, 400, "invalid_value", "best_of", "best_of: must be null or equal to n (%d), got %lld", r->n,
                            (long long)p->best_of);
    if (p->has_top_logprobs && !r->logprobs)
        return epx_api_fail(p->err, 400, "invalid_value", "top_logprobs", "top_logprobs: only allowed when logprobs is true");
    if (r->max_tokens != 0 && r->min_tokens > r->max_tokens)
        return epx_api_fail(p->err, 400, "invalid_value", "min_tokens", "min_tokens: must be at most max_tokens (%d), got %d",
                            (int)r->max_tokens, (int)r->min_tokens);
    EPX_TRY(epx_api_check_tools(p));
    if (r->grammar && r->min_tokens > 0)
        return epx_api_fail(p->err, 400, "unsupported_parameter", "min_tokens",
                            "min_tokens: not supported together with response_format or a forced tool call");
    if (r->is_chat && !r->messages)
        return epx_api_fail(p->err, 400, "missing_parameter", "messages", "messages: required, a non-empty array");
    if (!r->is_chat && r->n_prompts == 0)
        return epx_api_fail(p->err, 400, "missing_parameter", "prompt",
                            "prompt: required, a string, a list of strings, or token ids");
    if ((int64_t)r->n * (r->is_chat ? 1 : r->n_prompts) > EPX_API_MAX_CHOICES)
        return epx_api_fail(p->err, 400, "invalid_value", "n", "n: %d times %d prompts is more than %d choices", r->n,
                            r->n_prompts, EPX_API_MAX_CHOICES);
    return EPX_OK;
}

static epx_status_t parse_members(epx_api_parse_t *p, json_t *root) {
    const char *name;
    json_t *v;
    if (!json_object_get(root, "model"))
        return epx_api_fail(p->err, 400, "missing_parameter", "model", "model: required, here \"%s\"", p->lim->model_name);
    json_object_foreach(root, name, v) EPX_TRY(epx_api_parse_param(p, name, v));
    return check_together(p);
}

epx_status_t epx_api_parse(const char *body, size_t n_bytes, int is_chat, const epx_api_limits_t *lim, epx_api_request_t *out,
                           epx_api_error_t *err) {
    epx_api_parse_t p = {.req = out, .lim = lim, .err = err};
    json_t *root = NULL;
    memset(out, 0, sizeof *out);
    EPX_TRY(epx_api_load_body(body, n_bytes, &root, err));
    out->is_chat = is_chat;
    out->n = 1;
    out->sampling = lim->default_sampling;
    epx_status_t s = parse_members(&p, root);
    json_decref(root);
    if (s < 0) epx_api_request_fini(out);
    return s;
}

void epx_api_request_fini(epx_api_request_t *r) {
    json_decref(r->messages);
    json_decref(r->template_vars);
    for (int i = 0; i < r->n_prompts; i++) {
        free(r->prompts[i].text);
        free(r->prompts[i].ids);
    }
    free(r->prompts);
    free(r->bias);
    free(r->grammar);
    json_decref(r->tools);
    for (int i = 0; i < r->n_stop; i++) free(r->stop[i]);
    memset(r, 0, sizeof *r);
}
