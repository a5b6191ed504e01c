/* HTTP client of the benchmarks and evaluations: many requests at a time on one thread, over libcurl. Server-sent events are
 * handed out one by one with the time of their arrival. Not for the server. One thread per fetcher. */
#ifndef EPX_APP_FETCH_H
#define EPX_APP_FETCH_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "base/str.h"

typedef struct epx_fetcher epx_fetcher_t;

/* One request and its answer. Zero-initialise, fill the first part, keep in place until on_done was called. */
typedef struct epx_fetch {
    const char *url;  /* borrowed; http:// or https:// */
    const char *body; /* borrowed; JSON to POST, NULL: GET */
    size_t n_body;
    /* The payload of one event of a 200 answer ("[DONE]" too), borrowed for the call; time of its arrival. NULL: text is
     * collected. */
    void (*on_event)(struct epx_fetch *f, const char *data, size_t n_bytes, uint64_t now_ns);
    void (*on_done)(struct epx_fetch *f); /* may start other requests, this one too */
    void *ctx;
    /* Results. */
    uint64_t start_ns; /* just before the request is sent */
    uint64_t last_ns;  /* of the last event, or of the end of an answer without events */
    int status;        /* of HTTP; 0: no answer */
    int is_stream;     /* the answer was text/event-stream */
    epx_str_t text;    /* the answer when it was no stream, or an error's; owned, kept until epx_fetch_fini */
    char error[256];   /* "": the answer was received whole, whatever its status */
    /* Private. */
    void *handle;
    epx_fetcher_t *owner;
    epx_str_t line; /* an event that has not come whole */
} epx_fetch_t;

/* Raises this process's limit of open files to what it may. max_connections: at a time, to one server.
 * EPX_ERR_NOMEM, EPX_ERR_OS. */
epx_status_t epx_fetcher_create(int max_connections, epx_fetcher_t **out_f);
void epx_fetcher_destroy(epx_fetcher_t *f);
/* Send. With OPENAI_API_KEY or EPX_API_KEY in the environment the header Authorization: Bearer is added. */
epx_status_t epx_fetch_start(epx_fetcher_t *f, epx_fetch_t *r);
/* Receive until the clock is at until_ns or until something happened; callbacks run in here. */
epx_status_t epx_fetcher_step(epx_fetcher_t *f, uint64_t until_ns);
/* Requests on their way. */
int epx_fetcher_n_live(const epx_fetcher_t *f);
/* Send one request and wait for its end. Negative only when it could not be sent; else see r->error and r->status. */
epx_status_t epx_fetch_wait(epx_fetcher_t *f, epx_fetch_t *r);
/* Free the answer's text; not while the request is on its way. */
void epx_fetch_fini(epx_fetch_t *r);

#endif
