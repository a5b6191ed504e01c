/* Public calls of a cluster. Callers' threads; they never wait for a rank, except create, stats and destroy, which are bounded
 * by loading, 1 s and 5 s. */
#include "server/front/cluster.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "server/front/cluster_impl.h"
#include "server/front/wire.h"

enum { STATS_WAIT_S = 1 };
#define STOP_NS 5000000000u

static void wake_reader(epx_cluster_t *c) {
    uint64_t one = 1;
    ssize_t k = write(c->wake_fd, &one, sizeof one);
    (void)k; /* full means that a wake is pending already */
}

void epx_cluster_send(epx_cluster_t *c, int rank, uint32_t kind, const void *payload, size_t n_bytes) {
    epx_pipe_t *l = &c->ranks[rank].link;
    if (epx_pipe_queue(l, kind, payload, n_bytes) < 0) return;
    if (epx_pipe_flush(l, 0) != EPX_OK) wake_reader(c);
}

void epx_cluster_send_all(epx_cluster_t *c, uint32_t kind, const void *payload, size_t n_bytes) {
    epx_cluster_send_some(c, 0, c->n_ranks, kind, payload, n_bytes);
}

void epx_cluster_send_some(epx_cluster_t *c, int first, int n, uint32_t kind, const void *payload, size_t n_bytes) {
    for (int r = first; r < first + n; r++) epx_cluster_send(c, r, kind, payload, n_bytes);
}

const char *epx_cluster_rank_name(const epx_cluster_t *c, int rank, char out[EPX_RANK_NAME_BYTES]) {
    if (c->n_replicas == 1) snprintf(out, EPX_RANK_NAME_BYTES, "rank %d", rank);
    else snprintf(out, EPX_RANK_NAME_BYTES, "replica %d rank %d", rank / c->replica_size, rank % c->replica_size);
    return out;
}

const char *epx_cluster_process_name(const epx_cluster_t *c, int rank, char out[EPX_RANK_NAME_BYTES]) {
    char name[EPX_RANK_NAME_BYTES];
    const char *host = c->nodes[rank / c->node_size].host;
    epx_cluster_rank_name(c, rank, name);
    snprintf(out, EPX_RANK_NAME_BYTES, "%.60s (process %d%s%s)", name, c->ranks[rank].pid, c->n_nodes > 1 ? " on " : "",
             c->n_nodes > 1 ? host : "");
    return out;
}

static epx_status_t check_nodes(const epx_cluster_config_t *cfg) {
    int n = cfg->nodes.n_nodes, n_ranks = cfg->rank.tp * (cfg->n_replicas ? cfg->n_replicas : 1);
    if (n < 0 || (n > 1 && n_ranks % n))
        return epx_fail(EPX_ERR_ARG, "n_nodes = %d; the divisors of %d ranks are possible", n, n_ranks);
    if (n > 1 && (!cfg->nodes.address || cfg->nodes.node != 0))
        return epx_fail(EPX_ERR_ARG, "several nodes need an address, and the front is node 0, not %d", cfg->nodes.node);
    return EPX_OK;
}

static epx_status_t check_config(const epx_cluster_config_t *cfg) {
    if (cfg->size != sizeof *cfg)
        return epx_fail(EPX_ERR_ARG, "epx_cluster_config_t.size is %u; this build has %zu", cfg->size, sizeof *cfg);
    if (cfg->rank.tp < 1 || cfg->rank.tp > EPX_CLUSTER_MAX_RANKS)
        return epx_fail(EPX_ERR_ARG, "tp = %d; 1 to %d are possible", cfg->rank.tp, (int)EPX_CLUSTER_MAX_RANKS);
    if (cfg->rank.dp < 1 || cfg->rank.tp % cfg->rank.dp)
        return epx_fail(EPX_ERR_ARG, "dp = %d; the divisors of tp = %d are possible", cfg->rank.dp, cfg->rank.tp);
    if (cfg->n_replicas < 0 || cfg->n_replicas > EPX_CLUSTER_MAX_RANKS / cfg->rank.tp)
        return epx_fail(EPX_ERR_ARG, "n_replicas = %d; with tp = %d 0 to %d are possible", cfg->n_replicas, cfg->rank.tp,
                        (int)EPX_CLUSTER_MAX_RANKS / cfg->rank.tp);
    EPX_TRY(check_nodes(cfg));
    if (cfg->on_event == NULL) return epx_fail(EPX_ERR_ARG, "on_event is NULL");
    return EPX_OK;
}

