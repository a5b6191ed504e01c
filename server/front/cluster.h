/* The front's view of the ranks, of one replica of the model or of several: starts them as processes (posix_spawn of the program
 * itself with a hidden worker argument and an inherited socket), feeds them requests, hands their events on, notices their death.
 * Owns one reader thread. Thread-safe: submit, cancel, status, stats. Callbacks run on the reader thread and must not block; they
 * may call submit and cancel. */
#ifndef EPX_SERVER_FRONT_CLUSTER_H
#define EPX_SERVER_FRONT_CLUSTER_H

#include "base/status.h"
#include "engine/runtime/rank.h"
#include "server/front/nodes.h"

typedef struct epx_cluster epx_cluster_t;

/* Which DP rank gets a request that names none. */
typedef enum {
    EPX_BALANCE_REQUESTS = 0, /* the fewest live requests */
    EPX_BALANCE_TOKENS,       /* the fewest tokens of live requests, then the fewest requests */
    EPX_BALANCE_ROUND_ROBIN
} epx_balance_t;

typedef struct {
    uint32_t size;
    epx_rank_config_t rank;   /* the same for every rank; rank.rank and the callbacks are ignored */
    int n_replicas;           /* whole models of rank.tp ranks each, which know nothing of each other; 0: 1 */
    epx_nodes_config_t nodes; /* hosts; their number divides that of all ranks; node is 0 */
    const char *program;      /* executable to spawn; NULL: /proc/self/exe */
    epx_balance_t balance;
    int limit_queue; /* 1: a rank has at most max_running + max_queued requests; more are EPX_ERR_CAPACITY */
    int max_queued;
    int show_progress; /* draw loading progress on stderr */
    /* Events of all requests, in order per request. Reader thread. */
    epx_event_fn on_event;
    void *ctx;
    /* A rank died or the group was lost; every live request of its replica has received EPX_FINISH_ERROR. Requests of other
     * replicas go on, new ones are refused. Once. Reader thread. */
    void (*on_failure)(void *ctx, const char *message);
} epx_cluster_config_t;

typedef struct {
    epx_rank_info_t info;    /* of rank 0 */
    int n_ranks, n_replicas; /* ranks of all replicas together, numbered replica by replica */
    int n_dp, ranks_per_dp;  /* DP ranks; each is that many consecutive ranks, of which the first speaks for all */
    int pids[64];
    uint64_t mapped_bytes[64]; /* per rank */
    int n_nodes;
    char hosts[64][64]; /* names of the nodes; their ranks are n_ranks / n_nodes consecutive ones */
    int failed;         /* 1 after a rank died */
    char failure[1024];
} epx_cluster_status_t;

/* Spawn all ranks, on other nodes with the help of epx_node_run(), wait until every one is ready. *cfg and its strings are
 * borrowed during the call, ctx until destroy. On failure every rank is gone, the message names the rank and its error, and
 * on_failure was not called. */
epx_status_t epx_cluster_create(const epx_cluster_config_t *cfg, epx_cluster_t **out_c);
/* Route to DP rank dp_rank, counted over all replicas, or by cfg.balance when dp_rank is -1. EPX_ERR_CAPACITY: that rank's queue
 * is full. req->id is ignored; *out_id receives a fresh id, used in events. Events may arrive before this returns. Never blocks
 * on a rank. A request that the rank refuses ends with EPX_FINISH_ERROR. EPX_ERR_PEER: a group is lost; the message says why. */
epx_status_t epx_cluster_submit(epx_cluster_t *c, const epx_request_t *req, int dp_rank, uint64_t *out_id);
/* The request ends with EPX_FINISH_CANCELLED unless it has ended by itself before. Unknown ids are ignored. */
void epx_cluster_cancel(epx_cluster_t *c, uint64_t id);
void epx_cluster_status(epx_cluster_t *c, epx_cluster_status_t *out);
/* Ask every rank for statistics and wait at most 1 s; stats[n_ranks]. Not from a callback. */
epx_status_t epx_cluster_stats(epx_cluster_t *c, epx_rank_stats_t *out_stats, int n_ranks);
/* The newest counters that the ranks reported by themselves; asks nobody and never waits. They are at most 250 ms and one step
 * old while a rank works and exact while it is idle; a request whose last event was delivered is counted.
 * out_stats [n_ranks]. out_expert_rows [n_layers * n_experts] or NULL: (token, expert) pairs of all ranks are added to it. */
epx_status_t epx_cluster_reports(epx_cluster_t *c, epx_rank_stats_t *out_stats, uint64_t *out_expert_rows, int n_ranks);
/* Forget the prefixes of earlier requests on all ranks, before any request submitted later. Does not wait. */
void epx_cluster_flush_cache(epx_cluster_t *c);
/* Orderly stop: live requests are cancelled, the ranks leave together; bounded (5 s), then SIGKILL. No process of the cluster
 * is left and no callback runs afterwards. Not from a callback. NULL allowed. */
void epx_cluster_destroy(epx_cluster_t *c);

/* The worker's main, called by the program when it sees the hidden argument: fd is the inherited socket. Returns the exit code.
 */
int epx_worker_main(int fd);
#define EPX_WORKER_ARGUMENT "--epx-worker-fd"

#endif
