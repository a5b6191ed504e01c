/* Serving for a long time under pressure: four rank processes with small KV pools, requests that come at random times, singly and
 * in bursts, with random lengths, shared prefixes, end tokens or not, greedy or sampled; some are cancelled. Every answer must be
 * the one that the same request gets alone on one rank without prefix cache; a cancelled one must be its beginning. No request
 * may stay, and the ranks' memory must not grow. In two layouts: DP attention, then heads divided over two ranks, mixed chunks
 * and steps in halves. Usage: server_soak SECONDS; EPX_SOAK_SECONDS goes first. Seed: EPX_TEST_SEED. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/philox.h"
#include "tests/server/front_util.h"

#define TINY EPX_SOURCE_DIR "/models/tinymoe-math"

enum {
    N_POOL = 96,
    MAX_PROMPT = 180,
    MAX_NEW = 60,
    VOCAB = 4096,
    MAX_LIVE = 96,
    N_SLOTS = 8192,
    STUCK_STEPS = 20000,
    STALL_S = 600,
    ROUND_S = 45,
    TICK_US = 2000
};
enum { KV_TOKENS = 560 }; /* what a rank's pool holds */

#define FAIL(...)                     \
    do {                              \
        fprintf(stderr, __VA_ARGS__); \
        fputc('\n', stderr);          \
        exit(1);                      \
    } while (0)

typedef struct {
    int32_t prompt[MAX_PROMPT], n_prompt, max_new;
    int ignore_eos;
    epx_sampling_t sampling;
    int32_t out[MAX_NEW]; /* alone */
    int n_out;            /* 0: not known yet */
    epx_finish_t finish;
} question_t;

/* What has come for a request, by id; filled by the reader thread. */
typedef struct {
    uint64_t id;
    int n_tokens, ended;
    int32_t tokens[MAX_NEW + 1];
    epx_finish_t finish;
    char error[256];
} slot_t;

typedef struct {
    uint64_t id, start_step; /* of rank 0 */
    int question, cancel_at; /* tokens after which it is cancelled; -1: never */
    int cancelled;
} live_t;

typedef struct {
    pthread_mutex_t lock;
    epx_cluster_t *cluster;
    slot_t slots[N_SLOTS];
    char failure[512];
    int lost;
    uint64_t event_ns; /* of the last event */
} side_t;

typedef struct {
    side_t alone, four;
    question_t pool[N_POOL];
    int n_pool; /* of these in use: all but in a short run */
    int asked;  /* the question that is being answered alone; -1: none */
    uint64_t asked_id;
    uint64_t n_questions;
    live_t live[MAX_LIVE];
    int n_live;
    uint64_t seed, at;
    uint64_t n_answers, n_cancelled, n_tokens;
    uint64_t warm_bytes, most_bytes; /* of the ranks, when warm and since then */
} soak_t;

static soak_t S;

static uint32_t draw(uint32_t n) { return epx_philox_u32(S.seed, S.at++) % n; }

/* ---- events ---- */

static void on_event(void *ctx, const epx_event_t *ev) {
    side_t *c = ctx;
    slot_t *s = &c->slots[ev->id % N_SLOTS];
    pthread_mutex_lock(&c->lock);
    c->event_ns = epx_now_ns();
    if (s->id != ev->id) *s = (slot_t){.id = ev->id};
    if (ev->token >= 0 && s->n_tokens <= MAX_NEW) s->tokens[s->n_tokens++] = ev->token;
    if (ev->finish != EPX_FINISH_NONE) {
        s->ended++;
        s->finish = ev->finish;
        snprintf(s->error, sizeof s->error, "%s", ev->error ? ev->error : "");
    }
    pthread_mutex_unlock(&c->lock);
}

static void on_failure(void *ctx, const char *message) {
    side_t *c = ctx;
    pthread_mutex_lock(&c->lock);
    c->lost = 1;
    snprintf(c->failure, sizeof c->failure, "%s", message);
    pthread_mutex_unlock(&c->lock);
}

static slot_t look(side_t *c, uint64_t id) {
    pthread_mutex_lock(&c->lock);
    slot_t s = c->slots[id % N_SLOTS];
    int lost = c->lost;
    uint64_t event_ns = c->event_ns;
    pthread_mutex_unlock(&c->lock);
    if (epx_now_ns() - event_ns > STALL_S * UINT64_C(1000000000)) FAIL("no request has moved for %d s", STALL_S);
    if (lost) FAIL("the ranks are lost: %s", c->failure);
    return s.id == id ? s : (slot_t){.id = id};
}

