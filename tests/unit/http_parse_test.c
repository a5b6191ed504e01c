/* The request parser and the answer writer: every parameter with good values, bad values and wrong types; a zoo of bad JSON. */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/http/openai_request.h"
#include "server/http/openai_write.h"

static const epx_api_limits_t limits = {.model_name = "tiny",
                                        .n_vocab = 4083,
                                        .max_context = 4096,
                                        .default_sampling = {.temperature = 0.5f, .top_p = 0.9f, .top_k = 20}};

static epx_status_t parse(int is_chat, const char *body, epx_api_request_t *r, epx_api_error_t *err) {
    return epx_api_parse(body, strlen(body), is_chat, &limits, r, err);
}

/* A completions (or chat) request with one more member. */
static epx_status_t parse_with(int is_chat, const char *member, epx_api_request_t *r, epx_api_error_t *err) {
    char body[2048];
    snprintf(body, sizeof body, "{\"model\":\"tiny\",%s%s%s}",
             is_chat ? "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]" : "\"prompt\":\"hi\"", *member ? "," : "", member);
    return parse(is_chat, body, r, err);
}

/* ---- values that are refused: member, status, param, words of the message ---- */
static const struct {
    int is_chat;
    const char *member;
    int status;
    const char *param, *words;
} refused[] = {
    {0, "\"temperature\":-0.1", 400, "temperature", "from 0 to 2, or null, got -0.1"},
    {0, "\"temperature\":2.5", 400, "temperature", "got 2.5"},
    {0, "\"temperature\":\"1\"", 400, "temperature", "got \"1\""},
    {1, "\"temperature\":[1]", 400, "temperature", "got [1]"},
    {0, "\"top_p\":0", 400, "top_p", "above 0"},
    {0, "\"top_p\":1.01", 400, "top_p", "at most 1"},
    {0, "\"top_p\":true", 400, "top_p", "got true"},
    {0, "\"top_k\":-2", 400, "top_k", "got -2"},
    {0, "\"top_k\":1.5", 400, "top_k", "integer"},
    {0, "\"top_k\":4294967296", 400, "top_k", "got 4294967296"},
    {0, "\"min_p\":-1", 400, "min_p", "from 0 to 1"},
    {0, "\"min_p\":\"x\"", 400, "min_p", "got \"x\""},
    {0, "\"seed\":1.0", 400, "seed", "64-bit integer"},
    {0, "\"seed\":\"7\"", 400, "seed", "got \"7\""},
    {0, "\"n\":0", 400, "n", "from 1 to 8"},
    {0, "\"n\":9", 400, "n", "got 9"},
    {0, "\"n\":\"2\"", 400, "n", "got \"2\""},
    {0, "\"best_of\":2", 400, "best_of", "equal to n (1), got 2"},
    {0, "\"max_tokens\":0", 400, "max_tokens", ">= 1"},
    {0, "\"max_tokens\":-5", 400, "max_tokens", "got -5"},
    {0, "\"max_tokens\":1.5", 400, "max_tokens", "integer"},
    {0, "\"max_tokens\":99999999999", 400, "max_tokens", "got 99999999999"},
    {1, "\"max_completion_tokens\":0", 400, "max_completion_tokens", "got 0"},
    {1, "\"max_tokens\":3,\"max_completion_tokens\":4", 400, "max_completion_tokens", "contradicts max_tokens 3"},
    {0, "\"max_completion_tokens\":4", 400, "max_completion_tokens", "unknown parameter"},
    {0, "\"stop\":\"\"", 400, "stop", "1 to 1024 bytes"},
    {0, "\"stop\":[\"a\",\"\"]", 400, "stop", "got \"\""},
    {0, "\"stop\":5", 400, "stop", "got 5"},
    {0, "\"stop\":{}", 400, "stop", "got {}"},
    {0, "\"stop\":[\"a\",1]", 400, "stop", "got 1"},
    {0, "\"stop\":[\"a\",\"b\",\"c\",\"d\",\"e\"]", 400, "stop", "at most 4"},
    {0, "\"stop_token_ids\":5", 400, "stop_token_ids", "list"},
    {0, "\"stop_token_ids\":[-1]", 400, "stop_token_ids", "from 0 to 4082, got -1"},
    {0, "\"stop_token_ids\":[4083]", 400, "stop_token_ids", "got 4083"},
    {0, "\"stop_token_ids\":[\"a\"]", 400, "stop_token_ids", "got \"a\""},
    {0, "\"ignore_eos\":1", 400, "ignore_eos", "true, false or null, got 1"},
    {0, "\"stream\":\"yes\"", 400, "stream", "got \"yes\""},
    {0, "\"stream_options\":{\"include_usage\":true}", 400, "stream_options", "only allowed when stream is true"},
    {0, "\"stream\":true,\"stream_options\":[]", 400, "stream_options", "object"},
    {0, "\"stream\":true,\"stream_options\":{\"include_usage\":1}", 400, "stream_options.include_usage", "got 1"},
    {0, "\"stream\":true,\"stream_options\":{\"chunk\":1}", 400, "stream_options", "stream_options.chunk: unknown"},
    {0, "\"stream\":true,\"stream_options\":{\"include_obfuscation\":true}", 400, "stream_options.include_obfuscation", "false"},
    {0, "\"user\":5", 400, "user", "string or null"},
    {0, "\"echo\":1", 400, "echo", "true, false or null"},
    {0, "\"suffix\":\"x\"", 400, "suffix", "not supported"},
    {0, "\"logprobs\":6", 400, "logprobs", "from 0 to 5, or null, got 6"},
    {0, "\"logprobs\":-1", 400, "logprobs", "got -1"},
    {0, "\"logprobs\":true", 400, "logprobs", "got true"},
    {0, "\"top_logprobs\":1", 400, "top_logprobs", "unknown parameter"},
    {1, "\"logprobs\":2", 400, "logprobs", "true, false or null"},
    {1, "\"top_logprobs\":2", 400, "top_logprobs", "only allowed when logprobs is true"},
    {1, "\"logprobs\":true,\"top_logprobs\":21", 400, "top_logprobs", "from 0 to 20, or null, got 21"},
    {1, "\"logprobs\":true,\"top_logprobs\":-1", 400, "top_logprobs", "got -1"},
    {0, "\"frequency_penalty\":2.5", 400, "frequency_penalty", "from -2 to 2, or null, got 2.5"},
    {0, "\"frequency_penalty\":\"1\"", 400, "frequency_penalty", "got \"1\""},
    {0, "\"presence_penalty\":-2.5", 400, "presence_penalty", "got -2.5"},
    {0, "\"repetition_penalty\":0", 400, "repetition_penalty", "above 0 and at most 2"},
    {0, "\"repetition_penalty\":3", 400, "repetition_penalty", "got 3"},
    {0, "\"logit_bias\":[]", 400, "logit_bias", "an object"},
    {0, "\"logit_bias\":{\"4083\":1}", 400, "logit_bias", "\"4083\" is not a token id from 0 to 4082"},
    {0, "\"logit_bias\":{\"-1\":1}", 400, "logit_bias", "\"-1\" is not a token id"},
    {0, "\"logit_bias\":{\"a\":1}", 400, "logit_bias", "\"a\" is not a token id"},
    {0, "\"logit_bias\":{\"\":1}", 400, "logit_bias", "\"\" is not a token id"},
    {0, "\"logit_bias\":{\"5\":101}", 400, "logit_bias", "from -100 to 100 for each token, got 101"},
    {0, "\"logit_bias\":{\"5\":\"1\"}", 400, "logit_bias", "got \"1\""},
    {0, "\"min_tokens\":-1", 400, "min_tokens", ">= 0, or null, got -1"},
    {0, "\"min_tokens\":5,\"max_tokens\":4", 400, "min_tokens", "at most max_tokens (4), got 5"},
    {1, "\"response_format\":\"json\"", 400, "response_format", "an object with a string type"},
    {1, "\"response_format\":{\"type\":\"xml\"}", 400, "response_format.type", "got \"xml\""},
    {0, "\"response_format\":{\"type\":\"json_object\",\"x\":1}", 400, "response_format", "response_format.x: unknown"},
    {0, "\"response_format\":{\"type\":\"json_schema\"}", 400, "response_format.json_schema", "must be an object"},
    {0, "\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"schema\":{}}}", 400, "response_format.json_schema",
     "name: must be a string"},
    {0, "\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"name\":\"a\",\"schema\":{\"pattern\":\"x\"}}}", 400,
     "response_format", "keyword \"pattern\" is not supported"},
    {0, "\"response_format\":{\"type\":\"json_object\"},\"min_tokens\":1", 400, "min_tokens", "not supported together"},
    {1, "\"tools\":{}", 400, "tools", "a list of at most 128"},
    {1, "\"tools\":[{\"type\":\"function\"}]", 400, "tools[0]", "function: must be an object"},
    {1, "\"tools\":[{\"type\":\"retrieval\"}]", 400, "tools[0]", "{\"type\": \"function\""},
    {1, "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"a b\"}}]", 400, "tools[0]", "function.name: must be"},
    {1, "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"a\",\"x\":1}}]", 400, "tools[0]", "tools[0].x: unknown"},
    {1, "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"a\"}},{\"type\":\"function\",\"function\":{\"name\":\"a\"}}]",
     400, "tools[1]", "given twice"},
    {1, "\"tool_choice\":\"required\"", 400, "tool_choice", "only allowed with tools"},
    {1, "\"tool_choice\":\"any\"", 400, "tool_choice", "got \"any\""},
    {1,
     "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"a\"}}],\"tool_choice\":{\"type\":\"function\",\"function\":{"
     "\"name\":\"b\"}}",
     400, "tool_choice", "\"b\" is not one of the tools"},
    {1,
     "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"a\",\"parameters\":{\"format\":\"x\"}}}],\"tool_choice\":"
     "\"required\"",
     400, "tools", "a: keyword \"format\" is not supported"},
    {1, "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"a\"}}],\"response_format\":{\"type\":\"json_object\"}", 400,
     "tools", "not supported together with response_format"},
    {1, "\"parallel_tool_calls\":1", 400, "parallel_tool_calls", "true, false or null"},
    {1, "\"reasoning_effort\":\"high\"", 400, "reasoning_effort", "not supported"},
    {1, "\"store\":true", 400, "store", "not supported"},
    {1, "\"metadata\":{\"a\":\"b\"}", 400, "metadata", "not supported"},
    {1, "\"chat_template_kwargs\":[]", 400, "chat_template_kwargs", "object"},
    {1, "\"chat_template_kwargs\":{\"messages\":[]}", 400, "chat_template_kwargs", "set by the server"},
    {0, "\"priority\":1.5", 400, "priority", "a 32-bit integer, or null"},
    {0, "\"temprature\":1", 400, "temprature", "unknown parameter; accepted: model, prompt"},
    {1, "\"prompt\":\"x\"", 400, "prompt", "unknown parameter"},
    {0, "\"messages\":[]", 400, "messages", "unknown parameter"},
    {0, "\"\":1", 400, NULL, "unknown parameter"},
    {0, "\"temperature\":null,\"temperature\":1", 400, NULL, "duplicate"},
};

