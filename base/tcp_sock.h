/* Non-blocking TCP sockets with deadlines, for meetings of processes (base/tcp_join.h). Knows nothing of who meets. */
#ifndef EPX_BASE_TCP_SOCK_H
#define EPX_BASE_TCP_SOCK_H

#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#include "base/status.h"

typedef struct {
    struct sockaddr_storage addr;
    socklen_t len;
    char text[128]; /* as the caller wrote it */
} epx_tcp_address_t;

/* Split HOST:PORT or [IPV6]:PORT and resolve HOST; the first address counts. EPX_ERR_ARG names what is wrong. */
epx_status_t epx_tcp_resolve(const char *text, epx_tcp_address_t *out);
/* 127.0.0.0/8 or ::1. */
int epx_tcp_is_loopback(const epx_tcp_address_t *a);
/* Bind to this address only. */
epx_status_t epx_tcp_listen(const epx_tcp_address_t *a, int backlog, int *out_fd);
/* Connect, again and again while nobody listens there, until the deadline. */
epx_status_t epx_tcp_connect(const epx_tcp_address_t *a, uint64_t deadline_ns, int *out_fd);
/* One accepted connection, or -1. */
int epx_tcp_accept(int listen_fd);
/* All n bytes, or an error: EPX_ERR_TIMEOUT, EPX_ERR_PEER (closed or reset). */
epx_status_t epx_tcp_send(int fd, const void *data, size_t n_bytes, uint64_t deadline_ns);
epx_status_t epx_tcp_recv(int fd, void *data, size_t n_bytes, uint64_t deadline_ns);
/* Milliseconds to the deadline for poll(), at most max_ms. */
int epx_tcp_poll_ms(uint64_t deadline_ns, int max_ms);

#endif
