/* A node without a front: joins node 0, starts this host's ranks and watches them. One thread, the parent of the ranks, so that
 * they die with it. See nodes.h. */
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/tcp_join.h"
#include "server/front/nodes.h"
#include "server/front/nodes_impl.h"
#include "server/front/spawn.h"
#include "server/front/wire.h"

enum { MAX_RANKS = 64 };
#define DEFAULT_SILENCE_NS 10000000000u
#define LEAVE_NS 5000000000u /* from the end of the server to SIGKILL */
#define LONGEST_BEAT_NS 1000000000u

typedef struct {
    const epx_node_config_t *cfg;
    epx_tcp_address_t address;
    epx_pipe_t link;
    int n_ranks, first; /* of this node */
    epx_process_t ranks[MAX_RANKS];
    uint64_t silence_ns, heard_ns, beat_at;
} node_t;

epx_status_t epx_node_await(epx_pipe_t *l, uint64_t deadline_ns, uint32_t *out_kind, const char **out_payload,
                            size_t *out_bytes) {
    epx_status_t s;
    while ((s = epx_pipe_next(l, out_kind, out_payload, out_bytes)) == EPX_AGAIN) {
        if (l->at_end) return epx_fail(EPX_ERR_PEER, "it closed its connection");
        if (epx_now_ns() >= deadline_ns) return epx_fail(EPX_ERR_TIMEOUT, "it does not answer");
        poll(&(struct pollfd){l->fd, POLLIN, 0}, 1, epx_tcp_poll_ms(deadline_ns, 1000));
        EPX_TRY(epx_pipe_receive(l));
    }
    return s;
}

uint64_t epx_node_beat_ns(uint64_t limit_ns) { return limit_ns / 4 < LONGEST_BEAT_NS ? limit_ns / 4 : LONGEST_BEAT_NS; }

/* ---- the start ---- */

static epx_status_t check_config(const epx_node_config_t *cfg) {
    const epx_nodes_config_t *n = &cfg->nodes;
    if (cfg->size != sizeof *cfg)
        return epx_fail(EPX_ERR_ARG, "epx_node_config_t.size is %u; this build has %zu", cfg->size, sizeof *cfg);
    if (n->n_nodes < 2 || n->node < 1 || n->node >= n->n_nodes || !n->address || !cfg->model_path)
        return epx_fail(EPX_ERR_ARG, "node = %d of n_nodes = %d; 1 to n_nodes - 1 are possible, with an address and a model path",
                        n->node, n->n_nodes);
    if (cfg->n_ranks < 1 || cfg->n_ranks > MAX_RANKS || cfg->n_ranks % n->n_nodes)
        return epx_fail(EPX_ERR_ARG, "n_ranks = %d; multiples of n_nodes = %d up to %d are possible", cfg->n_ranks, n->n_nodes,
                        (int)MAX_RANKS);
    return EPX_OK;
}

static epx_tcp_party_t party(const node_t *n, const char *member, int n_members) {
    uint64_t timeout_ns = n->cfg->nodes.join_timeout_ns;
    return (epx_tcp_party_t){n->address, member, n_members, timeout_ns ? timeout_ns : EPX_NODE_JOIN_NS};
}

static epx_status_t send_hello(node_t *n) {
    char host[64] = "";
    epx_wire_hello_t hello = {host, n->cfg->model_path, n->cfg->nodes.facts ? n->cfg->nodes.facts : ""};
    epx_str_t frame = {0};
    epx_status_t s;
    gethostname(host, sizeof host - 1);
    s = epx_wire_put_hello(&frame, &hello);
    if (s >= 0) s = epx_pipe_queue(&n->link, EPX_MSG_NODE_HELLO, frame.data, frame.n_bytes);
    if (s >= 0) s = epx_pipe_flush(&n->link, 1);
    epx_str_fini(&frame);
    return s;
}

static epx_status_t told_to_end(const char *data, size_t n_bytes) {
    const char *why;
    epx_status_t status;
    EPX_TRY(epx_wire_get_failure(data, n_bytes, &status, &why));
    return status < 0 ? epx_fail(status, "node 0 has ended the server: %s", why) : EPX_OK;
}

