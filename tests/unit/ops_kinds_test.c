/* The ops of architectures beyond plain bf16 GQA, against a plain double-precision computation, and their row rule: block-scaled
 * e4m3 and transposed weights, fused and biased experts with the clamped activation, router kinds, windows, sinks, latent
 * attention, partial and interleaved rotary embedding, norms over full width. Every ISA level of this CPU.
 * Budgets as in ops_reference_test.c. */
#include "tests/unit/ops_test_util.h"

#define U 0x1p-24
#define N_OF(a) ((int)(sizeof(a) / sizeof((a)[0])))

static void same_bits(const char *what, int row, const void *a, const void *b, size_t bytes) {
    if (memcmp(a, b, bytes) != 0) fail_msg("%s: row %d differs (EPX_TEST_SEED=%llu)", what, row, (unsigned long long)g_seed);
}

/* ---- weights of any kind ---- */

typedef struct {
    epx_weight_t w;
    void *block, *scale;
} any_weight_t;

static void *random_scale(int64_t n, epx_wtype_t type) {
    void *p = must_alloc((size_t)n * 4);
    for (int64_t i = 0; i < n; i++) {
        const float f = 0.002f * (1.5f + uniform());
        if (type == EPX_W_BF16) ((uint16_t *)p)[i] = epx_f32_to_bf16(f);
        else ((float *)p)[i] = f;
    }
    return p;
}

/* [n, k], stored as such or transposed. */
static any_weight_t any_weight(int64_t n, int64_t k, epx_wtype_t type, int transposed) {
    const int64_t rows = transposed ? k : n, cols = transposed ? n : k;
    any_weight_t a = {0};
    if (type == EPX_W_F8_E4M3) {
        uint8_t *p = a.block = must_alloc((size_t)(n * k));
        for (int64_t i = 0; i < n * k; i++) {
            p[i] = (uint8_t)below(256);
            if ((p[i] & 0x7F) == 0x7F) p[i] ^= 0x10; /* no NaN */
        }
        a.w = (epx_weight_t){.data = p, .type = type, .scale_type = below(2) ? EPX_W_BF16 : EPX_W_F32};
        a.w.scale = a.scale = random_scale((rows + 127) / 128 * ((cols + 127) / 128), a.w.scale_type);
    } else {
        test_weight_t t = random_weight(rows, cols, type);
        a.block = t.block;
        a.w = t.w;
    }
    a.w.n = n, a.w.k = k, a.w.transposed = transposed;
    return a;
}

static double at(const epx_weight_t *w, int64_t n, int64_t k) {
    const int64_t r = w->transposed ? k : n, c = w->transposed ? n : k, cols = w->transposed ? w->n : w->k, i = r * cols + c;
    if (w->type == EPX_W_BF16) return epx_bf16_to_f32(((const uint16_t *)w->data)[i]);
    if (w->type == EPX_W_F32) return ((const float *)w->data)[i];
    const int64_t s = r / 128 * ((cols + 127) / 128) + c / 128;
    const float f = w->scale_type == EPX_W_BF16 ? epx_bf16_to_f32(((const uint16_t *)w->scale)[s]) : ((const float *)w->scale)[s];
    return epx_e4m3_to_f32(((const uint8_t *)w->data)[i]) * f; /* rounded to f32 by definition */
}

static void free_weight(any_weight_t *a) { free(a->block), free(a->scale); }

/* ---- linear ---- */

