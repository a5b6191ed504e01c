/* Attention blocks: grouped-query and multi-head latent. Scratch is the model's; nothing allocates. */
#include <math.h>

#include "engine/model/common/arch.h"

static epx_rope_t rope_of(const epx_model_t *m) {
    const epx_model_config_t *c = &m->cfg;
    return (epx_rope_t){.inv_freq = m->inv_freq,
                        .scale = c->yarn.factor > 0 ? (float)c->yarn.attention_factor : 1.0f,
                        .first = c->rope_first,
                        .dim = c->rope_dim,
                        .interleaved = c->rope_interleaved};
}

static epx_attn_t attn_of(const epx_model_t *m, int layer, const epx_weight_t *sinks) {
    const epx_model_config_t *c = &m->cfg;
    return (epx_attn_t){
        .n_heads = m->heads.n_q, .scale = c->attn_scale, .window = epx_layer_slides(c, layer) ? c->window : 0, .sinks = sinks};
}

/* The projection of this rank's heads, to `out`. */
static epx_linear_t of_heads(const epx_model_t *m, const epx_weight_t *w, const epx_weight_t *bias, int first, int n_heads,
                             float *out) {
    const int64_t dim = m->cfg.head_dim;
    if (m->heads.tp == 1) return (epx_linear_t){*w, *bias, out};
    return (epx_linear_t){epx_weight_part(w, first * dim, n_heads * dim), epx_weight_part(bias, first * dim, n_heads * dim), out};
}

epx_status_t epx_block_gqa(epx_model_t *m, const epx_batch_t *b, int layer) {
    const epx_model_config_t *c = &m->cfg;
    const epx_weight_t *w = m->layers[layer].w;
    const epx_rope_t rope = rope_of(m);
    const epx_heads_t *h = &m->heads;
    const epx_weight_t sinks = h->tp > 1 ? epx_weight_part(&w[EPX_SLOT_SINKS], h->first_q, h->n_q) : w[EPX_SLOT_SINKS];
    const epx_attn_t attn = attn_of(m, layer, &sinks);
    if (b->n_rows == 0) return EPX_OK;
    int64_t n = b->n_rows, n_q = (int64_t)h->n_q * c->head_dim, n_kv = (int64_t)h->n_kv * c->head_dim, ld = n_q + 2 * n_kv;
    float *q = m->qkv, *k = q + n_q, *v = k + n_kv;
    epx_ops_rmsnorm(m->ops, epx_residual(m, b), &w[EPX_SLOT_ATTN_NORM], c->rms_eps, n, c->hidden, m->norm);
    const epx_linear_t qkv[] = {of_heads(m, &w[EPX_SLOT_Q], &w[EPX_SLOT_Q_BIAS], h->first_q, h->n_q, q),
                                of_heads(m, &w[EPX_SLOT_K], &w[EPX_SLOT_K_BIAS], h->first_kv, h->n_kv, k),
                                of_heads(m, &w[EPX_SLOT_V], &w[EPX_SLOT_V_BIAS], h->first_kv, h->n_kv, v)};
    epx_ops_linears(m->ops, m->norm, c->hidden, qkv, 3, n, ld);
    epx_ops_qk_norm_rope_store(m->ops, q, k, v, ld, h->n_q, &w[EPX_SLOT_Q_NORM], &w[EPX_SLOT_K_NORM], c->rms_eps, &rope, b->rows,
                               n, &b->kv[layer]);
    epx_ops_attention(m->ops, &attn, q, ld, b->rows, n, &b->kv[layer], m->attn, n_q);
    if (h->tp > 1) EPX_TRY(epx_attention_gather(m, w, n));
    else epx_ops_linear(m->ops, m->attn, n_q, &w[EPX_SLOT_O], &w[EPX_SLOT_O_BIAS], n, m->proj, c->hidden);
    epx_ops_add(m->ops, epx_residual(m, b), m->proj, n, c->hidden);
    return EPX_OK;
}

/* Rows [first, first + n) of a matrix as a matrix of its own. Of an e4m3 matrix `first` is a multiple of the scale block. */
static epx_weight_t rows_of(const epx_weight_t *w, int64_t first, int64_t n) {
    epx_weight_t part = *w;
    const int64_t elem = w->type == EPX_W_F32 ? 4 : w->type == EPX_W_BF16 ? 2 : 1, scale = w->scale_type == EPX_W_F32 ? 4 : 2;
    const int64_t per_row = (w->k + EPX_W_SCALE_BLOCK - 1) / EPX_W_SCALE_BLOCK;
    part.data = (const char *)w->data + first * w->k * elem;
    if (w->scale) part.scale = (const char *)w->scale + first / EPX_W_SCALE_BLOCK * per_row * scale;
    part.n = n;
    return part;
}

