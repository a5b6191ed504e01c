/* Failures with processes as ranks: a killed peer is named within a second in every phase, a slow peer gives a deadline error
 * with its numbers, lack of memory and different configs fail on all ranks, and nothing hangs. Also: processes give the right
 * answers. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"
#include "epx/epx.h"

enum { W = 3, BLOB = 4096, H = 33, K = 2, E = 5, T = 4 };

/* Shared by the ranks of one case. */
typedef struct {
    pthread_barrier_t barrier, survivors; /* of all ranks; of all but one */
    char blobs[W][BLOB];
    pid_t pids[W];
} team_t;

typedef struct {
    team_t *team;
    int rank;
    int n_gathers, last_gather; /* the dying rank dies after the last one; the others' next one fails, as a launcher's would */
    int dies;
} member_t;

static epx_status_t barrier(void *ctx) {
    pthread_barrier_wait(&((member_t *)ctx)->team->barrier);
    return EPX_OK;
}

static epx_status_t allgather(void *ctx, const void *mine, size_t n, void *out) {
    member_t *m = ctx;
    if (n > BLOB) return EPX_ERR_CAPACITY;
    if (m->last_gather > 0 && m->n_gathers == m->last_gather) {
        pthread_barrier_wait(&m->team->survivors); /* who leaves early would be taken for another dead rank */
        return EPX_ERR_IO;
    }
    m->n_gathers++;
    memcpy(m->team->blobs[m->rank], mine, n);
    pthread_barrier_wait(&m->team->barrier);
    for (int r = 0; r < W; r++) memcpy((char *)out + (size_t)r * n, m->team->blobs[r], n);
    pthread_barrier_wait(&m->team->barrier);
    if (m->dies && m->n_gathers == m->last_gather) kill(getpid(), SIGKILL);
    return EPX_OK;
}

