/* The main loop of a rank's process: take the front's messages between steps, step, send the step's events in one frame.
 * One thread; the rank's own threads are the engine's business. */
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/clock.h"
#include "server/front/cluster.h"
#include "server/front/spawn.h"
#include "server/front/wire.h"
#include "server/front/worker_impl.h"

#define REPORT_NS 250000000u

void epx_worker_leave(int exit_code) { _exit(exit_code); }

void epx_worker_wait(epx_worker_t *w) {
    poll(&(struct pollfd){w->link.fd, POLLIN, 0}, 1, -1);
    if (epx_pipe_receive(&w->link) < 0 || w->link.at_end) epx_worker_leave(EPX_WORKER_ABANDONED);
}

/* Sending fails only when the front is gone. */
static void send_frame(epx_worker_t *w, uint32_t kind, const void *payload, size_t n) {
    if (epx_pipe_queue(&w->link, kind, payload, n) < 0 || epx_pipe_flush(&w->link, 1) < 0) epx_worker_leave(EPX_WORKER_ABANDONED);
}

static epx_status_t report_failure(epx_worker_t *w, epx_status_t status) {
    epx_str_t frame = {0};
    if (epx_wire_put_failure(&frame, status, epx_error_message()) >= 0) send_frame(w, EPX_MSG_FAILED, frame.data, frame.n_bytes);
    epx_str_fini(&frame);
    return status;
}

static void add_event(void *ctx, const epx_event_t *ev) {
    epx_worker_t *w = ctx;
    w->ended |= ev->finish != EPX_FINISH_NONE;
    if (epx_wire_put_event(&w->events, ev) < 0) epx_worker_leave(EPX_WORKER_FAILED);
}

static void flush_events(epx_worker_t *w) {
    if (w->events.n_bytes == 0) return;
    send_frame(w, EPX_MSG_EVENTS, w->events.data, w->events.n_bytes);
    epx_str_clear(&w->events);
}

/* Counters, before the events of a step in which a request ended, so that who has seen an end finds it counted; else at most
 * every REPORT_NS, and always before the rank goes idle. */
static void send_report(epx_worker_t *w, int idle) {
    const epx_meter_t *m = epx_rank_meter(w->rank);
    epx_rank_stats_t stats = {0};
    uint64_t now = epx_now_ns();
    if (!w->ended && !idle && now - w->report_ns < REPORT_NS) return;
    w->ended = 0;
    w->report_ns = now;
    epx_rank_stats(w->rank, &stats);
    epx_str_clear(&w->report);
    if (epx_str_append(&w->report, (const char *)&stats, sizeof stats) < 0 ||
        epx_str_append(&w->report, (const char *)m->expert_rows,
                       sizeof *m->expert_rows * (size_t)m->n_layers * (size_t)m->n_experts) < 0)
        epx_worker_leave(EPX_WORKER_FAILED);
    send_frame(w, EPX_MSG_REPORT, w->report.data, w->report.n_bytes);
}

/* ---- messages of the front ---- */

static epx_status_t take_request(epx_worker_t *w, const char *data, size_t n) {
    epx_request_t req;
    EPX_TRY(epx_wire_get_request(data, n, &req));
    if (epx_rank_submit(w->rank, &req) < 0) {
        epx_event_t ev = {
            .id = req.id, .token = -1, .finish = EPX_FINISH_ERROR, .n_prompt = req.n_prompt, .error = epx_error_message()};
        add_event(w, &ev);
        flush_events(w);
    }
    return EPX_OK;
}

static uint64_t number_of(const char *data, size_t n) {
    uint64_t v = 0;
    if (n == sizeof v) memcpy(&v, data, sizeof v);
    return v;
}

static void send_stats(epx_worker_t *w) {
    epx_rank_stats_t stats = {0};
    epx_rank_stats(w->rank, &stats);
    send_frame(w, EPX_MSG_STATS, &stats, sizeof stats);
}

static epx_status_t take_frame(epx_worker_t *w, uint32_t kind, const char *data, size_t n) {
    switch (kind) {
    case EPX_MSG_REQUEST:
        return take_request(w, data, n);
    case EPX_MSG_CANCEL:
        epx_rank_cancel(w->rank, number_of(data, n));
        return EPX_OK;
    case EPX_MSG_WAKE:
        epx_rank_wake(w->rank, number_of(data, n));
        w->idle = 0;
        return EPX_OK;
    case EPX_MSG_STOP:
        epx_rank_stop(w->rank);
        w->stopping = 1;
        w->idle = 0;
        return EPX_OK;
    case EPX_MSG_GET_STATS:
        send_stats(w);
        return EPX_OK;
    case EPX_MSG_FLUSH:
        epx_rank_flush_cache(w->rank);
        send_report(w, 1);
        return EPX_OK;
    case EPX_MSG_ABORT:
        epx_worker_leave(EPX_WORKER_ABANDONED);
    default:
        return epx_fail(EPX_ERR_FORMAT, "frame of unknown kind %u from the front", kind);
    }
}

