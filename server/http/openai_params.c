/* One table of every top-level parameter: how it is read, or which neutral values it may have while its effect is not offered.
 * Pure. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "server/http/openai_parse.h"

enum { CHAT = 1, COMPLETIONS = 2, BOTH = 3 };

typedef epx_status_t (*param_fn_t)(epx_api_parse_t *p, const char *name, const json_t *v);

static epx_status_t parse_model(epx_api_parse_t *p, const char *name, const json_t *v) {
    char shown[EPX_API_SHOW_BYTES];
    if (!json_is_string(v)) return epx_api_bad_value(p, name, v, "a string");
    size_t n = strlen(p->lim->model_name);
    if (json_string_length(v) == n && memcmp(json_string_value(v), p->lim->model_name, n) == 0) return EPX_OK;
    return epx_api_fail(p->err, 404, "model_not_found", name, "model: %s does not exist here; the model served is \"%s\"",
                        epx_api_show(v, shown), p->lim->model_name);
}

/* JSON integer within [lo, hi]; null leaves *out alone. */
static epx_status_t take_int(epx_api_parse_t *p, const char *name, const json_t *v, int64_t lo, int64_t hi, int64_t *out,
                             const char *legal) {
    if (json_is_null(v)) return EPX_OK;
    if (!json_is_integer(v) || json_integer_value(v) < lo || json_integer_value(v) > hi)
        return epx_api_bad_value(p, name, v, legal);
    *out = json_integer_value(v);
    return EPX_OK;
}

static epx_status_t take_real(epx_api_parse_t *p, const char *name, const json_t *v, double lo, double hi, float *out,
                              const char *legal) {
    if (json_is_null(v)) return EPX_OK;
    double x = json_number_value(v);
    if (!json_is_number(v) || !isfinite(x) || x < lo || x > hi) return epx_api_bad_value(p, name, v, legal);
    *out = (float)x;
    return EPX_OK;
}

static epx_status_t take_bool(epx_api_parse_t *p, const char *name, const json_t *v, int *out) {
    if (json_is_null(v)) return EPX_OK;
    if (!json_is_boolean(v)) return epx_api_bad_value(p, name, v, "true, false or null");
    *out = json_is_true(v);
    return EPX_OK;
}

static epx_status_t parse_max_tokens(epx_api_parse_t *p, const char *name, const json_t *v) {
    int64_t n = p->req->max_tokens;
    EPX_TRY(take_int(p, name, v, 1, INT32_MAX, &n, "an integer >= 1 or null"));
    p->req->max_tokens = (int32_t)n;
    return EPX_OK;
}

static epx_status_t parse_max_completion_tokens(epx_api_parse_t *p, const char *name, const json_t *v) {
    return take_int(p, name, v, 1, INT32_MAX, &p->max_completion_tokens, "an integer >= 1 or null");
}

static epx_status_t parse_temperature(epx_api_parse_t *p, const char *name, const json_t *v) {
    return take_real(p, name, v, 0, 2, &p->req->sampling.temperature, "a number from 0 to 2, or null");
}

static epx_status_t parse_top_p(epx_api_parse_t *p, const char *name, const json_t *v) {
    /* 1e-30: what is smaller may round to 0, which is not a probability mass. */
    return take_real(p, name, v, 1e-30, 1, &p->req->sampling.top_p, "a number above 0 and at most 1, or null");
}

static epx_status_t parse_min_p(epx_api_parse_t *p, const char *name, const json_t *v) {
    return take_real(p, name, v, 0, 1, &p->req->sampling.min_p, "a number from 0 to 1, or null");
}

static epx_status_t parse_top_k(epx_api_parse_t *p, const char *name, const json_t *v) {
    int64_t k = p->req->sampling.top_k;
    EPX_TRY(take_int(p, name, v, -1, INT32_MAX, &k, "an integer >= 1, or -1, 0 (both off) or null"));
    p->req->sampling.top_k = (int32_t)k;
    return EPX_OK;
}

static epx_status_t parse_seed(epx_api_parse_t *p, const char *name, const json_t *v) {
    int64_t seed = 0;
    EPX_TRY(take_int(p, name, v, INT64_MIN, INT64_MAX, &seed, "a 64-bit integer or null"));
    p->req->has_seed = !json_is_null(v);
    p->req->sampling.seed = (uint64_t)seed;
    return EPX_OK;
}

