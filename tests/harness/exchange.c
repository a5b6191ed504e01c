/* One exchange against the oracle: see exchange.h. */
#include "tests/harness/exchange.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { POISON = 0xA5, GUARD_BYTES = 64, MAX_MIRRORS = 12 };

/* A host buffer and its copy on the device. */
typedef struct {
    void *host, *device;
    size_t n_bytes;
} mirror_t;

struct th_open {
    th_batch_t batches[TH_MAX_RANKS];
    th_expect_t want;
    epx_io_t io;
    int rank, n_local, row_cap;
    uint64_t seed;
    size_t max_rows, row_bytes, scale_words, scale_gap; /* output rows, bytes of a wire row, words of its scales */
    unsigned char *out_x;                               /* dispatch output unless LISTS */
    size_t n_out_words;
    uint32_t *out_scale;
    int32_t *counts, *histogram;
    float *other_weights;      /* [T, K] that are not the batch's */
    unsigned char *y, *result; /* expert outputs; combine output */
    size_t y_bytes, result_bytes;
    th_device_t *device;
    mirror_t outs[MAX_MIRRORS]; /* to be fetched after the call */
    int n_outs;
    void *fetched[2 * TH_MAX_RANKS + 4]; /* host copies of lists */
    int n_fetched;
};

static const char *mode_name(epx_combine_t m) { return m == EPX_COMBINE_EXACT ? "exact" : "partial"; }
static const char *layout_name(epx_layout_t l) {
    static const char *const names[] = {"lists", "expert-major", "contiguous"};
    return names[l];
}

const char *th_case_text(const th_case_t *c, char *out, size_t n_bytes) {
    const th_shape_t *s = &c->shape;
    snprintf(
        out, n_bytes,
        "%s W=%d %s->%s/%s/%s %s %s E=%d K=%d H=%d T<=%d scales=%d/%d/%d align=%d slots=%d replicate=%d opts=%u seed=%llu%s%s",
        c->backend ? c->backend : "auto", s->n_ranks, th_dtype_name(s->token), th_dtype_name(s->wire), th_dtype_name(s->expert),
        th_dtype_name(s->combine), layout_name(s->layout), mode_name(s->mode), s->n_experts, s->top_k, s->hidden, s->max_tokens,
        s->scale_format, s->scale_layout, th_scale_block(s), s->align, th_n_slots(s), th_replicate(s), c->opts,
        (unsigned long long)c->seed, s->slot_rank ? " slot_rank" : "", s->slot_expert ? " slot_expert" : "");
    return out;
}

void th_plan_config(const th_case_t *c, epx_plan_config_t *out_cfg) {
    const th_shape_t *s = &c->shape;
    epx_plan_config_init(out_cfg);
    out_cfg->max_tokens = s->max_tokens;
    out_cfg->hidden = s->hidden;
    out_cfg->top_k = s->top_k;
    out_cfg->n_experts = s->n_experts;
    out_cfg->n_slots = s->n_slots || s->slot_rank || s->slot_expert ? th_n_slots(s) : 0;
    out_cfg->replicate = th_replicate(s);
    out_cfg->renormalize = s->renormalize;
    out_cfg->slot_rank = s->slot_rank;
    out_cfg->slot_expert = s->slot_expert;
    out_cfg->token_dtype = s->token;
    out_cfg->wire_dtype = s->wire;
    out_cfg->expert_dtype = s->expert;
    out_cfg->combine_dtype = s->combine;
    out_cfg->layout = s->layout;
    out_cfg->combine = s->mode;
    out_cfg->scale_format = s->scale_format;
    out_cfg->scale_layout = s->scale_layout;
    out_cfg->scale_block = th_scale_block(s);
    out_cfg->align = s->align ? s->align : 1;
    out_cfg->backend = c->backend;
    out_cfg->n_blocks = c->n_blocks;
    out_cfg->n_channels = c->n_channels ? c->n_channels : 1;
    const char *ms = getenv("EPX_CONTRACT_TIMEOUT_MS"); /* the planted mistakes wait in vain: a short wait saves time */
    uint64_t usual = ms ? strtoull(ms, NULL, 10) * 1000000u : 20000000000u;
    out_cfg->timeout_ns = c->timeout_ns ? c->timeout_ns : usual;
}

static void maybe_sleep(const th_case_t *c, int rank, uint64_t seed, uint64_t at) {
    uint64_t m = th_mix(seed ^ 0x51EE9, at * 64 + (uint64_t)rank);
    if ((c->opts & TH_DELAYS) && m % 3 == 0) th_sleep_us((unsigned)(m >> 32) % 300);
}

static void *poisoned(size_t n_bytes) {
    void *p = malloc(n_bytes + GUARD_BYTES);
    if (!p) abort();
    memset(p, POISON, n_bytes + GUARD_BYTES);
    return p;
}

