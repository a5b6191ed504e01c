/* The row rule of ops.h: rows computed alone on one thread must be bit-identical to the same rows in any batch, order, chunking,
 * thread count and page size, and in prefill as in decode. For every ISA level of this CPU. */
#include "tests/unit/ops_test_util.h"

enum { TRIALS = 6 };

/* Random non-empty chunk of what is left. */
static int chunk_of(int left) { return 1 + below(below(2) ? left : (left < 5 ? left : 5)); }

static void same_bits(const char *what, int row, const void *a, const void *b, size_t bytes) {
    if (memcmp(a, b, bytes) != 0) fail_msg("%s: row %d differs (EPX_TEST_SEED=%llu)", what, row, (unsigned long long)g_seed);
}

static void linear_case(int n, int k, epx_wtype_t type) {
    enum { M = 70 };
    float *x = random_floats((int64_t)M * k), *px = must_alloc((size_t)M * (size_t)k * 4),
          *want = must_alloc((size_t)M * (size_t)n * 4), *got = must_alloc((size_t)M * (size_t)n * 4);
    test_weight_t w = random_weight(n, k, type), bias = random_weight(1, n, type);
    int order[M];
    for (int i = 0; i < M; i++) order[i] = i;
    for (int i = 0; i < M; i++) epx_ops_linear(g_ops[1], x + i * k, k, &w.w, &bias.w, 1, want + i * n, n);
    for (int trial = 0; trial < TRIALS; trial++) {
        const int m = trial == 0 ? M : 1 + below(M);
        shuffle(order, M);
        for (int i = 0; i < m; i++) memcpy(px + i * k, x + order[i] * k, (size_t)k * 4);
        for (int at = 0, step; at < m; at += step) {
            step = trial < 2 ? m - at : chunk_of(m - at);
            epx_ops_linear(g_ops[1 + below(MAX_THREADS)], px + at * k, k, &w.w, &bias.w, step, got + at * n, n);
        }
        for (int i = 0; i < m; i++) same_bits("linear", i, got + i * n, want + order[i] * n, (size_t)n * 4);
    }
    free(x), free(px), free(want), free(got), free(w.block), free(bias.block);
}

static void linear_body(void) {
    linear_case(130, 2048, EPX_W_BF16);
    linear_case(67, 33, EPX_W_BF16);
    linear_case(70, 200, EPX_W_F32);
    linear_case(3, 31, EPX_W_F32);
    linear_case(129, 7, EPX_W_BF16);
}

static void rows_body(void) {
    enum { M = 300, W = 203, E = 40, K = 5 };
    float *x = random_floats(M * W), *got = must_alloc(M * W * 4), want[W], p[M * K], pw[K];
    test_weight_t w = random_weight(1, W, EPX_W_BF16);
    int32_t ids[M * K], idw[K];
    const epx_router_t r = {
        .n_experts = E, .top_k = K, .renormalize = 1, .factor = 1.0f, .n_groups = 1, .top_groups = 1, .group_best = 1};
    epx_ops_rmsnorm(g_ops[3], x, &w.w, 1e-6f, M, W, got);
    epx_ops_router(g_ops[4], &r, x, M, ids, p);
    for (int i = 0; i < M; i++) {
        epx_ops_rmsnorm(g_ops[1], x + i * W, &w.w, 1e-6f, 1, W, want);
        same_bits("rmsnorm", i, got + i * W, want, sizeof want);
        epx_ops_router(g_ops[1], &r, x + i * E, 1, idw, pw);
        same_bits("router ids", i, ids + i * K, idw, sizeof idw);
        same_bits("router weights", i, p + i * K, pw, sizeof pw);
    }
    free(x), free(got), free(w.block);
}

