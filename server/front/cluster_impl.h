/* Inside of a cluster, shared by cluster.c (callers' threads), reader.c, messages.c and loss.c (the reader thread).
 * `lock` guards everything marked L; the rest belongs to the reader thread, or does not change after create. */
#ifndef EPX_SERVER_FRONT_CLUSTER_IMPL_H
#define EPX_SERVER_FRONT_CLUSTER_IMPL_H

#include <pthread.h>

#include "server/front/cluster.h"
#include "server/front/frame.h"
#include "server/front/live.h"
#include "server/front/spawn.h"

enum { EPX_CLUSTER_MAX_RANKS = 64, EPX_FAILURE_BYTES = 1024, EPX_HOST_BYTES = 64 };
#define EPX_DEFAULT_WAIT_NS 10000000000u /* of epx_rank_config_t.timeout_ns */

typedef enum { EPX_CLUSTER_STARTING, EPX_CLUSTER_SERVING, EPX_CLUSTER_STOPPING, EPX_CLUSTER_FAILED } epx_cluster_state_t;

typedef struct {
    epx_process_t process;
    int pid;         /* L, kept after the end */
    epx_pipe_t link; /* the out half: L */
    int started;
    int ready;
    int said_why;                        /* the rank sent FAILED: its exit code says nothing new */
    epx_rank_info_t info;                /* L */
    epx_rank_stats_t stats;              /* L */
    uint64_t n_stats_asked, n_stats_got; /* L */
    epx_rank_stats_t report;             /* L: the newest unasked one */
    uint64_t *expert_rows;               /* L, owned, [n_layers, n_experts] of that report; NULL before the first */
    int n_live;                          /* L */
    int64_t n_live_tokens;               /* L: prompts and answers so far of live requests */
    epx_str_t boot_blob;
    int boot_waits; /* gave its blob and waits for the others */
    double progress;
    int n_seen_stopped; /* looks in a row that found the process stopped by a signal */
} epx_front_rank_t;

/* Ranks that form one world. Its end is not the others' end. */
typedef struct {
    uint64_t wake_seq;         /* L: requests so far, as its ranks count them */
    int lost;                  /* L: a rank is gone, live requests were ended */
    uint64_t kill_deadline;    /* L; 0: none; else when the remaining processes get SIGKILL */
    uint64_t suspect_deadline; /* 0: none; else when `suspicion` counts, if the root cause was not found by then */
    epx_status_t suspect_status;
    char suspicion[EPX_FAILURE_BYTES];
} epx_replica_t;

/* Another host. Reader thread; hosts do not change after the start. */
typedef struct {
    epx_pipe_t link;
    char host[EPX_HOST_BYTES];
    char *model_path; /* owned */
    uint64_t heard_ns;
    uint64_t stopped; /* bit i: its i-th rank is stopped by a signal */
    int lost;
} epx_front_node_t;

struct epx_cluster {
    epx_cluster_config_t cfg; /* strings and .rank are valid until the ranks are ready */
    int n_ranks;
    int n_replicas, replica_size; /* ranks of a replica */
    epx_replica_t replicas[EPX_CLUSTER_MAX_RANKS];
    int group_size; /* ranks of an attention group; the first one speaks for it */
    epx_front_rank_t ranks[EPX_CLUSTER_MAX_RANKS];
    int n_nodes, node_size;                        /* ranks of a node */
    epx_front_node_t nodes[EPX_CLUSTER_MAX_RANKS]; /* [0] is this host: only its name */
    uint64_t beat_at;                              /* 0: there are no other nodes */
    pthread_t reader;
    pthread_mutex_t lock;
    pthread_cond_t changed;      /* state, n_stats_got */
    int wake_fd;                 /* eventfd: look at the state and the out queues again */
    epx_cluster_state_t state;   /* L */
    int closing;                 /* L: the reader may end when every process is gone */
    uint64_t next_id;            /* L */
    int next_rank;               /* L: where the search for the least loaded rank begins */
    epx_live_table_t live;       /* L */
    epx_status_t failure_status; /* L, as is: */
    char failure[EPX_FAILURE_BYTES];
    uint64_t watch_at; /* when to look for stopped processes next; 0: nobody waits for a rank */
};

