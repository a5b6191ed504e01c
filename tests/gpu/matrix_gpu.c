/* The contract matrix on GPUs: dtype x layout x combine mode x W x shape, each through the whole edge set of routings, against
 * the oracle bit for bit. Ranks are threads or processes; several share a device when there are fewer. Usage: contract_gpu
 * threads | processes [N_DEVICES [STEPS]]   (N_DEVICES 0: all). Exit 77: no GPU can be used, with the reason. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/ranks.h"
#include "tests/harness/components.h"
#include "tests/harness/exchange.h"

enum { N_W = 5, N_DTYPES = 10, N_SHAPES = 10, N_OPTS = 6, N_LAYOUTS = 3, N_BLOCKS = 4, MAX_EXPERTS = 80, ARENA_BYTES = 96 << 20 };

static const int w_values[N_W] = {1, 2, 3, 4, 8}, blocks_values[N_BLOCKS] = {0, 1, 5, 16};
static const epx_dtype_t dtype_values[N_DTYPES][4] = {
    {EPX_F32, EPX_F32, EPX_F32, EPX_F32},
    {EPX_BF16, EPX_BF16, EPX_BF16, EPX_BF16},
    {EPX_F16, EPX_F16, EPX_F16, EPX_F16},
    {EPX_BF16, EPX_FP8_E4M3, EPX_BF16, EPX_BF16},
    {EPX_F32, EPX_FP8_E4M3, EPX_F32, EPX_F32},
    {EPX_F16, EPX_FP8_E4M3, EPX_F16, EPX_F16},
    {EPX_BF16, EPX_BF16, EPX_F32, EPX_F32},
    {EPX_BF16, EPX_FP8_E4M3, EPX_F32, EPX_BF16},
    {EPX_FP8_E4M3, EPX_FP8_E4M3, EPX_BF16, EPX_BF16},
    {EPX_FP8_E4M3, EPX_FP8_E4M3, EPX_F32, EPX_F32},
};
/* The last ones have more tokens than travel as packets. */
static const struct {
    int n_experts, top_k, hidden, max_tokens;
} shape_values[N_SHAPES] = {{7, 2, 64, 5},   {16, 4, 128, 8}, {13, 8, 216, 3},  {70, 64, 16, 2},   {32, 6, 256, 4},
                            {3, 3, 104, 40}, {5, 1, 2064, 6}, {16, 4, 64, 150}, {40, 33, 32, 135}, {24, 5, 1544, 131}};
static const unsigned opts_values[N_OPTS] = {
    0, TH_HALVES | TH_ADD, TH_NO_COUNTS | TH_LATE, TH_HALVES | TH_DELAYS | TH_LATE, TH_ADD | TH_DELAYS, TH_HISTOGRAM};

typedef struct {
    int n_devices, n_steps, w;
} args_t;

static void fill_placement(th_shape_t *s, int which, uint64_t seed, int *slot_rank, int *slot_expert) {
    for (int i = 0; i < s->n_experts; i++) {
        slot_rank[i] = (int)(th_mix(seed, (uint64_t)i) % (uint64_t)s->n_ranks);
        slot_expert[i] = s->n_experts - 1 - i;
    }
    s->slot_rank = which >= 1 ? slot_rank : NULL;
    s->slot_expert = which >= 2 ? slot_expert : NULL;
}

static int run_case(th_rank_t *r, epx_group_t *g, th_device_t *d, int idx, int dtype, int layout, int mode) {
    const args_t *a = r->arg;
    int slot_rank[MAX_EXPERTS], slot_expert[MAX_EXPERTS], shape = (idx * 2 + idx / N_SHAPES) % N_SHAPES;
    const epx_dtype_t *t = dtype_values[dtype];
    th_case_t c = {.backend = idx % 2 ? "onesided" : NULL, .opts = opts_values[(idx + idx / N_OPTS) % N_OPTS], .device = d};
    int big = shape_values[shape].max_tokens > 100 && a->w > 2; /* the oracle is slow */
    c.n_steps = big ? 3 : a->n_steps;
    /* Few blocks have many rows each, whose places must fit the shared memory. */
    c.n_blocks = big && a->w > 4 ? 0 : blocks_values[(idx + idx / N_BLOCKS) % N_BLOCKS];
    c.seed = th_seed() + (uint64_t)idx * 1009;
    c.shape = (th_shape_t){.n_ranks = a->w,
                           .max_tokens = shape_values[shape].max_tokens,
                           .hidden = shape_values[shape].hidden,
                           .top_k = shape_values[shape].top_k,
                           .n_experts = shape_values[shape].n_experts,
                           .token = t[0],
                           .wire = t[1],
                           .expert = t[2],
                           .combine = t[3],
                           .layout = (epx_layout_t)layout,
                           .align = layout == EPX_LAYOUT_CONTIGUOUS ? 1 + 7 * (idx % 3) : 1,
                           .scale_format = idx / 2 % 2 ? EPX_SCALE_UE8M0 : EPX_SCALE_F32,
                           .scale_layout = layout != EPX_LAYOUT_LISTS && idx / 3 % 2 ? EPX_SCALE_COL_MAJOR : EPX_SCALE_ROW_MAJOR,
                           .mode = mode ? EPX_COMBINE_PARTIAL : EPX_COMBINE_EXACT};
    if (idx % 4 == 1) c.n_channels = 1 + idx % 3, c.channel = idx % 3; /* one of several */
    if (c.n_channels > 1 && a->w > 4) c.n_blocks = 0;                  /* the channels share what a rank may have of the device */
    fill_placement(&c.shape, idx % 3, c.seed, slot_rank, slot_expert);
    return th_case_run(r, g, &c);
}

