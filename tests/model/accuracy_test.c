/* Word problems, greedy: every layout and backend gives the text of one rank, token for token, and enough of it is right.
 *   model_accuracy                the 200 "known" problems of tests/data/wordproblems: some layouts (make test)
 *   model_accuracy full           SGLang's three accuracy runs of its pplx test (data-parallel attention on 4 ranks with 128
 *                                 requests at a time; 40 problems one at a time; 4 ranks of which two each share the heads) with
 *                                 pplx, deepep low_latency and auto, in chat form and in 5-shot form; prereduced sums may change
 *                                 at most 2 answers, which are listed
 *   model_accuracy FILE [N]       the same on the first N (200) problems of a file of GSM8K's form, whatever is right
 * The 5-shot form, its stop string and how an answer is read are those of SGLang's benchmark/gsm8k/bench_sglang.py. */
#include <ctype.h>
#include <string.h>

#include "base/clock.h"
#include "engine/tokenizer/chat_template.h"
#include "engine/tokenizer/tokenizer.h"
#include "tests/model/harness.h"

enum { MAX_PROBLEMS = 2000, N_KNOWN = 200, MAX_NEW = 512, N_SHOTS = 5, N_SINGLE = 40, AT_ONCE = 128, MAY_DIFFER = 2 };

typedef enum { CHAT = 0, SHOTS, N_FORMS } form_t;
static const char *const form_names[] = {"chat", "5-shot"};
static const int max_new[] = {220, MAX_NEW};

typedef struct {
    char *question, *answer; /* owned */
    int32_t *prompt[N_FORMS], n_prompt[N_FORMS];
    char label[32];
    int32_t n_out, out[MAX_NEW];     /* of this run */
    int32_t n_alone, alone[MAX_NEW]; /* of one rank, in this form */
    char answer_alone[32];
} problem_t;

typedef struct {
    epx_tokenizer_t *tok;
    epx_chat_template_t *chat;
    int32_t stop; /* the token "Question": the model would begin another problem */
    problem_t *problems;
    int n;
} exam_t;

typedef struct {
    const char *name, *backend;
    int w, dp, one_by_one, halves;
    epx_combine_t combine;
} layout_t;

typedef struct {
    exam_t *x;
    const layout_t *l;
    form_t form;
    int n;
    uint64_t start_ns, end_ns;
    epx_rank_stats_t stats; /* of rank 0 */
} sitting_t;

/* ---- problems ---- */

/* Chat form: what follows the last "#### ", up to the end of its line. 5-shot form: the last run of digits, commas left out. */
static void read_answer(const char *text, form_t form, char *out, size_t n_out) {
    const char *at = NULL, *p = text;
    size_t n = 0;
    out[0] = 0;
    if (form == CHAT) {
        while ((p = strstr(p, "#### "))) at = p += 5;
        if (at) snprintf(out, n_out, "%.*s", (int)strcspn(at, "\n"), at);
        return;
    }
    for (int in_run = 0; *p; p++) {
        if (*p == ',') continue;
        const int is_digit = isdigit((unsigned char)*p) != 0;
        if (is_digit && !in_run) n = 0;
        if (is_digit && n + 1 < n_out) out[n++] = *p, out[n] = 0;
        in_run = is_digit;
    }
}

static void encode(const exam_t *x, const char *text, size_t n_bytes, problem_t *p, form_t form) {
    size_t n;
    CHECK_OK(epx_tokenizer_encode(x->tok, text, n_bytes, &p->prompt[form], &n));
    p->n_prompt[form] = (int32_t)n;
}

static void encode_chat(const exam_t *x, problem_t *p) {
    epx_str_t s = {0};
    json_t *messages = json_pack("[{s:s, s:s}]", "role", "user", "content", p->question);
    CHECK(messages, "no memory");
    CHECK_OK(epx_chat_template_render(x->chat, messages, 1, NULL, &s));
    json_decref(messages);
    encode(x, s.data, s.n_bytes, p, CHAT);
    epx_str_fini(&s);
}

