/* What a device link must provide: memory of the ranks' GPUs that all ranks of a group can reach, on top of the group's host
 * transport. A group on devices has both: the host transport carries flags of create, destroy and abort, the link the rows.
 * A link includes only spi/, cuda/ and base/. */
#ifndef EPX_SPI_DEVICE_H
#define EPX_SPI_DEVICE_H

#include "spi/transport.h"

typedef struct epx_device_link epx_device_link_t;

/* Wire modes that the self-test of a link has passed on every pair of ranks, bits. */
enum { EPX_WIRE_PACKETS = 1u << 0, EPX_WIRE_BULK = 1u << 1 };

/* The devices of one group; links embed it as their first member. The same on every rank, but for `device`. */
typedef struct epx_device_net {
    const epx_device_link_t *link;
    int device;        /* of this rank */
    int max_blocks;    /* multiprocessors of each rank's own: those of its device, shared out; the least of the group */
    uint32_t wire;     /* EPX_WIRE_* */
    int outlives_peer; /* a dead peer's memory stays readable: masking is possible */
} epx_device_net_t;

/* base[r]: rank r's slab as this rank's device sees it. */
typedef struct {
    int rank, n_ranks;
    uint64_t bytes;
    char **base; /* [n_ranks], owned by the link; all set after slab_share() */
} epx_device_slab_t;

struct epx_device_link {
    const char *name, *detail;
    /* EPX_OK, or EPX_ERR_UNSUPPORTED with the reason. */
    epx_status_t (*available)(void);
    /* The i-th device: "gpu0" and what it is; static strings. EPX_ERR_NOT_FOUND past the end. */
    epx_status_t (*device_text)(int i, const char **out_name, const char **out_detail);
    /* Collective over the group, also when it fails on one rank. Tests the links. */
    epx_status_t (*open)(epx_net_t *host, int device, uint64_t timeout_ns, epx_device_net_t **out_net);
    void (*close)(epx_device_net_t *d);
    /* Local: zeroed. EPX_ERR_NOMEM with bytes wanted and free. */
    epx_status_t (*slab_alloc)(epx_net_t *host, uint64_t bytes, epx_device_slab_t **out_slab);
    /* Collective. */
    epx_status_t (*slab_share)(epx_net_t *host, epx_device_slab_t *slab, uint64_t timeout_ns);
    void (*slab_free)(epx_net_t *host, epx_device_slab_t *slab);
};

#endif
