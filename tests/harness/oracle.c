/* The independent oracle: see oracle.h. */
#include "tests/harness/oracle.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "tests/harness/batch.h"

static const float FP8_MAX = 448.0f;
static const float AMAX_FLOOR = 1e-12f, AMAX_CEIL = 3.402823466e+38f; /* docs/protocol.md, arithmetic */

int th_dtype_bytes(epx_dtype_t d) { return d == EPX_F32 ? 4 : d == EPX_FP8_E4M3 ? 1 : 2; }

const char *th_dtype_name(epx_dtype_t d) {
    static const char *const names[] = {"f32", "bf16", "f16", "fp8"};
    return names[d];
}

int th_scale_block(const th_shape_t *s) { return s->scale_block ? s->scale_block : 128; }

static int n_blocks(const th_shape_t *s) { return (s->hidden + th_scale_block(s) - 1) / th_scale_block(s); }

int th_scale_words(const th_shape_t *s) {
    if (!th_has_scales(s)) return 0;
    return s->scale_format == EPX_SCALE_F32 ? n_blocks(s) : (n_blocks(s) + 3) / 4;
}

float th_scale_at(const th_shape_t *s, const uint32_t *words, int i) {
    int b = i / th_scale_block(s);
    float f;
    if (s->scale_format == EPX_SCALE_UE8M0) return ldexpf(1.0f, (int)(words[b / 4] >> 8 * (b % 4) & 255u) - 127);
    memcpy(&f, &words[b], sizeof f);
    return f;
}

/* The scales of a row as they travel. */
static void store_scales(const th_shape_t *s, const float *scales, uint32_t *out_words) {
    memset(out_words, 0, (size_t)th_scale_words(s) * sizeof *out_words);
    for (int b = 0; b < n_blocks(s); b++) {
        uint32_t code = 0;
        if (s->scale_format == EPX_SCALE_F32) memcpy(&out_words[b], &scales[b], sizeof *out_words);
        else
            while (ldexpf(1.0f, (int)code - 127) < scales[b]) code++;
        if (s->scale_format == EPX_SCALE_UE8M0) out_words[b / 4] |= code << 8 * (b % 4);
    }
}

epx_dtype_t th_result_dtype(const th_shape_t *s) {
    if (s->token != EPX_FP8_E4M3) return s->token;
    return s->combine != EPX_FP8_E4M3 ? s->combine : s->expert;
}

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

void th_quantise_row(const float *x, int n, int block, epx_scale_format_t format, unsigned char *out_q, float *out_scales) {
    for (int b = 0; b * block < n; b++) {
        int end = (b + 1) * block < n ? (b + 1) * block : n;
        float amax = AMAX_FLOOR, power = 0x1p-126f;
        for (int i = b * block; i < end; i++)
            if (fabsf(x[i]) > amax) amax = fabsf(x[i]);
        if (amax > AMAX_CEIL) amax = AMAX_CEIL;
        float scale = amax / FP8_MAX;
        while (power < scale) power *= 2;
        if (format == EPX_SCALE_UE8M0) scale = power;
        for (int i = b * block; i < end; i++) out_q[i] = epx_f32_to_e4m3(x[i] / scale);
        out_scales[b] = scale;
    }
}

/* The row as the combine dtype carries it. */
static void round_row(const th_shape_t *s, float *row) {
    unsigned char cell[4], *q = malloc((size_t)s->hidden);
    float *scales = malloc((size_t)n_blocks(s) * sizeof *scales);
    if (!q || !scales) abort();
    if (s->combine == EPX_FP8_E4M3) th_quantise_row(row, s->hidden, th_scale_block(s), s->scale_format, q, scales);
    for (int i = 0; i < s->hidden; i++) {
        if (s->combine != EPX_FP8_E4M3) {
            th_store(s->combine, cell, 0, row[i]);
            row[i] = th_load(s->combine, cell, 0);
        } else {
            row[i] = th_load(EPX_FP8_E4M3, q, i) * scales[i / th_scale_block(s)];
        }
    }
    free(scales);
    free(q);
}