static void check_linear(int m, int n, int k, epx_wtype_t type, int transposed) {
    float *x = random_floats((int64_t)m * k), *out = must_alloc((size_t)(m * n) * 4), *one = must_alloc((size_t)n * 4);
    any_weight_t w = any_weight(n, k, type, transposed);
    epx_ops_linear(g_ops[1 + below(MAX_THREADS)], x, k, &w.w, NULL, m, out, n);
    for (int i = 0; i < m; i++) {
        for (int j = 0; j < n; j++) {
            double sum = 0, mag = 0;
            for (int c = 0; c < k; c++) sum += (double)x[i * k + c] * at(&w.w, j, c), mag += fabs(x[i * k + c] * at(&w.w, j, c));
            if (!(fabs(out[i * n + j] - sum) <= (k + 8) * U * mag))
                fail_msg("linear type %d transposed %d m %d n %d k %d at %d,%d: %g, want %g", type, transposed, m, n, k, i, j,
                         out[i * n + j], sum);
        }
        epx_ops_linear(g_ops[1], x + i * k, k, &w.w, NULL, 1, one, n);
        same_bits("linear", i, out + i * n, one, (size_t)n * 4);
    }
    free(x), free(out), free(one), free_weight(&w);
}

static void linear_body(void) {
    static const int ks[] = {1, 31, 64, 127, 128, 130, 200, 256, 300}, ns[] = {1, 7, 33, 130, 200}, ms[] = {1, 2, 5, 13, 70};
    for (int i = 0; i < N_OF(ks); i++)
        for (int kind = 1; kind < 6; kind++) {
            const epx_wtype_t type = kind < 2 ? EPX_W_F8_E4M3 : (epx_wtype_t)(kind % 3);
            check_linear(ms[below(N_OF(ms))], ns[below(N_OF(ns))], ks[i], type, kind >= 2);
            check_linear(ms[below(N_OF(ms))], ns[below(N_OF(ns))], ks[i], EPX_W_F8_E4M3, kind % 2);
        }
    for (int kind = 0; kind < 3; kind++) check_linear(6, 130, 300, (epx_wtype_t)kind, 1);
    check_linear(7, 150, 300, EPX_W_F8_E4M3, 0);
}

/* Every code that is not NaN, exactly. */
static void codes(void **state) {
    (void)state;
    uint8_t code[256];
    const float one = 1.0f, x = 1.0f;
    float out[256];
    char list[64];
    for (int i = 0; i < 256; i++) code[i] = (uint8_t)((i & 0x7F) == 0x7F ? 0 : i);
    const float scales[2] = {one, one};
    const epx_weight_t w = {.data = code, .type = EPX_W_F8_E4M3, .n = 256, .k = 1, .scale = scales, .scale_type = EPX_W_F32};
    snprintf(list, sizeof list, "%s", epx_ops_isa_available());
    for (char *save = NULL, *isa = strtok_r(list, ",", &save); isa; isa = strtok_r(NULL, ",", &save)) {
        open_ops(isa, 1);
        epx_ops_linear(g_ops[1], &x, 1, &w, NULL, 1, out, 256);
        for (int i = 0; i < 256; i++) assert_true(out[i] == epx_e4m3_to_f32(code[i]));
        epx_ops_destroy(g_ops[1]);
    }
}

/* ---- experts ---- */

static double activation(const epx_expert_weights_t *w, double g, double u) {
    if (w->act == EPX_ACT_SILU_MUL) return u * g / (1 + exp(-g));
    g = fmin(g, w->act_limit), u = fmax(fmin(u, w->act_limit), -(double)w->act_limit);
    return (u + 1) * g / (1 + exp(-1.702 * g));
}

static double dot(const float *x, const epx_weight_t *w, int row, int k) {
    double s = 0;
    for (int c = 0; c < k; c++) s += x[c] * at(w, row, c);
    return s;
}

static double expert_ref(const float *x, const epx_expert_weights_t *w, int h, int ffn, int o) {
    double sum = w->down_bias.data ? at(&w->down_bias, 0, o) : 0;
    for (int i = 0; i < ffn; i++) {
        const int both = w->up.data == NULL;
        double g = dot(x, &w->gate, both ? 2 * i : i, h), u = dot(x, both ? &w->gate : &w->up, both ? 2 * i + 1 : i, h);
        if (w->gate_bias.data) g += at(&w->gate_bias, 0, 2 * i), u += at(&w->gate_bias, 0, 2 * i + 1);
        sum += at(&w->down, o, i) * activation(w, g, u);
    }
    return sum;
}

