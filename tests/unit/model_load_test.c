/* Safetensors headers, mapping of checkpoints, dummy weights. Files are made by the test in a temporary directory; what is mapped
 * is compared with the bytes written. */
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/half.h"
#include "base/memory.h"
#include "engine/model/load/checkpoint.h"
#include "engine/model/load/dummy.h"
#include "engine/model/load/safetensors.h"

enum { PATH = 512 };

static char g_dir[PATH];

static void path_of(const char *name, char out[PATH]) { assert_true(snprintf(out, PATH, "%s/%s", g_dir, name) < PATH); }

static void remove_file(const char *name) {
    char p[PATH];
    path_of(name, p);
    unlink(p);
}

static int setup(void **state) {
    (void)state;
    snprintf(g_dir, sizeof g_dir, "/tmp/epx-load-XXXXXX");
    return mkdtemp(g_dir) ? 0 : -1;
}

static int teardown(void **state) {
    (void)state;
    remove_file("model.safetensors");
    remove_file("model.safetensors.index.json");
    remove_file("a.safetensors");
    remove_file("b.safetensors");
    return rmdir(g_dir);
}

/* header text, n_data bytes 0, 1, 2, ... after it. n_header overrides the length word unless 0. */
static void write_file(const char *name, const char *header, uint64_t n_data, uint64_t n_header) {
    char p[PATH];
    uint64_t n = strlen(header);
    uint8_t word[8];
    path_of(name, p);
    FILE *f = fopen(p, "wb");
    assert_non_null(f);
    for (int i = 0; i < 8; i++) word[i] = (uint8_t)((n_header ? n_header : n) >> (8 * i));
    fwrite(word, 1, 8, f);
    fwrite(header, 1, n, f);
    for (uint64_t i = 0; i < n_data; i++) fputc((int)(i * 7 + i / 256) & 0xFF, f);
    fclose(f);
}

/* The same with the header padded so that data begins at a multiple of 8. */
static void write_aligned(const char *name, const char *header, uint64_t n_data) {
    char padded[1024];
    snprintf(padded, sizeof padded, "%-*s", (int)((strlen(header) + 7) / 8 * 8), header);
    write_file(name, padded, n_data, 0);
}

