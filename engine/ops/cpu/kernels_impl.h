/* Common body of the kernels, included once by each kernels_<isa>.c after it has defined VW (floats of a register), VISA,
 * MR_MAX and the v_ functions. Not a header for anyone else.
 *
 * Row rule: each dot product of length k has one accumulator register, fed in steps of 2 * VW elements (for bf16: the even,
 * then the odd ones), and one horizontal sum; a tail is padded with zeros. Every tile below, of any size, does exactly that
 * sequence for each of its outputs. */
#include <math.h>
#include <string.h>

#include "base/compiler.h"
#include "base/status.h"

#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)

/* ---- exp ---- */

/* exp(x), error below 2 units in the last place; 0 below -104, infinity above 88.73, NaN for NaN. x = n ln 2 + r,
 * |r| <= 0.3466, Taylor polynomial of degree 7 (remainder 5e-9). ln 2 is split so that n * hi is exact without FMA. 2^n is
 * applied in two factors, so that results down to the smallest denormal are right. */
static inline vf v_exp(vf x) {
    const vf magic = v_set1(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    x = v_max(v_set1(-110.0f), v_min(v_set1(100.0f), x));
    const vf n = v_sub(v_add(v_mul(x, v_set1(1.44269504f)), magic), magic);
    const vf r = v_fma(n, v_set1(2.12194440e-4f), v_fma(n, v_set1(-0.693359375f), x));
    vf p = v_set1(1.0f / 5040.0f);
    p = v_fma(p, r, v_set1(1.0f / 720.0f));
    p = v_fma(p, r, v_set1(1.0f / 120.0f));
    p = v_fma(p, r, v_set1(1.0f / 24.0f));
    p = v_fma(p, r, v_set1(1.0f / 6.0f));
    p = v_fma(p, r, v_set1(0.5f));
    p = v_fma(p, r, v_set1(1.0f));
    p = v_fma(p, r, v_set1(1.0f));
    const vf half = v_sub(v_add(v_mul(n, v_set1(0.5f)), magic), magic);
    return v_mul(v_mul(p, v_pow2(half)), v_pow2(v_sub(n, half)));
}

/* ---- packing ---- */

static inline void pack_pair(vf a, vf b, epx_pack_t order, float *dst) {
    if (order == EPX_PACK_EVEN_ODD) v_unzip(a, b, &a, &b);
    v_store(dst, a);
    v_store(dst + VW, b);
}

static void pack(const float *x, int64_t k, epx_pack_t order, float *dst) {
    int64_t i = 0;
    for (; i + 2 * VW <= k; i += 2 * VW) pack_pair(v_load(x + i), v_load(x + i + VW), order, dst + i);
    if (i == k) return;
    const int n = (int)(k - i);
    const vf b = n > VW ? v_loadn(x + i + VW, n - VW) : v_zero();
    pack_pair(v_loadn(x + i, n < VW ? n : VW), b, order, dst + i);
}

/* ---- matrix tiles: MR rows of x by 4 rows of w ---- */

static inline vf even_bf16(const uint16_t *p) { return v_bf16_even(p); }
static inline vf odd_bf16(const uint16_t *p) { return v_bf16_odd(p); }
static inline vf even_f32(const float *p) { return v_load(p); }
static inline vf odd_f32(const float *p) { return v_load(p + VW); }

#define REP_1(F) F(0)
#define REP_2(F) REP_1(F) F(1)
#define REP_3(F) REP_2(F) F(2)
#define REP_4(F) REP_3(F) F(3)
#define REP_5(F) REP_4(F) F(4)
#define REP_6(F) REP_5(F) F(5)

#define T_DECL(m)                    \
    const float *x##m = x + (m)*ldx; \
    vf a##m##0 = v_zero(), a##m##1 = v_zero(), a##m##2 = v_zero(), a##m##3 = v_zero();
#define T_FMA(m)                               \
    {                                          \
        const vf xv = v_load(x##m + i + half); \
        a##m##0 = v_fma(xv, b0, a##m##0);      \
        a##m##1 = v_fma(xv, b1, a##m##1);      \
        a##m##2 = v_fma(xv, b2, a##m##2);      \
        a##m##3 = v_fma(xv, b3, a##m##3);      \
    }
#define T_STEP(LOAD, HALF, REP, p0, p1, p2, p3)                              \
    {                                                                        \
        const int half = HALF;                                               \
        const vf b0 = LOAD(p0), b1 = LOAD(p1), b2 = LOAD(p2), b3 = LOAD(p3); \
        REP(T_FMA)                                                           \
    }
#define T_STORE(m)                                              \
    {                                                           \
        float sum[4];                                           \
        v_hsum4(a##m##0, a##m##1, a##m##2, a##m##3, sum);       \
        for (int j = 0; j < nr; j++) out[(m)*ldo + j] = sum[j]; \
    }
/* out[i, j] = dot(x row i, w[j]), j < nr <= 4. All four pointers of w are readable; x is packed. */
#define TILE(MR, WT)                                                                                                          \
    static void tile_##WT##_##MR(const float *x, int64_t ldx, const WT##_t *const w[4], int64_t k, int64_t ahead, float *out, \
                                 int64_t ldo, int nr) {                                                                       \
        const WT##_t *w0 = w[0], *w1 = w[1], *w2 = w[2], *w3 = w[3];                                                          \
        int64_t i = 0;                                                                                                        \
        REP_##MR(T_DECL) for (; i + 2 * VW <= k; i += 2 * VW) {                                                               \
            EPX_PREFETCH_R(w0 + i + ahead);                                                                                   \
            EPX_PREFETCH_R(w1 + i + ahead);                                                                                   \
            EPX_PREFETCH_R(w2 + i + ahead);                                                                                   \
            EPX_PREFETCH_R(w3 + i + ahead);                                                                                   \
            T_STEP(even_##WT, 0, REP_##MR, w0 + i, w1 + i, w2 + i, w3 + i)                                                    \
            T_STEP(odd_##WT, VW, REP_##MR, w0 + i, w1 + i, w2 + i, w3 + i)                                                    \
        }                                                                                                                     \
        if (i < k) {                                                                                                          \
            WT##_t tail[4][2 * VW] = {{0}};                                                                                   \
            for (int j = 0; j < 4; j++) memcpy(tail[j], w[j] + i, (size_t)(k - i) * sizeof(WT##_t));                          \
            T_STEP(even_##WT, 0, REP_##MR, tail[0], tail[1], tail[2], tail[3])                                                \
            T_STEP(odd_##WT, VW, REP_##MR, tail[0], tail[1], tail[2], tail[3])                                                \
        }                                                                                                                     \
        REP_##MR(T_STORE)                                                                                                     \
    }

typedef uint16_t bf16_t;
typedef float f32_t;
TILE(1, bf16)
TILE(1, f32)
TILE(2, bf16)
TILE(2, f32)
#if MR_MAX > 2
TILE(3, bf16)
TILE(3, f32)
TILE(4, bf16)
TILE(4, f32)
TILE(5, bf16)
TILE(5, f32)
TILE(6, bf16)
TILE(6, f32)
#endif

typedef void (*tile_bf16_fn)(const float *, int64_t, const bf16_t *const[4], int64_t, int64_t, float *, int64_t, int);
typedef void (*tile_f32_fn)(const float *, int64_t, const f32_t *const[4], int64_t, int64_t, float *, int64_t, int);
#if MR_MAX > 2
static const tile_bf16_fn g_tile_bf16[MR_MAX] = {tile_bf16_1, tile_bf16_2, tile_bf16_3, tile_bf16_4, tile_bf16_5, tile_bf16_6};
static const tile_f32_fn g_tile_f32[MR_MAX] = {tile_f32_1, tile_f32_2, tile_f32_3, tile_f32_4, tile_f32_5, tile_f32_6};
#else
static const tile_bf16_fn g_tile_bf16[MR_MAX] = {tile_bf16_1, tile_bf16_2};
static const tile_f32_fn g_tile_f32[MR_MAX] = {tile_f32_1, tile_f32_2};
#endif

/* Rows of the next tile when `left` remain: even parts instead of a full tile and a small rest. */
static inline int next_mr(int left) {
    const int n_tiles = (left + MR_MAX - 1) / MR_MAX;
    return (left + n_tiles - 1) / n_tiles;
}

/* Four rows of w; rows from `nr` on repeat the last one, so that nothing outside w is read. */
static inline void quad_bf16(const bf16_t *w, int64_t ldw, int nr, const bf16_t *out[4]) {
    for (int j = 0; j < 4; j++) out[j] = w + (j < nr ? j : nr - 1) * ldw;
}
static inline void quad_f32(const f32_t *w, int64_t ldw, int nr, const f32_t *out[4]) {
    for (int j = 0; j < 4; j++) out[j] = w + (j < nr ? j : nr - 1) * ldw;
}

/* All columns of rows m .. m + mr: the rows stay in the first cache while the weights pass. */
static void rows_bf16(const epx_gemm_t *g, int m, int mr) {
    const int64_t k = g->w->k;
    for (int n = 0; n < g->n; n += 4) {
        const int nr = g->n - n < 4 ? g->n - n : 4;
        const bf16_t *quad[4];
        quad_bf16((const bf16_t *)g->w->data + (g->n0 + n) * k, k, nr, quad);
        g_tile_bf16[mr - 1](g->xp + m * g->ldxp, g->ldxp, quad, k, 4 * k, g->out + m * g->ldo + n, g->ldo, nr);
    }
}

static void rows_f32(const epx_gemm_t *g, int m, int mr) {
    const int64_t k = g->w->k;
    for (int n = 0; n < g->n; n += 4) {
        const int nr = g->n - n < 4 ? g->n - n : 4;
        const f32_t *quad[4];
        quad_f32((const f32_t *)g->w->data + (g->n0 + n) * k, k, nr, quad);
        g_tile_f32[mr - 1](g->xp + m * g->ldxp, g->ldxp, quad, k, 4 * k, g->out + m * g->ldo + n, g->ldo, nr);
    }
}

#include "engine/ops/cpu/kernels_narrow.h"

static void gemm(const epx_gemm_t *g) {
    if (g->w->transposed) {
        gemm_transposed(g);
        return;
    }
    for (int m = 0, mr; m < g->m; m += mr) {
        mr = next_mr(g->m - m);
        if (g->w->type == EPX_W_F8_E4M3) rows_f8(g, m, mr);
        else if (g->w->type == EPX_W_BF16) rows_bf16(g, m, mr);
        else rows_f32(g, m, mr);
    }
}

/* ---- rows ---- */

static inline vf silu_mul(vf g, vf u) { return v_mul(v_div(g, v_add(v_set1(1.0f), v_exp(v_sub(v_zero(), g)))), u); }

static inline vf clamped_glu(vf g, vf u, vf limit) {
    g = v_min(limit, g);
    u = v_max(v_sub(v_zero(), limit), v_min(limit, u));
    const vf swish = v_div(g, v_add(v_set1(1.0f), v_exp(v_mul(v_set1(-1.702f), g))));
    return v_mul(swish, v_add(u, v_set1(1.0f)));
}

static void act_pack(float *gate, const float *up, int64_t n, const epx_expert_weights_t *w, float *dst) {
    const vf limit = v_set1(w->act_limit);
    const int clamped = w->act == EPX_ACT_CLAMPED_GLU;
    int64_t i = 0;
    for (; i + VW <= n; i += VW) {
        const vf g = v_load(gate + i), u = v_load(up + i);
        v_store(gate + i, clamped ? clamped_glu(g, u, limit) : silu_mul(g, u));
    }
    const int rest = (int)(n - i);
    if (rest > 0) {
        const vf g = v_loadn(gate + i, rest), u = v_loadn(up + i, rest);
        v_storen(gate + i, clamped ? clamped_glu(g, u, limit) : silu_mul(g, u), rest);
    }
    pack(gate, n, epx_pack_order(&w->down), dst);
}

static void widen_row(const epx_weight_t *w, int64_t row, float *out) {
    if (w->type == EPX_W_F32) {
        memcpy(out, (const float *)w->data + row * w->k, (size_t)w->k * sizeof *out);
        return;
    }
    const uint16_t *src = (const uint16_t *)w->data + row * w->k;
    for (int64_t i = 0; i < w->k; i++) out[i] = epx_bf16_to_f32(src[i]);
}

/* Sum of squares in four accumulators taken in turn: the order depends on the width alone. */
static float sum_squares(const float *x, int64_t n) {
    vf s[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
    int64_t i = 0;
    for (; i + 4 * VW <= n; i += 4 * VW)
        for (int j = 0; j < 4; j++) {
            const vf v = v_load(x + i + j * VW);
            s[j] = v_fma(v, v, s[j]);
        }
    for (int j = 0; i < n; i += VW, j++) {
        const vf v = n - i >= VW ? v_load(x + i) : v_loadn(x + i, (int)(n - i));
        s[j] = v_fma(v, v, s[j]);
    }
    return v_hsum(v_add(v_add(s[0], s[1]), v_add(s[2], s[3])));
}

static void rmsnorm(const float *x, const epx_weight_t *w, float eps, int64_t width, float *out) {
    const float inv = 1.0f / sqrtf(sum_squares(x, width) / (float)width + eps);
    if (w->type == EPX_W_BF16) {
        const uint16_t *wb = w->data;
        for (int64_t i = 0; i < width; i++) out[i] = x[i] * inv * epx_bf16_to_f32(wb[i]);
    } else {
        const float *wf = w->data;
        for (int64_t i = 0; i < width; i++) out[i] = x[i] * inv * wf[i];
    }
}

static void rope(float *x, const float *cosine, const float *sine, int dim, int interleaved) {
    const int half = dim / 2;
    for (int i = 0; interleaved && i < half; i++) {
        const float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cosine[i] - b * sine[i];
        x[2 * i + 1] = b * cosine[i] + a * sine[i];
    }
    for (int i = 0; !interleaved && i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i] + a * sine[i];
    }
}

static void add(float *out, const float *addend, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] += addend[i];
}

/* exp(x[i] - max) for up to VW elements from i; lanes past n are 0. */
static inline vf exp_from(const float *x, int64_t i, int64_t n, vf max) {
    if (n - i >= VW) return v_exp(v_sub(v_load(x + i), max));
    float e[VW];
    v_store(e, v_exp(v_sub(v_loadn(x + i, (int)(n - i)), max)));
    return v_loadn(e, (int)(n - i));
}

static inline vf sigmoid(vf x) { return v_div(v_set1(1.0f), v_add(v_set1(1.0f), v_exp(v_sub(v_zero(), x)))); }

static void scores(epx_score_t score, const float *logits, int n, float *out) {
    float max = logits[0];
    if (score == EPX_SCORE_SIGMOID) {
        for (int i = 0; i < n; i += VW) v_store(out + i, sigmoid(n - i >= VW ? v_load(logits + i) : v_loadn(logits + i, n - i)));
        return;
    }
    for (int i = 1; i < n; i++) max = logits[i] > max ? logits[i] : max;
    const vf vmax = v_set1(max);
    vf sum = v_zero();
    for (int i = 0; i < n; i += VW) {
        const vf e = exp_from(logits, i, n, vmax);
        v_store(out + i, e);
        sum = v_add(sum, e);
    }
    const vf vsum = v_set1(v_hsum(sum));
    for (int i = 0; i < n; i += VW) v_store(out + i, v_div(v_load(out + i), vsum));
}

/* Element i of a vector of f32 or bf16. */
static inline float vector_at(const epx_weight_t *w, int64_t i) {
    return w->type == EPX_W_BF16 ? epx_bf16_to_f32(((const uint16_t *)w->data)[i]) : ((const float *)w->data)[i];
}

/* ---- bounds ---- */

static float read_sum(const float *x, int64_t n) {
    vf s[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
    for (int64_t i = 0; i < n; i += 4 * VW)
        for (int j = 0; j < 4; j++) s[j] = v_add(s[j], v_load(x + i + j * VW));
    return v_hsum(v_add(v_add(s[0], s[1]), v_add(s[2], s[3])));
}

static float fma_loop(int64_t steps) {
    vf s0 = v_zero(), s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0, s8 = s0, s9 = s0;
    const vf a = v_set1(0.5f), b = v_set1(1.0f);
    for (int64_t i = 0; i < steps; i++) {
        s0 = v_fma(s0, a, b), s1 = v_fma(s1, a, b), s2 = v_fma(s2, a, b), s3 = v_fma(s3, a, b), s4 = v_fma(s4, a, b);
        s5 = v_fma(s5, a, b), s6 = v_fma(s6, a, b), s7 = v_fma(s7, a, b), s8 = v_fma(s8, a, b), s9 = v_fma(s9, a, b);
    }
    const vf low = v_add(v_add(s0, s1), v_add(s2, s3)), high = v_add(v_add(s4, s5), v_add(s6, s7));
    return v_hsum(v_add(v_add(low, high), v_add(s8, s9)));
}

#include "engine/ops/cpu/kernels_attn.h"

const epx_cpu_kernels_t CAT(epx_cpu_kernels_, VISA) = {
#define NAME_(x) #x
#define NAME(x) NAME_(x)
    .name = NAME(VISA),
    .width = VW,
    .pack = pack,
    .gemm = gemm,
    .act_pack = act_pack,
    .attention = attention,
    .rmsnorm = rmsnorm,
    .rope = rope,
    .add = add,
    .widen_row = widen_row,
    .scores = scores,
    .read_sum = read_sum,
    .fma_loop = fma_loop,
};
