/* Encoding and decoding of frame payloads. Any thread. */
#include "server/front/wire.h"

#include <string.h>

/* Arrays are kept at 8-byte borders of the frame, so that they can be read in place. */
enum { ALIGN = 8 };

typedef struct {
    uint32_t version, config_bytes, info_bytes, stats_bytes;
} config_head_t;

static epx_status_t put(epx_str_t *out, const void *data, size_t n) {
    static const char zeros[ALIGN];
    EPX_TRY(epx_str_append(out, data, n));
    return epx_str_append(out, zeros, (ALIGN - n % ALIGN) % ALIGN);
}

/* NULL and "" differ: length -1 is NULL. */
static epx_status_t put_text(epx_str_t *out, const char *s) {
    int64_t n = s ? (int64_t)strlen(s) : -1;
    EPX_TRY(put(out, &n, sizeof n));
    return s ? put(out, s, (size_t)n + 1) : EPX_OK;
}

static const void *take(epx_wire_reader_t *r, size_t n) {
    const char *p = r->p;
    size_t whole = n + (ALIGN - n % ALIGN) % ALIGN;
    if (r->bad || whole < n || whole > r->n_bytes) {
        r->bad = 1;
        return NULL;
    }
    r->p += whole;
    r->n_bytes -= whole;
    return p;
}

static void get(epx_wire_reader_t *r, void *out, size_t n) {
    const void *p = take(r, n);
    if (p) memcpy(out, p, n);
    else memset(out, 0, n);
}

static const char *get_text(epx_wire_reader_t *r) {
    int64_t n;
    const char *p;
    get(r, &n, sizeof n);
    if (r->bad || n < 0) return NULL;
    p = take(r, (size_t)n + 1);
    if (p && p[n] != 0) r->bad = 1;
    return r->bad ? NULL : p;
}

static epx_status_t checked(const epx_wire_reader_t *r, const char *what) {
    return r->bad ? epx_fail(EPX_ERR_FORMAT, "%s frame is cut short", what) : EPX_OK;
}

static config_head_t own_head(void) {
    return (config_head_t){EPX_WIRE_VERSION, sizeof(epx_rank_config_t), sizeof(epx_rank_info_t), sizeof(epx_rank_stats_t)};
}

static epx_status_t check_head(const config_head_t *h, const char *what) {
    config_head_t own = own_head();
    if (memcmp(h, &own, sizeof own) == 0) return EPX_OK;
    return epx_fail(EPX_ERR_MISMATCH, "%s are different programs: wire version %u, here %d", what, h->version,
                    (int)EPX_WIRE_VERSION);
}

epx_status_t epx_wire_put_config(epx_str_t *out, const epx_rank_config_t *cfg, int rank) {
    config_head_t h = own_head();
    epx_rank_config_t c = *cfg;
    c.rank = rank;
    c.model_path = c.moe_a2a_backend = c.deepep_mode = c.load_format = c.isa = c.schedule_policy = NULL;
    c.transports = c.device = NULL;
    c.allgather = NULL;
    c.barrier = NULL;
    c.progress = NULL;
    c.boot_ctx = c.progress_ctx = NULL;
    EPX_TRY(put(out, &h, sizeof h));
    EPX_TRY(put(out, &c, sizeof c));
    EPX_TRY(put_text(out, cfg->model_path));
    EPX_TRY(put_text(out, cfg->moe_a2a_backend));
    EPX_TRY(put_text(out, cfg->deepep_mode));
    EPX_TRY(put_text(out, cfg->load_format));
    EPX_TRY(put_text(out, cfg->isa));
    EPX_TRY(put_text(out, cfg->schedule_policy));
    EPX_TRY(put_text(out, cfg->transports));
    return put_text(out, cfg->device);
}

epx_status_t epx_wire_get_config(const char *data, size_t n_bytes, epx_rank_config_t *out_cfg) {
    epx_wire_reader_t r = {data, n_bytes, 0};
    config_head_t h;
    get(&r, &h, sizeof h);
    EPX_TRY(checked(&r, "configuration"));
    EPX_TRY(check_head(&h, "front and worker"));
    get(&r, out_cfg, sizeof *out_cfg);
    out_cfg->model_path = get_text(&r);
    out_cfg->moe_a2a_backend = get_text(&r);
    out_cfg->deepep_mode = get_text(&r);
    out_cfg->load_format = get_text(&r);
    out_cfg->isa = get_text(&r);
    out_cfg->schedule_policy = get_text(&r);
    out_cfg->transports = get_text(&r);
    out_cfg->device = get_text(&r);
    return checked(&r, "configuration");
}

