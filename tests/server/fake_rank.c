/* A rank without a model, linked instead of the engine's: for tests of processes, death and cancelling. It does not exchange
 * anything between ranks. Token i of a request is prompt[0] + i. model_path chooses what it does:
 *   "fake"        2 ms a step            "fake:slow"   20 ms a step
 *   "fake:refuse" rank 1 fails to start  "fake:crash"  rank 1 ends in create without a word
 *   "fake:stuck"  a step with work never returns       "fake:uneven" ranks give bootstrap blobs of different size
 *   "fake:halt"   rank 1 stops itself with SIGSTOP in create
 *   "fake:lost"   rank 0 reports a lost peer in its first step with work
 * It checks the front's side of rank.h: a step of an idle rank without a wake is an internal error. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/runtime/rank.h"

enum { MAX_LIVE = 256, MAX_PROMPT = 100000, FIELDS = 4, FAKE_LAYERS = 2, FAKE_EXPERTS = 3 };

typedef struct {
    uint64_t id;
    int32_t first, n_prompt, n_max, n_done;
    int cancelled;
} fake_request_t;

struct epx_rank {
    int rank, tp;
    long step_ms;
    int stuck, stuck_now, lost;
    fake_request_t live[MAX_LIVE];
    int n_live;
    int idle, stopping;
    uint64_t wake_seq;
    epx_rank_stats_t stats;
    uint64_t expert_rows[FAKE_LAYERS * FAKE_EXPERTS];
    epx_meter_t meter;
};

void epx_rank_config_init(epx_rank_config_t *cfg) {
    memset(cfg, 0, sizeof *cfg);
    cfg->size = sizeof *cfg;
    cfg->tp = cfg->dp = cfg->ep = 1;
}

static int is(const epx_rank_config_t *cfg, const char *name) { return strcmp(cfg->model_path, name) == 0; }

/* Blobs of all ranks come back in rank order. */
static epx_status_t check_boot(const epx_rank_config_t *cfg) {
    int32_t mine[FIELDS] = {cfg->rank, cfg->rank * 3, 7, (int32_t)getpid()}, all[64][FIELDS];
    size_t n = is(cfg, "fake:uneven") && cfg->rank ? sizeof mine - 1 : sizeof mine;
    if (cfg->tp == 1) return EPX_OK;
    EPX_TRY(cfg->allgather(cfg->boot_ctx, mine, n, all));
    for (int r = 0; r < cfg->tp; r++)
        if (all[r][0] != r || all[r][1] != 3 * r || all[r][2] != 7)
            return epx_fail(EPX_ERR_INTERNAL, "blob of rank %d is wrong", r);
    if (all[cfg->rank][3] != (int32_t)getpid()) return epx_fail(EPX_ERR_INTERNAL, "own blob is wrong");
    return cfg->barrier(cfg->boot_ctx);
}

epx_status_t epx_rank_create(const epx_rank_config_t *cfg, epx_rank_t **out_rank) {
    epx_rank_t *r;
    if (is(cfg, "fake:refuse") && cfg->rank == 1) return epx_fail(EPX_ERR_FORMAT, "fake/model.safetensors: refused as asked");
    if (is(cfg, "fake:crash") && cfg->rank == 1) _exit(42);
    if (is(cfg, "fake:halt") && cfg->rank == 1) raise(SIGSTOP);
    cfg->progress(cfg->progress_ctx, "weights", 0.5);
    EPX_TRY(check_boot(cfg));
    r = calloc(1, sizeof *r);
    if (r == NULL) return epx_fail(EPX_ERR_NOMEM, "fake rank");
    r->rank = cfg->rank;
    r->tp = cfg->tp;
    r->meter = (epx_meter_t){.n_layers = FAKE_LAYERS, .n_experts = FAKE_EXPERTS, .expert_rows = r->expert_rows};
    r->step_ms = is(cfg, "fake:slow") ? 20 : 2;
    r->stuck = is(cfg, "fake:stuck");
    r->lost = is(cfg, "fake:lost") && cfg->rank == 0;
    cfg->progress(cfg->progress_ctx, "ready", 1.0);
    *out_rank = r;
    return EPX_OK;
}

void epx_rank_destroy(epx_rank_t *r) { free(r); }

