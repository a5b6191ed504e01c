/* Long runs on GPUs. Every result is compared on the device with the hash of what the CPU computes, so no replay goes unchecked.
 * Usage: soak_gpu replays N [N_DEVICES [W]]: N exchanges for each of the shapes below, as replays of graphs with 16 routing
 * tables in random turn and every 50th as an eager call; EPX_CUDA_MODULE may name the module with random delays. soak_gpu waiting
 * [N_DEVICES]: multiprocessors taken from other work while a rank is late. soak_gpu memory: bytes of a rank at the sizes of
 * docs/performance.md; needs one GPU, allocates nothing there. Exit 77: no GPU can be used, with the reason. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "tests/gpu/soak.h"
#include "tests/gpu/soak_kernels.h"
#include "tests/harness/batch.h"

enum { N_TABLES = 16, MAX_T = 160, MAX_K = 8, ARENA_BYTES = 256 << 20 };

typedef struct {
    const char *name;
    int T, H, K, E, exact;
} shape_t;
/* Up to 128 tokens travel as packets, more in bulk. */
static const shape_t shapes[] = {{"packets, exact", 12, 1024, 4, 16, 1},
                                 {"packets, prereduced", 40, 2048, 8, 32, 0},
                                 {"bulk, exact", 160, 256, 4, 16, 1},
                                 {"bulk, prereduced", 150, 1024, 8, 32, 0}};
enum { N_SHAPES = sizeof shapes / sizeof shapes[0] };

typedef struct {
    uint16_t *x, *y, *result;
    uint8_t *codes;
    float *scales, *weights;
    int32_t *ids, *counts;
    uint32_t *n_tokens;
    uint64_t *want;
    sk_found_t *found;
    int n_local, row_cap;
} buffers_t;

/* ---- what the CPU computes ---- */

static int owner(const shape_t *s, int n_ranks, int e) {
    int q = s->E / n_ranks, m = s->E % n_ranks;
    return e < m * (q + 1) ? e / (q + 1) : m + (e - m * (q + 1)) / q;
}

/* The row as the experts see it after the cast: bf16(code * scale). */
static void through_wire(const shape_t *s, const uint16_t *x, float *out) {
    for (int b = 0; b < s->H; b += 128) {
        float amax = 1e-12f;
        for (int h = b; h < b + 128; h++) amax = fmaxf(amax, fabsf(epx_bf16_to_f32(x[h])));
        float scale = amax / 448.0f;
        for (int h = b; h < b + 128; h++)
            out[h] = epx_bf16_to_f32(epx_f32_to_bf16(epx_e4m3_to_f32(epx_f32_to_e4m3(epx_bf16_to_f32(x[h]) / scale)) * scale));
    }
}

static uint16_t summed(const shape_t *s, int n_ranks, const int32_t *ids, const float *weights, float y) {
    float acc = 0;
    for (int k = 0; s->exact && k < s->K; k++)
        if (ids[k] >= 0) acc = fmaf(weights[k], y, acc);
    for (int q = 0; !s->exact && q < n_ranks; q++) {
        float part = 0;
        int any = 0;
        for (int k = 0; k < s->K; k++)
            if (ids[k] >= 0 && owner(s, n_ranks, ids[k]) == q) part = fmaf(weights[k], y, part), any = 1;
        if (any) acc += epx_bf16_to_f32(epx_f32_to_bf16(part));
    }
    return epx_f32_to_bf16(acc);
}

/* Hash of the results of one table. row: scratch [H]. */
static uint64_t expected(const shape_t *s, int n_ranks, int n, const uint16_t *x, const int32_t *ids, const float *weights,
                         float *row) {
    uint64_t sum = 0;
    uint32_t word = 0;
    for (int t = 0; t < n; t++) {
        through_wire(s, x + (size_t)t * (size_t)s->H, row);
        for (int h = 0; h < s->H; h++) {
            word = word >> 16 | (uint32_t)summed(s, n_ranks, ids + t * s->K, weights + t * s->K, row[h]) << 16;
            if (h % 2) sum += sk_mix(word, (uint32_t)(t * s->H + h) / 2);
        }
    }
    return sum;
}

