/* The exchange over slabs: who writes what into whose slab, and when. See docs/protocol.md. */
#include "spi/exchange.h"

#include <string.h>

#include "base/status.h"
#include "spi/debug.h"
#include "spi/mutant.h"
#include "spi/route.h"
#include "spi/rows.h"

static char *own(const epx_plan_t *p, uint64_t off) { return p->slab->base[p->rank] + off; }

const void *epx_exchange_rows(const epx_plan_t *p, int channel, int rank) {
    if (p->slab->base[rank] == NULL) return own(p, epx_d_row_off(&p->layout, channel, rank, 0));
    uint64_t off = p->cfg.wire_dtype == p->cfg.token_dtype ? p->layout.x_off : p->layout.stage_off;
    return p->slab->base[rank] + epx_channel_off(&p->layout, channel) + off;
}

const float *epx_exchange_scales(const epx_plan_t *p, int channel, int rank) {
    if (p->layout.n_scales == 0) return NULL;
    if (p->slab->base[rank] == NULL) return (const float *)(const void *)own(p, epx_d_scale_off(&p->layout, channel, rank, 0));
    return (const float *)(const void *)(p->slab->base[rank] + epx_channel_off(&p->layout, channel) + p->layout.stage_scale_off);
}

/* x may lie elsewhere in the input region. */
static void copy_in(char *dst, const char *src, size_t n_bytes) {
    if (dst < src + n_bytes && src < dst + n_bytes) memmove(dst, src, n_bytes);
    else epx_row_copy(dst, src, n_bytes);
}

void epx_exchange_stage(epx_plan_t *p, int channel, const epx_io_t *io) {
    const epx_slab_layout_t *l = &p->layout;
    uint64_t base = epx_channel_off(l, channel);
    char *rows = own(p, base + (p->cfg.wire_dtype == p->cfg.token_dtype ? l->x_off : l->stage_off));
    float *scales = (float *)(void *)own(p, base + l->stage_scale_off);
    size_t n = (size_t)io->n_tokens, h = (size_t)p->cfg.hidden;
    p->channels[channel].own_rows = rows;
    p->channels[channel].own_scales = scales;
    if (n == 0) return;
    if (p->cfg.wire_dtype == p->cfg.token_dtype) {
        if (io->x != rows) copy_in(rows, io->x, n * l->x_row_bytes);
        if (l->n_scales) memcpy(scales, io->x_scale, n * l->scale_words * sizeof(float));
        return;
    }
    for (size_t t = 0; t < n; t++)
        epx_row_quantise((uint8_t *)rows + t * l->wire_row_bytes, scales + t * l->scale_words,
                         (const char *)io->x + t * l->x_row_bytes, p->cfg.token_dtype, h, (size_t)p->cfg.scale_block,
                         p->cfg.scale_format);
}

void epx_exchange_push_routing(epx_plan_t *p, int channel, int dst, const epx_io_t *io) {
    const epx_slab_layout_t *l = &p->layout;
    uint64_t n_tokens = (uint64_t)io->n_tokens;
    size_t bytes = (size_t)io->n_tokens * (size_t)p->cfg.top_k * 4;
    memcpy(epx_slab_put(p->slab, dst, epx_count_off(l, channel, p->rank), sizeof n_tokens), &n_tokens, sizeof n_tokens);
    if (bytes == 0) return;
    if (!(EPX_MUTANT(stale_routing) && p->channels[channel].epoch % 3 == 0))
        memcpy(epx_slab_put(p->slab, dst, epx_ids_off(l, channel, p->rank), bytes), io->ids, bytes);
    memcpy(epx_slab_put(p->slab, dst, epx_weights_off(l, channel, p->rank), bytes), io->weights, bytes);
}

