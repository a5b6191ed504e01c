/* Between the two parts of `epx eval gsm8k`: asking and reporting. */
#ifndef EPX_APP_EVAL_GSM8K_H
#define EPX_APP_EVAL_GSM8K_H

#include "app/bench_load.h"
#include "app/gsm8k.h"
#include "app/settings.h"

/* One server and its answers. */
typedef struct {
    char base[1024], url[1088], model[512];
    const epx_api_t *api;
    epx_load_t load; /* requests [n] in the order of the questions */
    double seconds;  /* from the first question to the last answer */
} epx_gsm8k_side_t;

typedef struct {
    const epx_settings_t *o;
    epx_gsm8k_t data;
    size_t n; /* questions asked: the first of data */
    epx_bench_prompt_t *prompts;
    epx_gsm8k_side_t sides[2]; /* the second with --compare */
    int n_sides;
} epx_gsm8k_run_t;

/* How an answer was scored. */
typedef struct {
    int answered, found, right; /* loose */
    int found_strict, right_strict;
    double strict;
    epx_str_t digits; /* loose; owned */
} epx_gsm8k_score_t;

epx_status_t epx_gsm8k_score(const epx_gsm8k_run_t *g, int side, size_t i, epx_gsm8k_score_t *out);
/* Print the scores and the comparison; write --log-file and --result-file. *out_failed: 1 when a question was not answered. */
epx_status_t epx_gsm8k_report(const epx_gsm8k_run_t *g, int *out_failed);

#endif
