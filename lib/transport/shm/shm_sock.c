/* SOCK_SEQPACKET keeps message borders. Set-up path only. */
#include "transport/shm/shm_sock.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/status.h"

typedef struct {
    uint8_t secret[SHM_SECRET_BYTES];
    int32_t rank;
} hello_t;

static int timeout_ms(uint64_t deadline_ns) {
    uint64_t now = epx_now_ns();
    if (now >= deadline_ns) return 0;
    uint64_t ms = (deadline_ns - now + 999999) / 1000000;
    return ms > 1000 ? 1000 : (int)ms;
}

static socklen_t abstract_address(const char *name, struct sockaddr_un *a) {
    memset(a, 0, sizeof *a);
    a->sun_family = AF_UNIX;
    int n = snprintf(a->sun_path + 1, sizeof a->sun_path - 1, "epx-%.*s", SHM_NAME_BYTES, name);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

epx_status_t shm_listen(int backlog, shm_card_t *out_card, int *out_fd) {
    static const char hex[] = "0123456789abcdef";
    uint8_t random_bytes[SHM_NAME_BYTES / 2 + SHM_SECRET_BYTES];
    struct sockaddr_un a;
    if (getrandom(random_bytes, sizeof random_bytes, 0) != (ssize_t)sizeof random_bytes)
        return epx_fail_errno(EPX_ERR_OS, errno, "shm: getrandom");
    memset(out_card, 0, sizeof *out_card);
    for (size_t i = 0; i < SHM_NAME_BYTES / 2; i++) {
        out_card->name[2 * i] = hex[random_bytes[i] >> 4];
        out_card->name[2 * i + 1] = hex[random_bytes[i] & 15];
    }
    memcpy(out_card->secret, random_bytes + SHM_NAME_BYTES / 2, SHM_SECRET_BYTES);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return epx_fail_errno(EPX_ERR_OS, errno, "shm: socket");
    if (bind(fd, (struct sockaddr *)&a, abstract_address(out_card->name, &a)) != 0 || listen(fd, backlog) != 0) {
        int e = errno;
        close(fd);
        return epx_fail_errno(EPX_ERR_OS, e, "shm: bind or listen on an abstract socket");
    }
    *out_fd = fd;
    return EPX_OK;
}

epx_status_t shm_connect(const shm_card_t *card, int rank, uint64_t deadline_ns, int *out_fd) {
    struct sockaddr_un a;
    struct timespec pause = {0, 1000000};
    socklen_t len = abstract_address(card->name, &a);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return epx_fail_errno(EPX_ERR_OS, errno, "shm: socket");
    while (connect(fd, (struct sockaddr *)&a, len) != 0) {
        int e = errno;
        if ((e == EAGAIN || e == EINTR) && epx_now_ns() < deadline_ns) { /* the backlog is full */
            nanosleep(&pause, NULL);
            continue;
        }
        close(fd);
        return epx_fail_errno(e == EAGAIN ? EPX_ERR_TIMEOUT : EPX_ERR_PEER, e, "shm: connect to a peer's socket");
    }
    hello_t h = {{0}, rank};
    memcpy(h.secret, card->secret, sizeof h.secret);
    epx_status_t s = shm_send(fd, &h, sizeof h, -1);
    if (s < 0) {
        close(fd);
        return s;
    }
    *out_fd = fd;
    return EPX_OK;
}

static int same_user(int fd) {
    struct ucred c;
    socklen_t n = sizeof c;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &c, &n) == 0 && c.uid == geteuid();
}

epx_status_t shm_accept(int listen_fd, const shm_card_t *card, uint64_t until_ns, uint64_t deadline_ns, int *out_rank,
                        int *out_fd) {
    for (;;) {
        struct pollfd p = {listen_fd, POLLIN, 0};
        int fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK), passed = -1;
        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED)) continue;
        if (fd < 0 && errno != EAGAIN) return epx_fail_errno(EPX_ERR_OS, errno, "shm: accept");
        if (fd < 0) {
            if (epx_now_ns() >= until_ns) return EPX_AGAIN;
            (void)poll(&p, 1, timeout_ms(until_ns));
            continue;
        }
        hello_t h;
        int known = same_user(fd) && shm_recv(fd, &h, sizeof h, deadline_ns, &passed) == EPX_OK &&
                    memcmp(h.secret, card->secret, sizeof h.secret) == 0;
        if (passed >= 0) close(passed);
        if (known) {
            *out_rank = h.rank;
            *out_fd = fd;
            return EPX_OK;
        }
        close(fd); /* a stranger, or a peer's shm_listens() */
    }
}

int shm_listens(const shm_card_t *card) {
    struct sockaddr_un a;
    socklen_t len = abstract_address(card->name, &a);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return 1;
    int refused = connect(fd, (struct sockaddr *)&a, len) != 0 && errno == ECONNREFUSED;
    close(fd);
    return !refused;
}

epx_status_t shm_send(int sock, const void *msg, size_t n_bytes, int fd) {
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control;
    struct iovec iov = {(void *)(uintptr_t)msg, n_bytes};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
    if (fd >= 0) {
        memset(&control, 0, sizeof control);
        m.msg_control = control.bytes;
        m.msg_controllen = sizeof control.bytes;
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    ssize_t n;
    do n = sendmsg(sock, &m, MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    if (n == (ssize_t)n_bytes) return EPX_OK;
    return epx_fail_errno(errno == EPIPE || errno == ECONNRESET ? EPX_ERR_PEER : EPX_ERR_OS, errno, "shm: send to a peer");
}

static int take_fd(struct msghdr *m) {
    int fd = -1;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c != NULL; c = CMSG_NXTHDR(m, c))
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) memcpy(&fd, CMSG_DATA(c), sizeof fd);
    return fd;
}

epx_status_t shm_recv(int sock, void *msg, size_t n_bytes, uint64_t deadline_ns, int *out_fd) {
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control;
    for (;;) {
        struct iovec iov = {msg, n_bytes};
        struct msghdr m = {
            .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
        ssize_t n = recvmsg(sock, &m, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
        if (n == (ssize_t)n_bytes) {
            *out_fd = take_fd(&m);
            return EPX_OK;
        }
        if (n == 0) return epx_fail(EPX_ERR_PEER, "shm: the peer closed its socket");
        if (n > 0) {
            int fd = take_fd(&m);
            if (fd >= 0) close(fd);
            return epx_fail(EPX_ERR_FORMAT, "shm: message of %zd bytes, %zu expected", n, n_bytes);
        }
        if (errno != EAGAIN && errno != EINTR) return epx_fail_errno(EPX_ERR_PEER, errno, "shm: receive from a peer");
        if (epx_now_ns() >= deadline_ns) return epx_fail(EPX_ERR_TIMEOUT, "shm: no message from the peer in time");
        struct pollfd p = {sock, POLLIN, 0};
        (void)poll(&p, 1, timeout_ms(deadline_ns));
    }
}
