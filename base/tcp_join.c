/* See tcp_join.h. Member 0 sends a nonce; the joiner answers with its own nonce, number, size and a keyed hash of all of that;
 * member 0 answers once, when everybody is there or something is wrong, with a keyed hash of its own. So neither side learns
 * the token and an answer cannot be replayed. Members that know the token and disagree end the meeting with a named error;
 * strangers are counted and dropped. */
#include "base/tcp_join.h"

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

#define MAGIC UINT64_C(0x31706a2d78706521) /* also tells byte orders apart */
enum { NONCE_BYTES = EPX_TCP_NONCE_BYTES, MESSAGE_BYTES = 256, MAX_STRANGERS = 64 };
static const uint64_t STRANGER_NS = UINT64_C(5000000000); /* to answer the challenge */

typedef struct {
    uint64_t magic;
    uint8_t nonce[NONCE_BYTES];
} challenge_t;

typedef struct {
    uint64_t magic;
    int32_t member, n;
    uint8_t nonce[NONCE_BYTES], mac[EPX_SHA256_BYTES];
} join_t;

/* Member 0's answer. */
typedef struct {
    uint64_t magic;
    int32_t status;
    uint32_t pad;
    char message[MESSAGE_BYTES]; /* when status < 0 */
    uint8_t mac[EPX_SHA256_BYTES];
} verdict_t;

/* What the keyed hashes are of. */
typedef struct {
    char role[8];
    uint8_t nonces[2][NONCE_BYTES];
    int32_t member, n, status, pad;
} proof_t;

/* A connection of member 0 that has not proved itself yet. */
typedef struct {
    int fd;
    uint64_t since_ns;
    uint8_t nonce[NONCE_BYTES];
    size_t got;
    join_t join;
} stranger_t;

typedef struct {
    const epx_tcp_party_t *p;
    int *fds; /* [n] of those that joined */
    int listen_fd, n_joined, n_refused, n_strangers;
    uint64_t deadline_ns;
    uint8_t (*nonces)[2][NONCE_BYTES]; /* [n] of those that joined */
    stranger_t strangers[MAX_STRANGERS];
} lobby_t;

epx_status_t epx_tcp_check_token(const epx_tcp_address_t *a) {
    const char *token = getenv("EPX_JOIN_TOKEN");
    if (epx_tcp_is_loopback(a) || (token != NULL && token[0] != '\0')) return EPX_OK;
    return epx_fail(EPX_ERR_ARG,
                    "EPX_JOIN_TOKEN is not set; it must be, to the same secret everywhere, where %s is not a loopback address",
                    a->text);
}

static void prove(const char *role, const uint8_t (*nonces)[NONCE_BYTES] /* [2] */, int member, int n, int status,
                  uint8_t out_mac[EPX_SHA256_BYTES]) {
    const char *token = getenv("EPX_JOIN_TOKEN");
    proof_t p = {.member = member, .n = n, .status = status};
    memcpy(p.role, role, strlen(role));
    memcpy(p.nonces, nonces, sizeof p.nonces);
    epx_hmac_sha256(token, token == NULL ? 0 : strlen(token), &p, sizeof p, out_mac);
}

static epx_status_t make_nonce(uint8_t out[NONCE_BYTES]) {
    if (getrandom(out, NONCE_BYTES, 0) == NONCE_BYTES) return EPX_OK;
    return epx_fail_errno(EPX_ERR_OS, errno, "joining: getrandom");
}

