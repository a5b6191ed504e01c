/* The expert distribution record: rows by layer and expert between a start and a stop, taken from the counters that the ranks
 * report. /metrics, /engine/state and the web page read the same counters and are not disturbed by it. */
#include <stdlib.h>
#include <string.h>

#include "server/http/native.h"

/* The record's arrays for n counters. h->lock held. */
static int make_room(epx_expert_record_t *r, size_t n) {
    if (r->n == n && r->base) return 1;
    epx_expert_record_fini(r);
    r->base = calloc(n + 1, sizeof *r->base);
    r->rows = calloc(n + 1, sizeof *r->rows);
    r->n = n;
    if (r->base && r->rows) return 1;
    epx_expert_record_fini(r);
    return 0;
}

/* Add what came since base. h->lock held. */
static void collect(epx_expert_record_t *r, const uint64_t *now) {
    for (size_t i = 0; i < r->n; i++) r->rows[i] += now[i] - r->base[i];
    memcpy(r->base, now, r->n * sizeof *r->base);
}

static enum MHD_Result text(struct MHD_Connection *conn, int status, const char *message) {
    epx_api_error_t err;
    if (status == 200) return epx_native_respond_text(conn, status, "text/plain; charset=utf-8", message);
    epx_api_fail(&err, status, status == 400 ? "invalid_state" : "internal_error", NULL, "%s", message);
    return epx_http_respond_error(conn, &err);
}

EPX_NATIVE_HANDLER(epx_native_record_start) {
    epx_reading_t now;
    enum MHD_Result result;
    (void)url, (void)body, (void)out_call;
    if (epx_native_reading(h, conn, &now, &result) < 0) return result;
    size_t n = (size_t)now.n_layers * (size_t)now.n_experts;
    pthread_mutex_lock(&h->lock);
    int was_on = h->record.is_on, ok = was_on || make_room(&h->record, n);
    if (ok && !was_on) {
        h->record.is_on = h->record.has_any = 1;
        memcpy(h->record.base, now.expert_rows, n * sizeof *now.expert_rows);
    }
    pthread_mutex_unlock(&h->lock);
    epx_reading_fini(&now);
    if (!ok) return text(conn, 500, "out of memory");
    if (was_on) return text(conn, 400, "the expert distribution is being recorded already");
    return text(conn, 200, "Start recording expert distribution.\n");
}

EPX_NATIVE_HANDLER(epx_native_record_stop) {
    epx_reading_t now;
    enum MHD_Result result;
    (void)url, (void)body, (void)out_call;
    if (epx_native_reading(h, conn, &now, &result) < 0) return result;
    pthread_mutex_lock(&h->lock);
    int was_on = h->record.is_on;
    if (was_on) collect(&h->record, now.expert_rows);
    h->record.is_on = 0;
    pthread_mutex_unlock(&h->lock);
    epx_reading_fini(&now);
    if (!was_on) return text(conn, 400, "the expert distribution is not being recorded");
    return text(conn, 200, "Stop recording expert distribution.\n");
}

static json_t *as_json(const epx_expert_record_t *r, int n_layers, int n_experts) {
    json_t *layers = json_array();
    for (int l = 0; l < n_layers; l++) {
        json_t *row = json_array();
        for (int e = 0; e < n_experts; e++) json_array_append_new(row, json_integer((json_int_t)r->rows[l * n_experts + e]));
        json_array_append_new(layers, row);
    }
    return json_pack("{s:i, s:i, s:b, s:o}", "num_layers", n_layers, "num_experts", n_experts, "recording", r->is_on,
                     "logical_count", layers);
}

/* The counts are the answer, not a file; they begin at zero afterwards, also while the recording goes on. */
EPX_NATIVE_HANDLER(epx_native_record_dump) {
    epx_reading_t now;
    enum MHD_Result result;
    json_t *out = NULL;
    (void)url, (void)body, (void)out_call;
    if (epx_native_reading(h, conn, &now, &result) < 0) return result;
    pthread_mutex_lock(&h->lock);
    if (h->record.is_on) collect(&h->record, now.expert_rows);
    if (h->record.has_any) {
        out = as_json(&h->record, now.n_layers, now.n_experts);
        memset(h->record.rows, 0, h->record.n * sizeof *h->record.rows);
        h->record.has_any = h->record.is_on;
    }
    pthread_mutex_unlock(&h->lock);
    epx_reading_fini(&now);
    if (!out) return text(conn, 400, "nothing was recorded; start with /start_expert_distribution_record");
    return epx_native_respond(conn, 200, out);
}
