/* Building blocks that architectures are put together from. Scratch is the model's; nothing allocates.
 * A rank without rows computes nothing but takes part in every exchange. */
#include <string.h>

#include "engine/model/common/arch.h"

void epx_block_embed(epx_model_t *m, const epx_batch_t *b) {
    if (b->n_rows) epx_ops_embed(m->ops, &m->w[EPX_SLOT_EMBED], b->tokens, b->n_rows, m->h);
}

void epx_block_gqa(epx_model_t *m, const epx_batch_t *b, int layer) {
    const epx_model_config_t *c = &m->cfg;
    const epx_weight_t *w = m->layers[layer].w;
    if (b->n_rows == 0) return;
    int64_t n = b->n_rows, n_q = (int64_t)c->n_heads * c->head_dim, n_kv = (int64_t)c->n_kv_heads * c->head_dim,
            ld = n_q + 2 * n_kv;
    float *q = m->qkv, *k = q + n_q, *v = k + n_kv;
    epx_ops_rmsnorm(m->ops, m->h, &w[EPX_SLOT_ATTN_NORM], c->rms_eps, n, c->hidden, m->norm);
    epx_ops_linear(m->ops, m->norm, c->hidden, &w[EPX_SLOT_Q], NULL, n, q, ld);
    epx_ops_linear(m->ops, m->norm, c->hidden, &w[EPX_SLOT_K], NULL, n, k, ld);
    epx_ops_linear(m->ops, m->norm, c->hidden, &w[EPX_SLOT_V], NULL, n, v, ld);
    epx_ops_qk_norm_rope_store(m->ops, q, k, v, ld, c->n_heads, &w[EPX_SLOT_Q_NORM], &w[EPX_SLOT_K_NORM], c->rms_eps, m->inv_freq,
                               m->rope_scale, b->rows, n, &b->kv[layer]);
    float scale = 1.0f / __builtin_sqrtf((float)c->head_dim);
    epx_ops_attention(m->ops, q, ld, c->n_heads, scale, b->rows, n, &b->kv[layer], m->attn, n_q);
    epx_ops_linear(m->ops, m->attn, n_q, &w[EPX_SLOT_O], NULL, n, m->proj, c->hidden);
    epx_ops_add(m->ops, m->h, m->proj, n, c->hidden);
}

/* Norm into the exchange's own rows x, so that dispatch copies nothing; then the choice of experts. */
static void route(epx_model_t *m, int32_t n, int layer, float *x) {
    const epx_model_config_t *c = &m->cfg;
    const epx_weight_t *w = m->layers[layer].w;
    epx_ops_rmsnorm(m->ops, m->h, &w[EPX_SLOT_FFN_NORM], c->rms_eps, n, c->hidden, x);
    epx_ops_linear(m->ops, x, c->hidden, &w[EPX_SLOT_ROUTER], NULL, n, m->router, c->n_experts);
    epx_ops_router_softmax_topk(m->ops, m->router, n, c->n_experts, c->top_k, c->norm_topk_prob, m->ids, m->weights);
}

epx_status_t epx_block_moe_softmax(epx_model_t *m, const epx_batch_t *b, int layer) {
    void *x;
    epx_lists_t lists;
    epx_io_t io;
    epx_meter_mark_t mark;
    EPX_TRY(epx_plan_input(m->plan, 0, &x));
    if (b->n_rows) route(m, b->n_rows, layer, x);
    epx_io_init(&io);
    io.x = x;
    io.ids = m->ids;
    io.weights = m->weights;
    io.n_tokens = b->n_rows;
    epx_meter_add_rows(&m->meter, layer, m->ids, b->n_rows, m->cfg.top_k);
    epx_meter_begin(m->plan, &mark);
    EPX_TRY(epx_dispatch_send(m->plan, &io));
    EPX_TRY(epx_dispatch_recv(m->plan, &io));
    epx_meter_end(&m->meter, m->plan, EPX_PHASE_DISPATCH, &mark);
    EPX_TRY(epx_plan_lists(m->plan, 0, &lists));
    if (lists.n_rows) epx_ops_experts(m->ops, &lists, m->layers[layer].experts, m->cfg.hidden, m->cfg.moe_ffn, m->expert_out);
    io.x = m->expert_out;
    io.out_x = m->proj;
    epx_meter_begin(m->plan, &mark);
    EPX_TRY(epx_combine_send(m->plan, &io));
    EPX_TRY(epx_combine_recv(m->plan, &io));
    epx_meter_end(&m->meter, m->plan, EPX_PHASE_COMBINE, &mark);
    if (b->n_rows) epx_ops_add(m->ops, m->h, m->proj, b->n_rows, m->cfg.hidden);
    return EPX_OK;
}

void epx_block_logits(epx_model_t *m, const epx_batch_t *b) {
    int64_t hidden = m->cfg.hidden;
    if (b->n_logits == 0) return;
    const epx_weight_t *head = &m->w[m->cfg.tie_embeddings ? EPX_SLOT_EMBED : EPX_SLOT_LM_HEAD];
    for (int32_t i = 0; i < b->n_logits; i++)
        memcpy(m->norm + i * hidden, m->h + b->logit_rows[i] * hidden, (size_t)hidden * sizeof(float));
    epx_ops_rmsnorm(m->ops, m->norm, &m->w[EPX_SLOT_FINAL_NORM], m->cfg.rms_eps, b->n_logits, hidden, m->norm);
    epx_ops_linear(m->ops, m->norm, hidden, head, NULL, b->n_logits, b->logits, m->cfg.vocab);
}

void epx_block_probe(const epx_model_t *m, const epx_batch_t *b, int layer) {
    if (m->probe) m->probe(m->probe_ctx, layer, b->n_rows, m->ids, m->weights, m->h);
}
