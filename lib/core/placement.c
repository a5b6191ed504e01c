/* Placement of experts on ranks: built at create, replaced from a named epoch on. Set-up path but epx_placement_for(). */
#include "spi/place.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "core/core.h"
#include "spi/unsupported.h"

const epx_placement_t *epx_placement_for(const epx_plan_t *p, uint64_t epoch) {
    const epx_placement_t *newest = &p->placements[p->newest_placement], *other = &p->placements[!p->newest_placement];
    return epoch >= newest->first_epoch ? newest : other;
}

const epx_placement_t *epx_plan_place(const epx_plan_t *p, int channel) {
    const epx_channel_t *ch = &p->channels[channel];
    return epx_placement_for(p, ch->state == EPX_CH_DISPATCH_SEND ? ch->epoch + 1 : ch->epoch);
}

void epx_placement_build(epx_plan_t *p, epx_placement_t *pl) {
    int n_slots = p->cfg.n_slots, n_experts = p->cfg.n_experts;
    memset(pl->first, 0, ((size_t)n_experts + 1) * sizeof *pl->first);
    memset(p->slot_count, 0, (size_t)p->n_ranks * sizeof *p->slot_count);
    for (int s = 0; s < n_slots; s++)
        if (p->alive[pl->slot_rank[s]]) pl->first[pl->slot_expert[s] + 1]++;
    for (int e = 0; e < n_experts; e++) pl->first[e + 1] += pl->first[e];
    for (int s = 0; s < n_slots; s++) {
        int rank = pl->slot_rank[s];
        int32_t local = p->slot_count[rank]++;
        if (p->alive[rank]) pl->places[pl->first[pl->slot_expert[s]]++] = (epx_place_t){rank, local};
    }
    /* Every start has moved to its end, which is the next expert's start. */
    for (int e = n_experts; e > 0; e--) pl->first[e] = pl->first[e - 1];
    pl->first[0] = 0;
    pl->n_local = p->slot_count[p->rank];
}

void epx_placement_fill(epx_plan_t *p, const epx_plan_config_t *c, uint64_t first_epoch, epx_placement_t *pl) {
    pl->version = c->placement_version;
    pl->first_epoch = first_epoch;
    for (int s = 0; s < c->n_slots; s++) {
        pl->slot_rank[s] = epx_slot_owner(c, p->n_ranks, s);
        pl->slot_expert[s] = epx_slot_expert(c, s);
    }
    epx_placement_build(p, pl);
}

/* ---- epx_plan_set_placement() ---- */

/* What ranks compare. */
typedef struct {
    uint64_t slot_rank, slot_expert, version, epoch, reached;
} placement_record_t;

static uint64_t last_epoch(const epx_plan_t *p) {
    uint64_t last = 0;
    for (int i = 0; i < p->cfg.n_channels; i++)
        if (p->channels[i].epoch > last) last = p->channels[i].epoch;
    return last;
}

/* The older of the two tables is free when no exchange uses it and none will. */
static epx_status_t check_free(const epx_plan_t *p) {
    const epx_placement_t *newest = &p->placements[p->newest_placement];
    for (int i = 0; i < p->cfg.n_channels; i++) {
        const epx_channel_t *ch = &p->channels[i];
        int idle = ch->state == EPX_CH_DISPATCH_SEND;
        if (idle ? ch->epoch + 1 >= newest->first_epoch : ch->place == newest) continue;
        return epx_fail(EPX_ERR_STATE,
                        "placement version %" PRIu64 " comes into force at epoch %" PRIu64 ", and channel %d is at %" PRIu64
                        ": only one placement can be on its way",
                        newest->version, newest->first_epoch, i, ch->epoch);
    }
    return EPX_OK;
}

static epx_status_t check_slots(const epx_plan_t *p, const epx_plan_config_t *c) {
    memset(p->slot_count, 0, (size_t)p->n_ranks * sizeof *p->slot_count);
    for (int s = 0; s < c->n_slots; s++) {
        int rank = epx_slot_owner(c, p->n_ranks, s);
        if (++p->slot_count[rank] > p->n_local_max)
            return epx_fail(EPX_ERR_CAPACITY, "slot_rank gives rank %d more than the %d slots that a rank had at create", rank,
                            p->n_local_max);
    }
    return EPX_OK;
}

static epx_status_t check_own(const epx_plan_t *p, const epx_plan_config_t *c) {
    EPX_TRY(epx_validate_placement(c, p->n_ranks));
    EPX_TRY(check_slots(p, c));
    uint64_t version = p->placements[p->newest_placement].version;
    if (c->placement_version <= version)
        return epx_fail(EPX_ERR_ARG, "version is %" PRIu64 "; legal: above the present one, %" PRIu64, c->placement_version,
                        version);
    return check_free(p);
}

static epx_status_t compare_field(const char *name, uint64_t a, uint64_t b, int rank) {
    if (a == b) return EPX_OK;
    return epx_fail(EPX_ERR_MISMATCH, "%s is %" PRIu64 " on rank 0 and %" PRIu64 " on rank %d", name, a, b, rank);
}

static epx_status_t compare_all(const epx_plan_t *p, const placement_record_t *all) {
    const placement_record_t *first = NULL;
    for (int r = 0; r < p->n_ranks; r++) {
        if (!p->alive[r]) continue;
        if (first == NULL) first = &all[r];
        EPX_TRY(compare_field("version", first->version, all[r].version, r));
        EPX_TRY(compare_field("epoch", first->epoch, all[r].epoch, r));
        EPX_TRY(compare_field("the hash of slot_rank", first->slot_rank, all[r].slot_rank, r));
        EPX_TRY(compare_field("the hash of slot_expert", first->slot_expert, all[r].slot_expert, r));
        if (all[r].reached >= first->epoch)
            return epx_fail(EPX_ERR_ARG, "epoch is %" PRIu64 ", and rank %d has begun exchange %" PRIu64 "; legal: a later one",
                            first->epoch, r, all[r].reached);
    }
    return EPX_OK;
}

epx_status_t epx_plan_set_placement(epx_plan_t *p, const int *slot_rank, const int *slot_expert, uint64_t version,
                                    uint64_t epoch) {
    if (p == NULL) return epx_fail(EPX_ERR_ARG, "plan is NULL");
    if (p->a2a->device != NULL) return epx_unsupported_call("epx_plan_set_placement on devices", "make a new plan");
    EPX_TRY(epx_plan_poll(p));
    epx_plan_config_t c = p->cfg;
    c.slot_rank = slot_rank;
    c.slot_expert = slot_expert;
    c.placement_version = version;
    /* The others wait for this rank from here on. */
    epx_status_t s = epx_group_agree(p->group, check_own(p, &c), "epx_plan_set_placement");
    if (s < 0) return s;
    placement_record_t mine = {epx_table_hash(slot_rank, c.n_slots), epx_table_hash(slot_expert, c.n_slots), version, epoch,
                               last_epoch(p)};
    EPX_TRY(epx_group_allgather(p->group, &mine, sizeof mine, epx_group_records(p->group), p->cfg.timeout_ns));
    EPX_TRY(compare_all(p, epx_group_records(p->group)));
    p->newest_placement = !p->newest_placement;
    epx_placement_fill(p, &c, epoch, &p->placements[p->newest_placement]);
    return EPX_OK;
}