static void check_experts(int m, int h, int ffn, epx_wtype_t type, int fused) {
    any_weight_t gate = any_weight(fused ? 2 * ffn : ffn, h, type, fused), up = any_weight(ffn, h, type, 0);
    any_weight_t down = any_weight(h, ffn, type, fused), gb = any_weight(1, 2 * ffn, EPX_W_BF16, 0),
                 db = any_weight(1, h, EPX_W_F32, 0);
    epx_expert_weights_t w = {.gate = gate.w, .down = down.w};
    if (fused) w.gate_bias = gb.w, w.down_bias = db.w, w.act = EPX_ACT_CLAMPED_GLU, w.act_limit = 0.7f;
    else w.up = up.w;
    float *x = random_floats((int64_t)m * h), *out = must_alloc((size_t)(m * h) * 4), *one = must_alloc((size_t)h * 4);
    epx_ops_ffn(g_ops[1 + below(MAX_THREADS)], x, &w, m, h, ffn, out);
    for (int i = 0; i < m; i++) {
        epx_ops_ffn(g_ops[1], x + i * h, &w, 1, h, ffn, one);
        same_bits("experts", i, out + i * h, one, (size_t)h * 4);
        const int o = below(h);
        const double want = expert_ref(x + i * h, &w, h, ffn, o);
        /* |x|, |w| <= 1 (e4m3: 448 * 0.005): sums of h and ffn terms, each off by a few roundings of its magnitude */
        if (!(fabs(out[i * h + o] - want) <= 4 * (h + ffn) * U * (h + 1.0) * ffn + 1e-5 * fabs(want)))
            fail_msg("experts h %d ffn %d type %d fused %d: %g, want %g", h, ffn, type, fused, out[i * h + o], want);
    }
    free(x), free(out), free(one), free_weight(&gate), free_weight(&up), free_weight(&down), free_weight(&gb), free_weight(&db);
}

static void experts_body(void) {
    for (int type = 0; type < 3; type++) {
        check_experts(13, 33, 70, (epx_wtype_t)type, 1);
        check_experts(5, 96, 64, (epx_wtype_t)type, 1);
    }
    check_experts(9, 130, 140, EPX_W_F8_E4M3, 0);
    check_experts(70, 64, 31, EPX_W_F8_E4M3, 0);
}

/* ---- router ---- */

static double score_of(const epx_router_t *r, const float *logits, int e) {
    double total = 0;
    if (r->score == EPX_SCORE_SIGMOID) return 1 / (1 + exp(-(double)logits[e]));
    for (int i = 0; i < r->n_experts; i++) total += exp((double)logits[i] - logits[e]);
    return 1 / total;
}

enum { E = 48, K = 5, ROWS = 40 };

static double choice_of(const epx_router_t *r, const float *l, int e) {
    return score_of(r, l, e) + (r->bias ? at(r->bias, 0, e) : 0);
}

/* 1: expert e lies in one of the best groups. */
static int group_kept(const epx_router_t *r, const float *l, int e) {
    const int size = E / r->n_groups;
    double value[E];
    int better = 0;
    for (int g = 0; g < r->n_groups; g++) {
        double a = -1e9, b = -1e9;
        for (int i = g * size; i < (g + 1) * size; i++) {
            const double c = choice_of(r, l, i);
            if (c > a) b = a, a = c;
            else if (c > b) b = c;
        }
        value[g] = r->group_best == 2 ? a + b : a;
    }
    for (int g = 0; g < r->n_groups; g++) better += value[g] > value[e / size];
    return better < r->top_groups;
}

