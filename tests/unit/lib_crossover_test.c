/* How "auto" chooses a backend: the nearest measured point, the same answer on all ranks, the same bits whatever is chosen. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "epx/epx.h"
#include "lib/core/core.h"
#include "lib/core/crossover.h"

enum { W = 2, T = 5, K = 2, E = 4, H = 64 };

static char path[] = "/tmp/epx-crossover-XXXXXX";

static void use_table(const char *text) {
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    assert_int_equal(fclose(f), 0);
    assert_int_equal(setenv("EPX_A2A_TABLE", path, 1), 0);
}

static void the_nearest_point_counts(void **state) {
    (void)state;
    epx_crossover_t c;
    use_table("# W bytes tokens\n2 4096 8 onesided # us\n\n2 4096 128 collective\n4 512 8 collective\n");
    static const struct {
        int w, tokens;
        uint64_t bytes;
        const char *want;
    } cases[] = {{2, 8, 4096, "onesided"},  {2, 1, 8192, "onesided"},  {2, 500, 4096, "collective"},
                 {4, 9, 600, "collective"}, {2, 31, 4096, "onesided"}, {2, 36, 4096, "collective"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_int_equal(epx_crossover(cases[i].w, cases[i].bytes, cases[i].tokens, &c), EPX_OK);
        assert_string_equal(c.backend, cases[i].want);
        assert_non_null(strstr(c.why, "EPX_A2A_TABLE"));
    }
    unsetenv("EPX_A2A_TABLE");
    assert_int_equal(epx_crossover(2, 4096, 8, &c), EPX_OK);
    assert_non_null(strstr(c.why, "built-in table"));
}

static void bad_tables_are_named(void **state) {
    (void)state;
    static const struct {
        const char *text, *says;
    } cases[] = {{"2 4096 8\n", "line 1"},
                 {"2 4096 8 onesided\n2 4096 8 ref\n", "line 2: backend is \"ref\"; legal: onesided, collective"},
                 {"2 0 8 onesided\n", "legal: W ROW_BYTES TOKENS BACKEND"},
                 {"2 4096 8 onesided more\n", "line 1"},
                 {"# nothing\n", "has no line"}};
    epx_crossover_t c;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        use_table(cases[i].text);
        assert_int_equal(epx_crossover(2, 4096, 8, &c), EPX_ERR_FORMAT);
        assert_non_null(strstr(epx_last_error(), cases[i].says));
    }
    setenv("EPX_A2A_TABLE", "/nonexistent/table", 1);
    assert_int_equal(epx_crossover(2, 4096, 8, &c), EPX_ERR_IO);
    assert_non_null(strstr(epx_last_error(), "/nonexistent/table"));
    unsetenv("EPX_A2A_TABLE");
}

static const uint64_t *fields_of(const void *ctx, int rank) { return (const uint64_t *)ctx + rank * EPX_CONFIG_FIELDS; }

static void ranks_must_choose_the_same(void **state) {
    (void)state;
    epx_plan_config_t c;
    uint64_t f[2 * EPX_CONFIG_FIELDS];
    epx_plan_config_init(&c);
    epx_config_fields(&c, 1, "onesided", f);
    epx_config_fields(&c, 1, "onesided", f + EPX_CONFIG_FIELDS);
    assert_int_equal(epx_config_compare(fields_of, f, 2), EPX_OK);
    epx_config_fields(&c, 1, "collective", f + EPX_CONFIG_FIELDS);
    assert_int_equal(epx_config_compare(fields_of, f, 2), EPX_ERR_MISMATCH);
    assert_non_null(strstr(epx_last_error(), "EPX_A2A_TABLE must be the same on all ranks"));
    epx_config_fields(&c, 1, NULL, f + EPX_CONFIG_FIELDS); /* that rank has an error of its own */
    assert_int_equal(epx_config_compare(fields_of, f, 2), EPX_OK);
}

typedef struct {
    epx_world_t *world;
    const char *want;
    uint16_t out[2][T * H]; /* by combine mode */
    char why[128], error[256];
} rank_t;

