/* Puts into boxes, boxes into messages, messages into slabs. A slab's boxes to one peer are used by the slab's thread; the wire,
 * the receiving side and the list of slabs are under net->lock. Order: docs/protocol.md, section 3. */
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/checked.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "transport/ucx/net.h"

#define HEAD_MAGIC 0x78707565u
enum { SEGMENT_ALIGN = 16, MIN_BOX_BYTES = 4096, MAX_BOX_BYTES = 1 << 20, BOXES_PER_PHASE = 2 };
#define NO_FLAG UINT64_MAX

static ucx_net_t *net_of(const epx_slab_t *s) { return (ucx_net_t *)s->net; }
static ucx_slab_t *slab_of(const epx_slab_t *s) { return (ucx_slab_t *)(uintptr_t)s; } /* `slab` is its first member */
static size_t round_up(size_t n) { return (n + SEGMENT_ALIGN - 1) / SEGMENT_ALIGN * SEGMENT_ALIGN; }

/* ---- the wire ---- */

void ucx_progress_now(ucx_net_t *n) {
    if (n->wire == NULL) return;
    pthread_mutex_lock(&n->lock);
    n->module->progress(n->wire);
    pthread_mutex_unlock(&n->lock);
}

/* Who does not get the lock is served by the thread that has it. */
static void progress(epx_net_t *net) {
    ucx_net_t *n = (ucx_net_t *)net;
    if (n->wire == NULL || pthread_mutex_trylock(&n->lock) != 0) return;
    n->module->progress(n->wire);
    pthread_mutex_unlock(&n->lock);
}

static void idle(epx_net_t *net, uint64_t max_ns) {
    ucx_net_t *n = (ucx_net_t *)net;
    struct timespec ts = {(time_t)(max_ns / 1000000000u), (long)(max_ns % 1000000000u)};
    pthread_mutex_lock(&n->lock);
    int fd = n->module->arm(n->wire);
    pthread_mutex_unlock(&n->lock);
    struct pollfd p = {fd, POLLIN, 0};
    if (fd >= 0) (void)ppoll(&p, 1, &ts, NULL);
    else sched_yield();
}

static int left(const epx_net_t *net, int rank) { return epx_load_acquire_u32(&((const ucx_net_t *)net)->peers[rank].left) != 0; }

static int unreachable(const ucx_net_t *n, int rank) {
    return epx_load_acquire_u32(&n->peers[rank].lost) || epx_load_acquire_u32(&n->peers[rank].left);
}

int ucx_flush(ucx_net_t *n, uint64_t deadline_ns) {
    pthread_mutex_lock(&n->lock);
    void *request = n->module->flush(n->wire);
    int done = request == NULL;
    pthread_mutex_unlock(&n->lock);
    while (!done && epx_now_ns() < deadline_ns) {
        pthread_mutex_lock(&n->lock);
        done = n->module->flushed(n->wire, request);
        pthread_mutex_unlock(&n->lock);
        if (!done) sched_yield();
    }
    if (done) return 1;
    pthread_mutex_lock(&n->lock);
    n->module->drop_flush(n->wire, request);
    pthread_mutex_unlock(&n->lock);
    return 0;
}

/* ---- messages without data ---- */

static void sweep_controls(ucx_net_t *n) {
    for (ucx_control_t **at = &n->controls; *at != NULL;) {
        ucx_control_t *c = *at;
        if (epx_load_acquire_u32(&c->busy)) {
            at = &c->next;
            continue;
        }
        *at = c->next;
        free(c);
    }
}

void ucx_send_control(ucx_net_t *n, ucx_kind_t kind, int dst, const ucx_slab_t *about, uint64_t value) {
    if (unreachable(n, dst)) return;
    ucx_control_t *c = calloc(1, sizeof *c);
    if (c == NULL) return;
    c->head = (ucx_head_t){.magic = HEAD_MAGIC, .kind = kind, .src = n->net.rank, .flag_off = NO_FLAG, .value = value};
    if (about != NULL) c->head.serial = about->serial, c->head.turn = epx_load_relaxed_u32(&about->turn);
    memcpy(c->head.key, n->peers[dst].key, sizeof c->head.key);
    pthread_mutex_lock(&n->lock);
    sweep_controls(n);
    c->next = n->controls;
    n->controls = c;
    (void)n->module->send(n->wire, dst, &c->head, sizeof c->head, NULL, 0, &c->busy);
    n->module->progress(n->wire);
    pthread_mutex_unlock(&n->lock);
}

