/* The library's ways to exchange, as variants of the bench: backend x combine x layout x input x dtype. Each step is one whole
 * epx_dispatch + expert + epx_combine with all its checks. The expert multiplies each row it was sent by its factor; with layout
 * "fused" it makes one pass a (token, rank) and writes the weighted sum in place. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "app/bench_a2a.h"
#include "base/half.h"

typedef struct {
    epx_plan_t *plan;
    epx_io_t dispatch, combine;
    int registered, major, fused, fp8, first_expert, n_local, row_cap;
    uint16_t *x, *y, *out;
    char *rows; /* expert-major rows in wire form */
    float *scales;
    int32_t *counts;
} ours_t;

static void widen_fp8(uint16_t *y, const uint8_t *codes, const float *scales, float factor, size_t h) {
    static float value_of[256];
    for (int c = 0; value_of[0xFE] == 0 && c < 256; c++) value_of[c] = epx_e4m3_to_f32((uint8_t)c);
    for (size_t i = 0; i < h; i++) y[i] = epx_f32_to_bf16(factor * (scales[i / 128] * value_of[codes[i]]));
}

static void expert_row(const ours_t *o, size_t h, uint16_t *y, const void *row, const float *scales, int expert) {
    if (o->fp8) widen_fp8(y, row, scales, bench_factor(expert), h);
    else bench_expert_row(y, row, bench_factor(expert), h);
}

static void experts_of_lists(const ours_t *o, const epx_lists_t *l, size_t h) {
    for (int e = 0; e < l->n_local_experts; e++) {
        for (int32_t i = l->expert_off[e]; i < l->expert_off[e + 1]; i++) {
            epx_list_entry_t en = l->entries[i];
            const char *row = (const char *)l->row_base[en.src] + en.token * l->row_stride_bytes;
            const float *scales = l->scale_base ? l->scale_base[en.src] + en.token * l->scale_stride : NULL;
            expert_row(o, h, o->y + (size_t)i * h, row, scales, o->first_expert + e);
        }
    }
}

/* One pass a (token, rank): the sum of weight * factor is the expert, its rows go straight where combine sums them. */
static int experts_fused(const bench_rank_t *r, const ours_t *o, const epx_lists_t *l, size_t h) {
    epx_partials_t at = {.size = sizeof at};
    size_t k_max = (size_t)r->job->top_k;
    if (epx_plan_partials(o->plan, 0, &at) < 0) return -1;
    for (int i = 1; i <= at.n_ranks; i++) {
        int src = (r->rank + i) % at.n_ranks; /* own tokens last: peers wait for theirs */
        for (size_t t = 0; t < at.n_tokens[src]; t++) {
            float factor = 0;
            for (size_t p = t * k_max; p < (t + 1) * k_max; p++)
                if (at.rows[src][p] >= 0) factor += at.weights[src][p] * bench_factor(at.ids[src][p]);
            if (factor == 0) continue; /* no expert of it is here: weights are positive */
            uint16_t *out = (uint16_t *)(void *)((char *)at.sums[src] + t * at.sum_stride_bytes);
            const char *row = (const char *)l->row_base[src] + t * l->row_stride_bytes;
            if (o->fp8) widen_fp8(out, (const uint8_t *)row, l->scale_base[src] + t * l->scale_stride, factor, h);
            else bench_expert_row(out, (const uint16_t *)(const void *)row, factor, h);
        }
    }
    return 0;
}

static void experts_of_major(const ours_t *o, size_t h) {
    size_t row_bytes = h * (o->fp8 ? 1 : 2), n_scales = (h + 127) / 128;
    for (int e = 0; e < o->n_local; e++) {
        for (int i = 0; i < o->counts[e]; i++) {
            size_t row = (size_t)e * (size_t)o->row_cap + (size_t)i;
            expert_row(o, h, o->y + row * h, o->rows + row * row_bytes, o->scales + row * n_scales, o->first_expert + e);
        }
    }
}

static int step(bench_rank_t *r, bench_variant_t *v, int table) {
    ours_t *o = v->state;
    epx_lists_t lists = {0};
    size_t h = (size_t)r->job->hidden;
    o->dispatch.ids = bench_ids(r, table);
    o->dispatch.weights = bench_weights(r, table);
    epx_status_t s = epx_dispatch(o->plan, &o->dispatch);
    if (s >= 0 && !o->major) s = epx_plan_lists(o->plan, 0, &lists);
    if (s >= 0 && o->major) experts_of_major(o, h);
    else if (s >= 0 && o->fused) s = experts_fused(r, o, &lists, h) < 0 ? EPX_ERR_UNSUPPORTED : EPX_OK;
    else if (s >= 0) experts_of_lists(o, &lists, h);
    if (s >= 0) s = epx_combine(o->plan, &o->combine);
    return s < 0 ? bench_fail(r->run, "rank %d: %s: %s", r->rank, v->about.name, epx_last_error()) : 0;
}

static uint64_t wire(bench_variant_t *v) {
    const ours_t *o = v->state;
    epx_plan_stats_t s = {.size = sizeof s};
    return epx_plan_stats(o->plan, &s) < 0 ? 0 : s.dispatch_bytes + s.combine_bytes;
}

static void close_ours(bench_variant_t *v) {
    ours_t *o = v->state;
    epx_plan_destroy(o->plan);
    if (!o->registered) free(o->x);
    free(o->y);
    free(o->out);
    free(o->rows);
    free(o->scales);
    free(o->counts);
    free(o);
}

