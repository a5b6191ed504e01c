/* Tokenizer: the bundled model's cases, options one by one against stored ids of the tokenizers package, long pieces, refusals.
 * The four published tokenizers are in tokenizer_cases_test.c. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "base/clock.h"
#include "engine/tokenizer/tokenizer.h"

#define MODEL EPX_SOURCE_DIR "/models/tinymoe-math/"

static epx_tokenizer_t *load(const char *path) {
    epx_tokenizer_t *t = NULL;
    if (epx_tokenizer_create(path, &t) < 0) fail_msg("%s", epx_error_message());
    return t;
}

static int same_ids(const json_t *want, const int32_t *ids, size_t n) {
    size_t i;
    if (json_array_size(want) != n) return 0;
    for (i = 0; i < n; i++) {
        if (json_integer_value(json_array_get(want, i)) != ids[i]) return 0;
    }
    return 1;
}

/* Encode, compare with `want`; decode, compare with `decoded` unless NULL. Returns 1 when both agree. */
static int check(const epx_tokenizer_t *t, const json_t *text, const json_t *want, const json_t *decoded) {
    int32_t *ids = NULL;
    size_t n = 0;
    epx_str_t s = {0};
    int ok;
    if (epx_tokenizer_encode(t, json_string_value(text), json_string_length(text), &ids, &n) < 0) {
        print_error("%s\n", epx_error_message());
        return 0;
    }
    ok = same_ids(want, ids, n);
    if (ok && decoded) {
        ok = epx_tokenizer_decode(t, ids, n, 0, &s) == EPX_OK && s.n_bytes == json_string_length(decoded) &&
             memcmp(epx_str_z(&s), json_string_value(decoded), s.n_bytes) == 0;
    }
    epx_str_fini(&s);
    free(ids);
    return ok;
}

static void test_bundled_model(void **state) {
    epx_tokenizer_t *t = load(MODEL "tokenizer.json");
    FILE *f = fopen(MODEL "tokenizer_cases.jsonl", "r");
    char *line = NULL;
    size_t cap = 0, n = 0;
    (void)state;
    assert_non_null(f);
    while (getline(&line, &cap, f) > 0) {
        json_t *j = json_loads(line, JSON_ALLOW_NUL, NULL);
        assert_non_null(j);
        n++;
        if (!check(t, json_object_get(j, "text"), json_object_get(j, "ids"), json_object_get(j, "decoded")))
            fail_msg("line %zu: %s", n, line);
        json_decref(j);
    }
    assert_int_equal(n, 300);
    free(line);
    fclose(f);
    epx_tokenizer_destroy(t);
}

/* The rows leave out what they share. */
static epx_tokenizer_t *create_row(const json_t *file, json_t *row) {
    json_t *t = json_object_get(row, "tokenizer"), *model = json_object_get(t, "model");
    epx_tokenizer_t *tok = NULL;
    char *text;
    json_object_update_missing(model, json_object_get(file, "model"));
    text = json_dumps(t, JSON_COMPACT);
    assert_non_null(text);
    if (epx_tokenizer_create_from_memory("options.json", text, strlen(text), &tok) < 0) fail_msg("%s", epx_error_message());
    free(text);
    return tok;
}

static void test_options(void **state) {
    json_t *file = json_load_file(EPX_TEST_DATA "/tokenizer_cases/options.json", 0, NULL), *row, *text;
    size_t i, k, bad = 0;
    (void)state;
    assert_non_null(file);
    json_array_foreach(json_object_get(file, "rows"), i, row) {
        epx_tokenizer_t *t = create_row(file, row);
        json_array_foreach(json_object_get(file, "texts"), k, text) {
            if (check(t, text, json_array_get(json_object_get(row, "ids"), k), NULL)) continue;
            print_error("%s: \"%s\"\n", json_string_value(json_object_get(row, "name")), json_string_value(text));
            bad++;
        }
        epx_tokenizer_destroy(t);
    }
    assert_true(i >= 30);
    assert_int_equal(bad, 0);
    json_decref(file);
}

