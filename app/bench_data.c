/* Data sets by SGLang's rules: random-ids counts up from a random token, random repeats or cuts a text of the file, sharegpt
 * takes the first two turns of a conversation, jsonl is one {"prompt", "output_len"} a line. */
#include "app/bench_data.h"

#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/philox.h"

enum { MAX_FILE_BYTES = 1 << 30, MIN_TOKENS = 2 };

typedef struct {
    const epx_bench_data_config_t *c;
    epx_bench_data_t *out;
    uint64_t n_drawn; /* of the random stream */
} build_t;

/* Uniform in [low, high]. */
static int64_t draw(build_t *b, int64_t low, int64_t high) {
    uint64_t word = (uint64_t)epx_philox_u32(b->c->seed, b->n_drawn) << 32 | epx_philox_u32(b->c->seed, b->n_drawn + 1);
    b->n_drawn += 2;
    return low + (int64_t)(word % (uint64_t)(high - low + 1));
}

static int64_t draw_len(build_t *b, int64_t longest) {
    int64_t least = (int64_t)((double)longest * b->c->range_ratio);
    return draw(b, least < 1 ? 1 : least, longest);
}

static epx_status_t no_memory(size_t n) { return epx_fail(EPX_ERR_NOMEM, "no memory for %zu prompts", n); }

/* The prompt of these tokens. Takes over ids. */
static epx_status_t add_ids(build_t *b, int32_t *ids, int64_t n_prompt, int64_t n_output) {
    epx_bench_prompt_t *p = &b->out->prompts[b->out->n];
    epx_str_t bytes = {0};
    epx_status_t s = EPX_OK;
    *p = (epx_bench_prompt_t){.n_prompt = n_prompt, .n_output = n_output};
    if (b->c->want_ids) {
        p->ids = ids;
    } else {
        s = epx_tokenizer_decode(b->c->tokenizer, ids, (size_t)n_prompt, 0, &bytes);
        if (s >= 0) s = epx_utf8_append_lossy(&p->text, epx_str_z(&bytes), bytes.n_bytes);
        free(ids);
    }
    epx_str_fini(&bytes);
    b->out->n++; /* also after a failure: what it holds is freed with the rest */
    return s;
}

/* ---- random-ids ---- */

/* Tokens that are no special ones, so that a prompt does not end turns or answers. *out_ids is the caller's (free). */
static epx_status_t ordinary_tokens(const epx_tokenizer_t *tok, int32_t **out_ids, int32_t *out_n) {
    int32_t n_vocab = epx_tokenizer_n_vocab(tok), n = 0, *ids = malloc((size_t)n_vocab * sizeof *ids);
    size_t n_bytes;
    if (!ids) return no_memory((size_t)n_vocab);
    for (int32_t id = 0; id < n_vocab; id++)
        if (epx_tokenizer_token_bytes(tok, id, &n_bytes) && n_bytes && !epx_tokenizer_is_special(tok, id)) ids[n++] = id;
    *out_ids = ids;
    *out_n = n;
    return n ? EPX_OK : epx_fail(EPX_ERR_FORMAT, "the tokenizer has no ordinary token");
}

static epx_status_t random_ids(build_t *b) {
    const epx_bench_data_config_t *c = b->c;
    int32_t *vocab = NULL, n_vocab = 0;
    epx_status_t s = ordinary_tokens(c->tokenizer, &vocab, &n_vocab);
    for (size_t i = 0; i < c->n && s >= 0; i++) {
        int64_t n = draw_len(b, c->input_len), n_output = draw_len(b, c->output_len), first = draw(b, 0, n_vocab - 1);
        int32_t *ids = malloc((size_t)n * sizeof *ids);
        for (int64_t k = 0; ids && k < n; k++) ids[k] = vocab[(first + (int64_t)i + k) % n_vocab];
        s = ids ? add_ids(b, ids, n, n_output) : no_memory(c->n);
    }
    free(vocab);
    return s;
}

/* ---- files ---- */

static epx_status_t encode(build_t *b, const char *text, size_t n_bytes, int32_t **out_ids, int64_t *out_n) {
    size_t n = 0;
    EPX_TRY(epx_tokenizer_encode(b->c->tokenizer, text, n_bytes, out_ids, &n));
    *out_n = (int64_t)n;
    return EPX_OK;
}

/* A text as it stands, with n_output tokens to generate. */
static epx_status_t add_text(build_t *b, const json_t *text, int64_t n_output) {
    const epx_bench_data_config_t *c = b->c;
    int32_t *ids = NULL;
    int64_t n = 0;
    EPX_TRY(encode(b, json_string_value(text), json_string_length(text), &ids, &n));
    if (n < MIN_TOKENS || n_output < MIN_TOKENS || (c->context_len && n + n_output > c->context_len)) {
        free(ids);
        return EPX_OK;
    }
    if (c->want_ids) return add_ids(b, ids, n, n_output);
    epx_bench_prompt_t *p = &b->out->prompts[b->out->n++];
    *p = (epx_bench_prompt_t){.n_prompt = n, .n_output = n_output};
    free(ids);
    return epx_str_append(&p->text, json_string_value(text), json_string_length(text));
}

