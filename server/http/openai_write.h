/* Answers and stream chunks as JSON text in OpenAI's shapes. Pure. Every string is made valid UTF-8 on the way. */
#ifndef EPX_SERVER_HTTP_OPENAI_WRITE_H
#define EPX_SERVER_HTTP_OPENAI_WRITE_H

#include "base/str.h"
#include "server/http/openai_request.h"

/* What all chunks and the answer of one request share. Borrowed pointers. */
typedef struct {
    int is_chat;
    int include_usage; /* chunks carry "usage": null until the last */
    const char *id, *model;
    int64_t created; /* Unix seconds */
} epx_api_head_t;

typedef struct {
    int idx;
    const char *text;
    size_t n_bytes;
    const char *finish_reason; /* NULL: null */
    json_t *logprobs;          /* NULL: null; borrowed */
    const json_t *calls;       /* NULL: none; list of {name, arguments}; borrowed */
    int first_call;            /* number of the first of them within the choice */
} epx_api_choice_text_t;

typedef struct {
    int64_t n_prompt, n_completion;
} epx_api_usage_t;

/* A JSON string, each invalid sequence replaced by U+FFFD; NULL without memory. */
json_t *epx_api_text(const char *text, size_t n_bytes);

/* All append to out and return EPX_OK or EPX_ERR_NOMEM (out then unspecified). */

/* The whole answer of a request without stream. */
epx_status_t epx_api_write_answer(const epx_api_head_t *h, const epx_api_choice_text_t *choices, int n_choices,
                                  const epx_api_usage_t *usage, epx_str_t *out);
/* One event "data: {...}\n\n" with a piece of text and / or a finish reason. with_role: chat's first delta. */
epx_status_t epx_api_write_chunk(const epx_api_head_t *h, const epx_api_choice_text_t *c, int with_role, epx_str_t *out);
/* The event with usage and no choices. */
epx_status_t epx_api_write_usage_chunk(const epx_api_head_t *h, const epx_api_usage_t *usage, epx_str_t *out);
/* {"error": {...}}, and the same as an event. */
epx_status_t epx_api_write_error(const epx_api_error_t *err, epx_str_t *out);
epx_status_t epx_api_write_error_event(const epx_api_error_t *err, epx_str_t *out);
/* {"object": "list", "data": [model]} or the model alone. */
epx_status_t epx_api_write_model(const char *name, int64_t created, int max_context, int as_list, epx_str_t *out);

#endif
