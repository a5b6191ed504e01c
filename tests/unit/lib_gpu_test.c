/* What can be tested of the exchange on GPUs without one: refusals by field and value, sizes and offsets of a slab, and what is
 * said when the CUDA module cannot be used. Kernels: tests/gpu. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/status.h"
#include "lib/core/core.h"
#include "lib/cuda/module.h"
#include "lib/spi/gpu_layout.h"
#include "lib/spi/gpu_setup.h"

static epx_plan_config_t shape(void) {
    epx_plan_config_t c, n;
    epx_plan_config_init(&c);
    c.max_tokens = 32, c.hidden = 2048, c.top_k = 8, c.n_experts = 128;
    c.token_dtype = EPX_BF16, c.wire_dtype = EPX_FP8_E4M3;
    c.layout = EPX_LAYOUT_EXPERT_MAJOR;
    assert_int_equal(epx_validate_device_config(&c, 2, &n), EPX_OK);
    return n;
}

static void refusals_name_field_and_value(void **state) {
    (void)state;
    static const struct {
        size_t at;
        int value;
        const char *part;
    } wrong[] = {{offsetof(epx_plan_config_t, expert_dtype), EPX_F16, "expert_dtype is f16"},
                 {offsetof(epx_plan_config_t, hidden), 2052, "hidden is 2052"},
                 {offsetof(epx_plan_config_t, n_experts), 32768, "n_experts is 32768"},
                 {offsetof(epx_plan_config_t, n_slots), 130, "n_slots is 130"},
                 {offsetof(epx_plan_config_t, debug), 1, "debug is 1"},
                 {offsetof(epx_plan_config_t, renormalize), 1, "renormalize is 1"},
                 {offsetof(epx_plan_config_t, replicate), 2, "replicate is 2"},
                 {offsetof(epx_plan_config_t, scale_block), 64, "scale_block is 64"},
                 {offsetof(epx_plan_config_t, combine_dtype), EPX_FP8_E4M3, "combine_dtype is fp8_e4m3"},
                 {offsetof(epx_plan_config_t, n_channels), 5, "n_channels is 5"},
                 {offsetof(epx_plan_config_t, n_blocks), 265, "n_blocks is 265"}};
    epx_plan_config_t good = shape();
    assert_int_equal(epx_gpu_check_config(&good, 2, 132), EPX_OK);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        epx_plan_config_t c = good;
        memcpy((char *)&c + wrong[i].at, &wrong[i].value, sizeof wrong[i].value);
        assert_int_equal(epx_gpu_check_config(&c, 2, 132), EPX_ERR_UNSUPPORTED);
        if (strstr(epx_last_error(), wrong[i].part) == NULL) fail_msg("no \"%s\" in: %s", wrong[i].part, epx_last_error());
    }
    assert_int_equal(epx_gpu_check_config(&good, 33, 132), EPX_ERR_UNSUPPORTED);
    assert_non_null(strstr(epx_last_error(), "n_ranks is 33"));
}

/* Regions in ascending order do not overlap and fill the slab. */
static void check_regions(const epx_gpu_plan_t *p) {
    const epx_gpu_layout_t *l = &p->l;
    uint64_t w = (uint64_t)p->n_ranks, t = (uint64_t)p->max_tokens, planes = p->exact ? (uint64_t)p->top_k : w;
    const uint64_t r[][2] = {{l->count_off, 2 * w * 16},
                             {l->start_off, w * 16},
                             {l->flag_d_off, w * (uint64_t)p->n_blocks * 8},
                             {l->flag_c_off, w * (uint64_t)p->n_blocks * 8},
                             {l->ids_off, 2 * w * t * (((uint64_t)p->top_k + 5) / 6) * 16},
                             {l->weights_off, 2 * w * t * (((uint64_t)p->top_k + 2) / 3) * 16},
                             {l->dp_off, 2 * w * (uint64_t)p->packet_tokens * l->d_packets * 16},
                             {l->cp_off, planes * (uint64_t)p->packet_tokens * l->c_packets * 16},
                             {l->d_off, 2 * w * t * l->d_row_bytes},
                             {l->c_off, planes * t * l->c_row_bytes},
                             {l->total_bytes, 0}};
    assert_int_equal(r[0][0], EPX_GPU_HEAD_BYTES);
    for (size_t i = 0; i + 1 < sizeof r / sizeof r[0]; i++) {
        assert_true(r[i][0] % 256 == 0);
        assert_true(r[i][0] + r[i][1] <= r[i + 1][0] && r[i + 1][0] - r[i][0] - r[i][1] < 256);
    }
}

