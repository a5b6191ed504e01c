/* The CUDA ops against the CPU ops on random shapes, and the row rule bit by bit. Exits 77 without a GPU.
 * Budgets: a product of bf16 values is summed in f32 (1e-5 of the sum of absolute products); a result that is rounded to bf16
 * once more has 2^-8 of its size; attention rounds q, k, v and probabilities to bf16 (0.02 of the largest value, mean 0.004); a
 * feed-forward rounds its middle (0.02 of the largest output, mean 0.003). Sequence numbers in messages count the cases. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "base/philox.h"
#include "engine/ops/ops.h"

static epx_ops_t *g_cpu, *g_gpu;
static uint64_t g_seed, g_draw;
static int g_bad, g_cases;

#define CHECK(cond, ...)                                               \
    do {                                                               \
        if (!(cond)) {                                                 \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #cond); \
            fprintf(stderr, __VA_ARGS__);                              \
            fprintf(stderr, "\n");                                     \
            if (++g_bad > 20) exit(1);                                 \
        }                                                              \
    } while (0)
#define MUST(expr)                                                                   \
    do {                                                                             \
        if ((expr) != EPX_OK) {                                                      \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, epx_error_message()); \
            exit(1);                                                                 \
        }                                                                            \
    } while (0)

static float uniform(void) { return 2.0f * epx_philox_unit(g_seed, g_draw++) - 1.0f; }
static float rounded(float x) { return epx_bf16_to_f32(epx_f32_to_bf16(x)); }
static void *must(void *p) {
    if (!p) exit(2);
    return p;
}
/* Values that bf16 holds exactly. */
static float *values(int64_t n) {
    float *x = must(malloc((size_t)(n + 1) * 4));
    for (int64_t i = 0; i < n; i++) x[i] = rounded(uniform());
    return x;
}
static void *device(size_t n_bytes) {
    void *p;
    MUST(epx_ops_alloc(g_gpu, n_bytes, &p));
    return p;
}
static void *to_device(const void *from, size_t n_bytes) {
    void *p = device(n_bytes);
    MUST(epx_ops_upload(g_gpu, p, from, n_bytes));
    return p;
}
static void drop(void *p) { epx_ops_free(g_gpu, p, 0); }
static uint16_t *as_bf16(const float *x, int64_t n) {
    uint16_t *y = must(malloc((size_t)(n + 1) * 2));
    for (int64_t i = 0; i < n; i++) y[i] = epx_f32_to_bf16(x[i]);
    return y;
}
static void *rows_to_device(const float *x, int64_t n) {
    uint16_t *y = as_bf16(x, n);
    void *p = to_device(y, (size_t)n * 2);
    free(y);
    return p;
}
static float *rows_from_device(const void *p, int64_t n) {
    uint16_t *y = must(malloc((size_t)(n + 1) * 2));
    float *x = must(malloc((size_t)(n + 1) * 4));
    MUST(epx_ops_download(g_gpu, y, p, (size_t)n * 2));
    for (int64_t i = 0; i < n; i++) x[i] = epx_bf16_to_f32(y[i]);
    free(y);
    return x;
}
static float *from_device(const void *p, int64_t n) {
    float *x = must(malloc((size_t)(n + 1) * 4));
    MUST(epx_ops_download(g_gpu, x, p, (size_t)n * 4));
    return x;
}

/* A bf16 (or f32 vector) weight on both sides. */
typedef struct {
    epx_weight_t cpu, gpu;
} weight_t;
static weight_t weight(int64_t n, int64_t k, int f32) {
    float *x = values(n * k);
    uint16_t *y = as_bf16(x, n * k);
    weight_t w = {{.n = n, .k = k, .type = f32 ? EPX_W_F32 : EPX_W_BF16}, {0}};
    w.cpu.data = f32 ? (void *)x : (void *)y;
    w.gpu = w.cpu;
    w.gpu.data = to_device(w.cpu.data, (size_t)(n * k) * (f32 ? 4 : 2));
    free(f32 ? (void *)y : (void *)x);
    return w;
}
static void drop_weight(weight_t *w) {
    drop((void *)(uintptr_t)w->gpu.data);
    free((void *)(uintptr_t)w->cpu.data);
}

