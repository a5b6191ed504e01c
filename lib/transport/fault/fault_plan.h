/* What goes wrong: the text of EPX_FAULT as numbers. */
#ifndef EPX_FAULT_PLAN_H
#define EPX_FAULT_PLAN_H

#include <stdint.h>

#include "epx/epx_status.h"

enum { FAULT_MAX_RULES = 8 };

typedef enum { FAULT_DROP, FAULT_CORRUPT, FAULT_KILL } fault_kind_t;

/* Rank `rank` does it in call `call` of exchange `epoch`. */
typedef struct {
    fault_kind_t kind;
    int rank;
    char call[16];
    uint64_t epoch;
} fault_rule_t;

typedef struct {
    uint64_t seed;
    unsigned delay_us; /* a delivery waits for up to this long */
    int n_rules;
    fault_rule_t rules[FAULT_MAX_RULES];
} fault_plan_t;

/* Parse "seed=7,delay=300,drop=1:dispatch_send:5,corrupt=...,kill=..."; NULL: seed 1, nothing else.
 * EPX_ERR_ARG naming the part that is wrong. */
epx_status_t fault_parse(const char *text, fault_plan_t *out);
/* Is there a rule of this kind for rank, call and epoch? */
int fault_due(const fault_plan_t *f, fault_kind_t kind, int rank, const char *call, uint64_t epoch);

#endif
