/* Mixtral: grouped-query attention, rotary embedding, every layer a softmax-routed MoE with weights renormalised over the chosen.
 * Source: Mixtral of Experts (arXiv:2401.04088); field and tensor names as in Hugging Face checkpoints.
 * Not here: sliding windows, rope scaling, quantised weights; all refused by name. */
#include "engine/model/common/arch.h"

enum { MAX_SIZE = 1 << 20 };

static epx_status_t read_config(const epx_json_doc_t *d, epx_model_config_t *c) {
    EPX_TRY(epx_json_refuse(d, "attention_bias", "biases of the attention projections are not supported"));
    EPX_TRY(epx_json_refuse(d, "sliding_window", "sliding-window attention is not supported with this architecture"));
    EPX_TRY(epx_config_quantisation(d, 0, c));
    EPX_TRY(epx_config_sizes(d, c));
    EPX_TRY(epx_config_int(d, "intermediate_size", 1, MAX_SIZE, &c->moe_ffn));
    EPX_TRY(epx_config_int(d, "num_local_experts", 1, 1 << 16, &c->n_experts));
    EPX_TRY(epx_config_top_k(d, "num_experts_per_tok", c));
    EPX_TRY(epx_config_rope(d, 0, c, NULL));
    c->norm_topk_prob = 1;
    return epx_config_common(d, c);
}

static const epx_tensor_rule_t rules[] = {
    EPX_RULES_ENDS,
    EPX_RULES_NORMS,
    EPX_RULES_QKVO,
    EPX_RULE_ROUTER("block_sparse_moe.gate.weight"),
    EPX_RULES_EXPERTS("block_sparse_moe.experts.%E.", "w1", "w3", "w2"),
};

static epx_status_t forward(epx_model_t *m, const epx_batch_t *b) { return epx_forward_decoder(m, b, epx_block_gqa); }

extern const epx_arch_t epx_arch_mixtral;
const epx_arch_t epx_arch_mixtral = {
    .architecture = "MixtralForCausalLM",
    .model_type = "mixtral",
    .read_config = read_config,
    .rules = rules,
    .n_rules = sizeof rules / sizeof rules[0],
    .forward = forward,
};
