/* What the server counts and how it is read: latencies of requests by DP rank, the newest counters of the ranks, the expert
 * distribution record. Everything here is guarded by the server's lock unless it says otherwise; nothing waits for a rank. */
#ifndef EPX_SERVER_HTTP_METRICS_H
#define EPX_SERVER_HTTP_METRICS_H

#include "base/str.h"
#include "server/front/cluster.h"

enum { EPX_LATENCY_MAX_BUCKETS = 24 };

typedef enum { EPX_LATENCY_FIRST_TOKEN, EPX_LATENCY_INTER_TOKEN, EPX_LATENCY_REQUEST, EPX_N_LATENCIES } epx_latency_t;

typedef struct {
    uint64_t n[EPX_LATENCY_MAX_BUCKETS + 1]; /* not cumulative; the one behind the last bound is +Inf */
    double sum_s;
} epx_latency_hist_t;

/* Counters of requests that one DP rank ran. */
typedef struct {
    epx_latency_hist_t latency[EPX_N_LATENCIES];
    uint64_t n_requests, n_aborted, n_failed;
    /* for the throughput between two readings */
    uint64_t read_ns, read_tokens;
    double tokens_per_s;
} epx_dp_metrics_t;

typedef struct {
    int n_dp;
    epx_dp_metrics_t *dp;   /* owned, [n_dp] */
    uint64_t last_token_ns; /* 0: none yet */
} epx_metrics_t;

/* Upper bounds in seconds, ascending. */
const double *epx_latency_bounds(epx_latency_t what, int *out_n);

/* Before the first request. */
epx_status_t epx_metrics_init(epx_metrics_t *m, epx_cluster_t *cluster);
void epx_metrics_fini(epx_metrics_t *m);
/* An event of a request that was submitted at start_ns; *last_ns: when its token before came, 0: none yet. is_whole: a stop
 * string ended the answer, so that its cancellation is no abort. */
void epx_metrics_on_event(epx_metrics_t *m, const epx_event_t *ev, int is_whole, uint64_t start_ns, uint64_t *last_ns);

/* A reading of everything that is exposed: the same numbers for /metrics, /engine/state and the native endpoints. */
typedef struct {
    epx_cluster_status_t status;
    int n_ranks, n_layers, n_experts;
    int n_dp, ranks_per_dp, ranks_per_replica;
    epx_rank_stats_t *stats;   /* owned, [n_ranks] */
    uint64_t *expert_rows;     /* owned, [n_layers, n_experts], all ranks together */
    epx_dp_metrics_t *metrics; /* owned, [n_dp] */
} epx_reading_t;

/* The counters of a DP rank: those of its first rank, which counts requests for all of them. */
const epx_rank_stats_t *epx_reading_dp(const epx_reading_t *r, int dp);
/* The first rank of the replica of this rank: peers of a rank are numbered within its replica. */
int epx_reading_first_peer(const epx_reading_t *r, int rank);

struct epx_http;
/* Takes the server's lock. EPX_ERR_NOMEM, EPX_ERR_STATE before the server was started. */
epx_status_t epx_reading_take(struct epx_http *h, epx_reading_t *out);
void epx_reading_fini(epx_reading_t *r);
/* The reading in the Prometheus text format, version 0.0.4. */
epx_status_t epx_metrics_write(const epx_reading_t *r, const char *model_name, epx_str_t *out);
/* The reading as JSON, for the web page. */
epx_status_t epx_state_write(const epx_reading_t *r, const char *model_name, int max_context, epx_str_t *out);

/* Rows by layer and expert between a start and a stop. */
typedef struct {
    int is_on, has_any; /* running; was started at least once since the last dump */
    uint64_t *base;     /* owned: the counts at the start */
    uint64_t *rows;     /* owned: the counts of what was recorded before */
    size_t n;
} epx_expert_record_t;
void epx_expert_record_fini(epx_expert_record_t *r);

#endif
