/* What the clients compute: metrics of times that are known, events of the three APIs, data sets, scores of answers. Expected
 * values are worked out by hand or, where said, by numpy. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "app/bench_api.h"
#include "app/bench_data.h"
#include "app/bench_metrics.h"
#include "app/gsm8k.h"

static void near(double got, double want) {
    if (got < want - 1e-6 || got > want + 1e-6) fail_msg("got %.9g, expected %.9g", got, want);
}

/* ---- metrics ---- */

static void test_percentiles(void **state) {
    static const double v[] = {0.010, 0.020, 0.040, 0.080, 0.500};
    (void)state;
    near(epx_bench_percentile(v, 5, 50), 0.04); /* numpy.percentile */
    near(epx_bench_percentile(v, 5, 90), 0.332);
    near(epx_bench_percentile(v, 5, 95), 0.416);
    near(epx_bench_percentile(v, 5, 99), 0.4832);
    near(epx_bench_percentile(v, 5, 100), 0.5);
    near(epx_bench_percentile(v, 5, 0), 0.01);
    near(epx_bench_percentile(v, 1, 99), 0.01);
    near(epx_bench_percentile(v, 0, 99), 0);
}

/* Three requests: one of 4 tokens, one of a single token, one that failed and must not count anywhere; and one without any text.
 */
static void test_metrics(void **state) {
    static const double gaps[] = {0.1, 0.2, 0.3};
    const epx_bench_sample_t s[] = {
        {.done = 1,
         .start = 100.0,
         .ttft = 0.5,
         .latency = 1.1,
         .n_prompt = 10,
         .n_output = 4,
         .n_retokens = 5,
         .itl = gaps,
         .n_itl = 3},
        {.done = 1, .start = 100.5, .ttft = 0.7, .latency = 0.7, .n_prompt = 20, .n_output = 1, .n_retokens = -1},
        {.done = 0, .start = 90.0, .ttft = 9, .latency = 99, .n_prompt = 1000, .n_output = 1000, .itl = gaps, .n_itl = 3},
        {.done = 1, .start = 101.0, .ttft = -1, .latency = 0.3, .n_prompt = 5, .n_output = 2, .n_retokens = 0},
    };
    epx_bench_metrics_t m;
    (void)state;
    assert_int_equal(epx_bench_metrics(s, 4, 2.0, &m), EPX_OK);
    assert_int_equal(m.n_done, 3);
    assert_int_equal(m.n_failed, 1);
    assert_int_equal(m.n_input, 35);
    assert_int_equal(m.n_output, 7);
    assert_int_equal(m.n_retokens, 5);
    near(m.requests_per_s, 1.5);
    near(m.input_per_s, 17.5);
    near(m.output_per_s, 3.5);
    near(m.total_per_s, 21);
    near(m.retokens_per_s, 2.5);
    near(m.total_retokens_per_s, 20);
    near(m.concurrency, (1.1 + 0.7 + 0.3) / 2);
    near(m.ttft.mean, 600); /* of the two that had text */
    near(m.ttft.median, 600);
    near(m.ttft.std, 100);
    near(m.tpot.mean, 200); /* (1.1 - 0.5) / 3; one token and no text have none */
    near(m.tpot.std, 0);
    near(m.itl.mean, 200);
    near(m.itl.median, 200);
    near(m.itl.p95, 290);
    near(m.itl.p99, 298);
    near(m.itl.max, 300);
    near(m.itl.std, 81.649658);
    near(m.e2e.mean, 700);
    near(m.e2e.median, 700);
    near(m.e2e.p90, 1020);
    near(m.e2e.p99, 1092);
    near(m.peak_output_per_s, 3); /* 100.5 .6 .8 in the first second; 101.1 and 101.2 in the second */
    assert_int_equal(m.peak_concurrent, 3);
}

static void test_no_request(void **state) {
    const epx_bench_sample_t s = {.done = 0, .latency = 1};
    epx_bench_metrics_t m;
    (void)state;
    assert_int_equal(epx_bench_metrics(&s, 1, 1.0, &m), EPX_OK);
    assert_int_equal(m.n_failed, 1);
    near(m.e2e.p99 + m.ttft.mean + m.itl.max + m.peak_output_per_s + m.concurrency, 0);
}

/* ---- answers ---- */

static void take(epx_reply_t *r, epx_api_kind_t kind, const char *event) {
    assert_int_equal(epx_reply_take(r, kind, event, strlen(event)), EPX_OK);
}

