/* Slow paths of flags and waits: yield, park, deadline, dead peers. System calls: sched_yield, futex, poll (in dead_rank), and
 * those of message transports. */
#include "spi/wait.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/status.h"

/* A flag takes 0.15 us, a futex wake 40 us (docs/protocol.md, section 6). So: some flag times without a system call, then polls
 * between yields, which give a peer on the same core its turn, then sleep. */
enum { POLLS_PER_CLOCK = 64, POLLS_BEFORE_YIELD = 20, POLLS_PER_PROGRESS = 4 };
static const uint64_t SPIN_NS = 5000, YIELD_NS = 400000, SLICE_NS = 20000000;
/* With message peers: how long to sleep for one of them, or for a mapped one while messages may come. */
static const uint64_t IDLE_NS = 1000000, MIXED_SLICE_NS = 200000;
/* What a slice counts at most against the deadline. When more time has gone, this process did not run: it was stopped (Ctrl-Z, a
 * debugger, a frozen control group), and its peers probably with it. A peer that hangs while this one runs is still found. */
static const uint64_t MOST_COUNTED_NS = 250000000;

_Static_assert(sizeof(epx_slab_head_t) == EPX_HEAD_BYTES, "slab head");

void epx_slab_wake(const epx_slab_t *s, int rank) {
    epx_slab_head_t *h = epx_slab_head(s, rank);
    __atomic_fetch_add(&h->bell, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &h->bell, FUTEX_WAKE, 1, NULL, NULL, 0);
}

const char *epx_peer_text(const epx_net_t *net, int rank) {
    static _Thread_local char text[EPX_NODE_BYTES + 64];
    const epx_peer_t *p = &net->peers[rank];
    int here = memcmp(p->host, net->peers[net->rank].host, sizeof p->host) == 0;
    char world[32] = "";
    if (p->world_rank != rank) snprintf(world, sizeof world, "world rank %d, ", (int)p->world_rank);
    snprintf(text, sizeof text, "rank %d (%spid %lld%s%.*s)", rank, world, (long long)p->pid, here ? "" : " on ",
             here ? 0 : EPX_NODE_BYTES, p->node);
    return text;
}

void epx_slab_abort(const epx_slab_t *s, uint64_t word) {
    for (int r = 0; r < s->n_ranks; r++) {
        uint64_t none = 0;
        if (s->base[r] == NULL) {
            s->net->transport->messages->abort(s, r, word);
            continue;
        }
        __atomic_compare_exchange_n(&epx_slab_head(s, r)->abort_word, &none, word, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&epx_slab_head(s, r)->parked, __ATOMIC_SEQ_CST)) epx_slab_wake(s, r);
    }
}

epx_status_t epx_abort_error(epx_net_t *net, uint64_t word) {
    int origin = epx_abort_origin(word), about = epx_abort_about(word);
    epx_status_t s = epx_abort_status(word);
    if (s == EPX_ERR_PEER && about >= 0 && about < net->n_ranks) {
        epx_store_relaxed_u32(&net->found_dead, (uint32_t)about + 1);
        return epx_fail(EPX_ERR_PEER, "%s is gone; found by rank %d", epx_peer_text(net, about), origin);
    }
    if (s == EPX_ERR_TIMEOUT && about >= 0 && about < net->n_ranks)
        return epx_fail(EPX_ERR_ABORTED, "rank %d gave up waiting for %s and aborted the plan", origin,
                        epx_peer_text(net, about));
    if (s == EPX_ERR_FORMAT)
        return epx_fail(EPX_ERR_ABORTED, "rank %d got a malformed message from rank %d and aborted the plan", origin, about);
    return epx_fail(EPX_ERR_ABORTED, "rank %d aborted the plan", origin);
}

/* Park until the bell rings or the slice ends. Returns at once if the word has arrived. */
static void park(const epx_wait_t *w, const uint64_t *word, uint64_t value, uint64_t slice_ns) {
    epx_slab_head_t *h = epx_slab_head(w->slab, w->slab->rank);
    struct timespec ts = {(time_t)(slice_ns / 1000000000u), (long)(slice_ns % 1000000000u)};
    uint32_t bell = __atomic_load_n(&h->bell, __ATOMIC_SEQ_CST);
    __atomic_store_n(&h->parked, 1, __ATOMIC_SEQ_CST); /* partner: the load of `parked` in epx_slab_signal() */
    if (__atomic_load_n(word, __ATOMIC_SEQ_CST) < value && __atomic_load_n(&h->abort_word, __ATOMIC_SEQ_CST) == 0)
        syscall(SYS_futex, &h->bell, FUTEX_WAIT, bell, &ts, NULL, 0);
    __atomic_store_n(&h->parked, 0, __ATOMIC_SEQ_CST);
}

static epx_status_t peer_gone(const epx_wait_t *w, int dead) {
    epx_store_relaxed_u32(&w->net->found_dead, (uint32_t)dead + 1);
    epx_slab_abort(w->slab, epx_abort_pack(EPX_ERR_PEER, w->net->rank, dead));
    return epx_fail(EPX_ERR_PEER, "%s is gone: %s epoch %llu cannot finish", epx_peer_text(w->net, dead), w->phase,
                    (unsigned long long)w->epoch);
}