static int is_poison(const void *p, size_t n_bytes) {
    const unsigned char *b = p;
    for (size_t i = 0; i < n_bytes; i++)
        if (b[i] != POISON) return 0;
    return 1;
}

static int first_difference(const unsigned char *a, const unsigned char *b, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (a[i] != b[i]) return (int)i;
    return -1;
}

/* ---- devices ---- */

/* Where the call finds a buffer: on CPUs the host's own, else a device copy with the same content. out: fetch it afterwards. */
static int place(th_open_t *o, const void *host, size_t n_bytes, int out, const void **out_at) {
    *out_at = host;
    if (o->device == NULL || host == NULL) return 0;
    void *at = o->device->take(o->device, n_bytes);
    if (at == NULL || o->device->upload(o->device, at, host, n_bytes) != 0 || (out && o->n_outs == MAX_MIRRORS)) return -1;
    if (out) o->outs[o->n_outs++] = (mirror_t){(void *)(uintptr_t)host, at, n_bytes};
    *out_at = at;
    return 0;
}

/* Wait for the stream, ask for errors, bring the outputs back. */
static int bring_back(th_rank_t *r, epx_plan_t *p, th_open_t *o) {
    if (o->device == NULL) return 0;
    TH_CHECK(r, o->device->sync(o->device) == 0, "%s", "the stream failed");
    TH_OK(r, epx_plan_poll(p));
    for (int i = 0; i < o->n_outs; i++)
        TH_CHECK(r, o->device->fetch(o->device, o->outs[i].host, o->outs[i].device, o->outs[i].n_bytes) == 0, "%s",
                 "fetch failed");
    return 0;
}

static void *fetched(th_open_t *o, const void *from, size_t n_bytes) {
    void *to = malloc(n_bytes + 1);
    if (to == NULL || o->device->fetch(o->device, to, from, n_bytes) != 0) abort();
    o->fetched[o->n_fetched++] = to;
    return to;
}

/* Lists of a device plan with every pointer turned into a host copy. */
static void fetch_lists(const th_case_t *c, th_open_t *o, epx_lists_t *l) {
    size_t w = (size_t)c->shape.n_ranks, t = (size_t)c->shape.max_tokens;
    if (o->device == NULL) return;
    l->expert_off = fetched(o, l->expert_off, ((size_t)l->n_local_experts + 1) * sizeof *l->expert_off);
    l->n_rows = l->expert_off[l->n_local_experts];
    l->entries = fetched(o, l->entries, (size_t)l->n_rows * sizeof *l->entries);
    const void **rows = fetched(o, l->row_base, w * sizeof *rows);
    const float **scales = l->scale_base ? fetched(o, l->scale_base, w * sizeof *scales) : NULL;
    for (size_t q = 0; q < w; q++) {
        const char *on_device = rows[q], *copy = fetched(o, on_device, t * l->row_stride_bytes);
        if (scales) scales[q] = (const float *)(const void *)(copy + ((const char *)scales[q] - on_device));
        rows[q] = copy;
    }
    l->row_base = rows;
    l->scale_base = scales;
}

static void drop_device(th_open_t *o) {
    for (int i = 0; i < o->n_fetched; i++) free(o->fetched[i]);
    o->n_fetched = 0;
    o->n_outs = 0;
    if (o->device != NULL) o->device->reset(o->device);
}

static void open_buffers(const th_case_t *c, th_open_t *o, const epx_plan_info_t *info) {
    const th_shape_t *s = &c->shape;
    size_t h = (size_t)s->hidden, rows = info->max_rows, n_y = s->layout == EPX_LAYOUT_LISTS ? (size_t)o->want.n_rows : rows;
    int by_column = s->scale_layout == EPX_SCALE_COL_MAJOR;
    if (s->layout == EPX_LAYOUT_EXPERT_MAJOR) n_y = rows = (size_t)o->n_local * (size_t)o->row_cap;
    o->max_rows = rows;
    o->row_bytes = h * (size_t)th_dtype_bytes(s->wire);
    o->scale_words = (size_t)th_scale_words(s);
    o->scale_gap = info->scale_gap;
    o->n_out_words = rows * o->scale_words;
    if (by_column) o->n_out_words = o->scale_words * o->scale_gap;
    if (by_column && s->layout == EPX_LAYOUT_EXPERT_MAJOR) o->n_out_words *= (size_t)o->n_local;
    o->out_x = poisoned(rows * o->row_bytes);
    o->out_scale = poisoned(o->n_out_words * sizeof(uint32_t));
    o->counts = poisoned((size_t)o->n_local * sizeof(int32_t));
    o->histogram = poisoned((size_t)s->n_experts * sizeof(int32_t));
    o->y_bytes = n_y * h * (size_t)th_dtype_bytes(s->expert);
    o->y = poisoned(o->y_bytes);
    o->result_bytes = (size_t)o->batches[o->rank].n_tokens * h * (size_t)th_dtype_bytes(th_result_dtype(s));
    o->result = poisoned(o->result_bytes);
    size_t n_weights = (size_t)o->batches[o->rank].n_tokens * (size_t)s->top_k;
    o->other_weights = poisoned(n_weights * sizeof(float));
    for (size_t i = 0; i < n_weights; i++) o->other_weights[i] = 3.5f;
}