static void compare(const char *what, const float *got, const float *want, int64_t n, double most, double mean) {
    double worst = 0, sum = 0;
    for (int64_t i = 0; i < n; i++) {
        const double d = fabs((double)got[i] - (double)want[i]);
        if (!(d <= worst)) worst = d;
        sum += d;
    }
    g_cases++;
    CHECK(worst <= most && sum <= mean * (double)(n ? n : 1), "%s: worst %g (budget %g), mean %g (budget %g) of %lld", what,
          worst, most, sum / (double)(n ? n : 1), mean, (long long)n);
}
static double largest(const float *x, int64_t n) {
    double m = 1e-30;
    for (int64_t i = 0; i < n; i++) m = fmax(m, fabs((double)x[i]));
    return m;
}

/* ---- memory and rows ---- */

static void test_memory(void) {
    enum { N = 10007 };
    uint16_t *a = must(malloc(N * 2)), *b = must(malloc(N * 2));
    uint16_t *p = device(N * 2);
    MUST(epx_ops_download(g_gpu, b, p, N * 2));
    for (int i = 0; i < N; i++) CHECK(b[i] == 0, "memory is not zeroed at %d", i);
    epx_ops_random(g_cpu, 77 + ((uint64_t)5 << 33), 0.03f, N, a);
    epx_ops_random(g_gpu, 77 + ((uint64_t)5 << 33), 0.03f, N, p);
    MUST(epx_ops_download(g_gpu, b, p, N * 2));
    CHECK(memcmp(a, b, N * 2) == 0, "seeded weights differ");
    epx_ops_fill(g_gpu, 0x3F80, N - 1, p);
    MUST(epx_ops_download(g_gpu, b, p, N * 2));
    CHECK(b[0] == 0x3F80 && b[N - 2] == 0x3F80 && b[N - 1] == a[N - 1], "fill");
    g_cases += 3;
    drop(p), free(a), free(b);
}

static void test_rows(int n, int width) {
    const int64_t all = (int64_t)n * width;
    float *h = values(all), *more = values(all), *gate = values(n), *got, *want = must(malloc((size_t)all * 4 + 4));
    weight_t w = weight(1, width, n % 2), table = weight(50, width, 0);
    int32_t *ids = must(calloc((size_t)n + 1, 4)), *back = must(calloc((size_t)n + 1, 4));
    epx_attn_row_t *rows = must(calloc((size_t)n + 1, sizeof *rows));
    const int32_t block = 0;
    for (int i = 0; i < n; i++) ids[i] = i * 7 % 50, back[i] = n - 1 - i, rows[i] = (epx_attn_row_t){&block, 0};
    const epx_ops_step_t step = {n, ids, rows, n, back, 16};
    MUST(epx_ops_begin(g_gpu, &step));
    void *dh = to_device(h, (size_t)all * 4), *dmore = to_device(more, (size_t)all * 4), *dgate = to_device(gate, (size_t)n * 4);
    void *drows = rows_to_device(more, all), *out = device((size_t)all * 4);
    epx_ops_rmsnorm(g_cpu, h, &w.cpu, 1e-6f, n, width, want);
    epx_ops_rmsnorm(g_gpu, dh, &w.gpu, 1e-6f, n, width, out);
    got = rows_from_device(out, all);
    compare("rmsnorm", got, want, all, 0.004 * largest(want, all), 0.002 * largest(want, all));
    free(got);
    epx_ops_embed(g_cpu, &table.cpu, ids, n, want);
    epx_ops_embed(g_gpu, &table.gpu, ids, n, out);
    got = from_device(out, all);
    compare("embed", got, want, all, 0, 0);
    free(got);
    epx_ops_gather(g_gpu, dh, back, n, width, out);
    epx_ops_gather(g_cpu, h, back, n, width, want);
    got = from_device(out, all);
    compare("gather", got, want, all, 0, 0);
    free(got);
    epx_ops_add(g_gpu, dh, dmore, n, width);
    epx_ops_add_rows(g_gpu, dh, drows, n, width);
    epx_ops_add_gated(g_gpu, dh, dmore, dgate, n, width);
    epx_ops_add(g_cpu, h, more, n, width);
    epx_ops_add_rows(g_cpu, h, more, n, width);
    epx_ops_add_gated(g_cpu, h, more, gate, n, width);
    got = from_device(dh, all);
    compare("add", got, h, all, 1e-6, 1e-6);
    free(got), free(h), free(more), free(gate), free(want), free(ids), free(back), free(rows);
    drop(dh), drop(dmore), drop(dgate), drop(drows), drop(out), drop_weight(&w), drop_weight(&table);
}

