/* A typed OpenAI request and the parser that makes it from a JSON body. Pure: no sockets, no tokenizer, no clock; a seed that was
 * not given stays marked as such. Every parameter is obeyed or refused by name; none is ignored. */
#ifndef EPX_SERVER_HTTP_OPENAI_REQUEST_H
#define EPX_SERVER_HTTP_OPENAI_REQUEST_H

#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

#include "base/status.h"
#include "engine/sample/sample.h"
#include "server/http/text_stream.h"

enum {
    EPX_API_MAX_N = 8,
    EPX_API_MAX_CHOICES = 64, /* prompts * n of one request */
    EPX_API_MAX_STOP_IDS = 64,
    EPX_API_MAX_DEPTH = 64,   /* of the JSON body */
    EPX_API_MAX_LOGPROBS = 5, /* of completions; chat: EPX_SAMPLE_MAX_TOP */
};

/* An HTTP error in OpenAI's terms. type, code: static strings. */
typedef struct {
    int status;
    const char *type, *code;
    char param[64]; /* "": null */
    char message[600];
} epx_api_error_t;

/* Fill err and return EPX_ERR_ARG. param may be NULL. */
epx_status_t epx_api_fail(epx_api_error_t *err, int status, const char *code, const char *param, const char *fmt, ...)
    EPX_PRINTF(5, 6);

typedef struct {
    char *text; /* owned; NULL when ids were given */
    size_t n_bytes;
    int32_t *ids; /* owned; NULL when text was given */
    size_t n_ids;
} epx_api_prompt_t;

/* Owned by the caller, who calls epx_api_request_fini. */
typedef struct {
    int is_chat;
    json_t *messages;          /* chat: array of {role, content (a string), ...} */
    json_t *template_vars;     /* chat_template_kwargs or NULL */
    epx_api_prompt_t *prompts; /* completions: [n_prompts] */
    int n_prompts;
    int n;
    int32_t max_tokens;     /* 0: not given */
    int32_t default_tokens; /* then, and if there is room; 0: OpenAI's default */
    epx_sampling_t sampling;
    epx_adjust_t adjust;
    epx_bias_t *bias; /* owned: the list of adjust */
    int32_t min_tokens;
    int32_t priority; /* the larger goes first; 0 */
    int logprobs, echo;
    char *grammar;    /* owned; spec of engine/grammar/grammar.h, NULL: none */
    json_t *tools;    /* owned; for the chat template, NULL: none */
    int one_call;     /* at most one tool call */
    int keep_special; /* special tokens are text */
    int32_t n_top;
    int has_seed, stream, include_usage, ignore_eos;
    char *stop[EPX_API_MAX_STOPS];
    size_t stop_bytes[EPX_API_MAX_STOPS];
    int n_stop;
    int32_t stop_ids[EPX_API_MAX_STOP_IDS];
    int n_stop_ids;
} epx_api_request_t;

/* What the parser must know of the server. */
typedef struct {
    const char *model_name;
    epx_sampling_t default_sampling;
    int n_vocab, max_context;
} epx_api_limits_t;

/* Parse the body of /v1/chat/completions (is_chat) or /v1/completions.
 * EPX_ERR_ARG: *err holds status, parameter and message, *out is zeroed and holds nothing to free. */
epx_status_t epx_api_parse(const char *body, size_t n_bytes, int is_chat, const epx_api_limits_t *lim, epx_api_request_t *out,
                           epx_api_error_t *err);
void epx_api_request_fini(epx_api_request_t *r);

#endif
