/* The C ABI between libepx and the module that knows UCX (libepx_ucx.so), which is opened at run time so that libepx needs no
 * UCX. A wire carries messages of header and data to numbered peers, each whole and once, in any order. It keeps no deadline
 * and knows nothing of slabs. One thread at a time; the callbacks run inside progress(). */
#ifndef EPX_UCX_WIRE_H
#define EPX_UCX_WIRE_H

#include <stddef.h>
#include <stdint.h>

#define EPX_WIRE_ABI 2u
#define EPX_WIRE_MODULE "epx_wire_module" /* exported: const epx_wire_module_t *epx_wire_module(void) */

typedef struct epx_wire epx_wire_t;
/* A message has come; both pointers are borrowed until the return. */
typedef void (*epx_wire_recv_fn)(void *ctx, const void *header, size_t header_bytes, const void *data, size_t n_bytes);
/* The connection to a peer is broken for good. */
typedef void (*epx_wire_lost_fn)(void *ctx, int peer);

typedef struct {
    uint32_t abi;        /* EPX_WIRE_ABI */
    const char *library; /* "UCX 1.13.1" */
    /* 0, or -1 with a text in error[]. */
    int (*open)(int n_peers, epx_wire_recv_fn recv, epx_wire_lost_fn lost, void *ctx, epx_wire_t **out_wire, char *error,
                size_t error_bytes);
    /* The address that peers connect to. *inout_bytes: room, then used. */
    int (*address)(epx_wire_t *w, void *out_address, size_t *inout_bytes, char *error, size_t error_bytes);
    int (*connect)(epx_wire_t *w, int peer, const void *address, char *error, size_t error_bytes);
    /* *busy becomes 1, and 0 when header and data may be reused. -1: the peer is lost (and *busy is 0). */
    int (*send)(epx_wire_t *w, int peer, const void *header, size_t header_bytes, const void *data, size_t n_bytes,
                uint32_t *busy);
    void (*progress)(epx_wire_t *w);
    /* Has everything sent so far left this host? NULL: yes; else ask again, until flushed() is 1 or drop it. */
    void *(*flush)(epx_wire_t *w);
    int (*flushed)(epx_wire_t *w, void *flush);
    void (*drop_flush)(epx_wire_t *w, void *flush);
    /* A descriptor that becomes readable with the next event, or -1 when progress() has something to do now. */
    int (*arm)(epx_wire_t *w);
    /* Break the connection to a peer: what is on its way there is given up, so that flush() does not wait for it. Not told to
     * lost(). */
    void (*drop)(epx_wire_t *w, int peer);
    /* At once, whatever is in flight. NULL is allowed. */
    void (*close)(epx_wire_t *w);
} epx_wire_module_t;

#endif
