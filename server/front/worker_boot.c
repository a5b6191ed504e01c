/* A worker's bootstrap: the front is the hub that collects a blob of every rank and answers with all of them. */
#include <string.h>

#include "base/clock.h"
#include "server/front/wire.h"
#include "server/front/worker_impl.h"

#define PROGRESS_NS 50000000u

/* Frames that are not for the bootstrap wait in order until the main loop takes them. */
static epx_status_t defer(epx_worker_t *w, uint32_t kind, const char *data, size_t n) {
    epx_pipe_t keep = {.fd = w->link.fd, .out = w->deferred};
    epx_status_t s = epx_pipe_queue(&keep, kind, data, n);
    w->deferred = keep.out;
    return s;
}

static epx_status_t take_answer(const char *data, size_t n, size_t n_wanted, void *out_all) {
    if (n != n_wanted) return epx_fail(EPX_ERR_MISMATCH, "bootstrap: %zu bytes came, %zu were expected", n, n_wanted);
    if (n) memcpy(out_all, data, n);
    return EPX_OK;
}

epx_status_t epx_worker_allgather(void *ctx, const void *mine, size_t n_bytes, void *out_all) {
    epx_worker_t *w = ctx;
    const char *data;
    uint32_t kind;
    size_t n;
    EPX_TRY(epx_pipe_queue(&w->link, EPX_MSG_BOOT_MINE, mine, n_bytes));
    EPX_TRY(epx_pipe_flush(&w->link, 1));
    for (;;) {
        epx_status_t s = epx_pipe_next(&w->link, &kind, &data, &n);
        if (s < 0) return s;
        if (s == EPX_AGAIN) epx_worker_wait(w);
        else if (kind == EPX_MSG_BOOT_ALL) return take_answer(data, n, n_bytes * (size_t)w->n_ranks, out_all);
        else if (kind == EPX_MSG_ABORT) epx_worker_leave(EPX_WORKER_ABANDONED);
        else EPX_TRY(defer(w, kind, data, n));
    }
}

epx_status_t epx_worker_barrier(void *ctx) { return epx_worker_allgather(ctx, NULL, 0, NULL); }

void epx_worker_progress(void *ctx, const char *what, double fraction) {
    epx_worker_t *w = ctx;
    epx_str_t frame = {0};
    uint64_t now = epx_now_ns();
    if (fraction < 1 && now - w->progress_ns < PROGRESS_NS) return;
    w->progress_ns = now;
    if (epx_str_append(&frame, (const char *)&fraction, sizeof fraction) >= 0 &&
        epx_str_append_z(&frame, what ? what : "") >= 0 &&
        epx_pipe_queue(&w->link, EPX_MSG_PROGRESS, frame.data, frame.n_bytes) >= 0)
        epx_pipe_flush(&w->link, 1);
    epx_str_fini(&frame);
}
