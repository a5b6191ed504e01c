/* Serving under pressure gives the text that a request gets alone: KV pools that run out, retraction, cancels, shared prefixes,
 * chunks, mixing, policies, several ranks, idle ranks, steps in halves. Compared are logits, bit for bit, of every drawn token.
 * Seed: EPX_TEST_SEED. */
#include <string.h>

#include "base/philox.h"
#include "tests/model/harness.h"

enum { N_REQUESTS = 24, MAX_PROMPT = 60, MAX_NEW = 30, VOCAB = 512 };

typedef struct {
    int32_t prompt[MAX_PROMPT], n_prompt, n_new;
    uint64_t hash[MAX_NEW]; /* of the logits before each token */
    int32_t tokens[MAX_NEW], n_tokens, n_cached;
    int n_drawn[MAX_NEW];  /* how often token i was drawn: once */
    int cancel, cancelled; /* asked to be, by its own rank; has ended so */
} request_t;

typedef struct {
    request_t q[N_REQUESTS];
    int w, idle; /* ranks; those from w - idle on get no request */
    int group;   /* ranks of an attention group: all get its requests, each at its own time */
    int rows_of_idle_rank;
    epx_rank_stats_t stats[8];
} exam_t;

static const char *g_model = QWEN;

/* Latent attention is not divided: the ranks of a group do the same work. */
static int is_latent(void) {
    epx_model_config_t c;
    CHECK_OK(epx_model_config_load(g_model, &c));
    return c.mla.kv_lora > 0;
}

static uint64_t hash_logits(const float *x, int32_t n) {
    uint64_t h = 14695981039346656037u;
    for (int32_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        h = (h ^ bits) * 1099511628211u;
    }
    return h;
}

static void on_logits(void *ctx, uint64_t id, int32_t token_idx, const float *logits, int32_t vocab) {
    request_t *q = &((exam_t *)ctx)->q[id];
    q->hash[token_idx] = hash_logits(logits, vocab);
    q->n_drawn[token_idx]++;
}

static void on_event(void *ctx, const epx_event_t *ev) {
    request_t *q = &((exam_t *)ctx)->q[ev->id];
    if (ev->finish == EPX_FINISH_CANCELLED) {
        q->cancelled = 1;
        return;
    }
    q->cancel = ev->id % 5 == 4 && q->n_tokens >= 3; /* in the runs that look at it */
    CHECK(ev->finish != EPX_FINISH_ERROR && ev->token >= 0, "request %d: %s", (int)ev->id, ev->error ? ev->error : "");
    q->tokens[q->n_tokens++] = ev->token;
    q->n_cached = ev->n_cached;
}

static void on_layer(void *ctx, int layer, int32_t n_rows, const int32_t *ids, const float *weights, const float *h) {
    (void)layer, (void)ids, (void)weights, (void)h;
    __atomic_fetch_add(&((exam_t *)ctx)->rows_of_idle_rank, n_rows, __ATOMIC_RELAXED); /* several idle ranks */
}

static epx_request_t request(const request_t *q, uint64_t id) {
    epx_request_t r = {.id = id, .prompt = q->prompt, .n_prompt = q->n_prompt, .max_new_tokens = q->n_new, .ignore_eos = 1};
    epx_sampling_init(&r.sampling);
    r.sampling.temperature = id % 2 ? 0.0f : 0.8f;
    r.sampling.seed = id;
    return r;
}

/* Requests come over the first steps, not all at once. */
static void body(void *ctx, int rank, epx_rank_t *r) {
    exam_t *x = ctx;
    int busy = (x->w - x->idle) / x->group, next = rank / x->group, idle = next >= busy, late = rank % x->group;
    epx_status_t s = EPX_OK;
    if (idle) epx_model_set_probe(epx_rank_model(r), on_layer, x);
    else if (late == 0) epx_rank_set_logits_hook(r, on_logits, x);
    for (int step = 0; s == EPX_OK; step++) {
        for (int k = 0; k < 2 && !idle && next < N_REQUESTS && step % (2 + late) == late; k++, next += busy) {
            epx_request_t q = request(&x->q[next], (uint64_t)next);
            CHECK_OK(epx_rank_submit(r, &q));
        }
        /* Nobody goes idle while requests are to come: the numbers differ until every rank has given its last. */
        epx_rank_wake(r, idle || next >= N_REQUESTS ? 1u << 20 : (uint64_t)step + 1);
        s = epx_rank_step(r, on_event, x);
        for (int i = rank; !idle && x->group == 1 && i < N_REQUESTS; i += busy) /* its own requests only */
            if (x->q[i].cancel) epx_rank_cancel(r, (uint64_t)i);
        CHECK(s >= 0, "%s", epx_last_error());
    }
    epx_rank_stats(r, &x->stats[rank]);
    epx_rank_info_t info;
    epx_rank_info(r, &info);
    CHECK(info.attn_tp == x->group || is_latent(), "the heads are divided over %d ranks, not %d", info.attn_tp, x->group);
}