static void expect_error(const epx_api_error_t *err, int status, const char *param, const char *words, const char *body) {
    if (err->status != status || (param && strcmp(err->param, param) != 0) || !strstr(err->message, words))
        fail_msg("%s\n  gave %d, param %s: %s\n  wanted %d, %s: ...%s...", body, err->status, err->param, err->message, status,
                 param ? param : "any", words);
    assert_non_null(err->code);
    assert_string_equal(err->type, "invalid_request_error");
}

static void test_refused_values(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        epx_api_request_t r;
        epx_api_error_t err = {0};
        if (parse_with(refused[i].is_chat, refused[i].member, &r, &err) >= 0) fail_msg("%s was accepted", refused[i].member);
        expect_error(&err, refused[i].status, refused[i].param, refused[i].words, refused[i].member);
    }
}

/* ---- whole bodies that are refused ---- */
static const struct {
    int is_chat;
    const char *body;
    int status;
    const char *param, *words;
} zoo[] = {
    {0, "", 400, "", "empty"},
    {0, " ", 400, "", "not valid JSON"},
    {0, "nul", 400, "", "not valid JSON"},
    {0, "null", 400, "", "must be a JSON object"},
    {0, "true", 400, "", "must be a JSON object"},
    {0, "5", 400, "", "must be a JSON object"},
    {0, "\"x\"", 400, "", "must be a JSON object"},
    {0, "[]", 400, "", "must be a JSON object"},
    {0, "{", 400, "", "line 1"},
    {0, "}", 400, "", "not valid JSON"},
    {0, "{\"a\"}", 400, "", "not valid JSON"},
    {0, "{\"a\":}", 400, "", "not valid JSON"},
    {0, "{\"a\":1,}", 400, "", "not valid JSON"},
    {0, "{a:1}", 400, "", "not valid JSON"},
    {0, "{'a':1}", 400, "", "not valid JSON"},
    {0, "{\"a\":01}", 400, "", "not valid JSON"},
    {0, "{\"a\":+1}", 400, "", "not valid JSON"},
    {0, "{\"a\":.5}", 400, "", "not valid JSON"},
    {0, "{\"a\":1.}", 400, "", "not valid JSON"},
    {0, "{\"a\":0x10}", 400, "", "not valid JSON"},
    {0, "{\"a\":NaN}", 400, "", "not valid JSON"},
    {0, "{\"a\":Infinity}", 400, "", "not valid JSON"},
    {0, "{\"temperature\":1e400}", 400, "", "not valid JSON"},
    {0, "{\"seed\":99999999999999999999}", 400, "", "not valid JSON"},
    {0, "{\"a\":\"\\ud800\"}", 400, "", "not valid JSON"},
    {0, "{\"a\":\"\\udc00x\"}", 400, "", "not valid JSON"},
    {0, "{\"a\":\"\\x41\"}", 400, "", "not valid JSON"},
    {0, "{\"a\":\"\\u12\"}", 400, "", "not valid JSON"},
    {0, "{\"a\":\"\t\"}", 400, "", "not valid JSON"},
    {0, "{\"a\":\"\xff\"}", 400, "", "not valid UTF-8 at byte 6"},
    {0, "{\"a\":\"\xc0\xaf\"}", 400, "", "not valid UTF-8"},
    {0, "{\"a\":\"\xed\xa0\x80\"}", 400, "", "not valid UTF-8"},
    {0, "{\"a\":\"\xf4\x90\x80\x80\"}", 400, "", "not valid UTF-8"},
    {0, "{\"a\":1}{\"b\":2}", 400, "", "not valid JSON"},
    {0, "{\"a\":1} x", 400, "", "not valid JSON"},
    {0, "{\"a\":1,\"a\":2}", 400, "", "duplicate"},
    {0, "{\"model\":\"tiny\",\"prompt\":\"a\",\"logit_bias\":{\"1\":0,\"1\":0}}", 400, "", "duplicate"},
    {0, "{\"a\":/*c*/1}", 400, "", "not valid JSON"},
    {0, "{}", 400, "model", "required"},
    {0, "{\"model\":\"tiny\"}", 400, "prompt", "required"},
    {1, "{\"model\":\"tiny\"}", 400, "messages", "required"},
    {0, "{\"model\":5,\"prompt\":\"a\"}", 400, "model", "must be a string"},
    {0, "{\"model\":null,\"prompt\":\"a\"}", 400, "model", "must be a string"},
    {0, "{\"model\":\"gpt-4\",\"prompt\":\"a\"}", 404, "model", "\"gpt-4\" does not exist"},
    {0, "{\"model\":\"tiny\\u0000\",\"prompt\":\"a\"}", 404, "model", "does not exist"},
    {0, "{\"model\":\"tiny\",\"prompt\":null}", 400, "prompt", "got null"},
    {0, "{\"model\":\"tiny\",\"prompt\":[]}", 400, "prompt", "got []"},
    {0, "{\"model\":\"tiny\",\"prompt\":{}}", 400, "prompt", "got {}"},
    {0, "{\"model\":\"tiny\",\"prompt\":5}", 400, "prompt", "got 5"},
    {0, "{\"model\":\"tiny\",\"prompt\":[1,\"a\"]}", 400, "prompt", "got \"a\""},
    {0, "{\"model\":\"tiny\",\"prompt\":[\"a\",1]}", 400, "prompt", "got 1"},
    {0, "{\"model\":\"tiny\",\"prompt\":[[1],[]]}", 400, "prompt", "got []"},
    {0, "{\"model\":\"tiny\",\"prompt\":[4083]}", 400, "prompt", "from 0 to 4082"},
    {0, "{\"model\":\"tiny\",\"prompt\":[1.5]}", 400, "prompt", "got 1.5"},
    {1, "{\"model\":\"tiny\",\"messages\":[]}", 400, "messages", "non-empty"},
    {1, "{\"model\":\"tiny\",\"messages\":\"hi\"}", 400, "messages", "non-empty array"},
    {1, "{\"model\":\"tiny\",\"messages\":[5]}", 400, "messages[0]", "object"},
    {1, "{\"model\":\"tiny\",\"messages\":[{}]}", 400, "messages[0].role", "required"},
    {1, "{\"model\":\"tiny\",\"messages\":[{\"role\":\"boss\",\"content\":\"x\"}]}", 400, "messages[0].role", "got \"boss\""},
    {1, "{\"model\":\"tiny\",\"messages\":[{\"role\":\"robot\",\"content\":\"x\"}]}", 400, "messages[0].role", "got \"robot\""},
    {1, "{\"model\":\"tiny\",\"messages\":[{\"role\":\"assistant\",\"content\":null}]}", 400, "messages[0].content",
     "a string or a list"},
    {1,
     "{\"model\":\"tiny\",\"messages\":[{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"function\":{\"name\":\"f\","
     "\"arguments\":\"[1]\"}}]}]}",
     400, "messages[0].tool_calls", "the text of a JSON object"},
    {1, "{\"model\":\"tiny\",\"messages\":[{\"role\":\"user\"}]}", 400, "messages[0].content", "required"},
    {1, "{\"model\":\"tiny\",\"messages\":[{\"role\":\"user\",\"content\":null}]}", 400, "messages[0].content", "got null"},
    {1, "{\"model\":\"tiny\",\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]}", 400,
     "messages[0].content", "image_url"},
    {1, "{\"model\":\"tiny\",\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]}", 400, "messages[0].content",
     "text"},
    {1, "{\"model\":\"tiny\",\"messages\":[{\"role\":\"user\",\"content\":[\"x\"]}]}", 400, "messages[0].content", "object"},
    {1, "{\"model\":\"tiny\",\"messages\":[{\"role\":\"user\",\"content\":\"x\",\"color\":1}]}", 400, "messages[0].color",
     "unknown"},
    {1, "{\"model\":\"tiny\",\"messages\":[{\"role\":\"user\",\"content\":\"x\",\"tool_calls\":[{}]}]}", 400,
     "messages[0].tool_calls", "unless the role is assistant"},
};

