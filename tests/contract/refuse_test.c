/* What the library refuses, and how it says so: bad arguments by field, value and legal values; values not built by name;
 * configs that differ between ranks; calls out of order. After a refusal everything still works.
 * Usage: contract_refuse */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "tests/harness/components.h"
#include "tests/harness/exchange.h"

enum { T = 4, H = 32, K = 3, E = 6 };

static const th_case_t base_case = {
    .opts = TH_HALVES,
    .shape = {.n_ranks = 2,
              .max_tokens = T,
              .hidden = H,
              .top_k = K,
              .n_experts = E,
              .layout = EPX_LAYOUT_EXPERT_MAJOR}, /* f32, exact */
};

typedef struct {
    epx_world_t *w;
    epx_group_t *g;
    epx_plan_t *p;
    th_case_t c;
} bench_t;

static int setup(th_rank_t *r, bench_t *b) {
    epx_world_config_t cfg;
    *b = (bench_t){.c = base_case};
    b->c.shape.n_ranks = r->n_ranks;
    th_world_config(r, NULL, &cfg);
    TH_OK(r, epx_world_create(&cfg, &b->w));
    TH_OK(r, epx_group_create(b->w, NULL, 0, -1, &b->g));
    return 0;
}

static int setup_plan(th_rank_t *r, bench_t *b) {
    epx_plan_config_t pc;
    if (setup(r, b) != 0) return -1;
    th_plan_config(&b->c, &pc);
    TH_OK(r, epx_plan_create(b->g, &pc, &b->p));
    return 0;
}

static void teardown(bench_t *b) {
    epx_plan_destroy(b->p);
    epx_group_destroy(b->g);
    epx_world_destroy(b->w);
}

static int still_works(th_rank_t *r, bench_t *b) {
    th_tally_t tally = {0};
    for (int i = 0; i < 2; i++)
        if (th_step(r, b->p, &b->c, r->rank, TH_FULL, 3, &tally) != 0) return -1;
    return 0;
}

/* ---- plan fields ---- */

static const int bad_slot_rank[E] = {0, 1, 0, 1, 0, 2}, bad_slot_expert[E] = {0, 1, 2, 3, 4, 4},
                 far_slot_expert[E] = {0, 1, 2, 3, 4, 6};

/* ROW(status, field in the message, value in the message, statement on cfg) */
#define PLAN_ROWS(ROW)                                                                                                 \
    ROW(EPX_ERR_ARG, "max_tokens", "0", cfg->max_tokens = 0)                                                           \
    ROW(EPX_ERR_ARG, "max_tokens", "-5", cfg->max_tokens = -5)                                                         \
    ROW(EPX_ERR_ARG, "hidden", "0", cfg->hidden = 0)                                                                   \
    ROW(EPX_ERR_ARG, "top_k", "0", cfg->top_k = 0)                                                                     \
    ROW(EPX_ERR_ARG, "top_k", "65", cfg->top_k = 65)                                                                   \
    ROW(EPX_ERR_ARG, "n_experts", "0", cfg->n_experts = 0)                                                             \
    ROW(EPX_ERR_ARG, "n_slots", "5", cfg->n_slots = 5)                                                                 \
    ROW(EPX_ERR_ARG, "slot_rank", "2", (cfg->n_slots = E, cfg->slot_rank = bad_slot_rank))                             \
    ROW(EPX_ERR_ARG, "slot_expert", "6", (cfg->n_slots = E, cfg->slot_expert = far_slot_expert))                       \
    ROW(EPX_ERR_ARG, "token_dtype", "9", cfg->token_dtype = (epx_dtype_t)9)                                            \
    ROW(EPX_ERR_ARG, "wire_dtype", "f16", cfg->wire_dtype = EPX_F16)                                                   \
    ROW(EPX_ERR_ARG, "expert_dtype", "9", cfg->expert_dtype = (epx_dtype_t)9)                                          \
    ROW(EPX_ERR_ARG, "combine_dtype", "9", cfg->combine_dtype = (epx_dtype_t)9)                                        \
    ROW(EPX_ERR_ARG, "layout", "7", cfg->layout = (epx_layout_t)7)                                                     \
    ROW(EPX_ERR_ARG, "combine", "7", cfg->combine = (epx_combine_t)7)                                                  \
    ROW(EPX_ERR_ARG, "align", "0", cfg->align = 0)                                                                     \
    ROW(EPX_ERR_ARG, "replicate", "0", cfg->replicate = 0)                                                             \
    ROW(EPX_ERR_ARG, "n_channels", "0", cfg->n_channels = 0)                                                           \
    ROW(EPX_ERR_ARG, "n_blocks", "-1", cfg->n_blocks = -1)                                                             \
    ROW(EPX_ERR_ARG, "scale_format", "7", cfg->scale_format = (epx_scale_format_t)7)                                   \
    ROW(EPX_ERR_ARG, "scale_layout", "7", cfg->scale_layout = (epx_scale_layout_t)7)                                   \
    ROW(EPX_ERR_ARG, "renormalize", "2", cfg->renormalize = 2)                                                         \
    ROW(EPX_ERR_ARG, "debug", "2", cfg->debug = 2)                                                                     \
    ROW(EPX_ERR_ARG, "backend", "teleport", cfg->backend = "teleport")                                                 \
    ROW(EPX_ERR_ARG, "size", "4", cfg->size = 4)                                                                       \
    ROW(EPX_ERR_ARG, "replicate", "3", cfg->replicate = 3)                                                             \
    ROW(EPX_ERR_ARG, "scale_layout", "col", (cfg->layout = EPX_LAYOUT_LISTS, cfg->scale_layout = EPX_SCALE_COL_MAJOR)) \
    ROW(EPX_ERR_UNSUPPORTED, "scale_block", "513", cfg->scale_block = 513)                                             \
    ROW(EPX_ERR_ARG, "align", "2", cfg->align = 2)                                                                     \
    ROW(EPX_ERR_UNSUPPORTED, "expert_dtype", "fp8", cfg->expert_dtype = EPX_FP8_E4M3)                                  \
    ROW(EPX_ERR_ARG, "n_channels", "65", cfg->n_channels = 65)                                                         \
    ROW(EPX_ERR_UNSUPPORTED, "n_blocks", "1", cfg->n_blocks = 1)                                                       \
    ROW(EPX_ERR_UNSUPPORTED, "token_dtype", "bytes", cfg->token_dtype = EPX_BYTES)                                     \
    ROW(EPX_ERR_ARG, "combine_dtype", "bytes",                                                                         \
        (cfg->token_dtype = EPX_FP8_E4M3, cfg->wire_dtype = EPX_FP8_E4M3, cfg->combine_dtype = EPX_BYTES))

