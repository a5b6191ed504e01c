/* What an exchange backend must provide, and the plan as core and backends see it. A backend includes only spi/ and base/.
 * Core has validated every argument and the order of calls before a backend function runs. */
#ifndef EPX_SPI_A2A_H
#define EPX_SPI_A2A_H

#include <stddef.h>
#include <stdint.h>

#include "epx/epx.h"
#include "spi/layout.h"
#include "spi/place.h"
#include "spi/rows.h"
#include "spi/transport.h"
#include "spi/wait.h"

typedef struct epx_a2a epx_a2a_t;

/* Where a channel stands: the call that is expected next. */
typedef enum { EPX_CH_DISPATCH_SEND = 0, EPX_CH_DISPATCH_RECV, EPX_CH_COMBINE_SEND, EPX_CH_COMBINE_RECV } epx_channel_state_t;

/* Routing of one exchange as the receiver sees it. Arrays are owned by the plan's private block. */
typedef struct {
    const int32_t **ids;       /* [W] -> [n_tokens[src], K] */
    const float **weights;     /* [W] -> [n_tokens[src], K] */
    uint32_t *n_tokens;        /* [W] */
    epx_list_entry_t *entries; /* [row_max] ordered (local expert, src, token) */
    uint8_t *entry_k;          /* [row_max] the first k of that token that names the expert */
    int32_t *expert_off;       /* [El + 1] */
    int32_t *out_off;          /* [El + 1] first row of each local expert in the plan's layout, then all rows */
    int32_t *row_of;           /* [W][T * K] output row of (src, token, k), or -1: not ours. Repeats name the same row */
    uint64_t *stamp;           /* [max(El, W)] scratch: the last token that named it */
    epx_row_term_t *terms;     /* [max(K, W)] scratch */
    const void **row_base;     /* [W] rows of each source on this side */
    const float **scale_base;  /* [W] */
    const int32_t **rows_of;   /* [W] row_of of each source, for epx_plan_partials() */
    void **sums;               /* [W] where this rank's partial sums go */
} epx_routes_t;

typedef struct {
    epx_channel_state_t state;
    int n_tokens;                 /* T of the exchange in flight */
    uint64_t epoch;               /* of the exchange in flight, or the last one; the first is 1 */
    const epx_placement_t *place; /* of that exchange */
    const char *own_rows;         /* staged rows and scales of this rank */
    const float *own_scales;
    int caller_sums;  /* the caller writes the partial sums in place */
    int n_missing;    /* tokens with places that no living rank computes */
    uint8_t *missing; /* [T] such places of each token */
    float *weights;   /* [T * K] weights in force; NULL without cfg.renormalize */
    epx_lists_t lists;
    epx_routes_t routes;
} epx_channel_t;

enum { EPX_WHY_BYTES = 112 };

struct epx_plan {
    const epx_a2a_t *a2a;
    char why[EPX_WHY_BYTES];     /* why this backend */
    epx_group_t *group;          /* borrowed; for core */
    epx_net_t *net;              /* borrowed from the group */
    epx_slab_t *slab;            /* owned */
    epx_plan_config_t cfg;       /* normalised: no EPX_BYTES, no 0 defaults; tables point into the private block */
    epx_row_form_t out_form;     /* rows of the result of combine */
    epx_row_form_t expert_form;  /* rows of expert outputs */
    epx_row_form_t combine_form; /* rows on the wire back */
    epx_slab_layout_t layout;
    int rank, n_ranks, row_cap;
    int n_local_max;  /* most slots of a rank */
    size_t row_max;   /* rows that lists can hold */
    size_t max_rows;  /* rows that dispatch output and expert outputs can have in the plan's layout */
    size_t scale_gap; /* words from a scale of the output to the row's next */
    size_t private_bytes;
    uint64_t device_slab_bytes, device_private_bytes; /* 0 on CPUs */
    epx_placement_t placements[2];
    int newest_placement;
    int32_t *slot_count; /* [W] scratch */
    uint8_t *alive;      /* [W] 0: masked, no part in exchanges */
    int any_masked;
    uint64_t n_recovers;
    epx_channel_t *channels; /* [n_channels] */
    void *backend_block;     /* a2a->private_bytes() of them, zeroed */

