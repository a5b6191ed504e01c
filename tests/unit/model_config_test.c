/* config.json and generation_config.json: what is read, and that everything unsupported or malformed is refused by name and
 * value. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine/model/model.h"
#include "engine/runtime/generation.h"

#define GOOD                                                                                                                     \
    "\"architectures\":[\"Qwen3MoeForCausalLM\"],\"model_type\":\"qwen3_moe\",\"hidden_size\":256,\"num_hidden_layers\":6,"      \
    "\"num_attention_heads\":8,\"num_key_value_heads\":2,\"head_dim\":32,\"moe_intermediate_size\":128,\"num_experts\":16,"      \
    "\"num_experts_per_tok\":4,\"vocab_size\":4096,\"max_position_embeddings\":4096,\"rope_theta\":10000,\"rms_norm_eps\":1e-6," \
    "\"norm_topk_prob\":true,\"tie_word_embeddings\":true,\"eos_token_id\":[5,6]"

static epx_status_t parse(const char *json, epx_model_config_t *c) {
    return epx_model_config_parse("config.json", json, strlen(json), c);
}

static void test_good(void **state) {
    (void)state;
    epx_model_config_t c;
    assert_int_equal(
        parse("{" GOOD ",\"rope_scaling\":null,\"sliding_window\":4096,\"use_sliding_window\":false,\"mlp_only_layers\":[]}", &c),
        EPX_OK);
    assert_true(c.hidden == 256 && c.n_layers == 6 && c.n_heads == 8 && c.n_kv_heads == 2 && c.head_dim == 32 &&
                c.moe_ffn == 128);
    assert_true(c.n_experts == 16 && c.top_k == 4 && c.vocab == 4096 && c.max_position == 4096 && c.rope_theta == 10000.0);
    assert_true(c.norm_topk_prob == 1 && c.tie_embeddings == 1 && c.rms_eps == 1e-6f);
    assert_true(c.n_eos == 2 && c.eos_ids[0] == 5 && c.eos_ids[1] == 6);
    assert_string_equal(epx_model_architecture(&c), "Qwen3MoeForCausalLM");
}

/* transformers 5 nests the rotary fields. */
static void test_nested_rope(void **state) {
    (void)state;
    epx_model_config_t c;
    assert_int_equal(parse("{" GOOD ",\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":5e6}}", &c), EPX_OK);
    assert_true(c.rope_theta == 5e6);
    assert_int_equal(parse("{" GOOD ",\"rope_parameters\":{\"rope_type\":\"yarn\"}}", &c), EPX_ERR_UNSUPPORTED);
    assert_non_null(strstr(epx_error_message(), "yarn"));
}

/* GOOD with one key replaced or added. */
static void refuse_with(const char *key, const char *value, epx_status_t s, const char *part) {
    epx_model_config_t c;
    json_error_t e;
    json_t *root = json_loads("{" GOOD "}", 0, &e), *v = json_loads(value, JSON_DECODE_ANY, &e);
    assert_non_null(root);
    assert_non_null(v);
    json_object_set_new(root, key, v);
    char *text = json_dumps(root, 0);
    epx_status_t got = parse(text, &c);
    if (got != s || !strstr(epx_error_message(), part) || !strstr(epx_error_message(), "config.json"))
        fail_msg("%s = %s: expected %d with \"%s\", got %d: %s", key, value, (int)s, part, (int)got, epx_error_message());
    free(text);
    json_decref(root);
}

static void test_refused(void **state) {
    (void)state;
    const epx_status_t no = EPX_ERR_UNSUPPORTED, bad = EPX_ERR_FORMAT;
    refuse_with("architectures", "[\"GPT2LMHeadModel\"]", no,
                "unknown architecture \"GPT2LMHeadModel\", supported: Qwen3MoeForCausalLM");
    refuse_with("architectures", "[]", bad, "architectures");
    refuse_with("architectures", "\"x\"", bad, "architectures");
    refuse_with("model_type", "\"mixtral\"", bad, "model_type is \"mixtral\"");
    refuse_with("rope_scaling", "{\"type\":\"yarn\",\"factor\":4}", no, "rope_scaling is {\"type\":\"yarn\"");
    refuse_with("attention_bias", "true", no, "attention_bias is true");
    refuse_with("hidden_act", "\"gelu\"", no, "hidden_act is \"gelu\", supported: \"silu\"");
    refuse_with("use_sliding_window", "true", no, "use_sliding_window is true");
    refuse_with("quantization_config", "{\"quant_method\":\"gptq\"}", no, "quantization_config is {\"quant_method\":\"gptq\"}");
    refuse_with("quantization_config", "{\"quant_method\":\"fp8\"}", no, "weight_block_size is not [128, 128]");
    refuse_with("quantization_config", "{\"quant_method\":\"fp8\",\"weight_block_size\":[64,64]}", no, "weight_block_size");
    refuse_with("quantization_config", "{\"quant_method\":\"fp8\",\"fmt\":\"e5m2\",\"weight_block_size\":[128,128]}", no,
                "fmt is \"e5m2\"");
    refuse_with("quantization_config",
                "{\"quant_method\":\"fp8\",\"activation_scheme\":\"static\",\"weight_block_size\":[128,128]}", no,
                "activation_scheme is \"static\"");
    refuse_with("decoder_sparse_step", "2", no, "decoder_sparse_step is 2");
    refuse_with("mlp_only_layers", "[0]", no, "mlp_only_layers is [0]");
    refuse_with("hidden_size", "0", bad, "hidden_size is 0, expected an integer from 1");
    refuse_with("hidden_size", "\"256\"", bad, "hidden_size is \"256\"");
    refuse_with("hidden_size", "null", bad, "hidden_size is missing");
    refuse_with("hidden_size", "1e3", bad, "hidden_size is 1000.0");
    refuse_with("num_experts_per_tok", "17", bad, "expected an integer from 1 to 16");
    refuse_with("num_key_value_heads", "3", bad, "expected a divisor of num_attention_heads, 8");
    refuse_with("head_dim", "31", bad, "head_dim is 31");
    refuse_with("head_dim", "578", bad, "head_dim is 578");
    refuse_with("rms_norm_eps", "-1", bad, "rms_norm_eps is -1");
    refuse_with("rope_theta", "\"x\"", bad, "rope_theta");
    refuse_with("norm_topk_prob", "1", bad, "norm_topk_prob is 1, expected true or false");
    refuse_with("eos_token_id", "4096", bad, "eos_token_id");
    refuse_with("eos_token_id", "[1,\"a\"]", bad, "entry 1");
    refuse_with("eos_token_id", "[1,2,3,4,5,6,7,8,9]", no, "9 entries, at most 8");
}