static void check_router(const epx_router_t *r) {
    float *logits = random_floats(ROWS * E), w[ROWS * K], w1[K];
    int32_t ids[ROWS * K], ids1[K];
    for (int i = 0; i < ROWS * E; i++) logits[i] *= 4.0f;
    epx_ops_router(g_ops[3], r, logits, ROWS, ids, w);
    for (int m = 0; m < ROWS; m++) {
        const float *l = logits + m * E;
        double total = 0, last = 1e9;
        epx_ops_router(g_ops[1], r, l, 1, ids1, w1);
        same_bits("router ids", m, ids + m * K, ids1, sizeof ids1);
        same_bits("router weights", m, w + m * K, w1, sizeof w1);
        for (int k = 0; k < K; k++) {
            const int e = ids1[k];
            int better = 0;
            assert_true(group_kept(r, l, e) && choice_of(r, l, e) <= last);
            last = choice_of(r, l, e);
            for (int i = 0; i < E; i++) better += group_kept(r, l, i) && choice_of(r, l, i) > last;
            assert_int_equal(better, k);
            total += score_of(r, l, e);
        }
        for (int k = 0; k < K; k++) {
            const double want = score_of(r, l, ids1[k]) / (r->renormalize ? total : 1) * r->factor;
            assert_true(fabs(w1[k] - want) <= (E + 20) * U * 2 * want);
        }
    }
    free(logits);
}

static void router_body(void) {
    any_weight_t bias = any_weight(1, E, EPX_W_F32, 0);
    for (int i = 0; i < 8; i++) {
        const epx_router_t r = {.n_experts = E,
                                .top_k = K,
                                .score = i & 1 ? EPX_SCORE_SIGMOID : EPX_SCORE_SOFTMAX,
                                .renormalize = i & 2,
                                .factor = 2.5f,
                                .n_groups = i & 4 ? 6 : 1,
                                .top_groups = i & 4 ? 2 : 1,
                                .group_best = i & 1 ? 2 : 1,
                                .bias = i & 1 ? &bias.w : NULL};
        check_router(&r);
    }
    free_weight(&bias);
}

/* ---- attention ---- */

typedef struct {
    int n, heads, kv_heads, dim, v_dim, page, window, with_sinks;
    int rope_first, rope_dim, interleaved, latent, norm_k; /* norm_k: length of the norm of k; 0: none */
} attn_case_t;

/* The same rotation and norm in double, in place. */
static void rope_ref(const attn_case_t *c, double *x, int position, const float *inv) {
    for (int i = 0; i < c->rope_dim / 2; i++) {
        const int a = c->rope_first + (c->interleaved ? 2 * i : i),
                  b = c->rope_first + (c->interleaved ? 2 * i + 1 : i + c->rope_dim / 2);
        const double t = (float)position * inv[i], p = x[a], q = x[b];
        x[a] = 1.25 * (p * cos(t) - q * sin(t));
        x[b] = 1.25 * (q * cos(t) + p * sin(t));
    }
}

static void norm_ref(double *x, int n, const epx_weight_t *w) {
    double ss = 0;
    for (int i = 0; i < n; i++) ss += x[i] * x[i];
    for (int i = 0; i < n; i++) x[i] = x[i] / sqrt(ss / n + 1e-6) * at(w, 0, i);
}

/* q [n, heads, dim] and k [n, kv_heads, dim] as they enter the scores. */
static void prepare_ref(const attn_case_t *c, const float *raw, int ld, const epx_weight_t *norm, const float *inv, double *q,
                        double *k) {
    const int n_q = c->heads * c->dim, n_k = c->kv_heads * c->dim;
    for (int i = 0; i < c->n; i++) {
        for (int d = 0; d < n_q; d++) q[i * n_q + d] = raw[i * ld + d];
        for (int d = 0; d < n_k; d++) k[i * n_k + d] = raw[i * ld + n_q + d];
        if (c->norm_k > c->dim) norm_ref(k + i * n_k, c->norm_k, norm);
        for (int h = 0; h < c->kv_heads; h++) {
            if (c->norm_k && c->norm_k <= c->dim) norm_ref(k + i * n_k + h * c->dim, c->norm_k, norm);
            rope_ref(c, k + i * n_k + h * c->dim, i, inv);
        }
        for (int h = 0; h < c->heads; h++) rope_ref(c, q + i * n_q + h * c->dim, i, inv);
    }
}

