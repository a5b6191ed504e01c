/* Token sampling. See sample.h.
 * Order of the filters, as in Hugging Face transformers: temperature, top-k, top-p, min-p; each works on what the one before
 * left, with probabilities renormalised over it. Candidates are ordered by descending logit, ties by ascending id; top-p keeps
 * the shortest prefix whose mass reaches top_p, at least one token. The draw walks the kept candidates in that order. */
#include "engine/sample/sample.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "base/philox.h"

enum { LANES = 4, BLOCK = 256, FIRST_CANDIDATES = 256, MORE_CANDIDATES = 8 };

typedef struct {
    float logit;
    int32_t id;
} cand_t;

struct epx_sampler {
    int32_t n_vocab;
    cand_t *cands; /* [n_vocab] */
    double *probs; /* [n_vocab] unnormalised */
    float *copy;   /* [n_vocab] */
    int32_t *seen; /* [n_vocab] all zero between calls */
};

void epx_sampling_init(epx_sampling_t *s) {
    *s = (epx_sampling_t){.temperature = 1.0f, .top_p = 1.0f, .min_p = 0.0f, .top_k = -1, .seed = 0};
}

epx_status_t epx_sampling_validate(const epx_sampling_t *s) {
    if (!(s->temperature >= 0.0f) || !isfinite(s->temperature))
        return epx_fail(EPX_ERR_ARG, "temperature is %g, expected 0 (greedy) or a positive number", (double)s->temperature);
    if (!(s->top_p > 0.0f && s->top_p <= 1.0f))
        return epx_fail(EPX_ERR_ARG, "top_p is %g, expected above 0 and at most 1", (double)s->top_p);
    if (!(s->min_p >= 0.0f && s->min_p <= 1.0f)) return epx_fail(EPX_ERR_ARG, "min_p is %g, expected 0 to 1", (double)s->min_p);
    if (s->top_k < -1) return epx_fail(EPX_ERR_ARG, "top_k is %d, expected -1 or 0 (off) or at least 1", s->top_k);
    return EPX_OK;
}

epx_status_t epx_sampler_create(int32_t n_vocab, epx_sampler_t **out_s) {
    if (n_vocab < 1) return epx_fail(EPX_ERR_ARG, "sampler: n_vocab is %d, at least 1", n_vocab);
    epx_sampler_t *s = calloc(1, sizeof *s);
    if (!s) return epx_fail(EPX_ERR_NOMEM, "sampler: no memory");
    s->n_vocab = n_vocab;
    s->cands = malloc((size_t)n_vocab * sizeof *s->cands);
    s->probs = malloc((size_t)n_vocab * sizeof *s->probs);
    s->copy = malloc((size_t)n_vocab * sizeof *s->copy);
    s->seen = calloc((size_t)n_vocab, sizeof *s->seen);
    if (!s->cands || !s->probs || !s->copy || !s->seen) {
        epx_sampler_destroy(s);
        return epx_fail(EPX_ERR_NOMEM, "sampler: no memory for a vocabulary of %d", n_vocab);
    }
    *out_s = s;
    return EPX_OK;
}

void epx_sampler_destroy(epx_sampler_t *s) {
    if (!s) return;
    free(s->cands);
    free(s->probs);
    free(s->copy);
    free(s->seen);
    free(s);
}

/* a before b in the order of candidates. */
static int before(const cand_t *a, const cand_t *b) { return a->logit != b->logit ? a->logit > b->logit : a->id < b->id; }

static int compare(const void *a, const void *b) { return before(a, b) ? -1 : 1; }

/* The float's bits as an integer that compares as the float does; -0 just below 0, NaNs outside the infinities. Integer compares,
 * because compilers do not vectorise float ones that could trap. Its own inverse. */
static inline int32_t key_of_bits(int32_t bits) { return bits ^ ((bits >> 31) & INT32_MAX); }

