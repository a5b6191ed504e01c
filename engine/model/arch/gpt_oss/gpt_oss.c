/* gpt-oss: grouped-query attention with biases, sinks and a sliding window on some layers, YaRN; every layer a MoE whose experts
 * have biases and a clamped gated activation, gate and up in one tensor with interleaved columns.
 * Source: gpt-oss model card (arXiv:2508.10925); field and tensor names as in Hugging Face checkpoints in bf16.
 * Not here: mxfp4 weights (the published form), refused by name. */
#include <string.h>

#include "engine/model/common/arch.h"

enum { MAX_SIZE = 1 << 20 };

static epx_status_t read_layer_types(const epx_json_doc_t *d, epx_model_config_t *c) {
    const json_t *list = json_object_get(d->root, "layer_types");
    if (!json_is_array(list) || json_array_size(list) != (size_t)c->n_layers)
        return epx_fail(EPX_ERR_FORMAT, "%s: layer_types is not a list of num_hidden_layers = %d names", d->name, c->n_layers);
    for (int l = 0; l < c->n_layers; l++) {
        const char *type = json_string_value(json_array_get(list, (size_t)l));
        if (type && strcmp(type, "sliding_attention") == 0) c->sliding[l / 64] |= 1ull << l % 64;
        else if (!type || strcmp(type, "full_attention") != 0)
            return epx_fail(EPX_ERR_UNSUPPORTED,
                            "%s: layer_types[%d] is \"%.60s\", supported: \"full_attention\", \"sliding_attention\"", d->name, l,
                            type ? type : "not a string");
    }
    return epx_config_int(d, "sliding_window", 1, 1 << 28, &c->window);
}

static epx_status_t read_config(const epx_json_doc_t *d, epx_model_config_t *c) {
    EPX_TRY(epx_config_quantisation(d, 0, c));
    EPX_TRY(epx_config_only_bool(d, "attention_bias", 1, "attention without biases is not supported with this architecture"));
    EPX_TRY(epx_config_sizes(d, c));
    EPX_TRY(read_layer_types(d, c));
    EPX_TRY(epx_config_int(d, "intermediate_size", 1, MAX_SIZE, &c->moe_ffn));
    EPX_TRY(epx_config_int(d, "num_local_experts", 1, 1 << 16, &c->n_experts));
    EPX_TRY(epx_config_top_k(d, epx_json_has(d, "num_experts_per_tok") ? "num_experts_per_tok" : "experts_per_token", c));
    EPX_TRY(epx_config_rope(d, 1, c, NULL));
    EPX_TRY(epx_json_real_or(d, "swiglu_limit", 1e-3, 1e6, 7.0, &c->act_limit));
    c->act = EPX_ACT_CLAMPED_GLU;
    c->attention_bias = 1;
    c->norm_topk_prob = 1; /* a softmax over the chosen logits is the softmax over all, renormalised over the chosen */
    return epx_config_common(d, c);
}

static const epx_tensor_rule_t rules[] = {
    EPX_RULES_ENDS,
    EPX_RULES_NORMS,
    EPX_RULES_QKVO,
    EPX_RULES_QKV_BIAS,
    {EPX_LAYER "self_attn.o_proj.bias", {EPX_DIM_HIDDEN}, EPX_PLACE_REPLICATED, EPX_SLOT_O_BIAS},
    {EPX_LAYER "self_attn.sinks", {EPX_DIM_HEADS}, EPX_PLACE_REPLICATED, EPX_SLOT_SINKS},
    EPX_RULE_ROUTER("mlp.router.weight"),
    {EPX_LAYER "mlp.router.bias", {EPX_DIM_EXPERTS}, EPX_PLACE_REPLICATED, EPX_SLOT_ROUTER_BIAS},
    {EPX_LAYER "mlp.experts.gate_up_proj",
     {EPX_DIM_EXPERTS, EPX_DIM_HIDDEN, EPX_DIM_FFN_TWICE},
     EPX_PLACE_BY_EXPERT,
     EPX_SLOT_GATE,
     EPX_WHEN_ALWAYS,
     1},
    {EPX_LAYER "mlp.experts.gate_up_proj_bias", {EPX_DIM_EXPERTS, EPX_DIM_FFN_TWICE}, EPX_PLACE_BY_EXPERT, EPX_SLOT_GATE_BIAS},
    {EPX_LAYER "mlp.experts.down_proj",
     {EPX_DIM_EXPERTS, EPX_DIM_FFN, EPX_DIM_HIDDEN},
     EPX_PLACE_BY_EXPERT,
     EPX_SLOT_DOWN,
     EPX_WHEN_ALWAYS,
     1},
    {EPX_LAYER "mlp.experts.down_proj_bias", {EPX_DIM_EXPERTS, EPX_DIM_HIDDEN}, EPX_PLACE_BY_EXPERT, EPX_SLOT_DOWN_BIAS},
};

static epx_status_t forward(epx_model_t *m, const epx_batch_t *b) { return epx_forward_decoder(m, b, epx_block_gqa); }

extern const epx_arch_t epx_arch_gpt_oss;
const epx_arch_t epx_arch_gpt_oss = {
    .architecture = "GptOssForCausalLM",
    .model_type = "gpt_oss",
    .read_config = read_config,
    .rules = rules,
    .n_rules = sizeof rules / sizeof rules[0],
    .forward = forward,
};