static void test_argmax(void) {
    enum { N = 5, WIDTH = 3001 };
    float *x = values(N * WIDTH);
    int32_t want[N], got[N];
    x[1 * WIDTH + 2999] = x[1 * WIDTH + 7] = 3.0f; /* the first of equal ones */
    x[2 * WIDTH + 100] = NAN;
    for (int i = 0; i < WIDTH; i++) x[3 * WIDTH + i] = -INFINITY;
    x[4 * WIDTH + 3000] = 2.0f, x[4 * WIDTH] = -INFINITY;
    void *dx = to_device(x, N * WIDTH * 4), *out = device(N * 4);
    epx_ops_argmax(g_cpu, x, N, WIDTH, want);
    epx_ops_argmax(g_gpu, dx, N, WIDTH, out);
    MUST(epx_ops_download(g_gpu, got, out, sizeof got));
    CHECK(memcmp(want, got, sizeof got) == 0 && want[1] == 7 && want[2] == -1 && want[3] == -1 && want[4] == 3000, "argmax");
    g_cases++;
    drop(dx), drop(out), free(x);
}

/* ---- matrix products ---- */

static void test_linear(int m, int n, int k, int with_bias) {
    const int ldx = k + 8, ldo = n + 3;
    float *x = values((int64_t)m * ldx), *want = must(malloc((size_t)m * (size_t)ldo * 4 + 4)), *got, *alone;
    weight_t w = weight(n, k, 0), w2 = weight(5, k, 0), bias = weight(1, n, with_bias == 2);
    void *dx = rows_to_device(x, (int64_t)m * ldx), *out = device((size_t)m * (size_t)ldo * 4 + 4);
    for (int64_t i = 0; i < (int64_t)m * ldo; i++) want[i] = 12345.0f;
    MUST(epx_ops_upload(g_gpu, out, want, (size_t)m * (size_t)ldo * 4));
    epx_ops_linear(g_cpu, x, ldx, &w.cpu, with_bias ? &bias.cpu : NULL, m, want, ldo);
    epx_ops_linear(g_gpu, dx, ldx, &w.gpu, with_bias ? &bias.gpu : NULL, m, out, ldo);
    got = from_device(out, (int64_t)m * ldo);
    compare("linear", got, want, (int64_t)m * ldo, 1e-5 * 0.25 * k + 1e-6, 1e-6 * 0.25 * k + 1e-7);
    for (int row = 0; row<m; row += m> 40 ? 37 : 1) { /* the row by itself, beside another matrix */
        void *one = device((size_t)n * 4 + 64);
        const epx_linear_t parts[2] = {{w2.gpu, {0}, (float *)one + n}, {w.gpu, with_bias ? bias.gpu : (epx_weight_t){0}, one}};
        epx_ops_linears(g_gpu, (const uint16_t *)dx + (int64_t)row * ldx, ldx, parts, 2, 1, n + 5);
        alone = from_device(one, n);
        CHECK(memcmp(alone, got + (int64_t)row * ldo, (size_t)n * 4) == 0, "linear %d x %d x %d: bits of row %d depend on M", m,
              n, k, row);
        free(alone);
        drop(one);
    }
    free(x), free(want), free(got);
    drop(dx), drop(out), drop_weight(&w), drop_weight(&w2), drop_weight(&bias);
}

