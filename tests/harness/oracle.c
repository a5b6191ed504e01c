/* The independent oracle: see oracle.h. */
#include "tests/harness/oracle.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"

static const float FP8_MAX = 448.0f;
static const float AMAX_FLOOR = 1e-12f, AMAX_CEIL = 3.402823466e+38f; /* docs/protocol.md, arithmetic */

int th_dtype_bytes(epx_dtype_t d) { return d == EPX_F32 ? 4 : d == EPX_FP8_E4M3 ? 1 : 2; }

const char *th_dtype_name(epx_dtype_t d) {
    static const char *const names[] = {"f32", "bf16", "f16", "fp8"};
    return names[d];
}

int th_n_scales(const th_shape_t *s) { return (s->hidden + TH_SCALE_BLOCK - 1) / TH_SCALE_BLOCK; }

epx_dtype_t th_result_dtype(const th_shape_t *s) { return s->token == EPX_FP8_E4M3 ? s->combine : s->token; }

int th_has_scales(const th_shape_t *s) { return s->wire == EPX_FP8_E4M3; }

float th_load(epx_dtype_t d, const void *row, int i) {
    uint16_t h = 0;
    float f = 0;
    if (d == EPX_F32) {
        memcpy(&f, (const char *)row + 4 * (size_t)i, 4);
        return f;
    }
    if (d == EPX_FP8_E4M3) return epx_e4m3_to_f32(((const unsigned char *)row)[i]);
    memcpy(&h, (const char *)row + 2 * (size_t)i, 2);
    return d == EPX_BF16 ? epx_bf16_to_f32(h) : epx_f16_to_f32(h);
}

void th_store(epx_dtype_t d, void *row, int i, float v) {
    if (d == EPX_F32) {
        memcpy((char *)row + 4 * (size_t)i, &v, 4);
    } else if (d == EPX_FP8_E4M3) {
        ((unsigned char *)row)[i] = epx_f32_to_e4m3(v);
    } else {
        uint16_t h = d == EPX_BF16 ? epx_f32_to_bf16(v) : epx_f32_to_f16(v);
        memcpy((char *)row + 2 * (size_t)i, &h, 2);
    }
}

static float rounded(epx_dtype_t d, float v) {
    unsigned char cell[4];
    th_store(d, cell, 0, v);
    return th_load(d, cell, 0);
}

void th_quantise_row(const float *x, int n, unsigned char *out_q, float *out_scales) {
    for (int b = 0; b * TH_SCALE_BLOCK < n; b++) {
        int end = (b + 1) * TH_SCALE_BLOCK < n ? (b + 1) * TH_SCALE_BLOCK : n;
        float amax = AMAX_FLOOR;
        for (int i = b * TH_SCALE_BLOCK; i < end; i++)
            if (fabsf(x[i]) > amax) amax = fabsf(x[i]);
        if (amax > AMAX_CEIL) amax = AMAX_CEIL;
        float scale = amax / FP8_MAX;
        for (int i = b * TH_SCALE_BLOCK; i < end; i++) out_q[i] = epx_f32_to_e4m3(x[i] / scale);
        out_scales[b] = scale;
    }
}

void th_expert_row(const th_shape_t *s, int expert, const void *row, const float *scales, void *out) {
    float a = 0.31f + 0.17f * (float)(expert % 11), b = 0.013f * (float)(expert % 5) - 0.02f;
    for (int i = 0; i < s->hidden; i++) {
        float v = th_load(s->wire, row, i);
        if (scales) v = v * scales[i / TH_SCALE_BLOCK];
        float y = a * v;
        th_store(s->expert, out, i, y + b);
    }
}

static int slot_rank_of(const th_shape_t *s, int slot) {
    if (s->slot_rank) return s->slot_rank[slot];
    int base = s->n_experts / s->n_ranks, extra = s->n_experts % s->n_ranks;
    int in_long = extra * (base + 1); /* slots on ranks that have one more */
    return slot < in_long ? slot / (base + 1) : extra + (slot - in_long) / base;
}

static int expert_of(const th_shape_t *s, int slot) { return s->slot_expert ? s->slot_expert[slot] : slot; }