/* ---- clusters ---- */

/* Nobody was there before: the time without events begins now. */
static void touch(side_t *c) {
    pthread_mutex_lock(&c->lock);
    c->event_ns = epx_now_ns();
    pthread_mutex_unlock(&c->lock);
}

static void open_side(side_t *c, const epx_rank_config_t *rank) {
    epx_cluster_config_t cfg = {.size = sizeof cfg, .rank = *rank, .on_event = on_event, .on_failure = on_failure, .ctx = c};
    cfg.rank.model_path = TINY;
    cfg.rank.n_threads = 1;
    cfg.rank.timeout_ns = UINT64_C(60000000000);
    memset(c, 0, sizeof *c); /* ids begin anew */
    c->event_ns = epx_now_ns();
    pthread_mutex_init(&c->lock, NULL);
    if (epx_cluster_create(&cfg, &c->cluster) < 0) FAIL("ranks: %s", epx_error_message());
}

static uint64_t submit(side_t *c, const question_t *q, int dp_rank) {
    epx_request_t r = {.prompt = q->prompt,
                       .n_prompt = q->n_prompt,
                       .max_new_tokens = q->max_new,
                       .ignore_eos = q->ignore_eos,
                       .sampling = q->sampling};
    uint64_t id = 0;
    if (epx_cluster_submit(c->cluster, &r, dp_rank, &id) < 0) FAIL("submit: %s", epx_error_message());
    return id;
}

static void nap(unsigned us) { nanosleep(&(struct timespec){us / 1000000, (long)(us % 1000000) * 1000}, NULL); }

/* ---- questions, and their answers alone ---- */

static void make_question(question_t *q) {
    const int32_t family = (int32_t)draw(5), shared = 16 + (int32_t)draw(120);
    memset(q, 0, sizeof *q);
    q->n_prompt = 1 + (int32_t)draw(MAX_PROMPT);
    q->max_new = 1 + (int32_t)draw(MAX_NEW);
    for (int32_t i = 0; i < q->n_prompt; i++) q->prompt[i] = i < shared ? (family * 701 + i * 13) % VOCAB : (int32_t)draw(VOCAB);
    q->ignore_eos = draw(4) > 0;
    epx_sampling_init(&q->sampling);
    q->sampling.temperature = draw(2) ? 0.0f : 0.9f;
    q->sampling.seed = draw(1000000);
}

static int is_live(int question) {
    for (int i = 0; i < S.n_live; i++)
        if (S.live[i].question == question) return 1;
    return 0;
}

/* One question after the other gets a new text that is answered alone, while the load goes on with the others. */
static void ask_alone(int question) {
    if (is_live(question)) return;
    make_question(&S.pool[question]);
    S.asked = question;
    S.asked_id = submit(&S.alone, &S.pool[question], -1);
    touch(&S.alone);
}

/* 1: the question that was asked has its answer. */
static int hear_alone(void) {
    const slot_t s = look(&S.alone, S.asked_id);
    question_t *q = &S.pool[S.asked];
    if (!s.ended) return 0;
    if (s.finish == EPX_FINISH_ERROR || s.n_tokens < 1) FAIL("alone: %s", s.error);
    memcpy(q->out, s.tokens, sizeof q->out);
    q->n_out = s.n_tokens;
    q->finish = s.finish;
    S.asked = -1;
    S.n_questions++;
    return 1;
}

static void fill_pool(void) {
    for (int i = 0; i < S.n_pool; i++) {
        ask_alone(i);
        while (!hear_alone()) nap(200);
    }
}

/* ---- load ---- */

static void check_answer(const live_t *l, const slot_t *s) {
    const question_t *q = &S.pool[l->question];
    const int whole = s->finish != EPX_FINISH_CANCELLED;
    if (s->finish == EPX_FINISH_ERROR) FAIL("request %llu: %s", (unsigned long long)l->id, s->error);
    if (s->ended != 1) FAIL("request %llu ended %d times", (unsigned long long)l->id, s->ended);
    if (!whole && !l->cancelled) FAIL("request %llu was cancelled by nobody", (unsigned long long)l->id);
    if (whole ? s->n_tokens != q->n_out || s->finish != q->finish : s->n_tokens > q->n_out)
        FAIL("request %llu: %d tokens, end %d; alone %d tokens, end %d", (unsigned long long)l->id, s->n_tokens, (int)s->finish,
             q->n_out, (int)q->finish);
    for (int i = 0; i < s->n_tokens; i++)
        if (s->tokens[i] != q->out[i])
            FAIL("request %llu: token %d is %d, alone %d (seed %llu)", (unsigned long long)l->id, i, s->tokens[i], q->out[i],
                 (unsigned long long)S.seed);
    S.n_answers += (uint64_t)whole;
    S.n_cancelled += (uint64_t)!whole;
    S.n_tokens += (uint64_t)s->n_tokens;
}

