/* Every op against a plain double-precision computation. Budgets: a sum of n products in f32 in any order is off by at most
 * (n + 8) 2^-24 times the sum of magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1); functions of
 * such sums state theirs. */
#include "tests/unit/ops_test_util.h"

static const int g_ks[] = {1, 7, 31, 33, 128, 200, 2048};
static const int g_ns[] = {1, 3, 130};
static const int g_ms[] = {1, 2, 3, 4, 5, 6, 7, 11, 13, 33, 70};
#define N_OF(a) ((int)(sizeof(a) / sizeof((a)[0])))
#define U 0x1p-24

static void check_linear(int m, int n, int k, epx_wtype_t type, int threads) {
    const int ldx = k + 3, ldo = n + 2;
    float *x = random_floats((int64_t)m * ldx), *out = random_floats((int64_t)m * ldo),
          *before = must_alloc((size_t)(m * ldo) * 4);
    test_weight_t w = random_weight(n, k, type), b = random_weight(1, n, type);
    const int with_bias = below(2);
    memcpy(before, out, (size_t)(m * ldo) * 4);
    epx_ops_linear(g_ops[threads], x, ldx, &w.w, with_bias ? &b.w : NULL, m, out, ldo);
    for (int i = 0; i < m; i++) {
        for (int j = 0; j < n; j++) {
            double sum = with_bias ? weight_at(&b.w, 0, j) : 0.0, mag = fabs(sum);
            for (int c = 0; c < k; c++) {
                const double p = (double)x[i * ldx + c] * weight_at(&w.w, j, c);
                sum += p, mag += fabs(p);
            }
            if (!(fabs(out[i * ldo + j] - sum) <= (k + 8) * U * mag))
                fail_msg("linear m %d n %d k %d type %d at %d,%d: %g, want %g", m, n, k, type, i, j, out[i * ldo + j], sum);
        }
        assert_memory_equal(out + i * ldo + n, before + i * ldo + n, 2 * sizeof(float));
    }
    free(x), free(out), free(before), free(w.block), free(b.block);
}

static void linear_body(void) {
    for (int a = 0; a < N_OF(g_ks); a++)
        for (int b = 0; b < N_OF(g_ns); b++)
            for (int type = 0; type < 2; type++) {
                check_linear(g_ms[below(N_OF(g_ms))], g_ns[b], g_ks[a], (epx_wtype_t)type, 1 + below(MAX_THREADS));
                check_linear(1, g_ns[b], g_ks[a], (epx_wtype_t)type, 1);
            }
    for (int i = 0; i < N_OF(g_ms); i++) check_linear(g_ms[i], 37, 70, i % 2 ? EPX_W_F32 : EPX_W_BF16, 2);
    check_linear(300, 5, 40, EPX_W_BF16, 3); /* more rows than scratch holds: two waves */
}

static void check_norm(int m, int width, epx_wtype_t type) {
    float *x = random_floats((int64_t)m * width), *out = must_alloc((size_t)(m * width) * 4);
    test_weight_t w = random_weight(1, width, type);
    epx_ops_rmsnorm(g_ops[2], x, &w.w, 1e-6f, m, width, out);
    for (int i = 0; i < m; i++) {
        double ss = 0;
        for (int c = 0; c < width; c++) ss += (double)x[i * width + c] * x[i * width + c];
        for (int c = 0; c < width; c++) {
            const double want = x[i * width + c] / sqrt(ss / width + 1e-6) * weight_at(&w.w, 0, c);
            if (!(fabs(out[i * width + c] - want) <= (width + 8) * U * fabs(want) + 1e-38)) /* sum, root, quotient, 2 products */
                fail_msg("rmsnorm width %d: %g, want %g", width, out[i * width + c], want);
        }
    }
    epx_ops_rmsnorm(g_ops[1], x, &w.w, 1e-6f, m, width, x);
    assert_memory_equal(x, out, (size_t)(m * width) * 4);
    free(x), free(out), free(w.block);
}

static void rows_body(void) {
    for (int a = 0; a < N_OF(g_ks); a++)
        for (int type = 0; type < 2; type++) check_norm(1 + below(5), g_ks[a], (epx_wtype_t)type);
    test_weight_t table = random_weight(50, 33, EPX_W_BF16);
    float *out = must_alloc(20 * 33 * 4), *sum = random_floats(20 * 33), *old = must_alloc(20 * 33 * 4);
    int32_t ids[20];
    for (int i = 0; i < 20; i++) ids[i] = below(50);
    epx_ops_embed(g_ops[2], &table.w, ids, 20, out);
    for (int i = 0; i < 20; i++)
        for (int c = 0; c < 33; c++) assert_true(out[i * 33 + c] == weight_at(&table.w, ids[i], c));
    memcpy(old, sum, 20 * 33 * 4);
    epx_ops_add(g_ops[2], sum, out, 20, 33);
    for (int i = 0; i < 20 * 33; i++) assert_true(sum[i] == old[i] + out[i]);
    free(out), free(sum), free(old), free(table.block);
}