static void apply_plan_row(epx_plan_config_t *cfg, int idx) {
    int i = 0;
#define ROW(status, field, value, statement) \
    if (i++ == idx) statement;
    PLAN_ROWS(ROW)
#undef ROW
}

static const struct {
    epx_status_t status;
    const char *field, *value;
} plan_rows[] = {
#define ROW(status, field, value, statement) {status, field, value},
    PLAN_ROWS(ROW)
#undef ROW
};
enum { N_PLAN_ROWS = sizeof plan_rows / sizeof plan_rows[0] };

static int has_value(const char *text, const char *value) { /* whatever case the library writes names in */
    char low[1024];
    size_t n = strlen(text);
    if (n >= sizeof low) n = sizeof low - 1;
    for (size_t i = 0; i < n; i++) low[i] = text[i] >= 'A' && text[i] <= 'Z' ? (char)(text[i] + 32) : text[i];
    low[n] = 0;
    return strstr(low, value) != NULL;
}

static int check_refusal(th_rank_t *r, int i, epx_status_t s, const char *what) {
    const char *m = epx_last_error();
    TH_CHECK(r, s == plan_rows[i].status, "row %d (%s = %s), %s: status %d, wanted %d: %s", i, plan_rows[i].field,
             plan_rows[i].value, what, (int)s, (int)plan_rows[i].status, m);
    TH_CHECK(r, strstr(m, plan_rows[i].field), "row %d (%s = %s), %s: the message does not name the field: %s", i,
             plan_rows[i].field, plan_rows[i].value, what, m);
    TH_CHECK(r, has_value(m, plan_rows[i].value), "row %d (%s = %s), %s: the message does not give the value: %s", i,
             plan_rows[i].field, plan_rows[i].value, what, m);
    return 0;
}

