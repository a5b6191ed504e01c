/* Masked peers, and making an aborted plan usable again. Set-up path, but epx_mask_apply(): once a dispatch, without memory or
 * lock. */
#include <inttypes.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/status.h"
#include "core/core.h"
#include "spi/mutant.h"
#include "spi/unsupported.h"

/* ---- which places of a token are missing ---- */

/* Places of a token that no living rank computes. The others' weights are scaled to the old sum where asked for. */
static int mask_token(const epx_plan_t *p, const epx_channel_t *ch, uint32_t t, const int32_t *ids, const float *w,
                      float *out_w) {
    float all = 0, there = 0;
    int n_missing = 0, source = epx_plan_source(p, p->rank);
    for (int k = 0; k < p->cfg.top_k; k++) {
        if (ids[k] < 0) continue;
        int lives = epx_place_of(ch->place, ids[k], source, t) != NULL;
        all += w[k];
        if (lives) there += w[k];
        n_missing += !lives;
    }
    if (out_w == NULL) return n_missing;
    float factor = n_missing == 0 || there == 0.0f || EPX_MUTANT(no_renormalize) ? 1.0f : all / there;
    for (int k = 0; k < p->cfg.top_k; k++) out_w[k] = w[k] * factor;
    return n_missing;
}

void epx_mask_apply(epx_plan_t *p, epx_io_t *io) {
    epx_channel_t *ch = &p->channels[io->channel];
    size_t k_max = (size_t)p->cfg.top_k;
    ch->n_missing = 0;
    if (!p->any_masked) return;
    for (size_t t = 0; t < (size_t)io->n_tokens; t++) {
        float *out_w = ch->weights == NULL ? NULL : ch->weights + t * k_max;
        int n = mask_token(p, ch, (uint32_t)t, io->ids + t * k_max, io->weights + t * k_max, out_w);
        ch->missing[t] = (uint8_t)n;
        ch->n_missing += n != 0;
    }
    if (ch->weights != NULL) io->weights = ch->weights;
}

epx_status_t epx_plan_missing(epx_plan_t *p, int channel, int *out_n_tokens, const uint8_t **out_places) {
    if (p == NULL || out_n_tokens == NULL) return epx_fail(EPX_ERR_ARG, "%s is NULL", p == NULL ? "plan" : "out_n_tokens");
    if (channel < 0 || channel >= p->cfg.n_channels)
        return epx_fail(EPX_ERR_ARG, "channel is %d; legal: 0 to %d", channel, p->cfg.n_channels - 1);
    *out_n_tokens = p->channels[channel].n_missing;
    if (out_places != NULL) *out_places = p->channels[channel].missing;
    return EPX_OK;
}

/* ---- epx_plan_recover() ---- */

/* What a rank tells the others, in its place of their recover region, before it raises the flag in front of it. */
typedef struct {
    uint64_t epoch;       /* highest of its channels */
    uint64_t group_epoch; /* of its last all-gather */
    uint64_t masked;      /* hash of the masked ranks */
} recover_word_t;

_Static_assert(sizeof(recover_word_t) + 8 <= EPX_FLAG_STRIDE, "recover record");

static int takes_part(const epx_plan_t *p, int r) { return p->alive[r] && !p->group->masked[r]; }

static void tell_all(epx_plan_t *p, uint64_t flag, const recover_word_t *word) {
    uint64_t off = epx_recover_off(&p->layout, p->rank);
    for (int r = 0; r < p->n_ranks; r++) {
        if (!takes_part(p, r)) continue;
        if (word != NULL) memcpy(epx_slab_put(p->slab, r, off + 8, sizeof *word), word, sizeof *word);
        epx_slab_signal(p->slab, r, off, flag);
    }
}

/* Wait for the flag of every living rank. The abort word says nothing here: it is what is being cleared. */
static epx_status_t hear_all(epx_plan_t *p, uint64_t flag, uint64_t deadline) {
    struct timespec pause = {0, 50000};
    for (int r = 0; r < p->n_ranks; r++) {
        const uint64_t *word = epx_slab_word(p->slab, p->rank, epx_recover_off(&p->layout, r));
        while (takes_part(p, r) && epx_load_acquire_u64(word) < flag) {
            epx_net_progress(p->net);
            int dead = p->net->transport->dead_rank(p->net);
            if (epx_load_acquire_u64(word) >= flag) break;
            if (dead >= 0) return epx_fail(EPX_ERR_PEER, "recover: %s is gone and not masked", epx_peer_text(p->net, dead));
            if (epx_now_ns() > deadline)
                return epx_fail(EPX_ERR_TIMEOUT, "recover: rank %d waited %.3f s for %s", p->rank,
                                (double)p->cfg.timeout_ns * 1e-9, epx_peer_text(p->net, r));
            nanosleep(&pause, NULL);
        }
    }
    return EPX_OK;
}

