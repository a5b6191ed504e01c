/* A wire for tests, built as libepx_ucx.so in a folder of its own: messages between ranks that are threads of one process,
 * delivered late and out of order. Most come at once, some up to a millisecond later, a few 40 milliseconds, and half of the
 * aborts, so that they outlive a failure and its recover. Nothing is lost. Knows nothing of UCX and is no model of its speed.
 * EPX_LATE_WIRE_SEED sets the delays. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "lib/transport/ucx/net.h"

typedef struct message {
    struct message *next;
    uint64_t due_ns;
    size_t header_bytes, n_bytes;
    char bytes[];
} message_t;

struct epx_wire {
    struct epx_wire *next;
    uint64_t id, *peer_ids; /* [n_peers] 0: not connected */
    int n_peers;
    epx_wire_recv_fn recv;
    void *ctx;
    message_t *in; /* by due_ns */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all below and of the queues */
static epx_wire_t *wires;
static uint64_t last_id, n_sent;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* splitmix64 of the number of the message. Under the lock. */
static uint64_t delay_ns(int is_abort) {
    const char *seed = getenv("EPX_LATE_WIRE_SEED");
    uint64_t z = ++n_sent * UINT64_C(0x9E3779B97F4A7C15) + (seed != NULL ? strtoull(seed, NULL, 0) : 0);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    z ^= z >> 31;
    if (is_abort ? z % 100 < 50 : z % 100 >= 99) return 40000000;
    return z % 100 < 80 ? 0 : (z >> 32) % 1000000;
}

static int open_wire(int n_peers, epx_wire_recv_fn recv, epx_wire_lost_fn lost, void *ctx, epx_wire_t **out_wire, char *error,
                     size_t error_bytes) {
    epx_wire_t *w = calloc(1, sizeof *w);
    (void)lost; /* threads of one process are never lost */
    if (w != NULL) w->peer_ids = calloc((size_t)n_peers, sizeof *w->peer_ids);
    if (w == NULL || w->peer_ids == NULL) {
        free(w);
        snprintf(error, error_bytes, "late wire: no memory");
        return -1;
    }
    w->n_peers = n_peers;
    w->recv = recv;
    w->ctx = ctx;
    pthread_mutex_lock(&lock);
    w->id = ++last_id;
    w->next = wires;
    wires = w;
    pthread_mutex_unlock(&lock);
    *out_wire = w;
    return 0;
}

static int address_of(epx_wire_t *w, void *out_address, size_t *inout_bytes, char *error, size_t error_bytes) {
    (void)error, (void)error_bytes;
    memcpy(out_address, &w->id, sizeof w->id);
    *inout_bytes = sizeof w->id;
    return 0;
}

static int connect_peer(epx_wire_t *w, int peer, const void *address, char *error, size_t error_bytes) {
    (void)error, (void)error_bytes;
    memcpy(&w->peer_ids[peer], address, sizeof w->peer_ids[peer]);
    return 0;
}

static void enqueue(epx_wire_t *to, message_t *m) {
    message_t **at = &to->in;
    ucx_head_t h;
    memcpy(&h, m->bytes, sizeof h);
    m->due_ns = now_ns() + delay_ns(h.kind == UCX_ABORT);
    while (*at != NULL && (*at)->due_ns <= m->due_ns) at = &(*at)->next;
    m->next = *at;
    *at = m;
}

static int send_message(epx_wire_t *w, int peer, const void *header, size_t header_bytes, const void *data, size_t n_bytes,
                        uint32_t *busy) {
    message_t *m = malloc(sizeof *m + header_bytes + n_bytes);
    __atomic_store_n(busy, 0, __ATOMIC_RELEASE); /* it has been copied */
    if (m == NULL) return -1;
    m->header_bytes = header_bytes;
    m->n_bytes = n_bytes;
    memcpy(m->bytes, header, header_bytes);
    if (n_bytes) memcpy(m->bytes + header_bytes, data, n_bytes);
    pthread_mutex_lock(&lock);
    epx_wire_t *to = wires;
    while (to != NULL && (w->peer_ids[peer] == 0 || to->id != w->peer_ids[peer])) to = to->next;
    if (to != NULL) enqueue(to, m);
    pthread_mutex_unlock(&lock);
    if (to == NULL) free(m); /* it has left, or was dropped */
    return 0;
}

/* The first message that is due. */
static message_t *take(epx_wire_t *w) {
    pthread_mutex_lock(&lock);
    message_t *m = w->in;
    if (m != NULL && m->due_ns <= now_ns()) w->in = m->next;
    else m = NULL;
    pthread_mutex_unlock(&lock);
    return m;
}

static void progress(epx_wire_t *w) {
    message_t *m;
    for (int i = 0; i < 16 && (m = take(w)) != NULL; i++) {
        w->recv(w->ctx, m->bytes, m->header_bytes, m->bytes + m->header_bytes, m->n_bytes);
        free(m);
    }
}

static void *flush(epx_wire_t *w) {
    (void)w;
    return NULL; /* what was sent needs this rank no more */
}

static int flushed(epx_wire_t *w, void *request) {
    (void)w, (void)request;
    return 1;
}

static void drop_flush(epx_wire_t *w, void *request) { (void)w, (void)request; }

static int arm(epx_wire_t *w) {
    (void)w;
    return -1;
}

static void drop_peer(epx_wire_t *w, int peer) { w->peer_ids[peer] = 0; }

static void close_wire(epx_wire_t *w) {
    if (w == NULL) return;
    pthread_mutex_lock(&lock);
    epx_wire_t **at = &wires;
    while (*at != w) at = &(*at)->next;
    *at = w->next;
    pthread_mutex_unlock(&lock);
    for (message_t *m = w->in, *next; m != NULL; m = next) next = m->next, free(m);
    free(w->peer_ids);
    free(w);
}

const epx_wire_module_t *epx_wire_module(void);
__attribute__((visibility("default"))) const epx_wire_module_t *epx_wire_module(void) {
    static const epx_wire_module_t m = {EPX_WIRE_ABI, "late wire of the tests",
                                        open_wire,    address_of,
                                        connect_peer, send_message,
                                        progress,     flush,
                                        flushed,      drop_flush,
                                        arm,          drop_peer,
                                        close_wire};
    return &m;
}