static epx_status_t take_all(epx_worker_t *w, epx_pipe_t *from) {
    const char *data;
    uint32_t kind;
    size_t n;
    epx_status_t s;
    while ((s = epx_pipe_next(from, &kind, &data, &n)) == EPX_OK) EPX_TRY(take_frame(w, kind, data, n));
    return s < 0 ? s : EPX_OK;
}

/* Whatever the front has said so far, oldest first. Does not block. */
static epx_status_t take_messages(epx_worker_t *w) {
    epx_pipe_t early = {.fd = -1, .in = w->deferred};
    epx_status_t s;
    w->deferred = (epx_str_t){0};
    s = take_all(w, &early);
    epx_pipe_fini(&early);
    if (s < 0) return s;
    if (epx_pipe_receive(&w->link) < 0) epx_worker_leave(EPX_WORKER_ABANDONED);
    EPX_TRY(take_all(w, &w->link));
    if (w->link.at_end) epx_worker_leave(EPX_WORKER_ABANDONED);
    return EPX_OK;
}

/* ---- life ---- */

static epx_status_t serve(epx_worker_t *w) {
    int left = 0;
    for (;;) {
        epx_status_t s;
        EPX_TRY(take_messages(w));
        if (w->idle) {
            epx_worker_wait(w);
            continue;
        }
        s = epx_rank_step(w->rank, add_event, w);
        if (s == EPX_ERR_ABORTED && w->stopping) s = EPX_OK, left = 1;
        if (s < 0) return s; /* the front ends the live requests: it knows which process died and how */
        w->idle = s == EPX_AGAIN;
        send_report(w, w->idle);
        flush_events(w);
        if (left) return EPX_OK;
    }
}

/* The first frame is the configuration; its strings lie in *out_text, which outlives the rank. */
static epx_status_t read_config(epx_worker_t *w, epx_str_t *out_text, epx_rank_config_t *out_cfg) {
    const char *data;
    uint32_t kind;
    size_t n;
    epx_status_t s;
    while ((s = epx_pipe_next(&w->link, &kind, &data, &n)) == EPX_AGAIN) epx_worker_wait(w);
    if (s < 0) return s;
    if (kind != EPX_MSG_CONFIG)
        return epx_fail(EPX_ERR_FORMAT, "the first frame has kind %u; a configuration was expected", kind);
    EPX_TRY(epx_str_append(out_text, data, n));
    EPX_TRY(epx_wire_get_config(out_text->data, out_text->n_bytes, out_cfg));
    w->n_ranks = out_cfg->tp;
    out_cfg->allgather = out_cfg->tp > 1 ? epx_worker_allgather : NULL;
    out_cfg->barrier = out_cfg->tp > 1 ? epx_worker_barrier : NULL;
    out_cfg->boot_ctx = w;
    out_cfg->progress = epx_worker_progress;
    out_cfg->progress_ctx = w;
    return EPX_OK;
}

static epx_status_t run(epx_worker_t *w, epx_str_t *text) {
    epx_rank_config_t cfg;
    epx_rank_info_t info = {0};
    epx_status_t s;
    char name[16];
    s = read_config(w, text, &cfg);
    if (s < 0) return report_failure(w, s);
    snprintf(name, sizeof name, "epx-rank-%d", cfg.rank);
    prctl(PR_SET_NAME, name);
    s = epx_rank_create(&cfg, &w->rank);
    if (s < 0) return report_failure(w, s);
    epx_rank_info(w->rank, &info);
    send_frame(w, EPX_MSG_READY, &info, sizeof info);
    s = epx_watchdog_start(w, cfg.rank, cfg.watchdog_s);
    if (s >= 0) s = serve(w);
    epx_watchdog_stop(w);
    if (s < 0) report_failure(w, s);
    epx_rank_destroy(w->rank);
    w->rank = NULL;
    return s;
}

int epx_worker_main(int fd) {
    epx_worker_t w = {0};
    epx_str_t text = {0};
    epx_status_t s = epx_process_bind_to_front(fd);
    if (s < 0) {
        fprintf(stderr, "epx: %s\n", epx_error_message());
        return EPX_WORKER_ABANDONED;
    }
    epx_pipe_init(&w.link, fd);
    s = run(&w, &text);
    epx_str_fini(&text);
    epx_str_fini(&w.events);
    epx_str_fini(&w.report);
    epx_str_fini(&w.deferred);
    epx_pipe_fini(&w.link);
    return s < 0 ? EPX_WORKER_FAILED : EPX_WORKER_OK;
}
