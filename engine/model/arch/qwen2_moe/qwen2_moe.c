/* Qwen2-MoE: grouped-query attention with biases of q, k and v, every layer a softmax-routed MoE beside a shared expert that each
 * token takes to the degree of a sigmoid gate.
 * Source: Qwen2 Technical Report (arXiv:2407.10671), section 2.2.2; field and tensor names as in Hugging Face checkpoints.
 * Not here: sliding windows, rope scaling, layers without experts, quantised weights; all refused by name. */
#include "engine/model/common/arch.h"

enum { MAX_SIZE = 1 << 20 };

static epx_status_t read_config(const epx_json_doc_t *d, epx_model_config_t *c) {
    int64_t step;
    EPX_TRY(epx_json_refuse(d, "mlp_only_layers", "layers without experts are not supported with this architecture"));
    EPX_TRY(epx_json_int_or(d, "decoder_sparse_step", 0, 1 << 20, 1, &step));
    if (step != 1)
        return epx_fail(EPX_ERR_UNSUPPORTED, "%s: decoder_sparse_step is %lld, supported: 1 (every layer has experts)", d->name,
                        (long long)step);
    EPX_TRY(epx_json_refuse(d, "use_sliding_window", "sliding-window attention is not supported with this architecture"));
    EPX_TRY(epx_config_only_bool(d, "qkv_bias", 1, "q, k and v without biases are not supported with this architecture"));
    EPX_TRY(epx_config_quantisation(d, 0, c));
    EPX_TRY(epx_config_sizes(d, c));
    EPX_TRY(epx_config_int(d, "moe_intermediate_size", 1, MAX_SIZE, &c->moe_ffn));
    EPX_TRY(epx_config_int(d, "shared_expert_intermediate_size", 1, MAX_SIZE, &c->shared_ffn));
    EPX_TRY(epx_config_int(d, "num_experts", 1, 1 << 16, &c->n_experts));
    EPX_TRY(epx_config_top_k(d, "num_experts_per_tok", c));
    EPX_TRY(epx_config_rope(d, 0, c, NULL));
    EPX_TRY(epx_json_bool_or(d, "norm_topk_prob", 0, &c->norm_topk_prob));
    c->attention_bias = 1;
    return epx_config_common(d, c);
}

static const epx_tensor_rule_t rules[] = {
    EPX_RULES_ENDS,
    EPX_RULES_NORMS,
    EPX_RULES_QKVO,
    EPX_RULES_QKV_BIAS,
    EPX_RULE_ROUTER("mlp.gate.weight"),
    EPX_RULES_EXPERTS("mlp.experts.%E.", "gate_proj", "up_proj", "down_proj"),
    EPX_RULES_FFN("mlp.shared_expert.", EPX_DIM_SHARED_FFN, EPX_WHEN_SHARED),
    {EPX_LAYER "mlp.shared_expert_gate.weight", {EPX_DIM_ONE, EPX_DIM_HIDDEN}, EPX_PLACE_REPLICATED, EPX_SLOT_SHARED_GATE},
};

static epx_status_t forward(epx_model_t *m, const epx_batch_t *b) { return epx_forward_decoder(m, b, epx_block_gqa); }

extern const epx_arch_t epx_arch_qwen2_moe;
const epx_arch_t epx_arch_qwen2_moe = {
    .architecture = "Qwen2MoeForCausalLM",
    .model_type = "qwen2_moe",
    .read_config = read_config,
    .rules = rules,
    .n_rules = sizeof rules / sizeof rules[0],
    .forward = forward,
};