static epx_status_t join_node_0(node_t *n) {
    epx_tcp_party_t p = party(n, "node", n->cfg->nodes.n_nodes);
    epx_tcp_join_t j;
    const char *data;
    uint32_t kind;
    size_t n_bytes;
    epx_status_t s;
    int fd;
    EPX_TRY(epx_tcp_join_begin(&p, n->cfg->nodes.node, &j));
    EPX_TRY(epx_tcp_join_end(&p, &j, &fd));
    epx_pipe_init(&n->link, fd);
    EPX_TRY(send_hello(n));
    s = epx_node_await(&n->link, epx_now_ns() + p.timeout_ns, &kind, &data, &n_bytes);
    if (s < 0) return epx_fail_context(s, "node 0 at %s", n->address.text);
    if (kind == EPX_MSG_NODE_WELCOME) return EPX_OK;
    if (kind != EPX_MSG_NODE_END) return epx_fail(EPX_ERR_FORMAT, "frame of unknown kind %u from node 0", kind);
    s = told_to_end(data, n_bytes);
    return s < 0 ? s : epx_fail(EPX_ERR_PEER, "node 0 has ended before the start");
}

/* One connection for each rank of this host. */
static epx_status_t connect_ranks(node_t *n, int *out_fds) {
    int n_others = n->cfg->n_ranks - n->n_ranks, n_begun = 0;
    epx_tcp_party_t p = party(n, EPX_NODE_RANK_MEMBER, n_others + 1);
    epx_tcp_join_t joins[MAX_RANKS];
    epx_status_t s = EPX_OK, first = EPX_OK;
    while (n_begun < n->n_ranks && s >= 0) {
        s = epx_tcp_join_begin(&p, n->first - n->n_ranks + n_begun + 1, &joins[n_begun]);
        if (s >= 0) n_begun++;
    }
    for (int i = 0; i < n_begun; i++) {
        if (s < 0) close(joins[i].fd);
        else if ((first = epx_tcp_join_end(&p, &joins[i], &out_fds[i])) < 0) s = first;
    }
    return s;
}

/* That node 0 does not take anything any more is seen when receiving, after its last word. */
static void flush(node_t *n) { epx_pipe_flush(&n->link, 0); }

static epx_status_t tell_rank(node_t *n, uint32_t kind, int i, const char *how) {
    epx_wire_rank_t at = {n->first + i, n->ranks[i].pid};
    epx_str_t frame = {0};
    epx_status_t s = epx_str_append(&frame, (const char *)&at, sizeof at);
    if (s >= 0) s = epx_str_append_z(&frame, how);
    if (s >= 0) s = epx_pipe_queue(&n->link, kind, frame.data, frame.n_bytes);
    epx_str_fini(&frame);
    flush(n);
    return s;
}

static epx_status_t start_ranks(node_t *n) {
    const char *program = n->cfg->program ? n->cfg->program : "/proc/self/exe";
    int fds[MAX_RANKS];
    epx_status_t s = EPX_OK;
    for (int i = 0; i < MAX_RANKS; i++) fds[i] = -1;
    s = connect_ranks(n, fds);
    for (int i = 0; i < n->n_ranks && s >= 0; i++) {
        s = epx_process_spawn_on(program, fds[i], &n->ranks[i]);
        if (s >= 0) s = tell_rank(n, EPX_MSG_NODE_STARTED, i, "");
    }
    for (int i = 0; i < n->n_ranks; i++)
        if (fds[i] >= 0) close(fds[i]); /* the rank has it; its end must be seen */
    return s;
}

/* ---- while serving ---- */

static int n_alive(const node_t *n) {
    int alive = 0;
    for (int i = 0; i < n->n_ranks; i++) alive += n->ranks[i].pid != 0;
    return alive;
}

static epx_status_t beat(node_t *n, uint64_t now) {
    uint64_t stopped = 0;
    if (now < n->beat_at) return EPX_OK;
    n->beat_at = now + epx_node_beat_ns(n->silence_ns);
    for (int i = 0; i < n->n_ranks; i++) stopped |= (uint64_t)epx_process_is_stopped(&n->ranks[i]) << i;
    EPX_TRY(epx_pipe_queue(&n->link, EPX_MSG_NODE_BEAT, &stopped, sizeof stopped));
    flush(n);
    return EPX_OK;
}

/* Wait for news of node 0 or of a rank; 1 when node 0 has some. */
static int wait_for_news(node_t *n) {
    struct pollfd fds[1 + MAX_RANKS];
    fds[0] = (struct pollfd){n->link.fd, POLLIN, 0};
    for (int i = 0; i < n->n_ranks; i++) fds[1 + i] = (struct pollfd){n->ranks[i].pid ? n->ranks[i].pidfd : -1, POLLIN, 0};
    return poll(fds, 1 + (nfds_t)n->n_ranks, epx_tcp_poll_ms(n->beat_at, 1000) + 1) > 0 && fds[0].revents;
}