static void test_zoo(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof zoo / sizeof zoo[0]; i++) {
        epx_api_request_t r;
        epx_api_error_t err = {0};
        if (parse(zoo[i].is_chat, zoo[i].body, &r, &err) >= 0) fail_msg("%s was accepted", zoo[i].body);
        expect_error(&err, zoo[i].status, zoo[i].param, zoo[i].words, zoo[i].body);
    }
}

static void test_deep_nesting(void **state) {
    enum { N = 100000 };
    char *body = malloc(N + 1);
    epx_api_request_t r;
    epx_api_error_t err = {0};
    (void)state;
    memset(body, '[', N);
    body[N] = '\0';
    assert_true(parse(0, body, &r, &err) < 0);
    assert_non_null(strstr(err.message, "deeper than 64"));
    memset(body, '{', N);
    assert_true(parse(1, body, &r, &err) < 0);
    free(body);
    assert_true(parse(0, "{\"model\":\"tiny\",\"prompt\":\"[[[[{{{{ \\\" [[[\"}", &r, &err) >=
                0); /* brackets in strings are text */
    epx_api_request_fini(&r);
}

/* ---- what is accepted ---- */

static epx_api_request_t accept(int is_chat, const char *member) {
    epx_api_request_t r;
    epx_api_error_t err = {0};
    if (parse_with(is_chat, member, &r, &err) < 0) fail_msg("%s: %s", member, err.message);
    return r;
}

