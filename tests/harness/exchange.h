/* One exchange of the library against the oracle, bit for bit: the body of nearly every contract case.
 * Called by rank bodies of launch.h; all ranks of the group call it with the same arguments. */
#ifndef EPX_TESTS_HARNESS_EXCHANGE_H
#define EPX_TESTS_HARNESS_EXCHANGE_H

#include "tests/harness/batch.h"
#include "tests/harness/device.h"
#include "tests/harness/launch.h"

enum {
    TH_REGISTERED = 1, /* rows are written into epx_plan_input() */
    TH_HALVES = 2,     /* four calls instead of two */
    TH_HISTOGRAM = 4,  /* ask for out_histogram */
    TH_ADD = 8,        /* give an add operand */
    TH_NO_COUNTS = 16, /* LISTS: out_counts is NULL */
    TH_DELAYS = 32,    /* ranks sleep at random between the halves */
    TH_LATE = 64,      /* EXACT: weights are given to combine_recv; dispatch gets others */
    TH_PARTIALS = 128  /* the partial sums are written in place where the plan can; elsewhere it must refuse */
};

typedef struct {
    const char *backend;
    th_shape_t shape;
    unsigned opts;
    int n_channels, channel; /* 0 channels: 1; which one the steps use */
    int n_steps;
    uint64_t seed;
    th_device_t *device; /* of this rank; NULL: CPU. TH_REGISTERED does not exist there */
    int n_blocks;        /* devices: 0: chosen */
    uint64_t timeout_ns; /* 0: EPX_CONTRACT_TIMEOUT_MS of the environment, or 20 s */
} th_case_t;

/* Counters of one plan over its steps, to be compared with epx_plan_stats(). */
typedef struct {
    uint64_t n_steps, rows_sent[TH_MAX_RANKS], rows_received[TH_MAX_RANKS];
} th_tally_t;

/* One line that names the case. */
const char *th_case_text(const th_case_t *c, char *out, size_t n_bytes);
void th_plan_config(const th_case_t *c, epx_plan_config_t *out_cfg);
/* Dispatch, experts, combine with the given routing; compares everything. rank: group rank. 0 or th_fail(). */
int th_step(th_rank_t *r, epx_plan_t *p, const th_case_t *c, int rank, th_kind_t kind, uint64_t seed, th_tally_t *tally);
/* The same in two parts, so that two plans can have an exchange open at once: dispatch, and the rest. */
typedef struct th_open th_open_t;
int th_step_open(th_rank_t *r, epx_plan_t *p, const th_case_t *c, int rank, th_kind_t kind, uint64_t seed, th_open_t **out);
int th_step_close(th_rank_t *r, epx_plan_t *p, const th_case_t *c, th_open_t *o, th_tally_t *tally);
/* The four halves on their own (c->opts must have TH_HALVES), so that steps of several channels interleave: begin, then
 * th_step_half() 1 (dispatch_recv), 2 (combine_send), 3 (combine_recv), then end, also after a failure. */
int th_step_begin(th_rank_t *r, epx_plan_t *p, const th_case_t *c, int rank, th_kind_t kind, uint64_t seed, th_open_t **out);
int th_step_half(th_rank_t *r, epx_plan_t *p, const th_case_t *c, th_open_t *o, int half);
void th_step_end(const th_case_t *c, th_open_t *o, th_tally_t *tally);
/* Compare epx_plan_stats() and epx_plan_info() with what was counted. */
int th_check_stats(th_rank_t *r, epx_plan_t *p, const th_case_t *c, const th_tally_t *tally);
/* Plan create must be refused here with EPX_ERR_UNSUPPORTED, naming the backend and the reason `why`. */
int th_case_refused(th_rank_t *r, epx_group_t *g, const th_case_t *c, const char *why);
/* Plan create, c->n_steps steps through all kinds, counters, destroy. */
int th_case_run(th_rank_t *r, epx_group_t *g, const th_case_t *c);

#endif
