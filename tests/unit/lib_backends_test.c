/* The backends against each other, bit for bit: lists, rows, scales, results and counters of onesided and collective equal those
 * of the oracle, over layouts, combine modes and dtypes, with threads as ranks. The full contract suite is tests/contract. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "base/half.h"
#include "base/philox.h"
#include "lib_threads.h"

enum { T_MAX = 7, K = 4, H = 300, E = 10, STEPS = 5, W_MAX = 4, N_BACKENDS = 3 };
static const char *const backends[N_BACKENDS] = {"ref", "onesided", "collective"};

typedef struct {
    epx_layout_t layout;
    epx_combine_t combine;
    epx_dtype_t token, wire, expert, comb;
    int use_input, with_add;
    uint64_t seed;
    char failure[256];
} case_t;

static size_t bytes_of(epx_dtype_t d) { return d == EPX_F32 ? 4 : d == EPX_FP8_E4M3 ? 1 : 2; }

static void put(epx_dtype_t d, void *p, size_t i, float f) {
    uint16_t h = d == EPX_BF16 ? epx_f32_to_bf16(f) : epx_f32_to_f16(f);
    uint8_t b = epx_f32_to_e4m3(f);
    if (d == EPX_F32) memcpy((char *)p + 4 * i, &f, 4);
    else if (d == EPX_FP8_E4M3) ((uint8_t *)p)[i] = b;
    else memcpy((char *)p + 2 * i, &h, 2);
}

static float noise(uint64_t seed, uint64_t i) { return epx_philox_unit(seed, i) * 4.0f - 2.0f; }

/* Inputs of one rank and step. */
typedef struct {
    int n;
    int32_t ids[T_MAX * K];
    float weights[T_MAX * K], x_scale[T_MAX * 3];
    char x[T_MAX * H * 4], add[T_MAX * H * 4];
} input_t;

static void draw(const case_t *c, int rank, int step, input_t *in) {
    uint64_t seed = c->seed * 1000 + (uint64_t)step * 10 + (uint64_t)rank;
    epx_dtype_t out = c->token == EPX_FP8_E4M3 ? c->comb : c->token;
    in->n = (int)(epx_philox_u32(seed, 0) % (T_MAX + 1)) * (epx_philox_u32(seed, 1) % 4 != 0);
    for (size_t i = 0; i < T_MAX * K; i++) {
        in->ids[i] = (int32_t)(epx_philox_u32(seed, 10 + i) % (E + 2)) - 1; /* -1 .. E, with repeats */
        if (in->ids[i] == E) in->ids[i] = 0;
        in->weights[i] = noise(seed, 500 + i);
    }
    for (size_t i = 0; i < T_MAX * 3; i++) in->x_scale[i] = epx_philox_unit(seed, 900 + i);
    for (size_t i = 0; i < T_MAX * H; i++) {
        put(c->token, in->x, i, noise(seed, 1000 + i));
        put(out, in->add, i, noise(seed, 100000 + i));
    }
}

static epx_status_t make_plan(const case_t *c, epx_group_t *g, const char *backend, epx_plan_t **out) {
    epx_plan_config_t cfg;
    epx_plan_config_init(&cfg);
    cfg.max_tokens = T_MAX;
    cfg.hidden = H;
    cfg.top_k = K;
    cfg.n_experts = E;
    cfg.token_dtype = c->token;
    cfg.wire_dtype = c->wire;
    cfg.expert_dtype = c->expert;
    cfg.combine_dtype = c->comb;
    cfg.layout = c->layout;
    cfg.combine = c->combine;
    cfg.backend = backend;
    epx_status_t s = epx_plan_create(g, &cfg, out);
    size_t bytes = 0;
    epx_plan_info_t info = {.size = sizeof info};
    if (s == EPX_OK && (epx_plan_bytes(&cfg, epx_group_size(g), &bytes) || epx_plan_info(*out, &info) ||
                        bytes != info.slab_bytes + info.private_bytes))
        return EPX_ERR_INTERNAL;
    return s;
}

/* What one backend gave in one step. */
typedef struct {
    int32_t counts[E], hist[E], n_rows;
    epx_list_entry_t entries[W_MAX * T_MAX * K];
    char *rows, *y, *out;
    float *scales;
} answer_t;

static size_t row_cap(int w) { return (size_t)E * (size_t)w * T_MAX; }

