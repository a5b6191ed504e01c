/* What the server says of itself, cancelling by name, and the answers all native endpoints are made of. */
#include <stdlib.h>
#include <string.h>

#include "server/http/native.h"

/* ---- answers ---- */

enum MHD_Result epx_native_respond(struct MHD_Connection *conn, int status, json_t *root) {
    epx_str_t body = {0};
    char *text = root ? json_dumps(root, JSON_COMPACT | JSON_ENCODE_ANY) : NULL;
    epx_status_t s = text ? epx_str_append_z(&body, text) : EPX_ERR_NOMEM;
    free(text);
    json_decref(root);
    if (s >= 0) return epx_http_respond_json(conn, status, &body);
    epx_str_fini(&body);
    return MHD_NO;
}

enum MHD_Result epx_native_respond_text(struct MHD_Connection *conn, int status, const char *type, const char *text) {
    struct MHD_Response *r = MHD_create_response_from_buffer(strlen(text), (void *)(uintptr_t)text, MHD_RESPMEM_MUST_COPY);
    if (!r) return MHD_NO;
    MHD_add_response_header(r, "Content-Type", type);
    enum MHD_Result ok = MHD_queue_response(conn, (unsigned)status, r);
    MHD_destroy_response(r);
    return ok;
}

static enum MHD_Result plain(struct MHD_Connection *conn, int status, const char *text) {
    return epx_native_respond_text(conn, status, "text/plain; charset=utf-8", text);
}

epx_status_t epx_native_reading(epx_http_t *h, struct MHD_Connection *conn, epx_reading_t *out, enum MHD_Result *out_result) {
    epx_api_error_t err;
    if (epx_reading_take(h, out) >= 0) return EPX_OK;
    epx_status_t s = epx_api_fail(&err, 500, "internal_error", NULL, "%s", epx_error_message());
    *out_result = epx_http_respond_error(conn, &err);
    return s;
}

static epx_status_t check_names(const json_t *root, const char *const *names, epx_api_error_t *err) {
    const char *name;
    json_t *v;
    json_object_foreach((json_t *)root, name, v) {
        const char *const *at = names;
        while (*at && strcmp(*at, name) != 0) at++;
        if (!*at) return epx_api_fail(err, 400, "unknown_parameter", name, "%.60s: unknown parameter", name);
    }
    return EPX_OK;
}

epx_status_t epx_native_load(const epx_str_t *body, const char *const *names, json_t **out_root, epx_api_error_t *err) {
    EPX_TRY(epx_api_load_body(epx_str_z(body), body->n_bytes, out_root, err));
    epx_status_t s = check_names(*out_root, names, err);
    if (s < 0) json_decref(*out_root);
    return s;
}

/* ---- endpoints ---- */

EPX_NATIVE_HANDLER(epx_native_ping) {
    (void)h, (void)url, (void)body, (void)out_call;
    return plain(conn, 200, "");
}

EPX_NATIVE_HANDLER(epx_native_model_info) {
    const char *path = h->cfg.model_path ? h->cfg.model_path : h->model_name;
    (void)url, (void)body, (void)out_call;
    return epx_native_respond(conn, 200,
                              json_pack("{s:s, s:s, s:b, s:n, s:s, s:s, s:i}", "model_path", path, "tokenizer_path", path,
                                        "is_generation", 1, "preferred_sampling_params", "weight_version", "default",
                                        "served_model_name", h->model_name, "max_context_length", h->max_tokens));
}

static json_t *dp_state(const epx_reading_t *r, int dp) {
    const epx_rank_stats_t *st = epx_reading_dp(r, dp);
    return json_pack("{s:i, s:i, s:i, s:i, s:I, s:I, s:f, s:f, s:I, s:I, s:I}", "dp_rank", dp, "pid",
                     r->status.pids[dp * r->ranks_per_dp], "num_running_reqs", st->n_running, "num_queue_reqs", st->n_waiting,
                     "num_used_tokens", (json_int_t)st->kv_used_tokens, "max_total_num_tokens", (json_int_t)st->kv_tokens,
                     "token_usage", st->kv_tokens ? (double)st->kv_used_tokens / (double)st->kv_tokens : 0.0,
                     "last_gen_throughput", r->metrics[dp].tokens_per_s, "num_steps", (json_int_t)st->n_steps,
                     "prompt_tokens_total", (json_int_t)st->n_prompt_tokens, "generation_tokens_total",
                     (json_int_t)st->n_generated_tokens);
}

