/* Backend "collective": every token goes to every rank (all-gather), answers come back per k (exact) or as one partial sum a
 * rank for every token (reduce-scatter). The baseline that onesided is measured against. */
#include <string.h>

#include "base/status.h"
#include "spi/a2a.h"
#include "spi/debug.h"
#include "spi/exchange.h"
#include "spi/route.h"

static epx_status_t can(const epx_net_t *net, const epx_plan_config_t *cfg) {
    (void)cfg;
    if (net == NULL || (net->transport->links & EPX_LINK_MAPPED)) return EPX_OK;
    return epx_fail(EPX_ERR_UNSUPPORTED, "backend collective needs mapped memory, transport %s has none", net->transport->name);
}

static epx_status_t private_bytes(const epx_plan_config_t *cfg, int n_ranks, size_t row_max, size_t *out_bytes) {
    (void)cfg, (void)n_ranks, (void)row_max;
    *out_bytes = 0;
    return EPX_OK;
}

static char *gathered(const epx_plan_t *p, int channel, int rank, int src) {
    return p->slab->base[rank] + epx_channel_off(&p->layout, channel) + p->layout.d_off +
           (uint64_t)src * p->layout.max_tokens * p->layout.wire_row_bytes;
}

static float *gathered_scales(const epx_plan_t *p, int channel, int rank, int src) {
    return (float *)(void *)(p->slab->base[rank] + epx_channel_off(&p->layout, channel) + p->layout.d_scale_off +
                             (uint64_t)src * p->layout.max_tokens * p->layout.scale_words * sizeof(float));
}

static epx_status_t dispatch_send(epx_plan_t *p, const epx_io_t *io) {
    size_t rows = (size_t)io->n_tokens * p->layout.wire_row_bytes,
           scales = (size_t)io->n_tokens * p->layout.scale_words * sizeof(float);
    epx_exchange_stage(p, io->channel, io);
    for (int i = 1; i <= p->n_ranks; i++) {
        int dst = (p->rank + i) % p->n_ranks;
        if (!epx_plan_sends_to(p, dst)) continue;
        epx_exchange_push_routing(p, io->channel, dst, io);
        epx_debug_push_sums(p, io->channel, dst);
        if (dst != p->rank) p->dispatch_bytes += rows + scales + (uint64_t)io->n_tokens * (uint64_t)p->cfg.top_k * 8 + 8;
        if (p->slab->base[dst] == NULL) {
            epx_exchange_push_rows(p, io->channel, dst, io, 1);
            continue;
        }
        if (rows) epx_row_copy(gathered(p, io->channel, dst, p->rank), epx_exchange_rows(p, io->channel, p->rank), rows);
        if (scales) memcpy(gathered_scales(p, io->channel, dst, p->rank), epx_exchange_scales(p, io->channel, p->rank), scales);
    }
    epx_exchange_flag_dispatch(p, io->channel);
    (void)epx_route_count_sent(p, io, p->rows_sent);
    return EPX_OK;
}

static epx_status_t dispatch_recv(epx_plan_t *p, const epx_io_t *io) {
    epx_channel_t *ch = &p->channels[io->channel];
    EPX_TRY(epx_exchange_wait_dispatch(p, io->channel));
    epx_exchange_open_routing(p, io->channel);
    for (int src = 0; src < p->n_ranks; src++) {
        int holder = epx_plan_holder(p, epx_plan_source(p, src), p->rank), at = holder < 0 ? src : holder;
        ch->routes.row_base[src] = gathered(p, io->channel, p->rank, at);
        ch->routes.scale_base[src] = p->layout.n_scales ? gathered_scales(p, io->channel, p->rank, at) : NULL;
    }
    epx_route_build(p, ch);
    epx_route_lists(p, ch);
    EPX_TRY(epx_debug_check_rows(p, io->channel));
    epx_route_output(p, ch, io);
    return epx_debug_check_slab(p);
}

static epx_status_t combine_send(epx_plan_t *p, const epx_io_t *io) {
    epx_exchange_send_rows(p, io->channel, io->x, 1);
    epx_exchange_flag_combine(p, io->channel);
    return EPX_OK;
}

static epx_status_t combine_recv(epx_plan_t *p, const epx_io_t *io) {
    EPX_TRY(epx_exchange_wait_combine(p, io->channel));
    return epx_exchange_sum(p, io->channel, io, 1);
}

extern const epx_a2a_t epx_a2a_collective;
const epx_a2a_t epx_a2a_collective = {
    "collective",
    "all-gather of tokens; rows back per k, or reduce-scatter of partial sums: the baseline",
    50,
    EPX_REGION_D | EPX_REGION_C,
    0,
    can,
    private_bytes,
    dispatch_send,
    dispatch_recv,
    combine_send,
    combine_recv,
};
