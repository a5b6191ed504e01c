/* What a device plan does when something goes wrong, and under CUDA graphs: every error is named within its deadline, the device
 * stays usable, nothing hangs.
 * Usage: faults_gpu [N_DEVICES [REPLAYS]]. Exit 77: no GPU can be used, with the reason. */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/atomic.h"
#include "base/clock.h"
#include "base/half.h"
#include "tests/gpu/ranks.h"
#include "tests/harness/batch.h"

enum { T = 12, H = 256, K = 4, E = 16, N_TABLES = 16, ARENA_BYTES = 32 << 20 };

typedef struct {
    int n_devices, n_replays;
} args_t;

/* Device buffers of one exchange. */
typedef struct {
    uint16_t *x, *rows, *result;
    int32_t *ids, *counts;
    float *weights;
    uint32_t *n_tokens;
} buffers_t;

static void config(epx_plan_config_t *c) {
    epx_plan_config_init(c);
    c->max_tokens = T, c->hidden = H, c->top_k = K, c->n_experts = E;
    c->token_dtype = c->wire_dtype = EPX_BF16;
    c->layout = EPX_LAYOUT_EXPERT_MAJOR;
    c->timeout_ns = 300000000;
}

static int take_buffers(th_rank_t *r, th_device_t *d, const epx_plan_t *p, buffers_t *b) {
    epx_plan_info_t info = {.size = sizeof info};
    TH_OK(r, epx_plan_info(p, &info));
    size_t slots = (size_t)info.n_local_experts * (size_t)info.row_cap;
    d->reset(d);
    b->x = d->take(d, (size_t)N_TABLES * T * H * 2);
    b->ids = d->take(d, (size_t)N_TABLES * T * K * 4);
    b->weights = d->take(d, (size_t)N_TABLES * T * K * 4);
    b->rows = d->take(d, slots * H * 2);
    b->counts = d->take(d, (size_t)info.n_local_experts * 4 + 4);
    b->result = d->take(d, (size_t)T * H * 2);
    b->n_tokens = d->take(d, N_TABLES * 4);
    TH_CHECK(r, b->n_tokens != NULL, "%s", "arena");
    return 0;
}

static epx_io_t io_of(const th_device_t *d, const buffers_t *b, int table) {
    epx_io_t io;
    epx_io_init(&io);
    io.x = b->x + (size_t)table * T * H;
    io.ids = b->ids + (size_t)table * T * K;
    io.weights = b->weights + (size_t)table * T * K;
    io.n_tokens_device = b->n_tokens + table;
    io.out_x = b->rows;
    io.out_counts = b->counts;
    io.stream = d->stream;
    return io;
}

/* The experts give their rows back unchanged. */
static epx_io_t back_of(const th_device_t *d, const buffers_t *b) {
    epx_io_t io;
    epx_io_init(&io);
    io.x = b->rows;
    io.out_x = b->result;
    io.stream = d->stream;
    return io;
}

/* ---- graphs ---- */

typedef struct {
    uint16_t x[N_TABLES][T][H], want[N_TABLES][T][H];
    int32_t ids[N_TABLES][T][K];
    float weights[N_TABLES][T][K];
    uint32_t n_tokens[N_TABLES];
} tables_t;

static void fill_tables(tables_t *t, uint64_t seed) {
    uint64_t at = 0;
    for (int i = 0; i < N_TABLES; i++) {
        t->n_tokens[i] = (uint32_t)(th_mix(seed, at++) % (T + 1));
        for (int k = 0; k < T * K; k++) {
            t->ids[i][k / K][k % K] = (int32_t)(th_mix(seed, at++) % (E + 1)) - 1;
            t->weights[i][k / K][k % K] = (float)(th_mix(seed, at++) % 1000) / 1000;
        }
        for (int h = 0; h < T * H; h++)
            t->x[i][h / H][h % H] = epx_f32_to_bf16((float)(int)(th_mix(seed, at++) % 2001) / 500 - 2);
        for (int h = 0; h < T * H; h++) {
            float acc = 0;
            for (int k = 0; k < K; k++)
                if (t->ids[i][h / H][k] >= 0) acc = fmaf(t->weights[i][h / H][k], epx_bf16_to_f32(t->x[i][h / H][h % H]), acc);
            t->want[i][h / H][h % H] = epx_f32_to_bf16(acc);
        }
    }
}

