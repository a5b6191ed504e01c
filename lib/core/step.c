/* The four halves: order of calls, checks, errors; the backend does the work. No allocation, lock, log line or system call
 * but those of waits. */
#include <stdio.h>
#include <string.h>

#include "base/atomic.h"
#include "base/status.h"
#include "core/core.h"

/* ---- errors ---- */

/* The stored error, or EPX_OK. */
static epx_status_t stored_error(epx_plan_t *p) {
    uint32_t s = epx_load_acquire_u32(&p->error_status);
    return s == 0 ? EPX_OK : epx_fail((epx_status_t)(-(int)s), "%s", p->error_message);
}

epx_status_t epx_plan_fail(epx_plan_t *p, epx_status_t s) {
    if (!epx_cas_u32(&p->error_claim, 0, 1)) {
        epx_status_t first = stored_error(p);
        return first < 0 ? first : s;
    }
    snprintf(p->error_message, sizeof p->error_message, "%.*s", (int)sizeof p->error_message - 1, epx_error_message());
    epx_store_release_u32(&p->error_status, (uint32_t)(-(int)s)); /* partner: stored_error() */
    if (p->a2a->device != NULL) p->a2a->device->stop(p);
    return s;
}

/* What the kernels have found; peers are told. */
static epx_status_t check_device(epx_plan_t *p) {
    int about = -1;
    epx_status_t s = p->a2a->device->check(p, &about);
    if (s >= 0) return EPX_OK;
    s = epx_plan_fail(p, s);
    epx_slab_abort(p->slab, epx_abort_pack(EPX_ERR_TIMEOUT, p->rank, about));
    return s;
}

/* Own error, then what peers have said, then the device. No system call. */
static epx_status_t check_alive(epx_plan_t *p) {
    EPX_TRY(stored_error(p));
    uint64_t word = epx_load_acquire_u64(&epx_slab_head(p->slab, p->rank)->abort_word);
    if (word != 0) return epx_plan_fail(p, epx_abort_error(p->net, word));
    return p->a2a->device == NULL ? EPX_OK : check_device(p);
}

epx_status_t epx_plan_poll(epx_plan_t *p) {
    if (p == NULL) return epx_fail(EPX_ERR_ARG, "plan is NULL");
    epx_net_progress(p->net);
    EPX_TRY(check_alive(p));
    int dead = p->net->transport->dead_rank(p->net);
    if (dead < 0) return EPX_OK;
    epx_slab_abort(p->slab, epx_abort_pack(EPX_ERR_PEER, p->rank, dead));
    return epx_plan_fail(p, epx_fail(EPX_ERR_PEER, "%s is gone", epx_peer_text(p->net, dead)));
}

epx_status_t epx_plan_abort(epx_plan_t *p) {
    if (p == NULL) return epx_fail(EPX_ERR_ARG, "plan is NULL");
    (void)epx_plan_fail(p, epx_fail(EPX_ERR_ABORTED, "rank %d aborted the plan", p->rank));
    epx_slab_abort(p->slab, epx_abort_pack(EPX_ERR_ABORTED, p->rank, -1));
    return EPX_OK;
}

/* ---- order of calls ---- */

static const char *const call_names[] = {"dispatch_send", "dispatch_recv", "combine_send", "combine_recv"};

static epx_status_t enter(epx_plan_t *p, const epx_io_t *io, epx_channel_state_t state) {
    if (p == NULL || io == NULL) return epx_fail(EPX_ERR_ARG, "%s is NULL", p == NULL ? "plan" : "io");
    if (io->size != sizeof *io)
        return epx_fail(EPX_ERR_ARG, "io->size is %u; legal: %zu, set by epx_io_init()", io->size, sizeof *io);
    if (io->channel < 0 || io->channel >= p->cfg.n_channels)
        return epx_fail(EPX_ERR_ARG, "io->channel is %d; legal: 0 to %d", io->channel, p->cfg.n_channels - 1);
    EPX_TRY(check_alive(p));
    epx_channel_state_t want = p->channels[io->channel].state;
    if (want != state)
        return epx_fail(EPX_ERR_STATE, "%s called on channel %d; expected: %s", call_names[state], io->channel, call_names[want]);
    return EPX_OK;
}

/* After a backend call: a failure is the plan's; success moves the channel on. */
static epx_status_t leave(epx_plan_t *p, int channel, epx_channel_state_t next, epx_status_t s) {
    if (s < 0) return epx_plan_fail(p, s);
    p->channels[channel].state = next;
    return EPX_OK;
}

/* Tell a transport that listens that a call begins or ends. */
static void tell(const epx_plan_t *p, int channel, epx_channel_state_t call, int begins) {
    if (p->net->transport->at_call != NULL)
        p->net->transport->at_call(p->net, call_names[call], channel, p->channels[channel].epoch, p->wait_ns, begins);
}

typedef epx_status_t (*half_t)(epx_plan_t *p, const epx_io_t *io);

static epx_status_t run(epx_plan_t *p, const epx_io_t *io, epx_channel_state_t call, half_t half) {
    tell(p, io->channel, call, 1);
    epx_status_t s = half(p, io);
    tell(p, io->channel, call, 0);
    return leave(p, io->channel, (epx_channel_state_t)((call + 1) % 4), s);
}