static int body_plan_fields(th_rank_t *r) {
    bench_t b;
    if (setup_plan(r, &b) != 0) return -1;
    int n_bad = 0;
    for (int i = 0; i < N_PLAN_ROWS; i++) {
        epx_plan_config_t cfg;
        epx_plan_t *p = NULL;
        size_t bytes = 12345;
        th_note(r, "plan field row %d: %s = %s", i, plan_rows[i].field, plan_rows[i].value);
        th_plan_config(&b.c, &cfg);
        apply_plan_row(&cfg, i);
        int ok = check_refusal(r, i, epx_plan_create(b.g, &cfg, &p), "create") == 0 && p == NULL;
        if (strcmp(plan_rows[i].field, "backend") != 0)
            ok &= check_refusal(r, i, epx_plan_bytes(&cfg, 2, &bytes), "bytes") == 0 && bytes == 12345;
        if (!ok && r->rank == 0) fprintf(stderr, "    row %d: %s\n", i, epx_last_error());
        n_bad += !ok;
    }
    if (n_bad) return th_fail(r, "%d of %d plan fields are not refused as they should", n_bad, N_PLAN_ROWS);
    if (still_works(r, &b) != 0) return -1;
    teardown(&b);
    return 0;
}

static void plan_fields(void **state) {
    (void)state;
    assert_int_equal(th_launch(TH_THREADS, 2, body_plan_fields, NULL, 40, NULL), 0);
}

static int body_doubled_expert(th_rank_t *r) {
    bench_t b;
    epx_plan_t *p = NULL;
    epx_plan_config_t cfg;
    if (setup(r, &b) != 0) return -1;
    th_plan_config(&b.c, &cfg);
    cfg.n_slots = E;
    cfg.slot_expert = bad_slot_expert; /* expert 4 twice, 5 nowhere */
    epx_status_t s = epx_plan_create(b.g, &cfg, &p);
    TH_CHECK(r, s == EPX_ERR_ARG && strstr(epx_last_error(), "5"), "status %d: %s", (int)s, epx_last_error());
    TH_CHECK(r, strstr(epx_last_error(), "slot_expert"), "message: %s", epx_last_error());
    teardown(&b);
    return 0;
}

static void expert_without_slot(void **state) {
    (void)state;
    assert_int_equal(th_launch(TH_THREADS, 2, body_doubled_expert, NULL, 40, NULL), 0);
}

/* ---- configs that differ ---- */

static const int other_slot_rank[E] = {1, 0, 1, 0, 1, 0}, other_slot_expert[E] = {5, 4, 3, 2, 1, 0};

#define DIFF_ROWS(ROW)                                                            \
    ROW("max_tokens", cfg->max_tokens = T + 1)                                    \
    ROW("hidden", cfg->hidden = H + 1)                                            \
    ROW("top_k", cfg->top_k = K + 1)                                              \
    ROW("n_experts", cfg->n_experts = E + 1)                                      \
    ROW("slot_rank", (cfg->n_slots = E, cfg->slot_rank = other_slot_rank))        \
    ROW("slot_expert", (cfg->n_slots = E, cfg->slot_expert = other_slot_expert))  \
    ROW("placement_version", cfg->placement_version = 5)                          \
    ROW("token_dtype", (cfg->token_dtype = EPX_BF16, cfg->wire_dtype = EPX_BF16)) \
    ROW("wire_dtype", cfg->wire_dtype = EPX_FP8_E4M3)                             \
    ROW("expert_dtype", cfg->expert_dtype = EPX_BF16)                             \
    ROW("combine_dtype", cfg->combine_dtype = EPX_F16)                            \
    ROW("layout", cfg->layout = EPX_LAYOUT_LISTS)                                 \
    ROW("scale_block", cfg->scale_block = 64)                                     \
    ROW("scale_format", cfg->scale_format = EPX_SCALE_UE8M0)                      \
    ROW("scale_layout", cfg->scale_layout = EPX_SCALE_COL_MAJOR)                  \
    ROW("align", (cfg->layout = EPX_LAYOUT_CONTIGUOUS, cfg->align = 8))           \
    ROW("n_channels", cfg->n_channels = 2)                                        \
    ROW("n_slots", cfg->n_slots = E + 1)                                          \
    ROW("debug", cfg->debug = 1)                                                  \
    ROW("renormalize", cfg->renormalize = 1)                                      \
    ROW("replicate", cfg->replicate = 3)                                          \
    ROW("combine", cfg->combine = EPX_COMBINE_PARTIAL)                            \
    ROW("backend", cfg->backend = "collective")                                   \
    ROW("timeout_ns", cfg->timeout_ns = 123)

static const char *const diff_rows[] = {
#define ROW(field, statement) field,
    DIFF_ROWS(ROW)
#undef ROW
};
enum { N_DIFF_ROWS = sizeof diff_rows / sizeof diff_rows[0] };

static void apply_diff_row(epx_plan_config_t *cfg, int idx) {
    int i = 0;
#define ROW(field, statement) \
    if (i++ == idx) statement;
    DIFF_ROWS(ROW)
#undef ROW
}

