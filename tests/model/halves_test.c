/* Two-batch overlap seen in a trace of the calls: in every layer of a step in halves, the second half computes its attention and
 * leaves for its experts while the first half's rows are on their way, and the same on the way back. Also: the exchange takes no
 * more memory than without, and a step with one token a rank stays in one piece. */
#include <string.h>
#include <unistd.h>

#include "tests/model/harness.h"

enum { W = 2, N_PROMPT = 40, N_NEW = 6, MAX_CALLS = 1 << 14 };

typedef struct {
    epx_rank_stats_t stats;
    epx_rank_info_t info;
} side_t;

typedef struct {
    int n_requests; /* of rank 0; rank 1 has none */
    side_t side[W];
} exam_t;

static void on_event(void *ctx, const epx_event_t *ev) {
    (void)ctx;
    CHECK(ev->finish != EPX_FINISH_ERROR, "%s", ev->error ? ev->error : "");
}

static void body(void *ctx, int rank, epx_rank_t *r) {
    exam_t *x = ctx;
    int32_t prompt[N_PROMPT];
    for (int i = 0; i < x->n_requests && rank == 0; i++) {
        for (int k = 0; k < N_PROMPT; k++) prompt[k] = (i * 31 + k * 7) % 500;
        epx_request_t q = {.id = (uint64_t)i, .prompt = prompt, .n_prompt = N_PROMPT, .max_new_tokens = N_NEW, .ignore_eos = 1};
        epx_sampling_init(&q.sampling);
        CHECK_OK(epx_rank_submit(r, &q));
    }
    run_until_idle(r, on_event, NULL);
    epx_rank_stats(r, &x->side[rank].stats);
    epx_rank_info(r, &x->side[rank].info);
}

static exam_t run(int n_requests, int halves, const char *transports) {
    exam_t x = {.n_requests = n_requests};
    epx_rank_config_t c = small_config(QWEN, W);
    c.n_threads = 1;
    c.chunk_tokens = 64;
    c.moe_a2a_backend = "pplx";
    c.two_batch_overlap = halves;
    c.transports = transports;
    with_ranks(&c, body, &x);
    return x;
}

/* A letter for each call in order of time: dispatch_send a, dispatch_recv b, combine_send c, combine_recv d; of channel 1 in
 * capitals. The first exchange is the self-test's. */
static char *read_calls(const char *path) {
    static const char *const names[] = {"dispatch_send", "dispatch_recv", "combine_send", "combine_recv"};
    json_error_t e;
    json_t *events = json_load_file(path, 0, &e), *v;
    char *calls = calloc(1, MAX_CALLS);
    size_t i, n = 0;
    CHECK(events && calls, "%s: %s", path, e.text);
    json_array_foreach(events, i, v) {
        int channel = (int)json_integer_value(json_object_get(json_object_get(v, "args"), "channel"));
        for (int k = 0; k < 4; k++)
            if (strcmp(json_string_value(json_object_get(v, "name")), names[k]) == 0)
                calls[n++] = (char)((channel ? 'A' : 'a') + k);
        CHECK(n < MAX_CALLS - 1 && (channel == 0 || channel == 1), "%zu calls, channel %d", n, channel);
    }
    json_decref(events);
    CHECK(strncmp(calls, "abcd", 4) == 0, "the self-test comes first");
    memmove(calls, calls + 4, n - 3);
    return calls;
}

static int count(const char *text, const char *what) {
    int n = 0;
    for (const char *at = text; (at = strstr(at, what)) != NULL; at++) n++;
    return n;
}

/* In a step in halves of L layers: "aA bcBC" once, then "da DA bcBC" for each further layer, then "dD". */
static void check_calls(const char *calls, const exam_t *x) {
    const epx_rank_stats_t *s = &x->side[0].stats;
    const int layers = x->side[0].info.n_layers, halved = (int)s->n_halved_steps, whole = (int)s->n_steps - halved;
    CHECK(halved > 3 && whole == 0, "%d steps in halves, %d others", halved, whole);
    CHECK(count(calls, "aAbcBCd") == halved, "first layers: %s", calls);
    CHECK(count(calls, "daDAbcBCd") == halved * (layers - 1), "later layers: %s", calls);
    CHECK(count(calls, "bcBCdD") == halved, "last layers: %s", calls);
    CHECK((int)strlen(calls) == halved * layers * 8, "%zu calls in %d steps of %d layers", strlen(calls), halved, layers);
}

static void check_trace(void) {
    char dir[] = "/tmp/epx-halves-XXXXXX", path[128];
    CHECK(mkdtemp(dir), "no directory");
    setenv("EPX_TRACE_DIR", dir, 1);
    exam_t x = run(3, 1, "trace");
    for (int rank = 0; rank < W; rank++) {
        int found = 0;
        for (int i = 0; i < 2 * W && !found; i++) {
            snprintf(path, sizeof path, "%s/epx-trace-%d-%d-%d.json", dir, (int)getpid(), rank, i);
            found = access(path, R_OK) == 0;
        }
        CHECK(found, "no trace of rank %d", rank);
        char *calls = read_calls(path);
        check_calls(calls, &x);
        unlink(path);
        free(calls);
    }
    CHECK(rmdir(dir) == 0, "%s is not empty", dir);
    unsetenv("EPX_TRACE_DIR");
    printf("%d steps in halves: every call in its place on both ranks, one of which had no tokens\n",
           (int)x.side[0].stats.n_halved_steps);
}

int main(void) {
    check_trace();
    exam_t one = run(1, 1, NULL), plain = run(1, 0, NULL);
    CHECK(one.side[0].stats.n_halved_steps == 1, "%d steps in halves: only the prompt's has two tokens",
          (int)one.side[0].stats.n_halved_steps);
    CHECK(one.side[0].info.n_channels == 2 && one.side[0].info.channel_tokens == plain.side[0].info.channel_tokens / 2,
          "%d channels of %d tokens", one.side[0].info.n_channels, one.side[0].info.channel_tokens);
    printf("exchange: %llu bytes with two channels, %llu with one\n", (unsigned long long)one.side[0].info.exchange_bytes,
           (unsigned long long)plain.side[0].info.exchange_bytes);
    CHECK(one.side[0].info.exchange_bytes <= plain.side[0].info.exchange_bytes * 11 / 10, "more than a tenth more");
    return 0;
}
