/* base: number formats against brute force over every code, strings, checked arithmetic, Philox against published vectors. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/checked.h"
#include "base/half.h"
#include "base/philox.h"
#include "base/status.h"
#include "base/str.h"

/* Nearest code by searching all codes of a format: independent of the conversion's own arithmetic. */
static int nearest(double a, int n_codes, float (*decode)(uint32_t), int *out_tie) {
    int best = 0;
    double bd = 1e300;
    *out_tie = -1;
    for (int c = 0; c < n_codes; c++) {
        double d = fabs((double)decode((uint32_t)c) - a);
        if (d < bd) bd = d, best = c, *out_tie = -1;
        else if (d == bd) *out_tie = c;
    }
    return best;
}
static float dec_e4m3(uint32_t c) { return epx_e4m3_to_f32((uint8_t)c); }

static void e4m3_rounds_to_nearest_even(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 60000; i++) {
        float f = ldexpf(epx_philox_unit(7, i) + 1.0f, (int)(epx_philox_u32(8, i) % 24) - 13);
        int tie, c = nearest(f, 0x7F, dec_e4m3, &tie);
        if (tie >= 0 && (c & 1)) c = tie;
        assert_int_equal(epx_f32_to_e4m3(f), c);
        assert_int_equal(epx_f32_to_e4m3(-f), c | 0x80);
    }
    for (int c = 0; c < 0x7F; c++) { /* every code, and every midpoint goes to the even code */
        assert_int_equal(epx_f32_to_e4m3(dec_e4m3((uint32_t)c)), c);
        if (c < 0x7E) {
            float mid = (dec_e4m3((uint32_t)c) + dec_e4m3((uint32_t)c + 1)) / 2;
            assert_int_equal(epx_f32_to_e4m3(mid), c & 1 ? c + 1 : c);
        }
    }
    assert_int_equal(epx_f32_to_e4m3(1e9f), 0x7E);
    assert_int_equal(epx_f32_to_e4m3(-INFINITY), 0xFE);
    assert_int_equal(epx_f32_to_e4m3(NAN), 0x7F);
    assert_int_equal(epx_f32_to_e4m3(-0.0f), 0x80);
}

static void f16_round_trip_and_midpoints(void **state) {
    (void)state;
    for (uint32_t c = 0; c < 0x7C00; c++) {
        float f = epx_f16_to_f32((uint16_t)c);
        assert_int_equal(epx_f32_to_f16(f), c);
        assert_int_equal(epx_f32_to_f16(-f), c | 0x8000);
        if (c < 0x7BFF) {
            float g = epx_f16_to_f32((uint16_t)(c + 1)), mid = (f + g) / 2;
            assert_int_equal(epx_f32_to_f16(mid), c & 1 ? c + 1 : c);
            assert_int_equal(epx_f32_to_f16(nextafterf(mid, 0)), c);
            assert_int_equal(epx_f32_to_f16(nextafterf(mid, 1e9f)), c + 1);
        }
    }
    assert_int_equal(epx_f32_to_f16(65519.9f), 0x7BFF);
    assert_int_equal(epx_f32_to_f16(65520.0f), 0x7C00);
    assert_int_equal(epx_f32_to_f16(NAN), 0x7FFF);
    assert_int_equal(epx_f32_to_f16(-INFINITY), 0xFC00);
}

static void bf16_rounds_to_nearest_even(void **state) {
    (void)state;
    assert_int_equal(epx_f32_to_bf16(1.0f), 0x3F80);
    assert_int_equal(epx_f32_to_bf16(epx_bits_f32(0x3F808000u)), 0x3F80);
    assert_int_equal(epx_f32_to_bf16(epx_bits_f32(0x3F818000u)), 0x3F82);
    assert_int_equal(epx_f32_to_bf16(epx_bits_f32(0x3F808001u)), 0x3F81);
    assert_int_equal(epx_f32_to_bf16(-NAN), 0x7FFF);
    assert_int_equal(epx_f32_to_bf16(3.4e38f), 0x7F80);
}

static void philox_known_answers(void **state) { /* Random123 kat_vectors, philox4x32 10 rounds */
    (void)state;
    uint32_t c0[4] = {0, 0, 0, 0}, k0[2] = {0, 0}, o[4];
    epx_philox4x32(c0, k0, o);
    assert_int_equal(o[0], 0x6627e8d5u);
    assert_int_equal(o[1], 0xe169c58du);
    assert_int_equal(o[2], 0xbc57ac4cu);
    assert_int_equal(o[3], 0x9b00dbd8u);
    uint32_t c1[4] = {0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}, k1[2] = {0xa4093822u, 0x299f31d0u};
    epx_philox4x32(c1, k1, o);
    assert_int_equal(o[0], 0xd16cfe09u);
    assert_int_equal(o[3], 0x24126ea1u);
}

static void strings_and_sizes(void **state) {
    (void)state;
    epx_str_t s = {0};
    size_t r = 5;
    assert_int_equal(epx_str_printf(&s, "%d-%s", 7, "x"), EPX_OK);
    assert_int_equal(epx_str_append(&s, "a\0b", 3), EPX_OK);
    assert_int_equal(s.n_bytes, 6);
    assert_memory_equal(s.data, "7-xa\0b", 7);
    epx_str_fini(&s);
    assert_false(epx_mul_size((size_t)-1, 2, &r));
    assert_int_equal(r, 5);
    assert_true(epx_round_up_size(65, 64, &r));
    assert_int_equal(r, 128);
    assert_false(epx_round_up_size((size_t)-3, 64, &r));
    assert_int_equal(epx_edit_distance("--temprature", "--temperature"), 1);
    assert_int_equal(epx_edit_distance("", "abc"), 3);
}

static void errors_keep_context(void **state) {
    (void)state;
    assert_int_equal(epx_fail(EPX_ERR_ARG, "hidden is %d; legal: >= 1", 0), EPX_ERR_ARG);
    assert_int_equal(epx_fail_context(EPX_ERR_ARG, "config.json"), EPX_ERR_ARG);
    assert_string_equal(epx_error_message(), "config.json: hidden is 0; legal: >= 1");
    assert_int_equal(epx_fail(EPX_ERR_IO, "%s", epx_error_message()), EPX_ERR_IO);
    assert_string_equal(epx_error_message(), "config.json: hidden is 0; legal: >= 1");
}

/* The system's words, not a number; and no file type that could block. */
static void unreadable_files_are_named(void **state) {
    char dir[] = "/tmp/epx-base-XXXXXX", path[64], *data;
    size_t n_bytes;
    (void)state;
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/f", dir);
    assert_int_equal(epx_read_file(path, 10, &data, &n_bytes), EPX_ERR_IO);
    assert_non_null(strstr(epx_error_message(), path));
    assert_non_null(strstr(epx_error_message(), "No such file or directory"));
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(epx_read_file(path, 10, &data, &n_bytes), EPX_ERR_IO);
    assert_non_null(strstr(epx_error_message(), "not a regular file"));
    assert_int_equal(unlink(path), 0);
    assert_int_equal(epx_read_file(dir, 10, &data, &n_bytes), EPX_ERR_IO);
    assert_non_null(strstr(epx_error_message(), "not a regular file"));
    assert_int_equal(rmdir(dir), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(e4m3_rounds_to_nearest_even), cmocka_unit_test(f16_round_trip_and_midpoints),
        cmocka_unit_test(bf16_rounds_to_nearest_even), cmocka_unit_test(philox_known_answers),
        cmocka_unit_test(strings_and_sizes),           cmocka_unit_test(errors_keep_context),
        cmocka_unit_test(unreadable_files_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
