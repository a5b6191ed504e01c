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

#endif
