/* One HTTP exchange on a connection: route, body within limits, hand-over to the endpoint. Runs on MHD's threads; a connection
 * stays with one thread. A response cannot be queued in mid-upload, so a body is refused by its announced length or drained. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/clock.h"
#include "server/http/call.h"
#include "server/http/http_impl.h"

typedef struct {
    const epx_http_route_t *route; /* NULL: none */
    epx_str_t body;
    size_t n_drained;
    int refused; /* err will be the answer, the body is dropped */
    epx_api_error_t err;
    epx_call_t *call; /* one reference */
} exchange_t;

static void set_receiving(struct MHD_Connection *conn, epx_http_t *h, int receiving) {
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(conn, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    epx_http_conn_t *c = info ? info->socket_context : NULL;
    if (!c) return;
    pthread_mutex_lock(&h->lock);
    c->receiving = receiving;
    c->since_ns = epx_now_ns();
    pthread_mutex_unlock(&h->lock);
}

static void drop_body(epx_http_t *h, exchange_t *x) {
    pthread_mutex_lock(&h->lock);
    h->body_bytes -= x->body.n_bytes;
    pthread_mutex_unlock(&h->lock);
    epx_str_fini(&x->body);
}

static int too_large(exchange_t *x) {
    x->refused = 1;
    epx_api_fail(&x->err, 413, "request_too_large", NULL, "the request body is larger than %d bytes", EPX_HTTP_MAX_BODY_BYTES);
    return 1;
}

static const char *header(struct MHD_Connection *conn, const char *name) {
    return MHD_lookup_connection_value(conn, MHD_HEADER_KIND, name);
}

static int announced_too_large(struct MHD_Connection *conn, exchange_t *x) {
    const char *length = header(conn, "Content-Length");
    errno = 0;
    if (!length || (strtoull(length, NULL, 10) <= EPX_HTTP_MAX_BODY_BYTES && errno == 0)) return 0;
    return too_large(x);
}

/* application/json, perhaps with charset=utf-8. */
static int is_json_type(const char *type) {
    static const char json[] = "application/json";
    if (!type || strncasecmp(type, json, sizeof json - 1) != 0) return 0;
    type += sizeof json - 1;
    type += strspn(type, " \t");
    if (*type == '\0') return 1;
    if (*type++ != ';') return 0;
    type += strspn(type, " \t");
    return *type == '\0' || strcasecmp(type, "charset=utf-8") == 0 || strcasecmp(type, "charset=\"utf-8\"") == 0;
}

/* What the request line and the headers already decide. */
static void check_head(epx_http_t *h, struct MHD_Connection *conn, const char *url, const char *method, exchange_t *x) {
    const char *type = header(conn, "Content-Type"), *coding = header(conn, "Content-Encoding");
    x->route = epx_http_find_route(url);
    x->refused = 1;
    if (!epx_http_authorised(h, url, header(conn, "Authorization"))) {
        epx_api_fail(&x->err, 401, "invalid_api_key", NULL, "this server needs its API key: Authorization: Bearer KEY");
    } else if (!x->route) {
        epx_api_fail(&x->err, 404, "not_found", NULL, "no such path: %.300s", url);
    } else if (!epx_http_route_allows(x->route, method)) {
        x->err.status = 405;
    } else if (x->route->has_body && !is_json_type(type)) {
        epx_api_fail(&x->err, 415, "unsupported_media_type", NULL, "Content-Type: must be application/json, got %.100s",
                     type ? type : "none");
    } else if (x->route->has_body && coding && strcasecmp(coding, "identity") != 0) {
        epx_api_fail(&x->err, 415, "unsupported_media_type", NULL, "Content-Encoding: must be absent or identity, got %.100s",
                     coding);
    } else {
        x->refused = 0;
    }
}

static enum MHD_Result begin(epx_http_t *h, struct MHD_Connection *conn, const char *url, const char *method, void **exchange) {
    exchange_t *x = calloc(1, sizeof *x);
    if (!x) return MHD_NO;
    *exchange = x;
    if (announced_too_large(conn, x)) return epx_http_respond_error(conn, &x->err);
    check_head(h, conn, url, method, x);
    return MHD_YES;
}

/* 1 when the bytes fit into what all connections may hold together. */
static int reserve(epx_http_t *h, size_t n) {
    pthread_mutex_lock(&h->lock);
    int fits = h->body_bytes + n <= EPX_HTTP_MAX_ALL_BODIES_BYTES;
    if (fits) h->body_bytes += n;
    pthread_mutex_unlock(&h->lock);
    return fits;
}

static void keep_body(epx_http_t *h, exchange_t *x, const char *data, size_t n) {
    if (x->body.n_bytes + n > EPX_HTTP_MAX_BODY_BYTES) {
        too_large(x);
    } else if (!reserve(h, n)) {
        x->refused = 1;
        epx_api_fail(&x->err, 429, "busy", NULL, "too many request bodies are being received");
    } else if (epx_str_append(&x->body, data, n) < 0) {
        pthread_mutex_lock(&h->lock);
        h->body_bytes -= n;
        pthread_mutex_unlock(&h->lock);
        x->refused = 1;
        epx_api_fail(&x->err, 500, "internal_error", NULL, "out of memory");
    }
    if (x->refused) drop_body(h, x);
}

static enum MHD_Result take_body(epx_http_t *h, exchange_t *x, const char *data, size_t *n_bytes) {
    size_t n = *n_bytes;
    *n_bytes = 0;
    if (!x->refused && x->route->has_body) keep_body(h, x, data, n);
    x->n_drained += n;
    return x->n_drained > EPX_HTTP_MAX_DRAIN_BYTES ? MHD_NO : MHD_YES;
}

static enum MHD_Result dispatch(epx_http_t *h, struct MHD_Connection *conn, const char *url, const char *method, exchange_t *x) {
    set_receiving(conn, h, 0);
    if (x->refused && x->err.status == 405) return epx_http_respond_method(conn, method, url, x->route->allow);
    if (x->refused) return epx_http_respond_error(conn, &x->err);
    enum MHD_Result ok = x->route->handle(h, conn, url, &x->body, &x->call);
    drop_body(h, x);
    return ok;
}

enum MHD_Result epx_http_on_access(void *http, struct MHD_Connection *conn, const char *url, const char *method,
                                   const char *version, const char *data, size_t *n_bytes, void **exchange) {
    exchange_t *x = *exchange;
    (void)version;
    if (!x) return begin(http, conn, url, method, exchange);
    if (*n_bytes > 0) return take_body(http, x, data, n_bytes);
    if (x->call) return epx_http_continue_call(x->call);
    return dispatch(http, conn, url, method, x);
}

void epx_http_on_completed(void *http, struct MHD_Connection *conn, void **exchange, enum MHD_RequestTerminationCode why) {
    exchange_t *x = *exchange;
    (void)why;
    if (!x) return;
    *exchange = NULL;
    if (x->call) {
        epx_call_detach(x->call);
        epx_call_unref(x->call);
    }
    drop_body(http, x);
    free(x);
    set_receiving(conn, http, 1);
}

static void add_connection(epx_http_t *h, struct MHD_Connection *conn, void **socket_ctx) {
    epx_http_conn_t *c = calloc(1, sizeof *c);
    if (!c) return; /* served, only without the watcher's limit on slow requests */
    c->fd = MHD_get_connection_info(conn, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
    c->receiving = 1;
    c->since_ns = epx_now_ns();
    *socket_ctx = c;
    pthread_mutex_lock(&h->lock);
    c->next = h->conns;
    if (c->next) c->next->prev = c;
    h->conns = c;
    pthread_mutex_unlock(&h->lock);
}

static void remove_connection(epx_http_t *h, epx_http_conn_t *c) {
    pthread_mutex_lock(&h->lock);
    if (c->prev) c->prev->next = c->next;
    else h->conns = c->next;
    if (c->next) c->next->prev = c->prev;
    pthread_mutex_unlock(&h->lock);
    free(c);
}

void epx_http_on_connection(void *http, struct MHD_Connection *conn, void **socket_ctx,
                            enum MHD_ConnectionNotificationCode what) {
    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
        add_connection(http, conn, socket_ctx);
    } else if (*socket_ctx) {
        remove_connection(http, *socket_ctx);
        *socket_ctx = NULL;
    }
}
