/* Ranks without tokens. First: a request on one of four DP ranks, the others idle, gives the logits of one rank bit for bit. Then
 * for many steps: in each, a random subset of the ranks has tokens; every subset must occur, every rank must count the same
 * steps, and every logit must be that of the request alone. Half of the steps run in two halves. Usage: model_idle [STEPS];
 * EPX_TEST_SEED. */
#include <string.h>

#include "base/philox.h"
#include "tests/model/harness.h"

enum { W = 4, N_QUESTIONS = 64, MAX_PROMPT = 12, MAX_NEW = 3, VOCAB = 512, KEPT_IDS = 1024 };

typedef struct {
    int32_t prompt[MAX_PROMPT], n_prompt, n_new;
    uint64_t hash[MAX_NEW]; /* of the logits before each token, alone on one rank */
} question_t;

typedef struct {
    question_t q[N_QUESTIONS];
    uint64_t seed;
    int n_steps, is_base;
    uint8_t *busy;          /* [n_steps] bit r: rank r had tokens in this step */
    int asked[W][KEPT_IDS]; /* question of each rank's request, by its number modulo KEPT_IDS */
    uint64_t n_logits[W], n_steps_of[W];
} exam_t;

typedef struct {
    exam_t *x;
    int rank;
} side_t;

static uint64_t hash_logits(const float *v, int32_t n) {
    uint64_t h = 14695981039346656037u;
    for (int32_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &v[i], sizeof bits);
        h = (h ^ bits) * 1099511628211u;
    }
    return h;
}

static int *question_of(exam_t *x, int rank, uint64_t id) { return &x->asked[rank][id % KEPT_IDS]; }

static void on_logits(void *ctx, uint64_t id, int32_t token_idx, const float *logits, int32_t vocab) {
    side_t *s = ctx;
    const int question = *question_of(s->x, s->rank, id);
    uint64_t *want = &s->x->q[question].hash[token_idx];
    const uint64_t got = hash_logits(logits, vocab);
    if (s->x->is_base) *want = got;
    CHECK(*want == got, "rank %d, request %llu, token %d: logits differ from those of one rank", s->rank, (unsigned long long)id,
          token_idx);
    s->x->n_logits[s->rank]++;
}

static void on_event(void *ctx, const epx_event_t *ev) {
    (void)ctx;
    CHECK(ev->finish != EPX_FINISH_ERROR && ev->token >= 0, "%s", ev->error ? ev->error : "no token");
}

static void submit(side_t *s, epx_rank_t *r, int question, uint64_t id) {
    const question_t *q = &s->x->q[question];
    epx_request_t req = {.id = id, .prompt = q->prompt, .n_prompt = q->n_prompt, .max_new_tokens = q->n_new, .ignore_eos = 1};
    epx_sampling_init(&req.sampling);
    req.sampling.temperature = 0;
    *question_of(s->x, s->rank, id) = question;
    CHECK_OK(epx_rank_submit(r, &req));
}

/* One question after the other on `rank` 0, nobody else has any. */
static void body_single(void *ctx, int rank, epx_rank_t *r) {
    side_t side = {ctx, rank};
    epx_rank_stats_t st;
    epx_rank_set_logits_hook(r, on_logits, &side);
    for (int i = 0; i < N_QUESTIONS; i++) {
        if (rank == 0) submit(&side, r, i, (uint64_t)i);
        run_until_idle(r, on_event, &side);
    }
    epx_rank_stats(r, &st);
    CHECK(rank == 0 || st.n_prefill_tokens + st.n_decode_tokens == 0, "rank %d was to be idle", rank);
}

