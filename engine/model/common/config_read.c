/* Fields of config.json that several architectures read the same way. What is not known is refused by name and value. */
#include <math.h>
#include <string.h>

#include "engine/model/common/arch.h"

enum { MAX_SIZE = 1 << 20, MAX_VOCAB = 1 << 24, MAX_EXPERTS = 16384 };

epx_status_t epx_config_int(const epx_json_doc_t *d, const char *key, int lo, int hi, int *out) {
    int64_t v;
    EPX_TRY(epx_json_int(d, key, lo, hi, &v));
    *out = (int)v;
    return EPX_OK;
}

static epx_status_t read_heads(const epx_json_doc_t *d, epx_model_config_t *c) {
    int64_t v;
    EPX_TRY(epx_config_int(d, "num_attention_heads", 1, 4096, &c->n_heads));
    EPX_TRY(epx_json_int_or(d, "num_key_value_heads", 1, 4096, c->n_heads, &v));
    c->n_kv_heads = (int)v;
    EPX_TRY(epx_json_int_or(d, "head_dim", 2, EPX_OPS_MAX_HEAD_DIM, c->hidden / c->n_heads, &v));
    c->head_dim = (int)v;
    if (c->head_dim < 2 || c->head_dim > EPX_OPS_MAX_HEAD_DIM || c->head_dim % 2)
        return epx_fail(EPX_ERR_FORMAT, "%s: head_dim is %d, expected an even number from 2 to %d", d->name, c->head_dim,
                        EPX_OPS_MAX_HEAD_DIM);
    if (c->n_heads % c->n_kv_heads)
        return epx_fail(EPX_ERR_FORMAT, "%s: num_key_value_heads is %d, expected a divisor of num_attention_heads, %d", d->name,
                        c->n_kv_heads, c->n_heads);
    c->rope_dim = c->head_dim;
    c->attn_scale = 1.0f / sqrtf((float)c->head_dim);
    return EPX_OK;
}

static epx_status_t read_sizes(const epx_json_doc_t *d, epx_model_config_t *c) {
    EPX_TRY(epx_config_int(d, "hidden_size", 1, MAX_SIZE, &c->hidden));
    EPX_TRY(epx_config_int(d, "num_hidden_layers", 1, EPX_MAX_LAYERS, &c->n_layers));
    EPX_TRY(epx_config_int(d, "vocab_size", 1, MAX_VOCAB, &c->vocab));
    EPX_TRY(epx_config_int(d, "max_position_embeddings", 1, 1 << 28, &c->max_position));
    c->routed_factor = 1.0;
    c->n_groups = c->top_groups = c->group_best = 1;
    return EPX_OK;
}

epx_status_t epx_config_sizes(const epx_json_doc_t *d, epx_model_config_t *c) {
    EPX_TRY(read_sizes(d, c));
    return read_heads(d, c);
}

epx_status_t epx_config_top_k(const epx_json_doc_t *d, const char *key, epx_model_config_t *c) {
    if (c->n_experts > MAX_EXPERTS)
        return epx_fail(EPX_ERR_UNSUPPORTED, "%s: %d experts, at most %d", d->name, c->n_experts, MAX_EXPERTS);
    return epx_config_int(d, key, 1, c->n_experts < EPX_MAX_TOP_K ? c->n_experts : EPX_MAX_TOP_K, &c->top_k);
}

epx_status_t epx_config_only_bool(const epx_json_doc_t *d, const char *key, int value, const char *why) {
    int v;
    EPX_TRY(epx_json_bool_or(d, key, value, &v));
    if (v != value) return epx_fail(EPX_ERR_UNSUPPORTED, "%s: %s is %s: %s", d->name, key, v ? "true" : "false", why);
    return EPX_OK;
}

epx_status_t epx_config_only_string(const epx_json_doc_t *d, const char *key, const char *a, const char *b) {
    const char *v;
    EPX_TRY(epx_json_string_or(d, key, a, &v));
    if (strcmp(v, a) == 0 || (b && strcmp(v, b) == 0)) return EPX_OK;
    return epx_fail(EPX_ERR_UNSUPPORTED, "%s: %s is \"%.60s\", supported: \"%s\"%s%s%s", d->name, key, v, a, b ? ", \"" : "",
                    b ? b : "", b ? "\"" : "");
}

