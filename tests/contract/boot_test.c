/* Bootstrap "tcp": joining, and everything that can be wrong about it, each with its named error and within the timeout.
 * Ranks are processes, since the token is in the environment. Usage: contract_boot */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/atomic.h"
#include "base/clock.h"
#include "tests/harness/components.h"
#include "tests/harness/exchange.h"

static const uint64_t SECOND = 1000000000u;
typedef struct {
    char bootstrap[64];
    int port;
} place_t;

/* A port that was free a moment ago. */
static place_t new_place(void) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    place_t p;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_true(fd >= 0 && bind(fd, (struct sockaddr *)&a, sizeof a) == 0 && getsockname(fd, (struct sockaddr *)&a, &n) == 0);
    close(fd);
    p.port = ntohs(a.sin_port);
    snprintf(p.bootstrap, sizeof p.bootstrap, "tcp:127.0.0.1:%d", p.port);
    return p;
}

static epx_status_t join(th_rank_t *r, int rank, int n_ranks, uint64_t timeout_ns, epx_world_t **w) {
    const place_t *p = r->arg;
    epx_world_config_t c;
    epx_world_config_init(&c);
    c.bootstrap = p->bootstrap;
    c.rank = rank;
    c.n_ranks = n_ranks;
    c.timeout_ns = timeout_ns;
    return epx_world_create(&c, w);
}

static int says(const char *const *words) {
    for (int i = 0; words[i]; i++)
        if (strstr(epx_last_error(), words[i]) == NULL) return 0;
    return 1;
}
#define SAYS(r, ...)                                                                     \
    do {                                                                                 \
        const char *const words_[] = {__VA_ARGS__, NULL};                                \
        TH_CHECK(r, says(words_), "the message does not name it: %s", epx_last_error()); \
    } while (0)

static void run(int n_ranks, th_fn_t fn) {
    place_t p = new_place();
    assert_int_equal(th_launch(TH_PROCESSES, n_ranks, fn, &p, 30, NULL), 0);
}

/* ---- it works ---- */

static int exchange(th_rank_t *r, epx_world_t *w) {
    epx_group_t *g = NULL;
    th_case_t c = {.opts = TH_HALVES | TH_HISTOGRAM, .n_steps = TH_N_KINDS, .seed = th_seed()};
    c.shape = (th_shape_t){.n_ranks = r->n_ranks,
                           .max_tokens = 6,
                           .hidden = 40,
                           .top_k = 3,
                           .n_experts = 7,
                           .token = EPX_BF16,
                           .wire = EPX_BF16,
                           .expert = EPX_F32,
                           .combine = EPX_BF16,
                           .layout = EPX_LAYOUT_LISTS,
                           .mode = EPX_COMBINE_EXACT};
    TH_OK(r, epx_group_create(w, NULL, 0, -1, &g));
    int rc = th_case_run(r, g, &c);
    epx_group_destroy(g);
    return rc;
}

static int body_works(th_rank_t *r) {
    epx_world_t *w = NULL;
    if (r->rank == 0) th_sleep_us(200000); /* the others come first and must wait */
    setenv("EPX_JOIN_TOKEN", "a secret", 1);
    TH_OK(r, join(r, r->rank, r->n_ranks, 10 * SECOND, &w));
    TH_CHECK(r, epx_world_rank(w) == r->rank && epx_world_size(w) == r->n_ranks, "%s", "rank or size differ");
    int rc = exchange(r, w);
    epx_world_destroy(w);
    return rc;
}

static void ranks_join_and_exchange(void **state) {
    (void)state;
    run(1, body_works);
    run(4, body_works);
}

/* ---- strangers and other tokens ---- */

static int connect_stranger(int port) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    for (int i = 0; i < 2000 && connect(fd, (struct sockaddr *)&a, sizeof a) != 0; i++) th_sleep_us(1000);
    return fd;
}

