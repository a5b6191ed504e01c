/* Long runs of the exchange, every result against the oracle.
 * Usage: contract_soak alternate threads|processes STEPS   one plan, two ranks, STEPS exchanges with changing routing and T
 *        contract_soak edges                               W 1..16, T per rank in {0, 1, T - 1, T}, K up to 16, E in {W..8W,
 * prime} contract_soak fuzz threads|processes SECONDS      random plans: shape, dtypes, layout, mode, options, placement The seed
 * is printed; EPX_CONTRACT_SEED sets it. SIGKILL in each phase is contract_faults. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "tests/harness/components.h"
#include "tests/harness/exchange.h"

enum { MAX_SLOTS = 160, RANKS_MAX = 16 };

typedef struct {
    th_case_t c;
    int slot_rank[MAX_SLOTS];
} soak_t;

static int rank_body(th_rank_t *r) {
    soak_t *s = r->arg;
    epx_world_config_t cfg;
    epx_world_t *w = NULL;
    epx_group_t *g = NULL;
    th_world_config(r, r->n_ranks > 1 ? "shm" : NULL, &cfg);
    TH_OK(r, epx_world_create(&cfg, &w));
    TH_OK(r, epx_group_create(w, NULL, 0, -1, &g));
    int rc = th_case_run(r, g, &s->c);
    epx_group_destroy(g);
    epx_world_destroy(w);
    return rc;
}

static int run(th_mode_t mode, soak_t *s, unsigned timeout_s) {
    char text[256];
    int bad = th_launch(mode, s->c.shape.n_ranks, rank_body, s, timeout_s, NULL);
    if (bad)
        fprintf(stderr, "FAILED: %s, %s, E %d, T %d\n", th_mode_name(mode), th_case_text(&s->c, text, sizeof text),
                s->c.shape.n_experts, s->c.shape.max_tokens);
    return bad != 0;
}

static soak_t plain(const char *backend, int w, int t, int h, int k, int e) {
    soak_t s = {.c = {.backend = backend, .n_steps = TH_N_KINDS, .seed = th_seed()}};
    s.c.shape = (th_shape_t){.n_ranks = w,
                             .max_tokens = t,
                             .hidden = h,
                             .top_k = k,
                             .n_experts = e,
                             .token = EPX_F32,
                             .wire = EPX_F32,
                             .expert = EPX_F32,
                             .combine = EPX_F32};
    return s;
}

static int alternate(th_mode_t mode, int n_steps) {
    soak_t s = plain("onesided", 2, 3, 8, 2, 5);
    s.c.n_steps = n_steps;
    s.c.timeout_ns = UINT64_C(60000000000);
    int bad = run(mode, &s, 3600);
    printf("%d alternations on one plan, %s: %s\n", n_steps, th_mode_name(mode), bad ? "FAILED" : "ok");
    return bad;
}

static int next_prime(int n) {
    for (;; n++) {
        int d = 2;
        while (d * d <= n && n % d) d++;
        if (d * d > n) return n;
    }
}

/* T = 3, so that 0, 1, T - 1 and T are all there are: the uneven kinds give each rank one of them independently. */
static int edges(void) {
    static const char *const backends[] = {"onesided", "collective"};
    int n_bad = 0, n = 0;
    for (int w = 1; w <= RANKS_MAX; w++) {
        const int es[] = {w, 2 * w + 1, 5 * w, 8 * w, next_prime(4 * w + 2)};
        for (int i = 0; i < 16 * 5; i++, n++) {
            int e = es[i % 5], k = 1 + i / 5;
            soak_t s = plain(backends[(i / 5 + i) % 2], w, 3, 12, k < e ? k : e, e);
            s.c.n_steps = 2 * TH_N_KINDS;
            s.c.seed += (uint64_t)n * 977;
            s.c.shape.mode = n % 3 ? EPX_COMBINE_EXACT : EPX_COMBINE_PARTIAL;
            s.c.shape.layout = n % 2 ? EPX_LAYOUT_LISTS : EPX_LAYOUT_EXPERT_MAJOR;
            n_bad += run(TH_THREADS, &s, 300);
        }
    }
    printf("edge sets: %d plans of 1 to %d ranks, %d routings each: %s\n", n, RANKS_MAX, 2 * TH_N_KINDS, n_bad ? "FAILED" : "ok");
    return n_bad;
}

/* Every combination of 0, 1, T - 1 and T tokens over the ranks, one after the other on one plan: what a rank sends must not
 * depend on what the others have. */
static int combination_body(th_rank_t *r) {
    soak_t *s = r->arg;
    epx_world_config_t cfg;
    epx_plan_config_t pc;
    epx_world_t *w = NULL;
    epx_group_t *g = NULL;
    epx_plan_t *p = NULL;
    th_tally_t tally = {0};
    th_world_config(r, NULL, &cfg);
    TH_OK(r, epx_world_create(&cfg, &w));
    TH_OK(r, epx_group_create(w, NULL, 0, -1, &g));
    th_plan_config(&s->c, &pc);
    TH_OK(r, epx_plan_create(g, &pc, &p));
    int rc = 0;
    for (uint64_t i = 0; rc == 0 && i < UINT64_C(1) << 2 * r->n_ranks; i++)
        rc = th_step(r, p, &s->c, r->rank, TH_COUNTS, i, &tally);
    epx_plan_destroy(p);
    epx_group_destroy(g);
    epx_world_destroy(w);
    return rc;
}

