/* config.json of each architecture's reference checkpoint: what is read, and that a change to something not supported is refused
 * by name. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/model/model.h"

static json_t *base_of(const char *model) {
    char path[512];
    json_error_t e;
    snprintf(path, sizeof path, EPX_TEST_DATA "/reference/%s/config.json", model);
    json_t *root = json_load_file(path, 0, &e);
    if (!root) fail_msg("%s: %s", path, e.text);
    return root;
}

static epx_status_t parse(json_t *root, epx_model_config_t *c) {
    char *text = json_dumps(root, 0);
    epx_status_t s = epx_model_config_parse("config.json", text, strlen(text), c);
    free(text);
    json_decref(root);
    return s;
}

/* One key of the model's file changed; value NULL: removed. */
static void refuse_with(const char *model, const char *key, const char *value, epx_status_t s, const char *part) {
    epx_model_config_t c;
    json_error_t e;
    json_t *root = base_of(model), *v = value ? json_loads(value, JSON_DECODE_ANY, &e) : NULL;
    if (value && !v) fail_msg("%s: %s", value, e.text);
    if (v) json_object_set_new(root, key, v);
    else json_object_del(root, key);
    epx_status_t got = parse(root, &c);
    if (got != s || !strstr(epx_error_message(), part) || !strstr(epx_error_message(), "config.json"))
        fail_msg("%s: %s = %s: expected %d with \"%s\", got %d: %s", model, key, value, (int)s, part, (int)got,
                 epx_error_message());
}

static void test_read(void **state) {
    (void)state;
    epx_model_config_t c;
    assert_int_equal(parse(base_of("mixtral"), &c), EPX_OK);
    assert_true(c.n_experts == 8 && c.top_k == 2 && c.norm_topk_prob && c.head_dim == 32 && c.rope_theta == 1e6);
    assert_int_equal(parse(base_of("qwen2_moe"), &c), EPX_OK);
    assert_true(c.shared_ffn == 64 && c.attention_bias && !c.norm_topk_prob);
    assert_int_equal(parse(base_of("glm4_moe"), &c), EPX_OK);
    assert_true(c.rope_dim == 16 && c.head_dim == 32 && c.n_dense_layers == 1 && c.dense_ffn == 192 &&
                c.score == EPX_SCORE_SIGMOID && c.qk_norm && c.group_best == 2);
    assert_int_equal(parse(base_of("deepseek_v2"), &c), EPX_OK);
    assert_true(c.mla.kv_lora == 32 && c.mla.q_lora == 48 && c.head_dim == 48 && c.n_kv_heads == 1 && c.rope_first == 32 &&
                c.rope_interleaved && c.n_groups == 4 && c.top_groups == 2 && c.group_best == 1 && c.shared_ffn == 96);
    assert_int_equal(parse(base_of("deepseek_v3"), &c), EPX_OK);
    assert_true(c.yarn.factor == 40 && c.yarn.truncate && fabs(c.yarn.attention_factor - 1) < 1e-12);
    const double m = 0.1 * log(40.0) + 1;
    assert_true(fabs((double)c.attn_scale - m * m / sqrt(48.0)) < 1e-6);
    assert_int_equal(parse(base_of("gpt_oss"), &c), EPX_OK);
    assert_true(c.window == 16 && c.sliding[0] == 5 && c.act == EPX_ACT_CLAMPED_GLU && c.act_limit == 7.0 && !c.yarn.truncate);
    assert_int_equal(parse(base_of("qwen3_moe_fp8"), &c), EPX_OK);
    assert_true(c.fp8 && c.tie_embeddings);
}

/* DeepSeek-V2-Lite's shape: queries not compressed, experts chosen from all. */
static void test_v2_lite(void **state) {
    (void)state;
    epx_model_config_t c;
    json_t *root = base_of("deepseek_v2");
    json_object_set_new(root, "q_lora_rank", json_null());
    json_object_set_new(root, "topk_method", json_string("greedy"));
    assert_int_equal(parse(root, &c), EPX_OK);
    assert_true(c.mla.q_lora == 0 && c.n_groups == 1 && c.top_groups == 1);
}