static void open_free(const th_case_t *c, th_open_t *o) {
    drop_device(o);
    th_batches_fini(&c->shape, o->batches);
    th_expect_fini(&o->want);
    free(o->out_x);
    free(o->out_scale);
    free(o->counts);
    free(o->histogram);
    free(o->other_weights);
    free(o->y);
    free(o->result);
    free(o);
}

#define PLACE(r, o, field, n_bytes, out)                                                         \
    do {                                                                                         \
        const void *at_;                                                                         \
        TH_CHECK(r, place(o, (o)->io.field, n_bytes, out, &at_) == 0, "%s", "no device memory"); \
        (o)->io.field = (void *)(uintptr_t)at_;                                                  \
    } while (0)

static int place_dispatch(th_rank_t *r, const th_case_t *c, th_open_t *o) {
    const th_shape_t *s = &c->shape;
    size_t n = (size_t)o->io.n_tokens, k = (size_t)s->top_k;
    if (o->device == NULL) return 0;
    o->io.stream = o->device->stream;
    PLACE(r, o, x, n * (size_t)s->hidden * (size_t)th_dtype_bytes(s->token), 0);
    PLACE(r, o, ids, n * k * sizeof(int32_t), 0);
    PLACE(r, o, weights, n * k * sizeof(float), 0);
    PLACE(r, o, x_scale, n * (size_t)th_scale_words(s) * sizeof(uint32_t), 0);
    PLACE(r, o, out_histogram, (size_t)s->n_experts * sizeof(int32_t) + GUARD_BYTES, 1);
    PLACE(r, o, out_x, o->max_rows * o->row_bytes + GUARD_BYTES, 1);
    PLACE(r, o, out_scale, o->n_out_words * sizeof(uint32_t) + GUARD_BYTES, 1);
    PLACE(r, o, out_counts, (size_t)o->n_local * sizeof(int32_t) + GUARD_BYTES, 1);
    return 0;
}

static int late_weights(const th_case_t *c) { return (c->opts & TH_LATE) && c->shape.mode == EPX_COMBINE_EXACT; }

static int fill_io(th_rank_t *r, epx_plan_t *p, const th_case_t *c, th_open_t *o) {
    const th_shape_t *s = &c->shape;
    const th_batch_t *b = &o->batches[o->rank];
    epx_io_init(&o->io);
    o->io.channel = c->channel;
    o->io.x = b->x;
    if (c->opts & TH_REGISTERED) {
        void *in = NULL;
        TH_OK(r, epx_plan_input(p, c->channel, &in));
        TH_CHECK(r, (uintptr_t)in % 64 == 0, "registered input %p is not 64-byte aligned", in);
        memcpy(in, b->x, (size_t)b->n_tokens * (size_t)s->hidden * (size_t)th_dtype_bytes(s->token));
        o->io.x = in;
    }
    o->io.x_scale = (const float *)(const void *)b->x_scale;
    o->io.ids = b->ids;
    o->io.weights = late_weights(c) ? o->other_weights : b->weights;
    o->io.n_tokens = b->n_tokens;
    int packed = s->layout != EPX_LAYOUT_LISTS;
    o->io.out_x = packed ? o->out_x : NULL;
    o->io.out_scale = packed && th_has_scales(s) ? (float *)(void *)o->out_scale : NULL;
    o->io.out_counts = (c->opts & TH_NO_COUNTS) && !packed ? NULL : o->counts;
    o->io.out_histogram = c->opts & TH_HISTOGRAM ? o->histogram : NULL;
    return place_dispatch(r, c, o);
}

static int check_row(th_rank_t *r, const th_open_t *o, int i, const void *row, const uint32_t *scales) {
    const unsigned char *want = o->want.rows + (size_t)i * o->row_bytes;
    int at = first_difference(row, want, o->row_bytes);
    TH_CHECK(r, at < 0, "row %d (src %u token %u) differs at byte %d: %02x, wanted %02x", i, o->want.entries[i].src,
             o->want.entries[i].token, at, ((const unsigned char *)row)[at], want[at]);
    for (size_t j = 0; o->want.scales && j < o->scale_words; j++)
        TH_CHECK(r, scales[j] == o->want.scales[(size_t)i * o->scale_words + j], "scale word %zu of row %d: %08x, wanted %08x", j,
                 i, scales[j], o->want.scales[(size_t)i * o->scale_words + j]);
    return 0;
}

