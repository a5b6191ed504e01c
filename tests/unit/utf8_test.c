/* UTF-8 helpers of the tokenizer: borders, validity, repair; and NFC against known pairs and for linear time. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "engine/tokenizer/nfc.h"
#include "engine/tokenizer/tokenizer.h"
#include "engine/tokenizer/utf8.h"

static void test_valid(void **state) {
    static const struct {
        const char *text;
        size_t n, bad; /* bad == n: valid */
    } row[] = {{"", 0, 0},
               {"abc\0d", 5, 5},
               {"\xC3\xA9", 2, 2},
               {"12345678\xC3", 9, 8},
               {"a\xC0\x80", 3, 1},
               {"\xE0\x9F\xBF", 3, 0},
               {"\xED\xA0\x80", 3, 0},
               {"\xED\x9F\xBF", 3, 3},
               {"\xF0\x8F\xBF\xBF", 4, 0},
               {"\xF4\x8F\xBF\xBF", 4, 4},
               {"\xF4\x90\x80\x80", 4, 0},
               {"ab\xFF", 3, 2},
               {"\x80", 1, 0}};
    size_t i, bad;
    (void)state;
    for (i = 0; i < sizeof row / sizeof *row; i++) {
        bad = row[i].n;
        assert_int_equal(epx_utf8_valid(row[i].text, row[i].n, &bad), row[i].bad == row[i].n);
        assert_int_equal(bad, row[i].bad);
    }
}

static void test_complete_prefix(void **state) {
    static const struct {
        const char *text;
        size_t n, want;
    } row[] = {{"", 0, 0},
               {"a", 1, 1},
               {"a\xC3", 2, 1},
               {"a\xC3\xA9", 3, 3},
               {"\xE2\x82", 2, 0},
               {"x\xF0\x9F\x98", 4, 1},
               {"x\xF0\x9F\x98\x80", 5, 5},
               {"\xE0\x80", 2, 2}, /* can never become a character */
               {"\xF4\x90", 2, 2}, /* beyond U+10FFFF */
               {"\x80\x80\x80\x80", 4, 4},
               {"\xFF", 1, 1},
               {"\xC0", 1, 1},
               {"\xF0\x9F\x98\x80\x80", 5, 5}};
    size_t i;
    (void)state;
    for (i = 0; i < sizeof row / sizeof *row; i++) assert_int_equal(epx_utf8_complete_prefix(row[i].text, row[i].n), row[i].want);
}

/* Expected strings: Python's bytes.decode("utf-8", "replace"). */
static void test_lossy(void **state) {
    static const char *const row[][2] = {{"abc", "abc"},
                                         {"a\xFFz", "a\xEF\xBF\xBDz"},
                                         {"\xE2\x82z", "\xEF\xBF\xBDz"},
                                         {"\xF0\x9F\x98", "\xEF\xBF\xBD"},
                                         {"\xE0\x80\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"},
                                         {"\xED\xA0\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"},
                                         {"\xF0\x9F\xE2\x82\xAC", "\xEF\xBF\xBD\xE2\x82\xAC"}};
    size_t i;
    (void)state;
    for (i = 0; i < sizeof row / sizeof *row; i++) {
        epx_str_t s = {0};
        assert_int_equal(epx_utf8_append_lossy(&s, row[i][0], strlen(row[i][0])), EPX_OK);
        assert_string_equal(epx_str_z(&s), row[i][1]);
        epx_str_fini(&s);
    }
}

/* A stream cut anywhere is never stuck: what is held back is under 4 bytes, and the parts join to the whole. */
static void test_streaming(void **state) {
    static const char text[] = "aé€😀\xFF\xE2\x82z\xF0\x9F";
    size_t n = sizeof text - 1, cut, done;
    (void)state;
    for (cut = 0; cut <= n; cut++) {
        done = epx_utf8_complete_prefix(text, cut);
        assert_true(done <= cut && cut - done < 4);
    }
}

static void test_nfc(void **state) {
    static const char *const row[][2] = {{"e\u0301", "\u00e9"},
                                         {"\u212b", "\u00c5"},
                                         {"a\u0323\u0307", "\u1ea1\u0307"},
                                         {"a\u0307\u0323", "\u1ea1\u0307"},
                                         {"\u1100\u1161\u11a8", "\uac01"},
                                         {"\u0958", "\u0915\u093c"}, /* excluded from composition */
                                         {"\u0344", "\u0308\u0301"},
                                         {"\u1f82", "\u1f82"},
                                         {"plain", "plain"}};
    size_t i;
    (void)state;
    for (i = 0; i < sizeof row / sizeof *row; i++) {
        epx_str_t s = {0};
        assert_int_equal(epx_nfc(row[i][0], strlen(row[i][0]), &s), EPX_OK);
        assert_string_equal(epx_str_z(&s), row[i][1]);
        epx_str_fini(&s);
    }
    assert_true(epx_nfc_is_plain("caf\u00e9 \u02ff", 8));
    assert_false(epx_nfc_is_plain("e\u0301", 3));
}

/* 200,000 marks in the worst order: an exchange sort needs 10^10 steps. */
static void test_nfc_is_linear(void **state) {
    const size_t n = 200000;
    char *text = malloc(n * 2 + 1);
    epx_str_t s = {0};
    uint64_t start = epx_now_ns();
    size_t i;
    (void)state;
    assert_non_null(text);
    text[0] = 'a';
    for (i = 0; i < n; i++) memcpy(text + 1 + 2 * i, i % 2 ? "\u0316" : "\u0315", 2); /* classes 220 and 232 */
    assert_int_equal(epx_nfc(text, n * 2 + 1, &s), EPX_OK);
    assert_int_equal(s.n_bytes, n * 2 + 1);
    assert_memory_equal(s.data + 1, "\u0316\u0316", 4);
    assert_memory_equal(s.data + s.n_bytes - 4, "\u0315\u0315", 4);
    assert_true(epx_now_ns() - start < 5000000000u);
    epx_str_fini(&s);
    free(text);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_valid), cmocka_unit_test(test_complete_prefix),
                                       cmocka_unit_test(test_lossy), cmocka_unit_test(test_streaming),
                                       cmocka_unit_test(test_nfc),   cmocka_unit_test(test_nfc_is_linear)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