static int upload_tables(th_rank_t *r, th_device_t *d, const buffers_t *b, const tables_t *t) {
    TH_CHECK(r,
             d->upload(d, b->x, t->x, sizeof t->x) == 0 && d->upload(d, b->ids, t->ids, sizeof t->ids) == 0 &&
                 d->upload(d, b->weights, t->weights, sizeof t->weights) == 0 &&
                 d->upload(d, b->n_tokens, t->n_tokens, sizeof t->n_tokens) == 0,
             "%s", "upload");
    return 0;
}

static int exchange(th_rank_t *r, epx_plan_t *p, th_device_t *d, const buffers_t *b, int table) {
    epx_io_t io = io_of(d, b, table), back = back_of(d, b);
    TH_OK(r, epx_dispatch(p, &io));
    TH_OK(r, epx_combine(p, &back));
    return 0;
}

static int check_result(th_rank_t *r, epx_plan_t *p, th_device_t *d, const buffers_t *b, const tables_t *t, int table, int turn) {
    static _Thread_local uint16_t got[T][H];
    TH_CHECK(r, d->sync(d) == 0, "%s", "stream");
    TH_OK(r, epx_plan_poll(p));
    TH_CHECK(r, d->fetch(d, got, b->result, sizeof got) == 0, "%s", "fetch");
    for (uint32_t i = 0; i < t->n_tokens[table]; i++)
        for (int h = 0; h < H; h++)
            TH_CHECK(r, got[i][h] == t->want[table][i][h], "turn %d table %d token %u channel %d: %04x, wanted %04x", turn, table,
                     i, h, got[i][h], t->want[table][i][h]);
    return 0;
}

static int record(th_rank_t *r, epx_plan_t *p, th_device_t *d, const buffers_t *b, void **graphs) {
    for (int i = 0; i < N_TABLES; i++) {
        TH_CHECK(r, tg_capture_begin(d) == 0, "%s", "capture");
        if (exchange(r, p, d, b, i) != 0) return -1;
        TH_CHECK(r, (graphs[i] = tg_capture_end(d)) != NULL, "%s", "capture");
    }
    return 0;
}

static int replay(th_rank_t *r, epx_plan_t *p, th_device_t *d, const buffers_t *b, const tables_t *t, void **graphs) {
    const args_t *a = r->arg;
    for (int turn = 0; turn < a->n_replays; turn++) {
        int table = (int)(th_mix(7, (uint64_t)turn) % N_TABLES);
        if (turn % 50 == 49 && exchange(r, p, d, b, table) != 0) return -1; /* eager calls among the replays */
        if (turn % 50 != 49) TH_CHECK(r, tg_graph_launch(d, graphs[table]) == 0, "%s", "launch");
        if (turn < 64 || turn % 97 == 0)
            if (check_result(r, p, d, b, t, table, turn) != 0) return -1;
    }
    return check_result(r, p, d, b, t, (int)(th_mix(7, (uint64_t)(a->n_replays - 1)) % N_TABLES), a->n_replays);
}

/* All ranks are here: between two of these nobody allocates, frees, loads or instantiates, which would wait for the kernels of
 * the ranks on the same device, and these for the rank that waits. */
static int meet(th_rank_t *r) {
    TH_CHECK(r, th_barrier(r) == EPX_OK, "%s", "another rank failed");
    return 0;
}

static int graphs(th_rank_t *r, tg_rank_t *k) {
    epx_plan_config_t cfg;
    epx_plan_t *p = NULL;
    buffers_t b;
    void *g[N_TABLES] = {NULL};
    tables_t *t = malloc(sizeof *t);
    config(&cfg);
    cfg.timeout_ns = 20000000000u;
    TH_OK(r, epx_plan_create(k->group, &cfg, &p));
    fill_tables(t, 100 + (uint64_t)r->rank);
    int rc = take_buffers(r, k->device, p, &b) || upload_tables(r, k->device, &b, t) || record(r, p, k->device, &b, g) ||
             meet(r) || replay(r, p, k->device, &b, t, g);
    if (rc != 0) epx_plan_abort(p);
    else rc = meet(r);
    for (int i = 0; i < N_TABLES; i++) tg_graph_free(g[i]);
    epx_plan_destroy(p);
    free(t);
    return rc;
}

/* A plan cannot be made while this thread captures. */
static int capture_refused(th_rank_t *r, tg_rank_t *k) {
    epx_plan_config_t cfg;
    epx_plan_t *p = NULL;
    config(&cfg);
    TH_CHECK(r, tg_capture_begin(k->device) == 0, "%s", "capture");
    epx_status_t s = epx_plan_create(k->group, &cfg, &p);
    tg_graph_free(tg_capture_end(k->device));
    TH_CHECK(r, s == EPX_ERR_STATE && strstr(epx_last_error(), "captured"), "status %d: %s", (int)s, epx_last_error());
    TH_OK(r, epx_plan_create(k->group, &cfg, &p));
    epx_plan_destroy(p);
    return 0;
}

