/* Attention over paged KV, part of kernels_impl.h (same includers, same rules).
 *
 * A query vector of position p goes through KV blocks [64 b, 64 b + 64) in ascending b, those without a position it attends to
 * left out. In each: scores of the positions it attends to (others weigh 0), new running maximum, weights exp(score - maximum),
 * then accumulators and running sum scaled by exp(old - new) and fed in ascending position. The other vectors of the tile only
 * share loads; no step of one depends on another. */

typedef struct {
    const epx_attn_tile_t *t;
    int n_q, dim, dim_p, v_dim; /* vectors, head_dim, its packed length, floats of V */
    float *qp, *acc, *s;        /* [n_q, dim_p], [n_q, dim_p], [n_q, EPX_OPS_KV_BLOCK] */
    float max[EPX_OPS_Q_TILE], sum[EPX_OPS_Q_TILE];
    int from[EPX_OPS_Q_TILE], n_pos[EPX_OPS_Q_TILE]; /* positions [from, n_pos) of the present block are attended to; 0: none */
    const float *k[EPX_OPS_KV_BLOCK], *v[EPX_OPS_KV_BLOCK];
} attn_t;

static void attn_start(attn_t *a) {
    const epx_attn_tile_t *t = a->t;
    for (int i = 0; i < a->n_q; i++) {
        const int row = i / t->n_heads, head = t->head0 + i % t->n_heads;
        pack(t->q + row * t->ldq + (int64_t)head * a->dim, a->dim, EPX_PACK_NATURAL, a->qp + (int64_t)i * a->dim_p);
        memset(a->acc + (int64_t)i * a->dim_p, 0, (size_t)a->dim_p * sizeof(float));
        a->max[i] = -INFINITY;
        a->sum[i] = 0.0f;
        if (t->attn->sinks == NULL || t->attn->sinks->data == NULL) continue;
        a->max[i] = vector_at(t->attn->sinks, head); /* a sink is a score whose value is 0 */
        a->sum[i] = 1.0f;
    }
}

/* Pointers to K and V of positions base .. base + n. */
static void attn_locate(attn_t *a, int32_t base, int n) {
    const epx_kv_layer_t *kv = a->t->kv;
    int32_t page = base / kv->page_size, slot = base % kv->page_size;
    for (int j = 0; j < n; j++) {
        const int64_t at = ((int64_t)a->t->rows[0].block_table[page] * kv->page_size + slot) * kv->n_kv_heads + a->t->kv_head;
        a->k[j] = (const float *)kv->k_pages + at * a->dim;
        a->v[j] = (const float *)kv->v_pages + at * a->dim;
        if (++slot == kv->page_size) slot = 0, page++;
    }
}

/* s[i, j] = q_i . k_j for all vectors and j < n. Scores past a vector's own position are computed and not used. */
static void attn_scores(attn_t *a, int n) {
    const int64_t ahead = 4 * (int64_t)a->t->kv->n_kv_heads * a->dim; /* the next four positions, where the page goes on */
    for (int j = 0; j < n; j += 4) {
        const int nr = n - j < 4 ? n - j : 4;
        const float *k[4];
        for (int c = 0; c < 4; c++) k[c] = a->k[j + (c < nr ? c : nr - 1)];
        for (int i = 0, mr; i < a->n_q; i += mr) {
            mr = next_mr(a->n_q - i);
            g_tile_f32[mr - 1](a->qp + (int64_t)i * a->dim_p, a->dim_p, k, a->dim, ahead, a->s + i * EPX_OPS_KV_BLOCK + j,
                               EPX_OPS_KV_BLOCK, nr);
        }
    }
}

/* Scores of vector i to weights; running maximum and sum; accumulators scaled. */
static void attn_softmax(attn_t *a, int i) {
    float *s = a->s + i * EPX_OPS_KV_BLOCK, *acc = a->acc + (int64_t)i * a->dim_p, one[VW];
    const vf scale = v_set1(a->t->attn->scale);
    vf vmax = v_set1(a->max[i]), sum = v_zero();
    for (int j = 0; j < EPX_OPS_KV_BLOCK; j++)
        if (j < a->from[i] || j >= a->n_pos[i]) s[j] = -INFINITY;
    for (int j = 0; j < EPX_OPS_KV_BLOCK; j += VW) {
        const vf x = v_mul(v_load(s + j), scale);
        vmax = v_max(vmax, x);
        v_store(s + j, x);
    }
    const vf max = v_set1(v_hmax(vmax));
    const vf shrink = v_exp(v_sub(v_set1(a->max[i]), max));
    for (int j = 0; j < EPX_OPS_KV_BLOCK; j += VW) {
        const vf e = v_exp(v_sub(v_load(s + j), max));
        sum = v_add(sum, e);
        v_store(s + j, e);
    }
    for (int d = 0; d < a->dim_p; d += VW) v_store(acc + d, v_mul(v_load(acc + d), shrink));
    v_store(one, shrink);
    a->sum[i] = a->sum[i] * one[0] + v_hsum(sum);
    v_store(one, max);
    a->max[i] = one[0];
}

