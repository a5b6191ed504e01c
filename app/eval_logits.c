/* `epx eval logits`: the reference files of docs/models.md against this engine. Rank 0 has all prompts; other ranks own experts.
 */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "app/eval.h"
#include "base/str.h"
#include "engine/model/common/json_doc.h"
#include "engine/model/load/safetensors.h"

enum { MAX_PROMPTS = 256, FILE_MAX_BYTES = 1 << 30 };

typedef struct {
    const epx_settings_t *settings;
    int vocab, top_k;
    epx_json_doc_t json;
    char path[4096], *bytes; /* of the safetensors file */
    size_t n_bytes;
    epx_safetensors_t st;
    int prompt; /* that runs now */
    epx_status_t probe_status;
    int n_rows; /* of logits */
    double worst, sum, n_values;
    int n_layers, n_choices, n_equal;
    double worst_weight;
    int32_t *text; /* greedy tokens of the prompt that runs */
    int n_text, n_tokens, n_tokens_equal, n_bad_tokens;
} check_t;

/* Data of a tensor of 4-byte elements; *out NULL when the file has no such tensor. shape[2]: 1 in front of one dimension. */
static epx_status_t tensor(const check_t *c, epx_tensor_dtype_t type, const void **out, int64_t shape[2], const char *fmt, ...)
    EPX_PRINTF(5, 6);
static epx_status_t tensor(const check_t *c, epx_tensor_dtype_t type, const void **out, int64_t shape[2], const char *fmt, ...) {
    char name[96];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(name, sizeof name, fmt, ap);
    va_end(ap);
    const epx_safetensors_entry_t *e = epx_safetensors_find(&c->st, name);
    *out = NULL;
    if (e == NULL) return EPX_OK;
    if (e->tensor.dtype != type || e->tensor.n_dims < 1 || e->tensor.n_dims > 2)
        return epx_fail(EPX_ERR_FORMAT, "%s: tensor \"%s\" is not %s of one or two dimensions", c->path, name,
                        epx_tensor_dtype_name(type));
    shape[0] = e->tensor.n_dims == 2 ? e->tensor.shape[0] : 1;
    shape[1] = e->tensor.shape[e->tensor.n_dims - 1];
    *out = c->bytes + e->file_off;
    return EPX_OK;
}

static float f32_at(const void *data, int64_t i) { /* data of a file: any alignment */
    float v;
    memcpy(&v, (const char *)data + i * 4, 4);
    return v;
}
static int32_t i32_at(const void *data, int64_t i) {
    int32_t v;
    memcpy(&v, (const char *)data + i * 4, 4);
    return v;
}

/* ---- logits ---- */

static epx_status_t compare_rows(check_t *c, const char *kind, const float *got, int64_t n_rows) {
    const void *want;
    int64_t shape[2];
    EPX_TRY(tensor(c, EPX_TENSOR_F32, &want, shape, "%s.%d", kind, c->prompt));
    if (want == NULL) return EPX_OK;
    if (shape[0] != n_rows || shape[1] != c->vocab)
        return epx_fail(EPX_ERR_FORMAT, "%s: tensor \"%s.%d\" has %lld rows of %lld, expected %lld of %d", c->path, kind,
                        c->prompt, (long long)shape[0], (long long)shape[1], (long long)n_rows, c->vocab);
    for (int64_t i = 0; i < n_rows * c->vocab; i++) {
        double d = fabs((double)got[i] - (double)f32_at(want, i));
        if (!(d <= c->worst)) c->worst = d;
        c->sum += d;
    }
    c->n_values += (double)(n_rows * c->vocab);
    c->n_rows += (int)n_rows;
    return EPX_OK;
}

/* ---- experts ---- */

static void compare_choice(check_t *c, const int32_t *ids, const float *weights, int k, const void *want, const void *want_w,
                           int64_t row) {
    int n_same = 0;
    for (int i = 0; i < k; i++)
        for (int j = 0; j < k; j++) {
            if (ids[i] != i32_at(want, row * k + j)) continue;
            n_same++;
            if (want_w) c->worst_weight = fmax(c->worst_weight, fabs((double)weights[i] - (double)f32_at(want_w, row * k + j)));
        }
    c->n_choices++;
    c->n_equal += n_same == k;
}

static epx_status_t compare_layer(check_t *c, int layer, int32_t n_rows, const int32_t *ids, const float *weights) {
    const void *want, *want_w;
    int64_t shape[2], shape_w[2];
    EPX_TRY(tensor(c, EPX_TENSOR_I32, &want, shape, "router_ids.%d.layer%d", c->prompt, layer));
    EPX_TRY(tensor(c, EPX_TENSOR_F32, &want_w, shape_w, "router_weights.%d.layer%d", c->prompt, layer));
    if (want == NULL) return EPX_OK;
    if (ids == NULL)
        return epx_fail(EPX_ERR_FORMAT, "%s: has router ids of layer %d, which has no experts in this model", c->path, layer);
    if (shape[0] != n_rows || shape[1] != c->top_k || (want_w && memcmp(shape, shape_w, sizeof shape) != 0))
        return epx_fail(EPX_ERR_FORMAT, "%s: router_ids or router_weights of prompt %d, layer %d: expected %d rows of %d",
                        c->path, c->prompt, layer, n_rows, c->top_k);
    c->n_layers++;
    for (int32_t row = 0; row < n_rows; row++)
        compare_choice(c, ids + row * shape[1], weights + row * shape[1], (int)shape[1], want, want_w, row);
    return EPX_OK;
}

