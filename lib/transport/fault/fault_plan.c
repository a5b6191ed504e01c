/* Parser of EPX_FAULT. Pure. */
#include "transport/fault/fault_plan.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/status.h"

static int is_call(const char *s) {
    static const char *const calls[] = {"dispatch_send", "dispatch_recv", "combine_send", "combine_recv"};
    for (int i = 0; i < 4; i++)
        if (strcmp(s, calls[i]) == 0) return 1;
    return 0;
}

/* "RANK:CALL:EPOCH" after "name=". */
static int parse_rule(const char *part, const char *name, fault_kind_t kind, fault_plan_t *f) {
    fault_rule_t *r = &f->rules[f->n_rules];
    size_t n = strlen(name);
    int used = 0;
    if (strncmp(part, name, n) != 0 || part[n] != '=' || f->n_rules == FAULT_MAX_RULES) return 0;
    if (sscanf(part + n + 1, "%d:%15[a-z_]:%" SCNu64 "%n", &r->rank, r->call, &r->epoch, &used) != 3) return 0;
    if (part[n + 1 + (size_t)used] != '\0' || !is_call(r->call)) return 0;
    r->kind = kind;
    f->n_rules++;
    return 1;
}

static int parse_part(const char *part, fault_plan_t *f) {
    int used = 0;
    if (sscanf(part, "seed=%" SCNu64 "%n", &f->seed, &used) == 1) return part[used] == '\0';
    if (sscanf(part, "delay=%u%n", &f->delay_us, &used) == 1) return part[used] == '\0';
    return parse_rule(part, "drop", FAULT_DROP, f) || parse_rule(part, "corrupt", FAULT_CORRUPT, f) ||
           parse_rule(part, "kill", FAULT_KILL, f);
}

epx_status_t fault_parse(const char *text, fault_plan_t *out) {
    fault_plan_t f = {.seed = 1};
    char part[64];
    while (text != NULL && *text != '\0') {
        size_t n = strcspn(text, ",");
        snprintf(part, sizeof part, "%.*s", n < sizeof part ? (int)n : 0, text);
        if (!parse_part(part, &f))
            return epx_fail(EPX_ERR_ARG,
                            "EPX_FAULT has \"%.*s\"; legal: seed=N, delay=MICROSECONDS, and up to %d of "
                            "drop=, corrupt=, kill=RANK:CALL:EPOCH",
                            (int)n, text, FAULT_MAX_RULES);
        text += n + (text[n] == ',');
    }
    *out = f;
    return EPX_OK;
}

int fault_due(const fault_plan_t *f, fault_kind_t kind, int rank, const char *call, uint64_t epoch) {
    for (int i = 0; i < f->n_rules; i++) {
        const fault_rule_t *r = &f->rules[i];
        if (r->kind == kind && r->rank == rank && r->epoch == epoch && strcmp(r->call, call) == 0) return 1;
    }
    return 0;
}
