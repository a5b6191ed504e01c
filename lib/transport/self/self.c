/* Transport "self": a group of one rank; the slab is private memory. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/memory.h"
#include "base/status.h"
#include "spi/memory.h"
#include "spi/transport.h"

typedef struct {
    epx_slab_t slab;
    char *base[1];
} self_slab_t;

static epx_status_t can(const epx_peer_t *peers, int n_ranks) {
    (void)peers;
    if (n_ranks == 1) return EPX_OK;
    return epx_fail(EPX_ERR_UNSUPPORTED, "transport self joins one rank, the group has %d", n_ranks);
}

static epx_status_t open_net(int rank, int n_ranks, const epx_peer_t *peers, epx_net_t **out_net, void *card) {
    (void)card;
    epx_net_t *n = calloc(1, sizeof *n);
    if (n == NULL) return epx_fail(EPX_ERR_NOMEM, "self: no memory for %zu bytes", sizeof *n);
    n->rank = rank;
    n->n_ranks = n_ranks;
    n->peers = peers;
    n->may_spin = 1;
    *out_net = n;
    return EPX_OK;
}

static epx_status_t connect_net(epx_net_t *net, const void *cards, uint64_t timeout_ns) {
    (void)net, (void)cards, (void)timeout_ns;
    return EPX_OK;
}

static void close_net(epx_net_t *net) { free(net); }

static epx_status_t slab_check(epx_net_t *net, size_t bytes, int n_slabs) {
    (void)net;
    return epx_memory_check(bytes, n_slabs);
}

static epx_status_t slab_alloc(epx_net_t *net, size_t bytes, epx_slab_t **out_slab) {
    self_slab_t *s = calloc(1, sizeof *s);
    if (s == NULL) return epx_fail(EPX_ERR_NOMEM, "self: no memory for %zu bytes", sizeof *s);
    s->base[0] = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (s->base[0] == MAP_FAILED) {
        int e = errno;
        free(s);
        return epx_fail_errno(EPX_ERR_NOMEM, e, "self: slab of %zu bytes wanted, %llu bytes free", bytes,
                              (unsigned long long)epx_memory_free_bytes());
    }
    s->slab.rank = net->rank;
    s->slab.n_ranks = 1;
    s->slab.bytes = bytes;
    s->slab.base = s->base;
    *out_slab = &s->slab;
    return EPX_OK;
}

static epx_status_t slab_share(epx_net_t *net, epx_slab_t *slab, uint64_t timeout_ns) {
    (void)net, (void)slab, (void)timeout_ns;
    return EPX_OK;
}

static void slab_free(epx_net_t *net, epx_slab_t *slab) {
    (void)net;
    if (slab == NULL) return;
    munmap(slab->base[0], slab->bytes);
    free(slab);
}

static epx_status_t pass(epx_net_t *net, const void *message, size_t n_bytes, int fd, void *out_messages, int *out_fds,
                         uint64_t timeout_ns) {
    (void)net, (void)fd, (void)timeout_ns;
    memmove(out_messages, message, n_bytes);
    out_fds[0] = -1;
    return EPX_OK;
}

static int dead_rank(epx_net_t *net) {
    (void)net;
    return -1;
}

extern const epx_transport_t epx_transport_self;
const epx_transport_t epx_transport_self = {
    "self",
    "one rank; the slab is private memory",
    EPX_LINK_SELF | EPX_LINK_MAPPED,
    200,
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