/* One step on each of two channels of a plan, halves in turn; every channel has a stream and an arena of its own. */
static int two_steps(th_rank_t *r, epx_plan_t *p, const th_case_t *c, th_kind_t kind) {
    th_open_t *open[2] = {NULL, NULL};
    th_tally_t tally = {0};
    int rc = 0;
    for (int i = 0; rc == 0 && i < 2; i++) rc = th_step_begin(r, p, &c[i], r->rank, kind, c[i].seed + (uint64_t)kind, &open[i]);
    for (int half = 1; rc == 0 && half <= 3; half++)
        for (int i = 0; rc == 0 && i < 2; i++) rc = th_step_half(r, p, &c[(i + half) % 2], open[(i + half) % 2], half);
    for (int i = 0; i < 2; i++)
        if (open[i] != NULL) th_step_end(&c[i], open[i], &tally);
    return rc;
}

static int both_channels(th_rank_t *r, tg_rank_t *k) {
    const args_t *a = r->arg;
    epx_plan_config_t cfg;
    epx_plan_t *p = NULL;
    th_case_t c[2] = {{.opts = TH_HALVES, .n_channels = 2, .seed = th_seed() + 77, .device = k->device}};
    c[0].shape = (th_shape_t){.n_ranks = a->w,
                              .max_tokens = 9,
                              .hidden = 256,
                              .top_k = 4,
                              .n_experts = 16,
                              .token = EPX_BF16,
                              .wire = EPX_FP8_E4M3,
                              .expert = EPX_BF16,
                              .combine = EPX_BF16,
                              .layout = EPX_LAYOUT_EXPERT_MAJOR,
                              .mode = EPX_COMBINE_PARTIAL};
    c[1] = c[0];
    c[1].channel = 1, c[1].seed += 1000, c[1].device = tg_device_open(k->device->ordinal, ARENA_BYTES / 4);
    TH_CHECK(r, c[1].device != NULL, "%s", "no second stream");
    int rc = -1;
    if (th_barrier(r) != EPX_OK) th_fail(r, "%s", "another rank failed"); /* the arena was taken while nobody spins */
    th_plan_config(&c[0], &cfg);
    if (epx_plan_create(k->group, &cfg, &p) != EPX_OK) th_fail(r, "epx_plan_create: %s", epx_last_error());
    else rc = 0;
    for (int kind = 0; rc == 0 && kind < TH_N_KINDS; kind++) rc = two_steps(r, p, c, (th_kind_t)kind);
    if (rc != 0 && p != NULL) (void)epx_plan_abort(p);
    epx_plan_destroy(p);
    (void)th_barrier(r); /* freeing memory waits for the device, so nobody may still spin */
    tg_device_close(c[1].device);
    return rc;
}

static int cases(th_rank_t *r, tg_rank_t *k) {
    const args_t *a = r->arg;
    for (int idx = 0, dtype = 0; dtype < N_DTYPES; dtype++)
        for (int layout = 0; layout < N_LAYOUTS; layout++)
            for (int mode = 0; mode < 2; mode++)
                for (int turn = 0; turn < (a->w <= 4 ? 2 : 1); turn++, idx++)
                    if (run_case(r, k->group, k->device, idx + a->w, dtype, layout, mode) != 0) return -1;
    return both_channels(r, k);
}

static int rank_body(th_rank_t *r) {
    const args_t *a = r->arg;
    return tg_with_group(r, a->n_devices, ARENA_BYTES, cases);
}

int main(int argc, char **argv) {
    th_mode_t mode = argc > 1 && strcmp(argv[1], "processes") == 0 ? TH_PROCESSES : TH_THREADS;
    args_t a = {.n_devices = argc > 2 ? atoi(argv[2]) : 0, .n_steps = argc > 3 ? atoi(argv[3]) : TH_N_KINDS};
    int n_bad = 0;
    a.n_devices = tg_devices(a.n_devices);
    if (a.n_devices == 0) return 77;
    th_print_seed();
    for (int i = 0; i < N_W; i++) {
        a.w = w_values[i];
        if (mode == TH_PROCESSES && a.w > 2 && a.w > a.n_devices) continue; /* processes take turns on a device: slow */
        int bad = th_launch(mode, a.w, rank_body, &a, 200, NULL);
        printf("%s, W=%d on %d device%s: %s\n", th_mode_name(mode), a.w, a.n_devices, a.n_devices == 1 ? "" : "s",
               bad ? "FAILED" : "all bits equal");
        fflush(stdout);
        n_bad += bad != 0;
    }
    return n_bad != 0;
}
