/* The body of /generate, SGLang's names and defaults: every parameter is obeyed or refused by name. Pure. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/http/native.h"

typedef struct {
    epx_api_parse_t p; /* p.req: the request itself, or the parameters of one prompt */
    epx_api_request_t *req;
    epx_native_t *own;
    const json_t *params, *rid;
    int n_dp;
} parse_t;

static epx_status_t no_memory(epx_api_error_t *err) { return epx_api_fail(err, 500, "internal_error", NULL, "out of memory"); }

/* ---- accepted with the values that ask for nothing ---- */

typedef struct {
    const char *name, *neutral; /* JSON array; NULL: any value, it has no effect here */
} neutral_t;

static const neutral_t neutral_request[] = {
    {"input_embeds", "[null]"},
    {"image_data", "[null,[]]"},
    {"video_data", "[null,[]]"},
    {"audio_data", "[null,[]]"},
    {"modalities", "[null,[],[\"text\"]]"},
    {"return_logprob", "[null,false]"},
    {"logprob_start_len", "[null,-1]"},
    {"top_logprobs_num", "[null,0]"},
    {"token_ids_logprob", "[null]"},
    {"return_text_in_logprobs", "[null,false]"},
    {"return_hidden_states", "[null,false]"},
    {"return_routed_experts", "[null,false]"},
    {"return_bytes", "[null,false]"},
    {"return_entropy", "[null,false]"},
    {"lora_path", "[null]"},
    {"lora_id", "[null]"},
    {"session_params", "[null]"},
    {"custom_logit_processor", "[null]"},
    {"bootstrap_host", "[null]"},
    {"bootstrap_port", "[null]"},
    {"bootstrap_room", "[null]"},
    {"background", "[null,false]"},
    {"extra_key", "[null]"},
    {"log_metrics", "[null,true]"},
    {"no_logs", "[null,false,true]"},
};

static const neutral_t neutral_params[] = {
    {"regex", "[null]"},
    {"ebnf", "[null]"},
    {"structural_tag", "[null]"},
    {"stop_regex", "[null,[]]"},
    {"spaces_between_special_tokens", "[null,true]"},
    {"no_stop_trim", "[null,false]"},
    {"custom_params", "[null]"},
    {"stream_interval", "[null]"},
};

static int is_neutral(const char *list, const json_t *v) {
    json_t *values = json_loads(list, 0, NULL);
    int found = 0;
    for (size_t i = 0; i < json_array_size(values); i++) {
        const json_t *at = json_array_get(values, i);
        int same = json_is_number(at) && json_is_number(v) && json_number_value(at) == json_number_value(v);
        found |= same || json_equal(at, v);
    }
    json_decref(values);
    return found;
}

/* EPX_AGAIN: not one of them. A list of neutral values, one for each prompt, is neutral too. */
static epx_status_t check_neutral(epx_api_error_t *err, const neutral_t *table, size_t n, const char *name, const json_t *v) {
    char shown[EPX_API_SHOW_BYTES];
    for (size_t i = 0; i < n; i++) {
        if (strcmp(table[i].name, name) != 0) continue;
        int ok = is_neutral(table[i].neutral, v);
        size_t k = 0;
        while (!ok && k < json_array_size(v) && is_neutral(table[i].neutral, json_array_get(v, k))) k++;
        if (ok || (json_is_array(v) && k == json_array_size(v))) return EPX_OK;
        return epx_api_fail(err, 400, "unsupported_parameter", name,
                            "%s: not supported here, only the values %s are accepted, got %s", name, table[i].neutral,
                            epx_api_show(v, shown));
    }
    return EPX_AGAIN;
}
#define CHECK_NEUTRAL(err, table, name, v) check_neutral(err, table, sizeof table / sizeof table[0], name, v)

/* ---- sampling parameters ---- */

static epx_status_t parse_new_tokens(epx_api_parse_t *p, const char *name, const json_t *v) {
    int64_t n = json_integer_value(v);
    if (json_is_null(v)) { /* as much as fits */
        p->req->default_tokens = INT32_MAX;
        return EPX_OK;
    }
    if (!json_is_integer(v) || n < 0 || n > INT32_MAX) return epx_api_bad_value(p, name, v, "an integer >= 0 or null");
    p->req->max_tokens = n == 0 ? -1 : (int32_t)n;
    return EPX_OK;
}

/* SGLang's name -> the OpenAI face's, which means the same. */
static const struct {
    const char *name, *same_as;
} renamed[] = {
    {"temperature", "temperature"},
    {"top_p", "top_p"},
    {"top_k", "top_k"},
    {"min_p", "min_p"},
    {"stop", "stop"},
    {"stop_token_ids", "stop_token_ids"},
    {"ignore_eos", "ignore_eos"},
    {"frequency_penalty", "frequency_penalty"},
    {"presence_penalty", "presence_penalty"},
    {"repetition_penalty", "repetition_penalty"},
    {"logit_bias", "logit_bias"},
    {"skip_special_tokens", "skip_special_tokens"},
    {"n", "n"},
    {"min_new_tokens", "min_tokens"},
    {"sampling_seed", "seed"},
};

