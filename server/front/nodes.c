/* The front's side of other hosts: meeting them at the start, their connections, their silence. Reader thread. */
#include "server/front/nodes.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "base/clock.h"
#include "base/tcp_join.h"
#include "server/front/cluster_impl.h"
#include "server/front/facts.h"
#include "server/front/nodes_impl.h"
#include "server/front/wire.h"

#define LAST_WORD_NS 1000000000u

/* ---- the start ---- */

static epx_tcp_party_t party(const epx_cluster_t *c, const char *member, int n) {
    epx_tcp_party_t p = {.member = member, .n = n, .timeout_ns = c->cfg.nodes.join_timeout_ns};
    if (p.timeout_ns == 0) p.timeout_ns = EPX_NODE_JOIN_NS;
    return p;
}

/* Connections of other members become pipes. */
static epx_status_t gather_nodes(epx_cluster_t *c) {
    epx_tcp_party_t p = party(c, "node", c->n_nodes);
    int fds[EPX_CLUSTER_MAX_RANKS];
    EPX_TRY(epx_tcp_resolve(c->cfg.nodes.address, &p.address));
    EPX_TRY(epx_tcp_check_token(&p.address));
    EPX_TRY(epx_tcp_gather(&p, fds));
    for (int i = 1; i < c->n_nodes; i++) {
        epx_pipe_init(&c->nodes[i].link, fds[i]);
        c->nodes[i].heard_ns = epx_now_ns();
    }
    return EPX_OK;
}

static const char *name_node(const epx_cluster_t *c, int node, char out[EPX_RANK_NAME_BYTES]) {
    snprintf(out, EPX_RANK_NAME_BYTES, "node %d (%s)", node, c->nodes[node].host[0] ? c->nodes[node].host : "of unknown host");
    return out;
}

/* The node's first frame. */
static epx_status_t take_hello(epx_cluster_t *c, int node, epx_str_t *differences) {
    epx_front_node_t *n = &c->nodes[node];
    epx_wire_hello_t hello;
    char name[EPX_RANK_NAME_BYTES];
    const char *data;
    uint32_t kind;
    size_t n_bytes;
    EPX_TRY(epx_node_await(&n->link, epx_now_ns() + EPX_NODE_ANSWER_NS, &kind, &data, &n_bytes));
    if (kind != EPX_MSG_NODE_HELLO) return epx_fail(EPX_ERR_FORMAT, "its first frame has kind %u", kind);
    EPX_TRY(epx_wire_get_hello(data, n_bytes, &hello));
    snprintf(n->host, sizeof n->host, "%s", hello.host);
    n->model_path = strdup(hello.model_path);
    if (!n->model_path) return epx_fail(EPX_ERR_NOMEM, "no memory for a node");
    return epx_facts_compare(c->cfg.nodes.facts ? c->cfg.nodes.facts : "", hello.facts, name_node(c, node, name), differences);
}

static epx_status_t compare_all(epx_cluster_t *c) {
    epx_str_t differences = {0};
    char name[EPX_RANK_NAME_BYTES];
    epx_status_t s = EPX_OK;
    for (int i = 1; i < c->n_nodes && s >= 0; i++) {
        s = take_hello(c, i, &differences);
        if (s < 0) epx_fail_context(s, "%s", name_node(c, i, name));
    }
    if (s >= 0 && differences.n_bytes) s = epx_fail(EPX_ERR_MISMATCH, "the nodes differ: %s", differences.data);
    epx_str_fini(&differences);
    return s;
}