/* ---- tables ---- */

typedef struct {
    uint16_t *x;
    int32_t ids[MAX_T * MAX_K];
    float weights[MAX_T * MAX_K], *row;
} table_t;

static void draw(const shape_t *s, uint64_t seed, table_t *t, uint32_t *out_n) {
    uint64_t at = 0;
    *out_n = (uint32_t)(th_mix(seed, at++) % (unsigned)(s->T + 1));
    if (th_mix(seed, at++) % 4 == 0) *out_n = (uint32_t)s->T;
    for (int i = 0; i < s->T * s->K; i++) {
        int32_t id = (int32_t)(th_mix(seed, at++) % (unsigned)(s->E + 1)) - 1;
        for (int k = i - i % s->K; k < i; k++)
            if (t->ids[k] == id) id = -1;
        t->ids[i] = id;
        t->weights[i] = (float)(th_mix(seed, at++) % 1000) / 1000;
    }
    for (int i = 0; i < s->T * s->H; i++) t->x[i] = epx_f32_to_bf16((float)(int)(th_mix(seed, at++) % 2001) / 500 - 2);
}

static int send_tables(th_rank_t *r, th_device_t *d, const shape_t *s, const buffers_t *b) {
    size_t tk = (size_t)s->T * (size_t)s->K, th = (size_t)s->T * (size_t)s->H;
    table_t *t = calloc(1, sizeof *t);
    TH_CHECK(r, t != NULL && (t->x = malloc(th * 2)) != NULL && (t->row = malloc((size_t)s->H * 4)) != NULL, "%s", "memory");
    int bad = 0;
    for (int i = 0; i < N_TABLES; i++) {
        uint32_t n;
        draw(s, 1000u + 17u * (unsigned)r->rank + 131u * (unsigned)i, t, &n);
        uint64_t want = expected(s, r->n_ranks, (int)n, t->x, t->ids, t->weights, t->row);
        bad |= d->upload(d, b->x + (size_t)i * th, t->x, th * 2) | d->upload(d, b->ids + (size_t)i * tk, t->ids, tk * 4) |
               d->upload(d, b->weights + (size_t)i * tk, t->weights, tk * 4) | d->upload(d, b->n_tokens + i, &n, 4) |
               d->upload(d, b->want + i, &want, 8);
    }
    const sk_found_t none = {0, 0};
    const uint64_t wrong = 1; /* of the check itself */
    bad |= d->upload(d, b->found, &none, sizeof none) | d->upload(d, b->want + N_TABLES, &wrong, 8);
    free(t->x), free(t->row), free(t);
    TH_CHECK(r, bad == 0, "%s", "upload");
    return 0;
}

static int take_buffers(th_rank_t *r, th_device_t *d, const shape_t *s, const epx_plan_t *p, buffers_t *b) {
    epx_plan_info_t info = {.size = sizeof info};
    TH_OK(r, epx_plan_info(p, &info));
    size_t slots = (size_t)info.n_local_experts * (size_t)info.row_cap, n = N_TABLES * (size_t)s->T, H = (size_t)s->H;
    d->reset(d);
    b->n_local = info.n_local_experts, b->row_cap = info.row_cap;
    b->x = d->take(d, n * H * 2);
    b->ids = d->take(d, n * (size_t)s->K * 4);
    b->weights = d->take(d, n * (size_t)s->K * 4);
    b->n_tokens = d->take(d, N_TABLES * 4);
    b->want = d->take(d, (N_TABLES + 1) * 8);
    b->found = d->take(d, sizeof *b->found);
    b->codes = d->take(d, slots * H);
    b->scales = d->take(d, slots * (H / 128) * 4);
    b->counts = d->take(d, (size_t)info.n_local_experts * 4 + 4);
    b->y = d->take(d, slots * H * 2);
    b->result = d->take(d, (size_t)s->T * H * 2);
    TH_CHECK(r, b->result != NULL, "%s", "arena");
    return 0;
}

/* ---- replays ---- */