/* Does token t of this rank, with these ids, have an expert at dst? */
static int goes_to(const epx_plan_t *p, int channel, size_t t, const int32_t *ids, int dst) {
    int source = epx_plan_source(p, p->rank);
    for (int k = 0; k < p->cfg.top_k; k++) {
        const epx_place_t *at = ids[k] < 0 ? NULL : epx_place_of(p->channels[channel].place, ids[k], source, (uint32_t)t);
        if (at != NULL && at->rank == dst) return 1;
    }
    return 0;
}

void epx_exchange_push_rows(epx_plan_t *p, int channel, int dst, const epx_io_t *io, int all_tokens) {
    const epx_slab_layout_t *l = &p->layout;
    const char *rows = epx_exchange_rows(p, channel, p->rank);
    const float *scales = epx_exchange_scales(p, channel, p->rank);
    size_t n = (size_t)io->n_tokens, k_max = (size_t)p->cfg.top_k, scale_bytes = l->scale_words * sizeof(float);
    for (size_t t = 0; t < n; t++) {
        if (!all_tokens && !goes_to(p, channel, t, io->ids + t * k_max, dst)) continue;
        char *at = epx_slab_put(p->slab, dst, epx_d_row_off(l, channel, p->rank, t), l->wire_row_bytes);
        epx_row_copy(at, rows + t * l->wire_row_bytes, l->wire_row_bytes);
    }
    for (size_t t = 0; scale_bytes && t < n; t++) { /* apart from the rows, so that both are long runs */
        if (!all_tokens && !goes_to(p, channel, t, io->ids + t * k_max, dst)) continue;
        memcpy(epx_slab_put(p->slab, dst, epx_d_scale_off(l, channel, p->rank, t), scale_bytes), scales + t * l->scale_words,
               scale_bytes);
    }
}

/* Own rank last: peers are on the critical path. */
static int nth_dst(const epx_plan_t *p, int i) { return (p->rank + 1 + i) % p->n_ranks; }

/* Does any token of this exchange go to `dst`? For planted mistakes. */
static int sends_rows_to(const epx_plan_t *p, int channel, int dst) {
    const int32_t *ids = (const int32_t *)(const void *)own(p, epx_ids_off(&p->layout, channel, p->rank));
    for (size_t t = 0; t < (size_t)p->channels[channel].n_tokens; t++)
        if (goes_to(p, channel, t, ids + t * (size_t)p->cfg.top_k, dst)) return 1;
    return 0;
}

void epx_exchange_flag_dispatch(epx_plan_t *p, int channel) {
    for (int i = 0; i < p->n_ranks; i++) {
        int dst = nth_dst(p, i);
        if (!p->alive[dst]) continue;
        if (EPX_MUTANT(no_flag_at_zero_rows) && !sends_rows_to(p, channel, dst)) continue;
        epx_slab_signal(p->slab, dst, epx_flag_d_off(&p->layout, channel, p->rank), p->channels[channel].epoch);
    }
}

void epx_exchange_flag_combine(epx_plan_t *p, int channel) {
    for (int i = 0; i < p->n_ranks; i++)
        if (p->alive[nth_dst(p, i)])
            epx_slab_signal(p->slab, nth_dst(p, i), epx_flag_c_off(&p->layout, channel, p->rank), p->channels[channel].epoch);
}

static epx_wait_t wait_of(epx_plan_t *p, int channel, const char *phase) {
    epx_wait_t w = {p->net, p->slab, phase, p->channels[channel].epoch, p->cfg.timeout_ns, &p->wait_ns};
    return w;
}

epx_status_t epx_exchange_wait_dispatch(epx_plan_t *p, int channel) {
    epx_wait_t w = wait_of(p, channel, "dispatch");
    if (EPX_MUTANT(drop_wait_dispatch)) return EPX_OK;
    for (int i = 0; i < p->n_ranks; i++) {
        int src = nth_dst(p, i);
        if (p->alive[src]) EPX_TRY(epx_wait_ge(&w, src, epx_flag_d_off(&p->layout, channel, src), w.epoch));
    }
    epx_slab_drain(p->slab);
    if (EPX_MUTANT(early_reuse) && p->rank % 2 == 1) EPX_MUTANT_PAUSE();
    return EPX_OK;
}