void th_expert_row(const th_shape_t *s, int expert, const void *row, const uint32_t *scales, void *out) {
    float a = 0.31f + 0.17f * (float)(expert % 11), b = 0.013f * (float)(expert % 5) - 0.02f;
    for (int i = 0; i < s->hidden; i++) {
        float v = th_load(s->wire, row, i);
        if (scales) v = v * th_scale_at(s, scales, i);
        float y = a * v;
        th_store(s->expert, out, i, y + b);
    }
}

int th_n_slots(const th_shape_t *s) { return s->n_slots ? s->n_slots : s->n_experts; }

int th_replicate(const th_shape_t *s) { return s->replicate ? s->replicate : 1; }

static int is_dead(const th_shape_t *s, int rank) { return s->dead >> rank & 1u; }

static int slot_rank_of(const th_shape_t *s, int slot) {
    if (s->slot_rank) return s->slot_rank[slot];
    int base = th_n_slots(s) / s->n_ranks, extra = th_n_slots(s) % s->n_ranks;
    int in_long = extra * (base + 1); /* slots on ranks that have one more */
    return slot < in_long ? slot / (base + 1) : extra + (slot - in_long) / base;
}

static int expert_of(const th_shape_t *s, int slot) { return s->slot_expert ? s->slot_expert[slot] : slot % s->n_experts; }

/* The slot that computes expert e for token t of source q: the n-th of its living slots, n by a hash; -1: none. */
static int serving_slot(const th_shape_t *s, int e, int q, int t) {
    int n = 0, slot = 0;
    for (int i = 0; i < th_n_slots(s); i++) n += expert_of(s, i) == e && !is_dead(s, slot_rank_of(s, i));
    if (n == 0) return -1;
    uint64_t h = th_mix((uint64_t)q << 32 | (uint64_t)t, 0) >> 32;
    for (int skip = (int)(h * (uint64_t)n >> 32);; slot++)
        if (expert_of(s, slot) == e && !is_dead(s, slot_rank_of(s, slot)) && skip-- == 0) return slot;
}

static int serving_rank(const th_shape_t *s, int e, int q, int t) {
    int slot = e < 0 ? -1 : serving_slot(s, e, q, t);
    return slot < 0 ? -1 : slot_rank_of(s, slot);
}

/* Tokens are those of the first rank of each group of `replicate`; all of them hold the same. */
static int source_of(const th_shape_t *s, int rank) { return rank / th_replicate(s) * th_replicate(s); }

/* Whose copy `reader` reads: its own, else holder number reader % replicate, or the next living one. */
static int holder_of(const th_shape_t *s, int source, int reader) {
    int n = th_replicate(s), at = source_of(s, reader) == source ? reader : source + reader % n;
    for (int i = 0; i < n; i++, at = source + (at - source + 1) % n)
        if (!is_dead(s, at)) return at;
    return -1;
}

static int n_tokens_of(const th_shape_t *s, const th_batch_t *batches, int q, int reader) {
    return source_of(s, q) != q || holder_of(s, q, reader) < 0 ? 0 : batches[q].n_tokens;
}

static int names_expert(const th_shape_t *s, const th_batch_t *b, int t, int e) {
    for (int k = 0; k < s->top_k; k++)
        if (b->ids[t * s->top_k + k] == e) return 1;
    return 0;
}

static int names_rank(const th_shape_t *s, const th_batch_t *b, int source, int t, int q) {
    for (int k = 0; k < s->top_k; k++)
        if (serving_rank(s, b->ids[t * s->top_k + k], source, t) == q) return 1;
    return 0;
}

/* The row of token t as the wire carries it. */
static void wire_row(const th_shape_t *s, const th_batch_t *b, int t, unsigned char *out_row, uint32_t *out_words) {
    const char *x = (const char *)b->x + (size_t)t * (size_t)s->hidden * (size_t)th_dtype_bytes(s->token);
    size_t n_words = (size_t)th_scale_words(s);
    if (s->wire == s->token) {
        memcpy(out_row, x, (size_t)s->hidden * (size_t)th_dtype_bytes(s->wire));
        if (th_has_scales(s)) memcpy(out_words, b->x_scale + (size_t)t * n_words, n_words * sizeof *out_words);
        return;
    }
    float *f = malloc((size_t)s->hidden * sizeof *f), *scales = malloc((size_t)n_blocks(s) * sizeof *scales);
    if (!f || !scales) abort();
    for (int i = 0; i < s->hidden; i++) f[i] = th_load(s->token, x, i);
    th_quantise_row(f, s->hidden, th_scale_block(s), s->scale_format, out_row, scales);
    store_scales(s, scales, out_words);
    free(scales);
    free(f);
}

