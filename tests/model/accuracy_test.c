/* The 200 "known" word problems of tests/data/wordproblems in chat form, greedy, at most 220 new tokens: at least 198 right with
 * one rank (transformers: 200), and the same text, token for token, in the layouts of SGLang's pplx test: data-parallel attention
 * on 2 and 4 ranks, 4 ranks of which two each share the heads, and one request at a time. Also prints tokens per second. */
#include <string.h>

#include "base/clock.h"
#include "engine/tokenizer/chat_template.h"
#include "engine/tokenizer/tokenizer.h"
#include "tests/model/harness.h"

enum { N_PROBLEMS = 200, MAX_NEW = 220, NEEDED = 198 };

typedef struct {
    int32_t *prompt; /* owned */
    int32_t n_prompt, n_out;
    int32_t out[MAX_NEW];
    char answer[32]; /* after "#### " */
} problem_t;

typedef struct {
    problem_t *problems; /* [N_PROBLEMS] */
    int w, dp, n, one_by_one;
    uint64_t start_ns, end_ns;
    epx_rank_stats_t stats; /* of rank 0 */
} exam_t;

/* The text after the last "#### ", up to the end of its line; "" when there is none. */
static void final_answer(const char *text, char *out, size_t n_out) {
    const char *at = NULL, *p = text;
    while ((p = strstr(p, "#### "))) at = p += 5;
    out[0] = 0;
    if (at) snprintf(out, n_out, "%.*s", (int)strcspn(at, "\n"), at);
}

typedef struct {
    epx_tokenizer_t *tok;
    epx_chat_template_t *chat;
} text_t;

/* Chat form: the model's template around one user message. */
static void encode(const text_t *t, const json_t *question, problem_t *p) {
    epx_str_t s = {0};
    size_t n;
    json_t *messages = json_pack("[{s:s, s:O}]", "role", "user", "content", question);
    CHECK(messages, "no memory");
    CHECK_OK(epx_chat_template_render(t->chat, messages, 1, NULL, &s));
    json_decref(messages);
    CHECK_OK(epx_tokenizer_encode(t->tok, s.data, s.n_bytes, &p->prompt, &n));
    p->n_prompt = (int32_t)n;
    epx_str_fini(&s);
}

static void read_problems(const text_t *t, problem_t *out) {
    char line[8192];
    json_error_t e;
    int n = 0;
    FILE *f = fopen(EPX_TEST_DATA "/wordproblems/heldout.jsonl", "r");
    CHECK(f, "no problems");
    while (n < N_PROBLEMS && fgets(line, sizeof line, f)) {
        json_t *j = json_loads(line, 0, &e);
        CHECK(j, "line %d: %s", n + 1, e.text);
        CHECK(strcmp(json_string_value(json_object_get(j, "split")), "known") == 0, "line %d", n + 1);
        encode(t, json_object_get(j, "question"), &out[n]);
        final_answer(json_string_value(json_object_get(j, "answer")), out[n].answer, sizeof out[n].answer);
        CHECK(out[n].answer[0], "line %d has no answer", n + 1);
        json_decref(j);
        n++;
    }
    fclose(f);
    CHECK(n == N_PROBLEMS, "%d problems", n);
}

static void on_event(void *ctx, const epx_event_t *ev) {
    problem_t *p = &((exam_t *)ctx)->problems[ev->id];
    CHECK(ev->finish != EPX_FINISH_ERROR && ev->token >= 0, "problem %d: %s", (int)ev->id, ev->error ? ev->error : "");
    p->out[p->n_out++] = ev->token;
}

static void submit(const exam_t *x, epx_rank_t *r, int i) {
    epx_request_t q = {
        .id = (uint64_t)i, .prompt = x->problems[i].prompt, .n_prompt = x->problems[i].n_prompt, .max_new_tokens = MAX_NEW};
    epx_sampling_init(&q.sampling);
    q.sampling.temperature = 0;
    CHECK_OK(epx_rank_submit(r, &q));
}

/* Ranks of one attention group get the same problems. */
static void body(void *ctx, int rank, epx_rank_t *r) {
    exam_t *x = ctx;
    int first = rank / (x->w / x->dp);
    for (int i = first; i < x->n && !x->one_by_one; i += x->dp) {
        submit(x, r, i);
    }
    if (rank == 0) x->start_ns = epx_now_ns();
    for (int i = 0; i < x->n && x->one_by_one; i++) {
        if (i % x->dp == first) submit(x, r, i);
        run_until_idle(r, on_event, x);
    }
    run_until_idle(r, on_event, x);
    if (rank == 0) {
        x->end_ns = epx_now_ns();
        epx_rank_stats(r, &x->stats);
    }
}