static void write_text(const char *name, const char *text) {
    char p[PATH];
    path_of(name, p);
    FILE *f = fopen(p, "wb");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static epx_want_t want(const char *name, int64_t a, int64_t b, epx_weight_t *view) {
    epx_want_t w = {.n_dims = b ? 2 : 1, .shape = {a, b}, .view = view};
    snprintf(w.name, sizeof w.name, "%s", name);
    return w;
}

/* Open and map one wanted tensor; the message must hold `part` (and "model.safetensors"). */
static void refuse(const epx_want_t *w, epx_status_t s, const char *part) {
    epx_checkpoint_t *ck = NULL;
    epx_status_t got = epx_checkpoint_open(g_dir, &ck);
    if (got == EPX_OK) got = epx_checkpoint_map(ck, w, 1, (epx_load_progress_t){0});
    epx_checkpoint_close(ck);
    if (got != s || !strstr(epx_error_message(), part) || !strstr(epx_error_message(), "model.safetensors"))
        fail_msg("expected %d with \"%s\", got %d: %s", (int)s, part, (int)got, epx_error_message());
}

/* A FIFO would block its reader until a writer comes. */
static void test_fifo(void **state) {
    (void)state;
    epx_weight_t view;
    epx_want_t w = want("t", 2, 0, &view);
    char p[PATH];
    remove_file("model.safetensors");
    path_of("model.safetensors", p);
    assert_int_equal(mkfifo(p, 0600), 0);
    refuse(&w, EPX_ERR_IO, "not a regular file");
    remove_file("model.safetensors");
}

static void test_header_errors(void **state) {
    (void)state;
    static const struct {
        const char *header;
        uint64_t n_data, n_header;
        epx_status_t s;
        const char *part;
    } cases[] = {
        {"{", 0, 0, EPX_ERR_FORMAT, "header length is 1"},
        {"{}", 0, 1u << 30, EPX_ERR_FORMAT, "header length is 1073741824"},
        {"{}", 0, 5000, EPX_ERR_FORMAT, "truncated"},
        {"{}", 0, UINT64_MAX, EPX_ERR_FORMAT, "header length is 18446744073709551615"},
        {"[]", 0, 0, EPX_ERR_FORMAT, "not a JSON object"},
        {"{\"x\":", 0, 0, EPX_ERR_FORMAT, "header, byte"},
        {"{\"x\":3}", 0, 0, EPX_ERR_FORMAT, "\"x\": its entry is not an object"},
        {"{\"__metadata__\":3}", 0, 0, EPX_ERR_FORMAT, "__metadata__"},
        {"{\"x\":{\"dtype\":\"BF17\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4, 0, EPX_ERR_UNSUPPORTED, "\"BF17\""},
        {"{\"x\":{\"dtype\":7,\"shape\":[2],\"data_offsets\":[0,4]}}", 4, 0, EPX_ERR_FORMAT, "dtype"},
        {"{\"x\":{\"dtype\":\"BF16\",\"shape\":[-2],\"data_offsets\":[0,4]}}", 4, 0, EPX_ERR_FORMAT, "shape[0]"},
        {"{\"x\":{\"dtype\":\"BF16\",\"shape\":[1.5],\"data_offsets\":[0,4]}}", 4, 0, EPX_ERR_FORMAT, "shape[0]"},
        {"{\"x\":{\"dtype\":\"BF16\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,2]}}", 2, 0, EPX_ERR_FORMAT, "at most 8"},
        {"{\"x\":{\"dtype\":\"BF16\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0, 0, EPX_ERR_FORMAT,
         "overflows"},
        {"{\"x\":{\"dtype\":\"BF16\",\"shape\":[9223372036854775807],\"data_offsets\":[0,0]}}", 0, 0, EPX_ERR_FORMAT,
         "needs 1844674407370955"},
        {"{\"x\":{\"dtype\":\"BF16\",\"shape\":[99999999999999999999],\"data_offsets\":[0,4]}}", 4, 0, EPX_ERR_FORMAT,
         "header, byte"},
        {"{\"x\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,6]}}", 6, 0, EPX_ERR_FORMAT,
         "hold 6 bytes, shape [2] of BF16 needs 4"},
        {"{\"x\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[4,0]}}", 4, 0, EPX_ERR_FORMAT, "data_offsets"},
        {"{\"x\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[-4,0]}}", 4, 0, EPX_ERR_FORMAT, "data_offsets"},
        {"{\"x\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0]}}", 4, 0, EPX_ERR_FORMAT, "data_offsets"},
        {"{\"x\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,4]}}", 2, 0, EPX_ERR_FORMAT, "truncated"},
        {"{\"x\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,4]}}", 6, 0, EPX_ERR_FORMAT,
         "6 bytes of data, the header describes 4"},
        {"{\"x\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,4]},\"x\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_"
         "offsets\":[0,4]}}",
         4, 0, EPX_ERR_FORMAT, "duplicate"},
        {"{\"x\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,4]},\"y\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_"
         "offsets\":[2,6]}}",
         6, 0, EPX_ERR_FORMAT, "\"y\": data begins at byte 2, expected 4: it overlaps"},
        {"{\"x\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,4]},\"y\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_"
         "offsets\":[6,10]}}",
         10, 0, EPX_ERR_FORMAT, "hole"},
    };
    epx_weight_t v;
    epx_want_t w = want("x", 2, 0, &v);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_file("model.safetensors", cases[i].header, cases[i].n_data, cases[i].n_header);
        refuse(&w, cases[i].s, cases[i].part);
    }
    write_text("model.safetensors", "abc");
    refuse(&w, EPX_ERR_FORMAT, "3 bytes");
}

