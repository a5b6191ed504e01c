/* Groups: connect ranks over one transport, and all-gather small records over a control slab. */
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "core/core.h"
#include "spi/mutant.h"
#include "spi/unsupported.h"

enum { MESSAGE_BYTES = 164, RECORD_STRIDE = EPX_GROUP_RECORD_BYTES + 64 };

/* What world ranks exchange when a group is made. */
typedef struct {
    int32_t status;
    uint32_t members; /* hash of the rank list */
    int32_t on_device;
    uint8_t card[EPX_NET_CARD_BYTES];
    char message[MESSAGE_BYTES];
} group_record_t;

/* One slot of the control slab: rec[parity][src]. seq is the flag of the rest. */
typedef struct {
    uint64_t seq;
    uint64_t n_bytes;
    uint8_t data[EPX_GROUP_RECORD_BYTES];
} record_t;

_Static_assert(sizeof(record_t) <= RECORD_STRIDE, "record");

static uint64_t record_off(const epx_group_t *g, uint64_t parity, int src) {
    return EPX_HEAD_BYTES + (parity * (uint64_t)g->n_ranks + (uint64_t)src) * RECORD_STRIDE;
}

static const record_t *own_record(const epx_group_t *g, uint64_t off) {
    return (const record_t *)(const void *)(g->ctl->base[g->rank] + off);
}

static size_t ctl_bytes(int n_ranks) {
    size_t bytes = EPX_HEAD_BYTES + (size_t)2 * (size_t)n_ranks * RECORD_STRIDE;
    return (bytes + EPX_SLAB_ALIGN - 1) / EPX_SLAB_ALIGN * EPX_SLAB_ALIGN;
}

/* ---- create ---- */

static epx_status_t check_ranks(const epx_world_t *w, const int *ranks, int n_ranks, int device) {
    int size = w->boot.n_ranks;
    if (device < -1) return epx_fail(EPX_ERR_ARG, "device is %d; legal: -1 (CPU) or the number of a CUDA device", device);
    if ((ranks == NULL) != (n_ranks == 0))
        return epx_fail(EPX_ERR_ARG, "ranks and n_ranks %d disagree; legal: both, or NULL and 0", n_ranks);
    if (n_ranks < 0 || n_ranks > size) return epx_fail(EPX_ERR_ARG, "n_ranks is %d; legal: 0 (all) to %d", n_ranks, size);
    for (int i = 0; i < n_ranks; i++) {
        if (ranks[i] < 0 || ranks[i] >= size)
            return epx_fail(EPX_ERR_ARG, "ranks[%d] is %d; legal: 0 to %d", i, ranks[i], size - 1);
        for (int j = 0; j < i; j++)
            if (ranks[j] == ranks[i])
                return epx_fail(EPX_ERR_ARG, "ranks[%d] and ranks[%d] are both %d; legal: distinct ranks", j, i, ranks[i]);
    }
    return EPX_OK;
}

static uint32_t members_hash(const epx_world_t *w, const int *ranks, int n_ranks) {
    uint32_t h = 2166136261u;
    int n = ranks == NULL ? w->boot.n_ranks : n_ranks;
    for (int i = 0; i < n; i++) h = (h ^ (uint32_t)(ranks == NULL ? i : ranks[i])) * 16777619u;
    return h;
}

/* Members in group order; rank -1 when this world rank is not one of them. */
static epx_status_t new_group(const epx_world_t *w, const int *ranks, int n_ranks, epx_group_t **out_group) {
    epx_group_t *g = calloc(1, sizeof *g);
    int n = ranks == NULL ? w->boot.n_ranks : n_ranks;
    if (g != NULL) g->peers = calloc((size_t)n, sizeof *g->peers);
    if (g != NULL) g->masked = calloc((size_t)n, 1);
    if (g != NULL) g->records = calloc((size_t)n, EPX_GROUP_RECORD_BYTES);
    if (g == NULL || g->peers == NULL || g->records == NULL || g->masked == NULL) {
        epx_group_destroy(g);
        return epx_fail(EPX_ERR_NOMEM, "no memory for a group of %d ranks", n);
    }
    g->n_ranks = n;
    g->rank = -1;
    g->timeout_ns = w->timeout_ns;
    for (int i = 0; i < n; i++) {
        int world_rank = ranks == NULL ? i : ranks[i];
        g->peers[i] = w->peers[world_rank];
        if (world_rank == w->boot.rank) g->rank = i;
    }
    *out_group = g;
    return EPX_OK;
}

