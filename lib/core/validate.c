/* All argument checks of public calls on plans. Pure, but for EPX_DEBUG; messages name field, value and legal values. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "core/core.h"
#include "spi/unsupported.h"

static epx_status_t in_range(const char *field, int64_t v, int64_t lo, int64_t hi) {
    if (v >= lo && v <= hi) return EPX_OK;
    return epx_fail(EPX_ERR_ARG, "%s is %lld; legal: %lld to %lld", field, (long long)v, (long long)lo, (long long)hi);
}

/* A legal value that is not the only one built. */
static epx_status_t only_int(const char *field, int v, int built) {
    char value[16], legal[16];
    if (v == built) return EPX_OK;
    snprintf(value, sizeof value, "%d", v);
    snprintf(legal, sizeof legal, "%d", built);
    return epx_unsupported_value(field, value, legal);
}

static epx_status_t check_sizes(const epx_plan_config_t *c) {
    EPX_TRY(in_range("max_tokens", c->max_tokens, 1, INT_MAX / 2));
    EPX_TRY(in_range("hidden", c->hidden, 1, INT_MAX / 2));
    EPX_TRY(in_range("top_k", c->top_k, 1, EPX_MAX_TOP_K));
    EPX_TRY(in_range("n_experts", c->n_experts, 1, EPX_MAX_SLOTS));
    if (c->n_slots != 0) EPX_TRY(in_range("n_slots", c->n_slots, c->n_experts, EPX_MAX_SLOTS));
    EPX_TRY(in_range("align", c->align, 1, INT_MAX / 2));
    EPX_TRY(in_range("scale_block", c->scale_block, 1, INT_MAX / 2));
    EPX_TRY(in_range("replicate", c->replicate, 1, EPX_MAX_RANKS));
    EPX_TRY(in_range("n_channels", c->n_channels, 1, 64));
    EPX_TRY(in_range("n_blocks", c->n_blocks, 0, 1 << 16));
    EPX_TRY(in_range("renormalize", c->renormalize, 0, 1));
    EPX_TRY(in_range("debug", c->debug, 0, 1));
    EPX_TRY(in_range("token_dtype", (int64_t)c->token_dtype, EPX_F32, EPX_BYTES));
    EPX_TRY(in_range("wire_dtype", (int64_t)c->wire_dtype, EPX_F32, EPX_BYTES));
    EPX_TRY(in_range("expert_dtype", (int64_t)c->expert_dtype, EPX_F32, EPX_BYTES));
    EPX_TRY(in_range("combine_dtype", (int64_t)c->combine_dtype, EPX_F32, EPX_BYTES));
    EPX_TRY(in_range("scale_format", (int64_t)c->scale_format, EPX_SCALE_F32, EPX_SCALE_UE8M0));
    EPX_TRY(in_range("scale_layout", (int64_t)c->scale_layout, EPX_SCALE_ROW_MAJOR, EPX_SCALE_COL_MAJOR));
    EPX_TRY(in_range("layout", (int64_t)c->layout, EPX_LAYOUT_LISTS, EPX_LAYOUT_CONTIGUOUS));
    return in_range("combine", (int64_t)c->combine, EPX_COMBINE_EXACT, EPX_COMBINE_REDUCED);
}

static epx_status_t check_built(const epx_plan_config_t *c, int on_device) {
    if (c->token_dtype == EPX_BYTES) return epx_unsupported_value("token_dtype", "bytes", "f32, bf16, f16, fp8_e4m3");
    if (c->scale_block > EPX_ROW_CHUNK) {
        char value[16];
        snprintf(value, sizeof value, "%d", c->scale_block);
        return epx_unsupported_value("scale_block", value, "1 to 512");
    }
    if (c->align != 1 && c->layout != EPX_LAYOUT_CONTIGUOUS)
        return epx_fail(EPX_ERR_ARG, "align is %d; legal with this layout: 1 (CONTIGUOUS pads the rows of an expert)", c->align);
    if (c->scale_layout == EPX_SCALE_COL_MAJOR && c->layout == EPX_LAYOUT_LISTS)
        return epx_fail(EPX_ERR_ARG, "scale_layout is COL_MAJOR with layout LISTS; legal: ROW_MAJOR, since rows stay in place");
    if (!on_device) EPX_TRY(only_int("n_blocks", c->n_blocks, 0));
    if (!on_device && c->combine == EPX_COMBINE_REDUCED)
        return epx_unsupported_value("combine", "REDUCED", "EXACT, PARTIAL; REDUCED in groups on devices");
    return EPX_OK;
}