static epx_status_t parse_n(epx_api_parse_t *p, const char *name, const json_t *v) {
    int64_t n = 1;
    EPX_TRY(take_int(p, name, v, 1, EPX_API_MAX_N, &n, "an integer from 1 to 8, or null"));
    p->req->n = (int)n;
    return EPX_OK;
}

static epx_status_t parse_best_of(epx_api_parse_t *p, const char *name, const json_t *v) {
    p->has_best_of = !json_is_null(v);
    return take_int(p, name, v, 1, EPX_API_MAX_N, &p->best_of, "null or equal to n");
}

static epx_status_t parse_stream(epx_api_parse_t *p, const char *name, const json_t *v) {
    return take_bool(p, name, v, &p->req->stream);
}

static epx_status_t parse_priority(epx_api_parse_t *p, const char *name, const json_t *v) {
    if (json_is_null(v)) return EPX_OK;
    if (!json_is_integer(v) || json_integer_value(v) < INT32_MIN || json_integer_value(v) > INT32_MAX)
        return epx_api_bad_value(p, name, v, "a 32-bit integer, or null");
    p->req->priority = (int32_t)json_integer_value(v);
    return EPX_OK;
}

static epx_status_t parse_ignore_eos(epx_api_parse_t *p, const char *name, const json_t *v) {
    return take_bool(p, name, v, &p->req->ignore_eos);
}

static epx_status_t parse_skip_special_tokens(epx_api_parse_t *p, const char *name, const json_t *v) {
    int skip = !p->req->keep_special;
    EPX_TRY(take_bool(p, name, v, &skip));
    p->req->keep_special = !skip;
    return EPX_OK;
}

static epx_status_t parse_echo(epx_api_parse_t *p, const char *name, const json_t *v) {
    return take_bool(p, name, v, &p->req->echo);
}

static epx_status_t parse_stream_options(epx_api_parse_t *p, const char *name, const json_t *v) {
    const char *member;
    json_t *m;
    int off = 0;
    if (json_is_null(v)) return EPX_OK;
    if (!json_is_object(v)) return epx_api_bad_value(p, name, v, "an object or null");
    p->has_stream_options = 1;
    json_object_foreach((json_t *)v, member, m) {
        if (strcmp(member, "include_usage") == 0) {
            EPX_TRY(take_bool(p, "stream_options.include_usage", m, &p->req->include_usage));
        } else if (strcmp(member, "include_obfuscation") == 0) {
            EPX_TRY(take_bool(p, "stream_options.include_obfuscation", m, &off));
            if (off) return epx_api_bad_value(p, "stream_options.include_obfuscation", m, "false or null (not offered here)");
        } else {
            return epx_api_fail(p->err, 400, "unknown_parameter", name,
                                "stream_options.%.40s: unknown; include_usage is accepted", member);
        }
    }
    return EPX_OK;
}

static epx_status_t parse_template_vars(epx_api_parse_t *p, const char *name, const json_t *v) {
    if (json_is_null(v)) return EPX_OK;
    if (!json_is_object(v)) return epx_api_bad_value(p, name, v, "an object or null");
    if (json_object_get(v, "messages") || json_object_get(v, "add_generation_prompt") || json_object_get(v, "tools"))
        return epx_api_fail(p->err, 400, "invalid_value", name,
                            "%s: messages, tools and add_generation_prompt are set by the server", name);
    p->req->template_vars = json_incref((json_t *)v);
    return EPX_OK;
}

/* A label of the caller's own; nothing here depends on it. */
static epx_status_t parse_label(epx_api_parse_t *p, const char *name, const json_t *v) {
    if (!json_is_string(v) && !json_is_null(v)) return epx_api_bad_value(p, name, v, "a string or null");
    return EPX_OK;
}

