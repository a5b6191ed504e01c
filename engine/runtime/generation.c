/* Generation defaults of a model directory. See generation.h. */
#include "engine/runtime/generation.h"

#include <stdio.h>
#include <unistd.h>

enum { ANY_VOCAB = 1 << 24 };

static epx_status_t read_sampling(const epx_json_doc_t *d, epx_sampling_t *s) {
    double temperature, top_p, min_p;
    int64_t top_k;
    int do_sample;
    EPX_TRY(epx_json_real_or(d, "temperature", 0.0, 1e6, (double)s->temperature, &temperature));
    EPX_TRY(epx_json_real_or(d, "top_p", 0.0, 1.0, (double)s->top_p, &top_p));
    EPX_TRY(epx_json_real_or(d, "min_p", 0.0, 1.0, (double)s->min_p, &min_p));
    EPX_TRY(epx_json_int_or(d, "top_k", -1, INT32_MAX, s->top_k, &top_k));
    EPX_TRY(epx_json_bool_or(d, "do_sample", 1, &do_sample));
    s->temperature = do_sample ? (float)temperature : 0.0f;
    s->top_p = (float)top_p;
    s->min_p = (float)min_p;
    s->top_k = (int32_t)top_k;
    epx_status_t st = epx_sampling_validate(s);
    return st < 0 ? epx_fail_context(EPX_ERR_FORMAT, "%s", d->name) : st;
}

/* Open DIR/name if it exists; *out_found 0 when it does not. */
static epx_status_t load(const char *dir, const char *name, char *path, size_t n_path, epx_json_doc_t *out, int *out_found) {
    if (snprintf(path, n_path, "%s/%s", dir, name) >= (int)n_path)
        return epx_fail(EPX_ERR_ARG, "model path is too long, at most %zu", n_path - 32);
    *out_found = access(path, F_OK) == 0;
    return *out_found ? epx_json_doc_load(path, out) : EPX_OK;
}

epx_status_t epx_generation_defaults(const char *model_dir, epx_generation_defaults_t *out) {
    epx_generation_defaults_t g = {.n_eos = 0};
    char path[4096];
    epx_json_doc_t doc;
    int found;
    epx_status_t s = EPX_OK;
    epx_sampling_init(&g.sampling);
    EPX_TRY(load(model_dir, "generation_config.json", path, sizeof path, &doc, &found));
    if (found) {
        s = read_sampling(&doc, &g.sampling);
        if (s == EPX_OK) s = epx_json_eos(&doc, ANY_VOCAB, g.eos_ids, &g.n_eos);
        epx_json_doc_fini(&doc);
    }
    if (s == EPX_OK && g.n_eos == 0) {
        EPX_TRY(load(model_dir, "config.json", path, sizeof path, &doc, &found));
        if (found) {
            s = epx_json_eos(&doc, ANY_VOCAB, g.eos_ids, &g.n_eos);
            epx_json_doc_fini(&doc);
        }
    }
    if (s == EPX_OK) *out = g;
    return s;
}
