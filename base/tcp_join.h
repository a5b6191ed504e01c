/* Meeting of processes over TCP: member 0 listens, the others join and prove that they know EPX_JOIN_TOKEN. Used by the tcp
 * bootstrap of libepx for ranks, and by the server for hosts. Blocking, with deadlines; nothing is encrypted
 * (docs/multi-host.md). Any thread. */
#ifndef EPX_BASE_TCP_JOIN_H
#define EPX_BASE_TCP_JOIN_H

#include "base/tcp_sock.h"

enum { EPX_TCP_NONCE_BYTES = 32 };

typedef struct {
    epx_tcp_address_t address;
    const char *member; /* what a member is called in messages: "rank" */
    int n;              /* members, with member 0 */
    uint64_t timeout_ns;
} epx_tcp_party_t;

/* A member between begin and end. */
typedef struct {
    int fd, member;
    uint64_t deadline_ns;
    uint8_t nonces[2][EPX_TCP_NONCE_BYTES];
} epx_tcp_join_t;

/* EPX_ERR_ARG: no EPX_JOIN_TOKEN where the address is not a loopback address. */
epx_status_t epx_tcp_check_token(const epx_tcp_address_t *a);
/* Member 0: wait for all others. out_fds [n], owned by the caller, [0] is -1. Returns EPX_ERR_OS (cannot listen),
 * EPX_ERR_MISMATCH (n differs, a member joined twice), EPX_ERR_TIMEOUT naming the missing members; then no descriptor is open. */
epx_status_t epx_tcp_gather(const epx_tcp_party_t *p, int *out_fds);
/* The others, in two halves, so that one process may join as several members: begin all, then end all. end waits until everybody
 * is there; it closes the descriptor on an error. Returns EPX_ERR_TIMEOUT, EPX_ERR_FORMAT (not a member 0 of this program), and
 * what member 0 refused it for. */
epx_status_t epx_tcp_join_begin(const epx_tcp_party_t *p, int member, epx_tcp_join_t *out_join);
epx_status_t epx_tcp_join_end(const epx_tcp_party_t *p, epx_tcp_join_t *join, int *out_fd);

#endif