static void attend_ref(const attn_case_t *c, const double *q, const double *k, const float *raw, int ld,
                       const epx_weight_t *sinks, int i, int h, double *out) {
    const int n_q = c->heads * c->dim, n_k = c->kv_heads * c->dim, g = h / (c->heads / c->kv_heads);
    const int low = c->window && i - c->window + 1 > 0 ? i - c->window + 1 : 0;
    double p[256], total = 0, max = c->with_sinks ? at(sinks, 0, h) : -1e300;
    for (int j = low; j <= i; j++) {
        p[j] = 0;
        for (int d = 0; d < c->dim; d++) p[j] += q[i * n_q + h * c->dim + d] * k[j * n_k + g * c->dim + d];
        p[j] *= 0.2;
        max = fmax(max, p[j]);
    }
    if (c->with_sinks) total = exp(at(sinks, 0, h) - max);
    for (int j = low; j <= i; j++) total += p[j] = exp(p[j] - max);
    for (int d = 0; d < c->v_dim; d++) {
        out[d] = 0;
        for (int j = low; j <= i; j++)
            out[d] += p[j] / total * (c->latent ? k[j * n_k + g * c->dim + d] : raw[j * ld + n_q + n_k + g * c->dim + d]);
    }
}

static void check_attention(attn_case_t c) {
    const int n_q = c.heads * c.dim, n_k = c.kv_heads * c.dim, ld = n_q + 2 * n_k, n_pages = c.n / c.page + 1,
              n_out = c.heads * c.v_dim;
    const size_t pool = (size_t)n_pages * (size_t)(c.page * n_k);
    float *raw = random_floats((int64_t)c.n * ld), *x = must_alloc((size_t)(c.n * ld) * 4),
          *out = must_alloc((size_t)(c.n * n_out) * 4), *one = must_alloc((size_t)n_out * 4), inv[64], *kp = must_alloc(pool * 4),
          *vp = must_alloc(pool * 4);
    double *q = must_alloc((size_t)(c.n * n_q) * 8), *k = must_alloc((size_t)(c.n * n_k) * 8), want[600];
    int32_t *table = must_alloc((size_t)n_pages * 4);
    epx_attn_row_t *rows = must_alloc((size_t)c.n * sizeof *rows);
    any_weight_t sinks = any_weight(1, c.heads, EPX_W_BF16, 0), norm = any_weight(1, c.norm_k ? c.norm_k : 1, EPX_W_BF16, 0);
    const epx_kv_layer_t kv = {kp, c.latent ? kp : vp, c.page, c.kv_heads, c.dim, c.v_dim};
    const epx_rope_t rope = {inv, 1.25f, c.rope_first, c.rope_dim, c.interleaved};
    const epx_attn_t attn = {c.heads, 0.2f, c.window, c.with_sinks ? &sinks.w : NULL};
    for (size_t i = 0; i < pool; i++) kp[i] = vp[i] = NAN;
    for (int i = 0; i < n_pages; i++) table[i] = n_pages - 1 - i;
    for (int i = 0; i < c.rope_dim / 2; i++) inv[i] = powf(100.0f, -2.0f * (float)i / (float)c.rope_dim);
    for (int i = 0; i < c.n; i++) rows[i] = (epx_attn_row_t){table, i};
    memcpy(x, raw, (size_t)(c.n * ld) * 4);
    epx_ops_qk_norm_rope_store(g_ops[2], x, x + n_q, c.latent ? NULL : x + n_q + n_k, ld, c.heads, NULL,
                               c.norm_k ? &norm.w : NULL, 1e-6f, &rope, rows, c.n, &kv);
    epx_ops_attention(g_ops[3], &attn, x, ld, rows, c.n, &kv, out, n_out);
    prepare_ref(&c, raw, ld, &norm.w, inv, q, k);
    for (int i = 0; i < c.n; i++) {
        epx_ops_attention(g_ops[1], &attn, x + i * ld, ld, rows + i, 1, &kv, one, n_out);
        same_bits("attention", i, out + i * n_out, one, (size_t)n_out * 4);
        for (int h = 0; h < c.heads; h++) {
            attend_ref(&c, q, k, raw, ld, &sinks.w, i, h, want);
            for (int d = 0; d < c.v_dim;
                 d++) /* values up to about 4, scores up to about 10: relative error of a weight below 2e-5 */
                if (!(fabs(out[i * n_out + h * c.v_dim + d] - want[d]) <= 1e-4))
                    fail_msg("attention window %d latent %d at %d,%d,%d: %g, want %g", c.window, c.latent, i, h, d,
                             out[i * n_out + h * c.v_dim + d], want[d]);
        }
    }
    free(raw), free(x), free(out), free(one), free(kp), free(vp), free(q), free(k), free(table), free(rows);
    free_weight(&sinks), free_weight(&norm);
}