static uint64_t masked_hash(const epx_plan_t *p) {
    uint64_t h = UINT64_C(14695981039346656037);
    for (int r = 0; r < p->n_ranks; r++) h = (h ^ (uint64_t)takes_part(p, r)) * UINT64_C(1099511628211);
    return h;
}

static epx_status_t agree_on(const epx_plan_t *p, recover_word_t *inout) {
    for (int r = 0; r < p->n_ranks; r++) {
        recover_word_t w;
        if (!takes_part(p, r)) continue;
        memcpy(&w, p->slab->base[p->rank] + epx_recover_off(&p->layout, r) + 8, sizeof w);
        if (w.masked != inout->masked)
            return epx_fail(EPX_ERR_MISMATCH, "recover: ranks %d and %d have masked different ranks", p->rank, r);
        if (w.epoch > inout->epoch && !EPX_MUTANT(recover_keeps_epoch)) inout->epoch = w.epoch;
        if (w.group_epoch > inout->group_epoch) inout->group_epoch = w.group_epoch;
    }
    return EPX_OK;
}

/* No living rank is in a call: forget what was in flight. Flags only grow, and none is above the common epoch. */
static void reset(epx_plan_t *p, const recover_word_t *w) {
    for (int r = 0; r < p->n_ranks; r++) {
        p->alive[r] = (uint8_t)takes_part(p, r);
        p->any_masked |= !p->alive[r];
    }
    for (int i = 0; i < p->cfg.n_channels; i++) {
        p->channels[i].state = EPX_CH_DISPATCH_SEND;
        p->channels[i].epoch = w->epoch;
    }
    for (int i = 0; i < 2; i++)
        if (p->placements[i].first_epoch != UINT64_MAX) epx_placement_build(p, &p->placements[i]);
    p->group->epoch = w->group_epoch;
    p->group->lost = 0;
    __atomic_store_n(&epx_slab_head(p->slab, p->rank)->abort_word, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&epx_slab_head(p->group->ctl, p->rank)->abort_word, 0, __ATOMIC_SEQ_CST);
    epx_store_release_u32(&p->error_status, 0);
    epx_store_release_u32(&p->error_claim, 0);
}

static epx_status_t check_recover(const epx_plan_t *p) {
    if (p->a2a->device != NULL)
        return epx_unsupported_call("epx_plan_recover on devices", "destroy the plan and create a new one");
    for (int r = 0; r < p->n_ranks; r++)
        if (!p->alive[r] && !p->group->masked[r])
            return epx_fail(EPX_ERR_ARG, "rank %d was left out by an earlier recover and cannot come back; create a new plan", r);
    return EPX_OK;
}

/* Messages of this plan and of its group are of a new turn from here on: those of the turn before, which may be under way for
 * long, are dropped by every rank that has seen this one. */
static void renew_messages(epx_plan_t *p) {
    const epx_messages_t *m = p->net->transport->messages;
    uint32_t turn = ++p->group->n_recovers;
    if (m == NULL || EPX_MUTANT(recover_keeps_messages)) return;
    m->renew(p->slab, turn);
    m->renew(p->group->ctl, turn);
}

/* All living ranks have done so. */
static void settle_messages(epx_plan_t *p) {
    const epx_messages_t *m = p->net->transport->messages;
    if (m == NULL || EPX_MUTANT(recover_keeps_messages)) return;
    m->settle(p->slab, p->group->n_recovers);
    m->settle(p->group->ctl, p->group->n_recovers);
}

epx_status_t epx_plan_recover(epx_plan_t *p) {
    if (p == NULL) return epx_fail(EPX_ERR_ARG, "plan is NULL");
    EPX_TRY(check_recover(p));
    uint64_t turn = ++p->n_recovers, deadline = epx_now_ns() + p->cfg.timeout_ns;
    recover_word_t word = {0, p->group->epoch, masked_hash(p)};
    for (int i = 0; i < p->cfg.n_channels; i++)
        if (p->channels[i].epoch > word.epoch) word.epoch = p->channels[i].epoch;
    renew_messages(p);
    tell_all(p, 2 * turn, &word); /* this rank is in no exchange any more */
    epx_status_t s = hear_all(p, 2 * turn, deadline);
    if (s >= 0) s = agree_on(p, &word);
    if (s < 0) {
        epx_slab_abort(p->slab, epx_abort_pack(EPX_ERR_ABORTED, p->rank, -1));
        return s;
    }
    settle_messages(p);
    reset(p, &word);
    tell_all(p, 2 * turn + 1, NULL); /* and its abort word is clear: from here on the next error may be written */
    EPX_TRY(hear_all(p, 2 * turn + 1, deadline));
    epx_slab_drain(p->slab);
    return EPX_OK;
}
