/* Times of the CUDA ops and of whole steps of a model with seeded dummy weights on one GPU: lines of JSON. Results are checked
 * elsewhere (ops_gpu, `epx eval logits`); here only that logits are finite. Weights and KV rotate out of the L2 cache by their
 * size. Usage: steps_gpu ops | steps DIR    DIR holds a config.json. Exits 77 without a GPU. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "engine/kv/store.h"
#include "engine/model/model.h"
#include "epx/epx.h"

enum { MAX_ROWS = 4096, PAGE = 16, CONTEXT = 1536 };
static epx_ops_t *g_ops;

#define MUST(expr)                                                                   \
    do {                                                                             \
        if ((expr) != EPX_OK) {                                                      \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, epx_error_message()); \
            exit(1);                                                                 \
        }                                                                            \
    } while (0)

static void *device(size_t n_bytes) {
    void *p;
    MUST(epx_ops_alloc(g_ops, n_bytes, &p));
    return p;
}
static void *device_random(size_t n) {
    void *p = device(n * 2);
    epx_ops_random(g_ops, n, 0.03f, n, p);
    return p;
}
static void *uploaded(const void *from, size_t n_bytes) {
    void *p = device(n_bytes);
    MUST(epx_ops_upload(g_ops, p, from, n_bytes));
    return p;
}

/* Median microseconds of a call in a queue of `inner`. */
typedef void (*body_fn)(void *ctx, int i);
static int by_value(const void *a, const void *b) { return *(const double *)a < *(const double *)b ? -1 : 1; }
static double time_us(body_fn body, void *ctx, int inner) {
    enum { REPEATS = 7 };
    double us[REPEATS];
    for (int r = -1; r < REPEATS; r++) {
        MUST(epx_ops_sync(g_ops));
        const uint64_t start = epx_now_ns();
        for (int i = 0; i < inner; i++) body(ctx, i);
        MUST(epx_ops_sync(g_ops));
        if (r >= 0) us[r] = (double)(epx_now_ns() - start) / 1e3 / inner;
    }
    qsort(us, REPEATS, sizeof us[0], by_value);
    return us[REPEATS / 2];
}

/* ---- ops ---- */

typedef struct {
    int64_t m, n, k;
    void *x;
    uint16_t *w;
    int n_copies;
    float *out;
} linear_case_t;
static void run_linear(void *ctx, int i) {
    const linear_case_t *c = ctx;
    const epx_weight_t w = {.data = c->w + (int64_t)(i % c->n_copies) * c->n * c->k, .type = EPX_W_BF16, .n = c->n, .k = c->k};
    epx_ops_linear(g_ops, c->x, c->k, &w, NULL, c->m, c->out, c->n);
}
static void bench_linear(const char *name, int64_t n, int64_t k) {
    static const int64_t rows[] = {1, 64, 256, 640, 4096};
    linear_case_t c = {.n = n, .k = k, .n_copies = n > 100000 ? 1 : 8};
    c.x = device_random((size_t)(MAX_ROWS * k));
    c.w = device_random((size_t)(n * k * c.n_copies));
    c.out = device((size_t)n * (n > 100000 ? 1024 : MAX_ROWS) * 4);
    for (int i = 0; i < 5 && (n < 100000 || rows[i] <= 640); i++) {
        c.m = rows[i];
        const double us = time_us(run_linear, &c, 16);
        printf("{\"bench\":\"linear\",\"name\":\"%s\",\"m\":%lld,\"us\":%.1f,\"weight_TB_s\":%.2f,\"TFLOP_s\":%.0f}\n", name,
               (long long)c.m, us, 2.0 * (double)(n * k) / us / 1e6, 2.0 * (double)(c.m * n * k) / us / 1e6);
    }
    epx_ops_free(g_ops, c.x, 0), epx_ops_free(g_ops, c.w, 0), epx_ops_free(g_ops, c.out, 0);
}

