/* Writes texts of grammars with random tokens, for grammar_test.py: grammar_gen TOKENIZER_JSON [N_VOCAB].
 * A line in: {"spec": SPEC, "seed": N, "max_tokens": N, "check": bool}. A line out: {"error": TEXT}, or
 * {"text": TEXT, "done": bool, "n_tokens": N, "mask_us": mean, "mask_max_us": most}. check: every mask is compared with trying
 * tokens one by one from the beginning. Lines that are not valid JSON end the program with an error, as does a mask that lies. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/clock.h"
#include "base/philox.h"
#include "engine/grammar/grammar.h"

enum { MAX_HISTORY = 4000 };

static epx_tokenizer_t *g_tok;
static epx_grammar_vocab_t *g_vocab;
static int32_t g_n_vocab;
static uint32_t *g_bits;

typedef struct {
    const epx_grammar_t *g;
    epx_grammar_state_t *s;
    uint64_t seed, n_random;
    int32_t history[MAX_HISTORY], n;
    uint64_t mask_ns, mask_max_ns;
} run_t;

static uint32_t next_random(run_t *r) { return epx_philox_u32(r->seed, r->n_random++); }

static void die(const char *what) {
    fprintf(stderr, "grammar_gen: %s: %s\n", what, epx_error_message());
    exit(1);
}

static int has_bit(int32_t id) { return (int)((g_bits[id / 32] >> (id % 32)) & 1u); }

/* Would the token be taken behind the history? */
static int tried(const run_t *r, int32_t token) {
    epx_grammar_state_t *s;
    if (epx_grammar_state_create(r->g, g_vocab, &s) < 0) die("state");
    for (int32_t i = 0; i < r->n; i++)
        if (epx_grammar_accept(s, r->history[i]) < 0) die("the history does not fit");
    int ok = epx_grammar_accept(s, token) >= 0;
    epx_grammar_state_destroy(s);
    return ok;
}

static void check_mask(run_t *r) {
    for (int i = 0; i < 30; i++) {
        int32_t token = (int32_t)(next_random(r) % (uint32_t)g_n_vocab);
        if (tried(r, token) == has_bit(token)) continue;
        fprintf(stderr, "grammar_gen: behind %d tokens the mask says %d of token %d\n", r->n, has_bit(token), token);
        exit(1);
    }
}

static int is_structural(int32_t id) {
    size_t n = 0;
    const char *b = epx_tokenizer_token_bytes(g_tok, id, &n);
    for (size_t i = 0; i < n; i++)
        if (strchr("\"}],:", b[i])) return 1;
    return 0;
}

/* Any allowed token; in a part of the draws one that may close something, so that texts end. */
static int32_t draw(run_t *r, int32_t n_allowed) {
    int closing = next_random(r) % 100 < 40;
    int32_t n_close = 0;
    for (int32_t id = 0; closing && id < g_n_vocab; id++) n_close += has_bit(id) && is_structural(id);
    closing = n_close > 0;
    int32_t k = (int32_t)(next_random(r) % (uint32_t)(closing ? n_close : n_allowed));
    for (int32_t id = 0; id < g_n_vocab; id++)
        if (has_bit(id) && (!closing || is_structural(id)) && k-- == 0) return id;
    die("draw");
    return -1;
}

static int32_t masked(run_t *r) {
    int32_t n = 0;
    uint64_t t0 = epx_now_ns(), took;
    if (epx_grammar_mask(r->s, g_bits, &n) < 0) die("mask");
    took = epx_now_ns() - t0;
    r->mask_ns += took;
    if (took > r->mask_max_ns) r->mask_max_ns = took;
    return n;
}

/* Returns 1 when the text is whole. */
static int generate(run_t *r, int32_t max_tokens, int check) {
    while (!epx_grammar_must_end(r->s)) {
        int32_t n = masked(r);
        if (check) check_mask(r);
        if (n == 0 || (epx_grammar_can_end(r->s) && next_random(r) % 4 == 0)) return 1;
        if (r->n == max_tokens || r->n == MAX_HISTORY) return 0;
        int32_t token = draw(r, n);
        if (epx_grammar_accept(r->s, token) < 0) die("a token of the mask was refused");
        r->history[r->n++] = token;
    }
    return 1;
}

static void put(json_t *o) {
    json_dumpf(o, stdout, JSON_COMPACT);
    putchar('\n');
    fflush(stdout);
    json_decref(o);
}

static void answer(run_t *r, int done) {
    epx_str_t text = {0}, whole = {0};
    json_t *o = json_object();
    if (epx_tokenizer_decode(g_tok, r->history, (size_t)r->n, 0, &text) < 0) die("decode");
    if (epx_utf8_append_lossy(&whole, epx_str_z(&text), text.n_bytes) < 0) die("decode");
    json_object_set_new(o, "text", json_stringn(epx_str_z(&whole), whole.n_bytes));
    json_object_set_new(o, "done", json_boolean(done));
    json_object_set_new(o, "n_tokens", json_integer(r->n));
    json_object_set_new(o, "mask_us", json_real((double)r->mask_ns / 1e3 / (r->n + 1)));
    json_object_set_new(o, "mask_max_us", json_real((double)r->mask_max_ns / 1e3));
    put(o);
    epx_str_fini(&text);
    epx_str_fini(&whole);
}

static void take_line(const json_t *line) {
    static run_t r;
    epx_grammar_t *g = NULL;
    char *spec = json_dumps(json_object_get(line, "spec"), JSON_COMPACT);
    if (epx_grammar_create(spec, strlen(spec), &g) < 0) {
        put(json_pack("{s:s}", "error", epx_error_message()));
        free(spec);
        return;
    }
    r = (run_t){.g = g, .seed = (uint64_t)json_integer_value(json_object_get(line, "seed"))};
    if (epx_grammar_state_create(g, g_vocab, &r.s) < 0) die("state");
    int done = generate(&r, (int32_t)json_integer_value(json_object_get(line, "max_tokens")),
                        json_is_true(json_object_get(line, "check")));
    answer(&r, done);
    epx_grammar_state_destroy(r.s);
    epx_grammar_destroy(g);
    free(spec);
}

int main(int argc, char **argv) {
    char *line = NULL;
    size_t cap = 0;
    if (argc < 2 || epx_tokenizer_create(argv[1], &g_tok) < 0) die("tokenizer");
    g_n_vocab = argc > 2 ? atoi(argv[2]) : epx_tokenizer_n_vocab(g_tok);
    if (epx_grammar_vocab_create(g_tok, g_n_vocab, &g_vocab) < 0) die("vocabulary");
    g_bits = calloc((size_t)(g_n_vocab + 31) / 32, sizeof *g_bits);
    while (getline(&line, &cap, stdin) > 0) {
        json_t *v = json_loads(line, 0, NULL);
        if (!v) die("not a line of JSON");
        take_line(v);
        json_decref(v);
    }
    free(line);
    free(g_bits);
    epx_grammar_vocab_destroy(g_vocab);
    epx_tokenizer_destroy(g_tok);
    return 0;
}