static int body_strangers(th_rank_t *r) {
    const place_t *p = r->arg;
    char junk[200];
    if (r->rank == 2) { /* not a rank of this world */
        int fds[80];
        memset(junk, 'x', sizeof junk);
        for (int i = 0; i < 80; i++) {
            fds[i] = connect_stranger(p->port);
            if (i % 2) (void)!send(fds[i], junk, i % 3 ? sizeof junk : 7, MSG_NOSIGNAL); /* it may be dropped already */
        }
        epx_store_release_u64(&th_words(r)[0], 1);
        th_barrier(r);
        for (int i = 0; i < 80; i++) close(fds[i]);
        return 0;
    }
    epx_world_t *w = NULL;
    for (int i = 0; r->rank == 1 && i < 8000 && epx_load_acquire_u64(&th_words(r)[0]) == 0; i++) th_sleep_us(1000);
    TH_OK(r, join(r, r->rank, 2, 20 * SECOND, &w));
    th_barrier(r);
    epx_world_destroy(w);
    return 0;
}

static void strangers_do_not_stop_it(void **state) {
    (void)state;
    run(3, body_strangers);
}

static int body_wrong_token(th_rank_t *r) {
    epx_world_t *w = NULL;
    uint64_t start = epx_now_ns();
    setenv("EPX_JOIN_TOKEN", r->rank == 1 ? "hunter3" : "hunter2", 1);
    epx_status_t s = join(r, r->rank, r->n_ranks, 2 * SECOND, &w);
    double took = (double)(epx_now_ns() - start) * 1e-9;
    TH_CHECK(r, strstr(epx_last_error(), "hunter") == NULL, "the message has the token: %s", epx_last_error());
    TH_CHECK(r, took < 5, "took %.3f s", took);
    if (r->rank == 1) {
        TH_CHECK(r, s == EPX_ERR_MISMATCH, "status %d: %s", (int)s, epx_last_error());
        SAYS(r, "token", "rank 1");
    } else {
        TH_CHECK(r, s == EPX_ERR_TIMEOUT, "status %d: %s", (int)s, epx_last_error());
        SAYS(r, "missing", "ranks: 1;", "1 connections refused", "token");
    }
    return 0;
}

static void another_token_is_refused(void **state) {
    (void)state;
    run(3, body_wrong_token);
}

/* ---- ranks that disagree ---- */

static int body_wrong_size(th_rank_t *r) {
    epx_world_t *w = NULL;
    TH_STATUS(r, join(r, r->rank, r->rank == 1 ? 4 : 3, 5 * SECOND, &w), EPX_ERR_MISMATCH);
    SAYS(r, "n_ranks", "4 on rank 1", "3 on rank 0");
    return 0;
}

static void another_size_ends_it(void **state) {
    (void)state;
    run(2, body_wrong_size); /* of three that rank 0 waits for */
}

static int body_twice(th_rank_t *r) {
    epx_world_t *w = NULL;
    TH_STATUS(r, join(r, r->rank == 2 ? 1 : r->rank, 3, 5 * SECOND, &w), EPX_ERR_MISMATCH);
    SAYS(r, "rank 1 joined twice");
    return 0;
}

static void a_rank_that_joins_twice_ends_it(void **state) {
    (void)state;
    run(3, body_twice);
}

static int body_out_of_range(th_rank_t *r) {
    epx_world_t *w = NULL;
    TH_STATUS(r, join(r, 5, 3, SECOND, &w), EPX_ERR_ARG);
    SAYS(r, "rank is 5");
    TH_STATUS(r, join(r, -1, 3, SECOND, &w), EPX_ERR_ARG);
    TH_STATUS(r, join(r, 0, -1, SECOND, &w), EPX_ERR_ARG);
    SAYS(r, "n_ranks is -1");
    return 0;
}

static void ranks_must_be_given(void **state) {
    (void)state;
    run(1, body_out_of_range);
}