static void test_wanted_errors(void **state) {
    (void)state;
    epx_weight_t v;
    epx_want_t w = want("x", 2, 3, &v);
    write_file("model.safetensors", "{\"x\":{\"dtype\":\"BF16\",\"shape\":[3,2],\"data_offsets\":[0,12]}}", 12, 0);
    refuse(&w, EPX_ERR_FORMAT, "tensor \"x\" has shape [3, 2], expected [2, 3]");
    w = want("y", 2, 3, &v);
    refuse(&w, EPX_ERR_NOT_FOUND, "tensor \"y\" of shape [2, 3] is missing");
    w = want("x", 6, 0, &v);
    refuse(&w, EPX_ERR_FORMAT, "has shape [3, 2], expected [6]");
    write_file("model.safetensors", "{\"x\":{\"dtype\":\"F16\",\"shape\":[2,3],\"data_offsets\":[0,12]}}", 12, 0);
    w = want("x", 2, 3, &v);
    refuse(&w, EPX_ERR_UNSUPPORTED, "has dtype F16, supported: BF16, F32");
    write_file("model.safetensors", "{\"x\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[0,12]} }", 12, 0);
    refuse(&w, EPX_ERR_UNSUPPORTED, "expected a multiple of 2"); /* the header has an odd length */
    remove_file("model.safetensors");
    epx_checkpoint_t *ck;
    assert_int_equal(epx_checkpoint_open(g_dir, &ck), EPX_ERR_NOT_FOUND);
    assert_non_null(strstr(epx_error_message(), "neither model.safetensors nor"));
    assert_int_equal(epx_checkpoint_open("/nonexistent/x", &ck), EPX_ERR_NOT_FOUND);
}

static void check_bytes(const epx_weight_t *v, uint64_t data_off, uint64_t n_bytes) {
    const uint8_t *p = v->data;
    for (uint64_t i = 0; i < n_bytes; i++) assert_int_equal(p[i], ((i + data_off) * 7 + (i + data_off) / 256) & 0xFF);
}

/* Four tensors of 2 pages + a bit, 1 page, 8 bytes, 5 pages. */
#define FOUR                                                                    \
    "{\"a\":{\"dtype\":\"BF16\",\"shape\":[4100,1],\"data_offsets\":[0,8200]}," \
    "\"b\":{\"dtype\":\"F32\",\"shape\":[1024],\"data_offsets\":[8200,12296]}," \
    "\"c\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[12296,12304]},"   \
    "\"d\":{\"dtype\":\"BF16\",\"shape\":[2,5120],\"data_offsets\":[12304,32784]}}      "

static void test_mapping(void **state) {
    (void)state;
    epx_weight_t a, c, d;
    epx_checkpoint_t *ck;
    epx_want_t one[] = {want("c", 2, 0, &c)}, two[] = {want("d", 2, 5120, &d), want("a", 4100, 1, &a)};
    long page = sysconf(_SC_PAGESIZE);
    write_file("model.safetensors", FOUR, 32784, 0);
    assert_int_equal((8 + strlen(FOUR)) % 4, 0);
    assert_int_equal(epx_checkpoint_open(g_dir, &ck), EPX_OK);
    assert_int_equal(epx_checkpoint_map(ck, one, 1, (epx_load_progress_t){0}), EPX_OK);
    assert_true(epx_checkpoint_mapped_bytes(ck) <= 2 * (uint64_t)page); /* not the whole file */
    check_bytes(&c, 12296, 8);
    assert_true(c.n == 1 && c.k == 2 && c.type == EPX_W_F32);
    epx_checkpoint_close(ck);
    assert_int_equal(epx_checkpoint_open(g_dir, &ck), EPX_OK);
    assert_int_equal(epx_checkpoint_map(ck, two, 2, (epx_load_progress_t){0}), EPX_OK);
    check_bytes(&a, 0, 8200);
    check_bytes(&d, 12304, 20480);
    assert_true(d.n == 2 && d.k == 5120 && d.type == EPX_W_BF16);
    epx_checkpoint_close(ck);
    remove_file("model.safetensors");
}

