/* See tcp.h. Joining: rank 0 sends a nonce; the joiner answers with its own nonce, rank, size and a keyed hash of all of that;
 * rank 0 answers once, when everybody is there or something is wrong, with a keyed hash of its own. So neither side learns
 * the token and an answer cannot be replayed. Ranks that know the token and disagree end the world with a named error;
 * strangers are counted and dropped. */
#include "boot/tcp.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/sha256.h"
#include "base/status.h"
#include "base/str.h"
#include "boot/tcp_sock.h"

#define MAGIC UINT64_C(0x31706a2d78706521) /* also tells byte orders apart */
enum { NONCE_BYTES = 32, MESSAGE_BYTES = 256, MAX_STRANGERS = 64 };
static const uint64_t STRANGER_NS = UINT64_C(5000000000); /* to answer the challenge */

typedef struct {
    uint64_t magic;
    uint8_t nonce[NONCE_BYTES];
} challenge_t;

typedef struct {
    uint64_t magic;
    int32_t rank, n_ranks;
    uint8_t nonce[NONCE_BYTES], mac[EPX_SHA256_BYTES];
} join_t;

/* Rank 0's answer, and the head of every later frame. n_bytes follow: of the record, or of all. */
typedef struct {
    uint64_t magic, seq, n_bytes;
    int32_t status;
    uint32_t pad;
    char message[MESSAGE_BYTES];   /* when status < 0 */
    uint8_t mac[EPX_SHA256_BYTES]; /* of the first frame */
} frame_t;

/* What the keyed hashes are of. */
typedef struct {
    char role[8];
    uint8_t nonces[2][NONCE_BYTES];
    int32_t rank, n_ranks, status, pad;
} proof_t;

typedef struct {
    tcp_address_t address;
    int rank, n_ranks, lost;
    uint64_t timeout_ns, seq;
    int *fds; /* [n_ranks] on rank 0, -1 where none; [1] on the others */
} tcp_t;

/* A connection of rank 0 that has not proved itself yet. */
typedef struct {
    int fd;
    uint64_t since_ns;
    uint8_t nonce[NONCE_BYTES];
    size_t got;
    join_t join;
} stranger_t;

typedef struct {
    tcp_t *t;
    int listen_fd, n_joined, n_refused, n_strangers;
    uint64_t deadline_ns;
    uint8_t (*nonces)[2][NONCE_BYTES]; /* [n_ranks] of those that joined */
    stranger_t strangers[MAX_STRANGERS];
} lobby_t;

static void prove(const char *role, const uint8_t *server_nonce, const uint8_t *client_nonce, int rank, int n_ranks, int status,
                  uint8_t out_mac[EPX_SHA256_BYTES]) {
    const char *token = getenv("EPX_JOIN_TOKEN");
    proof_t p = {.rank = rank, .n_ranks = n_ranks, .status = status};
    memcpy(p.role, role, strlen(role));
    memcpy(p.nonces[0], server_nonce, NONCE_BYTES);
    memcpy(p.nonces[1], client_nonce, NONCE_BYTES);
    epx_hmac_sha256(token, token == NULL ? 0 : strlen(token), &p, sizeof p, out_mac);
}

static epx_status_t make_nonce(uint8_t out[NONCE_BYTES]) {
    if (getrandom(out, NONCE_BYTES, 0) == NONCE_BYTES) return EPX_OK;
    return epx_fail_errno(EPX_ERR_OS, errno, "tcp bootstrap: getrandom");
}