/* LISTS: compare the lists and every row, then let the experts read the delivered rows. */
static int check_lists(th_rank_t *r, epx_plan_t *p, const th_case_t *c, th_open_t *o) {
    const th_shape_t *s = &c->shape;
    const th_expect_t *w = &o->want;
    epx_lists_t l;
    memset(&l, 0, sizeof l);
    TH_OK(r, epx_plan_lists(p, c->channel, &l));
    fetch_lists(c, o, &l);
    TH_CHECK(r, l.n_local_experts == w->n_local, "%d local experts, wanted %d", l.n_local_experts, w->n_local);
    for (int e = 0; e <= w->n_local; e++)
        TH_CHECK(r, l.expert_off[e] == w->expert_off[e], "expert_off[%d] is %d, wanted %d", e, l.expert_off[e], w->expert_off[e]);
    TH_CHECK(r, l.n_rows == w->n_rows, "%d rows, wanted %d", l.n_rows, w->n_rows);
    size_t y_bytes = (size_t)s->hidden * (size_t)th_dtype_bytes(s->expert);
    for (int e = 0; e < w->n_local; e++) {
        for (int i = w->expert_off[e]; i < w->expert_off[e + 1]; i++) {
            epx_list_entry_t at = l.entries[i];
            TH_CHECK(r, at.src == w->entries[i].src && at.token == w->entries[i].token, "entry %d is (%u, %u), wanted (%u, %u)",
                     i, at.src, at.token, w->entries[i].src, w->entries[i].token);
            const void *row = (const char *)l.row_base[at.src] + at.token * l.row_stride_bytes;
            const uint32_t *scales =
                w->scales ? (const uint32_t *)(const void *)(l.scale_base[at.src] + at.token * l.scale_stride) : NULL;
            if (check_row(r, o, i, row, scales) != 0) return -1;
            th_expert_row(s, w->local_expert[e], row, scales, o->y + (size_t)i * y_bytes);
        }
    }
    return 0;
}

/* Rows that expert e takes in the output. */
static size_t rows_of(const th_case_t *c, const th_open_t *o, int e) {
    size_t n = (size_t)(o->want.expert_off[e + 1] - o->want.expert_off[e]), a = c->shape.align ? (size_t)c->shape.align : 1;
    if (c->shape.layout == EPX_LAYOUT_EXPERT_MAJOR) return (size_t)o->row_cap;
    return c->shape.layout == EPX_LAYOUT_LISTS ? n : (n + a - 1) / a * a;
}

/* Word j of the scales of row i of expert e; first: the expert's first row. */
static size_t scale_index(const th_case_t *c, const th_open_t *o, int e, size_t first, size_t i, size_t j) {
    if (c->shape.scale_layout == EPX_SCALE_ROW_MAJOR) return (first + i) * o->scale_words + j;
    if (c->shape.layout == EPX_LAYOUT_EXPERT_MAJOR) return ((size_t)e * o->scale_words + j) * o->scale_gap + i;
    return j * o->scale_gap + first + i;
}

/* The whole output as it must be: rows and scales of the lists, zeros where CONTIGUOUS pads, the poison everywhere else. */
static void draw_output(const th_case_t *c, const th_open_t *o, unsigned char *x, uint32_t *scales) {
    const th_expect_t *w = &o->want;
    size_t first = 0;
    for (int e = 0; e < w->n_local; first += rows_of(c, o, e), e++) {
        size_t n = (size_t)(w->expert_off[e + 1] - w->expert_off[e]), at = (size_t)w->expert_off[e];
        if (c->shape.layout == EPX_LAYOUT_CONTIGUOUS) memset(x + first * o->row_bytes, 0, rows_of(c, o, e) * o->row_bytes);
        memcpy(x + first * o->row_bytes, w->rows + at * o->row_bytes, n * o->row_bytes);
        for (size_t i = 0; i < (c->shape.layout == EPX_LAYOUT_CONTIGUOUS ? rows_of(c, o, e) : n); i++)
            for (size_t j = 0; j < o->scale_words; j++)
                scales[scale_index(c, o, e, first, i, j)] = i < n ? w->scales[(at + i) * o->scale_words + j] : 0;
    }
}