/* The queries of all heads, [n, n_heads, nope + rope], into m->q; m->norm holds the rows. */
static void mla_queries(epx_model_t *m, const epx_weight_t *w, int64_t n, float *out) {
    const epx_model_config_t *c = &m->cfg;
    const int64_t n_q = (int64_t)c->n_heads * (c->mla.nope + c->mla.rope), q_lora = c->mla.q_lora;
    const float mla_eps = 1e-6f; /* of the norms inside the block, whatever rms_norm_eps is */
    float *compressed = m->attn; /* free until attention runs */
    if (q_lora == 0) {
        epx_ops_linear(m->ops, m->norm, c->hidden, &w[EPX_SLOT_Q], NULL, n, out, n_q);
        return;
    }
    epx_ops_linear(m->ops, m->norm, c->hidden, &w[EPX_SLOT_Q_A], NULL, n, compressed, q_lora);
    epx_ops_rmsnorm(m->ops, compressed, &w[EPX_SLOT_Q_A_NORM], mla_eps, n, q_lora, compressed);
    epx_ops_linear(m->ops, compressed, q_lora, &w[EPX_SLOT_Q], NULL, n, out, n_q);
}

/* q heads of nope + rope to heads of kv_lora + rope: the key's up-projection applied to q. */
static void mla_absorb(epx_model_t *m, const epx_weight_t *kv_b, const float *q, int64_t n, int64_t ld) {
    const epx_mla_t *a = &m->cfg.mla;
    const int64_t from_ld = (int64_t)m->cfg.n_heads * (a->nope + a->rope);
    for (int h = 0; h < m->cfg.n_heads; h++) {
        const float *from = q + h * (a->nope + a->rope);
        float *to = m->qkv + h * (a->kv_lora + a->rope);
        epx_weight_t key = rows_of(kv_b, (int64_t)h * (a->nope + a->v), a->nope);
        key.n = a->kv_lora;
        key.k = a->nope;
        key.transposed = 1;
        epx_ops_linear(m->ops, from, from_ld, &key, NULL, n, to, ld);
        for (int64_t r = 0; r < n; r++)
            for (int i = 0; i < a->rope; i++) to[r * ld + a->kv_lora + i] = from[r * from_ld + a->nope + i];
    }
}

epx_status_t epx_block_mla(epx_model_t *m, const epx_batch_t *b, int layer) {
    const epx_model_config_t *c = &m->cfg;
    const epx_mla_t *a = &c->mla;
    const epx_weight_t *w = m->layers[layer].w;
    const epx_rope_t rope = rope_of(m);
    const epx_attn_t attn = attn_of(m, layer, &w[EPX_SLOT_SINKS]);
    if (b->n_rows == 0) return EPX_OK;
    const int64_t n = b->n_rows, n_q = (int64_t)c->n_heads * c->head_dim, ld = n_q + c->head_dim;
    const int64_t n_lat = (int64_t)c->n_heads * a->kv_lora, n_v = (int64_t)c->n_heads * a->v;
    float *k = m->qkv + n_q;
    epx_ops_rmsnorm(m->ops, epx_residual(m, b), &w[EPX_SLOT_ATTN_NORM], c->rms_eps, n, c->hidden, m->norm);
    mla_queries(m, w, n, m->q);
    mla_absorb(m, &w[EPX_SLOT_KV_B], m->q, n, ld);
    epx_ops_linear(m->ops, m->norm, c->hidden, &w[EPX_SLOT_KV_A], NULL, n, k, ld);
    epx_ops_qk_norm_rope_store(m->ops, m->qkv, k, NULL, ld, c->n_heads, NULL, &w[EPX_SLOT_KV_A_NORM], 1e-6f, &rope, b->rows, n,
                               &b->kv[layer]);
    epx_ops_attention(m->ops, &attn, m->qkv, ld, b->rows, n, &b->kv[layer], m->attn, n_lat);
    for (int h = 0; h < c->n_heads; h++) {
        const epx_weight_t value = rows_of(&w[EPX_SLOT_KV_B], (int64_t)h * (a->nope + a->v) + a->nope, a->v);
        epx_ops_linear(m->ops, (float *)m->attn + h * a->kv_lora, n_lat, &value, NULL, n, m->q + h * a->v, n_v);
    }
    epx_ops_linear(m->ops, m->q, n_v, &w[EPX_SLOT_O], NULL, n, m->proj, c->hidden);
    epx_ops_add(m->ops, epx_residual(m, b), m->proj, n, c->hidden);
    return EPX_OK;
}

/* YaRN (arXiv:2309.00071, section 3.2): frequencies that turn less than beta_slow times within the original context are divided
 * by the factor, those that turn more than beta_fast times stay, with a linear ramp over the dimensions between. */
static double yarn_dimension(const epx_model_config_t *c, double turns) {
    return c->rope_dim * log(c->yarn.original_positions / (turns * 2 * M_PI)) / (2 * log(c->rope_theta));
}

void epx_rope_frequencies(const epx_model_config_t *c, float *out) {
    const epx_yarn_t *y = &c->yarn;
    double low = 0, high = 0;
    if (y->factor > 0) {
        low = yarn_dimension(c, y->beta_fast), high = yarn_dimension(c, y->beta_slow);
        if (y->truncate) low = floor(low), high = ceil(high);
        low = fmax(low, 0), high = fmin(high, c->rope_dim - 1);
    }
    for (int i = 0; i < c->rope_dim / 2; i++) {
        const double f = pow(c->rope_theta, -2.0 * i / c->rope_dim), width = high != low ? high - low : 0.001;
        const double ramp = fmin(fmax((i - low) / width, 0), 1);
        out[i] = (float)(y->factor > 0 ? f / y->factor * ramp + f * (1 - ramp) : f);
    }
}
