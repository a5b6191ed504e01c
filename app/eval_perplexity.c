/* `epx eval perplexity FILE`: how well the model predicts a text. The text's tokens are cut into windows that overlap by half;
 * each token but the first is scored once, in the first window where at least half a window (or everything) stands before it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "app/eval.h"
#include "app/session.h"
#include "base/checked.h"

enum { DEFAULT_WINDOW = 512, FILE_MAX_BYTES = 64 << 20 };

typedef struct {
    const int32_t *ids;
    int32_t n, window;
    int vocab;
    float *logits; /* [window, vocab], of rank 0 */
    int64_t n_scored;
    double sum, square; /* of negative log-likelihoods */
} text_t;

/* -ln p of `target`. */
static double surprise(const float *logits, int vocab, int32_t target) {
    double max = (double)logits[0], total = 0;
    for (int i = 1; i < vocab; i++) max = fmax(max, (double)logits[i]);
    for (int i = 0; i < vocab; i++) total += exp((double)logits[i] - max);
    return log(total) + max - (double)logits[target];
}

static void score(text_t *t, int32_t first, int32_t n, int32_t skip) {
    for (int32_t i = skip; i + 1 < n; i++) {
        double s = surprise(t->logits + (int64_t)i * t->vocab, t->vocab, t->ids[first + i + 1]);
        t->sum += s;
        t->square += s * s;
        t->n_scored++;
    }
}

static epx_status_t body(void *ctx, int rank, epx_rank_t *r) {
    text_t *t = ctx;
    for (int32_t first = 0, skip = 0; first + 1 < t->n && first + skip + 1 < t->n;) {
        int32_t n = t->n - first < t->window ? t->n - first : t->window, step = t->window / 2;
        EPX_TRY(epx_rank_logits(r, t->ids + first, rank == 0 ? n : 0, n, rank == 0 ? t->logits : NULL));
        if (rank == 0) score(t, first, n, skip);
        first += step;
        skip = t->window - 1 - step; /* the window before scored its last prediction but one */
    }
    return EPX_OK;
}

static epx_status_t read_text(const epx_settings_t *o, int32_t **out_ids, int32_t *out_n, int *out_vocab, int *out_context) {
    epx_session_t s;
    epx_model_config_t mc;
    char *text = NULL;
    size_t n_bytes, n = 0;
    epx_session_init(&s, o);
    epx_status_t st = epx_model_config_load(o->model_path, &mc);
    if (st == EPX_OK) st = epx_session_load_text(&s);
    if (st == EPX_OK) st = epx_read_file(o->eval_file, FILE_MAX_BYTES, &text, &n_bytes);
    if (st == EPX_OK) st = epx_tokenizer_encode(s.tokenizer, text, n_bytes, out_ids, &n);
    free(text);
    epx_session_close(&s);
    if (st < 0) return st;
    *out_n = (int32_t)n;
    *out_vocab = mc.vocab;
    *out_context = o->context_length ? (int)o->context_length : mc.max_position;
    if (n >= 2 && n <= INT32_MAX) return EPX_OK;
    free(*out_ids);
    return epx_fail(EPX_ERR_ARG, "%s: %zu tokens, at least 2 are needed", o->eval_file, n);
}

static void print(const epx_settings_t *o, const text_t *t) {
    double n = (double)t->n_scored, mean = t->sum / n, error = n > 1 ? sqrt((t->square / n - mean * mean) / (n - 1)) : 0;
    printf("text        %s: %d tokens, windows of %d, overlapping by half\n", o->eval_file, t->n, t->window);
    printf("scored      %lld tokens, mean negative log-likelihood %.6f +- %.6f\n", (long long)t->n_scored, mean, error);
    printf("perplexity  %.4f\n", exp(mean));
}

epx_status_t epx_eval_perplexity(const epx_settings_t *o) {
    text_t t = {.n = 0};
    int32_t *ids = NULL;
    int context = 0;
    size_t n_bytes;
    EPX_TRY(read_text(o, &ids, &t.n, &t.vocab, &context));
    t.ids = ids;
    t.window = o->window ? (int32_t)o->window : DEFAULT_WINDOW;
    if (t.window > context) t.window = context;
    if (!epx_mul_size((size_t)t.window * sizeof(float), (size_t)t.vocab, &n_bytes)) n_bytes = SIZE_MAX;
    t.logits = malloc(n_bytes);
    epx_status_t s =
        t.logits ? epx_eval_ranks(o, body, &t) : epx_fail(EPX_ERR_NOMEM, "--window %d: %zu bytes of logits", t.window, n_bytes);
    if (s == EPX_OK) print(o, &t);
    free(t.logits);
    free(ids);
    return s;
}
