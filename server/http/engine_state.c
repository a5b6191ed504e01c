/* /metrics and /engine/state: the handlers, and the reading as JSON for the web page. */
#include <inttypes.h>
#include <stdlib.h>

#include <jansson.h>

#include "server/http/native.h"

static json_t *counters(const uint64_t *v, int n) {
    json_t *a = json_array();
    for (int i = 0; i < n; i++) json_array_append_new(a, json_integer((json_int_t)v[i]));
    return a;
}

/* Rows to the ranks of the same replica, in a row of all ranks. */
static json_t *by_peer(const epx_reading_t *r, int rank, const uint64_t *v) {
    json_t *a = json_array();
    for (int peer = 0, first = epx_reading_first_peer(r, rank); peer < r->n_ranks; peer++) {
        int i = peer - first;
        json_array_append_new(a, json_integer(i < 0 || i >= r->ranks_per_replica ? 0 : (json_int_t)v[i]));
    }
    return a;
}

static json_t *time_hist(const epx_time_hist_t *h) {
    return json_pack("{s:I, s:I, s:o}", "sum_ns", (json_int_t)h->sum_ns, "count", (json_int_t)epx_time_hist_count(h), "buckets",
                     counters(h->n, EPX_TIME_BUCKETS));
}

static json_t *latency(const epx_latency_hist_t *h, epx_latency_t what) {
    int n;
    uint64_t count = 0;
    epx_latency_bounds(what, &n);
    for (int i = 0; i <= n; i++) count += h->n[i];
    return json_pack("{s:f, s:I}", "sum_s", h->sum_s, "count", (json_int_t)count);
}

static json_t *rank_json(const epx_reading_t *r, int rank) {
    const epx_rank_stats_t *st = &r->stats[rank];
    const epx_dp_metrics_t none = {0}, *m = rank % r->ranks_per_dp ? &none : &r->metrics[rank / r->ranks_per_dp];
    json_t *o =
        json_pack("{s:i, s:i, s:i, s:i, s:i, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "rank", rank, "dp_rank", rank / r->ranks_per_dp,
                  "pid", r->status.pids[rank], "running", st->n_running, "waiting", st->n_waiting, "kv_used",
                  (json_int_t)st->kv_used_tokens, "kv_tokens", (json_int_t)st->kv_tokens, "steps", (json_int_t)st->n_steps,
                  "prompt_tokens", (json_int_t)st->n_prompt_tokens, "generated_tokens", (json_int_t)st->n_generated_tokens,
                  "requests", (json_int_t)m->n_requests, "moved_bytes", (json_int_t)(st->dispatch_bytes + st->combine_bytes));
    json_object_set_new(o, "rows_sent", by_peer(r, rank, st->rows_sent));
    json_object_set_new(o, "pairs_sent", by_peer(r, rank, st->pairs_sent));
    json_object_set_new(o, "wait",
                        json_pack("{s:o, s:o}", "dispatch", time_hist(&st->wait[EPX_PHASE_DISPATCH]), "combine",
                                  time_hist(&st->wait[EPX_PHASE_COMBINE])));
    json_object_set_new(o, "copy",
                        json_pack("{s:o, s:o}", "dispatch", time_hist(&st->copy[EPX_PHASE_DISPATCH]), "combine",
                                  time_hist(&st->copy[EPX_PHASE_COMBINE])));
    json_object_set_new(o, "first_token", latency(&m->latency[EPX_LATENCY_FIRST_TOKEN], EPX_LATENCY_FIRST_TOKEN));
    json_object_set_new(o, "inter_token", latency(&m->latency[EPX_LATENCY_INTER_TOKEN], EPX_LATENCY_INTER_TOKEN));
    return o;
}

static json_t *state_json(const epx_reading_t *r, const char *model_name, int max_context) {
    const epx_rank_info_t *i = &r->status.info;
    json_t *ranks = json_array(), *experts = json_array(), *bounds = json_array();
    for (int rank = 0; rank < r->n_ranks; rank++) json_array_append_new(ranks, rank_json(r, rank));
    for (int l = 0; l < r->n_layers; l++)
        json_array_append_new(experts, counters(r->expert_rows + (size_t)l * (size_t)r->n_experts, r->n_experts));
    for (int b = 0; b < EPX_TIME_BUCKETS - 1; b++)
        json_array_append_new(bounds, json_integer((json_int_t)epx_time_hist_bound_ns(b)));
    json_t *root = json_pack("{s:s, s:s, s:b, s:s, s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:i}", "model", model_name, "version",
                             epx_version(), "failed", r->status.failed, "failure", r->status.failure, "backend", i->backend,
                             "transport", i->transport, "isa", i->isa, "top_k", i->top_k, "n_layers", r->n_layers, "n_experts",
                             r->n_experts, "max_context", max_context, "max_running", i->max_running);
    json_object_set_new(root, "ranks", ranks);
    json_object_set_new(root, "expert_rows", experts);
    json_object_set_new(root, "bounds_ns", bounds);
    return root;
}

epx_status_t epx_state_write(const epx_reading_t *r, const char *model_name, int max_context, epx_str_t *out) {
    json_t *root = state_json(r, model_name, max_context);
    char *text = json_dumps(root, JSON_COMPACT);
    epx_status_t s = text ? epx_str_append_z(out, text) : epx_fail(EPX_ERR_NOMEM, "no memory for the engine's state");
    free(text);
    json_decref(root);
    return s;
}

EPX_NATIVE_HANDLER(epx_native_state) {
    epx_reading_t r;
    epx_str_t out = {0};
    enum MHD_Result result;
    (void)url, (void)body, (void)out_call;
    if (epx_native_reading(h, conn, &r, &result) < 0) return result;
    epx_status_t s = epx_state_write(&r, h->model_name, h->max_tokens, &out);
    epx_reading_fini(&r);
    if (s >= 0) return epx_http_respond_json(conn, 200, &out);
    epx_str_fini(&out);
    return MHD_NO;
}

EPX_NATIVE_HANDLER(epx_native_metrics) {
    epx_reading_t r;
    epx_str_t out = {0};
    enum MHD_Result result;
    (void)url, (void)body, (void)out_call;
    if (epx_native_reading(h, conn, &r, &result) < 0) return result;
    epx_status_t s = epx_metrics_write(&r, h->model_name, &out);
    epx_reading_fini(&r);
    result = s < 0 ? MHD_NO : epx_native_respond_text(conn, 200, "text/plain; version=0.0.4; charset=utf-8", epx_str_z(&out));
    epx_str_fini(&out);
    return result;
}