int th_owner(const th_shape_t *s, int expert) {
    for (int slot = 0; slot < s->n_experts; slot++)
        if (expert_of(s, slot) == expert) return slot_rank_of(s, slot);
    return -1;
}

static int names_expert(const th_shape_t *s, const th_batch_t *b, int t, int e) {
    for (int k = 0; k < s->top_k; k++)
        if (b->ids[t * s->top_k + k] == e) return 1;
    return 0;
}

static int names_rank(const th_shape_t *s, const int *owner, const th_batch_t *b, int t, int q) {
    for (int k = 0; k < s->top_k; k++) {
        int e = b->ids[t * s->top_k + k];
        if (e >= 0 && owner[e] == q) return 1;
    }
    return 0;
}

/* The row of token t as the wire carries it. */
static void wire_row(const th_shape_t *s, const th_batch_t *b, int t, unsigned char *out_row, float *out_scales) {
    const char *x = (const char *)b->x + (size_t)t * (size_t)s->hidden * (size_t)th_dtype_bytes(s->token);
    if (s->wire == s->token) {
        memcpy(out_row, x, (size_t)s->hidden * (size_t)th_dtype_bytes(s->wire));
        if (th_has_scales(s)) memcpy(out_scales, b->x_scale + t * th_n_scales(s), (size_t)th_n_scales(s) * sizeof(float));
        return;
    }
    float *f = malloc((size_t)s->hidden * sizeof *f);
    if (!f) abort();
    for (int i = 0; i < s->hidden; i++) f[i] = th_load(s->token, x, i);
    th_quantise_row(f, s->hidden, out_row, out_scales);
    free(f);
}

static void fill_lists(const th_shape_t *s, const th_batch_t *batches, th_expect_t *out) {
    size_t row_bytes = (size_t)s->hidden * (size_t)th_dtype_bytes(s->wire);
    for (int l = 0; l < out->n_local; l++) {
        out->expert_off[l] = out->n_rows;
        for (int q = 0; q < s->n_ranks; q++) {
            for (int t = 0; t < batches[q].n_tokens; t++) {
                if (!names_expert(s, &batches[q], t, out->local_expert[l])) continue;
                int i = out->n_rows++;
                out->entries[i] = (epx_list_entry_t){(uint32_t)q, (uint32_t)t};
                wire_row(s, &batches[q], t, out->rows + (size_t)i * row_bytes,
                         out->scales ? out->scales + (size_t)i * (size_t)th_n_scales(s) : NULL);
            }
        }
    }
    out->expert_off[out->n_local] = out->n_rows;
}

/* ys[k][h]: output of expert ids[k] for token t, as the expert dtype holds it. */
static void expert_outputs(const th_shape_t *s, const th_batch_t *b, int t, float *ys) {
    unsigned char *row = malloc((size_t)s->hidden * 8 + 8);
    float *scales = malloc((size_t)th_n_scales(s) * sizeof *scales);
    if (!row || !scales) abort();
    unsigned char *y = row + (size_t)s->hidden * 4;
    wire_row(s, b, t, row, scales);
    for (int k = 0; k < s->top_k; k++) {
        int e = b->ids[t * s->top_k + k];
        if (e < 0) continue;
        th_expert_row(s, e, row, th_has_scales(s) ? scales : NULL, y);
        for (int h = 0; h < s->hidden; h++) ys[(size_t)k * (size_t)s->hidden + (size_t)h] = th_load(s->expert, y, h);
    }
    free(scales);
    free(row);
}

static float sum_exact(const th_shape_t *s, const int32_t *ids, const float *w, const float *y) {
    float acc = 0.0f;
    for (int k = 0; k < s->top_k; k++)
        if (ids[k] >= 0) acc = fmaf(w[k], rounded(s->combine, y[(size_t)k * (size_t)s->hidden]), acc);
    return acc;
}

static float sum_partial(const th_shape_t *s, const int *owner, const int32_t *ids, const float *w, const float *y) {
    float acc = 0.0f;
    for (int q = 0; q < s->n_ranks; q++) {
        float part = 0.0f;
        int any = 0;
        for (int k = 0; k < s->top_k; k++) {
            if (ids[k] < 0 || owner[ids[k]] != q) continue;
            part = fmaf(w[k], y[(size_t)k * (size_t)s->hidden], part);
            any = 1;
        }
        if (any) acc = acc + rounded(s->combine, part);
    }
    return acc;
}

