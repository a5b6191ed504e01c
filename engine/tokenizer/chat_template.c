/* Chat templates: compile, load from a model directory, render. The language is in the jinja_* files. */
#include "engine/tokenizer/chat_template.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/tokenizer/jinja.h"
#include "engine/tokenizer/tokenizer.h"

#define MAX_CONFIG_BYTES ((size_t)64 << 20)

struct epx_chat_template {
    char *source; /* with \n line ends; the tree points into it */
    jinja_arena_t arena;
    jinja_body_t body;
    json_t *variables; /* special tokens, by name */
};

/* \r\n and \r become \n, and the last newline goes, as Jinja2 does before it reads. */
static char *normalize_newlines(const char *source, size_t n_bytes, size_t *out_bytes) {
    char *copy = malloc(n_bytes + 1);
    size_t i, n = 0;
    if (copy == NULL) return NULL;
    for (i = 0; i < n_bytes; i++) {
        if (source[i] == '\r' && i + 1 < n_bytes && source[i + 1] == '\n') continue;
        copy[n++] = source[i] == '\r' ? '\n' : source[i];
    }
    if (n && copy[n - 1] == '\n') n--;
    copy[n] = 0;
    *out_bytes = n;
    return copy;
}

static epx_status_t compile(epx_chat_template_t *t, const char *source, size_t n_bytes) {
    jinja_tokens_t tokens = {0};
    epx_status_t s;
    size_t bad;
    if (n_bytes > JINJA_MAX_SOURCE_BYTES)
        return epx_fail(EPX_ERR_FORMAT, "chat template: %zu bytes; at most %zu", n_bytes, JINJA_MAX_SOURCE_BYTES);
    if (!epx_utf8_valid(source, n_bytes, &bad)) return epx_fail(EPX_ERR_FORMAT, "chat template: invalid UTF-8 at byte %zu", bad);
    t->variables = json_object();
    t->source = normalize_newlines(source, n_bytes, &n_bytes);
    if (t->variables == NULL || t->source == NULL) return epx_fail(EPX_ERR_NOMEM, "chat template: %zu bytes", n_bytes);
    s = jinja_lex(&t->arena, t->source, n_bytes, &tokens);
    if (s == EPX_OK) s = jinja_parse(&t->arena, &tokens, &t->body);
    free(tokens.v);
    return s;
}

epx_status_t epx_chat_template_create(const char *source, size_t n_bytes, epx_chat_template_t **out_t) {
    epx_chat_template_t *t = calloc(1, sizeof *t);
    epx_status_t s;
    if (t == NULL) return epx_fail(EPX_ERR_NOMEM, "chat template");
    s = compile(t, source, n_bytes);
    if (s < 0) epx_chat_template_destroy(t);
    else *out_t = t;
    return s;
}

void epx_chat_template_destroy(epx_chat_template_t *t) {
    if (t == NULL) return;
    jinja_arena_fini(&t->arena);
    json_decref(t->variables);
    free(t->source);
    free(t);
}

/* ---- loading ---- */

static epx_status_t join_path(const char *dir, const char *file, char out[PATH_MAX]) {
    int n = snprintf(out, PATH_MAX, "%s/%s", dir, file);
    if (n < 0 || n >= PATH_MAX) return epx_fail(EPX_ERR_ARG, "path %.60s.../%s is too long", dir, file);
    return EPX_OK;
}

/* tokenizer_config.json as an object, or NULL in *out_config when there is none. */
static epx_status_t read_config(const char *model_dir, json_t **out_config) {
    char path[PATH_MAX], *data;
    size_t n;
    json_error_t e;
    EPX_TRY(join_path(model_dir, "tokenizer_config.json", path));
    *out_config = NULL;
    if (access(path, F_OK) != 0) return EPX_OK;
    EPX_TRY(epx_read_file(path, MAX_CONFIG_BYTES, &data, &n));
    /* DECODE_INT_AS_REAL: model_max_length is written as an integer beyond 64 bits. */
    *out_config = json_loadb(data, n, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL, &e);
    free(data);
    if (*out_config == NULL) return epx_fail(EPX_ERR_FORMAT, "%s: line %d, column %d: %s", path, e.line, e.column, e.text);
    return EPX_OK;
}

/* A string, or a list of {name, template} with one named default. */
static const char *config_template(const json_t *config) {
    const json_t *v = json_object_get(config, "chat_template");
    json_t *o;
    size_t i;
    if (json_is_string(v)) return json_string_value(v);
    json_array_foreach(v, i, o) {
        const char *name = json_string_value(json_object_get(o, "name"));
        if (name && strcmp(name, "default") == 0) return json_string_value(json_object_get(o, "template"));
    }
    return NULL;
}