static void test_lookup(void **state) {
    epx_tokenizer_t *t = load(MODEL "tokenizer.json");
    const int32_t ids[] = {4081, 321, 4082};
    const int32_t unknown[] = {4090};
    size_t n;
    epx_str_t s = {0};
    (void)state;
    assert_int_equal(epx_tokenizer_n_vocab(t), 4083);
    assert_int_equal(epx_tokenizer_id(t, "<|im_end|>"), 4082);
    assert_int_equal(epx_tokenizer_id(t, "no such token"), -1);
    assert_int_equal(epx_tokenizer_id(t, ""), -1);
    assert_true(epx_tokenizer_is_special(t, 4082));
    assert_false(epx_tokenizer_is_special(t, 321));
    assert_false(epx_tokenizer_is_special(t, -1));
    assert_non_null(epx_tokenizer_token_bytes(t, 4082, &n));
    assert_int_equal(n, 10);
    assert_null(epx_tokenizer_token_bytes(t, 4083, &n));
    assert_null(epx_tokenizer_token_bytes(t, INT32_MIN, &n));
    assert_int_equal(epx_tokenizer_decode(t, ids, 3, 1, &s), EPX_OK);
    assert_string_equal(epx_str_z(&s), "user");
    assert_int_equal(epx_tokenizer_decode(t, ids, 3, 0, &s), EPX_OK);
    assert_string_equal(epx_str_z(&s), "user<|im_start|>user<|im_end|>");
    assert_int_equal(epx_tokenizer_decode(t, unknown, 1, 0, &s), EPX_ERR_ARG);
    assert_non_null(strstr(epx_error_message(), "4090"));
    epx_str_fini(&s);
    epx_tokenizer_destroy(t);
}

static void test_bad_text(void **state) {
    epx_tokenizer_t *t = load(MODEL "tokenizer.json");
    int32_t *ids = NULL;
    size_t n = 0;
    (void)state;
    assert_int_equal(epx_tokenizer_encode(t, "ab\xFFz", 4, &ids, &n), EPX_ERR_ARG);
    assert_non_null(strstr(epx_error_message(), "byte 2"));
    assert_int_equal(epx_tokenizer_encode(t, "", 0, &ids, &n), EPX_OK);
    assert_null(ids);
    assert_int_equal(n, 0);
    epx_tokenizer_destroy(t);
}

/* 100 KB of one character and of two: n log n, and exact to the byte. */
static void test_long_piece(void **state) {
    static const char *const unit[] = {"a", "ab", " ", "\n", "中", "e\u0301", "1", "<|im_"};
    epx_tokenizer_t *t = load(MODEL "tokenizer.json");
    uint64_t start = epx_now_ns();
    size_t i, k, n, len;
    (void)state;
    for (i = 0; i < sizeof unit / sizeof *unit; i++) {
        epx_str_t text = {0}, back = {0};
        int32_t *ids = NULL;
        len = strlen(unit[i]);
        for (k = 0; k < 100000 / len; k++) assert_int_equal(epx_str_append(&text, unit[i], len), EPX_OK);
        assert_int_equal(epx_tokenizer_encode(t, text.data, text.n_bytes, &ids, &n), EPX_OK);
        assert_int_equal(epx_tokenizer_decode(t, ids, n, 0, &back), EPX_OK);
        if (strcmp(unit[i], "e\u0301") != 0) { /* NFC changes that one */
            assert_int_equal(back.n_bytes, text.n_bytes);
            assert_memory_equal(back.data, text.data, text.n_bytes);
        }
        free(ids);
        epx_str_fini(&text);
        epx_str_fini(&back);
    }
    assert_true(epx_now_ns() - start < 10000000000u);
    epx_tokenizer_destroy(t);
}

/* ---- several threads, one tokenizer ---- */

typedef struct {
    const epx_tokenizer_t *t;
    int failed;
} worker_t;

static void *work(void *arg) {
    static const char text[] = "Question: 12 e\u0301 apples<|im_end|> and so on, 中文";
    worker_t *w = arg;
    int32_t *first = NULL, *ids;
    size_t n_first = 0, n, i;
    w->failed = epx_tokenizer_encode(w->t, text, sizeof text - 1, &first, &n_first) < 0;
    for (i = 0; i < 200 && !w->failed; i++) {
        w->failed = epx_tokenizer_encode(w->t, text, sizeof text - 1, &ids, &n) < 0 || n != n_first ||
                    memcmp(ids, first, n * sizeof *ids) != 0;
        free(ids);
    }
    free(first);
    return NULL;
}

static void test_threads(void **state) {
    epx_tokenizer_t *t = load(MODEL "tokenizer.json");
    worker_t w[4];
    pthread_t thread[4];
    int i;
    (void)state;
    for (i = 0; i < 4; i++) {
        w[i] = (worker_t){t, 0};
        assert_int_equal(pthread_create(&thread[i], NULL, work, &w[i]), 0);
    }
    for (i = 0; i < 4; i++) {
        pthread_join(thread[i], NULL);
        assert_false(w[i].failed);
    }
    epx_tokenizer_destroy(t);
}

