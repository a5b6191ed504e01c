/* Building blocks that architectures are put together from: ends of the model, feed-forward, experts. Attention is in
 * attention.c. Scratch is the model's; nothing allocates. A rank without rows computes nothing but takes part in every exchange.
 * The residual stream, the choice of experts and the shared expert's output have a place for every row of a step; all other
 * scratch is used by one part of a step at a time. */
#include <stdlib.h>

#include "engine/model/common/arch.h"

void epx_block_embed(epx_model_t *m, const epx_batch_t *b) {
    if (b->n_rows) epx_ops_embed(m->ops, &m->w[EPX_SLOT_EMBED], b->tokens, b->n_rows, epx_residual(m, b));
}

/* The dense feed-forward or the shared expert of a layer. */
static void ffn(epx_model_t *m, int layer, const void *x, int64_t n, int64_t size, float *out) {
    const epx_weight_t *w = m->layers[layer].w;
    const epx_expert_weights_t e = {.gate = w[EPX_SLOT_FFN_GATE], .up = w[EPX_SLOT_FFN_UP], .down = w[EPX_SLOT_FFN_DOWN]};
    epx_ops_ffn(m->ops, x, &e, n, m->cfg.hidden, size, out);
}

void epx_block_dense(epx_model_t *m, const epx_batch_t *b, int layer) {
    const epx_model_config_t *c = &m->cfg;
    if (b->n_rows == 0) return;
    float *h = epx_residual(m, b);
    epx_ops_rmsnorm(m->ops, h, &m->layers[layer].w[EPX_SLOT_FFN_NORM], c->rms_eps, b->n_rows, c->hidden, m->norm);
    ffn(m, layer, m->norm, b->n_rows, c->dense_ffn, m->proj);
    epx_ops_add(m->ops, h, m->proj, b->n_rows, c->hidden);
}

static int32_t *ids_of(const epx_model_t *m, const epx_batch_t *b) { return m->ids + (int64_t)b->first * m->cfg.top_k; }
static float *weights_of(const epx_model_t *m, const epx_batch_t *b) { return m->weights + (int64_t)b->first * m->cfg.top_k; }
static float *shared_of(const epx_model_t *m, const epx_batch_t *b) { return m->shared + (int64_t)b->first * m->cfg.hidden; }
static float *gate_of(const epx_model_t *m, const epx_batch_t *b) {
    return m->shared + (int64_t)m->max_rows * m->cfg.hidden + b->first;
}

/* Norm into the exchange's own rows x, so that dispatch copies nothing; then the choice of experts. */
static void route(epx_model_t *m, const epx_batch_t *b, int layer, void *x) {
    const epx_model_config_t *c = &m->cfg;
    const epx_weight_t *w = m->layers[layer].w;
    const int32_t n = b->n_rows;
    const epx_router_t r = {.n_experts = c->n_experts,
                            .top_k = c->top_k,
                            .score = c->score,
                            .renormalize = c->norm_topk_prob,
                            .factor = (float)c->routed_factor,
                            .n_groups = c->n_groups,
                            .top_groups = c->top_groups,
                            .group_best = c->group_best,
                            .bias = &w[EPX_SLOT_CORRECTION_BIAS]};
    epx_ops_rmsnorm(m->ops, epx_residual(m, b), &w[EPX_SLOT_FFN_NORM], c->rms_eps, n, c->hidden, x);
    epx_ops_linear(m->ops, x, c->hidden, &w[EPX_SLOT_ROUTER], &w[EPX_SLOT_ROUTER_BIAS], n, m->router, c->n_experts);
    epx_ops_router(m->ops, &r, m->router, n, ids_of(m, b), weights_of(m, b));
}