static epx_status_t make(const epx_cluster_config_t *cfg, epx_cluster_t **out_c) {
    epx_cluster_t *c = calloc(1, sizeof *c);
    pthread_condattr_t attr;
    if (c == NULL) return epx_fail(EPX_ERR_NOMEM, "cluster: %zu bytes wanted", sizeof *c);
    c->cfg = *cfg;
    c->n_replicas = cfg->n_replicas ? cfg->n_replicas : 1;
    c->replica_size = cfg->rank.tp;
    c->n_ranks = c->n_replicas * c->replica_size;
    c->group_size = cfg->rank.tp / cfg->rank.dp;
    c->n_nodes = cfg->nodes.n_nodes > 1 ? cfg->nodes.n_nodes : 1;
    c->node_size = c->n_ranks / c->n_nodes;
    for (int i = 0; i < c->n_nodes; i++) c->nodes[i].link.fd = -1;
    gethostname(c->nodes[0].host, sizeof c->nodes[0].host - 1);
    c->next_id = 1;
    for (int r = 0; r < c->n_ranks; r++) {
        c->ranks[r].link.fd = -1;
        c->ranks[r].process.pidfd = -1;
    }
    c->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (c->wake_fd < 0) {
        free(c);
        return epx_fail_errno(EPX_ERR_OS, errno, "eventfd");
    }
    pthread_mutex_init(&c->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&c->changed, &attr);
    pthread_condattr_destroy(&attr);
    *out_c = c;
    return EPX_OK;
}