static void test_shards(void **state) {
    (void)state;
    epx_weight_t x, y;
    epx_checkpoint_t *ck;
    epx_want_t both[] = {want("y", 4, 0, &y), want("x", 2, 0, &x)};
    write_file("a.safetensors", "{\"x\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,4]}} ", 4, 0);
    write_file("b.safetensors", "{\"y\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[0,8]}} ", 8, 0);
    write_text("model.safetensors.index.json", "{\"weight_map\":{\"x\":\"a.safetensors\",\"y\":\"b.safetensors\"}}");
    assert_int_equal(epx_checkpoint_open(g_dir, &ck), EPX_OK);
    assert_int_equal(epx_checkpoint_map(ck, both, 2, (epx_load_progress_t){0}), EPX_OK);
    check_bytes(&x, 0, 4);
    check_bytes(&y, 0, 8);
    epx_checkpoint_close(ck);
    epx_want_t none = want("z", 2, 0, &x);
    refuse(&none, EPX_ERR_NOT_FOUND, "\"z\" is missing");
    remove_file("b.safetensors");
    refuse(&both[0], EPX_ERR_NOT_FOUND, "model.safetensors.index.json: weight_map names b.safetensors");
    write_text("model.safetensors.index.json", "{\"weight_map\":{\"x\":\"../a.safetensors\"}}");
    refuse(&both[1], EPX_ERR_FORMAT, "plain file name");
    write_text("model.safetensors.index.json", "{\"weight_map\":[]}");
    refuse(&both[1], EPX_ERR_FORMAT, "weight_map");
    write_text("model.safetensors.index.json", "{\"weight_map\"");
    refuse(&both[1], EPX_ERR_FORMAT, "not valid JSON");
}

/* One tensor for all experts: only the wanted slices, as stored, matrices [in, out]. */
static void test_slices(void **state) {
    (void)state;
    epx_weight_t m, b;
    epx_checkpoint_t *ck;
    epx_want_t w[] = {{.name = "m", .n_dims = 3, .shape = {4, 3, 2}, .sliced = 1, .slice = 2, .transposed = 1, .view = &m},
                      {.name = "b", .n_dims = 2, .shape = {4, 5}, .sliced = 1, .slice = 3, .view = &b}};
    write_aligned("model.safetensors",
                  "{\"m\":{\"dtype\":\"BF16\",\"shape\":[4,3,2],\"data_offsets\":[0,48]},"
                  "\"b\":{\"dtype\":\"F32\",\"shape\":[4,5],\"data_offsets\":[48,128]}}   ",
                  128);
    assert_int_equal(epx_checkpoint_open(g_dir, &ck), EPX_OK);
    assert_int_equal(epx_checkpoint_map(ck, w, 2, (epx_load_progress_t){0}), EPX_OK);
    check_bytes(&m, 24, 12);
    check_bytes(&b, 48 + 60, 20);
    assert_true(m.n == 2 && m.k == 3 && m.transposed == 1 && m.type == EPX_W_BF16);
    assert_true(b.n == 1 && b.k == 5 && b.transposed == 0 && b.type == EPX_W_F32);
    epx_checkpoint_close(ck);
    w[0].shape[0] = 5;
    refuse(&w[0], EPX_ERR_FORMAT, "has shape [4, 3, 2], expected [5, 3, 2]");
    remove_file("model.safetensors");
}

#define F8 "{\"x\":{\"dtype\":\"F8_E4M3\",\"shape\":[130,3],\"data_offsets\":[0,390]}"
static void test_fp8(void **state) {
    (void)state;
    epx_weight_t v;
    epx_checkpoint_t *ck;
    epx_want_t w = want("x", 130, 3, &v);
    write_aligned("model.safetensors", F8 ",\"x_scale_inv\":{\"dtype\":\"BF16\",\"shape\":[2,1],\"data_offsets\":[390,394]}} ",
                  394);
    refuse(&w, EPX_ERR_UNSUPPORTED, "has dtype F8_E4M3, supported: BF16, F32");
    w.allow_f8 = 1;
    assert_int_equal(epx_checkpoint_open(g_dir, &ck), EPX_OK);
    assert_int_equal(epx_checkpoint_map(ck, &w, 1, (epx_load_progress_t){0}), EPX_OK);
    check_bytes(&v, 0, 390);
    assert_true(v.type == EPX_W_F8_E4M3 && v.n == 130 && v.k == 3 && v.scale_type == EPX_W_BF16);
    const epx_weight_t scale = {.data = v.scale};
    check_bytes(&scale, 390, 4);
    epx_checkpoint_close(ck);
    write_aligned("model.safetensors", F8 "}", 390);
    refuse(&w, EPX_ERR_NOT_FOUND, "tensor \"x_scale_inv\" of shape [2, 1] is missing");
    write_aligned("model.safetensors", F8 ",\"x_scale_inv\":{\"dtype\":\"F32\",\"shape\":[1,1],\"data_offsets\":[390,394]}}",
                  394);
    refuse(&w, EPX_ERR_FORMAT, "tensor \"x_scale_inv\" has shape [1, 1], expected [2, 1]");
    write_aligned("model.safetensors", F8 ",\"x_scale_inv\":{\"dtype\":\"F16\",\"shape\":[2,1],\"data_offsets\":[390,394]}}",
                  394);
    refuse(&w, EPX_ERR_UNSUPPORTED, "tensor \"x_scale_inv\" has dtype F16");
    remove_file("model.safetensors");
}

