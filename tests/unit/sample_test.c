/* Sampler against a second implementation that follows the definitions literally (ranks by counting, no sorting), and against the
 * distribution it should draw from. Seed: EPX_TEST_SEED. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/philox.h"
#include "engine/sample/sample.h"

enum { MAX_VOCAB = 700 };

static uint64_t seed(void) {
    const char *s = getenv("EPX_TEST_SEED");
    return s ? strtoull(s, NULL, 10) : 1;
}

/* Candidates that sort before i. */
static int rank_of(const float *logits, int n, int i) {
    int r = 0;
    for (int j = 0; j < n; j++) r += logits[j] > logits[i] || (logits[j] == logits[i] && j < i);
    return r;
}

/* Probabilities after temperature, top-k, top-p, min-p, renormalised after each filter; dropped tokens have 0. */
static void reference(const epx_sampling_t *p, const float *logits, int n, double *out) {
    int order[MAX_VOCAB] = {0};
    double max = -INFINITY, sum = 0, kept = 0, before = 0;
    for (int i = 0; i < n; i++) order[rank_of(logits, n, i)] = i;
    for (int i = 0; i < n; i++) max = fmax(max, (double)logits[i]);
    for (int i = 0; i < n; i++) {
        int in = p->top_k < 1 || rank_of(logits, n, i) < p->top_k;
        out[i] = in ? exp(((double)logits[i] - max) / (double)p->temperature) : 0.0;
        sum += out[i];
    }
    for (int r = 0; r < n; r++) { /* a token stays while the mass before it has not reached top_p */
        int i = order[r];
        double q = out[i] / sum;
        if (r > 0 && before >= (double)p->top_p) out[i] = 0;
        before += q;
        kept += out[i];
    }
    double top = out[order[0]] / kept;
    sum = 0;
    for (int i = 0; i < n; i++) {
        if (out[i] / kept < (double)p->min_p * top) out[i] = 0;
        sum += out[i];
    }
    for (int i = 0; i < n; i++) out[i] /= sum;
}

static void random_logits(uint64_t key, float *out, int n, float spread) {
    for (int i = 0; i < n; i++) out[i] = (epx_philox_unit(key, (uint64_t)i) - 0.5f) * spread;
}

static void test_validate(void **state) {
    (void)state;
    epx_sampling_t p;
    epx_sampling_init(&p);
    assert_int_equal(epx_sampling_validate(&p), EPX_OK);
    p.temperature = -0.1f;
    assert_int_equal(epx_sampling_validate(&p), EPX_ERR_ARG);
    assert_non_null(strstr(epx_error_message(), "temperature is -0.1"));
    p.temperature = NAN;
    assert_int_equal(epx_sampling_validate(&p), EPX_ERR_ARG);
    p.temperature = INFINITY;
    assert_int_equal(epx_sampling_validate(&p), EPX_ERR_ARG);
    epx_sampling_init(&p);
    p.top_p = 0.0f;
    assert_int_equal(epx_sampling_validate(&p), EPX_ERR_ARG);
    assert_non_null(strstr(epx_error_message(), "top_p is 0"));
    p.top_p = 1.5f;
    assert_int_equal(epx_sampling_validate(&p), EPX_ERR_ARG);
    epx_sampling_init(&p);
    p.min_p = 1.01f;
    assert_int_equal(epx_sampling_validate(&p), EPX_ERR_ARG);
    epx_sampling_init(&p);
    p.top_k = -2;
    assert_int_equal(epx_sampling_validate(&p), EPX_ERR_ARG);
    assert_non_null(strstr(epx_error_message(), "top_k is -2"));
}

static void test_greedy_and_logprob(void **state) {
    (void)state;
    epx_sampler_t *s;
    epx_sampling_t p;
    float logits[MAX_VOCAB], lp;
    int32_t token;
    assert_int_equal(epx_sampler_create(MAX_VOCAB, &s), EPX_OK);
    epx_sampling_init(&p);
    p.temperature = 0;
    random_logits(seed(), logits, MAX_VOCAB, 6.0f);
    logits[17] = logits[200] = 5.0f; /* a tie: the lowest id */
    assert_int_equal(epx_sample(s, &p, logits, 0, &token, &lp), EPX_OK);
    assert_int_equal(token, 17);
    double sum = 0;
    for (int i = 0; i < MAX_VOCAB; i++) sum += exp((double)logits[i]);
    assert_true(fabs((double)lp - (5.0 - log(sum))) < 1e-5);
    logits[3] = NAN;
    assert_int_equal(epx_sample(s, &p, logits, 0, &token, &lp), EPX_ERR_INTERNAL);
    assert_non_null(strstr(epx_error_message(), "token 3"));
    epx_sampler_destroy(s);
}