static void abort_peer(const epx_slab_t *s, int rank, uint64_t word) {
    ucx_slab_t *u = slab_of(s);
    if (u->links == NULL || !epx_cas_u32(&u->links[rank]->abort_sent, 0, 1)) return;
    ucx_send_control(net_of(s), UCX_ABORT, rank, u, word);
}

/* ---- sending ---- */

static void give_up(ucx_slab_t *u, int rank, epx_status_t s) {
    u->links[rank]->failed = 1;
    epx_slab_abort(&u->slab, epx_abort_pack(s, u->slab.rank, rank));
}

/* A box that nobody reads, or -1 after the deadline or the loss of the peer. */
static int free_box(ucx_slab_t *u, int rank) {
    ucx_link_t *l = u->links[rank];
    ucx_net_t *n = net_of(&u->slab);
    uint64_t start = 0;
    for (;;) {
        for (int i = 0; i < u->n_boxes; i++)
            if (!epx_load_acquire_u32(&l->boxes[i].busy)) return i;
        if (start == 0) start = epx_now_ns();
        ucx_progress_now(n);
        if (unreachable(n, rank)) give_up(u, rank, EPX_ERR_PEER);
        else if (epx_now_ns() - start >= u->timeout_ns) give_up(u, rank, EPX_ERR_TIMEOUT);
        else if (!u->renewing && epx_load_acquire_u64(&epx_slab_head(&u->slab, u->slab.rank)->abort_word) != 0) l->failed = 1;
        if (l->failed) return -1;
        sched_yield();
    }
}

static ucx_box_t *open_box(ucx_slab_t *u, int rank) {
    ucx_link_t *l = u->links[rank];
    if (l->open < 0) {
        int i = l->failed ? -1 : free_box(u, rank);
        l->open = i < 0 ? 0 : i; /* after a failure: a place to write to */
        l->boxes[l->open].n_bytes = 0;
        l->boxes[l->open].last_at = SIZE_MAX;
    }
    return &l->boxes[l->open];
}

static void send_box(ucx_slab_t *u, int rank, uint64_t flag_off, uint64_t value) {
    ucx_link_t *l = u->links[rank];
    ucx_net_t *n = net_of(&u->slab);
    ucx_box_t *b = &l->boxes[l->open];
    l->open = -1;
    if (l->failed) return;
    b->head = (ucx_head_t){.magic = HEAD_MAGIC,
                           .kind = UCX_DATA,
                           .src = n->net.rank,
                           .turn = u->turn,
                           .serial = u->serial,
                           .seq = ++l->sent,
                           .flag_off = flag_off,
                           .value = value};
    memcpy(b->head.key, n->peers[rank].key, sizeof b->head.key);
    pthread_mutex_lock(&n->lock);
    int bad = n->module->send(n->wire, rank, &b->head, sizeof b->head, b->data, b->n_bytes, &b->busy);
    n->module->progress(n->wire);
    pthread_mutex_unlock(&n->lock);
    u->dirty = 1;
    if (bad && !left(&n->net, rank)) give_up(u, rank, EPX_ERR_PEER);
}

/* Does the put continue the last segment? Then only its length grows. */
static char *extend(ucx_slab_t *u, ucx_box_t *b, uint64_t off, size_t n_bytes) {
    ucx_segment_t seg;
    if (b->last_at == SIZE_MAX || b->n_bytes + n_bytes > u->box_bytes) return NULL;
    memcpy(&seg, b->data + b->last_at, sizeof seg);
    if (seg.off + seg.n_bytes != off) return NULL;
    char *at = b->data + b->n_bytes;
    seg.n_bytes += n_bytes;
    memcpy(b->data + b->last_at, &seg, sizeof seg);
    b->n_bytes += n_bytes;
    return at;
}

