/* Transport "shm": ranks on one host, processes or threads. One memfd a slab, passed over Unix sockets; nothing has a name.
 * Rank i accepts from higher ranks and connects to lower ones. Step path: dead_rank() only, one poll(). */
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/atomic.h"
#include "base/clock.h"
#include "base/status.h"
#include "spi/memory.h"
#include "spi/transport.h"
#include "spi/wait.h"
#include "transport/shm/shm_map.h"
#include "transport/shm/shm_sock.h"

enum { POLL_BATCH = 64 };
/* How often a rank that waits in set-up looks whether its peers are alive. */
static const uint64_t LOOK_NS = 100000000;

typedef struct {
    epx_net_t net;
    int listen_fd;
    shm_card_t card;
    uint64_t serial; /* of the last slab shared, to notice calls out of order */
    int *fds;        /* [W]; -1 for the own rank */
} shm_net_t;

typedef struct {
    epx_slab_t slab;
    uint64_t serial;
    shm_map_t **maps; /* [W] */
} shm_slab_t;

/* How a rank hands its slab to one peer; the descriptor travels beside it. */
typedef struct {
    uint64_t serial, bytes;
    shm_map_t *map; /* for a rank of the same process, with a reference taken for it; else NULL */
} slab_message_t;

_Static_assert(sizeof(shm_card_t) <= EPX_NET_CARD_BYTES, "card");

static int same_process(const epx_peer_t *a, const epx_peer_t *b) {
    return a->pid == b->pid && memcmp(a->process, b->process, sizeof a->process) == 0;
}

static epx_status_t can(const epx_peer_t *peers, int n_ranks) {
    for (int i = 1; i < n_ranks; i++)
        if (memcmp(peers[i].host, peers[0].host, sizeof peers[0].host) != 0)
            return epx_fail(EPX_ERR_UNSUPPORTED,
                            "transport shm joins ranks of one host; world ranks %d and %d are on different hosts or "
                            "network namespaces",
                            peers[0].world_rank, peers[i].world_rank);
    return EPX_OK;
}

static int n_cores(void) {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : (int)sysconf(_SC_NPROCESSORS_ONLN);
}

/* Close all sockets: peers see that nothing more will come. */
static void hang_up(shm_net_t *n) {
    for (int r = 0; n->fds != NULL && r < n->net.n_ranks; r++) {
        if (n->fds[r] >= 0) close(n->fds[r]);
        n->fds[r] = -1;
    }
    if (n->listen_fd >= 0) close(n->listen_fd);
    n->listen_fd = -1;
}

static void close_net(epx_net_t *net) {
    shm_net_t *n = (shm_net_t *)net;
    if (n == NULL) return;
    hang_up(n);
    free(n->fds);
    free(n);
}

static epx_status_t open_net(int rank, int n_ranks, const epx_peer_t *peers, epx_net_t **out_net, void *card) {
    epx_status_t s;
    shm_net_t *n = calloc(1, sizeof *n);
    if (n == NULL) return epx_fail(EPX_ERR_NOMEM, "shm: no memory for %zu bytes", sizeof *n);
    n->listen_fd = -1;
    n->net.rank = rank;
    n->net.n_ranks = n_ranks;
    n->net.peers = peers;
    n->net.may_spin = n_ranks <= n_cores();
    n->fds = malloc((size_t)n_ranks * sizeof *n->fds);
    if (n->fds == NULL) {
        s = epx_fail(EPX_ERR_NOMEM, "shm: no memory for %d sockets", n_ranks);
        goto err_net;
    }
    for (int r = 0; r < n_ranks; r++) n->fds[r] = -1;
    EPX_TRY_GOTO(s, shm_listen(n_ranks, &n->card, &n->listen_fd), err_net);
    memcpy(card, &n->card, sizeof n->card);
    *out_net = &n->net;
    return EPX_OK;
err_net:
    close_net(&n->net);
    return s;
}

static int left_group(const epx_net_t *net, int r) {
    return net->ctl != NULL && epx_load_acquire_u32(&epx_slab_head(net->ctl, r)->left);
}

