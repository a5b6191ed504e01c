/* The exchanges of a rank: which ranks share the experts, the plans of the MoE layers, their memory, counters and self-test. */
#include <stdio.h>
#include <string.h>

#include "engine/runtime/rank_internal.h"

/* ---- groups of ranks that hold all experts together ---- */

static int ep_first(const epx_rank_t *r) { return r->cfg.rank - r->cfg.rank % r->cfg.ep; }
static int least(int a, int b) { return a < b ? a : b; }

/* Ranks of an attention group have the same tokens; those of them that are in one expert group hold them together. */
static int n_holders(const epx_rank_t *r) { return least(r->attn_size, r->cfg.ep); }

epx_status_t epx_rank_make_ep_groups(epx_rank_t *r) {
    int ranks[EPX_RANK_MAX_TP], ep = r->cfg.ep;
    r->ep_group = r->group;
    for (int g = 0; ep < r->cfg.tp && g < r->cfg.tp / ep; g++) { /* every rank makes all, as it must, and is in one */
        epx_group_t *made = NULL;
        for (int i = 0; i < ep; i++) ranks[i] = g * ep + i;
        EPX_TRY(epx_group_create(r->world, ranks, ep, epx_ops_device_idx(r->ops), &made));
        if (made) r->ep_group = made;
    }
    return EPX_OK;
}

/* ---- modes ---- */

static int is_auto(const epx_rank_t *r) { return strcmp(r->cfg.deepep_mode, "auto") == 0; }

static int is_contiguous(const epx_rank_t *r, epx_exchange_t which) {
    const epx_moe_preset_t *p = epx_moe_preset(r->cfg.moe_a2a_backend);
    if (!p->deepep_class) return 0;
    return is_auto(r) ? p->auto_by_batch && which == EPX_EXCHANGE_MAIN : strcmp(r->cfg.deepep_mode, "normal") == 0;
}

int epx_rank_has_exchange(const epx_rank_t *r, epx_exchange_t which) {
    const epx_moe_preset_t *p = epx_moe_preset(r->cfg.moe_a2a_backend);
    return which == EPX_EXCHANGE_MAIN || (p->deepep_class && p->auto_by_batch && is_auto(r));
}

void epx_rank_plan_config(const epx_rank_t *r, epx_exchange_t which, epx_plan_config_t *out) {
    int decode_rows = r->cfg.max_running;
    epx_plan_config_init(out);
    epx_model_plan_config(r->model, out);
    out->combine = r->cfg.combine;
    out->replicate = n_holders(r);
    out->backend = epx_moe_preset(r->cfg.moe_a2a_backend)->library;
    out->timeout_ns = epx_rank_timeout_ns(r);
    if (is_contiguous(r, which)) out->layout = EPX_LAYOUT_CONTIGUOUS; /* the products need no padding: align 1 */
    if (which == EPX_EXCHANGE_DECODE)
        out->max_tokens = least(out->max_tokens, (decode_rows + out->n_channels - 1) / out->n_channels);
}

/* ---- memory ---- */

static epx_status_t plan_bytes(const epx_rank_t *r, epx_exchange_t which, uint64_t *inout) {
    const epx_model_config_t *m = epx_model_config(r->model);
    epx_plan_config_t pc;
    size_t bytes = 0;
    int first, n_local;
    epx_rank_plan_config(r, which, &pc);
    EPX_TRY(epx_group_plan_bytes(r->ep_group, &pc, &bytes));
    epx_model_expert_range(m->n_experts, r->cfg.rank - ep_first(r), r->cfg.ep, &first, &n_local);
    uint64_t rows = (uint64_t)(r->cfg.ep / pc.replicate) * (uint64_t)pc.max_tokens * (uint64_t)least(n_local, m->top_k);
    uint64_t row_bytes = (uint64_t)m->hidden * epx_ops_row_elem_bytes(r->ops);
    *inout += bytes + rows * row_bytes * (pc.layout == EPX_LAYOUT_CONTIGUOUS); /* rows in */
    if (which == EPX_EXCHANGE_MAIN) *inout += rows * row_bytes;                /* rows out, of both */
    return EPX_OK;
}

epx_status_t epx_rank_exchange_bytes(const epx_rank_t *r, uint64_t *out_bytes) {
    epx_plan_config_t pc;
    size_t attention = 0;
    uint64_t bytes = 0;
    for (epx_exchange_t w = EPX_EXCHANGE_MAIN; w < EPX_N_EXCHANGES; w++)
        if (epx_rank_has_exchange(r, w)) EPX_TRY(plan_bytes(r, w, &bytes));
    epx_plan_config_init(&pc);
    if (epx_model_attention_plan_config(r->model, &pc)) EPX_TRY(epx_plan_bytes(&pc, r->attn_size, &attention));
    *out_bytes = bytes + attention;
    return EPX_OK;
}

/* ---- plans ---- */

