/* Throughput of ranks against each other in one run: layouts of the same model take turns on the same requests, so that what
 * else the machine does hits all of them. The texts of all must be equal, else nothing is printed. Processes as `epx serve`
 * starts them, without HTTP. Usage: bench_serving layouts|prefix MODEL_DIR ROUNDS [JSON_FILE]   appends a line for each
 * comparison */
#include <epx_commit.h> /* made by the build */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/philox.h"
#include "server/front/cluster.h"

enum { MAX_REQUESTS = 64, MAX_PROMPT = 768, MAX_NEW = 64, MAX_SIDES = 4, MAX_ROUNDS = 200, SEED = 7 };

#define FAIL(...)                     \
    do {                              \
        fprintf(stderr, __VA_ARGS__); \
        fputc('\n', stderr);          \
        exit(1);                      \
    } while (0)

typedef struct {
    const char *name;
    int n_requests, n_shared, n_own, n_new; /* prompt tokens that all requests begin with, and others; generated tokens */
} workload_t;

typedef struct {
    const char *name;
    int tp, dp, threads, halves, no_cache;
} layout_t;

typedef struct {
    const layout_t *l;
    epx_cluster_t *cluster;
    pthread_mutex_t lock; /* held while a round is submitted: events wait until all ids are known */
    pthread_cond_t changed;
    uint64_t ids[MAX_REQUESTS];
    int n_requests, n_left;
    int n_tokens[MAX_REQUESTS];
    int32_t tokens[MAX_REQUESTS][MAX_NEW];
    char failure[512];
    double seconds[MAX_ROUNDS];
} side_t;

static side_t sides[MAX_SIDES];
static int32_t prompts[MAX_REQUESTS][MAX_PROMPT];