/* Prompts of a few families, so that prefixes are shared. */
static void make_requests(exam_t *x) {
    uint64_t seed = test_seed(), at = 0;
    memset(x, 0, sizeof *x);
    for (int i = 0; i < N_REQUESTS; i++) {
        request_t *q = &x->q[i];
        int32_t family = (int32_t)(epx_philox_u32(seed, at++) % 3);
        q->n_prompt = 20 + (int32_t)(epx_philox_u32(seed, at++) % (MAX_PROMPT - 20));
        q->n_new = 1 + (int32_t)(epx_philox_u32(seed, at++) % MAX_NEW);
        int32_t n_shared = 10 + (int32_t)(epx_philox_u32(seed, at++) % 40);
        for (int32_t k = 0; k < q->n_prompt; k++)
            q->prompt[k] = k < n_shared ? (family * 37 + k * 5) % VOCAB : (int32_t)(epx_philox_u32(seed, at++) % VOCAB);
    }
}

static exam_t run(const epx_rank_config_t *c, int idle) {
    static exam_t x;
    make_requests(&x);
    x.w = c->tp;
    x.group = c->tp / c->dp;
    x.idle = idle;
    with_ranks(c, body, &x);
    return x;
}

/* One request at a time on one rank, nothing shared. */
static void body_alone(void *ctx, int rank, epx_rank_t *r) {
    exam_t *x = ctx;
    (void)rank;
    epx_rank_set_logits_hook(r, on_logits, x);
    for (int i = 0; i < N_REQUESTS; i++) {
        epx_request_t q = request(&x->q[i], (uint64_t)i);
        CHECK_OK(epx_rank_submit(r, &q));
        run_until_idle(r, on_event, x);
    }
}

static void check_same(const exam_t *got, const exam_t *alone, const char *what) {
    for (int i = 0; i < N_REQUESTS; i++) {
        const request_t *a = &got->q[i], *b = &alone->q[i];
        CHECK(a->n_tokens == a->n_new || (a->cancelled && a->n_tokens > 3), "%s: request %d has %d tokens of %d", what, i,
              a->n_tokens, a->n_new);
        for (int32_t k = 0; k < a->n_tokens; k++) {
            CHECK(a->n_drawn[k] == 1, "%s: request %d, token %d was drawn %d times", what, i, k, a->n_drawn[k]);
            CHECK(a->hash[k] == b->hash[k] && a->tokens[k] == b->tokens[k], "%s: request %d, token %d differs", what, i, k);
        }
    }
}

static void report(const exam_t *x, const char *what) {
    unsigned long long retracted = 0, cached = 0, looked = 0;
    for (int i = 0; i < x->w; i++) {
        retracted += x->stats[i].n_retracted;
        cached += x->stats[i].n_cached_tokens;
        looked += x->stats[i].n_lookup_tokens;
    }
    printf("%-44s %llu retractions, %llu of %llu tokens from the cache\n", what, retracted, cached, looked);
}

static void check_one_rank(const exam_t *alone) {
    uint64_t n_retracted = 0;
    for (int k = 0; k < 8; k++) {
        char what[96];
        epx_rank_config_t c = small_config(g_model, 1);
        c.max_running = 8;
        c.chunk_tokens = k & 4 ? 17 : 64;
        c.mixed_chunk = k & 1;
        c.disable_prefix_cache = (k & 2) != 0;
        c.schedule_policy = k & 1 ? "lpm" : "fcfs";
        c.page_size = k & 4 ? 1 : 4;
        c.max_total_tokens = 120; /* little more than the longest request */
        c.conservativeness = 0.02;
        exam_t got = run(&c, 0);
        snprintf(what, sizeof what, "chunk %d%s, %s, prefix cache %s", c.chunk_tokens, c.mixed_chunk ? " mixed" : "",
                 c.schedule_policy, c.disable_prefix_cache ? "off" : "on");
        check_same(&got, alone, what);
        report(&got, what);
        n_retracted += got.stats[0].n_retracted;
        CHECK((got.stats[0].n_cached_tokens > 0) == !c.disable_prefix_cache, "%s: prefix cache", what);
        CHECK(got.stats[0].kv_used_tokens == 0, "%s: KV is left over", what);
    }
    CHECK(n_retracted > 3, "the pools ran out only %d times", (int)n_retracted);
}

/* All ranks run the same steps in halves, also those without rows; single decodes, and everything without the flag, in one piece.
 */
static void check_halves(const exam_t *x, const epx_rank_config_t *c, const char *what) {
    const epx_rank_stats_t *s = &x->stats[0];
    for (int i = 0; i < c->tp; i++)
        CHECK(x->stats[i].n_halved_steps == s->n_halved_steps && x->stats[i].n_steps == s->n_steps,
              "%s: rank %d ran %llu of %llu steps in halves, rank 0 %llu of %llu", what, i,
              (unsigned long long)x->stats[i].n_halved_steps, (unsigned long long)x->stats[i].n_steps,
              (unsigned long long)s->n_halved_steps, (unsigned long long)s->n_steps);
    CHECK(c->two_batch_overlap ? s->n_halved_steps > 20 : s->n_halved_steps == 0, "%s: %llu steps in halves", what,
          (unsigned long long)s->n_halved_steps);
}

