/* Products with block-scaled e4m3 weights and with transposed weights, part of kernels_impl.h (same includers, same rules).
 *
 * e4m3, [n, k]: the tile of kernels_impl.h with an element widened and scaled in registers, w = value * factor rounded to f32, so
 * the result is that of the dequantised matrix in f32. Factors change every 128 columns, a multiple of 2 * VW.
 * Transposed, [k, n]: registers run along n, each output has one accumulator fed in ascending k. */

typedef uint8_t f8_t;

/* The factor of block (row / 128, col / 128) of the stored matrix, times the 256 that v_f8() leaves out. */
static inline float f8_factor(const epx_weight_t *w, int64_t row, int64_t col) {
    const int64_t cols = w->transposed ? w->n : w->k, per_row = (cols + EPX_W_SCALE_BLOCK - 1) / EPX_W_SCALE_BLOCK;
    const int64_t i = row / EPX_W_SCALE_BLOCK * per_row + col / EPX_W_SCALE_BLOCK;
    const float f = w->scale_type == EPX_W_BF16 ? epx_bf16_to_f32(((const uint16_t *)w->scale)[i]) : ((const float *)w->scale)[i];
    return f * 256.0f;
}

typedef struct {
    const float *x; /* packed, natural order */
    int64_t ldx;
    const f8_t *w[4]; /* all readable */
    const epx_weight_t *weight;
    int64_t row; /* of w[0] in the stored matrix; the four share a block */
    float *out;
    int64_t ldo;
    int nr;
} f8_tile_t;