/* ---- refusals ---- */

#define VOCAB "\"vocab\":{\"a\":0,\"b\":1,\"ab\":2}"
#define MODEL_JSON "\"model\":{\"type\":\"BPE\"," VOCAB ",\"merges\":[\"a b\"]}"
#define PRE "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"use_regex\":false,\"add_prefix_space\":false}"
#define SPLIT(pattern)                                                                                                   \
    "{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":\"" pattern \
    "\"},\"behavior\":\"Isolated\"},{\"type\":\"ByteLevel\",\"use_regex\":false}]}," MODEL_JSON "}"

static void test_refusals(void **state) {
    static const struct {
        const char *json;
        epx_status_t status;
        const char *says;
    } row[] = {
        {"", EPX_ERR_FORMAT, "line"},
        {"[]", EPX_ERR_FORMAT, "an array"},
        {"{\"a\":1,\"a\":2}", EPX_ERR_FORMAT, "duplicate"},
        {"{" MODEL_JSON "}", EPX_ERR_UNSUPPORTED, "pre_tokenizer"},
        {"{" PRE "}", EPX_ERR_FORMAT, "model: missing"},
        {"{" PRE ",\"model\":{\"type\":\"WordPiece\"}}", EPX_ERR_UNSUPPORTED, "model.type: \"WordPiece\""},
        {"{" PRE ",\"model\":{\"type\":\"BPE\",\"vocab\":[],\"merges\":[]}}", EPX_ERR_FORMAT, "model.vocab"},
        {"{" PRE ",\"model\":{" VOCAB ",\"merges\":{}}}", EPX_ERR_FORMAT, "model.merges"},
        {"{" PRE ",\"model\":{" VOCAB ",\"merges\":[\"a c\"]}}", EPX_ERR_FORMAT, "merges[0]: \"c\""},
        {"{" PRE ",\"model\":{" VOCAB ",\"merges\":[\"b a\"]}}", EPX_ERR_FORMAT, "\"ba\" is not in"},
        {"{" PRE ",\"model\":{" VOCAB ",\"merges\":[[\"a\"]]}}", EPX_ERR_FORMAT, "merges[0]"},
        {"{" PRE ",\"model\":{" VOCAB ",\"merges\":[\"a b \"]}}", EPX_ERR_FORMAT, "merges[0]"},
        {"{" PRE ",\"model\":{" VOCAB ",\"merges\":[7]}}", EPX_ERR_FORMAT, "merges[0]"},
        {"{" PRE ",\"model\":{\"vocab\":{\"a\":4294967295},\"merges\":[]}}", EPX_ERR_FORMAT, "4294967295"},
        {"{" PRE ",\"model\":{\"vocab\":{\"a\":-1},\"merges\":[]}}", EPX_ERR_FORMAT, "-1"},
        {"{" PRE ",\"model\":{\"vocab\":{\"a\":1.5},\"merges\":[]}}", EPX_ERR_FORMAT, "a real"},
        {"{" PRE ",\"model\":{\"vocab\":{\"a\":0,\"b\":0},\"merges\":[]}}", EPX_ERR_FORMAT, "id 0"},
        {"{" PRE ",\"model\":{\"vocab\":{\"\":0},\"merges\":[]}}", EPX_ERR_FORMAT, "empty"},
        {"{" PRE ",\"model\":{" VOCAB ",\"merges\":[],\"dropout\":0.1}}", EPX_ERR_UNSUPPORTED, "model.dropout: 0.1"},
        {"{" PRE ",\"model\":{" VOCAB ",\"merges\":[],\"byte_fallback\":true}}", EPX_ERR_UNSUPPORTED, "byte_fallback"},
        {"{" PRE ",\"model\":{" VOCAB ",\"merges\":[],\"end_of_word_suffix\":\"</w>\"}}", EPX_ERR_UNSUPPORTED, "</w>"},
        {"{" PRE "," MODEL_JSON ",\"normalizer\":{\"type\":\"Lowercase\"}}", EPX_ERR_UNSUPPORTED, "Lowercase"},
        {"{" PRE "," MODEL_JSON ",\"normalizer\":{\"type\":\"Sequence\"}}", EPX_ERR_FORMAT, "normalizers"},
        {"{" PRE "," MODEL_JSON ",\"decoder\":{\"type\":\"Metaspace\"}}", EPX_ERR_UNSUPPORTED, "Metaspace"},
        {"{" PRE "," MODEL_JSON ",\"added_tokens\":[{\"id\":0,\"content\":\"<x>\"}]}", EPX_ERR_FORMAT, "added_tokens[0]"},
        {"{" PRE "," MODEL_JSON ",\"added_tokens\":[{\"id\":9,\"content\":\"ab\"}]}", EPX_ERR_FORMAT, "id 9"},
        {"{" PRE "," MODEL_JSON ",\"added_tokens\":[{\"id\":3}]}", EPX_ERR_FORMAT, "content"},
        {"{" PRE "," MODEL_JSON ",\"added_tokens\":[{\"id\":3,\"content\":\"x\",\"lstrip\":1}]}", EPX_ERR_FORMAT, "lstrip"},
        {"{\"pre_tokenizer\":{\"type\":\"Metaspace\"}," MODEL_JSON "}", EPX_ERR_UNSUPPORTED, "Metaspace"},
        {"{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[]}," MODEL_JSON "}", EPX_ERR_UNSUPPORTED, "no ByteLevel"},
        {SPLIT("("), EPX_ERR_FORMAT, "not a pattern"},
        {SPLIT("\\\\w+"), EPX_ERR_UNSUPPORTED, "escape"},
        {SPLIT("\\\\h"), EPX_ERR_UNSUPPORTED, "escape"},
        {SPLIT("[a&&b]"), EPX_ERR_UNSUPPORTED, "&&"},
        {SPLIT("[a[b]]"), EPX_ERR_UNSUPPORTED, "[ in a class"},
        {SPLIT("\\\\p{Han}+"), EPX_ERR_UNSUPPORTED, "\\p property"},
        {SPLIT("a{1,3}+"), EPX_ERR_UNSUPPORTED, "{n,m}+"},
        {SPLIT("(?m)a"), EPX_ERR_UNSUPPORTED, "group"},
        {SPLIT("(?<n>a)"), EPX_ERR_UNSUPPORTED, "group"},
        {SPLIT("(*ACCEPT)"), EPX_ERR_UNSUPPORTED, "verb"},
        {SPLIT("a\\\\"), EPX_ERR_UNSUPPORTED, "backslash"}};
    size_t i;
    (void)state;
    for (i = 0; i < sizeof row / sizeof *row; i++) {
        epx_tokenizer_t *t = NULL;
        epx_status_t s = epx_tokenizer_create_from_memory("t.json", row[i].json, strlen(row[i].json), &t);
        if (s != row[i].status || strstr(epx_error_message(), row[i].says) == NULL)
            fail_msg("row %zu: status %d, \"%s\"; expected %d, \"%s\"", i, s, epx_error_message(), row[i].status, row[i].says);
        assert_null(t);
    }
}

