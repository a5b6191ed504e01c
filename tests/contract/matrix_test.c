/* The contract matrix: every backend x transport x dtype x layout x combine mode x W, each through the whole edge set of
 * routings, against the oracle bit for bit.
 * Usage: contract_matrix self | threads | processes [pairwise [STEPS]]
 *        contract_matrix remote BOOTSTRAP RANK N_RANKS [STEPS]: one rank of several that are started by hand or by a launcher
 *        (RANK and N_RANKS -1: by the bootstrap); pairwise cases.
 * pairwise: only a set of cases in which every pair of values occurs (for the sanitizers and the planted mistakes). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/harness/components.h"
#include "tests/harness/exchange.h"
#include "tests/harness/pairwise.h"

enum {
    N_W = 5,
    N_DTYPES = 10,
    N_LAYOUTS = 3,
    N_COMBINES = 2,
    N_SHAPES = 7,
    N_OPTS = 8,
    MAX_CASES = 2048,
    N_ROUNDS = 2,
    MAX_SLOTS = 128
};
enum { DIM_W, DIM_BACKEND, DIM_DTYPE, DIM_LAYOUT, DIM_COMBINE, DIM_SHAPE, DIM_OPTS, N_DIMS };

static const int w_values[N_W] = {1, 2, 3, 4, 8};

/* token, wire, expert, combine */
static const epx_dtype_t dtype_values[N_DTYPES][4] = {
    {EPX_F32, EPX_F32, EPX_F32, EPX_F32},
    {EPX_BF16, EPX_BF16, EPX_BF16, EPX_BF16},
    {EPX_F16, EPX_F16, EPX_F16, EPX_F16},
    {EPX_FP8_E4M3, EPX_FP8_E4M3, EPX_F32, EPX_BF16}, /* quantised by the caller */
    {EPX_BF16, EPX_FP8_E4M3, EPX_F32, EPX_BF16},
    {EPX_F32, EPX_FP8_E4M3, EPX_F32, EPX_F32},
    {EPX_BF16, EPX_BF16, EPX_F32, EPX_BF16},
    {EPX_BF16, EPX_FP8_E4M3, EPX_BF16, EPX_FP8_E4M3},
    {EPX_FP8_E4M3, EPX_FP8_E4M3, EPX_F16, EPX_FP8_E4M3},
    {EPX_F16, EPX_F16, EPX_BF16, EPX_F32},
};

static const struct {
    int n_experts, top_k, hidden, max_tokens;
} shape_values[N_SHAPES] = {
    {7, 2, 64, 5}, {16, 4, 128, 8}, {13, 8, 200, 3}, {5, 1, 1, 6}, {70, 64, 7, 2}, {32, 6, 256, 4}, {3, 3, 96, 4},
};

static const unsigned opts_values[N_OPTS] = {
    0,
    TH_REGISTERED | TH_HISTOGRAM,
    TH_HALVES | TH_ADD | TH_PARTIALS,
    TH_REGISTERED | TH_HALVES | TH_NO_COUNTS | TH_DELAYS | TH_LATE,
    TH_NO_COUNTS | TH_ADD | TH_LATE | TH_PARTIALS,
    TH_REGISTERED | TH_DELAYS | TH_PARTIALS,
    TH_HALVES | TH_HISTOGRAM | TH_DELAYS,
    TH_REGISTERED | TH_HALVES | TH_ADD | TH_HISTOGRAM,
};

/* format, layout, block of the scales */
static const int scale_values[][3] = {{EPX_SCALE_F32, EPX_SCALE_ROW_MAJOR, 128},
                                      {EPX_SCALE_UE8M0, EPX_SCALE_ROW_MAJOR, 32},
                                      {EPX_SCALE_F32, EPX_SCALE_COL_MAJOR, 32},
                                      {EPX_SCALE_UE8M0, EPX_SCALE_COL_MAJOR, 128}};
static const int align_values[] = {4, 1, 16};

