/* The row rule as a property: the logits behind every generated token have the same bits whatever else is in the batch, for any
 * number of ranks and threads, chunk and page size, arrival order, in one piece or in halves, and by prefill or by decode. Random
 * configurations, one fixed set of requests. Also: the library's row counters against counts made from the router's ids. Seed:
 * EPX_TEST_SEED. */
#include <string.h>

#include "base/philox.h"
#include "tests/model/harness.h"

enum { N_REQUESTS = 12, MAX_NEW = 8, MAX_PROMPT = 150, MAX_RANKS = 4 };

typedef struct {
    int32_t prompt[MAX_PROMPT + MAX_NEW];
    int32_t n_prompt, max_new;
    epx_sampling_t sampling;
} request_t;

typedef struct {
    const char *model;
    int vocab, top_k, n_experts;
    request_t requests[N_REQUESTS];
    float *base; /* [N_REQUESTS, MAX_NEW, vocab]: one request at a time, one rank, one thread */
    int32_t base_tokens[N_REQUESTS][MAX_NEW];
    int is_base;
    uint64_t key; /* of this configuration */
    int w;
    int n_seen[MAX_RANKS];
    uint64_t rows[MAX_RANKS][MAX_RANKS]; /* [from][to] counted from router ids */
    const char *what;
} prop_t;

typedef struct {
    prop_t *p;
    int rank;
} side_t;

static float *base_row(const prop_t *p, uint64_t id, int32_t idx) {
    return p->base + (id * MAX_NEW + (uint64_t)idx) * (uint64_t)p->vocab;
}

static void on_logits(void *ctx, uint64_t id, int32_t idx, const float *logits, int32_t vocab) {
    side_t *s = ctx;
    float *want = base_row(s->p, id, idx);
    size_t n_bytes = (size_t)vocab * sizeof(float);
    if (s->p->is_base) memcpy(want, logits, n_bytes);
    else
        CHECK(memcmp(want, logits, n_bytes) == 0, "%s: request %d, token %d: logits differ from the request alone", s->p->what,
              (int)id, idx);
    s->p->n_seen[s->rank]++;
}

static void on_event(void *ctx, const epx_event_t *ev) {
    side_t *s = ctx;
    CHECK(ev->finish != EPX_FINISH_ERROR && ev->token >= 0, "request %d: %s", (int)ev->id, ev->error ? ev->error : "no token");
    int32_t *want = &s->p->base_tokens[ev->id][ev->n_generated - 1];
    if (s->p->is_base) *want = ev->token;
    else CHECK(*want == ev->token, "%s: request %d: token %d, alone %d", s->p->what, (int)ev->id, ev->token, *want);
}

static int owner(int expert, int n_experts, int w) {
    int first, n, r = 0;
    for (;; r++) {
        epx_model_expert_range(n_experts, r, w, &first, &n);
        if (expert < first + n) return r;
    }
}

/* A token goes once to each rank that owns one of its experts. */
static void on_layer(void *ctx, int layer, int32_t n_rows, const int32_t *ids, const float *weights, const float *hidden) {
    side_t *s = ctx;
    (void)layer, (void)weights, (void)hidden;
    if (!ids) return; /* a layer without experts */
    for (int32_t row = 0; row < n_rows; row++) {
        int to[MAX_RANKS] = {0};
        for (int k = 0; k < s->p->top_k; k++) to[owner(ids[row * s->p->top_k + k], s->p->n_experts, s->p->w)] = 1;
        for (int r = 0; r < s->p->w; r++) s->p->rows[s->rank][r] += (uint64_t)to[r];
    }
}

static void submit(const prop_t *p, epx_rank_t *r, int i) {
    const request_t *q = &p->requests[i];
    epx_request_t req = {.id = (uint64_t)i,
                         .prompt = q->prompt,
                         .n_prompt = q->n_prompt,
                         .max_new_tokens = q->max_new,
                         .sampling = q->sampling,
                         .ignore_eos = 1};
    CHECK_OK(epx_rank_submit(r, &req));
}

/* Requests of this rank arrive at random steps; all ranks make the same number of steps. */
static void body(void *ctx, int rank, epx_rank_t *r) {
    prop_t *p = ctx;
    side_t side = {p, rank};
    epx_rank_stats_t st;
    epx_rank_set_logits_hook(r, on_logits, &side);
    epx_model_set_probe(epx_rank_model(r), on_layer, &side);
    for (int step = 0; step < 12; step++) {
        for (int i = 0; i < N_REQUESTS; i++) {
            uint32_t d = epx_philox_u32(p->key, 100 + (uint64_t)i);
            if ((int)(d % (uint32_t)p->w) == rank && (int)(d / 64 % 12) == step) submit(p, r, i);
        }
        CHECK(epx_rank_step(r, on_event, &side) >= 0, "%s", epx_last_error());
    }
    run_until_idle(r, on_event, &side);
    epx_rank_stats(r, &st);
    for (int to = 0; to < p->w; to++)
        CHECK(st.rows_sent[to] == p->rows[rank][to], "%s: rank %d to %d: library counts %llu rows, router ids give %llu", p->what,
              rank, to, (unsigned long long)st.rows_sent[to], (unsigned long long)p->rows[rank][to]);
    CHECK(st.kv_used_tokens == 0 && st.n_running == 0 && st.n_waiting == 0, "something is left");
}

