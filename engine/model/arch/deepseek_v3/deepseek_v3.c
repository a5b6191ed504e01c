/* DeepSeek-V3: multi-head latent attention; leading dense layers, then sigmoid-routed experts with a correction bias, chosen
 * within the best groups, beside a shared expert.
 * Source: DeepSeek-V3 Technical Report (arXiv:2412.19437); field and tensor names as in Hugging Face checkpoints. Layers for
 * multi-token prediction in the files are not read. Not here: biases of the projections, other routing methods; refused by name.
 */
#include "engine/model/common/arch.h"

enum { MAX_SIZE = 1 << 20 };

static epx_status_t read_config(const epx_json_doc_t *d, epx_model_config_t *c) {
    EPX_TRY(epx_config_only_string(d, "topk_method", "noaux_tc", NULL));
    EPX_TRY(epx_config_only_string(d, "scoring_func", "sigmoid", NULL));
    EPX_TRY(epx_config_quantisation(d, 1, c));
    EPX_TRY(epx_config_mla(d, c));
    EPX_TRY(epx_config_deepseek_experts(d, c));
    EPX_TRY(epx_config_groups(d, c));
    EPX_TRY(epx_json_bool_or(d, "norm_topk_prob", 1, &c->norm_topk_prob));
    c->score = EPX_SCORE_SIGMOID;
    c->group_best = 2;
    return epx_config_common(d, c);
}

static const epx_tensor_rule_t rules[] = {
    EPX_RULES_ENDS,
    EPX_RULES_NORMS,
    EPX_RULES_MLA,
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

static epx_status_t forward(epx_model_t *m, const epx_batch_t *b) { return epx_forward_decoder(m, b, epx_block_mla); }

extern const epx_arch_t epx_arch_deepseek_v3;
const epx_arch_t epx_arch_deepseek_v3 = {
    .architecture = "DeepseekV3ForCausalLM",
    .model_type = "deepseek_v3",
    .read_config = read_config,
    .rules = rules,
    .n_rules = sizeof rules / sizeof rules[0],
    .forward = forward,
};
