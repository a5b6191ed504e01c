/* Backend "ref": the slow sequential oracle. All ranks live in one address space; every rank reads its peers' tables, rows and
 * expert outputs where they are, one element at a time, and does the whole combine at the source. It shares flags, waits and
 * number formats with the other backends, but neither their lists, nor their kernels, nor their combine region. */
#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "base/half.h"
#include "base/status.h"
#include "spi/a2a.h"
#include "spi/debug.h"
#include "spi/wait.h"

/* Words that a rank publishes: its expert outputs in list order, their lists. */
enum { PUB_OUTPUTS = 0, PUB_ENTRIES, PUB_EXPERT_OFF };

static epx_status_t can(const epx_net_t *net, const epx_plan_config_t *cfg) {
    (void)cfg;
    if (net != NULL && net->n_messages > 0)
        return epx_fail(EPX_ERR_UNSUPPORTED, "backend ref needs all ranks in one process and mapped; %d are reached by messages",
                        net->n_messages);
    for (int r = 1; net != NULL && r < net->n_ranks; r++)
        if (memcmp(net->peers[r].process, net->peers[0].process, sizeof net->peers[0].process) != 0 ||
            net->peers[r].pid != net->peers[0].pid)
            return epx_fail(EPX_ERR_UNSUPPORTED,
                            "backend ref needs all ranks in one process; ranks 0 and %d are pids %lld and %lld", r,
                            (long long)net->peers[0].pid, (long long)net->peers[r].pid);
    return EPX_OK;
}

/* Block of a channel: gathered rows | gathered scales | copy of the expert outputs | two f32 rows. */
typedef struct {
    size_t rows, scales, outputs, scratch, bytes;
} block_t;

/* Words that hold the scales of a row on the wire. */
static size_t n_words(const epx_plan_config_t *cfg) {
    size_t n_blocks = ((size_t)cfg->hidden + (size_t)cfg->scale_block - 1) / (size_t)cfg->scale_block;
    if (cfg->wire_dtype != EPX_FP8_E4M3) return 0;
    return cfg->scale_format == EPX_SCALE_UE8M0 ? (n_blocks + 3) / 4 : n_blocks;
}

static int block_of(const epx_plan_config_t *cfg, int n_ranks, size_t row_max, block_t *b) {
    size_t h = (size_t)cfg->hidden, n = (size_t)n_ranks * (size_t)cfg->max_tokens;
    b->rows = 0;
    if (!epx_mul_size(n, h * epx_dtype_bytes(cfg->wire_dtype), &b->scales) || !epx_round_up_size(b->scales, 64, &b->scales))
        return 0;
    if (!epx_mul_size(n, n_words(cfg) * sizeof(float), &b->outputs) || !epx_add_size(b->outputs, b->scales, &b->outputs) ||
        !epx_round_up_size(b->outputs, 64, &b->outputs))
        return 0;
    return epx_mul_size(row_max, h * epx_dtype_bytes(cfg->expert_dtype), &b->scratch) &&
           epx_add_size(b->scratch, b->outputs, &b->scratch) && epx_round_up_size(b->scratch, 64, &b->scratch) &&
           epx_add_size(b->scratch, 2 * h * sizeof(float), &b->bytes) && epx_round_up_size(b->bytes, 64, &b->bytes);
}

static epx_status_t private_bytes(const epx_plan_config_t *cfg, int n_ranks, size_t row_max, size_t *out_bytes) {
    block_t b;
    if (block_of(cfg, n_ranks, row_max, &b) && epx_mul_size(b.bytes, (size_t)cfg->n_channels, out_bytes)) return EPX_OK;
    return epx_fail(EPX_ERR_CAPACITY, "backend ref: the gathered rows do not fit the address space");
}

static char *block_at(const epx_plan_t *p, int channel, block_t *b) {
    (void)block_of(&p->cfg, p->n_ranks, p->row_max, b);
    return (char *)p->backend_block + (size_t)channel * b->bytes;
}

static char *peer_at(const epx_plan_t *p, int channel, int rank, uint64_t off) {
    return p->slab->base[rank] + epx_channel_off(&p->layout, channel) + off;
}

