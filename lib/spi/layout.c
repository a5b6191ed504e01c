/* Computes the slab layout. Pure: any thread. */
#include "spi/layout.h"

#include "base/checked.h"
#include "base/status.h"

uint64_t epx_dtype_bytes(epx_dtype_t d) {
    switch (d) {
    case EPX_F32:
        return 4;
    case EPX_BF16:
    case EPX_F16:
        return 2;
    case EPX_FP8_E4M3:
        return 1;
    default:
        return 0;
    }
}

const char *epx_dtype_name(epx_dtype_t d) {
    static const char *const names[] = {"f32", "bf16", "f16", "fp8_e4m3", "bytes"};
    return (unsigned)d < sizeof names / sizeof names[0] ? names[d] : "unknown";
}

/* A running offset that remembers an overflow. */
typedef struct {
    size_t at;
    int ok;
} cursor_t;

/* Reserve a * b * c bytes, aligned; returns their offset. */
static uint64_t take(cursor_t *c, uint64_t a, uint64_t b, uint64_t n) {
    size_t off = c->at, bytes = 0;
    if (!epx_mul_size(a, b, &bytes) || !epx_mul_size(bytes, n, &bytes) || !epx_add_size(c->at, bytes, &c->at) ||
        !epx_round_up_size(c->at, EPX_REGION_ALIGN, &c->at))
        c->ok = 0;
    return off;
}

static const char *const region_names[] = {"flag_d", "flag_c",      "count", "publish", "ids", "weights", "x",
                                           "stage",  "stage_scale", "d",     "d_scale", "c",   "sums",    "c_sums"};

const char *epx_region_name(int i) { return region_names[i]; }

/* A region of a channel, with its canary in debug mode. */
static uint64_t region(epx_slab_layout_t *l, cursor_t *c, uint64_t a, uint64_t b, uint64_t n) {
    uint64_t off = take(c, a, b, n);
    if (l->debug) l->canary_off[l->n_canaries++] = take(c, EPX_REGION_ALIGN, 1, 1);
    return off;
}

static void lay_channel(const epx_plan_config_t *cfg, uint64_t n_ranks, uint32_t regions, cursor_t *c, epx_slab_layout_t *l) {
    uint64_t t = (uint64_t)cfg->max_tokens, d = regions & EPX_REGION_D ? n_ranks : 0;
    uint64_t staged = cfg->wire_dtype != cfg->token_dtype,
             planes = cfg->combine == EPX_COMBINE_EXACT ? (uint64_t)cfg->top_k : n_ranks;
    l->flag_d_off = region(l, c, n_ranks, EPX_FLAG_STRIDE, 1);
    l->flag_c_off = region(l, c, n_ranks, EPX_FLAG_STRIDE, 1);
    l->count_off = region(l, c, n_ranks, EPX_FLAG_STRIDE, 1);
    l->publish_off = region(l, c, EPX_PUBLISH_WORDS, 8, 1);
    l->ids_off = region(l, c, n_ranks, l->route_block, 4);
    l->weights_off = region(l, c, n_ranks, l->route_block, 4);
    l->x_off = region(l, c, t, l->x_row_bytes, 1);
    l->stage_off = region(l, c, t, l->wire_row_bytes, staged);
    l->stage_scale_off = region(l, c, t, l->scale_words, 4);
    l->d_off = region(l, c, d * t, l->wire_row_bytes, 1);
    l->d_scale_off = region(l, c, d * t, l->scale_words, 4);
    l->c_off = region(l, c, t, l->combine_row_bytes, regions & EPX_REGION_C ? planes : 0);
    l->sums_off = region(l, c, t, n_ranks, cfg->debug ? 8 : 0);
    l->c_sums_off = region(l, c, t, regions & EPX_REGION_C ? planes : 0, cfg->debug ? 8 : 0);
}

epx_status_t epx_slab_layout(const epx_plan_config_t *cfg, int n_ranks, uint32_t regions, epx_slab_layout_t *out) {
    epx_slab_layout_t l = {0};
    cursor_t head = {EPX_HEAD_BYTES, 1}, ch = {0, 1};
    uint64_t h = (uint64_t)cfg->hidden, w = (uint64_t)n_ranks;
    l.debug = cfg->debug;
    l.max_tokens = (uint64_t)cfg->max_tokens;
    l.route_block = l.max_tokens * (uint64_t)cfg->top_k;
    l.x_row_bytes = h * epx_dtype_bytes(cfg->token_dtype);
    l.wire_row_bytes = h * epx_dtype_bytes(cfg->wire_dtype);
    l.combine_row_bytes = h * epx_dtype_bytes(cfg->combine_dtype);
    uint64_t n_blocks = (h + (uint64_t)cfg->scale_block - 1) / (uint64_t)cfg->scale_block;
    if (cfg->wire_dtype == EPX_FP8_E4M3) {
        l.n_scales = n_blocks;
        l.scale_words = cfg->scale_format == EPX_SCALE_F32 ? n_blocks : (n_blocks + 3) / 4;
    }
    if (cfg->combine_dtype == EPX_FP8_E4M3) {
        l.combine_scale_off = (h + 3) / 4 * 4;
        l.combine_row_bytes = l.combine_scale_off + n_blocks * sizeof(float);
    }
    l.leave_off = take(&head, w, EPX_FLAG_STRIDE, 1);
    l.recover_off = take(&head, w, EPX_FLAG_STRIDE, 1);
    l.channel_off = head.at;
    if (!(regions & EPX_REGION_NONE)) lay_channel(cfg, w, regions, &ch, &l);
    l.channel_bytes = ch.at;
    (void)take(&head, l.channel_bytes, (uint64_t)cfg->n_channels, 1);
    size_t total = 0;
    if (!head.ok || !ch.ok || !epx_round_up_size(head.at, EPX_SLAB_ALIGN, &total) || total > INT64_MAX)
        return epx_fail(EPX_ERR_CAPACITY,
                        "max_tokens %d x hidden %d x top_k %d on %d ranks needs a slab larger than the address space",
                        cfg->max_tokens, cfg->hidden, cfg->top_k, n_ranks);
    l.total_bytes = total;
    *out = l;
    return EPX_OK;
}