static int row_bytes(epx_dtype_t dtype, int hidden) {
    return hidden * (dtype == EPX_F32 ? 4 : dtype == EPX_BF16 || dtype == EPX_F16 ? 2 : 1);
}

static void note_main(epx_rank_t *r, const epx_plan_config_t *pc, const epx_plan_info_t *pi) {
    snprintf(r->info.backend, sizeof r->info.backend, "%s", pi->backend);
    snprintf(r->info.transport, sizeof r->info.transport, "%s", pi->transport);
    r->info.combine = pc->combine;
    r->info.n_channels = pc->n_channels;
    r->info.channel_tokens = pc->max_tokens;
    r->info.contiguous = pc->layout == EPX_LAYOUT_CONTIGUOUS;
    r->info.ep = r->cfg.ep;
    r->info.n_local_experts = pi->n_local_experts;
    r->info.dispatch_row_bytes = row_bytes(pc->wire_dtype, pc->hidden);
    r->info.combine_row_bytes = row_bytes(pc->combine_dtype == EPX_BYTES ? pc->token_dtype : pc->combine_dtype, pc->hidden);
}

epx_status_t epx_rank_make_plans(epx_rank_t *r) {
    for (epx_exchange_t w = EPX_EXCHANGE_MAIN; w < EPX_N_EXCHANGES; w++) {
        epx_plan_config_t pc;
        epx_plan_info_t pi = {.size = sizeof pi};
        if (!epx_rank_has_exchange(r, w)) continue;
        epx_rank_plan_config(r, w, &pc);
        EPX_TRY(epx_plan_create(r->ep_group, &pc, &r->plans[w]));
        EPX_TRY(epx_plan_info(r->plans[w], &pi));
        r->info.exchange_bytes += pi.slab_bytes + pi.private_bytes;
        if (w == EPX_EXCHANGE_MAIN) note_main(r, &pc, &pi);
        else r->info.decode_tokens = pc.max_tokens;
        EPX_TRY(epx_rank_agree_status(r, epx_model_set_plan(r->model, w, r->plans[w]), "allocating rows of experts"));
    }
    return EPX_OK;
}

/* ---- self-test ---- */

static epx_status_t gather(void *group, const void *mine, size_t n_bytes, void *out_all) {
    return epx_group_allgather(group, mine, n_bytes, out_all, 0);
}

static epx_status_t test_one(epx_rank_t *r, epx_exchange_t which, double factor) {
    epx_self_test_t t = {.group_size = n_holders(r), .factor = factor, .gather = gather, .ctx = r->ep_group};
    epx_plan_config_t pc;
    epx_rank_plan_config(r, which, &pc);
    pc.max_tokens = EPX_SELF_TEST_TOKENS;
    pc.n_channels = 1;
    EPX_TRY(epx_plan_create(r->ep_group, &pc, &t.plan));
    epx_status_t s = epx_model_self_test(r->model, &t);
    epx_plan_destroy(t.plan);
    return s;
}

epx_status_t epx_rank_self_test(epx_rank_t *r, double factor) {
    epx_status_t found = EPX_OK;
    if (r->cfg.ep == 1 || r->max_rows < EPX_SELF_TEST_TOKENS) return EPX_OK; /* one rank has nobody to differ from */
    for (epx_exchange_t w = EPX_EXCHANGE_MAIN; w < EPX_N_EXCHANGES; w++) {
        epx_status_t s = epx_rank_has_exchange(r, w) && found >= 0 ? test_one(r, w, factor) : EPX_OK;
        EPX_TRY(found = epx_rank_agree_status(r, s, "self-test"));
    }
    return found;
}

/* ---- counters ---- */

/* By the even split of experts over the ranks of the group, which is the plan's default. */
static void sum_pairs(const epx_rank_t *r, uint64_t *out_pairs) {
    const epx_meter_t *m = epx_model_meter(r->model);
    for (int i = 0; i < r->cfg.ep; i++) {
        int first, n;
        epx_model_expert_range(m->n_experts, i, r->cfg.ep, &first, &n);
        for (int l = 0; l < m->n_layers; l++)
            for (int e = first; e < first + n; e++)
                out_pairs[ep_first(r) + i] += m->expert_rows[(size_t)l * (size_t)m->n_experts + (size_t)e];
    }
}

void epx_rank_exchange_stats(const epx_rank_t *r, epx_rank_stats_t *out) {
    for (epx_exchange_t w = EPX_EXCHANGE_MAIN; w < EPX_N_EXCHANGES; w++) {
        uint64_t sent[EPX_RANK_MAX_TP];
        epx_plan_stats_t ps = {.size = sizeof ps, .rows_sent = sent};
        if (!r->plans[w] || epx_plan_stats(r->plans[w], &ps) < 0) continue;
        out->dispatch_bytes += ps.dispatch_bytes;
        out->combine_bytes += ps.combine_bytes;
        for (int i = 0; i < r->cfg.ep; i++) out->rows_sent[ep_first(r) + i] += sent[i];
    }
    sum_pairs(r, out->pairs_sent);
}
