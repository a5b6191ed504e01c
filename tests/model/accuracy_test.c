/* The 200 "known" word problems of tests/data/wordproblems in chat form, greedy, at most 220 new tokens: at least 198 right with
 * one rank and with two (transformers: 200). Also prints tokens per second. */
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
    int w;
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

static void body(void *ctx, int rank, epx_rank_t *r) {
    exam_t *x = ctx;
    for (int i = rank; i < N_PROBLEMS; i += x->w) {
        epx_request_t q = {
            .id = (uint64_t)i, .prompt = x->problems[i].prompt, .n_prompt = x->problems[i].n_prompt, .max_new_tokens = MAX_NEW};
        epx_sampling_init(&q.sampling);
        q.sampling.temperature = 0;
        CHECK_OK(epx_rank_submit(r, &q));
    }
    if (rank == 0) x->start_ns = epx_now_ns();
    run_until_idle(r, on_event, x);
    if (rank == 0) {
        x->end_ns = epx_now_ns();
        epx_rank_stats(r, &x->stats);
    }
}

static int count_right(const epx_tokenizer_t *tok, const problem_t *p) {
    int n = 0;
    for (int i = 0; i < N_PROBLEMS; i++) {
        epx_str_t text = {0};
        char got[32];
        CHECK_OK(epx_tokenizer_decode(tok, p[i].out, (size_t)p[i].n_out, 1, &text));
        final_answer(epx_str_z(&text), got, sizeof got);
        n += strcmp(got, p[i].answer) == 0;
        epx_str_fini(&text);
    }
    return n;
}

static void sit(const epx_tokenizer_t *tok, problem_t *problems, int w) {
    exam_t x = {.problems = problems, .w = w};
    epx_rank_config_t c = small_config(TINY, w);
    int n_prompt = 0, n_out = 0;
    c.max_total_tokens = 0;
    c.max_running = 64;
    for (int i = 0; i < N_PROBLEMS; i++) problems[i].n_out = 0;
    with_ranks(&c, body, &x);
    for (int i = 0; i < N_PROBLEMS; i++) n_prompt += problems[i].n_prompt, n_out += problems[i].n_out;
    double s = (double)(x.end_ns - x.start_ns) * 1e-9;
    int n = count_right(tok, problems);
    printf("%d ranks: %d of %d right; %d prompt and %d new tokens in %.2f s: %.0f new tokens/s\n", w, n, N_PROBLEMS, n_prompt,
           n_out, s, n_out / s);
    printf("  rows sent by rank 0:");
    for (int i = 0; i < w; i++) printf(" to rank %d: %llu", i, (unsigned long long)x.stats.rows_sent[i]);
    printf("\n");
    fflush(stdout);
    CHECK(n >= NEEDED, "at least %d", NEEDED);
}

int main(void) {
    text_t t;
    problem_t *problems = calloc(N_PROBLEMS, sizeof *problems);
    int32_t(*first)[MAX_NEW] = calloc(N_PROBLEMS, sizeof *first);
    CHECK(problems && first, "no memory");
    CHECK_OK(epx_tokenizer_create(TINY "/tokenizer.json", &t.tok));
    CHECK_OK(epx_chat_template_load(TINY, &t.chat));
    read_problems(&t, problems);
    sit(t.tok, problems, 1);
    for (int i = 0; i < N_PROBLEMS; i++) memcpy(first[i], problems[i].out, sizeof first[i]);
    sit(t.tok, problems, 2);
    for (int i = 0; i < N_PROBLEMS; i++) /* exact combine: the same text, token for token */
        CHECK(memcmp(first[i], problems[i].out, (size_t)problems[i].n_out * sizeof first[i][0]) == 0,
              "problem %d: one rank and two differ", i);
    for (int i = 0; i < N_PROBLEMS; i++) free(problems[i].prompt);
    free(problems);
    free(first);
    epx_chat_template_destroy(t.chat);
    epx_tokenizer_destroy(t.tok);
    return 0;
}