/* Local part: choose the transport, open it, take the control slab. */
static epx_status_t open_local(const epx_world_t *w, epx_group_t *g, int device, void *card) {
    const epx_transport_t *t;
    /* A group on devices names its link; what carries its control words on the host is chosen. */
    epx_status_t s = device >= 0 ? epx_select_device_link(w->transports, &g->link) : EPX_OK;
    if (s < 0) return epx_fail_context(s, "device is %d", device);
    EPX_TRY(epx_select_transport(device >= 0 ? NULL : w->transports, g->peers, g->n_ranks, &t));
    if (device >= 0 && t->pass == NULL)
        return epx_fail(EPX_ERR_UNSUPPORTED,
                        "a group on devices has ranks on several hosts (transport %s); legal: ranks of one host", t->name);
    EPX_TRY(t->open(g->rank, g->n_ranks, g->peers, &g->net, card));
    g->net->masked = g->masked;
    g->net->transport = t; /* before anything that may look at messages */
    EPX_TRY(t->slab_alloc(g->net, ctl_bytes(g->n_ranks), &g->ctl));
    if (t->messages != NULL) EPX_TRY(t->messages->reserve(g->ctl, sizeof(record_t), sizeof(record_t), 2, g->timeout_ns));
    epx_slab_head(g->ctl, g->rank)->magic = EPX_SLAB_MAGIC;
    return EPX_OK;
}

/* A rank that lost a peer or waited for one in vain: another rank may know why. */
static int is_consequence(epx_status_t s) { return s == EPX_ERR_PEER || s == EPX_ERR_TIMEOUT; }

static epx_status_t failure_of(const group_record_t *all, int r) {
    return epx_fail((epx_status_t)all[r].status, "world rank %d could not make the group: %.*s", r, MESSAGE_BYTES - 1,
                    all[r].message);
}

/* Give the status and card to all world ranks; fail if any rank fails or lists other members. */
static epx_status_t world_round(const epx_world_t *w, group_record_t *mine, epx_status_t own, group_record_t *all) {
    char own_message[512];
    snprintf(own_message, sizeof own_message, "%s", own < 0 ? epx_error_message() : "");
    snprintf(mine->message, sizeof mine->message, "%.*s", MESSAGE_BYTES - 1, own_message);
    mine->status = own;
    epx_status_t s = epx_boot_allgather(&w->boot, mine, sizeof *mine, all);
    for (int r = 0; s >= 0 && is_consequence(own) && r < w->boot.n_ranks; r++)
        if (all[r].status < 0 && !is_consequence((epx_status_t)all[r].status)) return failure_of(all, r);
    if (own < 0) return epx_fail(own, "%s", own_message);
    EPX_TRY(s);
    for (int r = 0; r < w->boot.n_ranks; r++) {
        if (all[r].status < 0) return failure_of(all, r);
        if (all[r].members != mine->members)
            return epx_fail(EPX_ERR_MISMATCH, "ranks of the group differ: hash %08x on world rank %d and %08x on world rank %d",
                            mine->members, w->boot.rank, all[r].members, r);
        if (all[r].on_device != mine->on_device)
            return epx_fail(EPX_ERR_MISMATCH, "device is given on world rank %d only; legal: on all ranks, or -1 on all",
                            mine->on_device ? w->boot.rank : r);
    }
    return EPX_OK;
}

static epx_status_t join(const epx_world_t *w, epx_group_t *g, int device, const group_record_t *all) {
    const epx_transport_t *t = g->net->transport;
    uint8_t *cards = malloc((size_t)g->n_ranks * EPX_NET_CARD_BYTES);
    if (cards == NULL) return epx_fail(EPX_ERR_NOMEM, "no memory for %d cards", g->n_ranks);
    for (int i = 0; i < g->n_ranks; i++)
        memcpy(cards + (size_t)i * EPX_NET_CARD_BYTES, all[g->peers[i].world_rank].card, EPX_NET_CARD_BYTES);
    epx_status_t s = t->connect(g->net, cards, w->timeout_ns);
    free(cards);
    EPX_TRY(s);
    EPX_TRY(t->slab_share(g->net, g->ctl, w->timeout_ns));
    g->net->ctl = g->ctl;
    return g->link == NULL ? EPX_OK : g->link->open(g->net, device, w->timeout_ns, &g->net->device);
}

