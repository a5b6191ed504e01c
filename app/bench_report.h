/* What `epx bench serve` prints: SGLang's block of figures and its JSON line. */
#ifndef EPX_APP_BENCH_REPORT_H
#define EPX_APP_BENCH_REPORT_H

#include <stdio.h>

#include <jansson.h>

#include "app/bench_load.h"
#include "app/bench_metrics.h"

/* The arguments as the JSON line repeats them. */
typedef struct {
    const char *tag, *backend, *dataset_name; /* tag NULL: null */
    double request_rate;                      /* 0: inf */
    int64_t max_concurrency;                  /* 0: null */
    int64_t sharegpt_output_len;              /* 0: null */
    int64_t random_input_len, random_output_len;
    double random_range_ratio;
    int details;
} epx_bench_arguments_t;

void epx_bench_print(const epx_bench_arguments_t *a, const epx_bench_metrics_t *m, FILE *out);
/* One line of JSON with the keys of SGLang's; server_info is borrowed, NULL: null. EPX_ERR_NOMEM, EPX_ERR_IO. */
epx_status_t epx_bench_print_json(const epx_bench_arguments_t *a, const epx_bench_metrics_t *m, const epx_load_t *l,
                                  const json_t *server_info, FILE *out);

#endif
