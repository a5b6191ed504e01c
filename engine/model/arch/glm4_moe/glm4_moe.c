/* GLM-4-MoE: grouped-query attention with biases of q, k and v, optional per-head RMSNorm of q and k and rotary embedding of a
 * part of each head; leading dense layers, then sigmoid-routed experts with a correction bias and a shared expert.
 * Source: GLM-4.5 (arXiv:2508.06471); field and tensor names as in Hugging Face checkpoints. Layers for multi-token prediction in
 * the files are not read. Not here: rope scaling, quantised weights; refused by name. */
#include "engine/model/common/arch.h"

enum { MAX_SIZE = 1 << 20 };

static epx_status_t read_attention(const epx_json_doc_t *d, epx_model_config_t *c) {
    double part;
    json_t *nested = json_object_get(d->root, "rope_parameters");
    const epx_json_doc_t in = {d->name, json_is_object(nested) ? nested : d->root};
    EPX_TRY(epx_json_bool_or(d, "attention_bias", 0, &c->attention_bias));
    EPX_TRY(epx_json_bool_or(d, "use_qk_norm", 0, &c->qk_norm));
    EPX_TRY(epx_config_rope(d, 0, c, NULL));
    EPX_TRY(epx_json_real_or(d, "partial_rotary_factor", 0.0, 1.0, 0.5, &part));
    EPX_TRY(epx_json_real_or(&in, "partial_rotary_factor", 0.0, 1.0, part, &part));
    c->rope_dim = (int)(c->head_dim * part);
    if (c->rope_dim < 2 || c->rope_dim % 2)
        return epx_fail(EPX_ERR_FORMAT, "%s: partial_rotary_factor is %g: %d of %d elements of a head, expected an even number",
                        d->name, part, c->rope_dim, c->head_dim);
    return EPX_OK;
}

static epx_status_t read_config(const epx_json_doc_t *d, epx_model_config_t *c) {
    int n_shared;
    EPX_TRY(epx_config_quantisation(d, 0, c));
    EPX_TRY(epx_config_sizes(d, c));
    EPX_TRY(read_attention(d, c));
    EPX_TRY(epx_config_int(d, "moe_intermediate_size", 1, MAX_SIZE, &c->moe_ffn));
    EPX_TRY(epx_config_int(d, "n_routed_experts", 1, 1 << 16, &c->n_experts));
    EPX_TRY(epx_config_int(d, "n_shared_experts", 0, 64, &n_shared));
    EPX_TRY(epx_config_top_k(d, "num_experts_per_tok", c));
    EPX_TRY(epx_config_groups(d, c));
    EPX_TRY(epx_config_dense(d, c));
    EPX_TRY(epx_json_bool_or(d, "norm_topk_prob", 1, &c->norm_topk_prob));
    EPX_TRY(epx_json_real_or(d, "routed_scaling_factor", 0.0, 1e6, 1.0, &c->routed_factor));
    c->shared_ffn = n_shared * c->moe_ffn;
    c->score = EPX_SCORE_SIGMOID;
    c->group_best = 2;
    return epx_config_common(d, c);
}

static const epx_tensor_rule_t rules[] = {
    EPX_RULES_ENDS,
    EPX_RULES_NORMS,
    EPX_RULES_QKVO,
    EPX_RULES_QKV_BIAS,
    {EPX_LAYER "self_attn.q_norm.weight", {EPX_DIM_HEAD}, EPX_PLACE_REPLICATED, EPX_SLOT_Q_NORM, EPX_WHEN_QK_NORM},
    {EPX_LAYER "self_attn.k_norm.weight", {EPX_DIM_HEAD}, EPX_PLACE_REPLICATED, EPX_SLOT_K_NORM, EPX_WHEN_QK_NORM},
    EPX_RULES_FFN("mlp.", EPX_DIM_DENSE_FFN, EPX_WHEN_DENSE),
    EPX_RULE_ROUTER("mlp.gate.weight"),
    {EPX_LAYER "mlp.gate.e_score_correction_bias",
     {EPX_DIM_EXPERTS},
     EPX_PLACE_REPLICATED,
     EPX_SLOT_CORRECTION_BIAS,
     EPX_WHEN_EXPERTS},
    EPX_RULES_EXPERTS("mlp.experts.%E.", "gate_proj", "up_proj", "down_proj"),
    EPX_RULES_FFN("mlp.shared_experts.", EPX_DIM_SHARED_FFN, EPX_WHEN_SHARED),
};

static epx_status_t forward(epx_model_t *m, const epx_batch_t *b) { return epx_forward_decoder(m, b, epx_block_gqa); }

extern const epx_arch_t epx_arch_glm4_moe;
const epx_arch_t epx_arch_glm4_moe = {
    .architecture = "Glm4MoeForCausalLM",
    .model_type = "glm4_moe",
    .read_config = read_config,
    .rules = rules,
    .n_rules = sizeof rules / sizeof rules[0],
    .forward = forward,
};
