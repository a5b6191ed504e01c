/* Transport "ucx": ranks of several hosts. Peers of this host are mapped by the host's own transport (shm); the others are
 * reached by UCX messages (messages.c) through a module that is opened at run time (load.c). Which link a peer has is decided
 * by its host alone. Deadlines and dead peers are looked after here and in spi/wait.c, never by UCX. */
#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/clock.h"
#include "base/status.h"
#include "transport/ucx/load.h"
#include "transport/ucx/net.h"

enum { INNER_CARD_BYTES = 128 };
static const uint64_t GOODBYE_NS = UINT64_C(300000000), LINGER_NS = UINT64_C(100000000);

/* What a rank tells its peers through the bootstrap. */
typedef struct {
    uint8_t inner[INNER_CARD_BYTES]; /* start of the inner transport's card; the rest is 0 */
    uint64_t key[2];
    uint64_t address_bytes;
    uint8_t address[EPX_NET_CARD_BYTES - INNER_CARD_BYTES - 24];
} card_t;
_Static_assert(sizeof(card_t) == EPX_NET_CARD_BYTES, "card");

static int same_host(const epx_peer_t *a, const epx_peer_t *b) { return memcmp(a->host, b->host, sizeof a->host) == 0; }

static epx_status_t probe(void) {
    const epx_wire_module_t *m;
    return epx_ucx_load(&m);
}

static epx_status_t can(const epx_peer_t *peers, int n_ranks) {
    (void)peers, (void)n_ranks;
    return probe();
}

/* ---- open ---- */

static void close_net(epx_net_t *net) {
    ucx_net_t *n = (ucx_net_t *)net;
    if (n == NULL) return;
    for (int r = 0; n->wire != NULL && n->peers != NULL && r < net->n_ranks; r++)
        if (epx_load_acquire_u32(&n->peers[r].hello)) ucx_send_control(n, UCX_LEFT, r, NULL, 0);
    if (n->wire != NULL) (void)ucx_flush(n, epx_now_ns() + GOODBYE_NS);
    if (n->wire != NULL) n->module->close(n->wire);
    for (ucx_control_t *c = n->controls, *next; c != NULL; c = next) next = c->next, free(c);
    for (ucx_slab_t *s = n->zombies, *next; s != NULL; s = next) {
        next = s->next;
        ucx_links_free(s);
        free(s);
    }
    if (n->inner != NULL) n->inner->transport->close(n->inner);
    pthread_mutex_destroy(&n->lock);
    free(n->inner_peers);
    free(n->inner_ranks);
    free(n->inner_masked);
    free(n->peers);
    free(n);
}

/* Ranks of this host in group order. */
static epx_status_t sort_peers(ucx_net_t *n, const epx_peer_t *peers, int n_ranks) {
    n->peers = calloc((size_t)n_ranks, sizeof *n->peers);
    n->inner_peers = calloc((size_t)n_ranks, sizeof *n->inner_peers);
    n->inner_ranks = calloc((size_t)n_ranks, sizeof *n->inner_ranks);
    n->inner_masked = calloc((size_t)n_ranks, 1);
    if (n->inner_masked == NULL || n->peers == NULL || n->inner_peers == NULL || n->inner_ranks == NULL)
        return epx_fail(EPX_ERR_NOMEM, "ucx: no memory for %d peers", n_ranks);
    for (int r = 0; r < n_ranks; r++) {
        n->peers[r].inner = -1;
        if (!same_host(&peers[r], &peers[n->net.rank])) continue;
        if (r == n->net.rank) n->inner_rank = n->n_inner;
        n->inner_peers[n->n_inner] = peers[r];
        n->inner_ranks[n->n_inner] = r;
        n->peers[r].inner = n->n_inner++;
    }
    n->net.n_messages = n_ranks - n->n_inner;
    return EPX_OK;
}

static epx_status_t open_inner(ucx_net_t *n, card_t *card) {
    const epx_transport_t *t = epx_transport_of_host();
    uint8_t inner_card[EPX_NET_CARD_BYTES] = {0};
    EPX_TRY(t->open(n->inner_rank, n->n_inner, n->inner_peers, &n->inner, inner_card));
    n->inner->transport = t;
    n->inner->masked = n->inner_masked;
    n->net.may_spin = n->inner->may_spin;
    for (size_t i = INNER_CARD_BYTES; i < sizeof inner_card; i++) EPX_ASSERT(inner_card[i] == 0);
    memcpy(card->inner, inner_card, sizeof card->inner);
    return EPX_OK;
}

static epx_status_t open_wire(ucx_net_t *n, card_t *card) {
    char error[256] = "";
    size_t room = sizeof card->address;
    EPX_TRY(epx_ucx_load(&n->module));
    if (getrandom(n->key, sizeof n->key, 0) != (ssize_t)sizeof n->key) return epx_fail_errno(EPX_ERR_OS, errno, "ucx: getrandom");
    if (n->module->open(n->net.n_ranks, ucx_receive, ucx_lost, n, &n->wire, error, sizeof error) != 0)
        return epx_fail(EPX_ERR_OS, "ucx: %s", error);
    if (n->module->address(n->wire, card->address, &room, error, sizeof error) != 0)
        return epx_fail(EPX_ERR_OS, "ucx: %s", error);
    card->address_bytes = room;
    memcpy(card->key, n->key, sizeof card->key);
    return EPX_OK;
}

