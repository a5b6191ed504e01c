/* Exact combine: the logits of every position have the same bits for any number of ranks and any backend, in every mode, with
 * experts in several groups of ranks, and when steps run in two halves; pre-reduced combine stays within rounding of them. Ranks
 * without tokens take part. */
#include <math.h>
#include <string.h>

#include "tests/model/harness.h"

enum { N_PROMPTS = 3, MAX_LEN = 60 };

typedef struct {
    int vocab;
    int32_t prompts[N_PROMPTS][MAX_LEN];
    int32_t n[N_PROMPTS];
    float *logits[N_PROMPTS]; /* of this run */
    int w;
} run_t;

/* Prompt i runs on rank i mod w; the other ranks have no tokens then. Two prompts run at once when w allows. */
static void body(void *ctx, int rank, epx_rank_t *r) {
    run_t *c = ctx;
    for (int i = 0; i < N_PROMPTS; i++) {
        int mine = i % c->w == rank;
        CHECK_OK(epx_rank_logits(r, c->prompts[i], mine ? c->n[i] : 0, c->n[i], mine ? c->logits[i] : NULL));
    }
    int i = rank < N_PROMPTS ? rank : 0, has = rank < N_PROMPTS; /* all together: every rank has its own prompt */
    int32_t max_n = 0;
    for (int k = 0; k < N_PROMPTS; k++) max_n = c->n[k] > max_n ? c->n[k] : max_n;
    float *again = malloc((size_t)MAX_LEN * (size_t)c->vocab * sizeof *again);
    CHECK(again, "no memory");
    CHECK_OK(epx_rank_logits(r, c->prompts[i], has ? c->n[i] : 0, max_n, again));
    if (has && i % c->w == rank)
        CHECK(memcmp(again, c->logits[i], (size_t)c->n[i] * (size_t)c->vocab * sizeof *again) == 0,
              "w %d: prompt %d alone and with others differ", c->w, i);
    free(again);
}

static void run(const char *model, run_t *c, int w, const char *backend, epx_combine_t combine, int halves) {
    epx_rank_config_t cfg = small_config(model, w);
    cfg.two_batch_overlap = halves;
    cfg.n_threads = 1;
    cfg.moe_a2a_backend = backend;
    cfg.combine = combine;
    cfg.chunk_tokens = 37;
    c->w = w;
    for (int i = 0; i < N_PROMPTS; i++) memset(c->logits[i], 0xFF, (size_t)c->n[i] * (size_t)c->vocab * sizeof(float));
    with_ranks(&cfg, body, c);
}

/* The same with experts in groups of ep ranks and a mode of deepep; decodes and ends of prompts have an exchange of their own. */
static void run_deepep(const char *model, run_t *c, int w, int ep, const char *mode, int halves) {
    epx_rank_config_t cfg = small_config(model, w);
    cfg.n_threads = 1;
    cfg.ep = ep;
    cfg.moe_a2a_backend = "deepep";
    cfg.deepep_mode = mode;
    cfg.chunk_tokens = 17;
    cfg.max_running = 12; /* chunks of up to 12 rows count as decodes here */
    cfg.two_batch_overlap = halves;
    c->w = w;
    for (int i = 0; i < N_PROMPTS; i++) memset(c->logits[i], 0xFF, (size_t)c->n[i] * (size_t)c->vocab * sizeof(float));
    with_ranks(&cfg, body, c);
}

static void check_same(const run_t *got, const run_t *base, const char *model, const char *backend) {
    for (int i = 0; i < N_PROMPTS; i++)
        CHECK(memcmp(got->logits[i], base->logits[i], (size_t)base->n[i] * (size_t)base->vocab * sizeof(float)) == 0,
              "%s: %d ranks, %s: logits of prompt %d differ from one rank's", model, got->w, backend, i);
}

static double largest_difference(const run_t *a, const run_t *b) {
    double worst = 0;
    for (int i = 0; i < N_PROMPTS; i++)
        for (int64_t k = 0; k < (int64_t)a->n[i] * a->vocab; k++) {
            double d = fabs((double)a->logits[i][k] - (double)b->logits[i][k]);
            if (!(d <= worst)) worst = d;
        }
    return worst;
}

static run_t make(const char *model, int vocab) {
    char path[512];
    json_error_t e;
    run_t c = {.vocab = vocab};
    snprintf(path, sizeof path, "%s/reference.json", model);
    json_t *j = json_load_file(path, 0, &e);
    CHECK(j, "%s", path);
    for (int i = 0; i < N_PROMPTS; i++) {
        int32_t n;
        int32_t *ids = json_ids(json_array_get(json_object_get(j, "prompts"), (size_t)i + 1), &n);
        c.n[i] = n < MAX_LEN ? n : MAX_LEN;
        memcpy(c.prompts[i], ids, (size_t)c.n[i] * sizeof ids[0]);
        c.logits[i] = malloc((size_t)MAX_LEN * (size_t)vocab * sizeof(float));
        CHECK(c.logits[i], "no memory");
        free(ids);
    }
    json_decref(j);
    return c;
}

static void drop(run_t *c) {
    for (int i = 0; i < N_PROMPTS; i++) free(c->logits[i]);
}

static void check_model(const char *model, int vocab, int w_step) {
    static const char *const backends[] = {"auto", "pplx", "none"};
    run_t base = make(model, vocab), got = make(model, vocab);
    int n_runs = 0;
    double worst = 0;
    run(model, &base, 1, "auto", EPX_COMBINE_EXACT, 0);
    for (int w = 1; w <= 4; w += w < 2 ? 1 : w_step) {
        for (int b = 0; b < 3; b++, n_runs++) {
            run(model, &got, w, backends[b], EPX_COMBINE_EXACT, 0);
            check_same(&got, &base, model, backends[b]);
        }
        for (int b = 1; b < 3; b++, n_runs++) {
            run(model, &got, w, backends[b], EPX_COMBINE_EXACT, 1);
            check_same(&got, &base, model, "in halves");
        }
        for (int ep = 1; ep <= w; ep++) {
            static const char *const modes[] = {"normal", "auto", "low_latency"};
            for (int k = 0; w % ep == 0 && k < (ep == w ? 3 : 1); k++, n_runs++) {
                run_deepep(model, &got, w, ep, modes[(k + ep) % 3], k == 1);
                check_same(&got, &base, model, modes[(k + ep) % 3]);
            }
        }
        run(model, &got, w, "pplx", EPX_COMBINE_PARTIAL, w > 2);
        worst = fmax(worst, largest_difference(&got, &base));
    }
    printf("%s: %d runs bit-identical; pre-reduced differs by at most %.2e\n", model, n_runs, worst);
    CHECK(worst <= 1e-3, "pre-reduced combine is too far");
    drop(&base);
    drop(&got);
}

int main(int argc, char **argv) {
    if (argc == 2) {
        check_model(reference_model(argv[1]), 512, 2); /* 1, 2, 4 ranks */
        return 0;
    }
    check_model(QWEN, 512, 1);
    check_model(TINY, 4096, 1);
    return 0;
}
