/* Deaths, failures and deadlines of a cluster. Reader thread. */
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "server/front/cluster_impl.h"
#include "server/front/wire.h"

#define SUSPECT_NS 300000000u        /* well below the second in which a death must be named */
#define LEAVE_NS 1000000000u         /* the others find the loss themselves; after this they are killed */
#define WATCH_NS 1000000000u         /* between looks for stopped processes */
#define DEFAULT_WAIT_NS 10000000000u /* of epx_rank_config_t.timeout_ns */

enum { MOST_WAIT_S = 3600 };

void epx_cluster_end_live(epx_cluster_t *c, const char *why) {
    epx_live_table_t ended;
    pthread_mutex_lock(&c->lock);
    ended = c->live;
    c->live = (epx_live_table_t){0};
    for (int r = 0; r < c->n_ranks; r++) c->ranks[r].n_live = 0, c->ranks[r].n_live_tokens = 0;
    pthread_mutex_unlock(&c->lock);
    for (size_t i = 0; i < ended.cap; i++) {
        const epx_live_t *at = &ended.slots[i];
        epx_event_t ev = {.id = at->id,
                          .token = -1,
                          .finish = EPX_FINISH_ERROR,
                          .n_prompt = at->n_prompt,
                          .n_generated = at->n_generated,
                          .error = why,
                          .dp_rank = at->rank / c->group_size};
        if (at->id) c->cfg.on_event(c->cfg.ctx, &ev);
    }
    epx_live_fini(&ended);
}

void epx_cluster_fail(epx_cluster_t *c, epx_status_t status, const char *text) {
    epx_cluster_state_t before;
    pthread_mutex_lock(&c->lock);
    before = c->state;
    c->suspect_deadline = 0;
    if (before == EPX_CLUSTER_STARTING || before == EPX_CLUSTER_SERVING) {
        c->state = EPX_CLUSTER_FAILED;
        c->failure_status = status;
        snprintf(c->failure, sizeof c->failure, "%s", text);
    }
    if (before != EPX_CLUSTER_FAILED) {
        c->kill_deadline = epx_now_ns() + LEAVE_NS;
        epx_cluster_send_all(c, EPX_MSG_ABORT, NULL, 0);
    }
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    if (before == EPX_CLUSTER_STARTING) epx_cluster_erase_progress(c);
    if (before != EPX_CLUSTER_SERVING) return;
    epx_cluster_end_live(c, c->failure);
    if (c->cfg.on_failure) c->cfg.on_failure(c->cfg.ctx, c->failure);
}

void epx_cluster_suspect(epx_cluster_t *c, epx_status_t status, const char *text) {
    epx_cluster_state_t state;
    pthread_mutex_lock(&c->lock);
    state = c->state;
    pthread_mutex_unlock(&c->lock);
    if (c->suspect_deadline || state == EPX_CLUSTER_STOPPING || state == EPX_CLUSTER_FAILED) return;
    c->suspect_deadline = epx_now_ns() + SUSPECT_NS;
    c->suspect_status = status;
    snprintf(c->suspicion, sizeof c->suspicion, "%s", text);
}

/* The last frames were taken in this round's socket pass or are taken here. */
void epx_cluster_process_ended(epx_cluster_t *c, int rank) {
    epx_front_rank_t *r = &c->ranks[rank];
    char how[128], text[EPX_FAILURE_BYTES];
    int stopping;
    if (epx_pipe_receive(&r->link) < 0) r->link.at_end = 1;
    epx_cluster_take_frames(c, rank);
    r->link.at_end = 1;
    if (!epx_process_reap(&r->process, how, sizeof how)) return;
    pthread_mutex_lock(&c->lock);
    stopping = c->state == EPX_CLUSTER_STOPPING;
    pthread_mutex_unlock(&c->lock);
    if (stopping || r->said_why) return;
    snprintf(text, sizeof text, "rank %d (process %d) %s", rank, r->pid, how);
    epx_cluster_fail(c, EPX_ERR_PEER, text);
}

void epx_cluster_check_deadlines(epx_cluster_t *c) {
    uint64_t now = epx_now_ns();
    int late;
    if (c->suspect_deadline && now >= c->suspect_deadline) {
        c->suspect_deadline = 0;
        epx_cluster_fail(c, c->suspect_status, c->suspicion);
    }
    pthread_mutex_lock(&c->lock);
    late = c->kill_deadline && now >= c->kill_deadline;
    if (late) c->kill_deadline = 0;
    pthread_mutex_unlock(&c->lock);
    for (int r = 0; late && r < c->n_ranks; r++) epx_process_kill(&c->ranks[r].process);
}

/* Looks are counted, not time: after the terminal's Ctrl-Z and fg the front itself has been stopped as long as the ranks. */
static void look_at_rank(epx_cluster_t *c, int rank, int most_looks) {
    epx_front_rank_t *r = &c->ranks[rank];
    char text[EPX_FAILURE_BYTES];
    r->n_seen_stopped = epx_process_is_stopped(&r->process) ? r->n_seen_stopped + 1 : 0;
    if (r->n_seen_stopped <= most_looks) return;
    snprintf(text, sizeof text, "rank %d (process %d) has been stopped by a signal (SIGSTOP) for %d s", rank, r->pid, most_looks);
    epx_cluster_fail(c, EPX_ERR_TIMEOUT, text);
}

void epx_cluster_watch_stopped(epx_cluster_t *c) {
    uint64_t now = epx_now_ns(), wait_s = (c->cfg.rank.timeout_ns ? c->cfg.rank.timeout_ns : DEFAULT_WAIT_NS) / WATCH_NS;
    int expecting, most_looks = wait_s < MOST_WAIT_S ? (int)wait_s + 1 : MOST_WAIT_S;
    pthread_mutex_lock(&c->lock);
    expecting = c->state == EPX_CLUSTER_STARTING || (c->state == EPX_CLUSTER_SERVING && c->live.n > 0);
    pthread_mutex_unlock(&c->lock);
    if (expecting && now < c->watch_at) return;
    for (int r = 0; r < c->n_ranks; r++) {
        if (!expecting) c->ranks[r].n_seen_stopped = 0;
        else look_at_rank(c, r, most_looks);
    }
    c->watch_at = expecting ? now + WATCH_NS : 0;
}
