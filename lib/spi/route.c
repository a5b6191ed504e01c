/* Lists by counting sort: one pass over the tables counts, one fills. No allocation. */
#include "spi/route.h"

#include <string.h>

#include "spi/mutant.h"

static void clear_stamps(uint64_t *stamp, int n) { memset(stamp, 0, (size_t)n * sizeof *stamp); }

uint64_t epx_route_count_sent(epx_plan_t *p, const epx_io_t *io, uint64_t *rows) {
    const epx_channel_t *ch = &p->channels[io->channel];
    uint64_t *stamp = ch->routes.stamp, remote = 0;
    int k_max = p->cfg.top_k, source = epx_plan_source(p, p->rank);
    clear_stamps(stamp, p->n_ranks);
    for (int t = 0; t < io->n_tokens; t++) {
        for (int k = 0; k < k_max; k++) {
            int32_t id = io->ids[(size_t)t * (size_t)k_max + (size_t)k];
            const epx_place_t *at = id < 0 ? NULL : epx_place_of(ch->place, id, source, (uint32_t)t);
            if (at == NULL || stamp[at->rank] == (uint64_t)t + 1 || !epx_plan_sends_to(p, at->rank)) continue;
            stamp[at->rank] = (uint64_t)t + 1;
            rows[at->rank]++;
            remote += at->rank != p->rank;
        }
    }
    return remote;
}

/* Local expert that computes an id for a token, or -1. */
static int local_expert(const epx_plan_t *p, const epx_channel_t *ch, int32_t id, int src, uint32_t t) {
    if (EPX_MUTANT(replica_ignores_token)) t = (uint32_t)p->rank;
    const epx_place_t *at = id < 0 ? NULL : epx_place_of(ch->place, id, src, t);
    if (at == NULL || at->rank != p->rank) return -1;
    if (EPX_MUTANT(off_by_one_expert)) return (at->local + 1) % ch->place->n_local;
    return at->local;
}

static int source_at(const epx_plan_t *p, int i) { return EPX_MUTANT(list_unordered) ? (i + p->rank) % p->n_ranks : i; }

/* Rows per local expert into expert_off[e + 1], and rows_received. */
static void count_rows(epx_plan_t *p, epx_channel_t *ch) {
    epx_routes_t *r = &ch->routes;
    int k_max = p->cfg.top_k;
    uint64_t serial = 0;
    for (int src = 0; src < p->n_ranks; src++) {
        for (uint32_t t = 0; t < r->n_tokens[src]; t++) {
            const int32_t *ids = r->ids[src] + (size_t)t * (size_t)k_max;
            int any = 0;
            serial++;
            for (int k = 0; k < k_max; k++) {
                int e = local_expert(p, ch, ids[k], src, t);
                if (e < 0) continue;
                any = 1;
                if (r->stamp[e] == serial) continue;
                r->stamp[e] = serial;
                r->expert_off[e + 1]++;
            }
            if (any) p->rows_received[epx_plan_holder(p, src, p->rank)]++;
        }
    }
}

/* The row of (token, k): a new one, or the one that an earlier k of the token made. */
static void place_token(epx_plan_t *p, epx_channel_t *ch, int src, uint32_t t) {
    epx_routes_t *r = &ch->routes;
    int k_max = p->cfg.top_k;
    const int32_t *ids = r->ids[src] + (size_t)t * (size_t)k_max;
    int32_t *row_of = r->row_of + (size_t)src * p->layout.route_block + (size_t)t * (size_t)k_max;
    for (int k = 0; k < k_max; k++) {
        int e = local_expert(p, ch, ids[k], src, t), first = 0;
        row_of[k] = -1;
        if (e < 0) continue;
        while (ids[first] != ids[k]) first++;
        if (first < k) {
            row_of[k] = row_of[first];
            continue;
        }
        int32_t i = r->expert_off[e]++; /* restored by the caller */
        r->entries[i].src = (uint32_t)src;
        r->entries[i].token = t;
        r->entry_k[i] = (uint8_t)k;
        row_of[k] = i;
    }
}

/* List indices in row_of become rows of the layout. */
static void rows_to_layout(epx_plan_t *p, epx_channel_t *ch) {
    epx_routes_t *r = &ch->routes;
    size_t k_max = (size_t)p->cfg.top_k;
    for (int e = 0; e < ch->place->n_local; e++) {
        for (int32_t i = r->expert_off[e]; i < r->expert_off[e + 1]; i++) {
            int src = (int)r->entries[i].src;
            const int32_t *ids = r->ids[src] + r->entries[i].token * k_max;
            int32_t *row_of = r->row_of + (size_t)src * p->layout.route_block + r->entries[i].token * k_max;
            for (size_t k = r->entry_k[i]; k < k_max; k++)
                if (ids[k] == ids[r->entry_k[i]]) row_of[k] = (int32_t)epx_route_row(ch, e, i);
        }
    }
}

/* Where each expert's rows start in the output. */
static void lay_out(const epx_plan_t *p, epx_channel_t *ch) {
    epx_routes_t *r = &ch->routes;
    int32_t align = EPX_MUTANT(contiguous_unpadded) ? 1 : p->cfg.align;
    r->out_off[0] = 0;
    for (int e = 0; e < ch->place->n_local; e++) {
        int32_t n = r->expert_off[e + 1] - r->expert_off[e];
        if (p->cfg.layout == EPX_LAYOUT_EXPERT_MAJOR) n = p->row_cap;
        if (p->cfg.layout == EPX_LAYOUT_CONTIGUOUS) n = (n + align - 1) / align * align;
        r->out_off[e + 1] = r->out_off[e] + n;
    }
}