/* want: place of the hash to compare with. */
static int exchange(th_rank_t *r, epx_plan_t *p, th_device_t *d, const shape_t *s, const buffers_t *b, int table, int want) {
    epx_io_t in, back;
    epx_io_init(&in), epx_io_init(&back);
    in.x = b->x + (size_t)table * (size_t)s->T * (size_t)s->H;
    in.ids = b->ids + (size_t)table * (size_t)(s->T * s->K);
    in.weights = b->weights + (size_t)table * (size_t)(s->T * s->K);
    in.n_tokens_device = b->n_tokens + table;
    in.out_x = b->codes, in.out_scale = b->scales, in.out_counts = b->counts;
    back.x = b->y, back.out_x = b->result;
    in.stream = back.stream = d->stream;
    TH_OK(r, epx_dispatch(p, &in));
    int e = sk_experts(b->codes, b->scales, b->counts, b->n_local, b->row_cap, s->H, b->y, d->stream);
    TH_CHECK(r, e == 0, "experts: CUDA error %d", e);
    TH_OK(r, epx_combine(p, &back));
    e = sk_check(b->result, b->n_tokens + table, s->H, b->want + want, b->found, d->stream);
    TH_CHECK(r, e == 0, "check: CUDA error %d", e);
    return 0;
}

static int found(th_rank_t *r, epx_plan_t *p, th_device_t *d, const buffers_t *b, uint64_t checked, uint64_t bad) {
    sk_found_t f;
    TH_CHECK(r, d->sync(d) == 0, "%s", "stream");
    TH_OK(r, epx_plan_poll(p));
    TH_CHECK(r, d->fetch(d, &f, b->found, sizeof f) == 0, "%s", "fetch");
    TH_CHECK(r, f.n_checked == checked && f.n_bad == bad, "%llu exchanges checked and %llu wrong; wanted %llu and %llu",
             (unsigned long long)f.n_checked, (unsigned long long)f.n_bad, (unsigned long long)checked, (unsigned long long)bad);
    return 0;
}

static int replay(th_rank_t *r, epx_plan_t *p, th_device_t *d, const shape_t *s, const buffers_t *b, void **graphs) {
    const soak_args_t *a = r->arg;
    /* The check can fail: one exchange against a wrong hash. */
    if (exchange(r, p, d, s, b, 0, N_TABLES) != 0 || found(r, p, d, b, 1, 1) != 0) return -1;
    for (int turn = 0; turn < a->n_replays; turn++) {
        int table = (int)(th_mix(7, (uint64_t)turn) % N_TABLES);
        if (turn % 50 == 49 && exchange(r, p, d, s, b, table, table) != 0) return -1;
        if (turn % 50 != 49) TH_CHECK(r, tg_graph_launch(d, graphs[table]) == 0, "%s", "launch");
        if (turn % 1000 == 999 && found(r, p, d, b, (uint64_t)turn + 2, 1) != 0) return -1;
    }
    return found(r, p, d, b, (uint64_t)a->n_replays + 1, 1);
}

static int meet(th_rank_t *r) {
    TH_CHECK(r, th_barrier(r) == EPX_OK, "%s", "another rank failed");
    return 0;
}

static int record(th_rank_t *r, epx_plan_t *p, th_device_t *d, const shape_t *s, const buffers_t *b, void **graphs) {
    for (int i = 0; i < N_TABLES; i++) {
        TH_CHECK(r, tg_capture_begin(d) == 0, "%s", "capture");
        if (exchange(r, p, d, s, b, i, i) != 0) return -1;
        TH_CHECK(r, (graphs[i] = tg_capture_end(d)) != NULL, "%s", "capture");
    }
    return 0;
}