enum { E = 64, HIDDEN = 2048, FFN = 768, LAYERS = 3 };
typedef struct {
    epx_expert_weights_t w[LAYERS][E];
    epx_lists_t lists;
    void *out;
} experts_case_t;
static void run_experts(void *ctx, int i) {
    const experts_case_t *c = ctx;
    epx_ops_experts(g_ops, &c->lists, c->w[i % LAYERS], HIDDEN, FFN, c->out);
}
static epx_weight_t matrix(uint16_t *block, int i, int64_t n, int64_t k) {
    return (epx_weight_t){.data = block + (int64_t)i * n * k, .type = EPX_W_BF16, .n = n, .k = k};
}
/* The step's rows tell the ops how many rows an expert will have. */
static void tell_rows(int n_rows, int top_k) {
    static epx_attn_row_t rows[MAX_ROWS];
    static int32_t tokens[MAX_ROWS], block;
    const epx_ops_step_t s = {.n_rows = n_rows, .tokens = tokens, .rows = rows, .page_size = PAGE};
    const epx_router_t r = {
        .n_experts = 8, .top_k = top_k, .score = EPX_SCORE_SOFTMAX, .factor = 1, .n_groups = 1, .top_groups = 1};
    for (int i = 0; i < n_rows; i++) rows[i].block_table = &block;
    float *l = device((size_t)n_rows * 8 * 4), *w = device((size_t)n_rows * 8 * 4);
    int32_t *ids = device((size_t)n_rows * 8 * 4);
    MUST(epx_ops_begin(g_ops, &s));
    epx_ops_router(g_ops, &r, l, n_rows, ids, w);
    epx_ops_free(g_ops, l, 0), epx_ops_free(g_ops, w, 0), epx_ops_free(g_ops, ids, 0);
}
static void bench_experts(void) {
    static const int per_expert[] = {1, 4, 16, 64, 80, 256};
    static experts_case_t c;
    uint16_t *gate = device_random((size_t)LAYERS * E * FFN * HIDDEN), *up = device_random((size_t)LAYERS * E * FFN * HIDDEN);
    uint16_t *down = device_random((size_t)LAYERS * E * FFN * HIDDEN);
    for (int i = 0; i < LAYERS * E; i++)
        c.w[i / E][i % E] = (epx_expert_weights_t){
            .gate = matrix(gate, i, FFN, HIDDEN), .up = matrix(up, i, FFN, HIDDEN), .down = matrix(down, i, HIDDEN, FFN)};
    void *x = device_random((size_t)2048 * HIDDEN);
    const void *base[1] = {x};
    c.out = device((size_t)E * 256 * HIDDEN * 2);
    for (int j = 0; j < 6; j++) {
        const int m = per_expert[j], n = m * E;
        int32_t off[E + 1];
        epx_list_entry_t *entries = malloc((size_t)n * sizeof *entries);
        for (int e = 0; e <= E; e++) off[e] = e * m;
        for (int i = 0; i < n; i++) entries[i] = (epx_list_entry_t){0, (uint32_t)(i * 37 % 2048)};
        c.lists = (epx_lists_t){E,
                                -1,
                                uploaded(off, sizeof off),
                                uploaded(entries, (size_t)n * sizeof *entries),
                                uploaded(base, sizeof base),
                                NULL,
                                HIDDEN * 2,
                                0};
        tell_rows(n / 8 > 0 ? n / 8 : 1, 8);
        const double us = time_us(run_experts, &c, 12), bytes = 3.0 * E * FFN * HIDDEN * 2;
        printf("{\"bench\":\"experts\",\"experts\":%d,\"rows_per_expert\":%d,\"us\":%.1f,\"weight_TB_s\":%.2f,\"of_read_roof\":%."
               "2f,\"TFLOP_s\":%.0f}\n",
               E, m, us, bytes / us / 1e6, bytes / us / 1e6 / 4.25, bytes * m / us / 1e6);
        free(entries);
    }
}