/* down(silu(gate) up) with width 1 and weights 1 is silu(x) x: the activation alone. */
static void silu_body(void) {
    const float one = 1.0f;
    const epx_weight_t w1 = {.data = &one, .type = EPX_W_F32, .n = 1, .k = 1};
    const epx_expert_weights_t w = {w1, w1, w1};
    enum { N = 4000 };
    float *x = must_alloc(N * 4), *out = must_alloc(N * 4);
    for (int i = 0; i < N; i++) x[i] = uniform() * (i % 3 == 0 ? 1.0f : i % 3 == 1 ? 20.0f : 120.0f);
    x[0] = 0.0f, x[1] = -0.0f, x[2] = 88.8f, x[3] = -88.8f, x[4] = 1e30f, x[5] = -200.0f, x[6] = 1e-30f;
    epx_ops_ffn(g_ops[1], x, &w, N, 1, 1, out);
    for (int i = 0; i < N; i++) {
        const double want = (double)x[i] * x[i] / (1.0 + exp(-(double)x[i]));
        if (isinf((float)want)) assert_true(isinf(out[i]));
        else if (!(fabs(out[i] - want) <= 6 * U * 2 * fabs(want) + 1e-34)) /* exp 2 ulp, 3 roundings; below -88.7 silu is 0 */
            fail_msg("silu(%g) x: %.9g, want %.9g", x[i], out[i], want);
    }
    const float nan = NAN;
    epx_ops_ffn(g_ops[1], &nan, &w, 1, 1, 1, out);
    assert_true(isnan(out[0]));
    free(x), free(out);
}

static double expert_ref(const float *x, const epx_expert_weights_t *w, int h, int ffn, int o, double *out_mag) {
    double sum = 0, mag = 0;
    for (int i = 0; i < ffn; i++) {
        double g = 0, u = 0, gm = 0, um = 0;
        for (int c = 0; c < h; c++) {
            g += x[c] * weight_at(&w->gate, i, c), u += x[c] * weight_at(&w->up, i, c);
            gm += fabs(x[c] * weight_at(&w->gate, i, c)), um += fabs(x[c] * weight_at(&w->up, i, c));
        }
        const double d = weight_at(&w->down, o, i);
        sum += d * u * g / (1 + exp(-g));
        mag += fabs(d) * (um * (fabs(g) + 1.1 * gm)); /* |silu'| <= 1.1; errors of g and u carried to first order */
    }
    *out_mag = mag;
    return sum;
}

static void check_experts(int h, int ffn, epx_wtype_t type, int n_experts, int max_per_expert) {
    enum { SRC = 3, TOKENS = 40 };
    const int stride = h + 5;
    float *rows[SRC];
    const void *base[SRC];
    test_weight_t blocks[3 * 8];
    epx_expert_weights_t w[8];
    int32_t off[9] = {0};
    for (int s = 0; s < SRC; s++) base[s] = rows[s] = random_floats((int64_t)TOKENS * stride);
    for (int e = 0; e < n_experts; e++) {
        blocks[3 * e] = random_weight(ffn, h, type), blocks[3 * e + 1] = random_weight(ffn, h, type);
        blocks[3 * e + 2] = random_weight(h, ffn, type);
        w[e] = (epx_expert_weights_t){blocks[3 * e].w, blocks[3 * e + 1].w, blocks[3 * e + 2].w};
        off[e + 1] = off[e] + below(max_per_expert + 1);
    }
    epx_list_entry_t *entries = must_alloc(sizeof *entries * (size_t)off[n_experts]);
    for (int i = 0; i < off[n_experts]; i++) entries[i] = (epx_list_entry_t){(uint32_t)below(SRC), (uint32_t)below(TOKENS)};
    const epx_lists_t lists = {.n_local_experts = n_experts,
                               .n_rows = off[n_experts],
                               .expert_off = off,
                               .entries = entries,
                               .row_base = base,
                               .row_stride_bytes = (uint64_t)stride * 4};
    float *out = must_alloc(sizeof *out * (size_t)(off[n_experts] * h));
    epx_ops_experts(g_ops[1 + below(MAX_THREADS)], &lists, w, h, ffn, out);
    for (int e = 0; e < n_experts; e++)
        for (int i = off[e]; i < off[e + 1]; i++) {
            const int o = below(h);
            double mag, want = expert_ref(rows[entries[i].src] + entries[i].token * stride, &w[e], h, ffn, o, &mag);
            if (!(fabs(out[i * h + o] - want) <= (h + ffn + 24) * U * mag + 1e-30))
                fail_msg("experts h %d ffn %d row %d: %g, want %g", h, ffn, i, out[i * h + o], want);
        }
    for (int s = 0; s < SRC; s++) free(rows[s]);
    for (int b = 0; b < 3 * n_experts; b++) free(blocks[b].block);
    free(entries), free(out);
}