static void slabs_are_laid_out(void **state) {
    (void)state;
    for (int i = 0; i < 24; i++) {
        epx_plan_config_t c = shape();
        epx_gpu_plan_t p;
        c.max_tokens = 1 << (i % 8);
        c.top_k = 1 + 9 * (i % 5);
        c.combine = i % 2 ? EPX_COMBINE_PARTIAL : EPX_COMBINE_EXACT;
        if (i % 3 == 0) c.wire_dtype = c.token_dtype;
        epx_gpu_setup(&c, 0, 2 + i % 3, 64, 132, i % 4 != 3, &p);
        check_regions(&p);
        assert_true(p.n_blocks >= 1 && p.n_blocks <= 264);
        assert_true(p.packet_tokens <= c.max_tokens && (i % 4 != 3 || p.packet_tokens == 0));
    }
}

/* Rows: H channels of the wire dtype and one f32 scale for 128 of them. */
static void row_sizes(void **state) {
    (void)state;
    epx_plan_config_t c = shape();
    epx_gpu_plan_t p;
    c.combine = EPX_COMBINE_PARTIAL;
    epx_gpu_setup(&c, 1, 2, 64, 132, 1, &p);
    assert_int_equal(p.l.d_row_bytes, 2048 + 16 * 4);
    assert_int_equal(p.l.d_scale_off, 2048);
    assert_int_equal(p.l.c_row_bytes, 2048 * 2);
    assert_int_equal(p.packet_tokens, 32);
    assert_int_equal(p.row_cap, 64);
    c.scale_format = EPX_SCALE_UE8M0; /* 16 codes in 4 words */
    epx_gpu_setup(&c, 1, 2, 64, 132, 1, &p);
    assert_int_equal(p.l.d_row_bytes, 2048 + 4 * 4);
    assert_int_equal(p.l.d_packets, (1536 + 12) / 12 + (512 + 4 + 11) / 12);
}

/* Packets hold at most a sixteenth of a slab, or 1.8 MB; so a rank of eight with 128 tokens of DeepSeek-V3's shape takes 32 MB.
 */
static void packets_take_little(void **state) {
    (void)state;
    for (int t = 1; t <= 4096; t *= 4) {
        epx_plan_config_t c = shape();
        epx_gpu_plan_t p;
        c.max_tokens = t, c.hidden = 7168;
        epx_gpu_setup(&c, 0, 2, 64, 132, 1, &p);
        uint64_t packets = p.l.d_off - p.l.dp_off;
        assert_true(packets <= 1800000u || packets <= p.l.total_bytes / 16);
        assert_true(p.packet_tokens > 0);
    }
    epx_plan_config_t v3 = shape();
    epx_gpu_plan_t p;
    v3.max_tokens = 128, v3.hidden = 7168, v3.n_experts = v3.n_slots = 256, v3.combine = EPX_COMBINE_PARTIAL;
    epx_gpu_setup(&v3, 0, 8, 32, 132, 1, &p);
    assert_true(p.l.total_bytes < 32000000);
}

static void the_module_says_why_not(void **state) {
    (void)state;
    char why[512] = "", path[] = "/tmp/epx_not_a_module_XXXXXX";
    int n = 9;
    assert_null(epx_cuda_open("/nonexistent/libepx_cuda.so", &n, why, sizeof why));
    assert_int_equal(n, 0);
    assert_non_null(strstr(why, "/nonexistent/libepx_cuda.so"));
    int fd = mkstemp(path);
    assert_true(fd >= 0 && write(fd, "text", 4) == 4);
    close(fd);
    assert_null(epx_cuda_open(path, &n, why, sizeof why));
    assert_non_null(strstr(why, path));
    unlink(path);
    /* A library, but not ours. */
    assert_null(epx_cuda_open("libm.so.6", &n, why, sizeof why));
    assert_non_null(strstr(why, "libm.so.6 is not the CUDA module of this libepx"));
}

static void cuda_errors_keep_their_meaning(void **state) {
    (void)state;
    assert_int_equal(epx_cuda_check(0, "nothing"), EPX_OK);
    if (epx_cuda() != NULL) return;
    assert_int_equal(epx_cuda_n_devices(), 0);
    assert_true(epx_cuda_reason()[0] != '\0');
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refusals_name_field_and_value),
        cmocka_unit_test(slabs_are_laid_out),
        cmocka_unit_test(row_sizes),
        cmocka_unit_test(packets_take_little),
        cmocka_unit_test(the_module_says_why_not),
        cmocka_unit_test(cuda_errors_keep_their_meaning),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