/* Largest logit, ties to the lowest id; EPX_ERR_INTERNAL when a logit is NaN or +infinity, or none is finite. */
static epx_status_t argmax(const float *logits, int32_t n, int32_t *out_id) {
    const int32_t key_inf = 0x7F800000, key_minus_inf = key_of_bits((int32_t)0xFF800000u);
    int32_t lo = INT32_MAX, hi = INT32_MIN, at = 0;
    for (int32_t i = 0; i < n; i++) {
        int32_t key = key_of_bits((int32_t)epx_f32_bits(logits[i]));
        hi = key > hi ? key : hi;
        lo = key < lo ? key : lo;
    }
    if (hi >= key_inf || lo < key_minus_inf) {
        while (logits[at] < INFINITY) at++;
        return epx_fail(EPX_ERR_INTERNAL, "logit of token %d is %g", at, (double)logits[at]);
    }
    if (hi == key_minus_inf) return epx_fail(EPX_ERR_INTERNAL, "no token has a finite logit");
    float max = epx_bits_f32((uint32_t)key_of_bits(hi));
    while (logits[at] != max) at++;
    *out_id = at;
    return EPX_OK;
}

/* e^x for x <= 0 with a relative error below 3e-7; below -87 it stays at e^-87 = 1.6e-38. No call and no float compare, so that a
 * loop over it uses vectors. e^x = 2^n 2^f with f in [-0.5, 0.5]; 2^f by its Taylor polynomial of degree 6. */
static inline float exp_negative(float x) {
    const float magic = 12582912.0f;  /* 1.5 * 2^23: adding it rounds to an integer */
    const int32_t limit = 0x42AE0000; /* 87.0 */
    int32_t size = (int32_t)epx_f32_bits(x) & INT32_MAX;
    float t = -epx_bits_f32((uint32_t)(size < limit ? size : limit)) * 1.44269504f, n = (t + magic) - magic,
          f = (t - n) * 0.693147181f;
    float e = 1.0f + f * (1.0f + f * (0.5f + f * (1.0f / 6 + f * (1.0f / 24 + f * (1.0f / 120 + f * (1.0f / 720))))));
    return e * epx_bits_f32((uint32_t)((int32_t)n + 127) << 23);
}

static float logprob_of(const float *logits, int32_t n, float max, int32_t id) {
    float e[BLOCK];
    double sum[LANES] = {0};
    for (int32_t i = 0; i < n; i += BLOCK) {
        int32_t m = n - i < BLOCK ? n - i : BLOCK;
        for (int32_t k = 0; k < m; k++) e[k] = exp_negative(logits[i + k] - max);
        for (int32_t k = 0; k < m; k++) sum[k % LANES] += (double)e[k];
    }
    return (float)((double)logits[id] - (double)max - log((sum[0] + sum[1]) + (sum[2] + sum[3])));
}

/* Sift cands[at] down a heap of n whose root is the last in order. */
static void sift(cand_t *c, int32_t at, int32_t n) {
    for (;;) {
        int32_t child = 2 * at + 1;
        if (child >= n) return;
        if (child + 1 < n && before(&c[child], &c[child + 1])) child++;
        if (!before(&c[at], &c[child])) return;
        cand_t t = c[at];
        c[at] = c[child];
        c[child] = t;
        at = child;
    }
}

/* The first k candidates, in order: a heap of the k best so far, then a sort. */
static void take_top_k(epx_sampler_t *s, const float *logits, int32_t k) {
    cand_t *c = s->cands;
    for (int32_t i = 0; i < k; i++) c[i] = (cand_t){logits[i], i};
    for (int32_t i = k / 2 - 1; i >= 0; i--) sift(c, i, k);
    for (int32_t i = k; i < s->n_vocab; i++) {
        cand_t x = {logits[i], i};
        if (!before(&x, &c[0])) continue;
        c[0] = x;
        sift(c, 0, k);
    }
    qsort(c, (size_t)k, sizeof *c, compare);
}

static double weight(float logit, float max, float temperature) {
    return exp(((double)logit - (double)max) / (double)temperature);
}

/* probs of the first n candidates, unnormalised; returns their sum. */
static double weigh(epx_sampler_t *s, int32_t n, float max, float temperature) {
    double sum = 0;
    for (int32_t i = 0; i < n; i++) sum += s->probs[i] = weight(s->cands[i].logit, max, temperature);
    return sum;
}