static void on_event(void *ctx, const epx_event_t *ev) {
    side_t *s = ctx;
    int i = 0;
    pthread_mutex_lock(&s->lock);
    while (i < s->n_requests && s->ids[i] != ev->id) i++;
    if (ev->finish == EPX_FINISH_ERROR || i == s->n_requests) snprintf(s->failure, sizeof s->failure, "%s", ev->error);
    else if (ev->token >= 0 && s->n_tokens[i] < MAX_NEW) s->tokens[i][s->n_tokens[i]++] = ev->token;
    s->n_left -= ev->finish != EPX_FINISH_NONE;
    if (s->n_left == 0) pthread_cond_signal(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

static void on_failure(void *ctx, const char *message) {
    (void)ctx;
    FAIL("the ranks are lost: %s", message);
}

static void open_side(side_t *s, const layout_t *l, const char *model, const workload_t *w) {
    epx_cluster_config_t cfg = {.size = sizeof cfg, .on_event = on_event, .on_failure = on_failure, .ctx = s};
    epx_rank_config_init(&cfg.rank);
    cfg.rank.model_path = model;
    cfg.rank.tp = cfg.rank.ep = l->tp;
    cfg.rank.dp = l->dp;
    cfg.rank.n_threads = l->threads;
    cfg.rank.two_batch_overlap = l->halves;
    cfg.rank.disable_prefix_cache = l->no_cache;
    cfg.rank.max_running = w->n_requests / l->dp;
    cfg.rank.chunk_tokens = 256 / l->dp;
    cfg.rank.max_total_tokens = (int64_t)(w->n_requests / l->dp + 1) * (w->n_shared + w->n_own + w->n_new + 16);
    s->l = l;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    if (epx_cluster_create(&cfg, &s->cluster) < 0) FAIL("%s: %s", l->name, epx_error_message());
}

/* New texts in every round, so that no prefix of an earlier one is found. */
static void make_prompts(const workload_t *w, int round) {
    const int n = w->n_shared + w->n_own;
    for (int i = 0; i < w->n_requests; i++)
        for (int k = 0; k < n; k++) {
            const uint64_t who = k < w->n_shared ? 0 : (uint64_t)i + 1;
            prompts[i][k] = (int32_t)(epx_philox_u32(SEED + (uint64_t)round, who * MAX_PROMPT + (uint64_t)k) % 4000);
        }
}

static double run_round(side_t *s, const workload_t *w) {
    epx_request_t q = {.n_prompt = w->n_shared + w->n_own, .max_new_tokens = w->n_new, .ignore_eos = 1};
    epx_sampling_init(&q.sampling);
    q.sampling.temperature = 0;
    memset(s->n_tokens, 0, sizeof s->n_tokens);
    s->n_requests = s->n_left = w->n_requests;
    const uint64_t start = epx_now_ns();
    pthread_mutex_lock(&s->lock);
    for (int i = 0; i < w->n_requests; i++) {
        q.prompt = prompts[i];
        if (epx_cluster_submit(s->cluster, &q, i % s->l->dp, &s->ids[i]) < 0) FAIL("submit: %s", epx_error_message());
    }
    while (s->n_left > 0) pthread_cond_wait(&s->changed, &s->lock);
    pthread_mutex_unlock(&s->lock);
    if (s->failure[0]) FAIL("%s: %s", s->l->name, s->failure);
    return (double)(epx_now_ns() - start) * 1e-9;
}

static void check_texts(int n_sides, const workload_t *w) {
    for (int i = 1; i < n_sides; i++)
        for (int k = 0; k < w->n_requests; k++)
            if (sides[i].n_tokens[k] != w->n_new ||
                memcmp(sides[i].tokens[k], sides[0].tokens[k], (size_t)w->n_new * sizeof(int32_t)) != 0)
                FAIL("%s: request %d has another text than with %s", sides[i].l->name, k, sides[0].l->name);
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void report(const side_t *s, const workload_t *w, const char *model, int n_rounds, FILE *json) {
    double ratio[MAX_ROUNDS], seconds[MAX_ROUNDS];
    const double tokens = (double)w->n_requests * (w->n_shared + w->n_own + w->n_new);
    for (int r = 0; r < n_rounds; r++) ratio[r] = sides[0].seconds[r] / s->seconds[r], seconds[r] = s->seconds[r];
    qsort(ratio, (size_t)n_rounds, sizeof ratio[0], ascending);
    qsort(seconds, (size_t)n_rounds, sizeof seconds[0], ascending);
    const double mid = ratio[n_rounds / 2], rate = tokens / seconds[n_rounds / 2];
    printf("%-8s %-28s %8.0f tokens/s  %.3f of %s (quartiles %.3f to %.3f, %d rounds)\n", w->name, s->l->name, rate, mid,
           sides[0].l->name, ratio[n_rounds / 4], ratio[n_rounds * 3 / 4], n_rounds);
    if (!json) return;
    time_t now = time(NULL);
    char date[32];
    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
    fprintf(json,
            "{\"bench\":\"serving\",\"commit\":\"%s\",\"date\":\"%s\",\"model\":\"%s\",\"workload\":\"%s\",\"requests\":%d,"
            "\"shared\":%d,"
            "\"own\":%d,\"new\":%d,\"layout\":\"%s\",\"against\":\"%s\",\"rounds\":%d,\"tokens_per_s\":%.1f,\"ratio_p50\":%.4f,"
            "\"ratio_p25\":%.4f,\"ratio_p75\":%.4f,\"checked\":true}\n",
            EPX_COMMIT, date, model, w->name, w->n_requests, w->n_shared, w->n_own, w->n_new, s->l->name, sides[0].l->name,
            n_rounds, rate, mid, ratio[n_rounds / 4], ratio[n_rounds * 3 / 4]);
}

static void compare(const layout_t *layouts, int n_sides, const workload_t *w, const char *model, int n_rounds, FILE *json) {
    for (int i = 0; i < n_sides; i++) open_side(&sides[i], &layouts[i], model, w);
    for (int r = -1; r < n_rounds; r++) { /* the first is the warm-up */
        make_prompts(w, r + 1);
        for (int k = 0; k < n_sides; k++) {
            side_t *s = &sides[(k + r + 1) % n_sides];
            const double seconds = run_round(s, w);
            if (r >= 0) s->seconds[r] = seconds;
        }
        check_texts(n_sides, w);
    }
    const char *slash = strrchr(model, '/');
    for (int i = 0; i < n_sides; i++) report(&sides[i], w, slash ? slash + 1 : model, n_rounds, json);
    for (int i = 0; i < n_sides; i++) epx_cluster_destroy(sides[i].cluster);
    memset(sides, 0, sizeof sides);
}

int main(int argc, char **argv) {
    static const layout_t layouts[] = {{"1 rank, 2 threads", 1, 1, 2, 0, 0},
                                       {"tp 2 dp 2", 2, 2, 1, 0, 0},
                                       {"tp 2 dp 2, in halves", 2, 2, 1, 1, 0},
                                       {"tp 2 dp 1", 2, 1, 1, 0, 0}};
    static const layout_t cache[] = {{"without prefix cache", 1, 1, 2, 0, 1}, {"prefix cache", 1, 1, 2, 0, 0}};
    static const workload_t prefill = {"prefill", 16, 0, 240, 1}, decode = {"decode", 32, 0, 16, 48};
    static const workload_t shared = {"shared", 32, 480, 32, 16};
    if (argc == 3 && strcmp(argv[1], EPX_WORKER_ARGUMENT) == 0) return epx_worker_main(atoi(argv[2]));
    const int n_rounds = argc >= 4 ? atoi(argv[3]) : 0, is_prefix = argc >= 4 && strcmp(argv[1], "prefix") == 0;
    if (n_rounds < 4 || n_rounds > MAX_ROUNDS || (!is_prefix && strcmp(argv[1], "layouts") != 0))
        FAIL("usage: bench_serving layouts|prefix MODEL_DIR ROUNDS [JSON_FILE], 4 to %d rounds", MAX_ROUNDS);
    FILE *json = argc == 5 ? fopen(argv[4], "a") : NULL;
    if (argc == 5 && !json) FAIL("cannot write %s", argv[4]);
    if (is_prefix) compare(cache, 2, &shared, argv[2], n_rounds, json);
    else {
        compare(layouts, 4, &prefill, argv[2], n_rounds, json);
        compare(layouts, 4, &decode, argv[2], n_rounds, json);
    }
    return json && fclose(json) != 0;
}
