/* Inside of a worker process, shared by worker.c and worker_boot.c. One thread. */
#ifndef EPX_SERVER_FRONT_WORKER_IMPL_H
#define EPX_SERVER_FRONT_WORKER_IMPL_H

#include "engine/runtime/rank.h"
#include "server/front/frame.h"
#include "server/front/spawn.h"

typedef struct epx_watchdog epx_watchdog_t;

typedef struct {
    epx_pipe_t link;
    epx_str_t events;   /* of the present step, not queued yet */
    epx_str_t deferred; /* frames that came while the rank waited for a bootstrap answer: header, payload, padded to 8 bytes */
    int n_ranks;
    epx_rank_t *rank;
    int idle; /* all ranks agreed that there is nothing to do: only a wake or a stop may start the next step,
                 because a step is collective and only those two go to every rank */
    int stopping;
    epx_watchdog_t *watchdog;
    uint64_t progress_ns; /* when the last progress frame was sent */
    epx_str_t report;     /* the report being put together */
    uint64_t report_ns;   /* when the last report was queued */
    int ended;            /* a request ended in the present step */
} epx_worker_t;

/* Block until the front's next frames are in the buffer. The front is gone or a rank is lost: ends the process at once, since
 * nobody is left to tell and peers see the closed sockets. */
void epx_worker_wait(epx_worker_t *w);
/* End the process now, without the collective parts of an orderly stop. */
void epx_worker_leave(int exit_code) __attribute__((noreturn));
enum { EPX_WORKER_OK = 0, EPX_WORKER_FAILED = 1, EPX_WORKER_ABANDONED = 3, EPX_WORKER_STUCK = EPX_EXIT_STUCK };

/* ---- worker_boot.c: callbacks for epx_rank_config_t with ctx an epx_worker_t ---- */
epx_status_t epx_worker_allgather(void *ctx, const void *mine, size_t n_bytes, void *out_all);
epx_status_t epx_worker_barrier(void *ctx);
/* At most 20 frames a second, and always the last. */
void epx_worker_progress(void *ctx, const char *what, double fraction);

/* ---- watchdog.c ---- */
/* Start a thread that ends the process with EPX_WORKER_STUCK when the rank is in one phase of a step for `seconds`; first it says
 * on standard error where the rank is, and leaves the others half a second to say it too. w->rank is made. */
epx_status_t epx_watchdog_start(epx_worker_t *w, int rank, int seconds);
/* Twice and without start are allowed. */
void epx_watchdog_stop(epx_worker_t *w);

#endif
