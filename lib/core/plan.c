/* Plans: sizes, create, information, destroy. One private block a plan; one slab a plan and rank. Set-up path. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/checked.h"
#include "base/clock.h"
#include "base/status.h"
#include "core/core.h"
#include "spi/debug.h"
#include "spi/rows.h"
#include "spi/unsupported.h"

void epx_plan_config_init(epx_plan_config_t *cfg) {
    if (cfg == NULL) return;
    memset(cfg, 0, sizeof *cfg);
    cfg->size = sizeof *cfg;
    cfg->token_dtype = EPX_F32;
    cfg->wire_dtype = EPX_F32;
    cfg->expert_dtype = EPX_BYTES;
    cfg->combine_dtype = EPX_BYTES;
    cfg->scale_block = 128;
    cfg->align = 1;
    cfg->replicate = 1;
    cfg->n_channels = 1;
}

void epx_io_init(epx_io_t *io) {
    if (io == NULL) return;
    memset(io, 0, sizeof *io);
    io->size = sizeof *io;
}

/* ---- sizes ---- */

/* Hands out parts of one block; with base NULL it only counts. */
typedef struct {
    char *base;
    size_t at;
    int ok;
} arena_t;

static void *take(arena_t *a, size_t n, size_t elem_bytes) {
    size_t bytes = 0, off = a->at;
    if (!epx_mul_size(n, elem_bytes, &bytes) || !epx_add_size(a->at, bytes, &a->at) || !epx_round_up_size(a->at, 64, &a->at))
        a->ok = 0;
    return a->base == NULL ? NULL : a->base + off;
}

/* What a plan needs, from the config alone; equal on all ranks, so tables are sized for the rank with most experts. */
typedef struct {
    epx_slab_layout_t layout;
    const epx_a2a_t *a2a;
    char why[EPX_WHY_BYTES];
    int n_local_max;
    size_t row_max, max_rows, backend_bytes, private_bytes;
    uint64_t device_slab_bytes, device_private_bytes;
    size_t put_bytes, phase_bytes, message_bytes; /* the last: of all message peers, 0 without any */
} sizes_t;

/* A group, or ranks that have none yet. */
typedef struct {
    const epx_net_t *net; /* NULL: no group yet */
    int n_ranks, n_far;   /* n_far: reached by messages */
} where_t;

static where_t where_of(const epx_group_t *g) {
    return (where_t){g->net, g->n_ranks, g->net->transport->messages == NULL ? 0 : g->net->n_messages};
}

/* What carries messages between hosts. */
static const epx_messages_t *messages_of(const epx_net_t *net) {
    const epx_transport_t *t = net != NULL ? net->transport : NULL;
    for (int i = 0; net == NULL && (t == NULL || t->messages == NULL); i++) t = epx_transport_at(i);
    return t->messages;
}

/* Puts and phases to one peer, as the halves make them. */
static void size_messages(const epx_plan_config_t *c, const where_t *at, sizes_t *z) {
    const epx_slab_layout_t *l = &z->layout;
    size_t table = (size_t)l->route_block * 4, scales = (size_t)l->scale_words * 4, put = table, t = (size_t)l->max_tokens;
    size_t per_token = c->combine == EPX_COMBINE_PARTIAL ? 1 : z->row_max / ((size_t)(at->n_ranks / c->replicate) * t);
    size_t dispatch = 2 * table + t * ((size_t)l->wire_row_bytes + scales),
           combine = t * per_token * (size_t)l->combine_row_bytes;
    if (put < l->wire_row_bytes) put = (size_t)l->wire_row_bytes;
    if (put < l->combine_row_bytes) put = (size_t)l->combine_row_bytes;
    if (put < scales) put = scales;
    z->put_bytes = put;
    z->phase_bytes = dispatch > combine ? dispatch : combine;
    if (at->n_far == 0 || z->a2a->device != NULL) return;
    z->message_bytes = messages_of(at->net)->bytes(z->put_bytes, z->phase_bytes, 2 * c->n_channels, at->n_far);
}

