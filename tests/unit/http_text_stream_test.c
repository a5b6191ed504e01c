/* Stop strings and UTF-8 borders: random texts and splits against a search of the whole text. */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/philox.h"
#include "engine/tokenizer/tokenizer.h"
#include "server/http/text_stream.h"

enum { N_RANDOM = 20000 };
static uint64_t seed, word;
static uint32_t below(uint32_t n) { return epx_philox_u32(seed, word++) % n; }

/* Length of the text before the stop string that ends first (the longest of those that end together), or n. */
static size_t cut_of(const char *text, size_t n, const char *const *stops, const size_t *bytes, int n_stops, int *out_found) {
    *out_found = 0;
    for (size_t end = 1; end <= n; end++) {
        size_t longest = 0;
        for (int i = 0; i < n_stops; i++)
            if (bytes[i] <= end && bytes[i] > longest && memcmp(text + end - bytes[i], stops[i], bytes[i]) == 0)
                longest = bytes[i];
        if (!longest) continue;
        *out_found = 1;
        return end - longest;
    }
    return n;
}

static size_t random_text(char *out, int n_pieces) {
    /* Few letters make many half matches; pieces of characters make invalid UTF-8. */
    static const char *const pieces[] = {"a",        "b",    "ab",  "aab", "c", "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80",
                                         "\xe2\x82", "\xff", "\x80"};
    int kinds = below(2) ? 8 : 11; /* half of the texts are valid */
    size_t n = 0;
    for (int i = 0; i < n_pieces; i++) {
        const char *p = pieces[below((uint32_t)kinds)];
        memcpy(out + n, p, strlen(p));
        n += strlen(p);
    }
    return n;
}

static void one_random(void) {
    char text[256], stop_text[4][32];
    const char *stops[4];
    size_t bytes[4], n = random_text(text, (int)below(40));
    int n_stops = (int)below(5), found, kept_valid = 1;
    epx_text_stream_t s = {0};
    epx_str_t got = {0}, want = {0};
    for (int i = 0; i < n_stops; i++) {
        stops[i] = stop_text[i];
        do bytes[i] = random_text(stop_text[i], 1 + (int)below(4));
        while (!epx_utf8_valid(stop_text[i], bytes[i], NULL));
    }
    assert_int_equal(epx_text_stream_init(&s, stops, bytes, n_stops), EPX_OK);
    for (size_t at = 0; at < n;) {
        size_t step = 1 + below(6), before = got.n_bytes;
        if (step > n - at) step = n - at;
        assert_int_equal(epx_text_stream_push(&s, text + at, step, &got), EPX_OK);
        kept_valid &= got.n_bytes == before || epx_utf8_valid(got.data + before, got.n_bytes - before, NULL);
        at += step;
    }
    assert_int_equal(epx_text_stream_finish(&s, &got), EPX_OK);
    size_t cut = cut_of(text, n, stops, bytes, n_stops, &found);
    assert_int_equal(epx_utf8_append_lossy(&want, text, cut), EPX_OK);
    assert_int_equal(s.stopped, found);
    assert_true(kept_valid);
    assert_int_equal(got.n_bytes, want.n_bytes);
    assert_memory_equal(epx_str_z(&got), epx_str_z(&want), want.n_bytes);
    epx_text_stream_fini(&s);
    epx_str_fini(&got);
    epx_str_fini(&want);
}

static void test_random_splits(void **state) {
    const char *env = getenv("EPX_SEED");
    (void)state;
    seed = env ? strtoull(env, NULL, 0) : 7;
    printf("EPX_SEED=%llu\n", (unsigned long long)seed);
    for (int i = 0; i < N_RANDOM; i++) one_random();
}

static void push(epx_text_stream_t *s, const char *bytes, const char *want) {
    epx_str_t out = {0};
    assert_int_equal(epx_text_stream_push(s, bytes, strlen(bytes), &out), EPX_OK);
    assert_string_equal(epx_str_z(&out), want);
    epx_str_fini(&out);
}

/* What is held back, and no longer than needed. */
static void test_holds_back(void **state) {
    const char *stops[] = {"END"};
    size_t bytes[] = {3};
    epx_text_stream_t s = {0};
    epx_str_t rest = {0};
    (void)state;
    assert_int_equal(epx_text_stream_init(&s, stops, bytes, 1), EPX_OK);
    push(&s, "one E", "one ");
    push(&s, "N", "");
    push(&s, "E", "EN");
    push(&s, "\xe2\x82", "E");
    push(&s, "\xac", "\xe2\x82\xac");
    push(&s, " EN", " ");
    assert_int_equal(epx_text_stream_finish(&s, &rest), EPX_OK);
    assert_string_equal(epx_str_z(&rest), "EN");
    epx_str_fini(&rest);
    epx_text_stream_fini(&s);
}

static void test_stops_and_drops(void **state) {
    const char *stops[] = {"\n\n", "lo w"};
    size_t bytes[] = {2, 4};
    epx_text_stream_t s = {0};
    (void)state;
    assert_int_equal(epx_text_stream_init(&s, stops, bytes, 2), EPX_OK);
    push(&s, "hel", "he");
    push(&s, "lo", "l");
    push(&s, " world", "");
    assert_true(s.stopped);
    push(&s, "more", "");
    epx_text_stream_fini(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_random_splits), cmocka_unit_test(test_holds_back),
                                       cmocka_unit_test(test_stops_and_drops)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