static epx_status_t gather_ranks(epx_cluster_t *c) {
    int n = c->n_ranks - c->node_size, fds[EPX_CLUSTER_MAX_RANKS + 1];
    epx_tcp_party_t p = party(c, EPX_NODE_RANK_MEMBER, n + 1);
    EPX_TRY(epx_tcp_resolve(c->cfg.nodes.address, &p.address));
    for (int i = 1; i < c->n_nodes; i++) {
        epx_pipe_t *l = &c->nodes[i].link;
        EPX_TRY(epx_pipe_queue(l, EPX_MSG_NODE_WELCOME, NULL, 0));
        EPX_TRY(epx_pipe_flush(l, 1));
    }
    EPX_TRY(epx_tcp_gather(&p, fds));
    pthread_mutex_lock(&c->lock);
    for (int i = 0; i < n; i++) epx_pipe_init(&c->ranks[c->node_size + i].link, fds[i + 1]);
    pthread_mutex_unlock(&c->lock);
    return EPX_OK;
}

epx_status_t epx_cluster_gather_nodes(epx_cluster_t *c) {
    if (c->n_nodes == 1) return EPX_OK;
    EPX_TRY(gather_nodes(c));
    EPX_TRY(compare_all(c));
    EPX_TRY(gather_ranks(c));
    for (int i = 1; i < c->n_nodes; i++) c->nodes[i].heard_ns = epx_now_ns();
    c->beat_at = epx_now_ns();
    return EPX_OK;
}

/* ---- while serving ---- */

/* Its ranks count as gone, and every replica that has one of them is lost. */
static void lose_node(epx_cluster_t *c, int node, epx_status_t status, const char *how) {
    epx_front_node_t *n = &c->nodes[node];
    int first = node * c->node_size, last = first + c->node_size - 1;
    char text[EPX_FAILURE_BYTES], name[EPX_RANK_NAME_BYTES];
    if (n->lost) return;
    n->lost = 1;
    epx_pipe_fini(&n->link);
    snprintf(text, sizeof text, "%s with ranks %d to %d %s", name_node(c, node, name), first, last, how);
    for (int r = first; r <= last; r++) c->ranks[r].link.at_end = 1;
    for (int p = first / c->replica_size; p <= last / c->replica_size; p++)
        epx_cluster_fail(c, p * c->replica_size, status, text);
}

/* A number of one of the node's ranks, or an error. */
static epx_status_t take_rank(const epx_cluster_t *c, int node, const char *data, size_t n, epx_wire_rank_t *out) {
    if (n < sizeof *out) return epx_fail(EPX_ERR_FORMAT, "a frame of %zu bytes", n);
    memcpy(out, data, sizeof *out);
    if (out->rank / c->node_size != node || out->rank < 0 || out->rank >= c->n_ranks)
        return epx_fail(EPX_ERR_FORMAT, "rank %d is not its own", out->rank);
    return EPX_OK;
}

static epx_status_t take_node_frame(epx_cluster_t *c, int node, uint32_t kind, const char *data, size_t n) {
    epx_wire_rank_t at;
    char how[128];
    switch (kind) {
    case EPX_MSG_NODE_STARTED:
        EPX_TRY(take_rank(c, node, data, n, &at));
        pthread_mutex_lock(&c->lock);
        c->ranks[at.rank].pid = at.pid;
        pthread_mutex_unlock(&c->lock);
        epx_cluster_check_ready(c);
        return EPX_OK;
    case EPX_MSG_NODE_ENDED:
        EPX_TRY(take_rank(c, node, data, n, &at));
        snprintf(how, sizeof how, "%.*s", (int)(n - sizeof at), data + sizeof at);
        epx_cluster_rank_ended(c, at.rank, how);
        return EPX_OK;
    case EPX_MSG_NODE_BEAT:
        if (n == sizeof(uint64_t)) memcpy(&c->nodes[node].stopped, data, n);
        return EPX_OK;
    default:
        return epx_fail(EPX_ERR_FORMAT, "frame of unknown kind %u", kind);
    }
}

