/* Words and keys are those of SGLang's bench_serving, so that what reads its output reads this; keys that it does not have come
 * last. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "app/bench_report.h"

static void line_text(FILE *out, const char *name, const char *value) { fprintf(out, "%-40s %-10s\n", name, value); }
static void line_count(FILE *out, const char *name, int64_t v) { fprintf(out, "%-40s %-10lld\n", name, (long long)v); }
static void line_real(FILE *out, const char *name, double v) { fprintf(out, "%-40s %-10.2f\n", name, v); }

static void rule(FILE *out, const char *title, char c) {
    int n = 50 - (int)strlen(title), left = n / 2;
    for (int i = 0; i < left; i++) fputc(c, out);
    fputs(title, out);
    for (int i = left; i < n; i++) fputc(c, out);
    fputc('\n', out);
}

static void print_totals(const epx_bench_metrics_t *m, FILE *out) {
    line_count(out, "Successful requests:", m->n_done);
    if (m->n_failed) line_count(out, "Failed requests:", m->n_failed);
    line_real(out, "Benchmark duration (s):", m->duration);
    line_count(out, "Total input tokens:", m->n_input);
    line_count(out, "Total generated tokens:", m->n_output);
    line_count(out, "Total generated tokens (retokenized):", m->n_retokens);
    line_real(out, "Request throughput (req/s):", m->requests_per_s);
    line_real(out, "Input token throughput (tok/s):", m->input_per_s);
    line_real(out, "Output token throughput (tok/s):", m->output_per_s);
    line_real(out, "Peak output token throughput (tok/s):", m->peak_output_per_s);
    line_count(out, "Peak concurrent requests:", m->peak_concurrent);
    line_real(out, "Total token throughput (tok/s):", m->total_per_s);
    line_real(out, "Concurrency:", m->concurrency);
}

void epx_bench_print(const epx_bench_arguments_t *a, const epx_bench_metrics_t *m, FILE *out) {
    char number[32];
    fputc('\n', out);
    rule(out, " Serving Benchmark Result ", '=');
    line_text(out, "Backend:", a->backend);
    snprintf(number, sizeof number, "%g", a->request_rate);
    line_text(out, "Traffic request rate:", a->request_rate > 0 ? number : "inf");
    snprintf(number, sizeof number, "%lld", (long long)a->max_concurrency);
    line_text(out, "Max request concurrency:", a->max_concurrency ? number : "not set");
    print_totals(m, out);
    rule(out, "End-to-End Latency", '-');
    line_real(out, "Mean E2E Latency (ms):", m->e2e.mean);
    line_real(out, "Median E2E Latency (ms):", m->e2e.median);
    line_real(out, "P90 E2E Latency (ms):", m->e2e.p90);
    line_real(out, "P99 E2E Latency (ms):", m->e2e.p99);
    rule(out, "Time to First Token", '-');
    line_real(out, "Mean TTFT (ms):", m->ttft.mean);
    line_real(out, "Median TTFT (ms):", m->ttft.median);
    line_real(out, "P99 TTFT (ms):", m->ttft.p99);
    rule(out, "Time per Output Token (excl. 1st token)", '-');
    line_real(out, "Mean TPOT (ms):", m->tpot.mean);
    line_real(out, "Median TPOT (ms):", m->tpot.median);
    line_real(out, "P99 TPOT (ms):", m->tpot.p99);
    rule(out, "Inter-Token Latency", '-');
    line_real(out, "Mean ITL (ms):", m->itl.mean);
    line_real(out, "Median ITL (ms):", m->itl.median);
    line_real(out, "P95 ITL (ms):", m->itl.p95);
    line_real(out, "P99 ITL (ms):", m->itl.p99);
    line_real(out, "Max ITL (ms):", m->itl.max);
    rule(out, "", '=');
}

/* ---- JSON ---- */

static void set(json_t *o, const char *key, json_t *value) { json_object_set_new(o, key, value); }

static json_t *text_or_null(const char *text) { return text ? json_string(text) : json_null(); }

static json_t *count_or_null(int64_t v) { return v ? json_integer(v) : json_null(); }

static void set_spread(json_t *o, const char *name, const epx_bench_spread_t *s) {
    const struct {
        const char *what;
        double v;
    } all[] = {{"mean", s->mean}, {"median", s->median}, {"std", s->std}, {"p90", s->p90},
               {"p95", s->p95},   {"p99", s->p99},       {"max", s->max}};
    char key[64];
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        snprintf(key, sizeof key, "%s_%s_ms", all[i].what, name);
        set(o, key, json_real(all[i].v));
    }
}