static void carve_channel(const sizes_t *z, const epx_plan_config_t *c, size_t w, arena_t *a, epx_channel_t *ch) {
    epx_routes_t *r = &ch->routes;
    size_t el = (size_t)z->n_local_max, k = (size_t)c->top_k;
    r->ids = take(a, w, sizeof *r->ids);
    r->weights = take(a, w, sizeof *r->weights);
    r->n_tokens = take(a, w, sizeof *r->n_tokens);
    r->entries = take(a, z->row_max, sizeof *r->entries);
    r->entry_k = take(a, z->row_max, sizeof *r->entry_k);
    r->expert_off = take(a, el + 1, sizeof *r->expert_off);
    r->out_off = take(a, el + 1, sizeof *r->out_off);
    r->row_of = take(a, w * z->layout.route_block, sizeof *r->row_of);
    r->stamp = take(a, el > w ? el : w, sizeof *r->stamp);
    r->terms = take(a, k > w ? k : w, sizeof *r->terms);
    r->row_base = take(a, w, sizeof *r->row_base);
    r->scale_base = take(a, w, sizeof *r->scale_base);
    r->rows_of = take(a, w, sizeof *r->rows_of);
    r->sums = take(a, w, sizeof *r->sums);
    ch->missing = take(a, (size_t)c->max_tokens, sizeof *ch->missing);
    ch->weights = c->renormalize ? take(a, (size_t)c->max_tokens * k, sizeof *ch->weights) : NULL;
}

static void carve_placement(const epx_plan_config_t *c, arena_t *a, epx_placement_t *pl) {
    pl->slot_rank = take(a, (size_t)c->n_slots, sizeof *pl->slot_rank);
    pl->slot_expert = take(a, (size_t)c->n_slots, sizeof *pl->slot_expert);
    pl->places = take(a, (size_t)c->n_slots, sizeof *pl->places);
    pl->first = take(a, (size_t)c->n_experts + 1, sizeof *pl->first);
}

/* The plan itself is the first part of the block. */
static void carve(const sizes_t *z, const epx_plan_config_t *c, int n_ranks, arena_t *a, epx_plan_t *p) {
    size_t w = (size_t)n_ranks;
    epx_channel_t unused;
    (void)take(a, 1, sizeof *p);
    for (int i = 0; i < 2; i++) carve_placement(c, a, &p->placements[i]);
    p->slot_count = take(a, w, sizeof *p->slot_count);
    p->alive = take(a, w, sizeof *p->alive);
    p->rows_sent = take(a, w, sizeof *p->rows_sent);
    p->rows_received = take(a, w, sizeof *p->rows_received);
    p->channels = take(a, (size_t)c->n_channels, sizeof *p->channels);
    for (int i = 0; z->a2a->device == NULL && i < c->n_channels; i++)
        carve_channel(z, c, w, a, p->channels == NULL ? &unused : &p->channels[i]);
    p->backend_block = take(a, z->backend_bytes, 1);
}

static epx_status_t most_local(const epx_plan_config_t *c, int n_ranks, int *out) {
    int most = 0;
    if (c->slot_rank == NULL) {
        *out = (c->n_slots + n_ranks - 1) / n_ranks;
        return EPX_OK;
    }
    int *count = calloc((size_t)n_ranks, sizeof *count);
    if (count == NULL) return epx_fail(EPX_ERR_NOMEM, "no memory for %d counters", n_ranks);
    for (int s = 0; s < c->n_slots; s++) {
        int n = ++count[c->slot_rank[s]];
        most = n > most ? n : most;
    }
    free(count);
    *out = most;
    return EPX_OK;
}