static char *put(const epx_slab_t *s, int rank, uint64_t off, size_t n_bytes) {
    ucx_slab_t *u = slab_of(s);
    ucx_box_t *b = open_box(u, rank);
    char *at = extend(u, b, off, n_bytes);
    if (at != NULL) return at;
    if (round_up(b->n_bytes) + sizeof(ucx_segment_t) + n_bytes > u->box_bytes) {
        send_box(u, rank, NO_FLAG, 0);
        b = open_box(u, rank);
    }
    ucx_segment_t seg = {off, n_bytes};
    b->last_at = round_up(b->n_bytes);
    memset(b->data + b->n_bytes, 0, b->last_at - b->n_bytes);
    memcpy(b->data + b->last_at, &seg, sizeof seg);
    b->n_bytes = b->last_at + sizeof seg + n_bytes;
    return b->data + b->last_at + sizeof seg;
}

static void signal_peer(const epx_slab_t *s, int rank, uint64_t off, uint64_t value) {
    (void)open_box(slab_of(s), rank);
    send_box(slab_of(s), rank, off, value);
}

static int is_masked(const ucx_net_t *n, int rank) { return n->net.masked != NULL && n->net.masked[rank]; }

/* A rank whose box is still read, or -1; masked ranks on demand only. */
static int busy_rank(const ucx_slab_t *u, const ucx_net_t *living_of) {
    for (int r = 0; r < u->slab.n_ranks; r++)
        for (int i = 0; u->links[r] != NULL && !(living_of != NULL && is_masked(living_of, r)) && i < u->n_boxes; i++)
            if (epx_load_acquire_u32(&u->links[r]->boxes[i].busy)) return r;
    return -1;
}

static int some_message_rank(const ucx_slab_t *u) {
    int r = 0;
    while (u->links[r] == NULL) r++;
    return r;
}

static void drain(const epx_slab_t *s) {
    ucx_slab_t *u = slab_of(s);
    ucx_net_t *n = net_of(s);
    if (!u->dirty) return;
    uint64_t deadline = epx_now_ns() + u->timeout_ns;
    int busy;
    u->dirty = 0;
    while ((busy = busy_rank(u, n)) >= 0 && epx_now_ns() < deadline) {
        if (epx_load_acquire_u64(&epx_slab_head(s, s->rank)->abort_word) != 0) return;
        ucx_progress_now(n);
        sched_yield();
    }
    if (busy < 0 && ucx_flush(n, deadline)) return;
    give_up(u, busy < 0 ? some_message_rank(u) : busy, EPX_ERR_TIMEOUT);
}

/* ---- receiving: under the lock, inside progress() ---- */

static void set_abort(ucx_slab_t *u, uint64_t word) {
    epx_slab_head_t *h = epx_slab_head(&u->slab, u->slab.rank);
    uint64_t none = 0;
    __atomic_compare_exchange_n(&h->abort_word, &none, word, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&h->parked, __ATOMIC_SEQ_CST)) epx_slab_wake(&u->slab, u->slab.rank);
}

/* All segments lie inside the slab and behind its head. */
static int put_segments(const ucx_slab_t *u, const char *data, size_t n_bytes) {
    char *own = u->slab.base[u->slab.rank];
    for (size_t at = 0; at < n_bytes;) {
        ucx_segment_t seg;
        if (n_bytes - at < sizeof seg) return 0;
        memcpy(&seg, data + at, sizeof seg);
        at += sizeof seg;
        if (seg.n_bytes > n_bytes - at || seg.off < EPX_HEAD_BYTES || seg.off > u->slab.bytes ||
            seg.n_bytes > u->slab.bytes - seg.off)
            return 0;
        memcpy(own + seg.off, data + at, seg.n_bytes);
        at = round_up(at + seg.n_bytes);
    }
    return 1;
}

/* Count message `seq`; 0 when it cannot be. */
static int count_arrival(ucx_link_t *l, uint64_t seq) {
    if (seq <= l->arrived || seq - l->arrived > 64 * UCX_WINDOW_WORDS) return 0;
    uint64_t bit = seq - l->arrived - 1;
    l->ahead[bit / 64] |= UINT64_C(1) << bit % 64;
    while (l->ahead[0] & 1) {
        for (int i = 0; i < UCX_WINDOW_WORDS; i++)
            l->ahead[i] = l->ahead[i] >> 1 | (i + 1 < UCX_WINDOW_WORDS ? l->ahead[i + 1] << 63 : 0);
        l->arrived++;
    }
    return 1;
}