static epx_status_t open_net(int rank, int n_ranks, const epx_peer_t *peers, epx_net_t **out_net, void *card) {
    card_t mine = {{0}};
    epx_status_t s;
    ucx_net_t *n = calloc(1, sizeof *n);
    if (n == NULL) return epx_fail(EPX_ERR_NOMEM, "ucx: no memory for %zu bytes", sizeof *n);
    n->net.rank = rank;
    n->net.n_ranks = n_ranks;
    n->net.peers = peers;
    pthread_mutex_init(&n->lock, NULL);
    EPX_TRY_GOTO(s, sort_peers(n, peers, n_ranks), err_net);
    EPX_TRY_GOTO(s, open_inner(n, &mine), err_net);
    if (n->net.n_messages > 0) EPX_TRY_GOTO(s, open_wire(n, &mine), err_net);
    memcpy(card, &mine, sizeof mine);
    *out_net = &n->net;
    return EPX_OK;
err_net:
    close_net(&n->net);
    return s;
}

/* ---- connect ---- */

static epx_status_t connect_inner(ucx_net_t *n, const card_t *cards, uint64_t timeout_ns) {
    uint8_t *inner = calloc((size_t)n->n_inner, EPX_NET_CARD_BYTES);
    if (inner == NULL) return epx_fail(EPX_ERR_NOMEM, "ucx: no memory for %d cards", n->n_inner);
    for (int i = 0; i < n->n_inner; i++)
        memcpy(inner + (size_t)i * EPX_NET_CARD_BYTES, cards[n->inner_ranks[i]].inner, INNER_CARD_BYTES);
    epx_status_t s = n->inner->transport->connect(n->inner, inner, timeout_ns);
    free(inner);
    return s;
}

static epx_status_t connect_wire(ucx_net_t *n, const card_t *cards) {
    char error[256] = "";
    for (int r = 0; r < n->net.n_ranks; r++) {
        if (n->peers[r].inner >= 0) continue;
        if (cards[r].address_bytes == 0 || cards[r].address_bytes > sizeof cards[r].address)
            return epx_fail(EPX_ERR_FORMAT, "ucx: %s gave no address", epx_peer_text(&n->net, r));
        memcpy(n->peers[r].key, cards[r].key, sizeof n->peers[r].key);
        pthread_mutex_lock(&n->lock);
        int bad = n->module->connect(n->wire, r, cards[r].address, error, sizeof error);
        pthread_mutex_unlock(&n->lock);
        if (bad) return epx_fail(EPX_ERR_PEER, "ucx: cannot connect to %s: %s", epx_peer_text(&n->net, r), error);
    }
    return EPX_OK;
}

static void send_hellos(ucx_net_t *n, uint64_t round) {
    for (int r = 0; r < n->net.n_ranks; r++)
        if (n->peers[r].inner < 0) ucx_send_control(n, UCX_HELLO, r, NULL, round);
}

static epx_status_t await_hellos(ucx_net_t *n, uint32_t round, uint64_t deadline) {
    for (int r = 0; r < n->net.n_ranks; r++) {
        while (n->peers[r].inner < 0 && epx_load_acquire_u32(&n->peers[r].hello) < round) {
            if (epx_load_acquire_u32(&n->peers[r].lost))
                return epx_fail(EPX_ERR_PEER, "ucx: the connection to %s broke", epx_peer_text(&n->net, r));
            if (epx_now_ns() >= deadline)
                return epx_fail(EPX_ERR_TIMEOUT, "ucx: no message from %s in time; is the network between the hosts open?",
                                epx_peer_text(&n->net, r));
            ucx_progress_now(n);
            sched_yield();
        }
    }
    return EPX_OK;
}

/* Every connection is tried now, not in the first step. Setting one up needs both sides to call in, so nobody may stay away
 * until its peers' connections are up as well: the second round says that. After it, what is still on its way needs this host
 * only. */
static epx_status_t meet(ucx_net_t *n, uint64_t deadline) {
    for (uint32_t round = 1; round <= 2; round++) {
        send_hellos(n, round);
        EPX_TRY(await_hellos(n, round, deadline));
    }
    if (ucx_flush(n, deadline)) return EPX_OK;
    return epx_fail(EPX_ERR_TIMEOUT, "ucx: the first messages did not leave in time");
}

static epx_status_t connect_net(epx_net_t *net, const void *cards, uint64_t timeout_ns) {
    ucx_net_t *n = (ucx_net_t *)net;
    uint64_t deadline = epx_now_ns() + timeout_ns;
    card_t *all = malloc((size_t)net->n_ranks * sizeof *all); /* aligned */
    if (all == NULL) return epx_fail(EPX_ERR_NOMEM, "ucx: no memory for %d cards", net->n_ranks);
    memcpy(all, cards, (size_t)net->n_ranks * sizeof *all);
    epx_status_t s = connect_inner(n, all, timeout_ns);
    if (s >= 0 && net->n_messages > 0) s = connect_wire(n, all);
    if (s >= 0 && net->n_messages > 0) s = meet(n, deadline);
    free(all);
    return s;
}

