/* The reader thread of a cluster: starts the ranks, then waits for frames, ended processes and deadlines until the cluster is
 * closed and every process has been reaped. It is the parent thread of the workers, so their death signal follows its life. */
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "server/front/cluster_impl.h"
#include "server/front/wire.h"

/* Descriptors of one round: the eventfd, then socket and pidfd of each rank, then the connections of other nodes from 1 on. */
typedef struct {
    struct pollfd fds[1 + 3 * EPX_CLUSTER_MAX_RANKS];
    int n, first_node;
} poll_set_t;

static epx_status_t start_rank(epx_cluster_t *c, int rank, const char *program) {
    epx_front_rank_t *r = &c->ranks[rank];
    epx_rank_config_t cfg = c->cfg.rank;
    epx_str_t frame = {0};
    epx_status_t s;
    int remote = epx_cluster_is_remote(c, rank);
    cfg.first_dp_rank = rank / c->replica_size * cfg.dp;
    if (remote) cfg.model_path = c->nodes[rank / c->node_size].model_path; /* its own node has started it */
    else EPX_TRY(epx_process_spawn(program, &r->process));
    pthread_mutex_lock(&c->lock);
    if (!remote) {
        epx_pipe_init(&r->link, r->process.fd);
        r->pid = r->process.pid;
    }
    r->started = 1;
    s = epx_wire_put_config(&frame, &cfg, rank % c->replica_size);
    if (s >= 0) epx_cluster_send(c, rank, EPX_MSG_CONFIG, frame.data, frame.n_bytes);
    pthread_mutex_unlock(&c->lock);
    epx_str_fini(&frame);
    return s;
}

/* /proc/self/exe works although the file may have been replaced since the start. */
static void start_all(epx_cluster_t *c) {
    const char *program = c->cfg.program ? c->cfg.program : "/proc/self/exe";
    for (int r = 0; r < c->n_ranks; r++) {
        char text[EPX_FAILURE_BYTES], name[EPX_RANK_NAME_BYTES];
        epx_status_t s = start_rank(c, r, program);
        if (s >= 0) continue;
        snprintf(text, sizeof text, "%s: %s", epx_cluster_rank_name(c, r, name), epx_error_message());
        epx_cluster_fail(c, r, s, text);
        return;
    }
}

static void fill_poll_set(epx_cluster_t *c, poll_set_t *set) {
    set->n = 0;
    set->fds[set->n++] = (struct pollfd){c->wake_fd, POLLIN, 0};
    pthread_mutex_lock(&c->lock);
    for (int r = 0; r < c->n_ranks; r++) {
        const epx_pipe_t *l = &c->ranks[r].link;
        short want = l->out_off < l->out.n_bytes ? POLLIN | POLLOUT : POLLIN;
        set->fds[set->n++] = (struct pollfd){l->at_end ? -1 : l->fd, want, 0};
        set->fds[set->n++] = (struct pollfd){c->ranks[r].process.pidfd, POLLIN, 0};
    }
    pthread_mutex_unlock(&c->lock);
    set->first_node = set->n;
    for (int i = 1; i < c->n_nodes; i++) {
        const epx_pipe_t *l = &c->nodes[i].link;
        short want = l->out_off < l->out.n_bytes ? POLLIN | POLLOUT : POLLIN;
        set->fds[set->n++] = (struct pollfd){l->fd, want, 0};
    }
}

/* Of two deadlines, where 0 is none. */
static uint64_t earlier(uint64_t a, uint64_t b) { return a == 0 || (b && b < a) ? b : a; }

/* Until the next deadline; -1: none is set. */
static int timeout_ms(epx_cluster_t *c) {
    uint64_t now = epx_now_ns(), next = earlier(c->watch_at, c->beat_at);
    pthread_mutex_lock(&c->lock);
    for (int p = 0; p < c->n_replicas; p++) {
        next = earlier(next, c->replicas[p].suspect_deadline);
        next = earlier(next, c->replicas[p].kill_deadline);
    }
    pthread_mutex_unlock(&c->lock);
    if (next == 0) return -1;
    return next <= now ? 0 : (int)((next - now) / 1000000u) + 1;
}

static void serve_socket(epx_cluster_t *c, int rank, short got) {
    epx_front_rank_t *r = &c->ranks[rank];
    char text[EPX_FAILURE_BYTES], name[EPX_RANK_NAME_BYTES];
    if (got & POLLOUT) {
        pthread_mutex_lock(&c->lock);
        epx_pipe_flush(&r->link, 0);
        pthread_mutex_unlock(&c->lock);
    }
    if ((got & (POLLIN | POLLHUP | POLLERR)) == 0) return;
    if (epx_pipe_receive(&r->link) < 0) r->link.at_end = 1;
    epx_cluster_take_frames(c, rank);
    if (r->link.at_end && !r->said_why) {
        snprintf(text, sizeof text, "%s closed its socket", epx_cluster_process_name(c, rank, name));
        epx_cluster_suspect(c, rank, EPX_ERR_PEER, text);
    }
}

/* Frames first: a rank that failed says why before it ends. */
static void serve_round(epx_cluster_t *c, const poll_set_t *set) {
    if (set->fds[0].revents) {
        uint64_t n;
        ssize_t k = read(c->wake_fd, &n, sizeof n);
        (void)k;
    }
    for (int r = 0; r < c->n_ranks; r++)
        if (set->fds[1 + 2 * r].revents) serve_socket(c, r, set->fds[1 + 2 * r].revents);
    for (int r = 0; r < c->n_ranks; r++)
        if (set->fds[2 + 2 * r].revents) epx_cluster_process_ended(c, r);
    for (int i = 1; i < c->n_nodes; i++)
        if (set->fds[set->first_node + i - 1].revents) epx_cluster_serve_node(c, i);
}

static int finished(epx_cluster_t *c) {
    int closing;
    pthread_mutex_lock(&c->lock);
    closing = c->closing;
    pthread_mutex_unlock(&c->lock);
    for (int r = 0; r < c->n_ranks; r++) {
        const epx_front_rank_t *k = &c->ranks[r];
        if (epx_cluster_is_remote(c, r) ? k->link.fd >= 0 && !k->link.at_end : k->process.pid != 0) return 0;
    }
    return closing;
}

void *epx_cluster_reader_main(void *cluster) {
    epx_cluster_t *c = cluster;
    poll_set_t set;
    epx_status_t s = epx_cluster_gather_nodes(c);
    if (s < 0) epx_cluster_fail(c, 0, s, epx_error_message());
    else start_all(c);
    epx_cluster_watch_stopped(c);
    while (!finished(c)) {
        fill_poll_set(c, &set);
        if (poll(set.fds, (nfds_t)set.n, timeout_ms(c)) > 0) serve_round(c, &set);
        epx_cluster_check_deadlines(c);
        epx_cluster_watch_stopped(c);
        epx_cluster_beat_nodes(c);
    }
    epx_cluster_end_nodes(c);
    epx_cluster_end_live(c, -1, "the ranks were stopped");
    return NULL;
}
