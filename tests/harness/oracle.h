/* What an exchange must give, computed by the book: one scalar pass over the global batch, no code of the library but the
 * number formats of base/half.h (tested on their own). Written from docs/protocol.md, not from lib/.
 * Pure: no library handle, no thread, no clock. */
#ifndef EPX_TESTS_HARNESS_ORACLE_H
#define EPX_TESTS_HARNESS_ORACLE_H

#include "epx/epx.h"

typedef struct {
    int n_ranks, max_tokens, hidden, top_k, n_experts;
    int n_slots, replicate; /* 0: n_experts and 1 */
    const int *slot_rank;   /* [n_slots] or NULL: even split, the first (n_slots % W) ranks get one more */
    const int *slot_expert; /* [n_slots] or NULL: slot % n_experts */
    uint32_t dead;          /* bit r: rank r is masked */
    int renormalize;
    epx_dtype_t token, wire, expert, combine; /* none is EPX_BYTES */
    epx_layout_t layout;
    epx_combine_t mode;
    epx_scale_format_t scale_format;
    epx_scale_layout_t scale_layout;
    int scale_block, align; /* 0: 128 and 1 */
} th_shape_t;

/* What one rank gives. Owned. */
typedef struct {
    int n_tokens;
    void *x;           /* [T, H] token dtype */
    uint32_t *x_scale; /* [T, scale words]; fp8 tokens only, else NULL */
    int32_t *ids;      /* [T, K] */
    float *weights;    /* [T, K] */
    void *add;         /* [T, H] result dtype; used when the case asks for it */
} th_batch_t;

/* What one rank must see. Owned. */
typedef struct {
    int n_local, n_rows;
    int32_t *local_expert;     /* [n_local] logical expert of each local slot */
    int32_t *expert_off;       /* [n_local + 1] */
    epx_list_entry_t *entries; /* [n_rows] */
    unsigned char *rows;       /* [n_rows, H] wire dtype */
    uint32_t *scales;          /* [n_rows, scale words]; fp8 wire only */
    unsigned char *result;     /* [T, H] result dtype */
    int n_missing;             /* tokens of this rank with a place that no living rank computes */
    uint8_t *missing;          /* [T] such places of each token */
    int32_t *histogram;        /* [E] */
    uint64_t rows_sent[64], rows_received[64];
} th_expect_t;

int th_dtype_bytes(epx_dtype_t d);
const char *th_dtype_name(epx_dtype_t d);
/* Channels of a scale block; 32-bit words that hold the scales of a row: a float each, or four codes. */
int th_scale_block(const th_shape_t *s);
int th_scale_words(const th_shape_t *s);
/* Scale of channel i. */
float th_scale_at(const th_shape_t *s, const uint32_t *words, int i);
/* Of combine's result: the token dtype, or, when tokens are fp8, the combine dtype, or the expert dtype if that is fp8 too. */
epx_dtype_t th_result_dtype(const th_shape_t *s);
/* Does the wire carry scales? */
int th_has_scales(const th_shape_t *s);
/* Element i of a row. */
float th_load(epx_dtype_t d, const void *row, int i);
void th_store(epx_dtype_t d, void *row, int i, float v);

/* Quantise one row of n values: scales[ceil(n / block)], q[n]. */
void th_quantise_row(const float *x, int n, int block, epx_scale_format_t format, unsigned char *out_q, float *out_scales);
/* The experts of the tests: out[h] = a(e) * row[h] + b(e) in f32, rounded to the expert dtype. scales: fp8 wire only. */
void th_expert_row(const th_shape_t *s, int expert, const void *row, const uint32_t *scales, void *out);
int th_n_slots(const th_shape_t *s);
int th_replicate(const th_shape_t *s);

/* What `rank` must see when every rank q gives batches[q]. with_add: the batches' add operand is used.
 * Returns 0; -1: no memory. th_expect_fini() frees. */
int th_oracle(const th_shape_t *s, const th_batch_t *batches, int rank, int with_add, th_expect_t *out);
void th_expect_fini(th_expect_t *e);

#endif
