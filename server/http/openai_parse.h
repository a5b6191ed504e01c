/* Shared by the files of the request parser only. */
#ifndef EPX_SERVER_HTTP_OPENAI_PARSE_H
#define EPX_SERVER_HTTP_OPENAI_PARSE_H

#include "server/http/openai_request.h"

typedef enum { EPX_API_TOOL_AUTO, EPX_API_TOOL_NONE, EPX_API_TOOL_REQUIRED, EPX_API_TOOL_NAMED } epx_api_tool_choice_t;

typedef struct {
    epx_api_request_t *req;
    const epx_api_limits_t *lim;
    epx_api_error_t *err;
    int64_t max_completion_tokens; /* 0: not given */
    int has_stream_options, has_best_of, has_top_logprobs;
    int64_t best_of;
    int has_tool_choice;
    epx_api_tool_choice_t tool_choice;
    const json_t *tool_name; /* EPX_API_TOOL_NAMED */
} epx_api_parse_t;

enum { EPX_API_SHOW_BYTES = 100 };
/* A value as JSON for a message, cut to fit; returns buf. */
const char *epx_api_show(const json_t *v, char buf[EPX_API_SHOW_BYTES]);
/* 400 on parameter `name`: "name: legal, got value". */
epx_status_t epx_api_bad_value(epx_api_parse_t *p, const char *name, const json_t *v, const char *legal);

/* The body as a JSON object, within the limits of depth and encoding. *out_root is a new reference. */
epx_status_t epx_api_load_body(const char *body, size_t n_bytes, json_t **out_root, epx_api_error_t *err);
/* Handle one top-level parameter; a name that does not exist is refused. */
epx_status_t epx_api_parse_param(epx_api_parse_t *p, const char *name, const json_t *v);
epx_status_t epx_api_parse_messages(epx_api_parse_t *p, const char *name, const json_t *v);
epx_status_t epx_api_parse_prompt(epx_api_parse_t *p, const char *name, const json_t *v);
epx_status_t epx_api_parse_stop(epx_api_parse_t *p, const char *name, const json_t *v);
epx_status_t epx_api_parse_stop_ids(epx_api_parse_t *p, const char *name, const json_t *v);
/* openai_sampling.c */
epx_status_t epx_api_parse_presence_penalty(epx_api_parse_t *p, const char *name, const json_t *v);
epx_status_t epx_api_parse_frequency_penalty(epx_api_parse_t *p, const char *name, const json_t *v);
epx_status_t epx_api_parse_repetition_penalty(epx_api_parse_t *p, const char *name, const json_t *v);
epx_status_t epx_api_parse_logit_bias(epx_api_parse_t *p, const char *name, const json_t *v);
epx_status_t epx_api_parse_min_tokens(epx_api_parse_t *p, const char *name, const json_t *v);
epx_status_t epx_api_parse_chat_logprobs(epx_api_parse_t *p, const char *name, const json_t *v);
epx_status_t epx_api_parse_top_logprobs(epx_api_parse_t *p, const char *name, const json_t *v);
epx_status_t epx_api_parse_logprobs(epx_api_parse_t *p, const char *name, const json_t *v);
/* openai_format.c. The second takes the reference of spec, compiles it as a test and keeps its text in the request. */
epx_status_t epx_api_parse_response_format(epx_api_parse_t *p, const char *name, const json_t *v);
epx_status_t epx_api_set_grammar(epx_api_parse_t *p, const char *param, json_t *spec);
/* openai_tools.c */
epx_status_t epx_api_parse_tools(epx_api_parse_t *p, const char *name, const json_t *v);
epx_status_t epx_api_parse_tool_choice(epx_api_parse_t *p, const char *name, const json_t *v);
epx_status_t epx_api_parse_parallel_tool_calls(epx_api_parse_t *p, const char *name, const json_t *v);
/* What tools and tool_choice mean together, after both were read. */
epx_status_t epx_api_check_tools(epx_api_parse_t *p);
/* The function of that name, borrowed; NULL: none. */
const json_t *epx_api_find_tool(const json_t *tools, const char *name);
/* tool_calls of a message, set in out with their arguments as objects, as templates expect them. */
epx_status_t epx_api_message_calls(epx_api_parse_t *p, const char *where, const json_t *v, json_t *out);
/* A list of token ids within the vocabulary. *out_ids is owned by the caller. */
epx_status_t epx_api_parse_ids(epx_api_parse_t *p, const char *name, const json_t *v, int32_t **out_ids, size_t *out_n);

#endif
