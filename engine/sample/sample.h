/* Token sampling: greedy, temperature, top-k, top-p, min-p. Pure: random numbers are Philox keyed by (seed, token index), so a
 * request's text does not depend on what else is in the batch.
 * Filters apply in the order of Hugging Face transformers: temperature, top-k, top-p, min-p. */
#ifndef EPX_ENGINE_SAMPLE_SAMPLE_H
#define EPX_ENGINE_SAMPLE_SAMPLE_H

#include <stdint.h>

#include "base/status.h"

typedef struct {
    float temperature; /* 0: greedy (ties: lowest id); else > 0 */
    float top_p;       /* (0, 1] */
    float min_p;       /* [0, 1] */
    int32_t top_k;     /* -1 or 0: off; else >= 1 */
    uint64_t seed;
} epx_sampling_t;

typedef struct {
    int32_t token;
    float bias;
} epx_bias_t;

typedef struct {
    int32_t token;
    float logprob;
} epx_top_t;

/* What changes logits before a token is drawn. All zero: nothing. */
typedef struct {
    float presence_penalty, frequency_penalty; /* -2 to 2, over generated tokens */
    float repetition_penalty;                  /* over prompt and generated tokens; above 0; 0 or 1: off */
    const epx_bias_t *bias;                    /* [n_bias], added to the logits; -100 to 100 */
    int32_t n_bias;
} epx_adjust_t;

enum { EPX_SAMPLE_MAX_TOP = 20, EPX_SAMPLE_MAX_BIAS = 1024 };

/* Temperature 1, no filters, seed 0. */
void epx_sampling_init(epx_sampling_t *s);
/* EPX_ERR_ARG names the field, its value and the legal range. NaN and infinities are refused. */
epx_status_t epx_sampling_validate(const epx_sampling_t *s);
typedef struct epx_sampler epx_sampler_t; /* scratch for one vocabulary; one thread at a time */
/* n_vocab >= 1. */
epx_status_t epx_sampler_create(int32_t n_vocab, epx_sampler_t **out_s);
void epx_sampler_destroy(epx_sampler_t *s);
/* Draw one token; p must have passed epx_sampling_validate(). EPX_ERR_INTERNAL when a logit is NaN or +infinity, or none is
 * finite. logits [n_vocab], not changed. token_idx: index of the token to be drawn within the request (0 = first generated).
 * out_logprob (may be NULL): natural log of the softmax probability of the token at temperature 1, before filters. */
epx_status_t epx_sample(epx_sampler_t *s, const epx_sampling_t *p, const float *logits, uint64_t token_idx, int32_t *out_token,
                        float *out_logprob);

/* EPX_ERR_ARG names the field, its value and the legal range. */
epx_status_t epx_adjust_validate(const epx_adjust_t *a, int32_t n_vocab);
/* 1 when it changes nothing. */
int epx_adjust_is_neutral(const epx_adjust_t *a);
/* A copy of logits [n_vocab] that the caller may change; borrowed until the next call with this sampler. */
float *epx_sampler_copy(epx_sampler_t *s, const float *logits);
/* Change logits in place, in this order. tokens [n_tokens] of the request, the first n_prompt of them the prompt.
 *   repetition  every token that occurs: a positive logit is divided by the penalty, another multiplied
 *   frequency, presence  logit - frequency * count - presence * (count > 0), count over generated tokens
 *   bias        logit + bias
 * Source  repetition: Keskar et al., "CTRL", arXiv 1909.05858, section 4.1; frequency and presence: OpenAI's API reference. */
void epx_adjust_logits(epx_sampler_t *s, const epx_adjust_t *a, float *logits, const int32_t *tokens, int32_t n_prompt,
                       int32_t n_tokens);
/* Natural log of the softmax probability at temperature 1 of `token`, and of the n_top most probable tokens in descending order
 * (ties: lowest id first); n_top <= EPX_SAMPLE_MAX_TOP and is cut to the vocabulary. Returns how many were written to out_top. */
int32_t epx_logprobs(epx_sampler_t *s, const float *logits, int32_t token, float *out_logprob, int32_t n_top, epx_top_t *out_top);

#endif