epx_status_t epx_wire_put_request(epx_str_t *out, const epx_request_t *req) {
    epx_request_t q = *req;
    q.prompt = q.stop_ids = NULL;
    q.adjust.bias = NULL;
    q.grammar = NULL;
    if (!req->grammar) q.grammar_bytes = SIZE_MAX; /* the mark of "none" */
    EPX_TRY(put(out, &q, sizeof q));
    EPX_TRY(put(out, req->prompt, sizeof *req->prompt * (size_t)req->n_prompt));
    EPX_TRY(put(out, req->stop_ids, sizeof *req->stop_ids * (size_t)req->n_stop_ids));
    EPX_TRY(put(out, req->adjust.bias, sizeof *req->adjust.bias * (size_t)req->adjust.n_bias));
    return req->grammar ? put(out, req->grammar, req->grammar_bytes) : EPX_OK;
}

epx_status_t epx_wire_get_request(const char *data, size_t n_bytes, epx_request_t *out_req) {
    epx_wire_reader_t r = {data, n_bytes, 0};
    get(&r, out_req, sizeof *out_req);
    if (out_req->n_prompt < 0 || out_req->n_stop_ids < 0 || out_req->adjust.n_bias < 0) r.bad = 1;
    EPX_TRY(checked(&r, "request"));
    out_req->prompt = take(&r, sizeof *out_req->prompt * (size_t)out_req->n_prompt);
    out_req->stop_ids = take(&r, sizeof *out_req->stop_ids * (size_t)out_req->n_stop_ids);
    out_req->adjust.bias = take(&r, sizeof *out_req->adjust.bias * (size_t)out_req->adjust.n_bias);
    if (out_req->grammar_bytes == SIZE_MAX) out_req->grammar_bytes = 0;
    else out_req->grammar = take(&r, out_req->grammar_bytes);
    return checked(&r, "request");
}

epx_status_t epx_wire_put_event(epx_str_t *out, const epx_event_t *ev) {
    epx_event_t e = *ev;
    e.error = NULL;
    e.top = NULL;
    EPX_TRY(put(out, &e, sizeof e));
    EPX_TRY(put(out, ev->top, sizeof *ev->top * (size_t)ev->n_top));
    return put_text(out, ev->error);
}

epx_status_t epx_wire_get_event(epx_wire_reader_t *r, epx_event_t *out_ev) {
    if (r->n_bytes == 0) return EPX_AGAIN;
    get(r, out_ev, sizeof *out_ev);
    if (out_ev->n_top < 0) r->bad = 1;
    out_ev->top = take(r, sizeof *out_ev->top * (size_t)out_ev->n_top);
    out_ev->error = get_text(r);
    return checked(r, "event");
}

epx_status_t epx_wire_put_hello(epx_str_t *out, const epx_wire_hello_t *hello) {
    config_head_t h = own_head();
    EPX_TRY(put(out, &h, sizeof h));
    EPX_TRY(put_text(out, hello->host));
    EPX_TRY(put_text(out, hello->model_path));
    return put_text(out, hello->facts);
}

epx_status_t epx_wire_get_hello(const char *data, size_t n_bytes, epx_wire_hello_t *out_hello) {
    epx_wire_reader_t r = {data, n_bytes, 0};
    config_head_t h;
    get(&r, &h, sizeof h);
    EPX_TRY(checked(&r, "hello"));
    EPX_TRY(check_head(&h, "the nodes"));
    out_hello->host = get_text(&r);
    out_hello->model_path = get_text(&r);
    out_hello->facts = get_text(&r);
    if (!out_hello->host || !out_hello->model_path || !out_hello->facts) r.bad = 1;
    return checked(&r, "hello");
}

epx_status_t epx_wire_put_failure(epx_str_t *out, epx_status_t status, const char *message) {
    int32_t number = status;
    EPX_TRY(put(out, &number, sizeof number));
    return put_text(out, message);
}

epx_status_t epx_wire_get_failure(const char *data, size_t n_bytes, epx_status_t *out_status, const char **out_message) {
    epx_wire_reader_t r = {data, n_bytes, 0};
    int32_t number;
    const char *text;
    get(&r, &number, sizeof number);
    text = get_text(&r);
    EPX_TRY(checked(&r, "failure"));
    *out_status = (epx_status_t)number;
    *out_message = text ? text : "";
    return EPX_OK;
}
