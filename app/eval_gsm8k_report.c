/* Scores of `epx eval gsm8k`, the log of every question and the comparison of two servers. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "app/eval_gsm8k.h"

enum { MAX_SHOWN = 20, SHOWN_BYTES = 60 };

typedef struct {
    int64_t n_answered, n_right, n_invalid, n_right_strict, n_invalid_strict, n_tokens;
} totals_t;

static void add_score(totals_t *t, const epx_gsm8k_score_t *s, const epx_load_request_t *r) {
    t->n_answered += s->answered;
    t->n_right += s->right;
    t->n_invalid += !s->found || !s->answered;
    t->n_right_strict += s->right_strict;
    t->n_invalid_strict += !s->found_strict || !s->answered;
    t->n_tokens += s->answered && r->reply.n_tokens > 0 ? r->reply.n_tokens : 0;
}

static epx_status_t total(const epx_gsm8k_run_t *g, int side, totals_t *out) {
    *out = (totals_t){0};
    for (size_t i = 0; i < g->n; i++) {
        epx_gsm8k_score_t s;
        epx_status_t st = epx_gsm8k_score(g, side, i, &s);
        add_score(out, &s, &g->sides[side].load.requests[i]);
        epx_str_fini(&s.digits);
        if (st < 0) return st;
    }
    return EPX_OK;
}

static void print_totals(const epx_gsm8k_run_t *g, int side, const totals_t *t) {
    double n = (double)g->n, p = (double)t->n_right / n, strict = (double)t->n_right_strict / n, s = g->sides[side].seconds;
    if (g->n_sides > 1) printf("%s\n", g->sides[side].base);
    printf("Accuracy: %.3f +- %.3f (%lld of %zu)\n", p, sqrt(p * (1 - p) / n), (long long)t->n_right, g->n);
    printf("Invalid: %.3f\n", (double)t->n_invalid / n);
    printf("Accuracy, strict: %.3f +- %.3f (%lld of %zu)\n", strict, sqrt(strict * (1 - strict) / n),
           (long long)t->n_right_strict, g->n);
    printf("Invalid, strict: %.3f\n", (double)t->n_invalid_strict / n);
    printf("Latency: %.3f s\n", s);
    printf("Output throughput: %.3f token/s\n", (double)t->n_tokens / s);
}

static int say_unanswered(const epx_gsm8k_run_t *g, int side, const totals_t *t) {
    const epx_load_t *l = &g->sides[side].load;
    for (size_t i = 0; i < g->n; i++) {
        if (l->requests[i].ok) continue;
        fprintf(stderr, "epx: %s did not answer %lld of %zu questions, which count as wrong; question %zu: %s\n",
                g->sides[side].base, (long long)((int64_t)g->n - t->n_answered), g->n, i, l->requests[i].error);
        return 1;
    }
    return 0;
}

/* ---- comparison ---- */

static size_t common_bytes(const epx_str_t *a, const epx_str_t *b) {
    size_t n = a->n_bytes < b->n_bytes ? a->n_bytes : b->n_bytes, i = 0;
    while (i < n && a->data[i] == b->data[i]) i++;
    while (i > 0 && i < a->n_bytes && ((unsigned char)a->data[i] & 0xc0) == 0x80) i--; /* to the beginning of a character */
    return i;
}

static void print_part(const char *name, const epx_str_t *text, size_t from) {
    size_t n = text->n_bytes - from;
    printf("    %s ", name);
    for (size_t i = 0; i < n && i < SHOWN_BYTES; i++) {
        char c = text->data[from + i];
        if (c == '\n') fputs("\\n", stdout);
        else if ((unsigned char)c >= 32 && c != 127) fputc(c, stdout);
        else fputc('?', stdout);
    }
    puts(n > SHOWN_BYTES ? "..." : n ? "" : "(the end)");
}

static void print_difference(const epx_gsm8k_run_t *g, size_t i, const epx_gsm8k_score_t s[2]) {
    const epx_str_t *a = &g->sides[0].load.requests[i].reply.text, *b = &g->sides[1].load.requests[i].reply.text;
    size_t at = common_bytes(a, b);
    printf("  question %zu: %s and %s; texts differ from byte %zu on\n", i, s[0].right ? "right" : "wrong",
           s[1].right ? "right" : "wrong", at);
    print_part("first ", a, at);
    print_part("second", b, at);
}

static int same_text(const epx_str_t *a, const epx_str_t *b) {
    return a->n_bytes == b->n_bytes && (a->n_bytes == 0 || memcmp(a->data, b->data, a->n_bytes) == 0);
}

static int same_value(const epx_gsm8k_score_t s[2]) {
    return s[0].found == s[1].found && (!s[0].found || strcmp(epx_str_z(&s[0].digits), epx_str_z(&s[1].digits)) == 0);
}

static epx_status_t compare(const epx_gsm8k_run_t *g) {
    size_t n_text = 0, n_value = 0, n_first = 0, n_second = 0, n_shown = 0;
    printf("Comparison of %s and %s\n", g->sides[0].base, g->sides[1].base);
    for (size_t i = 0; i < g->n; i++) {
        epx_gsm8k_score_t s[2] = {0};
        epx_status_t st = epx_gsm8k_score(g, 0, i, &s[0]);
        if (st >= 0) st = epx_gsm8k_score(g, 1, i, &s[1]);
        int same = same_text(&g->sides[0].load.requests[i].reply.text, &g->sides[1].load.requests[i].reply.text);
        n_text += (size_t)same;
        n_value += (size_t)same_value(s);
        n_first += (size_t)(s[0].right && !s[1].right);
        n_second += (size_t)(s[1].right && !s[0].right);
        if (!same && n_shown++ < MAX_SHOWN) print_difference(g, i, s);
        for (int k = 0; k < 2; k++) epx_str_fini(&s[k].digits);
        if (st < 0) return st;
    }
    if (n_shown > MAX_SHOWN) printf("  ... and %zu more; --log-file has all\n", n_shown - MAX_SHOWN);
    printf("Same text: %zu of %zu\nSame value: %zu of %zu\n", n_text, g->n, n_value, g->n);
    printf("Only the first right: %zu\nOnly the second right: %zu\n", n_first, n_second);
    return EPX_OK;
}

