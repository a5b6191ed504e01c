/* Partial sums that the caller writes where combine wants them. */
#include "base/status.h"
#include "core/core.h"

static epx_status_t refuse(const char *field, const char *value, const char *legal) {
    return epx_fail(EPX_ERR_UNSUPPORTED, "epx_plan_partials: %s is %s; legal: %s", field, value, legal);
}

static epx_status_t check_plan(const epx_plan_t *p) {
    if (p->a2a->device != NULL) return refuse("the group", "on devices", "CPUs");
    if (p->cfg.combine != EPX_COMBINE_PARTIAL) return refuse("combine", "EXACT", "PARTIAL");
    if (p->cfg.combine_dtype == EPX_FP8_E4M3) return refuse("combine_dtype", "fp8_e4m3", "f32, bf16, f16");
    if (p->cfg.replicate != 1) return refuse("replicate", "above 1", "1");
    if (!(p->a2a->regions & EPX_REGION_C)) return refuse("backend", p->a2a->name, "onesided, collective");
    for (int r = 0; r < p->n_ranks; r++)
        if (p->slab->base[r] == NULL) return refuse("transport", p->net->transport->name, "one that maps all ranks");
    return EPX_OK;
}

epx_status_t epx_plan_partials(epx_plan_t *p, int channel, epx_partials_t *out) {
    if (p == NULL || out == NULL) return epx_fail(EPX_ERR_ARG, "%s is NULL", p == NULL ? "plan" : "out");
    if (out->size != sizeof *out) return epx_fail(EPX_ERR_ARG, "out->size is %u; legal: %zu", out->size, sizeof *out);
    if (channel < 0 || channel >= p->cfg.n_channels)
        return epx_fail(EPX_ERR_ARG, "channel is %d; legal: 0 to %d", channel, p->cfg.n_channels - 1);
    EPX_TRY(check_plan(p));
    epx_channel_t *ch = &p->channels[channel];
    if (ch->state != EPX_CH_COMBINE_SEND)
        return epx_fail(EPX_ERR_STATE, "epx_plan_partials is legal between dispatch_recv and combine_send only");
    epx_routes_t *r = &ch->routes;
    for (int src = 0; src < p->n_ranks; src++) {
        r->rows_of[src] = r->row_of + (size_t)src * p->layout.route_block;
        r->sums[src] = p->slab->base[src] + epx_c_row_off(&p->layout, channel, (uint64_t)p->rank, 0);
    }
    ch->caller_sums = 1;
    *out = (epx_partials_t){.size = sizeof *out,
                            .n_ranks = p->n_ranks,
                            .n_tokens = r->n_tokens,
                            .ids = r->ids,
                            .weights = r->weights,
                            .rows = r->rows_of,
                            .sums = r->sums,
                            .sum_stride_bytes = p->layout.combine_row_bytes};
    return EPX_OK;
}