static void run_experts(const th_case_t *c, th_open_t *o) {
    const th_shape_t *s = &c->shape;
    size_t first = 0, y_bytes = (size_t)s->hidden * (size_t)th_dtype_bytes(s->expert);
    uint32_t words[512];
    for (int e = 0; e < o->want.n_local; first += rows_of(c, o, e), e++) {
        for (size_t i = 0; i < (size_t)(o->want.expert_off[e + 1] - o->want.expert_off[e]); i++) {
            for (size_t j = 0; j < o->scale_words; j++) words[j] = o->out_scale[scale_index(c, o, e, first, i, j)];
            th_expert_row(s, o->want.local_expert[e], o->out_x + (first + i) * o->row_bytes, o->want.scales ? words : NULL,
                          o->y + (first + i) * y_bytes);
        }
    }
}

static int check_packed(th_rank_t *r, const th_case_t *c, th_open_t *o) {
    size_t n_x = o->max_rows * o->row_bytes, n_s = o->n_out_words * sizeof(uint32_t);
    unsigned char *x = poisoned(n_x);
    uint32_t *scales = poisoned(n_s);
    draw_output(c, o, x, scales);
    int at_x = first_difference(o->out_x, x, n_x + GUARD_BYTES), at_s = -1;
    at_s = first_difference((unsigned char *)o->out_scale, (unsigned char *)scales, n_s + GUARD_BYTES);
    int got_x = at_x < 0 ? 0 : o->out_x[at_x], want_x = at_x < 0 ? 0 : x[at_x];
    free(scales);
    free(x);
    TH_CHECK(r, at_x < 0, "row %d of %zu of the output differs at byte %d: %02x, wanted %02x", at_x / (int)o->row_bytes,
             o->max_rows, at_x % (int)o->row_bytes, got_x, want_x);
    TH_CHECK(r, at_s < 0, "scale word %d of %zu of the output differs", at_s / 4, o->n_out_words);
    run_experts(c, o);
    return 0;
}

static int check_offsets(th_rank_t *r, epx_plan_t *p, const th_case_t *c, th_open_t *o) {
    const int32_t *off = NULL;
    size_t first = 0;
    TH_OK(r, epx_plan_offsets(p, c->channel, &off));
    if (o->device != NULL) off = fetched(o, off, ((size_t)o->want.n_local + 1) * sizeof *off);
    for (int e = 0; e <= o->want.n_local; e++) {
        TH_CHECK(r, off[e] == (int32_t)first, "expert %d starts at row %d, wanted %zu", e, off[e], first);
        if (e < o->want.n_local) first += rows_of(c, o, e);
    }
    return 0;
}

static int check_counts(th_rank_t *r, const th_case_t *c, const th_open_t *o) {
    const th_expect_t *w = &o->want;
    for (int e = 0; o->io.out_counts && e < w->n_local; e++)
        TH_CHECK(r, o->counts[e] == w->expert_off[e + 1] - w->expert_off[e], "count of local expert %d is %d, wanted %d", e,
                 o->counts[e], w->expert_off[e + 1] - w->expert_off[e]);
    TH_CHECK(r, is_poison(o->counts + w->n_local, GUARD_BYTES), "%s", "written past the end of out_counts");
    for (int e = 0; o->io.out_histogram && e < c->shape.n_experts; e++)
        TH_CHECK(r, o->histogram[e] == w->histogram[e], "histogram[%d] is %d, wanted %d", e, o->histogram[e], w->histogram[e]);
    return 0;
}

static int check_missing(th_rank_t *r, epx_plan_t *p, const th_case_t *c, const th_open_t *o) {
    const uint8_t *places = NULL;
    int n = -1;
    TH_OK(r, epx_plan_missing(p, c->channel, &n, &places));
    TH_CHECK(r, n == o->want.n_missing, "%d tokens with missing places, wanted %d", n, o->want.n_missing);
    for (int t = 0; n > 0 && t < o->batches[o->rank].n_tokens; t++)
        TH_CHECK(r, places[t] == o->want.missing[t], "token %d misses %d places, wanted %d", t, places[t], o->want.missing[t]);
    return 0;
}

static int check_result(th_rank_t *r, const th_case_t *c, const th_open_t *o) {
    const th_shape_t *s = &c->shape;
    int at = first_difference(o->result, o->want.result, o->result_bytes);
    epx_dtype_t d = th_result_dtype(s);
    int i = at < 0 ? 0 : at / th_dtype_bytes(d);
    TH_CHECK(r, at < 0, "combine result of token %d channel %d: %.9g, wanted %.9g", i / s->hidden, i % s->hidden,
             (double)th_load(d, o->result, i), (double)th_load(d, o->want.result, i));
    TH_CHECK(r, is_poison(o->result + o->result_bytes, GUARD_BYTES), "%s", "written past the end of the combine result");
    return 0;
}

