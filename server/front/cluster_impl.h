/* Inside of a cluster, shared by cluster.c (callers' threads), reader.c, messages.c and loss.c (the reader thread).
 * `lock` guards everything marked L; the rest belongs to the reader thread, or does not change after create. */
#ifndef EPX_SERVER_FRONT_CLUSTER_IMPL_H
#define EPX_SERVER_FRONT_CLUSTER_IMPL_H

#include <pthread.h>

#include "server/front/cluster.h"
#include "server/front/frame.h"
#include "server/front/live.h"
#include "server/front/spawn.h"

enum { EPX_CLUSTER_MAX_RANKS = 64, EPX_FAILURE_BYTES = 512 };

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

struct epx_cluster {
    epx_cluster_config_t cfg; /* strings and .rank are valid until the ranks are ready */
    int n_ranks;
    int n_replicas, replica_size; /* ranks of a replica */
    epx_replica_t replicas[EPX_CLUSTER_MAX_RANKS];
    int group_size; /* ranks of an attention group; the first one speaks for it */
    epx_front_rank_t ranks[EPX_CLUSTER_MAX_RANKS];
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
enum { EPX_RANK_NAME_BYTES = 64 };
const char *epx_cluster_rank_name(const epx_cluster_t *c, int rank, char out[EPX_RANK_NAME_BYTES]);

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
/* A process has ended: reaped here. */
void epx_cluster_process_ended(epx_cluster_t *c, int rank);
/* Act on deadlines that have passed. */
void epx_cluster_check_deadlines(epx_cluster_t *c);
/* Call after every round. While something is expected of the ranks, a process that a signal has stopped for longer than a wait
 * for a peer may take is a loss: during the start, and with one rank, no peer would notice. */
void epx_cluster_watch_stopped(epx_cluster_t *c);
/* End every live request of a replica, or of all with -1, with an error. */
void epx_cluster_end_live(epx_cluster_t *c, int replica, const char *why);

/* ---- progress.c ---- */
/* Redraw the loading bar on stderr from the ranks' progress. */
void epx_cluster_draw_progress(const epx_cluster_t *c, const char *phase);
/* Remove the bar. */
void epx_cluster_erase_progress(const epx_cluster_t *c);

#endif