static int is_row_dtype(epx_dtype_t d) { return d == EPX_F32 || d == EPX_BF16 || d == EPX_F16; }

static epx_status_t resolve_dtypes(epx_plan_config_t *c) {
    if (c->wire_dtype == EPX_BYTES) return epx_unsupported_value("wire_dtype", "bytes", "token_dtype, fp8_e4m3");
    if (c->wire_dtype != c->token_dtype && c->wire_dtype != EPX_FP8_E4M3)
        return epx_fail(EPX_ERR_ARG, "wire_dtype is %s with token_dtype %s; legal: token_dtype or fp8_e4m3",
                        epx_dtype_name(c->wire_dtype), epx_dtype_name(c->token_dtype));
    if (c->combine_dtype == EPX_BYTES && c->token_dtype == EPX_FP8_E4M3)
        return epx_fail(EPX_ERR_ARG,
                        "combine_dtype is bytes (token_dtype) with token_dtype fp8_e4m3; state f32, bf16 or f16, which is then "
                        "also the dtype of the result, or fp8_e4m3 with an expert_dtype");
    if (c->combine_dtype == EPX_BYTES) c->combine_dtype = c->token_dtype;
    if (c->expert_dtype == EPX_BYTES && c->combine_dtype == EPX_FP8_E4M3) {
        if (c->token_dtype == EPX_FP8_E4M3)
            return epx_fail(EPX_ERR_ARG, "expert_dtype is bytes with combine_dtype and token_dtype fp8_e4m3; state f32, bf16 or "
                                         "f16: it is also the dtype of the result");
        c->expert_dtype = c->token_dtype;
    }
    if (c->expert_dtype == EPX_BYTES || c->combine == EPX_COMBINE_REDUCED) c->expert_dtype = c->combine_dtype;
    if (!is_row_dtype(c->expert_dtype))
        return epx_unsupported_value("expert_dtype", epx_dtype_name(c->expert_dtype), "f32, bf16, f16");
    return EPX_OK;
}

epx_dtype_t epx_result_dtype(const epx_plan_config_t *c) {
    if (c->token_dtype != EPX_FP8_E4M3) return c->token_dtype;
    return c->combine_dtype != EPX_FP8_E4M3 ? c->combine_dtype : c->expert_dtype;
}

epx_status_t epx_validate_placement(const epx_plan_config_t *c, int n_ranks) {
    for (int s = 0; c->slot_rank != NULL && s < c->n_slots; s++)
        if (c->slot_rank[s] < 0 || c->slot_rank[s] >= n_ranks)
            return epx_fail(EPX_ERR_ARG, "slot_rank[%d] is %d; legal: 0 to %d", s, c->slot_rank[s], n_ranks - 1);
    if (c->slot_expert == NULL) return EPX_OK;
    for (int s = 0; s < c->n_slots; s++)
        if (c->slot_expert[s] < 0 || c->slot_expert[s] >= c->n_experts)
            return epx_fail(EPX_ERR_ARG, "slot_expert[%d] is %d; legal: 0 to %d", s, c->slot_expert[s], c->n_experts - 1);
    uint8_t *seen = calloc((size_t)c->n_experts, 1);
    if (seen == NULL) return epx_fail(EPX_ERR_NOMEM, "no memory for %d bytes", c->n_experts);
    for (int s = 0; s < c->n_slots; s++) seen[c->slot_expert[s]] = 1;
    int e = 0;
    while (e < c->n_experts && seen[e]) e++;
    free(seen);
    if (e == c->n_experts) return EPX_OK;
    return epx_fail(EPX_ERR_ARG, "slot_expert has no slot for expert %d; legal: at least one for each of 0 to %d", e,
                    c->n_experts - 1);
}