/* c: validated and normalised. */
static epx_status_t measure(const where_t *at, const epx_plan_config_t *c, const epx_choice_t *choice, sizes_t *z) {
    const epx_a2a_t *a2a = choice->a2a;
    /* Rows that come in messages arrive in region D whatever the backend; on devices none do. */
    uint32_t regions = a2a->regions | (a2a->device == NULL && at->n_far > 0 ? EPX_REGION_D : 0);
    size_t rows = 0, places = 0, slots = 0, pad = 0;
    int n_ranks = at->n_ranks;
    memset(z, 0, sizeof *z);
    z->a2a = a2a;
    memcpy(z->why, choice->why, sizeof z->why);
    EPX_TRY(epx_slab_layout(c, n_ranks, regions, &z->layout));
    EPX_TRY(most_local(c, n_ranks, &z->n_local_max));
    int per_token = c->top_k < z->n_local_max ? c->top_k : z->n_local_max;
    if (!epx_mul_size((size_t)(n_ranks / c->replicate), (size_t)c->max_tokens, &rows) ||
        !epx_mul_size(rows, (size_t)per_token, &z->row_max) || !epx_mul_size(rows, (size_t)z->n_local_max, &slots) ||
        !epx_mul_size(rows * (size_t)c->replicate, (size_t)c->top_k, &places) ||
        !epx_mul_size((size_t)z->n_local_max, (size_t)c->align - 1, &pad) || slots > INT32_MAX || places > INT32_MAX ||
        z->row_max + pad > INT32_MAX)
        return epx_fail(EPX_ERR_CAPACITY,
                        "max_tokens %d on %d ranks with top_k %d and %d local experts: row numbers must stay below 2^31",
                        c->max_tokens, n_ranks, c->top_k, z->n_local_max);
    z->max_rows = c->layout == EPX_LAYOUT_EXPERT_MAJOR ? slots : z->row_max + (c->layout == EPX_LAYOUT_CONTIGUOUS ? pad : 0);
    EPX_TRY(a2a->private_bytes(c, n_ranks, z->row_max, &z->backend_bytes));
    arena_t count = {NULL, 0, 1};
    epx_plan_t nowhere;
    carve(z, c, n_ranks, &count, &nowhere);
    if (!count.ok) return epx_fail(EPX_ERR_CAPACITY, "the private tables do not fit the address space");
    z->private_bytes = count.at;
    size_messages(c, at, z);
    if (a2a->device != NULL)
        a2a->device->bytes(at->net, c, z->n_local_max, z->row_max, &z->device_slab_bytes, &z->device_private_bytes);
    return EPX_OK;
}

static epx_status_t check_config_pointer(const epx_plan_config_t *cfg) {
    if (cfg == NULL) return epx_fail(EPX_ERR_ARG, "cfg is NULL");
    if (cfg->size != sizeof *cfg)
        return epx_fail(EPX_ERR_ARG, "cfg->size is %u; legal: %zu, set by epx_plan_config_init()", cfg->size, sizeof *cfg);
    return EPX_OK;
}

static epx_status_t measure_for(const epx_group_t *g, const epx_plan_config_t *cfg, epx_plan_config_t *c, sizes_t *z) {
    epx_choice_t choice;
    where_t at = where_of(g);
    EPX_TRY(g->link == NULL ? epx_validate_config(cfg, g->n_ranks, c) : epx_validate_device_config(cfg, g->n_ranks, c));
    EPX_TRY(epx_select_a2a(g->net, at.n_ranks, at.n_far, c, &choice));
    return measure(&at, c, &choice, z);
}

static size_t all_bytes(const sizes_t *z) {
    return z->layout.total_bytes + z->private_bytes + z->message_bytes + z->device_slab_bytes + z->device_private_bytes;
}

epx_status_t epx_plan_bytes_hosts(const epx_plan_config_t *cfg, int n_ranks, int n_here, size_t *out_bytes) {
    where_t at = {NULL, n_ranks, n_ranks - n_here};
    epx_plan_config_t c;
    epx_choice_t choice;
    sizes_t z;
    EPX_TRY(check_config_pointer(cfg));
    if (out_bytes == NULL) return epx_fail(EPX_ERR_ARG, "out_bytes is NULL");
    EPX_TRY(epx_validate_config(cfg, n_ranks, &c));
    if (n_here < 1 || n_here > n_ranks)
        return epx_fail(EPX_ERR_ARG, "n_here is %d; legal: 1 to n_ranks %d, the ranks of one host", n_here, n_ranks);
    EPX_TRY(epx_select_a2a(NULL, at.n_ranks, at.n_far, &c, &choice));
    EPX_TRY(measure(&at, &c, &choice, &z));
    *out_bytes = all_bytes(&z);
    return EPX_OK;
}