epx_status_t epx_exchange_wait_combine(epx_plan_t *p, int channel) {
    epx_wait_t w = wait_of(p, channel, "combine");
    if (EPX_MUTANT(drop_wait_combine)) return EPX_OK;
    for (int i = 0; i < p->n_ranks; i++) {
        int src = nth_dst(p, i);
        if (!p->alive[src]) continue;
        if (EPX_MUTANT(early_reuse) && !sends_rows_to(p, channel, src)) continue;
        EPX_TRY(epx_wait_ge(&w, src, epx_flag_c_off(&p->layout, channel, src), w.epoch));
    }
    epx_slab_drain(p->slab);
    return EPX_OK;
}

void epx_exchange_open_routing(epx_plan_t *p, int channel) {
    epx_routes_t *r = &p->channels[channel].routes;
    for (int src = 0; src < p->n_ranks; src++) {
        int holder = epx_plan_source(p, src) == src ? epx_plan_holder(p, src, p->rank) : -1;
        r->n_tokens[src] = 0;
        if (holder < 0) continue;
        r->ids[src] = (const int32_t *)(const void *)own(p, epx_ids_off(&p->layout, channel, holder));
        r->weights[src] = (const float *)(const void *)own(p, epx_weights_off(&p->layout, channel, holder));
        r->n_tokens[src] = (uint32_t)*epx_slab_word(p->slab, p->rank, epx_count_off(&p->layout, channel, holder));
    }
}

/* Where a row goes that another rank, or this one, will sum. */
static char *c_slot(const epx_plan_t *p, int channel, int rank, uint64_t plane, uint64_t token) {
    if (EPX_MUTANT(channels_share_rows)) channel = 0;
    return epx_slab_put(p->slab, rank, epx_c_row_off(&p->layout, channel, plane, token), p->layout.combine_row_bytes);
}

/* Where this rank finds such a row. */
static char *c_row(const epx_plan_t *p, int channel, uint64_t plane, uint64_t token) {
    if (EPX_MUTANT(channels_share_rows)) channel = 0;
    return own(p, epx_c_row_off(&p->layout, channel, plane, token));
}

/* The mutant's rounding: drop the low bits. */
static void truncate_row(uint16_t *dst, const float *src, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, &src[i], 4);
        dst[i] = (uint16_t)(u >> 16);
    }
}

static uint64_t slot_of(const epx_plan_t *p, int channel, int src, uint64_t token) {
    if (EPX_MUTANT(wrong_slot)) return (token + 1) % p->channels[channel].routes.n_tokens[src];
    return token;
}

/* The first living rank of those that want the results of `source`. */
static int first_member(const epx_plan_t *p, int source) {
    int m = source;
    while (!p->alive[m]) m++;
    return m;
}

/* The row that the first of them has got goes to the others, too. */
static void share_row(epx_plan_t *p, int channel, int first, uint64_t plane, uint64_t token, const char *row) {
    int end = epx_plan_source(p, first) + p->cfg.replicate;
    epx_debug_push_sum(p, channel, first, plane, token, row);
    if (first != p->rank) p->combine_bytes += p->layout.combine_row_bytes;
    for (int m = first + 1; m < end && !EPX_MUTANT(one_member_served); m++) {
        if (!p->alive[m]) continue;
        epx_row_copy(c_slot(p, channel, m, plane, token), row, p->layout.combine_row_bytes);
        epx_debug_push_sum(p, channel, m, plane, token, row);
        if (m != p->rank) p->combine_bytes += p->layout.combine_row_bytes;
    }
}

