/* Chat templates against stored renderings of Jinja2 (tests/tools/make_chat_cases.py), limits, and refusals by name. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "engine/tokenizer/chat_template.h"
#include "engine/tokenizer/tokenizer.h"

#define MODEL EPX_SOURCE_DIR "/models/tinymoe-math"

static epx_chat_template_t *load(const char *dir) {
    epx_chat_template_t *t = NULL;
    if (epx_chat_template_load(dir, &t) < 0) fail_msg("%s", epx_error_message());
    return t;
}

static void check_ids(const epx_tokenizer_t *tok, const epx_str_t *prompt, const json_t *want) {
    int32_t *ids = NULL;
    size_t n, i;
    assert_int_equal(epx_tokenizer_encode(tok, prompt->data, prompt->n_bytes, &ids, &n), EPX_OK);
    assert_int_equal(n, json_array_size(want));
    for (i = 0; i < n; i++) assert_int_equal(ids[i], json_integer_value(json_array_get(want, i)));
    free(ids);
}

static void test_bundled_model(void **state) {
    epx_chat_template_t *t = load(MODEL);
    epx_tokenizer_t *tok = NULL;
    FILE *f = fopen(MODEL "/chat_template_cases.jsonl", "r");
    char *line = NULL;
    size_t cap = 0, n = 0;
    int g;
    (void)state;
    assert_int_equal(epx_tokenizer_create(MODEL "/tokenizer.json", &tok), EPX_OK);
    assert_non_null(f);
    for (; getline(&line, &cap, f) > 0; n++) {
        json_t *j = json_loads(line, JSON_ALLOW_NUL, NULL);
        for (g = 0; g < 2; g++) {
            epx_str_t s = {0};
            assert_int_equal(epx_chat_template_render(t, json_object_get(j, "messages"), g, NULL, &s), EPX_OK);
            assert_string_equal(epx_str_z(&s), json_string_value(json_object_get(j, g ? "prompt" : "prompt_no_generation")));
            check_ids(tok, &s, json_object_get(j, g ? "ids" : "ids_no_generation"));
            epx_str_fini(&s);
        }
        json_decref(j);
    }
    assert_int_equal(n, 20);
    free(line);
    fclose(f);
    epx_tokenizer_destroy(tok);
    epx_chat_template_destroy(t);
}

/* 1 when rendering gives the stored output, or fails where Jinja2 failed. */
static int agrees(const epx_chat_template_t *t, const json_t *row, json_t *variables, const char *what) {
    static const char *const fixed[] = {"messages", "add_generation_prompt"};
    const json_t *want = json_object_get(row, "output");
    json_t *messages = json_incref(json_object_get(variables, "messages"));
    int generate = json_is_true(json_object_get(variables, "add_generation_prompt")), ok;
    epx_str_t s = {0};
    epx_status_t st;
    size_t i;
    if (messages == NULL) messages = json_array();
    for (i = 0; i < 2; i++) json_object_del(variables, fixed[i]);
    st = epx_chat_template_render(t, messages, generate, variables, &s);
    ok = want ? st == EPX_OK && s.n_bytes == json_string_length(want) &&
                    memcmp(epx_str_z(&s), json_string_value(want), s.n_bytes) == 0
              : st < 0;
    if (!ok)
        print_error("%s\n  expected %s: %s\n  got      %d: %s\n", what, want ? "text" : "an error",
                    want ? json_string_value(want) : json_string_value(json_object_get(row, "error")), st,
                    st < 0 ? epx_error_message() : epx_str_z(&s));
    epx_str_fini(&s);
    json_decref(messages);
    return ok;
}

/* What `xz -dc path` prints, as JSON; NULL: none. */
static json_t *load_packed(const char *path) {
    char command[1024];
    snprintf(command, sizeof command, "xz -dc '%s'", path);
    FILE *f = popen(command, "r");
    assert_non_null(f);
    json_t *o = json_loadf(f, JSON_ALLOW_NUL, NULL);
    assert_int_equal(pclose(f), 0);
    return o;
}

