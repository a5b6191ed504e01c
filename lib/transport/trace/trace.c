/* Transport "trace": the transport of a host, with each of the four calls written down: begin, time waited, the rest. On close
 * a file of Chrome's trace event format (JSON array) is written to EPX_TRACE_DIR, one for each rank and group. Step path: two
 * clock reads and one record a call; the buffer keeps the first TRACE_EVENTS calls. */
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "spi/transport.h"

enum { TRACE_EVENTS = 1 << 16 };

typedef struct {
    const char *call;
    int channel;
    uint64_t epoch, begin_ns, wait_ns, end_ns;
} event_t;

typedef struct {
    epx_net_t net;
    epx_net_t *inner;
    event_t *events;
    size_t n_events;
    uint64_t begin_ns, wait_before_ns;
} trace_net_t;

static epx_status_t can(const epx_peer_t *peers, int n_ranks) { return epx_transport_of_host()->can(peers, n_ranks); }

static epx_status_t open_net(int rank, int n_ranks, const epx_peer_t *peers, epx_net_t **out_net, void *card) {
    trace_net_t *n = calloc(1, sizeof *n);
    event_t *events = malloc(TRACE_EVENTS * sizeof *events);
    epx_status_t s =
        n == NULL || events == NULL ? epx_fail(EPX_ERR_NOMEM, "trace: no memory for %d events", TRACE_EVENTS) : EPX_OK;
    if (s >= 0) s = epx_transport_of_host()->open(rank, n_ranks, peers, &n->inner, card);
    if (s < 0) {
        free(events);
        free(n);
        return s;
    }
    n->inner->transport = epx_transport_of_host();
    n->net = *n->inner;
    n->events = events;
    *out_net = &n->net;
    return EPX_OK;
}

/* The connection below knows the same masks and control slab. */
static epx_net_t *inner_of(epx_net_t *net) {
    epx_net_t *inner = ((trace_net_t *)net)->inner;
    if (inner->masked != net->masked) inner->masked = net->masked;
    if (inner->ctl != net->ctl) inner->ctl = net->ctl;
    return inner;
}

static epx_status_t connect_net(epx_net_t *net, const void *cards, uint64_t timeout_ns) {
    epx_net_t *inner = inner_of(net);
    return inner->transport->connect(inner, cards, timeout_ns);
}

/* One complete event: name, microseconds from begin_ns on. */
static void write_event(FILE *f, const char *name, const event_t *e, int rank, uint64_t begin_ns, uint64_t ns, int first) {
    fprintf(f,
            "%s{\"name\":\"%s\",\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f,\"args\":{\"epoch\":%" PRIu64
            ",\"channel\":%d}}",
            first ? "" : ",\n", name, (int)getpid(), rank, (double)begin_ns * 1e-3, (double)ns * 1e-3, e->epoch, e->channel);
}

static void write_trace(const trace_net_t *n) {
    static atomic_uint serial;
    const char *dir = getenv("EPX_TRACE_DIR");
    char path[4096];
    if (n->n_events == 0) return;
    snprintf(path, sizeof path, "%s/epx-trace-%d-%d-%u.json", dir == NULL ? "." : dir, (int)getpid(), n->net.rank,
             atomic_fetch_add(&serial, 1));
    FILE *f = fopen(path, "we");
    if (f == NULL) {
        epx_log(EPX_LOG_ERROR, "trace: cannot write %s", path);
        return;
    }
    fputs("[", f);
    for (size_t i = 0; i < n->n_events; i++) {
        const event_t *e = &n->events[i];
        write_event(f, e->call, e, n->net.rank, e->begin_ns, e->end_ns - e->begin_ns, i == 0);
        if (e->wait_ns) write_event(f, "wait", e, n->net.rank, e->begin_ns, e->wait_ns, 0);
        write_event(f, "copy", e, n->net.rank, e->begin_ns + e->wait_ns, e->end_ns - e->begin_ns - e->wait_ns, 0);
    }
    fputs("]\n", f);
    if (fclose(f) != 0) epx_log(EPX_LOG_ERROR, "trace: cannot write %s", path);
}

static void close_net(epx_net_t *net) {
    trace_net_t *n = (trace_net_t *)net;
    if (n == NULL) return;
    write_trace(n);
    n->inner->transport->close(n->inner);
    free(n->events);
    free(n);
}

static epx_status_t slab_check(epx_net_t *net, size_t bytes, int n_slabs) {
    epx_net_t *inner = inner_of(net);
    return inner->transport->slab_check(inner, bytes, n_slabs);
}

static epx_status_t slab_alloc(epx_net_t *net, size_t bytes, epx_slab_t **out_slab) {
    epx_net_t *inner = inner_of(net);
    return inner->transport->slab_alloc(inner, bytes, out_slab);
}

static epx_status_t slab_share(epx_net_t *net, epx_slab_t *slab, uint64_t timeout_ns) {
    epx_net_t *inner = inner_of(net);
    return inner->transport->slab_share(inner, slab, timeout_ns);
}

static void slab_free(epx_net_t *net, epx_slab_t *slab) {
    epx_net_t *inner = inner_of(net);
    inner->transport->slab_free(inner, slab);
}

static int dead_rank(epx_net_t *net) {
    epx_net_t *inner = inner_of(net);
    return inner->transport->dead_rank(inner);
}

/* wait_ns grows over the plan's life; what it has grown by in this call was waiting, which comes first in a receiving half. */
static void at_call(epx_net_t *net, const char *call, int channel, uint64_t epoch, uint64_t wait_ns, int begins) {
    trace_net_t *n = (trace_net_t *)net;
    if (begins) {
        n->begin_ns = epx_now_ns();
        n->wait_before_ns = wait_ns;
    } else if (n->n_events < TRACE_EVENTS) {
        n->events[n->n_events++] = (event_t){call, channel, epoch, n->begin_ns, wait_ns - n->wait_before_ns, epx_now_ns()};
    }
}

extern const epx_transport_t epx_transport_trace;
const epx_transport_t epx_transport_trace = {
    .name = "trace",
    .detail = "wraps the transport of a host: writes a Chrome trace of the four calls, wait and copy apart, to EPX_TRACE_DIR",
    .links = EPX_LINK_SELF | EPX_LINK_MAPPED,
    .can = can,
    .open = open_net,
    .connect = connect_net,
    .close = close_net,
    .slab_check = slab_check,
    .slab_alloc = slab_alloc,
    .slab_share = slab_share,
    .slab_free = slab_free,
    .dead_rank = dead_rank,
    .at_call = at_call,
};