/* In children: a failed check ends the process with the line number. */
#define CHECK(cond)                                                                               \
    do {                                                                                          \
        if (!(cond)) {                                                                            \
            fprintf(stderr, "line %d: %s (last error: %s)\n", __LINE__, #cond, epx_last_error()); \
            _exit(3);                                                                             \
        }                                                                                         \
    } while (0)

typedef struct {
    team_t *team;
    member_t *member;
    int rank;
    epx_world_t *world;
    epx_group_t *group;
} rank_t;

static void open_rank(rank_t *r, member_t *m) {
    epx_world_config_t cfg;
    epx_world_config_init(&cfg);
    cfg.rank = r->rank;
    cfg.n_ranks = W;
    cfg.allgather = allgather;
    cfg.barrier = barrier;
    cfg.ctx = m;
    CHECK(epx_world_create(&cfg, &r->world) == EPX_OK);
    CHECK(epx_group_create(r->world, NULL, 0, -1, &r->group) == EPX_OK);
}

static void close_rank(rank_t *r) {
    epx_group_destroy(r->group);
    epx_world_destroy(r->world);
}

/* Run body in W processes; ranks in killed_mask must die of SIGKILL, the others exit 0. */
static void run_processes(void (*body)(rank_t *r), unsigned killed_mask) {
    team_t *team = mmap(NULL, sizeof *team, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_barrierattr_t attr;
    assert_ptr_not_equal(team, MAP_FAILED);
    pthread_barrierattr_init(&attr);
    pthread_barrierattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&team->barrier, &attr, W);
    pthread_barrier_init(&team->survivors, &attr, W - 1);
    fflush(NULL);
    for (int r = 0; r < W; r++) {
        pid_t pid = fork();
        if (pid != 0) team->pids[r] = pid;
        if (pid == 0) {
            member_t m = {.team = team, .rank = r};
            rank_t me = {team, &m, r, NULL, NULL};
            alarm(20);
            open_rank(&me, &m);
            body(&me);
            close_rank(&me);
            _exit(0);
        }
    }
    int bad = 0;
    for (int r = 0; r < W; r++) {
        int st;
        waitpid(team->pids[r], &st, 0);
        int ok = killed_mask >> r & 1 ? WIFSIGNALED(st) && WTERMSIG(st) == SIGKILL : WIFEXITED(st) && WEXITSTATUS(st) == 0;
        if (!ok) printf("rank %d ended with status %#x\n", r, st), bad = 1;
    }
    munmap(team, sizeof *team);
    assert_false(bad);
}

static epx_plan_config_t shape(void) {
    epx_plan_config_t c;
    epx_plan_config_init(&c);
    c.max_tokens = T;
    c.hidden = H;
    c.top_k = K;
    c.n_experts = E;
    c.timeout_ns = 5000000000u;
    return c;
}

/* x[t][i] = rank + t + i; ids walk over all experts; expert e multiplies by e + 1. */
static epx_status_t exchange(rank_t *r, epx_plan_t *p, int step, float *out) {
    float x[T * H], weights[T * K], y[64 * H];
    int32_t ids[T * K];
    epx_lists_t l;
    epx_plan_info_t info = {.size = sizeof info};
    epx_io_t io;
    epx_io_init(&io);
    for (int i = 0; i < T * K; i++) ids[i] = (i + r->rank + step) % E, weights[i] = (float)(i + 1);
    for (int t = 0; t < T; t++)
        for (int i = 0; i < H; i++) x[t * H + i] = (float)(r->rank + t + i);
    io.x = x, io.ids = ids, io.weights = weights, io.n_tokens = T;
    epx_status_t s = epx_dispatch(p, &io);
    if (s) return s;
    s = epx_plan_lists(p, 0, &l);
    if (s) return s;
    epx_plan_info(p, &info);
    int first = r->rank < E % W ? r->rank * (E / W + 1) : r->rank * (E / W) + E % W;
    for (int e = 0; e < l.n_local_experts; e++)
        for (int32_t i = l.expert_off[e]; i < l.expert_off[e + 1]; i++) {
            const float *row = (const float *)(const void *)((const char *)l.row_base[l.entries[i].src] +
                                                             l.entries[i].token * l.row_stride_bytes);
            for (int j = 0; j < H; j++) y[i * H + j] = row[j] * (float)(first + e + 1);
        }
    epx_io_init(&io);
    io.x = y, io.out_x = out;
    return epx_combine(p, &io);
}

static void exchange_is_right(rank_t *r) {
    static const char *const backends[] = {"onesided", "collective"};
    for (int b = 0; b < 2; b++) {
        epx_plan_config_t c = shape();
        epx_plan_t *p = NULL;
        float out[T * H];
        c.backend = backends[b];
        CHECK(epx_plan_create(r->group, &c, &p) == EPX_OK);
        for (int step = 0; step < 200; step++) {
            CHECK(exchange(r, p, step, out) == EPX_OK);
            for (int t = 0; t < T; t++) {
                float f = 0;
                for (int k = 0; k < K; k++) f += (float)(t * K + k + 1) * (float)((t * K + k + r->rank + step) % E + 1);
                for (int i = 0; i < H; i++) CHECK(out[t * H + i] == f * (float)(r->rank + t + i)); /* small integers: exact */
            }
        }
        epx_plan_destroy(p);
    }
    epx_plan_config_t c = shape();
    epx_plan_t *p = NULL;
    c.backend = "ref";
    CHECK(epx_plan_create(r->group, &c, &p) == EPX_ERR_UNSUPPORTED && strstr(epx_last_error(), "one process") != NULL);
    close_rank(r);
    r->group = NULL, r->world = NULL;
}

static void names_rank_2(rank_t *r, epx_status_t s, uint64_t start) {
    char want[64];
    snprintf(want, sizeof want, "rank 2 (pid %d)", r->team->pids[2]);
    CHECK(s == EPX_ERR_PEER);
    CHECK(strstr(epx_last_error(), want) != NULL);
    CHECK(epx_now_ns() - start < 1000000000u);
}

/* A rank dies after the all-gather that opens epx_group_create(), before it connects. */
static void killed_in_group_create(rank_t *r, int dead) {
    epx_group_t *g = NULL;
    char want[64];
    snprintf(want, sizeof want, "rank %d (pid %d)", dead, r->team->pids[dead]);
    r->member->last_gather = r->member->n_gathers + 1;
    r->member->dies = r->rank == dead;
    uint64_t start = epx_now_ns();
    CHECK(epx_group_create(r->world, NULL, 0, -1, &g) == EPX_ERR_PEER);
    CHECK(g == NULL && strstr(epx_last_error(), want) != NULL);
    CHECK(epx_now_ns() - start < 1000000000u);
}
static void first_killed_in_create(rank_t *r) { killed_in_group_create(r, 0); }
static void last_killed_in_create(rank_t *r) { killed_in_group_create(r, 2); }

/* One rank cannot map its peers' slabs: all fail with its reason, and the next plan works. */
static void no_address_space(rank_t *r) {
    epx_plan_config_t c = shape();
    epx_plan_t *p = NULL;
    struct rlimit old, low;
    c.max_tokens = 1 << 14; /* a slab of about 8 MB */
    getrlimit(RLIMIT_AS, &old);
    low = old;
    if (r->rank == 1) {
        long pages = 0;
        FILE *f = fopen("/proc/self/statm", "r");
        CHECK(f != NULL && fscanf(f, "%ld", &pages) == 1);
        fclose(f);
        size_t bytes;
        CHECK(epx_plan_bytes(&c, W, &bytes) == EPX_OK);
        low.rlim_cur = (rlim_t)pages * 4096 + bytes + (4 << 20); /* room for the own memory, not for that of two peers */
        CHECK(setrlimit(RLIMIT_AS, &low) == 0);
    }
    uint64_t start = epx_now_ns();
    CHECK(epx_plan_create(r->group, &c, &p) == EPX_ERR_NOMEM);
    CHECK(r->rank == 1 || strstr(epx_last_error(), "plan sharing failed on rank 1") != NULL);
    CHECK(epx_now_ns() - start < 2000000000u);
    if (r->rank == 1) CHECK(setrlimit(RLIMIT_AS, &old) == 0);
    float out[T * H];
    c = shape();
    CHECK(epx_plan_create(r->group, &c, &p) == EPX_OK);
    CHECK(exchange(r, p, 0, out) == EPX_OK);
    epx_plan_destroy(p);
}

static void killed_in_allgather(rank_t *r) {
    char mine[16] = "x", all[W * 16];
    CHECK(epx_group_allgather(r->group, mine, sizeof mine, all, 0) == EPX_OK);
    uint64_t start = epx_now_ns();
    if (r->rank == 2) kill(getpid(), SIGKILL);
    names_rank_2(r, epx_group_allgather(r->group, mine, sizeof mine, all, 0), start);
    CHECK(epx_group_dead_rank(r->group) == 2);
    CHECK(epx_group_allgather(r->group, mine, sizeof mine, all, 0) == EPX_ERR_PEER);
}

static void killed_in_dispatch(rank_t *r) {
    epx_plan_config_t c = shape();
    epx_plan_t *p = NULL;
    float out[T * H];
    CHECK(epx_plan_create(r->group, &c, &p) == EPX_OK);
    for (int step = 0; step < 3; step++) CHECK(exchange(r, p, step, out) == EPX_OK);
    uint64_t start = epx_now_ns();
    if (r->rank == 2) kill(getpid(), SIGKILL);
    names_rank_2(r, exchange(r, p, 3, out), start);
    names_rank_2(r, epx_plan_poll(p), start); /* the first error stays */
    names_rank_2(r, exchange(r, p, 3, out), start);
    epx_plan_destroy(p);
    CHECK(epx_now_ns() - start < 1500000000u);
}

static void killed_in_combine(rank_t *r) {
    epx_plan_config_t c = shape();
    epx_plan_t *p = NULL;
    float x[T * H] = {0}, w[T * K] = {0};
    int32_t ids[T * K] = {0, 1, 2, 3, 4, 0, 1, 2};
    static float y[64 * H];
    epx_io_t io;
    CHECK(epx_plan_create(r->group, &c, &p) == EPX_OK);
    epx_io_init(&io);
    io.x = x, io.ids = ids, io.weights = w, io.n_tokens = T;
    CHECK(epx_dispatch(p, &io) == EPX_OK);
    uint64_t start = epx_now_ns();
    if (r->rank == 2) kill(getpid(), SIGKILL);
    epx_io_init(&io);
    io.x = y, io.out_x = x;
    names_rank_2(r, epx_combine(p, &io), start);
    epx_plan_destroy(p);
}

static void slow_peer(rank_t *r) {
    epx_plan_config_t c = shape();
    epx_plan_t *p = NULL;
    float out[T * H];
    c.timeout_ns = 200000000u;
    CHECK(epx_plan_create(r->group, &c, &p) == EPX_OK);
    CHECK(exchange(r, p, 0, out) == EPX_OK);
    if (r->rank == 2) {
        struct timespec ts = {0, 500000000};
        nanosleep(&ts, NULL);
        CHECK(exchange(r, p, 1, out) == EPX_ERR_ABORTED);
        CHECK(strstr(epx_last_error(), "aborted the plan") != NULL);
    } else {
        epx_status_t s = exchange(r, p, 1, out);
        CHECK(s == EPX_ERR_TIMEOUT || s == EPX_ERR_ABORTED); /* the slower of the two learns it from the other */
        if (s == EPX_ERR_TIMEOUT)
            CHECK(strstr(epx_last_error(), "dispatch: ") && strstr(epx_last_error(), "for rank 2 (pid") &&
                  strstr(epx_last_error(), "epoch 2, expected 2, seen 1"));
        CHECK(epx_plan_poll(p) == s);
    }
    epx_plan_destroy(p);
}

static void mismatch_fails_everywhere(rank_t *r) {
    epx_plan_config_t c = shape();
    epx_plan_t *p = NULL;
    c.top_k = r->rank == 1 ? 3 : K;
    CHECK(epx_plan_create(r->group, &c, &p) == EPX_ERR_MISMATCH);
    CHECK(strcmp(epx_last_error(), "top_k is 2 on rank 0 and 3 on rank 1") == 0);
    c = shape();
    c.hidden = r->rank == 2 ? 0 : H;
    CHECK(epx_plan_create(r->group, &c, &p) == (r->rank == 2 ? EPX_ERR_ARG : EPX_ERR_MISMATCH));
    CHECK(strstr(epx_last_error(), "hidden is ") != NULL);
    c = shape(); /* the group is still usable */
    CHECK(epx_plan_create(r->group, &c, &p) == EPX_OK);
    epx_plan_destroy(p);
}

static void no_memory_fails_everywhere(rank_t *r) {
    epx_plan_config_t c = shape();
    epx_plan_t *p = NULL;
    c.hidden = 1 << 20;
    c.max_tokens = 1 << 14; /* 100 GB and more */
    CHECK(epx_plan_create(r->group, &c, &p) == EPX_ERR_NOMEM);
    CHECK(strstr(epx_last_error(), "bytes wanted") && strstr(epx_last_error(), "bytes free"));
    c = shape();
    struct rlimit old, low = {1024, 1024};
    getrlimit(RLIMIT_FSIZE, &old);
    low.rlim_max = old.rlim_max;
    if (r->rank == 1) setrlimit(RLIMIT_FSIZE, &low);
    CHECK(epx_plan_create(r->group, &c, &p) == EPX_ERR_NOMEM);
    CHECK(strstr(epx_last_error(), "RLIMIT_FSIZE") && (r->rank == 1 || strstr(epx_last_error(), "rank 1")));
    if (r->rank == 1) setrlimit(RLIMIT_FSIZE, &old);
    CHECK(epx_plan_create(r->group, &c, &p) == EPX_OK);
    epx_plan_destroy(p);
}

static void processes_exchange(void **state) { (void)state, run_processes(exchange_is_right, 0); }
static void kill_first_in_create(void **state) { (void)state, run_processes(first_killed_in_create, 1); }
static void kill_last_in_create(void **state) { (void)state, run_processes(last_killed_in_create, 4); }
static void address_space(void **state) {
    (void)state;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    skip(); /* their shadow memory does not live with RLIMIT_AS */
#endif
    run_processes(no_address_space, 0);
}
static void kill_in_allgather(void **state) { (void)state, run_processes(killed_in_allgather, 4); }
static void kill_in_dispatch(void **state) { (void)state, run_processes(killed_in_dispatch, 4); }
static void kill_in_combine(void **state) { (void)state, run_processes(killed_in_combine, 4); }
static void deadline(void **state) { (void)state, run_processes(slow_peer, 0); }
static void mismatch(void **state) { (void)state, run_processes(mismatch_fails_everywhere, 0); }
static void no_memory(void **state) { (void)state, run_processes(no_memory_fails_everywhere, 0); }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(processes_exchange),
        cmocka_unit_test(kill_first_in_create),
        cmocka_unit_test(kill_last_in_create),
        cmocka_unit_test(kill_in_allgather),
        cmocka_unit_test(kill_in_dispatch),
        cmocka_unit_test(kill_in_combine),
        cmocka_unit_test(deadline),
        cmocka_unit_test(mismatch),
        cmocka_unit_test(no_memory),
        cmocka_unit_test(address_space),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
