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
        j->c->k->pack(list_row(j->lists, j->wave0 + r), j->hidden, j->experts[s.expert].gate.type, j->c->packed + r * j->ldxp);
}

static int min_int(int64_t a, int64_t b) { return (int)(a < b ? a : b); }

/* Item: EPX_OPS_N_CHUNK columns of the middle of one segment. */
static void gate_up_item(void *ctx, int64_t item, int thread) {
    const job_t *j = ctx;
    const int64_t n_chunks = epx_div_up(j->ffn, EPX_OPS_N_CHUNK), n0 = item % n_chunks * EPX_OPS_N_CHUNK;
    const epx_cpu_segment_t s = j->c->segments[item / n_chunks];
    const epx_expert_weights_t *w = &j->experts[s.expert];
    float *gate = epx_cpu_scratch(j->c, thread), *up = gate + EPX_OPS_M_CHUNK * EPX_OPS_N_CHUNK;
    epx_gemm_t g = {.n0 = n0, .n = min_int(j->ffn - n0, EPX_OPS_N_CHUNK), .ldxp = j->ldxp, .ldo = EPX_OPS_N_CHUNK};
    for (int m0 = 0; m0 < s.n; m0 += EPX_OPS_M_CHUNK) {
        g.m = min_int(s.n - m0, EPX_OPS_M_CHUNK);
        g.xp = j->c->packed + (s.row0 + m0) * j->ldxp;
        g.w = &w->gate, g.out = gate;
        j->c->k->gemm(&g);
        g.w = &w->up, g.out = up;
        j->c->k->gemm(&g);
        for (int i = 0; i < g.m; i++)
            j->c->k->silu_mul_pack(gate + i * EPX_OPS_N_CHUNK, up + i * EPX_OPS_N_CHUNK, g.n, w->down.type,
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
    (void)thread;
    for (int m0 = 0; m0 < s.n; m0 += EPX_OPS_M_CHUNK) {
        g.m = min_int(s.n - m0, EPX_OPS_M_CHUNK);
        g.xp = j->c->mid + (s.row0 + m0) * j->ldmid;
        g.out = j->out + (s.row0 + m0) * j->hidden + n0;
        j->c->k->gemm(&g);
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
        EPX_ASSERT(j->experts[*e].gate.type == j->experts[*e].up.type);
        j->c->segments[j->n_segments++] = s;
        r += s.n;
    }
}

void epx_cpu_experts(epx_ops_t *ops, const epx_lists_t *lists, const epx_expert_weights_t *experts, int64_t hidden, int64_t ffn,
                     float *out) {
    epx_cpu_ops_t *c = epx_cpu(ops);
    job_t j = {.c = c, .lists = lists, .experts = experts, .hidden = hidden, .ffn = ffn};
    j.ldxp = epx_cpu_packed_len(c, hidden);
    j.ldmid = epx_cpu_packed_len(c, ffn);
    EPX_ASSERT(j.ldxp <= c->max_k && j.ldmid <= c->max_ffn);
    int32_t e = 0;
    for (int64_t n; j.wave0 < lists->n_rows; j.wave0 += n) {
        n = lists->n_rows - j.wave0 < c->max_rows ? lists->n_rows - j.wave0 : c->max_rows;
        j.out = out + j.wave0 * hidden;
        cut_segments(&j, &e, n);
        const double weights = (double)hidden * (double)ffn, bytes = 4.0 * weights * j.n_segments;
        const int parallel = epx_cpu_worth(bytes, 4.0 * weights * (double)n);
        epx_pool_run(c->pool, pack_item, &j, j.n_segments, epx_cpu_worth(8.0 * (double)(n * hidden), 0));
        epx_pool_run(c->pool, gate_up_item, &j, j.n_segments * epx_div_up(ffn, EPX_OPS_N_CHUNK), parallel);
        epx_pool_run(c->pool, down_item, &j, j.n_segments * epx_div_up(hidden, EPX_OPS_N_CHUNK), parallel);
    }
}
