/* Definitions of SGLang's bench_serving. Differences: a request without any text has no time to first token, instead of 0. */
#include "app/bench_metrics.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    double *v;
    size_t n, cap;
} list_t;

static epx_status_t push(list_t *l, double x) {
    if (l->n == l->cap) {
        size_t cap = l->cap ? 2 * l->cap : 1024;
        double *v = realloc(l->v, cap * sizeof *v);
        if (!v) return epx_fail(EPX_ERR_NOMEM, "no memory for %zu times", cap);
        l->v = v;
        l->cap = cap;
    }
    l->v[l->n++] = x;
    return EPX_OK;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double epx_bench_percentile(const double *sorted, size_t n, double percent) {
    if (n == 0) return 0;
    double at = percent / 100 * (double)(n - 1), low = floor(at);
    size_t i = (size_t)low;
    return i + 1 < n ? sorted[i] + (sorted[i + 1] - sorted[i]) * (at - low) : sorted[n - 1];
}

/* Frees the list. */
static epx_bench_spread_t spread_of(list_t *l) {
    epx_bench_spread_t s = {0};
    double sum = 0, square = 0;
    if (l->n) qsort(l->v, l->n, sizeof *l->v, ascending);
    for (size_t i = 0; i < l->n; i++) sum += l->v[i];
    double mean = l->n ? sum / (double)l->n : 0;
    for (size_t i = 0; i < l->n; i++) square += (l->v[i] - mean) * (l->v[i] - mean);
    s.mean = mean * 1e3;
    s.std = l->n ? sqrt(square / (double)l->n) * 1e3 : 0;
    s.median = epx_bench_percentile(l->v, l->n, 50) * 1e3;
    s.p90 = epx_bench_percentile(l->v, l->n, 90) * 1e3;
    s.p95 = epx_bench_percentile(l->v, l->n, 95) * 1e3;
    s.p99 = epx_bench_percentile(l->v, l->n, 99) * 1e3;
    s.max = epx_bench_percentile(l->v, l->n, 100) * 1e3;
    free(l->v);
    *l = (list_t){0};
    return s;
}

/* ---- peaks ---- */

static void count_seconds(const epx_bench_sample_t *s, double first, size_t n_seconds, double *tokens, double *present) {
    double at = s->start + s->ttft;
    for (size_t i = 0; s->ttft >= 0 && i <= s->n_itl; i++) {
        double second = floor(at - first);
        if (second >= 0 && second < (double)n_seconds) tokens[(size_t)second]++;
        if (i < s->n_itl) at += s->itl[i];
    }
    for (double t = floor(s->start - first); t <= floor(s->start + s->latency - first) && t < (double)n_seconds; t++)
        present[(size_t)t]++;
}

static epx_status_t find_peaks(const epx_bench_sample_t *samples, size_t n, epx_bench_metrics_t *m) {
    double first = INFINITY, last = -INFINITY;
    for (size_t i = 0; i < n; i++) {
        if (!samples[i].done) continue;
        first = fmin(first, samples[i].start);
        last = fmax(last, samples[i].start + samples[i].latency);
    }
    if (m->n_done == 0) return EPX_OK;
    size_t n_seconds = (size_t)ceil(last - first) + 1;
    double *tokens = calloc(2 * n_seconds, sizeof *tokens), *present = tokens ? tokens + n_seconds : NULL;
    if (!tokens) return epx_fail(EPX_ERR_NOMEM, "no memory for %zu seconds", n_seconds);
    for (size_t i = 0; i < n; i++)
        if (samples[i].done) count_seconds(&samples[i], first, n_seconds, tokens, present);
    for (size_t i = 0; i < n_seconds; i++) {
        m->peak_output_per_s = fmax(m->peak_output_per_s, tokens[i]);
        m->peak_concurrent = (int64_t)fmax((double)m->peak_concurrent, present[i]);
    }
    free(tokens);
    return EPX_OK;
}

/* ---- all ---- */

typedef struct {
    list_t e2e, ttft, tpot, itl;
} lists_t;

static epx_status_t add_sample(const epx_bench_sample_t *s, lists_t *l, epx_bench_metrics_t *m) {
    m->n_done++;
    m->n_input += s->n_prompt;
    m->n_output += s->n_output;
    m->n_retokens += s->n_retokens > 0 ? s->n_retokens : 0;
    m->concurrency += s->latency;
    EPX_TRY(push(&l->e2e, s->latency));
    if (s->ttft >= 0) EPX_TRY(push(&l->ttft, s->ttft));
    if (s->ttft >= 0 && s->n_output > 1) EPX_TRY(push(&l->tpot, (s->latency - s->ttft) / (double)(s->n_output - 1)));
    for (size_t i = 0; i < s->n_itl; i++) EPX_TRY(push(&l->itl, s->itl[i]));
    return EPX_OK;
}

epx_status_t epx_bench_metrics(const epx_bench_sample_t *samples, size_t n, double duration, epx_bench_metrics_t *out) {
    epx_bench_metrics_t m = {.duration = duration};
    lists_t l = {0};
    epx_status_t s = EPX_OK;
    for (size_t i = 0; i < n && s >= 0; i++)
        if (samples[i].done) s = add_sample(&samples[i], &l, &m);
    if (s >= 0) s = find_peaks(samples, n, &m);
    m.n_failed = (int64_t)n - m.n_done;
    m.requests_per_s = (double)m.n_done / duration;
    m.input_per_s = (double)m.n_input / duration;
    m.output_per_s = (double)m.n_output / duration;
    m.retokens_per_s = (double)m.n_retokens / duration;
    m.total_per_s = m.input_per_s + m.output_per_s;
    m.total_retokens_per_s = m.input_per_s + m.retokens_per_s;
    m.concurrency /= duration;
    m.e2e = spread_of(&l.e2e);
    m.ttft = spread_of(&l.ttft);
    m.tpot = spread_of(&l.tpot);
    m.itl = spread_of(&l.itl);
    if (s >= 0) *out = m;
    return s;
}
