/* libepx_ucx.so: the wire over UCX's active messages. Endpoints report errors (UCP_ERR_HANDLING_MODE_PEER) and are closed by
 * force, so that a dead peer holds nobody up. Eager messages only: the receiver never has to ask for data. */
#include <ucp/api/ucp.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "transport/ucx/wire.h"

enum { AM_ID = 1 };
static const uint64_t CLOSE_NS = 500000000;

typedef struct {
    epx_wire_t *wire;
    int peer, lost;
    ucp_ep_h ep;
} link_t;

struct epx_wire {
    ucp_context_h context;
    ucp_worker_h worker;
    link_t *links; /* [n_peers] */
    int n_peers, efd, closing;
    epx_wire_recv_fn recv;
    epx_wire_lost_fn lost;
    void *ctx;
};

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int failed(char *error, size_t error_bytes, const char *call, ucs_status_t s) {
    snprintf(error, error_bytes, "%s: %s", call, ucs_status_string(s));
    return -1;
}

/* ---- callbacks of UCX ---- */

static ucs_status_t on_message(void *arg, const void *header, size_t header_bytes, void *data, size_t n_bytes,
                               const ucp_am_recv_param_t *param) {
    epx_wire_t *w = arg;
    if (!(param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)) w->recv(w->ctx, header, header_bytes, data, n_bytes);
    return UCS_OK;
}

static void on_error(void *arg, ucp_ep_h ep, ucs_status_t status) {
    link_t *l = arg;
    (void)ep, (void)status;
    if (l->lost) return;
    l->lost = 1;
    if (!l->wire->closing) l->wire->lost(l->wire->ctx, l->peer);
}

static void on_sent(void *request, ucs_status_t status, void *busy) {
    (void)status; /* an error is told by on_error() */
    __atomic_store_n((uint32_t *)busy, 0, __ATOMIC_RELEASE);
    ucp_request_free(request);
}

/* ---- open and close ---- */

static void close_wire(epx_wire_t *w) {
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_EP_CLOSE_FLAG_FORCE};
    uint64_t deadline = now_ns() + CLOSE_NS;
    if (w == NULL) return;
    w->closing = 1;
    for (int i = 0; w->links != NULL && i < w->n_peers; i++) {
        if (w->links[i].ep == NULL) continue;
        ucs_status_ptr_t r = ucp_ep_close_nbx(w->links[i].ep, &param);
        if (!UCS_PTR_IS_PTR(r)) continue;
        while (ucp_request_check_status(r) == UCS_INPROGRESS && now_ns() < deadline) ucp_worker_progress(w->worker);
        ucp_request_free(r);
    }
    if (w->worker != NULL) ucp_worker_destroy(w->worker);
    if (w->context != NULL) ucp_cleanup(w->context);
    free(w->links);
    free(w);
}

static int open_context(epx_wire_t *w, char *error, size_t error_bytes) {
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED,
                           .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP};
    ucp_config_t *config = NULL;
    ucs_status_t s = ucp_config_read(NULL, NULL, &config); /* UCX_* of the environment */
    if (s != UCS_OK) return failed(error, error_bytes, "ucp_config_read", s);
    if (getenv("UCX_TLS") == NULL) (void)ucp_config_modify(config, "TLS", "^sm"); /* no shared memory: that is libepx's own */
    s = ucp_init(&params, config, &w->context);
    ucp_config_release(config);
    return s == UCS_OK ? 0 : failed(error, error_bytes, "ucp_init", s);
}

static int open_worker(epx_wire_t *w, char *error, size_t error_bytes) {
    ucp_worker_params_t params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE, .thread_mode = UCS_THREAD_MODE_SERIALIZED};
    ucp_am_handler_param_t am = {.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                                               UCP_AM_HANDLER_PARAM_FIELD_ARG,
                                 .id = AM_ID,
                                 .cb = on_message,
                                 .arg = w};
    ucs_status_t s = ucp_worker_create(w->context, &params, &w->worker);
    if (s != UCS_OK) return failed(error, error_bytes, "ucp_worker_create", s);
    s = ucp_worker_set_am_recv_handler(w->worker, &am);
    if (s != UCS_OK) return failed(error, error_bytes, "ucp_worker_set_am_recv_handler", s);
    s = ucp_worker_get_efd(w->worker, &w->efd);
    return s == UCS_OK ? 0 : failed(error, error_bytes, "ucp_worker_get_efd", s);
}