static int replays(th_rank_t *r, tg_rank_t *k) {
    const soak_args_t *a = r->arg;
    const shape_t *s = &shapes[a->shape];
    epx_plan_config_t c;
    epx_plan_t *p = NULL;
    buffers_t b;
    void *graphs[N_TABLES] = {NULL};
    epx_plan_config_init(&c);
    c.max_tokens = s->T, c.hidden = s->H, c.top_k = s->K, c.n_experts = s->E;
    c.token_dtype = EPX_BF16, c.wire_dtype = EPX_FP8_E4M3, c.layout = EPX_LAYOUT_EXPERT_MAJOR;
    c.combine = s->exact ? EPX_COMBINE_EXACT : EPX_COMBINE_PARTIAL;
    c.timeout_ns = 20000000000u;
    TH_OK(r, epx_plan_create(k->group, &c, &p));
    int rc = take_buffers(r, k->device, s, p, &b) || send_tables(r, k->device, s, &b) || record(r, p, k->device, s, &b, graphs) ||
             meet(r) || replay(r, p, k->device, s, &b, graphs);
    if (rc != 0) epx_plan_abort(p);
    else rc = meet(r);
    for (int i = 0; i < N_TABLES; i++) tg_graph_free(graphs[i]);
    epx_plan_destroy(p);
    return rc;
}

/* ---- memory ---- */

static int memory(th_rank_t *r, tg_rank_t *k) {
    static const int sizes[][5] = {{8, 128, 7168, 256, 8},
                                   {2, 128, 7168, 256, 8},
                                   {2, 512, 7168, 256, 8},
                                   {2, 128, 2048, 128, 8},
                                   {8, 512, 7168, 256, 8}}; /* W, T, H, E, K */
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const int *z = sizes[i];
        epx_plan_config_t c;
        size_t bytes = 0;
        if (z[0] != r->n_ranks) continue;
        for (int exact = 0; exact < 2; exact++) {
            epx_plan_config_init(&c);
            c.max_tokens = z[1], c.hidden = z[2], c.n_experts = z[3], c.top_k = z[4];
            c.token_dtype = EPX_BF16, c.wire_dtype = EPX_FP8_E4M3, c.layout = EPX_LAYOUT_EXPERT_MAJOR;
            c.combine = exact ? EPX_COMBINE_EXACT : EPX_COMBINE_PARTIAL;
            TH_OK(r, epx_group_plan_bytes(k->group, &c, &bytes));
            if (r->rank == 0)
                printf("memory of a rank, W %d T %d H %d E %d K %d %s: %.1f MB\n", z[0], z[1], z[2], z[3], z[4],
                       exact ? "exact" : "prereduced", (double)bytes * 1e-6);
        }
    }
    return 0;
}

/* ---- programs ---- */

static int (*program)(th_rank_t *r, tg_rank_t *k);

static int rank_body(th_rank_t *r) {
    const soak_args_t *a = r->arg;
    return tg_with_group(r, a->n_devices, ARENA_BYTES, program);
}

static int run(soak_args_t *a, const char *name, int seconds) {
    int bad = th_launch(TH_THREADS, a->n_ranks, rank_body, a, seconds, NULL);
    printf("%s, W=%d on %d device%s: %s\n", name, a->n_ranks, a->n_devices, a->n_devices == 1 ? "" : "s", bad ? "FAILED" : "ok");
    fflush(stdout);
    return bad != 0;
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "replays";
    int is_replays = strcmp(what, "replays") == 0, at = is_replays ? 3 : 2, n_bad = 0;
    soak_args_t a = {.n_replays = argc > 2 && is_replays ? atoi(argv[2]) : 1000};
    a.n_devices = tg_devices(argc > at ? atoi(argv[at]) : 0);
    a.n_ranks = argc > at + 1 ? atoi(argv[at + 1]) : 2;
    if (a.n_devices == 0) return 77;
    if (is_replays) {
        program = replays;
        for (a.shape = 0; a.shape < N_SHAPES; a.shape++) {
            char name[80];
            snprintf(name, sizeof name, "%d exchanges, %s, every one checked", a.n_replays, shapes[a.shape].name);
            n_bad += run(&a, name, 500);
        }
        return n_bad != 0;
    }
    if (strcmp(what, "waiting") == 0) {
        program = soak_waiting;
        return run(&a, "waiting", 100);
    }
    if (strcmp(what, "memory") == 0) {
        program = memory;
        for (a.n_ranks = 2; a.n_ranks <= 8; a.n_ranks *= 4) n_bad += run(&a, "memory", 60);
        return n_bad != 0;
    }
    fprintf(stderr, "soak_gpu: \"%s\"; legal: replays, waiting, memory\n", what);
    return 2;
}