/* Each (row, expert) alone through the dense form, then lists of random counts, orders and sources. */
static void experts_case(int h, int ffn, epx_wtype_t type) {
    enum { E = 4, ROWS = 30, SRC = 2, MAX_LIST = 400 };
    test_weight_t b[E][3];
    epx_expert_weights_t w[E];
    float *x = random_floats((int64_t)ROWS * h), *want = must_alloc((size_t)(E * ROWS * h) * 4),
          *got = must_alloc((size_t)(MAX_LIST * h) * 4);
    float *copy = must_alloc((size_t)(SRC * ROWS * h) * 4);
    epx_list_entry_t entries[MAX_LIST];
    int32_t off[E + 1] = {0};
    int row_at[SRC][ROWS];
    for (int e = 0; e < E; e++) {
        for (int i = 0; i < 3; i++) b[e][i] = i < 2 ? random_weight(ffn, h, type) : random_weight(h, ffn, type);
        w[e] = (epx_expert_weights_t){b[e][0].w, b[e][1].w, b[e][2].w};
        for (int r = 0; r < ROWS; r++) epx_ops_ffn(g_ops[1], x + r * h, &w[e], 1, h, ffn, want + (e * ROWS + r) * h);
    }
    const void *base[SRC] = {copy, copy + ROWS * h};
    for (int trial = 0; trial < TRIALS; trial++) {
        for (int s = 0; s < SRC; s++) {
            for (int r = 0; r < ROWS; r++) row_at[s][r] = r;
            shuffle(row_at[s], ROWS);
            for (int r = 0; r < ROWS; r++) memcpy(copy + (s * ROWS + r) * h, x + row_at[s][r] * h, (size_t)h * 4);
        }
        for (int e = 0; e < E; e++) off[e + 1] = off[e] + (below(3) == 0 ? 0 : below(trial == 0 ? 100 : 14)); /* trial 0: waves */
        for (int i = 0; i < off[E]; i++) entries[i] = (epx_list_entry_t){(uint32_t)below(SRC), (uint32_t)below(ROWS)};
        const epx_lists_t l = {.n_local_experts = E,
                               .n_rows = off[E],
                               .expert_off = off,
                               .entries = entries,
                               .row_base = base,
                               .row_stride_bytes = (uint64_t)h * 4};
        epx_ops_experts(g_ops[1 + below(MAX_THREADS)], &l, w, h, ffn, got);
        for (int e = 0; e < E; e++)
            for (int i = off[e]; i < off[e + 1]; i++)
                same_bits("experts", i, got + i * h, want + (e * ROWS + row_at[entries[i].src][entries[i].token]) * h,
                          (size_t)h * 4);
    }
    for (int e = 0; e < E; e++) free(b[e][0].block), free(b[e][1].block), free(b[e][2].block);
    free(x), free(want), free(got), free(copy);
}

static void experts_body(void) {
    experts_case(128, 96, EPX_W_BF16);
    experts_case(65, 31, EPX_W_BF16);
    experts_case(33, 70, EPX_W_F32);
}

enum { SEQS = 2, LEN = 150, MAX_PAGES = SEQS * LEN };
typedef struct {
    int heads, kv_heads, dim, ld, page;
    float *raw[SEQS], inv[64]; /* [LEN, ld]: q, k, v before norms */
    int window;
    test_weight_t q_norm, k_norm, sinks; /* sinks: absent in some cases */
    float *pages_k, *pages_v;
    int32_t table[SEQS][LEN];
} attn_case_t;

/* Fresh pages in random places, all NaN. */
static void new_pages(attn_case_t *c, int page) {
    int order[MAX_PAGES];
    const int per_seq = (LEN + page - 1) / page;
    c->page = page;
    for (int i = 0; i < SEQS * per_seq; i++) order[i] = i;
    shuffle(order, SEQS * per_seq);
    for (int s = 0; s < SEQS; s++)
        for (int i = 0; i < per_seq; i++) c->table[s][i] = order[s * per_seq + i];
    for (int64_t i = 0; i < (int64_t)SEQS * per_seq * page * c->kv_heads * c->dim; i++) c->pages_k[i] = c->pages_v[i] = NAN;
}

/* One step over the given rows (sequence, position), results to out[seq][position]. */
static void attn_step(attn_case_t *c, epx_ops_t *ops, const int (*at)[2], int n, float *out[SEQS]) {
    float *x = must_alloc((size_t)(n * c->ld) * 4), *o = must_alloc((size_t)(n * c->heads * c->dim) * 4);
    epx_attn_row_t *rows = must_alloc((size_t)n * sizeof *rows);
    const epx_kv_layer_t kv = {c->pages_k, c->pages_v, c->page, c->kv_heads, c->dim, 0};
    const epx_rope_t rope = {.inv_freq = c->inv, .scale = 1.0f, .dim = c->dim};
    const epx_attn_t attn = {.n_heads = c->heads, .scale = 0.3f, .window = c->window, .sinks = &c->sinks.w};
    const int out_w = c->heads * c->dim;
    for (int i = 0; i < n; i++) {
        memcpy(x + i * c->ld, c->raw[at[i][0]] + at[i][1] * c->ld, (size_t)c->ld * 4);
        rows[i] = (epx_attn_row_t){c->table[at[i][0]], at[i][1]};
    }
    epx_ops_qk_norm_rope_store(ops, x, x + out_w, x + out_w + c->kv_heads * c->dim, c->ld, c->heads, &c->q_norm.w, &c->k_norm.w,
                               1e-6f, &rope, rows, n, &kv);
    epx_ops_attention(ops, &attn, x, c->ld, rows, n, &kv, o, out_w);
    for (int i = 0; i < n; i++) memcpy(out[at[i][0]] + at[i][1] * out_w, o + i * out_w, (size_t)out_w * 4);
    free(x), free(o), free(rows);
}