static void close_fd(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

/* ---- member 0 ---- */

/* nonces [2]; NULL: to a stranger, without proof. */
static void send_verdict(lobby_t *l, int fd, int member, const uint8_t (*nonces)[NONCE_BYTES], epx_status_t s) {
    verdict_t f = {.magic = MAGIC, .status = s};
    if (s < 0) snprintf(f.message, sizeof f.message, "%.*s", MESSAGE_BYTES - 1, epx_error_message());
    if (nonces != NULL) prove("verdict", nonces, member, l->p->n, s, f.mac);
    uint64_t soon = epx_now_ns() + UINT64_C(1000000000);
    char kept[MESSAGE_BYTES];
    memcpy(kept, f.message, sizeof kept);
    (void)epx_tcp_send(fd, &f, sizeof f, soon);
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
    const epx_tcp_party_t *p = l->p;
    memcpy(nonces[0], st->nonce, NONCE_BYTES);
    memcpy(nonces[1], j->nonce, NONCE_BYTES);
    prove("join", nonces, j->member, j->n, 0, mac);
    if (j->magic != MAGIC || !epx_equal_constant_time(mac, j->mac, sizeof mac)) {
        send_verdict(l, st->fd, -1, NULL,
                     epx_fail(EPX_ERR_MISMATCH, "another join token (EPX_JOIN_TOKEN) than that of %s 0", p->member));
        l->n_refused++;
        drop_stranger(l, i);
        return EPX_OK;
    }
    epx_status_t s = EPX_OK;
    if (j->n != p->n)
        s = epx_fail(EPX_ERR_MISMATCH, "n_%ss is %d on %s %d and %d on %s 0", p->member, j->n, p->member, j->member, p->n,
                     p->member);
    else if (j->member < 1 || j->member >= p->n)
        s = epx_fail(EPX_ERR_MISMATCH, "%s %d asked to join; legal: 1 to %d", p->member, j->member, p->n - 1);
    else if (l->fds[j->member] >= 0)
        s = epx_fail(EPX_ERR_MISMATCH, "%s %d joined twice: two processes have that number", p->member, j->member);
    if (s < 0) {
        send_verdict(l, st->fd, j->member, nonces, s);
        return s;
    }
    l->fds[j->member] = st->fd;
    memcpy(l->nonces[j->member], nonces, sizeof nonces);
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
    int fd = epx_tcp_accept(l->listen_fd);
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
    const epx_tcp_party_t *p = l->p;
    epx_str_t s = {0};
    for (int i = 1; i < p->n && s.n_bytes < 120; i++)
        if (l->fds[i] < 0) (void)epx_str_printf(&s, "%s%d", s.n_bytes ? ", " : "", i);
    epx_status_t st = epx_fail(EPX_ERR_TIMEOUT,
                               "%s 0 waited %.3f s at %s; missing of %d %ss: %s%s; %d connections refused for another join token",
                               p->member, (double)p->timeout_ns * 1e-9, p->address.text, p->n, p->member, epx_str_z(&s),
                               s.n_bytes >= 120 ? ", ..." : "", l->n_refused);
    epx_str_fini(&s);
    return st;
}

static epx_status_t lobby_round(lobby_t *l) {
    struct pollfd p[MAX_STRANGERS + 1];
    int n = l->n_strangers;
    p[n] = (struct pollfd){l->listen_fd, POLLIN, 0};
    for (int i = 0; i < n; i++) p[i] = (struct pollfd){l->strangers[i].fd, POLLIN, 0};
    (void)poll(p, (nfds_t)n + 1, epx_tcp_poll_ms(l->deadline_ns, 1000));
    for (int i = n - 1; i >= 0; i--) { /* downwards: dropping moves the last one here */
        if (p[i].revents) EPX_TRY(hear_stranger(l, i));
        else if (epx_now_ns() - l->strangers[i].since_ns > STRANGER_NS) drop_stranger(l, i);
    }
    return p[n].revents ? greet(l) : EPX_OK;
}

static epx_status_t gather_all(lobby_t *l) {
    while (l->n_joined < l->p->n - 1) {
        if (epx_now_ns() >= l->deadline_ns) return missing(l);
        EPX_TRY(lobby_round(l));
    }
    return EPX_OK;
}

epx_status_t epx_tcp_gather(const epx_tcp_party_t *p, int *out_fds) {
    lobby_t *l = calloc(1, sizeof *l);
    epx_status_t s;
    for (int i = 0; i < p->n; i++) out_fds[i] = -1;
    if (l != NULL) l->nonces = calloc((size_t)p->n, sizeof *l->nonces);
    if (l == NULL || l->nonces == NULL) {
        free(l);
        return epx_fail(EPX_ERR_NOMEM, "no memory for %d %ss", p->n, p->member);
    }
    l->p = p;
    l->fds = out_fds;
    l->listen_fd = -1;
    l->deadline_ns = epx_now_ns() + p->timeout_ns;
    s = epx_tcp_listen(&p->address, p->n + MAX_STRANGERS, &l->listen_fd);
    if (s < 0) s = epx_fail_context(s, "%s 0", p->member);
    else s = gather_all(l);
    for (int i = 1; i < p->n; i++)
        if (out_fds[i] >= 0) send_verdict(l, out_fds[i], i, (const uint8_t(*)[NONCE_BYTES])l->nonces[i], s);
    for (int i = 1; s < 0 && i < p->n; i++) close_fd(&out_fds[i]);
    while (l->n_strangers > 0) drop_stranger(l, 0);
    close_fd(&l->listen_fd);
    free(l->nonces);
    free(l);
    return s;
}

/* ---- the others ---- */

/* Until a challenge has come: a listener may be just going away. */
static epx_status_t meet(const epx_tcp_party_t *p, epx_tcp_join_t *j, challenge_t *out_c) {
    epx_status_t s = EPX_ERR_PEER;
    while (s == EPX_ERR_PEER) {
        close_fd(&j->fd);
        s = epx_tcp_connect(&p->address, j->deadline_ns, &j->fd);
        if (s < 0)
            return epx_fail_context(s, "no %s 0 at %s within %.3f s", p->member, p->address.text, (double)p->timeout_ns * 1e-9);
        s = epx_tcp_recv(j->fd, out_c, sizeof *out_c, j->deadline_ns);
    }
    if (s < 0) return epx_fail_context(s, "%s %d at %s", p->member, j->member, p->address.text);
    if (out_c->magic == MAGIC) return EPX_OK;
    return epx_fail(EPX_ERR_FORMAT, "who answers at %s is not %s 0 of epx", p->address.text, p->member);
}

static epx_status_t send_join(const epx_tcp_party_t *p, epx_tcp_join_t *j) {
    challenge_t c;
    join_t m = {.magic = MAGIC, .member = j->member, .n = p->n};
    EPX_TRY(make_nonce(m.nonce));
    EPX_TRY(meet(p, j, &c));
    memcpy(j->nonces[0], c.nonce, NONCE_BYTES);
    memcpy(j->nonces[1], m.nonce, NONCE_BYTES);
    prove("join", (const uint8_t(*)[NONCE_BYTES])j->nonces, j->member, p->n, 0, m.mac);
    return epx_tcp_send(j->fd, &m, sizeof m, j->deadline_ns);
}

epx_status_t epx_tcp_join_begin(const epx_tcp_party_t *p, int member, epx_tcp_join_t *out_join) {
    epx_tcp_join_t j = {.fd = -1, .member = member, .deadline_ns = epx_now_ns() + p->timeout_ns};
    epx_status_t s = send_join(p, &j);
    if (s < 0) close_fd(&j.fd);
    else *out_join = j;
    return s;
}

/* Member 0 tells who is missing a little later than the time-out. */
static epx_status_t take_verdict(const epx_tcp_party_t *p, const epx_tcp_join_t *j) {
    verdict_t f;
    uint8_t mac[EPX_SHA256_BYTES];
    epx_status_t s = epx_tcp_recv(j->fd, &f, sizeof f, j->deadline_ns + p->timeout_ns / 8);
    if (s < 0)
        return epx_fail_context(s, "%s %d joined at %s and waits for %s 0, which waits for all %ss", p->member, j->member,
                                p->address.text, p->member, p->member);
    if (f.magic != MAGIC) return epx_fail(EPX_ERR_FORMAT, "malformed answer from %s", p->address.text);
    if (f.status < 0)
        return epx_fail((epx_status_t)f.status, "%s 0 at %s refused %s %d: %.*s", p->member, p->address.text, p->member,
                        j->member, MESSAGE_BYTES - 1, f.message);
    prove("verdict", (const uint8_t(*)[NONCE_BYTES])j->nonces, j->member, p->n, f.status, mac);
    if (!epx_equal_constant_time(mac, f.mac, sizeof mac))
        return epx_fail(EPX_ERR_MISMATCH, "who answers at %s does not know the join token", p->address.text);
    return EPX_OK;
}

epx_status_t epx_tcp_join_end(const epx_tcp_party_t *p, epx_tcp_join_t *join, int *out_fd) {
    epx_status_t s = take_verdict(p, join);
    if (s < 0) close_fd(&join->fd);
    else *out_fd = join->fd;
    join->fd = -1;
    return s;
}