static void body_subsets(void *ctx, int rank, epx_rank_t *r) {
    side_t side = {ctx, rank};
    exam_t *x = ctx;
    epx_rank_stats_t st = {0};
    uint64_t n_tokens = 0, n_asked = 0, before;
    epx_rank_set_logits_hook(r, on_logits, &side);
    for (int step = 0; step < x->n_steps; step++) {
        const uint32_t d = epx_philox_u32(x->seed + (uint64_t)rank, (uint64_t)step);
        if (st.n_running + st.n_waiting < 2 && d % 3 == 0) submit(&side, r, (int)(d / 3 % N_QUESTIONS), n_asked++);
        CHECK(epx_rank_step(r, on_event, &side) >= 0, "%s", epx_last_error());
        before = n_tokens;
        epx_rank_stats(r, &st);
        n_tokens = st.n_prefill_tokens + st.n_decode_tokens;
        if (n_tokens > before) __atomic_fetch_or(&x->busy[step], (uint8_t)(1u << rank), __ATOMIC_RELAXED);
    }
    run_until_idle(r, on_event, &side);
    epx_rank_stats(r, &st);
    x->n_steps_of[rank] += st.n_steps;
    CHECK(st.kv_used_tokens == 0 && st.n_running + st.n_waiting == 0, "something is left");
}

static void make_questions(exam_t *x) {
    uint64_t at = 0;
    for (int i = 0; i < N_QUESTIONS; i++) {
        question_t *q = &x->q[i];
        q->n_prompt = 1 + (int32_t)(epx_philox_u32(x->seed, at++) % MAX_PROMPT);
        q->n_new = 1 + (int32_t)(epx_philox_u32(x->seed, at++) % MAX_NEW);
        for (int k = 0; k < q->n_prompt; k++) q->prompt[k] = (int32_t)(epx_philox_u32(x->seed, at++) % VOCAB);
    }
}

static epx_rank_config_t config(int w, int halves) {
    epx_rank_config_t c = small_config(QWEN, w);
    c.n_threads = 1;
    c.max_running = 4;
    c.chunk_tokens = 8;
    c.max_total_tokens = 1024;
    c.two_batch_overlap = halves;
    c.moe_a2a_backend = halves ? "none" : "pplx";
    return c;
}

static void check_subsets(exam_t *x, int n_steps) {
    int n_of[1 << W] = {0}, idle_steps = 0;
    x->n_steps = n_steps;
    x->busy = calloc((size_t)n_steps, 1);
    CHECK(x->busy, "no memory");
    for (int halves = 0; halves < 2; halves++) {
        const epx_rank_config_t c = config(W, halves);
        x->n_steps = halves ? n_steps / 2 : n_steps - n_steps / 2;
        memset(x->busy, 0, (size_t)x->n_steps);
        with_ranks(&c, body_subsets, x);
        for (int i = 0; i < x->n_steps; i++) n_of[x->busy[i]]++;
    }
    for (int m = 0; m < 1 << W; m++) {
        CHECK(n_of[m] > n_steps / 500, "only %d of %d steps had tokens on the ranks %x", n_of[m], n_steps, (unsigned)m);
        if (m != (1 << W) - 1) idle_steps += n_of[m];
    }
    for (int r = 1; r < W; r++) CHECK(x->n_steps_of[r] == x->n_steps_of[0], "rank %d counts other steps than rank 0", r);
    printf("%d steps of %d ranks, in %d of them some rank had no token, each subset at least %d times; %llu logits, all those of "
           "one "
           "rank\n",
           n_steps, W, idle_steps, n_steps / 500,
           (unsigned long long)(x->n_logits[0] + x->n_logits[1] + x->n_logits[2] + x->n_logits[3]));
    free(x->busy);
}

int main(int argc, char **argv) {
    static exam_t x;
    epx_rank_config_t c = config(1, 0);
    const int n_steps = argc == 2 ? atoi(argv[1]) : 1000;
    CHECK(n_steps >= 1000, "usage: model_idle [STEPS], at least 1000");
    x.seed = test_seed();
    make_questions(&x);
    x.is_base = 1;
    with_ranks(&c, body_single, &x);
    x.is_base = 0;
    for (int halves = 0; halves < 2; halves++) {
        c = config(W, halves);
        with_ranks(&c, body_single, &x);
    }
    printf("%d requests on one of %d ranks, the others idle: the logits of one rank, bit for bit\n", 2 * N_QUESTIONS, W);
    memset(x.n_logits, 0, sizeof x.n_logits);
    check_subsets(&x, n_steps);
    return 0;
}