epx_status_t epx_config_common(const epx_json_doc_t *d, epx_model_config_t *c) {
    double eps;
    EPX_TRY(epx_config_only_string(d, "hidden_act", "silu", NULL));
    EPX_TRY(epx_json_real_or(d, "rms_norm_eps", 0.0, 1.0, 1e-6, &eps));
    c->rms_eps = (float)eps;
    return epx_json_bool_or(d, "tie_word_embeddings", 0, &c->tie_embeddings);
}

/* ---- rotary embedding ---- */

static const char *const yarn_keys[] = {"type",           "rope_type",        "factor",    "original_max_position_embeddings",
                                        "beta_fast",      "beta_slow",        "mscale",    "truncate",
                                        "mscale_all_dim", "attention_factor", "rope_theta"};

static epx_status_t check_keys(const epx_json_doc_t *d, const char *at) {
    const char *key;
    json_t *v;
    json_object_foreach(d->root, key, v) {
        size_t i = 0, n = sizeof yarn_keys / sizeof yarn_keys[0];
        while (i < n && strcmp(yarn_keys[i], key) != 0) i++;
        if (i == n) return epx_fail(EPX_ERR_UNSUPPORTED, "%s: %s.%.60s is not a known field of YaRN scaling", d->name, at, key);
    }
    return EPX_OK;
}

static double yarn_mscale(double factor, double mscale) { return factor > 1 ? 0.1 * mscale * log(factor) + 1.0 : 1.0; }

static epx_status_t read_yarn(const epx_json_doc_t *d, const char *at, epx_model_config_t *c, double *out_all_dim) {
    epx_yarn_t *y = &c->yarn;
    double mscale, all_dim;
    EPX_TRY(check_keys(d, at));
    if (!epx_json_has(d, "factor") || !epx_json_has(d, "original_max_position_embeddings"))
        return epx_fail(EPX_ERR_FORMAT, "%s: %s has no factor or no original_max_position_embeddings", d->name, at);
    EPX_TRY(epx_json_real_or(d, "factor", 1.0, 1e6, 1.0, &y->factor));
    EPX_TRY(epx_json_real_or(d, "original_max_position_embeddings", 1.0, 1e9, 1.0, &y->original_positions));
    EPX_TRY(epx_json_real_or(d, "beta_fast", 1e-6, 1e6, 32.0, &y->beta_fast));
    EPX_TRY(epx_json_real_or(d, "beta_slow", 1e-6, 1e6, 1.0, &y->beta_slow));
    EPX_TRY(epx_json_bool_or(d, "truncate", 1, &y->truncate));
    EPX_TRY(epx_json_real_or(d, "mscale", 0.0, 100.0, 0.0, &mscale));
    EPX_TRY(epx_json_real_or(d, "mscale_all_dim", 0.0, 100.0, 0.0, &all_dim));
    double implied = mscale > 0 && all_dim > 0 ? yarn_mscale(y->factor, mscale) / yarn_mscale(y->factor, all_dim)
                                               : yarn_mscale(y->factor, 1.0);
    EPX_TRY(epx_json_real_or(d, "attention_factor", 0.0, 100.0, implied, &y->attention_factor));
    if (all_dim > 0 && !out_all_dim)
        return epx_fail(EPX_ERR_UNSUPPORTED, "%s: %s.mscale_all_dim is not supported with this architecture", d->name, at);
    if (out_all_dim && all_dim > 0) *out_all_dim = yarn_mscale(y->factor, all_dim);
    return EPX_OK;
}