void epx_route_build(epx_plan_t *p, epx_channel_t *ch) {
    epx_routes_t *r = &ch->routes;
    clear_stamps(r->stamp, ch->place->n_local);
    memset(r->expert_off, 0, ((size_t)ch->place->n_local + 1) * sizeof *r->expert_off);
    count_rows(p, ch);
    for (int e = 0; e < ch->place->n_local; e++) r->expert_off[e + 1] += r->expert_off[e];
    for (int i = 0; i < p->n_ranks; i++) {
        int src = source_at(p, i);
        for (uint32_t t = 0; t < r->n_tokens[src]; t++) place_token(p, ch, src, t);
    }
    /* place_token() moved every start to its end, which is the next expert's start. */
    for (int e = ch->place->n_local; e > 0; e--) r->expert_off[e] = r->expert_off[e - 1];
    r->expert_off[0] = 0;
    lay_out(p, ch);
    if (p->cfg.layout != EPX_LAYOUT_LISTS) rows_to_layout(p, ch);
}

void epx_route_lists(epx_plan_t *p, epx_channel_t *ch) {
    epx_routes_t *r = &ch->routes;
    ch->lists.n_local_experts = ch->place->n_local;
    ch->lists.n_rows = r->expert_off[ch->place->n_local];
    ch->lists.expert_off = r->expert_off;
    ch->lists.entries = r->entries;
    ch->lists.row_base = r->row_base;
    ch->lists.scale_base = p->layout.n_scales ? r->scale_base : NULL;
    ch->lists.row_stride_bytes = p->layout.wire_row_bytes;
    ch->lists.scale_stride = p->layout.scale_words;
}

/* The start of a row that is copied next; the hardware follows from there. */
static void prefetch_row(const char *row, size_t bytes) {
    for (size_t i = 0; i < bytes && i < 512; i += 64) EPX_PREFETCH_R(row + i);
}

/* The scales of output row `row`, which lies with expert e; words NULL: zeros. */
static void put_scales(const epx_plan_t *p, int e, size_t row, const float *words, float *out) {
    size_t n = p->layout.scale_words, at = row * n;
    if (p->cfg.scale_layout == EPX_SCALE_COL_MAJOR) {
        size_t first = p->cfg.layout == EPX_LAYOUT_EXPERT_MAJOR ? (size_t)e : 0;
        at = first * n * p->scale_gap + row - first * (size_t)p->row_cap;
    }
    if (EPX_MUTANT(scales_row_major)) at = row * n;
    size_t gap = EPX_MUTANT(scales_row_major) ? 1 : p->scale_gap;
    for (size_t j = 0; j < n; j++) {
        if (words != NULL) memcpy(&out[at + j * gap], &words[j], 4);
        else memset(&out[at + j * gap], 0, 4);
    }
}

/* CONTIGUOUS: rows between the count and the next expert are zero. */
static void pad_rows(const epx_plan_t *p, const epx_routes_t *r, int e, const epx_io_t *io) {
    size_t row_bytes = p->layout.wire_row_bytes;
    size_t row = (size_t)(r->out_off[e] + r->expert_off[e + 1] - r->expert_off[e]), end = (size_t)r->out_off[e + 1];
    if (row < end) memset((char *)io->out_x + row * row_bytes, 0, (end - row) * row_bytes);
    for (; p->layout.n_scales && row < end; row++) put_scales(p, e, row, NULL, io->out_scale);
}

static void pack_rows(epx_plan_t *p, epx_channel_t *ch, const epx_io_t *io) {
    epx_routes_t *r = &ch->routes;
    size_t row_bytes = p->layout.wire_row_bytes;
    for (int e = 0; e < ch->place->n_local; e++) {
        for (int32_t i = r->expert_off[e]; i < r->expert_off[e + 1]; i++) {
            epx_list_entry_t en = r->entries[i];
            size_t row = epx_route_row(ch, e, i);
            if (i + 1 < r->expert_off[e + 1])
                prefetch_row((const char *)r->row_base[r->entries[i + 1].src] + r->entries[i + 1].token * row_bytes, row_bytes);
            epx_row_copy((char *)io->out_x + row * row_bytes, (const char *)r->row_base[en.src] + en.token * row_bytes,
                         row_bytes);
            if (p->layout.n_scales)
                put_scales(p, e, row, r->scale_base[en.src] + en.token * p->layout.scale_words, io->out_scale);
        }
        if (p->cfg.layout == EPX_LAYOUT_CONTIGUOUS) pad_rows(p, r, e, io);
    }
}

/* Distinct (token, expert) pairs over all ranks. */
static void histogram(const epx_plan_t *p, const epx_routes_t *r, int32_t *out) {
    size_t k_max = (size_t)p->cfg.top_k;
    memset(out, 0, (size_t)p->cfg.n_experts * sizeof *out);
    for (int src = 0; src < p->n_ranks; src++) {
        for (size_t i = 0; i < r->n_tokens[src] * k_max; i++) {
            const int32_t *ids = r->ids[src] + i / k_max * k_max;
            size_t first = 0;
            while (ids[first] != ids[i % k_max]) first++;
            if (ids[first] >= 0 && first == i % k_max) out[ids[first]]++;
        }
    }
}

void epx_route_output(epx_plan_t *p, epx_channel_t *ch, const epx_io_t *io) {
    const epx_routes_t *r = &ch->routes;
    if (p->cfg.layout != EPX_LAYOUT_LISTS) pack_rows(p, ch, io);
    if (io->out_counts != NULL)
        for (int e = 0; e < ch->place->n_local; e++) io->out_counts[e] = r->expert_off[e + 1] - r->expert_off[e];
    if (io->out_histogram != NULL) histogram(p, r, io->out_histogram);
}
