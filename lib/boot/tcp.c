/* See tcp.h. Joining is base/tcp_join.h's; here is the all-gather over the star of connections. */
#include "boot/tcp.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/tcp_join.h"

#define MAGIC UINT64_C(0x31706a2d78706521) /* also tells byte orders apart */
enum { MESSAGE_BYTES = 256 };

/* The head of a frame. n_bytes follow: of the record, or of all. */
typedef struct {
    uint64_t magic, seq, n_bytes;
    int32_t status;
    uint32_t pad;
    char message[MESSAGE_BYTES]; /* when status < 0 */
} frame_t;

typedef struct {
    epx_tcp_address_t address;
    int rank, n_ranks, lost;
    uint64_t timeout_ns, seq;
    int *fds; /* [n_ranks] on rank 0, -1 where none; [1] on the others */
} tcp_t;

static void close_fd(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

/* ---- all-gather ---- */

static epx_status_t take_record(tcp_t *t, int r, size_t n_bytes, char *out, uint64_t deadline) {
    frame_t f;
    epx_status_t s = epx_tcp_recv(t->fds[r], &f, sizeof f, deadline);
    if (s >= 0 && (f.magic != MAGIC || f.seq != t->seq || f.n_bytes != n_bytes))
        return epx_fail(EPX_ERR_MISMATCH, "rank %d gave %llu bytes in all-gather %llu, expected %zu in %llu", r,
                        (unsigned long long)f.n_bytes, (unsigned long long)f.seq, n_bytes, (unsigned long long)t->seq);
    if (s >= 0) s = epx_tcp_recv(t->fds[r], out, n_bytes, deadline);
    return s >= 0 ? EPX_OK : epx_fail_context(s, "rank %d gave no record", r);
}

static epx_status_t serve_allgather(tcp_t *t, const void *mine, size_t n_bytes, char *out_all) {
    uint64_t deadline = epx_now_ns() + t->timeout_ns;
    epx_status_t s = EPX_OK;
    memmove(out_all, mine, n_bytes);
    for (int r = 1; r < t->n_ranks && s >= 0; r++) s = take_record(t, r, n_bytes, out_all + (size_t)r * n_bytes, deadline);
    frame_t f = {.magic = MAGIC, .seq = t->seq, .n_bytes = s < 0 ? 0 : n_bytes * (size_t)t->n_ranks, .status = s};
    if (s < 0) snprintf(f.message, sizeof f.message, "%.*s", MESSAGE_BYTES - 1, epx_error_message());
    if (s < 0) deadline = epx_now_ns() + UINT64_C(1000000000);
    for (int r = 1; r < t->n_ranks; r++) {
        epx_status_t sent = epx_tcp_send(t->fds[r], &f, sizeof f, deadline);
        if (sent >= 0 && f.n_bytes) sent = epx_tcp_send(t->fds[r], out_all, f.n_bytes, deadline);
        if (sent < 0 && s >= 0) s = epx_fail_context(sent, "rank %d took no records", r);
    }
    return f.status < 0 ? epx_fail((epx_status_t)f.status, "%s", f.message) : s;
}

static epx_status_t ask_allgather(tcp_t *t, const void *mine, size_t n_bytes, char *out_all) {
    uint64_t deadline = epx_now_ns() + t->timeout_ns;
    frame_t f = {.magic = MAGIC, .seq = t->seq, .n_bytes = n_bytes};
    epx_status_t s = epx_tcp_send(t->fds[0], &f, sizeof f, deadline);
    if (s >= 0) s = epx_tcp_send(t->fds[0], mine, n_bytes, deadline);
    deadline += t->timeout_ns / 8; /* rank 0 tells who is missing a little later */
    if (s >= 0) s = epx_tcp_recv(t->fds[0], &f, sizeof f, deadline);
    if (s < 0) return epx_fail_context(s, "no answer from rank 0 at %s", t->address.text);
    if (f.magic == MAGIC && f.status < 0) return epx_fail((epx_status_t)f.status, "%.*s", MESSAGE_BYTES - 1, f.message);
    if (f.magic != MAGIC || f.seq != t->seq || f.n_bytes != n_bytes * (size_t)t->n_ranks)
        return epx_fail(EPX_ERR_FORMAT, "malformed answer from rank 0 at %s", t->address.text);
    return epx_tcp_recv(t->fds[0], out_all, f.n_bytes, deadline);
}

static epx_status_t tcp_allgather(void *ctx, const void *mine, size_t n_bytes, void *out_all) {
    tcp_t *t = ctx;
    if (t->lost) return epx_fail(EPX_ERR_PEER, "tcp bootstrap: the world was lost in an earlier all-gather");
    t->seq++;
    epx_status_t s = t->rank == 0 ? serve_allgather(t, mine, n_bytes, out_all) : ask_allgather(t, mine, n_bytes, out_all);
    t->lost = s < 0;
    return s;
}

static epx_status_t tcp_barrier(void *ctx) {
    tcp_t *t = ctx;
    char mine = 0, *all = malloc((size_t)t->n_ranks);
    if (all == NULL) return epx_fail(EPX_ERR_NOMEM, "tcp bootstrap: no memory for %d bytes", t->n_ranks);
    epx_status_t s = tcp_allgather(t, &mine, 1, all);
    free(all);
    return s;
}

static void tcp_close(void *ctx) {
    tcp_t *t = ctx;
    for (int i = 0; t->fds != NULL && i < (t->rank == 0 ? t->n_ranks : 1); i++) close_fd(&t->fds[i]);
    free(t->fds);
    free(t);
}

static epx_status_t check(const epx_tcp_address_t *a, int rank, int n_ranks) {
    if (n_ranks < 1 || n_ranks > EPX_MAX_RANKS)
        return epx_fail(EPX_ERR_ARG, "n_ranks is %d with bootstrap tcp; legal: 1 to %d", n_ranks, EPX_MAX_RANKS);
    if (rank < 0 || rank >= n_ranks)
        return epx_fail(EPX_ERR_ARG, "rank is %d with bootstrap tcp; legal: 0 to n_ranks - 1 = %d", rank, n_ranks - 1);
    return epx_tcp_check_token(a);
}

static epx_status_t join(tcp_t *t) {
    epx_tcp_party_t p = {t->address, "rank", t->n_ranks, t->timeout_ns};
    epx_tcp_join_t j;
    epx_status_t s = t->rank == 0 ? epx_tcp_gather(&p, t->fds) : epx_tcp_join_begin(&p, t->rank, &j);
    if (s >= 0 && t->rank > 0) s = epx_tcp_join_end(&p, &j, &t->fds[0]);
    return s < 0 ? epx_fail_context(s, "tcp bootstrap") : EPX_OK;
}

epx_status_t epx_boot_tcp_open(const char *address, int rank, int n_ranks, uint64_t timeout_ns, epx_boot_t *out_boot) {
    epx_tcp_address_t a;
    EPX_TRY(epx_tcp_resolve(address, &a));
    EPX_TRY(check(&a, rank, n_ranks));
    tcp_t *t = calloc(1, sizeof *t);
    int n_fds = rank == 0 ? n_ranks : 1;
    if (t == NULL || (t->fds = malloc((size_t)n_fds * sizeof *t->fds)) == NULL) {
        free(t);
        return epx_fail(EPX_ERR_NOMEM, "tcp bootstrap: no memory for %d connections", n_fds);
    }
    for (int i = 0; i < n_fds; i++) t->fds[i] = -1;
    t->address = a;
    t->rank = rank;
    t->n_ranks = n_ranks;
    t->timeout_ns = timeout_ns;
    epx_status_t s = join(t);
    if (s < 0) {
        tcp_close(t);
        return s;
    }
    *out_boot = (epx_boot_t){rank, n_ranks, tcp_allgather, tcp_barrier, t, tcp_close};
    return EPX_OK;
}
