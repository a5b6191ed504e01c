/* Qwen3-MoE: grouped-query attention with per-head RMSNorm of q and k, rotary embedding, every layer a softmax-routed MoE.
 * Source: Qwen3 Technical Report (arXiv:2505.09388); field and tensor names as in Hugging Face checkpoints.
 * Not here: rope scaling, sliding windows, layers without experts, quantised weights; all refused by name. */
#include <string.h>

#include "engine/model/common/arch.h"

enum { MAX_SIZE = 1 << 20, MAX_VOCAB = 1 << 24 };

static epx_status_t read_sizes(const epx_json_doc_t *d, epx_model_config_t *c) {
    int64_t v;
#define SIZE(key, lo, hi, field)                   \
    do {                                           \
        EPX_TRY(epx_json_int(d, key, lo, hi, &v)); \
        c->field = (int)v;                         \
    } while (0)
    SIZE("hidden_size", 1, MAX_SIZE, hidden);
    SIZE("num_hidden_layers", 1, 4096, n_layers);
    SIZE("num_attention_heads", 1, 4096, n_heads);
    SIZE("num_key_value_heads", 1, 4096, n_kv_heads);
    SIZE("moe_intermediate_size", 1, MAX_SIZE, moe_ffn);
    SIZE("num_experts", 1, 1 << 16, n_experts);
    SIZE("num_experts_per_tok", 1, c->n_experts < EPX_MAX_TOP_K ? c->n_experts : EPX_MAX_TOP_K, top_k);
    SIZE("vocab_size", 1, MAX_VOCAB, vocab);
    SIZE("max_position_embeddings", 1, 1 << 28, max_position);
#undef SIZE
    EPX_TRY(epx_json_int_or(d, "head_dim", 2, EPX_OPS_MAX_HEAD_DIM, c->hidden / c->n_heads, &v));
    c->head_dim = (int)v;
    if (c->head_dim < 2 || c->head_dim > EPX_OPS_MAX_HEAD_DIM || c->head_dim % 2)
        return epx_fail(EPX_ERR_FORMAT, "%s: head_dim is %d, expected an even number from 2 to %d", d->name, c->head_dim,
                        EPX_OPS_MAX_HEAD_DIM);
    if (c->n_heads % c->n_kv_heads)
        return epx_fail(EPX_ERR_FORMAT, "%s: num_key_value_heads is %d, expected a divisor of num_attention_heads, %d", d->name,
                        c->n_kv_heads, c->n_heads);
    return EPX_OK;
}

/* transformers 5 writes rope_theta and rope_type into rope_parameters; before that they were top-level keys. */
static epx_status_t read_rope(const epx_json_doc_t *d, epx_model_config_t *c) {
    const char *type;
    json_t *nested = json_object_get(d->root, "rope_parameters");
    if (json_is_object(nested)) {
        epx_json_doc_t rope = {d->name, nested};
        EPX_TRY(epx_json_string_or(&rope, "rope_type", "default", &type));
        if (strcmp(type, "default") != 0)
            return epx_fail(EPX_ERR_UNSUPPORTED, "%s: rope_parameters.rope_type is \"%.60s\", supported: \"default\"", d->name,
                            type);
        return epx_json_real_or(&rope, "rope_theta", 1.0, 1e12, 10000.0, &c->rope_theta);
    }
    EPX_TRY(epx_json_refuse(d, "rope_scaling", "rotary scaling is not supported with this architecture"));
    return epx_json_real_or(d, "rope_theta", 1.0, 1e12, 10000.0, &c->rope_theta);
}

static epx_status_t refuse_others(const epx_json_doc_t *d) {
    int64_t step;
    const char *act;
    EPX_TRY(epx_json_refuse(d, "attention_bias", "biases of the attention projections are not supported"));
    EPX_TRY(epx_json_refuse(d, "use_sliding_window", "sliding-window attention is not supported with this architecture"));
    EPX_TRY(epx_json_refuse(d, "quantization_config", "quantised checkpoints are not supported, use a bf16 or f32 one"));
    EPX_TRY(epx_json_refuse(d, "mlp_only_layers", "layers without experts are not supported"));
    EPX_TRY(epx_json_int_or(d, "decoder_sparse_step", 0, 1 << 20, 1, &step));
    if (step != 1)
        return epx_fail(EPX_ERR_UNSUPPORTED, "%s: decoder_sparse_step is %lld, supported: 1 (every layer has experts)", d->name,
                        (long long)step);
    EPX_TRY(epx_json_string_or(d, "hidden_act", "silu", &act));
    if (strcmp(act, "silu") != 0)
        return epx_fail(EPX_ERR_UNSUPPORTED, "%s: hidden_act is \"%.60s\", supported: \"silu\"", d->name, act);
    return EPX_OK;
}