/* bos_token and the like: a string, or an object with `content`. */
static epx_status_t copy_special_tokens(const json_t *config, json_t *variables) {
    static const char *const name[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                       "pad_token", "cls_token", "mask_token"};
    size_t i;
    for (i = 0; i < sizeof name / sizeof *name; i++) {
        json_t *v = json_object_get(config, name[i]);
        if (json_is_object(v)) v = json_object_get(v, "content");
        if (json_is_string(v) && json_object_set(variables, name[i], v) < 0)
            return epx_fail(EPX_ERR_NOMEM, "chat template: special tokens");
    }
    return EPX_OK;
}

static epx_status_t load_source(const char *model_dir, const json_t *config, epx_chat_template_t **out_t) {
    char path[PATH_MAX], *data;
    const char *text;
    size_t n;
    epx_status_t s;
    EPX_TRY(join_path(model_dir, "chat_template.jinja", path));
    if (access(path, F_OK) == 0) {
        EPX_TRY(epx_read_file(path, JINJA_MAX_SOURCE_BYTES, &data, &n));
        s = epx_chat_template_create(data, n, out_t);
        free(data);
        return s < 0 ? epx_fail_context(s, "%s", path) : s;
    }
    text = config_template(config);
    if (text == NULL)
        return epx_fail(EPX_ERR_NOT_FOUND,
                        "%s: no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)", model_dir);
    s = epx_chat_template_create(text, strlen(text), out_t);
    return s < 0 ? epx_fail_context(s, "%s/tokenizer_config.json: chat_template", model_dir) : s;
}

epx_status_t epx_chat_template_load(const char *model_dir, epx_chat_template_t **out_t) {
    json_t *config = NULL;
    epx_chat_template_t *t = NULL;
    epx_status_t s;
    EPX_TRY(read_config(model_dir, &config));
    s = load_source(model_dir, config, &t);
    if (s == EPX_OK) s = copy_special_tokens(config, t->variables);
    json_decref(config);
    if (s < 0) epx_chat_template_destroy(t);
    else *out_t = t;
    return s;
}

/* ---- rendering ---- */

static epx_status_t assign_members(jinja_run_t *r, const json_t *o) {
    const char *name;
    json_t *v;
    json_object_foreach((json_t *)o, name, v) EPX_TRY(jinja_assign(r, name, v));
    return EPX_OK;
}

/* transformers passes tools and documents always, None when there are none. */
static epx_status_t assign_all(jinja_run_t *r, const epx_chat_template_t *t, const json_t *messages, int add_generation_prompt,
                               const json_t *extra) {
    EPX_TRY(jinja_assign(r, "tools", json_null()));
    EPX_TRY(jinja_assign(r, "documents", json_null()));
    EPX_TRY(assign_members(r, t->variables));
    EPX_TRY(assign_members(r, extra));
    EPX_TRY(jinja_assign(r, "messages", (json_t *)messages));
    return jinja_assign(r, "add_generation_prompt", jinja_bool(add_generation_prompt));
}

static void fini_run(jinja_run_t *r, jinja_frame_t *globals) {
    while (globals->n) json_decref(globals->var[--globals->n].value);
    free(globals->var);
    while (r->n_pool) json_decref(r->pool[--r->n_pool]);
    free(r->pool);
    while (r->n_ns) json_decref(r->ns[--r->n_ns]);
    free(r->ns);
    json_decref(r->undefined);
    json_decref(r->function);
}

epx_status_t epx_chat_template_render(const epx_chat_template_t *t, const json_t *messages, int add_generation_prompt,
                                      const json_t *extra, epx_str_t *out) {
    jinja_frame_t globals = {0};
    epx_str_t text = {0};
    jinja_run_t r = {.top = &globals, .out = &text, .steps_left = JINJA_MAX_STEPS};
    epx_status_t s = EPX_OK;
    if (!json_is_array(messages)) return epx_fail(EPX_ERR_ARG, "messages: an array expected");
    if (extra && !json_is_object(extra)) return epx_fail(EPX_ERR_ARG, "template variables: an object expected");
    r.undefined = json_object();
    r.function = json_object();
    if (r.undefined == NULL || r.function == NULL) s = epx_fail(EPX_ERR_NOMEM, "chat template");
    if (s == EPX_OK) s = assign_all(&r, t, messages, add_generation_prompt, extra);
    if (s == EPX_OK) s = jinja_exec(&r, &t->body);
    if (s == EPX_OK) s = epx_str_append(out, epx_str_z(&text), text.n_bytes);
    epx_str_fini(&text);
    fini_run(&r, &globals);
    return s;
}
