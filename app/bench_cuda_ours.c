/* The library's exchange in the CUDA bench: buffers of one plan, exchange 0 against the oracle, then graphs. */
#include <stdlib.h>
#include <string.h>

#include "app/bench_cuda.h"
#include "base/status.h"

enum { MOST_CHECKED = 64, TIMEOUT_S = 20 }; /* result rows compared of a rank and job; every received row is */

typedef struct {
    epx_plan_t *plan;
    epx_plan_info_t info;
    char *x, *out_x, *y, *result;
    int32_t *ids, *counts;
    float *weights, *scales;
} state_t;

static void close_state(state_t *s) {
    void *const all[] = {s->x, s->out_x, s->y, s->result, s->ids, s->counts, s->weights, s->scales};
    epx_plan_destroy(s->plan);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) cu_free(all[i]);
}

static epx_status_t make_plan(bc_rank_t *r, const bc_job_t *j, state_t *s) {
    epx_plan_config_t c;
    epx_plan_config_init(&c);
    c.max_tokens = j->n_tokens, c.hidden = j->hidden, c.top_k = j->top_k, c.n_experts = j->n_experts;
    c.token_dtype = EPX_BF16, c.wire_dtype = j->fp8 ? EPX_FP8_E4M3 : EPX_BF16;
    c.layout = j->fused ? EPX_LAYOUT_LISTS : EPX_LAYOUT_EXPERT_MAJOR;
    c.combine = j->fused ? EPX_COMBINE_REDUCED : j->exact ? EPX_COMBINE_EXACT : EPX_COMBINE_PARTIAL;
    c.n_blocks = j->n_blocks;
    c.timeout_ns = TIMEOUT_S * UINT64_C(1000000000);
    EPX_TRY(epx_plan_create(r->group, &c, &s->plan));
    s->info.size = sizeof s->info;
    return epx_plan_info(s->plan, &s->info);
}

static epx_status_t make_buffers(bc_rank_t *r, const bc_job_t *j, state_t *s) {
    const bc_input_t *in = &r->b->in[r->rank];
    size_t T = (size_t)j->n_tokens, H = (size_t)j->hidden, tk = BC_EXCHANGES * T * (size_t)j->top_k,
           rows = j->fused ? 0 : (size_t)s->info.n_local_experts * (size_t)s->info.row_cap;
    s->x = cu_alloc((T + BC_EXCHANGES) * H * 2);
    s->ids = cu_alloc(tk * 4);
    s->weights = cu_alloc(tk * 4);
    s->counts = cu_alloc((size_t)s->info.n_local_experts * 4);
    s->out_x = cu_alloc(rows * in->wire_bytes);
    s->scales = cu_alloc(rows * s->info.scale_words * 4);
    s->y = cu_alloc((j->fused ? (size_t)r->b->n_ranks * T : rows) * H * 2);
    s->result = cu_alloc(T * H * 2);
    if (!s->x || !s->ids || !s->weights || !s->counts || !s->out_x || !s->scales || !s->y || !s->result)
        return EPX_ERR_NOMEM; /* the message is there */
    EPX_TRY(cu_upload(&r->dev, s->x, in->x, (T + BC_EXCHANGES) * H * 2));
    EPX_TRY(cu_upload(&r->dev, s->ids, in->ids, tk * 4));
    return cu_upload(&r->dev, s->weights, in->weights, tk * 4);
}

static void fill_io(const bc_rank_t *r, const bc_job_t *j, const state_t *s, int i, epx_io_t *out, epx_io_t *back) {
    size_t tk = (size_t)j->n_tokens * (size_t)j->top_k;
    epx_io_init(out), epx_io_init(back);
    out->x = s->x + (size_t)i * (size_t)j->hidden * 2;
    out->ids = s->ids + (size_t)i * tk;
    out->weights = s->weights + (size_t)i * tk;
    out->n_tokens = j->n_tokens;
    out->out_counts = s->counts;
    if (!j->fused) out->out_x = s->out_x;
    if (!j->fused && j->fp8) out->out_scale = s->scales;
    back->x = s->y, back->out_x = s->result;
    out->stream = back->stream = r->dev.stream;
}

static epx_status_t dispatch(const bc_job_t *j, const state_t *s, const epx_io_t *io) {
    if (!j->separate) return epx_dispatch(s->plan, io);
    EPX_TRY(epx_dispatch_send(s->plan, io));
    return epx_dispatch_recv(s->plan, io);
}
static epx_status_t combine(const bc_job_t *j, const state_t *s, const epx_io_t *io) {
    if (!j->separate) return epx_combine(s->plan, io);
    EPX_TRY(epx_combine_send(s->plan, io));
    return epx_combine_recv(s->plan, io);
}

/* ---- exchange 0 against the oracle ---- */