static void test_native_events(void **state) {
    epx_reply_t r;
    (void)state;
    epx_reply_init(&r);
    take(&r, EPX_API_NATIVE,
         "{\"text\":\"\",\"meta_info\":{\"prompt_tokens\":7,\"completion_tokens\":1,\"finish_reason\":null}}");
    assert_int_equal(r.text.n_bytes, 0);
    take(&r, EPX_API_NATIVE, "{\"text\":\"ab\",\"meta_info\":{\"completion_tokens\":3,\"finish_reason\":null}}");
    assert_int_equal(r.n_tokens, 3);
    assert_int_equal(r.n_prompt, 7);
    assert_false(r.is_end);
    take(&r, EPX_API_NATIVE,
         "{\"text\":\"abcd\",\"meta_info\":{\"completion_tokens\":5,\"finish_reason\":{\"type\":\"length\"}}}");
    assert_string_equal(r.text.data, "abcd");
    assert_string_equal(r.finish, "length");
    assert_true(r.is_end);
    take(&r, EPX_API_NATIVE, "[DONE]");
    assert_string_equal(r.error, "");
    epx_str_fini(&r.text);
}

static void test_openai_events(void **state) {
    epx_reply_t r;
    (void)state;
    epx_reply_init(&r);
    take(&r, EPX_API_TEXT, "{\"choices\":[{\"text\":\"one\"}]}");
    assert_int_equal(r.n_new_bytes, 3);
    take(&r, EPX_API_TEXT, "{\"choices\":[{\"text\":\" two\",\"finish_reason\":\"stop\"}],\"usage\":null}");
    take(&r, EPX_API_TEXT, "{\"choices\":[],\"usage\":{\"completion_tokens\":9,\"prompt_tokens\":4}}");
    assert_int_equal(r.n_new_bytes, 0);
    assert_int_equal(r.n_tokens, 9);
    assert_string_equal(r.text.data, "one two");
    epx_str_fini(&r.text);
    epx_reply_init(&r);
    take(&r, EPX_API_CHAT, "{\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":null}}]}");
    assert_int_equal(r.n_new_bytes, 0);
    take(&r, EPX_API_CHAT, "{\"choices\":[{\"delta\":{\"content\":\"x\"}}]}");
    take(&r, EPX_API_CHAT, "{\"choices\":[{\"message\":{\"content\":\"y\"}}]}");
    assert_string_equal(r.text.data, "xy");
    epx_str_fini(&r.text);
}

static void test_errors(void **state) {
    static const struct {
        const char *event, *error;
    } cases[] = {{"{\"error\":{\"message\":\"no\"}}", "no"},
                 {"{\"error\":\"bad\"}", "bad"},
                 {"{\"object\":\"error\",\"message\":\"old\"}", "old"},
                 {"{\"text\":", "an event is no JSON: "}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        epx_reply_t r;
        epx_reply_init(&r);
        take(&r, EPX_API_NATIVE, cases[i].event);
        if (strncmp(r.error, cases[i].error, strlen(cases[i].error)) != 0) fail_msg("%s: \"%s\"", cases[i].event, r.error);
    }
}

static json_t *body_of(const epx_ask_t *a) {
    char *text = NULL;
    assert_int_equal(epx_api_body(a, &text), EPX_OK);
    json_t *o = json_loads(text, 0, NULL);
    free(text);
    assert_non_null(o);
    return o;
}

static void expect_body(const epx_ask_t *a, const char *want) {
    json_t *got = body_of(a), *o = json_loads(want, 0, NULL);
    assert_non_null(o);
    if (!json_equal(got, o)) fail_msg("body %s, expected %s", json_dumps(got, JSON_SORT_KEYS), want);
    json_decref(got);
    json_decref(o);
}

static void test_bodies(void **state) {
    static const int32_t ids[] = {4, 5};
    const char *stop[] = {"Q"};
    json_t *extra = json_pack("{s:f}", "temperature", 0.5);
    epx_ask_t a = {
        .api = epx_api_of("sglang"), .text = "hi", .n_text = 2, .max_tokens = 3, .stream = 1, .ignore_eos = 1, .model = "m"};
    (void)state;
    expect_body(
        &a, "{\"text\":\"hi\",\"sampling_params\":{\"temperature\":0.0,\"max_new_tokens\":3,\"ignore_eos\":true},\"stream\":true,"
            "\"lora_path\":null,\"return_logprob\":false,\"logprob_start_len\":-1}");
    a.api = epx_api_of("vllm-chat");
    a.extra = extra;
    expect_body(&a, "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"temperature\":0.5,\"stream\":true,"
                    "\"max_tokens\":3,\"ignore_eos\":true,\"stream_options\":{\"include_usage\":true}}");
    a.api = epx_api_of("sglang-oai-chat");
    json_t *o = body_of(&a);
    assert_int_equal(json_integer_value(json_object_get(o, "max_completion_tokens")), 3);
    assert_null(json_object_get(o, "max_tokens"));
    json_decref(o);
    a = (epx_ask_t){
        .api = epx_api_of("sglang-oai"), .ids = ids, .n_ids = 2, .max_tokens = 3, .model = "m", .stop = stop, .n_stop = 1};
    expect_body(&a, "{\"model\":\"m\",\"prompt\":[4,5],\"temperature\":0.0,\"stream\":false,\"max_tokens\":3,\"stop\":[\"Q\"]}");
    assert_null(epx_api_of("trt"));
    json_decref(extra);
}

