/* OLMoE: attention with RMSNorm of q and k over their full width, rotary embedding, every layer a softmax-routed MoE.
 * Source: OLMoE (arXiv:2409.02060); field and tensor names as in Hugging Face checkpoints.
 * Not here: clipping of q, k and v, biases, rope scaling, quantised weights; all refused by name. */
#include "engine/model/common/arch.h"

enum { MAX_SIZE = 1 << 20 };

static epx_status_t read_config(const epx_json_doc_t *d, epx_model_config_t *c) {
    EPX_TRY(epx_json_refuse(d, "attention_bias", "biases of the attention projections are not supported"));
    EPX_TRY(epx_json_refuse(d, "clip_qkv", "clipping of q, k and v is not supported"));
    EPX_TRY(epx_config_quantisation(d, 0, c));
    EPX_TRY(epx_config_sizes(d, c));
    EPX_TRY(epx_config_int(d, "intermediate_size", 1, MAX_SIZE, &c->moe_ffn));
    EPX_TRY(epx_config_int(d, "num_experts", 1, 1 << 16, &c->n_experts));
    EPX_TRY(epx_config_top_k(d, "num_experts_per_tok", c));
    EPX_TRY(epx_config_rope(d, 0, c, NULL));
    EPX_TRY(epx_json_bool_or(d, "norm_topk_prob", 0, &c->norm_topk_prob));
    return epx_config_common(d, c);
}

static const epx_tensor_rule_t rules[] = {
    EPX_RULES_ENDS,
    EPX_RULES_NORMS,
    EPX_RULES_QKVO,
    {EPX_LAYER "self_attn.q_norm.weight", {EPX_DIM_Q}, EPX_PLACE_REPLICATED, EPX_SLOT_Q_NORM},
    {EPX_LAYER "self_attn.k_norm.weight", {EPX_DIM_KV}, EPX_PLACE_REPLICATED, EPX_SLOT_K_NORM},
    EPX_RULE_ROUTER("mlp.gate.weight"),
    EPX_RULES_EXPERTS("mlp.experts.%E.", "gate_proj", "up_proj", "down_proj"),
};

static epx_status_t forward(epx_model_t *m, const epx_batch_t *b) { return epx_forward_decoder(m, b, epx_block_gqa); }

extern const epx_arch_t epx_arch_olmoe;
const epx_arch_t epx_arch_olmoe = {
    .architecture = "OlmoeForCausalLM",
    .model_type = "olmoe",
    .read_config = read_config,
    .rules = rules,
    .n_rules = sizeof rules / sizeof rules[0],
    .forward = forward,
};