static void publish(const epx_plan_t *p, int channel, int word, const void *ptr) {
    uint64_t *w = (uint64_t *)(void *)peer_at(p, channel, p->rank, p->layout.publish_off);
    w[word] = (uint64_t)(uintptr_t)ptr;
}

static const void *published(const epx_plan_t *p, int channel, int rank, int word) {
    const uint64_t *w = (const uint64_t *)(const void *)peer_at(p, channel, rank, p->layout.publish_off);
    return (const void *)(uintptr_t)w[word];
}

static void flag_all(const epx_plan_t *p, int channel, uint64_t (*flag)(const epx_slab_layout_t *l, int channel, int src)) {
    for (int r = 0; r < p->n_ranks; r++)
        if (p->alive[r]) epx_slab_signal(p->slab, r, flag(&p->layout, channel, p->rank), p->channels[channel].epoch);
}

static epx_status_t wait_all(epx_plan_t *p, int channel, const char *phase,
                             uint64_t (*flag)(const epx_slab_layout_t *l, int channel, int src)) {
    epx_wait_t w = {p->net, p->slab, phase, p->channels[channel].epoch, p->cfg.timeout_ns, &p->wait_ns};
    for (int r = 0; r < p->n_ranks; r++)
        if (p->alive[r]) EPX_TRY(epx_wait_ge(&w, r, flag(&p->layout, channel, r), w.epoch));
    return EPX_OK;
}

/* Own tables stay in the own slab, where peers read them. */
static void publish_routing(epx_plan_t *p, const epx_io_t *io) {
    char *own = p->slab->base[p->rank];
    size_t bytes = (size_t)io->n_tokens * (size_t)p->cfg.top_k * 4;
    *epx_slab_word(p->slab, p->rank, epx_count_off(&p->layout, io->channel, p->rank)) = (uint64_t)io->n_tokens;
    if (bytes == 0) return;
    memcpy(own + epx_ids_off(&p->layout, io->channel, p->rank), io->ids, bytes);
    memcpy(own + epx_weights_off(&p->layout, io->channel, p->rank), io->weights, bytes);
}

/* The rank that computes an id for a token, or -1. */
static int computes(const epx_plan_t *p, int channel, int32_t id, int src, size_t t) {
    const epx_place_t *at = id < 0 ? NULL : epx_place_of(p->channels[channel].place, id, src, (uint32_t)t);
    return at == NULL ? -1 : at->rank;
}

static epx_status_t dispatch_send(epx_plan_t *p, const epx_io_t *io) {
    size_t n = (size_t)io->n_tokens, k = (size_t)p->cfg.top_k;
    char *x = peer_at(p, io->channel, p->rank, p->layout.x_off);
    publish_routing(p, io);
    if (n && io->x != x) memmove(x, io->x, n * p->layout.x_row_bytes);
    if (n && io->x_scale != NULL)
        memcpy(peer_at(p, io->channel, p->rank, p->layout.stage_scale_off), io->x_scale, n * n_words(&p->cfg) * sizeof(float));
    for (int r = 0; r < p->n_ranks; r++) {
        for (size_t t = 0; t < n; t++) {
            int goes = 0;
            for (size_t j = 0; j < k; j++)
                goes |= computes(p, io->channel, io->ids[t * k + j], epx_plan_source(p, p->rank), t) == r;
            p->rows_sent[r] += (uint64_t)(goes && epx_plan_sends_to(p, r));
        }
    }
    flag_all(p, io->channel, epx_flag_d_off);
    return EPX_OK;
}

static float value_of(epx_dtype_t dtype, const void *row, size_t i) {
    uint16_t h;
    float f;
    switch (dtype) {
    case EPX_F32:
        memcpy(&f, (const char *)row + 4 * i, 4);
        return f;
    case EPX_BF16:
        memcpy(&h, (const char *)row + 2 * i, 2);
        return epx_bf16_to_f32(h);
    case EPX_F16:
        memcpy(&h, (const char *)row + 2 * i, 2);
        return epx_f16_to_f32(h);
    default:
        return epx_e4m3_to_f32(((const uint8_t *)row)[i]);
    }
}

