/* A reading in the Prometheus text exposition format, version 0.0.4
 * (https://prometheus.io/docs/instrumenting/exposition_formats/). Names with "sglang:" mean what they mean in SGLang; the others
 * are epx's own. docs/metrics.md lists all of them. Pure. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "server/http/metrics.h"

enum { TOP_EXPERTS = 4 };

typedef struct {
    epx_str_t *out;
    const epx_reading_t *r;
    epx_str_t model; /* model_name="..." */
    epx_status_t s;  /* the first failure */
} writer_t;

#define PUT(w, ...)                                                      \
    do {                                                                 \
        if ((w)->s >= 0) (w)->s = epx_str_printf((w)->out, __VA_ARGS__); \
    } while (0)

static epx_status_t append_label_value(epx_str_t *out, const char *v) {
    for (; *v; v++) {
        if (*v == '\\' || *v == '"') EPX_TRY(epx_str_printf(out, "\\%c", *v));
        else if (*v == '\n') EPX_TRY(epx_str_append_z(out, "\\n"));
        else EPX_TRY(epx_str_append(out, v, 1));
    }
    return EPX_OK;
}

static void family(writer_t *w, const char *name, const char *type, const char *help) {
    PUT(w, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

/* One sample of a DP rank. */
static void by_dp(writer_t *w, const char *name, int dp, double v) {
    PUT(w, "%s{%s,dp_rank=\"%d\"} %.15g\n", name, epx_str_z(&w->model), dp, v);
}

#define DP_FAMILY(w, name, type, help, expr)                       \
    do {                                                           \
        family(w, name, type, help);                               \
        for (int dp = 0; dp < (w)->r->n_dp; dp++) {                \
            const epx_rank_stats_t *st = epx_reading_dp(w->r, dp); \
            const epx_dp_metrics_t *me = &(w)->r->metrics[dp];     \
            (void)st, (void)me;                                    \
            by_dp(w, name, dp, (double)(expr));                    \
        }                                                          \
    } while (0)

static void write_scheduler(writer_t *w) {
    DP_FAMILY(w, "sglang:num_running_reqs", "gauge", "Requests in the running batch.", st->n_running);
    DP_FAMILY(w, "sglang:num_queue_reqs", "gauge", "Requests that wait for the batch.", st->n_waiting);
    DP_FAMILY(w, "sglang:num_used_tokens", "gauge", "Tokens of KV in use.", st->kv_used_tokens);
    DP_FAMILY(w, "sglang:max_total_num_tokens", "gauge", "Tokens that the KV pool holds.", st->kv_tokens);
    DP_FAMILY(w, "sglang:token_usage", "gauge", "Share of the KV pool in use, 0 to 1.",
              st->kv_tokens ? (double)st->kv_used_tokens / (double)st->kv_tokens : 0.0);
    DP_FAMILY(w, "sglang:cache_hit_rate", "gauge", "Share of prompt tokens found in the prefix cache since the start, 0 to 1.",
              st->n_lookup_tokens ? (double)st->n_cached_tokens / (double)st->n_lookup_tokens : 0.0);
    DP_FAMILY(w, "epx_kv_evictable_tokens", "gauge", "Tokens of KV kept only for the prefix cache.", st->kv_evictable_tokens);
    DP_FAMILY(w, "sglang:gen_throughput", "gauge", "Generated tokens per second since the reading before, at least 1 s ago.",
              me->tokens_per_s);
}

static void write_tokens(writer_t *w) {
    DP_FAMILY(w, "sglang:prompt_tokens_total", "counter", "Tokens of prompts that were computed.", st->n_prompt_tokens);
    DP_FAMILY(w, "sglang:cached_tokens_total", "counter", "Of the prompts, tokens whose KV was found in the prefix cache.",
              st->n_cached_tokens);
    DP_FAMILY(w, "sglang:generation_tokens_total", "counter", "Generated tokens.", st->n_generated_tokens);
    DP_FAMILY(w, "sglang:num_requests_total", "counter", "Requests that have ended.", me->n_requests);
    DP_FAMILY(w, "sglang:num_aborted_requests_total", "counter", "Of these, cancelled: the client left, or an abort.",
              me->n_aborted);
    DP_FAMILY(w, "epx_failed_requests_total", "counter", "Of these, ended by an error of the engine.", me->n_failed);
    DP_FAMILY(w, "epx_retracted_requests_total", "counter", "Times that a request had to wait again for KV.", st->n_retracted);
    DP_FAMILY(w, "epx_steps_total", "counter", "Forward steps.", st->n_steps);
    DP_FAMILY(w, "epx_prefill_rows_total", "counter", "Rows of prompts that were computed.", st->n_prefill_tokens);
    DP_FAMILY(w, "epx_decode_rows_total", "counter", "Rows of decoding that were computed.", st->n_decode_tokens);
}

static void latency(writer_t *w, epx_latency_t what, const char *name, const char *help) {
    int n;
    const double *bound = epx_latency_bounds(what, &n);
    family(w, name, "histogram", help);
    for (int dp = 0; dp < w->r->n_dp; dp++) {
        const epx_latency_hist_t *h = &w->r->metrics[dp].latency[what];
        uint64_t sum = 0;
        for (int i = 0; i < n; i++) {
            sum += h->n[i];
            PUT(w, "%s_bucket{%s,dp_rank=\"%d\",le=\"%g\"} %" PRIu64 "\n", name, epx_str_z(&w->model), dp, bound[i], sum);
        }
        sum += h->n[n];
        PUT(w, "%s_bucket{%s,dp_rank=\"%d\",le=\"+Inf\"} %" PRIu64 "\n", name, epx_str_z(&w->model), dp, sum);
        PUT(w, "%s_sum{%s,dp_rank=\"%d\"} %.9g\n", name, epx_str_z(&w->model), dp, h->sum_s);
        PUT(w, "%s_count{%s,dp_rank=\"%d\"} %" PRIu64 "\n", name, epx_str_z(&w->model), dp, sum);
    }
}

static void write_latencies(writer_t *w) {
    latency(w, EPX_LATENCY_FIRST_TOKEN, "sglang:time_to_first_token_seconds", "From submission to the first token.");
    latency(w, EPX_LATENCY_INTER_TOKEN, "sglang:inter_token_latency_seconds", "Between two tokens of a request.");
    latency(w, EPX_LATENCY_REQUEST, "sglang:e2e_request_latency_seconds", "From submission to the end of the answer.");
}

/* ---- exchange ---- */

static const char *const phases[EPX_N_PHASES] = {"dispatch", "combine"};

static int dp_of(const writer_t *w, int rank) { return rank / w->r->ranks_per_dp; }

/* Rows and bytes between two ranks; with exact sums one row a (token, expert) pair comes back, else one a (token, rank) pair. */
static void peers(writer_t *w, const char *name, const char *help, int in_bytes) {
    const epx_rank_info_t *info = &w->r->status.info;
    family(w, name, "counter", help);
    for (int rank = 0; rank < w->r->n_ranks; rank++)
        for (int peer = 0; peer < w->r->ranks_per_replica; peer++)
            for (int p = 0; p < EPX_N_PHASES; p++) {
                const epx_rank_stats_t *st = &w->r->stats[rank];
                int is_pairs = p == EPX_PHASE_COMBINE && info->combine == EPX_COMBINE_EXACT;
                uint64_t rows = is_pairs ? st->pairs_sent[peer] : st->rows_sent[peer];
                int scale = !in_bytes ? 1 : p == EPX_PHASE_DISPATCH ? info->dispatch_row_bytes : info->combine_row_bytes;
                PUT(w, "%s{%s,dp_rank=\"%d\",rank=\"%d\",peer=\"%d\",phase=\"%s\"} %" PRIu64 "\n", name, epx_str_z(&w->model),
                    dp_of(w, rank), rank, epx_reading_first_peer(w->r, rank) + peer, phases[p], rows * (uint64_t)scale);
            }
}

static void phase_hist(writer_t *w, int rank, int phase, const char *part, const epx_time_hist_t *h) {
    char labels[96];
    uint64_t sum = 0;
    snprintf(labels, sizeof labels, "dp_rank=\"%d\",rank=\"%d\",phase=\"%s\",part=\"%s\"", dp_of(w, rank), rank, phases[phase],
             part);
    for (int i = 0; i < EPX_TIME_BUCKETS - 1; i++) {
        sum += h->n[i];
        PUT(w, "epx_exchange_seconds_bucket{%s,%s,le=\"%g\"} %" PRIu64 "\n", epx_str_z(&w->model), labels,
            (double)epx_time_hist_bound_ns(i) * 1e-9, sum);
    }
    sum += h->n[EPX_TIME_BUCKETS - 1];
    PUT(w, "epx_exchange_seconds_bucket{%s,%s,le=\"+Inf\"} %" PRIu64 "\n", epx_str_z(&w->model), labels, sum);
    PUT(w, "epx_exchange_seconds_sum{%s,%s} %.9g\n", epx_str_z(&w->model), labels, (double)h->sum_ns * 1e-9);
    PUT(w, "epx_exchange_seconds_count{%s,%s} %" PRIu64 "\n", epx_str_z(&w->model), labels, sum);
}

static void write_exchange(writer_t *w) {
    peers(w, "epx_exchange_rows_total", "Rows between a rank and a peer; dispatch: sent to it, combine: answered by it.", 0);
    peers(w, "epx_exchange_row_bytes_total", "The same in bytes of rows on the wire.", 1);
    family(w, "epx_exchange_moved_bytes_total", "counter", "Bytes that the exchange moved to other ranks, tables included.");
    for (int rank = 0; rank < w->r->n_ranks; rank++)
        for (int p = 0; p < EPX_N_PHASES; p++)
            PUT(w, "epx_exchange_moved_bytes_total{%s,dp_rank=\"%d\",rank=\"%d\",phase=\"%s\"} %" PRIu64 "\n",
                epx_str_z(&w->model), dp_of(w, rank), rank, phases[p],
                p == EPX_PHASE_DISPATCH ? w->r->stats[rank].dispatch_bytes : w->r->stats[rank].combine_bytes);
    family(w, "epx_exchange_seconds", "histogram",
           "Time of one layer's dispatch or combine: waiting for peers (wait) and the rest (copy).");
    for (int rank = 0; rank < w->r->n_ranks; rank++)
        for (int p = 0; p < EPX_N_PHASES; p++) {
            phase_hist(w, rank, p, "wait", &w->r->stats[rank].wait[p]);
            phase_hist(w, rank, p, "copy", &w->r->stats[rank].copy[p]);
        }
}

/* ---- experts ---- */

static uint64_t most_of(const uint64_t *rows, int n, double *out_mean) {
    uint64_t most = 0, sum = 0;
    for (int i = 0; i < n; i++) {
        if (rows[i] > most) most = rows[i];
        sum += rows[i];
    }
    *out_mean = (double)sum / n;
    return most;
}

typedef double (*layer_value_fn)(uint64_t most, double mean);
static double value_most(uint64_t most, double mean) { return mean >= 0 ? (double)most : 0; }
static double value_mean(uint64_t most, double mean) { return most ? mean : 0; }
static double value_ratio(uint64_t most, double mean) { return mean > 0 ? (double)most / mean : 1; }

static void by_layer(writer_t *w, const char *name, const char *help, layer_value_fn value) {
    family(w, name, "gauge", help);
    for (int l = 0; l < w->r->n_layers; l++) {
        double mean;
        uint64_t most = most_of(w->r->expert_rows + (size_t)l * (size_t)w->r->n_experts, w->r->n_experts, &mean);
        PUT(w, "%s{%s,layer=\"%d\"} %.15g\n", name, epx_str_z(&w->model), l, value(most, mean));
    }
}

/* The expert with the most rows after those already taken; the lower id of equals. */
static int next_top(const uint64_t *rows, int n, const int *taken, int n_taken) {
    int best = -1;
    for (int e = 0; e < n; e++) {
        int is_taken = 0;
        for (int i = 0; i < n_taken; i++) is_taken |= taken[i] == e;
        if (!is_taken && (best < 0 || rows[e] > rows[best])) best = e;
    }
    return best;
}

static void write_top_experts(writer_t *w) {
    const char *name = "epx_expert_top_rows";
    family(w, name, "gauge", "Rows of the experts of a layer that had the most since the start; place 1 is the first.");
    for (int l = 0; l < w->r->n_layers; l++) {
        const uint64_t *rows = w->r->expert_rows + (size_t)l * (size_t)w->r->n_experts;
        int taken[TOP_EXPERTS];
        for (int i = 0; i < TOP_EXPERTS && i < w->r->n_experts; i++) {
            taken[i] = next_top(rows, w->r->n_experts, taken, i);
            PUT(w, "%s{%s,layer=\"%d\",place=\"%d\",expert=\"%d\"} %" PRIu64 "\n", name, epx_str_z(&w->model), l, i + 1, taken[i],
                rows[taken[i]]);
        }
    }
}

/* Rows that arrive at the fullest rank of a replica over the mean. */
static double replica_imbalance(const epx_rank_stats_t *stats, int n) {
    double most = 0, sum = 0;
    for (int to = 0; to < n; to++) {
        double rows = 0;
        for (int from = 0; from < n; from++) rows += (double)stats[from].pairs_sent[to];
        most = fmax(most, rows);
        sum += rows;
    }
    return sum > 0 ? most * n / sum : 1;
}

static double rank_imbalance(const epx_reading_t *r) {
    double most = 1;
    for (int first = 0; first < r->n_ranks; first += r->ranks_per_replica)
        most = fmax(most, replica_imbalance(&r->stats[first], r->ranks_per_replica));
    return most;
}

static void write_experts(writer_t *w) {
    by_layer(w, "epx_expert_rows_max", "Rows of the layer's most loaded expert since the start.", value_most);
    by_layer(w, "epx_expert_rows_mean", "Rows of an expert of the layer since the start, mean.", value_mean);
    by_layer(w, "epx_expert_imbalance", "epx_expert_rows_max over epx_expert_rows_mean; 1 is even.", value_ratio);
    write_top_experts(w);
    family(w, "epx_rank_imbalance", "gauge", "(token, expert) pairs of the most loaded rank over the mean since the start.");
    PUT(w, "epx_rank_imbalance{%s} %.15g\n", epx_str_z(&w->model), rank_imbalance(w->r));
}

static void write_server(writer_t *w) {
    const epx_rank_info_t *i = &w->r->status.info;
    family(w, "epx_info", "gauge", "Always 1; the labels say what is running.");
    PUT(w, "epx_info{%s,version=\"%s\",backend=\"%s\",transport=\"%s\",isa=\"%s\",ranks=\"%d\"} 1\n", epx_str_z(&w->model),
        epx_version(), i->backend, i->transport, i->isa, w->r->n_ranks);
    family(w, "epx_up", "gauge", "1 while every rank lives, 0 after one was lost.");
    PUT(w, "epx_up{%s} %d\n", epx_str_z(&w->model), !w->r->status.failed);
}

epx_status_t epx_metrics_write(const epx_reading_t *r, const char *model_name, epx_str_t *out) {
    writer_t w = {.out = out, .r = r, .s = EPX_OK};
    epx_status_t s = epx_str_append_z(&w.model, "model_name=\"");
    if (s >= 0) s = append_label_value(&w.model, model_name);
    if (s >= 0) s = epx_str_append_z(&w.model, "\"");
    w.s = s;
    write_server(&w);
    write_scheduler(&w);
    write_tokens(&w);
    write_latencies(&w);
    write_exchange(&w);
    write_experts(&w);
    epx_str_fini(&w.model);
    return w.s;
}