static void encode_shots(const exam_t *x, problem_t *p) {
    epx_str_t s = {0};
    for (int i = 0; i < N_SHOTS; i++)
        CHECK_OK(epx_str_printf(&s, "Question: %s\nAnswer: %s\n\n", x->problems[i].question, x->problems[i].answer));
    CHECK_OK(epx_str_printf(&s, "Question: %s\nAnswer:", p->question));
    encode(x, s.data, s.n_bytes, p, SHOTS);
    epx_str_fini(&s);
}

static void read_line(problem_t *p, const char *line, int number) {
    json_error_t e;
    json_t *j = json_loads(line, 0, &e);
    const char *question = json_string_value(json_object_get(j, "question"));
    const char *answer = json_string_value(json_object_get(j, "answer"));
    CHECK(question && answer, "line %d: %s", number, e.text);
    p->question = strdup(question);
    p->answer = strdup(answer);
    CHECK(p->question && p->answer, "no memory");
    read_answer(answer, CHAT, p->label, sizeof p->label);
    for (char *c = p->label; (c = strchr(c, ','));) memmove(c, c + 1, strlen(c));
    CHECK(p->label[0], "line %d has no answer", number);
    json_decref(j);
}

static void read_problems(exam_t *x, const char *path, int n) {
    static char line[65536];
    FILE *f = fopen(path, "r");
    CHECK(f && n > N_SHOTS && n <= MAX_PROBLEMS, "%s: %d problems", path, n);
    x->problems = calloc((size_t)n, sizeof *x->problems);
    CHECK(x->problems, "no memory");
    for (x->n = 0; x->n < n && fgets(line, sizeof line, f); x->n++) read_line(&x->problems[x->n], line, x->n + 1);
    fclose(f);
    CHECK(x->n == n, "%s has %d problems, %d wanted", path, x->n, n);
    for (int i = 0; i < n; i++) {
        encode_chat(x, &x->problems[i]);
        encode_shots(x, &x->problems[i]);
    }
}

static void drop_problems(exam_t *x) {
    for (int i = 0; i < x->n; i++) {
        free(x->problems[i].question);
        free(x->problems[i].answer);
        for (int f = 0; f < N_FORMS; f++) free(x->problems[i].prompt[f]);
    }
    free(x->problems);
}

/* ---- ranks ---- */

static void on_event(void *ctx, const epx_event_t *ev) {
    problem_t *p = &((sitting_t *)ctx)->x->problems[ev->id];
    CHECK(ev->finish != EPX_FINISH_ERROR && ev->token >= 0, "problem %d: %s", (int)ev->id, ev->error ? ev->error : "");
    p->out[p->n_out++] = ev->token;
}

static void submit(const sitting_t *s, epx_rank_t *r, int i) {
    const problem_t *p = &s->x->problems[i];
    epx_request_t q = {
        .id = (uint64_t)i, .prompt = p->prompt[s->form], .n_prompt = p->n_prompt[s->form], .max_new_tokens = max_new[s->form]};
    if (s->form == SHOTS) q.stop_ids = &s->x->stop, q.n_stop_ids = 1;
    epx_sampling_init(&q.sampling);
    q.sampling.temperature = 0;
    CHECK_OK(epx_rank_submit(r, &q));
}

/* Ranks of one attention group get the same problems. */
static void body(void *ctx, int rank, epx_rank_t *r) {
    sitting_t *s = ctx;
    const int first = rank / (s->l->w / s->l->dp);
    if (rank == 0) s->start_ns = epx_now_ns();
    for (int i = 0; i < s->n; i++) {
        if (i % s->l->dp == first) submit(s, r, i);
        if (s->l->one_by_one) run_until_idle(r, on_event, s);
    }
    run_until_idle(r, on_event, s);
    if (rank != 0) return;
    s->end_ns = epx_now_ns();
    epx_rank_stats(r, &s->stats);
}