/* The text of an error with the name that the caller knows. */
static void rename_error(epx_api_error_t *err, const char *from, const char *to) {
    char rest[sizeof err->message];
    size_t n = strlen(from);
    if (strcmp(from, to) == 0 || strcmp(err->param, from) != 0) return;
    snprintf(err->param, sizeof err->param, "%s", to);
    if (strncmp(err->message, from, n) != 0) return;
    snprintf(rest, sizeof rest, "%s", err->message + n);
    snprintf(err->message, sizeof err->message, "%s%.500s", to, rest);
}

/* A schema as JSON text, or "$$ANY$$" for any object; the same as OpenAI's response_format. */
static epx_status_t parse_schema(epx_api_parse_t *p, const char *name, const json_t *v) {
    json_t *schema = NULL, *format;
    if (json_is_null(v)) return EPX_OK;
    int is_any = json_is_string(v) && strcmp(json_string_value(v), "$$ANY$$") == 0;
    if (json_is_string(v) && !is_any) schema = json_loads(json_string_value(v), JSON_REJECT_DUPLICATES, NULL);
    if (!is_any && !json_is_object(schema)) {
        json_decref(schema);
        return epx_api_bad_value(p, name, v, "a JSON Schema as a string of JSON, \"$$ANY$$\", or null");
    }
    format = is_any ? json_pack("{s:s}", "type", "json_object")
                    : json_pack("{s:s, s:{s:s, s:o}}", "type", "json_schema", "json_schema", "name", "schema", "schema", schema);
    epx_status_t s = epx_api_parse_param(p, "response_format", format);
    json_decref(format);
    return s;
}

static epx_status_t parse_param(epx_api_parse_t *p, const char *name, const json_t *v) {
    if (strcmp(name, "json_schema") == 0) return parse_schema(p, name, v);
    if (strcmp(name, "max_new_tokens") == 0) return parse_new_tokens(p, name, v);
    for (size_t i = 0; i < sizeof renamed / sizeof renamed[0]; i++) {
        if (strcmp(renamed[i].name, name) != 0) continue;
        epx_status_t s = epx_api_parse_param(p, renamed[i].same_as, v);
        if (s < 0) rename_error(p->err, renamed[i].same_as, name);
        return s;
    }
    epx_status_t s = CHECK_NEUTRAL(p->err, neutral_params, name, v);
    if (s != EPX_AGAIN) return s;
    return epx_api_fail(p->err, 400, "unknown_parameter", name, "sampling_params.%.60s: unknown parameter", name);
}

static epx_status_t parse_params(parse_t *q, int idx, const json_t *params) {
    const char *name;
    json_t *v;
    epx_api_request_t *r = &q->own->each[idx];
    epx_api_parse_t p = {.req = r, .lim = q->p.lim, .err = q->p.err};
    r->n = 1;
    r->sampling = q->p.lim->default_sampling;
    r->default_tokens = EPX_NATIVE_NEW_TOKENS;
    if (params == NULL || json_is_null(params)) return EPX_OK;
    if (!json_is_object(params))
        return epx_api_bad_value(&q->p, "sampling_params", params, "an object, or a list of one for each prompt");
    json_object_foreach((json_t *)params, name, v) EPX_TRY(parse_param(&p, name, v));
    return EPX_OK;
}

static epx_status_t parse_all_params(parse_t *q) {
    int n = q->req->n_prompts, is_list = json_is_array(q->params);
    if (is_list && json_array_size(q->params) != (size_t)n)
        return epx_api_fail(q->p.err, 400, "invalid_value", "sampling_params", "sampling_params: a list of %zu for %d prompts",
                            json_array_size(q->params), n);
    q->own->each = calloc((size_t)n, sizeof *q->own->each);
    if (!q->own->each) return no_memory(q->p.err);
    q->own->n_prompts = n;
    for (int i = 0; i < n; i++) {
        EPX_TRY(parse_params(q, i, is_list ? json_array_get(q->params, (size_t)i) : q->params));
        if (q->own->each[i].n != q->own->each[0].n)
            return epx_api_fail(q->p.err, 400, "invalid_value", "n", "n: must be the same for all prompts, got %d and %d",
                                q->own->each[0].n, q->own->each[i].n);
    }
    q->req->n = q->own->each[0].n;
    q->req->max_tokens = q->own->each[0].max_tokens; /* for messages */
    if (q->req->n * n > EPX_API_MAX_CHOICES)
        return epx_api_fail(q->p.err, 400, "invalid_value", "n", "n: %d times %d prompts is more than %d answers", q->req->n, n,
                            EPX_API_MAX_CHOICES);
    return EPX_OK;
}

/* ---- the rest ---- */