/* ---- files ---- */

static json_t *answer_json(const epx_gsm8k_run_t *g, int side, size_t i, const epx_gsm8k_score_t *s) {
    const epx_load_request_t *r = &g->sides[side].load.requests[i];
    json_t *o = json_object();
    json_object_set_new(o, "answer", json_stringn(epx_str_z(&r->reply.text), r->reply.text.n_bytes));
    json_object_set_new(o, "value", s->found ? json_string(epx_str_z(&s->digits)) : json_null());
    json_object_set_new(o, "right", json_boolean(s->right));
    json_object_set_new(o, "strict_value", s->found_strict ? json_real(s->strict) : json_null());
    json_object_set_new(o, "strict_right", json_boolean(s->right_strict));
    json_object_set_new(o, "finish_reason", json_string(r->reply.finish));
    json_object_set_new(o, "completion_tokens", r->reply.n_tokens >= 0 ? json_integer(r->reply.n_tokens) : json_null());
    json_object_set_new(o, "latency", json_real(epx_load_sample(r).latency));
    json_object_set_new(o, "error", r->error[0] ? json_string(r->error) : json_null());
    return o;
}

static epx_status_t write_line(FILE *out, json_t *o) {
    char *line = o ? json_dumps(o, JSON_COMPACT) : NULL;
    int bad = line && (fputs(line, out) < 0 || fputc('\n', out) < 0);
    epx_status_t s = !line ? epx_fail(EPX_ERR_NOMEM, "no memory for a line")
                     : bad ? epx_fail_errno(EPX_ERR_IO, errno, "write")
                           : EPX_OK;
    free(line);
    json_decref(o);
    return s;
}

static epx_status_t log_question(const epx_gsm8k_run_t *g, size_t i, FILE *out) {
    const epx_gsm8k_item_t *it = &g->data.items[i];
    json_t *o = json_object();
    epx_status_t st = EPX_OK;
    json_object_set_new(o, "index", json_integer((json_int_t)i));
    json_object_set_new(o, "question", json_stringn(it->question.data, it->question.n_bytes));
    json_object_set_new(o, "reference", json_stringn(it->answer.data, it->answer.n_bytes));
    for (int k = 0; k < g->n_sides && st >= 0; k++) {
        epx_gsm8k_score_t s;
        st = epx_gsm8k_score(g, k, i, &s);
        json_t *a = answer_json(g, k, i, &s);
        if (k == 0) {
            json_object_update(o, a);
            json_decref(a);
        } else {
            json_object_set_new(o, "compared", a);
        }
        epx_str_fini(&s.digits);
    }
    if (st >= 0) return write_line(out, o);
    json_decref(o);
    return st;
}

static epx_status_t write_log(const epx_gsm8k_run_t *g) {
    if (!g->o->log_file) return EPX_OK;
    FILE *out = fopen(g->o->log_file, "w");
    if (!out) return epx_fail_errno(EPX_ERR_IO, errno, "--log-file %s", g->o->log_file);
    epx_status_t s = EPX_OK;
    for (size_t i = 0; i < g->n && s >= 0; i++) s = log_question(g, i, out);
    if (fclose(out) != 0 && s >= 0) s = epx_fail_errno(EPX_ERR_IO, errno, "--log-file %s", g->o->log_file);
    return s;
}

static epx_status_t write_result(const epx_gsm8k_run_t *g, const totals_t *t) {
    const epx_settings_t *o = g->o;
    const epx_gsm8k_side_t *side = &g->sides[0];
    if (!o->result_file) return EPX_OK;
    FILE *out = fopen(o->result_file, "a");
    if (!out) return epx_fail_errno(EPX_ERR_IO, errno, "--result-file %s", o->result_file);
    double n = (double)g->n;
    json_t *r = json_pack("{s:s, s:s, s:f, s:f, s:f, s:f, s:f, s:i, s:{s:i, s:i, s:i}}", "task", "gsm8k", "backend",
                          side->api->backend, "latency", side->seconds, "accuracy", (double)t->n_right / n, "invalid",
                          (double)t->n_invalid / n, "strict_accuracy", (double)t->n_right_strict / n, "output_throughput",
                          (double)t->n_tokens / side->seconds, "num_requests", (int)g->n, "other", "num_questions",
                          (int)o->num_questions, "num_shots", (int)o->num_shots, "parallel", (int)o->parallel);
    epx_status_t s = write_line(out, r);
    if (fclose(out) != 0 && s >= 0) s = epx_fail_errno(EPX_ERR_IO, errno, "--result-file %s", o->result_file);
    return s;
}

epx_status_t epx_gsm8k_report(const epx_gsm8k_run_t *g, int *out_failed) {
    totals_t t[2] = {{0}};
    for (int k = 0; k < g->n_sides; k++) {
        EPX_TRY(total(g, k, &t[k]));
        print_totals(g, k, &t[k]);
        *out_failed |= say_unanswered(g, k, &t[k]);
    }
    if (g->n_sides > 1) EPX_TRY(compare(g));
    EPX_TRY(write_log(g));
    return write_result(g, &t[0]);
}