static void on_layer(void *ctx, int layer, int32_t n_rows, const int32_t *ids, const float *weights, const float *hidden) {
    check_t *c = ctx;
    (void)hidden;
    if (c->probe_status == EPX_OK) c->probe_status = compare_layer(c, layer, n_rows, ids, weights);
}

/* ---- greedy tokens ---- */

static void on_token(void *ctx, const epx_event_t *ev) {
    check_t *c = ctx;
    if (ev->token >= 0) c->text[c->n_text++] = ev->token;
    if (ev->finish == EPX_FINISH_ERROR && c->probe_status == EPX_OK)
        c->probe_status = epx_fail(EPX_ERR_INTERNAL, "%s", ev->error);
}

/* Tokens are comparable up to the first difference, which counts where the reference was sure. */
static void compare_text(check_t *c, const void *want, int32_t n) {
    const json_t *margins = json_array_get(json_object_get(c->json.root, "greedy_margin"), (size_t)c->prompt);
    int i = 0;
    while (i < n && i < c->n_text && c->text[i] == i32_at(want, i)) i++;
    c->n_tokens += n;
    c->n_tokens_equal += i;
    if (i == n) return;
    const json_t *m = json_array_get(margins, (size_t)i);
    c->n_bad_tokens += !json_is_number(m) || json_number_value(m) > 2 * c->settings->tolerance;
    printf("greedy      prompt %d: token %d is %d, reference %d, margin %g\n", c->prompt, i, i < c->n_text ? c->text[i] : -1,
           i32_at(want, i), json_number_value(m));
}

static epx_status_t run_greedy(check_t *c, epx_rank_t *r, int rank, const int32_t *ids, int32_t n, const void *want,
                               int32_t n_want) {
    epx_request_t q = {.id = 1, .prompt = ids, .n_prompt = n, .max_new_tokens = n_want, .ignore_eos = 1};
    epx_status_t s;
    epx_sampling_init(&q.sampling);
    q.sampling.temperature = 0;
    c->n_text = 0;
    if (rank == 0) EPX_TRY(epx_rank_submit(r, &q));
    while ((s = epx_rank_step(r, on_token, c)) == EPX_OK) continue;
    if (s < 0) return s;
    if (rank == 0) compare_text(c, want, n_want);
    return EPX_OK;
}

/* ---- all prompts ---- */

static epx_status_t read_prompt(const check_t *c, size_t i, int32_t **out_ids, int32_t *out_n) {
    const json_t *list = json_array_get(json_object_get(c->json.root, "prompts"), i);
    size_t n = json_array_size(list);
    if (n < 1 || n > INT32_MAX) return epx_fail(EPX_ERR_FORMAT, "%s: prompts[%zu] is not a list of token ids", c->json.name, i);
    int32_t *ids = malloc(n * sizeof *ids);
    if (ids == NULL) return epx_fail(EPX_ERR_NOMEM, "%s: prompts[%zu]: no memory", c->json.name, i);
    for (size_t k = 0; k < n; k++) {
        json_int_t v = json_integer_value(json_array_get(list, k));
        ids[k] = v >= 0 && v < c->vocab ? (int32_t)v : -1; /* the rank refuses it with its place */
    }
    *out_ids = ids;
    *out_n = (int32_t)n;
    return EPX_OK;
}

/* Rank 0 runs and compares; the others take part in the same collectives. */
static epx_status_t run_prompt(check_t *c, epx_rank_t *r, int rank, const int32_t *ids, int32_t n, float *logits) {
    const void *greedy;
    int64_t shape[2];
    epx_rank_info_t info;
    epx_rank_info(r, &info);
    if (rank == 0 && n <= info.chunk_tokens) epx_rank_watch_layers(r, on_layer, c); /* a longer one would come in parts */
    epx_status_t s = epx_rank_logits(r, ids, rank == 0 ? n : 0, n, logits);
    if (rank == 0) epx_rank_watch_layers(r, NULL, NULL);
    if (s == EPX_OK) s = c->probe_status;
    if (rank == 0 && s == EPX_OK) s = compare_rows(c, "logits_last", logits + (int64_t)(n - 1) * c->vocab, 1);
    if (rank == 0 && s == EPX_OK) s = compare_rows(c, "logits_all", logits, n);
    if (s == EPX_OK) s = tensor(c, EPX_TENSOR_I32, &greedy, shape, "greedy.%d", c->prompt);
    if (s == EPX_OK && greedy) s = run_greedy(c, r, rank, ids, n, greedy, (int32_t)shape[1]);
    return s == EPX_OK ? c->probe_status : s;
}