typedef struct {
    th_mode_t mode;
    const char *transport;
    int n_backends, n_steps, n_cases;
    const char *backends[TH_MAX_COMPONENTS];
    th_tuple_t cases[MAX_CASES];
    int w, backend;        /* of the present launch; indices */
    const char *bootstrap; /* of a rank that was started elsewhere, else NULL */
    epx_world_t *world;    /* of such a rank */
} matrix_t;

/* Where the experts lie: even; scattered over the ranks; scattered with the slots in another order; copies of experts in order;
 * scattered copies, of some experts many. */
static void fill_placement(th_shape_t *s, int which, uint64_t seed, int *slot_rank, int *slot_expert) {
    int n = s->n_experts, e = n;
    s->n_slots = which >= 3 ? n + n / 2 + 1 : n;
    for (int i = 0; i < s->n_slots; i++) {
        slot_rank[i] = (int)(th_mix(seed, (uint64_t)i) % (uint64_t)s->n_ranks);
        slot_expert[i] = i < n ? n - 1 - i : (int)(th_mix(seed ^ 0xC09, (uint64_t)i) % (uint64_t)(e < 3 ? e : 3));
    }
    s->slot_rank = which == 1 || which == 2 || which == 4 ? slot_rank : NULL;
    s->slot_expert = which == 2 || which == 4 ? slot_expert : NULL;
}

/* Some cases give the same tokens to several ranks. */
static int replicate_of(int n_ranks, int idx) {
    if (idx % 3 != 1) return 1;
    if (n_ranks == 8 && idx % 2) return 4;
    return n_ranks % 2 ? n_ranks : 2;
}

static int run_case(th_rank_t *r, epx_group_t *g, const matrix_t *m, int idx) {
    const int *v = m->cases[idx].v;
    const epx_dtype_t *d = dtype_values[v[DIM_DTYPE]];
    const int *scales = scale_values[(idx + idx / 5) % 4];
    int slot_rank[MAX_SLOTS], slot_expert[MAX_SLOTS];
    th_case_t c = {.backend = m->backends[v[DIM_BACKEND]], .opts = opts_values[v[DIM_OPTS]], .n_steps = m->n_steps};
    c.seed = th_seed() + (uint64_t)idx * 1009;
    c.shape = (th_shape_t){.n_ranks = w_values[v[DIM_W]],
                           .replicate = replicate_of(w_values[v[DIM_W]], idx),
                           .max_tokens = shape_values[v[DIM_SHAPE]].max_tokens,
                           .hidden = shape_values[v[DIM_SHAPE]].hidden,
                           .top_k = shape_values[v[DIM_SHAPE]].top_k,
                           .n_experts = shape_values[v[DIM_SHAPE]].n_experts,
                           .token = d[0],
                           .wire = d[1],
                           .expert = d[2],
                           .combine = d[3],
                           .layout = (epx_layout_t)v[DIM_LAYOUT],
                           .scale_format = (epx_scale_format_t)scales[0],
                           .scale_layout = v[DIM_LAYOUT] ? (epx_scale_layout_t)scales[1] : EPX_SCALE_ROW_MAJOR,
                           .scale_block = scales[2],
                           .align = v[DIM_LAYOUT] == EPX_LAYOUT_CONTIGUOUS ? align_values[idx % 3] : 1,
                           .mode = v[DIM_COMBINE] ? EPX_COMBINE_PARTIAL : EPX_COMBINE_EXACT};
    fill_placement(&c.shape, (idx + idx / 5) % 5, c.seed, slot_rank, slot_expert);
    if (r->mode == TH_PROCESSES && r->n_ranks > 1 && th_needs_one_process(c.backend))
        return th_case_refused(r, g, &c, "one process");
    if (r->n_ranks > 1 && strcmp(m->transport == NULL ? "" : m->transport, "fault") == 0 && th_needs_one_process(c.backend))
        return th_case_refused(r, g, &c, "messages");
    return th_case_run(r, g, &c);
}