/* A tensor's dummy values depend on its name and the seed only. */
static void test_dummy(void **state) {
    (void)state;
    epx_weight_t v[4], other;
    static const uint16_t zero[5];
    void *block, *block2;
    size_t n_bytes, n_bytes2;
    const epx_ops_config_t oc = {.size = sizeof oc, .n_threads = 1};
    epx_ops_t *ops;
    assert_int_equal(epx_ops_create(&oc, &ops), EPX_OK);
    epx_want_t w[] = {want("m.a", 33, 65, &v[0]), want("norm.weight", 7, 0, &v[1]), want("m.b", 33, 65, &v[2]),
                      want("m.bias", 5, 0, &v[3])};
    epx_want_t alone = want("m.b", 33, 65, &other);
    assert_int_equal(epx_dummy_weights(ops, 5, w, 4, (epx_load_progress_t){0}, &block, &n_bytes), EPX_OK);
    assert_int_equal(epx_dummy_weights(ops, 5, &alone, 1, (epx_load_progress_t){0}, &block2, &n_bytes2), EPX_OK);
    assert_memory_equal(v[2].data, other.data, 33 * 65 * 2);
    assert_memory_not_equal(v[0].data, v[2].data, 33 * 65 * 2);
    for (int i = 0; i < 7; i++) assert_true(epx_bf16_to_f32(((const uint16_t *)v[1].data)[i]) == 1.0f);
    assert_memory_equal(v[3].data, zero, sizeof zero); /* a vector that is not a norm */
    double sum = 0, square = 0;
    for (int i = 0; i < 33 * 65; i++) {
        double x = (double)epx_bf16_to_f32(((const uint16_t *)other.data)[i]);
        sum += x;
        square += x * x;
    }
    /* Memory that is promised but not there: refused, with both numbers. */
    epx_weight_t huge_view;
    epx_want_t huge = want("huge", 1 << 20, 1 << 16, &huge_view);
    char wanted[96];
    void *block3;
    while ((uint64_t)huge.shape[0] * (uint64_t)huge.shape[1] * 2 <= epx_memory_free_bytes() + ((uint64_t)4 << 30))
        huge.shape[1] *= 2;
    snprintf(wanted, sizeof wanted, "dummy weights: %" PRIu64 " bytes wanted, ",
             (uint64_t)huge.shape[0] * (uint64_t)huge.shape[1] * 2);
    assert_int_equal(epx_dummy_weights(ops, 1, &huge, 1, (epx_load_progress_t){0}, &block3, &n_bytes2), EPX_ERR_NOMEM);
    assert_non_null(strstr(epx_error_message(), wanted));
    assert_non_null(strstr(epx_error_message(), " free"));
    double n = 33 * 65, variance = square / n - sum / n * sum / n;
    assert_true(variance > 0.019 * 0.019 && variance < 0.021 * 0.021);
    epx_ops_free(ops, block2, n_bytes2);
    assert_int_equal(epx_dummy_weights(ops, 6, &alone, 1, (epx_load_progress_t){0}, &block2, &n_bytes2), EPX_OK);
    assert_memory_not_equal(v[2].data, other.data, 33 * 65 * 2);
    epx_ops_free(ops, block, n_bytes);
    epx_ops_free(ops, block2, n_bytes2);
    epx_ops_destroy(ops);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_header_errors), cmocka_unit_test(test_wanted_errors), cmocka_unit_test(test_mapping),
        cmocka_unit_test(test_shards),        cmocka_unit_test(test_dummy),         cmocka_unit_test(test_slices),
        cmocka_unit_test(test_fp8),           cmocka_unit_test(test_fifo),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