#define F8_LOAD(p) v_mul(v_f8(p), factor)
#define TILE_F8(MR)                                                                               \
    static void tile_f8_##MR(const f8_tile_t *t) {                                                \
        const float *x = t->x;                                                                    \
        const f8_t *w0 = t->w[0], *w1 = t->w[1], *w2 = t->w[2], *w3 = t->w[3];                    \
        const int64_t k = t->weight->k, ldx = t->ldx, ldo = t->ldo;                               \
        float *out = t->out;                                                                      \
        const int nr = t->nr;                                                                     \
        int64_t i = 0;                                                                            \
        REP_##MR(T_DECL) while (i < k) {                                                          \
            const int64_t end = k - i < EPX_W_SCALE_BLOCK ? k : i + EPX_W_SCALE_BLOCK;            \
            const vf factor = v_set1(f8_factor(t->weight, t->row, i));                            \
            for (; i + 2 * VW <= end; i += 2 * VW) {                                              \
                EPX_PREFETCH_R(w0 + i + 4 * k);                                                   \
                EPX_PREFETCH_R(w1 + i + 4 * k);                                                   \
                EPX_PREFETCH_R(w2 + i + 4 * k);                                                   \
                EPX_PREFETCH_R(w3 + i + 4 * k);                                                   \
                T_STEP(F8_LOAD, 0, REP_##MR, w0 + i, w1 + i, w2 + i, w3 + i)                      \
                T_STEP(F8_LOAD, VW, REP_##MR, w0 + i + VW, w1 + i + VW, w2 + i + VW, w3 + i + VW) \
            }                                                                                     \
            if (i == end) continue;                                                               \
            f8_t tail[4][2 * VW] = {{0}};                                                         \
            for (int j = 0; j < 4; j++) memcpy(tail[j], t->w[j] + i, (size_t)(end - i));          \
            T_STEP(F8_LOAD, 0, REP_##MR, tail[0], tail[1], tail[2], tail[3])                      \
            T_STEP(F8_LOAD, VW, REP_##MR, tail[0] + VW, tail[1] + VW, tail[2] + VW, tail[3] + VW) \
            i = end;                                                                              \
        }                                                                                         \
        REP_##MR(T_STORE)                                                                         \
    }
TILE_F8(1)
TILE_F8(2)
#if MR_MAX > 2
TILE_F8(3)
TILE_F8(4)
TILE_F8(5)
TILE_F8(6)
static void (*const g_tile_f8[MR_MAX])(const f8_tile_t *) = {tile_f8_1, tile_f8_2, tile_f8_3, tile_f8_4, tile_f8_5, tile_f8_6};
#else
static void (*const g_tile_f8[MR_MAX])(const f8_tile_t *) = {tile_f8_1, tile_f8_2};
#endif

static void rows_f8(const epx_gemm_t *g, int m, int mr) {
    const int64_t k = g->w->k;
    f8_tile_t t = {.x = g->xp + m * g->ldxp, .ldx = g->ldxp, .weight = g->w, .ldo = g->ldo};
    for (int n = 0; n < g->n; n += 4) {
        t.nr = g->n - n < 4 ? g->n - n : 4;
        t.row = g->n0 + n;
        t.out = g->out + m * g->ldo + n;
        for (int j = 0; j < 4; j++) t.w[j] = (const f8_t *)g->w->data + (t.row + (j < t.nr ? j : t.nr - 1)) * k;
        g_tile_f8[mr - 1](&t);
    }
}

/* ---- transposed ---- */

/* 2 * VW columns from p as two registers: bf16 even and odd ones, else the first and second half. */
static inline void load_columns(const epx_weight_t *w, const void *p, vf factor, vf *out_a, vf *out_b) {
    if (w->type == EPX_W_BF16) {
        *out_a = v_bf16_even(p);
        *out_b = v_bf16_odd(p);
    } else if (w->type == EPX_W_F32) {
        *out_a = v_load(p);
        *out_b = v_load((const float *)p + VW);
    } else {
        *out_a = v_mul(v_f8(p), factor);
        *out_b = v_mul(v_f8((const f8_t *)p + VW), factor);
    }
}

enum { C_ROWS = 4 }; /* rows of x that share a pass over the columns */

/* out[i, 0 .. n) for m <= C_ROWS rows, n <= 2 * VW columns from n0. */
static void columns(const epx_gemm_t *g, int m0, int m, int64_t n0, int n) {
    const epx_weight_t *w = g->w;
    const size_t elem = w->type == EPX_W_F32 ? 4 : w->type == EPX_W_BF16 ? 2 : 1;
    const int whole = n == 2 * VW;
    vf a[C_ROWS], b[C_ROWS], factor = v_zero();
    float tail[2 * VW] = {0}, lane[2 * VW];
    for (int i = 0; i < C_ROWS; i++) a[i] = b[i] = v_zero();
    for (int64_t k = 0; k < w->k; k++) {
        const void *p = (const char *)w->data + (size_t)(k * w->n + n0) * elem;
        vf wa, wb;
        if (w->type == EPX_W_F8_E4M3 && k % EPX_W_SCALE_BLOCK == 0) factor = v_set1(f8_factor(w, k, n0));
        if (!whole) p = memcpy(tail, p, (size_t)n * elem);
        load_columns(w, p, factor, &wa, &wb);
        for (int i = 0; i < C_ROWS; i++) {
            const vf x = v_set1(g->xp[(m0 + (i < m ? i : 0)) * g->ldxp + k]);
            a[i] = v_fma(x, wa, a[i]);
            b[i] = v_fma(x, wb, b[i]);
        }
    }
    for (int i = 0; i < m; i++) {
        float *out = g->out + (m0 + i) * g->ldo + (n0 - g->n0);
        v_store(lane, a[i]);
        v_store(lane + VW, b[i]);
        for (int c = 0; c < n; c++) out[c] = w->type == EPX_W_BF16 ? lane[c % 2 * VW + c / 2] : lane[c];
    }
}

static void gemm_transposed(const epx_gemm_t *g) {
    for (int n = 0; n < g->n; n += 2 * VW)
        for (int m = 0; m < g->m; m += C_ROWS)
            columns(g, m, g->m - m < C_ROWS ? g->m - m : C_ROWS, g->n0 + n, g->n - n < 2 * VW ? g->n - n : 2 * VW);
}