static void expert_outputs(const case_t *c, int rank, int step, const epx_plan_info_t *info, answer_t *a) {
    int32_t at = 0;
    for (int e = 0; e < info->n_local_experts; e++) {
        for (int32_t j = 0; j < a->counts[e]; j++, at++) {
            size_t row = c->layout == EPX_LAYOUT_LISTS ? (size_t)at : (size_t)e * (size_t)info->row_cap + (size_t)j;
            for (size_t i = 0; i < H; i++)
                put(c->expert, a->y, row * H + i, noise(c->seed + 77, (uint64_t)(((step * 8 + rank) * 512 + at) * H) + i));
        }
    }
}

static void copy_lists(const case_t *c, const epx_lists_t *l, answer_t *a) {
    a->n_rows = l->n_rows;
    for (int32_t i = 0; i < l->n_rows; i++) {
        a->entries[i] = l->entries[i];
        memcpy(a->rows + (size_t)i * H * bytes_of(c->wire),
               (const char *)l->row_base[l->entries[i].src] + l->entries[i].token * l->row_stride_bytes, H * bytes_of(c->wire));
        if (l->scale_base != NULL)
            memcpy(a->scales + (size_t)i * 3, l->scale_base[l->entries[i].src] + l->entries[i].token * l->scale_stride, 12);
    }
}

static epx_status_t exchange(const case_t *c, epx_plan_t *p, int rank, int step, input_t *in, answer_t *a) {
    epx_io_t io;
    epx_lists_t lists;
    void *input;
    epx_plan_info_t info = {.size = sizeof info};
    epx_io_init(&io);
    epx_plan_info(p, &info);
    epx_plan_input(p, 0, &input);
    if (c->use_input) memcpy(input, in->x, (size_t)in->n * H * bytes_of(c->token));
    io.x = in->n == 0 ? NULL : c->use_input ? input : in->x;
    io.x_scale = c->token == EPX_FP8_E4M3 ? in->x_scale : NULL;
    io.ids = in->ids;
    io.weights = in->weights;
    io.n_tokens = in->n;
    io.out_counts = a->counts;
    io.out_histogram = a->hist;
    if (c->layout == EPX_LAYOUT_EXPERT_MAJOR) {
        io.out_x = a->rows;
        io.out_scale = c->wire == EPX_FP8_E4M3 ? a->scales : NULL;
    }
    epx_status_t s = epx_dispatch(p, &io);
    if (s) return s;
    if (c->layout == EPX_LAYOUT_LISTS) {
        s = epx_plan_lists(p, 0, &lists);
        if (s) return s;
        copy_lists(c, &lists, a);
    }
    expert_outputs(c, rank, step, &info, a);
    epx_io_init(&io);
    io.x = a->y;
    io.out_x = a->out;
    io.add = c->with_add ? in->add : NULL;
    return epx_combine(p, &io);
}

static int same(const answer_t *a, const answer_t *b, int w, size_t out_bytes) {
    return !memcmp(a->counts, b->counts, sizeof a->counts) && !memcmp(a->hist, b->hist, sizeof a->hist) &&
           a->n_rows == b->n_rows && !memcmp(a->entries, b->entries, sizeof a->entries) &&
           !memcmp(a->rows, b->rows, row_cap(w) * H * 4) && !memcmp(a->scales, b->scales, row_cap(w) * 12) &&
           !memcmp(a->out, b->out, out_bytes);
}

static void new_answer(answer_t *a, int w) {
    memset(a, 0, sizeof *a);
    a->rows = calloc(row_cap(w), H * 4);
    a->y = calloc(row_cap(w), H * 4);
    a->scales = calloc(row_cap(w), 12);
    a->out = calloc(T_MAX, H * 4);
}

static void free_answer(answer_t *a) {
    free(a->rows);
    free(a->y);
    free(a->scales);
    free(a->out);
}

static int same_counters(epx_plan_t *a, epx_plan_t *b) {
    uint64_t n[4][W_MAX] = {{0}};
    epx_plan_stats_t s = {.size = sizeof s, .rows_sent = n[0], .rows_received = n[1]};
    epx_plan_stats_t t = {.size = sizeof t, .rows_sent = n[2], .rows_received = n[3]};
    return epx_plan_stats(a, &s) == EPX_OK && epx_plan_stats(b, &t) == EPX_OK && !memcmp(n[0], n[2], sizeof n[0]) &&
           !memcmp(n[1], n[3], sizeof n[1]) && s.n_combines == STEPS;
}