static int fill_result(const th_shape_t *s, const int *owner, const th_batch_t *b, int with_add, th_expect_t *out) {
    float *ys = malloc((size_t)s->top_k * (size_t)s->hidden * sizeof *ys);
    if (!ys) return -1;
    for (int t = 0; t < b->n_tokens; t++) {
        const int32_t *ids = b->ids + t * s->top_k;
        const float *w = b->weights + t * s->top_k;
        expert_outputs(s, b, t, ys);
        for (int h = 0; h < s->hidden; h++) {
            int at = t * s->hidden + h;
            float v = s->mode == EPX_COMBINE_EXACT ? sum_exact(s, ids, w, ys + h) : sum_partial(s, owner, ids, w, ys + h);
            if (with_add) v = v + th_load(th_result_dtype(s), b->add, at);
            th_store(th_result_dtype(s), out->result, at, v);
        }
    }
    free(ys);
    return 0;
}

static void fill_counters(const th_shape_t *s, const int *owner, const th_batch_t *batches, int rank, th_expect_t *out) {
    for (int q = 0; q < s->n_ranks; q++) {
        for (int t = 0; t < batches[rank].n_tokens; t++) out->rows_sent[q] += names_rank(s, owner, &batches[rank], t, q);
        for (int t = 0; t < batches[q].n_tokens; t++) out->rows_received[q] += names_rank(s, owner, &batches[q], t, rank);
        for (int t = 0; t < batches[q].n_tokens; t++)
            for (int e = 0; e < s->n_experts; e++) out->histogram[e] += names_expert(s, &batches[q], t, e);
    }
}

int th_oracle(const th_shape_t *s, const th_batch_t *batches, int rank, int with_add, th_expect_t *out) {
    memset(out, 0, sizeof *out);
    size_t n_tokens = 0, n_local = 0;
    int *owner = malloc((size_t)s->n_experts * sizeof *owner);
    out->local_expert = malloc((size_t)s->n_experts * sizeof(int32_t));
    if (!owner || !out->local_expert) goto err;
    for (int e = 0; e < s->n_experts; e++) owner[e] = th_owner(s, e);
    for (int slot = 0; slot < s->n_experts; slot++)
        if (slot_rank_of(s, slot) == rank) out->local_expert[n_local++] = expert_of(s, slot);
    for (int q = 0; q < s->n_ranks; q++) n_tokens += (size_t)batches[q].n_tokens;
    size_t h = (size_t)s->hidden;
    size_t per_token = (size_t)s->top_k < n_local ? (size_t)s->top_k : n_local; /* distinct local experts of a token */
    size_t cap = n_tokens * per_token + 1;
    out->n_local = (int)n_local;
    out->expert_off = calloc(n_local + 1, sizeof(int32_t));
    out->entries = malloc(cap * sizeof *out->entries);
    out->rows = malloc(cap * h * (size_t)th_dtype_bytes(s->wire));
    out->scales = !th_has_scales(s) ? NULL : malloc(cap * (size_t)th_n_scales(s) * sizeof(float));
    out->result = malloc((size_t)batches[rank].n_tokens * h * (size_t)th_dtype_bytes(th_result_dtype(s)) + 1);
    out->histogram = calloc((size_t)s->n_experts, sizeof(int32_t));
    if (!out->expert_off || !out->entries || !out->rows || !out->result || !out->histogram) goto err;
    if (th_has_scales(s) && !out->scales) goto err;
    fill_lists(s, batches, out);
    fill_counters(s, owner, batches, rank, out);
    if (fill_result(s, owner, &batches[rank], with_add, out) != 0) goto err;
    free(owner);
    return 0;
err:
    free(owner);
    th_expect_fini(out);
    return -1;
}

void th_expect_fini(th_expect_t *e) {
    free(e->local_expert);
    free(e->expert_off);
    free(e->entries);
    free(e->rows);
    free(e->scales);
    free(e->result);
    free(e->histogram);
    memset(e, 0, sizeof *e);
}