    uint64_t *rows_sent, *rows_received; /* [W] */
    uint64_t n_dispatches, n_combines, dispatch_bytes, combine_bytes, wait_ns;

    uint32_t error_claim;  /* the first error takes it, then fills the message, then releases error_status */
    uint32_t error_status; /* -(status); 0: none */
    char error_message[512];
};

/* What a backend on devices provides besides; its slab is device memory, the plan's host slab only a head. */
typedef struct {
    /* Bytes of device memory of a valid config, shared with peers and private. n_local_max, row_max: of the rank with most
     * experts. */
    void (*bytes)(const epx_net_t *net, const epx_plan_config_t *cfg, int n_local_max, size_t row_max, uint64_t *out_slab,
                  uint64_t *out_private);
    epx_status_t (*open)(epx_plan_t *p, int n_local_max);      /* local */
    epx_status_t (*share)(epx_plan_t *p, uint64_t timeout_ns); /* collective, also when it fails on one rank */
    void (*close)(epx_plan_t *p);                              /* also after a failed open */
    void (*drain)(epx_plan_t *p); /* wait until the device has finished; bounded by the kernels' deadlines */
    epx_status_t (*check)(epx_plan_t *p, int *out_about); /* the device's first error, and the rank it is about. Never blocks */
    void (*stop)(epx_plan_t *p);                          /* make kernels that wait, and later ones, return. Any thread */
    epx_status_t (*dispatch)(epx_plan_t *p, const epx_io_t *io); /* both halves in one launch */
    epx_status_t (*combine)(epx_plan_t *p, const epx_io_t *io);
} epx_a2a_device_t;

struct epx_a2a {
    const char *name, *detail;
    int score;
    uint32_t regions;       /* EPX_REGION_* it needs in the slab */
    int peers_read_private; /* peers (threads) read the private block: destroy waits for them also after an abort */
    /* Can it run here? EPX_OK, or EPX_ERR_UNSUPPORTED with the reason. net NULL: only the config is known. */
    epx_status_t (*can)(const epx_net_t *net, const epx_plan_config_t *cfg);
    /* Bytes of backend_block for a valid, normalised config; 0 with overflow reported as EPX_ERR_CAPACITY. */
    epx_status_t (*private_bytes)(const epx_plan_config_t *cfg, int n_ranks, size_t row_max, size_t *out_bytes);
    epx_status_t (*dispatch_send)(epx_plan_t *p, const epx_io_t *io);
    /* Waits, fills channel->routes and ->lists, writes io->out_*. */
    epx_status_t (*dispatch_recv)(epx_plan_t *p, const epx_io_t *io);
    epx_status_t (*combine_send)(epx_plan_t *p, const epx_io_t *io);
    epx_status_t (*combine_recv)(epx_plan_t *p, const epx_io_t *io);
    const epx_a2a_device_t *device; /* NULL: a CPU backend */
};

/* ---- replication: `replicate` consecutive ranks hold the same tokens; the first of them is the source that lists name ---- */

static inline int epx_plan_source(const epx_plan_t *p, int rank) { return rank - rank % p->cfg.replicate; }
/* The rank whose copy of the tokens of `source` is read by dst: dst itself if it holds them, else one of the holders, spread over
 * the readers; the next living one where that is masked. -1: none lives. */
static inline int epx_plan_holder(const epx_plan_t *p, int source, int dst) {
    int n = p->cfg.replicate, first = dst >= source && dst - source < n ? dst - source : dst % n;
    for (int i = 0; i < n; i++)
        if (p->alive[source + (first + i) % n]) return source + (first + i) % n;
    return -1;
}
/* Does this rank's copy of its tokens go to dst? */
static inline int epx_plan_sends_to(const epx_plan_t *p, int dst) {
    return p->alive[dst] && epx_plan_holder(p, epx_plan_source(p, p->rank), dst) == p->rank;
}

#endif