/* ---- data sets ---- */

static char dir[] = "/tmp/epx-bench-XXXXXX";

static const char *write_file(const char *text) {
    static char path[64];
    snprintf(path, sizeof path, "%s/data", dir);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
    return path;
}

static epx_tokenizer_t *tok;

static epx_bench_data_t data_of(epx_bench_data_config_t c) {
    epx_bench_data_t d;
    c.tokenizer = tok;
    if (epx_bench_data(&c, &d) < 0) fail_msg("%s", epx_error_message());
    return d;
}

static void test_random_ids(void **state) {
    epx_bench_data_config_t c = {
        .name = "random-ids", .n = 200, .input_len = 40, .output_len = 9, .range_ratio = 0.5, .seed = 3, .want_ids = 1};
    epx_bench_data_t a = data_of(c), b = data_of(c), one;
    int64_t least = 99, most = 0;
    (void)state;
    assert_int_equal(a.n, 200);
    for (size_t i = 0; i < a.n; i++) {
        const epx_bench_prompt_t *p = &a.prompts[i];
        assert_true(p->n_prompt >= 20 && p->n_prompt <= 40 && p->n_output >= 4 && p->n_output <= 9);
        least = p->n_output < least ? p->n_output : least;
        most = p->n_output > most ? p->n_output : most;
        assert_int_equal(p->n_prompt, b.prompts[i].n_prompt); /* the same seed, the same prompts */
        assert_memory_equal(p->ids, b.prompts[i].ids, (size_t)p->n_prompt * sizeof *p->ids);
        for (int64_t k = 0; k < p->n_prompt; k++) assert_false(epx_tokenizer_is_special(tok, p->ids[k]));
    }
    assert_int_equal(least, 4);
    assert_int_equal(most, 9);
    assert_true(memcmp(a.prompts[0].ids, a.prompts[1].ids, 20 * sizeof(int32_t)) != 0);
    c.want_ids = 0;
    c.range_ratio = 1;
    one = data_of(c);
    assert_true(one.prompts[0].n_prompt == 40 && one.prompts[0].n_output == 9 && !one.prompts[0].ids &&
                one.prompts[0].text.n_bytes > 40);
    epx_bench_data_fini(&a);
    epx_bench_data_fini(&b);
    epx_bench_data_fini(&one);
}

static size_t count(const char *text) {
    int32_t *ids = NULL;
    size_t n = 0;
    assert_int_equal(epx_tokenizer_encode(tok, text, strlen(text), &ids, &n), EPX_OK);
    free(ids);
    return n;
}

static void test_files(void **state) {
    const char *talk =
        "[{\"conversations\":[{\"value\":\"How many apples?\"},{\"value\":\"There are 3 apples here.\"},{\"value\":\"x\"}]},"
        "{\"conversations\":[{\"value\":\"alone\"}]}]";
    epx_bench_data_t d = data_of((epx_bench_data_config_t){.name = "sharegpt", .path = write_file(talk), .n = 5, .seed = 1});
    (void)state;
    assert_int_equal(d.n, 1);
    assert_string_equal(d.prompts[0].text.data, "How many apples?");
    assert_int_equal(d.prompts[0].n_prompt, count("How many apples?"));
    assert_int_equal(d.prompts[0].n_output, count("There are 3 apples here."));
    epx_bench_data_fini(&d);
    d = data_of((epx_bench_data_config_t){.name = "random",
                                          .path = write_file(talk),
                                          .n = 1,
                                          .input_len = 30,
                                          .output_len = 5,
                                          .range_ratio = 1,
                                          .seed = 1,
                                          .want_ids = 1});
    assert_int_equal(d.prompts[0].n_prompt, 30);
    assert_int_equal(d.prompts[0].ids[count("How many apples?")], d.prompts[0].ids[0]); /* repeated */
    epx_bench_data_fini(&d);
    d = data_of((epx_bench_data_config_t){
        .name = "jsonl",
        .path = write_file("{\"prompt\":\"one two\",\"output_len\":7}\n\n{\"prompt\":\"three four\",\"output_len\":9}\n"),
        .n = 9});
    assert_int_equal(d.n, 2);
    assert_string_equal(d.prompts[1].text.data, "three four");
    assert_int_equal(d.prompts[1].n_output, 9);
    epx_bench_data_fini(&d);
    epx_bench_data_config_t bad = {.name = "jsonl", .tokenizer = tok, .n = 1, .path = write_file("{\"prompt\":\"a b\"}\n")};
    assert_int_equal(epx_bench_data(&bad, &d), EPX_ERR_FORMAT);
    assert_non_null(strstr(epx_error_message(), "line 1"));
}