/* Set the flags whose messages have all come. The release here is the partner of the acquire in epx_wait_ge(). */
static void set_flags(ucx_slab_t *u, ucx_link_t *l) {
    for (int i = 0; i < l->n_flags;) {
        if (l->flags[i].seq > l->arrived) {
            i++;
            continue;
        }
        uint64_t off = l->flags[i].off, value = l->flags[i].value;
        l->flags[i] = l->flags[--l->n_flags];
        if (epx_load_relaxed_u64(epx_slab_word(&u->slab, u->slab.rank, off)) < value)
            epx_slab_signal(&u->slab, u->slab.rank, off, value);
    }
}

/* What came of earlier turns is forgotten; what still comes of them will be dropped. */
static void begin_turn(ucx_link_t *l, uint32_t turn) {
    l->turn = turn;
    l->arrived = 0;
    l->n_flags = 0;
    memset(l->ahead, 0, sizeof l->ahead);
}

static int take_data(ucx_slab_t *u, const ucx_head_t *h, const void *data, size_t n_bytes) {
    ucx_link_t *l = u->links[h->src];
    if (h->turn > l->turn) begin_turn(l, h->turn);
    if (!put_segments(u, data, n_bytes) || !count_arrival(l, h->seq)) return 0;
    if (h->flag_off != NO_FLAG) {
        if (h->flag_off < EPX_HEAD_BYTES || h->flag_off % 8 != 0 || h->flag_off > u->slab.bytes - 8 ||
            l->n_flags == UCX_MAX_FLAGS)
            return 0;
        l->flags[l->n_flags].seq = h->seq;
        l->flags[l->n_flags].off = h->flag_off;
        l->flags[l->n_flags++].value = h->value;
    }
    set_flags(u, l);
    return 1;
}

static ucx_slab_t *find_slab(const ucx_net_t *n, uint64_t serial) {
    ucx_slab_t *u = n->slabs;
    while (u != NULL && u->serial != serial) u = u->next;
    return u;
}

void ucx_receive(void *ctx, const void *header, size_t header_bytes, const void *data, size_t n_bytes) {
    ucx_net_t *n = ctx;
    ucx_head_t h;
    if (header_bytes != sizeof h) return;
    memcpy(&h, header, sizeof h);
    if (h.magic != HEAD_MAGIC || memcmp(h.key, n->key, sizeof h.key) != 0 || h.src < 0 || h.src >= n->net.n_ranks ||
        n->peers[h.src].inner >= 0)
        return; /* a stranger */
    if (h.kind == UCX_HELLO && h.value > n->peers[h.src].hello) epx_store_release_u32(&n->peers[h.src].hello, (uint32_t)h.value);
    if (h.kind == UCX_LEFT) epx_store_release_u32(&n->peers[h.src].left, 1);
    ucx_slab_t *u = find_slab(n, h.serial);
    if (u == NULL || u->links == NULL) return; /* destroyed here */
    uint32_t own_turn = epx_load_acquire_u32(&u->turn);
    /* An abort of the own turn counts, however late; a peer that has begun another turn has given this one up. */
    if (h.kind == UCX_ABORT && h.value != 0 && h.turn >= own_turn) set_abort(u, h.value);
    if (h.kind != UCX_DATA || h.turn < u->links[h.src]->turn) return;
    if (h.turn > own_turn) set_abort(u, epx_abort_pack(EPX_ERR_ABORTED, h.src, -1));
    if (!take_data(u, &h, data, n_bytes)) set_abort(u, epx_abort_pack(EPX_ERR_FORMAT, n->net.rank, h.src));
}

void ucx_lost(void *ctx, int peer) { epx_store_release_u32(&((ucx_net_t *)ctx)->peers[peer].lost, 1); }

/* ---- after a failure ---- */

static void renew(epx_slab_t *slab, uint32_t turn) {
    ucx_slab_t *u = slab_of(slab);
    ucx_net_t *n = net_of(slab);
    if (n == NULL) return;
    for (int r = 0; r < slab->n_ranks; r++) {
        ucx_link_t *l = u->links[r];
        if (l == NULL) continue;
        l->open = -1;
        l->sent = 0;
        l->failed = is_masked(n, r);
        epx_store_release_u32(&l->abort_sent, (uint32_t)l->failed);
        pthread_mutex_lock(&n->lock);
        if (l->failed) n->module->drop(n->wire, r);
        pthread_mutex_unlock(&n->lock);
    }
    u->renewing = 1;
    epx_store_release_u32(&u->turn, turn);
}