/* ---- cluster.c ---- */
/* Queue and send without blocking; what does not fit is left to the reader. Errors are left to the reader too, which sees the
 * end of the socket and of the process. lock held. */
void epx_cluster_send(epx_cluster_t *c, int rank, uint32_t kind, const void *payload, size_t n_bytes);
void epx_cluster_send_all(epx_cluster_t *c, uint32_t kind, const void *payload, size_t n_bytes);
/* To n ranks from `first` on. lock held. */
void epx_cluster_send_some(epx_cluster_t *c, int first, int n, uint32_t kind, const void *payload, size_t n_bytes);
/* How people call a rank: "rank 1", or "replica 2 rank 1" where there are several. Returns out. */
enum { EPX_RANK_NAME_BYTES = 160 };
const char *epx_cluster_rank_name(const epx_cluster_t *c, int rank, char out[EPX_RANK_NAME_BYTES]);
/* The same and its process: "rank 1 (process 77)", or "rank 1 (process 77 on nodeb)" where there are several hosts. */
const char *epx_cluster_process_name(const epx_cluster_t *c, int rank, char out[EPX_RANK_NAME_BYTES]);

/* ---- reader.c ---- */
void *epx_cluster_reader_main(void *cluster);

/* ---- messages.c: reader thread ---- */
/* Take every whole frame of a rank. A malformed frame is a loss. */
void epx_cluster_take_frames(epx_cluster_t *c, int rank);

/* ---- loss.c: reader thread, lock not held ---- */
/* The replica of this rank is lost for the reason given: end its live requests, tell its ranks, tell the owner. During the start
 * all replicas are lost with it. The first reason stays. */
void epx_cluster_fail(epx_cluster_t *c, int rank, epx_status_t status, const char *text);
/* A loss that is probably another rank's fault (a closed socket, a peer not answering): becomes the reason only if nothing
 * better is known a moment later. */
void epx_cluster_suspect(epx_cluster_t *c, int rank, epx_status_t status, const char *text);
/* A process of this host has ended: reaped here. */
void epx_cluster_process_ended(epx_cluster_t *c, int rank);
/* A rank has ended in the way that `how` says. */
void epx_cluster_rank_ended(epx_cluster_t *c, int rank, const char *how);
/* Act on deadlines that have passed. */
void epx_cluster_check_deadlines(epx_cluster_t *c);
/* Call after every round. While something is expected of the ranks, a process that a signal has stopped for longer than a wait
 * for a peer may take is a loss: during the start, and with one rank, no peer would notice. */
void epx_cluster_watch_stopped(epx_cluster_t *c);
/* End every live request of a replica, or of all with -1, with an error. */
void epx_cluster_end_live(epx_cluster_t *c, int replica, const char *why);

/* ---- nodes.c: reader thread ---- */
static inline int epx_cluster_is_remote(const epx_cluster_t *c, int rank) { return rank >= c->node_size; }
/* Wait for the other nodes, compare their facts with this one's, and connect their ranks. Nothing to do on one host. On an error
 * the nodes that came were told. */
epx_status_t epx_cluster_gather_nodes(epx_cluster_t *c);
/* Bytes or the end of a node's connection. */
void epx_cluster_serve_node(epx_cluster_t *c, int node);
/* Beat when it is time, and lose nodes that have been silent for too long. */
void epx_cluster_beat_nodes(epx_cluster_t *c);
/* Kill a rank of another node. */
void epx_cluster_kill_remote(epx_cluster_t *c, int rank);
/* The last word to every node: why the server ends. Bounded. */
void epx_cluster_end_nodes(epx_cluster_t *c);

/* ---- messages.c ---- */
/* Serve once every rank is ready and its process is known. */
void epx_cluster_check_ready(epx_cluster_t *c);

/* ---- progress.c ---- */
/* Redraw the loading bar on stderr from the ranks' progress. */
void epx_cluster_draw_progress(const epx_cluster_t *c, const char *phase);
/* Remove the bar. */
void epx_cluster_erase_progress(const epx_cluster_t *c);

#endif