/* Experts' weights, one behind the other, on both sides. */
typedef struct {
    int n;
    epx_expert_weights_t *cpu, *gpu;
    weight_t gate, up, down;
} experts_t;
static epx_weight_t part(const epx_weight_t *w, int64_t n, int64_t k, int e, size_t elem) {
    return (epx_weight_t){.data = (const char *)w->data + (size_t)(e * n * k) * elem, .type = w->type, .n = n, .k = k};
}
static experts_t make_experts(int n, int64_t hidden, int64_t ffn) {
    experts_t x = {.n = n, .cpu = must(calloc((size_t)n, sizeof *x.cpu)), .gpu = must(calloc((size_t)n, sizeof *x.gpu))};
    x.gate = weight(n * ffn, hidden, 0), x.up = weight(n * ffn, hidden, 0), x.down = weight(n * hidden, ffn, 0);
    for (int e = 0; e < n; e++) {
        x.cpu[e] = (epx_expert_weights_t){.gate = part(&x.gate.cpu, ffn, hidden, e, 2),
                                          .up = part(&x.up.cpu, ffn, hidden, e, 2),
                                          .down = part(&x.down.cpu, hidden, ffn, e, 2)};
        x.gpu[e] = (epx_expert_weights_t){.gate = part(&x.gate.gpu, ffn, hidden, e, 2),
                                          .up = part(&x.up.gpu, ffn, hidden, e, 2),
                                          .down = part(&x.down.gpu, hidden, ffn, e, 2)};
    }
    return x;
}
static void drop_experts(experts_t *x) {
    free(x->cpu), free(x->gpu);
    drop_weight(&x->gate), drop_weight(&x->up), drop_weight(&x->down);
}

/* The number of rows in the step chooses the kernel of the experts; it must not change their bits. */
static void tell_rows(int n) {
    enum { MOST = 600, E = 8 };
    static float logits[MOST * E];
    static int32_t ids[MOST];
    static epx_attn_row_t rows[MOST];
    static const int32_t block = 0;
    const epx_router_t r = {.n_experts = E, .top_k = 1, .score = EPX_SCORE_SOFTMAX, .factor = 1, .n_groups = 1, .top_groups = 1};
    const epx_ops_step_t step = {.n_rows = n, .tokens = ids, .rows = rows, .page_size = 16};
    for (int i = 0; i < n; i++) rows[i].block_table = &block;
    MUST(epx_ops_begin(g_gpu, &step));
    void *dl = to_device(logits, sizeof logits), *di = device(MOST * 4), *dw = device(MOST * 4);
    epx_ops_router(g_gpu, &r, dl, n, di, dw);
    MUST(epx_ops_sync(g_gpu));
    drop(dl), drop(di), drop(dw);
}