epx_status_t epx_plan_bytes(const epx_plan_config_t *cfg, int n_ranks, size_t *out_bytes) {
    return epx_plan_bytes_hosts(cfg, n_ranks, n_ranks < 1 ? 1 : n_ranks, out_bytes);
}

epx_status_t epx_group_plan_bytes(const epx_group_t *g, const epx_plan_config_t *cfg, size_t *out_bytes) {
    epx_plan_config_t c;
    sizes_t z;
    EPX_TRY(check_config_pointer(cfg));
    if (g == NULL || out_bytes == NULL) return epx_fail(EPX_ERR_ARG, "%s is NULL", g == NULL ? "group" : "out_bytes");
    EPX_TRY(measure_for(g, cfg, &c, &z));
    *out_bytes = all_bytes(&z);
    return EPX_OK;
}

/* ---- create ---- */

/* Forms of the rows that the combine half handles. */
static void set_forms(epx_plan_t *p, const epx_plan_config_t *c) {
    p->expert_form = epx_row_form(c->expert_dtype);
    p->out_form = epx_row_form(epx_result_dtype(c));
    p->combine_form = (epx_row_form_t){c->combine_dtype, c->scale_format, p->layout.combine_scale_off, (uint64_t)c->scale_block};
}

/* Words between neighbouring scales of an output row: 1, or the padded number of rows, a multiple of 16 bytes as tensor copy
 * engines want it. */
static size_t scale_gap(const epx_plan_config_t *c, const sizes_t *z, int row_cap) {
    if (c->scale_layout == EPX_SCALE_ROW_MAJOR) return 1;
    return ((c->layout == EPX_LAYOUT_EXPERT_MAJOR ? (size_t)row_cap : z->max_rows) + 3) / 4 * 4;
}

static epx_status_t new_plan(epx_group_t *g, const epx_plan_config_t *c, const sizes_t *z, epx_plan_t **out_plan) {
    epx_plan_t carved = {0};
    void *block = NULL;
    if (posix_memalign(&block, 64, z->private_bytes) != 0)
        return epx_fail(EPX_ERR_NOMEM, "private tables: no memory for %zu bytes", z->private_bytes);
    memset(block, 0, z->private_bytes);
    arena_t a = {block, 0, 1};
    epx_plan_t *p = block;
    carve(z, c, g->n_ranks, &a, &carved);
    *p = carved;
    p->a2a = z->a2a;
    memcpy(p->why, z->why, sizeof p->why);
    p->group = g;
    p->net = g->net;
    p->cfg = *c;
    p->cfg.slot_rank = NULL;
    p->cfg.slot_expert = NULL;
    p->cfg.backend = z->a2a->name;
    p->layout = z->layout;
    set_forms(p, c);
    p->rank = g->rank;
    p->n_ranks = g->n_ranks;
    p->row_cap = g->n_ranks / c->replicate * c->max_tokens;
    p->n_local_max = z->n_local_max;
    p->row_max = z->row_max;
    p->max_rows = z->max_rows;
    p->scale_gap = scale_gap(c, z, p->row_cap);
    p->private_bytes = z->private_bytes + z->message_bytes;
    p->device_slab_bytes = z->device_slab_bytes;
    p->device_private_bytes = z->device_private_bytes;
    memset(p->alive, 1, (size_t)g->n_ranks);
    epx_placement_fill(p, c, 0, &p->placements[0]);
    p->placements[1].first_epoch = UINT64_MAX;
    (void)epx_row_kernels(); /* chosen here, not in the first step */
    *out_plan = p;
    return EPX_OK;
}

static int ranks_on_host(const epx_group_t *g) {
    int n = 0;
    for (int r = 0; r < g->n_ranks; r++) n += memcmp(g->peers[r].host, g->peers[g->rank].host, sizeof g->peers[r].host) == 0;
    return n;
}