static int has_left(const epx_net_t *net, int peer) {
    if (net->ctl == NULL) return 0;
    if (net->ctl->base[peer] == NULL) return net->transport->messages->left(net, peer);
    return epx_load_acquire_u32(&epx_slab_head(net->ctl, peer)->left) != 0;
}

/* Has anything happened that ends the wait for `value` with an error? Called between slices. */
static epx_status_t look_around(const epx_wait_t *w, int peer, const uint64_t *word, uint64_t value) {
    uint64_t abort_word = epx_load_acquire_u64(&epx_slab_head(w->slab, w->slab->rank)->abort_word);
    if (abort_word != 0) return epx_abort_error(w->net, abort_word);
    int dead = w->net->transport->dead_rank(w->net);
    if (dead >= 0) return peer_gone(w, dead);
    /* A peer may leave right after its last word. Its `left` is then seen with the word, and nobody is to be told of a loss. */
    if (has_left(w->net, peer) && epx_load_acquire_u64(word) < value) {
        epx_slab_abort(w->slab, epx_abort_pack(EPX_ERR_PEER, w->net->rank, peer));
        return epx_fail(EPX_ERR_PEER, "%s has left the group: %s epoch %llu cannot finish", epx_peer_text(w->net, peer), w->phase,
                        (unsigned long long)w->epoch);
    }
    return EPX_OK;
}

static epx_status_t timed_out(const epx_wait_t *w, int peer, uint64_t value, uint64_t seen) {
    epx_slab_abort(w->slab, epx_abort_pack(EPX_ERR_TIMEOUT, w->net->rank, peer));
    return epx_fail(EPX_ERR_TIMEOUT, "%s: rank %d waited %.3f s for %s: epoch %llu, expected %llu, seen %llu", w->phase,
                    w->net->rank, (double)w->timeout_ns * 1e-9, epx_peer_text(w->net, peer), (unsigned long long)w->epoch,
                    (unsigned long long)value, (unsigned long long)seen);
}

/* Poll without system calls, or with sched_yield, until `limit_ns` have gone since start. 1: the word has arrived. Messages are
 * taken in between. */
static int poll_word(epx_net_t *net, const uint64_t *word, uint64_t value, uint64_t start, uint64_t limit_ns, int yield) {
    int polls = net->n_messages ? POLLS_PER_PROGRESS : yield ? POLLS_BEFORE_YIELD : POLLS_PER_CLOCK;
    do {
        for (int i = 0; i < polls; i++) {
            if (epx_load_acquire_u64(word) >= value) return 1;
            EPX_CPU_RELAX();
        }
        epx_net_progress(net);
        if (yield) sched_yield();
    } while (epx_now_ns() - start < limit_ns);
    return 0;
}

/* Between looks. Where messages may come, no sleep is long: they are taken in by this thread. */
static void sleep_a_slice(const epx_wait_t *w, int peer, const uint64_t *word, uint64_t value, uint64_t left_ns) {
    uint64_t most = w->net->n_messages == 0 ? SLICE_NS : w->slab->base[peer] == NULL ? IDLE_NS : MIXED_SLICE_NS;
    uint64_t slice = left_ns < most ? left_ns : most;
    if (w->slab->base[peer] == NULL) w->net->transport->messages->idle(w->net, slice);
    else park(w, word, value, slice);
    epx_net_progress(w->net);
}

static epx_status_t wait_parked(const epx_wait_t *w, int peer, const uint64_t *word, uint64_t value) {
    uint64_t spent = 0, last = epx_now_ns();
    for (;;) {
        epx_status_t s = look_around(w, peer, word, value);
        /* Data that has arrived wins over the news that its sender is gone. */
        if (epx_load_acquire_u64(word) >= value) return EPX_OK;
        if (s < 0) return s;
        const uint64_t now = epx_now_ns();
        spent += now - last < MOST_COUNTED_NS ? now - last : MOST_COUNTED_NS;
        last = now;
        if (spent >= w->timeout_ns) return timed_out(w, peer, value, epx_load_acquire_u64(word));
        sleep_a_slice(w, peer, word, value, w->timeout_ns - spent);
    }
}

epx_status_t epx_wait_slow(const epx_wait_t *w, int peer, uint64_t off, uint64_t value) {
    const uint64_t *word = epx_slab_word(w->slab, w->slab->rank, off);
    uint64_t start = epx_now_ns(), spin = SPIN_NS < w->timeout_ns ? SPIN_NS : w->timeout_ns;
    uint64_t yield = YIELD_NS < w->timeout_ns ? YIELD_NS : w->timeout_ns;
    epx_status_t s = EPX_OK;
    if (!(w->net->may_spin && poll_word(w->net, word, value, start, spin, 0)) && !poll_word(w->net, word, value, start, yield, 1))
        s = wait_parked(w, peer, word, value);
    if (w->wait_ns != NULL) *w->wait_ns += epx_now_ns() - start;
    return s;
}
