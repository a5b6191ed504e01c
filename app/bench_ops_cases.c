/* The operations that `epx bench ops` measures: weights in rotation, so that they come from memory as in a model, and inputs.
 * Not here: timing, output. */
#include <stdlib.h>
#include <string.h>

#include "app/bench_ops.h"
#include "base/philox.h"

enum { PAGE = 16, PATTERN = 65536 };

typedef struct {
    const bench_ops_settings_t *o;
    epx_ops_t *ops;
    epx_wtype_t dtype;
    int64_t n_rows;
    float *x, *out;
} common_t;

const char *bench_ops_dtype_name(epx_wtype_t dtype) { return dtype == EPX_W_F32 ? "f32" : dtype == EPX_W_BF16 ? "bf16" : "fp8"; }

static size_t element_bytes(epx_wtype_t t) { return t == EPX_W_F32 ? 4 : t == EPX_W_BF16 ? 2 : 1; }

/* Small normal numbers of both signs in any of the three types. */
static void fill(void *data, int64_t n, epx_wtype_t t, uint64_t seed) {
    for (int64_t i = 0; i < n; i++) {
        const uint32_t u = epx_philox_u32(seed, (uint64_t)i / 4) >> (i % 4 * 8);
        const float f = ((float)(u & 0xFF) - 127.5f) * 0x1p-12f;
        uint32_t bits;
        memcpy(&bits, &f, sizeof bits);
        if (t == EPX_W_F32) ((uint32_t *)data)[i] = bits;
        else if (t == EPX_W_BF16) ((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
        else ((uint8_t *)data)[i] = (uint8_t)((u & 0x87) | 0x28); /* 2^-2 to 2^-1: never NaN */
    }
}

static void *make(int64_t n, epx_wtype_t t, uint64_t seed) {
    const size_t bytes = (size_t)n * element_bytes(t);
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (p == NULL) {
        (void)epx_fail(EPX_ERR_NOMEM, "bench ops: %zu bytes wanted", bytes);
        return NULL;
    }
    const int64_t drawn = n < PATTERN ? n : PATTERN;
    const size_t pattern = (size_t)drawn * element_bytes(t);
    fill(p, drawn, t, seed);
    for (size_t at = pattern; at < bytes; at += pattern) memcpy((char *)p + at, p, bytes - at < pattern ? bytes - at : pattern);
    return p;
}

/* Copies of `bytes` that make up the footprint, at least one. */
static int64_t n_copies(const bench_ops_settings_t *o, double bytes) {
    const double n = (double)o->footprint_mib * 1048576.0 / bytes;
    return n < 1 ? 1 : (int64_t)n;
}

/* ---- linear ---- */

typedef struct {
    common_t c;
    char *data;
    float *scale;
    int64_t n, k, copies;
} linear_t;

static epx_weight_t weight(const char *data, int64_t offset, int64_t n, int64_t k, epx_wtype_t t, const float *scale) {
    return (epx_weight_t){.data = data + (size_t)offset * element_bytes(t),
                          .type = t,
                          .n = n,
                          .k = k,
                          .scale = t == EPX_W_F8_E4M3 ? scale : NULL,
                          .scale_type = EPX_W_F32};
}

/* One factor for each block of the largest matrix. */
static float *scales(int64_t n, int64_t k) {
    const int64_t blocks = ((n + EPX_W_SCALE_BLOCK - 1) / EPX_W_SCALE_BLOCK) * ((k + EPX_W_SCALE_BLOCK - 1) / EPX_W_SCALE_BLOCK);
    return make(blocks, EPX_W_F32, 3);
}

static void run_linear(void *ctx, int64_t turn) {
    const linear_t *l = ctx;
    const epx_weight_t w = weight(l->data, turn % l->copies * l->n * l->k, l->n, l->k, l->c.dtype, l->scale);
    epx_ops_linear(l->c.ops, l->c.x, l->k, &w, NULL, l->c.n_rows, l->c.out, l->n);
}

static epx_status_t linear_case(const common_t *c, const char *op, int64_t n, int64_t k, bench_ops_each_fn each, void *ctx) {
    const double bytes = (double)(n * k) * (double)element_bytes(c->dtype);
    linear_t l = {.c = *c, .n = n, .k = k, .copies = n_copies(c->o, bytes)};
    bench_ops_case_t b = {.op = op,
                          .dtype = bench_ops_dtype_name(c->dtype),
                          .n_rows = c->n_rows,
                          .flops = 2.0 * (double)(n * k * c->n_rows),
                          .bytes = bytes,
                          .run = run_linear,
                          .ctx = &l};
    l.data = make(n * k * l.copies, c->dtype, 1);
    l.scale = scales(n, k);
    epx_status_t s = l.data && l.scale ? each(ctx, &b) : EPX_ERR_NOMEM;
    free(l.data);
    free(l.scale);
    return s;
}

/* ---- experts ---- */

typedef struct {
    common_t c;
    char *data;
    float *scale;
    int64_t copies;
    epx_expert_weights_t *w; /* [copies, experts] */
    int32_t *off;            /* [experts + 1] */
    epx_list_entry_t *entries;
    const void *row_base[1];
} experts_t;

static void run_experts(void *ctx, int64_t turn) {
    const experts_t *e = ctx;
    const bench_ops_settings_t *o = e->c.o;
    const epx_lists_t lists = {.n_local_experts = (int32_t)o->experts,
                               .n_rows = (int32_t)(e->c.n_rows * o->top_k),
                               .expert_off = e->off,
                               .entries = e->entries,
                               .row_base = e->row_base,
                               .row_stride_bytes = (uint64_t)o->hidden * sizeof(float)};
    epx_ops_experts(e->c.ops, &lists, e->w + turn % e->copies * o->experts, o->hidden, o->ffn, e->c.out);
}

/* top_k different experts for each row, drawn uniformly; lists by expert, then row. Returns the experts that got rows. */
static int64_t draw_lists(experts_t *e) {
    const int64_t n = e->c.o->experts, k = e->c.o->top_k, m = e->c.n_rows;
    int64_t n_entries = 0, n_hit = 0;
    for (int64_t x = 0; x < n; x++) {
        const int64_t before = n_entries;
        e->off[x] = (int32_t)n_entries;
        for (int64_t r = 0; r < m; r++) {
            /* a random start and step that is odd: k different experts when n is a power of two, else k in a row */
            const int64_t start = epx_philox_u32((uint64_t)e->c.o->seed, (uint64_t)r) % (uint32_t)n;
            const int64_t place = (x - start + n) % n;
            if (place < k) e->entries[n_entries++] = (epx_list_entry_t){.src = 0, .token = (uint32_t)r};
        }
        n_hit += n_entries > before;
    }
    e->off[n] = (int32_t)n_entries;
    return n_hit;
}

static epx_status_t fill_experts(experts_t *e) {
    const bench_ops_settings_t *o = e->c.o;
    const int64_t one = o->hidden * o->ffn, n = o->experts * e->copies;
    e->data = make(3 * one * n, e->c.dtype, 2);
    e->scale = scales(o->hidden > o->ffn ? o->hidden : o->ffn, o->hidden > o->ffn ? o->hidden : o->ffn);
    e->w = calloc((size_t)n, sizeof *e->w);
    e->off = calloc((size_t)o->experts + 1, sizeof *e->off);
    e->entries = calloc((size_t)(e->c.n_rows * o->top_k), sizeof *e->entries);
    if (!e->data || !e->scale || !e->w || !e->off || !e->entries) return epx_fail(EPX_ERR_NOMEM, "bench ops: experts");
    for (int64_t i = 0; i < n; i++) {
        e->w[i].gate = weight(e->data, 3 * i * one, o->ffn, o->hidden, e->c.dtype, e->scale);
        e->w[i].up = weight(e->data, (3 * i + 1) * one, o->ffn, o->hidden, e->c.dtype, e->scale);
        e->w[i].down = weight(e->data, (3 * i + 2) * one, o->hidden, o->ffn, e->c.dtype, e->scale);
    }
    e->row_base[0] = e->c.x;
    return EPX_OK;
}

static epx_status_t experts_case(const common_t *c, bench_ops_each_fn each, void *ctx) {
    const bench_ops_settings_t *o = c->o;
    const double one = 3.0 * (double)(o->hidden * o->ffn), all = one * (double)o->experts * (double)element_bytes(c->dtype);
    experts_t e = {.c = *c, .copies = n_copies(o, all)};
    bench_ops_case_t b = {.op = "experts", .dtype = bench_ops_dtype_name(c->dtype), .n_rows = c->n_rows, .run = run_experts};
    epx_status_t s = fill_experts(&e);
    if (s >= 0) {
        b.ctx = &e;
        b.bytes = (double)draw_lists(&e) * one * (double)element_bytes(c->dtype);
        b.flops = 2.0 * one * (double)(c->n_rows * o->top_k);
        s = each(ctx, &b);
    }
    free(e.data);
    free(e.scale);
    free(e.w);
    free(e.off);
    free(e.entries);
    return s;
}

/* ---- attention ---- */

typedef struct {
    common_t c;
    epx_kv_layer_t kv;
    epx_attn_t attn;
    epx_attn_row_t *rows;
    int32_t *tables; /* [sequences, pages of a sequence] */
    int64_t copies, layer_floats;
} attention_t;

static void run_attention(void *ctx, int64_t turn) {
    const attention_t *a = ctx;
    epx_kv_layer_t kv = a->kv;
    kv.k_pages += turn % a->copies * a->layer_floats * 2;
    kv.v_pages = kv.k_pages + a->layer_floats;
    const int64_t width = a->c.o->heads * a->c.o->head_dim;
    epx_ops_attention(a->c.ops, &a->attn, a->c.x, width, a->rows, a->c.n_rows, &kv, a->c.out, width);
}

/* n_rows sequences of `context` tokens with one new row each, or one sequence whose last n_rows rows are new. */
static epx_status_t attention_case(const common_t *c, int decode, bench_ops_each_fn each, void *ctx) {
    const bench_ops_settings_t *o = c->o;
    const int64_t n_seqs = decode ? c->n_rows : 1, pages = (o->context + PAGE - 1) / PAGE;
    const double kv_bytes = (double)(n_seqs * o->context * o->kv_heads * o->head_dim) * 2 * sizeof(float);
    attention_t a = {.c = *c, .layer_floats = n_seqs * pages * PAGE * o->kv_heads * o->head_dim};
    double read = 0;
    if (!decode && c->n_rows > o->context) return EPX_OK;
    a.copies = n_copies(o, kv_bytes);
    a.attn = (epx_attn_t){.n_heads = (int)o->heads, .scale = 0.1f};
    a.kv = (epx_kv_layer_t){.page_size = PAGE, .n_kv_heads = (int32_t)o->kv_heads, .head_dim = (int32_t)o->head_dim};
    a.kv.k_pages = make(2 * a.layer_floats * a.copies, EPX_W_F32, 4);
    a.rows = calloc((size_t)c->n_rows, sizeof *a.rows);
    a.tables = calloc((size_t)(n_seqs * pages), sizeof *a.tables);
    epx_status_t s = a.kv.k_pages && a.rows && a.tables ? EPX_OK : epx_fail(EPX_ERR_NOMEM, "bench ops: attention");
    for (int64_t i = 0; s >= 0 && i < n_seqs * pages; i++) a.tables[i] = (int32_t)i;
    for (int64_t i = 0; s >= 0 && i < c->n_rows; i++) {
        a.rows[i].block_table = a.tables + (decode ? i * pages : 0);
        a.rows[i].position = (int32_t)(decode ? o->context - 1 : o->context - c->n_rows + i);
        read += a.rows[i].position + 1;
    }
    bench_ops_case_t b = {.op = decode ? "attention, decode" : "attention, prefill",
                          .dtype = "f32",
                          .n_rows = c->n_rows,
                          .flops = 4.0 * read * (double)(o->heads * o->head_dim),
                          .bytes = kv_bytes,
                          .run = run_attention,
                          .ctx = &a};
    if (s >= 0) s = each(ctx, &b);
    free(a.kv.k_pages);
    free(a.rows);
    free(a.tables);
    return s;
}

static int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

epx_status_t bench_ops_cases(const bench_ops_settings_t *o, epx_ops_t *ops, epx_wtype_t dtype, int64_t n_rows,
                             bench_ops_each_fn each, void *ctx) {
    const int64_t q = o->heads * o->head_dim, qkv = q + 2 * o->kv_heads * o->head_dim;
    common_t c = {.o = o, .ops = ops, .dtype = dtype, .n_rows = n_rows};
    c.x = make(n_rows * max_i64(q, o->hidden), EPX_W_F32, 5);
    c.out = make(n_rows * max_i64(qkv, o->hidden * o->top_k), EPX_W_F32, 6);
    epx_status_t s = c.x && c.out ? EPX_OK : EPX_ERR_NOMEM;
    if (s >= 0) s = linear_case(&c, "linear, qkv", qkv, o->hidden, each, ctx);
    if (s >= 0) s = linear_case(&c, "linear, o", o->hidden, q, each, ctx);
    if (s >= 0) s = experts_case(&c, each, ctx);
    if (s >= 0 && dtype != EPX_W_F8_E4M3) s = attention_case(&c, 1, each, ctx);
    if (s >= 0 && dtype != EPX_W_F8_E4M3) s = attention_case(&c, 0, each, ctx);
    free(c.x);
    free(c.out);
    return s;
}