static void test_published_templates(void **state) {
    static const char *const name[] = {"qwen2_5", "qwen3", "deepseek_v3"};
    json_t *file = load_packed(EPX_TEST_DATA "/tokenizer_cases/chat_templates.json.xz"), *row;
    epx_chat_template_t *t[3];
    char path[1024], what[64];
    size_t i, k, bad = 0;
    (void)state;
    assert_non_null(file);
    for (k = 0; k < 3; k++) {
        snprintf(path, sizeof path, EPX_TEST_DATA "/tokenizers/%s", name[k]);
        t[k] = load(path);
    }
    json_array_foreach(file, i, row) {
        for (k = 0; strcmp(name[k], json_string_value(json_object_get(row, "template"))) != 0;) k++;
        snprintf(what, sizeof what, "case %zu, %s", i, name[k]);
        bad += !agrees(t[k], row, json_object_get(row, "variables"), what);
    }
    for (k = 0; k < 3; k++) epx_chat_template_destroy(t[k]);
    assert_true(i >= 3 * 40);
    assert_int_equal(bad, 0);
    json_decref(file);
}

/* Each row is one small template; a row that Jinja2 refuses must be refused, at compile time or when rendering. */
static void test_snippets(void **state) {
    json_t *file = json_load_file(EPX_TEST_DATA "/tokenizer_cases/chat_snippets.json", JSON_ALLOW_NUL, NULL), *row, *variables;
    size_t i, bad = 0;
    (void)state;
    assert_non_null(file);
    json_array_foreach(file, i, row) {
        const json_t *source = json_object_get(row, "source");
        epx_chat_template_t *t = NULL;
        if (i == 0) continue; /* holds the variables */
        variables = json_deep_copy(json_object_get(json_array_get(file, 0), "variables"));
        if (epx_chat_template_create(json_string_value(source), json_string_length(source), &t) == EPX_OK) {
            bad += !agrees(t, row, variables, json_string_value(source));
        } else if (json_object_get(row, "output")) {
            print_error("%s\n  refused: %s\n", json_string_value(source), epx_error_message());
            bad++;
        }
        epx_chat_template_destroy(t);
        json_decref(variables);
    }
    assert_true(i > 120);
    assert_int_equal(bad, 0);
    json_decref(file);
}

/* ---- refusals and limits ---- */

static epx_status_t render(const char *source, epx_str_t *out) {
    epx_chat_template_t *t = NULL;
    json_t *messages = json_array();
    epx_status_t s = epx_chat_template_create(source, strlen(source), &t);
    if (s == EPX_OK) s = epx_chat_template_render(t, messages, 1, NULL, out);
    epx_chat_template_destroy(t);
    json_decref(messages);
    return s;
}