static int combinations(void) {
    int n_bad = 0;
    for (int w = 1; w <= 6; w++) {
        soak_t s = plain("onesided", w, 5, 12, 3, 2 * w + 1);
        int bad = th_launch(TH_THREADS, w, combination_body, &s, 600, NULL);
        printf("every combination of 0, 1, 4, 5 tokens on %d ranks: %d exchanges: %s\n", w, 1 << 2 * w, bad ? "FAILED" : "ok");
        n_bad += bad != 0;
    }
    return n_bad;
}

/* Scales, replicated tokens, copies of experts. */
static void random_extras(soak_t *s, uint64_t seed) {
    static const int blocks[] = {128, 32, 1, 77, 512};
    uint64_t u[6];
    th_shape_t *c = &s->c.shape;
    for (int i = 0; i < 6; i++) u[i] = th_mix(seed ^ 0xE87A, (uint64_t)i);
    c->scale_format = (epx_scale_format_t)(u[0] % 2);
    if (c->layout != EPX_LAYOUT_LISTS) c->scale_layout = (epx_scale_layout_t)(u[1] % 2);
    c->scale_block = blocks[u[2] % 5];
    if (u[3] % 3 == 0) c->n_slots = c->n_experts + (int)(u[4] % 16);
    for (int r = 2; u[5] % 3 == 0 && r <= c->n_ranks; r++)
        if (c->n_ranks % r == 0) c->replicate = r;
}

static soak_t random_case(th_mode_t mode, uint64_t seed) {
    static const epx_dtype_t d[][4] = {{EPX_F32, EPX_F32, EPX_F32, EPX_F32},
                                       {EPX_BF16, EPX_BF16, EPX_BF16, EPX_BF16},
                                       {EPX_F16, EPX_F16, EPX_F16, EPX_F16},
                                       {EPX_BF16, EPX_FP8_E4M3, EPX_F32, EPX_BF16},
                                       {EPX_F32, EPX_FP8_E4M3, EPX_F32, EPX_F32},
                                       {EPX_BF16, EPX_BF16, EPX_F32, EPX_BF16},
                                       {EPX_BF16, EPX_FP8_E4M3, EPX_BF16, EPX_FP8_E4M3},
                                       {EPX_FP8_E4M3, EPX_FP8_E4M3, EPX_F32, EPX_BF16}};
    static const char *const backends[] = {"onesided", "collective", "ref"};
    uint64_t u[12];
    for (int i = 0; i < 12; i++) u[i] = th_mix(seed, (uint64_t)i);
    int w = 1 + (int)(u[0] % (mode == TH_THREADS ? 12 : 5)), e = w + (int)(u[1] % (uint64_t)(7 * w + 1)),
        k = 1 + (int)(u[2] % 16);
    soak_t s =
        plain(backends[u[3] % (mode == TH_THREADS ? 3 : 2)], w, 1 + (int)(u[4] % 9), 1 + (int)(u[5] % 300), k < e ? k : e, e);
    const epx_dtype_t *t = d[u[6] % (sizeof d / sizeof d[0])];
    s.c.shape.token = t[0];
    s.c.shape.wire = t[1];
    s.c.shape.expert = t[2];
    s.c.shape.combine = t[3];
    s.c.shape.mode = u[7] & 1 ? EPX_COMBINE_EXACT : EPX_COMBINE_PARTIAL;
    s.c.shape.layout = (epx_layout_t)(u[8] % 3);
    s.c.shape.align = s.c.shape.layout == EPX_LAYOUT_CONTIGUOUS ? 1 + (int)(u[8] / 3 % 17) : 1;
    s.c.opts = (unsigned)(u[9] % 64);
    if (s.c.shape.layout != EPX_LAYOUT_LISTS) s.c.opts &= ~(unsigned)TH_NO_COUNTS;
    s.c.seed = u[10];
    random_extras(&s, seed);
    for (int i = 0; i < th_n_slots(&s.c.shape); i++) s.slot_rank[i] = (int)(th_mix(u[11], (uint64_t)i) % (uint64_t)w);
    return s;
}

static int fuzz(th_mode_t mode, int seconds) {
    uint64_t end = epx_now_ns() + (uint64_t)seconds * 1000000000u, n = 0;
    int n_bad = 0;
    for (; n_bad == 0 && epx_now_ns() < end; n++) {
        soak_t s = random_case(mode, th_mix(th_seed(), n));
        if (n % 3 == 0) s.c.shape.slot_rank = s.slot_rank;
        n_bad += run(mode, &s, 120);
    }
    printf("fuzzed plans, %s: %llu plans of %d routings: %s\n", th_mode_name(mode), (unsigned long long)n, TH_N_KINDS,
           n_bad ? "FAILED" : "ok");
    return n_bad || n == 0;
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    th_mode_t mode = argc > 2 && strcmp(argv[2], "processes") == 0 ? TH_PROCESSES : TH_THREADS;
    int n = argc > 3 ? atoi(argv[3]) : 0;
    th_print_seed();
    if (strcmp(what, "alternate") == 0 && n > 0) return alternate(mode, n);
    if (strcmp(what, "edges") == 0) return edges() + combinations() != 0;
    if (strcmp(what, "fuzz") == 0 && n > 0) return fuzz(mode, n);
    fprintf(stderr, "usage: contract_soak alternate threads|processes STEPS | edges | fuzz threads|processes SECONDS\n");
    return 2;
}