static int do_send(th_rank_t *r, epx_plan_t *p, const th_case_t *c, th_open_t *o) {
    maybe_sleep(c, o->rank, o->seed, 0);
    if (c->opts & TH_HALVES) TH_OK(r, epx_dispatch_send(p, &o->io));
    return 0;
}

static int do_recv(th_rank_t *r, epx_plan_t *p, const th_case_t *c, th_open_t *o) {
    maybe_sleep(c, o->rank, o->seed, 1);
    if (c->opts & TH_HALVES) TH_OK(r, epx_dispatch_recv(p, &o->io));
    else TH_OK(r, epx_dispatch(p, &o->io));
    if (bring_back(r, p, o) != 0) return -1;
    maybe_sleep(c, o->rank, o->seed, 2);
    if ((o->device == NULL || c->shape.layout != EPX_LAYOUT_EXPERT_MAJOR) && check_offsets(r, p, c, o) != 0) return -1;
    if (c->shape.layout == EPX_LAYOUT_LISTS ? check_lists(r, p, c, o) : check_packed(r, c, o)) return -1;
    if (check_missing(r, p, c, o) != 0) return -1;
    return check_counts(r, c, o);
}

int th_step_begin(th_rank_t *r, epx_plan_t *p, const th_case_t *c, int rank, th_kind_t kind, uint64_t seed, th_open_t **out) {
    char text[256];
    th_note(r, "%s, %s, step seed %llu", th_case_text(c, text, sizeof text), th_kind_name(kind), (unsigned long long)seed);
    epx_plan_info_t info = {.size = sizeof info};
    TH_OK(r, epx_plan_info(p, &info));
    th_open_t *o = calloc(1, sizeof *o);
    if (!o) return th_fail(r, "no memory for a step");
    o->rank = rank;
    o->seed = seed;
    if (th_batches_make(&c->shape, kind, seed, o->batches) != 0) goto err_memory;
    if (th_oracle(&c->shape, o->batches, rank, (c->opts & TH_ADD) != 0, &o->want) != 0) goto err_memory;
    o->n_local = info.n_local_experts;
    o->row_cap = info.row_cap;
    int row_cap = c->shape.n_ranks / th_replicate(&c->shape) * c->shape.max_tokens;
    if (o->n_local != o->want.n_local || o->row_cap != row_cap) {
        th_fail(r, "plan info: %d local experts, %d rows; wanted %d, %d", o->n_local, o->row_cap, o->want.n_local, row_cap);
        goto err_open;
    }
    o->device = c->device;
    open_buffers(c, o, &info);
    if (fill_io(r, p, c, o) != 0 || do_send(r, p, c, o) != 0) goto err_open;
    *out = o;
    return 0;
err_memory:
    th_fail(r, "no memory for a step");
err_open:
    open_free(c, o);
    return -1;
}

static int fill_combine(th_rank_t *r, const th_case_t *c, th_open_t *o) {
    drop_device(o);
    epx_io_init(&o->io);
    o->io.channel = c->channel;
    o->io.x = o->y;
    o->io.out_x = o->result;
    o->io.add = c->opts & TH_ADD ? o->batches[o->rank].add : NULL;
    o->io.n_tokens = o->batches[o->rank].n_tokens;
    o->io.combine_weights = late_weights(c) ? o->batches[o->rank].weights : NULL;
    if (o->device == NULL) return 0;
    o->io.stream = o->device->stream;
    PLACE(r, o, combine_weights, (size_t)o->io.n_tokens * (size_t)c->shape.top_k * sizeof(float), 0);
    PLACE(r, o, x, o->y_bytes, 0);
    PLACE(r, o, add, o->result_bytes, 0);
    PLACE(r, o, out_x, o->result_bytes + GUARD_BYTES, 1);
    return 0;
}

/* Can the plan of this case hand out the places of partial sums? */
static int takes_partials(const th_case_t *c, const epx_plan_info_t *info) {
    const th_shape_t *s = &c->shape;
    int mapped = strcmp(info->transport, "ucx") != 0 && strcmp(info->transport, "fault") != 0;
    return s->mode == EPX_COMBINE_PARTIAL && s->combine != EPX_FP8_E4M3 && th_replicate(s) == 1 &&
           strcmp(info->backend, "ref") != 0 && (mapped || s->n_ranks == 1);
}

/* The sum of docs/protocol.md, section 5, element by element, from the expert outputs in o->y. */
static void write_sum(const th_case_t *c, const th_open_t *o, const int32_t *rows, const float *weights, void *out) {
    const th_shape_t *s = &c->shape;
    for (int i = 0; i < s->hidden; i++) {
        float sum = 0;
        for (int k = 0; k < s->top_k; k++)
            if (rows[k] >= 0) sum = fmaf(weights[k], th_load(s->expert, o->y, rows[k] * s->hidden + i), sum);
        th_store(s->combine, out, i, sum);
    }
}