/* Two sources of tokens; expert e has counts[e] rows of them. `hint` rows are told to begin(), which chooses the kernel only. */
static float *run_experts(const experts_t *x, const int *counts, const float *tokens, int n_tokens, int64_t hidden, int64_t ffn,
                          int hint, float *out_cpu) {
    int n = 0;
    for (int e = 0; e < x->n; e++) n += counts[e];
    int32_t *off = must(calloc((size_t)x->n + 1, 4));
    epx_list_entry_t *entries = must(calloc((size_t)n + 1, sizeof *entries));
    for (int e = 0, i = 0; e < x->n; e++) {
        for (int j = 0; j < counts[e]; j++, i++)
            entries[i] = (epx_list_entry_t){(uint32_t)(j % 2), (uint32_t)((j * 5 + e) % n_tokens)};
        off[e + 1] = i;
    }
    const int64_t half = (int64_t)n_tokens * hidden;
    void *drows = rows_to_device(tokens, 2 * half), *out = device((size_t)n * (size_t)hidden * 2 + 4);
    const void *base[2] = {tokens, tokens + half}, *dbase[2] = {drows, (uint16_t *)drows + half};
    void *doff = to_device(off, (size_t)(x->n + 1) * 4), *dentries = to_device(entries, (size_t)n * sizeof *entries);
    void *dbases = to_device(dbase, sizeof dbase);
    epx_lists_t l = {x->n, n, off, entries, base, NULL, (uint64_t)hidden * 4, 0};
    const epx_lists_t d = {x->n, -1, doff, dentries, dbases, NULL, (uint64_t)hidden * 2, 0};
    tell_rows(hint);
    if (out_cpu) epx_ops_experts(g_cpu, &l, x->cpu, hidden, ffn, out_cpu);
    epx_ops_experts(g_gpu, &d, x->gpu, hidden, ffn, out);
    float *got = rows_from_device(out, (int64_t)n * hidden);
    drop(drows), drop(out), drop(doff), drop(dentries), drop(dbases);
    free(off), free(entries);
    return got;
}

static void test_experts(int64_t hidden, int64_t ffn) {
    enum { N = 6, TOKENS = 90 };
    const int counts[N] = {3, 0, 17, 1, 140, 65}, fewer[N] = {3, 0, 17, 1, 0, 0};
    experts_t x = make_experts(N, hidden, ffn);
    float *tokens = values(2 * TOKENS * hidden), *want = must(malloc(226 * (size_t)hidden * 4));
    float *got = run_experts(&x, counts, tokens, TOKENS, hidden, ffn, 0, want);
    const double size = largest(want, 226 * hidden);
    compare("experts", got, want, 226 * hidden, 0.02 * size, 0.003 * size);
    float *again = run_experts(&x, fewer, tokens, TOKENS, hidden, ffn, 0, NULL);
    CHECK(memcmp(again, got, 21 * (size_t)hidden * 4) == 0, "experts: bits depend on other rows");
    free(again);
    for (int hint = 200; hint <= 600; hint += 400) {
        again = run_experts(&x, counts, tokens, TOKENS, hidden, ffn, hint, NULL);
        CHECK(memcmp(again, got, 226 * (size_t)hidden * 4) == 0, "experts: bits depend on the tile, hint %d", hint);
        free(again);
    }
    free(got);
    /* dense: the other tile shapes, f32 result */
    static const int dense_rows[] = {1, 12, 13, 64, 65, 150};
    void *dx = rows_to_device(tokens, 2 * TOKENS * hidden), *out = device((size_t)150 * (size_t)hidden * 4);
    float *first = NULL;
    for (int i = 0; i < 6; i++) {
        const int n = dense_rows[i];
        epx_ops_ffn(g_cpu, tokens, &x.cpu[2], n, hidden, ffn, want);
        epx_ops_ffn(g_gpu, dx, &x.gpu[2], n, hidden, ffn, out);
        got = from_device(out, n * hidden);
        compare("ffn", got, want, n * hidden, 0.02 * size, 0.003 * size);
        if (!first) first = got;
        else CHECK(memcmp(first, got, (size_t)hidden * 4) == 0, "ffn of %d rows: bits of row 0 depend on their number", n);
        if (got != first) free(got);
    }
    free(first), free(tokens), free(want);
    drop(dx), drop(out), drop_experts(&x);
}

/* ---- router ---- */

