/* Expert feed-forward over dispatched lists. Rows are read where the transport put them and packed once; gate, up and the
 * activation are one pass whose result is packed for down. Lists longer than the scratch are done in waves of rows. */
#include "base/status.h"
#include "engine/ops/cpu/cpu.h"

typedef struct {
    epx_cpu_ops_t *c;
    const epx_lists_t *lists;
    const epx_expert_weights_t *experts;
    int64_t hidden, ffn, ldxp, ldmid;
    int64_t wave0; /* list index of the wave's first row */
    int n_segments;
    float *out; /* of the wave's first row */
} job_t;

static const float *list_row(const epx_lists_t *l, int64_t i) {
    if (l->entries == NULL)
        return (const float *)(const void *)((const char *)l->row_base[0] + (uint64_t)i * l->row_stride_bytes);
    const epx_list_entry_t e = l->entries[i];
    return (const float *)(const void *)((const char *)l->row_base[e.src] + e.token * l->row_stride_bytes);
}

static void pack_item(void *ctx, int64_t segment, int thread) {
    const job_t *j = ctx;
    const epx_cpu_segment_t s = j->c->segments[segment];
    (void)thread;
    for (int64_t r = s.row0; r < s.row0 + s.n; r++)
        j->c->k->pack(list_row(j->lists, j->wave0 + r), j->hidden, epx_pack_order(&j->experts[s.expert].gate),
                      j->c->packed + r * j->ldxp);
}

static int min_int(int64_t a, int64_t b) { return (int)(a < b ? a : b); }

/* One row of interleaved gate and up to its packed middle. */
static void split_act(const job_t *j, const epx_expert_weights_t *w, int64_t n0, int n, const float *both, float *mid) {
    float gate[EPX_OPS_N_CHUNK], up[EPX_OPS_N_CHUNK];
    for (int i = 0; i < n; i++) {
        gate[i] = both[2 * i];
        up[i] = both[2 * i + 1];
        if (!epx_present(&w->gate_bias)) continue;
        gate[i] += epx_vector_at(&w->gate_bias, 2 * (n0 + i));
        up[i] += epx_vector_at(&w->gate_bias, 2 * (n0 + i) + 1);
    }
    j->c->k->act_pack(gate, up, n, w, mid + n0);
}

/* The same item when gate holds up too: twice the columns, as wide as both scratch blocks together. */
static void fused_gate_up(const job_t *j, epx_cpu_segment_t s, const epx_expert_weights_t *w, int64_t n0, float *both) {
    const int n = min_int(j->ffn - n0, EPX_OPS_N_CHUNK);
    epx_gemm_t g = {.w = &w->gate, .n0 = 2 * n0, .n = 2 * n, .ldxp = j->ldxp, .out = both, .ldo = 2 * EPX_OPS_N_CHUNK};
    for (int m0 = 0; m0 < s.n; m0 += EPX_OPS_M_CHUNK) {
        g.m = min_int(s.n - m0, EPX_OPS_M_CHUNK);
        g.xp = j->c->packed + (s.row0 + m0) * j->ldxp;
        j->c->k->gemm(&g);
        for (int i = 0; i < g.m; i++)
            split_act(j, w, n0, n, both + i * 2 * EPX_OPS_N_CHUNK, j->c->mid + (s.row0 + m0 + i) * j->ldmid);
    }
}

/* Item: EPX_OPS_N_CHUNK columns of the middle of one segment. */
static void gate_up_item(void *ctx, int64_t item, int thread) {
    const job_t *j = ctx;
    const int64_t n_chunks = epx_div_up(j->ffn, EPX_OPS_N_CHUNK), n0 = item % n_chunks * EPX_OPS_N_CHUNK;
    const epx_cpu_segment_t s = j->c->segments[item / n_chunks];
    const epx_expert_weights_t *w = &j->experts[s.expert];
    float *gate = epx_cpu_scratch(j->c, thread), *up = gate + EPX_OPS_M_CHUNK * EPX_OPS_N_CHUNK;
    if (!epx_present(&w->up)) {
        fused_gate_up(j, s, w, n0, gate);
        return;
    }
    epx_gemm_t g = {.n0 = n0, .n = min_int(j->ffn - n0, EPX_OPS_N_CHUNK), .ldxp = j->ldxp, .ldo = EPX_OPS_N_CHUNK};
    for (int m0 = 0; m0 < s.n; m0 += EPX_OPS_M_CHUNK) {
        g.m = min_int(s.n - m0, EPX_OPS_M_CHUNK);
        g.xp = j->c->packed + (s.row0 + m0) * j->ldxp;
        g.w = &w->gate, g.out = gate;
        j->c->k->gemm(&g);
        g.w = &w->up, g.out = up;
        j->c->k->gemm(&g);
        for (int i = 0; i < g.m; i++)
            j->c->k->act_pack(gate + i * EPX_OPS_N_CHUNK, up + i * EPX_OPS_N_CHUNK, g.n, w,
                              j->c->mid + (s.row0 + m0 + i) * j->ldmid + n0);
    }
}