/* Write the partial sums in place, or see that the plan refuses. Sets io.x. */
static int send_sums(th_rank_t *r, epx_plan_t *p, const th_case_t *c, th_open_t *o) {
    epx_plan_info_t info = {.size = sizeof info};
    epx_partials_t sums = {.size = sizeof sums};
    size_t k_max = (size_t)c->shape.top_k;
    TH_OK(r, epx_plan_info(p, &info));
    if (!takes_partials(c, &info)) {
        TH_STATUS(r, epx_plan_partials(p, c->channel, &sums), EPX_ERR_UNSUPPORTED);
        return 0;
    }
    TH_OK(r, epx_plan_partials(p, c->channel, &sums));
    for (int src = 0; src < sums.n_ranks; src++) {
        for (size_t t = 0; t < sums.n_tokens[src]; t++) {
            const int32_t *rows = sums.rows[src] + t * k_max;
            int any = 0;
            for (size_t k = 0; k < k_max; k++) any |= rows[k] >= 0;
            if (any) write_sum(c, o, rows, sums.weights[src] + t * k_max, (char *)sums.sums[src] + t * sums.sum_stride_bytes);
        }
    }
    if (o->want.n_rows > 0) { /* a set io.x is refused, and nothing is sent */
        TH_STATUS(r, c->opts & TH_HALVES ? epx_combine_send(p, &o->io) : epx_combine(p, &o->io), EPX_ERR_ARG);
    }
    o->io.x = NULL;
    return 0;
}

int th_step_half(th_rank_t *r, epx_plan_t *p, const th_case_t *c, th_open_t *o, int half) {
    if (half == 1) return do_recv(r, p, c, o);
    if (half == 2) {
        if (fill_combine(r, c, o) != 0) return -1;
        if ((c->opts & TH_PARTIALS) && o->device == NULL && send_sums(r, p, c, o) != 0) return -1;
        TH_OK(r, epx_combine_send(p, &o->io));
        memset(o->y, POISON, o->y_bytes); /* borrowed during combine_send only */
        maybe_sleep(c, o->rank, o->seed, 3);
        return 0;
    }
    TH_OK(r, epx_combine_recv(p, &o->io));
    if (bring_back(r, p, o) != 0) return -1;
    return check_result(r, c, o);
}

int th_step_open(th_rank_t *r, epx_plan_t *p, const th_case_t *c, int rank, th_kind_t kind, uint64_t seed, th_open_t **out) {
    th_open_t *o = NULL;
    if (th_step_begin(r, p, c, rank, kind, seed, &o) != 0) return -1;
    if (do_recv(r, p, c, o) == 0) {
        *out = o;
        return 0;
    }
    open_free(c, o);
    return -1;
}

void th_step_end(const th_case_t *c, th_open_t *o, th_tally_t *tally) {
    for (int q = 0; q < c->shape.n_ranks; q++) {
        tally->rows_sent[q] += o->want.rows_sent[q];
        tally->rows_received[q] += o->want.rows_received[q];
    }
    tally->n_steps++;
    open_free(c, o);
}

static int do_combine(th_rank_t *r, epx_plan_t *p, const th_case_t *c, th_open_t *o) {
    if (c->opts & TH_HALVES) return th_step_half(r, p, c, o, 2) || th_step_half(r, p, c, o, 3);
    if (fill_combine(r, c, o) != 0) return -1;
    if ((c->opts & TH_PARTIALS) && o->device == NULL && send_sums(r, p, c, o) != 0) return -1;
    TH_OK(r, epx_combine(p, &o->io));
    if (bring_back(r, p, o) != 0) return -1;
    return check_result(r, c, o);
}

int th_step_close(th_rank_t *r, epx_plan_t *p, const th_case_t *c, th_open_t *o, th_tally_t *tally) {
    int rc = do_combine(r, p, c, o);
    th_step_end(c, o, tally);
    return rc ? -1 : 0;
}

int th_step(th_rank_t *r, epx_plan_t *p, const th_case_t *c, int rank, th_kind_t kind, uint64_t seed, th_tally_t *tally) {
    th_open_t *o = NULL;
    if (th_step_open(r, p, c, rank, kind, seed, &o) != 0) return -1;
    return th_step_close(r, p, c, o, tally);
}