static epx_status_t wrong(const bc_rank_t *r, const bc_job_t *j, const char *what, int a, int b) {
    return epx_fail(EPX_ERR_INTERNAL, "rank %d: wrong %s (%d, %d) at E %d K %d H %d T %d", r->rank, what, a, b, j->n_experts,
                    j->top_k, j->hidden, j->n_tokens);
}

static int names(const bc_job_t *j, const bc_input_t *in, int t, int e) {
    for (int k = 0; k < j->top_k; k++)
        if (in->ids[t * j->top_k + k] == e) return 1;
    return 0;
}

/* Rows of local expert e in order: compare what came and prepare what goes back. rows, y: room for the most rows of an expert. */
static epx_status_t check_expert(bc_rank_t *r, const bc_job_t *j, state_t *s, int e, char *rows, uint16_t *y, int32_t count) {
    const bc_t *b = r->b;
    int expert = bc_first_expert(j, b->n_ranks, r->rank) + e, n = 0;
    size_t H = (size_t)j->hidden, row = (size_t)e * (size_t)s->info.row_cap, width = j->fp8 ? H : 2 * H,
           words = s->info.scale_words;
    char *scales = rows + (size_t)s->info.row_cap * width;
    if (count < 0 || count > s->info.row_cap) return wrong(r, j, "count", expert, count);
    EPX_TRY(cu_fetch(&r->dev, rows, s->out_x + row * width, (size_t)count * width));
    EPX_TRY(cu_fetch(&r->dev, scales, s->scales + row * words, (size_t)count * words * 4));
    for (int src = 0; src < b->n_ranks; src++)
        for (int t = 0; t < j->n_tokens; t++) {
            const uint8_t *want = b->in[src].wire + (size_t)t * b->in[src].wire_bytes;
            const uint16_t *seen = b->in[src].seen + (size_t)t * H;
            if (!names(j, &b->in[src], t, expert)) continue;
            if (n >= count || memcmp(rows + (size_t)n * width, want, width) != 0 ||
                memcmp(scales + (size_t)n * words * 4, want + width, words * 4) != 0)
                return wrong(r, j, "row of an expert", expert, n);
            for (size_t h = 0; h < H; h++) y[(size_t)n * H + h] = bc_expert(expert, seen[h]);
            n++;
        }
    if (n != count) return wrong(r, j, "count of an expert", expert, count);
    return cu_upload(&r->dev, s->y + row * H * 2, y, (size_t)count * H * 2);
}

static epx_status_t check_experts(bc_rank_t *r, const bc_job_t *j, state_t *s) {
    size_t cap = (size_t)s->info.row_cap, n = (size_t)s->info.n_local_experts;
    char *rows = malloc(cap * (r->b->in[0].wire_bytes + 2 * (size_t)j->hidden));
    uint16_t *y = malloc(cap * (size_t)j->hidden * 2);
    int32_t *counts = malloc(n * sizeof *counts + 4);
    epx_status_t st = rows && y && counts ? EPX_OK : epx_fail(EPX_ERR_NOMEM, "no memory for %zu rows", cap);
    if (st >= 0) st = cu_fetch(&r->dev, counts, s->counts, n * sizeof *counts);
    for (size_t e = 0; st >= 0 && e < n; e++) st = check_expert(r, j, s, (int)e, rows, y, counts[e]);
    free(rows);
    free(y);
    free(counts);
    return st;
}

/* Lists: rows of each source where they lie, and the weighted rows that go back. */
static epx_status_t check_lists(bc_rank_t *r, const bc_job_t *j, state_t *s) {
    const bc_t *b = r->b;
    size_t H = (size_t)j->hidden, T = (size_t)j->n_tokens;
    const void *base[BC_MAX_RANKS];
    epx_lists_t l;
    EPX_TRY(epx_plan_lists(s->plan, 0, &l));
    EPX_TRY(cu_fetch(&r->dev, base, l.row_base, sizeof *base * (size_t)b->n_ranks));
    uint8_t *rows = malloc(T * l.row_stride_bytes);
    uint16_t *y = calloc((size_t)b->n_ranks * T, H * 2);
    float *scratch = malloc(2 * H * sizeof *scratch);
    epx_status_t st = rows && y && scratch ? EPX_OK : epx_fail(EPX_ERR_NOMEM, "no memory for %zu rows", T);
    for (int src = 0; st >= 0 && src < b->n_ranks; src++) {
        st = cu_fetch(&r->dev, rows, base[src], T * l.row_stride_bytes);
        for (int t = 0; st >= 0 && t < j->n_tokens; t++) {
            const uint8_t *want = b->in[src].wire + (size_t)t * b->in[src].wire_bytes;
            if (!bc_partial_row(b, j, r->rank, src, t, y + ((size_t)src * T + (size_t)t) * H, scratch)) continue;
            if (memcmp(rows + (size_t)t * l.row_stride_bytes, want, j->fp8 ? H : 2 * H) != 0)
                st = wrong(r, j, "row in place", src, t);
        }
    }
    if (st >= 0) st = cu_upload(&r->dev, s->y, y, (size_t)b->n_ranks * T * H * 2);
    free(rows);
    free(y);
    free(scratch);
    return st;
}