static int body_mismatch(th_rank_t *r) {
    bench_t b;
    if (setup_plan(r, &b) != 0) return -1;
    for (int i = 0; i < N_DIFF_ROWS; i++) {
        epx_plan_config_t cfg;
        epx_plan_t *p = NULL;
        th_note(r, "%s differs", diff_rows[i]);
        th_plan_config(&b.c, &cfg);
        cfg.backend = "onesided";
        cfg.expert_dtype = EPX_F32;
        cfg.combine_dtype = EPX_BF16;
        if (r->rank == i % r->n_ranks) apply_diff_row(&cfg, i);
        epx_status_t s = epx_plan_create(b.g, &cfg, &p);
        TH_CHECK(r, s == EPX_ERR_MISMATCH, "%s differs: status %d: %s", diff_rows[i], (int)s, epx_last_error());
        int by_layout = strcmp(diff_rows[i], "align") == 0; /* differs before align does */
        TH_CHECK(r, strstr(epx_last_error(), by_layout ? "layout" : diff_rows[i]), "%s differs, the message does not name it: %s",
                 diff_rows[i], epx_last_error());
        TH_CHECK(r, p == NULL, "%s", "a handle was written by a failing call");
    }
    if (still_works(r, &b) != 0) return -1;
    teardown(&b);
    return 0;
}

static void mismatch_names_the_field(void **state) {
    (void)state;
    assert_int_equal(th_launch(TH_THREADS, 3, body_mismatch, NULL, 40, NULL), 0);
}

/* One rank's own config is bad: the others get an error instead of waiting for it. */
static int body_one_bad(th_rank_t *r) {
    bench_t b;
    epx_plan_config_t cfg;
    epx_plan_t *p = NULL;
    if (setup_plan(r, &b) != 0) return -1;
    th_plan_config(&b.c, &cfg);
    if (r->rank == 1) cfg.top_k = 65;
    epx_status_t s = epx_plan_create(b.g, &cfg, &p);
    TH_CHECK(r, s == (r->rank == 1 ? EPX_ERR_ARG : EPX_ERR_MISMATCH), "status %d: %s", (int)s, epx_last_error());
    TH_CHECK(r, r->rank == 1 || strstr(epx_last_error(), "rank 1"), "the message does not name the rank: %s", epx_last_error());
    if (still_works(r, &b) != 0) return -1;
    teardown(&b);
    return 0;
}

/* One rank gives no config at all, or none that can be read: nobody waits for it. */
static int body_one_without(th_rank_t *r) {
    bench_t b;
    epx_plan_config_t cfg;
    epx_plan_t *p = NULL;
    static const int short_table[1] = {0};
    if (setup_plan(r, &b) != 0) return -1;
    for (int how = 0; how < 4; how++) {
        int odd = r->rank == 1;
        th_plan_config(&b.c, &cfg);
        if (odd && how == 1) cfg.size = 4;
        if (odd && how == 3) cfg.n_slots = 1 << 30, cfg.slot_rank = short_table; /* refused before the table is read */
        uint64_t start = epx_now_ns();
        epx_status_t s = epx_plan_create(b.g, odd && how == 0 ? NULL : &cfg, odd && how == 2 ? NULL : &p);
        TH_CHECK(r, s == (how == 3 && !odd ? EPX_ERR_MISMATCH : EPX_ERR_ARG), "%d: status %d: %s", how, (int)s, epx_last_error());
        TH_CHECK(r, odd || strstr(epx_last_error(), "rank 1"), "%d: the message does not name the rank: %s", how,
                 epx_last_error());
        TH_CHECK(r, p == NULL && epx_now_ns() - start < 5000000000u, "%d: too late, or a handle was written", how);
    }
    if (still_works(r, &b) != 0) return -1;
    teardown(&b);
    return 0;
}

static void one_rank_without_a_config(void **state) {
    (void)state;
    assert_int_equal(th_launch(TH_THREADS, 3, body_one_without, NULL, 20, NULL), 0);
}

static void one_rank_with_a_bad_config(void **state) {
    (void)state;
    assert_int_equal(th_launch(TH_THREADS, 3, body_one_bad, NULL, 20, NULL), 0);
}

/* ---- world ---- */