static void close_fd(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

/* ---- rank 0: joining ---- */

static void send_verdict(lobby_t *l, int fd, int rank, uint8_t nonces[2][NONCE_BYTES], epx_status_t s) {
    frame_t f = {.magic = MAGIC, .status = s};
    if (s < 0) snprintf(f.message, sizeof f.message, "%.*s", MESSAGE_BYTES - 1, epx_error_message());
    if (nonces != NULL) prove("rank 0", nonces[0], nonces[1], rank, l->t->n_ranks, s, f.mac);
    uint64_t soon = epx_now_ns() + UINT64_C(1000000000);
    char kept[MESSAGE_BYTES];
    memcpy(kept, f.message, sizeof kept);
    (void)tcp_send(fd, &f, sizeof f, soon);
    if (s < 0) (void)epx_fail(s, "%s", kept); /* a failed send must not replace it */
}

static void drop_stranger(lobby_t *l, int i) {
    close_fd(&l->strangers[i].fd);
    l->strangers[i] = l->strangers[--l->n_strangers];
}

/* A whole join message: who does not know the token is turned away; who does must agree with this rank. */
static epx_status_t admit(lobby_t *l, int i) {
    stranger_t *st = &l->strangers[i];
    const join_t *j = &st->join;
    uint8_t mac[EPX_SHA256_BYTES], nonces[2][NONCE_BYTES];
    tcp_t *t = l->t;
    memcpy(nonces[0], st->nonce, NONCE_BYTES);
    memcpy(nonces[1], j->nonce, NONCE_BYTES);
    prove("join", nonces[0], nonces[1], j->rank, j->n_ranks, 0, mac);
    if (j->magic != MAGIC || !epx_equal_constant_time(mac, j->mac, sizeof mac)) {
        send_verdict(l, st->fd, -1, NULL, epx_fail(EPX_ERR_MISMATCH, "another join token (EPX_JOIN_TOKEN) than that of rank 0"));
        l->n_refused++;
        drop_stranger(l, i);
        return EPX_OK;
    }
    epx_status_t s = EPX_OK;
    if (j->n_ranks != t->n_ranks)
        s = epx_fail(EPX_ERR_MISMATCH, "n_ranks is %d on rank %d and %d on rank 0", j->n_ranks, j->rank, t->n_ranks);
    else if (j->rank < 1 || j->rank >= t->n_ranks)
        s = epx_fail(EPX_ERR_MISMATCH, "rank %d asked to join; legal: 1 to %d", j->rank, t->n_ranks - 1);
    else if (t->fds[j->rank] >= 0) s = epx_fail(EPX_ERR_MISMATCH, "rank %d joined twice: two processes have that rank", j->rank);
    if (s < 0) {
        send_verdict(l, st->fd, j->rank, nonces, s);
        return s;
    }
    t->fds[j->rank] = st->fd;
    memcpy(l->nonces[j->rank], nonces, sizeof nonces);
    l->n_joined++;
    st->fd = -1;
    drop_stranger(l, i);
    return EPX_OK;
}

static epx_status_t hear_stranger(lobby_t *l, int i) {
    stranger_t *st = &l->strangers[i];
    ssize_t n = recv(st->fd, (char *)&st->join + st->got, sizeof st->join - st->got, 0);
    if (n > 0) st->got += (size_t)n;
    if (st->got == sizeof st->join) return admit(l, i);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) drop_stranger(l, i);
    return EPX_OK;
}

/* Who came first has had the most time to answer. */
static void drop_oldest(lobby_t *l) {
    int oldest = 0;
    for (int i = 1; i < l->n_strangers; i++)
        if (l->strangers[i].since_ns < l->strangers[oldest].since_ns) oldest = i;
    drop_stranger(l, oldest);
}

static epx_status_t greet(lobby_t *l) {
    challenge_t c = {.magic = MAGIC};
    int fd = tcp_accept(l->listen_fd);
    if (fd < 0) return EPX_OK;
    if (l->n_strangers == MAX_STRANGERS) drop_oldest(l);
    stranger_t *st = &l->strangers[l->n_strangers];
    memset(st, 0, sizeof *st);
    st->fd = fd;
    st->since_ns = epx_now_ns();
    l->n_strangers++;
    EPX_TRY(make_nonce(c.nonce));
    memcpy(st->nonce, c.nonce, sizeof st->nonce);
    if (send(fd, &c, sizeof c, MSG_NOSIGNAL) != (ssize_t)sizeof c) drop_stranger(l, l->n_strangers - 1);
    return EPX_OK;
}

static epx_status_t missing(const lobby_t *l) {
    epx_str_t s = {0};
    for (int r = 1; r < l->t->n_ranks && s.n_bytes < 120; r++)
        if (l->t->fds[r] < 0) (void)epx_str_printf(&s, "%s%d", s.n_bytes ? ", " : "", r);
    epx_status_t st = epx_fail(EPX_ERR_TIMEOUT,
                               "tcp bootstrap: rank 0 waited %.3f s at %s; missing of %d ranks: %s%s; %d connections refused for "
                               "another join token",
                               (double)l->t->timeout_ns * 1e-9, l->t->address.text, l->t->n_ranks, epx_str_z(&s),
                               s.n_bytes >= 120 ? ", ..." : "", l->n_refused);
    epx_str_fini(&s);
    return st;
}