typedef struct {
    epx_attn_row_t *rows;
    int n;
    epx_kv_layer_t kv[2];
    float *q;
    void *out;
} attn_case_t;
static void run_attention(void *ctx, int i) {
    const attn_case_t *c = ctx;
    const epx_attn_t a = {.n_heads = 32, .scale = 0.088f};
    epx_ops_attention(g_ops, &a, c->q, 5120, c->rows, c->n, &c->kv[i % 2], c->out, 4096);
}
static void bench_attention(void) {
    enum { MOST = 640, PAGES = CONTEXT / PAGE };
    static const int batches[] = {1, 64, 256, 640}, prompts[] = {1024, 4096};
    static int32_t tables[MOST][PAGES], prompt_table[4096 / PAGE], tokens[MAX_ROWS];
    static epx_attn_row_t rows[MAX_ROWS];
    const size_t kv = (size_t)MOST * CONTEXT * 4 * 128;
    attn_case_t c = {.rows = rows, .q = device((size_t)MAX_ROWS * 5120 * 4), .out = device((size_t)MAX_ROWS * 4096 * 2)};
    for (int i = 0; i < 2; i++) c.kv[i] = (epx_kv_layer_t){device_random(kv), device_random(kv), PAGE, 4, 128, 0};
    for (int i = 0; i < MOST * PAGES; i++) tables[i / PAGES][i % PAGES] = (int32_t)((int64_t)i * 7919 % (MOST * PAGES));
    for (int i = 0; i < 4096 / PAGE; i++) prompt_table[i] = i * 3;
    for (int b = 0; b < 4; b++) {
        c.n = batches[b];
        for (int i = 0; i < c.n; i++) rows[i] = (epx_attn_row_t){tables[i], CONTEXT - 1};
        const epx_ops_step_t s = {.n_rows = c.n, .tokens = tokens, .rows = rows, .page_size = PAGE};
        MUST(epx_ops_begin(g_ops, &s));
        const double us = time_us(run_attention, &c, 12), bytes = (double)c.n * CONTEXT * 4 * 128 * 4;
        printf("{\"bench\":\"attention_decode\",\"rows\":%d,\"context\":%d,\"us\":%.1f,\"TB_s\":%.2f}\n", c.n, CONTEXT, us,
               bytes / us / 1e6);
    }
    for (int p = 0; p < 2; p++) {
        c.n = prompts[p];
        for (int i = 0; i < c.n; i++) rows[i] = (epx_attn_row_t){prompt_table, i};
        const epx_ops_step_t s = {.n_rows = c.n, .tokens = tokens, .rows = rows, .page_size = PAGE};
        MUST(epx_ops_begin(g_ops, &s));
        const double us = time_us(run_attention, &c, 4), flop = 4.0 * 32 * 128 * 0.5 * c.n * c.n;
        printf("{\"bench\":\"attention_prefill\",\"rows\":%d,\"us\":%.1f,\"TFLOP_s\":%.0f}\n", c.n, us, flop / us / 1e6);
    }
}

/* ---- steps ---- */

typedef struct {
    epx_model_t *model;
    epx_batch_t b;
    epx_world_t *world;
    epx_group_t *group;
    epx_plan_t *plan;
    epx_kv_store_t *kv;
} steps_t;

static void open_model(steps_t *s, const char *dir) {
    epx_model_config_t mc;
    epx_world_config_t wc;
    epx_plan_config_t pc;
    const epx_model_load_t load = {
        .size = sizeof load, .dir = dir, .dummy = 1, .seed = 1, .n_ranks = 1, .attn_tp = 1, .max_rows = MAX_ROWS};
    MUST(epx_model_config_load(dir, &mc));
    epx_world_config_init(&wc);
    wc.bootstrap = "self";
    MUST(epx_world_create(&wc, &s->world));
    MUST(epx_group_create(s->world, NULL, 0, epx_ops_device_idx(g_ops), &s->group));
    const uint64_t start = epx_now_ns();
    MUST(epx_model_create(&mc, &load, g_ops, &s->model));
    printf("{\"bench\":\"dummy_weights\",\"seconds\":%.2f,\"layers\":%d}\n", (double)(epx_now_ns() - start) / 1e9, mc.n_layers);
    epx_plan_config_init(&pc);
    epx_model_plan_config(s->model, &pc);
    MUST(epx_plan_create(s->group, &pc, &s->plan));
    MUST(epx_model_set_plan(s->model, EPX_EXCHANGE_MAIN, s->plan));
    const uint64_t token = (uint64_t)mc.n_layers * 2 * (uint64_t)mc.n_kv_heads * (uint64_t)mc.head_dim * 2;
    const int64_t tokens = (int64_t)((double)epx_ops_free_bytes(g_ops) * 0.9 / (double)token);
    const epx_kv_shape_t shape = {mc.n_layers, mc.n_kv_heads, mc.head_dim, (int32_t)(tokens / PAGE), PAGE, 2, 0};
    MUST(epx_kv_store_create(g_ops, &shape, &s->kv));
    printf("{\"bench\":\"kv\",\"tokens\":%d}\n", shape.n_pages * PAGE);
    s->b.kv = epx_kv_store_layers(s->kv);
}