static int body_world(th_rank_t *r) {
    epx_world_config_t c;
    epx_world_t *w = NULL;
    static const char *const later[] = {"file:/tmp/x", "pmix"};
    for (size_t i = 0; i < sizeof later / sizeof later[0]; i++) {
        epx_world_config_init(&c);
        c.bootstrap = later[i];
        c.rank = 0, c.n_ranks = 1;
        TH_STATUS(r, epx_world_create(&c, &w), EPX_ERR_UNSUPPORTED);
        TH_CHECK(r, strstr(epx_last_error(), "bootstrap") && strstr(epx_last_error(), later[i]), "message: %s", epx_last_error());
    }
#define REFUSED(field, value, statement)                                                                                      \
    do {                                                                                                                      \
        th_world_config(r, NULL, &c);                                                                                         \
        statement;                                                                                                            \
        TH_STATUS(r, epx_world_create(&c, &w), EPX_ERR_ARG);                                                                  \
        TH_CHECK(r, strstr(epx_last_error(), field) && strstr(epx_last_error(), value), "%s = %s: message: %s", field, value, \
                 epx_last_error());                                                                                           \
    } while (0)
    REFUSED("bootstrap", "carrier-pigeon", c.bootstrap = "carrier-pigeon");
    REFUSED("rank", "7", (c.rank = 7, c.n_ranks = 2));
    REFUSED("n_ranks", "0", (c.rank = 0, c.n_ranks = 0));
    REFUSED("n_ranks", "5000", (c.rank = 0, c.n_ranks = 5000));
    REFUSED("allgather", "NULL", c.allgather = NULL);
    REFUSED("barrier", "NULL", c.barrier = NULL);
    REFUSED("transport", "smoke", c.transports = "smoke");
    REFUSED("size", "3", c.size = 3);
    TH_CHECK(r, w == NULL, "%s", "a handle was written by a failing call");
    TH_STATUS(r, epx_world_create(NULL, &w), EPX_ERR_ARG);
    th_world_config(r, NULL, &c);
    TH_STATUS(r, epx_world_create(&c, NULL), EPX_ERR_ARG);
    return 0;
}

static void world_fields(void **state) {
    (void)state;
    assert_int_equal(th_launch(TH_THREADS, 1, body_world, NULL, 20, NULL), 0);
}

/* ---- weights of combine ---- */

/* They are refused where no rank could use them, before anything is sent. */
static int body_late_weights(th_rank_t *r) {
    bench_t b;
    static const char *const fields[] = {"PARTIAL", "renormalize"};
    const float weights[K] = {0};
    if (setup(r, &b) != 0) return -1;
    for (int i = 0; i < 2; i++) {
        epx_plan_config_t cfg;
        epx_io_t io;
        int32_t counts[E];
        float rows[E * 2 * T * H];
        th_plan_config(&b.c, &cfg);
        if (i == 0) cfg.combine = EPX_COMBINE_PARTIAL;
        else cfg.renormalize = 1;
        TH_OK(r, epx_plan_create(b.g, &cfg, &b.p));
        epx_io_init(&io);
        io.out_x = rows, io.out_counts = counts;
        TH_OK(r, epx_dispatch(b.p, &io));
        io.x = rows, io.combine_weights = weights;
        TH_STATUS(r, epx_combine(b.p, &io), EPX_ERR_ARG);
        TH_CHECK(r, strstr(epx_last_error(), "combine_weights") && strstr(epx_last_error(), fields[i]), "message: %s",
                 epx_last_error());
        io.combine_weights = NULL;
        TH_OK(r, epx_combine(b.p, &io));
        epx_plan_destroy(b.p);
        b.p = NULL;
    }
    teardown(&b);
    return 0;
}

static void weights_of_combine(void **state) {
    (void)state;
    assert_int_equal(th_launch(TH_THREADS, 2, body_late_weights, NULL, 20, NULL), 0);
}

/* ---- NULL handles ---- */