/* ---- errors ---- */

/* Poll until the plan has an error. */
static epx_status_t first_error(epx_plan_t *p, uint64_t limit_ns) {
    uint64_t start = epx_now_ns();
    epx_status_t s;
    while ((s = epx_plan_poll(p)) == EPX_OK && epx_now_ns() - start < limit_ns) th_sleep_us(500);
    return s;
}

/* The device does a whole exchange on a new plan after the failure. */
static int works_again(th_rank_t *r, tg_rank_t *k) {
    epx_plan_config_t cfg;
    epx_plan_t *p = NULL;
    buffers_t b;
    tables_t *t = malloc(sizeof *t);
    config(&cfg);
    cfg.timeout_ns = 20000000000u;
    TH_CHECK(r, tg_device_usable(k->device) == 0, "%s", "the device is not usable");
    TH_OK(r, epx_plan_create(k->group, &cfg, &p));
    fill_tables(t, 300 + (uint64_t)r->rank);
    int rc = take_buffers(r, k->device, p, &b) || upload_tables(r, k->device, &b, t) || meet(r) ||
             exchange(r, p, k->device, &b, 3) || check_result(r, p, k->device, &b, t, 3, 0) || meet(r);
    epx_plan_destroy(p);
    free(t);
    return rc;
}

/* Rank 1 never comes: the others name it. */
static int timeout(th_rank_t *r, tg_rank_t *k) {
    epx_plan_config_t cfg;
    epx_plan_t *p = NULL;
    buffers_t b;
    static const char *const parts[] = {"dispatch", "rank 1", "expected 1", "seen 0", "0.300 s"};
    config(&cfg);
    TH_OK(r, epx_plan_create(k->group, &cfg, &p));
    if (take_buffers(r, k->device, p, &b) != 0) return -1;
    uint64_t start = epx_now_ns();
    if (r->rank != 1) {
        const uint32_t n = 3;
        TH_CHECK(r, k->device->upload(k->device, b.n_tokens, &n, sizeof n) == 0, "%s", "upload");
        epx_io_t io = io_of(k->device, &b, 0);
        TH_OK(r, epx_dispatch(p, &io));
        epx_status_t s = first_error(p, 5000000000u);
        TH_CHECK(r, s == EPX_ERR_TIMEOUT || s == EPX_ERR_ABORTED, "status %d: %s", (int)s, epx_last_error());
        for (size_t i = 0; s == EPX_ERR_TIMEOUT && i < sizeof parts / sizeof parts[0]; i++)
            TH_CHECK(r, strstr(epx_last_error(), parts[i]) != NULL, "no \"%s\" in: %s", parts[i], epx_last_error());
        TH_CHECK(r, epx_now_ns() - start < 2000000000u, "%.3f s", (double)(epx_now_ns() - start) * 1e-9);
        TH_CHECK(r, epx_combine(p, &io) == s, "%s", epx_last_error());
    } else {
        epx_status_t s = first_error(p, 5000000000u);
        TH_CHECK(r, s == EPX_ERR_ABORTED && strstr(epx_last_error(), "gave up waiting for rank 1"), "status %d: %s", (int)s,
                 epx_last_error());
    }
    epx_plan_destroy(p);
    return works_again(r, k);
}

/* Rank 0 waits on the device, with a long deadline, when another rank aborts. */
static int abort_ends_waits(th_rank_t *r, tg_rank_t *k) {
    epx_plan_config_t cfg;
    epx_plan_t *p = NULL;
    buffers_t b;
    const uint32_t n = 3;
    config(&cfg);
    cfg.timeout_ns = 60000000000u;
    TH_OK(r, epx_plan_create(k->group, &cfg, &p));
    if (take_buffers(r, k->device, p, &b) != 0) return -1;
    TH_CHECK(r, k->device->upload(k->device, b.n_tokens, &n, sizeof n) == 0, "%s", "upload");
    epx_io_t io = io_of(k->device, &b, 0);
    uint64_t start = epx_now_ns();
    if (r->rank == 0) TH_OK(r, epx_dispatch(p, &io));
    if (r->rank == 1) th_sleep_us(50000), epx_plan_abort(p);
    TH_CHECK(r, first_error(p, 5000000000u) == EPX_ERR_ABORTED, "%s", epx_last_error());
    TH_CHECK(r, k->device->sync(k->device) == 0 && epx_now_ns() - start < 2000000000u, "the kernel ran %.3f s",
             (double)(epx_now_ns() - start) * 1e-9);
    epx_plan_destroy(p);
    return works_again(r, k);
}