static epx_status_t lobby_round(lobby_t *l) {
    struct pollfd p[MAX_STRANGERS + 1];
    int n = l->n_strangers;
    p[n] = (struct pollfd){l->listen_fd, POLLIN, 0};
    for (int i = 0; i < n; i++) p[i] = (struct pollfd){l->strangers[i].fd, POLLIN, 0};
    (void)poll(p, (nfds_t)n + 1, tcp_poll_ms(l->deadline_ns, 1000));
    for (int i = n - 1; i >= 0; i--) { /* downwards: dropping moves the last one here */
        if (p[i].revents) EPX_TRY(hear_stranger(l, i));
        else if (epx_now_ns() - l->strangers[i].since_ns > STRANGER_NS) drop_stranger(l, i);
    }
    return p[n].revents ? greet(l) : EPX_OK;
}

static epx_status_t gather_ranks(lobby_t *l) {
    while (l->n_joined < l->t->n_ranks - 1) {
        if (epx_now_ns() >= l->deadline_ns) return missing(l);
        EPX_TRY(lobby_round(l));
    }
    return EPX_OK;
}

static epx_status_t open_rank_0(tcp_t *t) {
    lobby_t *l = calloc(1, sizeof *l);
    epx_status_t s;
    if (l != NULL) l->nonces = calloc((size_t)t->n_ranks, sizeof *l->nonces);
    if (l == NULL || l->nonces == NULL) {
        free(l);
        return epx_fail(EPX_ERR_NOMEM, "tcp bootstrap: no memory for %d ranks", t->n_ranks);
    }
    l->t = t;
    l->listen_fd = -1;
    l->deadline_ns = epx_now_ns() + t->timeout_ns;
    s = tcp_listen(&t->address, t->n_ranks + MAX_STRANGERS, &l->listen_fd);
    if (s >= 0) s = gather_ranks(l);
    for (int r = 1; r < t->n_ranks; r++)
        if (t->fds[r] >= 0) send_verdict(l, t->fds[r], r, l->nonces[r], s);
    while (l->n_strangers > 0) drop_stranger(l, 0);
    close_fd(&l->listen_fd);
    free(l->nonces);
    free(l);
    return s;
}

/* ---- the other ranks: joining ---- */

static epx_status_t join(tcp_t *t) {
    challenge_t c;
    join_t j = {.magic = MAGIC, .rank = t->rank, .n_ranks = t->n_ranks};
    frame_t f;
    uint8_t mac[EPX_SHA256_BYTES];
    uint64_t deadline = epx_now_ns() + t->timeout_ns;
    epx_status_t s = EPX_ERR_PEER;
    EPX_TRY(make_nonce(j.nonce));
    while (s == EPX_ERR_PEER) { /* a listener that is just going away */
        close_fd(&t->fds[0]);
        EPX_TRY(tcp_connect(&t->address, deadline, &t->fds[0]));
        s = tcp_recv(t->fds[0], &c, sizeof c, deadline);
    }
    if (s < 0) return epx_fail_context(s, "tcp bootstrap: rank %d at %s", t->rank, t->address.text);
    if (c.magic != MAGIC)
        return epx_fail(EPX_ERR_FORMAT, "tcp bootstrap: who answers at %s is not rank 0 of epx", t->address.text);
    prove("join", c.nonce, j.nonce, t->rank, t->n_ranks, 0, j.mac);
    s = tcp_send(t->fds[0], &j, sizeof j, deadline);
    deadline += t->timeout_ns / 8; /* rank 0 tells who is missing a little later */
    if (s >= 0) s = tcp_recv(t->fds[0], &f, sizeof f, deadline);
    if (s < 0)
        return epx_fail_context(s, "tcp bootstrap: rank %d joined at %s and waits for rank 0, which waits for all ranks", t->rank,
                                t->address.text);
    if (f.magic != MAGIC) return epx_fail(EPX_ERR_FORMAT, "tcp bootstrap: malformed answer from %s", t->address.text);
    if (f.status < 0)
        return epx_fail((epx_status_t)f.status, "tcp bootstrap: rank 0 at %s refused rank %d: %.*s", t->address.text, t->rank,
                        MESSAGE_BYTES - 1, f.message);
    prove("rank 0", c.nonce, j.nonce, t->rank, t->n_ranks, f.status, mac);
    if (!epx_equal_constant_time(mac, f.mac, sizeof mac))
        return epx_fail(EPX_ERR_MISMATCH, "tcp bootstrap: who answers at %s does not know the join token", t->address.text);
    return EPX_OK;
}