static int body_nulls(th_rank_t *r) {
    epx_group_t *g = NULL;
    epx_plan_t *p = NULL;
    epx_io_t io;
    epx_lists_t lists;
    epx_component_t comp;
    epx_plan_config_t cfg;
    size_t bytes;
    void *x = NULL;
    char byte[8];
    bench_t b;
    if (setup_plan(r, &b) != 0) return -1;
    epx_io_init(&io);
    epx_plan_config_init(&cfg);
    TH_STATUS(r, epx_group_create(NULL, NULL, 0, -1, &g), EPX_ERR_ARG);
    TH_STATUS(r, epx_group_create(b.w, NULL, 0, -1, NULL), EPX_ERR_ARG);
    TH_STATUS(r, epx_group_caps(NULL, &(epx_group_caps_t){.size = sizeof(epx_group_caps_t)}), EPX_ERR_ARG);
    TH_STATUS(r, epx_group_caps(b.g, NULL), EPX_ERR_ARG);
    TH_STATUS(r, epx_group_allgather(NULL, byte, 1, byte, 0), EPX_ERR_ARG);
    TH_STATUS(r, epx_group_allgather(b.g, NULL, 1, byte, 0), EPX_ERR_ARG);
    TH_STATUS(r, epx_group_allgather(b.g, byte, 1, NULL, 0), EPX_ERR_ARG);
    TH_STATUS(r, epx_plan_bytes(NULL, 2, &bytes), EPX_ERR_ARG);
    TH_STATUS(r, epx_plan_bytes(&cfg, 2, NULL), EPX_ERR_ARG);
    TH_STATUS(r, epx_plan_bytes(&cfg, 0, &bytes), EPX_ERR_ARG);
    cfg.max_tokens = cfg.hidden = cfg.top_k = cfg.n_experts = 1;
    TH_STATUS(r, epx_plan_bytes_hosts(&cfg, 2, 0, &bytes), EPX_ERR_ARG);
    TH_STATUS(r, epx_plan_bytes_hosts(&cfg, 2, 3, &bytes), EPX_ERR_ARG);
    TH_CHECK(r, strstr(epx_last_error(), "n_here is 3; legal: 1 to n_ranks 2") != NULL, "message: %s", epx_last_error());
    TH_STATUS(r, epx_plan_create(NULL, &cfg, &p), EPX_ERR_ARG);
    TH_STATUS(r, epx_plan_info(NULL, &(epx_plan_info_t){.size = sizeof(epx_plan_info_t)}), EPX_ERR_ARG);
    TH_STATUS(r, epx_plan_info(b.p, NULL), EPX_ERR_ARG);
    TH_STATUS(r, epx_plan_stats(NULL, &(epx_plan_stats_t){.size = sizeof(epx_plan_stats_t)}), EPX_ERR_ARG);
    TH_STATUS(r, epx_plan_stats(b.p, NULL), EPX_ERR_ARG);
    TH_STATUS(r, epx_plan_input(NULL, 0, &x), EPX_ERR_ARG);
    TH_STATUS(r, epx_plan_input(b.p, 0, NULL), EPX_ERR_ARG);
    TH_STATUS(r, epx_plan_input(b.p, 1, &x), EPX_ERR_ARG);
    TH_STATUS(r, epx_plan_lists(NULL, 0, &lists), EPX_ERR_ARG);
    TH_STATUS(r, epx_dispatch_send(NULL, &io), EPX_ERR_ARG);
    TH_STATUS(r, epx_dispatch_send(b.p, NULL), EPX_ERR_ARG);
    TH_STATUS(r, epx_dispatch_recv(NULL, &io), EPX_ERR_ARG);
    TH_STATUS(r, epx_combine_send(NULL, &io), EPX_ERR_ARG);
    TH_STATUS(r, epx_combine_recv(NULL, &io), EPX_ERR_ARG);
    TH_STATUS(r, epx_dispatch(NULL, &io), EPX_ERR_ARG);
    TH_STATUS(r, epx_combine(NULL, &io), EPX_ERR_ARG);
    TH_STATUS(r, epx_plan_poll(NULL), EPX_ERR_ARG);
    TH_STATUS(r, epx_plan_abort(NULL), EPX_ERR_ARG);
    TH_STATUS(r, epx_component(-1, &comp), EPX_ERR_NOT_FOUND);
    TH_STATUS(r, epx_component(10000, &comp), EPX_ERR_NOT_FOUND);
    TH_STATUS(r, epx_component(0, NULL), EPX_ERR_ARG);
    TH_STATUS(r, epx_plan_recover(NULL), EPX_ERR_ARG);
    TH_STATUS(r, epx_group_mask(NULL, 1, 0), EPX_ERR_ARG);
    TH_STATUS(r, epx_group_mask(b.g, r->rank, 0), EPX_ERR_ARG);
    TH_STATUS(r, epx_group_mask(b.g, 2, 0), EPX_ERR_ARG);
    TH_STATUS(r, epx_plan_set_placement(NULL, other_slot_rank, NULL, 1, 5), EPX_ERR_ARG);
    epx_plan_destroy(NULL);
    epx_group_destroy(NULL);
    epx_world_destroy(NULL);
    if (still_works(r, &b) != 0) return -1;
    teardown(&b);
    return 0;
}

static void null_handles(void **state) {
    (void)state;
    assert_int_equal(th_launch(TH_THREADS, 2, body_nulls, NULL, 20, NULL), 0);
}