static epx_status_t read_config(const epx_json_doc_t *d, epx_model_config_t *c) {
    double eps;
    EPX_TRY(refuse_others(d));
    EPX_TRY(read_sizes(d, c));
    EPX_TRY(read_rope(d, c));
    EPX_TRY(epx_json_real_or(d, "rms_norm_eps", 0.0, 1.0, 1e-6, &eps));
    c->rms_eps = (float)eps;
    EPX_TRY(epx_json_bool_or(d, "norm_topk_prob", 0, &c->norm_topk_prob));
    return epx_json_bool_or(d, "tie_word_embeddings", 0, &c->tie_embeddings);
}

#define LAYER "model.layers.%L."
#define EXPERT LAYER "mlp.experts.%E."
static const epx_tensor_rule_t rules[] = {
    {"model.embed_tokens.weight", {EPX_DIM_VOCAB, EPX_DIM_HIDDEN}, EPX_PLACE_REPLICATED, EPX_SLOT_EMBED, 0},
    {"model.norm.weight", {EPX_DIM_HIDDEN}, EPX_PLACE_REPLICATED, EPX_SLOT_FINAL_NORM, 0},
    {"lm_head.weight", {EPX_DIM_VOCAB, EPX_DIM_HIDDEN}, EPX_PLACE_REPLICATED, EPX_SLOT_LM_HEAD, 1},
    {LAYER "input_layernorm.weight", {EPX_DIM_HIDDEN}, EPX_PLACE_REPLICATED, EPX_SLOT_ATTN_NORM, 0},
    {LAYER "self_attn.q_proj.weight", {EPX_DIM_Q, EPX_DIM_HIDDEN}, EPX_PLACE_REPLICATED, EPX_SLOT_Q, 0},
    {LAYER "self_attn.k_proj.weight", {EPX_DIM_KV, EPX_DIM_HIDDEN}, EPX_PLACE_REPLICATED, EPX_SLOT_K, 0},
    {LAYER "self_attn.v_proj.weight", {EPX_DIM_KV, EPX_DIM_HIDDEN}, EPX_PLACE_REPLICATED, EPX_SLOT_V, 0},
    {LAYER "self_attn.o_proj.weight", {EPX_DIM_HIDDEN, EPX_DIM_Q}, EPX_PLACE_REPLICATED, EPX_SLOT_O, 0},
    {LAYER "self_attn.q_norm.weight", {EPX_DIM_HEAD}, EPX_PLACE_REPLICATED, EPX_SLOT_Q_NORM, 0},
    {LAYER "self_attn.k_norm.weight", {EPX_DIM_HEAD}, EPX_PLACE_REPLICATED, EPX_SLOT_K_NORM, 0},
    {LAYER "post_attention_layernorm.weight", {EPX_DIM_HIDDEN}, EPX_PLACE_REPLICATED, EPX_SLOT_FFN_NORM, 0},
    {LAYER "mlp.gate.weight", {EPX_DIM_EXPERTS, EPX_DIM_HIDDEN}, EPX_PLACE_REPLICATED, EPX_SLOT_ROUTER, 0},
    {EXPERT "gate_proj.weight", {EPX_DIM_FFN, EPX_DIM_HIDDEN}, EPX_PLACE_BY_EXPERT, EPX_SLOT_GATE, 0},
    {EXPERT "up_proj.weight", {EPX_DIM_FFN, EPX_DIM_HIDDEN}, EPX_PLACE_BY_EXPERT, EPX_SLOT_UP, 0},
    {EXPERT "down_proj.weight", {EPX_DIM_HIDDEN, EPX_DIM_FFN}, EPX_PLACE_BY_EXPERT, EPX_SLOT_DOWN, 0},
};

static epx_status_t forward(epx_model_t *m, const epx_batch_t *b) {
    epx_block_embed(m, b);
    for (int l = 0; l < m->cfg.n_layers; l++) {
        epx_block_gqa(m, b, l);
        EPX_TRY(epx_block_moe_softmax(m, b, l));
        epx_block_probe(m, b, l);
    }
    epx_block_logits(m, b);
    return EPX_OK;
}

extern const epx_arch_t epx_arch_qwen3_moe;
const epx_arch_t epx_arch_qwen3_moe = {
    .architecture = "Qwen3MoeForCausalLM",
    .model_type = "qwen3_moe",
    .read_config = read_config,
    .rules = rules,
    .n_rules = sizeof rules / sizeof rules[0],
    .forward = forward,
};
