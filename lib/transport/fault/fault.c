/* Transport "fault": the transport of a host, with every store to a peer held back and delivered later, in another order, by a
 * thread: as a network without ordering would. Puts may overtake each other; a flag goes after every put to that rank before it,
 * and later puts may overtake it. EPX_FAULT adds delays and plants failures (fault_plan.h). For tests: it allocates and locks. */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/status.h"
#include "spi/mutant.h"
#include "spi/transport.h"
#include "spi/wait.h"
#include "transport/fault/fault_plan.h"

/* A store that is under way. */
typedef struct store {
    struct store *next;
    int rank, is_flag;
    uint64_t off, value, due_ns;
    size_t n_bytes;
    char data[];
} store_t;

typedef struct fault_slab fault_slab_t;

typedef struct {
    epx_net_t net;
    epx_net_t *inner;
    fault_plan_t plan;
    pthread_mutex_t lock; /* of all below */
    pthread_t courier;
    int runs, stop;
    uint64_t random;
    char call[16];
    uint64_t epoch; /* of the call under way */
    fault_slab_t *slabs;
} fault_net_t;

struct fault_slab {
    epx_slab_t slab;
    epx_slab_t *inner;
    fault_slab_t *next;
    store_t *first, **last; /* in the order of sending */
    store_t **open;         /* [n_ranks] newest put to each rank: its sender may still write and read it */
};

static epx_status_t can(const epx_peer_t *peers, int n_ranks) { return epx_transport_of_host()->can(peers, n_ranks); }

static uint64_t next_random(fault_net_t *n) {
    n->random = n->random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return n->random >> 33;
}

/* ---- delivery ---- */

/* Flags only grow: one that was overtaken by the next is late for good. */
static void deliver(const fault_slab_t *s, const store_t *m) {
    if (!m->is_flag) memcpy(s->inner->base[m->rank] + m->off, m->data, m->n_bytes);
    else if (epx_load_relaxed_u64(epx_slab_word(s->inner, m->rank, m->off)) < m->value)
        epx_slab_signal(s->inner, m->rank, m->off, m->value);
}

/* May this store go now? A flag waits for the puts to its rank that were sent before it. */
static int may_go(const fault_slab_t *s, const store_t *m, uint64_t now) {
    if (m->due_ns > now || m == s->open[m->rank]) return 0;
    if (!m->is_flag || EPX_MUTANT(missing_fence)) return 1;
    for (const store_t *e = s->first; e != m; e = e->next)
        if (e->rank == m->rank && !e->is_flag) return 0;
    return 1;
}

/* Deliver some stores; all: until nothing that may go is left. */
static void pump(fault_net_t *n, fault_slab_t *s, int all) {
    uint64_t now = all ? UINT64_MAX : epx_now_ns();
    for (int again = 1; again;) {
        again = 0;
        for (store_t **at = &s->first; *at != NULL;) {
            store_t *m = *at;
            if (!may_go(s, m, now) || (!all && next_random(n) % 2)) {
                at = &m->next;
                continue;
            }
            *at = m->next;
            if (s->last == &m->next) s->last = at;
            deliver(s, m);
            free(m);
            again = all;
        }
    }
}

static void *carry(void *ctx) {
    fault_net_t *n = ctx;
    struct timespec pause = {0, 20000};
    for (int stop = 0; !stop;) {
        pthread_mutex_lock(&n->lock);
        for (fault_slab_t *s = n->slabs; s != NULL; s = s->next) pump(n, s, 0);
        stop = n->stop;
        pthread_mutex_unlock(&n->lock);
        nanosleep(&pause, NULL);
    }
    return NULL;
}

static store_t *enqueue(const epx_slab_t *slab, int rank, uint64_t off, size_t n_bytes) {
    fault_slab_t *s = (fault_slab_t *)(uintptr_t)slab;
    fault_net_t *n = (fault_net_t *)slab->net;
    store_t *m = calloc(1, sizeof *m + n_bytes);
    if (m == NULL) abort(); /* a test without memory */
    m->rank = rank;
    m->off = off;
    m->n_bytes = n_bytes;
    m->due_ns = n->plan.delay_us ? epx_now_ns() + next_random(n) % n->plan.delay_us * 1000 : 0;
    *s->last = m;
    s->last = &m->next;
    return m;
}

/* The rule "corrupt": one bit of the last large put that is under way. */
static void corrupt(fault_net_t *n, fault_slab_t *s, int rank) {
    store_t *last = NULL;
    if (!fault_due(&n->plan, FAULT_CORRUPT, n->net.rank, n->call, n->epoch)) return;
    for (store_t *m = s->first; m != NULL; m = m->next)
        if (m->rank == rank && !m->is_flag && m->n_bytes > 8) last = m;
    if (last != NULL) last->data[last->n_bytes / 2] ^= 1;
}

/* ---- messages ---- */