static void fill_lists(const th_shape_t *s, const th_batch_t *batches, int rank, const int *local_slot, th_expect_t *out) {
    size_t row_bytes = (size_t)s->hidden * (size_t)th_dtype_bytes(s->wire);
    for (int l = 0; l < out->n_local; l++) {
        out->expert_off[l] = out->n_rows;
        for (int q = 0; q < s->n_ranks; q++) {
            for (int t = 0; t < n_tokens_of(s, batches, q, rank); t++) {
                if (!names_expert(s, &batches[q], t, out->local_expert[l])) continue;
                if (serving_slot(s, out->local_expert[l], q, t) != local_slot[l]) continue;
                int i = out->n_rows++;
                out->entries[i] = (epx_list_entry_t){(uint32_t)q, (uint32_t)t};
                wire_row(s, &batches[q], t, out->rows + (size_t)i * row_bytes,
                         out->scales ? out->scales + (size_t)i * (size_t)th_scale_words(s) : NULL);
            }
        }
    }
    out->expert_off[out->n_local] = out->n_rows;
}

/* ys[k][h]: output of expert ids[k] for token t, as the expert dtype holds it. */
static void expert_outputs(const th_shape_t *s, const th_batch_t *b, int t, float *ys) {
    unsigned char *row = malloc((size_t)s->hidden * 8 + 8);
    uint32_t *scales = malloc((size_t)th_scale_words(s) * sizeof *scales + 1);
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

/* acc[h]: K rounded rows in k order. */
static void sum_exact(const th_shape_t *s, const int *ranks, const float *w, float *ys, float *acc) {
    for (int k = 0; k < s->top_k; k++) {
        float *y = ys + (size_t)k * (size_t)s->hidden;
        if (ranks[k] < 0) continue;
        round_row(s, y);
        for (int h = 0; h < s->hidden; h++) acc[h] = fmaf(w[k], y[h], acc[h]);
    }
}

/* acc[h]: one rounded sum a rank, in rank order. */
static void sum_partial(const th_shape_t *s, const int *ranks, const float *w, const float *ys, float *acc) {
    size_t n = (size_t)s->hidden;
    float *part = malloc(n * sizeof *part);
    if (!part) abort();
    for (int q = 0; q < s->n_ranks; q++) {
        int any = 0;
        memset(part, 0, n * sizeof *part);
        for (int k = 0; k < s->top_k; k++) {
            if (ranks[k] != q) continue;
            for (size_t h = 0; h < n; h++) part[h] = fmaf(w[k], ys[(size_t)k * n + h], part[h]);
            any = 1;
        }
        if (any) round_row(s, part);
        for (size_t h = 0; any && h < n; h++) acc[h] = acc[h] + part[h];
    }
    free(part);
}

/* Ranks that compute the places of a token (-1: none) and the weights in force; returns how many places are missing. */
static int places_of(const th_shape_t *s, const th_batch_t *b, int source, int t, int *ranks, float *w) {
    float all = 0, there = 0;
    int missing = 0;
    for (int k = 0; k < s->top_k; k++) {
        int id = b->ids[t * s->top_k + k];
        w[k] = b->weights[t * s->top_k + k];
        ranks[k] = serving_rank(s, id, source, t);
        if (id < 0) continue;
        all += w[k];
        if (ranks[k] >= 0) there += w[k];
        else missing++;
    }
    if (!s->renormalize || missing == 0 || there == 0.0f) return missing;
    float factor = all / there;
    for (int k = 0; k < s->top_k; k++) w[k] = w[k] * factor;
    return missing;
}

static int fill_result(const th_shape_t *s, const th_batch_t *b, int rank, int with_add, th_expect_t *out) {
    float *ys = malloc((size_t)s->top_k * (size_t)s->hidden * sizeof *ys), *acc = malloc((size_t)s->hidden * sizeof *acc);
    for (int t = 0; ys && acc && t < b->n_tokens; t++) {
        float w[EPX_MAX_TOP_K];
        int ranks[EPX_MAX_TOP_K];
        out->missing[t] = (uint8_t)places_of(s, b, source_of(s, rank), t, ranks, w);
        out->n_missing += out->missing[t] != 0;
        expert_outputs(s, b, t, ys);
        memset(acc, 0, (size_t)s->hidden * sizeof *acc);
        if (s->mode == EPX_COMBINE_EXACT) sum_exact(s, ranks, w, ys, acc);
        else sum_partial(s, ranks, w, ys, acc);
        for (int h = 0; h < s->hidden; h++) {
            int at = t * s->hidden + h;
            if (with_add) acc[h] = acc[h] + th_load(th_result_dtype(s), b->add, at);
            th_store(th_result_dtype(s), out->result, at, acc[h]);
        }
    }
    int rc = ys && acc ? 0 : -1;
    free(acc);
    free(ys);
    return rc;
}

static void fill_counters(const th_shape_t *s, const th_batch_t *batches, int rank, th_expect_t *out) {
    int source = source_of(s, rank);
    for (int q = 0; q < s->n_ranks; q++) {
        if (!is_dead(s, q) && holder_of(s, source, q) == rank)
            for (int t = 0; t < batches[rank].n_tokens; t++) out->rows_sent[q] += names_rank(s, &batches[rank], source, t, q);
        for (int t = 0; t < n_tokens_of(s, batches, q, rank); t++) {
            out->rows_received[holder_of(s, q, rank)] += names_rank(s, &batches[q], q, t, rank);
            for (int e = 0; e < s->n_experts; e++) out->histogram[e] += names_expert(s, &batches[q], t, e);
        }
    }
}

int th_oracle(const th_shape_t *s, const th_batch_t *batches, int rank, int with_add, th_expect_t *out) {
    memset(out, 0, sizeof *out);
    size_t n_tokens = 0, n_local = 0, h = (size_t)s->hidden, own = (size_t)batches[rank].n_tokens;
    int *local_slot = malloc((size_t)th_n_slots(s) * sizeof *local_slot);
    out->local_expert = malloc((size_t)th_n_slots(s) * sizeof(int32_t));
    if (!local_slot || !out->local_expert) goto err;
    for (int slot = 0; slot < th_n_slots(s); slot++) {
        if (slot_rank_of(s, slot) != rank) continue;
        local_slot[n_local] = slot;
        out->local_expert[n_local++] = expert_of(s, slot);
    }
    for (int q = 0; q < s->n_ranks; q++) n_tokens += (size_t)n_tokens_of(s, batches, q, rank);
    size_t per_token = (size_t)s->top_k < n_local ? (size_t)s->top_k : n_local; /* distinct local experts of a token */
    size_t cap = n_tokens * per_token + 1;
    out->n_local = (int)n_local;
    out->expert_off = calloc(n_local + 1, sizeof(int32_t));
    out->entries = malloc(cap * sizeof *out->entries);
    out->rows = malloc(cap * h * (size_t)th_dtype_bytes(s->wire));
    out->scales = !th_has_scales(s) ? NULL : malloc(cap * (size_t)th_scale_words(s) * sizeof(uint32_t));
    out->result = malloc(own * h * (size_t)th_dtype_bytes(th_result_dtype(s)) + 1);
    out->missing = calloc(own + 1, 1);
    out->histogram = calloc((size_t)s->n_experts, sizeof(int32_t));
    if (!out->expert_off || !out->entries || !out->rows || !out->result || !out->missing || !out->histogram) goto err;
    if (th_has_scales(s) && !out->scales) goto err;
    fill_lists(s, batches, rank, local_slot, out);
    fill_counters(s, batches, rank, out);
    if (fill_result(s, &batches[rank], rank, with_add, out) != 0) goto err;
    free(local_slot);
    return 0;
err:
    free(local_slot);
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
    free(e->missing);
    free(e->histogram);
    memset(e, 0, sizeof *e);
}
