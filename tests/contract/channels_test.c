/* Several exchanges of one plan in flight: every channel against the oracle, with the halves of the channels interleaved.
 * Usage: contract_channels threads | processes */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/harness/components.h"
#include "tests/harness/exchange.h"

enum { MAX_CHANNELS = 4, N_ROUNDS = 40 };

typedef struct {
    const char *backend;
    int n_channels, which;
} channels_t;

typedef struct {
    th_case_t c;
    th_open_t *o;
    int next, n_done; /* half that is due; exchanges done */
} lane_t;

static void lane_case(const channels_t *a, int channel, int n_ranks, th_case_t *out) {
    *out = (th_case_t){.backend = a->backend,
                       .opts = TH_HALVES | (channel == 1 ? TH_REGISTERED | TH_ADD | TH_PARTIALS : TH_HISTOGRAM),
                       .n_channels = a->n_channels,
                       .channel = channel,
                       .seed = th_seed() + (uint64_t)channel};
    out->shape = (th_shape_t){.n_ranks = n_ranks,
                              .max_tokens = 4,
                              .hidden = 40,
                              .top_k = 3,
                              .n_experts = 7,
                              .token = EPX_BF16,
                              .wire = a->which == 1 ? EPX_FP8_E4M3 : EPX_BF16,
                              .expert = EPX_BF16,
                              .combine = EPX_BF16,
                              .layout = a->which == 2 ? EPX_LAYOUT_EXPERT_MAJOR : EPX_LAYOUT_LISTS,
                              .mode = a->which ? EPX_COMBINE_PARTIAL : EPX_COMBINE_EXACT};
}

/* Run the half that is due. */
static int advance(th_rank_t *r, epx_plan_t *p, lane_t *l, th_tally_t *tally) {
    uint64_t seed = th_mix(l->c.seed, (uint64_t)l->n_done);
    int half = l->next, rc;
    if (half == 0) rc = th_step_begin(r, p, &l->c, r->rank, (th_kind_t)(seed % TH_N_KINDS), seed, &l->o);
    else rc = th_step_half(r, p, &l->c, l->o, half);
    if (half == 3 || (rc != 0 && l->o)) {
        th_step_end(&l->c, l->o, tally);
        l->o = NULL;
        l->n_done++;
    }
    l->next = (half + 1) % 4;
    return rc;
}

/* All ranks make the same calls in an order drawn at random. */
static int same_order(th_rank_t *r, epx_plan_t *p, lane_t *lanes, int n, th_tally_t *tally) {
    for (int i = 0; i < N_ROUNDS * 4; i++)
        if (advance(r, p, &lanes[th_mix(th_seed(), (uint64_t)i) % (uint64_t)n], tally) != 0) return -1;
    for (int c = 0; c < n; c++)
        while (lanes[c].next != 0)
            if (advance(r, p, &lanes[c], tally) != 0) return -1;
    return 0;
}

/* Each rank takes the channels in an order of its own; sends come before receives, so nobody waits in a ring. */
static int own_order(th_rank_t *r, epx_plan_t *p, lane_t *lanes, int n, th_tally_t *tally) {
    for (int i = 0; i < N_ROUNDS; i++) {
        for (int half = 0; half < 4; half++) {
            uint64_t first = th_mix(th_seed() + (uint64_t)r->rank, (uint64_t)(i * 4 + half));
            for (int c = 0; c < n; c++)
                if (advance(r, p, &lanes[(first + (uint64_t)c) % (uint64_t)n], tally) != 0) return -1;
        }
    }
    return 0;
}

static int run(th_rank_t *r, epx_group_t *g, const channels_t *a) {
    lane_t lanes[MAX_CHANNELS];
    epx_plan_config_t cfg;
    epx_plan_t *p = NULL;
    th_tally_t tally = {0};
    memset(lanes, 0, sizeof lanes);
    for (int c = 0; c < a->n_channels; c++) lane_case(a, c, r->n_ranks, &lanes[c].c);
    th_plan_config(&lanes[0].c, &cfg);
    TH_OK(r, epx_plan_create(g, &cfg, &p));
    int rc = same_order(r, p, lanes, a->n_channels, &tally);
    if (rc == 0) rc = own_order(r, p, lanes, a->n_channels, &tally);
    for (int c = 0; c < a->n_channels; c++)
        if (lanes[c].o) th_step_end(&lanes[c].c, lanes[c].o, &tally);
    if (rc != 0) epx_plan_abort(p);
    epx_plan_destroy(p);
    return rc;
}

static int rank_body(th_rank_t *r) {
    epx_world_config_t cfg;
    epx_world_t *w = NULL;
    epx_group_t *g = NULL;
    th_world_config(r, NULL, &cfg);
    TH_OK(r, epx_world_create(&cfg, &w));
    TH_OK(r, epx_group_create(w, NULL, 0, -1, &g));
    int rc = run(r, g, r->arg);
    epx_group_destroy(g);
    epx_world_destroy(w);
    return rc;
}

int main(int argc, char **argv) {
    const char *backends[TH_MAX_COMPONENTS];
    th_mode_t mode = argc > 1 && strcmp(argv[1], "processes") == 0 ? TH_PROCESSES : TH_THREADS;
    int n_bad = 0, n_backends = th_components("backend", backends);
    th_print_seed();
    for (int i = 0; i < n_backends; i++) {
        if (mode == TH_PROCESSES && th_needs_one_process(backends[i])) continue;
        for (int which = 0; which < 3; which++) {
            channels_t a = {backends[i], which == 1 ? MAX_CHANNELS : 2, which};
            int bad = th_launch(mode, which == 2 ? 2 : 3, rank_body, &a, 50, NULL);
            if (bad)
                fprintf(stderr, "FAILED: %s, %s, %d channels, case %d\n", backends[i], th_mode_name(mode), a.n_channels, which);
            n_bad += bad != 0;
        }
    }
    return n_bad != 0 || n_backends == 0;
}