static void store(epx_dtype_t dtype, void *row, size_t i, float f) {
    uint16_t h = dtype == EPX_BF16 ? epx_f32_to_bf16(f) : epx_f32_to_f16(f);
    if (dtype == EPX_F32) memcpy((char *)row + 4 * i, &f, 4);
    else memcpy((char *)row + 2 * i, &h, 2);
}

/* The definition of the fp8 scale: amax of the block without NaN, clamped to [1e-12, FLT_MAX]; amax / 448; for UE8M0 the next
 * power of two. */
static float scale_of(const epx_plan_t *p, const float *x, size_t n) {
    float amax = 1e-12f, scale;
    int e;
    for (size_t i = 0; i < n; i++)
        if (fabsf(x[i]) > amax) amax = fabsf(x[i]);
    if (isinf(amax)) amax = 3.402823466e+38f;
    scale = amax / 448.0f;
    if (p->cfg.scale_format == EPX_SCALE_F32) return scale;
    return frexpf(scale, &e) == 0.5f ? scale : ldexpf(1.0f, e);
}

/* x[n] becomes what fp8 with scales makes of it; codes and scales where wanted. */
static void through_fp8(const epx_plan_t *p, float *x, size_t n, uint8_t *codes, float *scales) {
    size_t block = (size_t)p->cfg.scale_block;
    for (size_t b = 0; b * block < n; b++) {
        size_t end = (b + 1) * block < n ? (b + 1) * block : n;
        float scale = scale_of(p, x + b * block, end - b * block);
        int e;
        for (size_t i = b * block; i < end; i++) {
            uint8_t code = epx_f32_to_e4m3(x[i] / scale);
            if (codes != NULL) codes[i] = code;
            x[i] = epx_e4m3_to_f32(code) * scale;
        }
        if (scales == NULL) continue;
        if (p->cfg.scale_format == EPX_SCALE_F32) scales[b] = scale;
        else (void)frexpf(scale, &e), ((uint8_t *)scales)[b] = (uint8_t)(e - 1 + 127);
    }
}

static float *scratch_of(const epx_plan_t *p, int channel) {
    block_t b;
    char *block = block_at(p, channel, &b);
    return (float *)(void *)(block + b.scratch);
}

static void quantise_row(const epx_plan_t *p, int channel, const void *x, uint8_t *codes, float *scales) {
    float *row = scratch_of(p, channel);
    for (size_t i = 0; i < (size_t)p->cfg.hidden; i++) row[i] = value_of(p->cfg.token_dtype, x, i);
    memset(scales, 0, n_words(&p->cfg) * sizeof *scales);
    through_fp8(p, row, (size_t)p->cfg.hidden, codes, scales);
}

static void gather_rows(epx_plan_t *p, int channel, int src, int holder) {
    block_t b;
    char *block = block_at(p, channel, &b);
    epx_routes_t *r = &p->channels[channel].routes;
    size_t t_max = (size_t)p->cfg.max_tokens, row_bytes = p->layout.wire_row_bytes, n_scales = n_words(&p->cfg);
    char *rows = block + (size_t)src * t_max * row_bytes;
    float *scales = (float *)(void *)(block + b.scales) + (size_t)src * t_max * n_scales;
    const char *x = peer_at(p, channel, holder, p->layout.x_off);
    for (size_t t = 0; t < r->n_tokens[src]; t++) {
        if (p->cfg.wire_dtype == p->cfg.token_dtype) memcpy(rows + t * row_bytes, x + t * row_bytes, row_bytes);
        else quantise_row(p, channel, x + t * p->layout.x_row_bytes, (uint8_t *)rows + t * row_bytes, scales + t * n_scales);
    }
    if (p->cfg.token_dtype == EPX_FP8_E4M3 && r->n_tokens[src])
        memcpy(scales, peer_at(p, channel, holder, p->layout.stage_scale_off), r->n_tokens[src] * n_scales * sizeof(float));
    r->row_base[src] = rows;
    r->scale_base[src] = n_scales ? scales : NULL;
}