/* text: strings; input_ids: token ids. Lists of them make a list of answers. */
static epx_status_t parse_input(parse_t *q, const char *name, const json_t *v) {
    const json_t *first = json_is_array(v) ? json_array_get(v, 0) : v;
    int want_ids = name[0] == 'i', is_ids = json_is_integer(first) || json_is_array(first);
    if (json_is_null(v)) return EPX_OK;
    if (q->req->n_prompts)
        return epx_api_fail(q->p.err, 400, "invalid_value", name, "%s: give either text or input_ids, not both", name);
    if (!first || is_ids != want_ids || (want_ids && !json_is_array(v)))
        return epx_api_bad_value(&q->p, name, v,
                                 want_ids ? "a list of token ids, or a list of such lists" : "a string or a list of strings");
    q->own->is_list = want_ids ? json_is_array(first) : json_is_array(v);
    return epx_api_parse_prompt(&q->p, name, v);
}

static epx_status_t parse_dp_rank(parse_t *q, const char *name, const json_t *v) {
    char legal[64];
    if (json_is_null(v)) return EPX_OK;
    snprintf(legal, sizeof legal, "null or an integer from 0 to %d", q->n_dp - 1);
    if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) >= q->n_dp)
        return epx_api_bad_value(&q->p, name, v, legal);
    q->own->dp_rank_plus_1 = (int)json_integer_value(v) + 1;
    return EPX_OK;
}

static epx_status_t copy_rid(parse_t *q, int idx, const json_t *v) {
    size_t n = json_string_length(v);
    if (!json_is_string(v) || n == 0 || n > EPX_NATIVE_MAX_RID || strlen(json_string_value(v)) != n)
        return epx_api_bad_value(&q->p, "rid", v, "a string of 1 to 128 bytes, or a list of one for each prompt");
    memcpy(q->own->rids[idx], json_string_value(v), n + 1);
    return EPX_OK;
}

static epx_status_t parse_rid(parse_t *q) {
    const json_t *v = q->rid;
    int n = q->req->n_prompts;
    if (!v || json_is_null(v)) return EPX_OK;
    if (json_is_array(v) ? json_array_size(v) != (size_t)n : n != 1)
        return epx_api_fail(q->p.err, 400, "invalid_value", "rid", "rid: one for each of the %d prompts is needed", n);
    q->own->rids = calloc((size_t)n, sizeof *q->own->rids);
    if (!q->own->rids) return no_memory(q->p.err);
    for (int i = 0; i < n; i++) EPX_TRY(copy_rid(q, i, json_is_array(v) ? json_array_get(v, (size_t)i) : v));
    return EPX_OK;
}

static epx_status_t parse_member(parse_t *q, const char *name, const json_t *v) {
    if (strcmp(name, "text") == 0 || strcmp(name, "input_ids") == 0) return parse_input(q, name, v);
    if (strcmp(name, "sampling_params") == 0) return q->params = v, EPX_OK;
    if (strcmp(name, "rid") == 0) return q->rid = v, EPX_OK;
    if (strcmp(name, "stream") == 0 || strcmp(name, "priority") == 0) return epx_api_parse_param(&q->p, name, v);
    if (strcmp(name, "data_parallel_rank") == 0 || strcmp(name, "routed_dp_rank") == 0) return parse_dp_rank(q, name, v);
    epx_status_t s = CHECK_NEUTRAL(q->p.err, neutral_request, name, v);
    if (s != EPX_AGAIN) return s;
    return epx_api_fail(
        q->p.err, 400, "unknown_parameter", name,
        "%.60s: unknown parameter; accepted: text, input_ids, sampling_params, stream, rid, priority, data_parallel_rank", name);
}

static epx_status_t parse_root(parse_t *q, json_t *root) {
    const char *name;
    json_t *v;
    json_object_foreach(root, name, v) EPX_TRY(parse_member(q, name, v));
    if (q->req->n_prompts == 0)
        return epx_api_fail(q->p.err, 400, "missing_parameter", "text", "text or input_ids: one of them is required");
    EPX_TRY(parse_all_params(q));
    return parse_rid(q);
}

epx_status_t epx_native_parse(const char *body, size_t n_bytes, const epx_api_limits_t *lim, int n_dp, epx_api_request_t *out_req,
                              epx_native_t **out_own, epx_api_error_t *err) {
    json_t *root = NULL;
    memset(out_req, 0, sizeof *out_req);
    EPX_TRY(epx_api_load_body(body, n_bytes, &root, err));
    parse_t q = {.p = {.req = out_req, .lim = lim, .err = err}, .req = out_req, .n_dp = n_dp};
    q.own = calloc(1, sizeof *q.own);
    out_req->n = 1;
    epx_status_t s = q.own ? parse_root(&q, root) : no_memory(err);
    json_decref(root);
    if (s < 0) {
        epx_native_free(q.own);
        epx_api_request_fini(out_req);
        return s;
    }
    *out_own = q.own;
    return EPX_OK;
}

void epx_native_free(void *own) {
    epx_native_t *n = own;
    if (!n) return;
    for (int i = 0; n->each && i < n->n_prompts; i++) epx_api_request_fini(&n->each[i]);
    for (int i = 0; n->choices && i < n->n_choices; i++) free(n->choices[i].ids);
    free(n->each);
    free(n->rids);
    free(n->choices);
    free(n);
}