/* `type` is the old spelling of rope_type. */
static epx_status_t read_scaling(const epx_json_doc_t *d, const char *at, int yarn, epx_model_config_t *c, double *out_all_dim) {
    const char *type;
    EPX_TRY(epx_json_string_or(d, "type", "default", &type));
    EPX_TRY(epx_json_string_or(d, "rope_type", type, &type));
    if (strcmp(type, "default") == 0) return EPX_OK;
    if (!yarn || strcmp(type, "yarn") != 0)
        return epx_fail(EPX_ERR_UNSUPPORTED, "%s: %s: rope_type is \"%.60s\", supported with this architecture: \"default\"%s",
                        d->name, at, type, yarn ? ", \"yarn\"" : "");
    return read_yarn(d, at, c, out_all_dim);
}

/* transformers 5 writes rope_theta and the scaling into rope_parameters; before that rope_theta was a top-level key. */
epx_status_t epx_config_rope(const epx_json_doc_t *d, int yarn, epx_model_config_t *c, double *out_mscale_all_dim) {
    json_t *nested = json_object_get(d->root, "rope_parameters"), *scaling = json_object_get(d->root, "rope_scaling");
    epx_json_doc_t in = {d->name, json_is_object(nested) ? nested : d->root};
    if (nested && !json_is_null(nested) && !json_is_object(nested))
        return epx_fail(EPX_ERR_FORMAT, "%s: rope_parameters is not an object", d->name);
    EPX_TRY(epx_json_real_or(&in, "rope_theta", 1.0, 1e12, 10000.0, &c->rope_theta));
    if (json_is_object(nested)) return read_scaling(&in, "rope_parameters", yarn, c, out_mscale_all_dim);
    if (!yarn) return epx_json_refuse(d, "rope_scaling", "rotary scaling is not supported with this architecture");
    if (!scaling || json_is_null(scaling)) return EPX_OK;
    if (!json_is_object(scaling)) return epx_fail(EPX_ERR_FORMAT, "%s: rope_scaling is not an object", d->name);
    in.root = scaling;
    return read_scaling(&in, "rope_scaling", yarn, c, out_mscale_all_dim);
}

/* ---- quantisation ---- */

static epx_status_t check_fp8(const epx_json_doc_t *d, const json_t *block) {
    EPX_TRY(epx_config_only_string(d, "quant_method", "fp8", NULL));
    EPX_TRY(epx_config_only_string(d, "fmt", "e4m3", NULL));
    EPX_TRY(epx_config_only_string(d, "activation_scheme", "dynamic", NULL));
    if (json_array_size(block) == 2 && json_integer_value(json_array_get(block, 0)) == EPX_W_SCALE_BLOCK &&
        json_integer_value(json_array_get(block, 1)) == EPX_W_SCALE_BLOCK)
        return EPX_OK;
    return epx_fail(EPX_ERR_UNSUPPORTED, "%s: quantization_config.weight_block_size is not [128, 128], the supported one",
                    d->name);
}

epx_status_t epx_config_quantisation(const epx_json_doc_t *d, int fp8, epx_model_config_t *c) {
    json_t *q = json_object_get(d->root, "quantization_config");
    const char *method;
    if (!q || json_is_null(q) || !fp8 || !json_is_object(q))
        return epx_json_refuse(d, "quantization_config",
                               "quantised checkpoints of this architecture are not supported, use a bf16 or f32 one");
    epx_json_doc_t in = {d->name, q};
    EPX_TRY(epx_json_string_or(&in, "quant_method", "unknown", &method));
    if (strcmp(method, "fp8") != 0)
        return epx_json_refuse(d, "quantization_config", "quantised checkpoints are supported as fp8 in 128 x 128 blocks only");
    c->fp8 = 1;
    return check_fp8(&in, json_object_get(q, "weight_block_size"));
}

/* ---- experts ---- */

epx_status_t epx_config_groups(const epx_json_doc_t *d, epx_model_config_t *c) {
    int64_t n, top;
    EPX_TRY(epx_json_int_or(d, "n_group", 1, 256, 1, &n));
    EPX_TRY(epx_json_int_or(d, "topk_group", 1, n, 1, &top));
    if (c->n_experts % n)
        return epx_fail(EPX_ERR_FORMAT, "%s: n_group is %d, expected a divisor of n_routed_experts, %d", d->name, (int)n,
                        c->n_experts);
    if (c->n_experts / n * top < c->top_k)
        return epx_fail(EPX_ERR_FORMAT, "%s: topk_group is %d: %d groups of %d experts are fewer than num_experts_per_tok, %d",
                        d->name, (int)top, (int)top, (int)(c->n_experts / n), c->top_k);
    c->n_groups = (int)n;
    c->top_groups = (int)top;
    return EPX_OK;
}