static int run_cases(th_rank_t *r, epx_group_t *g, const matrix_t *m) {
    for (int i = 0; i < m->n_cases; i++) {
        if (m->cases[i].v[DIM_W] != m->w || m->cases[i].v[DIM_BACKEND] != m->backend) continue;
        if (run_case(r, g, m, i) != 0) return -1;
    }
    return 0;
}

static int in_world(th_rank_t *r, const matrix_t *m, epx_world_t *w) {
    epx_group_t *g = NULL;
    TH_CHECK(r, epx_world_rank(w) == r->rank && epx_world_size(w) == r->n_ranks, "world says rank %d of %d", epx_world_rank(w),
             epx_world_size(w));
    TH_OK(r, epx_group_create(w, NULL, 0, -1, &g));
    epx_group_caps_t caps = {.size = sizeof caps};
    TH_OK(r, epx_group_caps(g, &caps));
    TH_CHECK(r, m->transport == NULL || strcmp(caps.transport, m->transport) == 0, "transport %s, wanted %s", caps.transport,
             m->transport);
    int rc = run_cases(r, g, m);
    epx_group_destroy(g);
    return rc;
}

static int rank_body(th_rank_t *r) {
    const matrix_t *m = r->arg;
    epx_world_config_t cfg;
    epx_world_t *w = NULL;
    th_world_config(r, m->transport, &cfg);
    if (strcmp(m->transport, "self") == 0) {
        epx_world_config_init(&cfg);
        cfg.bootstrap = "self";
        cfg.transports = "self";
    }
    th_note(r, "%s, world and group of %d", m->transport, r->n_ranks);
    TH_OK(r, epx_world_create(&cfg, &w));
    int rc = in_world(r, m, w);
    epx_world_destroy(w);
    return rc;
}

/* All combinations of W, backend, dtype, layout and combine, N_ROUNDS times; shape and options rotate. */
static void all_cases(matrix_t *m, int max_w, int i) {
    th_tuple_t t = {{0}};
    for (t.v[DIM_W] = 0; t.v[DIM_W] < max_w; t.v[DIM_W]++)
        for (t.v[DIM_BACKEND] = 0; t.v[DIM_BACKEND] < m->n_backends; t.v[DIM_BACKEND]++)
            for (t.v[DIM_DTYPE] = 0; t.v[DIM_DTYPE] < N_DTYPES; t.v[DIM_DTYPE]++)
                for (t.v[DIM_LAYOUT] = 0; t.v[DIM_LAYOUT] < N_LAYOUTS; t.v[DIM_LAYOUT]++)
                    for (t.v[DIM_COMBINE] = 0; t.v[DIM_COMBINE] < N_COMBINES; t.v[DIM_COMBINE]++, i++) {
                        t.v[DIM_SHAPE] = (i + i / N_SHAPES) % N_SHAPES;
                        t.v[DIM_OPTS] = (i + i / N_OPTS) % N_OPTS;
                        m->cases[m->n_cases++] = t;
                    }
}

static int pairwise_cases(matrix_t *m, int max_w) {
    int sizes[N_DIMS] = {max_w, m->n_backends, N_DTYPES, N_LAYOUTS, N_COMBINES, N_SHAPES, N_OPTS};
    m->n_cases = th_pairwise(N_DIMS, sizes, m->cases, MAX_CASES);
    return m->n_cases > 0 && th_pairwise_covers(N_DIMS, sizes, m->cases, m->n_cases) ? 0 : -1;
}

static int run_matrix(matrix_t *m, int max_w) {
    int n_bad = 0;
    for (m->w = 0; m->w < max_w; m->w++) {
        for (m->backend = 0; m->backend < m->n_backends; m->backend++) {
            int bad = th_launch(m->mode, w_values[m->w], rank_body, m, 100, NULL);
            if (bad)
                fprintf(stderr, "FAILED: %s, %s, %s, W=%d\n", m->transport, th_mode_name(m->mode), m->backends[m->backend],
                        w_values[m->w]);
            n_bad += bad != 0;
        }
    }
    return n_bad;
}