/* With deepep auto steps without prompt tokens have an exchange of their own, on all ranks; nothing else has one. */
static void check_exchanges(const exam_t *x, const epx_rank_config_t *c, const char *what) {
    const epx_rank_stats_t *s = &x->stats[0];
    int apart = strcmp(c->moe_a2a_backend, "deepep") == 0 && strcmp(c->deepep_mode, "auto") == 0;
    for (int i = 0; i < c->tp; i++)
        CHECK(x->stats[i].n_decode_exchanges == s->n_decode_exchanges, "%s: ranks differ in their exchanges", what);
    CHECK(apart ? s->n_decode_exchanges > 20 && s->n_decode_exchanges < s->n_steps : s->n_decode_exchanges == 0,
          "%s: %llu of %llu steps took the exchange for decoding", what, (unsigned long long)s->n_decode_exchanges,
          (unsigned long long)s->n_steps);
    for (int i = 0; i < c->tp; i++) /* tokens stay in their group of ranks */
        for (int to = 0; to < c->tp; to++)
            CHECK(to / c->ep == i / c->ep || x->stats[i].rows_sent[to] == 0, "%s: rank %d sent rows to rank %d", what, i, to);
}

/* Decodes and prefills meet across ranks, ranks without requests take part: their rows stay zero, live logits do not change. */
static void check_ranks(const exam_t *alone) {
    static const struct {
        int w, n_idle, dp, halves, mixed, ep; /* ep 0: all ranks */
        const char *backend, *mode;
    } layouts[] = {{2, 0, 2, 0, 0, 0, "pplx", "auto"},
                   {4, 0, 4, 0, 0, 0, "none", "auto"},
                   {4, 3, 4, 0, 0, 0, "auto", "auto"},
                   {3, 1, 3, 0, 0, 0, "pplx", "auto"},
                   {2, 0, 1, 0, 0, 0, "pplx", "auto"},
                   {4, 0, 2, 0, 0, 0, "pplx", "auto"},
                   {4, 2, 2, 0, 0, 0, "none", "auto"},
                   {4, 0, 1, 0, 0, 0, "none", "auto"},
                   /* steps in two halves */
                   {2, 0, 2, 1, 1, 0, "pplx", "auto"},
                   {4, 3, 4, 1, 0, 0, "none", "auto"},
                   {4, 2, 2, 1, 0, 0, "pplx", "auto"},
                   {4, 0, 1, 1, 0, 0, "auto", "auto"},
                   /* modes of deepep */
                   {4, 0, 4, 0, 0, 0, "deepep", "auto"},
                   {4, 3, 4, 0, 1, 0, "deepep", "auto"},
                   {2, 0, 1, 1, 0, 0, "deepep", "auto"},
                   {3, 1, 3, 0, 0, 0, "deepep", "normal"},
                   {2, 0, 2, 0, 0, 0, "deepep", "low_latency"},
                   /* experts in several groups */
                   {4, 0, 4, 0, 0, 2, "pplx", "auto"},
                   {4, 3, 4, 0, 0, 1, "deepep", "normal"},
                   {4, 0, 2, 0, 0, 2, "deepep", "auto"},
                   {4, 0, 1, 1, 0, 2, "none", "auto"}};
    for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++) {
        char what[128];
        epx_rank_config_t c = small_config(g_model, layouts[i].w);
        c.n_threads = 1;
        c.max_running = 6;
        c.chunk_tokens = 40;
        c.moe_a2a_backend = layouts[i].backend;
        c.deepep_mode = layouts[i].mode;
        c.dp = layouts[i].dp;
        if (layouts[i].ep) c.ep = layouts[i].ep;
        c.two_batch_overlap = layouts[i].halves;
        c.mixed_chunk = layouts[i].mixed;
        c.max_total_tokens = c.dp < c.tp ? 130 : 400; /* divided attention also retracts */
        exam_t got = run(&c, layouts[i].n_idle);
        snprintf(what, sizeof what, "%d ranks, dp %d, ep %d, %d idle, %s %s%s%s", c.tp, c.dp, c.ep, layouts[i].n_idle,
                 c.moe_a2a_backend, c.deepep_mode, c.two_batch_overlap ? ", in halves" : "", c.mixed_chunk ? ", mixed" : "");
        check_halves(&got, &c, what);
        check_exchanges(&got, &c, what);
        check_same(&got, alone, what);
        report(&got, what);
        CHECK(got.rows_of_idle_rank == 0, "%s: an idle rank computed %d rows", what, got.rows_of_idle_rank);
    }
}

int main(int argc, char **argv) {
    if (argc == 2) g_model = reference_model(argv[1]);
    static exam_t alone;
    epx_rank_config_t c = small_config(g_model, 1);
    c.disable_prefix_cache = 1;
    make_requests(&alone);
    with_ranks(&c, body_alone, &alone);
    check_same(&alone, &alone, "alone");
    check_one_rank(&alone);
    check_ranks(&alone);
    return 0;
}