static json_t *server_info(epx_http_t *h, const epx_reading_t *r) {
    const epx_rank_info_t *i = &r->status.info;
    json_t *root = h->cfg.server_args ? json_loads(h->cfg.server_args, 0, NULL) : json_object(), *states = json_array();
    json_t *more =
        json_pack("{s:s, s:s, s:s, s:i, s:i, s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:I, s:I}", "version", epx_version(),
                  "status", r->status.failed ? "failed" : "ready", "served_model_name", h->model_name, "n_ranks", r->n_ranks,
                  "n_replicas", r->status.n_replicas, "exchange_backend", i->backend, "exchange_transport", i->transport,
                  "cpu_isa", i->isa, "num_layers", i->n_layers, "num_experts", i->n_experts, "num_experts_per_tok", i->top_k,
                  "max_running_requests_per_rank", i->max_running, "chunked_prefill_size_per_rank", i->chunk_tokens,
                  "max_total_num_tokens", (json_int_t)i->kv_tokens, "max_req_input_len", (json_int_t)h->max_tokens - 1);
    for (int dp = 0; dp < r->n_dp; dp++) json_array_append_new(states, dp_state(r, dp));
    json_object_update(root, more);
    json_decref(more);
    json_object_set_new(root, "internal_states", states);
    return root;
}

EPX_NATIVE_HANDLER(epx_native_server_info) {
    epx_reading_t r;
    enum MHD_Result result;
    (void)url, (void)body, (void)out_call;
    if (epx_native_reading(h, conn, &r, &result) < 0) return result;
    result = epx_native_respond(conn, 200, server_info(h, &r));
    epx_reading_fini(&r);
    return result;
}

EPX_NATIVE_HANDLER(epx_native_load_info) {
    epx_reading_t r;
    enum MHD_Result result;
    json_t *list = json_array();
    (void)url, (void)body, (void)out_call;
    if (epx_native_reading(h, conn, &r, &result) < 0) {
        json_decref(list);
        return result;
    }
    for (int dp = 0; dp < r.n_dp; dp++) {
        const epx_rank_stats_t *st = epx_reading_dp(&r, dp);
        json_array_append_new(list, json_pack("{s:i, s:i, s:i, s:I}", "dp_rank", dp, "num_reqs", st->n_running + st->n_waiting,
                                              "num_waiting_reqs", st->n_waiting, "num_tokens", (json_int_t)st->kv_used_tokens));
    }
    epx_reading_fini(&r);
    return epx_native_respond(conn, 200, list);
}

EPX_NATIVE_HANDLER(epx_native_flush_cache) {
    (void)url, (void)body, (void)out_call;
    pthread_mutex_lock(&h->lock);
    int n_live = h->n_live;
    pthread_mutex_unlock(&h->lock);
    if (n_live) return plain(conn, 400, "Not flushed: requests are waiting or running.\n");
    epx_cluster_flush_cache(h->cluster);
    return plain(conn, 200, "Cache flushed.\n");
}

EPX_NATIVE_HANDLER(epx_native_abort) {
    static const char *const names[] = {"rid", "abort_all", "abort_message", NULL};
    epx_api_error_t err;
    json_t *root, *rid, *all;
    (void)url, (void)out_call;
    if (epx_native_load(body, names, &root, &err) < 0) return epx_http_respond_error(conn, &err);
    rid = json_object_get(root, "rid");
    all = json_object_get(root, "abort_all");
    int is_rid = json_is_string(rid) && json_string_length(rid) > 0, n = 0;
    if ((all && !json_is_boolean(all) && !json_is_null(all)) || (!is_rid && !json_is_true(all))) {
        json_decref(root);
        epx_api_fail(&err, 400, "invalid_value", "rid", "rid: the name of a request is needed, or abort_all: true");
        return epx_http_respond_error(conn, &err);
    }
    n = epx_call_abort(h, json_is_true(all) ? NULL : json_string_value(rid));
    json_decref(root);
    return epx_native_respond(conn, 200, json_pack("{s:i}", "num_aborted", n));
}