static void test_defaults(void **state) {
    epx_api_request_t r = accept(0, "");
    (void)state;
    assert_int_equal(r.n, 1);
    assert_int_equal(r.max_tokens, 0);
    assert_int_equal(r.n_prompts, 1);
    assert_string_equal(r.prompts[0].text, "hi");
    assert_false(r.stream || r.has_seed || r.ignore_eos || r.include_usage || r.n_stop || r.n_stop_ids);
    assert_true(r.sampling.temperature == 0.5f && r.sampling.top_p == 0.9f && r.sampling.top_k == 20);
    epx_api_request_fini(&r);
}

static void test_sampling_values(void **state) {
    epx_api_request_t r =
        accept(0, "\"presence_penalty\":-2,\"frequency_penalty\":1.5,\"repetition_penalty\":1.25,\"min_tokens\":3,"
                  "\"logit_bias\":{\"7\":-100,\"4082\":0.5},\"logprobs\":5,\"max_tokens\":3");
    (void)state;
    assert_true(r.adjust.presence_penalty == -2 && r.adjust.frequency_penalty == 1.5f && r.adjust.repetition_penalty == 1.25f);
    assert_int_equal(r.adjust.n_bias, 2);
    assert_int_equal(r.adjust.bias[0].token, 7);
    assert_true(r.adjust.bias[0].bias == -100 && r.adjust.bias[1].token == 4082 && r.adjust.bias[1].bias == 0.5f);
    assert_true(r.min_tokens == 3 && r.logprobs && r.n_top == 5 && !r.echo);
    epx_api_request_fini(&r);
    r = accept(1, "\"logprobs\":true,\"top_logprobs\":20");
    assert_true(r.logprobs && r.n_top == 20);
    epx_api_request_fini(&r);
    r = accept(0, "\"logprobs\":0,\"echo\":false");
    assert_true(r.logprobs && r.n_top == 0);
    epx_api_request_fini(&r);
}