/* The shared expert of this rank's own rows, while the exchange is under way; its gate's logits lie behind those of all rows. */
static void shared_expert(epx_model_t *m, const epx_batch_t *b, int layer, const void *x) {
    const epx_weight_t *gate = &m->layers[layer].w[EPX_SLOT_SHARED_GATE];
    const int64_t n = b->n_rows;
    if (n == 0 || m->cfg.shared_ffn == 0) return;
    ffn(m, layer, x, n, m->cfg.shared_ffn, shared_of(m, b));
    if (gate->data) epx_ops_linear(m->ops, x, m->cfg.hidden, gate, NULL, n, gate_of(m, b), 1);
}

static void add_parts(epx_model_t *m, const epx_batch_t *b, int layer) {
    const int64_t hidden = m->cfg.hidden, n = b->n_rows;
    float *h = epx_residual(m, b);
    if (n == 0) return;
    epx_ops_add_rows(m->ops, h, m->proj, n, hidden);
    if (m->cfg.shared_ffn == 0) return;
    if (m->layers[layer].w[EPX_SLOT_SHARED_GATE].data) epx_ops_add_gated(m->ops, h, shared_of(m, b), gate_of(m, b), n, hidden);
    else epx_ops_add(m->ops, h, shared_of(m, b), n, hidden);
}

/* ---- experts: three parts, so that the exchange of one half of a step can be under way while the other computes ---- */

/* Rows that are in an exchange. */
typedef struct {
    epx_plan_t *plan;
    epx_io_t io;
    epx_meter_mark_t mark;
} flight_t;

/* Where the rows of the exchange are, as lists: in place, or one after the other in expert_in. */
static epx_status_t receive(epx_model_t *m, epx_plan_t *plan, int contiguous, epx_io_t *io, epx_lists_t *out) {
    const int32_t *off;
    io->out_x = contiguous ? m->expert_in : NULL;
    io->out_counts = contiguous ? m->expert_counts : NULL;
    EPX_TRY(epx_dispatch_recv(plan, io));
    if (!contiguous) return epx_plan_lists(plan, io->channel, out);
    EPX_TRY(epx_plan_offsets(plan, io->channel, &off));
    *out = (epx_lists_t){.n_local_experts = m->n_local_experts,
                         .n_rows = off[m->n_local_experts],
                         .expert_off = off,
                         .row_base = (const void *const *)(const void *)&m->expert_in,
                         .row_stride_bytes = (uint64_t)m->cfg.hidden * sizeof(float)};
    return EPX_OK;
}

epx_status_t epx_model_run_experts(epx_model_t *m, epx_plan_t *plan, int contiguous, int layer, epx_io_t *io) {
    epx_lists_t rows;
    EPX_TRY(receive(m, plan, contiguous, io, &rows));
    if (rows.n_rows) epx_ops_experts(m->ops, &rows, m->layers[layer].experts, m->cfg.hidden, m->cfg.moe_ffn, m->expert_out);
    io->x = m->expert_out;
    io->out_x = m->proj;
    return epx_combine_send(plan, io);
}

/* Router and dispatch_send. */
static epx_status_t begin_experts(epx_model_t *m, const epx_batch_t *b, int layer, flight_t *f) {
    void *x = m->norm; /* a device's exchange reads rows where they lie */
    const int on_host = epx_ops_reads_host(m->ops);
    f->plan = m->plans[b->exchange];
    if (on_host) EPX_TRY(epx_plan_input(f->plan, b->channel, &x));
    if (b->n_rows) route(m, b, layer, x);
    epx_io_init(&f->io);
    f->io.channel = b->channel;
    f->io.x = x;
    f->io.ids = ids_of(m, b);
    f->io.weights = weights_of(m, b);
    f->io.n_tokens = b->n_rows;
    f->io.stream = epx_ops_stream(m->ops);
    if (on_host) epx_meter_add_rows(&m->meter, layer, f->io.ids, b->n_rows, m->cfg.top_k);
    epx_meter_begin(f->plan, &f->mark);
    EPX_TRY(epx_dispatch_send(f->plan, &f->io));
    epx_meter_pause(f->plan, &f->mark);
    return EPX_OK;
}