static int count_right(const epx_tokenizer_t *tok, const problem_t *p, int n_problems) {
    int n = 0;
    for (int i = 0; i < n_problems; i++) {
        epx_str_t text = {0};
        char got[32];
        CHECK_OK(epx_tokenizer_decode(tok, p[i].out, (size_t)p[i].n_out, 1, &text));
        final_answer(epx_str_z(&text), got, sizeof got);
        n += strcmp(got, p[i].answer) == 0;
        epx_str_fini(&text);
    }
    return n;
}

typedef struct {
    const char *name, *backend;
    int w, dp, n, one_by_one;
} layout_t;

static void sit(const epx_tokenizer_t *tok, problem_t *problems, const layout_t *l) {
    exam_t x = {.problems = problems, .w = l->w, .dp = l->dp, .n = l->n, .one_by_one = l->one_by_one};
    epx_rank_config_t c = small_config(TINY, l->w);
    int n_prompt = 0, n_out = 0;
    c.dp = l->dp;
    c.moe_a2a_backend = l->backend;
    c.max_total_tokens = 0;
    c.max_running = 64;
    for (int i = 0; i < N_PROBLEMS; i++) problems[i].n_out = 0;
    with_ranks(&c, body, &x);
    for (int i = 0; i < l->n; i++) n_prompt += problems[i].n_prompt, n_out += problems[i].n_out;
    double s = (double)(x.end_ns - x.start_ns) * 1e-9;
    int n = count_right(tok, problems, l->n);
    printf("%s: %d of %d right; %d prompt and %d new tokens in %.2f s: %.0f new tokens/s\n", l->name, n, l->n, n_prompt, n_out, s,
           n_out / s);
    printf("  rows sent by rank 0:");
    for (int i = 0; i < l->w; i++) printf(" to rank %d: %llu", i, (unsigned long long)x.stats.rows_sent[i]);
    printf("\n");
    fflush(stdout);
    CHECK(n >= l->n * NEEDED / N_PROBLEMS, "at least %d of %d", NEEDED, N_PROBLEMS);
}

static const layout_t layouts[] = {
    {"1 rank", "auto", 1, 1, N_PROBLEMS, 0},
    {"2 ranks, dp 2", "auto", 2, 2, N_PROBLEMS, 0},
    {"4 ranks, dp 4, pplx", "pplx", 4, 4, N_PROBLEMS, 0},
    {"4 ranks, dp 4, deepep, one request at a time", "deepep", 4, 4, 40, 1},
    {"4 ranks, dp 2 (two share the heads), pplx", "pplx", 4, 2, N_PROBLEMS, 0},
};

int main(void) {
    static int32_t n_first[N_PROBLEMS];
    text_t t;
    problem_t *problems = calloc(N_PROBLEMS, sizeof *problems);
    int32_t(*first)[MAX_NEW] = calloc(N_PROBLEMS, sizeof *first);
    CHECK(problems && first, "no memory");
    CHECK_OK(epx_tokenizer_create(TINY "/tokenizer.json", &t.tok));
    CHECK_OK(epx_chat_template_load(TINY, &t.chat));
    read_problems(&t, problems);
    sit(t.tok, problems, &layouts[0]);
    for (int i = 0; i < N_PROBLEMS; i++) memcpy(first[i], problems[i].out, sizeof first[i]), n_first[i] = problems[i].n_out;
    for (size_t k = 1; k < sizeof layouts / sizeof layouts[0]; k++) {
        sit(t.tok, problems, &layouts[k]);
        for (int i = 0; i < layouts[k].n; i++) /* exact combine: the same text, token for token */
            CHECK(problems[i].n_out == n_first[i] &&
                      memcmp(first[i], problems[i].out, (size_t)n_first[i] * sizeof first[i][0]) == 0,
                  "problem %d: one rank and %s differ", i, layouts[k].name);
    }
    for (int i = 0; i < N_PROBLEMS; i++) free(problems[i].prompt);
    free(problems);
    free(first);
    epx_chat_template_destroy(t.chat);
    epx_tokenizer_destroy(t.tok);
    return 0;
}