/* ---- io fields, order of calls ---- */

typedef struct {
    float x[(T + 1) * H], y[E * 2 * T * H], weights[(T + 1) * K], out[E * 2 * T * H], result[T * H];
    int32_t ids[(T + 1) * K], counts[E];
    epx_io_t io;
} step_data_t;

static void fill_step(step_data_t *d, int n_tokens) {
    memset(d, 0, sizeof *d);
    epx_io_init(&d->io);
    for (int i = 0; i < (T + 1) * K; i++) d->ids[i] = i % E, d->weights[i] = 0.5f;
    for (int i = 0; i < (T + 1) * H; i++) d->x[i] = (float)i;
    d->io.x = d->x;
    d->io.ids = d->ids;
    d->io.weights = d->weights;
    d->io.n_tokens = n_tokens;
    d->io.out_x = d->out;
    d->io.out_counts = d->counts;
}

static int refuse_io(th_rank_t *r, epx_plan_t *p, step_data_t *d, epx_status_t wanted, const char *const *words) {
    epx_status_t s = epx_dispatch_send(p, &d->io);
    TH_CHECK(r, s == wanted, "%s: status %d, wanted %d: %s", words[0], (int)s, (int)wanted, epx_last_error());
    for (int i = 0; words[i]; i++)
        TH_CHECK(r, strstr(epx_last_error(), words[i]), "the message lacks \"%s\": %s", words[i], epx_last_error());
    return 0;
}

#define REFUSE_IO(wanted, statement, ...)                         \
    do {                                                          \
        const char *const words[] = {__VA_ARGS__, NULL};          \
        fill_step(d, T);                                          \
        statement;                                                \
        if (refuse_io(r, b->p, d, wanted, words) != 0) return -1; \
    } while (0)

static int refuse_all_io(th_rank_t *r, bench_t *b, step_data_t *d) {
    REFUSE_IO(EPX_ERR_ARG, d->ids[K + 1] = E, "ids", "6", "token 1", "k 1");
    REFUSE_IO(EPX_ERR_ARG, d->ids[T * K - 1] = -2, "ids", "-2", "token 3", "k 2");
    REFUSE_IO(EPX_ERR_ARG, d->ids[0] = 0x7FFFFFFF, "ids", "2147483647");
    REFUSE_IO(EPX_ERR_CAPACITY, d->io.n_tokens = T + 1, "n_tokens", "5", "4");
    REFUSE_IO(EPX_ERR_ARG, d->io.n_tokens = -1, "n_tokens", "-1");
    REFUSE_IO(EPX_ERR_ARG, d->io.x = NULL, "x", "NULL");
    REFUSE_IO(EPX_ERR_ARG, d->io.ids = NULL, "ids", "NULL");
    REFUSE_IO(EPX_ERR_ARG, d->io.weights = NULL, "weights", "NULL");
    REFUSE_IO(EPX_ERR_ARG, d->io.channel = 1, "channel", "1");
    REFUSE_IO(EPX_ERR_ARG, d->io.channel = -1, "channel", "-1");
    REFUSE_IO(EPX_ERR_ARG, d->io.size = 8, "size", "8");
    REFUSE_IO(EPX_ERR_ARG, d->io.n_tokens_device = (const uint32_t *)d->ids, "n_tokens_device");
    REFUSE_IO(EPX_ERR_ARG, d->io.stream = d, "stream");
    return 0;
}

static int body_io(th_rank_t *r) {
    bench_t b;
    step_data_t *d = malloc(sizeof *d);
    if (!d || setup_plan(r, &b) != 0) return th_fail(r, "set-up");
    if (refuse_all_io(r, &b, d) != 0) return -1;
    fill_step(d, T);
    TH_OK(r, epx_dispatch_send(b.p, &d->io)); /* the same step, right this time */
    d->io.out_x = NULL;
    TH_STATUS(r, epx_dispatch_recv(b.p, &d->io), EPX_ERR_ARG);
    TH_CHECK(r, strstr(epx_last_error(), "out_x"), "message: %s", epx_last_error());
    d->io.out_x = d->out;
    d->io.out_counts = NULL;
    TH_STATUS(r, epx_dispatch_recv(b.p, &d->io), EPX_ERR_ARG);
    TH_CHECK(r, strstr(epx_last_error(), "out_counts"), "message: %s", epx_last_error());
    d->io.out_counts = d->counts;
    TH_OK(r, epx_dispatch_recv(b.p, &d->io));
    d->io.x = NULL;
    TH_STATUS(r, epx_combine_send(b.p, &d->io), EPX_ERR_ARG);
    d->io.x = d->y;
    TH_OK(r, epx_combine_send(b.p, &d->io));
    d->io.out_x = NULL;
    TH_STATUS(r, epx_combine_recv(b.p, &d->io), EPX_ERR_ARG);
    d->io.out_x = d->result;
    TH_OK(r, epx_combine_recv(b.p, &d->io));
    if (still_works(r, &b) != 0) return -1;
    teardown(&b);
    free(d);
    return 0;
}