static void set_arguments(json_t *o, const epx_bench_arguments_t *a) {
    set(o, "tag", text_or_null(a->tag));
    set(o, "backend", json_string(a->backend));
    set(o, "dataset_name", json_string(a->dataset_name));
    set(o, "request_rate", a->request_rate > 0 ? json_real(a->request_rate) : json_string("inf"));
    set(o, "max_concurrency", count_or_null(a->max_concurrency));
    set(o, "sharegpt_output_len", count_or_null(a->sharegpt_output_len));
    set(o, "random_input_len", json_integer(a->random_input_len));
    set(o, "random_output_len", json_integer(a->random_output_len));
    set(o, "random_range_ratio", json_real(a->random_range_ratio));
}

static void set_metrics(json_t *o, const epx_bench_metrics_t *m) {
    set(o, "duration", json_real(m->duration));
    set(o, "completed", json_integer(m->n_done));
    set(o, "total_input_tokens", json_integer(m->n_input));
    set(o, "total_output_tokens", json_integer(m->n_output));
    set(o, "total_output_tokens_retokenized", json_integer(m->n_retokens));
    set(o, "request_throughput", json_real(m->requests_per_s));
    set(o, "input_throughput", json_real(m->input_per_s));
    set(o, "output_throughput", json_real(m->output_per_s));
    set(o, "total_throughput", json_real(m->total_per_s));
    set_spread(o, "e2e_latency", &m->e2e);
    set_spread(o, "ttft", &m->ttft);
    set_spread(o, "tpot", &m->tpot);
    set_spread(o, "itl", &m->itl);
    set(o, "concurrency", json_real(m->concurrency));
    set(o, "accept_length", json_null());
    set(o, "max_output_tokens_per_s", json_real(m->peak_output_per_s));
    set(o, "max_concurrent_requests", json_integer(m->peak_concurrent));
    set(o, "failed", json_integer(m->n_failed));
    set(o, "output_throughput_retokenized", json_real(m->retokens_per_s));
    set(o, "total_throughput_retokenized", json_real(m->total_retokens_per_s));
}

static json_t *reals(const double *v, size_t n) {
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++) json_array_append_new(list, json_real(v[i]));
    return list;
}

static void set_details(json_t *o, const epx_load_t *l) {
    json_t *in = json_array(), *seen = json_array(), *out = json_array(), *ttft = json_array(), *itl = json_array(),
           *text = json_array(), *error = json_array(), *e2e = json_array(), *start = json_array();
    for (size_t i = 0; i < l->n; i++) {
        const epx_load_request_t *r = &l->requests[i];
        epx_bench_sample_t s = epx_load_sample(r);
        json_array_append_new(in, json_integer(s.n_prompt));
        json_array_append_new(seen, r->reply.n_prompt >= 0 ? json_integer(r->reply.n_prompt) : json_null());
        json_array_append_new(out, json_integer(s.done ? s.n_output : 0));
        json_array_append_new(ttft, s.ttft >= 0 ? json_real(s.ttft) : json_null());
        json_array_append_new(itl, reals(s.itl, s.n_itl));
        json_array_append_new(text, json_stringn(epx_str_z(&r->reply.text), r->reply.text.n_bytes));
        json_array_append_new(error, json_string(r->error));
        json_array_append_new(e2e, json_real(s.latency));
        json_array_append_new(start, json_real(s.start));
    }
    set(o, "input_lens", in);
    set(o, "output_lens", out);
    set(o, "ttfts", ttft);
    set(o, "itls", itl);
    set(o, "generated_texts", text);
    set(o, "errors", error);
    set(o, "server_input_lens", seen);
    set(o, "e2e_latencies", e2e);
    set(o, "start_times", start);
}

epx_status_t epx_bench_print_json(const epx_bench_arguments_t *a, const epx_bench_metrics_t *m, const epx_load_t *l,
                                  const json_t *server_info, FILE *out) {
    json_t *o = json_object();
    if (o) {
        set_arguments(o, a);
        set(o, "server_info", server_info ? json_deep_copy(server_info) : json_null());
        set_metrics(o, m);
        if (a->details) set_details(o, l);
    }
    char *line = o ? json_dumps(o, JSON_COMPACT) : NULL;
    int bad = line && (fputs(line, out) < 0 || fputc('\n', out) < 0 || fflush(out) != 0);
    epx_status_t s = !line ? epx_fail(EPX_ERR_NOMEM, "no memory for the result")
                     : bad ? epx_fail_errno(EPX_ERR_IO, errno, "the result")
                           : EPX_OK;
    free(line);
    json_decref(o);
    return s;
}