static int dead_rank(epx_net_t *net) {
    shm_net_t *n = (shm_net_t *)net;
    for (int first = 0; first < net->n_ranks; first += POLL_BATCH) {
        struct pollfd p[POLL_BATCH];
        int m = net->n_ranks - first < POLL_BATCH ? net->n_ranks - first : POLL_BATCH;
        for (int i = 0; i < m; i++) p[i] = (struct pollfd){n->fds[first + i], POLLRDHUP, 0};
        if (poll(p, (nfds_t)m, 0) <= 0) continue;
        for (int i = 0; i < m; i++)
            if ((p[i].revents & (POLLHUP | POLLERR | POLLRDHUP)) && !left_group(net, first + i) &&
                !(net->masked != NULL && net->masked[first + i]))
                return first + i;
    }
    return -1;
}

/* For waits of set-up that need somebody else than the dead. */
static epx_status_t check_peers(shm_net_t *n) {
    int dead = dead_rank(&n->net);
    if (dead < 0) return EPX_OK;
    return epx_fail(EPX_ERR_PEER, "rank %d (pid %lld) has died or given up", dead, (long long)n->net.peers[dead].pid);
}

static shm_card_t card_of(const void *cards, int r) {
    shm_card_t card;
    memcpy(&card, (const char *)cards + (size_t)r * EPX_NET_CARD_BYTES, sizeof card);
    return card;
}

/* Take connections until that many higher ranks are there or look_ns has come; *inout_n counts them. */
static epx_status_t accept_until(shm_net_t *n, uint64_t look_ns, uint64_t deadline, int *inout_n) {
    while (*inout_n > 0) {
        int r = -1, fd = -1;
        epx_status_t s = shm_accept(n->listen_fd, &n->card, look_ns, deadline, &r, &fd);
        if (s == EPX_AGAIN) return EPX_OK;
        if (s < 0) return s;
        if (r <= n->net.rank || r >= n->net.n_ranks || n->fds[r] >= 0) {
            close(fd);
            return epx_fail(EPX_ERR_FORMAT, "shm: connection from rank %d, expected %d to %d once each", r, n->net.rank + 1,
                            n->net.n_ranks - 1);
        }
        n->fds[r] = fd;
        --*inout_n;
    }
    return EPX_OK;
}

/* A higher rank that is not connected and does not listen any more, or -1. It has died or given up, or has connected since: a
 * rank connects to all lower ranks before it closes its listening socket. */
static int silent_rank(const shm_net_t *n, const void *cards) {
    for (int r = n->net.rank + 1; r < n->net.n_ranks; r++) {
        shm_card_t card = card_of(cards, r);
        if (n->fds[r] < 0 && !shm_listens(&card)) return r;
    }
    return -1;
}

static epx_status_t accept_higher(shm_net_t *n, const void *cards, uint64_t deadline) {
    int missing = n->net.n_ranks - 1 - n->net.rank;
    for (;;) {
        uint64_t now = epx_now_ns(), look = now + LOOK_NS;
        EPX_TRY(accept_until(n, look < deadline ? look : deadline, deadline, &missing));
        if (missing == 0) return EPX_OK;
        EPX_TRY(check_peers(n));
        int r = silent_rank(n, cards);
        if (r >= 0) EPX_TRY(accept_until(n, 0, deadline, &missing)); /* its connection may wait in the queue */
        if (r >= 0 && n->fds[r] < 0)
            return epx_fail(EPX_ERR_PEER, "rank %d (pid %lld) has died or given up before it connected to rank %d", r,
                            (long long)n->net.peers[r].pid, n->net.rank);
        if (now >= deadline)
            return epx_fail(EPX_ERR_TIMEOUT, "shm: rank %d waits for connections of %d ranks that did not come in time",
                            n->net.rank, missing);
    }
}