static void discard(epx_cluster_t *c) {
    for (int r = 0; r < c->n_ranks; r++) {
        epx_pipe_fini(&c->ranks[r].link);
        epx_str_fini(&c->ranks[r].boot_blob);
        free(c->ranks[r].expert_rows);
    }
    for (int i = 0; i < c->n_nodes; i++) {
        epx_pipe_fini(&c->nodes[i].link);
        free(c->nodes[i].model_path);
    }
    epx_live_fini(&c->live);
    close(c->wake_fd);
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

epx_status_t epx_cluster_create(const epx_cluster_config_t *cfg, epx_cluster_t **out_c) {
    epx_cluster_t *c = NULL;
    int e;
    EPX_TRY(check_config(cfg));
    EPX_TRY(make(cfg, &c));
    e = pthread_create(&c->reader, NULL, epx_cluster_reader_main, c);
    if (e) {
        discard(c);
        return epx_fail_errno(EPX_ERR_OS, e, "starting the reader thread");
    }
    pthread_mutex_lock(&c->lock);
    while (c->state == EPX_CLUSTER_STARTING) pthread_cond_wait(&c->changed, &c->lock);
    if (c->state == EPX_CLUSTER_FAILED) {
        epx_status_t s = epx_fail(c->failure_status, "%s", c->failure);
        pthread_mutex_unlock(&c->lock);
        epx_cluster_destroy(c);
        return s;
    }
    pthread_mutex_unlock(&c->lock);
    *out_c = c;
    return EPX_OK;
}

static int is_less_loaded(const epx_cluster_t *c, const epx_front_rank_t *a, const epx_front_rank_t *b) {
    if (c->cfg.balance == EPX_BALANCE_ROUND_ROBIN) return 0;
    if (c->cfg.balance == EPX_BALANCE_TOKENS && a->n_live_tokens != b->n_live_tokens) return a->n_live_tokens < b->n_live_tokens;
    return a->n_live < b->n_live;
}

/* lock held */
static int choose_rank(epx_cluster_t *c) {
    int best = c->next_rank;
    for (int i = c->group_size; i < c->n_ranks; i += c->group_size) {
        int r = (c->next_rank + i) % c->n_ranks;
        if (is_less_loaded(c, &c->ranks[r], &c->ranks[best])) best = r;
    }
    c->next_rank = (best + c->group_size) % c->n_ranks;
    return best;
}

/* To every rank of the attention group whose first rank this is. lock held. */
static void send_group(epx_cluster_t *c, int first, uint32_t kind, const void *payload, size_t n_bytes) {
    epx_cluster_send_some(c, first, c->group_size, kind, payload, n_bytes);
}

/* lock held */
static epx_status_t check_queue(const epx_cluster_t *c, int rank) {
    const epx_front_rank_t *r = &c->ranks[rank];
    char name[EPX_RANK_NAME_BYTES];
    if (!c->cfg.limit_queue || r->n_live < r->info.max_running + c->cfg.max_queued) return EPX_OK;
    return epx_fail(EPX_ERR_CAPACITY, "the queue is full: %s has %d requests; %d may run and %d wait",
                    epx_cluster_rank_name(c, rank, name), r->n_live, r->info.max_running, c->cfg.max_queued);
}

/* The request goes to its rank first, then the running number to all of the replica: a rank that has seen the number n and waits
 * for nothing knows that its own share of the submissions 1..n has arrived. lock held. */
static epx_status_t submit_locked(epx_cluster_t *c, const epx_request_t *req, int rank, uint64_t *out_id) {
    epx_live_t entry = {.id = c->next_id, .rank = rank, .n_prompt = req->n_prompt};
    epx_request_t numbered = *req;
    epx_str_t frame = {0};
    epx_status_t s;
    epx_replica_t *p = &c->replicas[rank / c->replica_size];
    if (c->state == EPX_CLUSTER_FAILED) return epx_fail(EPX_ERR_PEER, "%s", c->failure);
    if (c->state != EPX_CLUSTER_SERVING) return epx_fail(EPX_ERR_STATE, "the ranks are being stopped");
    EPX_TRY(check_queue(c, rank));
    numbered.id = entry.id;
    EPX_TRY_GOTO(s, epx_wire_put_request(&frame, &numbered), done);
    EPX_TRY_GOTO(s, epx_live_add(&c->live, &entry), done);
    c->next_id++;
    c->ranks[rank].n_live++;
    c->ranks[rank].n_live_tokens += req->n_prompt;
    if (c->live.n == 1) wake_reader(c); /* from now on something is expected of the ranks */
    *out_id = entry.id;
    send_group(c, rank, EPX_MSG_REQUEST, frame.data, frame.n_bytes);
    p->wake_seq++;
    epx_cluster_send_some(c, rank - rank % c->replica_size, c->replica_size, EPX_MSG_WAKE, &p->wake_seq, sizeof p->wake_seq);
done:
    epx_str_fini(&frame);
    return s;
}

epx_status_t epx_cluster_submit(epx_cluster_t *c, const epx_request_t *req, int dp_rank, uint64_t *out_id) {
    epx_status_t s;
    if (dp_rank < -1 || dp_rank >= c->n_ranks / c->group_size)
        return epx_fail(EPX_ERR_ARG, "dp_rank = %d; -1 (any) to %d are possible", dp_rank, c->n_ranks / c->group_size - 1);
    if (req->prompt == NULL || req->n_prompt < 1)
        return epx_fail(EPX_ERR_ARG, "n_prompt = %d; a prompt has at least one token", req->n_prompt);
    pthread_mutex_lock(&c->lock);
    s = submit_locked(c, req, dp_rank < 0 ? choose_rank(c) : dp_rank * c->group_size, out_id);
    pthread_mutex_unlock(&c->lock);
    return s;
}

void epx_cluster_cancel(epx_cluster_t *c, uint64_t id) {
    epx_live_t *at;
    pthread_mutex_lock(&c->lock);
    at = epx_live_find(&c->live, id);
    if (at) send_group(c, at->rank, EPX_MSG_CANCEL, &id, sizeof id);
    pthread_mutex_unlock(&c->lock);
}

void epx_cluster_status(epx_cluster_t *c, epx_cluster_status_t *out) {
    memset(out, 0, sizeof *out);
    pthread_mutex_lock(&c->lock);
    out->info = c->ranks[0].info;
    out->n_ranks = c->n_ranks;
    out->n_replicas = c->n_replicas;
    out->ranks_per_dp = c->group_size;
    out->n_dp = c->n_ranks / c->group_size;
    for (int r = 0; r < c->n_ranks; r++) {
        out->pids[r] = c->ranks[r].pid;
        out->mapped_bytes[r] = c->ranks[r].info.mapped_bytes;
    }
    out->n_nodes = c->n_nodes;
    for (int i = 0; i < c->n_nodes; i++) memcpy(out->hosts[i], c->nodes[i].host, sizeof out->hosts[i]);
    out->failed = c->state == EPX_CLUSTER_FAILED;
    snprintf(out->failure, sizeof out->failure, "%s", c->failure);
    pthread_mutex_unlock(&c->lock);
}

/* First rank whose answer is outstanding, or -1. lock held. */
static int missing_stats(const epx_cluster_t *c, const uint64_t *wanted) {
    for (int r = 0; r < c->n_ranks; r++)
        if (c->ranks[r].n_stats_got < wanted[r]) return r;
    return -1;
}

/* lock held */
static epx_status_t wait_for_stats(epx_cluster_t *c) {
    uint64_t wanted[EPX_CLUSTER_MAX_RANKS];
    struct timespec until;
    char name[EPX_RANK_NAME_BYTES];
    int r, e = 0;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += STATS_WAIT_S;
    for (r = 0; r < c->n_ranks; r++) {
        wanted[r] = ++c->ranks[r].n_stats_asked;
        epx_cluster_send(c, r, EPX_MSG_GET_STATS, NULL, 0);
    }
    while ((r = missing_stats(c, wanted)) >= 0 && c->state == EPX_CLUSTER_SERVING && e == 0)
        e = pthread_cond_timedwait(&c->changed, &c->lock, &until);
    if (c->state != EPX_CLUSTER_SERVING) return epx_fail(EPX_ERR_PEER, "%s", c->failure);
    if (r >= 0)
        return epx_fail(EPX_ERR_TIMEOUT, "%s did not send its statistics within %d s", epx_cluster_rank_name(c, r, name),
                        (int)STATS_WAIT_S);
    return EPX_OK;
}

epx_status_t epx_cluster_stats(epx_cluster_t *c, epx_rank_stats_t *out_stats, int n_ranks) {
    epx_status_t s;
    if (n_ranks != c->n_ranks) return epx_fail(EPX_ERR_ARG, "n_ranks = %d; the cluster has %d", n_ranks, c->n_ranks);
    pthread_mutex_lock(&c->lock);
    s = c->state == EPX_CLUSTER_SERVING ? wait_for_stats(c) : epx_fail(EPX_ERR_PEER, "%s", c->failure);
    for (int r = 0; s >= 0 && r < n_ranks; r++) out_stats[r] = c->ranks[r].stats;
    pthread_mutex_unlock(&c->lock);
    return s;
}

epx_status_t epx_cluster_reports(epx_cluster_t *c, epx_rank_stats_t *out_stats, uint64_t *out_expert_rows, int n_ranks) {
    if (n_ranks != c->n_ranks) return epx_fail(EPX_ERR_ARG, "n_ranks = %d; the cluster has %d", n_ranks, c->n_ranks);
    pthread_mutex_lock(&c->lock);
    for (int r = 0; r < n_ranks; r++) {
        const epx_front_rank_t *from = &c->ranks[r];
        size_t n_rows = (size_t)c->ranks[0].info.n_layers * (size_t)c->ranks[0].info.n_experts;
        out_stats[r] = from->report;
        for (size_t i = 0; out_expert_rows && from->expert_rows && i < n_rows; i++) out_expert_rows[i] += from->expert_rows[i];
    }
    pthread_mutex_unlock(&c->lock);
    return EPX_OK;
}

void epx_cluster_flush_cache(epx_cluster_t *c) {
    pthread_mutex_lock(&c->lock);
    if (c->state == EPX_CLUSTER_SERVING) epx_cluster_send_all(c, EPX_MSG_FLUSH, NULL, 0);
    pthread_mutex_unlock(&c->lock);
}

/* Replicas that are lost have their own end. lock held. */
static void begin_stop(epx_cluster_t *c) {
    c->state = EPX_CLUSTER_STOPPING;
    for (size_t i = 0; i < c->live.cap; i++) {
        const epx_live_t *at = &c->live.slots[i];
        if (at->id) send_group(c, at->rank, EPX_MSG_CANCEL, &at->id, sizeof at->id);
    }
    for (int p = 0; p < c->n_replicas; p++) {
        if (c->replicas[p].lost) continue;
        c->replicas[p].kill_deadline = epx_now_ns() + STOP_NS;
        epx_cluster_send_some(c, p * c->replica_size, c->replica_size, EPX_MSG_STOP, NULL, 0);
    }
}

void epx_cluster_destroy(epx_cluster_t *c) {
    if (c == NULL) return;
    pthread_mutex_lock(&c->lock);
    if (c->state != EPX_CLUSTER_STOPPING) begin_stop(c);
    c->closing = 1;
    pthread_mutex_unlock(&c->lock);
    wake_reader(c);
    pthread_join(c->reader, NULL);
    discard(c);
}
