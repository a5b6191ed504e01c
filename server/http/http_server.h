/* The HTTP face: OpenAI-compatible endpoints over libmicrohttpd. Owns its threads; the cluster, tokenizer and template are
 * borrowed for the server's life. */
#ifndef EPX_SERVER_HTTP_HTTP_SERVER_H
#define EPX_SERVER_HTTP_HTTP_SERVER_H

#include "base/status.h"
#include "engine/tokenizer/chat_template.h"
#include "engine/tokenizer/tokenizer.h"
#include "server/front/cluster.h"

typedef struct epx_http epx_http_t;

typedef struct {
    uint32_t size;
    const char *host;       /* numeric address; "127.0.0.1" */
    int port;               /* 0: any free port */
    const char *model_name; /* id in /v1/models */
    const epx_tokenizer_t *tokenizer;
    const epx_chat_template_t *chat_template; /* NULL: chat completions answer 400 saying so */
    epx_sampling_t default_sampling;          /* from generation_config.json; a request's fields override */
    int max_context, n_vocab;
    const char *api_key;     /* NULL: none; else every path but /health and /metrics needs "Authorization: Bearer KEY" */
    const char *model_path;  /* of /get_model_info; NULL: the name */
    const char *server_args; /* of /get_server_info: a JSON object, borrowed; NULL: none */
    /* Limits; 0: the default. */
    int max_connections;  /* 1024, and never more than the descriptors of this process allow */
    int max_live;         /* choices queued or generating; more are answered 429. 1024 */
    int client_timeout_s; /* silence of a client that owes us bytes or reads none. 30; a whole request may take twice that */
    int by_priority;      /* 1: requests may carry "priority" */
    int stream_interval;  /* tokens between two events of a stream after the first; 1 */
    int keepalive_s;      /* a stream is not silent for longer. 15 */
} epx_http_config_t;

/* Two steps, because the cluster needs the event callback before it exists and the server needs the cluster. */
epx_status_t epx_http_create(const epx_http_config_t *cfg, epx_http_t **out_h);
/* Event sink to give to epx_cluster_config_t (ctx: the epx_http_t). */
void epx_http_on_event(void *http, const epx_event_t *ev);
void epx_http_on_failure(void *http, const char *message);
/* Bind, listen, serve on own threads. *out_port: the port in use. EPX_ERR_OS names host, port and reason. */
epx_status_t epx_http_start(epx_http_t *h, epx_cluster_t *cluster, int *out_port);
/* Refuse new requests with 503 and wait until the live ones have ended, at most timeout_ms; also over when the cluster fails.
 * Returns the number of requests that are still live. */
int epx_http_drain(epx_http_t *h, int timeout_ms);
/* Stop accepting, end live streams with an error event, cancel their requests, join the server's threads; at most a few seconds.
 * Uses the cluster; afterwards only events may still arrive. The end of a server is, in this order: epx_http_stop,
 * epx_cluster_destroy, epx_http_destroy. Once; a server that was not started is left alone. */
void epx_http_stop(epx_http_t *h);
/* Stops first where that was not done, then frees. No event may arrive any more. NULL allowed. */
void epx_http_destroy(epx_http_t *h);

#endif