/* Steps, not seconds: a loaded machine is slow, but a request that others overtake for ever is an error. */
static uint64_t steps_now(void) {
    epx_rank_stats_t stats[4];
    if (epx_cluster_reports(S.four.cluster, stats, NULL, 4) < 0) FAIL("reports: %s", epx_error_message());
    return stats[0].n_steps;
}

static void look_after(void) {
    const uint64_t step = steps_now();
    for (int i = 0; i < S.n_live; i++) {
        live_t *l = &S.live[i];
        slot_t s = look(&S.four, l->id);
        if (s.ended) {
            check_answer(l, &s);
            S.live[i--] = S.live[--S.n_live];
            continue;
        }
        if (!l->cancelled && l->cancel_at >= 0 && s.n_tokens >= l->cancel_at) {
            l->cancelled = 1;
            epx_cluster_cancel(S.four.cluster, l->id);
        }
        if (step > l->start_step + STUCK_STEPS)
            FAIL("request %llu is stuck after %d tokens: %llu steps since it came", (unsigned long long)l->id, s.n_tokens,
                 (unsigned long long)(step - l->start_step));
    }
}

static void add_request(int n_groups) {
    const int question = (int)draw((uint32_t)S.n_pool);
    if (S.pool[question].n_out == 0) return;
    const int cancel_at = draw(6) ? -1 : (int)draw((uint32_t)S.pool[question].max_new);
    if (S.n_live == 0) touch(&S.four);
    const uint64_t id = submit(&S.four, &S.pool[question], draw(2) ? -1 : (int)draw((uint32_t)n_groups));
    S.live[S.n_live++] = (live_t){id, steps_now(), question, cancel_at, 0};
}

/* Random gaps; now and then a burst, now and then nothing for a while, so that ranks go idle and wake up. */
static void load(uint64_t until_ns, int n_groups) {
    int pause = 0;
    while (epx_now_ns() < until_ns) {
        const int burst = draw(400) == 0 ? 30 : draw(6) == 0;
        if (draw(1500) == 0) pause = 300;
        if (pause > 0) pause--;
        for (int i = 0; i < burst && pause == 0 && S.n_live < MAX_LIVE; i++) add_request(n_groups);
        look_after();
        if (S.asked >= 0) (void)hear_alone();
        else ask_alone((int)draw((uint32_t)S.n_pool));
        nap(TICK_US);
    }
    while (S.asked >= 0 && !hear_alone()) nap(TICK_US);
    while (S.n_live) {
        look_after();
        nap(TICK_US);
    }
}

/* ---- memory ---- */

/* Private and shared memory of a process without mapped files, in bytes. */
static uint64_t memory_of(int pid) {
    char path[64], line[256];
    unsigned long long kb, sum = 0;
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    FILE *f = fopen(path, "r");
    if (!f) FAIL("rank process %d is gone", pid);
    while (fgets(line, sizeof line, f))
        if (sscanf(line, "RssAnon: %llu", &kb) == 1 || sscanf(line, "RssShmem: %llu", &kb) == 1) sum += kb;
    fclose(f);
    return sum * 1024;
}

static uint64_t memory_of_ranks(int *out_n) {
    epx_cluster_status_t st;
    uint64_t sum = 0;
    epx_cluster_status(S.four.cluster, &st);
    for (int i = 0; i < st.n_ranks; i++) sum += memory_of(st.pids[i]);
    *out_n = st.n_ranks;
    return sum;
}

static void watch_memory(double seconds, double total_s) {
    int n = 0;
    const uint64_t now = memory_of_ranks(&n), slack = (uint64_t)n << 20;
    if (seconds < total_s / 3 || S.warm_bytes == 0) S.warm_bytes = now > S.warm_bytes ? now : S.warm_bytes;
    if (now > S.most_bytes) S.most_bytes = now;
    printf("  %6.0f s: %llu answers, %llu cancelled, %llu tokens, all as alone; %llu new questions; ranks hold %.1f MB\n",
           seconds, (unsigned long long)S.n_answers, (unsigned long long)S.n_cancelled, (unsigned long long)S.n_tokens,
           (unsigned long long)S.n_questions, (double)now / 1e6);
    fflush(stdout);
    if (now > S.warm_bytes + S.warm_bytes / 50 + slack)
        FAIL("memory grows: the ranks hold %.1f MB, %.1f MB when warm", (double)now / 1e6, (double)S.warm_bytes / 1e6);
}

