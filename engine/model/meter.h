/* What the MoE layers of one rank have done since create: rows by expert, and how long each half of the exchange took, waiting
 * for peers and own work apart. Plain data with a few helpers; no I/O. One writer, the thread of the rank. */
#ifndef EPX_ENGINE_MODEL_METER_H
#define EPX_ENGINE_MODEL_METER_H

#include <stdint.h>

#include "base/status.h"
#include "epx/epx.h"

enum { EPX_TIME_BUCKETS = 17 }; /* the last one has no upper bound */
typedef struct {
    uint64_t n[EPX_TIME_BUCKETS]; /* values in (bound of the bucket before, own bound]: not cumulative */
    uint64_t sum_ns;
} epx_time_hist_t;

typedef enum { EPX_PHASE_DISPATCH = 0, EPX_PHASE_COMBINE, EPX_N_PHASES } epx_phase_t;

/* One layer is one exchange, or two in a step of two halves: a dispatch and a combine. Both calls of a phase count as one value.
 */
typedef struct {
    epx_time_hist_t wait[EPX_N_PHASES]; /* waiting for peers, as libepx counts it */
    epx_time_hist_t copy[EPX_N_PHASES]; /* the rest of the calls: packing, copying, summing */
    int n_layers, n_experts;
    uint64_t *expert_rows; /* owned, [n_layers, n_experts] (token, expert) pairs that this rank's router chose */
} epx_meter_t;

/* Upper bound of bucket i in ns, 1 us to 0.1 s in steps of 1, 2, 5; UINT64_MAX for the last. */
uint64_t epx_time_hist_bound_ns(int i);
void epx_time_hist_add(epx_time_hist_t *h, uint64_t ns);
uint64_t epx_time_hist_count(const epx_time_hist_t *h);

epx_status_t epx_meter_init(epx_meter_t *m, int n_layers, int n_experts);
void epx_meter_fini(epx_meter_t *m);
/* ids [n_rows, top_k]; -1 is no expert. */
void epx_meter_add_rows(epx_meter_t *m, int layer, const int32_t *ids, int32_t n_rows, int top_k);

typedef struct {
    uint64_t at_ns, wait_ns;
} epx_meter_mark_t;
/* Take the time before a phase and add what has passed after it. plan: the one whose calls lie between. */
void epx_meter_begin(const epx_plan_t *plan, epx_meter_mark_t *out_mark);
/* Leave out of the phase what lies between: work of the rank's own while the exchange is under way. */
void epx_meter_pause(const epx_plan_t *plan, epx_meter_mark_t *mark);
void epx_meter_resume(const epx_plan_t *plan, epx_meter_mark_t *mark);
void epx_meter_end(epx_meter_t *m, const epx_plan_t *plan, epx_phase_t phase, const epx_meter_mark_t *mark);

#endif