int epx_slot_expert(const epx_plan_config_t *cfg, int slot) {
    return cfg->slot_expert != NULL ? cfg->slot_expert[slot] : slot % cfg->n_experts;
}

int epx_slot_owner(const epx_plan_config_t *cfg, int n_ranks, int slot) {
    if (cfg->slot_rank != NULL) return cfg->slot_rank[slot];
    int q = cfg->n_slots / n_ranks, r = cfg->n_slots % n_ranks; /* the first r ranks have q + 1 */
    return slot < r * (q + 1) ? slot / (q + 1) : r + (slot - r * (q + 1)) / q;
}

int epx_debug_wanted(const epx_plan_config_t *cfg) {
    const char *text = getenv("EPX_DEBUG");
    return text != NULL && text[0] != '\0' && strcmp(text, "0") != 0 ? 1 : cfg->debug;
}

static epx_status_t validate(const epx_plan_config_t *cfg, int n_ranks, int on_device, epx_plan_config_t *out_cfg) {
    epx_plan_config_t c = *cfg;
    EPX_TRY(in_range("n_ranks", n_ranks, 1, EPX_MAX_RANKS));
    EPX_TRY(check_sizes(&c));
    EPX_TRY(check_built(&c, on_device));
    EPX_TRY(resolve_dtypes(&c));
    if (c.n_slots == 0) c.n_slots = c.n_experts;
    if (c.timeout_ns == 0) c.timeout_ns = UINT64_C(10000000000);
    if (c.backend == NULL) c.backend = "auto";
    c.debug = epx_debug_wanted(&c);
    EPX_TRY(epx_validate_placement(&c, n_ranks));
    if (n_ranks % c.replicate != 0)
        return epx_fail(EPX_ERR_ARG, "replicate is %d with %d ranks; legal: a divisor of the number of ranks", c.replicate,
                        n_ranks);
    *out_cfg = c;
    return EPX_OK;
}

epx_status_t epx_validate_config(const epx_plan_config_t *cfg, int n_ranks, epx_plan_config_t *out_cfg) {
    return validate(cfg, n_ranks, 0, out_cfg);
}

epx_status_t epx_validate_device_config(const epx_plan_config_t *cfg, int n_ranks, epx_plan_config_t *out_cfg) {
    return validate(cfg, n_ranks, 1, out_cfg);
}

/* ---- step arguments ---- */

static epx_status_t check_ids(const epx_plan_t *p, const epx_io_t *io) {
    size_t n = (size_t)io->n_tokens * (size_t)p->cfg.top_k;
    uint32_t experts = (uint32_t)p->cfg.n_experts, worst = 0;
    for (size_t i = 0; i < n; i++) { /* one compare a word, no branch: -1 becomes 0 */
        uint32_t v = (uint32_t)io->ids[i] + 1u;
        worst = v > worst ? v : worst;
    }
    if (worst <= experts) return EPX_OK;
    size_t i = 0;
    while ((uint32_t)io->ids[i] + 1u <= experts) i++;
    return epx_fail(EPX_ERR_ARG, "ids[token %zu][k %zu] is %d; legal: -1 (not sent) to %u", i / (size_t)p->cfg.top_k,
                    i % (size_t)p->cfg.top_k, (int)io->ids[i], experts - 1);
}

static epx_status_t need(const void *ptr, const char *field, int64_t count) {
    if (ptr != NULL) return EPX_OK;
    return epx_fail(EPX_ERR_ARG, "io->%s is NULL; %lld elements are needed", field, (long long)count);
}

