/* Cost of the scheduler alone at many running requests: next batch, books after it, tokens, ends and arrivals, with a KV pool and
 * the prefix cache, on a simulated clock (a step takes STEP_MS; requests arrive at random times so that the ranks stay full).
 * Usage: bench_sched [RUNNING [STEPS [JSON_FILE]]] */
#include <epx_commit.h> /* made by the build */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/philox.h"
#include "engine/sched/sched.h"

enum { MAX_RUNNING = 16384, PAGE = 16, CHUNK = 8192, MEAN_PROMPT = 256, MAX_NEW = 512, FAMILIES = 16, SEED = 3 };
static const double STEP_MS = 40;

#define FAIL(...)                     \
    do {                              \
        fprintf(stderr, __VA_ARGS__); \
        fputc('\n', stderr);          \
        exit(1);                      \
    } while (0)

typedef struct {
    epx_sched_t *s;
    epx_kv_pool_t *pool;
    uint64_t at, next_id;
    double now_ms, next_ms; /* simulated; of the next arrival */
    double gap_ms;
    uint64_t n_ended, n_prefill, n_decode;
} rig_t;

static uint32_t draw(rig_t *r, uint32_t n) { return epx_philox_u32(SEED, r->at++) % n; }

/* Half of a prompt is common to its family. */
static void submit(rig_t *r) {
    epx_seq_t *seq;
    const int32_t n = MEAN_PROMPT / 2 + (int32_t)draw(r, MEAN_PROMPT), max_new = 1 + (int32_t)draw(r, MAX_NEW);
    const int32_t family = (int32_t)draw(r, FAMILIES);
    int32_t *tokens = malloc((size_t)(n + max_new) * sizeof *tokens);
    if (!tokens) FAIL("no memory");
    for (int32_t i = 0; i < n; i++) tokens[i] = i < n / 2 ? family * 100000 + i : (int32_t)draw(r, 100000);
    const epx_sched_request_t q = {.id = r->next_id++, .tokens = tokens, .n_prompt = n, .max_new = max_new, .user = tokens};
    if (epx_sched_submit(r->s, &q, &seq) < 0) FAIL("submit: %s", epx_error_message());
}

static uint64_t cpu_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* One step: what the scheduler does for it, in processor time. Arrivals are made outside the time, submitted inside. */
static double step(rig_t *r) {
    epx_sched_batch_t b;
    static epx_seq_t *ended[MAX_RUNNING];
    static int32_t *texts[MAX_RUNNING];
    int n_ended = 0;
    while (r->next_ms <= r->now_ms) {
        submit(r);
        r->next_ms += -log(1 - draw(r, 1u << 20) / (double)(1u << 20)) * r->gap_ms;
    }
    const uint64_t start = cpu_ns();
    epx_sched_next(r->s, &b);
    epx_sched_computed(r->s, &b);
    for (int32_t i = 0; i < b.n_items; i++)
        if (b.items[i].last && epx_sched_token(r->s, b.items[i].seq, (int32_t)(r->at + (uint64_t)i) % 100000))
            ended[n_ended++] = b.items[i].seq;
    for (int i = 0; i < n_ended; i++) {
        texts[i] = ended[i]->user;
        epx_sched_release(r->s, ended[i]);
    }
    const double us = (double)(cpu_ns() - start) * 1e-3;
    for (int i = 0; i < n_ended; i++) free(texts[i]);
    r->now_ms += STEP_MS;
    r->n_ended += (uint64_t)n_ended;
    r->n_prefill += (uint64_t)b.n_prefill_rows;
    r->n_decode += (uint64_t)b.n_decode_rows;
    return us;
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    const int running = argc > 1 ? atoi(argv[1]) : 2048, n_steps = argc > 2 ? atoi(argv[2]) : 2000;
    double *us = calloc((size_t)(n_steps > 0 ? n_steps : 1), sizeof *us), sum = 0;
    rig_t r = {.next_id = 1};
    epx_sched_config_t c;
    epx_sched_stats_t st;
    if (!us || running < 1 || running > MAX_RUNNING || n_steps < 100)
        FAIL("usage: bench_sched [RUNNING [STEPS [JSON_FILE]]], to %d running, from 100 steps", MAX_RUNNING);
    epx_sched_config_init(&c, running, CHUNK, 4096);
    c.prefix_cache = 1;
    c.mixed = 1;
    r.gap_ms = STEP_MS * MAX_NEW / 2 / running * 0.9; /* a little more than leave, so that all places are taken */
    if (epx_kv_pool_create(running * (MEAN_PROMPT * 3 / 2 + MAX_NEW) / PAGE, PAGE, &r.pool) < 0 ||
        epx_sched_create(&c, r.pool, &r.s) < 0)
        FAIL("%s", epx_error_message());
    for (int i = 0; i < running; i++) submit(&r);
    while (epx_sched_n_running(r.s) < running) step(&r);
    for (int i = 0; i < MAX_NEW; i++) step(&r); /* until lengths are mixed */
    r.n_ended = r.n_prefill = r.n_decode = 0;
    for (int i = 0; i < n_steps; i++) sum += us[i] = step(&r);
    qsort(us, (size_t)n_steps, sizeof *us, ascending);
    epx_sched_stats(r.s, &st);
    const double p50 = us[n_steps / 2], p99 = us[n_steps * 99 / 100];
    printf(
        "%d running, %d waiting; %.1f rows decoded, %.1f prompt tokens, %.2f ends a step; %.2f of prompts from the cache, %llu "
        "retractions\n",
        (int)st.n_running, (int)st.n_waiting, (double)r.n_decode / n_steps, (double)r.n_prefill / n_steps,
        (double)r.n_ended / n_steps, (double)st.n_cached_tokens / (double)st.n_prefix_tokens, (unsigned long long)st.n_retracted);
    printf("scheduler: %.1f us a step (median), %.1f mean, %.1f p99, %.1f most, of %d steps\n", p50, sum / n_steps, p99,
           us[n_steps - 1], n_steps);
    FILE *json = argc > 3 ? fopen(argv[3], "a") : NULL;
    if (json) {
        time_t now = time(NULL);
        char date[32];
        strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
        fprintf(json,
                "{\"bench\":\"scheduler\",\"commit\":\"%s\",\"date\":\"%s\",\"running\":%d,\"steps\":%d,\"us_p50\":%.1f,\"us_"
                "mean\":%.1f,"
                "\"us_p99\":%.1f,\"us_max\":%.1f,\"ends_per_step\":%.2f,\"prompt_tokens_per_step\":%.1f}\n",
                EPX_COMMIT, date, running, n_steps, p50, sum / n_steps, p99, us[n_steps - 1], (double)r.n_ended / n_steps,
                (double)r.n_prefill / n_steps);
        fclose(json);
    }
    return 0;
}