static void send_exact(epx_plan_t *p, int channel, const void *x) {
    epx_channel_t *ch = &p->channels[channel];
    const epx_routes_t *r = &ch->routes;
    size_t h = (size_t)p->cfg.hidden, row_bytes = h * epx_dtype_bytes(p->cfg.expert_dtype);
    for (int e = 0; e < ch->place->n_local; e++) {
        for (int32_t i = r->expert_off[e]; i < r->expert_off[e + 1]; i++) {
            int src = (int)r->entries[i].src, to = first_member(p, src);
            uint64_t slot = slot_of(p, channel, src, r->entries[i].token);
            const char *y = (const char *)x + epx_route_row(ch, e, i) * row_bytes;
            char *dst = c_slot(p, channel, to, r->entry_k[i], slot);
            if (EPX_MUTANT(skip_own_rounding) && to == p->rank && p->cfg.combine_dtype == EPX_BF16 &&
                p->cfg.expert_dtype == EPX_F32)
                truncate_row((uint16_t *)(void *)dst, (const float *)(const void *)y, h);
            else epx_row_store(dst, &p->combine_form, y, p->cfg.expert_dtype, h);
            share_row(p, channel, to, r->entry_k[i], slot, dst);
        }
    }
}

/* Terms of (src, token) in ascending k over the own experts. */
static int partial_terms(const epx_plan_t *p, const epx_routes_t *r, int src, uint32_t t, const void *x, epx_row_term_t *terms) {
    int k_max = p->cfg.top_k, n = 0;
    size_t at = (size_t)t * (size_t)k_max, row_bytes = (size_t)p->cfg.hidden * epx_dtype_bytes(p->cfg.expert_dtype);
    const int32_t *row_of = r->row_of + (size_t)src * p->layout.route_block + at;
    for (int k = 0; k < k_max; k++) {
        if (row_of[k] < 0) continue;
        terms[n].row = (const char *)x + (size_t)row_of[k] * row_bytes;
        terms[n++].weight = r->weights[src][at + (size_t)k];
    }
    return n;
}

static void send_partial(epx_plan_t *p, int channel, const void *x, int all_tokens) {
    const epx_routes_t *r = &p->channels[channel].routes;
    epx_row_term_t terms[EPX_MAX_TOP_K];
    size_t h = (size_t)p->cfg.hidden;
    float sum[EPX_ROW_CHUNK];
    const epx_row_form_t f32 = epx_row_form(EPX_F32);
    for (int i = 0; i < p->n_ranks; i++) {
        int src = nth_dst(p, i);
        for (uint32_t t = 0; t < r->n_tokens[src]; t++) {
            int n = partial_terms(p, r, src, t, x, terms);
            if (n == 0 && !all_tokens) continue;
            int to = first_member(p, src);
            uint64_t slot = slot_of(p, channel, src, t);
            char *dst = c_slot(p, channel, to, (uint64_t)p->rank, slot);
            epx_row_weighted_sum(dst, &p->combine_form, terms, n, &p->expert_form, NULL, h);
            if (EPX_MUTANT(skip_own_rounding) && to == p->rank && p->cfg.combine_dtype == EPX_BF16 && h <= EPX_ROW_CHUNK) {
                epx_row_weighted_sum(sum, &f32, terms, n, &p->expert_form, NULL, h);
                truncate_row((uint16_t *)(void *)dst, sum, h);
            }
            share_row(p, channel, to, (uint64_t)p->rank, slot, dst);
        }
    }
}

static int has_row(const epx_plan_t *p, const int32_t *rows) {
    for (int k = 0; k < p->cfg.top_k; k++)
        if (rows[k] >= 0) return 1;
    return 0;
}

void epx_exchange_finish_sums(epx_plan_t *p, int channel, int all_tokens) {
    const epx_routes_t *r = &p->channels[channel].routes;
    for (int src = 0; src < p->n_ranks; src++) {
        for (uint32_t t = 0; t < r->n_tokens[src]; t++) {
            char *at = (char *)r->sums[src] + t * p->layout.combine_row_bytes;
            int computed = has_row(p, r->rows_of[src] + (size_t)t * (size_t)p->cfg.top_k);
            if (!computed && !all_tokens) continue;
            if (!computed) memset(at, 0, p->layout.combine_row_bytes);
            epx_debug_push_sum(p, channel, src, (uint64_t)p->rank, t, at);
            if (src != p->rank) p->combine_bytes += p->layout.combine_row_bytes;
        }
    }
}

