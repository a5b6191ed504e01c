/* Which device ops run on: names, refusals, memory; and what does not depend on an instruction set. */
#include "tests/unit/ops_test_util.h"

static void refused(const epx_ops_config_t *cfg, epx_status_t status, const char *text) {
    epx_ops_t *ops = NULL;
    assert_int_equal(epx_ops_create(cfg, &ops), status);
    assert_null(ops);
    if (!strstr(epx_error_message(), text)) fail_msg("\"%s\" does not say \"%s\"", epx_error_message(), text);
}

/* No other device than the one that was asked for, and the reason in words. */
static void test_refusals(void **state) {
    (void)state;
    epx_ops_config_t cfg = {.size = sizeof cfg, .n_threads = 1, .device = "tpu"};
    refused(&cfg, EPX_ERR_ARG, "device is \"tpu\"; legal: cpu, cuda");
    cfg.device = "cpu";
    cfg.device_idx = 1;
    refused(&cfg, EPX_ERR_ARG, "device_idx is 1; legal with device cpu: 0");
    cfg.device = "cuda";
    cfg.device_idx = 0;
    setenv("EPX_OPS_CUDA_MODULE", "/nonexistent/libepx_ops_cuda.so", 1);
    refused(&cfg, EPX_ERR_UNSUPPORTED, "device cuda: the module cannot be opened: /nonexistent/libepx_ops_cuda.so");
    assert_int_equal(epx_ops_available("cuda"), EPX_ERR_UNSUPPORTED);
    assert_int_equal(epx_ops_available("cpu"), EPX_OK);
    assert_int_equal(epx_ops_available("gpu"), EPX_ERR_ARG);
}

static void test_memory(void **state) {
    (void)state;
    static const size_t sizes[] = {0, 1, 4096, (1 << 20) - 1, 1 << 20, (3 << 20) + 5};
    open_ops("scalar", 1);
    assert_int_equal(epx_ops_device_idx(g_ops[1]), -1);
    assert_int_equal(epx_ops_row_type(g_ops[1]), EPX_W_F32);
    assert_true(epx_ops_reads_host(g_ops[1]) && epx_ops_free_bytes(g_ops[1]) > 0 && epx_ops_stream(g_ops[1]) == NULL);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        void *p = NULL;
        char *back = must_alloc(sizes[i]);
        assert_int_equal(epx_ops_alloc(g_ops[1], sizes[i], &p), EPX_OK);
        assert_int_equal((uintptr_t)p % 64, 0);
        for (size_t k = 0; k < sizes[i]; k++) assert_int_equal(((char *)p)[k], 0);
        memset(back, 7, sizes[i]);
        assert_int_equal(epx_ops_upload(g_ops[1], p, back, sizes[i]), EPX_OK);
        memset(back, 0, sizes[i]);
        assert_int_equal(epx_ops_download(g_ops[1], back, p, sizes[i]), EPX_OK);
        for (size_t k = 0; k < sizes[i]; k++) assert_int_equal(back[k], 7);
        epx_ops_free(g_ops[1], p, sizes[i]);
        free(back);
    }
    epx_ops_free(g_ops[1], NULL, 5);
    epx_ops_destroy(g_ops[1]);
}

static void test_rows(void **state) {
    (void)state;
    const float x[] = {1,  5,   5,    2, /**/ -1, NAN, 0, 3, /**/ -INFINITY, -INFINITY, -INFINITY, -INFINITY, /**/ -INFINITY,
                       -9, -10, -9.5f};
    const int32_t rows[] = {3, 0};
    float out[8];
    int32_t best[4];
    open_ops("scalar", 1);
    epx_ops_argmax(g_ops[1], x, 4, 4, best);
    assert_int_equal(best[0], 1);
    assert_int_equal(best[1], -1);
    assert_int_equal(best[2], -1);
    assert_int_equal(best[3], 1);
    epx_ops_gather(g_ops[1], x, rows, 2, 4, out);
    assert_memory_equal(out, x + 12, 16);
    assert_memory_equal(out + 4, x, 16);
    epx_ops_destroy(g_ops[1]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