static void base_body(void *ctx, int rank, epx_rank_t *r) {
    prop_t *p = ctx;
    side_t side = {p, rank};
    epx_rank_set_logits_hook(r, on_logits, &side);
    for (int i = 0; i < N_REQUESTS; i++) {
        submit(p, r, i);
        run_until_idle(r, on_event, &side);
    }
    /* Decode against prefill: the whole text again as one prompt. */
    float *again = malloc((size_t)(MAX_PROMPT + MAX_NEW) * (size_t)p->vocab * sizeof *again);
    CHECK(again, "no memory");
    for (int i = 0; i < N_REQUESTS; i++) {
        request_t *q = &p->requests[i];
        memcpy(q->prompt + q->n_prompt, p->base_tokens[i], (size_t)q->max_new * sizeof(int32_t));
        CHECK_OK(epx_rank_logits(r, q->prompt, q->n_prompt + q->max_new, q->n_prompt + q->max_new, again));
        for (int t = 0; t < q->max_new; t++)
            CHECK(memcmp(again + (size_t)(q->n_prompt - 1 + t) * (size_t)p->vocab, base_row(p, (uint64_t)i, t),
                         (size_t)p->vocab * sizeof(float)) == 0,
                  "%s: request %d token %d: prefill and decode differ", p->model, i, t);
    }
    free(again);
}

static void make_requests(prop_t *p, uint64_t seed) {
    uint64_t at = 0;
    for (int i = 0; i < N_REQUESTS; i++) {
        request_t *q = &p->requests[i];
        q->n_prompt = 1 + (int32_t)(epx_philox_u32(seed, at++) % MAX_PROMPT);
        q->max_new = 1 + (int32_t)(epx_philox_u32(seed, at++) % MAX_NEW);
        for (int k = 0; k < q->n_prompt; k++) q->prompt[k] = (int32_t)(epx_philox_u32(seed, at++) % (uint32_t)p->vocab);
        epx_sampling_init(&q->sampling);
        q->sampling.temperature = i % 3 ? 0.8f : 0.0f;
        q->sampling.seed = seed + (uint64_t)i;
    }
}

static void random_config(prop_t *p, uint64_t key, char *what, size_t n_what) {
    static const char *const backends[] = {"pplx", "none"};
    epx_rank_config_t c = small_config(p->model, 1 + (int)(epx_philox_u32(key, 0) % MAX_RANKS));
    c.n_threads = 1 + (int)(epx_philox_u32(key, 1) % 3);
    c.chunk_tokens = 1 + (int)(epx_philox_u32(key, 2) % 70);
    c.page_size = 1 + (int)(epx_philox_u32(key, 3) % 70);
    c.max_running = 1 + (int)(epx_philox_u32(key, 4) % 10);
    c.moe_a2a_backend = backends[epx_philox_u32(key, 5) % 2];
    c.two_batch_overlap = (int)(epx_philox_u32(key, 6) % 2);
    snprintf(what, n_what, "%s: %d ranks, %d threads, chunk %d, page %d, %d running, %s%s", p->model, c.tp, c.n_threads,
             c.chunk_tokens, c.page_size, c.max_running, c.moe_a2a_backend, c.two_batch_overlap ? ", in halves" : "");
    p->what = what;
    p->key = key;
    p->w = c.tp;
    memset(p->n_seen, 0, sizeof p->n_seen);
    memset(p->rows, 0, sizeof p->rows);
    with_ranks(&c, body, p);
}

static void check_model(const char *model, int n_configs) {
    char what[400];
    epx_model_config_t mc;
    prop_t p = {.model = model, .is_base = 1, .what = "alone"};
    CHECK_OK(epx_model_config_load(model, &mc));
    p.vocab = mc.vocab;
    p.top_k = mc.top_k;
    p.n_experts = mc.n_experts;
    p.base = calloc((size_t)N_REQUESTS * MAX_NEW * (size_t)p.vocab, sizeof *p.base);
    CHECK(p.base, "no memory");
    make_requests(&p, test_seed());
    epx_rank_config_t c = small_config(model, 1);
    c.n_threads = 1;
    c.max_running = 1;
    c.chunk_tokens = MAX_PROMPT + MAX_NEW;
    with_ranks(&c, base_body, &p);
    p.is_base = 0;
    int n_total = 0, n_seen = 0;
    for (int i = 0; i < N_REQUESTS; i++) n_total += p.requests[i].max_new;
    for (int i = 0; i < n_configs; i++) {
        random_config(&p, test_seed() * 1000 + (uint64_t)i, what, sizeof what);
        n_seen = 0;
        for (int k = 0; k < p.w; k++) n_seen += p.n_seen[k];
        CHECK(n_seen == n_total, "%s: %d tokens, expected %d", what, n_seen, n_total);
    }
    printf("%s: %d configurations, %d logit rows each: same bits, row counters equal\n", model, n_configs, n_total);
    free(p.base);
}

int main(int argc, char **argv) {
    if (argc == 2) {
        check_model(reference_model(argv[1]), 16);
        return 0;
    }
    check_model(QWEN, 24);
    check_model(TINY, 8);
    return 0;
}