static void experts_body(void) {
    check_experts(33, 31, EPX_W_BF16, 8, 9);
    check_experts(64, 200, EPX_W_BF16, 5, 20);
    check_experts(31, 65, EPX_W_F32, 3, 7);
    check_experts(16, 8, EPX_W_BF16, 8, 100); /* several waves */
    check_experts(7, 1, EPX_W_BF16, 2, 0);    /* no rows at all */
}

/* A softmax weight is off by at most n_experts + 12 roundings relative. */
static void router_body(void) {
    enum { M = 9, E = 61, K = 6 };
    float *logits = random_floats(M * E), w[M * K];
    int32_t ids[M * K];
    epx_router_t router = {.n_experts = E, .top_k = K, .factor = 1.0f, .n_groups = 1, .top_groups = 1, .group_best = 1};
    for (int i = 0; i < M * E; i++) logits[i] *= 10.0f;
    for (int e = 0; e < E; e++) logits[E + e] = 1.5f; /* all equal: lowest ids */
    logits[2 * E + 40] = logits[2 * E + 3] = logits[2 * E + 17] = 30.0f;
    for (int renorm = 0; renorm < 2; renorm++) {
        router.renormalize = renorm;
        epx_ops_router(g_ops[1], &router, logits, M, ids, w);
        for (int i = 0; i < M; i++) {
            double total = 0, chosen = 0, max = -1e30;
            for (int e = 0; e < E; e++) max = fmax(max, logits[i * E + e]);
            for (int e = 0; e < E; e++) total += exp(logits[i * E + e] - max);
            int used[E] = {0};
            for (int k = 0; k < K; k++) {
                int best = -1;
                for (int e = 0; e < E; e++)
                    if (!used[e] && (best < 0 || logits[i * E + e] > logits[i * E + best])) best = e;
                used[best] = 1;
                assert_int_equal(ids[i * K + k], best);
                chosen += exp(logits[i * E + best] - max) / total;
            }
            for (int k = 0; k < K; k++) {
                const double want = exp(logits[i * E + ids[i * K + k]] - max) / total / (renorm ? chosen : 1);
                assert_true(fabs(w[i * K + k] - want) <= (E + 12) * U * 2 * want);
            }
        }
    }
    logits[5] = NAN; /* ids stay legal whatever the logits are */
    epx_ops_router(g_ops[1], &router, logits, 1, ids, w);
    for (int k = 0; k < K; k++) assert_true(ids[k] >= 0 && ids[k] < E);
    free(logits);
}

