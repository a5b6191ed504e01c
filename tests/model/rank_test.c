/* A rank's life: bad configurations and checkpoints, idling and waking, stopping, cancelling, refusing requests, losing a peer.
 */
#include <pthread.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/str.h"
#include "tests/model/harness.h"

/* ---- checkpoints and configurations that cannot work ---- */

static char g_dir[64];

static void copy_file(const char *name, size_t keep) {
    char from[512], to[512], *data;
    size_t n;
    snprintf(from, sizeof from, "%s/%s", QWEN, name);
    snprintf(to, sizeof to, "%s/%s", g_dir, name);
    CHECK_OK(epx_read_file(from, 1 << 28, &data, &n));
    FILE *f = fopen(to, "wb");
    CHECK(f && fwrite(data, 1, n < keep ? n : keep, f) == (n < keep ? n : keep), "%s", to);
    fclose(f);
    free(data);
}

/* Replace every `from` by `to` (equal lengths) in a copied file. */
static void patch(const char *name, const char *from, const char *to) {
    char path[512], *data;
    size_t n, len = strlen(from);
    int n_found = 0;
    CHECK(len == strlen(to), "patch keeps lengths");
    snprintf(path, sizeof path, "%s/%s", g_dir, name);
    CHECK_OK(epx_read_file(path, 1 << 28, &data, &n));
    for (size_t i = 0; i + len <= n; i++)
        if (memcmp(data + i, from, len) == 0) memcpy(data + i, to, len), n_found++;
    CHECK(n_found, "%s has no %s", name, from);
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(data, 1, n, f) == n, "%s", path);
    fclose(f);
    free(data);
}

static void fresh(void) {
    copy_file("config.json", (size_t)-1);
    copy_file("model.safetensors", (size_t)-1);
}

static void expect_message(epx_status_t got, epx_status_t want, const char *part, const char *part2) {
    CHECK(got == want && strstr(epx_error_message(), part) && strstr(epx_error_message(), part2),
          "expected %d with \"%s\" and \"%s\", got %d: %s", (int)want, part, part2, (int)got, epx_error_message());
}

static void refuse(epx_status_t want, const char *part, const char *part2) {
    epx_rank_config_t c = small_config(g_dir, 1);
    epx_rank_t *r;
    expect_message(epx_rank_create(&c, &r), want, part, part2);
}

static void check_checkpoints(void) {
    fresh();
    copy_file("model.safetensors", 50000);
    refuse(EPX_ERR_FORMAT, "model.safetensors: tensor", "truncated");
    fresh();
    patch("model.safetensors", "\"model.norm.weight\"", "\"model.n0rm.weight\"");
    refuse(EPX_ERR_NOT_FOUND, "model.safetensors", "\"model.norm.weight\" of shape [128] is missing");
    fresh();
    patch("config.json", "\"vocab_size\": 512", "\"vocab_size\": 513");
    refuse(EPX_ERR_FORMAT, "model.safetensors", "has shape [512, 128], expected [513, 128]");
    fresh();
    patch("config.json", "Qwen3MoeForCausalLM", "Qwen9MoeForCausalLM");
    refuse(EPX_ERR_UNSUPPORTED, "config.json", "unknown architecture \"Qwen9MoeForCausalLM\", supported: Qwen3MoeForCausalLM");
    fresh();
    patch("config.json", "\"hidden_size\":", "\"hidden_size\",");
    refuse(EPX_ERR_FORMAT, "config.json: line", "not valid JSON");
}

static void body_one_bad(void *ctx, const epx_rank_config_t *cfg) {
    epx_rank_t *r;
    (void)ctx;
    epx_status_t s = epx_rank_create(cfg, &r);
    if (cfg->rank == 1) expect_message(s, EPX_ERR_NOT_FOUND, "experts.7.up_proj", "missing");
    else expect_message(s, EPX_ERR_PEER, "loading the model: rank 1 failed", "experts.7.up_proj");
}

/* An expert that only rank 1 needs is missing: rank 0 loads, then learns why rank 1 did not. */
static void check_one_bad_rank(void) {
    fresh();
    patch("model.safetensors", "model.layers.2.mlp.experts.7.up_proj.weight", "model.layers.2.mlp.experts.7.up_pr0j.weight");
    epx_rank_config_t c = small_config(g_dir, 2);
    with_configs(&c, body_one_bad, NULL);
}