static void test_bad_json(void **state) {
    (void)state;
    epx_model_config_t c;
    assert_int_equal(parse("{\"hidden_size\": 12,\n \"x\": }", &c), EPX_ERR_FORMAT);
    assert_non_null(strstr(epx_error_message(), "config.json: line 2"));
    assert_int_equal(parse("[1]", &c), EPX_ERR_FORMAT);
    assert_int_equal(parse("", &c), EPX_ERR_FORMAT);
    assert_int_equal(parse("{\"a\":1,\"a\":2}", &c), EPX_ERR_FORMAT);
    assert_int_equal(epx_model_config_load("/nonexistent", &c), EPX_ERR_IO);
    assert_non_null(strstr(epx_error_message(), "/nonexistent/config.json"));
}

static void test_expert_range(void **state) {
    (void)state;
    for (int n_experts = 1; n_experts <= 20; n_experts++) {
        for (int w = 1; w <= 8; w++) {
            int next = 0, first, n;
            for (int r = 0; r < w; r++) {
                epx_model_expert_range(n_experts, r, w, &first, &n);
                assert_int_equal(first, next);
                assert_int_equal(n, n_experts / w + (r < n_experts % w));
                next += n;
            }
            assert_int_equal(next, n_experts);
        }
    }
}

static void test_generation(void **state) {
    (void)state;
    epx_generation_defaults_t g;
    assert_int_equal(epx_generation_defaults(EPX_SOURCE_DIR "/models/tinymoe-math", &g), EPX_OK);
    assert_true(g.n_eos == 2 && g.eos_ids[0] == 4082 && g.eos_ids[1] == 4080);
    assert_true(g.sampling.temperature == 0.3f && g.sampling.top_k == 20 && g.sampling.top_p == 0.95f &&
                g.sampling.min_p == 0.0f);
    assert_int_equal(epx_generation_defaults(EPX_TEST_DATA "/reference/qwen3_moe", &g), EPX_OK); /* config.json only */
    assert_true(g.n_eos == 1 && g.eos_ids[0] == 2 && g.sampling.temperature == 1.0f && g.sampling.top_k == -1);
}

static void test_generation_errors(void **state) {
    (void)state;
    epx_generation_defaults_t g;
    char dir[] = "/tmp/epx-gen-XXXXXX", path[64];
    static const struct {
        const char *json, *part;
    } cases[] = {{"{\"temperature\":-1}", "temperature is -1"},
                 {"{\"top_p\":0}", "top_p is 0"},
                 {"{\"top_k\":1.5}", "top_k is 1.5"},
                 {"{\"eos_token_id\":-4}", "eos_token_id"},
                 {"{", "not valid JSON"}};
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/generation_config.json", dir);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        FILE *f = fopen(path, "w");
        assert_non_null(f);
        fputs(cases[i].json, f);
        fclose(f);
        assert_int_equal(epx_generation_defaults(dir, &g), EPX_ERR_FORMAT);
        if (!strstr(epx_error_message(), cases[i].part) || !strstr(epx_error_message(), path))
            fail_msg("%s", epx_error_message());
    }
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs("{\"do_sample\":false,\"temperature\":0.7}", f);
    fclose(f);
    assert_int_equal(epx_generation_defaults(dir, &g), EPX_OK);
    assert_true(g.sampling.temperature == 0.0f && g.n_eos == 0);
    unlink(path);
    rmdir(dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_good),
        cmocka_unit_test(test_nested_rope),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_bad_json),
        cmocka_unit_test(test_expert_range),
        cmocka_unit_test(test_generation),
        cmocka_unit_test(test_generation_errors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
