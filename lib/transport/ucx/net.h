/* Private structures of transport ucx: the connection of one group, its slabs, and the messages between hosts. */
#ifndef EPX_UCX_NET_H
#define EPX_UCX_NET_H

#include <pthread.h>

#include "spi/transport.h"
#include "spi/wait.h"
#include "transport/ucx/wire.h"

enum { UCX_WINDOW_WORDS = 4, UCX_MAX_FLAGS = 160 };

typedef enum { UCX_HELLO = 1, UCX_DATA, UCX_ABORT, UCX_LEFT } ucx_kind_t;

/* Header of every message. */
typedef struct {
    uint32_t magic, kind;
    int32_t src;       /* group rank */
    uint32_t turn;     /* of its slab, see ucx_slab_t */
    uint64_t key[2];   /* the receiver's, from its card: strangers do not know it */
    uint64_t serial;   /* of the slab */
    uint64_t seq;      /* DATA: 1, 2, ... on this slab from this rank */
    uint64_t flag_off; /* DATA: UINT64_MAX: no flag */
    uint64_t value;    /* of the flag, or the abort word */
} ucx_head_t;

/* Data of a DATA message: segments, each this and n_bytes, the next one at a multiple of 16. */
typedef struct {
    uint64_t off, n_bytes;
} ucx_segment_t;

/* A message being written or on its way. */
typedef struct {
    ucx_head_t head;
    char *data; /* [box_bytes] */
    size_t n_bytes;
    size_t last_at; /* its last segment; SIZE_MAX: none */
    uint32_t busy;  /* the wire still reads it */
} ucx_box_t;

/* One slab and one message peer: what goes there and what comes from there. */
typedef struct {
    ucx_box_t *boxes; /* [n_boxes] */
    char *memory;     /* of all their data */
    int open;         /* the box being written, or -1 */
    int failed;       /* nothing goes there any more */
    uint32_t abort_sent;
    uint32_t turn;                    /* newest turn heard of from there: the fields below are of it */
    uint64_t sent;                    /* messages of this rank's turn */
    uint64_t arrived;                 /* all of 1 .. arrived have come */
    uint64_t ahead[UCX_WINDOW_WORDS]; /* bit i: arrived + 1 + i has come */
    int n_flags;
    struct {
        uint64_t seq, off, value;
    } flags[UCX_MAX_FLAGS]; /* that wait for earlier messages */
} ucx_link_t;

typedef struct ucx_slab {
    epx_slab_t slab;
    epx_slab_t *inner;
    struct ucx_slab *next;
    uint64_t serial, timeout_ns;
    ucx_link_t **links; /* [n_ranks], NULL for mapped ranks */
    int n_boxes, dirty; /* dirty: something was sent since the last drain */
    size_t box_bytes;
    uint32_t turn; /* grows with each recover: messages of an earlier turn are dropped by those who know of the new one */
    int renewing;  /* between renew() and settle(): the abort word says nothing */
} ucx_slab_t;

/* A message without data, freed once sent. */
typedef struct ucx_control {
    ucx_head_t head;
    uint32_t busy;
    struct ucx_control *next;
} ucx_control_t;

typedef struct {
    uint32_t lost, left, hello; /* hello: round. Set by the wire's callbacks, read by any thread */
    uint64_t key[2];
    int inner; /* rank in the inner net, -1: reached by messages */
} ucx_peer_t;

typedef struct {
    epx_net_t net;
    epx_net_t *inner;        /* ranks of this host */
    epx_peer_t *inner_peers; /* [n_inner] */
    int *inner_ranks;        /* [n_inner] -> group rank */
    uint8_t *inner_masked;   /* [n_inner] as net->masked says */
    int n_inner, inner_rank;
    const epx_wire_module_t *module; /* NULL when no rank is elsewhere */
    epx_wire_t *wire;
    pthread_mutex_t lock; /* of wire, slabs, controls, links' receiving part */
    uint64_t key[2], serial;
    ucx_peer_t *peers; /* [n_ranks] */
    ucx_slab_t *slabs;
    ucx_control_t *controls;
    ucx_slab_t *zombies; /* freed while the wire still read their boxes */
} ucx_net_t;

/* ---- messages.c ---- */

extern const epx_messages_t ucx_messages;
/* Callbacks of the wire; ctx is the ucx_net_t. */
void ucx_receive(void *ctx, const void *header, size_t header_bytes, const void *data, size_t n_bytes);
void ucx_lost(void *ctx, int peer);
/* Send a message without data; lost peers and lack of memory are ignored. about: the slab that it is about, or NULL. */
void ucx_send_control(ucx_net_t *n, ucx_kind_t kind, int dst, const ucx_slab_t *about, uint64_t value);
/* Until everything sent has left this host; 0 when the deadline came first. */
int ucx_flush(ucx_net_t *n, uint64_t deadline_ns);
/* Take in what has come, waiting for the lock. */
void ucx_progress_now(ucx_net_t *n);
/* Free the links of a slab; 0 when the wire still reads a box. */
int ucx_links_idle(const ucx_slab_t *s);
void ucx_links_free(ucx_slab_t *s);

#endif