/* One exchange of a plan with backend "auto"; the expert gives the row itself. */
static epx_status_t exchange(rank_t *r, epx_group_t *g, int mode) {
    static const float weights[T * K] = {1, 0.5f, 0.25f, 1, 1, 1, 0.5f, 0.5f, 0.125f, 1};
    epx_plan_config_t c;
    epx_plan_t *p = NULL;
    epx_io_t io;
    epx_plan_info_t info = {.size = sizeof info};
    epx_lists_t l;
    uint16_t x[T * H], y[W * T * K * H];
    int32_t ids[T * K];
    for (int i = 0; i < T * H; i++) x[i] = (uint16_t)(0x3F80 + (i * 7 + epx_group_rank(g)) % 90);
    for (int i = 0; i < T * K; i++) ids[i] = (i * 3 + epx_group_rank(g)) % E;
    epx_plan_config_init(&c);
    c.max_tokens = T, c.hidden = H, c.top_k = K, c.n_experts = E, c.token_dtype = c.wire_dtype = EPX_BF16;
    c.combine = mode ? EPX_COMBINE_PARTIAL : EPX_COMBINE_EXACT;
    epx_status_t s = epx_plan_create(g, &c, &p);
    if (s >= 0) s = epx_plan_info(p, &info);
    if (s >= 0 && strcmp(info.backend, r->want) != 0) s = EPX_ERR_INTERNAL;
    if (s >= 0) snprintf(r->why, sizeof r->why, "%s", info.backend_why);
    epx_io_init(&io);
    io.x = x, io.ids = ids, io.weights = weights, io.n_tokens = T;
    if (s >= 0) s = epx_dispatch(p, &io);
    if (s >= 0) s = epx_plan_lists(p, 0, &l);
    for (int i = 0; s >= 0 && i < l.n_rows; i++)
        memcpy(y + i * H, (const char *)l.row_base[l.entries[i].src] + l.entries[i].token * l.row_stride_bytes, H * 2);
    epx_io_init(&io);
    io.x = y, io.out_x = r->out[mode];
    if (s >= 0) s = epx_combine(p, &io);
    epx_plan_destroy(p);
    return s;
}

static void *run_rank(void *arg) {
    rank_t *r = arg;
    epx_group_t *g = NULL;
    epx_status_t s = epx_group_create(r->world, NULL, 0, -1, &g);
    for (int mode = 0; s >= 0 && mode < 2; mode++) s = exchange(r, g, mode);
    if (s < 0) snprintf(r->error, sizeof r->error, "%s (wanted %s)", epx_last_error(), r->want);
    epx_group_destroy(g);
    epx_world_destroy(r->world);
    return NULL;
}

static void run_ranks(rank_t *ranks, const char *want) {
    epx_world_t *worlds[W];
    pthread_t threads[W];
    memset(ranks, 0, W * sizeof *ranks);
    assert_int_equal(epx_world_create_local(W, worlds), EPX_OK);
    for (int i = 0; i < W; i++) {
        ranks[i].world = worlds[i];
        ranks[i].want = want;
        assert_int_equal(pthread_create(&threads[i], NULL, run_rank, &ranks[i]), 0);
    }
    for (int i = 0; i < W; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < W; i++) assert_string_equal(ranks[i].error, "");
}

static void every_choice_gives_the_same_bits(void **state) {
    (void)state;
    static rank_t a[W], b[W];
    use_table("2 128 5 collective\n2 128 500 onesided\n");
    run_ranks(a, "collective");
    use_table("2 128 5 onesided\n");
    run_ranks(b, "onesided");
    unsetenv("EPX_A2A_TABLE");
    assert_non_null(strstr(a[0].why, "EPX_A2A_TABLE: measured for W 2, rows of 128 bytes, 5 tokens"));
    for (int i = 0; i < W; i++) assert_memory_equal(a[i].out, b[i].out, sizeof a[i].out);
}

int main(void) {
    int fd = mkstemp(path), bad;
    if (fd < 0) return 1;
    close(fd);
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_nearest_point_counts), cmocka_unit_test(bad_tables_are_named),
                                       cmocka_unit_test(ranks_must_choose_the_same),
                                       cmocka_unit_test(every_choice_gives_the_same_bits)};
    bad = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    return bad;
}
