/* Counting rows and times of the exchange. See meter.h. */
#include "engine/model/meter.h"

#include <stdlib.h>

#include "base/clock.h"

static const uint64_t bounds_ns[EPX_TIME_BUCKETS - 1] = {1000,     2000,     5000,     10000,    20000,   50000,
                                                         100000,   200000,   500000,   1000000,  2000000, 5000000,
                                                         10000000, 20000000, 50000000, 100000000};

uint64_t epx_time_hist_bound_ns(int i) { return i < EPX_TIME_BUCKETS - 1 ? bounds_ns[i] : UINT64_MAX; }

void epx_time_hist_add(epx_time_hist_t *h, uint64_t ns) {
    int i = 0;
    while (i < EPX_TIME_BUCKETS - 1 && ns > bounds_ns[i]) i++;
    h->n[i]++;
    h->sum_ns += ns;
}

uint64_t epx_time_hist_count(const epx_time_hist_t *h) {
    uint64_t n = 0;
    for (int i = 0; i < EPX_TIME_BUCKETS; i++) n += h->n[i];
    return n;
}

epx_status_t epx_meter_init(epx_meter_t *m, int n_layers, int n_experts) {
    *m = (epx_meter_t){.n_layers = n_layers, .n_experts = n_experts};
    m->expert_rows = calloc((size_t)n_layers * (size_t)n_experts, sizeof *m->expert_rows);
    if (!m->expert_rows) return epx_fail(EPX_ERR_NOMEM, "meter: no memory for %d layers of %d experts", n_layers, n_experts);
    return EPX_OK;
}

void epx_meter_fini(epx_meter_t *m) {
    free(m->expert_rows);
    *m = (epx_meter_t){0};
}

void epx_meter_add_rows(epx_meter_t *m, int layer, const int32_t *ids, int32_t n_rows, int top_k) {
    uint64_t *rows = m->expert_rows + (size_t)layer * (size_t)m->n_experts;
    for (int64_t i = 0; i < (int64_t)n_rows * top_k; i++)
        if (ids[i] >= 0 && ids[i] < m->n_experts) rows[ids[i]]++;
}

static uint64_t waited_ns(const epx_plan_t *plan) {
    epx_plan_stats_t st = {.size = sizeof st};
    return epx_plan_stats(plan, &st) == EPX_OK ? st.wait_ns : 0;
}

void epx_meter_begin(const epx_plan_t *plan, epx_meter_mark_t *out_mark) {
    out_mark->wait_ns = waited_ns(plan);
    out_mark->at_ns = epx_now_ns();
}

/* While paused the mark holds the time that has passed; going on moves the beginning. */
void epx_meter_pause(const epx_plan_t *plan, epx_meter_mark_t *mark) {
    mark->at_ns = epx_now_ns() - mark->at_ns;
    mark->wait_ns = waited_ns(plan) - mark->wait_ns;
}

void epx_meter_resume(const epx_plan_t *plan, epx_meter_mark_t *mark) {
    mark->at_ns = epx_now_ns() - mark->at_ns;
    mark->wait_ns = waited_ns(plan) - mark->wait_ns;
}

void epx_meter_end(epx_meter_t *m, const epx_plan_t *plan, epx_phase_t phase, const epx_meter_mark_t *mark) {
    uint64_t all = epx_now_ns() - mark->at_ns, wait = waited_ns(plan) - mark->wait_ns;
    if (wait > all) wait = all;
    epx_time_hist_add(&m->wait[phase], wait);
    epx_time_hist_add(&m->copy[phase], all - wait);
}