/* A text cut or repeated to a length. */
static epx_status_t add_random(build_t *b, const json_t *text) {
    int32_t *some = NULL, *ids;
    int64_t n_some = 0, n = draw_len(b, b->c->input_len), n_output = draw_len(b, b->c->output_len);
    EPX_TRY(encode(b, json_string_value(text), json_string_length(text), &some, &n_some));
    if (n_some == 0) return EPX_OK;
    ids = malloc((size_t)n * sizeof *ids);
    for (int64_t k = 0; ids && k < n; k++) ids[k] = some[k % n_some];
    free(some);
    return ids ? add_ids(b, ids, n, n_output) : no_memory(b->c->n);
}

/* The turns of a conversation: [{"value": ...}, ...]. */
static const json_t *turn(const json_t *conversation, size_t i) {
    const json_t *list = json_object_get(conversation, "conversations");
    if (!list) list = json_object_get(conversation, "conversation");
    return json_object_get(json_array_get(list, i), "value");
}

static void shuffle(build_t *b, size_t *order, size_t n) {
    for (size_t i = n; i > 1; i--) {
        size_t k = (size_t)draw(b, 0, (int64_t)i - 1), kept = order[k];
        order[k] = order[i - 1];
        order[i - 1] = kept;
    }
}

static epx_status_t add_conversation(build_t *b, const json_t *conversation) {
    const json_t *question = turn(conversation, 0), *answer = turn(conversation, 1);
    int32_t *ids = NULL;
    int64_t n_answer = b->c->fixed_output_len;
    if (!json_is_string(question) || !json_is_string(answer)) return EPX_OK; /* fewer than two turns */
    if (strcmp(b->c->name, "random") == 0) return add_random(b, question);
    if (!n_answer) EPX_TRY(encode(b, json_string_value(answer), json_string_length(answer), &ids, &n_answer));
    free(ids);
    return add_text(b, question, n_answer);
}

static epx_status_t conversations(build_t *b) {
    json_error_t e;
    json_t *all = json_load_file(b->c->path, 0, &e);
    if (!all) return epx_fail(EPX_ERR_FORMAT, "--dataset-path %s: line %d: %s", b->c->path, e.line, e.text);
    size_t n = json_array_size(all), *order = malloc((n + 1) * sizeof *order);
    epx_status_t s = order ? EPX_OK : no_memory(n);
    for (size_t i = 0; order && i < n; i++) order[i] = i;
    if (order) shuffle(b, order, n);
    for (size_t i = 0; i < n && b->out->n < b->c->n && s >= 0; i++) s = add_conversation(b, json_array_get(all, order[i]));
    free(order);
    json_decref(all);
    return s;
}

static epx_status_t add_line(build_t *b, const char *line, size_t n, int number) {
    json_error_t e;
    json_t *o = json_loadb(line, n, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &e);
    const json_t *prompt = json_object_get(o, "prompt"), *length = json_object_get(o, "output_len");
    int64_t n_output = b->c->fixed_output_len ? b->c->fixed_output_len : json_integer_value(length);
    epx_status_t s;
    if (!o || !json_is_string(prompt) || n_output < 1)
        s = epx_fail(EPX_ERR_FORMAT, "--dataset-path %s: line %d: legal: {\"prompt\": TEXT, \"output_len\": 1 or more}%s%s",
                     b->c->path, number, o ? "" : ": ", o ? "" : e.text);
    else s = add_text(b, prompt, n_output);
    json_decref(o);
    return s;
}

static epx_status_t lines(build_t *b) {
    char *text = NULL;
    size_t n = 0;
    EPX_TRY(epx_read_file(b->c->path, MAX_FILE_BYTES, &text, &n));
    epx_status_t s = EPX_OK;
    int number = 1;
    for (char *p = text, *end = text + n; p < end && b->out->n < b->c->n && s >= 0; number++) {
        char *stop = memchr(p, '\n', (size_t)(end - p));
        size_t k = stop ? (size_t)(stop - p) : (size_t)(end - p);
        if (k && strspn(p, " \t\r") < k) s = add_line(b, p, k, number);
        p += k + 1;
    }
    free(text);
    return s;
}

epx_status_t epx_bench_data(const epx_bench_data_config_t *c, epx_bench_data_t *out) {
    build_t b = {.c = c, .out = out};
    *out = (epx_bench_data_t){.prompts = calloc(c->n, sizeof *out->prompts)};
    if (!out->prompts) return no_memory(c->n);
    epx_status_t s = strcmp(c->name, "random-ids") == 0 ? random_ids(&b)
                     : strcmp(c->name, "jsonl") == 0    ? lines(&b)
                                                        : conversations(&b);
    if (s >= 0 && out->n == 0)
        s = epx_fail(EPX_ERR_ARG, "--dataset-path %s: no prompt left; they have 2 tokens or more and fit the context", c->path);
    if (s < 0) epx_bench_data_fini(out);
    return s;
}

void epx_bench_data_fini(epx_bench_data_t *d) {
    for (size_t i = 0; i < d->n; i++) {
        epx_str_fini(&d->prompts[i].text);
        free(d->prompts[i].ids);
    }
    free(d->prompts);
    *d = (epx_bench_data_t){0};
}