/* ---- slabs ---- */

static epx_status_t slab_check(epx_net_t *net, size_t bytes, int n_slabs) {
    epx_net_t *inner = ((ucx_net_t *)net)->inner;
    return inner->transport->slab_check(inner, bytes, n_slabs);
}

static void unlist(ucx_net_t *n, ucx_slab_t *s) {
    pthread_mutex_lock(&n->lock);
    for (ucx_slab_t **at = &n->slabs; *at != NULL; at = &(*at)->next) {
        if (*at != s) continue;
        *at = s->next;
        break;
    }
    pthread_mutex_unlock(&n->lock);
}

static void slab_free(epx_net_t *net, epx_slab_t *slab) {
    ucx_net_t *n = (ucx_net_t *)net;
    ucx_slab_t *s = (ucx_slab_t *)slab;
    if (s == NULL) return;
    unlist(n, s);
    if (s->inner != NULL && n->inner->ctl == s->inner) n->inner->ctl = NULL;
    uint64_t deadline = epx_now_ns() + LINGER_NS;
    while (!ucx_links_idle(s) && epx_now_ns() < deadline) ucx_progress_now(n);
    if (s->inner != NULL) n->inner->transport->slab_free(n->inner, s->inner);
    free(slab->base);
    if (!ucx_links_idle(s)) { /* a peer is gone or cut off: the boxes live until the wire is closed */
        s->next = n->zombies;
        n->zombies = s;
        return;
    }
    ucx_links_free(s);
    free(s);
}

static epx_status_t slab_alloc(epx_net_t *net, size_t bytes, epx_slab_t **out_slab) {
    ucx_net_t *n = (ucx_net_t *)net;
    epx_status_t st;
    ucx_slab_t *s = calloc(1, sizeof *s);
    if (s == NULL) return epx_fail(EPX_ERR_NOMEM, "ucx: no memory for %zu bytes", sizeof *s);
    s->slab.rank = net->rank;
    s->slab.n_ranks = net->n_ranks;
    s->slab.bytes = bytes;
    s->slab.net = net->n_messages > 0 ? net : NULL;
    s->serial = ++n->serial;
    s->slab.base = calloc((size_t)net->n_ranks, sizeof *s->slab.base);
    if (s->slab.base == NULL) {
        st = epx_fail(EPX_ERR_NOMEM, "ucx: no memory for %d addresses", net->n_ranks);
        goto err_slab;
    }
    EPX_TRY_GOTO(st, n->inner->transport->slab_alloc(n->inner, bytes, &s->inner), err_slab);
    s->slab.base[net->rank] = s->inner->base[n->inner_rank];
    pthread_mutex_lock(&n->lock);
    s->next = n->slabs;
    n->slabs = s;
    pthread_mutex_unlock(&n->lock);
    *out_slab = &s->slab;
    return EPX_OK;
err_slab:
    slab_free(net, &s->slab);
    return st;
}

static epx_status_t slab_share(epx_net_t *net, epx_slab_t *slab, uint64_t timeout_ns) {
    ucx_net_t *n = (ucx_net_t *)net;
    ucx_slab_t *s = (ucx_slab_t *)slab;
    EPX_TRY(n->inner->transport->slab_share(n->inner, s->inner, timeout_ns));
    for (int i = 0; i < n->n_inner; i++) slab->base[n->inner_ranks[i]] = s->inner->base[i];
    if (s->serial == 1) n->inner->ctl = s->inner; /* the first slab of a group is its control slab */
    return EPX_OK;
}

/* ---- dead peers ---- */

static int dead_rank(epx_net_t *net) {
    ucx_net_t *n = (ucx_net_t *)net;
    for (int i = 0; net->masked != NULL && i < n->n_inner; i++) n->inner_masked[i] = net->masked[n->inner_ranks[i]];
    int i = n->inner->transport->dead_rank(n->inner);
    if (i >= 0) return n->inner_ranks[i];
    for (int r = 0; net->n_messages > 0 && r < net->n_ranks; r++)
        if (epx_load_acquire_u32(&n->peers[r].lost) && !epx_load_acquire_u32(&n->peers[r].left) &&
            !(net->masked != NULL && net->masked[r]))
            return r;
    return -1;
}

extern const epx_transport_t epx_transport_ucx;
const epx_transport_t epx_transport_ucx = {
    "ucx",
    "ranks of several hosts: shm inside a host, UCX messages between hosts",
    EPX_LINK_SELF | EPX_LINK_MAPPED | EPX_LINK_MESSAGE,
    50,
    can,
    open_net,
    connect_net,
    close_net,
    slab_check,
    slab_alloc,
    slab_share,
    slab_free,
    dead_rank,
    &ucx_messages,
    probe,
};
