/* The command line: parsing, messages, checks of settings. Expected messages are written out here. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "app/settings.h"

enum { MAX_ARGS = 24 };

static epx_settings_t got;
static epx_str_t problems;

/* Parse one line of words separated by single spaces. */
static void parse(epx_command_t command, const char *line) {
    static char copy[1024];
    char *argv[MAX_ARGS], *save = NULL;
    int argc = 0;
    epx_str_fini(&problems);
    epx_settings_init(&got);
    snprintf(copy, sizeof copy, "%s", line);
    for (char *w = strtok_r(copy, " ", &save); w && argc < MAX_ARGS; w = strtok_r(NULL, " ", &save)) argv[argc++] = w;
    assert_int_equal(epx_options_parse(&epx_settings_table, (int)command, 0, argc, argv, &got, &problems), EPX_OK);
}

static void parse_ok(epx_command_t command, const char *line) {
    parse(command, line);
    assert_string_equal(epx_str_z(&problems), "");
}

static void parse_bad(epx_command_t command, const char *line, const char *text) {
    parse(command, line);
    assert_string_equal(epx_str_z(&problems), text);
}

static void test_forms(void **state) {
    (void)state;
    parse_ok(EPX_CMD_SERVE, "--tp 4 --dp=2 --enable-dp-attention --model-path /m --moe-a2a-backend=pplx");
    assert_int_equal(got.tp, 4);
    assert_int_equal(got.dp, 2);
    assert_int_equal(got.enable_dp_attention, 1);
    assert_string_equal(got.model_path, "/m");
    assert_string_equal(got.moe_a2a_backend, "pplx");
    parse_ok(EPX_CMD_SERVE, "--tp-size 3 --tp-s 2 --enable-dp-a --model x --po 1 --ep 2 --max-r 8 --chunked-p -1 --cuda-graph-bs "
                            "1 2 4 --trust-r --attention-backend fa3");
    assert_int_equal(got.tp, 2);
    assert_int_equal(got.enable_dp_attention, 1);
    assert_string_equal(got.model_path, "x");
    assert_int_equal(got.port, 1);
    assert_int_equal(got.ep, 2);
    assert_int_equal(got.max_running_requests, 8);
    assert_int_equal(got.chunked_prefill_size, -1);
    epx_str_t notes = {0};
    assert_int_equal(epx_options_notes(&epx_settings_table, &got, &notes), EPX_OK);
    assert_string_equal(epx_str_z(&notes), "--trust-remote-code: no effect: no code of a checkpoint is ever run\n"
                                           "--cuda-graph-bs: no effect on the CPU\n"
                                           "--attention-backend: no effect: there is one attention implementation\n");
    epx_str_fini(&notes);
    parse_ok(EPX_CMD_GENERATE, "--prompt --tp --top-k -1 --temp 0.5 --min-p=0.25 --chat=a=b");
    assert_string_equal(got.prompt, "--tp");
    assert_int_equal(got.top_k, -1);
    assert_true(got.temperature == 0.5 && got.min_p == 0.25);
    assert_string_equal(got.chat, "a=b");
    parse_ok(EPX_CMD_INFO, "-h");
    assert_int_equal(got.help, 1);
    parse_ok(EPX_CMD_SERVE, "");
    assert_int_equal(got.port, 30000);
}

static void test_mistakes(void **state) {
    (void)state;
    parse_bad(EPX_CMD_SERVE, "--quantization", "unknown flag --quantization\n"); /* nothing is near */
    parse_bad(EPX_CMD_SERVE, "--modle-path x", "unknown flag --modle-path; did you mean --model-path?\n");
    parse_bad(EPX_CMD_SERVE, "--enable-dp-atention --tp 1",
              "unknown flag --enable-dp-atention; did you mean --enable-dp-attention?\n");
    parse_bad(EPX_CMD_SERVE, "--moe-a2a-backend foo",
              "--moe-a2a-backend foo: unknown value; legal values: auto, none, pplx, deepep\n");
    parse_bad(EPX_CMD_SERVE, "--moe-a2a-backend nixl",
              "--moe-a2a-backend nixl: known, but not built yet; legal values: auto, none, pplx, deepep\n");
    parse_bad(EPX_CMD_SERVE, "--tp 65", "--tp-size 65: legal values: integers from 1 to 64\n");
    parse_bad(EPX_CMD_SERVE, "--tp two", "--tp-size two: legal values: integers from 1 to 64\n");
    parse_bad(EPX_CMD_SERVE, "--tp=", "--tp-size : legal values: integers from 1 to 64\n");
    parse_bad(EPX_CMD_GENERATE, "--temperature nan", "--temperature nan: legal values: numbers from 0 to 100\n");
    parse_bad(EPX_CMD_SERVE, "--port", "--port needs a value\n");
    parse_bad(EPX_CMD_SERVE, "--enable-dp-attention=1", "--enable-dp-attention=1: this flag takes no value\n");
    parse_bad(EPX_CMD_SERVE, "--m x",
              "--m is the beginning of more than one flag: --model-path, --moe-a2a-backend, --moe-runner-backend, "
              "--max-running-requests, --max-prefill-tokens, --mem-fraction-static, --max-queued-requests, --moe-dense-tp-size, "
              "--max-total-tokens\n");
    parse_bad(EPX_CMD_GENERATE, "--port 1",
              "--port is not a flag of this command; it belongs to `epx serve`, `epx demo`, `epx eval`\n");
    parse_bad(EPX_CMD_INFO, "model", "unexpected argument \"model\": settings are given as --name value\n");
    parse_bad(EPX_CMD_SERVE, "--", "unexpected argument \"--\": settings are given as --name value\n");
    parse_bad(EPX_CMD_SERVE, "--tp 0 --port x --bogus 1 --dp 2",
              "--tp-size 0: legal values: integers from 1 to 64\n"
              "--port x: legal values: integers from 0 to 65535\nunknown flag --bogus\n");
    assert_int_equal(got.dp, 2);
}

