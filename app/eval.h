/* The parts of `epx eval`. Ranks run as threads of this process; every function here is called once per command. */
#ifndef EPX_APP_EVAL_H
#define EPX_APP_EVAL_H

#include "app/settings.h"
#include "engine/runtime/rank.h"

/* Run on every rank's thread; a negative status on one ends the command with its message. */
typedef epx_status_t (*epx_eval_body_fn)(void *ctx, int rank, epx_rank_t *r);

/* Create --tp ranks on as many threads, run body on each, destroy them. The first error of any rank is this thread's error. */
epx_status_t epx_eval_ranks(const epx_settings_t *o, epx_eval_body_fn body, void *ctx);

/* Perplexity of the text file o->eval_file, printed. */
epx_status_t epx_eval_perplexity(const epx_settings_t *o);
/* Compare with the reference values of o->reference and print. *out_over: 1 when something is over the tolerance. */
epx_status_t epx_eval_logits(const epx_settings_t *o, int *out_over);
/* Ask the word problems of o->data_path and print the scores. *out_failed: 1 when a question was not answered. */
epx_status_t epx_eval_gsm8k(const epx_settings_t *o, int *out_failed);

#endif