static epx_status_t connect_all(shm_net_t *n, const void *cards, uint64_t deadline) {
    const epx_net_t *net = &n->net;
    for (int r = 0; r < net->rank; r++) {
        shm_card_t card = card_of(cards, r);
        epx_status_t s = shm_connect(&card, net->rank, deadline, &n->fds[r]);
        if (s < 0) return epx_fail_context(s, "rank %d to rank %d (pid %lld)", net->rank, r, (long long)net->peers[r].pid);
    }
    return accept_higher(n, cards, deadline);
}

static epx_status_t connect_net(epx_net_t *net, const void *cards, uint64_t timeout_ns) {
    shm_net_t *n = (shm_net_t *)net;
    epx_status_t s = connect_all(n, cards, epx_now_ns() + timeout_ns);
    /* Peers need not wait for a rank that has failed by itself; of a lost peer they learn as this rank did, and name it. */
    if (s < 0 && s != EPX_ERR_PEER && s != EPX_ERR_TIMEOUT) hang_up(n);
    if (s < 0) return s;
    close(n->listen_fd);
    n->listen_fd = -1;
    return EPX_OK;
}

static epx_status_t slab_check(epx_net_t *net, size_t bytes, int n_slabs) {
    (void)net;
    return epx_memory_check(bytes, n_slabs);
}

static void slab_free(epx_net_t *net, epx_slab_t *slab) {
    shm_slab_t *s = (shm_slab_t *)slab;
    (void)net;
    if (s == NULL) return;
    for (int r = 0; s->maps != NULL && r < slab->n_ranks; r++) shm_map_unref(s->maps[r]);
    free(s->maps);
    free(slab->base);
    free(s);
}

static epx_status_t slab_alloc(epx_net_t *net, size_t bytes, epx_slab_t **out_slab) {
    epx_status_t st;
    shm_slab_t *s = calloc(1, sizeof *s);
    if (s == NULL) return epx_fail(EPX_ERR_NOMEM, "shm: no memory for %zu bytes", sizeof *s);
    s->slab.rank = net->rank;
    s->slab.n_ranks = net->n_ranks;
    s->slab.bytes = bytes;
    s->maps = calloc((size_t)net->n_ranks, sizeof *s->maps);
    s->slab.base = calloc((size_t)net->n_ranks, sizeof *s->slab.base);
    if (s->maps == NULL || s->slab.base == NULL) {
        st = epx_fail(EPX_ERR_NOMEM, "shm: no memory for %d mappings", net->n_ranks);
        goto err_slab;
    }
    EPX_TRY_GOTO(st, shm_map_create(bytes, &s->maps[net->rank]), err_slab);
    s->slab.base[net->rank] = s->maps[net->rank]->base;
    *out_slab = &s->slab;
    return EPX_OK;
err_slab:
    slab_free(net, &s->slab);
    return st;
}

static epx_status_t send_slab(shm_net_t *n, shm_slab_t *s, int peer) {
    shm_map_t *own = s->maps[n->net.rank];
    int thread = same_process(&n->net.peers[peer], &n->net.peers[n->net.rank]);
    slab_message_t m = {s->serial, s->slab.bytes, thread ? own : NULL};
    if (thread) shm_map_ref(own); /* the receiver's reference */
    epx_status_t st = shm_send(n->fds[peer], &m, sizeof m, thread ? -1 : own->fd);
    if (st < 0 && thread) shm_map_unref(own);
    return st;
}

static epx_status_t receive_message(shm_net_t *n, int peer, uint64_t deadline, void *m, size_t n_bytes, int *out_fd) {
    for (;;) {
        uint64_t now = epx_now_ns(), look = now + LOOK_NS;
        epx_status_t st = shm_recv(n->fds[peer], m, n_bytes, look < deadline ? look : deadline, out_fd);
        if (st != EPX_ERR_TIMEOUT || now >= deadline) return st;
        EPX_TRY(check_peers(n));
    }
}