static void test_values(void **state) {
    epx_api_request_t r =
        accept(0, "\"temperature\":0,\"top_p\":0.25,\"top_k\":-1,\"min_p\":0.5,\"seed\":-3,\"n\":8,\"best_of\":8,"
                  "\"max_tokens\":7,\"stop\":[\"a\",\"b\\u0000c\"],\"stop_token_ids\":[0,4082],\"ignore_eos\":true,"
                  "\"stream\":true,\"stream_options\":{\"include_usage\":true},\"user\":\"me\"");
    (void)state;
    assert_true(r.sampling.temperature == 0 && r.sampling.top_p == 0.25f && r.sampling.min_p == 0.5f && r.sampling.top_k == -1);
    assert_true(r.has_seed && r.sampling.seed == (uint64_t)-3);
    assert_int_equal(r.n, 8);
    assert_int_equal(r.max_tokens, 7);
    assert_int_equal(r.n_stop, 2);
    assert_int_equal(r.stop_bytes[1], 3);
    assert_memory_equal(r.stop[1], "b\0c", 3);
    assert_int_equal(r.n_stop_ids, 2);
    assert_int_equal(r.stop_ids[1], 4082);
    assert_true(r.ignore_eos && r.stream && r.include_usage);
    epx_api_request_fini(&r);
}