static void body(epx_world_t *w, int rank, void *arg) {
    case_t *c = arg;
    epx_group_t *g = NULL;
    epx_plan_t *p[N_BACKENDS] = {NULL};
    input_t *in = malloc(sizeof *in);
    const char *what = "group";
    epx_status_t s = epx_group_create(w, NULL, 0, -1, &g);
    for (int b = 0; b < N_BACKENDS && s == EPX_OK; b++) s = make_plan(c, g, what = backends[b], &p[b]);
    for (int step = 0; step < STEPS && s == EPX_OK; step++) {
        answer_t a[N_BACKENDS];
        draw(c, rank, step, in);
        for (int b = 0; b < N_BACKENDS; b++) new_answer(&a[b], epx_world_size(w));
        for (int b = 0; b < N_BACKENDS && s == EPX_OK; b++) s = exchange(c, p[b], rank, step, in, &a[b]);
        for (int b = 1; b < N_BACKENDS && s == EPX_OK; b++)
            if (!same(&a[0], &a[b], epx_world_size(w),
                      (size_t)in->n * H * bytes_of(c->token == EPX_FP8_E4M3 ? c->comb : c->token)))
                snprintf(c->failure, sizeof c->failure, "%s differs from ref: rank %d step %d", backends[b], rank, step);
        for (int b = 0; b < N_BACKENDS; b++) free_answer(&a[b]);
    }
    if (s != EPX_OK) snprintf(c->failure, sizeof c->failure, "rank %d %s: %.200s", rank, what, epx_last_error());
    for (int b = 1; b < N_BACKENDS && s == EPX_OK; b++)
        if (!same_counters(p[0], p[b])) snprintf(c->failure, sizeof c->failure, "counters of %s differ", backends[b]);
    for (int b = 0; b < N_BACKENDS; b++) epx_plan_destroy(p[b]);
    epx_group_destroy(g);
    free(in);
}

static uint64_t base_seed(void) {
    const char *s = getenv("EPX_TEST_SEED");
    return s != NULL ? strtoull(s, NULL, 10) : 20261130;
}

static void run_case(case_t c, int w) {
    c.seed = base_seed() + (uint64_t)w;
    assert_int_equal(lib_run(w, body, &c), EPX_OK);
    if (c.failure[0])
        fail_msg("%s (W %d seed %llu layout %d combine %d token %d wire %d expert %d combine dtype %d)", c.failure, w,
                 (unsigned long long)base_seed(), c.layout, c.combine, c.token, c.wire, c.expert, c.comb);
}

static void backends_give_the_same_bits(void **state) {
    (void)state;
    static const epx_dtype_t types[][4] = {
        {EPX_F32, EPX_F32, EPX_F32, EPX_F32},      {EPX_BF16, EPX_BF16, EPX_F32, EPX_BF16},
        {EPX_F16, EPX_F16, EPX_F16, EPX_F16},      {EPX_BF16, EPX_FP8_E4M3, EPX_BF16, EPX_BF16},
        {EPX_F32, EPX_FP8_E4M3, EPX_F32, EPX_F16}, {EPX_FP8_E4M3, EPX_FP8_E4M3, EPX_F32, EPX_BF16},
    };
    static const int sizes[] = {1, 2, 3, 4};
    int n = 0;
    for (size_t t = 0; t < sizeof types / sizeof types[0]; t++)
        for (int l = 0; l < 2; l++)
            for (int m = 0; m < 2; m++, n++)
                run_case((case_t){(epx_layout_t)l, (epx_combine_t)m, types[t][0], types[t][1], types[t][2], types[t][3], n % 2,
                                  n % 3 == 0, 0, ""},
                         sizes[(size_t)(n + l) % 4]);
}

/* ---- reuse: a rank that sends a peer nothing, then something, may not overtake the peer's reading ---- */

static void overtake_body(epx_world_t *w, int rank, void *arg) {
    static const float weights[2] = {1, 1}, x[2 * 8] = {0};
    static const int32_t own[2] = {0, 0}, peer[2] = {1, 1};
    int *bad = arg;
    epx_group_t *g = NULL;
    epx_plan_t *p = NULL;
    epx_plan_config_t cfg;
    epx_plan_config_init(&cfg);
    cfg.max_tokens = 2, cfg.hidden = 8, cfg.top_k = 1, cfg.n_experts = 2; /* expert e is on rank e */
    if (epx_group_create(w, NULL, 0, -1, &g) || epx_plan_create(g, &cfg, &p)) bad[rank] = -1;
    for (int step = 0; step < 40 && bad[rank] == 0; step++) {
        float out[2 * 8], y[4 * 8] = {0};
        int32_t count = -1;
        epx_io_t io;
        epx_io_init(&io);
        io.x = x, io.weights = weights, io.out_counts = &count, io.n_tokens = rank == 0 ? 2 : 0;
        io.ids = step % 2 ? peer : own;
        if (epx_dispatch(p, &io)) bad[rank] = -2;
        if (count != (rank == step % 2 ? 2 : 0)) bad[rank] = step + 1;
        io.x = y, io.out_x = out;
        if (epx_combine(p, &io)) bad[rank] = -3;
    }
    epx_plan_destroy(p);
    epx_group_destroy(g);
}

