/* One request from the command line: prompt in, text out as it comes, times measured. */
#ifndef EPX_APP_ANSWER_H
#define EPX_APP_ANSWER_H

#include <stdio.h>

#include "app/session.h"

typedef struct {
    int32_t n_prompt, n_generated;
    epx_finish_t finish;
    double prefill_s; /* from sending the request to its first token */
    double decode_s;  /* from the first token to the last */
} epx_answer_t;

/* Token ids of a text, or of a user's message through the chat template. *out_ids is owned by the caller (free). */
epx_status_t epx_answer_encode(const epx_session_t *s, const char *text, int as_chat, int32_t **out_ids, int32_t *out_n);
/* Run one request and write its text to `out` at UTF-8 borders; invalid bytes become U+FFFD, the end token is left out.
 * max_tokens 0: as many as fit. EPX_ERR_PEER: the ranks were lost; EPX_ERR_ARG: the rank refused the request; EPX_ERR_IO: `out`
 * cannot be written. */
epx_status_t epx_answer_run(epx_session_t *s, const int32_t *prompt, int32_t n_prompt, int32_t max_tokens,
                            const epx_sampling_t *sampling, FILE *out, epx_answer_t *out_answer);

#endif