/* Every part must be named, and nothing else reported. */
static void check(epx_command_t command, const char *line, int n_lines, const char *a, const char *b) {
    int n = 0;
    parse_ok(command, line);
    assert_int_equal(epx_settings_validate(&got, command, &problems), EPX_OK);
    for (const char *p = epx_str_z(&problems); *p; p++) n += *p == '\n';
    if (n != n_lines) fail_msg("%s: %d problems: %s", line, n, epx_str_z(&problems));
    if (a) assert_non_null(strstr(problems.data, a));
    if (b) assert_non_null(strstr(problems.data, b));
}

static void test_validate(void **state) {
    (void)state;
    check(EPX_CMD_SERVE, "--model-path /", 0, NULL, NULL);
    check(EPX_CMD_INFO, "", 0, NULL, NULL);
    check(EPX_CMD_SERVE, "--model-path / --tp 2 --dp 2 --ep 2 --enable-dp-attention --moe-a2a-backend pplx", 0, NULL, NULL);
    check(EPX_CMD_SERVE, "--model-path / --tp 3 --dp 2 --enable-dp-attention", 1, "--tp-size 3 --dp-size 2",
          "legal values of --dp-size with --tp-size 3: 1, 3");
    check(EPX_CMD_SERVE, "--model-path / --tp 2", 0, NULL, NULL);
    check(EPX_CMD_SERVE, "--model-path / --tp 4 --dp 2 --enable-dp-attention", 0, NULL, NULL);
    check(EPX_CMD_SERVE, "--model-path / --tp 2 --dp 2", 0, NULL, NULL); /* replicas */
    check(EPX_CMD_SERVE, "--model-path / --tp 4 --nnodes 2 --node-rank 1 --dist-init-addr h:1", 0, NULL, NULL);
    check(EPX_CMD_SERVE, "--model-path / --tp 2 --dp 3 --nnodes 4 --node-rank 4", 3, "--nnodes 4: 6 ranks do not divide",
          "legal values: 1, 2, 3, 6");
    check(EPX_CMD_SERVE, "--model-path / --tp 3 --dp 2 --max-running-requests 1 --chunked-prefill-size 1", 0, NULL, NULL);
    check(EPX_CMD_SERVE, "--model-path / --tp 8 --dp 9", 1, "--dp-size 9 without --enable-dp-attention: 9 replicas",
          "72 ranks; legal values of --dp-size: 1 to 8");
    check(EPX_CMD_SERVE, "--model-path / --ep 2", 1, "--ep-size 2", "with --tp-size 1: 1");
    check(EPX_CMD_SERVE, "--model-path / --moe-a2a-backend pplx", 0, NULL, NULL); /* SGLang wants two DP ranks */
    check(EPX_CMD_SERVE, "--model-path / --moe-a2a-backend pplx --deepep-mode normal", 1, "--deepep-mode normal",
          "legal values: low_latency, auto");
    check(EPX_CMD_SERVE, "--model-path / --deepep-mode normal", 0, NULL, NULL); /* only a note */
    check(EPX_CMD_SERVE, "--model-path / --moe-a2a-backend deepep --deepep-mode normal", 0, NULL, NULL);
    check(EPX_CMD_SERVE, "--model-path / --tp 4 --ep 2 --moe-a2a-backend deepep", 0, NULL, NULL); /* SGLang: only all ranks */
    check(EPX_CMD_SERVE, "--model-path / --tp 4 --dp 4 --enable-dp-attention --ep 1 --moe-a2a-backend pplx", 0, NULL, NULL);
    check(EPX_CMD_SERVE, "--model-path / --tp 4 --ep 3", 1, "--ep-size 3", "with --tp-size 4: 1, 2, 4");
    check(EPX_CMD_SERVE, "--model-path / --tp 12 --dp 2 --enable-dp-attention --ep 4", 1, "groups of 6 that share attention",
          "with --tp-size 12: 1, 2, 3, 6, 12");
    check(EPX_CMD_SERVE, "--model-path / --enable-dp-lm-head", 1, "--enable-dp-lm-head", "--enable-dp-attention");
    check(EPX_CMD_SERVE, "--model-path / --moe-dense-tp-size 2", 1, "--moe-dense-tp-size 2", "legal value: 1");
    check(EPX_CMD_SERVE, "--model-path / --disaggregation-mode decode", 1, "--disaggregation-mode decode", "not built yet");
    check(EPX_CMD_SERVE, "--model-path / --tp 2 --dp 2 --enable-dp-attention --chunked-prefill-size 1", 1,
          "--chunked-prefill-size 1", "2 to 131072");
    check(EPX_CMD_SERVE, "--model-path /no/such/dir", 1, "--model-path /no/such/dir: No such file", NULL);
    check(EPX_CMD_SERVE, "", 1, "--model-path is missing", NULL);
    check(EPX_CMD_GENERATE, "--model-path /", 1, "one of --prompt TEXT and --chat TEXT", NULL);
    check(EPX_CMD_GENERATE, "--model-path / --prompt a --chat b", 1, "only one of", NULL);
    check(EPX_CMD_GENERATE, "--model-path / --prompt a --top-p 0", 1, "--top-p 0", NULL);
    check(EPX_CMD_SERVE, "--tp 3 --dp 2 --enable-dp-attention --ep 2 --moe-a2a-backend pplx", 3, "--ep-size 2",
          "--model-path is missing");
}