static void test_refused(void **state) {
    (void)state;
    const epx_status_t no = EPX_ERR_UNSUPPORTED, bad = EPX_ERR_FORMAT;
    static const char *const all[] = {"mixtral", "qwen2_moe", "olmoe", "glm4_moe", "deepseek_v2", "deepseek_v3", "gpt_oss"};
    for (int i = 0; i < 7; i++) {
        refuse_with(all[i], "rope_scaling", "{\"rope_type\":\"llama3\",\"factor\":8}", no, "llama3");
        refuse_with(all[i], "rope_parameters", "{\"rope_type\":\"longrope\",\"rope_theta\":1e4}", no, "longrope");
        refuse_with(all[i], "quantization_config", "{\"quant_method\":\"mxfp4\"}", no, "mxfp4");
        refuse_with(all[i], "hidden_act", "\"gelu\"", no, "hidden_act is \"gelu\"");
        refuse_with(all[i], "hidden_size", NULL, bad, "hidden_size is missing");
        refuse_with(all[i], "num_attention_heads", "0", bad, "num_attention_heads is 0");
        refuse_with(all[i], "vocab_size", "-1", bad, "vocab_size is -1");
    }
    refuse_with("mixtral", "sliding_window", "4096", no, "sliding_window is 4096");
    refuse_with("mixtral", "rope_scaling", "{\"rope_type\":\"yarn\",\"factor\":4}", no, "yarn");
    refuse_with("mixtral", "num_experts_per_tok", "9", bad, "expected an integer from 1 to 8");
    refuse_with("qwen2_moe", "use_sliding_window", "true", no, "use_sliding_window is true");
    refuse_with("qwen2_moe", "mlp_only_layers", "[1]", no, "mlp_only_layers is [1]");
    refuse_with("qwen2_moe", "qkv_bias", "false", no, "qkv_bias is false");
    refuse_with("qwen2_moe", "shared_expert_intermediate_size", NULL, bad, "shared_expert_intermediate_size is missing");
    refuse_with("olmoe", "clip_qkv", "8.0", no, "clip_qkv is 8.0");
    refuse_with("olmoe", "attention_bias", "true", no, "attention_bias is true");
    refuse_with("glm4_moe", "partial_rotary_factor", "0.03", bad, "partial_rotary_factor is 0.03");
    refuse_with("glm4_moe", "n_group", "5", bad, "n_group is 5, expected a divisor of n_routed_experts, 12");
    refuse_with("glm4_moe", "first_k_dense_replace", "4", bad, "first_k_dense_replace is 4");
    refuse_with("deepseek_v2", "topk_method", "\"noaux_tc\"", no, "topk_method is \"noaux_tc\", supported: \"greedy\"");
    refuse_with("deepseek_v2", "scoring_func", "\"sigmoid\"", no, "scoring_func is \"sigmoid\"");
    refuse_with("deepseek_v2", "norm_topk_prob", "true", no, "norm_topk_prob is true");
    refuse_with("deepseek_v2", "moe_layer_freq", "2", no, "moe_layer_freq is 2");
    refuse_with("deepseek_v2", "kv_lora_rank", "1024", bad, "kv_lora_rank is 1024");
    refuse_with("deepseek_v2", "attention_bias", "true", no, "attention_bias is true");
    refuse_with("deepseek_v3", "topk_method", "\"greedy\"", no, "topk_method is \"greedy\"");
    refuse_with("deepseek_v3", "topk_group", "5", bad, "topk_group is 5");
    refuse_with("deepseek_v3", "num_experts_per_tok", "9", bad, "topk_group is 2: 2 groups of 4 experts are fewer");
    refuse_with("deepseek_v3", "quantization_config",
                "{\"quant_method\":\"fp8\",\"fmt\":\"e4m3\",\"weight_block_size\":[128,128]}", no, "qk_nope_head_dim is 32");
    refuse_with("deepseek_v3", "rope_scaling", "{\"type\":\"yarn\",\"factor\":40}", bad, "original_max_position_embeddings");
    refuse_with("deepseek_v3", "rope_scaling",
                "{\"type\":\"yarn\",\"factor\":40,\"original_max_position_embeddings\":64,\"long_factor\":[1]}", no,
                "rope_scaling.long_factor is not a known field");
    refuse_with("gpt_oss", "layer_types", "[\"full_attention\"]", bad, "layer_types is not a list of num_hidden_layers = 4");
    refuse_with("gpt_oss", "layer_types", "[\"full_attention\",\"x\",\"full_attention\",\"full_attention\"]", no,
                "layer_types[1] is \"x\"");
    refuse_with("gpt_oss", "attention_bias", "false", no, "attention_bias is false");
    refuse_with("gpt_oss", "sliding_window", "null", bad, "sliding_window is missing");
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_read), cmocka_unit_test(test_v2_lite),
                                       cmocka_unit_test(test_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