static void test_router(int n_rows, int n_experts, int top_k, int kind) {
    weight_t bias = weight(1, n_experts, 1);
    const epx_router_t cpu = {.n_experts = n_experts,
                              .top_k = top_k,
                              .score = kind == 0 ? EPX_SCORE_SOFTMAX : EPX_SCORE_SIGMOID,
                              .renormalize = kind != 1,
                              .factor = kind == 2 ? 2.5f : 1.0f,
                              .n_groups = kind == 2 ? 4 : 1,
                              .top_groups = kind == 2 ? 2 : 1,
                              .group_best = 2,
                              .bias = kind == 0 ? NULL : &bias.cpu};
    epx_router_t gpu = cpu;
    if (gpu.bias) gpu.bias = &bias.gpu;
    const int64_t n = (int64_t)n_rows * top_k;
    float *logits = must(malloc((size_t)n_rows * (size_t)n_experts * 4)), *weights = must(malloc((size_t)n * 4)), *got;
    int32_t *ids = must(malloc((size_t)n * 4)), *got_ids = must(malloc((size_t)n * 4));
    for (int64_t i = 0; i < (int64_t)n_rows * n_experts; i++) logits[i] = i < n_experts ? 1.5f : 8 * uniform(); /* row 0: ties */
    void *dl = to_device(logits, (size_t)n_rows * (size_t)n_experts * 4), *di = device((size_t)n * 4),
         *dw = device((size_t)n * 4);
    epx_ops_router(g_cpu, &cpu, logits, n_rows, ids, weights);
    epx_ops_router(g_gpu, &gpu, dl, n_rows, di, dw);
    MUST(epx_ops_download(g_gpu, got_ids, di, (size_t)n * 4));
    got = from_device(dw, n);
    CHECK(memcmp(ids, got_ids, (size_t)n * 4) == 0, "router kind %d, E %d, K %d: other experts", kind, n_experts, top_k);
    compare("router", got, weights, n, 1e-5, 1e-6);
    free(logits), free(weights), free(got), free(ids), free(got_ids);
    drop(dl), drop(di), drop(dw), drop_weight(&bias);
}

/* ---- attention ---- */

enum { PAGE = 16, MAX_PAGES = 64, N_SEQ = 3 };
typedef struct {
    int n_heads, n_kv, dim, ld;
    weight_t q_norm, k_norm;
    epx_rope_t rope_cpu, rope_gpu;
    epx_kv_layer_t kv_cpu, kv_gpu;
    int32_t tables[N_SEQ][MAX_PAGES];
    float *qkv; /* [N_SEQ][MAX_PAGES * PAGE, ld] inputs of every position */
} attn_case_t;

typedef struct {
    int seq, position;
} place_t;

/* One step of rows at `places` on both; returns the device's output, and the CPU's in *out_cpu. */
static float *attend(const attn_case_t *c, const place_t *places, int n, float **out_cpu) {
    const int64_t width = (int64_t)c->n_heads * c->dim, kv = (int64_t)c->n_kv * c->dim;
    const epx_attn_t attn = {.n_heads = c->n_heads, .scale = 1.0f / sqrtf((float)c->dim)};
    epx_attn_row_t *rows = must(malloc((size_t)n * sizeof *rows));
    int32_t *zero = must(calloc((size_t)n, 4));
    float *x = must(malloc((size_t)n * (size_t)c->ld * 4));
    for (int i = 0; i < n; i++) {
        rows[i] = (epx_attn_row_t){c->tables[places[i].seq], places[i].position};
        memcpy(x + (int64_t)i * c->ld, c->qkv + ((int64_t)places[i].seq * MAX_PAGES * PAGE + places[i].position) * c->ld,
               (size_t)c->ld * 4);
    }
    const epx_ops_step_t step = {n, zero, rows, 0, NULL, PAGE};
    void *dx = to_device(x, (size_t)n * (size_t)c->ld * 4), *out = device((size_t)n * (size_t)width * 2);
    float *dq = dx, *cpu = must(malloc((size_t)n * (size_t)width * 4));
    MUST(epx_ops_begin(g_gpu, &step));
    epx_ops_qk_norm_rope_store(g_gpu, dq, dq + width, dq + width + kv, c->ld, c->n_heads, &c->q_norm.gpu, &c->k_norm.gpu, 1e-6f,
                               &c->rope_gpu, rows, n, &c->kv_gpu);
    epx_ops_attention(g_gpu, &attn, dq, c->ld, rows, n, &c->kv_gpu, out, width);
    epx_ops_qk_norm_rope_store(g_cpu, x, x + width, x + width + kv, c->ld, c->n_heads, &c->q_norm.cpu, &c->k_norm.cpu, 1e-6f,
                               &c->rope_cpu, rows, n, &c->kv_cpu);
    epx_ops_attention(g_cpu, &attn, x, c->ld, rows, n, &c->kv_cpu, cpu, width);
    float *got = rows_from_device(out, n * width);
    if (out_cpu) *out_cpu = cpu;
    else free(cpu);
    free(rows), free(zero), free(x);
    drop(dx), drop(out);
    return got;
}