static epx_status_t reap_ranks(node_t *n) {
    char how[128];
    for (int i = 0; i < n->n_ranks; i++)
        if (epx_process_reap(&n->ranks[i], how, sizeof how)) EPX_TRY(tell_rank(n, EPX_MSG_NODE_ENDED, i, how));
    return EPX_OK;
}

static void kill_rank(node_t *n, const char *data, size_t n_bytes) {
    epx_wire_rank_t at = {-1, 0};
    if (n_bytes == sizeof at) memcpy(&at, data, sizeof at);
    if (at.rank >= n->first && at.rank < n->first + n->n_ranks) epx_process_kill(&n->ranks[at.rank - n->first]);
}

/* EPX_OK: go on. *out_ended: node 0 has said the last word, and the status is that. */
static epx_status_t take_frames(node_t *n, int *out_ended) {
    const char *data;
    uint32_t kind;
    size_t n_bytes;
    epx_status_t s = epx_pipe_receive(&n->link);
    if (s < 0) return s;
    n->heard_ns = epx_now_ns();
    while ((s = epx_pipe_next(&n->link, &kind, &data, &n_bytes)) == EPX_OK) {
        if (kind == EPX_MSG_NODE_KILL) kill_rank(n, data, n_bytes);
        if (kind != EPX_MSG_NODE_END) continue;
        *out_ended = 1;
        return told_to_end(data, n_bytes);
    }
    if (s < 0) return s;
    return n->link.at_end ? epx_fail(EPX_ERR_PEER, "node 0 at %s closed its connection", n->address.text) : EPX_OK;
}

static epx_status_t serve(node_t *n) {
    int ended = 0;
    while (!ended) {
        uint64_t now = epx_now_ns();
        EPX_TRY(beat(n, now));
        if (now - n->heard_ns > n->silence_ns)
            return epx_fail(EPX_ERR_TIMEOUT, "node 0 at %s has been silent for %.1f s", n->address.text,
                            (double)(now - n->heard_ns) * 1e-9);
        if (wait_for_news(n)) EPX_TRY(take_frames(n, &ended));
        EPX_TRY(reap_ranks(n));
    }
    return EPX_OK;
}

/* The ranks leave by themselves after an orderly stop; what is left is killed. */
static void end_ranks(node_t *n, uint64_t patience_ns) {
    uint64_t until = epx_now_ns() + patience_ns;
    char how[128];
    for (int killed = 0; n_alive(n);) {
        for (int i = 0; i < n->n_ranks; i++) {
            if (!killed && epx_now_ns() >= until) epx_process_kill(&n->ranks[i]);
            if (n->ranks[i].pid) poll(&(struct pollfd){n->ranks[i].pidfd, POLLIN, 0}, 1, 10);
            epx_process_reap(&n->ranks[i], how, sizeof how);
        }
        killed = epx_now_ns() >= until;
    }
}

epx_status_t epx_node_run(const epx_node_config_t *cfg) {
    node_t n = {.cfg = cfg, .link = {.fd = -1}};
    epx_status_t s;
    char why[1024];
    EPX_TRY(check_config(cfg));
    EPX_TRY(epx_tcp_resolve(cfg->nodes.address, &n.address));
    EPX_TRY(epx_tcp_check_token(&n.address));
    n.n_ranks = cfg->n_ranks / cfg->nodes.n_nodes;
    n.first = cfg->nodes.node * n.n_ranks;
    n.silence_ns = cfg->timeout_ns ? cfg->timeout_ns : DEFAULT_SILENCE_NS;
    s = join_node_0(&n);
    if (s >= 0) s = start_ranks(&n);
    if (s >= 0) {
        fprintf(stderr, "epx: node %d has joined node 0 at %s with ranks %d to %d\n", cfg->nodes.node, n.address.text, n.first,
                n.first + n.n_ranks - 1);
        n.heard_ns = n.beat_at = epx_now_ns();
        s = serve(&n);
    }
    snprintf(why, sizeof why, "%s", s < 0 ? epx_error_message() : "");
    epx_pipe_fini(&n.link); /* node 0 waits for that */
    end_ranks(&n, s < 0 ? 0 : LEAVE_NS);
    return s < 0 ? epx_fail(s, "%s", why) : EPX_OK;
}