/* Shortest prefix of the n weighed candidates whose mass reaches top_p of `sum`; n + 1 when they do not reach it. */
static int32_t cut_top_p(const double *probs, int32_t n, double sum, float top_p) {
    double mass = 0;
    for (int32_t i = 0; i < n; i++) {
        mass += probs[i];
        if (mass >= (double)top_p * sum) return i + 1;
    }
    return n + 1;
}

/* Candidates are in descending order, so what min_p keeps is a prefix; the first is always kept. */
static int32_t cut_min_p(const double *probs, int32_t n, float min_p) {
    int32_t kept = 1;
    while (kept < n && probs[kept] >= (double)min_p * probs[0]) kept++;
    return kept;
}

/* Candidates kept by top-p and min-p, in order, without top-k. Only as many are sorted as are needed to see where the cut is. */
static int32_t filter_all(epx_sampler_t *s, const epx_sampling_t *p, const float *logits, float max) {
    double sum = 0;
    for (int32_t i = 0; p->top_p < 1.0f && i < s->n_vocab; i++) sum += weight(logits[i], max, p->temperature);
    for (int32_t k = FIRST_CANDIDATES;; k *= MORE_CANDIDATES) {
        if (k > s->n_vocab) k = s->n_vocab;
        take_top_k(s, logits, k);
        weigh(s, k, max, p->temperature);
        int32_t n = p->top_p < 1.0f ? cut_top_p(s->probs, k, sum, p->top_p) : k + 1;
        int32_t m = cut_min_p(s->probs, n < k ? n : k, p->min_p);
        if (n <= k || m < k || k == s->n_vocab) return m;
        if (k > INT32_MAX / MORE_CANDIDATES) k = INT32_MAX / MORE_CANDIDATES;
    }
}

static int32_t draw(const epx_sampler_t *s, int32_t n, double u) {
    double sum = 0, mass = 0;
    for (int32_t i = 0; i < n; i++) sum += s->probs[i];
    for (int32_t i = 0; i < n; i++) {
        mass += s->probs[i];
        if (u * sum < mass) return s->cands[i].id;
    }
    for (int32_t i = n - 1; i > 0; i--) /* rounding of the last sum: the last token that has any mass */
        if (s->probs[i] > 0) return s->cands[i].id;
    return s->cands[0].id;
}

static int32_t sample(epx_sampler_t *s, const epx_sampling_t *p, const float *logits, float max, uint64_t token_idx) {
    int32_t n = s->n_vocab;
    if (p->top_k >= 1 && p->top_k < n) {
        n = p->top_k;
        take_top_k(s, logits, n);
        double sum = weigh(s, n, max, p->temperature);
        int32_t kept = p->top_p < 1.0f ? cut_top_p(s->probs, n, sum, p->top_p) : n;
        n = cut_min_p(s->probs, kept < n ? kept : n, p->min_p);
    } else if (p->top_p < 1.0f || p->min_p > 0.0f) {
        n = filter_all(s, p, logits, max);
    } else {
        for (int32_t i = 0; i < n; i++) s->cands[i] = (cand_t){logits[i], i}; /* no filter: any order does, ids are cheapest */
        weigh(s, n, max, p->temperature);
    }
    double u = ((double)epx_philox_u32(p->seed, token_idx) + 0.5) * 0x1p-32; /* inside (0, 1) */
    return draw(s, n, u);
}

epx_status_t epx_sample(epx_sampler_t *s, const epx_sampling_t *p, const float *logits, uint64_t token_idx, int32_t *out_token,
                        float *out_logprob) {
    int32_t best = 0, token;
    EPX_TRY(argmax(logits, s->n_vocab, &best));
    token = p->temperature > 0.0f ? sample(s, p, logits, logits[best], token_idx) : best;
    if (out_logprob) *out_logprob = logprob_of(logits, s->n_vocab, logits[best], token);
    *out_token = token;
    return EPX_OK;
}

/* ---- changes before the draw ---- */

static epx_status_t check_penalty(const char *name, float v) {
    if (v >= -2.0f && v <= 2.0f) return EPX_OK;
    return epx_fail(EPX_ERR_ARG, "%s is %g, expected -2 to 2", name, (double)v);
}