/* Shared expert, dispatch_recv, local experts, combine_send, which reads all of expert_out. */
static epx_status_t run_experts(epx_model_t *m, const epx_batch_t *b, int layer, flight_t *f) {
    epx_lists_t rows;
    shared_expert(m, b, layer, f->io.x);
    epx_meter_resume(f->plan, &f->mark);
    EPX_TRY(receive(m, f->plan, m->contiguous[b->exchange], &f->io, &rows));
    epx_meter_end(&m->meter, f->plan, EPX_PHASE_DISPATCH, &f->mark);
    if (rows.n_rows) epx_ops_experts(m->ops, &rows, m->layers[layer].experts, m->cfg.hidden, m->cfg.moe_ffn, m->expert_out);
    f->io.x = m->expert_out;
    f->io.out_x = m->proj;
    epx_meter_begin(f->plan, &f->mark);
    EPX_TRY(epx_combine_send(f->plan, &f->io));
    epx_meter_pause(f->plan, &f->mark);
    return EPX_OK;
}

/* combine_recv and the sums. */
static epx_status_t end_experts(epx_model_t *m, const epx_batch_t *b, int layer, flight_t *f) {
    epx_meter_resume(f->plan, &f->mark);
    EPX_TRY(epx_combine_recv(f->plan, &f->io));
    epx_meter_end(&m->meter, f->plan, EPX_PHASE_COMBINE, &f->mark);
    add_parts(m, b, layer);
    return EPX_OK;
}

epx_status_t epx_block_moe(epx_model_t *m, const epx_batch_t *b, int layer) {
    flight_t f;
    EPX_TRY(begin_experts(m, b, layer, &f));
    EPX_TRY(run_experts(m, b, layer, &f));
    return end_experts(m, b, layer, &f);
}

epx_status_t epx_block_logits(epx_model_t *m, const epx_batch_t *b) {
    int64_t hidden = m->cfg.hidden;
    if (b->n_logits == 0) return EPX_OK;
    const epx_weight_t *head = &m->w[m->cfg.tie_embeddings ? EPX_SLOT_EMBED : EPX_SLOT_LM_HEAD];
    EPX_ASSERT(!b->best || m->logits);
    const int32_t most = m->logits ? m->logits_rows : b->n_logits;
    for (int32_t first = 0, n; first < b->n_logits; first += n) {
        float *out = b->logits + (size_t)first * (size_t)m->cfg.vocab, *to = m->logits ? m->logits : out;
        n = b->n_logits - first < most ? b->n_logits - first : most;
        epx_ops_gather(m->ops, m->h, b->logit_rows + first, n, hidden, m->proj);
        epx_ops_rmsnorm(m->ops, m->proj, &m->w[EPX_SLOT_FINAL_NORM], m->cfg.rms_eps, n, hidden, m->norm);
        epx_ops_linear(m->ops, m->norm, hidden, head, NULL, n, to, m->cfg.vocab);
        if (b->best) {
            epx_ops_argmax(m->ops, to, n, m->cfg.vocab, m->best);
            EPX_TRY(epx_ops_download(m->ops, b->best + first, m->best, (size_t)n * sizeof *m->best));
            continue;
        }
        EPX_TRY(epx_ops_download(m->ops, out, to, (size_t)n * (size_t)m->cfg.vocab * sizeof(float)));
    }
    return EPX_OK;
}

/* The probe of values that a device holds. Watching costs time and memory, serving does not. */
static epx_status_t probe_copy(const epx_model_t *m, const epx_batch_t *b, int layer, int routed) {
    const size_t n = (size_t)b->n_rows, n_hidden = n * (size_t)m->cfg.hidden, n_chosen = n * (size_t)m->cfg.top_k;
    float *block = malloc((n_hidden + 2 * n_chosen + 1) * sizeof *block), *weights;
    int32_t *ids;
    if (!block) return epx_fail(EPX_ERR_NOMEM, "probe of layer %d: no memory for %zu rows", layer, n);
    weights = block + n_hidden;
    ids = (int32_t *)(void *)(weights + n_chosen);
    epx_status_t s = epx_ops_download(m->ops, block, epx_residual(m, b), n_hidden * sizeof *block);
    if (s >= 0 && routed) s = epx_ops_download(m->ops, weights, weights_of(m, b), n_chosen * sizeof *weights);
    if (s >= 0 && routed) s = epx_ops_download(m->ops, ids, ids_of(m, b), n_chosen * sizeof *ids);
    if (s >= 0) m->probe(m->probe_ctx, layer, b->n_rows, routed ? ids : NULL, routed ? weights : NULL, block);
    free(block);
    return s;
}