static void begin_dispatch(epx_plan_t *p, const epx_io_t *io) {
    epx_channel_t *ch = &p->channels[io->channel];
    ch->epoch++;
    ch->caller_sums = 0;
    ch->place = epx_placement_for(p, ch->epoch);
    ch->n_tokens = io->n_tokens_device != NULL ? p->cfg.max_tokens : io->n_tokens;
    p->n_dispatches++;
}

static epx_status_t run_dispatch_send(epx_plan_t *p, const epx_io_t *io) {
    begin_dispatch(p, io);
    if (p->a2a->device != NULL) return run(p, io, EPX_CH_DISPATCH_SEND, p->a2a->dispatch_send); /* ids lie on the device */
    epx_io_t masked = *io;
    epx_mask_apply(p, &masked);
    return run(p, &masked, EPX_CH_DISPATCH_SEND, p->a2a->dispatch_send);
}

static epx_status_t run_dispatch_recv(epx_plan_t *p, const epx_io_t *io) {
    return run(p, io, EPX_CH_DISPATCH_RECV, p->a2a->dispatch_recv);
}

static epx_status_t run_combine_send(epx_plan_t *p, const epx_io_t *io) {
    return run(p, io, EPX_CH_COMBINE_SEND, p->a2a->combine_send);
}

static epx_status_t run_combine_recv(epx_plan_t *p, const epx_io_t *io) {
    epx_status_t s = run(p, io, EPX_CH_COMBINE_RECV, p->a2a->combine_recv);
    if (s == EPX_OK) p->n_combines++;
    return s;
}

static epx_status_t run_dispatch(epx_plan_t *p, const epx_io_t *io) {
    if (p->a2a->device != NULL) {
        begin_dispatch(p, io);
        return leave(p, io->channel, EPX_CH_COMBINE_SEND, p->a2a->device->dispatch(p, io));
    }
    EPX_TRY(run_dispatch_send(p, io));
    return run_dispatch_recv(p, io);
}

static epx_status_t run_combine(epx_plan_t *p, const epx_io_t *io) {
    if (p->a2a->device != NULL) {
        epx_status_t s = leave(p, io->channel, EPX_CH_DISPATCH_SEND, p->a2a->device->combine(p, io));
        if (s == EPX_OK) p->n_combines++;
        return s;
    }
    EPX_TRY(run_combine_send(p, io));
    return run_combine_recv(p, io);
}

static epx_status_t validate(const epx_plan_t *p, const epx_io_t *io, epx_channel_state_t half) {
    int on_device = p->a2a->device != NULL, n_rows = p->channels[io->channel].lists.n_rows;
    switch (half) {
    case EPX_CH_DISPATCH_SEND:
        return on_device ? epx_validate_device_dispatch_send(p, io) : epx_validate_dispatch_send(p, io);
    case EPX_CH_DISPATCH_RECV:
        return on_device ? epx_validate_device_dispatch_recv(p, io) : epx_validate_dispatch_recv(p, io);
    case EPX_CH_COMBINE_SEND:
        return on_device ? epx_validate_device_combine_send(p, io) : epx_validate_combine_send(p, io, n_rows);
    default:
        return on_device ? epx_validate_device_combine_recv(p, io) : epx_validate_combine_recv(p, io);
    }
}

epx_status_t epx_dispatch_send(epx_plan_t *p, const epx_io_t *io) {
    EPX_TRY(enter(p, io, EPX_CH_DISPATCH_SEND));
    EPX_TRY(validate(p, io, EPX_CH_DISPATCH_SEND));
    return run_dispatch_send(p, io);
}

epx_status_t epx_dispatch_recv(epx_plan_t *p, const epx_io_t *io) {
    EPX_TRY(enter(p, io, EPX_CH_DISPATCH_RECV));
    EPX_TRY(validate(p, io, EPX_CH_DISPATCH_RECV));
    return run_dispatch_recv(p, io);
}

epx_status_t epx_combine_send(epx_plan_t *p, const epx_io_t *io) {
    EPX_TRY(enter(p, io, EPX_CH_COMBINE_SEND));
    EPX_TRY(validate(p, io, EPX_CH_COMBINE_SEND));
    return run_combine_send(p, io);
}

epx_status_t epx_combine_recv(epx_plan_t *p, const epx_io_t *io) {
    EPX_TRY(enter(p, io, EPX_CH_COMBINE_RECV));
    EPX_TRY(validate(p, io, EPX_CH_COMBINE_RECV));
    return run_combine_recv(p, io);
}

epx_status_t epx_dispatch(epx_plan_t *p, const epx_io_t *io) {
    EPX_TRY(enter(p, io, EPX_CH_DISPATCH_SEND));
    EPX_TRY(validate(p, io, EPX_CH_DISPATCH_SEND));
    EPX_TRY(validate(p, io, EPX_CH_DISPATCH_RECV));
    return run_dispatch(p, io);
}

epx_status_t epx_combine(epx_plan_t *p, const epx_io_t *io) {
    EPX_TRY(enter(p, io, EPX_CH_COMBINE_SEND));
    EPX_TRY(validate(p, io, EPX_CH_COMBINE_SEND));
    EPX_TRY(validate(p, io, EPX_CH_COMBINE_RECV));
    return run_combine(p, io);
}
