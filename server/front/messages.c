/* What a rank says: boot blobs, progress, ready, events, statistics, failure. Reader thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/front/cluster_impl.h"
#include "server/front/wire.h"

/* Every rank of a replica waits: give all of them all blobs. Sizes differ only if the ranks run different code. */
static void answer_boot(epx_cluster_t *c, int first) {
    epx_str_t all = {0};
    epx_status_t s = EPX_OK;
    epx_front_rank_t *ranks = &c->ranks[first];
    size_t n_bytes = ranks[0].boot_blob.n_bytes;
    for (int r = 0; r < c->replica_size; r++)
        if (!ranks[r].boot_waits) return;
    for (int r = 0; r < c->replica_size && s >= 0; r++) {
        epx_str_t *blob = &ranks[r].boot_blob;
        if (blob->n_bytes != n_bytes)
            s = epx_fail(EPX_ERR_MISMATCH, "bootstrap: rank %d gave %zu bytes, rank 0 gave %zu", r, blob->n_bytes, n_bytes);
        else s = epx_str_append(&all, blob->data, blob->n_bytes);
        epx_str_clear(blob);
        ranks[r].boot_waits = 0;
    }
    if (s < 0) {
        epx_cluster_fail(c, first, s, epx_error_message());
    } else {
        pthread_mutex_lock(&c->lock);
        epx_cluster_send_some(c, first, c->replica_size, EPX_MSG_BOOT_ALL, all.data, all.n_bytes);
        pthread_mutex_unlock(&c->lock);
    }
    epx_str_fini(&all);
}

static epx_status_t take_boot(epx_cluster_t *c, int rank, const char *data, size_t n) {
    epx_front_rank_t *r = &c->ranks[rank];
    if (r->boot_waits) return epx_fail(EPX_ERR_FORMAT, "a second bootstrap frame before the answer to the first");
    EPX_TRY(epx_str_append(&r->boot_blob, data, n));
    r->boot_waits = 1;
    answer_boot(c, rank - rank % c->replica_size);
    return EPX_OK;
}

static epx_status_t take_ready(epx_cluster_t *c, int rank, const char *data, size_t n) {
    if (n != sizeof(epx_rank_info_t)) return epx_fail(EPX_ERR_FORMAT, "ready frame of %zu bytes", n);
    pthread_mutex_lock(&c->lock);
    memcpy(&c->ranks[rank].info, data, n);
    pthread_mutex_unlock(&c->lock);
    c->ranks[rank].ready = 1;
    epx_cluster_check_ready(c);
    return EPX_OK;
}

void epx_cluster_check_ready(epx_cluster_t *c) {
    for (int r = 0; r < c->n_ranks; r++)
        if (!c->ranks[r].ready || c->ranks[r].pid == 0) return;
    epx_cluster_erase_progress(c);
    pthread_mutex_lock(&c->lock);
    if (c->state == EPX_CLUSTER_STARTING) {
        c->state = EPX_CLUSTER_SERVING;
        pthread_cond_broadcast(&c->changed);
    }
    pthread_mutex_unlock(&c->lock);
}

static epx_status_t take_progress(epx_cluster_t *c, int rank, const char *data, size_t n) {
    char phase[64];
    double fraction;
    if (n < sizeof fraction) return epx_fail(EPX_ERR_FORMAT, "progress frame of %zu bytes", n);
    memcpy(&fraction, data, sizeof fraction);
    snprintf(phase, sizeof phase, "%.*s", (int)(n - sizeof fraction), data + sizeof fraction);
    c->ranks[rank].progress = fraction;
    epx_cluster_draw_progress(c, phase);
    return EPX_OK;
}

/* 1 when the request is live; takes note of what the event says. */
static int note_event(epx_cluster_t *c, int rank, const epx_event_t *ev) {
    epx_live_t *at;
    int known;
    pthread_mutex_lock(&c->lock);
    at = epx_live_find(&c->live, ev->id);
    known = at != NULL && at->rank == rank;
    if (known) c->ranks[rank].n_live_tokens += ev->n_generated - at->n_generated;
    if (known) at->n_generated = ev->n_generated;
    if (known && ev->finish != EPX_FINISH_NONE) {
        c->ranks[rank].n_live_tokens -= at->n_prompt + at->n_generated;
        epx_live_remove(&c->live, ev->id);
        c->ranks[rank].n_live--;
    }
    pthread_mutex_unlock(&c->lock);
    return known;
}