static int open_wire(int n_peers, epx_wire_recv_fn recv, epx_wire_lost_fn lost, void *ctx, epx_wire_t **out_wire, char *error,
                     size_t error_bytes) {
    epx_wire_t *w = calloc(1, sizeof *w);
    if (w != NULL) w->links = calloc((size_t)n_peers, sizeof *w->links);
    if (w == NULL || w->links == NULL) {
        free(w);
        return failed(error, error_bytes, "calloc", UCS_ERR_NO_MEMORY);
    }
    w->n_peers = n_peers;
    w->recv = recv;
    w->lost = lost;
    w->ctx = ctx;
    for (int i = 0; i < n_peers; i++) w->links[i] = (link_t){w, i, 0, NULL};
    if (open_context(w, error, error_bytes) != 0 || open_worker(w, error, error_bytes) != 0) {
        close_wire(w);
        return -1;
    }
    *out_wire = w;
    return 0;
}

/* ---- addresses ---- */

static int address_of(epx_wire_t *w, void *out_address, size_t *inout_bytes, char *error, size_t error_bytes) {
    ucp_worker_attr_t attr = {.field_mask = UCP_WORKER_ATTR_FIELD_ADDRESS | UCP_WORKER_ATTR_FIELD_ADDRESS_FLAGS,
                              .address_flags = UCP_WORKER_ADDRESS_FLAG_NET_ONLY};
    ucs_status_t s = ucp_worker_query(w->worker, &attr);
    if (s != UCS_OK) return failed(error, error_bytes, "ucp_worker_query", s);
    int fits = attr.address_length <= *inout_bytes;
    if (fits) memcpy(out_address, attr.address, attr.address_length);
    else
        snprintf(error, error_bytes, "the worker address has %zu bytes, %zu fit; UCX_TLS or UCX_NET_DEVICES make it shorter",
                 attr.address_length, *inout_bytes);
    *inout_bytes = attr.address_length;
    ucp_worker_release_address(w->worker, attr.address);
    return fits ? 0 : -1;
}

static int connect_peer(epx_wire_t *w, int peer, const void *address, char *error, size_t error_bytes) {
    link_t *l = &w->links[peer];
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                            UCP_EP_PARAM_FIELD_ERR_HANDLER,
                              .address = address,
                              .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                              .err_handler = {on_error, l}};
    ucs_status_t s = ucp_ep_create(w->worker, &params, &l->ep);
    return s == UCS_OK ? 0 : failed(error, error_bytes, "ucp_ep_create", s);
}

/* ---- messages ---- */

static int send_message(epx_wire_t *w, int peer, const void *header, size_t header_bytes, const void *data, size_t n_bytes,
                        uint32_t *busy) {
    ucp_request_param_t param = {.op_attr_mask =
                                     UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS,
                                 .flags = UCP_AM_SEND_FLAG_EAGER,
                                 .cb.send = on_sent,
                                 .user_data = busy};
    link_t *l = &w->links[peer];
    if (l->lost || l->ep == NULL) return -1;
    __atomic_store_n(busy, 1, __ATOMIC_RELAXED);
    ucs_status_ptr_t r = ucp_am_send_nbx(l->ep, AM_ID, header, header_bytes, data, n_bytes, &param);
    if (UCS_PTR_IS_PTR(r)) return 0; /* on_sent() clears *busy */
    __atomic_store_n(busy, 0, __ATOMIC_RELEASE);
    return UCS_PTR_IS_ERR(r) ? -1 : 0;
}

static void progress(epx_wire_t *w) {
    for (int i = 0; i < 16 && ucp_worker_progress(w->worker); i++) continue;
}

static void *flush(epx_wire_t *w) {
    ucp_request_param_t param = {0};
    ucs_status_ptr_t r = ucp_worker_flush_nbx(w->worker, &param);
    return UCS_PTR_IS_PTR(r) ? r : NULL;
}

static int flushed(epx_wire_t *w, void *request) {
    ucp_worker_progress(w->worker);
    if (ucp_request_check_status(request) == UCS_INPROGRESS) return 0;
    ucp_request_free(request);
    return 1;
}

static void drop_flush(epx_wire_t *w, void *request) {
    (void)w;
    ucp_request_free(request);
}

static void drop_peer(epx_wire_t *w, int peer) {
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_EP_CLOSE_FLAG_FORCE};
    link_t *l = &w->links[peer];
    l->lost = 1;
    if (l->ep == NULL) return;
    ucs_status_ptr_t r = ucp_ep_close_nbx(l->ep, &param);
    l->ep = NULL;
    if (UCS_PTR_IS_PTR(r)) ucp_request_free(r); /* goes on by itself */
}

static int arm(epx_wire_t *w) { return ucp_worker_arm(w->worker) == UCS_OK ? w->efd : -1; }

const epx_wire_module_t *epx_wire_module(void);
__attribute__((visibility("default"))) const epx_wire_module_t *epx_wire_module(void) {
    static char library[64];
    static epx_wire_module_t m = {EPX_WIRE_ABI, library, open_wire,  address_of, connect_peer, send_message, progress,
                                  flush,        flushed, drop_flush, arm,        drop_peer,    close_wire};
    snprintf(library, sizeof library, "UCX %s", ucp_get_version_string());
    return &m;
}