epx_status_t epx_validate_dispatch_send(const epx_plan_t *p, const epx_io_t *io) {
    int64_t t = io->n_tokens, h = p->cfg.hidden, k = p->cfg.top_k;
    if (io->stream != NULL) return epx_fail(EPX_ERR_ARG, "io->stream is set on a CPU plan; legal: NULL");
    if (io->n_tokens_device != NULL) return epx_fail(EPX_ERR_ARG, "io->n_tokens_device is set on a CPU plan; legal: NULL");
    if (t < 0) return epx_fail(EPX_ERR_ARG, "n_tokens is %d; legal: 0 to max_tokens = %d", io->n_tokens, p->cfg.max_tokens);
    if (t > p->cfg.max_tokens)
        return epx_fail(EPX_ERR_CAPACITY, "n_tokens is %d; the plan was created for at most max_tokens = %d", io->n_tokens,
                        p->cfg.max_tokens);
    if (t == 0) return EPX_OK;
    EPX_TRY(need(io->x, "x", t * h));
    EPX_TRY(need(io->ids, "ids", t * k));
    EPX_TRY(need(io->weights, "weights", t * k));
    if (p->cfg.token_dtype == EPX_FP8_E4M3) EPX_TRY(need(io->x_scale, "x_scale", t * (int64_t)p->layout.scale_words));
    else if (io->x_scale != NULL)
        return epx_fail(EPX_ERR_ARG, "io->x_scale is set with token_dtype %s; legal: only with fp8_e4m3",
                        epx_dtype_name(p->cfg.token_dtype));
    return check_ids(p, io);
}

epx_status_t epx_validate_dispatch_recv(const epx_plan_t *p, const epx_io_t *io) {
    if (p->cfg.layout == EPX_LAYOUT_LISTS) {
        if (io->out_x != NULL) return epx_fail(EPX_ERR_ARG, "io->out_x is set with layout LISTS; rows stay in place, pass NULL");
        if (io->out_scale != NULL) return epx_fail(EPX_ERR_ARG, "io->out_scale is set with layout LISTS; pass NULL");
        return EPX_OK;
    }
    if (p->layout.n_scales == 0 && io->out_scale != NULL)
        return epx_fail(EPX_ERR_ARG, "io->out_scale is set with wire_dtype %s; legal: only with fp8_e4m3",
                        epx_dtype_name(p->cfg.wire_dtype));
    if (epx_plan_place(p, io->channel)->n_local == 0) return EPX_OK;
    int64_t rows = (int64_t)p->max_rows;
    EPX_TRY(need(io->out_x, "out_x", rows * p->cfg.hidden));
    EPX_TRY(need(io->out_counts, "out_counts", epx_plan_place(p, io->channel)->n_local));
    if (p->layout.n_scales) EPX_TRY(need(io->out_scale, "out_scale", rows * (int64_t)p->layout.scale_words));
    return EPX_OK;
}

epx_status_t epx_validate_combine_send(const epx_plan_t *p, const epx_io_t *io, int n_rows) {
    if (p->channels[io->channel].caller_sums) {
        if (io->x == NULL) return EPX_OK;
        return epx_fail(EPX_ERR_ARG, "io->x is set after epx_plan_partials(); legal: NULL, the sums are in place");
    }
    if (n_rows == 0) return EPX_OK;
    int64_t rows = p->cfg.layout == EPX_LAYOUT_LISTS ? n_rows : (int64_t)p->max_rows;
    return need(io->x, "x", rows * p->cfg.hidden);
}

epx_status_t epx_validate_combine_weights(const epx_plan_t *p, const epx_io_t *io) {
    if (io->combine_weights == NULL) return EPX_OK;
    if (p->cfg.combine != EPX_COMBINE_EXACT)
        return epx_fail(EPX_ERR_ARG,
                        "io->combine_weights is set with combine PARTIAL, whose ranks weigh their rows before they send "
                        "them; legal: only with EXACT");
    if (p->cfg.renormalize)
        return epx_fail(EPX_ERR_ARG, "io->combine_weights is set with renormalize 1; legal: only with renormalize 0");
    return EPX_OK;
}

epx_status_t epx_validate_combine_recv(const epx_plan_t *p, const epx_io_t *io) {
    EPX_TRY(epx_validate_combine_weights(p, io));
    int n = p->channels[io->channel].n_tokens;
    return n == 0 ? EPX_OK : need(io->out_x, "out_x", (int64_t)n * p->cfg.hidden);
}
