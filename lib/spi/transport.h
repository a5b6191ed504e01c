/* What a transport must provide: connect the ranks of a group, give every rank a slab that all ranks can reach, and tell
 * which peer is dead. A peer is mapped (its base address is known here) or reached by messages; a group may have both. All
 * share the waits of spi/wait.h.
 * A transport includes only spi/ and base/. */
#ifndef EPX_SPI_TRANSPORT_H
#define EPX_SPI_TRANSPORT_H

#include <stddef.h>
#include <stdint.h>

#include "epx/epx.h"

typedef struct epx_transport epx_transport_t;
typedef struct epx_net epx_net_t;
struct epx_device_net;

enum { EPX_NODE_BYTES = 40 };

/* One rank as its peers know it, exchanged when the world is made. */
typedef struct {
    uint8_t host[16];    /* equal on one host and network namespace */
    uint8_t process[16]; /* random, equal for ranks (threads) of one process */
    int64_t pid;
    int64_t uid;
    int32_t world_rank;
    int32_t pad;
    char node[EPX_NODE_BYTES]; /* host name, for messages */
} epx_peer_t;

/* Memory of one plan or group: base[r] is rank r's slab in this process, or NULL when r is reached by messages. */
typedef struct {
    int rank, n_ranks;
    size_t bytes;
    char **base;    /* [n_ranks], owned by the transport; set after slab_share(), the own one before */
    epx_net_t *net; /* set where a base may be NULL */
} epx_slab_t;

/* The connection of one group over one transport; transports embed it as their first member. */
struct epx_net {
    const epx_transport_t *transport; /* borrowed, static */
    int rank, n_ranks;
    const epx_peer_t *peers;       /* [n_ranks], borrowed from the group */
    int may_spin;                  /* 0 when there are more ranks on this host than cores */
    epx_slab_t *ctl;               /* the group's control slab once shared; owned by the group */
    int n_messages;                /* peers that are reached by messages */
    struct epx_device_net *device; /* of a group on devices (spi/device.h), owned by the group; NULL on CPUs */
    const uint8_t *masked; /* [n_ranks] 1: dead and known to be; dead_rank() passes over it. Owned by the group; set at open */
    uint32_t found_dead;   /* 1 + a rank that this rank, or one that told it, has found dead; 0: none */
};

enum { EPX_NET_CARD_BYTES = 1024 };

/* Peers whose memory is not mapped. A message is a list of puts into the peer's slab, closed by one flag. The receiver applies
 * every put of every message sent before the flag, then the flag (release); it does so inside its own calls of progress(), which
 * all waits make. Messages may be split and may overtake each other. One thread a slab, but abort(), progress() and left():
 * any thread. */
typedef struct {
    /* Local, after slab_alloc(): buffers, so that puts and signals take no memory. put_bytes: the largest put; phase_bytes: all
     * puts of one phase to one peer; n_phases: phases that may be in flight to one peer. */
    epx_status_t (*reserve)(epx_slab_t *slab, size_t put_bytes, size_t phase_bytes, int n_phases, uint64_t timeout_ns);
    /* Where to write n_bytes that go to `off` of rank's slab: before the next put or signal to that rank. Never NULL: after a
     * failure, which aborts the own slab, what is written is lost. */
    char *(*put)(const epx_slab_t *slab, int rank, uint64_t off, size_t n_bytes);
    void (*signal)(const epx_slab_t *slab, int rank, uint64_t off, uint64_t value);
    void (*abort)(const epx_slab_t *slab, int rank, uint64_t word);
    /* Until all messages of this slab have left this host, so that a rank may then stay away; bounded by timeout_ns. */
    void (*drain)(const epx_slab_t *slab);
    void (*progress)(epx_net_t *net);
    /* Sleep until a message comes, at most max_ns. */
    void (*idle)(epx_net_t *net, uint64_t max_ns);
    /* Has that peer destroyed its group? */
    int (*left)(const epx_net_t *net, int rank);
    /* After a failure. renew: what goes out from now on is of `turn`, above all earlier ones; what was begun is dropped, masked
     * ranks are cut off. settle: every living peer has renewed, so what still comes of earlier turns is dropped; in between it is
     * dropped once something of the turn has come from the same peer. One thread. */
    void (*renew)(epx_slab_t *slab, uint32_t turn);
    void (*settle)(epx_slab_t *slab, uint32_t turn);
    /* Bytes that reserve() takes for n_peers message peers. Pure. */
    size_t (*bytes)(size_t put_bytes, size_t phase_bytes, int n_phases, int n_peers);
} epx_messages_t;

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
    /* A rank whose process has died and which is not masked, or -1. Slow path of waits: one system call at most. Any thread. */
    int (*dead_rank)(epx_net_t *net);
    const epx_messages_t *messages; /* NULL: every peer is mapped */
    /* Is it there on this machine? NULL: always. EPX_ERR_UNSUPPORTED with the reason; the same answer each time. */
    epx_status_t (*probe)(void);
    /* Told before (begins 1) and after each of the four calls of a plan: its name (static), channel, epoch, time waited since
     * create. NULL: not wanted. */
    void (*at_call)(epx_net_t *net, const char *call, int channel, uint64_t epoch, uint64_t wait_ns, int begins);
    /* Collective, same order on every rank: give n_bytes to every peer, and `fd` (-1: none) to those of other processes.
     * out_messages [n_ranks][n_bytes], own included; out_fds [n_ranks], -1: none came; owned by the caller, also after a failure.
     * NULL: cannot, so it joins no groups on devices. */
    epx_status_t (*pass)(epx_net_t *net, const void *message, size_t n_bytes, int fd, void *out_messages, int *out_fds,
                         uint64_t timeout_ns);
};

/* The transport that joins the ranks of one host, for transports that join hosts. Static. */
const epx_transport_t *epx_transport_of_host(void);

#endif