static epx_status_t check_results(bc_rank_t *r, const bc_job_t *j, state_t *s) {
    size_t H = (size_t)j->hidden, n = (size_t)j->n_tokens * H;
    uint16_t *got = malloc(n * 2), *want = malloc(H * 2);
    float *scratch = malloc(2 * H * sizeof *scratch);
    int step = (j->n_tokens + MOST_CHECKED - 1) / MOST_CHECKED;
    epx_status_t st = got && want && scratch ? EPX_OK : epx_fail(EPX_ERR_NOMEM, "no memory for %zu elements", n);
    if (st >= 0) st = cu_fetch(&r->dev, got, s->result, n * 2);
    for (int t = 0; st >= 0 && t < j->n_tokens; t += step) {
        bc_result_row(r->b, j, r->rank, t, want, scratch);
        if (memcmp(want, got + (size_t)t * H, H * 2) != 0) st = wrong(r, j, "result of token", r->rank, t);
    }
    free(got);
    free(want);
    free(scratch);
    return st;
}

static epx_status_t check_dispatch(bc_rank_t *r, const bc_job_t *j, state_t *s) {
    epx_io_t io, back;
    fill_io(r, j, s, 0, &io, &back);
    EPX_TRY(dispatch(j, s, &io));
    EPX_TRY(cu_sync(r->dev.stream));
    EPX_TRY(epx_plan_poll(s->plan));
    return j->fused ? check_lists(r, j, s) : check_experts(r, j, s);
}

static epx_status_t check_combine(bc_rank_t *r, const bc_job_t *j, state_t *s) {
    epx_io_t io, back;
    fill_io(r, j, s, 0, &io, &back);
    EPX_TRY(cu_fill(&r->dev, s->result, 0xA5, (size_t)j->n_tokens * (size_t)j->hidden * 2));
    EPX_TRY(combine(j, s, &back));
    EPX_TRY(cu_sync(r->dev.stream));
    EPX_TRY(epx_plan_poll(s->plan));
    return check_results(r, j, s);
}

/* ---- timing ---- */

static epx_status_t record(bc_rank_t *r, const bc_job_t *j, state_t *s, void **out_graph) {
    EPX_TRY(cu_capture_begin(r->dev.stream));
    epx_status_t st = EPX_OK;
    for (int i = 0; st >= 0 && i < BC_EXCHANGES; i++) {
        epx_io_t io, back;
        fill_io(r, j, s, i, &io, &back);
        st = dispatch(j, s, &io);
        if (st >= 0) st = combine(j, s, &back);
    }
    epx_status_t end = cu_capture_end(r->dev.stream, out_graph);
    return st < 0 ? st : end;
}

static int measure(bc_rank_t *r, state_t *s, void *graph, bc_result_t *out) {
    double us[BC_MAX_REPLAYS];
    for (int run = 0; run < r->b->n_runs; run++) {
        if (bc_time(r, graph, us, r->b->n_replays) != 0) return -1;
        if (r->rank == 0) bc_summary(out, run, us, r->b->n_replays);
    }
    if (out->job.overlap) {
        epx_status_t st = bc_overlap(r, graph, out);
        if (st == EPX_ERR_UNSUPPORTED && r->rank == 0)
            snprintf(out->skipped, sizeof out->skipped, "overlap: %s", epx_last_error());
        if (bc_agree(r, st == EPX_ERR_UNSUPPORTED ? EPX_OK : st) != 0) return -1;
    }
    return bc_agree(r, epx_plan_poll(s->plan));
}

int bc_ours(bc_rank_t *r, bc_result_t *out) {
    const bc_job_t *j = &out->job;
    state_t s = {NULL};
    void *graph = NULL;
    int rc = bc_agree(r, make_plan(r, j, &s));
    if (rc == 0) rc = bc_agree(r, make_buffers(r, j, &s));
    if (rc == 0) rc = bc_agree(r, check_dispatch(r, j, &s));
    if (rc == 0) rc = bc_agree(r, check_combine(r, j, &s));
    if (rc == 0) rc = bc_agree(r, record(r, j, &s, &graph));
    if (rc == 0 && r->rank == 0) out->checked = 1, out->buffer_bytes = s.info.slab_bytes + s.info.private_bytes;
    if (rc == 0) rc = measure(r, &s, graph, out);
    if (rc != 0 && s.plan != NULL) (void)epx_plan_abort(s.plan);
    cu_graph_free(graph);
    close_state(&s);
    return rc;
}
