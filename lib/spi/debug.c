/* Canaries and checksums; see debug.h. */
#include "spi/debug.h"

#include <inttypes.h>
#include <string.h>

#include "base/status.h"

enum { CANARY = 0xC5 };

static char *canary_at(const epx_plan_t *p, int channel, int i) {
    return p->slab->base[p->rank] + epx_channel_off(&p->layout, channel) + p->layout.canary_off[i];
}

void epx_debug_plant(epx_plan_t *p) {
    for (int c = 0; c < p->cfg.n_channels; c++)
        for (int i = 0; i < p->layout.n_canaries; i++) memset(canary_at(p, c, i), CANARY, EPX_REGION_ALIGN);
}

static epx_status_t violation(epx_plan_t *p, epx_status_t s) {
    epx_slab_abort(p->slab, epx_abort_pack(EPX_ERR_ABORTED, p->rank, -1));
    return s;
}

epx_status_t epx_debug_check_slab(epx_plan_t *p) {
    for (int c = 0; p->layout.n_canaries && c < p->cfg.n_channels; c++) {
        for (int i = 0; i < p->layout.n_canaries; i++) {
            const unsigned char *at = (const unsigned char *)canary_at(p, c, i);
            int k = 0;
            while (k < EPX_REGION_ALIGN && at[k] == CANARY) k++;
            if (k < EPX_REGION_ALIGN)
                return violation(p, epx_fail(EPX_ERR_INTERNAL,
                                             "debug: canary behind region %s of channel %d of rank %d is overwritten: byte %d is "
                                             "%02x",
                                             epx_region_name(i), c, p->rank, k, at[k]));
        }
    }
    return EPX_OK;
}

/* FNV-1a over bytes. */
static uint64_t sum_of(uint64_t h, const void *data, size_t n) {
    const unsigned char *b = data;
    for (size_t i = 0; i < n; i++) h = (h ^ b[i]) * UINT64_C(1099511628211);
    return h;
}
static const uint64_t BASIS = UINT64_C(14695981039346656037);

static uint64_t row_sum(const epx_plan_t *p, const void *row, const float *scales) {
    uint64_t h = sum_of(BASIS, row, p->layout.wire_row_bytes);
    return p->layout.scale_words ? sum_of(h, scales, p->layout.scale_words * sizeof *scales) : h;
}

static uint64_t sums_off(const epx_plan_t *p, int channel, int src) {
    return epx_channel_off(&p->layout, channel) + p->layout.sums_off + (uint64_t)src * p->layout.max_tokens * 8;
}

void epx_debug_push_sums(epx_plan_t *p, int channel, int dst) {
    size_t n = (size_t)p->channels[channel].n_tokens;
    /* The own rows: this rank's slab is always mapped. */
    const char *rows = p->channels[channel].own_rows;
    const float *scales = p->channels[channel].own_scales;
    if (!p->layout.n_canaries || n == 0) return;
    char *at = epx_slab_put(p->slab, dst, sums_off(p, channel, p->rank), n * 8);
    for (size_t t = 0; t < n; t++) {
        uint64_t h = row_sum(p, rows + t * p->layout.wire_row_bytes, scales + t * p->layout.scale_words);
        memcpy(at + t * 8, &h, 8);
    }
}

epx_status_t epx_debug_check_rows(epx_plan_t *p, int channel) {
    const epx_lists_t *l = &p->channels[channel].lists;
    for (int32_t i = 0; p->layout.n_canaries && i < l->n_rows; i++) {
        int src = (int)l->entries[i].src, holder = epx_plan_holder(p, src, p->rank);
        uint64_t t = l->entries[i].token, want;
        const float *scales = l->scale_base == NULL ? NULL : l->scale_base[src] + t * l->scale_stride;
        uint64_t h = row_sum(p, (const char *)l->row_base[src] + t * l->row_stride_bytes, scales);
        memcpy(&want, p->slab->base[p->rank] + sums_off(p, channel, holder) + t * 8, 8);
        if (h != want)
            return violation(p, epx_fail(EPX_ERR_INTERNAL,
                                         "debug: dispatch epoch %" PRIu64 ": token %" PRIu64 " of rank %d came to rank %d with "
                                         "checksum %016" PRIx64 ", sent with %016" PRIx64,
                                         p->channels[channel].epoch, t, holder, p->rank, h, want));
    }
    return EPX_OK;
}

/* Without the bytes between codes and scales of an fp8 row. */
static uint64_t c_sum(const epx_plan_t *p, const char *row) {
    size_t n = (size_t)p->cfg.hidden * epx_dtype_bytes(p->cfg.combine_dtype), at = p->layout.combine_scale_off;
    uint64_t h = sum_of(BASIS, row, n);
    return at ? sum_of(h, row + at, p->layout.combine_row_bytes - at) : h;
}

static uint64_t c_sums_off(const epx_plan_t *p, int channel, uint64_t index) {
    return epx_channel_off(&p->layout, channel) + p->layout.c_sums_off + index * 8;
}

void epx_debug_push_sum(epx_plan_t *p, int channel, int dst, uint64_t plane, uint64_t token, const char *row) {
    if (!p->layout.n_canaries) return;
    uint64_t h = c_sum(p, row);
    memcpy(epx_slab_put(p->slab, dst, c_sums_off(p, channel, plane * p->layout.max_tokens + token), 8), &h, 8);
}

epx_status_t epx_debug_check_terms(epx_plan_t *p, int channel, size_t token, const epx_row_term_t *terms, int n) {
    const char *base = p->slab->base[p->rank], *first = base + epx_c_row_off(&p->layout, channel, 0, 0);
    for (int i = 0; p->layout.n_canaries && i < n; i++) {
        const char *row = terms[i].row;
        uint64_t index = (uint64_t)(row - first) / p->layout.combine_row_bytes, h = c_sum(p, row), want;
        memcpy(&want, base + c_sums_off(p, channel, index), 8);
        if (h != want)
            return violation(p, epx_fail(EPX_ERR_INTERNAL,
                                         "debug: combine epoch %" PRIu64 ": row %" PRIu64 " of token %zu came to rank %d with "
                                         "checksum %016" PRIx64 ", sent with %016" PRIx64,
                                         p->channels[channel].epoch, index / p->layout.max_tokens, token, p->rank, h, want));
    }
    return EPX_OK;
}