/* Everything that can fail on this rank alone before memory is taken. */
static epx_status_t prepare(epx_group_t *g, const epx_plan_config_t *cfg, epx_plan_config_t *c, sizes_t *z) {
    EPX_TRY(measure_for(g, cfg, c, z));
    return g->net->transport->slab_check(g->net, z->layout.total_bytes, ranks_on_host(g));
}

/* What ranks compare at create. */
typedef struct {
    uint64_t has_config; /* 0: the rank gave no config that can be read */
    uint64_t fields[EPX_CONFIG_FIELDS];
} config_record_t;

static const uint64_t *fields_of(const void *ctx, int rank) {
    const config_record_t *r = (const config_record_t *)ctx + rank;
    return r->has_config ? r->fields : NULL;
}

/* Ranks compare their configs; a rank's own error is more useful to it than the difference that it makes. cfg NULL: the rank has
 * none to give. */
static epx_status_t compare(epx_group_t *g, const epx_plan_config_t *cfg, epx_status_t own, const char *chosen,
                            uint64_t *out_hash) {
    config_record_t mine = {cfg != NULL, {0}};
    char own_message[512];
    snprintf(own_message, sizeof own_message, "%.*s", (int)sizeof own_message - 1, epx_last_error());
    if (cfg != NULL) epx_config_fields(cfg, own >= 0, chosen, mine.fields);
    *out_hash = epx_config_hash(mine.fields);
    epx_status_t s = epx_group_allgather(g, &mine, sizeof mine, g->records, g->timeout_ns);
    if (s >= 0) s = epx_config_compare(fields_of, g->records, g->n_ranks);
    return own < 0 ? epx_fail(own, "%s", own_message) : s;
}

/* Every mapping is the slab that its owner made for this plan. */
static epx_status_t check_heads(const epx_plan_t *p, uint64_t hash) {
    for (int r = 0; r < p->n_ranks; r++) {
        if (p->slab->base[r] == NULL) continue; /* reached by messages, which name the plan */
        const epx_slab_head_t *h = epx_slab_head(p->slab, r);
        if (h->magic != EPX_SLAB_MAGIC || h->hash != hash)
            return epx_fail(EPX_ERR_INTERNAL, "the slab mapped for rank %d is not the one of this plan", r);
    }
    return EPX_OK;
}

/* Own slab, and buffers for messages where there are any. */
static epx_status_t take_slab(epx_group_t *g, const sizes_t *z, epx_plan_t *p) {
    const epx_messages_t *m = g->net->transport->messages;
    EPX_TRY(g->net->transport->slab_alloc(g->net, z->layout.total_bytes, &p->slab));
    if (m == NULL) return EPX_OK;
    return m->reserve(p->slab, z->put_bytes, z->phase_bytes, 2 * p->cfg.n_channels, p->cfg.timeout_ns);
}

epx_status_t epx_plan_create(epx_group_t *g, const epx_plan_config_t *cfg, epx_plan_t **out_plan) {
    epx_plan_config_t c;
    sizes_t z;
    epx_plan_t *p = NULL;
    uint64_t hash = 0;
    if (g == NULL) return epx_fail(EPX_ERR_ARG, "group is NULL");
    /* From here on the other ranks wait for this one: whatever is wrong here is told to them. */
    epx_status_t s = out_plan == NULL ? epx_fail(EPX_ERR_ARG, "out_plan is NULL") : check_config_pointer(cfg);
    const epx_plan_config_t *readable = s < 0 ? NULL : cfg;
    if (s >= 0) s = prepare(g, cfg, &c, &z);
    EPX_TRY(epx_group_agree(g, compare(g, readable, s, s < 0 ? NULL : z.a2a->name, &hash), "plan check"));
    s = new_plan(g, &c, &z, &p);
    if (s >= 0) s = take_slab(g, &z, p);
    if (s >= 0 && p->a2a->device != NULL) s = p->a2a->device->open(p, z.n_local_max);
    EPX_TRY_GOTO(s, epx_group_agree(g, s, "plan memory"), err_plan);
    epx_slab_head(p->slab, p->rank)->magic = EPX_SLAB_MAGIC;
    epx_slab_head(p->slab, p->rank)->hash = hash;
    epx_debug_plant(p);
    s = g->net->transport->slab_share(g->net, p->slab, g->timeout_ns);
    EPX_TRY_GOTO(s, epx_group_agree(g, s, "plan sharing"), err_plan);
    EPX_TRY_GOTO(s, check_heads(p, hash), err_plan);
    if (p->a2a->device != NULL) {
        s = p->a2a->device->share(p, g->timeout_ns);
        EPX_TRY_GOTO(s, epx_group_agree(g, s, "plan sharing on devices"), err_plan);
    }
    *out_plan = p;
    return EPX_OK;
err_plan:
    if (p != NULL && p->a2a->device != NULL) p->a2a->device->close(p);
    if (p != NULL) g->net->transport->slab_free(g->net, p->slab);
    free(p);
    return s;
}

