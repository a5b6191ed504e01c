/* Many ranks: 64 and 128 threads of one process, small shapes, every backend; results against sums computed from the inputs.
 * Also that what a rank needs grows with W and not with its square: plan memory up to 4,096 ranks, descriptors, mappings.
 * Usage: contract_scale [RANKS]... (default 64 128) */
#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "epx/epx.h"

enum { MAX_RANKS = 256, T_MAX = 2, H = 24, K = 4, N_STEPS = 6, N_BACKENDS = 2 };

typedef struct {
    epx_world_t *world;
    int rank, n_ranks, bad;
    const char *backend;
    char message[512];
} rank_t;

static int n_experts_of(int n_ranks) { return 2 * n_ranks - 3; } /* odd: does not divide evenly */

static uint32_t mix(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t h = a * 2654435761u ^ b * 2246822519u ^ c * 3266489917u;
    h = (h ^ (h >> 15)) * 2246822519u;
    return h ^ (h >> 13);
}

static int fail(rank_t *r, const char *what) {
    snprintf(r->message, sizeof r->message, "%s: %s", what, epx_last_error());
    r->bad = 1;
    return -1;
}

/* Tokens of a rank in a step: 0, 1 or 2. Values are small integers: sums are exact. */
static int fill(const rank_t *r, int step, float x[T_MAX][H], int32_t ids[T_MAX][K], float w[T_MAX][K]) {
    int n = (int)(mix((uint32_t)r->rank, (uint32_t)step, 9) % 3);
    for (int t = 0; t < n; t++) {
        for (int h = 0; h < H; h++) x[t][h] = (float)(mix((uint32_t)(r->rank * 8 + t), (uint32_t)step, (uint32_t)h) % 15) - 7;
        for (int k = 0; k < K; k++) {
            uint32_t v = mix((uint32_t)(r->rank * 8 + t), (uint32_t)(step * 8 + k), 77);
            ids[t][k] = v % 11 == 0 ? -1 : (int32_t)(v % (uint32_t)n_experts_of(r->n_ranks));
            w[t][k] = (float)(1 + v % 3);
        }
    }
    return n;
}

static int first_expert(int n_experts, int n_ranks, int rank) {
    int each = n_experts / n_ranks, more = n_experts % n_ranks;
    return rank * each + (rank < more ? rank : more);
}

static int step(rank_t *r, epx_plan_t *p, int n, float *y, int y_rows) {
    float x[T_MAX][H], w[T_MAX][K], out[T_MAX][H];
    int32_t ids[T_MAX][K];
    epx_io_t io;
    epx_lists_t l;
    epx_io_init(&io);
    io.n_tokens = fill(r, n, x, ids, w);
    io.x = x;
    io.ids = ids[0];
    io.weights = w[0];
    if (epx_dispatch(p, &io) < 0 || epx_plan_lists(p, 0, &l) < 0) return fail(r, "dispatch");
    if (l.n_rows > y_rows) return fail(r, "more rows than possible");
    int first = first_expert(n_experts_of(r->n_ranks), r->n_ranks, r->rank);
    for (int e = 0; e < l.n_local_experts; e++) {
        for (int32_t i = l.expert_off[e]; i < l.expert_off[e + 1]; i++) {
            const float *row = (const float *)(const void *)((const char *)l.row_base[l.entries[i].src] +
                                                             l.entries[i].token * l.row_stride_bytes);
            for (int h = 0; h < H; h++) y[i * H + h] = row[h] * (float)(1 + (first + e) % 5);
        }
    }
    io.x = y;
    io.out_x = out;
    if (epx_combine(p, &io) < 0) return fail(r, "combine");
    for (int t = 0; t < io.n_tokens; t++) {
        float scale = 0;
        for (int k = 0; k < K; k++) scale += ids[t][k] < 0 ? 0 : w[t][k] * (float)(1 + ids[t][k] % 5);
        for (int h = 0; h < H; h++)
            if (out[t][h] != scale * x[t][h]) return fail(r, "a wrong sum");
    }
    return 0;
}