/* Log-probabilities against doubles, for wide and narrow logits and for tokens that are ruled out. */
static void test_logprob(void **state) {
    (void)state;
    for (uint64_t c = 0; c < 60; c++) {
        int n = 1 + (int)(epx_philox_u32(seed(), c) % MAX_VOCAB);
        float logits[MAX_VOCAB], max = -INFINITY, lp;
        double sum = 0;
        int32_t token;
        epx_sampler_t *s;
        epx_sampling_t p;
        epx_sampling_init(&p);
        p.seed = c;
        random_logits(seed() + c, logits, n, c % 3 == 0 ? 200.0f : c % 3 == 1 ? 10.0f : 0.1f);
        for (int i = 1; i < n; i += 7) logits[i] = -INFINITY;
        for (int i = 0; i < n; i++) max = fmaxf(max, logits[i]);
        for (int i = 0; i < n; i++) sum += exp((double)logits[i] - (double)max);
        assert_int_equal(epx_sampler_create(n, &s), EPX_OK);
        assert_int_equal(epx_sample(s, &p, logits, 0, &token, &lp), EPX_OK);
        assert_true(logits[token] > -INFINITY);
        double want = (double)logits[token] - (double)max - log(sum);
        assert_true(fabs((double)lp - want) <= 2e-6 * fmax(1.0, fabs(want)));
        for (int i = 0; i < n; i++) logits[i] = -INFINITY;
        assert_int_equal(epx_sample(s, &p, logits, 0, &token, &lp), EPX_ERR_INTERNAL);
        logits[n - 1] = INFINITY;
        assert_int_equal(epx_sample(s, &p, logits, 0, &token, &lp), EPX_ERR_INTERNAL);
        logits[n - 1] = -NAN;
        assert_int_equal(epx_sample(s, &p, logits, 0, &token, &lp), EPX_ERR_INTERNAL);
        epx_sampler_destroy(s);
    }
}

/* The token that the reference distribution gives for the draw u, walking candidates by descending logit (or by id when no filter
 * is on), as sample.h documents. */
static int expected_token(const epx_sampling_t *p, const float *logits, const double *probs, int n, double u) {
    int sorted = (p->top_k >= 1 && p->top_k < n) || p->top_p < 1.0f || p->min_p > 0.0f, order[MAX_VOCAB];
    double mass = 0;
    for (int i = 0; i < n; i++) order[sorted ? rank_of(logits, n, i) : i] = i;
    for (int r = 0; r < n; r++) {
        mass += probs[order[r]];
        if (u < mass) return order[r];
    }
    return -1;
}

static void test_against_reference(void **state) {
    (void)state;
    uint64_t key = seed();
    int n_checked = 0;
    for (int c = 0; c < 400; c++) {
        int n = 1 + (int)(epx_philox_u32(key, (uint64_t)c * 8) % MAX_VOCAB);
        float logits[MAX_VOCAB];
        double probs[MAX_VOCAB];
        epx_sampler_t *s;
        epx_sampling_t p;
        epx_sampling_init(&p);
        random_logits(key + 77 + (uint64_t)c, logits, n, 12.0f);
        for (int i = 0; i + 5 < n; i += 5) logits[i] = logits[i + 5]; /* ties */
        p.seed = key + (uint64_t)c;
        p.temperature = 0.2f + 3.0f * epx_philox_unit(key, (uint64_t)c * 8 + 1);
        if (c & 1) p.top_k = 1 + (int32_t)(epx_philox_u32(key, (uint64_t)c * 8 + 2) % 40);
        if (c & 2) p.top_p = 0.05f + 0.95f * epx_philox_unit(key, (uint64_t)c * 8 + 3);
        if (c & 4) p.min_p = 0.3f * epx_philox_unit(key, (uint64_t)c * 8 + 4);
        assert_int_equal(epx_sampler_create(n, &s), EPX_OK);
        reference(&p, logits, n, probs);
        for (uint64_t t = 0; t < 20; t++) {
            int32_t token;
            double u = ((double)epx_philox_u32(p.seed, t) + 0.5) * 0x1p-32;
            assert_int_equal(epx_sample(s, &p, logits, t, &token, NULL), EPX_OK);
            assert_true(probs[token] > 0);
            if (token != expected_token(&p, logits, probs, n, u)) /* only where u meets a border up to rounding */
                fail_msg("seed %llu case %d draw %llu: token %d, reference %d", (unsigned long long)key, c, (unsigned long long)t,
                         token, expected_token(&p, logits, probs, n, u));
            n_checked++;
        }
        epx_sampler_destroy(s);
    }
    print_message("seed %llu: %d draws equal\n", (unsigned long long)key, n_checked);
}