/* ---- information ---- */

epx_status_t epx_plan_info(const epx_plan_t *p, epx_plan_info_t *out_info) {
    if (p == NULL || out_info == NULL) return epx_fail(EPX_ERR_ARG, "%s is NULL", p == NULL ? "plan" : "out_info");
    if (out_info->size != sizeof *out_info)
        return epx_fail(EPX_ERR_ARG, "out_info->size is %u; legal: %zu", out_info->size, sizeof *out_info);
    out_info->backend = p->a2a->name;
    out_info->backend_why = p->why;
    out_info->transport = p->net->device != NULL ? p->net->device->link->name : p->net->transport->name;
    const epx_placement_t *place = epx_plan_place(p, 0);
    out_info->layout = p->cfg.layout;
    out_info->n_local_experts = place->n_local;
    out_info->placement_version = place->version;
    out_info->row_cap = p->row_cap;
    out_info->max_rows = p->max_rows;
    out_info->scale_words = p->layout.scale_words;
    out_info->scale_gap = p->scale_gap;
    out_info->slab_bytes = p->layout.total_bytes + p->device_slab_bytes;
    out_info->private_bytes = p->private_bytes + p->device_private_bytes;
    const epx_channel_t *first = &p->channels[0];
    out_info->epoch = first->state == EPX_CH_DISPATCH_SEND ? first->epoch : first->epoch - 1;
    return EPX_OK;
}

epx_status_t epx_plan_stats(const epx_plan_t *p, epx_plan_stats_t *io) {
    if (p == NULL || io == NULL) return epx_fail(EPX_ERR_ARG, "%s is NULL", p == NULL ? "plan" : "inout_stats");
    if (io->size != sizeof *io) return epx_fail(EPX_ERR_ARG, "inout_stats->size is %u; legal: %zu", io->size, sizeof *io);
    io->n_ranks = p->n_ranks;
    io->n_dispatches = p->n_dispatches;
    io->n_combines = p->n_combines;
    if (io->rows_sent != NULL) memcpy(io->rows_sent, p->rows_sent, (size_t)p->n_ranks * sizeof *io->rows_sent);
    if (io->rows_received != NULL) memcpy(io->rows_received, p->rows_received, (size_t)p->n_ranks * sizeof *io->rows_received);
    io->dispatch_bytes = p->dispatch_bytes;
    io->combine_bytes = p->combine_bytes;
    io->wait_ns = p->wait_ns;
    return EPX_OK;
}

static epx_status_t check_channel(const epx_plan_t *p, int channel) {
    if (channel >= 0 && channel < p->cfg.n_channels) return EPX_OK;
    return epx_fail(EPX_ERR_ARG, "channel is %d; legal: 0 to %d", channel, p->cfg.n_channels - 1);
}

epx_status_t epx_plan_input(epx_plan_t *p, int channel, void **out_x) {
    if (p == NULL || out_x == NULL) return epx_fail(EPX_ERR_ARG, "%s is NULL", p == NULL ? "plan" : "out_x");
    EPX_TRY(check_channel(p, channel));
    if (p->a2a->device != NULL)
        return epx_fail(EPX_ERR_UNSUPPORTED, "epx_plan_input is for CPU plans; on devices io->x is read where it lies");
    *out_x = p->slab->base[p->rank] + epx_channel_off(&p->layout, channel) + p->layout.x_off;
    return EPX_OK;
}