/* The text up to where SGLang's client stops reading. */
static void answer_of(const exam_t *x, const problem_t *p, form_t form, char *out, size_t n_out) {
    static const char *const stops[] = {"Question", "Assistant:", "<|separator|>"};
    epx_str_t text = {0};
    CHECK_OK(epx_tokenizer_decode(x->tok, p->out, (size_t)p->n_out, 1, &text));
    char *z = strdup(epx_str_z(&text)), *at;
    CHECK(z, "no memory");
    for (int i = 0; i < 3 && form == SHOTS; i++)
        if ((at = strstr(z, stops[i]))) *at = 0;
    read_answer(z, form, out, n_out);
    free(z);
    epx_str_fini(&text);
}

static int same_as_alone(const problem_t *p) {
    return p->n_out == p->n_alone && memcmp(p->out, p->alone, (size_t)p->n_out * sizeof p->out[0]) == 0;
}

static void keep_as_alone(const exam_t *x, form_t form) {
    for (int i = 0; i < x->n; i++) {
        problem_t *p = &x->problems[i];
        p->n_alone = p->n_out;
        memcpy(p->alone, p->out, sizeof p->alone);
        answer_of(x, p, form, p->answer_alone, sizeof p->answer_alone);
    }
}

/* Exact sums: the same tokens. Prereduced: the same answers but for a few, which are listed. */
static void compare(const sitting_t *s) {
    int n_texts = 0, n_answers = 0;
    char got[32];
    for (int i = 0; i < s->n; i++) {
        const problem_t *p = &s->x->problems[i];
        if (same_as_alone(p)) continue;
        CHECK(s->l->combine == EPX_COMBINE_PARTIAL, "%s, %s: problem %d differs from one rank's text", form_names[s->form],
              s->l->name, i);
        n_texts++;
        answer_of(s->x, p, s->form, got, sizeof got);
        if (strcmp(got, p->answer_alone) == 0) continue;
        n_answers++;
        printf("  problem %d: \"%s\", one rank \"%s\"\n", i, got, p->answer_alone);
    }
    if (s->l->combine == EPX_COMBINE_PARTIAL) printf("  %d of %d texts and %d answers differ\n", n_texts, s->n, n_answers);
    CHECK(n_answers <= MAY_DIFFER, "%d answers differ, at most %d may", n_answers, MAY_DIFFER);
}

/* Returns how many are right. */
static int sit(exam_t *x, const layout_t *l, form_t form) {
    sitting_t s = {.x = x, .l = l, .form = form, .n = l->one_by_one && x->n > N_SINGLE ? N_SINGLE : x->n};
    epx_rank_config_t c = small_config(TINY, l->w);
    int n_prompt = 0, n_out = 0, n_right = 0;
    char got[32];
    c.dp = l->dp;
    c.moe_a2a_backend = l->backend;
    c.deepep_mode = "low_latency";
    c.combine = l->combine;
    c.two_batch_overlap = l->halves;
    c.max_total_tokens = 0;
    c.max_running = AT_ONCE / l->dp;
    for (int i = 0; i < x->n; i++) x->problems[i].n_out = 0;
    with_ranks(&c, body, &s);
    for (int i = 0; i < s.n; i++) {
        answer_of(x, &x->problems[i], form, got, sizeof got);
        n_right += strcmp(got, x->problems[i].label) == 0;
        n_prompt += x->problems[i].n_prompt[form];
        n_out += x->problems[i].n_out;
    }
    const double seconds = (double)(s.end_ns - s.start_ns) * 1e-9;
    printf("%s, %s: %d of %d right; %d prompt and %d new tokens in %.1f s: %.0f new tokens/s; rows sent by rank 0:",
           form_names[form], l->name, n_right, s.n, n_prompt, n_out, seconds, n_out / seconds);
    for (int i = 0; i < l->w; i++) printf(" %llu", (unsigned long long)s.stats.rows_sent[i]);
    printf("\n");
    if (l->w == 1) keep_as_alone(x, form);
    else compare(&s);
    fflush(stdout);
    return n_right;
}