epx_status_t epx_group_create(epx_world_t *w, const int *ranks, int n_ranks, int device, epx_group_t **out_group) {
    if (w == NULL || out_group == NULL) return epx_fail(EPX_ERR_ARG, "%s is NULL", w == NULL ? "world" : "out_group");
    group_record_t mine = {0}, *all = calloc((size_t)w->boot.n_ranks, sizeof *all);
    epx_group_t *g = NULL;
    if (all == NULL) return epx_fail(EPX_ERR_NOMEM, "no memory for %d group records", w->boot.n_ranks);
    epx_status_t s = check_ranks(w, ranks, n_ranks, device);
    if (s >= 0) {
        mine.members = members_hash(w, ranks, n_ranks);
        mine.on_device = device >= 0;
        s = new_group(w, ranks, n_ranks, &g);
    }
    int member = g != NULL && g->rank >= 0;
    if (s >= 0 && member) s = open_local(w, g, device, mine.card);
    EPX_TRY_GOTO(s, world_round(w, &mine, s, all), err_group);
    s = member ? join(w, g, device, all) : EPX_OK;
    EPX_TRY_GOTO(s, world_round(w, &mine, s, all), err_group);
    if (!member) {
        epx_group_destroy(g);
        g = NULL;
    }
    free(all);
    *out_group = g;
    return EPX_OK;
err_group:
    free(all);
    epx_group_destroy(g);
    return s;
}

void epx_group_destroy(epx_group_t *g) {
    if (g == NULL) return;
    if (g->ctl != NULL) epx_store_release_u32(&epx_slab_head(g->ctl, g->rank)->left, 1);
    if (g->net != NULL) {
        const epx_transport_t *t = g->net->transport;
        if (g->net->device != NULL) g->link->close(g->net->device);
        g->net->ctl = NULL;
        t->slab_free(g->net, g->ctl);
        t->close(g->net);
    }
    free(g->records);
    free(g->masked);
    free(g->peers);
    free(g);
}

int epx_group_rank(const epx_group_t *g) { return g == NULL ? -1 : g->rank; }

int epx_group_size(const epx_group_t *g) { return g == NULL ? 0 : g->n_ranks; }

epx_status_t epx_group_caps(const epx_group_t *g, epx_group_caps_t *out_caps) {
    if (g == NULL || out_caps == NULL) return epx_fail(EPX_ERR_ARG, "%s is NULL", g == NULL ? "group" : "out_caps");
    if (out_caps->size != sizeof *out_caps)
        return epx_fail(EPX_ERR_ARG, "out_caps->size is %u; legal: %zu", out_caps->size, sizeof *out_caps);
    out_caps->n_ranks = g->n_ranks;
    out_caps->rank = g->rank;
    out_caps->transport = g->link != NULL ? g->link->name : g->net->transport->name;
    out_caps->links = g->net->transport->links;
    out_caps->max_top_k = EPX_MAX_TOP_K;
    out_caps->max_ranks = EPX_MAX_RANKS;
    out_caps->token_dtypes = 1u << EPX_F32 | 1u << EPX_BF16 | 1u << EPX_F16 | (g->link == NULL ? 1u << EPX_FP8_E4M3 : 0);
    return EPX_OK;
}

epx_status_t epx_group_mask(epx_group_t *g, int rank, int alive) {
    if (g == NULL) return epx_fail(EPX_ERR_ARG, "group is NULL");
    if (g->link != NULL) return epx_unsupported_call("epx_group_mask on devices", "make a new group of the living ranks");
    if (rank < 0 || rank >= g->n_ranks || rank == g->rank)
        return epx_fail(EPX_ERR_ARG, "rank is %d; legal: another rank of the group, 0 to %d without %d", rank, g->n_ranks - 1,
                        g->rank);
    g->masked[rank] = !alive;
    return EPX_OK;
}

int epx_group_dead_rank(epx_group_t *g) {
    if (g == NULL) return -1;
    uint64_t word = epx_load_acquire_u64(&epx_slab_head(g->ctl, g->rank)->abort_word);
    if (word != 0 && epx_abort_status(word) == EPX_ERR_PEER) return epx_abort_about(word);
    epx_net_progress(g->net);
    int dead = g->net->transport->dead_rank(g->net);
    if (dead < 0) dead = (int)epx_load_relaxed_u32(&g->net->found_dead) - 1;
    return dead >= 0 && g->masked[dead] ? -1 : dead;
}

/* ---- all-gather ---- */

static void push_record(epx_group_t *g, const void *mine, size_t n_bytes, uint64_t parity) {
    uint64_t off = record_off(g, parity, g->rank), n_bytes_64 = n_bytes;
    for (int i = 1; i < g->n_ranks; i++) {
        int dst = (g->rank + i) % g->n_ranks;
        if (g->masked[dst]) continue;
        char *at = epx_slab_put(g->ctl, dst, off + offsetof(record_t, n_bytes), sizeof n_bytes_64 + n_bytes);
        memcpy(at, &n_bytes_64, sizeof n_bytes_64);
        memcpy(at + sizeof n_bytes_64, mine, n_bytes);
        epx_slab_signal(g->ctl, dst, off, g->epoch); /* seq */
    }
}