static void check_stats(const char *what, double seconds) {
    epx_rank_stats_t stats[4];
    uint64_t retracted = 0, cached = 0, halved = 0;
    if (epx_cluster_stats(S.four.cluster, stats, 4) < 0) FAIL("statistics: %s", epx_error_message());
    for (int i = 0; i < 4; i++) {
        if (stats[i].n_running || stats[i].n_waiting || stats[i].kv_used_tokens) FAIL("rank %d: something is left", i);
        retracted += stats[i].n_retracted;
        cached += stats[i].n_cached_tokens;
        halved += stats[i].n_halved_steps;
    }
    printf(
        "%s: %.0f s, %llu answers and %llu cancelled ones as alone; %llu retractions, %llu tokens from the cache, %llu of %llu "
        "steps in halves; memory of the ranks %.1f MB when warm, at most %.1f MB\n",
        what, seconds, (unsigned long long)S.n_answers, (unsigned long long)S.n_cancelled, (unsigned long long)retracted,
        (unsigned long long)cached, (unsigned long long)(halved / 4), (unsigned long long)stats[0].n_steps,
        (double)S.warm_bytes / 1e6, (double)S.most_bytes / 1e6);
    if (S.n_answers < 10 || cached == 0 || (seconds > 30 && retracted == 0))
        FAIL("too little has happened: %llu answers", (unsigned long long)S.n_answers);
}

/* ---- layouts ---- */

typedef struct {
    const char *what;
    int dp, mixed, halves;
} layout_t;

static void run(const layout_t *l, double seconds) {
    const uint64_t start = epx_now_ns(), end = start + (uint64_t)(seconds * 1e9);
    epx_rank_config_t c;
    epx_rank_config_init(&c);
    c.tp = c.ep = 4;
    c.dp = l->dp;
    c.moe_a2a_backend = "pplx";
    c.max_running = 12;
    c.chunk_tokens = 64;
    c.max_total_tokens = KV_TOKENS;
    c.conservativeness = 0.1;
    c.mixed_chunk = l->mixed;
    c.two_batch_overlap = l->halves;
    c.schedule_policy = l->mixed ? "lpm" : "fcfs";
    open_side(&S.four, &c);
    S.n_answers = S.n_cancelled = S.n_tokens = S.warm_bytes = S.most_bytes = 0;
    S.n_questions = 0;
    do {
        load(epx_now_ns() + (uint64_t)((seconds < ROUND_S ? seconds : ROUND_S) * 1e9), l->dp);
        watch_memory((double)(epx_now_ns() - start) * 1e-9, seconds);
    } while (epx_now_ns() < end);
    check_stats(l->what, (double)(epx_now_ns() - start) * 1e-9);
    epx_cluster_destroy(S.four.cluster);
}

int main(int argc, char **argv) {
    static const layout_t layouts[] = {{"4 ranks, dp 4", 4, 0, 0}, {"4 ranks, dp 2, mixed, in halves", 2, 1, 1}};
    const int special = front_special_main(argc, argv);
    const char *text = getenv("EPX_SOAK_SECONDS"), *seed = getenv("EPX_TEST_SEED");
    if (special >= 0) return special;
    const double seconds = strtod(text ? text : argc == 2 ? argv[1] : "0", NULL);
    if (!(seconds >= 1)) FAIL("usage: server_soak SECONDS (at least 1), or EPX_SOAK_SECONDS in the environment");
    S.seed = seed ? strtoull(seed, NULL, 10) : 1;
    S.n_pool = seconds < ROUND_S ? N_POOL / 4 : N_POOL;
    printf("EPX_TEST_SEED=%llu, %.0f s\n", (unsigned long long)S.seed, seconds);
    S.asked = -1;
    epx_rank_config_t c;
    epx_rank_config_init(&c);
    c.disable_prefix_cache = 1;
    c.max_total_tokens = 4096;
    open_side(&S.alone, &c);
    fill_pool();
    for (int i = 0; i < 2; i++) run(&layouts[i], seconds / 2);
    epx_cluster_destroy(S.alone.cluster);
    if (!front_no_children()) FAIL("processes are left over");
    return 0;
}
