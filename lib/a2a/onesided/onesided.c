/* Backend "onesided": rows are staged once in the own slab and read in place by peers; routing tables are pushed; one flag a
 * peer and phase (docs/protocol.md). Rows for peers that are reached by messages go with the routing, in one message. */
#include "base/status.h"
#include "spi/a2a.h"
#include "spi/debug.h"
#include "spi/exchange.h"
#include "spi/mutant.h"
#include "spi/route.h"

static epx_status_t can(const epx_net_t *net, const epx_plan_config_t *cfg) {
    (void)cfg;
    if (net == NULL || (net->transport->links & EPX_LINK_MAPPED)) return EPX_OK;
    return epx_fail(EPX_ERR_UNSUPPORTED, "backend onesided needs mapped memory, transport %s has none", net->transport->name);
}

static epx_status_t private_bytes(const epx_plan_config_t *cfg, int n_ranks, size_t row_max, size_t *out_bytes) {
    (void)cfg, (void)n_ranks, (void)row_max;
    *out_bytes = 0;
    return EPX_OK;
}

static epx_status_t dispatch_send(epx_plan_t *p, const epx_io_t *io) {
    uint64_t row_bytes = p->layout.wire_row_bytes + p->layout.scale_words * sizeof(float),
             table = (uint64_t)io->n_tokens * (uint64_t)p->cfg.top_k * 8 + 8;
    if (EPX_MUTANT(flag_before_data)) {
        epx_exchange_flag_dispatch(p, io->channel);
        EPX_MUTANT_PAUSE();
    }
    for (int i = 1; i <= p->n_ranks; i++) {
        int dst = (p->rank + i) % p->n_ranks;
        if (!epx_plan_sends_to(p, dst)) continue;
        epx_exchange_push_routing(p, io->channel, dst, io);
        if (dst != p->rank) p->dispatch_bytes += table;
    }
    epx_exchange_stage(p, io->channel, io);
    for (int dst = 0; dst < p->n_ranks; dst++)
        if (epx_plan_sends_to(p, dst)) epx_debug_push_sums(p, io->channel, dst);
    for (int i = 1; p->net->n_messages > 0 && i < p->n_ranks; i++) {
        int dst = (p->rank + i) % p->n_ranks;
        if (p->slab->base[dst] == NULL && epx_plan_sends_to(p, dst)) epx_exchange_push_rows(p, io->channel, dst, io, 0);
    }
    if (!EPX_MUTANT(flag_before_data)) epx_exchange_flag_dispatch(p, io->channel);
    p->dispatch_bytes += epx_route_count_sent(p, io, p->rows_sent) * row_bytes;
    return EPX_OK;
}

static epx_status_t dispatch_recv(epx_plan_t *p, const epx_io_t *io) {
    epx_channel_t *ch = &p->channels[io->channel];
    EPX_TRY(epx_exchange_wait_dispatch(p, io->channel));
    epx_exchange_open_routing(p, io->channel);
    for (int src = 0; src < p->n_ranks; src++) {
        int holder = epx_plan_holder(p, epx_plan_source(p, src), p->rank);
        ch->routes.row_base[src] = holder < 0 ? NULL : epx_exchange_rows(p, io->channel, holder);
        ch->routes.scale_base[src] = holder < 0 ? NULL : epx_exchange_scales(p, io->channel, holder);
    }
    epx_route_build(p, ch);
    epx_route_lists(p, ch);
    EPX_TRY(epx_debug_check_rows(p, io->channel));
    epx_route_output(p, ch, io);
    return epx_debug_check_slab(p);
}

static epx_status_t combine_send(epx_plan_t *p, const epx_io_t *io) {
    if (EPX_MUTANT(flag_before_data)) {
        epx_exchange_flag_combine(p, io->channel);
        EPX_MUTANT_PAUSE();
    }
    epx_exchange_send_rows(p, io->channel, io->x, 0);
    if (!EPX_MUTANT(flag_before_data)) epx_exchange_flag_combine(p, io->channel);
    return EPX_OK;
}

static epx_status_t combine_recv(epx_plan_t *p, const epx_io_t *io) {
    EPX_TRY(epx_exchange_wait_combine(p, io->channel));
    return epx_exchange_sum(p, io->channel, io, 0);
}

extern const epx_a2a_t epx_a2a_onesided;
const epx_a2a_t epx_a2a_onesided = {
    "onesided",
    "rows staged once and read in place, routing tables pushed, one flag a peer and phase",
    100,
    EPX_REGION_C,
    0,
    can,
    private_bytes,
    dispatch_send,
    dispatch_recv,
    combine_send,
    combine_recv,
};
