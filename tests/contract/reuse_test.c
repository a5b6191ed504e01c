/* 1,000 exchanges on one plan with changing routing, T and delays; every backend, threads and processes.
 * Usage: contract_reuse threads | processes [STEPS] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/harness/components.h"
#include "tests/harness/exchange.h"

enum { N_CASES = 4 };

typedef struct {
    const char *backend, *transport;
    int n_steps;
} reuse_t;

static void reuse_case(const reuse_t *u, int which, int n_ranks, th_case_t *out) {
    static const epx_dtype_t token[N_CASES] = {EPX_F32, EPX_BF16, EPX_BF16, EPX_F32};
    static const epx_dtype_t wire[N_CASES] = {EPX_F32, EPX_BF16, EPX_FP8_E4M3, EPX_F32};
    static const unsigned opts[N_CASES] = {TH_REGISTERED, TH_HALVES | TH_DELAYS, TH_REGISTERED | TH_HALVES,
                                           TH_DELAYS | TH_HISTOGRAM};
    *out =
        (th_case_t){.backend = u->backend, .opts = opts[which], .n_steps = u->n_steps, .seed = th_seed() * 31 + (uint64_t)which};
    out->shape = (th_shape_t){.n_ranks = n_ranks,
                              .max_tokens = 3,
                              .hidden = which == 2 ? 130 : 24,
                              .top_k = 3,
                              .n_experts = 7,
                              .token = token[which],
                              .wire = wire[which],
                              .expert = token[which],
                              .combine = token[which],
                              .layout = which % 2 ? EPX_LAYOUT_EXPERT_MAJOR : EPX_LAYOUT_LISTS,
                              .mode = which / 2 ? EPX_COMBINE_PARTIAL : EPX_COMBINE_EXACT};
}

static int rank_body(th_rank_t *r) {
    const reuse_t *u = r->arg;
    epx_world_config_t cfg;
    epx_world_t *w = NULL;
    epx_group_t *g = NULL;
    th_world_config(r, u->transport, &cfg);
    TH_OK(r, epx_world_create(&cfg, &w));
    TH_OK(r, epx_group_create(w, NULL, 0, -1, &g));
    int rc = 0;
    for (int i = 0; rc == 0 && i < N_CASES; i++) {
        th_case_t c;
        reuse_case(u, i, r->n_ranks, &c);
        rc = th_case_run(r, g, &c);
    }
    epx_group_destroy(g);
    epx_world_destroy(w);
    return rc;
}

int main(int argc, char **argv) {
    const char *backends[TH_MAX_COMPONENTS];
    th_mode_t mode = argc > 1 && strcmp(argv[1], "processes") == 0 ? TH_PROCESSES : TH_THREADS;
    int n_steps = argc > 2 ? atoi(argv[2]) : 1000, n_bad = 0, n_backends = th_components("backend", backends);
    th_print_seed();
    for (int i = 0; i < n_backends; i++) {
        if (mode == TH_PROCESSES && th_needs_one_process(backends[i])) continue;
        for (int n_ranks = 2; n_ranks <= 3; n_ranks++) {
            reuse_t u = {backends[i], getenv("EPX_EMULATED_HOSTS") ? "ucx" : "shm", n_steps};
            int bad = th_launch(mode, n_ranks, rank_body, &u, 100, NULL);
            if (bad) fprintf(stderr, "FAILED: %s, %s, W=%d\n", backends[i], th_mode_name(mode), n_ranks);
            n_bad += bad != 0;
        }
    }
    return n_bad != 0 || n_backends == 0;
}
