/* What `epx bench serve` makes of the times of its requests: the definitions of SGLang's bench_serving. Pure. */
#ifndef EPX_APP_BENCH_METRICS_H
#define EPX_APP_BENCH_METRICS_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* One request. Times in seconds. */
typedef struct {
    int done;           /* 0: failed; then the rest does not count */
    double start;       /* just before it was sent; any origin */
    double ttft;        /* first event with text - start; negative: there was none */
    double latency;     /* last event - start */
    int64_t n_prompt;   /* tokens of the prompt as the data set counts them */
    int64_t n_output;   /* tokens that the server says it generated */
    int64_t n_retokens; /* the text, encoded again; -1: not known */
    const double *itl;  /* [n_itl], borrowed; one for each token after the first event */
    size_t n_itl;
} epx_bench_sample_t;

/* Milliseconds; zeros when there is no value. std is that of the population; percentiles are interpolated linearly. */
typedef struct {
    double mean, median, std, p90, p95, p99, max;
} epx_bench_spread_t;

typedef struct {
    int64_t n_done, n_failed;
    int64_t n_input, n_output, n_retokens; /* tokens of requests that were done */
    double duration;                       /* s, as given */
    double requests_per_s, input_per_s, output_per_s, retokens_per_s, total_per_s, total_retokens_per_s;
    double concurrency;       /* sum of latencies / duration */
    double peak_output_per_s; /* most tokens in one second since the first start */
    int64_t peak_concurrent;  /* most requests that were there in one such second */
    epx_bench_spread_t e2e, ttft, tpot, itl;
} epx_bench_metrics_t;

/* The value below which `percent` of values[0..n) lie, of sorted values; 0 when n is 0. */
double epx_bench_percentile(const double *sorted, size_t n, double percent);
/* duration in s, above 0. EPX_ERR_NOMEM. */
epx_status_t epx_bench_metrics(const epx_bench_sample_t *samples, size_t n, double duration, epx_bench_metrics_t *out);

#endif
