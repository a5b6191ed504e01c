/* Costs of an exchange. Formulas: docs/benchmarks.md, "epx plan". */
#include "app/plan_model.h"

#include <string.h>

/* Chance that none of K distinct experts of E is among n: C(E - n, K) / C(E, K). */
static double none_of(int n_experts, int top_k, int n) {
    double p = 1;
    for (int i = 0; i < top_k; i++) p *= (double)(n_experts - n - i < 0 ? 0 : n_experts - n - i) / (n_experts - i);
    return p;
}

double epx_cost_ranks_reached(int n_experts, int top_k, int n_ranks) {
    int each = n_experts / n_ranks, more = n_experts % n_ranks;
    double hit = more * (1 - none_of(n_experts, top_k, each + 1)) + (n_ranks - more) * (1 - none_of(n_experts, top_k, each));
    return hit * (n_ranks - 1) / n_ranks; /* every rank is the own one for 1 / W of the tokens */
}

static double most_local(const epx_cost_in_t *in) { return (in->n_experts + in->n_ranks - 1) / in->n_ranks; }

static size_t buffer_bytes(const epx_cost_in_t *in) {
    epx_plan_config_t c;
    size_t bytes = 0;
    epx_plan_config_init(&c);
    c.max_tokens = in->n_tokens;
    c.hidden = in->hidden;
    c.top_k = in->top_k;
    c.n_experts = in->n_experts;
    c.token_dtype = EPX_BF16;
    c.wire_dtype = in->fp8 ? EPX_FP8_E4M3 : EPX_BF16;
    c.combine = in->exact ? EPX_COMBINE_EXACT : EPX_COMBINE_PARTIAL;
    c.backend = "onesided";
    return epx_plan_bytes(&c, in->n_ranks, &bytes) < 0 ? 0 : bytes;
}

void epx_cost(const epx_cost_in_t *in, epx_cost_t *out) {
    double h = in->hidden, t = in->n_tokens, w = in->n_ranks, k = in->top_k, others = w - 1;
    double row = in->fp8 ? h + 4 * (double)((in->hidden + 127) / 128) : 2 * h, back = 2 * h;
    double table = others * (t * k * 8 + 8), bytes_per_us = in->link_gbs * 1000;
    memset(out, 0, sizeof *out);
    out->ranks_reached = epx_cost_ranks_reached(in->n_experts, in->top_k, in->n_ranks);
    out->dispatch_bytes = t * out->ranks_reached * row + table;
    out->combine_bytes = in->exact ? t * k * others / w * back : t * out->ranks_reached * back;
    out->gather_bytes = others * t * (row + back) + table;
    out->buffer_bytes = buffer_bytes(in);
    out->major_bytes = most_local(in) * w * t * row;
    if (in->n_ranks == 1) return;
    double bytes = out->dispatch_bytes + out->combine_bytes, wait = 2 * in->latency_us;
    out->floor_us = wait + bytes / bytes_per_us;
    wait += 2 * in->overhead_us;
    out->expected_us = wait + bytes / bytes_per_us / in->efficiency;
    out->gather_us = wait + out->gather_bytes / bytes_per_us / in->efficiency;
}