epx_status_t epx_config_dense(const epx_json_doc_t *d, epx_model_config_t *c) {
    int64_t n;
    EPX_TRY(epx_json_int_or(d, "first_k_dense_replace", 0, c->n_layers, 0, &n));
    c->n_dense_layers = (int)n;
    return epx_config_int(d, "intermediate_size", 1, MAX_SIZE, &c->dense_ffn);
}

/* ---- the DeepSeek family ---- */

epx_status_t epx_config_mla(const epx_json_doc_t *d, epx_model_config_t *c) {
    epx_mla_t *a = &c->mla;
    int64_t q_lora;
    double all_dim = 1.0;
    EPX_TRY(epx_json_refuse(d, "attention_bias", "biases of the attention projections are not supported"));
    EPX_TRY(read_sizes(d, c));
    EPX_TRY(epx_config_int(d, "num_attention_heads", 1, 4096, &c->n_heads));
    EPX_TRY(epx_json_int_or(d, "q_lora_rank", 1, MAX_SIZE, 0, &q_lora));
    a->q_lora = (int)q_lora;
    EPX_TRY(epx_config_int(d, "kv_lora_rank", 1, 512, &a->kv_lora));
    EPX_TRY(epx_config_int(d, "qk_nope_head_dim", 1, 512, &a->nope));
    EPX_TRY(epx_config_int(d, "qk_rope_head_dim", 2, 64, &a->rope));
    EPX_TRY(epx_config_int(d, "v_head_dim", 1, 512, &a->v));
    if (a->rope % 2 || (a->kv_lora + a->rope) % 2)
        return epx_fail(EPX_ERR_FORMAT, "%s: qk_rope_head_dim is %d and kv_lora_rank %d, expected even numbers", d->name, a->rope,
                        a->kv_lora);
    if (c->fp8 && (a->nope % EPX_W_SCALE_BLOCK || a->v % EPX_W_SCALE_BLOCK))
        return epx_fail(
            EPX_ERR_UNSUPPORTED,
            "%s: qk_nope_head_dim is %d and v_head_dim %d: fp8 weights need multiples of %d, so that a head begins with a block",
            d->name, a->nope, a->v, EPX_W_SCALE_BLOCK);
    EPX_TRY(epx_config_rope(d, 1, c, &all_dim));
    c->n_kv_heads = 1;
    c->head_dim = a->kv_lora + a->rope;
    c->rope_first = a->kv_lora;
    c->rope_dim = a->rope;
    c->rope_interleaved = 1;
    c->attn_scale = (float)(pow(a->nope + a->rope, -0.5) * all_dim * all_dim);
    return EPX_OK;
}

epx_status_t epx_config_deepseek_experts(const epx_json_doc_t *d, epx_model_config_t *c) {
    int64_t freq, n_shared;
    EPX_TRY(epx_json_int_or(d, "moe_layer_freq", 1, 1 << 20, 1, &freq));
    if (freq != 1) return epx_fail(EPX_ERR_UNSUPPORTED, "%s: moe_layer_freq is %d, supported: 1", d->name, (int)freq);
    EPX_TRY(epx_config_int(d, "moe_intermediate_size", 1, MAX_SIZE, &c->moe_ffn));
    EPX_TRY(epx_config_int(d, "n_routed_experts", 1, 1 << 16, &c->n_experts));
    EPX_TRY(epx_json_int_or(d, "n_shared_experts", 0, 64, 0, &n_shared));
    c->shared_ffn = (int)n_shared * c->moe_ffn;
    EPX_TRY(epx_config_top_k(d, "num_experts_per_tok", c));
    EPX_TRY(epx_config_dense(d, c));
    return epx_json_real_or(d, "routed_scaling_factor", 0.0, 1e6, 1.0, &c->routed_factor);
}
