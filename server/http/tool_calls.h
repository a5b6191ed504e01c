/* Tool calls in a model's text, in the form of Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.
 * Text goes in as it grows, what is not part of a call comes out. Pure; not thread-safe per object. */
#ifndef EPX_SERVER_HTTP_TOOL_CALLS_H
#define EPX_SERVER_HTTP_TOOL_CALLS_H

#include <jansson.h>

#include "base/str.h"

typedef struct {
    epx_str_t held; /* not decided yet: the beginning of a tag with the white space before it, or an open call */
    int is_open;    /* held begins with an open call, behind */
    size_t n_lead;  /* bytes of white space, which are text if the call is none */
    int n_calls;    /* so far */
} epx_tool_calls_t;

/* Add text. Append to out what is no call, without the white space around calls, and to calls one object
 * {"name": STRING, "arguments": STRING} for each that is complete. A call that is no JSON object with a name and arguments that
 * are an object stays text. is_last: no more will come; what is held becomes text. */
epx_status_t epx_tool_calls_push(epx_tool_calls_t *t, const char *text, size_t n_bytes, int is_last, epx_str_t *out,
                                 json_t *calls);
void epx_tool_calls_fini(epx_tool_calls_t *t);

#endif
