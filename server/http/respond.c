/* MHD responses: JSON, errors, event streams. Runs on MHD's threads. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/http/call.h"
#include "server/http/http_impl.h"
#include "server/http/openai_write.h"

enum MHD_Result epx_http_respond_json(struct MHD_Connection *conn, int status, epx_str_t *body) {
    struct MHD_Response *r = MHD_create_response_from_buffer(body->n_bytes, body->data, MHD_RESPMEM_MUST_FREE);
    if (!r) {
        epx_str_fini(body);
        return MHD_NO;
    }
    memset(body, 0, sizeof *body);
    MHD_add_response_header(r, "Content-Type", "application/json");
    if (status == 401) MHD_add_response_header(r, "WWW-Authenticate", "Bearer");
    if (status == 429) MHD_add_response_header(r, "Retry-After", "1");
    enum MHD_Result ok = MHD_queue_response(conn, (unsigned)status, r);
    MHD_destroy_response(r);
    return ok;
}

enum MHD_Result epx_http_respond_error(struct MHD_Connection *conn, const epx_api_error_t *err) {
    epx_str_t body = {0};
    if (epx_api_write_error(err, &body) >= 0) return epx_http_respond_json(conn, err->status, &body);
    epx_str_fini(&body);
    return MHD_NO;
}

enum MHD_Result epx_http_respond_method(struct MHD_Connection *conn, const char *method, const char *url, const char *allow) {
    epx_api_error_t err;
    epx_str_t body = {0};
    epx_api_fail(&err, 405, "method_not_allowed", NULL, "%.20s is not allowed on %.200s; allowed: %s", method, url, allow);
    if (epx_api_write_error(&err, &body) < 0) return MHD_NO;
    struct MHD_Response *r = MHD_create_response_from_buffer(body.n_bytes, body.data, MHD_RESPMEM_MUST_FREE);
    if (!r) {
        epx_str_fini(&body);
        return MHD_NO;
    }
    MHD_add_response_header(r, "Content-Type", "application/json");
    MHD_add_response_header(r, "Allow", allow);
    enum MHD_Result ok = MHD_queue_response(conn, 405, r);
    MHD_destroy_response(r);
    return ok;
}

/* An error after the first byte: an event, then the usual end. */
static void write_error_once(epx_call_t *c) {
    if (!c->has_error) return;
    c->has_error = 0;
    c->ended = 1;
    if (epx_api_write_error_event(&c->error, &c->out) >= 0) epx_str_append_z(&c->out, "data: [DONE]\n\n");
}

static ssize_t take_out(epx_call_t *c, char *buf, size_t max) {
    size_t n = c->out.n_bytes - c->out_off;
    if (n > max) n = max;
    memcpy(buf, c->out.data + c->out_off, n);
    c->out_off += n;
    if (c->out_off == c->out.n_bytes) {
        epx_str_clear(&c->out);
        c->out_off = 0;
    }
    return (ssize_t)n;
}

/* MHD asks for bytes: what is there, else suspend. */
static ssize_t read_stream(void *call, uint64_t pos, char *buf, size_t max) {
    epx_call_t *c = call;
    (void)pos;
    for (;;) {
        if (c->out_off < c->out.n_bytes) return take_out(c, buf, max);
        if (c->ended) return MHD_CONTENT_READER_END_OF_STREAM;
        epx_call_pump(c);
        write_error_once(c);
        if (c->out_off < c->out.n_bytes || c->ended) continue;
        /* Not END_WITH_ERROR: with epoll libmicrohttpd (0.9.75) forgets such a connection until its timeout. The end that it
         * writes to a client that is gone fails at once and closes. */
        if (c->client_left) return MHD_CONTENT_READER_END_OF_STREAM;
        if (epx_call_suspend(c)) return 0;
    }
}

static void free_stream(void *call) { epx_call_unref(call); }

enum MHD_Result epx_http_respond_stream(struct MHD_Connection *conn, epx_call_t *call) {
    epx_call_ref(call);
    struct MHD_Response *r =
        MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, EPX_HTTP_STREAM_BLOCK_BYTES, read_stream, call, free_stream);
    if (!r) {
        epx_call_unref(call);
        return MHD_NO;
    }
    call->streaming = 1;
    MHD_add_response_header(r, "Content-Type", "text/event-stream");
    MHD_add_response_header(r, "Cache-Control", "no-cache");
    MHD_add_response_header(r, "X-Accel-Buffering", "no"); /* nginx: do not collect the stream */
    enum MHD_Result ok = MHD_queue_response(conn, 200, r);
    MHD_destroy_response(r);
    return ok;
}