/* What GPUs do not do is refused by field and value, and the group lives on. */
static int refusals(th_rank_t *r, tg_rank_t *k) {
    static const struct {
        size_t at;
        int value;
        const char *part;
    } wrong[] = {{offsetof(epx_plan_config_t, hidden), 100, "hidden is 100"},
                 {offsetof(epx_plan_config_t, n_experts), 32768, "n_experts is 32768"},
                 {offsetof(epx_plan_config_t, n_channels), 5, "n_channels is 5"},
                 {offsetof(epx_plan_config_t, n_blocks), 4096, "n_blocks is 4096"},
                 {offsetof(epx_plan_config_t, max_tokens), 60000, "shared memory"}};
    epx_plan_config_t cfg;
    epx_plan_t *p = NULL;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        config(&cfg);
        memcpy((char *)&cfg + wrong[i].at, &wrong[i].value, sizeof wrong[i].value);
        TH_STATUS(r, epx_plan_create(k->group, &cfg, &p), EPX_ERR_UNSUPPORTED);
        TH_CHECK(r, strstr(epx_last_error(), wrong[i].part) != NULL, "no \"%s\" in: %s", wrong[i].part, epx_last_error());
    }
    return works_again(r, k);
}

/* Rank 1's process is killed while rank 0 waits for it on the device. */
static int killed_peer(th_rank_t *r, tg_rank_t *k) {
    epx_plan_config_t cfg;
    epx_plan_t *p = NULL;
    buffers_t b;
    const uint32_t n = 3;
    config(&cfg);
    cfg.timeout_ns = 60000000000u;
    TH_OK(r, epx_plan_create(k->group, &cfg, &p));
    if (take_buffers(r, k->device, p, &b) != 0) return -1;
    TH_CHECK(r, k->device->upload(k->device, b.n_tokens, &n, sizeof n) == 0, "%s", "upload");
    epx_io_t io = io_of(k->device, &b, 0);
    if (r->rank == 1) th_sleep_us(100000), raise(SIGKILL);
    TH_OK(r, epx_dispatch(p, &io));
    epx_status_t s = first_error(p, 5000000000u);
    TH_CHECK(r, s == EPX_ERR_PEER && strstr(epx_last_error(), "rank 1"), "status %d: %s", (int)s, epx_last_error());
    TH_CHECK(r, k->device->sync(k->device) == 0 && tg_device_usable(k->device) == 0, "%s", "the device is not usable");
    epx_plan_destroy(p);
    return 0;
}

static const struct {
    const char *name;
    int (*body)(th_rank_t *r, tg_rank_t *k);
    int n_ranks;
    th_mode_t mode;
} tests[] = {{"refusals", refusals, 2, TH_THREADS},
             {"graphs, 2 ranks", graphs, 2, TH_THREADS},
             {"graphs, 4 ranks", graphs, 4, TH_THREADS},
             {"plan refused in a capture", capture_refused, 2, TH_THREADS},
             {"a rank that never comes", timeout, 3, TH_THREADS},
             {"abort", abort_ends_waits, 2, TH_THREADS},
             {"graphs, 2 processes", graphs, 2, TH_PROCESSES},
             {"killed peer", killed_peer, 2, TH_PROCESSES}};
static int which;

static int rank_body(th_rank_t *r) {
    const args_t *a = r->arg;
    return tg_with_group(r, a->n_devices, ARENA_BYTES, tests[which].body);
}

int main(int argc, char **argv) {
    args_t a = {tg_devices(argc > 1 ? atoi(argv[1]) : 0), argc > 2 ? atoi(argv[2]) : 500};
    int n_bad = 0;
    if (a.n_devices == 0) return 77;
    /* Forked ranks first: CUDA does not survive a fork. */
    for (int round = 0; round < 2; round++)
        for (which = 0; which < (int)(sizeof tests / sizeof tests[0]); which++) {
            th_outcome_t out[TH_MAX_RANKS];
            if ((tests[which].mode == TH_PROCESSES) != (round == 0)) continue;
            int wanted = strcmp(tests[which].name, "killed peer") == 0, bad;
            bad = th_launch(tests[which].mode, tests[which].n_ranks, rank_body, &a, 300, out);
            printf("%s: %s\n", tests[which].name, bad == wanted && (!wanted || out[1] == TH_KILLED) ? "ok" : "FAILED");
            fflush(stdout);
            n_bad += bad != wanted;
        }
    return n_bad != 0;
}