/* acc[d ..] of vectors i .. i + NQ += sum_j s[j] v_j[d ..], j ascending; one or two registers wide. */
#define PV_DECL(m)                                            \
    float *c##m = a->acc + (int64_t)(i + (m)) * a->dim_p + d; \
    const float *s##m = a->s + (i + (m)) * EPX_OPS_KV_BLOCK;  \
    vf y##m = v_load(c##m);
#define PV_DECL2(m) vf z##m = v_load(c##m + VW);
#define PV_FMA(m) y##m = v_fma(v_set1(s##m[j]), v0, y##m);
#define PV_FMA2(m)                    \
    {                                 \
        const vf p = v_set1(s##m[j]); \
        y##m = v_fma(p, v0, y##m);    \
        z##m = v_fma(p, v1, z##m);    \
    }
#define PV_STORE(m) v_store(c##m, y##m);
#define PV_STORE2(m) v_store(c##m + VW, z##m);
#define PV(NQ)                                                                    \
    static void attn_values_##NQ(attn_t *a, int i, int n) {                       \
        int d = 0;                                                                \
        for (; d + 2 * VW <= a->v_dim; d += 2 * VW) {                             \
            REP_##NQ(PV_DECL) REP_##NQ(PV_DECL2) for (int j = 0; j < n; j++) {    \
                const vf v0 = v_load(a->v[j] + d), v1 = v_load(a->v[j] + d + VW); \
                REP_##NQ(PV_FMA2)                                                 \
            }                                                                     \
            REP_##NQ(PV_STORE) REP_##NQ(PV_STORE2)                                \
        }                                                                         \
        for (; d < a->v_dim; d += VW) {                                           \
            const int rest = a->v_dim - d < VW ? a->v_dim - d : VW;               \
            REP_##NQ(PV_DECL) for (int j = 0; j < n; j++) {                       \
                const vf v0 = v_loadn(a->v[j] + d, rest);                         \
                REP_##NQ(PV_FMA)                                                  \
            }                                                                     \
            REP_##NQ(PV_STORE)                                                    \
        }                                                                         \
    }
PV(1)
PV(2)
PV(4)

/* Vectors that attend to the same number of positions share loads of V. */
static void attn_values(attn_t *a) {
    for (int i = 0, step; i < a->n_q; i += step) {
        const int n = a->n_pos[i];
        step = 1;
        while (step < 4 && i + step < a->n_q && a->n_pos[i + step] == n) step++;
        if (step == 3) step = 2;
        if (n == 0) continue;
        if (step == 4) attn_values_4(a, i, n);
        else if (step == 2) attn_values_2(a, i, n);
        else attn_values_1(a, i, n);
    }
}

static void attn_finish(attn_t *a) {
    const epx_attn_tile_t *t = a->t;
    for (int i = 0; i < a->n_q; i++) {
        const int row = i / t->n_heads, head = t->head0 + i % t->n_heads;
        float *out = t->out + row * t->ldo + (int64_t)head * a->v_dim;
        const float *acc = a->acc + (int64_t)i * a->dim_p;
        for (int d = 0; d < a->v_dim; d++) out[d] = acc[d] / a->sum[i];
    }
}

/* The first position that the row attends to. */
static int32_t attn_low(const epx_attn_tile_t *t, int row) {
    const int32_t low = t->rows[row].position - t->attn->window + 1;
    return t->attn->window > 0 && low > 0 ? low : 0;
}

/* Which positions of the block at `base` vector i attends to. */
static void attn_limits(attn_t *a, int i, int32_t base) {
    const int row = i / a->t->n_heads;
    const int32_t own = a->t->rows[row].position - base + 1, low = attn_low(a->t, row) - base;
    a->from[i] = low > 0 ? low : 0;
    a->n_pos[i] = own <= 0 || low >= EPX_OPS_KV_BLOCK ? 0 : own < EPX_OPS_KV_BLOCK ? own : EPX_OPS_KV_BLOCK;
}

static void attention(const epx_attn_tile_t *t) {
    const int dim = t->kv->head_dim, dim_p = (int)epx_packed_len(dim, VW);
    attn_t a = {.t = t, .n_q = t->n_rows * t->n_heads, .dim = dim, .dim_p = dim_p};
    a.v_dim = t->kv->v_dim ? t->kv->v_dim : dim;
    a.qp = t->scratch;
    a.acc = a.qp + EPX_OPS_Q_TILE * EPX_OPS_MAX_HEAD_DIM;
    a.s = a.acc + EPX_OPS_Q_TILE * EPX_OPS_MAX_HEAD_DIM;
    int32_t last = 0, first = INT32_MAX;
    for (int r = 0; r < t->n_rows; r++) {
        last = t->rows[r].position > last ? t->rows[r].position : last;
        first = attn_low(t, r) < first ? attn_low(t, r) : first;
    }
    attn_start(&a);
    for (int32_t base = first / EPX_OPS_KV_BLOCK * EPX_OPS_KV_BLOCK; base <= last; base += EPX_OPS_KV_BLOCK) {
        const int n = last - base + 1 < EPX_OPS_KV_BLOCK ? last - base + 1 : EPX_OPS_KV_BLOCK;
        attn_locate(&a, base, n);
        attn_scores(&a, n);
        for (int i = 0; i < a.n_q; i++) {
            attn_limits(&a, i, base);
            if (a.n_pos[i] > 0) attn_softmax(&a, i);
        }
        attn_values(&a);
    }
    attn_finish(&a);
}
