/* One rank of several that exchange until something breaks, which hosts_test.sh sees to. Passes when the break is told in time
 * by an error that names a rank, and when everything can then be destroyed. Answers are checked.
 * Usage: hosts_cut BOOTSTRAP RANK N_RANKS DIR [LOST...]: makes DIR/ready.RANK after some exchanges. With LOST: ranks that this
 * one takes for dead after the break; it masks them, recovers, and exchanges with the others. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "epx/epx.h"

enum { T = 32, H = 2048, K = 4, E = 8, READY_AFTER = 50, GOES_ON = 200 };
static const uint64_t TIMEOUT_NS = 2000000000, MARGIN_NS = 1500000000;

static int failed(const char *what) {
    fprintf(stderr, "%s: %s\n", what, epx_last_error());
    return 1;
}

static int make_plan(const char *bootstrap, int rank, int n_ranks, epx_world_t **w, epx_group_t **g, epx_plan_t **p) {
    epx_world_config_t wc;
    epx_plan_config_t pc;
    epx_world_config_init(&wc);
    wc.bootstrap = bootstrap;
    wc.rank = rank;
    wc.n_ranks = n_ranks;
    epx_plan_config_init(&pc);
    pc.max_tokens = T, pc.hidden = H, pc.top_k = K, pc.n_experts = E, pc.timeout_ns = TIMEOUT_NS;
    if (epx_world_create(&wc, w) != EPX_OK) return failed("world");
    if (epx_group_create(*w, NULL, 0, -1, g) != EPX_OK) return failed("group");
    return epx_plan_create(*g, &pc, p) != EPX_OK ? failed("plan") : 0;
}

/* Experts answer with what they get, so a token comes back as often as it has places whose expert lives. */
static epx_status_t exchange(epx_plan_t *p, epx_io_t *io, const float *x, float *out, float *y) {
    epx_lists_t l;
    io->x = x;
    io->out_x = NULL;
    epx_status_t s = epx_dispatch(p, io);
    if (s == EPX_OK) s = epx_plan_lists(p, 0, &l);
    if (s != EPX_OK) return s;
    for (int i = 0; i < l.n_rows; i++)
        memcpy(y + (size_t)i * H, (const char *)l.row_base[l.entries[i].src] + l.entries[i].token * l.row_stride_bytes,
               H * sizeof *y);
    io->x = y;
    io->out_x = out;
    return epx_combine(p, io);
}

static int is_lost(int rank, char **lost) {
    for (; *lost != NULL; lost++)
        if (atoi(*lost) == rank) return 1;
    return 0;
}

/* Places of token t that a living rank computes: expert e is on rank e * n_ranks / E, as the even split says. */
static int n_places(const int32_t *ids, int t, int n_ranks, char **lost) {
    int n = 0;
    for (int k = 0; k < K; k++) n += !is_lost(ids[t * K + k] * n_ranks / E, lost);
    return n;
}

static void fill(float *x, int rank, int step) {
    for (int i = 0; i < T * H; i++) x[i] = (float)((i * 7 + rank * 31 + step * 13) % 64);
}

static int check_answers(const float *x, const float *out, const int32_t *ids, int n_ranks, char **lost) {
    for (int t = 0; t < T; t++) {
        float n = (float)n_places(ids, t, n_ranks, lost);
        for (int i = t * H; i < (t + 1) * H; i++)
            if (out[i] != n * x[i]) {
                fprintf(stderr, "token %d, channel %d: %g, expected %g\n", t, i % H, (double)out[i], (double)(n * x[i]));
                return 1;
            }
    }
    return 0;
}

static void say_ready(const char *dir, int rank) {
    char path[512];
    snprintf(path, sizeof path, "%s/ready.%d", dir, rank);
    FILE *f = fopen(path, "w");
    if (f != NULL) fclose(f);
}

static int judge(epx_plan_t *p, epx_status_t s, uint64_t took_ns) {
    printf("status %d after %.3f s: %s\n", (int)s, (double)took_ns * 1e-9, epx_last_error());
    if (s != EPX_ERR_TIMEOUT && s != EPX_ERR_PEER && s != EPX_ERR_ABORTED) return failed("the status is another one");
    if (strstr(epx_last_error(), "rank ") == NULL) return failed("the message names no rank");
    if (took_ns > TIMEOUT_NS + MARGIN_NS) return failed("it took longer than the deadline");
    return epx_plan_poll(p) == EPX_OK ? failed("poll says all is well") : 0;
}

/* Mask, recover, and exchange with those that are left. */
static int go_on(epx_group_t *g, epx_plan_t *p, epx_io_t *io, float *x, float *out, float *y, char **lost) {
    int n_ranks = epx_group_size(g), rank = epx_group_rank(g);
    char mine = (char)(rank + 1), all[16];
    for (char **l = lost; *l != NULL; l++)
        if (epx_group_mask(g, atoi(*l), 0) != EPX_OK) return failed("mask");
    if (epx_plan_recover(p) != EPX_OK) return failed("recover");
    for (int n = 0; n < GOES_ON; n++) {
        fill(x, rank, n);
        if (exchange(p, io, x, out, y) != EPX_OK) return failed("exchange after recover");
        if (check_answers(x, out, io->ids, n_ranks, lost) != 0) return 1;
        if (epx_group_allgather(g, &mine, 1, all, TIMEOUT_NS) != EPX_OK) return failed("all-gather after recover");
        for (int r = 0; r < n_ranks; r++)
            if (all[r] != (is_lost(r, lost) ? 0 : r + 1)) return failed("records after recover");
    }
    printf("recovered: %d exchanges of %d ranks\n", GOES_ON, n_ranks);
    return 0;
}

int main(int argc, char **argv) {
    static float x[T * H], out[T * H], y[T * K * 16 * H], weights[T * K];
    static char *nobody[] = {NULL};
    static int32_t ids[T * K];
    epx_world_t *w = NULL;
    epx_group_t *g = NULL;
    epx_plan_t *p = NULL;
    epx_io_t io;
    epx_status_t s = EPX_OK;
    if (argc < 5) return 2;
    int rank = atoi(argv[2]);
    if (make_plan(argv[1], rank, atoi(argv[3]), &w, &g, &p) != 0) return 1;
    for (int i = 0; i < T * K; i++) ids[i] = (i * 5 + i / K + rank) % E, weights[i] = 1;
    epx_io_init(&io);
    io.ids = ids, io.weights = weights, io.n_tokens = T;
    uint64_t start = epx_now_ns(), begin = start;
    for (int n = 0; s == EPX_OK; n++) {
        start = epx_now_ns();
        if (start - begin > 30000000000u) return failed("nothing broke in 30 s");
        fill(x, rank, n);
        s = exchange(p, &io, x, out, y);
        if (s == EPX_OK && check_answers(x, out, ids, atoi(argv[3]), nobody) != 0) return 1;
        if (n == READY_AFTER) say_ready(argv[4], rank);
    }
    int rc = judge(p, s, epx_now_ns() - start);
    if (rc == 0 && argc > 5) rc = go_on(g, p, &io, x, out, y, argv + 5);
    start = epx_now_ns();
    epx_plan_destroy(p);
    epx_group_destroy(g);
    epx_world_destroy(w);
    printf("destroyed in %.3f s\n", (double)(epx_now_ns() - start) * 1e-9);
    return rc || epx_now_ns() - start > TIMEOUT_NS;
}
