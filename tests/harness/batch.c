/* Deterministic inputs: see batch.h. */
#include "tests/harness/batch.h"

#include <stdlib.h>
#include <string.h>

uint64_t th_mix(uint64_t seed, uint64_t i) { /* splitmix64, Steele et al. 2014 */
    uint64_t z = seed + (i + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

const char *th_kind_name(th_kind_t kind) {
    static const char *const names[] = {"random",  "all-empty",  "one-empty", "full",     "some-none", "all-none",
                                        "repeats", "one-expert", "absent",    "one-rank", "same-k",    "counts"};
    return names[kind];
}

static float unit(uint64_t seed, uint64_t i) { return (float)(th_mix(seed, i) >> 40) * 0x1p-24f; }

static float value(uint64_t seed, uint64_t i) {
    static const float special[] = {0.0f, -0.0f, 300.0f, -447.5f, 1e-6f, -3e-7f, 1e-40f, 1.0f};
    uint64_t m = th_mix(seed ^ 0xABCD, i);
    if (m % 61 == 0) return special[(m >> 32) % 8];
    return 4.0f * unit(seed, i) - 2.0f;
}

static int n_tokens_of(const th_shape_t *s, th_kind_t kind, uint64_t seed, int rank) {
    uint64_t chosen = th_mix(seed, 7) % (uint64_t)s->n_ranks;
    int uneven = (int)(th_mix(seed, 1000 + (uint64_t)rank) % (uint64_t)(s->max_tokens + 1));
    if (kind == TH_COUNTS) {
        const int counts[] = {0, 1, s->max_tokens - 1, s->max_tokens};
        return counts[seed >> 2 * rank & 3];
    }
    if (kind == TH_ALL_EMPTY) return 0;
    if (kind == TH_FULL || kind == TH_ONE_EXPERT) return s->max_tokens;
    if (kind == TH_ONE_EMPTY) return (uint64_t)rank == chosen ? 0 : s->max_tokens;
    if (kind == TH_ONE_RANK) return (uint64_t)rank == chosen ? s->max_tokens : 0;
    return uneven;
}

static int is_taken(const int32_t *ids, int n, int32_t e) {
    for (int i = 0; i < n; i++)
        if (ids[i] == e) return 1;
    return 0;
}

static void fill_ids(const th_shape_t *s, th_kind_t kind, uint64_t seed, uint64_t row, int32_t *out_ids) {
    uint64_t n_experts = (uint64_t)s->n_experts, at = row * 1024;
    for (int k = 0; k < s->top_k; k++) {
        int32_t e = (int32_t)(th_mix(seed ^ 0x1D5, at++) % n_experts);
        if (k < s->n_experts)
            while (is_taken(out_ids, k, e)) e = (int32_t)(((uint64_t)e + 1) % n_experts);
        if (kind == TH_REPEATS) e = (int32_t)(th_mix(seed ^ 0x1D5, at) % (n_experts < 3 ? n_experts : 3));
        if (kind == TH_ONE_EXPERT) e = (int32_t)(th_mix(seed, 9) % n_experts);
        if (kind == TH_ABSENT) e = (int32_t)(th_mix(seed ^ 0x1D5, at) % ((n_experts + 2) / 3) * 3);
        if (kind == TH_SAME_K && k > 0) e = out_ids[0];
        out_ids[k] = e;
    }
    for (int k = 0; k < s->top_k; k++)
        if (kind == TH_ALL_NONE || (kind == TH_SOME_NONE && th_mix(seed ^ 0xF00, at++) % 3 == 0)) out_ids[k] = -1;
}

static int batch_make(const th_shape_t *s, th_kind_t kind, uint64_t seed, int rank, th_batch_t *b) {
    size_t h = (size_t)s->hidden, k = (size_t)s->top_k, eb = (size_t)th_dtype_bytes(s->token),
           ab = (size_t)th_dtype_bytes(th_result_dtype(s));
    size_t n_scales = s->token == EPX_FP8_E4M3 ? (size_t)th_scale_words(s) : 0;
    size_t n = (size_t)(b->n_tokens = n_tokens_of(s, kind, seed, rank));
    uint64_t mine = th_mix(seed, 5000 + (uint64_t)rank);
    b->x = malloc(n * h * eb + 1);
    b->add = malloc(n * h * ab + 1);
    b->x_scale = n_scales ? malloc(n * n_scales * sizeof(uint32_t) + 1) : NULL;
    b->ids = malloc(n * k * sizeof(int32_t) + 1);
    b->weights = malloc(n * k * sizeof(float) + 1);
    if (!b->x || !b->add || (n_scales && !b->x_scale) || !b->ids || !b->weights) return -1;
    for (size_t i = 0; i < n * h; i++) {
        th_store(s->token, b->x, (int)i, value(mine, i));
        th_store(th_result_dtype(s), b->add, (int)i, unit(mine ^ 0xADD, i));
    }
    for (size_t i = 0; i < n * n_scales; i++) { /* small positive numbers, or codes near 2^-7 */
        float f = 0.01f + unit(mine ^ 0x5CA1E, i);
        if (s->scale_format == EPX_SCALE_F32) memcpy(&b->x_scale[i], &f, sizeof f);
        else b->x_scale[i] = 0x78787878u + ((uint32_t)th_mix(mine ^ 0x5CA1E, i) & 0x03030303u);
    }
    for (size_t i = 0; i < n * k; i++) b->weights[i] = unit(mine ^ 0x3E1, i) - (i % 13 == 5 ? 0.9f : 0.0f);
    for (size_t t = 0; t < n; t++) fill_ids(s, kind, kind == TH_ONE_EXPERT ? seed : mine, t, b->ids + t * k);
    return 0;
}

int th_batches_make(const th_shape_t *s, th_kind_t kind, uint64_t seed, th_batch_t *out_batches) {
    memset(out_batches, 0, (size_t)s->n_ranks * sizeof *out_batches);
    for (int r = 0; r < s->n_ranks; r++) {
        if (batch_make(s, kind, seed, r / th_replicate(s) * th_replicate(s), &out_batches[r]) == 0) continue;
        th_batches_fini(s, out_batches);
        return -1;
    }
    return 0;
}

void th_batches_fini(const th_shape_t *s, th_batch_t *batches) {
    for (int r = 0; r < s->n_ranks; r++) {
        free(batches[r].x);
        free(batches[r].add);
        free(batches[r].x_scale);
        free(batches[r].ids);
        free(batches[r].weights);
        batches[r] = (th_batch_t){0};
    }
}
