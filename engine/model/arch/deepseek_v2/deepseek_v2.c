/* DeepSeek-V2: multi-head latent attention; leading dense layers, then softmax-routed experts, chosen within the best groups or
 * from all, beside shared experts.
 * Source: DeepSeek-V2 (arXiv:2405.04434); field and tensor names as in Hugging Face checkpoints.
 * Not here: biases, renormalised weights, auxiliary routing methods, quantised weights; all refused by name. */
#include <string.h>

#include "engine/model/common/arch.h"

enum { MAX_SIZE = 1 << 20 };

static epx_status_t read_router(const epx_json_doc_t *d, epx_model_config_t *c) {
    const char *method;
    EPX_TRY(epx_config_only_string(d, "topk_method", "greedy", "group_limited_greedy"));
    EPX_TRY(epx_config_only_string(d, "scoring_func", "softmax", NULL));
    EPX_TRY(epx_config_only_bool(d, "norm_topk_prob", 0, "renormalised weights are not supported with this architecture"));
    EPX_TRY(epx_json_string_or(d, "topk_method", "greedy", &method));
    if (strcmp(method, "greedy") == 0) return EPX_OK; /* then the group fields have no effect */
    return epx_config_groups(d, c);
}

static epx_status_t read_config(const epx_json_doc_t *d, epx_model_config_t *c) {
    EPX_TRY(epx_config_quantisation(d, 1, c));
    EPX_TRY(epx_config_mla(d, c));
    EPX_TRY(epx_config_deepseek_experts(d, c));
    EPX_TRY(read_router(d, c));
    return epx_config_common(d, c);
}

static const epx_tensor_rule_t rules[] = {
    EPX_RULES_ENDS,
    EPX_RULES_NORMS,
    EPX_RULES_MLA,
    EPX_RULES_FFN("mlp.", EPX_DIM_DENSE_FFN, EPX_WHEN_DENSE),
    EPX_RULE_ROUTER("mlp.gate.weight"),
    EPX_RULES_EXPERTS("mlp.experts.%E.", "gate_proj", "up_proj", "down_proj"),
    EPX_RULES_FFN("mlp.shared_experts.", EPX_DIM_SHARED_FFN, EPX_WHEN_SHARED),
};

static epx_status_t forward(epx_model_t *m, const epx_batch_t *b) { return epx_forward_decoder(m, b, epx_block_mla); }

extern const epx_arch_t epx_arch_deepseek_v2;
const epx_arch_t epx_arch_deepseek_v2 = {
    .architecture = "DeepseekV2ForCausalLM",
    .model_type = "deepseek_v2",
    .read_config = read_config,
    .rules = rules,
    .n_rules = sizeof rules / sizeof rules[0],
    .forward = forward,
};