static int names(const epx_plan_t *p, const epx_routes_t *r, int src, uint32_t t, int expert) {
    for (int k = 0; k < p->cfg.top_k; k++)
        if (r->ids[src][(size_t)t * (size_t)p->cfg.top_k + (size_t)k] == expert) return 1;
    return 0;
}

/* The expert in slot e of this rank. */
static int expert_in(const epx_plan_t *p, const epx_placement_t *pl, int e) {
    int slot = 0;
    for (int seen = 0; seen <= e; slot++) seen += pl->slot_rank[slot] == p->rank;
    return pl->slot_expert[slot - 1];
}

/* Every (expert, src, token) in order, by looking at all of them. */
static void build_lists(epx_plan_t *p, epx_channel_t *ch) {
    epx_routes_t *r = &ch->routes;
    int32_t n = 0;
    for (int e = 0; e < ch->place->n_local; e++) {
        int expert = expert_in(p, ch->place, e);
        r->expert_off[e] = n;
        for (int src = 0; src < p->n_ranks; src++) {
            for (uint32_t t = 0; t < r->n_tokens[src]; t++) {
                const epx_place_t *at = epx_place_of(ch->place, expert, src, t);
                if (at != NULL && at->rank == p->rank && at->local == e && names(p, r, src, t, expert))
                    r->entries[n++] = (epx_list_entry_t){(uint32_t)src, t};
            }
        }
    }
    r->expert_off[ch->place->n_local] = n;
}

static void count_received(epx_plan_t *p, int channel, const epx_routes_t *r) {
    for (int src = 0; src < p->n_ranks; src++) {
        for (uint32_t t = 0; t < r->n_tokens[src]; t++) {
            int any = 0;
            for (int e = 0; e < p->cfg.n_experts; e++)
                any |= names(p, r, src, t, e) && computes(p, channel, e, src, t) == p->rank;
            if (any) p->rows_received[epx_plan_holder(p, src, p->rank)]++;
        }
    }
}

/* Word j of the scales of output row i of expert e, which is row `row` of all. */
static float *scale_place(const epx_plan_t *p, const epx_io_t *io, int e, size_t i, size_t row, size_t j) {
    size_t n = n_words(&p->cfg), rows = p->cfg.layout == EPX_LAYOUT_EXPERT_MAJOR ? (size_t)p->row_cap : p->max_rows;
    if (p->cfg.scale_layout == EPX_SCALE_ROW_MAJOR) return io->out_scale + row * n + j;
    while (rows % 4 != 0) rows++;
    if (p->cfg.layout == EPX_LAYOUT_EXPERT_MAJOR) return io->out_scale + ((size_t)e * n + j) * rows + i;
    return io->out_scale + j * rows + row;
}

/* One output row: that of a list entry, or zeros. */
static void write_row(epx_plan_t *p, const epx_routes_t *r, const epx_io_t *io, int e, size_t i, const epx_list_entry_t *en) {
    size_t row_bytes = p->layout.wire_row_bytes, n = n_words(&p->cfg), row = (size_t)r->out_off[e] + i;
    char *out = (char *)io->out_x + row * row_bytes;
    if (en == NULL) memset(out, 0, row_bytes);
    else memcpy(out, (const char *)r->row_base[en->src] + en->token * row_bytes, row_bytes);
    for (size_t j = 0; j < n; j++) {
        float *to = scale_place(p, io, e, i, row, j);
        if (en == NULL) memset(to, 0, sizeof *to);
        else memcpy(to, r->scale_base[en->src] + en->token * n + j, sizeof *to);
    }
}

