/* The watcher thread, every EPX_HTTP_WATCH_MS: clients that left while their connection is suspended (MHD looks at a suspended
 * socket only when it is resumed), requests that arrive too slowly, streams that were silent for too long.
 * All under h->lock, which keeps the descriptors open: a suspended connection is not closed, and a listed one not before
 * remove_connection() had the lock. */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>

#include "base/clock.h"
#include "server/http/call.h"
#include "server/http/http_impl.h"

static const uint64_t second_ns = 1000000000u;

/* A half-closed client counts as gone too: it could not tell us anything else by closing. */
static int has_left(int fd) {
    struct pollfd p = {.fd = fd, .events = POLLRDHUP};
    return poll(&p, 1, 0) > 0 && (p.revents & (POLLRDHUP | POLLHUP | POLLERR));
}

static void watch_calls(epx_http_t *h, uint64_t now) {
    uint64_t keepalive_ns = (uint64_t)h->cfg.keepalive_s * second_ns;
    for (epx_call_t *c = h->calls; c; c = c->next) {
        if (!c->suspended) continue;
        if (has_left(c->fd)) c->gone = 1;
        else if (c->deadline_ns && now >= c->deadline_ns) c->tick = 1;
        else if (c->req.stream && now - c->quiet_since_ns >= keepalive_ns) c->tick = 1;
        if (c->gone || c->tick) epx_call_wake_locked(c);
    }
}

static void watch_connections(epx_http_t *h, uint64_t now) {
    uint64_t limit_ns = 2 * (uint64_t)h->cfg.client_timeout_s * second_ns;
    for (epx_http_conn_t *c = h->conns; c; c = c->next)
        if (c->receiving && now - c->since_ns >= limit_ns) {
            c->receiving = 0;
            shutdown(c->fd, SHUT_RDWR); /* MHD sees the end and closes */
        }
}

static void wait_a_round(epx_http_t *h) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += EPX_HTTP_WATCH_MS * 1000000L;
    until.tv_sec += until.tv_nsec / (long)second_ns;
    until.tv_nsec %= (long)second_ns;
    while (!h->stop_watcher && pthread_cond_timedwait(&h->changed, &h->lock, &until) != ETIMEDOUT) continue;
}

void *epx_http_watch_main(void *http) {
    epx_http_t *h = http;
    pthread_mutex_lock(&h->lock);
    while (!h->stop_watcher) {
        wait_a_round(h);
        uint64_t now = epx_now_ns();
        watch_calls(h, now);
        watch_connections(h, now);
    }
    pthread_mutex_unlock(&h->lock);
    return NULL;
}