static void attention_body(void) {
    check_attention((attn_case_t){
        .n = 150, .heads = 4, .kv_heads = 2, .dim = 32, .v_dim = 32, .page = 16, .window = 16, .with_sinks = 1, .rope_dim = 32});
    check_attention((attn_case_t){
        .n = 140, .heads = 2, .kv_heads = 1, .dim = 20, .v_dim = 20, .page = 7, .window = 64, .rope_dim = 10, .norm_k = 20});
    check_attention((attn_case_t){
        .n = 70, .heads = 3, .kv_heads = 3, .dim = 16, .v_dim = 16, .page = 64, .with_sinks = 1, .rope_dim = 8, .norm_k = 48});
    check_attention((attn_case_t){.n = 130,
                                  .heads = 5,
                                  .kv_heads = 1,
                                  .dim = 48,
                                  .v_dim = 32,
                                  .page = 16,
                                  .rope_first = 32,
                                  .rope_dim = 16,
                                  .interleaved = 1,
                                  .latent = 1,
                                  .norm_k = 32});
    check_attention((attn_case_t){.n = 9,
                                  .heads = 40,
                                  .kv_heads = 1,
                                  .dim = 576,
                                  .v_dim = 512,
                                  .page = 4,
                                  .rope_first = 512,
                                  .rope_dim = 64,
                                  .interleaved = 1,
                                  .latent = 1,
                                  .norm_k = 512});
    check_attention(
        (attn_case_t){.n = 66, .heads = 1, .kv_heads = 1, .dim = 8, .v_dim = 8, .page = 1, .window = 1, .rope_dim = 8});
}

static void gated_body(void) {
    enum { M = 9, W = 37 };
    float *out = random_floats(M * W), *add = random_floats(M * W), *old = must_alloc(M * W * 4), gate[M];
    for (int i = 0; i < M; i++) gate[i] = 20.0f * uniform();
    memcpy(old, out, M * W * 4);
    epx_ops_add_gated(g_ops[2], out, add, gate, M, W);
    for (int i = 0; i < M * W; i++) {
        const double part = add[i] / (1 + exp(-(double)gate[i / W]));
        assert_true(fabs(out[i] - (old[i] + part)) <= 8 * U * (fabs(old[i]) + fabs(part)));
    }
    free(out), free(add), free(old);
}

static void linear(void **s) { (void)s, each_isa(linear_body); }
static void experts(void **s) { (void)s, each_isa(experts_body); }
static void router(void **s) { (void)s, each_isa(router_body); }
static void attention(void **s) { (void)s, each_isa(attention_body); }
static void gated(void **s) { (void)s, each_isa(gated_body); }

int main(void) {
    seed_init();
    const struct CMUnitTest tests[] = {cmocka_unit_test(codes),  cmocka_unit_test(linear),    cmocka_unit_test(experts),
                                       cmocka_unit_test(router), cmocka_unit_test(attention), cmocka_unit_test(gated)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
