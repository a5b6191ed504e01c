/* Logits, routing and greedy text against the values that Hugging Face transformers computed in f32 (reference.safetensors), on
 * one rank with every level of kernels, and on two that share the heads of attention. */
#include <math.h>
#include <string.h>

#include "tests/model/harness.h"

static const double logit_tolerance = 1e-3, comfortable_margin = 2e-3;

typedef struct {
    const char *dir;
    int n_greedy;   /* tokens per prompt in the reference */
    int all_greedy; /* 1: every token must match, whatever the margin */
    ref_file_t ref;
    json_t *json;
    int detail; /* prompt with router ids */
    int n_layers_seen, n_router_rows;
    double worst_logit, worst_weight, worst_hidden;
    int32_t *greedy[16]; /* [n_greedy] of each prompt */
    int n_out[16];
} check_t;

static int ascending(const void *a, const void *b) { return *(const int32_t *)a - *(const int32_t *)b; }

static void compare_hidden(check_t *c, const float *hidden) {
    char name[64];
    snprintf(name, sizeof name, "hidden_after_layer0.%d", c->detail);
    const epx_safetensors_entry_t *e = epx_safetensors_find(&c->ref.st, name);
    CHECK(e, "%s", name);
    size_t n = (size_t)(e->tensor.shape[0] * e->tensor.shape[1]);
    const float *want = ref_data(&c->ref, n, "hidden_after_layer0.%d", c->detail);
    for (size_t i = 0; i < n; i++) c->worst_hidden = fmax(c->worst_hidden, fabs((double)hidden[i] - (double)want[i]));
}

static int is_moe(const check_t *c, int layer) {
    const json_t *list = json_object_get(c->json, "moe_layers");
    for (size_t i = 0; i < json_array_size(list); i++)
        if (json_integer_value(json_array_get(list, i)) == layer) return 1;
    return list == NULL;
}

static void on_layer(void *ctx, int layer, int32_t n_rows, const int32_t *ids, const float *weights, const float *hidden) {
    check_t *c = ctx;
    char name[64];
    if (layer == 0) compare_hidden(c, hidden);
    CHECK(is_moe(c, layer) == (ids != NULL), "layer %d: routed or not, the reference says otherwise", layer);
    c->n_layers_seen++;
    if (!ids) return;
    snprintf(name, sizeof name, "router_ids.%d.layer%d", c->detail, layer);
    const epx_safetensors_entry_t *e = epx_safetensors_find(&c->ref.st, name);
    CHECK(e && e->tensor.n_dims == 2 && e->tensor.shape[0] == n_rows, "%s", name);
    int k = (int)e->tensor.shape[1];
    size_t n = (size_t)n_rows * (size_t)k;
    const int32_t *want = ref_data(&c->ref, n, "router_ids.%d.layer%d", c->detail, layer);
    const float *want_w = ref_data(&c->ref, n, "router_weights.%d.layer%d", c->detail, layer);
    for (int32_t row = 0; row < n_rows; row++) {
        int32_t sorted[64];
        memcpy(sorted, ids + row * k, (size_t)k * sizeof sorted[0]);
        qsort(sorted, (size_t)k, sizeof sorted[0], ascending);
        for (int i = 0; i < k; i++) {
            CHECK(sorted[i] == want[row * k + i], "layer %d row %d: expert %d, reference %d", layer, row, sorted[i],
                  want[row * k + i]);
            for (int j = 0; j < k; j++)
                if (ids[row * k + j] == sorted[i])
                    c->worst_weight = fmax(c->worst_weight, fabs((double)weights[row * k + j] - (double)want_w[row * k + i]));
        }
        c->n_router_rows++;
    }
}

static void compare(check_t *c, const float *got, const float *want, size_t n) {
    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)got[i] - (double)want[i]);
        if (!(d <= c->worst_logit)) c->worst_logit = d;
    }
}

static void check_logits(check_t *c, epx_rank_t *r, int vocab) {
    const json_t *prompts = json_object_get(c->json, "prompts");
    for (size_t i = 0; i < json_array_size(prompts); i++) {
        int32_t n;
        int32_t *ids = json_ids(json_array_get(prompts, i), &n);
        float *logits = malloc((size_t)n * (size_t)vocab * sizeof *logits);
        CHECK(logits, "no memory");
        if ((int)i == c->detail) epx_model_set_probe(epx_rank_model(r), on_layer, c);
        CHECK_OK(epx_rank_logits(r, ids, n, n, logits));
        epx_model_set_probe(epx_rank_model(r), NULL, NULL);
        compare(c, logits + (size_t)(n - 1) * (size_t)vocab, ref_data(&c->ref, (size_t)vocab, "logits_last.%zu", i),
                (size_t)vocab);
        if ((int)i == c->detail)
            compare(c, logits, ref_data(&c->ref, (size_t)n * (size_t)vocab, "logits_all.%zu", i), (size_t)n * (size_t)vocab);
        free(logits);
        free(ids);
    }
}

static void on_token(void *ctx, const epx_event_t *ev) {
    check_t *c = ctx;
    CHECK(ev->finish != EPX_FINISH_ERROR, "%s", ev->error);
    c->greedy[ev->id][c->n_out[ev->id]++] = ev->token;
}