static void io_fields(void **state) {
    (void)state;
    assert_int_equal(th_launch(TH_THREADS, 2, body_io, NULL, 20, NULL), 0);
}

typedef epx_status_t (*half_fn_t)(epx_plan_t *, const epx_io_t *);

static int body_order(th_rank_t *r) {
    static const half_fn_t halves[4] = {epx_dispatch_send, epx_dispatch_recv, epx_combine_send, epx_combine_recv};
    static const char *const names[4] = {"dispatch_send", "dispatch_recv", "combine_send", "combine_recv"};
    bench_t b;
    step_data_t *d = malloc(sizeof *d);
    if (!d || setup_plan(r, &b) != 0) return th_fail(r, "set-up");
    for (int round = 0; round < 2; round++) {
        fill_step(d, T);
        for (int next = 0; next < 4; next++) {
            d->io.x = next < 2 ? d->x : d->y;
            d->io.out_x = next < 2 ? d->out : d->result;
            for (int wrong = 0; wrong < 4; wrong++) {
                if (wrong == next) continue;
                TH_STATUS(r, halves[wrong](b.p, &d->io), EPX_ERR_STATE);
                TH_CHECK(r, strstr(epx_last_error(), names[next]), "the message does not name the call that is due (%s): %s",
                         names[next], epx_last_error());
            }
            TH_STATUS(r, next == 0 ? EPX_ERR_STATE : epx_dispatch(b.p, &d->io), EPX_ERR_STATE);
            TH_STATUS(r, next == 2 ? EPX_ERR_STATE : epx_combine(b.p, &d->io), EPX_ERR_STATE);
            TH_OK(r, halves[next](b.p, &d->io));
        }
    }
    if (still_works(r, &b) != 0) return -1;
    teardown(&b);
    free(d);
    return 0;
}

static void order_of_calls(void **state) {
    (void)state;
    assert_int_equal(th_launch(TH_THREADS, 2, body_order, NULL, 20, NULL), 0);
}

static int body_lists_order(th_rank_t *r) {
    bench_t b;
    epx_lists_t lists;
    epx_plan_config_t pc;
    if (setup_plan(r, &b) != 0) return -1;
    TH_STATUS(r, epx_plan_lists(b.p, 0, &lists), EPX_ERR_STATE); /* EXPERT_MAJOR, and before dispatch_recv */
    epx_plan_destroy(b.p);
    b.c.shape.layout = EPX_LAYOUT_LISTS;
    th_plan_config(&b.c, &pc);
    TH_OK(r, epx_plan_create(b.g, &pc, &b.p));
    TH_STATUS(r, epx_plan_lists(b.p, 0, &lists), EPX_ERR_STATE);
    if (still_works(r, &b) != 0) return -1;
    TH_STATUS(r, epx_plan_lists(b.p, 0, &lists), EPX_ERR_STATE);
    teardown(&b);
    return 0;
}

static void lists_only_after_recv(void **state) {
    (void)state;
    assert_int_equal(th_launch(TH_THREADS, 2, body_lists_order, NULL, 20, NULL), 0);
}

static void statuses_and_version(void **state) {
    (void)state;
    assert_string_equal(epx_version(), "0.1.0");
    assert_string_equal(epx_status_text(EPX_OK), "done");
    assert_string_equal(epx_status_text(EPX_ERR_PEER), "a peer is gone");
    assert_string_equal(epx_status_text((epx_status_t)-9999), "unknown status");
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(statuses_and_version),
        cmocka_unit_test(plan_fields),
        cmocka_unit_test(expert_without_slot),
        cmocka_unit_test(mismatch_names_the_field),
        cmocka_unit_test(one_rank_with_a_bad_config),
        cmocka_unit_test(one_rank_without_a_config),
        cmocka_unit_test(world_fields),
        cmocka_unit_test(weights_of_combine),
        cmocka_unit_test(null_handles),
        cmocka_unit_test(io_fields),
        cmocka_unit_test(order_of_calls),
        cmocka_unit_test(lists_only_after_recv),
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
