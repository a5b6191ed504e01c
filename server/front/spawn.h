/* Starting one worker process, watching it and learning how it ended. */
#ifndef EPX_SERVER_FRONT_SPAWN_H
#define EPX_SERVER_FRONT_SPAWN_H

#include <stddef.h>
#include <sys/types.h>

#include "base/status.h"

enum { EPX_EXIT_STUCK = 4 }; /* exit code of a worker whose watchdog has ended it */
enum { EPX_WORKER_FD = 3 };  /* number of the inherited socket in the worker */

typedef struct {
    pid_t pid; /* 0: not started or reaped */
    int pidfd; /* readable when the process has ended; -1: none */
    int fd;    /* the front's end of the socket, close-on-exec */
} epx_process_t;

/* Start `program` with the hidden worker argument. It inherits one socket and stderr (which is its stdout too), nothing else.
 * The process dies with the calling thread (it sets PR_SET_PDEATHSIG), so call this from a thread that outlives it. */
epx_status_t epx_process_spawn(const char *program, epx_process_t *out_p);
/* The same with a socket of the caller's, which stays open here; p->fd is -1. The worker dies with this process, but cannot see
 * whether it was gone before. */
epx_status_t epx_process_spawn_on(const char *program, int socket_fd, epx_process_t *out_p);
/* If the process has ended: reap it, close its pidfd, write "was killed by signal 9 (SIGKILL)" or the like and return 1.
 * Else 0. Does not block. */
int epx_process_reap(epx_process_t *p, char *out_how, size_t n_bytes);
/* 1 while a signal such as SIGSTOP holds the process. A process held by a debugger does not count. */
int epx_process_is_stopped(const epx_process_t *p);
/* SIGKILL; nothing when it was reaped. */
void epx_process_kill(epx_process_t *p);
/* Called by a worker at its start: die with the front, ignore the terminal's signals, which the front handles for all.
 * EPX_ERR_PEER: the front is already gone. */
epx_status_t epx_process_bind_to_front(int fd);

#endif