static epx_status_t take_record(epx_group_t *g, const epx_wait_t *w, int src, uint64_t parity, size_t n_bytes, void *out) {
    uint64_t off = record_off(g, parity, src);
    EPX_TRY(epx_wait_ge(w, src, off, g->epoch));
    const record_t *r = own_record(g, off);
    if (r->n_bytes != n_bytes)
        return epx_fail(EPX_ERR_MISMATCH, "all-gather of %zu bytes on rank %d and %" PRIu64 " bytes on rank %d", n_bytes, g->rank,
                        r->n_bytes, src);
    memcpy(out, r->data, n_bytes);
    return EPX_OK;
}

static epx_status_t allgather(epx_group_t *g, const void *mine, size_t n_bytes, void *out_all, uint64_t timeout_ns) {
    uint64_t abort_word = epx_load_acquire_u64(&epx_slab_head(g->ctl, g->rank)->abort_word);
    if (abort_word != 0) return epx_abort_error(g->net, abort_word);
    if (g->lost) return epx_fail(EPX_ERR_ABORTED, "the group was lost in an earlier all-gather");
    g->epoch++;
    /* Two buffers: epoch e + 2 overwrites e, and its sender has seen our record of e + 1, which followed our read of e. */
    uint64_t parity = EPX_MUTANT(wrong_epoch_parity) ? 0 : g->epoch % 2;
    epx_wait_t w = {g->net, g->ctl, "all-gather", g->epoch, timeout_ns ? timeout_ns : UINT64_MAX, NULL};
    push_record(g, mine, n_bytes, parity);
    memmove((char *)out_all + (size_t)g->rank * n_bytes, mine, n_bytes);
    if (EPX_MUTANT(wrong_epoch_parity) && g->rank % 2 == 1) EPX_MUTANT_PAUSE();
    for (int i = 1; i < g->n_ranks; i++) {
        int src = (g->rank + i) % g->n_ranks;
        if (g->masked[src]) {
            memset((char *)out_all + (size_t)src * n_bytes, 0, n_bytes);
            continue;
        }
        epx_status_t s = take_record(g, &w, src, parity, n_bytes, (char *)out_all + (size_t)src * n_bytes);
        if (s == EPX_OK) continue;
        g->lost = 1;
        return s;
    }
    epx_slab_drain(g->ctl);
    return EPX_OK;
}

epx_status_t epx_group_allgather(epx_group_t *g, const void *mine, size_t n_bytes, void *out_all, uint64_t timeout_ns) {
    if (g == NULL) return epx_fail(EPX_ERR_ARG, "group is NULL");
    if (n_bytes > EPX_GROUP_RECORD_BYTES)
        return epx_fail(EPX_ERR_ARG, "n_bytes is %zu; legal: 0 to %d", n_bytes, EPX_GROUP_RECORD_BYTES);
    if (n_bytes > 0 && (mine == NULL || out_all == NULL))
        return epx_fail(EPX_ERR_ARG, "%s is NULL", mine == NULL ? "mine" : "out_all");
    static const char nothing[1];
    char none[1];
    if (n_bytes == 0) return allgather(g, nothing, 0, none, timeout_ns);
    return allgather(g, mine, n_bytes, out_all, timeout_ns);
}

/* What ranks tell each other after a step of set-up. */
typedef struct {
    int32_t status;
    char message[EPX_GROUP_RECORD_BYTES - 4];
} verdict_t;
_Static_assert(sizeof(verdict_t) == EPX_GROUP_RECORD_BYTES, "verdict");

epx_status_t epx_group_agree(epx_group_t *g, epx_status_t mine, const char *what) {
    verdict_t v = {mine, ""}, *all = (verdict_t *)(void *)g->records;
    char own[sizeof v.message] = "";
    if (mine < 0) snprintf(own, sizeof own, "%.*s", (int)sizeof own - 1, epx_error_message());
    memcpy(v.message, own, sizeof own);
    epx_status_t s = allgather(g, &v, sizeof v, all, g->timeout_ns);
    if (mine < 0) s = epx_fail(mine, "%s", own);
    for (int r = 0; s >= 0 && r < g->n_ranks; r++)
        if (all[r].status < 0)
            s = epx_fail((epx_status_t)all[r].status, "%s failed on rank %d: %.*s", what, r, (int)sizeof all[r].message - 1,
                         all[r].message);
    return s;
}