/* Pearson's statistic of 40,000 draws; its mean is the degrees of freedom d, its deviation sqrt(2 d). */
static void chi_square(const epx_sampling_t *p, const float *logits, int n) {
    enum { DRAWS = 40000 };
    int counts[MAX_VOCAB] = {0}, d = -1;
    double probs[MAX_VOCAB], x = 0;
    epx_sampler_t *s;
    reference(p, logits, n, probs);
    assert_int_equal(epx_sampler_create(n, &s), EPX_OK);
    for (uint64_t t = 0; t < DRAWS; t++) {
        int32_t token;
        assert_int_equal(epx_sample(s, p, logits, t, &token, NULL), EPX_OK);
        counts[token]++;
    }
    epx_sampler_destroy(s);
    for (int i = 0; i < n; i++) {
        double want = probs[i] * DRAWS;
        if (probs[i] == 0) assert_int_equal(counts[i], 0);
        else x += (counts[i] - want) * (counts[i] - want) / want, d++;
    }
    print_message("chi-square %.1f with %d degrees of freedom\n", x, d);
    assert_true(x < d + 5 * sqrt(2.0 * d) + 5);
    if (d > 3) assert_true(x > d - 4 * sqrt(2.0 * d)); /* draws that are too even are not random either */
}

static void test_distribution(void **state) {
    (void)state;
    float logits[40];
    epx_sampling_t p;
    epx_sampling_init(&p);
    random_logits(seed() + 5, logits, 40, 5.0f);
    p.seed = seed();
    chi_square(&p, logits, 40);
    p.temperature = 0.6f;
    p.top_k = 20;
    p.top_p = 0.95f;
    chi_square(&p, logits, 40);
    p.min_p = 0.2f;
    p.seed++;
    chi_square(&p, logits, 40);
}

/* A draw depends on (seed, index) only, not on what the sampler did before. */
static void test_stateless(void **state) {
    (void)state;
    float logits[100], other[100];
    int32_t first[50], again;
    epx_sampler_t *s;
    epx_sampling_t p, q;
    epx_sampling_init(&p);
    epx_sampling_init(&q);
    q.top_k = 3;
    random_logits(seed(), logits, 100, 4.0f);
    random_logits(seed() + 1, other, 100, 4.0f);
    assert_int_equal(epx_sampler_create(100, &s), EPX_OK);
    for (uint64_t t = 0; t < 50; t++) assert_int_equal(epx_sample(s, &p, logits, t, &first[t], NULL), EPX_OK);
    for (uint64_t t = 50; t-- > 0;) {
        assert_int_equal(epx_sample(s, &q, other, t, &again, NULL), EPX_OK);
        assert_int_equal(epx_sample(s, &p, logits, t, &again, NULL), EPX_OK);
        assert_int_equal(again, first[t]);
    }
    epx_sampler_destroy(s);
}

/* ---- changes before the draw, against a model that counts by searching ---- */

static double adjusted(const epx_adjust_t *a, const float *logits, const int32_t *tokens, int n_prompt, int n, int32_t id) {
    double l = (double)logits[id], rep = a->repetition_penalty == 0 ? 1.0 : (double)a->repetition_penalty;
    int count = 0, occurs = 0;
    for (int i = 0; i < n; i++) {
        occurs |= tokens[i] == id;
        count += tokens[i] == id && i >= n_prompt;
    }
    if (occurs) l = l > 0 ? l / rep : l * rep;
    l -= (double)a->frequency_penalty * count;
    if (count) l -= (double)a->presence_penalty;
    for (int i = 0; i < a->n_bias; i++)
        if (a->bias[i].token == id) l += (double)a->bias[i].bias;
    return l;
}

