/* `epx eval gsm8k`: puts word problems to a server, ours or another, or to ranks started for it. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "app/commands.h"
#include "app/eval.h"
#include "app/eval_gsm8k.h"
#include "base/clock.h"

static const char *const stops[] = {"Question", "Assistant:", "<|separator|>"};
enum { N_STOPS = sizeof stops / sizeof stops[0] };

/* ---- servers ---- */

/* SGLang's API where there is /get_model_info, else OpenAI's. */
static epx_status_t find_api(epx_fetcher_t *f, epx_gsm8k_side_t *side) {
    char url[1088];
    snprintf(url, sizeof url, "%s/get_model_info", side->base);
    epx_fetch_t r = {.url = url};
    EPX_TRY(epx_fetch_wait(f, &r));
    int status = r.status;
    epx_fetch_fini(&r);
    if (!status) return epx_fail(EPX_ERR_PEER, "%s: %s", side->base, r.error);
    side->api = epx_api_of(status == 200 ? "sglang" : "vllm");
    snprintf(side->url, sizeof side->url, "%s%s", side->base, side->api->path);
    return EPX_OK;
}

static epx_status_t find_model(epx_fetcher_t *f, epx_gsm8k_side_t *side) {
    char url[1088];
    snprintf(url, sizeof url, "%s/v1/models", side->base);
    if (side->api->kind == EPX_API_NATIVE) return EPX_OK;
    epx_fetch_t r = {.url = url};
    EPX_TRY(epx_fetch_wait(f, &r));
    json_t *list = json_loadb(epx_str_z(&r.text), r.text.n_bytes, 0, NULL);
    const char *id = json_string_value(json_object_get(json_array_get(json_object_get(list, "data"), 0), "id"));
    snprintf(side->model, sizeof side->model, "%s", id ? id : "");
    json_decref(list);
    epx_fetch_fini(&r);
    return id ? EPX_OK : epx_fail(EPX_ERR_PEER, "%s: status %d, no model there", url, r.status);
}

static void set_base(epx_gsm8k_side_t *side, const char *url) {
    snprintf(side->base, sizeof side->base, "%s", url);
    for (size_t n = strlen(side->base); n && side->base[n - 1] == '/'; n--) side->base[n - 1] = 0;
}

/* ---- questions ---- */

static epx_status_t make_prompts(epx_gsm8k_run_t *g) {
    const epx_settings_t *o = g->o;
    EPX_TRY(epx_gsm8k_load(o->data_path ? o->data_path : o->eval_file, &g->data));
    g->n = (size_t)o->num_questions < g->data.n ? (size_t)o->num_questions : g->data.n;
    if ((size_t)o->num_shots > g->data.n)
        return epx_fail(EPX_ERR_ARG, "--num-shots %lld: legal values: 0 to the %zu questions of the file",
                        (long long)o->num_shots, g->data.n);
    g->prompts = calloc(g->n, sizeof *g->prompts);
    if (!g->prompts) return epx_fail(EPX_ERR_NOMEM, "no memory for %zu questions", g->n);
    for (size_t i = 0; i < g->n; i++) {
        EPX_TRY(epx_gsm8k_prompt(&g->data, (size_t)o->num_shots, i, &g->prompts[i].text));
        g->prompts[i].n_output = o->max_new_tokens;
    }
    return EPX_OK;
}

static epx_status_t ask_side(const epx_gsm8k_run_t *g, epx_gsm8k_side_t *side) {
    epx_fetcher_t *f = NULL;
    EPX_TRY(epx_fetcher_create((int)g->o->parallel, &f));
    epx_status_t s = find_api(f, side);
    if (s >= 0) s = find_model(f, side);
    side->load = (epx_load_t){.fetcher = f,
                              .url = side->url,
                              .model = side->model,
                              .api = side->api,
                              .stop = stops,
                              .n_stop = N_STOPS,
                              .max_concurrent = g->o->parallel,
                              .show_progress = isatty(2)};
    uint64_t begin = epx_now_ns();
    if (s >= 0) s = epx_load_run(&side->load, g->prompts, g->n);
    side->seconds = (double)(epx_now_ns() - begin) * 1e-9;
    epx_fetcher_destroy(f);
    return s;
}

epx_status_t epx_gsm8k_score(const epx_gsm8k_run_t *g, int side, size_t i, epx_gsm8k_score_t *out) {
    const epx_load_request_t *r = &g->sides[side].load.requests[i];
    const epx_str_t *label = &g->data.items[i].answer, *text = &r->reply.text;
    epx_str_t want = {0};
    double want_strict = 0;
    int has_label = 0;
    *out = (epx_gsm8k_score_t){.answered = r->ok};
    epx_status_t s = epx_gsm8k_loose(label->data, label->n_bytes, &want, &has_label);
    if (s >= 0) s = epx_gsm8k_loose(epx_str_z(text), text->n_bytes, &out->digits, &out->found);
    out->right = r->ok && out->found && has_label && strcmp(epx_str_z(&want), epx_str_z(&out->digits)) == 0;
    out->found_strict = epx_gsm8k_strict(epx_str_z(text), text->n_bytes, &out->strict);
    out->right_strict =
        r->ok && out->found_strict && epx_gsm8k_strict(label->data, label->n_bytes, &want_strict) && out->strict == want_strict;
    epx_str_fini(&want);
    return s;
}

/* ---- the command ---- */

static epx_status_t ask_all(epx_gsm8k_run_t *g, int *out_failed) {
    for (int k = 0; k < g->n_sides; k++) EPX_TRY(ask_side(g, &g->sides[k]));
    return epx_gsm8k_report(g, out_failed);
}

static epx_status_t with_own_ranks(epx_gsm8k_run_t *g, int *out_failed) {
    epx_session_t session;
    struct epx_http *h = NULL;
    char url[64];
    int port;
    epx_session_init(&session, g->o);
    epx_status_t s = epx_session_load_text(&session);
    if (s >= 0) s = epx_session_start(&session);
    if (s >= 0) s = epx_serve_open(&session, &h, &port);
    if (s >= 0) {
        snprintf(url, sizeof url, "http://127.0.0.1:%d", port);
        set_base(&g->sides[0], url);
        s = ask_all(g, out_failed);
    }
    if (h) epx_serve_close(&session, h);
    epx_session_close(&session);
    return s;
}

epx_status_t epx_eval_gsm8k(const epx_settings_t *o, int *out_failed) {
    epx_gsm8k_run_t g = {.o = o, .n_sides = o->compare ? 2 : 1};
    char url[1024];
    snprintf(url, sizeof url, "http://%s%s%s:%d", strchr(o->host, ':') ? "[" : "", o->host, strchr(o->host, ':') ? "]" : "",
             (int)o->port);
    set_base(&g.sides[0], url);
    if (o->compare) set_base(&g.sides[1], o->compare);
    epx_status_t s = make_prompts(&g);
    if (s >= 0) s = o->model_path ? with_own_ranks(&g, out_failed) : ask_all(&g, out_failed);
    for (int k = 0; k < 2; k++) epx_load_clear(&g.sides[k].load);
    for (size_t i = 0; g.prompts && i < g.n; i++) epx_str_fini(&g.prompts[i].text);
    free(g.prompts);
    epx_gsm8k_fini(&g.data);
    return s;
}