static epx_status_t body(void *ctx, int rank, epx_rank_t *r) {
    check_t own = *(check_t *)ctx, *c = rank == 0 ? ctx : &own; /* only rank 0 counts */
    size_t n_prompts = json_array_size(json_object_get(c->json.root, "prompts"));
    epx_status_t s = EPX_OK;
    for (size_t i = 0; i < n_prompts && s == EPX_OK; i++) {
        int32_t *ids = NULL, n = 0;
        EPX_TRY(read_prompt(c, i, &ids, &n));
        c->prompt = (int)i;
        float *logits = rank == 0 ? malloc((size_t)n * (size_t)c->vocab * sizeof *logits) : NULL;
        if (rank == 0 && logits == NULL) s = epx_fail(EPX_ERR_NOMEM, "prompts[%zu]: no memory for logits of %d tokens", i, n);
        if (s == EPX_OK) s = run_prompt(c, r, rank, ids, n, logits);
        free(logits);
        free(ids);
    }
    return s;
}

static epx_status_t open_reference(check_t *c, const char *dir, char *json_path, size_t n_path) {
    uint64_t n_json;
    if (snprintf(json_path, n_path, "%s/reference.json", dir) >= (int)n_path ||
        snprintf(c->path, sizeof c->path, "%s/reference.safetensors", dir) >= (int)sizeof c->path)
        return epx_fail(EPX_ERR_ARG, "--reference: the path is too long");
    EPX_TRY(epx_json_doc_load(json_path, &c->json));
    size_t n = json_array_size(json_object_get(c->json.root, "prompts"));
    if (n < 1 || n > MAX_PROMPTS)
        return epx_fail(EPX_ERR_FORMAT, "%s: prompts is not a list of 1 to %d prompts", json_path, MAX_PROMPTS);
    EPX_TRY(epx_read_file(c->path, FILE_MAX_BYTES, &c->bytes, &c->n_bytes));
    if (c->n_bytes < 8) return epx_fail(EPX_ERR_FORMAT, "%s: %zu bytes", c->path, c->n_bytes);
    EPX_TRY(epx_safetensors_header_bytes(c->path, (const uint8_t *)c->bytes, c->n_bytes, &n_json));
    return epx_safetensors_parse(c->path, c->bytes + 8, n_json, c->n_bytes, &c->st);
}

/* The longest greedy text of the reference. */
static epx_status_t alloc_text(check_t *c) {
    int64_t longest = 1, shape[2] = {0, 0};
    const void *data;
    for (int i = 0; i < (int)json_array_size(json_object_get(c->json.root, "prompts")); i++) {
        EPX_TRY(tensor(c, EPX_TENSOR_I32, &data, shape, "greedy.%d", i));
        if (data && shape[1] > longest) longest = shape[1];
    }
    c->text = longest <= INT32_MAX ? calloc((size_t)longest, sizeof *c->text) : NULL;
    return c->text ? EPX_OK : epx_fail(EPX_ERR_NOMEM, "%s: no memory for %lld tokens", c->path, (long long)longest);
}

static int report(const check_t *c) {
    const double tolerance = c->settings->tolerance;
    const int logits_bad = !(c->worst <= tolerance), router_bad = c->n_equal != c->n_choices, text_bad = c->n_bad_tokens > 0;
    if (c->n_rows == 0 && c->n_choices == 0 && c->n_tokens == 0)
        printf("reference   %s holds nothing that is compared\n", c->path);
    if (c->n_rows)
        printf("logits      %d rows of %d: largest difference %.3g, mean %.3g, tolerance %g: %s\n", c->n_rows, c->vocab, c->worst,
               c->sum / c->n_values, tolerance, logits_bad ? "OVER" : "ok");
    if (c->n_choices)
        printf("router      %d of %d choices of experts equal in %d layers, weights differ by at most %.3g: %s\n", c->n_equal,
               c->n_choices, c->n_layers, c->worst_weight, router_bad ? "DIFFERENT" : "ok");
    if (c->n_tokens)
        printf("greedy      %d of %d tokens equal up to the first difference of each prompt: %s\n", c->n_tokens_equal,
               c->n_tokens, text_bad ? "DIFFERENT" : "ok");
    return logits_bad || router_bad || text_bad || (c->n_rows == 0 && c->n_choices == 0 && c->n_tokens == 0);
}

epx_status_t epx_eval_logits(const epx_settings_t *o, int *out_over) {
    epx_model_config_t mc;
    char json_path[4096];
    check_t c = {.settings = o};
    EPX_TRY(epx_model_config_load(o->model_path, &mc));
    c.vocab = mc.vocab;
    c.top_k = mc.top_k;
    epx_status_t s = open_reference(&c, o->reference ? o->reference : o->model_path, json_path, sizeof json_path);
    if (s == EPX_OK) s = alloc_text(&c);
    if (s == EPX_OK) s = epx_eval_ranks(o, body, &c);
    if (s == EPX_OK) *out_over = report(&c);
    free(c.text);
    epx_safetensors_fini(&c.st);
    free(c.bytes);
    json_decref(c.json.root);
    return s;
}