/* The token cap: derived when it is not set; else it must hold every kind of step. */
static void test_cap(void **state) {
    static const char sglang[] = "SGLANG_PPLX_NUM_MAX_DISPATCH_TOKENS_PER_RANK", own[] = "EPX_NUM_MAX_DISPATCH_TOKENS_PER_RANK";
#define FOUR "--model-path / --tp 4 --dp 4 --enable-dp-attention --moe-a2a-backend pplx "
    (void)state;
    setenv(sglang, "512", 1); /* the seed's launch line */
    check(EPX_CMD_SERVE, FOUR "--chunked-prefill-size 512 --max-running-requests 2048", 0, NULL, NULL);
    assert_int_equal(epx_settings_step_tokens(&got, 0), 512);
    check(EPX_CMD_SERVE, FOUR "--chunked-prefill-size 512 --max-running-requests 2048 --enable-mixed-chunk", 1, sglang, "640");
    check(EPX_CMD_SERVE, FOUR "--chunked-prefill-size 4096", 1, sglang, "1024 or more");
    check(EPX_CMD_SERVE, FOUR "--chunked-prefill-size 4096 --disaggregation-mode decode", 1, "--disaggregation-mode",
          "not built");
    setenv(own, "1024", 1); /* ours goes first */
    check(EPX_CMD_SERVE, FOUR "--chunked-prefill-size 4096", 0, NULL, NULL);
    setenv(own, "many", 1);
    check(EPX_CMD_SERVE, FOUR, 1, own, "integers from 1");
    unsetenv(own);
    unsetenv(sglang);
    check(EPX_CMD_SERVE, FOUR "--chunked-prefill-size 65536 --max-running-requests 4096", 0, NULL, NULL);
#undef FOUR
}

/* Every flag of a command is in its help, and no line is wider than a terminal. */
static void test_help(void **state) {
    (void)state;
    for (int c = 0; c < EPX_CMD_COUNT; c++) {
        epx_str_t text = {0};
        assert_int_equal(epx_page_help(epx_settings_page((epx_command_t)c), &text), EPX_OK);
        for (size_t i = 0; i < epx_settings_table.n_options; i++) {
            char name[64];
            snprintf(name, sizeof name, "    --%s", epx_settings_table.options[i].name);
            assert_true((strstr(text.data, name) != NULL) == ((epx_settings_table.options[i].commands >> c) & 1u));
        }
        for (const char *p = strstr(text.data, "DESCRIPTION"), *end; p && (end = strchr(p, '\n')); p = end + 1)
            if (end - p > 80) fail_msg("line of %d columns: %.*s", (int)(end - p), (int)(end - p), p);
        epx_str_fini(&text);
    }
}

static int finish(void **state) {
    (void)state;
    epx_str_fini(&problems);
    return 0;
}

int main(void) {
    static const struct CMUnitTest tests[] = {cmocka_unit_test(test_forms), cmocka_unit_test(test_mistakes),
                                              cmocka_unit_test(test_validate), cmocka_unit_test(test_cap),
                                              cmocka_unit_test(test_help)};
    return cmocka_run_group_tests(tests, NULL, finish);
}
