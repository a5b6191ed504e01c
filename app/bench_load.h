/* The load of `epx bench serve`: sends prompts at their times, at most so many at once, and keeps the times of what comes back.
 */
#ifndef EPX_APP_BENCH_LOAD_H
#define EPX_APP_BENCH_LOAD_H

#include "app/bench_api.h"
#include "app/bench_data.h"
#include "app/bench_metrics.h"
#include "app/fetch.h"

/* One request and what came of it. */
typedef struct {
    epx_fetch_t fetch;
    const epx_api_t *api;
    const epx_bench_prompt_t *prompt;
    char *body; /* owned while it is on its way */
    epx_reply_t reply;
    double *itl; /* [n_itl], owned, s */
    size_t n_itl, cap_itl;
    uint64_t first_ns, prev_ns; /* of the first and the latest event with text; 0: none */
    int64_t n_prev;             /* tokens at prev_ns */
    int ended, ok;
    char error[256];
    struct epx_load *load;
} epx_load_request_t;

typedef struct epx_load {
    epx_fetcher_t *fetcher;
    const char *url, *model;
    const epx_api_t *api;
    const json_t *extra;
    int stream, ignore_eos, return_logprob;
    const char *const *stop; /* [n_stop] */
    size_t n_stop;
    int64_t max_output;     /* cut the lengths of answers to this; 0: not */
    double requests_per_s;  /* 0: all at once */
    int64_t max_concurrent; /* 0: no limit */
    uint64_t seed;          /* of the times */
    int show_progress;
    epx_load_request_t *requests; /* [n], owned */
    size_t n, n_ended, n_live;
    epx_status_t status; /* of a callback */
} epx_load_t;

/* Send the prompts and wait for all answers. Fill the first part of *l before; what came is in l->requests.
 * Failed requests are no error. EPX_ERR_NOMEM, EPX_ERR_OS. */
epx_status_t epx_load_run(epx_load_t *l, const epx_bench_prompt_t *prompts, size_t n);
/* The same for `n` times the first prompt. */
epx_status_t epx_load_warm_up(epx_load_t *l, const epx_bench_prompt_t *prompt, size_t n);
/* Times of one request by SGLang's definitions; borrows its list. */
epx_bench_sample_t epx_load_sample(const epx_load_request_t *r);
/* Free what came; the settings stay. */
void epx_load_clear(epx_load_t *l);

#endif