epx_status_t epx_adjust_validate(const epx_adjust_t *a, int32_t n_vocab) {
    EPX_TRY(check_penalty("presence_penalty", a->presence_penalty));
    EPX_TRY(check_penalty("frequency_penalty", a->frequency_penalty));
    if (!(a->repetition_penalty >= 0.0f) || !isfinite(a->repetition_penalty))
        return epx_fail(EPX_ERR_ARG, "repetition_penalty is %g, expected a number above 0", (double)a->repetition_penalty);
    if (a->n_bias < 0 || a->n_bias > EPX_SAMPLE_MAX_BIAS || (a->n_bias && !a->bias))
        return epx_fail(EPX_ERR_ARG, "logit_bias has %d entries, expected at most %d", a->n_bias, EPX_SAMPLE_MAX_BIAS);
    for (int32_t i = 0; i < a->n_bias; i++) {
        const epx_bias_t *b = &a->bias[i];
        if (b->token < 0 || b->token >= n_vocab)
            return epx_fail(EPX_ERR_ARG, "logit_bias: token %d, expected 0 to %d", b->token, n_vocab - 1);
        if (!(b->bias >= -100.0f && b->bias <= 100.0f))
            return epx_fail(EPX_ERR_ARG, "logit_bias of token %d is %g, expected -100 to 100", b->token, (double)b->bias);
    }
    return EPX_OK;
}

int epx_adjust_is_neutral(const epx_adjust_t *a) {
    int repeats = a->repetition_penalty == 0.0f || a->repetition_penalty == 1.0f;
    return repeats && a->presence_penalty == 0.0f && a->frequency_penalty == 0.0f && a->n_bias == 0;
}

float *epx_sampler_copy(epx_sampler_t *s, const float *logits) {
    memcpy(s->copy, logits, (size_t)s->n_vocab * sizeof *logits);
    return s->copy;
}

/* Each token that occurs once, whatever how often. */
static void penalise_repetition(epx_sampler_t *s, float penalty, float *logits, const int32_t *tokens, int32_t n) {
    if (penalty == 0.0f || penalty == 1.0f) return;
    for (int32_t i = 0; i < n; i++) {
        float *l = &logits[tokens[i]];
        if (s->seen[tokens[i]]++) continue;
        *l = *l > 0.0f ? *l / penalty : *l * penalty;
    }
    for (int32_t i = 0; i < n; i++) s->seen[tokens[i]] = 0;
}

static void penalise_counts(epx_sampler_t *s, const epx_adjust_t *a, float *logits, const int32_t *tokens, int32_t n) {
    if (a->presence_penalty == 0.0f && a->frequency_penalty == 0.0f) return;
    for (int32_t i = 0; i < n; i++) s->seen[tokens[i]]++;
    for (int32_t i = 0; i < n; i++) {
        int32_t count = s->seen[tokens[i]];
        if (count == 0) continue;
        logits[tokens[i]] -= a->frequency_penalty * (float)count + a->presence_penalty;
        s->seen[tokens[i]] = 0;
    }
}

void epx_adjust_logits(epx_sampler_t *s, const epx_adjust_t *a, float *logits, const int32_t *tokens, int32_t n_prompt,
                       int32_t n_tokens) {
    penalise_repetition(s, a->repetition_penalty, logits, tokens, n_tokens);
    penalise_counts(s, a, logits, tokens + n_prompt, n_tokens - n_prompt);
    for (int32_t i = 0; i < a->n_bias; i++) logits[a->bias[i].token] += a->bias[i].bias;
}

int32_t epx_logprobs(epx_sampler_t *s, const float *logits, int32_t token, float *out_logprob, int32_t n_top,
                     epx_top_t *out_top) {
    int32_t n = n_top < s->n_vocab ? n_top : s->n_vocab, best = 0;
    double sum = 0;
    for (int32_t i = 0; i < s->n_vocab; i++)
        if (logits[i] > logits[best]) best = i;
    for (int32_t i = 0; i < s->n_vocab; i++) sum += (double)expf(logits[i] - logits[best]);
    double lse = (double)logits[best] + log(sum);
    *out_logprob = (float)((double)logits[token] - lse);
    if (n < 1) return 0;
    take_top_k(s, logits, n);
    for (int32_t i = 0; i < n; i++) out_top[i] = (epx_top_t){s->cands[i].id, (float)((double)s->cands[i].logit - lse)};
    return n;
}
