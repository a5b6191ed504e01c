/* Life of a model on one rank. See model.h. */
#include "engine/model/model.h"

#include <stdlib.h>

#include "base/checked.h"
#include "engine/model/common/arch.h"
#include "engine/model/load/checkpoint.h"

void epx_model_expert_range(int n_experts, int rank, int n_ranks, int *out_first, int *out_n) {
    int base = n_experts / n_ranks, extra = n_experts % n_ranks;
    *out_first = rank * base + (rank < extra ? rank : extra);
    *out_n = base + (rank < extra);
}

static epx_status_t take_memory(epx_model_t *m, int64_t n_rows, int64_t width, void *out_ptr) {
    size_t n_bytes;
    void *p;
    if (!epx_mul_size((size_t)n_rows, (size_t)width, &n_bytes) || !epx_mul_size(n_bytes, 4, &n_bytes))
        return epx_fail(EPX_ERR_NOMEM, "model scratch: %lld rows of %lld values overflow", (long long)n_rows, (long long)width);
    EPX_ASSERT(m->n_owned < (int)(sizeof m->owned / sizeof m->owned[0]));
    epx_status_t s = epx_ops_alloc(m->ops, n_bytes, &p);
    if (s < 0) return epx_fail_context(s, "model scratch: %lld rows of %lld values", (long long)n_rows, (long long)width);
    m->owned[m->n_owned].p = p;
    m->owned[m->n_owned++].n_bytes = n_bytes;
    *(void **)out_ptr = p;
    return EPX_OK;
}

