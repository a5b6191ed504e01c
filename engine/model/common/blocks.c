/* Building blocks that architectures are put together from: ends of the model, feed-forward, experts. Attention is in
 * attention.c. Scratch is the model's; nothing allocates. A rank without rows computes nothing but takes part in every exchange.
 */
#include <string.h>

#include "engine/model/common/arch.h"

void epx_block_embed(epx_model_t *m, const epx_batch_t *b) {
    if (b->n_rows) epx_ops_embed(m->ops, &m->w[EPX_SLOT_EMBED], b->tokens, b->n_rows, m->h);
}

/* The dense feed-forward or the shared expert of a layer. */
static void ffn(epx_model_t *m, int layer, const float *x, int64_t n, int64_t size, float *out) {
    const epx_weight_t *w = m->layers[layer].w;
    const epx_expert_weights_t e = {.gate = w[EPX_SLOT_FFN_GATE], .up = w[EPX_SLOT_FFN_UP], .down = w[EPX_SLOT_FFN_DOWN]};
    epx_ops_ffn(m->ops, x, &e, n, m->cfg.hidden, size, out);
}

void epx_block_dense(epx_model_t *m, const epx_batch_t *b, int layer) {
    const epx_model_config_t *c = &m->cfg;
    if (b->n_rows == 0) return;
    epx_ops_rmsnorm(m->ops, m->h, &m->layers[layer].w[EPX_SLOT_FFN_NORM], c->rms_eps, b->n_rows, c->hidden, m->norm);
    ffn(m, layer, m->norm, b->n_rows, c->dense_ffn, m->proj);
    epx_ops_add(m->ops, m->h, m->proj, b->n_rows, c->hidden);
}

/* Norm into the exchange's own rows x, so that dispatch copies nothing; then the choice of experts. */
static void route(epx_model_t *m, int32_t n, int layer, float *x) {
    const epx_model_config_t *c = &m->cfg;
    const epx_weight_t *w = m->layers[layer].w;
    const epx_router_t r = {.n_experts = c->n_experts,
                            .top_k = c->top_k,
                            .score = c->score,
                            .renormalize = c->norm_topk_prob,
                            .factor = (float)c->routed_factor,
                            .n_groups = c->n_groups,
                            .top_groups = c->top_groups,
                            .group_best = c->group_best,
                            .bias = &w[EPX_SLOT_CORRECTION_BIAS]};
    epx_ops_rmsnorm(m->ops, m->h, &w[EPX_SLOT_FFN_NORM], c->rms_eps, n, c->hidden, x);
    epx_ops_linear(m->ops, x, c->hidden, &w[EPX_SLOT_ROUTER], &w[EPX_SLOT_ROUTER_BIAS], n, m->router, c->n_experts);
    epx_ops_router(m->ops, &r, m->router, n, m->ids, m->weights);
}

/* The shared expert of this rank's own rows, while the exchange is under way; its gate's logits follow the rows. */
static void shared_expert(epx_model_t *m, int64_t n, int layer, const float *x) {
    const epx_weight_t *gate = &m->layers[layer].w[EPX_SLOT_SHARED_GATE];
    if (n == 0 || m->cfg.shared_ffn == 0) return;
    ffn(m, layer, x, n, m->cfg.shared_ffn, m->shared);
    if (gate->data) epx_ops_linear(m->ops, x, m->cfg.hidden, gate, NULL, n, m->shared + n * m->cfg.hidden, 1);
}

static void add_parts(epx_model_t *m, int64_t n, int layer) {
    int64_t hidden = m->cfg.hidden;
    if (n == 0) return;
    epx_ops_add(m->ops, m->h, m->proj, n, hidden);
    if (m->cfg.shared_ffn == 0) return;
    if (m->layers[layer].w[EPX_SLOT_SHARED_GATE].data)
        epx_ops_add_gated(m->ops, m->h, m->shared, m->shared + n * hidden, n, hidden);
    else epx_ops_add(m->ops, m->h, m->shared, n, hidden);
}

epx_status_t epx_block_moe(epx_model_t *m, const epx_batch_t *b, int layer) {
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
    epx_meter_pause(m->plan, &mark);
    shared_expert(m, b->n_rows, layer, x);
    epx_meter_resume(m->plan, &mark);
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
    add_parts(m, b->n_rows, layer);
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

/* Hand the layer's routing and residual stream to the probe, if any. */
static void probe(const epx_model_t *m, const epx_batch_t *b, int layer) {
    const int routed = layer >= m->cfg.n_dense_layers;
    if (m->probe) m->probe(m->probe_ctx, layer, b->n_rows, routed ? m->ids : NULL, routed ? m->weights : NULL, m->h);
}

epx_status_t epx_forward_decoder(epx_model_t *m, const epx_batch_t *b, epx_attention_fn attention) {
    epx_block_embed(m, b);
    for (int l = 0; l < m->cfg.n_layers; l++) {
        EPX_TRY(attention(m, b, l));
        if (l < m->cfg.n_dense_layers) epx_block_dense(m, b, l);
        else EPX_TRY(epx_block_moe(m, b, l));
        probe(m, b, l);
    }
    epx_block_logits(m, b);
    return EPX_OK;
}
