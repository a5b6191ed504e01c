/* Hugging Face chat templates: a subset of Jinja2 (docs/chat-templates.md lists it). Pure but for strftime_now(), which
 * reads the clock; a template may be rendered by several threads at once. */
#ifndef EPX_ENGINE_TOKENIZER_CHAT_TEMPLATE_H
#define EPX_ENGINE_TOKENIZER_CHAT_TEMPLATE_H

#include <stddef.h>

#include <jansson.h>

#include "base/status.h"
#include "base/str.h"

typedef struct epx_chat_template epx_chat_template_t;

/* Compile `source` (trim_blocks and lstrip_blocks on, as transformers sets them). Constructs outside the subset are
 * EPX_ERR_UNSUPPORTED with line and name; syntax errors EPX_ERR_FORMAT with line. */
epx_status_t epx_chat_template_create(const char *source, size_t n_bytes, epx_chat_template_t **out_t);
/* From a model directory: chat_template.jinja if present, else the chat_template of tokenizer_config.json (a string, or a list
 * with an entry named "default"). bos_token, eos_token etc. of that file become variables. No template: EPX_ERR_NOT_FOUND. */
epx_status_t epx_chat_template_load(const char *model_dir, epx_chat_template_t **out_t);
void epx_chat_template_destroy(epx_chat_template_t *t);
/* Render with `messages` (JSON array of {role, content, ...}), add_generation_prompt, and the members of `extra` (JSON object or
 * NULL: tools, enable_thinking, ...) as variables. Bounded: at most 16 MiB of output and 10 million evaluation steps.
 * raise_exception() in the template: EPX_ERR_ARG with its message. */
epx_status_t epx_chat_template_render(const epx_chat_template_t *t, const json_t *messages, int add_generation_prompt,
                                      const json_t *extra, epx_str_t *out);

#endif