void epx_exchange_send_rows(epx_plan_t *p, int channel, const void *x, int all_tokens) {
    if (p->channels[channel].caller_sums) {
        epx_exchange_finish_sums(p, channel, all_tokens);
        return;
    }
    if (p->cfg.combine == EPX_COMBINE_EXACT) send_exact(p, channel, x);
    else send_partial(p, channel, x, all_tokens);
}

/* Terms of an own token in k order; a repeat of an id names the row of its first place. late: weights given to combine, or NULL.
 */
static int exact_terms(const epx_plan_t *p, int channel, size_t t, const float *late, epx_row_term_t *terms) {
    const epx_channel_t *ch = &p->channels[channel];
    int source = epx_plan_source(p, p->rank), n = 0;
    size_t k_max = (size_t)p->cfg.top_k;
    const int32_t *ids = ch->routes.ids[source] + t * k_max;
    const float *weights = late != NULL ? late : ch->routes.weights[source];
    for (size_t i = 0; i < k_max; i++) {
        size_t k = EPX_MUTANT(wrong_k_order) ? k_max - 1 - i : i, first = 0;
        if (ids[k] < 0 || epx_place_of(ch->place, ids[k], source, (uint32_t)t) == NULL) continue;
        while (ids[first] != ids[k]) first++;
        terms[n].row = c_row(p, channel, first, t);
        terms[n++].weight = weights[t * k_max + k];
    }
    return n;
}

/* Terms of an own token in rank order: the ranks that compute an expert of it, or all. */
static int partial_sum_terms(const epx_plan_t *p, int channel, size_t t, int all_tokens) {
    const epx_channel_t *ch = &p->channels[channel];
    const epx_routes_t *r = &ch->routes;
    int source = epx_plan_source(p, p->rank), n = 0;
    const int32_t *ids = r->ids[source] + t * (size_t)p->cfg.top_k;
    for (int k = 0; k < p->cfg.top_k; k++) {
        const epx_place_t *at = ids[k] < 0 ? NULL : epx_place_of(ch->place, ids[k], source, (uint32_t)t);
        if (at != NULL) r->stamp[at->rank] = t + 1;
    }
    for (int src = 0; src < p->n_ranks; src++)
        if ((all_tokens && p->alive[src]) || r->stamp[src] == t + 1) r->terms[n++].row = c_row(p, channel, (uint64_t)src, t);
    return n;
}

epx_status_t epx_exchange_sum(epx_plan_t *p, int channel, const epx_io_t *io, int all_tokens) {
    epx_channel_t *ch = &p->channels[channel];
    size_t n = (size_t)ch->n_tokens, h = (size_t)p->cfg.hidden, out_bytes = h * epx_dtype_bytes(p->out_form.dtype);
    epx_row_term_t *terms = ch->routes.terms;
    memset(ch->routes.stamp, 0, (size_t)p->n_ranks * sizeof(uint64_t));
    for (size_t t = 0; t < n; t++) {
        char *out = (char *)io->out_x + t * out_bytes;
        const void *add = io->add == NULL ? NULL : (const char *)io->add + t * out_bytes;
        int exact = p->cfg.combine == EPX_COMBINE_EXACT;
        int n_terms =
            exact ? exact_terms(p, channel, t, io->combine_weights, terms) : partial_sum_terms(p, channel, t, all_tokens);
        EPX_TRY(epx_debug_check_terms(p, channel, t, terms, n_terms));
        if (exact) epx_row_weighted_sum(out, &p->out_form, terms, n_terms, &p->combine_form, add, h);
        else epx_row_plain_sum(out, &p->out_form, terms, n_terms, &p->combine_form, add, h);
    }
    return epx_debug_check_slab(p);
}
