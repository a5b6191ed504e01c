/* Puts, flags, waits and the abort word of slabs. A flag is a 64-bit word in the waiting rank's slab that only one peer
 * writes and that only grows. Waits spin, yield, then park on a futex; each slow step also looks at the abort word, at dead
 * peers and at the deadline. One thread waits on a slab at a time. Ordering is proved in docs/protocol.md. */
#ifndef EPX_SPI_WAIT_H
#define EPX_SPI_WAIT_H

#include <stdint.h>

#include "base/atomic.h"
#include "base/compiler.h"
#include "spi/layout.h"
#include "spi/transport.h"

/* First EPX_HEAD_BYTES of every slab. Written by peers, except magic and hash. */
typedef struct {
    uint64_t magic;
    uint64_t hash; /* of the config; 0 in a group's control slab */
    uint32_t left; /* control slab: its owner has destroyed the group */
    uint32_t pad0;
    char pad1[40];
    uint64_t abort_word; /* epx_abort_pack(); 0: none; the first writer wins */
    char pad2[56];
    uint32_t parked; /* the owner announces a futex wait */
    uint32_t bell;   /* futex word */
    char pad3[120];
} epx_slab_head_t;

#define EPX_SLAB_MAGIC UINT64_C(0x31306C6270786565)

/* Why a slab was aborted: status, the rank that found it, and the rank it is about (-1: none). Never 0. */
static inline uint64_t epx_abort_pack(epx_status_t s, int origin, int about) {
    return (uint64_t)(uint32_t)(-(int)s) << 40 | (uint64_t)(uint32_t)(origin + 1) << 20 | (uint64_t)(uint32_t)(about + 1);
}
static inline epx_status_t epx_abort_status(uint64_t w) { return (epx_status_t)(-(int)(w >> 40)); }
static inline int epx_abort_origin(uint64_t w) { return (int)((w >> 20) & 0xFFFFFu) - 1; }
static inline int epx_abort_about(uint64_t w) { return (int)(w & 0xFFFFFu) - 1; }

/* One wait, for its error message. */
typedef struct {
    epx_net_t *net;
    epx_slab_t *slab;
    const char *phase; /* "dispatch", "combine", "all-gather", "destroy" */
    uint64_t epoch;
    uint64_t timeout_ns; /* UINT64_MAX: none */
    uint64_t *wait_ns;   /* time spent is added here; NULL: not wanted */
} epx_wait_t;

static inline epx_slab_head_t *epx_slab_head(const epx_slab_t *s, int rank) { return (epx_slab_head_t *)(void *)s->base[rank]; }
static inline uint64_t *epx_slab_word(const epx_slab_t *s, int rank, uint64_t off) {
    return (uint64_t *)(void *)(s->base[rank] + off);
}

/* Where to write n_bytes that belong at `off` of rank's slab; write them before the next put or signal to that rank. */
static inline char *epx_slab_put(const epx_slab_t *s, int rank, uint64_t off, size_t n_bytes) {
    if (EPX_LIKELY(s->base[rank] != NULL)) return s->base[rank] + off;
    return s->net->transport->messages->put(s, rank, off, n_bytes);
}
/* Wake the owner of rank's slab if it is parked. Call after a sequentially consistent store to one of its words. */
void epx_slab_wake(const epx_slab_t *s, int rank);
/* Set a word of `rank`'s slab: everything written or read before is ordered before it (release). */
static inline void epx_slab_signal(const epx_slab_t *s, int rank, uint64_t off, uint64_t value) {
    if (EPX_UNLIKELY(s->base[rank] == NULL)) {
        s->net->transport->messages->signal(s, rank, off, value);
        return;
    }
    /* Store and load are sequentially consistent: against the parking side either it sees the value or we see `parked`. */
    __atomic_store_n(epx_slab_word(s, rank, off), value, __ATOMIC_SEQ_CST);
    if (EPX_UNLIKELY(__atomic_load_n(&epx_slab_head(s, rank)->parked, __ATOMIC_SEQ_CST))) epx_slab_wake(s, rank);
}
/* Let the messages of this slab leave the host; nothing to do where all peers are mapped. After the waits of a phase. */
static inline void epx_slab_drain(const epx_slab_t *s) {
    if (s->net != NULL) s->net->transport->messages->drain(s);
}
/* Set the abort word of every rank's slab that has none yet, and wake it. Any thread. */
void epx_slab_abort(const epx_slab_t *s, uint64_t word);

/* Slow path of epx_wait_ge(). */
epx_status_t epx_wait_slow(const epx_wait_t *w, int peer, uint64_t off, uint64_t value);
/* Wait until the word at `off` of the own slab, written by `peer`, is >= value (acquire).
 * Returns EPX_ERR_TIMEOUT naming phase, peer, epoch, expected and seen; EPX_ERR_PEER naming the dead rank and its pid;
 * EPX_ERR_ABORTED (or _PEER) when the slab's abort word is set. */
static inline epx_status_t epx_wait_ge(const epx_wait_t *w, int peer, uint64_t off, uint64_t value) {
    if (EPX_LIKELY(epx_load_acquire_u64(epx_slab_word(w->slab, w->slab->rank, off)) >= value)) return EPX_OK;
    return epx_wait_slow(w, peer, off, value);
}
/* Take in what messages have come. Never blocks. Any thread. */
static inline void epx_net_progress(epx_net_t *net) {
    if (net->transport->messages != NULL) net->transport->messages->progress(net);
}
/* "rank 1 (pid 123)", with the world rank where the group numbers it otherwise and the host where it is another one. Valid until
 * this thread's next call. */
const char *epx_peer_text(const epx_net_t *net, int rank);
/* Error of a set abort word, for this rank. */
epx_status_t epx_abort_error(epx_net_t *net, uint64_t word);

#endif