static void test_deep_nesting(void **state) {
    const size_t n = 100000;
    char *text = malloc(n);
    epx_tokenizer_t *t = NULL;
    (void)state;
    assert_non_null(text);
    memset(text, '[', n);
    assert_int_equal(epx_tokenizer_create_from_memory("deep", text, n, &t), EPX_ERR_FORMAT);
    free(text);
    assert_int_equal(epx_tokenizer_create("/nonexistent/tokenizer.json", &t), EPX_ERR_IO);
    assert_non_null(strstr(epx_error_message(), "/nonexistent/tokenizer.json"));
}

/* A pattern that backtracks without end is an error, not a hang; a byte without a token is one too. */
static void test_hostile_text(void **state) {
    epx_tokenizer_t *t = NULL;
    int32_t *ids = NULL;
    size_t n = 0;
    static const char json[] = SPLIT("(?:a|a|a|b)+[cd]");
    (void)state;
    assert_int_equal(epx_tokenizer_create_from_memory("t", json, strlen(json), &t), EPX_OK);
    assert_int_equal(epx_tokenizer_encode(t, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab", 66, &ids, &n),
                     EPX_ERR_ARG);
    assert_non_null(strstr(epx_error_message(), "pattern"));
    assert_int_equal(epx_tokenizer_encode(t, "xyz", 3, &ids, &n), EPX_ERR_ARG);
    assert_non_null(strstr(epx_error_message(), "no token"));
    epx_tokenizer_destroy(t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bundled_model), cmocka_unit_test(test_options),      cmocka_unit_test(test_lookup),
        cmocka_unit_test(test_bad_text),      cmocka_unit_test(test_long_piece),   cmocka_unit_test(test_threads),
        cmocka_unit_test(test_refusals),      cmocka_unit_test(test_deep_nesting), cmocka_unit_test(test_hostile_text)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