/* Values that ask for nothing are as good as none. */
static void test_neutral_values(void **state) {
    static const char *const both[] = {
        "\"temperature\":null,\"top_p\":null,\"top_k\":null,\"min_p\":null,\"seed\":null,\"n\":null,\"max_tokens\":null,\"stop\":"
        "null,"
        "\"stop_token_ids\":null,\"ignore_eos\":null,\"stream\":null,\"stream_options\":null,\"user\":null",
        "\"frequency_penalty\":0,\"presence_penalty\":0.0,\"repetition_penalty\":1,\"logit_bias\":{},\"min_tokens\":0",
        ("\"frequency_penalty\":null,\"presence_penalty\":null,\"logit_bias\":null,\"logprobs\":null,\"stop\":[],"
         "\"stop_token_ids\":[]"),
        "\"response_format\":{\"type\":\"text\"},\"top_k\":0"};
    (void)state;
    for (size_t i = 0; i < 8; i++) {
        epx_api_request_t r = accept((int)(i & 1), both[i / 2]);
        assert_true(r.sampling.temperature == 0.5f && !r.has_seed && r.n == 1 && r.n_stop == 0);
        epx_api_request_fini(&r);
    }
    epx_api_request_t c =
        accept(1, "\"tools\":[],\"tool_choice\":\"none\",\"logprobs\":false,\"top_logprobs\":null,\"store\":false,"
                  "\"modalities\":[\"text\"],\"service_tier\":\"auto\",\"max_completion_tokens\":9");
    assert_int_equal(c.max_tokens, 9);
    epx_api_request_fini(&c);
    c = accept(0, "\"echo\":false,\"suffix\":\"\",\"best_of\":1");
    epx_api_request_fini(&c);
}