static void routing_is_not_overwritten_while_it_is_read(void **state) {
    (void)state;
    int bad[2] = {0, 0};
    assert_int_equal(lib_run(2, overtake_body, bad), EPX_OK);
    assert_int_equal(bad[0], 0);
    assert_int_equal(bad[1], 0);
}

/* ---- failures with threads as ranks ---- */

typedef struct {
    const char *backend;
    int phase; /* 0: rank 2 stops before dispatch, 1: before combine; 2: rank 2 aborts from a second thread while all wait */
    epx_status_t got[3];
    char message[3][256];
} stop_t;

static void *abort_later(void *plan) {
    struct timespec ts = {0, 30000000};
    nanosleep(&ts, NULL);
    (void)epx_plan_poll(plan);
    (void)epx_plan_abort(plan);
    return NULL;
}

static epx_status_t one_exchange(epx_plan_t *p, int stop_before_combine) {
    static const int32_t ids[4] = {0, 1, 2, 0};
    static const float weights[4] = {1, 2, 3, 4}, x[16] = {1};
    static float y[3 * 2 * 3 * 16];
    float out[16];
    epx_io_t io;
    epx_io_init(&io);
    io.x = x, io.ids = ids, io.weights = weights, io.n_tokens = 1;
    epx_status_t s = epx_dispatch(p, &io);
    if (s || stop_before_combine) return s;
    io.x = y, io.out_x = out;
    return epx_combine(p, &io);
}

static void stop_body(epx_world_t *w, int rank, void *arg) {
    stop_t *c = arg;
    epx_group_t *g = NULL;
    epx_plan_t *p = NULL;
    epx_plan_config_t cfg;
    pthread_t thread;
    epx_plan_config_init(&cfg);
    cfg.max_tokens = 2, cfg.hidden = 16, cfg.top_k = 4, cfg.n_experts = 3;
    cfg.backend = c->backend;
    cfg.timeout_ns = c->phase == 2 ? 20000000000u : 150000000u;
    if (epx_group_create(w, NULL, 0, -1, &g) || epx_plan_create(g, &cfg, &p)) return;
    for (int i = 0; i < 3; i++) c->got[rank] = one_exchange(p, 0);
    if (rank == 2 && c->phase == 2) {
        pthread_create(&thread, NULL, abort_later, p);
        pthread_join(thread, NULL);
        c->got[rank] = epx_plan_poll(p);
    } else if (rank == 2) {
        if (c->phase == 1) (void)one_exchange(p, 1);
        struct timespec ts = {0, 300000000};
        nanosleep(&ts, NULL);
        c->got[rank] = one_exchange(p, 0);
    } else {
        c->got[rank] = one_exchange(p, 0);
    }
    snprintf(c->message[rank], sizeof c->message[rank], "%.250s", epx_last_error());
    epx_plan_destroy(p);
    epx_group_destroy(g);
}

static void a_rank_that_stops_ends_the_plan(void **state) {
    (void)state;
    for (int b = 0; b < N_BACKENDS; b++) {
        for (int phase = 0; phase < 3; phase++) {
            stop_t c = {backends[b], phase, {EPX_OK, EPX_OK, EPX_OK}, {""}};
            assert_int_equal(lib_run(3, stop_body, &c), EPX_OK);
            int timeouts = 0;
            for (int r = 0; r < 3; r++) {
                int ok = c.got[r] == EPX_ERR_ABORTED || (phase < 2 && c.got[r] == EPX_ERR_TIMEOUT);
                if (!ok) fail_msg("%s phase %d rank %d: %d %s", backends[b], phase, r, c.got[r], c.message[r]);
                timeouts += c.got[r] == EPX_ERR_TIMEOUT;
                if (c.got[r] == EPX_ERR_TIMEOUT) assert_non_null(strstr(c.message[r], phase ? "combine: " : "dispatch: "));
            }
            assert_true(phase == 2 ? timeouts == 0 : timeouts >= 1);
        }
    }
}

int main(void) {
    printf("seed %llu (EPX_TEST_SEED)\n", (unsigned long long)base_seed());
    const struct CMUnitTest tests[] = {cmocka_unit_test(backends_give_the_same_bits),
                                       cmocka_unit_test(routing_is_not_overwritten_while_it_is_read),
                                       cmocka_unit_test(a_rank_that_stops_ends_the_plan)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