static attn_case_t make_case(int n_heads, int n_kv, int dim, int whole_norm, int interleaved) {
    const epx_ops_needs_t needs = {
        .hidden = 2048, .n_heads = n_heads, .n_kv_heads = n_kv, .head_dim = dim, .n_experts = 8, .top_k = 8};
    MUST(epx_ops_accept(g_gpu, &needs));
    attn_case_t c = {n_heads, n_kv, dim, (n_heads + 2 * n_kv) * dim, .qkv = NULL};
    float freq[64];
    const size_t n = (size_t)N_SEQ * MAX_PAGES * PAGE * (size_t)n_kv * (size_t)dim;
    c.q_norm = weight(1, whole_norm ? n_heads * dim : dim, 0);
    c.k_norm = weight(1, whole_norm ? n_kv * dim : dim, 0);
    for (int i = 0; i < dim / 2; i++) freq[i] = powf(10000.0f, -2.0f * (float)i / (float)dim);
    float *own = must(malloc(sizeof freq));
    memcpy(own, freq, sizeof freq);
    c.rope_cpu = (epx_rope_t){own, 1.0f, 0, interleaved ? dim / 2 : dim, interleaved};
    c.rope_gpu = c.rope_cpu;
    c.rope_gpu.inv_freq = to_device(freq, sizeof freq);
    c.kv_cpu = (epx_kv_layer_t){must(calloc(n, 4)), must(calloc(n, 4)), PAGE, n_kv, dim, 0};
    c.kv_gpu = (epx_kv_layer_t){device(n * 2), device(n * 2), PAGE, n_kv, dim, 0};
    for (int s = 0; s < N_SEQ; s++)
        for (int p = 0; p < MAX_PAGES; p++) c.tables[s][p] = (p * 7 % MAX_PAGES) * N_SEQ + s;
    c.qkv = values((int64_t)N_SEQ * MAX_PAGES * PAGE * c.ld);
    return c;
}

static void drop_case(attn_case_t *c) {
    drop_weight(&c->q_norm), drop_weight(&c->k_norm);
    free((void *)(uintptr_t)c->rope_cpu.inv_freq), drop((void *)(uintptr_t)c->rope_gpu.inv_freq);
    free(c->kv_cpu.k_pages), free(c->kv_cpu.v_pages), drop(c->kv_gpu.k_pages), drop(c->kv_gpu.v_pages);
    free(c->qkv);
}

