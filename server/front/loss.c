/* Deaths, failures and deadlines of a cluster. Reader thread. */
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "server/front/cluster_impl.h"
#include "server/front/wire.h"

#define SUSPECT_NS 300000000u /* well below the second in which a death must be named */
#define LEAVE_NS 1000000000u  /* the others find the loss themselves; after this they are killed */
#define WATCH_NS 1000000000u  /* between looks for stopped processes */

enum { MOST_WAIT_S = 3600 };

/* Take the live requests of a replica, or of all with -1, out of the table; the rest stays. lock held. */
static epx_live_table_t take_live(epx_cluster_t *c, int replica) {
    epx_live_table_t all = c->live, kept = {0};
    for (int r = 0; r < c->n_ranks; r++)
        if (replica < 0 || r / c->replica_size == replica) c->ranks[r].n_live = 0, c->ranks[r].n_live_tokens = 0;
    for (size_t i = 0; replica >= 0 && i < all.cap; i++) {
        epx_live_t *at = &all.slots[i];
        if (at->id == 0 || at->rank / c->replica_size == replica) continue;
        if (epx_live_add(&kept, at) < 0) continue; /* without memory the request is ended too, whatever its replica says */
        at->id = 0;
    }
    c->live = kept;
    return all;
}

void epx_cluster_end_live(epx_cluster_t *c, int replica, const char *why) {
    epx_live_table_t ended;
    pthread_mutex_lock(&c->lock);
    ended = take_live(c, replica);
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

/* lock held */
static void abandon(epx_cluster_t *c, int replica) {
    epx_replica_t *p = &c->replicas[replica];
    if (p->lost) return;
    p->lost = 1;
    p->suspect_deadline = 0;
    p->kill_deadline = epx_now_ns() + LEAVE_NS;
    epx_cluster_send_some(c, replica * c->replica_size, c->replica_size, EPX_MSG_ABORT, NULL, 0);
}

void epx_cluster_fail(epx_cluster_t *c, int rank, epx_status_t status, const char *text) {
    epx_cluster_state_t before;
    int replica = rank / c->replica_size, known;
    pthread_mutex_lock(&c->lock);
    before = c->state;
    known = c->replicas[replica].lost;
    if (before == EPX_CLUSTER_STARTING || before == EPX_CLUSTER_SERVING) {
        c->state = EPX_CLUSTER_FAILED;
        c->failure_status = status;
        snprintf(c->failure, sizeof c->failure, "%s", text);
    }
    for (int p = 0; p < c->n_replicas; p++)
        if (p == replica || before == EPX_CLUSTER_STARTING) abandon(c, p);
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    if (before == EPX_CLUSTER_STARTING) epx_cluster_erase_progress(c);
    if (known || before == EPX_CLUSTER_STARTING || before == EPX_CLUSTER_STOPPING) return;
    epx_cluster_end_live(c, replica, text);
    if (before == EPX_CLUSTER_SERVING && c->cfg.on_failure) c->cfg.on_failure(c->cfg.ctx, c->failure);
}

void epx_cluster_suspect(epx_cluster_t *c, int rank, epx_status_t status, const char *text) {
    epx_replica_t *p = &c->replicas[rank / c->replica_size];
    int over;
    pthread_mutex_lock(&c->lock);
    over = p->lost || c->state == EPX_CLUSTER_STOPPING;
    pthread_mutex_unlock(&c->lock);
    if (p->suspect_deadline || over) return;
    p->suspect_deadline = epx_now_ns() + SUSPECT_NS;
    p->suspect_status = status;
    snprintf(p->suspicion, sizeof p->suspicion, "%s", text);
}

/* The last frames were taken in this round's socket pass or are taken here. */
static void take_last(epx_cluster_t *c, int rank) {
    epx_front_rank_t *r = &c->ranks[rank];
    if (epx_pipe_receive(&r->link) < 0) r->link.at_end = 1;
    epx_cluster_take_frames(c, rank);
    r->link.at_end = 1;
}

void epx_cluster_process_ended(epx_cluster_t *c, int rank) {
    char how[128];
    take_last(c, rank);
    if (epx_process_reap(&c->ranks[rank].process, how, sizeof how)) epx_cluster_rank_ended(c, rank, how);
}

void epx_cluster_rank_ended(epx_cluster_t *c, int rank, const char *how) {
    char text[EPX_FAILURE_BYTES], name[EPX_RANK_NAME_BYTES];
    int stopping;
    take_last(c, rank);
    pthread_mutex_lock(&c->lock);
    stopping = c->state == EPX_CLUSTER_STOPPING;
    pthread_mutex_unlock(&c->lock);
    if (stopping || c->ranks[rank].said_why) return;
    snprintf(text, sizeof text, "%s %s", epx_cluster_process_name(c, rank, name), how);
    epx_cluster_fail(c, rank, EPX_ERR_PEER, text);
}

static void check_replica(epx_cluster_t *c, int replica, uint64_t now) {
    epx_replica_t *p = &c->replicas[replica];
    int late, first = replica * c->replica_size;
    if (p->suspect_deadline && now >= p->suspect_deadline) {
        p->suspect_deadline = 0;
        epx_cluster_fail(c, first, p->suspect_status, p->suspicion);
    }
    pthread_mutex_lock(&c->lock);
    late = p->kill_deadline && now >= p->kill_deadline;
    if (late) p->kill_deadline = 0;
    pthread_mutex_unlock(&c->lock);
    for (int r = first; late && r < first + c->replica_size; r++) {
        if (epx_cluster_is_remote(c, r)) epx_cluster_kill_remote(c, r);
        else epx_process_kill(&c->ranks[r].process);
    }
}

void epx_cluster_check_deadlines(epx_cluster_t *c) {
    for (int p = 0; p < c->n_replicas; p++) check_replica(c, p, epx_now_ns());
}

static int is_stopped(const epx_cluster_t *c, int rank) {
    if (!epx_cluster_is_remote(c, rank)) return epx_process_is_stopped(&c->ranks[rank].process);
    return (c->nodes[rank / c->node_size].stopped >> (rank % c->node_size)) & 1;
}

/* Looks are counted, not time: after the terminal's Ctrl-Z and fg the front itself has been stopped as long as the ranks. */
static void look_at_rank(epx_cluster_t *c, int rank, int most_looks) {
    epx_front_rank_t *r = &c->ranks[rank];
    char text[EPX_FAILURE_BYTES], name[EPX_RANK_NAME_BYTES];
    r->n_seen_stopped = is_stopped(c, rank) ? r->n_seen_stopped + 1 : 0;
    if (r->n_seen_stopped <= most_looks) return;
    snprintf(text, sizeof text, "%s has been stopped by a signal (SIGSTOP) for %d s", epx_cluster_process_name(c, rank, name),
             most_looks);
    epx_cluster_fail(c, rank, EPX_ERR_TIMEOUT, text);
}

void epx_cluster_watch_stopped(epx_cluster_t *c) {
    uint64_t now = epx_now_ns(), wait_s = (c->cfg.rank.timeout_ns ? c->cfg.rank.timeout_ns : EPX_DEFAULT_WAIT_NS) / WATCH_NS;
    int expecting, most_looks = wait_s < MOST_WAIT_S ? (int)wait_s + 1 : MOST_WAIT_S;
    pthread_mutex_lock(&c->lock);
    expecting = c->state == EPX_CLUSTER_STARTING || (c->state != EPX_CLUSTER_STOPPING && c->live.n > 0);
    pthread_mutex_unlock(&c->lock);
    if (expecting && now < c->watch_at) return;
    for (int r = 0; r < c->n_ranks; r++) {
        if (!expecting) c->ranks[r].n_seen_stopped = 0;
        else look_at_rank(c, r, most_looks);
    }
    c->watch_at = expecting ? now + WATCH_NS : 0;
}