int th_check_stats(th_rank_t *r, epx_plan_t *p, const th_case_t *c, const th_tally_t *tally) {
    uint64_t sent[TH_MAX_RANKS] = {0}, received[TH_MAX_RANKS] = {0};
    epx_plan_stats_t st = {.size = sizeof st, .rows_sent = sent, .rows_received = received};
    epx_plan_info_t info = {.size = sizeof info};
    TH_OK(r, epx_plan_stats(p, &st));
    TH_OK(r, epx_plan_info(p, &info));
    TH_CHECK(r, st.n_ranks == c->shape.n_ranks, "stats of %d ranks, wanted %d", st.n_ranks, c->shape.n_ranks);
    uint64_t epoch = c->channel == 0 ? tally->n_steps : 0; /* info tells channel 0's */
    TH_CHECK(r, st.n_dispatches == tally->n_steps && st.n_combines == tally->n_steps && info.epoch == epoch,
             "%llu dispatches, %llu combines, epoch %llu; wanted %llu", (unsigned long long)st.n_dispatches,
             (unsigned long long)st.n_combines, (unsigned long long)info.epoch, (unsigned long long)tally->n_steps);
    for (int q = 0; c->device == NULL && q < c->shape.n_ranks; q++) /* on devices nobody on the host knows the ids */
        TH_CHECK(r, sent[q] == tally->rows_sent[q] && received[q] == tally->rows_received[q],
                 "rank %d: %llu rows sent, %llu received; wanted %llu, %llu", q, (unsigned long long)sent[q],
                 (unsigned long long)received[q], (unsigned long long)tally->rows_sent[q],
                 (unsigned long long)tally->rows_received[q]);
    TH_CHECK(r, c->shape.n_ranks > 1 || st.dispatch_bytes + st.combine_bytes == 0, "one rank sent %llu bytes to others",
             (unsigned long long)(st.dispatch_bytes + st.combine_bytes));
    return 0;
}

static int check_bytes(th_rank_t *r, const epx_group_t *g, epx_plan_t *p, const th_case_t *c, const epx_plan_config_t *cfg) {
    size_t bytes = 0;
    epx_plan_info_t info = {.size = sizeof info};
    TH_OK(r, epx_group_plan_bytes(g, cfg, &bytes));
    TH_OK(r, epx_plan_info(p, &info));
    TH_CHECK(r, bytes == info.slab_bytes + info.private_bytes, "epx_group_plan_bytes says %zu, the plan has %zu + %zu", bytes,
             info.slab_bytes, info.private_bytes);
    if (c->device != NULL || strcmp(info.transport, "fault") == 0) return 0;
    /* Without a group: all ranks on one host, or some number of them. */
    int n_here = c->shape.n_ranks, over_hosts = strcmp(info.transport, "ucx") == 0;
    do TH_OK(r, epx_plan_bytes_hosts(cfg, c->shape.n_ranks, n_here, &bytes));
    while (over_hosts && --n_here >= 1 && bytes != info.slab_bytes + info.private_bytes);
    TH_CHECK(r, bytes == info.slab_bytes + info.private_bytes, "epx_plan_bytes_hosts says %zu, the plan has %zu + %zu", bytes,
             info.slab_bytes, info.private_bytes);
    if (over_hosts) return 0;
    TH_OK(r, epx_plan_bytes(cfg, c->shape.n_ranks, &bytes));
    TH_CHECK(r, bytes == info.slab_bytes + info.private_bytes, "epx_plan_bytes says %zu", bytes);
    return 0;
}

int th_case_refused(th_rank_t *r, epx_group_t *g, const th_case_t *c, const char *why) {
    epx_plan_config_t cfg;
    epx_plan_t *p = NULL;
    th_plan_config(c, &cfg);
    TH_STATUS(r, epx_plan_create(g, &cfg, &p), EPX_ERR_UNSUPPORTED);
    TH_CHECK(r, strstr(epx_last_error(), c->backend) && strstr(epx_last_error(), why), "message: %s", epx_last_error());
    return 0;
}

int th_case_run(th_rank_t *r, epx_group_t *g, const th_case_t *c) {
    char text[256];
    epx_plan_config_t cfg;
    epx_plan_t *p = NULL;
    th_tally_t tally = {0};
    th_plan_config(c, &cfg);
    th_note(r, "%s, epx_plan_create", th_case_text(c, text, sizeof text));
    TH_OK(r, epx_plan_create(g, &cfg, &p));
    int rc = check_bytes(r, g, p, c, &cfg);
    for (int i = 0; rc == 0 && i < c->n_steps; i++)
        rc = th_step(r, p, c, epx_group_rank(g), (th_kind_t)((c->seed + (uint64_t)i) % TH_N_KINDS), th_mix(c->seed, (uint64_t)i),
                     &tally);
    if (rc == 0) rc = th_check_stats(r, p, c, &tally);
    if (rc == 0) th_note(r, "%s, epx_plan_destroy", text);
    if (rc != 0) epx_plan_abort(p); /* peers need not wait for a failed rank */
    epx_plan_destroy(p);
    return rc;
}