static void check_configs(void) {
    epx_rank_t *r;
    epx_rank_config_t c = small_config(QWEN, 1);
#define BAD(field, value, status, part)                                \
    do {                                                               \
        epx_rank_config_t b = c;                                       \
        b.field = value;                                               \
        expect_message(epx_rank_create(&b, &r), status, #field, part); \
    } while (0)
    BAD(dp, 2, EPX_ERR_ARG, "expected a divisor of tp = 1");
    BAD(ep, 2, EPX_ERR_ARG, "expected a divisor of tp = 1");
    BAD(deepep_mode, "fast", EPX_ERR_ARG, "\"fast\", expected with moe_a2a_backend auto: auto, low_latency|normal");
    BAD(tp, 0, EPX_ERR_ARG, "expected 1 to 64");
    BAD(rank, 1, EPX_ERR_ARG, "expected 0 to");
    BAD(moe_a2a_backend, "mooncake", EPX_ERR_ARG, "\"mooncake\", expected auto, none, pplx or deepep");
    BAD(load_format, "pt", EPX_ERR_ARG, "\"pt\", expected auto or dummy");
    BAD(max_context, 4096, EPX_ERR_ARG, "2048");
    BAD(max_running, -1, EPX_ERR_ARG, "-1");
    BAD(max_total_tokens, (int64_t)1 << 39, EPX_ERR_NOMEM, "bytes wanted");
#undef BAD
}

/* Each rank maps its own experts: two ranks together map little more than one, and each clearly less. */
static void body_mapped(void *ctx, int rank, epx_rank_t *r) {
    epx_rank_info_t info;
    epx_rank_info(r, &info);
    ((uint64_t *)ctx)[rank] = info.mapped_bytes;
}

static void check_mapped(void) {
    uint64_t one[1], two[2];
    epx_rank_config_t c1 = small_config(TINY, 1), c2 = small_config(TINY, 2);
    struct stat sb;
    CHECK(stat(TINY "/model.safetensors", &sb) == 0, "no model");
    with_ranks(&c1, body_mapped, one);
    with_ranks(&c2, body_mapped, two);
    uint64_t size = (uint64_t)sb.st_size, experts = 6ull * 16 * 3 * 128 * 256 * 2, rest = size - experts;
    printf("mapped bytes of a file of %llu: one rank %llu; two ranks %llu, %llu\n", (unsigned long long)size,
           (unsigned long long)one[0], (unsigned long long)two[0], (unsigned long long)two[1]);
    CHECK(one[0] >= size - 65536 && one[0] <= size + 4096, "one rank");
    for (int i = 0; i < 2; i++)
        CHECK(two[i] >= rest - 65536 + experts / 2 && two[i] <= rest + experts / 2 + 6 * 8 * 8192, "rank %d", i);
}

/* ---- requests ---- */

typedef struct {
    int n_tokens, n_ends;
    epx_finish_t finish;
    char error[512];
} seen_t;

static void on_event(void *ctx, const epx_event_t *ev) {
    seen_t *s = (seen_t *)ctx + ev->id;
    s->n_tokens += ev->token >= 0;
    if (ev->finish == EPX_FINISH_NONE) return;
    s->n_ends++;
    s->finish = ev->finish;
    snprintf(s->error, sizeof s->error, "%s", ev->error ? ev->error : "");
}

static const int32_t prompt[] = {5, 6, 7, 8, 9};

static epx_request_t request(uint64_t id, int32_t max_new) {
    epx_request_t q = {.id = id, .prompt = prompt, .n_prompt = 5, .max_new_tokens = max_new, .ignore_eos = 1};
    epx_sampling_init(&q.sampling);
    q.sampling.temperature = 0;
    return q;
}

static void body_requests(void *ctx, int rank, epx_rank_t *r) {
    (void)ctx, (void)rank;
    seen_t seen[4] = {{0}};
    static const int32_t bad_token[] = {5, 512};
    epx_request_t q = request(0, 3000);
    expect_message(epx_rank_submit(r, &q), EPX_ERR_CAPACITY, "3005", "2048");
    q = request(0, 3);
    q.prompt = bad_token;
    q.n_prompt = 2;
    expect_message(epx_rank_submit(r, &q), EPX_ERR_ARG, "prompt[1] is 512", "0 to 511");
    q = request(0, 3);
    q.sampling.top_p = 2.0f;
    expect_message(epx_rank_submit(r, &q), EPX_ERR_ARG, "top_p is 2", "at most 1");
    for (uint64_t i = 0; i < 3; i++) {
        q = request(i, i == 1 ? 1000 : 4);
        CHECK_OK(epx_rank_submit(r, &q));
    }
    CHECK(epx_rank_step(r, on_event, seen) == EPX_OK && seen[1].n_tokens == 1, "first step");
    epx_rank_cancel(r, 1);
    epx_rank_cancel(r, 77);
    run_until_idle(r, on_event, seen);
    CHECK(seen[0].n_tokens == 4 && seen[0].finish == EPX_FINISH_LENGTH && seen[2].n_tokens == 4, "requests 0 and 2");
    CHECK(seen[1].finish == EPX_FINISH_CANCELLED && seen[1].n_tokens == 1 && seen[1].n_ends == 1, "request 1");
    int32_t stop[1];
    q = request(3, 50); /* the fourth greedy token as a stop id */
    float *logits = malloc(5 * 512 * sizeof *logits);
    CHECK(logits, "no memory");
    CHECK_OK(epx_rank_logits(r, prompt, 5, 5, logits));
    stop[0] = 0;
    for (int32_t i = 1; i < 512; i++)
        if (logits[4 * 512 + i] > logits[4 * 512 + stop[0]]) stop[0] = i;
    free(logits);
    q.stop_ids = stop;
    q.n_stop_ids = 1;
    CHECK_OK(epx_rank_submit(r, &q));
    run_until_idle(r, on_event, seen);
    CHECK(seen[3].finish == EPX_FINISH_STOP && seen[3].n_tokens == 1, "stop id: %d tokens", seen[3].n_tokens);
}

/* The test at the start passes (or there would be no rank), and would not if the layer's sum were doubled or halved. */
static void body_self_test(void *ctx, int rank, epx_rank_t *r) {
    (void)ctx, (void)rank;
    CHECK_OK(epx_rank_self_test(r, 1));
    expect_message(epx_rank_self_test(r, 2), EPX_ERR_MISMATCH, "MoE layer 0, token 0", "refusing to serve");
    expect_message(epx_rank_self_test(r, 0.999), EPX_ERR_MISMATCH, "over 4 ranks", "one by one");
}

static void check_self_test(void) {
    for (int dp = 1; dp <= 4; dp *= 2) {
        epx_rank_config_t c = small_config(QWEN, 4);
        c.n_threads = 1;
        c.dp = dp;
        c.combine = dp == 2 ? EPX_COMBINE_PARTIAL : EPX_COMBINE_EXACT;
        c.moe_a2a_backend = dp == 4 ? "none" : "pplx";
        with_ranks(&c, body_self_test, NULL);
    }
}

/* ---- idling, waking, stopping: two ranks in lockstep, kept together by a barrier between the phases ---- */

static pthread_barrier_t phase;

static void body_wake(void *ctx, int rank, epx_rank_t *r) {
    seen_t seen[1] = {{0}};
    (void)ctx;
    CHECK(epx_rank_step(r, on_event, seen) == EPX_AGAIN, "both idle");
    if (rank == 0) epx_rank_wake(r, 1); /* rank 1 has not seen the wake: nobody may block */
    CHECK(epx_rank_step(r, on_event, seen) == EPX_OK, "wakes differ");
    if (rank == 1) epx_rank_wake(r, 1);
    CHECK(epx_rank_step(r, on_event, seen) == EPX_AGAIN, "wakes agree");
    if (rank == 0) {
        epx_request_t q = request(0, 3);
        CHECK_OK(epx_rank_submit(r, &q));
    }
    run_until_idle(r, on_event, seen);
    CHECK(seen[0].n_tokens == (rank == 0 ? 3 : 0), "%d tokens", seen[0].n_tokens);
    if (rank == 0) {
        epx_request_t q = request(0, 1000);
        CHECK_OK(epx_rank_submit(r, &q));
        epx_rank_stop(r);
    }
    CHECK(epx_rank_step(r, on_event, seen) == EPX_OK, "one was asked to stop");
    pthread_barrier_wait(&phase);
    epx_rank_stop(r);
    CHECK(epx_rank_step(r, on_event, seen) == EPX_ERR_ABORTED, "all were asked to stop");
    CHECK(rank == 1 || seen[0].finish == EPX_FINISH_CANCELLED, "the live request ends");
}

static void body_stop_idle(void *ctx, int rank, epx_rank_t *r) {
    (void)ctx;
    if (rank == 1) epx_rank_stop(r);
    CHECK(epx_rank_step(r, NULL, NULL) == EPX_OK, "with a stop under way nobody blocks");
    if (rank == 0) epx_rank_stop(r);
    CHECK(epx_rank_step(r, NULL, NULL) == EPX_ERR_ABORTED, "agreed stop");
}

/* ---- a peer that leaves in mid-generation ---- */

static void body_loss(void *ctx, int rank, epx_rank_t *r) {
    seen_t seen[1] = {{0}};
    epx_status_t s = EPX_OK;
    (void)ctx;
    epx_request_t q = request(0, 1500);
    if (rank == 0) CHECK_OK(epx_rank_submit(r, &q));
    for (int i = 0; i < 10 && s == EPX_OK; i++) s = epx_rank_step(r, on_event, seen);
    CHECK(s == EPX_OK, "ten steps");
    if (rank == 1) return; /* destroys its rank */
    while (s == EPX_OK) s = epx_rank_step(r, on_event, seen);
    printf("peer lost: %d: %s\n", (int)s, seen[0].error);
    CHECK(s == EPX_ERR_PEER || s == EPX_ERR_TIMEOUT, "%d", (int)s);
    CHECK(seen[0].finish == EPX_FINISH_ERROR && seen[0].n_ends == 1 && strstr(seen[0].error, "rank 1"), "%s", seen[0].error);
    CHECK(epx_rank_step(r, on_event, seen) == s && seen[0].n_ends == 1, "stays failed");
    CHECK(epx_rank_submit(r, &q) == EPX_ERR_STATE, "refuses requests");
}

static void body_dummy(void *ctx, int rank, epx_rank_t *r) {
    static const int32_t tokens[] = {1, 2, 3};
    CHECK_OK(epx_rank_logits(r, tokens, rank == 0 ? 3 : 0, 3, rank == 0 ? ctx : NULL));
}

/* Dummy weights are the same model for any number of ranks. */
static void check_dummy(void) {
    static float one[3 * 512], two[3 * 512];
    epx_rank_config_t c = small_config(QWEN, 1);
    c.load_format = "dummy";
    with_ranks(&c, body_dummy, one);
    c.tp = c.dp = c.ep = 2;
    with_ranks(&c, body_dummy, two);
    CHECK(memcmp(one, two, sizeof one) == 0 && one[0] != one[1], "dummy weights");
}

int main(void) {
    char path[128];
    snprintf(g_dir, sizeof g_dir, "/tmp/epx-rank-XXXXXX");
    CHECK(mkdtemp(g_dir), "mkdtemp");
    check_checkpoints();
    check_one_bad_rank();
    check_configs();
    check_mapped();
    check_dummy();
    check_self_test();
    epx_rank_config_t one = small_config(QWEN, 1), two = small_config(QWEN, 2);
    with_ranks(&one, body_requests, NULL);
    pthread_barrier_init(&phase, NULL, 2);
    with_ranks(&two, body_wake, NULL);
    with_ranks(&two, body_stop_idle, NULL);
    two.timeout_ns = 3u * 1000u * 1000u * 1000ull;
    with_ranks(&two, body_loss, NULL);
    snprintf(path, sizeof path, "%s/config.json", g_dir);
    unlink(path);
    snprintf(path, sizeof path, "%s/model.safetensors", g_dir);
    unlink(path);
    rmdir(g_dir);
    return 0;
}