static void write_output(epx_plan_t *p, const epx_channel_t *ch, const epx_io_t *io) {
    const epx_routes_t *r = &ch->routes;
    r->out_off[0] = 0;
    for (int e = 0; e < ch->place->n_local; e++) {
        int32_t n = r->expert_off[e + 1] - r->expert_off[e], room = n;
        if (p->cfg.layout == EPX_LAYOUT_EXPERT_MAJOR) room = p->row_cap;
        while (p->cfg.layout == EPX_LAYOUT_CONTIGUOUS && room % p->cfg.align != 0) room++;
        r->out_off[e + 1] = r->out_off[e] + room;
        if (io->out_counts != NULL) io->out_counts[e] = n;
        if (p->cfg.layout == EPX_LAYOUT_LISTS) continue;
        for (int32_t i = 0; i < n; i++) write_row(p, r, io, e, (size_t)i, &r->entries[r->expert_off[e] + i]);
        for (int32_t i = n; i < room && p->cfg.layout == EPX_LAYOUT_CONTIGUOUS; i++) write_row(p, r, io, e, (size_t)i, NULL);
    }
    for (int e = 0; io->out_histogram != NULL && e < p->cfg.n_experts; e++) {
        io->out_histogram[e] = 0;
        for (int src = 0; src < p->n_ranks; src++)
            for (uint32_t t = 0; t < r->n_tokens[src]; t++) io->out_histogram[e] += names(p, r, src, t, e);
    }
}

static epx_status_t dispatch_recv(epx_plan_t *p, const epx_io_t *io) {
    epx_channel_t *ch = &p->channels[io->channel];
    epx_routes_t *r = &ch->routes;
    EPX_TRY(wait_all(p, io->channel, "dispatch", epx_flag_d_off));
    for (int src = 0; src < p->n_ranks; src++) {
        int h = src == epx_plan_source(p, src) ? epx_plan_holder(p, src, p->rank) : -1;
        r->n_tokens[src] = 0;
        if (h < 0) continue;
        r->ids[src] = (const int32_t *)(const void *)(p->slab->base[h] + epx_ids_off(&p->layout, io->channel, h));
        r->weights[src] = (const float *)(const void *)(p->slab->base[h] + epx_weights_off(&p->layout, io->channel, h));
        r->n_tokens[src] = (uint32_t)*epx_slab_word(p->slab, h, epx_count_off(&p->layout, io->channel, h));
        gather_rows(p, io->channel, src, h);
    }
    build_lists(p, ch);
    count_received(p, io->channel, r);
    ch->lists = (epx_lists_t){ch->place->n_local,
                              r->expert_off[ch->place->n_local],
                              r->expert_off,
                              r->entries,
                              r->row_base,
                              p->layout.n_scales ? r->scale_base : NULL,
                              p->layout.wire_row_bytes,
                              n_words(&p->cfg)};
    write_output(p, ch, io);
    return epx_debug_check_slab(p);
}

static epx_status_t combine_send(epx_plan_t *p, const epx_io_t *io) {
    const epx_channel_t *ch = &p->channels[io->channel];
    const epx_routes_t *r = &ch->routes;
    block_t b;
    char *outputs = block_at(p, io->channel, &b) + b.outputs;
    size_t row_bytes = (size_t)p->cfg.hidden * epx_dtype_bytes(p->cfg.expert_dtype);
    for (int e = 0; e < ch->place->n_local; e++) {
        size_t first = (size_t)r->out_off[e];
        size_t n = (size_t)(r->expert_off[e + 1] - r->expert_off[e]);
        if (n) memcpy(outputs + (size_t)r->expert_off[e] * row_bytes, (const char *)io->x + first * row_bytes, n * row_bytes);
    }
    publish(p, io->channel, PUB_OUTPUTS, outputs);
    publish(p, io->channel, PUB_ENTRIES, r->entries);
    publish(p, io->channel, PUB_EXPERT_OFF, r->expert_off);
    flag_all(p, io->channel, epx_flag_c_off);
    return EPX_OK;
}

/* The expert's answer to an own token, wherever it was computed; NULL: nowhere. */
static const void *answer(const epx_plan_t *p, int channel, uint32_t t, int32_t expert) {
    int source = epx_plan_source(p, p->rank);
    const epx_place_t *at = expert < 0 ? NULL : epx_place_of(p->channels[channel].place, expert, source, t);
    if (at == NULL) return NULL;
    const epx_list_entry_t *entries = published(p, channel, at->rank, PUB_ENTRIES);
    const int32_t *off = published(p, channel, at->rank, PUB_EXPERT_OFF);
    int32_t i = off[at->local];
    while (entries[i].src != (uint32_t)source || entries[i].token != t) i++;
    return (const char *)published(p, channel, at->rank, PUB_OUTPUTS) +
           (size_t)i * (size_t)p->cfg.hidden * epx_dtype_bytes(p->cfg.expert_dtype);
}