static epx_status_t receive_slab(shm_net_t *n, shm_slab_t *s, int peer, uint64_t deadline) {
    slab_message_t m;
    int fd = -1;
    EPX_TRY(receive_message(n, peer, deadline, &m, sizeof m, &fd));
    epx_status_t st = EPX_OK;
    if (same_process(&n->net.peers[peer], &n->net.peers[n->net.rank])) s->maps[peer] = m.map;
    else if (fd >= 0) st = shm_map_open(fd, s->slab.bytes, &s->maps[peer]);
    else st = epx_fail(EPX_ERR_FORMAT, "shm: no descriptor came with a slab");
    if (fd >= 0) close(fd);
    if (st < 0) return st;
    if (m.serial != s->serial || m.bytes != s->slab.bytes)
        return epx_fail(EPX_ERR_MISMATCH,
                        "shm: slab %llu of %llu bytes came, %llu of %zu bytes expected: plans are created in another "
                        "order there",
                        (unsigned long long)m.serial, (unsigned long long)m.bytes, (unsigned long long)s->serial, s->slab.bytes);
    s->slab.base[peer] = s->maps[peer]->base;
    return EPX_OK;
}

/* The first of several failures, with its message. */
typedef struct {
    epx_status_t status;
    char message[512];
} first_failure_t;

static void note(first_failure_t *f, epx_status_t st, const epx_net_t *net, const char *what, int r) {
    if (st >= 0 || f->status < 0) return;
    f->status = epx_fail_context(st, "%s of rank %d (pid %lld)", what, r, (long long)net->peers[r].pid);
    snprintf(f->message, sizeof f->message, "%s", epx_error_message());
}

/* Round i: send to rank + i, receive from rank - i, so that few descriptors are under way at a time (the kernel counts those of a
 * user against RLIMIT_NOFILE). A failure does not end the rounds: no peer waits for a message that never comes, and none is left
 * for the next slab to find. */
static epx_status_t slab_share(epx_net_t *net, epx_slab_t *slab, uint64_t timeout_ns) {
    shm_net_t *n = (shm_net_t *)net;
    shm_slab_t *s = (shm_slab_t *)slab;
    uint64_t deadline = epx_now_ns() + timeout_ns;
    first_failure_t f = {EPX_OK, ""};
    s->serial = ++n->serial;
    for (int i = 1; i < net->n_ranks; i++) {
        int to = (net->rank + i) % net->n_ranks, from = (net->rank + net->n_ranks - i) % net->n_ranks;
        note(&f, send_slab(n, s, to), net, "slab", to);
        note(&f, receive_slab(n, s, from, deadline), net, "slab", from);
    }
    shm_map_close_fd(s->maps[net->rank]);
    return f.status < 0 ? epx_fail(f.status, "%s", f.message) : EPX_OK;
}

static epx_status_t pass(epx_net_t *net, const void *message, size_t n_bytes, int fd, void *out_messages, int *out_fds,
                         uint64_t timeout_ns) {
    shm_net_t *n = (shm_net_t *)net;
    uint64_t deadline = epx_now_ns() + timeout_ns;
    first_failure_t f = {EPX_OK, ""};
    char *out = out_messages;
    for (int r = 0; r < net->n_ranks; r++) out_fds[r] = -1;
    memmove(out + (size_t)net->rank * n_bytes, message, n_bytes);
    for (int i = 1; i < net->n_ranks; i++) {
        int to = (net->rank + i) % net->n_ranks, from = (net->rank + net->n_ranks - i) % net->n_ranks;
        int thread = same_process(&net->peers[to], &net->peers[net->rank]);
        note(&f, shm_send(n->fds[to], message, n_bytes, thread ? -1 : fd), net, "message", to);
        note(&f, receive_message(n, from, deadline, out + (size_t)from * n_bytes, n_bytes, &out_fds[from]), net, "message", from);
    }
    return f.status < 0 ? epx_fail(f.status, "%s", f.message) : EPX_OK;
}

extern const epx_transport_t epx_transport_shm;
const epx_transport_t epx_transport_shm = {
    "shm",
    "ranks of one host, processes or threads: memfd slabs passed over Unix sockets",
    EPX_LINK_SELF | EPX_LINK_MAPPED,
    100,
    can,
    open_net,
    connect_net,
    close_net,
    slab_check,
    slab_alloc,
    slab_share,
    slab_free,
    dead_rank,
    .pass = pass,
};