static int run_plan(rank_t *r, epx_group_t *g) {
    epx_plan_config_t c;
    epx_plan_t *p = NULL;
    epx_plan_config_init(&c);
    c.max_tokens = T_MAX;
    c.hidden = H;
    c.top_k = K;
    c.n_experts = n_experts_of(r->n_ranks);
    c.backend = r->backend;
    c.combine = r->n_ranks % 128 == 0 ? EPX_COMBINE_PARTIAL : EPX_COMBINE_EXACT;
    c.timeout_ns = UINT64_C(40000000000);
    if (epx_plan_create(g, &c, &p) < 0) return fail(r, "plan");
    int y_rows = r->n_ranks * T_MAX * 2; /* at most two experts a rank */
    float *y = malloc((size_t)y_rows * H * sizeof *y);
    for (int n = 0; y && n < N_STEPS; n++)
        if (step(r, p, n, y, y_rows)) break;
    if (!y) (void)fail(r, "no memory");
    free(y);
    epx_plan_destroy(p);
    return r->bad;
}

static void *rank_main(void *arg) {
    rank_t *r = arg;
    epx_group_t *g = NULL;
    if (epx_group_create(r->world, NULL, 0, -1, &g) < 0) (void)fail(r, "group");
    else (void)run_plan(r, g);
    epx_group_destroy(g);
    return NULL;
}

static int count_entries(const char *path) {
    DIR *d = opendir(path);
    int n = 0;
    while (d && readdir(d)) n++;
    if (d) closedir(d);
    return n;
}

static int run_ranks(int n_ranks, const char *backend) {
    static rank_t ranks[MAX_RANKS];
    static pthread_t threads[MAX_RANKS];
    epx_world_t *worlds[MAX_RANKS];
    int n_bad = 0, fds = count_entries("/proc/self/fd");
    if (epx_world_create_local(n_ranks, worlds) < 0) {
        printf("world of %d: %s\n", n_ranks, epx_last_error());
        return 1;
    }
    for (int i = 0; i < n_ranks; i++) {
        ranks[i] = (rank_t){.world = worlds[i], .rank = i, .n_ranks = n_ranks, .backend = backend};
        if (pthread_create(&threads[i], NULL, rank_main, &ranks[i]) != 0) exit(2);
    }
    for (int i = 0; i < n_ranks; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < n_ranks; i++) {
        if (ranks[i].bad && n_bad++ < 3) printf("rank %d of %d: %s\n", i, n_ranks, ranks[i].message);
        epx_world_destroy(worlds[i]);
    }
    int left = count_entries("/proc/self/fd") - fds;
    if (left != 0) printf("%d descriptors were left open\n", left);
    printf("%s, %d ranks: %s\n", backend, n_ranks, n_bad || left ? "FAILED" : "ok");
    return n_bad || left;
}

/* Per rank, memory may double with W and not more (a little for rounding). */
static int memory_is_linear(const char *backend) {
    size_t last = 0;
    int n_bad = 0;
    for (int w = 256; w <= EPX_MAX_RANKS; w *= 2) {
        epx_plan_config_t c;
        size_t bytes = 0;
        epx_plan_config_init(&c);
        c.max_tokens = 8;
        c.hidden = 256;
        c.top_k = 8;
        c.n_experts = 4096;
        c.combine = EPX_COMBINE_PARTIAL;
        c.backend = backend;
        if (epx_plan_bytes(&c, w, &bytes) < 0) printf("epx_plan_bytes: %s\n", epx_last_error());
        if (bytes == 0 || (last && bytes > last * 21 / 10)) n_bad = 1;
        printf("%s, %d ranks: %zu bytes a rank\n", backend, w, bytes);
        last = bytes;
    }
    return n_bad;
}

int main(int argc, char **argv) {
    static const char *const backends[N_BACKENDS] = {"onesided", "collective"};
    int n_bad = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int b = 0; b < N_BACKENDS; b++) {
        n_bad += memory_is_linear(backends[b]);
        for (int i = 1; i < argc; i++) {
            int w = atoi(argv[i]);
            if (w >= 2 && w <= MAX_RANKS) n_bad += run_ranks(w, backends[b]);
            else n_bad++;
        }
        if (argc == 1) n_bad += run_ranks(64, backends[b]) + run_ranks(128, backends[b]);
    }
    return n_bad != 0;
}