static epx_status_t take_events(epx_cluster_t *c, int rank, const char *data, size_t n) {
    epx_wire_reader_t reader = {data, n, 0};
    epx_event_t ev;
    epx_status_t s;
    while ((s = epx_wire_get_event(&reader, &ev)) == EPX_OK)
        if (note_event(c, rank, &ev)) {
            ev.dp_rank = rank / c->group_size;
            c->cfg.on_event(c->cfg.ctx, &ev);
        }
    return s < 0 ? s : EPX_OK;
}

static epx_status_t take_stats(epx_cluster_t *c, int rank, const char *data, size_t n) {
    if (n != sizeof(epx_rank_stats_t)) return epx_fail(EPX_ERR_FORMAT, "statistics frame of %zu bytes", n);
    pthread_mutex_lock(&c->lock);
    memcpy(&c->ranks[rank].stats, data, n);
    c->ranks[rank].n_stats_got++;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    return EPX_OK;
}

static epx_status_t take_report(epx_cluster_t *c, int rank, const char *data, size_t n) {
    epx_front_rank_t *r = &c->ranks[rank];
    size_t n_rows = (size_t)r->info.n_layers * (size_t)r->info.n_experts;
    if (n != sizeof r->report + n_rows * sizeof *r->expert_rows) return epx_fail(EPX_ERR_FORMAT, "report frame of %zu bytes", n);
    pthread_mutex_lock(&c->lock);
    memcpy(&r->report, data, sizeof r->report);
    if (!r->expert_rows) r->expert_rows = calloc(n_rows + 1, sizeof *r->expert_rows);
    if (r->expert_rows) memcpy(r->expert_rows, data + sizeof r->report, n_rows * sizeof *r->expert_rows);
    pthread_mutex_unlock(&c->lock);
    return EPX_OK;
}

/* A rank that lost a peer is seldom the cause: wait for the peer's own end to be seen. */
static epx_status_t take_failure(epx_cluster_t *c, int rank, const char *data, size_t n) {
    char text[EPX_FAILURE_BYTES], name[EPX_RANK_NAME_BYTES];
    const char *message;
    epx_status_t status;
    EPX_TRY(epx_wire_get_failure(data, n, &status, &message));
    c->ranks[rank].said_why = 1;
    snprintf(text, sizeof text, "%s: %s", epx_cluster_rank_name(c, rank, name), message);
    if (status == EPX_ERR_PEER || status == EPX_ERR_TIMEOUT || status == EPX_ERR_ABORTED)
        epx_cluster_suspect(c, rank, status, text);
    else epx_cluster_fail(c, rank, status, text);
    return EPX_OK;
}

static epx_status_t take_frame(epx_cluster_t *c, int rank, uint32_t kind, const char *data, size_t n) {
    switch (kind) {
    case EPX_MSG_BOOT_MINE:
        return take_boot(c, rank, data, n);
    case EPX_MSG_READY:
        return take_ready(c, rank, data, n);
    case EPX_MSG_PROGRESS:
        return take_progress(c, rank, data, n);
    case EPX_MSG_EVENTS:
        return take_events(c, rank, data, n);
    case EPX_MSG_STATS:
        return take_stats(c, rank, data, n);
    case EPX_MSG_REPORT:
        return take_report(c, rank, data, n);
    case EPX_MSG_FAILED:
        return take_failure(c, rank, data, n);
    default:
        return epx_fail(EPX_ERR_FORMAT, "frame of unknown kind %u", kind);
    }
}

void epx_cluster_take_frames(epx_cluster_t *c, int rank) {
    char text[EPX_FAILURE_BYTES], name[EPX_RANK_NAME_BYTES];
    const char *data;
    uint32_t kind;
    size_t n;
    epx_status_t s;
    while ((s = epx_pipe_next(&c->ranks[rank].link, &kind, &data, &n)) == EPX_OK) {
        s = take_frame(c, rank, kind, data, n);
        if (s < 0) break;
    }
    if (s >= 0) return;
    c->ranks[rank].link.at_end = 1;
    snprintf(text, sizeof text, "%s: %.800s", epx_cluster_rank_name(c, rank, name), epx_error_message());
    epx_cluster_fail(c, rank, s, text);
}