static void settle(epx_slab_t *slab, uint32_t turn) {
    ucx_slab_t *u = slab_of(slab);
    ucx_net_t *n = net_of(slab);
    if (n == NULL) return;
    pthread_mutex_lock(&n->lock);
    for (int r = 0; r < slab->n_ranks; r++)
        if (u->links[r] != NULL && u->links[r]->turn < turn) begin_turn(u->links[r], turn);
    pthread_mutex_unlock(&n->lock);
    u->renewing = 0;
}

/* ---- memory ---- */

int ucx_links_idle(const ucx_slab_t *s) { return s->links == NULL || busy_rank(s, NULL) < 0; }

void ucx_links_free(ucx_slab_t *s) {
    for (int r = 0; s->links != NULL && r < s->slab.n_ranks; r++) {
        if (s->links[r] == NULL) continue;
        free(s->links[r]->boxes);
        free(s->links[r]->memory);
        free(s->links[r]);
    }
    free(s->links);
    s->links = NULL;
}

static ucx_link_t *new_link(const ucx_slab_t *u) {
    ucx_link_t *l = calloc(1, sizeof *l);
    size_t bytes = 0;
    if (l == NULL) return NULL;
    l->open = -1;
    l->boxes = calloc((size_t)u->n_boxes, sizeof *l->boxes);
    if (epx_mul_size((size_t)u->n_boxes, u->box_bytes, &bytes)) l->memory = aligned_alloc(64, bytes);
    if (l->boxes == NULL || l->memory == NULL) {
        free(l->boxes);
        free(l->memory);
        free(l);
        return NULL;
    }
    memset(l->memory, 0, bytes); /* the pages are taken now */
    for (int i = 0; i < u->n_boxes; i++) l->boxes[i].data = l->memory + (size_t)i * u->box_bytes;
    return l;
}

/* Boxes for one peer. */
static void size_boxes(size_t put_bytes, size_t phase_bytes, int n_phases, size_t *out_box_bytes, int *out_n_boxes) {
    size_t want = phase_bytes + phase_bytes / 8 + MIN_BOX_BYTES, least = put_bytes + 2 * SEGMENT_ALIGN;
    size_t box = want < MAX_BOX_BYTES ? want : MAX_BOX_BYTES;
    if (box < least) box = least;
    *out_box_bytes = (box + 63) / 64 * 64;
    *out_n_boxes = n_phases * (want <= *out_box_bytes ? 1 : BOXES_PER_PHASE);
}

static size_t bytes(size_t put_bytes, size_t phase_bytes, int n_phases, int n_peers) {
    size_t box_bytes;
    int n_boxes;
    size_boxes(put_bytes, phase_bytes, n_phases, &box_bytes, &n_boxes);
    return (size_t)n_peers * (sizeof(ucx_link_t) + (size_t)n_boxes * (sizeof(ucx_box_t) + box_bytes));
}

static epx_status_t reserve(epx_slab_t *slab, size_t put_bytes, size_t phase_bytes, int n_phases, uint64_t timeout_ns) {
    ucx_slab_t *u = slab_of(slab);
    ucx_net_t *n = net_of(slab);
    if (n == NULL) return EPX_OK; /* all ranks are on this host */
    u->timeout_ns = timeout_ns;
    size_boxes(put_bytes, phase_bytes, n_phases, &u->box_bytes, &u->n_boxes);
    ucx_link_t **links = calloc((size_t)n->net.n_ranks, sizeof(ucx_link_t *));
    int ok = links != NULL;
    for (int r = 0; ok && r < n->net.n_ranks; r++)
        if (n->peers[r].inner < 0) ok = (links[r] = new_link(u)) != NULL;
    pthread_mutex_lock(&n->lock);
    u->links = links;
    pthread_mutex_unlock(&n->lock);
    if (ok) return EPX_OK;
    ucx_links_free(u);
    return epx_fail(EPX_ERR_NOMEM, "ucx: no memory for messages: %d boxes of %zu bytes for each of %d peers", u->n_boxes,
                    u->box_bytes, n->net.n_messages);
}

const epx_messages_t ucx_messages = {reserve, put, signal_peer, abort_peer, drain, progress, idle, left, renew, settle, bytes};