/* One sequence of n positions, heads and dims as given: q, k norm, rope, store, attention, all in double. */
static void check_attention(int n, int heads, int kv_heads, int dim, int page) {
    const int ld = (heads + 2 * kv_heads) * dim, n_pages = n / page + 1;
    float *qkv = random_floats((int64_t)n * ld), *raw = must_alloc((size_t)(n * ld) * 4),
          *out = must_alloc((size_t)(n * heads * dim) * 4);
    float *inv = must_alloc((size_t)dim * 2);
    const size_t pool = (size_t)n_pages * (size_t)(page * kv_heads * dim);
    float *kp = must_alloc(pool * 4), *vp = must_alloc(pool * 4);
    int32_t *table = must_alloc((size_t)n_pages * 4);
    epx_attn_row_t *rows = must_alloc((size_t)n * sizeof *rows);
    test_weight_t qn = random_weight(1, dim, EPX_W_BF16), kn = random_weight(1, dim, EPX_W_F32);
    for (size_t i = 0; i < pool; i++) kp[i] = vp[i] = NAN; /* what no position has written must not be used */
    for (int i = 0; i < n_pages; i++) table[i] = n_pages - 1 - i;
    for (int i = 0; i < dim / 2; i++) inv[i] = powf(10000.0f, -2.0f * (float)i / (float)dim);
    for (int i = 0; i < n; i++) rows[i] = (epx_attn_row_t){table, i};
    memcpy(raw, qkv, (size_t)(n * ld) * 4);
    const epx_kv_layer_t kv = {kp, vp, page, kv_heads, dim, 0};
    const float scale = 1.0f / sqrtf((float)dim);
    const epx_rope_t rope = {.inv_freq = inv, .scale = 1.0f, .dim = dim};
    const epx_attn_t attn = {.n_heads = heads, .scale = scale};
    epx_ops_qk_norm_rope_store(g_ops[2], qkv, qkv + heads * dim, qkv + (heads + kv_heads) * dim, ld, heads, &qn.w, &kn.w, 1e-6f,
                               &rope, rows, n, &kv);
    for (int i = 0; i < n; i++) /* norm and rope of every head */
        for (int h = 0; h < heads + kv_heads; h++) {
            const float *x = raw + i * ld + h * dim;
            const epx_weight_t *w = h < heads ? &qn.w : &kn.w;
            double ss = 0;
            for (int d = 0; d < dim; d++) ss += (double)x[d] * x[d];
            const double r = 1 / sqrt(ss / dim + 1e-6);
            for (int d = 0; d < dim / 2; d++) {
                const double a = x[d] * r * weight_at(w, 0, d), b = x[d + dim / 2] * r * weight_at(w, 0, d + dim / 2);
                const double t = (float)i * inv[d]; /* the angle is an f32 product by definition */
                const double tol = (dim + 16) * U * (fabs(a) + fabs(b));
                assert_true(fabs(qkv[i * ld + h * dim + d] - (a * cos(t) - b * sin(t))) <= tol);
                assert_true(fabs(qkv[i * ld + h * dim + d + dim / 2] - (b * cos(t) + a * sin(t))) <= tol);
            }
        }
    epx_ops_attention(g_ops[3], &attn, qkv, ld, rows, n, &kv, out, heads * dim);
    double *p = must_alloc((size_t)n * sizeof *p);
    for (int i = 0; i < n; i++)
        for (int h = 0; h < heads; h++) {
            const int g = h / (heads / kv_heads);
            double max = -1e300, total = 0;
            for (int j = 0; j <= i; j++) {
                p[j] = 0;
                for (int d = 0; d < dim; d++) p[j] += (double)qkv[i * ld + h * dim + d] * qkv[j * ld + (heads + g) * dim + d];
                p[j] *= scale;
                max = fmax(max, p[j]);
            }
            for (int j = 0; j <= i; j++) total += p[j] = exp(p[j] - max);
            for (int d = 0; d < dim; d++) {
                double want = 0;
                for (int j = 0; j <= i; j++) want += p[j] / total * raw[j * ld + (heads + kv_heads + g) * dim + d];
                /* |v| <= 1, so a relative error of the weights is an absolute one here: scores up to 4 sqrt(dim) */
                if (!(fabs(out[(i * heads + h) * dim + d] - want) <= 2e-5))
                    fail_msg("attention n %d dim %d page %d at %d,%d,%d: %g, want %g", n, dim, page, i, h, d,
                             out[(i * heads + h) * dim + d], want);
            }
        }
    free(qkv), free(raw), free(out), free(inv), free(kp), free(vp), free(table), free(rows), free(p), free(qn.block),
        free(kn.block);
}

static void attention_body(void) {
    check_attention(1, 1, 1, 2, 16);
    check_attention(130, 4, 2, 32, 16);
    check_attention(67, 5, 1, 20, 1);
    check_attention(70, 6, 2, 128, 64);
    check_attention(65, 40, 1, 14, 7); /* more heads a KV head than a tile holds */
}

static void linear(void **s) { (void)s, each_isa(linear_body); }
static void rows(void **s) { (void)s, each_isa(rows_body); }
static void silu(void **s) { (void)s, each_isa(silu_body); }
static void experts(void **s) { (void)s, each_isa(experts_body); }
static void router(void **s) { (void)s, each_isa(router_body); }
static void attention(void **s) { (void)s, each_isa(attention_body); }

static void bad_config_is_named(void **s) {
    (void)s;
    epx_ops_t *ops = NULL;
    epx_ops_config_t cfg = {.size = sizeof cfg, .n_threads = 1, .isa = "sse9"};
    assert_int_equal(epx_ops_create(&cfg, &ops), EPX_ERR_UNSUPPORTED);
    assert_non_null(strstr(epx_error_message(), "sse9"));
    assert_non_null(strstr(epx_error_message(), "scalar"));
    cfg.isa = NULL, cfg.n_threads = 0;
    assert_int_equal(epx_ops_create(&cfg, &ops), EPX_ERR_ARG);
    assert_null(ops);
}

int main(void) {
    seed_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(linear),
        cmocka_unit_test(rows),
        cmocka_unit_test(silu),
        cmocka_unit_test(experts),
        cmocka_unit_test(router),
        cmocka_unit_test(attention),
        cmocka_unit_test(bad_config_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