static const layout_t one = {"1 rank", "auto", 1, 1, 0, 0, EPX_COMBINE_EXACT};
static const layout_t some[] = {
    {"2 ranks, dp 2, in halves", "auto", 2, 2, 0, 1, EPX_COMBINE_EXACT},
    {"4 ranks, dp 4, pplx", "pplx", 4, 4, 0, 0, EPX_COMBINE_EXACT},
    {"4 ranks, dp 4, deepep, one request at a time", "deepep", 4, 4, 1, 0, EPX_COMBINE_EXACT},
    {"4 ranks, dp 2 (two share the heads), pplx", "pplx", 4, 2, 0, 0, EPX_COMBINE_EXACT},
};
static const layout_t all[] = {
    {"dp 4, 128 at a time, pplx", "pplx", 4, 4, 0, 0, EPX_COMBINE_EXACT},
    {"dp 4, 128 at a time, deepep", "deepep", 4, 4, 0, 0, EPX_COMBINE_EXACT},
    {"dp 4, 128 at a time, auto", "auto", 4, 4, 0, 0, EPX_COMBINE_EXACT},
    {"dp 4, one at a time, pplx", "pplx", 4, 4, 1, 0, EPX_COMBINE_EXACT},
    {"dp 4, one at a time, deepep", "deepep", 4, 4, 1, 0, EPX_COMBINE_EXACT},
    {"dp 4, one at a time, auto", "auto", 4, 4, 1, 0, EPX_COMBINE_EXACT},
    {"dp 2, pplx", "pplx", 4, 2, 0, 0, EPX_COMBINE_EXACT},
    {"dp 2, deepep", "deepep", 4, 2, 0, 0, EPX_COMBINE_EXACT},
    {"dp 2, auto", "auto", 4, 2, 0, 0, EPX_COMBINE_EXACT},
    {"dp 4, prereduced", "pplx", 4, 4, 0, 0, EPX_COMBINE_PARTIAL},
    {"dp 2, prereduced", "pplx", 4, 2, 0, 0, EPX_COMBINE_PARTIAL},
};

/* needed_percent of the problems must be right in every run. */
static void sit_all(exam_t *x, form_t form, const layout_t *layouts, size_t n_layouts, int needed_percent) {
    for (size_t k = 0; k <= n_layouts; k++) {
        const layout_t *l = k == 0 ? &one : &layouts[k - 1];
        const int n = l->one_by_one && x->n > N_SINGLE ? N_SINGLE : x->n, n_right = sit(x, l, form);
        CHECK(n_right * 100 >= n * needed_percent, "%d of %d right, at least %d %% needed", n_right, n, needed_percent);
    }
}

int main(int argc, char **argv) {
    static exam_t x;
    const int full = argc == 2 && strcmp(argv[1], "full") == 0, file = argc > 1 && !full;
    int32_t *ids;
    size_t n;
    CHECK_OK(epx_tokenizer_create(TINY "/tokenizer.json", &x.tok));
    CHECK_OK(epx_chat_template_load(TINY, &x.chat));
    CHECK_OK(epx_tokenizer_encode(x.tok, "Question", 8, &ids, &n));
    CHECK(n == 1, "\"Question\" is %zu tokens", n);
    x.stop = ids[0];
    free(ids);
    read_problems(&x, file ? argv[1] : EPX_TEST_DATA "/wordproblems/heldout.jsonl", argc == 3 ? atoi(argv[2]) : N_KNOWN);
    const size_t n_some = sizeof some / sizeof some[0], n_all = sizeof all / sizeof all[0];
    if (!file && !full) {
        sit_all(&x, CHAT, some, n_some, 99);
        sit_all(&x, SHOTS, some + 1, 1, 99);
    }
    for (int form = 0; form < N_FORMS && (file || full); form++) sit_all(&x, (form_t)form, all, n_all, full ? 99 : 0);
    drop_problems(&x);
    epx_chat_template_destroy(x.chat);
    epx_tokenizer_destroy(x.tok);
    return 0;
}