epx_status_t epx_plan_lists(epx_plan_t *p, int channel, epx_lists_t *out_lists) {
    if (p == NULL || out_lists == NULL) return epx_fail(EPX_ERR_ARG, "%s is NULL", p == NULL ? "plan" : "out_lists");
    EPX_TRY(check_channel(p, channel));
    if (p->cfg.layout != EPX_LAYOUT_LISTS) return epx_fail(EPX_ERR_STATE, "epx_plan_lists: the plan's layout is not LISTS");
    if (p->channels[channel].state != EPX_CH_COMBINE_SEND)
        return epx_fail(EPX_ERR_STATE, "epx_plan_lists is legal between dispatch_recv and combine_send only");
    *out_lists = p->channels[channel].lists;
    return EPX_OK;
}

epx_status_t epx_plan_offsets(epx_plan_t *p, int channel, const int32_t **out_off) {
    if (p == NULL || out_off == NULL) return epx_fail(EPX_ERR_ARG, "%s is NULL", p == NULL ? "plan" : "out_off");
    EPX_TRY(check_channel(p, channel));
    if (p->a2a->device != NULL && p->cfg.layout == EPX_LAYOUT_EXPERT_MAJOR)
        return epx_unsupported_call("epx_plan_offsets with EXPERT_MAJOR on devices", "an expert has row_cap rows");
    if (p->channels[channel].state != EPX_CH_COMBINE_SEND)
        return epx_fail(EPX_ERR_STATE, "epx_plan_offsets is legal between dispatch_recv and combine_send only");
    *out_off = p->a2a->device != NULL ? p->channels[channel].lists.expert_off : p->channels[channel].routes.out_off;
    return EPX_OK;
}

/* ---- destroy ---- */

/* Tell all peers that this rank uses no slab any more, and wait until they say the same. A negative status: not all have. */
static epx_status_t leave(epx_plan_t *p) {
    epx_wait_t w = {p->net, p->slab, "destroy", 1, p->cfg.timeout_ns, NULL};
    for (int r = 0; r < p->n_ranks; r++)
        if (p->alive[r] || p->slab->base[r] != NULL) epx_slab_signal(p->slab, r, epx_leave_off(&p->layout, p->rank), 1);
    for (int r = 0; r < p->n_ranks; r++)
        if (p->alive[r]) EPX_TRY(epx_wait_ge(&w, r, epx_leave_off(&p->layout, r), 1));
    epx_slab_drain(p->slab);
    return EPX_OK;
}

/* After an abort: peers of the same process may still read the private block. Bounded; the abort has ended their waits. */
static void leave_private(epx_plan_t *p) {
    struct timespec pause = {0, 1000000};
    uint64_t start = epx_now_ns();
    for (int r = 0; r < p->n_ranks; r++) epx_slab_signal(p->slab, r, epx_leave_off(&p->layout, p->rank), 1);
    for (int r = 0; r < p->n_ranks; r++)
        while (p->alive[r] && epx_load_acquire_u64(epx_slab_word(p->slab, p->rank, epx_leave_off(&p->layout, r))) == 0 &&
               epx_now_ns() - start < p->cfg.timeout_ns)
            nanosleep(&pause, NULL);
}

void epx_plan_destroy(epx_plan_t *p) {
    if (p == NULL) return;
    epx_status_t s = epx_plan_poll(p);
    if (p->a2a->device != NULL) {
        p->a2a->device->drain(p);
        s = epx_plan_poll(p);
    }
    if (s == EPX_OK) s = leave(p);
    if (s < 0 && s != EPX_ERR_TIMEOUT && p->a2a->peers_read_private) leave_private(p);
    if (p->a2a->device != NULL) p->a2a->device->close(p);
    p->net->transport->slab_free(p->net, p->slab);
    free(p);
}