/* ---- all-gather ---- */

static epx_status_t take_record(tcp_t *t, int r, size_t n_bytes, char *out, uint64_t deadline) {
    frame_t f;
    epx_status_t s = tcp_recv(t->fds[r], &f, sizeof f, deadline);
    if (s >= 0 && (f.magic != MAGIC || f.seq != t->seq || f.n_bytes != n_bytes))
        return epx_fail(EPX_ERR_MISMATCH, "rank %d gave %llu bytes in all-gather %llu, expected %zu in %llu", r,
                        (unsigned long long)f.n_bytes, (unsigned long long)f.seq, n_bytes, (unsigned long long)t->seq);
    if (s >= 0) s = tcp_recv(t->fds[r], out, n_bytes, deadline);
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
        epx_status_t sent = tcp_send(t->fds[r], &f, sizeof f, deadline);
        if (sent >= 0 && f.n_bytes) sent = tcp_send(t->fds[r], out_all, f.n_bytes, deadline);
        if (sent < 0 && s >= 0) s = epx_fail_context(sent, "rank %d took no records", r);
    }
    return f.status < 0 ? epx_fail((epx_status_t)f.status, "%s", f.message) : s;
}

static epx_status_t ask_allgather(tcp_t *t, const void *mine, size_t n_bytes, char *out_all) {
    uint64_t deadline = epx_now_ns() + t->timeout_ns;
    frame_t f = {.magic = MAGIC, .seq = t->seq, .n_bytes = n_bytes};
    epx_status_t s = tcp_send(t->fds[0], &f, sizeof f, deadline);
    if (s >= 0) s = tcp_send(t->fds[0], mine, n_bytes, deadline);
    deadline += t->timeout_ns / 8; /* rank 0 tells who is missing a little later */
    if (s >= 0) s = tcp_recv(t->fds[0], &f, sizeof f, deadline);
    if (s < 0) return epx_fail_context(s, "no answer from rank 0 at %s", t->address.text);
    if (f.magic == MAGIC && f.status < 0) return epx_fail((epx_status_t)f.status, "%.*s", MESSAGE_BYTES - 1, f.message);
    if (f.magic != MAGIC || f.seq != t->seq || f.n_bytes != n_bytes * (size_t)t->n_ranks)
        return epx_fail(EPX_ERR_FORMAT, "malformed answer from rank 0 at %s", t->address.text);
    return tcp_recv(t->fds[0], out_all, f.n_bytes, deadline);
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

static epx_status_t check(const tcp_address_t *a, int rank, int n_ranks) {
    const char *token = getenv("EPX_JOIN_TOKEN");
    if (n_ranks < 1 || n_ranks > EPX_MAX_RANKS)
        return epx_fail(EPX_ERR_ARG, "n_ranks is %d with bootstrap tcp; legal: 1 to %d", n_ranks, EPX_MAX_RANKS);
    if (rank < 0 || rank >= n_ranks)
        return epx_fail(EPX_ERR_ARG, "rank is %d with bootstrap tcp; legal: 0 to n_ranks - 1 = %d", rank, n_ranks - 1);
    if (!tcp_is_loopback(a) && (token == NULL || token[0] == '\0'))
        return epx_fail(EPX_ERR_ARG,
                        "EPX_JOIN_TOKEN is not set; it must be, to the same secret on all ranks, where %s is not a "
                        "loopback address",
                        a->text);
    return EPX_OK;
}

epx_status_t epx_boot_tcp_open(const char *address, int rank, int n_ranks, uint64_t timeout_ns, epx_boot_t *out_boot) {
    tcp_address_t a;
    EPX_TRY(tcp_resolve(address, &a));
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
    epx_status_t s = rank == 0 ? open_rank_0(t) : join(t);
    if (s < 0) {
        tcp_close(t);
        return s;
    }
    *out_boot = (epx_boot_t){rank, n_ranks, tcp_allgather, tcp_barrier, t, tcp_close};
    return EPX_OK;
}