static void run_step(void *ctx, int i) {
    steps_t *s = ctx;
    (void)i;
    MUST(epx_model_forward(s->model, &s->b));
}

static void one_size(steps_t *s, const char *name, int n_rows, int context, int n_logits, const epx_attn_row_t *rows) {
    static int32_t tokens[MAX_ROWS], logit_rows[MAX_ROWS];
    const int vocab = epx_model_config(s->model)->vocab;
    float *logits = malloc((size_t)n_logits * (size_t)vocab * 4);
    for (int i = 0; i < n_rows; i++) tokens[i] = (int32_t)((int64_t)i * 7919 % vocab);
    for (int i = 0; i < n_logits; i++) logit_rows[i] = n_logits == n_rows ? i : n_rows - 1;
    s->b.n_rows = n_rows, s->b.rows = rows, s->b.tokens = tokens;
    s->b.n_logits = n_logits, s->b.logit_rows = logit_rows, s->b.logits = logits;
    const double ms = time_us(run_step, s, 3) / 1e3;
    for (int i = 0; i < vocab && n_logits; i++)
        if (!isfinite(logits[i])) printf("logit %d is not finite\n", i), exit(1);
    printf("{\"bench\":\"%s\",\"rows\":%d,\"context\":%d,\"logits\":%d,\"ms\":%.2f,\"rows_per_s\":%.0f}\n", name, n_rows, context,
           n_logits, ms, n_rows * 1e3 / ms);
    free(logits);
}

static void bench_steps(const char *dir) {
    enum { MOST = 640, PAGES = CONTEXT / PAGE };
    static const int batches[] = {1, 64, 256, 640}, prompts[] = {1024, 4096};
    static int32_t tables[MOST][PAGES], prompt[4096 / PAGE];
    static epx_attn_row_t rows[MAX_ROWS];
    static steps_t s;
    open_model(&s, dir);
    for (int i = 0; i < MOST * PAGES; i++) tables[i / PAGES][i % PAGES] = i % (s.kv ? 32000 : 1);
    for (int i = 0; i < 4096 / PAGE; i++) prompt[i] = i;
    for (int b = 0; b < 4; b++) {
        for (int i = 0; i < batches[b]; i++) rows[i] = (epx_attn_row_t){tables[i], CONTEXT - 1};
        one_size(&s, "step_decode", batches[b], CONTEXT, 0, rows);
        if (batches[b] <= 64) one_size(&s, "step_decode", batches[b], CONTEXT, batches[b], rows);
    }
    for (int p = 0; p < 2; p++) {
        for (int i = 0; i < prompts[p]; i++) rows[i] = (epx_attn_row_t){prompt, i};
        one_size(&s, "step_prefill", prompts[p], prompts[p], 1, rows);
    }
    epx_plan_destroy(s.plan);
    epx_model_destroy(s.model);
    epx_kv_store_destroy(s.kv);
    epx_group_destroy(s.group);
    epx_world_destroy(s.world);
}

int main(int argc, char **argv) {
    const epx_ops_config_t cfg = {.size = sizeof cfg, .n_threads = 1, .device = "cuda"};
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc < 2 || (strcmp(argv[1], "steps") == 0) != (argc == 3)) {
        fprintf(stderr, "usage: steps_gpu ops | steps DIR\n");
        return 2;
    }
    if (epx_ops_create(&cfg, &g_ops) != EPX_OK) {
        printf("skipped: %s\n", epx_error_message());
        return 77;
    }
    if (argc == 3) {
        bench_steps(argv[2]);
    } else {
        const epx_ops_needs_t needs = {
            .hidden = HIDDEN, .moe_ffn = FFN, .n_heads = 32, .n_kv_heads = 4, .head_dim = 128, .n_experts = 128, .top_k = 8};
        MUST(epx_ops_accept(g_ops, &needs));
        MUST(epx_ops_reserve(g_ops, 32768, 4096, 32, FFN));
        bench_experts();
        bench_attention();
        bench_linear("qkv", 5120, 2048);
        bench_linear("o", 2048, 4096);
        bench_linear("router", 128, 2048);
        bench_linear("lm_head", 151936, 2048);
    }
    epx_ops_destroy(g_ops);
    return 0;
}
