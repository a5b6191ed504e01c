/* Counting and reading. The counting runs on the cluster's reader thread under the server's lock and takes no other. */
#include "server/http/metrics.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "server/http/http_impl.h"

/* The bounds of SGLang's histograms of the same names. */
static const double first_token_s[] = {0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400};
static const double inter_token_s[] = {0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04,
                                       0.06,  0.08,  0.1,   0.2,   0.4,  0.6,   0.8,  1,     2,    4,     8};
static const double request_s[] = {0.1, 0.2, 0.4, 0.6, 0.8, 1,   2,   4,   6,    8,    10,
                                   20,  40,  60,  80,  100, 200, 400, 600, 1200, 1800, 2400};

#define BOUNDS(a) \
    { a, (int)(sizeof a / sizeof a[0]) }
static const struct {
    const double *s;
    int n;
} bounds[EPX_N_LATENCIES] = {BOUNDS(first_token_s), BOUNDS(inter_token_s), BOUNDS(request_s)};

const double *epx_latency_bounds(epx_latency_t what, int *out_n) {
    *out_n = bounds[what].n;
    return bounds[what].s;
}

epx_status_t epx_metrics_init(epx_metrics_t *m, epx_cluster_t *cluster) {
    epx_cluster_status_t st;
    epx_cluster_status(cluster, &st);
    epx_metrics_fini(m);
    m->dp = calloc((size_t)st.n_dp + 1, sizeof *m->dp);
    if (!m->dp) return epx_fail(EPX_ERR_NOMEM, "no memory for the metrics of %d DP ranks", st.n_dp);
    m->n_dp = st.n_dp;
    return EPX_OK;
}

void epx_metrics_fini(epx_metrics_t *m) {
    free(m->dp);
    *m = (epx_metrics_t){0};
}

static void observe(epx_dp_metrics_t *r, epx_latency_t what, uint64_t ns) {
    epx_latency_hist_t *h = &r->latency[what];
    double s = (double)ns * 1e-9;
    int i = 0;
    while (i < bounds[what].n && s > bounds[what].s[i]) i++;
    h->n[i]++;
    h->sum_s += s;
}

void epx_metrics_on_event(epx_metrics_t *m, const epx_event_t *ev, int is_whole, uint64_t start_ns, uint64_t *last_ns) {
    uint64_t now = epx_now_ns();
    if (ev->dp_rank < 0 || ev->dp_rank >= m->n_dp) return;
    epx_dp_metrics_t *r = &m->dp[ev->dp_rank];
    if (ev->token >= 0) {
        if (*last_ns == 0) observe(r, EPX_LATENCY_FIRST_TOKEN, now - start_ns);
        else observe(r, EPX_LATENCY_INTER_TOKEN, now - *last_ns);
        *last_ns = m->last_token_ns = now;
    }
    if (ev->finish == EPX_FINISH_NONE) return;
    r->n_requests++;
    is_whole |= ev->finish == EPX_FINISH_STOP || ev->finish == EPX_FINISH_LENGTH;
    r->n_aborted += ev->finish == EPX_FINISH_CANCELLED && !is_whole;
    r->n_failed += ev->finish == EPX_FINISH_ERROR;
    if (is_whole) observe(r, EPX_LATENCY_REQUEST, now - start_ns);
}

/* Tokens per second since a reading at least a second ago; a rank that is idle makes none. */
static void update_rate(epx_dp_metrics_t *r, const epx_rank_stats_t *st, uint64_t now) {
    const uint64_t second = 1000000000u;
    if (r->read_ns == 0 || now - r->read_ns >= second) {
        uint64_t tokens = st->n_generated_tokens - r->read_tokens;
        r->tokens_per_s = r->read_ns ? (double)tokens * 1e9 / (double)(now - r->read_ns) : 0;
        r->read_ns = now;
        r->read_tokens = st->n_generated_tokens;
    }
}

const epx_rank_stats_t *epx_reading_dp(const epx_reading_t *r, int dp) { return &r->stats[dp * r->ranks_per_dp]; }

int epx_reading_first_peer(const epx_reading_t *r, int rank) { return rank - rank % r->ranks_per_replica; }

epx_status_t epx_reading_take(epx_http_t *h, epx_reading_t *out) {
    memset(out, 0, sizeof *out);
    if (!h->cluster) return epx_fail(EPX_ERR_STATE, "the server was not started");
    epx_cluster_status(h->cluster, &out->status);
    out->n_ranks = out->status.n_ranks;
    out->n_dp = out->status.n_dp;
    out->ranks_per_dp = out->status.ranks_per_dp;
    out->ranks_per_replica = out->n_ranks / out->status.n_replicas;
    out->n_layers = out->status.info.n_layers;
    out->n_experts = out->status.info.n_experts;
    size_t n = (size_t)out->n_ranks + 1, n_rows = (size_t)out->n_layers * (size_t)out->n_experts;
    out->stats = calloc(n, sizeof *out->stats);
    out->expert_rows = calloc(n_rows + 1, sizeof *out->expert_rows);
    out->metrics = calloc(n, sizeof *out->metrics);
    if (!out->stats || !out->expert_rows || !out->metrics) {
        epx_reading_fini(out);
        return epx_fail(EPX_ERR_NOMEM, "no memory for a reading of %d ranks and %zu experts", out->n_ranks, n_rows);
    }
    epx_status_t s = epx_cluster_reports(h->cluster, out->stats, out->expert_rows, out->n_ranks);
    if (s < 0) {
        epx_reading_fini(out);
        return s;
    }
    uint64_t now = epx_now_ns();
    pthread_mutex_lock(&h->lock);
    for (int d = 0; d < out->n_dp && d < h->metrics.n_dp; d++) {
        update_rate(&h->metrics.dp[d], epx_reading_dp(out, d), now);
        out->metrics[d] = h->metrics.dp[d];
    }
    pthread_mutex_unlock(&h->lock);
    return EPX_OK;
}

void epx_reading_fini(epx_reading_t *r) {
    free(r->stats);
    free(r->expert_rows);
    free(r->metrics);
    memset(r, 0, sizeof *r);
}

void epx_expert_record_fini(epx_expert_record_t *r) {
    free(r->base);
    free(r->rows);
    *r = (epx_expert_record_t){0};
}
