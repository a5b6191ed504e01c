/* From an architecture's tensor table to the rank's weight views: expand names, work out shapes, ask the loader. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/model/common/arch.h"
#include "engine/model/load/checkpoint.h"
#include "engine/model/load/dummy.h"
#include "engine/model/load/upload.h"

static int64_t dim_size(const epx_model_config_t *c, epx_dim_t d) {
    const epx_mla_t *a = &c->mla;
    const int64_t heads = c->n_heads;
    const int64_t sizes[] = {
        [EPX_DIM_NONE] = 0,
        [EPX_DIM_HIDDEN] = c->hidden,
        [EPX_DIM_VOCAB] = c->vocab,
        [EPX_DIM_Q] = heads * c->head_dim,
        [EPX_DIM_KV] = (int64_t)c->n_kv_heads * c->head_dim,
        [EPX_DIM_HEAD] = c->head_dim,
        [EPX_DIM_EXPERTS] = c->n_experts,
        [EPX_DIM_FFN] = c->moe_ffn,
        [EPX_DIM_FFN_TWICE] = 2 * (int64_t)c->moe_ffn,
        [EPX_DIM_DENSE_FFN] = c->dense_ffn,
        [EPX_DIM_SHARED_FFN] = c->shared_ffn,
        [EPX_DIM_ONE] = 1,
        [EPX_DIM_HEADS] = heads,
        [EPX_DIM_Q_LORA] = a->q_lora,
        [EPX_DIM_KV_LORA] = a->kv_lora,
        [EPX_DIM_KV_A] = a->kv_lora + a->rope,
        [EPX_DIM_MLA_Q] = heads * (a->nope + a->rope),
        [EPX_DIM_MLA_KV_B] = heads * (a->nope + a->v),
        [EPX_DIM_MLA_OUT] = heads * a->v,
    };
    return sizes[d];
}

/* Whether the checkpoint has the tensor (of this layer). */
static int exists(const epx_model_config_t *c, const epx_tensor_rule_t *r, int layer) {
    const int dense = layer < c->n_dense_layers;
    const int there[] = {
        [EPX_WHEN_ALWAYS] = 1,
        [EPX_WHEN_UNTIED] = !c->tie_embeddings,
        [EPX_WHEN_DENSE] = dense,
        [EPX_WHEN_EXPERTS] = !dense,
        [EPX_WHEN_SHARED] = !dense && c->shared_ffn > 0,
        [EPX_WHEN_ATTENTION_BIAS] = c->attention_bias,
        [EPX_WHEN_QK_NORM] = c->qk_norm,
        [EPX_WHEN_Q_LORA] = c->mla.q_lora > 0,
        [EPX_WHEN_NO_Q_LORA] = c->mla.q_lora == 0,
    };
    return there[r->when];
}

/* The pattern with %L and %E filled in. */
static void expand(const char *pattern, int layer, int expert, char *out, size_t n_out) {
    size_t at = 0;
    for (const char *p = pattern; *p && at + 12 < n_out; p++) {
        if (p[0] == '%' && (p[1] == 'L' || p[1] == 'E')) {
            at += (size_t)snprintf(out + at, n_out - at, "%d", p[1] == 'L' ? layer : expert);
            p++;
        } else {
            out[at++] = *p;
        }
    }
    out[at] = 0;
}

static epx_weight_t *slot_of(epx_model_t *m, const epx_tensor_rule_t *r, int layer, int expert) {
    if (r->place == EPX_PLACE_BY_EXPERT) {
        epx_expert_weights_t *e = &m->layers[layer].experts[expert - m->first_expert];
        epx_weight_t *const slots[EPX_N_EXPERT_SLOTS] = {[EPX_SLOT_GATE] = &e->gate,
                                                         [EPX_SLOT_UP] = &e->up,
                                                         [EPX_SLOT_DOWN] = &e->down,
                                                         [EPX_SLOT_GATE_BIAS] = &e->gate_bias,
                                                         [EPX_SLOT_DOWN_BIAS] = &e->down_bias};
        return slots[r->slot];
    }
    return strstr(r->name, "%L") ? &m->layers[layer].w[r->slot] : &m->w[r->slot];
}

static void add_want(epx_model_t *m, const epx_tensor_rule_t *r, int layer, int expert, epx_want_t *out) {
    expand(r->name, layer, expert, out->name, sizeof out->name);
    for (int i = 0; i < 3 && r->dims[i] != EPX_DIM_NONE; i++) out->shape[out->n_dims++] = dim_size(&m->cfg, r->dims[i]);
    out->sliced = r->place == EPX_PLACE_BY_EXPERT && !strstr(r->name, "%E");
    out->slice = out->sliced ? expert : 0;
    out->transposed = r->transposed;
    out->view = slot_of(m, r, layer, expert);
    out->allow_f8 = m->cfg.fp8 && out->n_dims == 2 && out->view != &m->w[EPX_SLOT_EMBED];
}

/* All wants of one rule; out NULL: only count. */
static size_t wants_of_rule(epx_model_t *m, const epx_tensor_rule_t *r, epx_want_t *out) {
    int n_layers = strstr(r->name, "%L") ? m->cfg.n_layers : 1, by_expert = r->place == EPX_PLACE_BY_EXPERT;
    int first = by_expert ? m->first_expert : 0, n_experts = by_expert ? m->n_local_experts : 1;
    size_t n = 0;
    for (int l = 0; l < n_layers; l++) {
        if (!exists(&m->cfg, r, l)) continue;
        n += (size_t)n_experts;
        for (int e = 0; out && e < n_experts; e++) add_want(m, r, l, first + e, out++);
    }
    return n;
}

static epx_status_t load_wants(epx_model_t *m, const epx_model_load_t *load, const epx_want_t *wants, size_t n) {
    if (load->dummy) return epx_dummy_weights(m->ops, load->seed, wants, n, load->progress, &m->weights_block, &m->weights_bytes);
    EPX_TRY(epx_checkpoint_open(load->dir, &m->ck));
    EPX_TRY(epx_checkpoint_map(m->ck, wants, n, load->progress));
    m->mapped_bytes = epx_checkpoint_mapped_bytes(m->ck);
    if (epx_ops_reads_host(m->ops)) return EPX_OK;
    EPX_TRY(epx_upload_weights(m->ops, wants, n, load->progress, &m->weights_block, &m->weights_bytes));
    epx_checkpoint_close(m->ck);
    m->ck = NULL;
    m->mapped_bytes = 0;
    return EPX_OK;
}

epx_status_t epx_model_load_weights(epx_model_t *m, const epx_model_load_t *load) {
    const epx_arch_t *a = m->cfg.arch;
    size_t n = 0, at = 0;
    for (int i = 0; i < a->n_rules; i++) n += wants_of_rule(m, &a->rules[i], NULL);
    epx_want_t *wants = calloc(n, sizeof *wants);
    if (!wants) return epx_fail(EPX_ERR_NOMEM, "%s: no memory for a list of %zu tensors", load->dir, n);
    for (int i = 0; i < a->n_rules; i++) at += wants_of_rule(m, &a->rules[i], wants + at);
    epx_status_t s = load_wants(m, load, wants, n);
    free(wants);
    return s;
}