static void test_prompt_forms(void **state) {
    epx_api_request_t r;
    epx_api_error_t err;
    (void)state;
    assert_true(parse(0, "{\"model\":\"tiny\",\"prompt\":[\"a\",\"b\\u0000\"],\"n\":2}", &r, &err) >= 0);
    assert_int_equal(r.n_prompts, 2);
    assert_int_equal(r.prompts[1].n_bytes, 2);
    epx_api_request_fini(&r);
    assert_true(parse(0, "{\"model\":\"tiny\",\"prompt\":[1,2,3]}", &r, &err) >= 0);
    assert_int_equal(r.n_prompts, 1);
    assert_int_equal(r.prompts[0].n_ids, 3);
    assert_int_equal(r.prompts[0].ids[2], 3);
    epx_api_request_fini(&r);
    assert_true(parse(0, "{\"model\":\"tiny\",\"prompt\":[[1],[2,3]]}", &r, &err) >= 0);
    assert_int_equal(r.n_prompts, 2);
    epx_api_request_fini(&r);
}

static void test_messages(void **state) {
    epx_api_request_t r;
    epx_api_error_t err;
    (void)state;
    assert_true(parse(1,
                      "{\"model\":\"tiny\",\"messages\":[{\"role\":\"developer\",\"content\":\"be brief\"},"
                      "{\"role\":\"user\",\"name\":\"bo\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},{\"type\":\"text\","
                      "\"text\":\"b\"}]},"
                      "{\"role\":\"assistant\",\"content\":\"c\",\"refusal\":null,\"tool_calls\":null}],"
                      "\"chat_template_kwargs\":{\"enable_thinking\":false}}",
                      &r, &err) >= 0);
    assert_int_equal(json_array_size(r.messages), 3);
    assert_string_equal(json_string_value(json_object_get(json_array_get(r.messages, 0), "role")), "system");
    assert_string_equal(json_string_value(json_object_get(json_array_get(r.messages, 1), "content")), "ab");
    assert_string_equal(json_string_value(json_object_get(json_array_get(r.messages, 1), "name")), "bo");
    assert_int_equal(json_object_size(json_array_get(r.messages, 2)), 2);
    assert_true(json_is_false(json_object_get(r.template_vars, "enable_thinking")));
    epx_api_request_fini(&r);
}

/* A long, odd value must neither overflow a message nor break its UTF-8. */
static void test_long_values_in_messages(void **state) {
    char member[1600] = "\"temperature\":\"";
    epx_api_request_t r;
    epx_api_error_t err = {0};
    epx_str_t out = {0};
    (void)state;
    for (int i = 0; i < 300; i++) strcat(member, "\xe2\x82\xac");
    strcat(member, "\"");
    assert_true(parse_with(0, member, &r, &err) < 0);
    assert_int_equal(epx_api_write_error(&err, &out), EPX_OK);
    json_t *root = json_loads(out.data, 0, NULL);
    assert_non_null(root);
    assert_string_equal(json_string_value(json_object_get(json_object_get(root, "error"), "param")), "temperature");
    json_decref(root);
    epx_str_fini(&out);
}

static void test_write_repairs_utf8(void **state) {
    epx_api_head_t head = {.is_chat = 0, .id = "cmpl-1", .model = "tiny", .created = 5};
    epx_api_choice_text_t c = {.idx = 0, .text = "a\xff\0b", .n_bytes = 4, .finish_reason = "stop"};
    epx_api_usage_t u = {3, 4};
    epx_str_t out = {0};
    (void)state;
    assert_int_equal(epx_api_write_answer(&head, &c, 1, &u, &out), EPX_OK);
    assert_string_equal(
        out.data, "{\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":5,\"model\":\"tiny\",\"choices\":[{\"index\":0,"
                  "\"text\":\"a\xef\xbf\xbd\\u0000b\",\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":"
                  "{\"prompt_tokens\":3,\"completion_tokens\":4,\"total_tokens\":7}}");
    epx_str_fini(&out);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_refused_values),
                                       cmocka_unit_test(test_zoo),
                                       cmocka_unit_test(test_deep_nesting),
                                       cmocka_unit_test(test_defaults),
                                       cmocka_unit_test(test_values),
                                       cmocka_unit_test(test_neutral_values),
                                       cmocka_unit_test(test_prompt_forms),
                                       cmocka_unit_test(test_messages),
                                       cmocka_unit_test(test_long_values_in_messages),
                                       cmocka_unit_test(test_write_repairs_utf8),
                                       cmocka_unit_test(test_sampling_values)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