/* Prefill in chunks, then rows alone, then the same rows in other company: bits must be the same. */
static void test_attention(int n_heads, int n_kv, int dim, int whole_norm, int interleaved) {
    attn_case_t c = make_case(n_heads, n_kv, dim, whole_norm, interleaved);
    const int lengths[N_SEQ] = {1, 300, 700}, chunk = 150;
    const int64_t width = (int64_t)n_heads * dim;
    place_t *places = must(malloc(1024 * sizeof *places));
    float *cpu, *got, *prefill = must(malloc(700 * (size_t)width * 4));
    char what[64];
    snprintf(what, sizeof what, "attention %d/%d heads of %d", n_heads, n_kv, dim);
    for (int s = 0; s < N_SEQ; s++)
        for (int first = 0; first < lengths[s]; first += chunk) {
            int n = 0;
            for (; n < chunk && first + n < lengths[s]; n++) places[n] = (place_t){s, first + n};
            got = attend(&c, places, n, &cpu);
            compare(what, got, cpu, n * width, 0.02, 0.004);
            if (s == 2) memcpy(prefill + first * width, got, (size_t)(n * width) * 4);
            free(got), free(cpu);
        }
    static const place_t alone[] = {{2, 0},   {1, 17},  {2, 31},  {2, 32},  {0, 0},   {2, 255}, {1, 256},
                                    {2, 256}, {2, 257}, {2, 511}, {2, 512}, {1, 299}, {2, 699}};
    const int n_alone = sizeof alone / sizeof alone[0];
    got = attend(&c, alone, n_alone, &cpu);
    compare(what, got, cpu, n_alone * width, 0.02, 0.004);
    for (int i = 0; i < n_alone; i++)
        if (alone[i].seq == 2)
            CHECK(memcmp(got + i * width, prefill + alone[i].position * width, (size_t)width * 4) == 0,
                  "%s: bits of position %d differ between decode and prefill", what, alone[i].position);
    free(got), free(cpu), free(prefill), free(places);
    drop_case(&c);
}

static void run_all(void) {
    static const int rows[] = {0, 1, 3, 16, 17, 64, 65, 129, 300}, columns[] = {1, 8, 33, 130}, depths[] = {8, 72, 256, 2048};
    test_memory();
    test_argmax();
    test_rows(1, 2048), test_rows(5, 64), test_rows(33, 200), test_rows(0, 64);
    for (int i = 0; i < 9; i++)
        for (int j = 0; j < 4; j++)
            for (int k = 0; k < 4; k++) test_linear(rows[i], columns[j], depths[k], (i + j + k) % 3);
    test_linear(200, 4000, 512, 1); /* large tiles */
    printf("products done: %d cases, %d bad\n", g_cases, g_bad);
    test_experts(64, 40), test_experts(2048, 768), test_experts(256, 128);
    printf("experts done: %d cases, %d bad\n", g_cases, g_bad);
    for (int kind = 0; kind < 3; kind++)
        test_router(9, 16, 4, kind), test_router(70, 128, 8, kind), test_router(1, 512, 10, kind);
    printf("router done: %d cases, %d bad\n", g_cases, g_bad);
    test_attention(8, 2, 32, 0, 0), test_attention(32, 4, 128, 0, 0), test_attention(16, 16, 64, 1, 1);
    test_attention(14, 2, 64, 0, 0), test_attention(40, 2, 128, 0, 0);
}

int main(void) {
    const char *seed = getenv("EPX_TEST_SEED");
    const epx_ops_config_t cpu = {.size = sizeof cpu, .n_threads = 8};
    const epx_ops_config_t gpu = {.size = sizeof gpu, .n_threads = 1, .device = "cuda"};
    const epx_ops_needs_t needs = {.hidden = 2048, .n_heads = 32, .n_kv_heads = 4, .head_dim = 128, .n_experts = 8, .top_k = 8};
    setvbuf(stdout, NULL, _IOLBF, 0);
    g_seed = seed ? strtoull(seed, NULL, 0) : 20261201u;
    printf("EPX_TEST_SEED=%llu\n", (unsigned long long)g_seed);
    if (epx_ops_create(&gpu, &g_gpu) != EPX_OK) {
        printf("skipped: %s\n", epx_error_message());
        return 77;
    }
    MUST(epx_ops_create(&cpu, &g_cpu));
    MUST(epx_ops_accept(g_gpu, &needs));
    MUST(epx_ops_reserve(g_gpu, 4096, 2048, 40, 2048));
    MUST(epx_ops_reserve(g_cpu, 4096, 2048, 40, 2048));
    run_all();
    MUST(epx_ops_sync(g_gpu));
    printf("ops_gpu: %d cases compared, %d failures\n", g_cases, g_bad);
    epx_ops_destroy(g_gpu);
    epx_ops_destroy(g_cpu);
    return g_bad ? 1 : 0;
}