/* Hand the layer's routing and residual stream to the probe, if any. */
static epx_status_t probe(const epx_model_t *m, const epx_batch_t *b, int layer) {
    const int routed = layer >= m->cfg.n_dense_layers;
    if (!m->probe) return EPX_OK;
    if (!epx_ops_reads_host(m->ops)) return probe_copy(m, b, layer, routed);
    m->probe(m->probe_ctx, layer, b->n_rows, routed ? ids_of(m, b) : NULL, routed ? weights_of(m, b) : NULL, epx_residual(m, b));
    return EPX_OK;
}

/* ---- a step in two halves ---- */

typedef struct {
    epx_batch_t b; /* these rows, on a channel of their own */
    flight_t f;
} half_t;

static void cut(const epx_batch_t *b, half_t halves[2]) {
    const int32_t n = (b->n_rows + 1) / 2;
    halves[0].b = halves[1].b = *b;
    halves[0].b.n_rows = n;
    halves[1].b.n_rows = b->n_rows - n;
    halves[1].b.first = n;
    halves[1].b.channel = 1;
    halves[1].b.tokens += n;
    halves[1].b.rows += n;
}

static int has_experts(const epx_model_t *m, int layer) { return layer >= m->cfg.n_dense_layers; }

/* What is left of the layer before, then this layer up to where its rows leave. */
static epx_status_t go_on(epx_model_t *m, half_t *half, int layer, epx_attention_fn attention) {
    if (layer > 0 && has_experts(m, layer - 1)) EPX_TRY(end_experts(m, &half->b, layer - 1, &half->f));
    if (layer > 0) EPX_TRY(probe(m, &half->b, layer - 1));
    if (layer == m->cfg.n_layers) return EPX_OK;
    EPX_TRY(attention(m, &half->b, layer));
    if (has_experts(m, layer)) return begin_experts(m, &half->b, layer, &half->f);
    epx_block_dense(m, &half->b, layer);
    return EPX_OK;
}

/* While rows of one half are on their way to or from their experts, the other half computes. Attention of the first half comes
 * first in every layer, so a sequence may lie in both: its later rows find the keys of its earlier ones. */
static epx_status_t layers_in_halves(epx_model_t *m, const epx_batch_t *b, epx_attention_fn attention) {
    half_t halves[2];
    cut(b, halves);
    for (int l = 0; l <= m->cfg.n_layers; l++) {
        for (int i = 0; i < 2; i++) EPX_TRY(go_on(m, &halves[i], l, attention));
        for (int i = 0; i < 2 && l < m->cfg.n_layers && has_experts(m, l); i++)
            EPX_TRY(run_experts(m, &halves[i].b, l, &halves[i].f));
    }
    return EPX_OK;
}

static epx_status_t layers(epx_model_t *m, const epx_batch_t *b, epx_attention_fn attention) {
    for (int l = 0; l < m->cfg.n_layers; l++) {
        EPX_TRY(attention(m, b, l));
        if (has_experts(m, l)) EPX_TRY(epx_block_moe(m, b, l));
        else epx_block_dense(m, b, l);
        EPX_TRY(probe(m, b, l));
    }
    return EPX_OK;
}

epx_status_t epx_forward_decoder(epx_model_t *m, const epx_batch_t *b, epx_attention_fn attention) {
    epx_block_embed(m, b);
    EPX_TRY(b->in_halves ? layers_in_halves(m, b, attention) : layers(m, b, attention));
    return epx_block_logits(m, b);
}