static void check_adjust(epx_sampler_t *s, uint64_t key) {
    enum { V = 50, N = 40 };
    float logits[V];
    int32_t tokens[N];
    epx_bias_t bias[2] = {{(int32_t)(key % V), -100.0f}, {(int32_t)((key + 7) % V), 3.5f}};
    int n_prompt = (int)(key % 20), n = n_prompt + (int)(key / 3 % 20);
    epx_adjust_t a = {.presence_penalty = key & 1 ? 1.25f : 0.0f,
                      .frequency_penalty = key & 2 ? -0.5f : 0.0f,
                      .repetition_penalty = key & 4   ? 1.5f
                                            : key & 8 ? 1.0f
                                                      : 0.0f,
                      .bias = bias,
                      .n_bias = key & 16 ? 2 : 0};
    random_logits(key, logits, V, 10.0f);
    for (int i = 0; i < n; i++) tokens[i] = (int32_t)(epx_philox_u32(key + 99, (uint64_t)i) % 20);
    float *out = epx_sampler_copy(s, logits);
    epx_adjust_logits(s, &a, out, tokens, n_prompt, n);
    for (int32_t id = 0; id < V; id++) {
        double want = adjusted(&a, logits, tokens, n_prompt, n, id);
        if (fabs((double)out[id] - want) > 1e-5 * (1 + fabs(want)))
            fail_msg("key %d token %d: %g, expected %g", (int)key, id, (double)out[id], want);
    }
    assert_int_equal(epx_adjust_is_neutral(&a), !(key & 1) && !(key & 2) && !(key & 4) && !(key & 16));
}

static void test_adjust(void **state) {
    epx_sampler_t *s;
    (void)state;
    assert_int_equal(epx_sampler_create(50, &s), EPX_OK);
    for (uint64_t key = 0; key < 400; key++) check_adjust(s, key + 1000 * seed());
    epx_sampler_destroy(s);
}

static void test_adjust_validate(void **state) {
    epx_bias_t bias = {5, 1};
    epx_adjust_t bad[] = {{.presence_penalty = 2.5f},        {.frequency_penalty = NAN},
                          {.repetition_penalty = -1},        {.n_bias = -1},
                          {.bias = &bias, .n_bias = 100000}, {.n_bias = 1}};
    epx_adjust_t good = {.presence_penalty = -2, .frequency_penalty = 2, .bias = &bias, .n_bias = 1};
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) assert_int_equal(epx_adjust_validate(&bad[i], 6), EPX_ERR_ARG);
    assert_int_equal(epx_adjust_validate(&good, 6), EPX_OK);
    assert_int_equal(epx_adjust_validate(&good, 5), EPX_ERR_ARG); /* token 5 of 5 */
    bias = (epx_bias_t){0, -101};
    assert_int_equal(epx_adjust_validate(&good, 6), EPX_ERR_ARG);
}

static void test_logprobs(void **state) {
    enum { V = 100, K = 20 };
    float logits[V], logprob;
    epx_top_t top[K];
    epx_sampler_t *s;
    double sum = 0;
    (void)state;
    assert_int_equal(epx_sampler_create(V, &s), EPX_OK);
    random_logits(seed(), logits, V, 8.0f);
    logits[3] = -INFINITY;
    logits[10] = logits[11] = 4.5f; /* a tie at the top */
    for (int i = 0; i < V; i++) sum += exp((double)logits[i]);
    assert_int_equal(epx_logprobs(s, logits, 42, &logprob, K, top), K);
    assert_true(fabs((double)logprob - ((double)logits[42] - log(sum))) < 1e-5);
    for (int k = 0; k < K; k++) {
        assert_int_equal(rank_of(logits, V, top[k].token), k);
        assert_true(fabs((double)top[k].logprob - ((double)logits[top[k].token] - log(sum))) < 1e-5);
    }
    assert_true(top[0].token == 10 && top[1].token == 11);
    assert_int_equal(epx_logprobs(s, logits, 3, &logprob, 0, NULL), 0);
    assert_true(isinf(logprob) && logprob < 0);
    epx_sampler_destroy(s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_adjust),       cmocka_unit_test(test_adjust_validate),    cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_validate),     cmocka_unit_test(test_greedy_and_logprob), cmocka_unit_test(test_against_reference),
        cmocka_unit_test(test_distribution), cmocka_unit_test(test_stateless),          cmocka_unit_test(test_logprob),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