static epx_status_t reserve(epx_slab_t *slab, size_t put_bytes, size_t phase_bytes, int n_phases, uint64_t timeout_ns) {
    (void)slab, (void)put_bytes, (void)phase_bytes, (void)n_phases, (void)timeout_ns;
    return EPX_OK;
}

static char *put(const epx_slab_t *slab, int rank, uint64_t off, size_t n_bytes) {
    fault_net_t *n = (fault_net_t *)slab->net;
    pthread_mutex_lock(&n->lock);
    store_t *m = enqueue(slab, rank, off, n_bytes);
    ((fault_slab_t *)(uintptr_t)slab)->open[rank] = m;
    pthread_mutex_unlock(&n->lock);
    return m->data;
}

static void send_flag(const epx_slab_t *slab, int rank, uint64_t off, uint64_t value) {
    fault_net_t *n = (fault_net_t *)slab->net;
    fault_slab_t *s = (fault_slab_t *)(uintptr_t)slab;
    pthread_mutex_lock(&n->lock);
    s->open[rank] = NULL;
    corrupt(n, s, rank);
    if (!fault_due(&n->plan, FAULT_DROP, n->net.rank, n->call, n->epoch)) {
        store_t *m = enqueue(slab, rank, off, 0);
        m->is_flag = 1;
        m->value = value;
    }
    pthread_mutex_unlock(&n->lock);
}

static void abort_peer(const epx_slab_t *slab, int rank, uint64_t word) {
    (void)rank; /* the inner slab has all of them, and a second word changes nothing */
    epx_slab_abort(((const fault_slab_t *)slab)->inner, word);
}

static void drain(const epx_slab_t *slab) {
    fault_net_t *n = (fault_net_t *)slab->net;
    pthread_mutex_lock(&n->lock);
    pump(n, (fault_slab_t *)(uintptr_t)slab, 1);
    pthread_mutex_unlock(&n->lock);
}

static void progress(epx_net_t *net) { (void)net; /* the courier does it */ }

static void idle(epx_net_t *net, uint64_t max_ns) {
    struct timespec pause = {0, (long)(max_ns < 50000 ? max_ns : 50000)};
    (void)net;
    nanosleep(&pause, NULL);
}

static int left(const epx_net_t *net, int rank) {
    const fault_slab_t *ctl = (const fault_slab_t *)net->ctl;
    return ctl != NULL && epx_load_acquire_u32(&epx_slab_head(ctl->inner, rank)->left) != 0;
}

/* What is under way is still here. */
static void renew(epx_slab_t *slab, uint32_t turn) {
    fault_net_t *n = (fault_net_t *)slab->net;
    fault_slab_t *s = (fault_slab_t *)slab;
    (void)turn;
    pthread_mutex_lock(&n->lock);
    for (int r = 0; r < slab->n_ranks; r++) s->open[r] = NULL;
    for (store_t *m = s->first, *next; m != NULL; m = next) next = m->next, free(m);
    s->first = NULL;
    s->last = &s->first;
    pthread_mutex_unlock(&n->lock);
}

static void settle(epx_slab_t *slab, uint32_t turn) { (void)slab, (void)turn; }

static size_t bytes(size_t put_bytes, size_t phase_bytes, int n_phases, int n_peers) {
    (void)put_bytes, (void)phase_bytes, (void)n_phases, (void)n_peers;
    return 0; /* what is under way comes and goes */
}

static const epx_messages_t fault_messages = {reserve, put,  send_flag, abort_peer, drain, progress,
                                              idle,    left, renew,     settle,     bytes};

/* ---- connection ---- */

static void close_net(epx_net_t *net) {
    fault_net_t *n = (fault_net_t *)net;
    if (n == NULL) return;
    pthread_mutex_lock(&n->lock);
    n->stop = 1;
    pthread_mutex_unlock(&n->lock);
    if (n->runs) pthread_join(n->courier, NULL);
    if (n->inner != NULL) n->inner->transport->close(n->inner);
    pthread_mutex_destroy(&n->lock);
    free(n);
}

static epx_status_t open_net(int rank, int n_ranks, const epx_peer_t *peers, epx_net_t **out_net, void *card) {
    epx_status_t s;
    fault_net_t *n = calloc(1, sizeof *n);
    if (n == NULL) return epx_fail(EPX_ERR_NOMEM, "fault: no memory for %zu bytes", sizeof *n);
    pthread_mutex_init(&n->lock, NULL);
    EPX_TRY_GOTO(s, fault_parse(getenv("EPX_FAULT"), &n->plan), err_net);
    EPX_TRY_GOTO(s, epx_transport_of_host()->open(rank, n_ranks, peers, &n->inner, card), err_net);
    n->inner->transport = epx_transport_of_host();
    n->net = *n->inner;
    n->net.n_messages = n_ranks - 1;
    n->random = n->plan.seed * 97 + (uint64_t)rank;
    *out_net = &n->net;
    return EPX_OK;
err_net:
    close_net(&n->net);
    return s;
}