static const struct {
    const char *name;
    int where;
    param_fn_t parse;
} params[] = {
    {"model", BOTH, parse_model},
    {"messages", CHAT, epx_api_parse_messages},
    {"prompt", COMPLETIONS, epx_api_parse_prompt},
    {"max_tokens", BOTH, parse_max_tokens},
    {"max_completion_tokens", CHAT, parse_max_completion_tokens},
    {"temperature", BOTH, parse_temperature},
    {"top_p", BOTH, parse_top_p},
    {"top_k", BOTH, parse_top_k},
    {"min_p", BOTH, parse_min_p},
    {"seed", BOTH, parse_seed},
    {"n", BOTH, parse_n},
    {"best_of", COMPLETIONS, parse_best_of},
    {"frequency_penalty", BOTH, epx_api_parse_frequency_penalty},
    {"presence_penalty", BOTH, epx_api_parse_presence_penalty},
    {"repetition_penalty", BOTH, epx_api_parse_repetition_penalty},
    {"logit_bias", BOTH, epx_api_parse_logit_bias},
    {"logprobs", CHAT, epx_api_parse_chat_logprobs},
    {"top_logprobs", CHAT, epx_api_parse_top_logprobs},
    {"logprobs", COMPLETIONS, epx_api_parse_logprobs},
    {"echo", COMPLETIONS, parse_echo},
    {"min_tokens", BOTH, epx_api_parse_min_tokens},
    {"response_format", BOTH, epx_api_parse_response_format},
    {"tools", CHAT, epx_api_parse_tools},
    {"tool_choice", CHAT, epx_api_parse_tool_choice},
    {"parallel_tool_calls", CHAT, epx_api_parse_parallel_tool_calls},
    {"stop", BOTH, epx_api_parse_stop},
    {"stop_token_ids", BOTH, epx_api_parse_stop_ids},
    {"ignore_eos", BOTH, parse_ignore_eos},
    {"priority", BOTH, parse_priority},
    {"skip_special_tokens", BOTH, parse_skip_special_tokens},
    {"stream", BOTH, parse_stream},
    {"stream_options", BOTH, parse_stream_options},
    {"chat_template_kwargs", CHAT, parse_template_vars},
    {"user", BOTH, parse_label},
};

/* Parameters of the API whose effect is not offered: accepted with the values that ask for nothing. */
static const struct {
    const char *name;
    int where;
    const char *neutral; /* JSON array */
} neutral_only[] = {
    {"suffix", COMPLETIONS, "[null,\"\"]"},
    {"functions", CHAT, "[null,[]]"},
    {"function_call", CHAT, "[null,\"none\",\"auto\"]"},
    {"modalities", CHAT, "[null,[\"text\"]]"},
    {"audio", CHAT, "[null]"},
    {"prediction", CHAT, "[null]"},
    {"reasoning_effort", CHAT, "[null]"},
    {"verbosity", CHAT, "[null]"},
    {"web_search_options", CHAT, "[null]"},
    {"store", CHAT, "[null,false]"},
    {"metadata", CHAT, "[null,{}]"},
    {"service_tier", CHAT, "[null,\"auto\",\"default\"]"},
};

static int same_value(const json_t *a, const json_t *b) {
    if (json_is_number(a) && json_is_number(b)) return json_number_value(a) == json_number_value(b);
    return json_equal(a, b);
}

static epx_status_t check_neutral(epx_api_parse_t *p, const char *name, const json_t *v, const char *neutral) {
    char shown[EPX_API_SHOW_BYTES];
    json_t *values = json_loads(neutral, 0, NULL);
    int found = 0;
    for (size_t i = 0; i < json_array_size(values); i++) found |= same_value(json_array_get(values, i), v);
    json_decref(values);
    if (found) return EPX_OK;
    return epx_api_fail(p->err, 400, "unsupported_parameter", name,
                        "%s: not supported here, only the values %s are accepted, got %s", name, neutral, epx_api_show(v, shown));
}

static epx_status_t unknown_param(epx_api_parse_t *p, const char *name) {
    char accepted[1000];
    size_t used = 0;
    int where = p->req->is_chat ? CHAT : COMPLETIONS;
    for (size_t i = 0; i < sizeof params / sizeof params[0]; i++)
        if ((params[i].where & where) && used < sizeof accepted)
            used += (size_t)snprintf(accepted + used, sizeof accepted - used, "%s%s", used ? ", " : "", params[i].name);
    return epx_api_fail(p->err, 400, "unknown_parameter", name, "%.60s: unknown parameter; accepted: %s", name, accepted);
}

epx_status_t epx_api_parse_param(epx_api_parse_t *p, const char *name, const json_t *v) {
    int where = p->req->is_chat ? CHAT : COMPLETIONS;
    for (size_t i = 0; i < sizeof params / sizeof params[0]; i++)
        if ((params[i].where & where) && strcmp(params[i].name, name) == 0) return params[i].parse(p, name, v);
    for (size_t i = 0; i < sizeof neutral_only / sizeof neutral_only[0]; i++)
        if ((neutral_only[i].where & where) && strcmp(neutral_only[i].name, name) == 0)
            return check_neutral(p, name, v, neutral_only[i].neutral);
    return unknown_param(p, name);
}