/* Both f32 and operand rows fit. */
static epx_status_t alloc_rows(epx_model_t *m, int64_t width, void *out_ptr) {
    return take_memory(m, m->max_rows, width, out_ptr);
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static epx_status_t make_frequencies(epx_model_t *m) {
    const int n = m->cfg.rope_dim / 2;
    float *own = malloc((size_t)n * sizeof *own);
    if (!own) return epx_fail(EPX_ERR_NOMEM, "model scratch: %d rotary frequencies", n);
    epx_rope_frequencies(&m->cfg, own);
    epx_status_t s = take_memory(m, 1, n, &m->inv_freq);
    if (s >= 0) s = epx_ops_upload(m->ops, m->inv_freq, own, (size_t)n * sizeof *own);
    free(own);
    return s;
}

/* Rows of logits that a device computes before they are brought to the host. */
enum { DEVICE_LOGITS_ROWS = 256 };

static epx_status_t alloc_scratch(epx_model_t *m) {
    const epx_model_config_t *c = &m->cfg;
    const epx_mla_t *a = &c->mla;
    int64_t n_q = (int64_t)c->n_heads * c->head_dim, n_kv = (int64_t)c->n_kv_heads * c->head_dim;
    int64_t mla_q = (int64_t)c->n_heads * larger(a->nope + a->rope, a->v);
    EPX_TRY(alloc_rows(m, c->hidden, &m->h));
    EPX_TRY(alloc_rows(m, c->hidden, &m->norm));
    EPX_TRY(alloc_rows(m, n_q + 2 * n_kv, &m->qkv));
    EPX_TRY(alloc_rows(m, larger(n_q, a->q_lora), &m->attn));
    if (a->kv_lora) EPX_TRY(alloc_rows(m, mla_q, &m->q));
    if (c->shared_ffn) EPX_TRY(alloc_rows(m, c->hidden + 1, &m->shared));
    EPX_TRY(alloc_rows(m, c->hidden, &m->proj));
    EPX_TRY(alloc_rows(m, c->n_experts, &m->router));
    EPX_TRY(alloc_rows(m, c->top_k, &m->ids));
    EPX_TRY(alloc_rows(m, c->top_k, &m->weights));
    if (!epx_ops_reads_host(m->ops)) {
        m->logits_rows = m->max_rows < DEVICE_LOGITS_ROWS ? m->max_rows : DEVICE_LOGITS_ROWS;
        EPX_TRY(take_memory(m, m->logits_rows, c->vocab, &m->logits));
        EPX_TRY(take_memory(m, m->logits_rows, 1, &m->best));
    }
    return make_frequencies(m);
}

static epx_status_t alloc_layers(epx_model_t *m) {
    size_t n = (size_t)m->cfg.n_layers * (size_t)m->n_local_experts;
    m->layers = calloc((size_t)m->cfg.n_layers, sizeof *m->layers);
    m->experts = calloc(n ? n : 1, sizeof *m->experts);
    if (!m->layers || !m->experts) return epx_fail(EPX_ERR_NOMEM, "model: no memory for tables of %zu experts", n);
    m->expert_counts = calloc((size_t)m->n_local_experts + 1, sizeof *m->expert_counts);
    if (!m->expert_counts) return epx_fail(EPX_ERR_NOMEM, "model: no memory for %d counts", m->n_local_experts);
    for (int l = m->cfg.n_dense_layers; l < m->cfg.n_layers; l++)
        m->layers[l].experts = m->experts + (size_t)l * (size_t)m->n_local_experts;
    for (size_t i = 0; i < n; i++) {
        m->experts[i].act = m->cfg.act;
        m->experts[i].act_limit = (float)m->cfg.act_limit;
    }
    return EPX_OK;
}

static epx_status_t check_ops(const epx_model_t *m, const epx_model_load_t *load) {
    const epx_model_config_t *c = &m->cfg;
    int slides = 0;
    for (int l = 0; l < c->n_layers; l++) slides |= epx_layer_slides(c, l);
    const epx_ops_needs_t needs = {.hidden = c->hidden,
                                   .moe_ffn = c->moe_ffn,
                                   .dense_ffn = c->n_dense_layers ? c->dense_ffn : 0,
                                   .shared_ffn = c->shared_ffn,
                                   .n_heads = c->n_heads,
                                   .n_kv_heads = c->n_kv_heads,
                                   .head_dim = c->head_dim,
                                   .n_experts = c->n_experts,
                                   .top_k = c->top_k,
                                   .n_groups = c->n_groups,
                                   .latent_attention = c->mla.kv_lora > 0,
                                   .sliding_window = slides,
                                   .fp8 = c->fp8 && !load->dummy,
                                   .attn_tp = load->attn_tp,
                                   .act = c->act};
    return epx_ops_accept(m->ops, &needs);
}

epx_status_t epx_model_create(const epx_model_config_t *cfg, const epx_model_load_t *load, epx_ops_t *ops, epx_model_t **out_m) {
    epx_status_t s;
    epx_model_t *m = calloc(1, sizeof *m);
    if (!m) return epx_fail(EPX_ERR_NOMEM, "model: no memory");
    m->cfg = *cfg;
    m->rank = load->rank;
    m->n_ranks = load->n_ranks;
    m->max_rows = load->max_rows;
    m->halves = load->halves;
    m->max_part = load->halves ? (load->max_rows + 1) / 2 : load->max_rows;
    if (m->max_part < EPX_SELF_TEST_TOKENS && m->max_part < m->max_rows) m->max_part = EPX_SELF_TEST_TOKENS;
    m->ops = ops;
    epx_model_expert_range(cfg->n_experts, m->rank, m->n_ranks, &m->first_expert, &m->n_local_experts);
    EPX_TRY_GOTO(s, check_ops(m, load), err_model);
    EPX_TRY_GOTO(s, alloc_layers(m), err_model);
    EPX_TRY_GOTO(s, epx_meter_init(&m->meter, cfg->n_layers, cfg->n_experts), err_model);
    EPX_TRY_GOTO(s, epx_model_load_weights(m, load), err_model);
    epx_heads_init(m, load->attn_tp, load->attn_rank);
    EPX_TRY_GOTO(s, alloc_scratch(m), err_model);
    *out_m = m;
    return EPX_OK;
err_model:
    epx_model_destroy(m);
    return s;
}

void epx_model_destroy(epx_model_t *m) {
    if (!m) return;
    epx_ops_free(m->ops, m->expert_in, m->expert_in_bytes);
    epx_ops_free(m->ops, m->expert_out, m->expert_out_bytes);
    free(m->expert_counts);
    epx_meter_fini(&m->meter);
    epx_heads_fini(m);
    epx_checkpoint_close(m->ck);
    while (m->n_owned) {
        m->n_owned--;
        epx_ops_free(m->ops, m->owned[m->n_owned].p, m->owned[m->n_owned].n_bytes);
    }
    epx_ops_free(m->ops, m->weights_block, m->weights_bytes);
    free(m->layers);
    free(m->experts);
    free(m);
}

/* Grows only; nothing is kept. */
static epx_status_t grow_rows(epx_model_t *m, size_t rows, void **inout, size_t *inout_bytes) {
    size_t n_bytes = rows * (size_t)m->cfg.hidden * epx_ops_row_elem_bytes(m->ops);
    void *p;
    if (n_bytes <= *inout_bytes) return EPX_OK;
    epx_status_t s = epx_ops_alloc(m->ops, n_bytes, &p);
    if (s < 0) return epx_fail_context(s, "rows of experts");
    epx_ops_free(m->ops, *inout, *inout_bytes);
    *inout = p;
    *inout_bytes = n_bytes;
    return EPX_OK;
}

/* Buffers for the rows that the plan can bring. */
static epx_status_t reserve_rows(epx_model_t *m, const epx_plan_info_t *info) {
    const epx_model_config_t *c = &m->cfg;
    int64_t rows = (int64_t)info->max_rows, ffn = larger(c->moe_ffn, larger(c->dense_ffn, c->shared_ffn));
    int64_t longest = larger(larger(c->hidden, (int64_t)c->n_heads * c->head_dim), c->mla.q_lora);
    longest = larger(longest, (int64_t)c->n_heads * c->mla.v);
    EPX_TRY(epx_ops_reserve(m->ops, larger(rows, m->max_rows), larger(longest, ffn), c->n_heads, ffn));
    if (info->layout == EPX_LAYOUT_CONTIGUOUS) EPX_TRY(grow_rows(m, info->max_rows, &m->expert_in, &m->expert_in_bytes));
    return grow_rows(m, info->max_rows, &m->expert_out, &m->expert_out_bytes);
}

epx_status_t epx_model_set_plan(epx_model_t *m, epx_exchange_t which, epx_plan_t *plan) {
    epx_plan_info_t info = {.size = sizeof info};
    EPX_TRY(epx_plan_info(plan, &info));
    if (info.n_local_experts != m->n_local_experts)
        return epx_fail(EPX_ERR_INTERNAL, "model: the plan has %d local experts, the weights are of %d", info.n_local_experts,
                        m->n_local_experts);
    if (info.layout != EPX_LAYOUT_LISTS && info.layout != EPX_LAYOUT_CONTIGUOUS)
        return epx_fail(EPX_ERR_INTERNAL, "model: layout of the plan is %d; legal: lists, contiguous", (int)info.layout);
    EPX_TRY(reserve_rows(m, &info));
    m->contiguous[which] = info.layout == EPX_LAYOUT_CONTIGUOUS;
    m->plans[which] = plan;
    return EPX_OK;
}

void epx_model_plan_config(const epx_model_t *m, epx_plan_config_t *out_cfg) {
    out_cfg->max_tokens = m->max_part;
    out_cfg->n_channels = m->halves ? 2 : 1;
    out_cfg->hidden = m->cfg.hidden;
    out_cfg->top_k = m->cfg.top_k;
    out_cfg->n_experts = m->cfg.n_experts;
    const epx_dtype_t rows = epx_ops_row_type(m->ops) == EPX_W_F32 ? EPX_F32 : EPX_BF16;
    out_cfg->token_dtype = rows;
    out_cfg->wire_dtype = rows;
    out_cfg->expert_dtype = rows;
    out_cfg->combine_dtype = rows;
    out_cfg->layout = EPX_LAYOUT_LISTS;
}

const epx_model_config_t *epx_model_config(const epx_model_t *m) { return &m->cfg; }
uint64_t epx_model_mapped_bytes(const epx_model_t *m) { return m->mapped_bytes; }
const epx_meter_t *epx_model_meter(const epx_model_t *m) { return &m->meter; }

void epx_model_set_probe(epx_model_t *m, epx_model_probe_fn fn, void *ctx) {
    m->probe = fn;
    m->probe_ctx = ctx;
}

epx_status_t epx_model_forward(epx_model_t *m, const epx_batch_t *b) {
    EPX_ASSERT(m->plans[b->exchange] && b->n_rows >= 0 && b->n_rows <= m->max_rows && b->n_logits <= b->n_rows);
    EPX_ASSERT(b->in_halves ? m->halves : b->n_rows <= m->max_part);
    const epx_ops_step_t step = {.n_rows = b->n_rows,
                                 .tokens = b->tokens,
                                 .rows = b->rows,
                                 .n_logits = b->n_logits,
                                 .logit_rows = b->logit_rows,
                                 .page_size = b->kv->page_size};
    EPX_TRY(epx_ops_begin(m->ops, &step));
    EPX_TRY(m->cfg.arch->forward(m, b));
    return epx_ops_sync(m->ops);
}
