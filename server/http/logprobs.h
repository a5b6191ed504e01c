/* The logprobs of one choice, from arrival until their text is sent. Not thread-safe per object.
 * A token is reported with the text that it is part of: tokens whose text is held back wait, tokens behind a stop string are
 * left out. */
#ifndef EPX_SERVER_HTTP_LOGPROBS_H
#define EPX_SERVER_HTTP_LOGPROBS_H

#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

#include "engine/sample/sample.h"
#include "engine/tokenizer/tokenizer.h"
#include "server/http/text_stream.h"

/* A token that arrived. */
typedef struct {
    int32_t token;
    float logprob;
    int32_t n_top;
    epx_top_t *top; /* owned, [n_top] */
    int is_prompt;  /* a token of the prompt, for its logprob only */
} epx_token_news_t;

typedef struct {
    epx_token_news_t token;
    size_t begin, end; /* bytes of the answer; equal for a token without text */
    size_t char_off;   /* of begin, in code points */
} epx_logprob_entry_t;

typedef struct {
    epx_logprob_entry_t *v; /* owned, [n] not taken yet */
    size_t n, cap;
    size_t n_bytes, n_chars; /* of all tokens so far */
} epx_logprobs_t;

/* Add the next token of the answer with its text; takes over news->top. */
epx_status_t epx_logprobs_add(epx_logprobs_t *l, epx_token_news_t *news, const char *bytes, size_t n_bytes);
/* Add the next token of a prompt that is echoed; NAN: the first, which has no logprob. Takes over news->top. */
epx_status_t epx_logprobs_add_prompt(epx_logprobs_t *l, epx_token_news_t *news, const char *bytes, size_t n_bytes);
/* What can be reported now, in the form of chat or of completions, as a new object; NULL when there is nothing. Those tokens
 * are gone from l. */
json_t *epx_logprobs_take(epx_logprobs_t *l, const epx_tokenizer_t *tok, int is_chat, const epx_text_stream_t *stream);
void epx_logprobs_fini(epx_logprobs_t *l);

#endif