static int take_memory(bench_rank_t *r, ours_t *o, size_t h) {
    size_t t = (size_t)r->job->n_tokens, k = (size_t)r->job->top_k, el = (size_t)o->n_local, w = (size_t)r->run->n_ranks;
    size_t per = k < el ? k : el, n_rows = o->major ? el * (size_t)o->row_cap : w * t * per;
    o->y = bench_alloc_rows(n_rows * h * sizeof *o->y);
    o->out = bench_alloc_rows(t * h * sizeof *o->out);
    o->counts = malloc(el * sizeof *o->counts + 64);
    if (!o->registered) o->x = bench_alloc_rows(t * h * sizeof *o->x);
    if (o->major) o->rows = bench_alloc_rows(n_rows * h * (o->fp8 ? 1 : 2));
    o->scales = malloc((o->major ? n_rows : 1) * ((h + 127) / 128) * sizeof *o->scales);
    return o->y && o->out && o->counts && o->x && o->scales && (!o->major || o->rows) ? 0 : -1;
}

static epx_status_t make_plan(bench_rank_t *r, const bench_result_t *a, ours_t *o) {
    epx_plan_config_t c;
    epx_plan_config_init(&c);
    c.max_tokens = r->job->n_tokens;
    c.hidden = r->job->hidden;
    c.top_k = r->job->top_k;
    c.n_experts = r->job->n_experts;
    c.token_dtype = EPX_BF16;
    c.wire_dtype = o->fp8 ? EPX_FP8_E4M3 : EPX_BF16;
    c.layout = o->major ? EPX_LAYOUT_EXPERT_MAJOR : EPX_LAYOUT_LISTS;
    c.combine = strcmp(a->combine, "exact") == 0 ? EPX_COMBINE_EXACT : EPX_COMBINE_PARTIAL;
    c.backend = a->backend;
    return epx_plan_create(r->group, &c, &o->plan);
}

static int open_ours(bench_rank_t *r, bench_variant_t *v) {
    bench_result_t *a = &v->about;
    ours_t *o = calloc(1, sizeof *o);
    if (!o) return bench_fail(r->run, "rank %d: no memory", r->rank);
    v->state = o;
    v->close = close_ours;
    o->major = strcmp(a->layout, "expert-major") == 0;
    o->fused = strcmp(a->layout, "fused") == 0;
    o->fp8 = strcmp(a->dtype, "fp8") == 0;
    o->registered = strcmp(a->input, "registered") == 0;
    o->first_expert = bench_first_expert(r->job, r->run->n_ranks, r->rank);
    o->n_local = bench_first_expert(r->job, r->run->n_ranks, r->rank + 1) - o->first_expert;
    o->row_cap = r->run->n_ranks * r->job->n_tokens;
    epx_status_t s = make_plan(r, a, o);
    if (s >= 0 && o->registered) {
        void *x = NULL;
        s = epx_plan_input(o->plan, 0, &x);
        o->x = x;
    }
    if (s < 0) return bench_fail(r->run, "rank %d: %s: %s", r->rank, a->name, epx_last_error());
    if (take_memory(r, o, (size_t)r->job->hidden)) return bench_fail(r->run, "rank %d: %s: no memory", r->rank, a->name);
    epx_io_init(&o->dispatch);
    epx_plan_info_t info = {.size = sizeof info};
    if (epx_plan_info(o->plan, &info) == EPX_OK) v->about.buffer_bytes = info.slab_bytes + info.private_bytes;
    o->dispatch.x = v->x = o->x;
    o->dispatch.n_tokens = r->job->n_tokens;
    o->dispatch.out_x = o->rows;
    o->dispatch.out_scale = o->fp8 && o->major ? o->scales : NULL;
    o->dispatch.out_counts = o->counts;
    epx_io_init(&o->combine);
    o->combine.x = o->fused ? NULL : o->y;
    o->combine.out_x = v->out = o->out;
    v->step = step;
    v->wire = wire;
    return 0;
}

/* The i-th element of "a,b,c" into out; 0 when there is none. */
static int element(const char *list, int i, char *out, size_t cap) {
    for (; i > 0; i--) {
        list = strchr(list, ',');
        if (!list) return 0;
        list++;
    }
    snprintf(out, cap, "%.*s", (int)strcspn(list, ","), list);
    return 1;
}

/* Names the i-th combination of the run's lists; 0 past the last. */
static int combination(const bench_run_t *run, int i, bench_result_t *a) {
    const char *lists[5] = {run->backends, run->combines, run->layouts, run->inputs, run->dtypes};
    char *out[5] = {a->backend, a->combine, a->layout, a->input, a->dtype};
    for (int d = 4; d >= 0; d--) {
        int n = 1;
        for (const char *p = lists[d]; *p; p++) n += *p == ',';
        if (!element(lists[d], i % n, out[d], sizeof a->backend)) return 0;
        i /= n;
    }
    snprintf(a->name, sizeof a->name, "%.12s %.10s %.12s %.4s %.4s", a->backend, a->combine, a->layout,
             strcmp(a->input, "registered") == 0 ? "reg" : "priv", a->dtype);
    return i == 0;
}

int bench_add_ours(bench_rank_t *r, bench_variant_t *v, int n) {
    for (int i = 0; combination(r->run, i, &v[n].about); i++) {
        if (strcmp(v[n].about.layout, "fused") == 0 && strcmp(v[n].about.combine, "exact") == 0) continue; /* no such thing */
        if (n + 12 >= BENCH_MAX_VARIANTS) return bench_fail(r->run, "more than %d modes", BENCH_MAX_VARIANTS - 12);
        v[n].about.kind = BENCH_OURS;
        if (open_ours(r, &v[n])) return -1;
        n++;
    }
    memset(&v[n], 0, sizeof v[n]);
    return n;
}