void epx_rank_info(const epx_rank_t *r, epx_rank_info_t *out_info) {
    memset(out_info, 0, sizeof *out_info);
    out_info->n_ranks = r->tp;
    out_info->mapped_bytes = 1000 + (uint64_t)r->rank;
    out_info->max_context = MAX_PROMPT;
    out_info->max_running = 1; /* for the front's limit; the played rank itself runs all */
    out_info->n_layers = FAKE_LAYERS;
    out_info->n_experts = FAKE_EXPERTS;
    snprintf(out_info->backend, sizeof out_info->backend, "fake");
}

void epx_rank_stats(const epx_rank_t *r, epx_rank_stats_t *out_stats) {
    *out_stats = r->stats;
    out_stats->n_running = r->n_live;
    for (int i = 0; i < r->tp; i++) out_stats->rows_sent[i] = (uint64_t)(10 * r->rank + i);
}

const epx_meter_t *epx_rank_meter(const epx_rank_t *r) { return &r->meter; }

epx_status_t epx_rank_submit(epx_rank_t *r, const epx_request_t *req) {
    if (req->max_new_tokens < 1) return epx_fail(EPX_ERR_ARG, "max_new_tokens = %d; at least 1", req->max_new_tokens);
    if (r->n_live == MAX_LIVE) return epx_fail(EPX_ERR_CAPACITY, "%d requests are live", r->n_live);
    for (int32_t i = 1; i < req->n_prompt; i++)
        if (req->prompt[i] != req->prompt[0]) return epx_fail(EPX_ERR_ARG, "prompt[%d] was damaged on its way", i);
    r->live[r->n_live++] = (fake_request_t){req->id, req->prompt[0], req->n_prompt, req->max_new_tokens, 0, 0};
    return EPX_OK;
}

void epx_rank_cancel(epx_rank_t *r, uint64_t id) {
    for (int i = 0; i < r->n_live; i++)
        if (r->live[i].id == id) r->live[i].cancelled = 1;
}

void epx_rank_flush_cache(epx_rank_t *r) { r->stats.n_cached_tokens = 0; }

void epx_rank_wake(epx_rank_t *r, uint64_t wake_seq) {
    if (wake_seq == r->wake_seq + 1) r->idle = 0; /* numbers come without gaps; else the next step complains */
    r->wake_seq = wake_seq;
}

/* A step that never returns is what the watchdog is for. */
void epx_rank_position(const epx_rank_t *r, epx_rank_position_t *out) {
    int stuck_now = __atomic_load_n(&r->stuck_now, __ATOMIC_RELAXED);
    *out = (epx_rank_position_t){.phase = "played step", .step = 7, .n_rows = 1, .is_idle = !stuck_now};
}

void epx_rank_stop(epx_rank_t *r) {
    r->stopping = 1;
    r->idle = 0;
}

/* 1 when the request has ended. */
static int advance(epx_rank_t *r, fake_request_t *q, epx_event_fn on_event, void *ctx) {
    epx_event_t ev = {.id = q->id, .token = -1, .n_prompt = q->n_prompt};
    if (q->cancelled) {
        ev.finish = EPX_FINISH_CANCELLED;
    } else {
        ev.token = q->first + q->n_done++;
        ev.finish = q->n_done == q->n_max ? EPX_FINISH_LENGTH : EPX_FINISH_NONE;
        r->stats.n_decode_tokens++;
        r->expert_rows[4]++; /* layer 1, expert 1 */
    }
    ev.n_generated = q->n_done;
    on_event(ctx, &ev);
    return ev.finish != EPX_FINISH_NONE;
}

epx_status_t epx_rank_step(epx_rank_t *r, epx_event_fn on_event, void *ctx) {
    struct timespec pause = {0, r->step_ms * 1000000};
    if (r->idle)
        return epx_fail(EPX_ERR_INTERNAL, "an idle rank was stepped without the next wake (last: %lu)",
                        (unsigned long)r->wake_seq);
    if (r->n_live && r->lost) return epx_fail(EPX_ERR_PEER, "rank 1 does not answer");
    __atomic_store_n(&r->stuck_now, r->n_live && r->stuck, __ATOMIC_RELAXED);
    while (r->n_live && r->stuck) pause.tv_nsec = 1000000, nanosleep(&pause, NULL);
    if (r->n_live == 0 && r->stopping) return epx_fail(EPX_ERR_ABORTED, "stopped");
    if (r->n_live == 0) {
        r->idle = 1;
        return EPX_AGAIN;
    }
    nanosleep(&pause, NULL);
    r->stats.n_steps++;
    for (int i = 0; i < r->n_live;)
        if (advance(r, &r->live[i], on_event, ctx)) r->live[i] = r->live[--r->n_live];
        else i++;
    return EPX_OK;
}