static void test_refusals(void **state) {
    static const struct {
        const char *source;
        epx_status_t status;
        const char *says;
    } row[] = {{"\n{% macro f() %}{% endmacro %}", EPX_ERR_UNSUPPORTED, "line 2: statement \"macro\""},
               {"{% include 'x' %}", EPX_ERR_UNSUPPORTED, "\"include\""},
               {"{% raw %}{% endraw %}", EPX_ERR_UNSUPPORTED, "\"raw\""},
               {"{% nonsense %}", EPX_ERR_FORMAT, "\"nonsense\""},
               {"{{ x|urlize }}", EPX_ERR_UNSUPPORTED, "filter \"urlize\""},
               {"{{ x is odder }}", EPX_ERR_UNSUPPORTED, "test \"odder\""},
               {"{{ cycler(1) }}", EPX_ERR_UNSUPPORTED, "function \"cycler\""},
               {"{{ 'x'.format(1) }}", EPX_ERR_UNSUPPORTED, "method \"format\""},
               {"{% for x in y recursive %}{% endfor %}", EPX_ERR_UNSUPPORTED, "recursive"},
               {"{% for x in [1] %}{{ loop.cycle }}{% endfor %}", EPX_ERR_UNSUPPORTED, "loop.cycle"},
               {"{% for x in [1] %}{{ loop }}{% endfor %}", EPX_ERR_UNSUPPORTED, "loop as a value"},
               {"{{ 'x'|replace('a', 'b', number=1) }}", EPX_ERR_UNSUPPORTED, "number"},
               {"{{ '%d' % 1 }}", EPX_ERR_UNSUPPORTED, "formatting"},
               {"{{ 9223372036854775807 + 1 }}", EPX_ERR_UNSUPPORTED, "64 bits"},
               {"{{ range }}", EPX_ERR_UNSUPPORTED, "function"},
               {"{% set a = namespace() %}{% set a.b = [a] %}", EPX_ERR_UNSUPPORTED, "namespace inside"},
               {"{% set a = namespace() %}{% set a.b = a %}", EPX_ERR_UNSUPPORTED, "namespace inside"},
               {"{{ a }\n}", EPX_ERR_FORMAT, "line 1"},
               {"{% break %}", EPX_ERR_FORMAT, "outside a loop"},
               {"{{ raise_exception('no ' ~ 1) }}", EPX_ERR_ARG, "no 1"},
               {"\n\n{{ x.y.z }}", EPX_ERR_ARG, "line 3"},
               {"{{ \xFF }}", EPX_ERR_FORMAT, "UTF-8 at byte 3"}};
    size_t i;
    (void)state;
    for (i = 0; i < sizeof row / sizeof *row; i++) {
        epx_str_t s = {0};
        epx_status_t st = render(row[i].source, &s);
        if (st != row[i].status || strstr(epx_error_message(), row[i].says) == NULL)
            fail_msg("%s: status %d, \"%s\"; expected %d, \"%s\"", row[i].source, st, epx_error_message(), row[i].status,
                     row[i].says);
        epx_str_fini(&s);
    }
}

static void test_limits(void **state) {
    static const char *const row[] = {
        "{% for a in range(1000) %}{% for b in range(1000) %}{% for c in range(1000) %}{% endfor %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(100) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(100) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(100000) %}{% set ns.s = [ns.s] %}{% endfor %}",
        "{{ 'x' * 100000000 }}",
        "{% for i in range(100) %}{{ 'x' * 1000000 }}{% endfor %}",
        "{{ range(100000000) }}",
        "{% for i in range(2000) %}{% set x = namespace() %}{% endfor %}",
        "{% for i in range(1000000) %}{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'.replace('a', 'bbbbbbbbbb') }}{% endfor %}"};
    size_t i;
    (void)state;
    for (i = 0; i < sizeof row / sizeof *row; i++) {
        epx_str_t s = {0};
        epx_status_t st = render(row[i], &s);
        if (st != EPX_ERR_CAPACITY) fail_msg("%s: status %d, %s", row[i], st, epx_error_message());
        assert_int_equal(s.n_bytes, 0); /* nothing half done comes out */
        epx_str_fini(&s);
    }
}

/* Source nested or chained n times must be refused, or work, on an ordinary stack. */
static void test_deep_source(void **state) {
    static const char *const part[][3] = {{"{{ ", "(", ""},
                                          {"{{ ", "[", ""},
                                          {"{{ ", "-", "1 }}"},
                                          {"{{ ", "not ", "1 }}"},
                                          {"{{ 1", "+1", " }}"},
                                          {"{{ a", ".a", " }}"},
                                          {"{{ a", "|list", " }}"},
                                          {"{{ ", "1 if ", ""},
                                          {"{% if 1 %}", "{% if 1 %}", ""},
                                          {"{% if 1 %}", "{% elif 1 %}", "{% endif %}"},
                                          {"{{ 1", "<1", " }}"},
                                          {"{{ ", "1 if 0 else ", "2 }}"}};
    size_t i, k;
    (void)state;
    for (i = 0; i < sizeof part / sizeof *part; i++) {
        epx_str_t source = {0}, out = {0};
        assert_int_equal(epx_str_append_z(&source, part[i][0]), EPX_OK);
        for (k = 0; k < 50000; k++) assert_int_equal(epx_str_append_z(&source, part[i][1]), EPX_OK);
        assert_int_equal(epx_str_append_z(&source, part[i][2]), EPX_OK);
        if (strstr(part[i][1], "elif")) assert_int_equal(render(source.data, &out), EPX_OK);
        else assert_true(render(source.data, &out) < 0);
        epx_str_fini(&source);
        epx_str_fini(&out);
    }
}

