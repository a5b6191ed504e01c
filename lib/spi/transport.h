/* What a transport must provide: connect the ranks of a group, give every rank a slab that all ranks can reach, and tell
 * which peer is dead. Mapped transports (EPX_LINK_MAPPED) give each peer's base address; they share the waits of spi/wait.h.
 * A transport includes only spi/ and base/. */
#ifndef EPX_SPI_TRANSPORT_H
#define EPX_SPI_TRANSPORT_H

#include <stddef.h>
#include <stdint.h>

#include "epx/epx.h"

typedef struct epx_transport epx_transport_t;

/* One rank as its peers know it, exchanged when the world is made. */
typedef struct {
    uint8_t host[16];    /* equal on one host and network namespace */
    uint8_t process[16]; /* random, equal for ranks (threads) of one process */
    int64_t pid;
    int64_t uid;
    int32_t world_rank;
    int32_t pad;
} epx_peer_t;

/* Memory of one plan or group: base[r] is rank r's slab in this process. Mapped transports only. */
typedef struct {
    int rank, n_ranks;
    size_t bytes;
    char **base; /* [n_ranks], owned by the transport; all set after slab_share() */
} epx_slab_t;

/* The connection of one group over one transport; transports embed it as their first member. */
typedef struct {
    const epx_transport_t *transport; /* borrowed, static */
    int rank, n_ranks;
    const epx_peer_t *peers; /* [n_ranks], borrowed from the group */
    int may_spin;            /* 0 when there are more ranks on this host than cores */
    epx_slab_t *ctl;         /* the group's control slab once shared; owned by the group */
} epx_net_t;

enum { EPX_NET_CARD_BYTES = 64 };

struct epx_transport {
    const char *name, *detail;
    uint32_t links; /* bits of epx_link_t */
    int score;      /* higher is tried first */
    /* Can it join these ranks? EPX_OK, or EPX_ERR_UNSUPPORTED with the reason. Same answer on every rank. */
    epx_status_t (*can)(const epx_peer_t *peers, int n_ranks);
    /* Local. Fills card[EPX_NET_CARD_BYTES], which core gives to every peer. */
    epx_status_t (*open)(int rank, int n_ranks, const epx_peer_t *peers, epx_net_t **out_net, void *card);
    /* Collective: cards is [n_ranks][EPX_NET_CARD_BYTES]. */
    epx_status_t (*connect)(epx_net_t *net, const void *cards, uint64_t timeout_ns);
    void (*close)(epx_net_t *net);
    /* Is there memory for n_slabs slabs of this size on this host now? EPX_ERR_NOMEM with bytes wanted and free. */
    epx_status_t (*slab_check)(epx_net_t *net, size_t bytes, int n_slabs);
    /* Local: own slab, zeroed, pages reserved. */
    epx_status_t (*slab_alloc)(epx_net_t *net, size_t bytes, epx_slab_t **out_slab);
    /* Collective, same order on every rank: fills base[]. */
    epx_status_t (*slab_share)(epx_net_t *net, epx_slab_t *slab, uint64_t timeout_ns);
    void (*slab_free)(epx_net_t *net, epx_slab_t *slab);
    /* A rank whose process has died, or -1. Slow path of waits: one system call at most. Any thread. */
    int (*dead_rank)(epx_net_t *net);
};

#endif