/* ---- gsm8k ---- */

static void test_loose(void **state) {
    static const struct {
        const char *text, *want; /* NULL: invalid */
    } cases[] = {{"#### 42", "42"},
                 {"it is 1,234 dollars.", "1234"},
                 {"3.50", "50"},
                 {"-7", "7"},
                 {"", NULL},
                 {"none", NULL},
                 {"12 then 7 apples", "7"},
                 {"007", NULL},
                 {"000", "0"},
                 {"1,2,3", "123"},
                 {"99999999999999999999999", "99999999999999999999999"},
                 {"$5-3", "3"},
                 {"5,", "5"}};
    epx_str_t got = {0};
    int found;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_int_equal(epx_gsm8k_loose(cases[i].text, strlen(cases[i].text), &got, &found), EPX_OK);
        if (found != (cases[i].want != NULL)) fail_msg("\"%s\": found %d", cases[i].text, found);
        if (found) assert_string_equal(got.data, cases[i].want);
    }
    epx_str_fini(&got);
}

static void test_strict(void **state) {
    static const struct {
        const char *text;
        int found;
        double want;
    } cases[] = {{"#### 42", 1, 42},
                 {"it costs $1,234.50.", 1, 1234.5},
                 {"3.50", 1, 3.5},
                 {"#### -7", 1, -7},
                 {"it is -5", 1, -5},
                 {"10-5", 1, 5},
                 {"10 - 5", 1, 5},
                 {"10 -5", 1, 5},
                 {"x-5", 1, 5},
                 {"=-5", 1, -5},
                 {"-$1,000", 1, -1000},
                 {"$-3.25", 1, -3.25},
                 {"(2)-5", 1, 5},
                 {"a b", 0, 0},
                 {"", 0, 0},
                 {".75 of it", 1, 0.75},
                 {"1,2,3", 1, 3},
                 {"5.", 1, 5},
                 {"12,34", 1, 34},
                 {"1,234,567 in all", 1, 1234567},
                 {"3.5 or 3.50", 1, 3.5},
                 {"1000000 not 1000001", 1, 1000001}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        double got = 0;
        int found = epx_gsm8k_strict(cases[i].text, strlen(cases[i].text), &got);
        if (found != cases[i].found || (found && !(got == cases[i].want))) fail_msg("\"%s\": %d, %g", cases[i].text, found, got);
    }
}

static void test_prompt(void **state) {
    epx_gsm8k_t d;
    epx_str_t p = {0};
    (void)state;
    assert_int_equal(
        epx_gsm8k_load(write_file("{\"question\":\"Q0?\",\"answer\":\"so #### 1\"}\n# no question\n"
                                  "{\"question\":\"Q1?\",\"answer\":\"#### 2\"}\n{\"question\":\"Q2?\",\"answer\":\"3\"}\n"),
                       &d),
        EPX_OK);
    assert_int_equal(d.n, 3);
    assert_int_equal(epx_gsm8k_prompt(&d, 2, 2, &p), EPX_OK);
    assert_string_equal(p.data, "Question: Q0?\nAnswer: so #### 1\n\nQuestion: Q1?\nAnswer: #### 2\n\nQuestion: Q2?\nAnswer:");
    epx_str_fini(&p);
    epx_gsm8k_fini(&d);
    assert_int_equal(epx_gsm8k_load(write_file("{\"question\":\"a\",\"answer\":\"none\"}\n"), &d), EPX_ERR_FORMAT);
    assert_int_equal(epx_gsm8k_load(write_file("{\"question\":\"a\"}\n"), &d), EPX_ERR_FORMAT);
    assert_int_equal(epx_gsm8k_load(write_file("\n"), &d), EPX_ERR_FORMAT);
}

static int begin(void **state) {
    (void)state;
    return mkdtemp(dir) == NULL || epx_tokenizer_create(EPX_SOURCE_DIR "/models/tinymoe-math/tokenizer.json", &tok) < 0;
}

static int finish(void **state) {
    char path[64];
    (void)state;
    epx_tokenizer_destroy(tok);
    snprintf(path, sizeof path, "%s/data", dir);
    unlink(path);
    return rmdir(dir);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_percentiles),   cmocka_unit_test(test_metrics),       cmocka_unit_test(test_no_request),
        cmocka_unit_test(test_native_events), cmocka_unit_test(test_openai_events), cmocka_unit_test(test_errors),
        cmocka_unit_test(test_bodies),        cmocka_unit_test(test_random_ids),    cmocka_unit_test(test_files),
        cmocka_unit_test(test_loose),         cmocka_unit_test(test_strict),        cmocka_unit_test(test_prompt)};
    return cmocka_run_group_tests(tests, begin, finish);
}
