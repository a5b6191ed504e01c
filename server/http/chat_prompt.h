/* The text that a chat becomes by the model's template. Pure but for what templates may do. */
#ifndef EPX_SERVER_HTTP_CHAT_PROMPT_H
#define EPX_SERVER_HTTP_CHAT_PROMPT_H

#include "engine/tokenizer/chat_template.h"
#include "server/http/openai_request.h"

/* Append the prompt of a chat request to out. A 400 when the template refuses the messages, or leaves out tools or calls that
 * the request has. */
epx_status_t epx_chat_prompt(const epx_chat_template_t *t, const epx_api_request_t *r, epx_str_t *out, epx_api_error_t *err);

#endif