/* Both sequences to their end in steps of random size; a step may hold rows of both, in order or interleaved. */
static void attn_run(attn_case_t *c, int one_by_one, float *out[SEQS]) {
    int done[SEQS] = {0}, at[SEQS * LEN][2];
    while (done[0] < LEN || done[1] < LEN) {
        int n = 0;
        const int shuffled = !one_by_one && below(3) == 0;
        for (int s = 0; s < SEQS; s++) {
            const int left = LEN - done[s];
            const int take = left == 0 || (one_by_one && n > 0) ? 0 : one_by_one ? 1 : below(4) == 0 ? left : below(left + 1);
            for (int i = 0; i < take; i++, n++) at[n][0] = s, at[n][1] = done[s]++;
        }
        for (int i = n - 1; shuffled && i > 0; i--) {
            const int j = below(i + 1), a = at[i][0], b = at[i][1];
            at[i][0] = at[j][0], at[i][1] = at[j][1], at[j][0] = a, at[j][1] = b;
        }
        if (n > 0) attn_step(c, g_ops[one_by_one ? 1 : 1 + below(MAX_THREADS)], (const int(*)[2])at, n, out);
    }
}

static void attention_case(int heads, int kv_heads, int dim, int window) {
    const int pages[] = {1, 16, 64};
    attn_case_t c = {.heads = heads, .kv_heads = kv_heads, .dim = dim, .ld = (heads + 2 * kv_heads) * dim, .window = window};
    float *want[SEQS], *got[SEQS];
    const size_t out_bytes = (size_t)(heads * dim) * 4;
    c.pages_k = must_alloc((size_t)SEQS * 192 * (size_t)(kv_heads * dim) * 4);
    c.pages_v = must_alloc((size_t)SEQS * 192 * (size_t)(kv_heads * dim) * 4);
    c.q_norm = random_weight(1, dim, EPX_W_BF16), c.k_norm = random_weight(1, dim, EPX_W_BF16);
    if (window > 0) c.sinks = random_weight(1, heads, EPX_W_BF16);
    for (int i = 0; i < dim / 2; i++) c.inv[i] = powf(1e4f, -2.0f * (float)i / (float)dim);
    for (int s = 0; s < SEQS; s++) {
        c.raw[s] = random_floats((int64_t)LEN * c.ld);
        want[s] = must_alloc(LEN * out_bytes), got[s] = must_alloc(LEN * out_bytes);
    }
    new_pages(&c, 16);
    attn_run(&c, 1, want);
    for (int trial = 0; trial < TRIALS; trial++) {
        new_pages(&c, pages[trial % 3]);
        attn_run(&c, 0, got);
        for (int s = 0; s < SEQS; s++)
            for (int p = 0; p < LEN; p++)
                same_bits("attention", p, (char *)got[s] + (size_t)p * out_bytes, (char *)want[s] + (size_t)p * out_bytes,
                          out_bytes);
    }
    for (int s = 0; s < SEQS; s++) {
        for (int i = 0; i < LEN * heads * dim; i++) assert_false(isnan(want[s][i]));
        free(c.raw[s]), free(want[s]), free(got[s]);
    }
    free(c.pages_k), free(c.pages_v), free(c.q_norm.block), free(c.k_norm.block), free(c.sinks.block);
}

static void attention_body(void) {
    attention_case(4, 2, 64, 0);
    attention_case(3, 1, 22, 0);
    attention_case(8, 1, 32, 0);
    attention_case(4, 2, 32, 16);
    attention_case(4, 1, 16, 70);
}

static void linear(void **s) { (void)s, each_isa(linear_body); }
static void rows(void **s) { (void)s, each_isa(rows_body); }
static void experts(void **s) { (void)s, each_isa(experts_body); }
static void attention(void **s) { (void)s, each_isa(attention_body); }

int main(void) {
    seed_init();
    const struct CMUnitTest tests[] = {cmocka_unit_test(linear), cmocka_unit_test(rows), cmocka_unit_test(experts),
                                       cmocka_unit_test(attention)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
