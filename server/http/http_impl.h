/* The server's own structures; for the files of this folder only. */
#ifndef EPX_SERVER_HTTP_IMPL_H
#define EPX_SERVER_HTTP_IMPL_H

#include <pthread.h>
#include <stdint.h>

#include <microhttpd.h>

#include "server/http/http_limits.h"
#include "server/http/http_server.h"
#include "server/http/metrics.h"
#include "server/http/openai_request.h"

enum { EPX_HTTP_N_BUCKETS = 1024 };

typedef struct epx_call epx_call_t;
struct epx_choice;

/* A TCP connection. In the server's list from accept to close, so that the watcher can end those that take too long. */
typedef struct epx_http_conn {
    struct epx_http_conn *prev, *next; /* [lock] */
    int fd;
    int receiving;     /* [lock] the client owes us a request */
    uint64_t since_ns; /* [lock] for how long */
} epx_http_conn_t;

/* An event of a request whose id is not known yet: submit has not returned. */
typedef struct epx_http_early {
    struct epx_http_early *next;
    epx_event_t ev; /* ev.error points to error, ev.top to top */
    char error[256];
    epx_top_t top[EPX_SAMPLE_MAX_TOP];
} epx_http_early_t;

struct epx_http {
    epx_http_config_t cfg;
    char *model_name;       /* owned */
    char *api_key;          /* owned; NULL: none */
    int64_t started_s;      /* Unix time */
    int max_tokens;         /* prompt + answer: context and KV capacity */
    size_t longest_token;   /* bytes, >= 1 */
    epx_cluster_t *cluster; /* borrowed from epx_http_start on */
    struct MHD_Daemon *daemon;
    pthread_t watcher;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* monotonic clock; waiters: the watcher, epx_http_stop */
    /* all below: [lock] */
    struct epx_choice *table[EPX_HTTP_N_BUCKETS]; /* choices the cluster owes an end, by id */
    epx_http_early_t *early;                      /* oldest first */
    int n_submitting;                             /* while 0 an unknown id is nobody's */
    int n_live;                                   /* choices admitted and not ended */
    size_t body_bytes;                            /* of all bodies being received */
    epx_call_t *calls;
    epx_http_conn_t *conns;
    uint64_t next_call;
    int draining; /* new requests are refused */
    int stopping, stop_watcher, stopped;
    int failed;
    char failure[1024];
    epx_metrics_t metrics;
    epx_expert_record_t record;
};

/* ---- exchange.c: one HTTP exchange, MHD's access handler and notifications ---- */
enum MHD_Result epx_http_on_access(void *http, struct MHD_Connection *conn, const char *url, const char *method,
                                   const char *version, const char *data, size_t *n_bytes, void **exchange);
void epx_http_on_completed(void *http, struct MHD_Connection *conn, void **exchange, enum MHD_RequestTerminationCode why);
void epx_http_on_connection(void *http, struct MHD_Connection *conn, void **socket_ctx, enum MHD_ConnectionNotificationCode what);

/* ---- auth.c ---- */
/* 1 when the path may be asked for with this Authorization header (NULL: absent). */
int epx_http_authorised(const epx_http_t *h, const char *url, const char *authorization);

/* ---- respond.c ---- */
/* A JSON answer; takes the contents of body, which is empty afterwards. */
enum MHD_Result epx_http_respond_json(struct MHD_Connection *conn, int status, epx_str_t *body);
enum MHD_Result epx_http_respond_error(struct MHD_Connection *conn, const epx_api_error_t *err);
/* 405 with the methods that are allowed. */
enum MHD_Result epx_http_respond_method(struct MHD_Connection *conn, const char *method, const char *url, const char *allow);
/* Queue the event stream of a call; the response holds a reference of the call. */
enum MHD_Result epx_http_respond_stream(struct MHD_Connection *conn, epx_call_t *call);

/* ---- routes.c ---- */
typedef struct {
    const char *path;  /* ends with '/': a prefix */
    const char *allow; /* methods */
    int has_body;
    /* Answer at once; or, with *out_call set, the exchange continues with the call. */
    enum MHD_Result (*handle)(epx_http_t *h, struct MHD_Connection *conn, const char *url, const epx_str_t *body,
                              epx_call_t **out_call);
} epx_http_route_t;
const epx_http_route_t *epx_http_find_route(const char *url);
int epx_http_route_allows(const epx_http_route_t *r, const char *method);

/* ---- generate.c: the POST endpoints ---- */
enum MHD_Result epx_http_post_chat(epx_http_t *h, struct MHD_Connection *conn, const char *url, const epx_str_t *body,
                                   epx_call_t **out_call);
enum MHD_Result epx_http_post_completions(epx_http_t *h, struct MHD_Connection *conn, const char *url, const epx_str_t *body,
                                          epx_call_t **out_call);
/* Go on with a call: suspend, answer, or start its stream. MHD_NO closes the connection. */
enum MHD_Result epx_http_continue_call(epx_call_t *call);

/* ---- watch.c: clients that left or are too slow, keep-alive of streams ---- */
void *epx_http_watch_main(void *http);

/* 1 and a 503 in *err when the server cannot generate: a rank died or the server is stopping. */
int epx_http_unavailable(epx_http_t *h, epx_api_error_t *err);

#endif