void epx_cluster_serve_node(epx_cluster_t *c, int node) {
    epx_front_node_t *n = &c->nodes[node];
    char text[EPX_FAILURE_BYTES];
    const char *data;
    uint32_t kind;
    size_t n_bytes;
    epx_status_t s = epx_pipe_receive(&n->link);
    if (s >= 0 && n->link.out_off < n->link.out.n_bytes) s = epx_pipe_flush(&n->link, 0);
    n->heard_ns = epx_now_ns();
    while (s >= 0 && !n->lost && (s = epx_pipe_next(&n->link, &kind, &data, &n_bytes)) == EPX_OK)
        s = take_node_frame(c, node, kind, data, n_bytes);
    if (s < 0) {
        snprintf(text, sizeof text, "is lost: %.800s", epx_error_message());
        lose_node(c, node, s, text);
    } else if (n->link.at_end) {
        lose_node(c, node, EPX_ERR_PEER, "closed its connection");
    }
}

static void beat_node(epx_cluster_t *c, int node, uint64_t now, uint64_t limit) {
    epx_front_node_t *n = &c->nodes[node];
    uint64_t nothing = 0;
    char how[64];
    if (n->lost) return;
    if (now - n->heard_ns > limit) {
        snprintf(how, sizeof how, "has been silent for %.1f s", (double)(now - n->heard_ns) * 1e-9);
        lose_node(c, node, EPX_ERR_TIMEOUT, how);
    } else if (epx_pipe_queue(&n->link, EPX_MSG_NODE_BEAT, &nothing, sizeof nothing) >= 0) {
        epx_pipe_flush(&n->link, 0); /* an error is seen when receiving */
    }
}

void epx_cluster_beat_nodes(epx_cluster_t *c) {
    uint64_t now = epx_now_ns(), limit = c->cfg.rank.timeout_ns ? c->cfg.rank.timeout_ns : EPX_DEFAULT_WAIT_NS;
    if (c->beat_at == 0 || now < c->beat_at) return;
    for (int i = 1; i < c->n_nodes; i++) beat_node(c, i, now, limit);
    c->beat_at = now + epx_node_beat_ns(limit);
}

/* Whatever the node makes of it, the front does not wait for this rank any more. */
void epx_cluster_kill_remote(epx_cluster_t *c, int rank) {
    epx_front_node_t *n = &c->nodes[rank / c->node_size];
    epx_wire_rank_t at = {rank, 0};
    if (!n->lost && epx_pipe_queue(&n->link, EPX_MSG_NODE_KILL, &at, sizeof at) >= 0) epx_pipe_flush(&n->link, 0);
    c->ranks[rank].link.at_end = 1;
}

static void end_node(epx_front_node_t *n, uint64_t until, epx_status_t status, const char *why) {
    epx_str_t frame = {0};
    epx_status_t s = EPX_AGAIN;
    if (epx_wire_put_failure(&frame, status, why) < 0 ||
        epx_pipe_queue(&n->link, EPX_MSG_NODE_END, frame.data, frame.n_bytes) < 0)
        s = EPX_OK;
    while (s == EPX_AGAIN && epx_now_ns() < until) {
        s = epx_pipe_flush(&n->link, 0);
        if (s == EPX_AGAIN) poll(&(struct pollfd){n->link.fd, POLLOUT, 0}, 1, 100);
    }
    epx_str_fini(&frame);
    shutdown(n->link.fd, SHUT_WR);
}

/* A socket that is closed with unread bytes takes the last word back: read until the node has closed. */
static void close_node(epx_front_node_t *n, uint64_t until) {
    while (!n->link.at_end && epx_now_ns() < until) {
        poll(&(struct pollfd){n->link.fd, POLLIN, 0}, 1, epx_tcp_poll_ms(until, 100));
        if (epx_pipe_receive(&n->link) < 0) break;
    }
    epx_pipe_fini(&n->link);
}

void epx_cluster_end_nodes(epx_cluster_t *c) {
    uint64_t until = epx_now_ns() + LAST_WORD_NS;
    for (int i = 1; i < c->n_nodes; i++)
        if (c->nodes[i].link.fd >= 0) end_node(&c->nodes[i], until, c->failure_status, c->failure);
    for (int i = 1; i < c->n_nodes; i++)
        if (c->nodes[i].link.fd >= 0) close_node(&c->nodes[i], until);
}