/* Item: EPX_OPS_N_CHUNK columns of the output of one segment. */
static void down_item(void *ctx, int64_t item, int thread) {
    const job_t *j = ctx;
    const int64_t n_chunks = epx_div_up(j->hidden, EPX_OPS_N_CHUNK), n0 = item % n_chunks * EPX_OPS_N_CHUNK;
    const epx_cpu_segment_t s = j->c->segments[item / n_chunks];
    epx_gemm_t g = {.w = &j->experts[s.expert].down,
                    .n0 = n0,
                    .n = min_int(j->hidden - n0, EPX_OPS_N_CHUNK),
                    .ldxp = j->ldmid,
                    .ldo = j->hidden};
    const epx_weight_t *bias = &j->experts[s.expert].down_bias;
    (void)thread;
    for (int m0 = 0; m0 < s.n; m0 += EPX_OPS_M_CHUNK) {
        g.m = min_int(s.n - m0, EPX_OPS_M_CHUNK);
        g.xp = j->c->mid + (s.row0 + m0) * j->ldmid;
        g.out = j->out + (s.row0 + m0) * j->hidden + n0;
        j->c->k->gemm(&g);
        if (epx_present(bias)) epx_cpu_add_bias(bias, n0, g.n, g.m, g.out, g.ldo);
    }
}

/* Segments of the rows [wave0, wave0 + n) of the list; `e` is the expert of row wave0 or an earlier, finished one. */
static void cut_segments(job_t *j, int32_t *e, int64_t n) {
    const int32_t *off = j->lists->expert_off;
    int64_t r = 0;
    for (j->n_segments = 0; r < n;) {
        while (off[*e + 1] <= j->wave0 + r) ++*e;
        const int64_t left = off[*e + 1] - (j->wave0 + r);
        const epx_cpu_segment_t s = {.expert = *e, .row0 = (int32_t)r, .n = min_int(left, n - r)};
        EPX_ASSERT(!epx_present(&j->experts[*e].up) ||
                   epx_pack_order(&j->experts[*e].gate) == epx_pack_order(&j->experts[*e].up));
        j->c->segments[j->n_segments++] = s;
        r += s.n;
    }
}

void epx_cpu_experts(epx_ops_t *ops, const epx_lists_t *lists, const epx_expert_weights_t *experts, int64_t hidden, int64_t ffn,
                     void *out) {
    epx_cpu_ops_t *c = epx_cpu(ops);
    job_t j = {.c = c, .lists = lists, .experts = experts, .hidden = hidden, .ffn = ffn};
    j.ldxp = epx_cpu_packed_len(c, hidden);
    j.ldmid = epx_cpu_packed_len(c, ffn);
    EPX_ASSERT(j.ldxp <= c->max_k && j.ldmid <= c->max_ffn);
    int32_t e = 0;
    for (int64_t n; j.wave0 < lists->n_rows; j.wave0 += n) {
        n = lists->n_rows - j.wave0 < c->max_rows ? lists->n_rows - j.wave0 : c->max_rows;
        j.out = (float *)out + j.wave0 * hidden;
        cut_segments(&j, &e, n);
        const double weights = (double)hidden * (double)ffn, bytes = 4.0 * weights * j.n_segments;
        const int parallel = epx_cpu_worth(bytes, 4.0 * weights * (double)n);
        epx_pool_run(c->pool, pack_item, &j, j.n_segments, epx_cpu_worth(8.0 * (double)(n * hidden), 0));
        epx_pool_run(c->pool, gate_up_item, &j, j.n_segments * epx_div_up(ffn, EPX_OPS_N_CHUNK), parallel);
        epx_pool_run(c->pool, down_item, &j, j.n_segments * epx_div_up(hidden, EPX_OPS_N_CHUNK), parallel);
    }
}

/* One expert that owns every row, in the order of x. Entries would be the identity, so a NULL entries pointer is taken as row
 * i = (row_base[0], i). */
void epx_cpu_ffn(epx_ops_t *ops, const void *x, const epx_expert_weights_t *w, int64_t n_rows, int64_t hidden, int64_t ffn,
                 float *out) {
    const int32_t off[2] = {0, (int32_t)n_rows};
    const void *base[1] = {x};
    const epx_lists_t one = {.n_local_experts = 1,
                             .n_rows = (int32_t)n_rows,
                             .expert_off = off,
                             .entries = NULL,
                             .row_base = base,
                             .row_stride_bytes = (uint64_t)hidden * sizeof(float)};
    epx_cpu_experts(ops, &one, w, hidden, ffn, out);
}
