/* The three ways to ask a server for text, and how its events are read: SGLang's native /generate, OpenAI's completions and chat
 * completions. Pure. */
#ifndef EPX_APP_BENCH_API_H
#define EPX_APP_BENCH_API_H

#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

#include "base/status.h"
#include "base/str.h"

typedef enum { EPX_API_NATIVE, EPX_API_TEXT, EPX_API_CHAT } epx_api_kind_t;

typedef struct {
    const char *backend; /* SGLang's name */
    epx_api_kind_t kind;
    const char *path;
    int port;               /* where such a server listens unless told otherwise */
    const char *max_tokens; /* the field's name */
} epx_api_t;

/* NULL: no such backend. */
const epx_api_t *epx_api_of(const char *backend);

/* What a request asks for. */
typedef struct {
    const epx_api_t *api;
    const char *model; /* OpenAI's only */
    const char *text;  /* or ids */
    size_t n_text;
    const int32_t *ids; /* [n_ids]; not with EPX_API_CHAT */
    int64_t n_ids;
    int64_t max_tokens;
    int stream, ignore_eos, return_logprob;
    const char *const *stop; /* [n_stop] */
    size_t n_stop;
    const json_t *extra; /* members that are added or replaced; NULL: none */
} epx_ask_t;

/* The JSON body; the caller frees it. EPX_ERR_NOMEM, EPX_ERR_ARG (text that is no UTF-8). */
epx_status_t epx_api_body(const epx_ask_t *a, char **out_body);

/* One answer as far as it has come, and one event of it. Zero-initialise. */
typedef struct {
    epx_str_t text;     /* generated so far; owned, epx_str_fini */
    int64_t n_tokens;   /* generated so far, as the server counts them; -1: it has not said */
    int64_t n_prompt;   /* as the server counts them; -1: it has not said */
    size_t n_new_bytes; /* of this event's text */
    int is_end;         /* the end of the answer was seen */
    char finish[32];    /* why it ended, or "" */
    char error[256];    /* an error that came instead of text, or "" */
} epx_reply_t;

void epx_reply_init(epx_reply_t *r);
/* Read an event, or the whole answer when nothing is streamed. Events that cannot be read set error. EPX_ERR_NOMEM. */
epx_status_t epx_reply_take(epx_reply_t *r, epx_api_kind_t kind, const char *data, size_t n_bytes);
/* The message of an error's body, or its beginning; at most n_out bytes with the closing 0. */
void epx_reply_error(const char *data, size_t n_bytes, char *out, size_t n_out);

#endif
