/* Offsets and sizes of one rank's slab. Fixed at create by capacities only, the same on every rank, so that a peer's slot is
 * found without asking. Plain integers: host and device read it. Nothing here allocates.
 *
 * slab = head | leave flags [W] | recover records [W] | channel 0 | channel 1 ...
 * channel = F_d[W] F_c[W] counts[W] published | ids[W][T][K] | weights[W][T][K] | X[T][H] | stage[T][H] + scales | D[W][T][H] +
 * scales | C C is [K][T][H] (exact) or [W][T][H] (partial). A region that a backend or transport does not use has size 0. */
#ifndef EPX_SPI_LAYOUT_H
#define EPX_SPI_LAYOUT_H

#include <stdint.h>

#include "epx/epx.h"

enum {
    EPX_FLAG_STRIDE = 64, /* one cache line a flag: writers are different ranks */
    EPX_HEAD_BYTES = 256, /* epx_slab_head_t */
    EPX_PUBLISH_WORDS = 8,
    EPX_MAX_REGIONS = 14,
    EPX_REGION_ALIGN = 64, /* of every region; X is promised to callers */
    EPX_SLAB_ALIGN = 4096
};

/* Optional regions, bits. */
enum { EPX_REGION_D = 1u << 0, EPX_REGION_C = 1u << 1, EPX_REGION_NONE = 1u << 2 /* only the head: rows lie elsewhere */ };

/* Offsets in bytes. Those of the second block are relative to the channel. */
typedef struct {
    uint64_t total_bytes, leave_off, recover_off, channel_off, channel_bytes;

    uint64_t flag_d_off, flag_c_off; /* [W] at EPX_FLAG_STRIDE */
    uint64_t count_off;              /* [W] u64 at EPX_FLAG_STRIDE: tokens of each source */
    uint64_t publish_off;            /* EPX_PUBLISH_WORDS u64 that the owner writes for backends of one address space */
    uint64_t ids_off, weights_off;   /* [W][T * K] int32, f32 */
    uint64_t x_off, stage_off, stage_scale_off;
    uint64_t d_off, d_scale_off, c_off;

    /* Debug mode: behind each region of a channel lie EPX_REGION_ALIGN bytes that nobody writes. */
    int debug, n_canaries;
    uint64_t canary_off[EPX_MAX_REGIONS];
    uint64_t sums_off, c_sums_off; /* checksums [W][T] of dispatch rows, one a row of C */

    uint64_t route_block; /* T * K: elements of ids and weights per source */
    uint64_t x_row_bytes, wire_row_bytes;
    uint64_t combine_row_bytes, combine_scale_off; /* of a row back; with fp8 its f32 scales are in it, at that offset */
    uint64_t n_scales;                             /* per row; 0 unless the wire is fp8 */
    uint64_t scale_words;                          /* 32-bit words that hold them: f32, or four UE8M0 codes a word */
    uint64_t max_tokens;
} epx_slab_layout_t;

/* Name of the i-th region of a channel, for messages. Static string. */
const char *epx_region_name(int i);
/* Bytes of one element; 0 for EPX_BYTES and unknown values. */
uint64_t epx_dtype_bytes(epx_dtype_t d);
/* "f32", "bf16", "f16", "fp8_e4m3", "bytes". Static string. */
const char *epx_dtype_name(epx_dtype_t d);
/* Lay out a slab for a valid, normalised config (no EPX_BYTES left in the dtypes). regions: EPX_REGION_* bits.
 * Returns EPX_ERR_CAPACITY when the sizes overflow; *out untouched. */
epx_status_t epx_slab_layout(const epx_plan_config_t *cfg, int n_ranks, uint32_t regions, epx_slab_layout_t *out);

static inline uint64_t epx_channel_off(const epx_slab_layout_t *l, int channel) {
    return l->channel_off + (uint64_t)channel * l->channel_bytes;
}
static inline uint64_t epx_flag_d_off(const epx_slab_layout_t *l, int channel, int src) {
    return epx_channel_off(l, channel) + l->flag_d_off + (uint64_t)src * EPX_FLAG_STRIDE;
}
static inline uint64_t epx_flag_c_off(const epx_slab_layout_t *l, int channel, int src) {
    return epx_channel_off(l, channel) + l->flag_c_off + (uint64_t)src * EPX_FLAG_STRIDE;
}
static inline uint64_t epx_leave_off(const epx_slab_layout_t *l, int src) {
    return l->leave_off + (uint64_t)src * EPX_FLAG_STRIDE;
}
static inline uint64_t epx_recover_off(const epx_slab_layout_t *l, int src) {
    return l->recover_off + (uint64_t)src * EPX_FLAG_STRIDE;
}
static inline uint64_t epx_count_off(const epx_slab_layout_t *l, int channel, int src) {
    return epx_channel_off(l, channel) + l->count_off + (uint64_t)src * EPX_FLAG_STRIDE;
}
static inline uint64_t epx_ids_off(const epx_slab_layout_t *l, int channel, int src) {
    return epx_channel_off(l, channel) + l->ids_off + (uint64_t)src * l->route_block * 4;
}
static inline uint64_t epx_weights_off(const epx_slab_layout_t *l, int channel, int src) {
    return epx_channel_off(l, channel) + l->weights_off + (uint64_t)src * l->route_block * 4;
}
static inline uint64_t epx_d_row_off(const epx_slab_layout_t *l, int channel, int src, uint64_t token) {
    return epx_channel_off(l, channel) + l->d_off + ((uint64_t)src * l->max_tokens + token) * l->wire_row_bytes;
}
static inline uint64_t epx_d_scale_off(const epx_slab_layout_t *l, int channel, int src, uint64_t token) {
    return epx_channel_off(l, channel) + l->d_scale_off + ((uint64_t)src * l->max_tokens + token) * l->scale_words * 4;
}
/* plane: k (exact) or the sending rank (partial). */
static inline uint64_t epx_c_row_off(const epx_slab_layout_t *l, int channel, uint64_t plane, uint64_t token) {
    return epx_channel_off(l, channel) + l->c_off + (plane * l->max_tokens + token) * l->combine_row_bytes;
}

#endif
