/* See tcp_sock.h. Every blocking step is a poll() with the time that is left. */
#include "base/tcp_sock.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/status.h"

enum { RETRY_MS = 30 };

int epx_tcp_poll_ms(uint64_t deadline_ns, int max_ms) {
    uint64_t now = epx_now_ns();
    if (now >= deadline_ns) return 0;
    uint64_t ms = (deadline_ns - now + 999999) / 1000000;
    return ms > (uint64_t)max_ms ? max_ms : (int)ms;
}

/* "HOST:PORT" into two strings; 0 when it is not one. */
static int split(const char *text, char *host, size_t host_bytes, char *port, size_t port_bytes) {
    const char *colon = strrchr(text, ':');
    if (colon == NULL || colon == text || colon[1] == '\0') return 0;
    size_t n = (size_t)(colon - text);
    if (text[0] == '[' && text[n - 1] == ']') text++, n -= 2;
    else if (memchr(text, ':', n) != NULL) return 0; /* IPv6 without brackets */
    if (n == 0 || n >= host_bytes || strlen(colon + 1) >= port_bytes) return 0;
    memcpy(host, text, n);
    host[n] = '\0';
    memcpy(port, colon + 1, strlen(colon + 1) + 1);
    char *end;
    long v = strtol(port, &end, 10);
    return *end == '\0' && port[0] >= '0' && port[0] <= '9' && v >= 1 && v <= 65535;
}

epx_status_t epx_tcp_resolve(const char *text, epx_tcp_address_t *out) {
    char host[sizeof out->text], port[8];
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found = NULL;
    if (strlen(text) >= sizeof out->text || !split(text, host, sizeof host, port, sizeof port))
        return epx_fail(EPX_ERR_ARG, "address is \"%.100s\"; legal: HOST:PORT or [IPV6]:PORT with a port of 1 to 65535", text);
    int rc = getaddrinfo(host, port, &hints, &found);
    if (rc != 0 || found == NULL)
        return epx_fail(EPX_ERR_ARG, "address \"%s\": the host cannot be resolved: %s", text, gai_strerror(rc));
    memset(out, 0, sizeof *out);
    memcpy(&out->addr, found->ai_addr, found->ai_addrlen);
    out->len = found->ai_addrlen;
    memcpy(out->text, text, strlen(text) + 1);
    freeaddrinfo(found);
    return EPX_OK;
}

int epx_tcp_is_loopback(const epx_tcp_address_t *a) {
    if (a->addr.ss_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)(const void *)&a->addr)->sin_addr.s_addr) >> 24 == 127;
    return a->addr.ss_family == AF_INET6 &&
           IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)(const void *)&a->addr)->sin6_addr);
}

static void set_options(int fd) {
    int one = 1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
}

epx_status_t epx_tcp_listen(const epx_tcp_address_t *a, int backlog, int *out_fd) {
    int one = 1, fd = socket(a->addr.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return epx_fail_errno(EPX_ERR_OS, errno, "socket");
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (const struct sockaddr *)&a->addr, a->len) != 0 || listen(fd, backlog) != 0) {
        int e = errno;
        close(fd);
        return epx_fail_errno(EPX_ERR_OS, e, "cannot listen at %s", a->text);
    }
    *out_fd = fd;
    return EPX_OK;
}

/* A connect to a free ephemeral port of this host can meet itself. */
static int met_itself(int fd) {
    struct sockaddr_storage mine = {0}, other = {0};
    socklen_t n = sizeof mine, m = sizeof other;
    return getsockname(fd, (struct sockaddr *)&mine, &n) == 0 && getpeername(fd, (struct sockaddr *)&other, &m) == 0 && n == m &&
           memcmp(&mine, &other, n) == 0;
}

/* 0 when connected, else errno. */
static int finish_connect(int fd, uint64_t deadline_ns) {
    struct pollfd p = {fd, POLLOUT, 0};
    int e = 0;
    socklen_t n = sizeof e;
    if (poll(&p, 1, epx_tcp_poll_ms(deadline_ns, 60000)) <= 0) return ETIMEDOUT;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &n) != 0) return errno;
    return e == 0 && met_itself(fd) ? ECONNREFUSED : e;
}

epx_status_t epx_tcp_connect(const epx_tcp_address_t *a, uint64_t deadline_ns, int *out_fd) {
    struct timespec pause = {0, RETRY_MS * 1000000L};
    for (;;) {
        int fd = socket(a->addr.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0) return epx_fail_errno(EPX_ERR_OS, errno, "socket");
        int e = connect(fd, (const struct sockaddr *)&a->addr, a->len) == 0 ? 0 : errno;
        if (e == EINPROGRESS || e == EINTR) e = finish_connect(fd, deadline_ns);
        if (e == 0) {
            set_options(fd);
            *out_fd = fd;
            return EPX_OK;
        }
        close(fd);
        if (epx_now_ns() >= deadline_ns) return epx_fail_errno(EPX_ERR_TIMEOUT, e, "connecting to %s", a->text);
        nanosleep(&pause, NULL);
    }
}

int epx_tcp_accept(int listen_fd) {
    int fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) set_options(fd);
    return fd;
}

/* After a call that could not go on: wait, or an error. */
static epx_status_t wait_ready(int fd, short events, ssize_t n, uint64_t deadline_ns) {
    struct pollfd p = {fd, events, 0};
    if (n == 0) return epx_fail(EPX_ERR_PEER, "the connection was closed");
    if (errno != EAGAIN && errno != EINTR) return epx_fail_errno(EPX_ERR_PEER, errno, "the connection broke");
    if (epx_now_ns() >= deadline_ns) return epx_fail(EPX_ERR_TIMEOUT, "nothing came in time");
    (void)poll(&p, 1, epx_tcp_poll_ms(deadline_ns, 1000));
    return EPX_OK;
}

epx_status_t epx_tcp_send(int fd, const void *data, size_t n_bytes, uint64_t deadline_ns) {
    const char *p = data;
    while (n_bytes > 0) {
        ssize_t n = send(fd, p, n_bytes, MSG_NOSIGNAL);
        if (n > 0) p += n, n_bytes -= (size_t)n;
        else EPX_TRY(wait_ready(fd, POLLOUT, -1, deadline_ns));
    }
    return EPX_OK;
}

epx_status_t epx_tcp_recv(int fd, void *data, size_t n_bytes, uint64_t deadline_ns) {
    char *p = data;
    while (n_bytes > 0) {
        ssize_t n = recv(fd, p, n_bytes, 0);
        if (n > 0) p += n, n_bytes -= (size_t)n;
        else EPX_TRY(wait_ready(fd, POLLIN, n, deadline_ns));
    }
    return EPX_OK;
}