/* ---- ranks that do not come ---- */

static int body_missing(th_rank_t *r) {
    epx_world_t *w = NULL;
    uint64_t start = epx_now_ns();
    TH_STATUS(r, join(r, r->rank, 4, r->rank ? 6 * SECOND : 2 * SECOND, &w), EPX_ERR_TIMEOUT);
    SAYS(r, "missing", "2, 3");
    TH_CHECK(r, epx_now_ns() - start < 5 * SECOND, "took %.3f s", (double)(epx_now_ns() - start) * 1e-9);
    return 0;
}

static void missing_ranks_are_named(void **state) {
    (void)state;
    run(2, body_missing);
}

static int body_nobody(th_rank_t *r) {
    epx_world_t *w = NULL;
    TH_STATUS(r, join(r, 1, 2, SECOND / 2, &w), EPX_ERR_TIMEOUT);
    SAYS(r, "no rank 0 at 127.0.0.1");
    return 0;
}

static void no_rank_0_is_named(void **state) {
    (void)state;
    run(1, body_nobody);
}

static int body_dies(th_rank_t *r) {
    epx_world_t *w = NULL;
    epx_group_t *g = NULL;
    TH_OK(r, join(r, r->rank, r->n_ranks, 2 * SECOND, &w));
    if (r->rank == 2) {
        epx_world_destroy(w);
        return 0;
    }
    epx_status_t s = epx_group_create(w, NULL, 0, -1, &g);
    TH_CHECK(r, s == EPX_ERR_PEER, "status %d: %s", (int)s, epx_last_error());
    SAYS(r, "rank 2");
    TH_CHECK(r, epx_group_create(w, NULL, 0, -1, &g) < 0, "%s", "a lost world made a group");
    epx_world_destroy(w);
    return 0;
}

static void a_rank_that_leaves_is_named(void **state) {
    (void)state;
    run(3, body_dies);
}

/* ---- addresses ---- */

static int body_addresses(th_rank_t *r) {
    static const char *const bad[] = {"tcp:",      "tcp:localhost", "tcp::80",  "tcp:localhost:0", "tcp:h:65536",
                                      "tcp:h:12x", "tcp:::1:80",    "tcp:h: 1", "tcp:h:-1",        "tcp:no.such.host.invalid:80"};
    epx_world_config_t c;
    epx_world_t *w = NULL;
    unsetenv("EPX_JOIN_TOKEN");
    epx_world_config_init(&c);
    c.rank = 0, c.n_ranks = 1;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        c.bootstrap = bad[i];
        TH_STATUS(r, epx_world_create(&c, &w), EPX_ERR_ARG);
        SAYS(r, "address");
    }
    c.bootstrap = "tcp:0.0.0.0:5";
    TH_STATUS(r, epx_world_create(&c, &w), EPX_ERR_ARG);
    SAYS(r, "EPX_JOIN_TOKEN", "0.0.0.0:5");
    setenv("EPX_JOIN_TOKEN", "t", 1);
    c.bootstrap = "tcp:192.0.2.1:7000"; /* TEST-NET-1: not an address of this host */
    TH_STATUS(r, epx_world_create(&c, &w), EPX_ERR_OS);
    SAYS(r, "cannot listen at 192.0.2.1:7000");
    return 0;
}

static void addresses_are_checked(void **state) {
    (void)state;
    run(1, body_addresses);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_join_and_exchange),         cmocka_unit_test(strangers_do_not_stop_it),
        cmocka_unit_test(another_token_is_refused),        cmocka_unit_test(another_size_ends_it),
        cmocka_unit_test(a_rank_that_joins_twice_ends_it), cmocka_unit_test(ranks_must_be_given),
        cmocka_unit_test(missing_ranks_are_named),         cmocka_unit_test(no_rank_0_is_named),
        cmocka_unit_test(a_rank_that_leaves_is_named),     cmocka_unit_test(addresses_are_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