/* The row as the combine dtype holds it. */
static void round_row(const epx_plan_t *p, float *row) {
    char word[4];
    if (p->cfg.combine_dtype == EPX_FP8_E4M3) {
        through_fp8(p, row, (size_t)p->cfg.hidden, NULL, NULL);
        return;
    }
    for (size_t i = 0; i < (size_t)p->cfg.hidden; i++) {
        store(p->cfg.combine_dtype, word, 0, row[i]);
        row[i] = value_of(p->cfg.combine_dtype, word, 0);
    }
}

/* total = the combined row. Exact: the rounded rows of all places of the token. */
static void sum_exact(const epx_plan_t *p, const float *weights, const void *const *rows, float *total) {
    size_t h = (size_t)p->cfg.hidden;
    float *row = total + h;
    for (int k = 0; k < p->cfg.top_k; k++) {
        if (rows[k] == NULL) continue;
        for (size_t i = 0; i < h; i++) row[i] = value_of(p->cfg.expert_dtype, rows[k], i);
        round_row(p, row);
        for (size_t i = 0; i < h; i++) total[i] = fmaf(weights[k], row[i], total[i]);
    }
}

/* Partial: one rank's places, rounded; then the ranks. */
static void sum_partial(const epx_plan_t *p, const int *ranks, const float *weights, const void *const *rows, float *total) {
    size_t h = (size_t)p->cfg.hidden;
    float *part = total + h;
    for (int r = 0; r < p->n_ranks; r++) {
        memset(part, 0, h * sizeof *part);
        for (int k = 0; k < p->cfg.top_k; k++) {
            if (ranks[k] != r) continue;
            for (size_t i = 0; i < h; i++) part[i] = fmaf(weights[k], value_of(p->cfg.expert_dtype, rows[k], i), part[i]);
        }
        round_row(p, part);
        for (size_t i = 0; i < h; i++) total[i] += part[i];
    }
}

static epx_status_t combine_recv(epx_plan_t *p, const epx_io_t *io) {
    epx_channel_t *ch = &p->channels[io->channel];
    epx_dtype_t out = p->out_form.dtype;
    size_t h = (size_t)p->cfg.hidden, k_max = (size_t)p->cfg.top_k, out_bytes = h * epx_dtype_bytes(out);
    const void *rows[EPX_MAX_TOP_K];
    int ranks[EPX_MAX_TOP_K], source = epx_plan_source(p, p->rank);
    float *total = scratch_of(p, io->channel);
    EPX_TRY(wait_all(p, io->channel, "combine", epx_flag_c_off));
    for (size_t t = 0; t < (size_t)ch->n_tokens; t++) {
        const int32_t *ids = ch->routes.ids[source] + t * k_max;
        const float *all = io->combine_weights != NULL ? io->combine_weights : ch->routes.weights[source];
        const float *weights = all + t * k_max;
        for (size_t k = 0; k < k_max; k++) {
            rows[k] = answer(p, io->channel, (uint32_t)t, ids[k]);
            ranks[k] = computes(p, io->channel, ids[k], source, t);
        }
        memset(total, 0, h * sizeof *total);
        if (p->cfg.combine == EPX_COMBINE_EXACT) sum_exact(p, weights, rows, total);
        else sum_partial(p, ranks, weights, rows, total);
        for (size_t i = 0; i < h; i++) {
            float f = total[i];
            if (io->add != NULL) f += value_of(out, (const char *)io->add + t * out_bytes, i);
            store(out, (char *)io->out_x + t * out_bytes, i, f);
        }
    }
    return EPX_OK;
}

extern const epx_a2a_t epx_a2a_ref;
const epx_a2a_t epx_a2a_ref = {
    "ref",
    "slow sequential oracle; all ranks in one process",
    10,
    0,
    1,
    can,
    private_bytes,
    dispatch_send,
    dispatch_recv,
    combine_send,
    combine_recv,
};