static int remote_body(th_rank_t *r) {
    const matrix_t *m = r->arg;
    return in_world(r, m, m->world);
}

/* One rank of a world that is made by name; transport and W are what it finds. */
static int run_remote(matrix_t *m, int rank, int n_ranks) {
    epx_world_config_t cfg;
    int sizes[N_DIMS] = {1, m->n_backends, N_DTYPES, N_LAYOUTS, N_COMBINES, N_SHAPES, N_OPTS}, bad = 0;
    epx_world_config_init(&cfg);
    cfg.bootstrap = m->bootstrap;
    cfg.rank = rank;
    cfg.n_ranks = n_ranks;
    if (epx_world_create(&cfg, &m->world) != EPX_OK) {
        fprintf(stderr, "rank %d of %d: %s\n", rank, n_ranks, epx_last_error());
        return 1;
    }
    n_ranks = epx_world_size(m->world);
    m->n_cases = th_pairwise(N_DIMS, sizes, m->cases, MAX_CASES);
    while (m->w < N_W && w_values[m->w] != n_ranks) m->w++;
    if (m->w == N_W) return fprintf(stderr, "%d ranks are not in the matrix\n", n_ranks), 1;
    for (int i = 0; i < m->n_cases; i++) m->cases[i].v[DIM_W] = m->w;
    for (m->backend = 0; m->backend < m->n_backends && !bad; m->backend++)
        bad = th_run_alone(epx_world_rank(m->world), n_ranks, remote_body, m);
    printf("rank %d of %d: %d cases of %d exchanges, %s\n", epx_world_rank(m->world), n_ranks, m->n_cases, m->n_steps,
           bad ? "failed" : "all right");
    epx_world_destroy(m->world);
    return bad;
}

int main(int argc, char **argv) {
    static matrix_t m;
    const char *transports[TH_MAX_COMPONENTS], *kind = argc > 1 ? argv[1] : "threads";
    int want_self = strcmp(kind, "self") == 0, is_pairwise = argc > 2 && strcmp(argv[2], "pairwise") == 0, n_bad = 0, n_cases = 0;
    int n_transports = th_components("transport", transports);
    const char *wrapper = strncmp(kind, "wrapper:", 8) == 0 ? kind + 8 : NULL; /* ranks are threads */
    m.mode = strcmp(kind, "processes") == 0 ? TH_PROCESSES : TH_THREADS;
    m.n_backends = th_components("backend", m.backends);
    m.n_steps = argc > 3 ? atoi(argv[3]) : TH_N_KINDS;
    if (strcmp(kind, "remote") == 0 && argc > 4) {
        m.mode = TH_PROCESSES;
        m.bootstrap = argv[2];
        m.n_steps = argc > 5 ? atoi(argv[5]) : TH_N_KINDS;
        return run_remote(&m, atoi(argv[3]), atoi(argv[4]));
    }
    th_print_seed();
    if (wrapper != NULL) transports[0] = wrapper, n_transports = 1;
    for (int i = 0; i < n_transports; i++) {
        int max_w = want_self ? 1 : N_W;
        if ((strcmp(transports[i], "self") == 0) != want_self) continue;
        m.transport = transports[i];
        m.n_cases = 0;
        for (int k = 0; !is_pairwise && k < N_ROUNDS; k++) all_cases(&m, max_w, m.n_cases + k);
        if (is_pairwise && pairwise_cases(&m, max_w) != 0) n_bad++;
        n_cases += m.n_cases;
        n_bad += run_matrix(&m, max_w);
    }
    printf("%d cases of %d exchanges, %d launches failed\n", n_cases, m.n_steps, n_bad);
    return n_bad != 0 || n_cases == 0;
}