static void test_arguments(void **state) {
    epx_chat_template_t *t = NULL;
    json_t *list = json_array(), *object = json_object();
    epx_str_t s = {0};
    (void)state;
    assert_int_equal(render("{% generation %}a{{ 1 }}{% endgeneration %}", &s), EPX_OK); /* transformers' own tag */
    assert_string_equal(epx_str_z(&s), "a1");
    epx_str_clear(&s);
    assert_int_equal(epx_chat_template_create("{{ x }}{{ strftime_now('%Y')|length }}", 39, &t), EPX_OK);
    assert_int_equal(epx_chat_template_render(t, object, 0, NULL, &s), EPX_ERR_ARG);
    assert_int_equal(epx_chat_template_render(t, list, 0, list, &s), EPX_ERR_ARG);
    json_object_set_new(object, "x", json_string("e"));
    assert_int_equal(epx_str_append_z(&s, "kept "), EPX_OK);
    assert_int_equal(epx_chat_template_render(t, list, 0, object, &s), EPX_OK);
    assert_string_equal(epx_str_z(&s), "kept e4");
    epx_str_fini(&s);
    epx_chat_template_destroy(t);
    json_decref(list);
    json_decref(object);
}

static void write_file(const char *dir, const char *name, const char *text) {
    char path[1024];
    FILE *f;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void expect_render(const char *dir, const char *want) {
    epx_chat_template_t *t = load(dir);
    json_t *list = json_array();
    epx_str_t s = {0};
    assert_int_equal(epx_chat_template_render(t, list, 0, NULL, &s), EPX_OK);
    assert_string_equal(epx_str_z(&s), want);
    epx_str_fini(&s);
    json_decref(list);
    epx_chat_template_destroy(t);
}

static void test_load(void **state) {
    char dir[] = "/tmp/epx-template-XXXXXX", path[64];
    epx_chat_template_t *t = NULL;
    (void)state;
    assert_non_null(mkdtemp(dir));
    assert_int_equal(epx_chat_template_load(dir, &t), EPX_ERR_NOT_FOUND);
    write_file(dir, "tokenizer_config.json", "{\"bos_token\": {\"content\": \"B\"}, \"eos_token\": \"E\", \"pad_token\": null}");
    assert_int_equal(epx_chat_template_load(dir, &t), EPX_ERR_NOT_FOUND);
    write_file(dir, "tokenizer_config.json",
               "{\"chat_template\": [{\"name\": \"rag\", \"template\": \"no\"}, {\"name\": \"default\","
               "\"template\": \"{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}\"}],"
               "\"bos_token\": {\"content\": \"B\"}, \"eos_token\": \"E\", \"pad_token\": null}");
    expect_render(dir, "BEFalse");
    write_file(dir, "chat_template.jinja", "file {{ bos_token }}\n");
    expect_render(dir, "file B");
    write_file(dir, "tokenizer_config.json", "{");
    assert_int_equal(epx_chat_template_load(dir, &t), EPX_ERR_FORMAT);
    snprintf(path, sizeof path, "%s/chat_template.jinja", dir);
    unlink(path);
    snprintf(path, sizeof path, "%s/tokenizer_config.json", dir);
    unlink(path);
    rmdir(dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bundled_model), cmocka_unit_test(test_published_templates),
                                       cmocka_unit_test(test_snippets),      cmocka_unit_test(test_refusals),
                                       cmocka_unit_test(test_limits),        cmocka_unit_test(test_deep_source),
                                       cmocka_unit_test(test_arguments),     cmocka_unit_test(test_load)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
