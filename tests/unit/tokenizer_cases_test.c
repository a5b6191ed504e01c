/* Four published tokenizers on 2,000 strings each, with ids stored from the tokenizers package (tests/tools/
 * make_tokenizer_cases.py), and the listed differences. Exit 77 when xz is not installed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "engine/tokenizer/tokenizer.h"

static json_t *cases; /* array of {t, n, ids by tokenizer} */

/* What `xz -dc path` prints. */
static epx_str_t unpack(const char *path) {
    epx_str_t s = {0};
    char command[1024], block[65536];
    size_t n;
    FILE *f;
    snprintf(command, sizeof command, "xz -dc '%s'", path);
    f = popen(command, "r");
    assert_non_null(f);
    while ((n = fread(block, 1, sizeof block, f)) > 0) assert_int_equal(epx_str_append(&s, block, n), EPX_OK);
    assert_int_equal(pclose(f), 0);
    return s;
}

static epx_tokenizer_t *load(const char *name) {
    char path[1024];
    epx_tokenizer_t *t = NULL;
    epx_str_t s;
    snprintf(path, sizeof path, EPX_TEST_DATA "/tokenizers/%s/tokenizer.json.xz", name);
    s = unpack(path);
    if (epx_tokenizer_create_from_memory(name, s.data, s.n_bytes, &t) < 0) fail_msg("%s", epx_error_message());
    epx_str_fini(&s);
    return t;
}

static int load_cases(void **state) {
    epx_str_t s = unpack(EPX_TEST_DATA "/tokenizer_cases/cases.jsonl.xz");
    char *line, *next;
    (void)state;
    cases = json_array();
    for (line = s.data; line < s.data + s.n_bytes; line = next + 1) {
        next = strchr(line, '\n');
        json_array_append_new(cases, json_loadb(line, (size_t)(next - line), JSON_ALLOW_NUL, NULL));
    }
    epx_str_fini(&s);
    return 0;
}

static int free_cases(void **state) {
    (void)state;
    json_decref(cases);
    return 0;
}

static int same_ids(const json_t *want, const int32_t *ids, size_t n) {
    size_t i;
    for (i = 0; i < n && i < json_array_size(want); i++) {
        if (json_integer_value(json_array_get(want, i)) != ids[i]) return 0;
    }
    return json_array_size(want) == n;
}

/* 1: decode(ids) is text. */
static int decodes_to(const epx_tokenizer_t *t, const int32_t *ids, size_t n, const json_t *text) {
    epx_str_t s = {0};
    int ok = epx_tokenizer_decode(t, ids, n, 0, &s) == EPX_OK && s.n_bytes == json_string_length(text) &&
             memcmp(epx_str_z(&s), json_string_value(text), s.n_bytes) == 0;
    epx_str_fini(&s);
    return ok;
}

/* Ids as stored, and decode(encode(x)) is NFC(x) where the tokenizer normalizes, x where it does not. */
static void check_all(const char *name, int nfc) {
    epx_tokenizer_t *t = load(name);
    json_t *row, *text, *want, *back;
    size_t i, n, bad_ids = 0, bad_text = 0;
    int32_t *ids;
    json_array_foreach(cases, i, row) {
        text = json_object_get(row, "t");
        want = json_object_get(row, name);
        if (want == NULL) want = json_object_get(row, "qwen2_5"); /* left out where qwen3 is the same */
        back = nfc && json_object_get(row, "n") ? json_object_get(row, "n") : text;
        ids = NULL;
        if (epx_tokenizer_encode(t, json_string_value(text), json_string_length(text), &ids, &n) < 0)
            fail_msg("%s, string %zu: %s", name, i, epx_error_message());
        if (!same_ids(want, ids, n)) {
            bad_ids++;
            print_error("%s, string %zu: other ids: %s\n", name, i, json_string_value(text));
        } else if (!decodes_to(t, ids, n, back)) {
            bad_text++;
            print_error("%s, string %zu: decodes to another text: %s\n", name, i, json_string_value(text));
        }
        free(ids);
    }
    epx_tokenizer_destroy(t);
    assert_int_equal(i, 2000);
    assert_int_equal(bad_ids, 0);
    assert_int_equal(bad_text, 0);
}

static void test_qwen2_5(void **state) {
    (void)state;
    check_all("qwen2_5", 1);
}
static void test_qwen3(void **state) {
    (void)state;
    check_all("qwen3", 1);
}
static void test_deepseek_v3(void **state) {
    (void)state;
    check_all("deepseek_v3", 0);
}
static void test_gptoss(void **state) {
    (void)state;
    check_all("gptoss", 0);
}

/* The listed differences are real, no more and no less than what the list says, and lose no text. */
static void test_differences(void **state) {
    json_t *file = json_load_file(EPX_TEST_DATA "/tokenizer_cases/differences.json", 0, NULL), *row, *want;
    const char *const name[] = {"qwen3", "deepseek_v3"};
    size_t i, k, n, seen = 0;
    int32_t *ids;
    (void)state;
    assert_non_null(file);
    for (k = 0; k < 2; k++) {
        epx_tokenizer_t *t = load(name[k]);
        json_array_foreach(file, i, row) {
            json_t *text = json_object_get(row, "text");
            want = json_object_get(json_object_get(row, "ids"), name[k]);
            if (want == NULL) continue;
            seen++;
            assert_int_equal(epx_tokenizer_encode(t, json_string_value(text), json_string_length(text), &ids, &n), EPX_OK);
            if (same_ids(want, ids, n))
                fail_msg("%s: %s is listed and does not differ", name[k], json_string_value(json_object_get(row, "point")));
            assert_true(decodes_to(t, ids, n, k == 0 ? json_object_get(row, "nfc") : text));
            free(ids);
        }
        epx_tokenizer_destroy(t);
    }
    assert_true(seen > 50);
    json_decref(file);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_qwen2_5), cmocka_unit_test(test_qwen3),
                                       cmocka_unit_test(test_deepseek_v3), cmocka_unit_test(test_gptoss),
                                       cmocka_unit_test(test_differences)};
    if (system("xz --version >/dev/null 2>&1") != 0) {
        printf("SKIP: xz is not installed\n");
        return 77;
    }
    return cmocka_run_group_tests(tests, load_cases, free_cases);
}