static int is_end(const epx_rank_info_t *info, int32_t token) {
    for (int i = 0; i < info->n_eos; i++)
        if (info->eos_ids[i] == token) return 1;
    return 0;
}

/* Equal up to and including the first end token; after it while the stored margin is comfortable. Returns the tokens compared. */
static int check_greedy_of(const check_t *c, const epx_rank_info_t *info, size_t i) {
    const int32_t *want = ref_data(&c->ref, (size_t)c->n_greedy, "greedy.%zu", i);
    const json_t *margins = json_array_get(json_object_get(c->json, "greedy_margin"), i);
    int ended = 0, n = 0;
    for (; n < c->n_greedy; n++) {
        double margin = json_number_value(json_array_get(margins, (size_t)n));
        if (!c->all_greedy && ended && margin < comfortable_margin) break;
        CHECK(c->greedy[i][n] == want[n], "%s prompt %zu token %d: %d, reference %d (margin %g)", c->dir, i, n, c->greedy[i][n],
              want[n], margin);
        ended |= is_end(info, want[n]);
    }
    return n;
}

static void check_greedy(check_t *c, int rank, epx_rank_t *r, const epx_rank_info_t *info) {
    const json_t *prompts = json_object_get(c->json, "prompts");
    int n_same = 0;
    for (size_t i = 0; i < json_array_size(prompts); i++) {
        epx_request_t q = {.id = i, .max_new_tokens = c->n_greedy, .ignore_eos = 1};
        epx_sampling_init(&q.sampling);
        q.sampling.temperature = 0;
        int32_t *ids = json_ids(json_array_get(prompts, i), &q.n_prompt);
        q.prompt = ids;
        c->greedy[i] = calloc((size_t)c->n_greedy, sizeof(int32_t));
        CHECK_OK(epx_rank_submit(r, &q));
        free(ids);
    }
    epx_rank_wake(r, 1); /* one of two ranks may have its requests first */
    run_until_idle(r, on_token, c);
    if (rank > 0) { /* the group's first rank reports for both */
        for (size_t i = 0; i < json_array_size(prompts); i++) free(c->greedy[i]);
        return;
    }
    for (size_t i = 0; i < json_array_size(prompts); i++) {
        CHECK(c->n_out[i] == c->n_greedy, "prompt %zu: %d tokens", i, c->n_out[i]);
        n_same += check_greedy_of(c, info, i);
        free(c->greedy[i]);
    }
    printf("%s: %d of %zu greedy tokens compared, all equal\n", c->dir, n_same, json_array_size(prompts) * (size_t)c->n_greedy);
    CHECK(!c->all_greedy || n_same == (int)json_array_size(prompts) * c->n_greedy, "%d", n_same);
}

static void body(void *ctx, int rank, epx_rank_t *r) {
    check_t *c = (check_t *)ctx + rank;
    epx_rank_info_t info;
    epx_rank_info(r, &info);
    check_logits(c, r, info.vocab);
    printf("%s (%s, rank %d, attention over %d): largest difference: logits %.2e, router weights %.2e, hidden %.2e; router ids "
           "equal in %d layers, %d rows\n",
           c->dir, info.isa, rank, info.attn_tp, c->worst_logit, c->worst_weight, c->worst_hidden, c->n_layers_seen,
           c->n_router_rows);
    CHECK(c->worst_logit <= logit_tolerance && c->worst_hidden <= logit_tolerance && c->worst_weight <= 1e-4, "too far");
    CHECK(c->n_layers_seen == info.n_layers, "%d layers", c->n_layers_seen);
    if (c->n_greedy) check_greedy(c, rank, r, &info);
}

/* tp ranks that share the heads where the architecture lets them. */
static void check_model(const char *dir, int n_greedy, int all_greedy, const char *isa, int tp) {
    char path[512];
    json_error_t e;
    check_t c = {.dir = dir, .n_greedy = n_greedy, .all_greedy = all_greedy};
    epx_rank_config_t cfg = small_config(dir, tp);
    cfg.dp = 1;
    cfg.isa = isa;
    snprintf(path, sizeof path, "%s/reference.safetensors", dir);
    c.ref = ref_open(path);
    snprintf(path, sizeof path, "%s/reference.json", dir);
    c.json = json_load_file(path, 0, &e);
    CHECK(c.json, "%s: %s", path, e.text);
    c.detail = (int)json_integer_value(json_object_get(c.json, "detail_prompt"));
    check_t of_rank[2] = {c, c};
    with_ranks(&cfg, body, of_rank);
    json_decref(c.json);
    ref_close(&c.ref);
}

int main(int argc, char **argv) {
    char isas[64], *save = NULL;
    snprintf(isas, sizeof isas, "%s", epx_ops_isa_available());
    for (char *isa = strtok_r(isas, ",", &save); isa; isa = strtok_r(NULL, ",", &save)) {
        if (argc == 2) {
            check_model(reference_model(argv[1]), 24, 1, isa, 1);
            if (isa == isas) check_model(reference_model(argv[1]), 24, 1, isa, 2);
            continue;
        }
        check_model(QWEN, 24, 1, isa, 1);
        if (isa == isas) check_model(QWEN, 24, 1, isa, 2);
        check_model(TINY, isa == isas ? 64 : 0, 0, isa,
                    1); /* text of the trained model with the best level only: it takes long */
    }
    return 0;
}
