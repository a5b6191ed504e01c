/* Parameters of sampling beyond temperature and its filters: penalties, bias, minimum length, logprobs. Pure. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/http/openai_parse.h"

static epx_status_t take_penalty(epx_api_parse_t *p, const char *name, const json_t *v, double lo, double hi, float *out,
                                 const char *legal) {
    double x = json_number_value(v);
    if (json_is_null(v)) return EPX_OK;
    if (!json_is_number(v) || !isfinite(x) || x < lo || x > hi) return epx_api_bad_value(p, name, v, legal);
    *out = (float)x;
    return EPX_OK;
}

epx_status_t epx_api_parse_presence_penalty(epx_api_parse_t *p, const char *name, const json_t *v) {
    return take_penalty(p, name, v, -2, 2, &p->req->adjust.presence_penalty, "a number from -2 to 2, or null");
}

epx_status_t epx_api_parse_frequency_penalty(epx_api_parse_t *p, const char *name, const json_t *v) {
    return take_penalty(p, name, v, -2, 2, &p->req->adjust.frequency_penalty, "a number from -2 to 2, or null");
}

epx_status_t epx_api_parse_repetition_penalty(epx_api_parse_t *p, const char *name, const json_t *v) {
    return take_penalty(p, name, v, 1e-6, 2, &p->req->adjust.repetition_penalty, "a number above 0 and at most 2, or null");
}

/* A token id written in decimal, as JSON's member names are strings. */
static int read_id(const char *text, int32_t n_vocab, int32_t *out) {
    char *end;
    errno = 0;
    long id = strtol(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end || errno || id >= n_vocab) return 0;
    *out = (int32_t)id;
    return 1;
}

epx_status_t epx_api_parse_logit_bias(epx_api_parse_t *p, const char *name, const json_t *v) {
    epx_api_request_t *r = p->req;
    const char *member;
    json_t *b;
    size_t n = json_object_size(v);
    if (json_is_null(v)) return EPX_OK;
    if (!json_is_object(v) || n > EPX_SAMPLE_MAX_BIAS)
        return epx_api_bad_value(p, name, v, "an object of at most 1024 token ids with numbers, or null");
    r->bias = calloc(n ? n : 1, sizeof *r->bias);
    if (!r->bias) return epx_api_fail(p->err, 500, "internal_error", NULL, "out of memory");
    json_object_foreach((json_t *)v, member, b) {
        epx_bias_t *at = &r->bias[r->adjust.n_bias++];
        double x = json_number_value(b);
        if (!read_id(member, p->lim->n_vocab, &at->token))
            return epx_api_fail(p->err, 400, "invalid_value", name, "%s: \"%.40s\" is not a token id from 0 to %d", name, member,
                                p->lim->n_vocab - 1);
        if (!json_is_number(b) || !isfinite(x) || x < -100 || x > 100)
            return epx_api_bad_value(p, name, b, "a number from -100 to 100 for each token");
        at->bias = (float)x;
    }
    r->adjust.bias = r->bias;
    return EPX_OK;
}

static epx_status_t take_count(epx_api_parse_t *p, const char *name, const json_t *v, int64_t hi, int32_t *out,
                               const char *legal) {
    if (json_is_null(v)) return EPX_OK;
    if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) > hi)
        return epx_api_bad_value(p, name, v, legal);
    *out = (int32_t)json_integer_value(v);
    return EPX_OK;
}

epx_status_t epx_api_parse_min_tokens(epx_api_parse_t *p, const char *name, const json_t *v) {
    return take_count(p, name, v, INT32_MAX, &p->req->min_tokens, "an integer >= 0, or null");
}

epx_status_t epx_api_parse_chat_logprobs(epx_api_parse_t *p, const char *name, const json_t *v) {
    if (json_is_null(v)) return EPX_OK;
    if (!json_is_boolean(v)) return epx_api_bad_value(p, name, v, "true, false or null");
    p->req->logprobs = json_is_true(v);
    return EPX_OK;
}

epx_status_t epx_api_parse_top_logprobs(epx_api_parse_t *p, const char *name, const json_t *v) {
    p->has_top_logprobs = json_integer_value(v) != 0;
    return take_count(p, name, v, EPX_SAMPLE_MAX_TOP, &p->req->n_top, "an integer from 0 to 20, or null");
}

epx_status_t epx_api_parse_logprobs(epx_api_parse_t *p, const char *name, const json_t *v) {
    p->req->logprobs = !json_is_null(v);
    return take_count(p, name, v, EPX_API_MAX_LOGPROBS, &p->req->n_top, "an integer from 0 to 5, or null");
}