static epx_status_t connect_net(epx_net_t *net, const void *cards, uint64_t timeout_ns) {
    fault_net_t *n = (fault_net_t *)net;
    n->inner->masked = net->masked;
    EPX_TRY(n->inner->transport->connect(n->inner, cards, timeout_ns));
    if (pthread_create(&n->courier, NULL, carry, n) != 0) return epx_fail(EPX_ERR_OS, "fault: no thread for deliveries");
    n->runs = 1;
    return EPX_OK;
}

/* ---- slabs ---- */

static epx_status_t slab_check(epx_net_t *net, size_t bytes, int n_slabs) {
    epx_net_t *inner = ((fault_net_t *)net)->inner;
    return inner->transport->slab_check(inner, bytes, n_slabs);
}

static void slab_free(epx_net_t *net, epx_slab_t *slab) {
    fault_net_t *n = (fault_net_t *)net;
    fault_slab_t *s = (fault_slab_t *)slab;
    if (s == NULL) return;
    pthread_mutex_lock(&n->lock);
    for (int r = 0; r < slab->n_ranks; r++) s->open[r] = NULL;
    pump(n, s, 1);
    fault_slab_t **at = &n->slabs;
    while (*at != NULL && *at != s) at = &(*at)->next;
    if (*at != NULL) *at = s->next;
    pthread_mutex_unlock(&n->lock);
    if (n->inner->ctl == s->inner) n->inner->ctl = NULL;
    n->inner->transport->slab_free(n->inner, s->inner);
    free(s->open);
    free(s->slab.base);
    free(s);
}

static epx_status_t slab_alloc(epx_net_t *net, size_t bytes, epx_slab_t **out_slab) {
    fault_net_t *n = (fault_net_t *)net;
    fault_slab_t *s = calloc(1, sizeof *s);
    if (s != NULL) s->slab.base = calloc((size_t)net->n_ranks, sizeof *s->slab.base);
    if (s != NULL) s->open = calloc((size_t)net->n_ranks, sizeof *s->open);
    if (s == NULL || s->slab.base == NULL || s->open == NULL) {
        if (s != NULL) free(s->slab.base);
        free(s);
        return epx_fail(EPX_ERR_NOMEM, "fault: no memory for a slab of %d ranks", net->n_ranks);
    }
    epx_status_t st = n->inner->transport->slab_alloc(n->inner, bytes, &s->inner);
    if (st < 0) {
        free(s->open);
        free(s->slab.base);
        free(s);
        return st;
    }
    s->slab.rank = net->rank;
    s->slab.n_ranks = net->n_ranks;
    s->slab.bytes = bytes;
    s->slab.net = net;
    s->slab.base[net->rank] = s->inner->base[net->rank];
    s->last = &s->first;
    pthread_mutex_lock(&n->lock);
    s->next = n->slabs;
    n->slabs = s;
    pthread_mutex_unlock(&n->lock);
    *out_slab = &s->slab;
    return EPX_OK;
}

static epx_status_t slab_share(epx_net_t *net, epx_slab_t *slab, uint64_t timeout_ns) {
    fault_net_t *n = (fault_net_t *)net;
    epx_slab_t *inner = ((fault_slab_t *)slab)->inner;
    EPX_TRY(n->inner->transport->slab_share(n->inner, inner, timeout_ns));
    if (n->inner->ctl == NULL) n->inner->ctl = inner; /* the group's control slab is the first that is shared */
    return EPX_OK;
}

static int dead_rank(epx_net_t *net) {
    epx_net_t *inner = ((fault_net_t *)net)->inner;
    return inner->transport->dead_rank(inner);
}

static void at_call(epx_net_t *net, const char *call, int channel, uint64_t epoch, uint64_t wait_ns, int begins) {
    fault_net_t *n = (fault_net_t *)net;
    (void)channel, (void)wait_ns;
    if (!begins) return;
    pthread_mutex_lock(&n->lock);
    snprintf(n->call, sizeof n->call, "%s", call);
    n->epoch = epoch;
    pthread_mutex_unlock(&n->lock);
    if (fault_due(&n->plan, FAULT_KILL, net->rank, call, epoch)) raise(SIGKILL);
}

extern const epx_transport_t epx_transport_fault;
const epx_transport_t epx_transport_fault = {
    .name = "fault",
    .detail = "wraps the transport of a host: stores to peers are delivered late and out of order; EPX_FAULT plants failures",
    .links = EPX_LINK_SELF | EPX_LINK_MAPPED | EPX_LINK_MESSAGE,
    .can = can,
    .open = open_net,
    .connect = connect_net,
    .close = close_net,
    .slab_check = slab_check,
    .slab_alloc = slab_alloc,
    .slab_share = slab_share,
    .slab_free = slab_free,
    .dead_rank = dead_rank,
    .messages = &fault_messages,
    .at_call = at_call,
};
