/* Unix sockets between the ranks of one host: unguessable abstract names, peer user checked, file descriptors passed. They
 * stay open for the life of the group, so that the kernel tells when a process dies. Every call has a deadline. */
#ifndef EPX_SHM_SOCK_H
#define EPX_SHM_SOCK_H

#include <stddef.h>
#include <stdint.h>

#include "epx/epx_status.h"

enum { SHM_NAME_BYTES = 32, SHM_SECRET_BYTES = 16 };

/* What a rank tells its peers through the bootstrap. */
typedef struct {
    char name[SHM_NAME_BYTES];        /* hex, abstract socket "epx-<name>" */
    uint8_t secret[SHM_SECRET_BYTES]; /* who knows it may connect: the name can be listed on the host, this cannot */
    uint8_t pad[16];
} shm_card_t;

/* Deadlines are times of epx_now_ns(). Descriptors given out are owned by the caller, close-on-exec and non-blocking. */

/* Listen on a new name. EPX_ERR_OS. */
epx_status_t shm_listen(int backlog, shm_card_t *out_card, int *out_fd);
/* Connect as `rank` to the owner of the card. EPX_ERR_PEER when it does not listen, EPX_ERR_TIMEOUT when its queue stays full. */
epx_status_t shm_connect(const shm_card_t *card, int rank, uint64_t deadline_ns, int *out_fd);
/* Accept one connection that proves the secret; others are dropped. EPX_AGAIN when the queue is empty and until_ns has come;
 * deadline_ns is for the message of a connection that is there. */
epx_status_t shm_accept(int listen_fd, const shm_card_t *card, uint64_t until_ns, uint64_t deadline_ns, int *out_rank,
                        int *out_fd);
/* 0 when nobody listens on the card's name: its owner has closed it, or has died. 1 when somebody does or it cannot be told. */
int shm_listens(const shm_card_t *card);
/* One message, at once. fd -1: none is passed. EPX_ERR_PEER when the peer has closed, EPX_ERR_OS. */
epx_status_t shm_send(int sock, const void *msg, size_t n_bytes, int fd);
/* Exactly n_bytes. *out_fd: -1 when none came; owned by the caller. EPX_ERR_PEER when the peer has closed. */
epx_status_t shm_recv(int sock, void *msg, size_t n_bytes, uint64_t deadline_ns, int *out_fd);

#endif
