/* Chooses transport and backend by capability and score. Pure but for log lines; the same answer on every rank. */
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/status.h"
#include "core/core.h"
#include "core/crossover.h"

/* The next name of a comma separated list; *list moves on. 0 at the end. */
static int next_name(const char **list, const char **out_name, size_t *out_len) {
    while (**list == ',' || **list == ' ') (*list)++;
    if (**list == '\0') return 0;
    *out_name = *list;
    *out_len = strcspn(*list, ", ");
    *list += *out_len;
    return 1;
}

static int same_name(const char *a, const char *name, size_t len) { return strlen(a) == len && memcmp(a, name, len) == 0; }

static int is_link(const char *name, size_t len) {
    const epx_device_link_t *l;
    for (int i = 0; (l = epx_device_link_at(i)) != NULL; i++)
        if (same_name(l->name, name, len)) return 1;
    return 0;
}

static int is_allowed(const char *allowed, const char *wanted) {
    const char *list = allowed, *name;
    size_t len;
    if (allowed == NULL) return 1;
    while (next_name(&list, &name, &len))
        if (same_name(wanted, name, len)) return 1;
    return 0;
}

epx_status_t epx_select_device_link(const char *allowed, const epx_device_link_t **out) {
    const epx_device_link_t *l;
    epx_status_t s = EPX_ERR_UNSUPPORTED;
    for (int i = 0; (l = epx_device_link_at(i)) != NULL; i++) {
        if (!is_allowed(allowed, l->name)) {
            s = epx_fail(EPX_ERR_UNSUPPORTED, "transports is \"%s\"; a group on devices needs %s among them", allowed, l->name);
            continue;
        }
        s = l->available();
        if (s < 0) {
            s = epx_fail_context(s, "transport %s is not available", l->name);
            continue;
        }
        *out = l;
        return EPX_OK;
    }
    return s;
}

epx_status_t epx_select_check_names(const char *transports) {
    const char *list = transports, *name;
    size_t len;
    int n = 0;
    if (transports == NULL) return EPX_OK;
    for (; next_name(&list, &name, &len); n++) {
        const epx_transport_t *t = epx_transport_named(name, len);
        if (t == NULL && is_link(name, len)) continue;
        if (t == NULL) return epx_component_refuse("transport", name, len);
        if (t->probe != NULL && t->probe() < 0)
            return epx_fail_context(EPX_ERR_UNSUPPORTED, "transport %s is not available", t->name);
    }
    if (n == 0) return epx_fail(EPX_ERR_ARG, "transports is \"%s\"; give names or NULL for all", transports);
    return EPX_OK;
}

static epx_status_t first_allowed(const char *allowed, const epx_peer_t *peers, int n_ranks, const epx_transport_t **out) {
    const char *list = allowed, *name;
    epx_status_t s = EPX_ERR_UNSUPPORTED;
    size_t len;
    while (next_name(&list, &name, &len)) {
        const epx_transport_t *t = epx_transport_named(name, len);
        if (t == NULL) s = epx_fail(EPX_ERR_UNSUPPORTED, "transport %.*s joins groups on devices only", (int)len, name);
        if (t == NULL) continue;
        s = t->can(peers, n_ranks);
        if (s < 0) continue;
        *out = t;
        return EPX_OK;
    }
    return epx_fail_context(s, "no transport of \"%s\" can join the group", allowed);
}

epx_status_t epx_select_transport(const char *allowed, const epx_peer_t *peers, int n_ranks, const epx_transport_t **out) {
    const epx_transport_t *best = NULL, *t;
    epx_status_t s = EPX_ERR_UNSUPPORTED, refused;
    if (allowed != NULL) return first_allowed(allowed, peers, n_ranks, out);
    for (int i = 0; (t = epx_transport_at(i)) != NULL; i++) {
        if (best != NULL && t->score <= best->score) continue; /* not even looked for: a module may have to be opened */
        refused = t->can(peers, n_ranks);
        if (refused < 0) s = refused, epx_log(EPX_LOG_DEBUG, "transport %s not used: %s", t->name, epx_error_message());
        else best = t;
    }
    if (best == NULL) return epx_fail_context(s, "no transport can join the group");
    *out = best;
    return EPX_OK;
}

/* By name, or the first: there is one for each. */
static epx_status_t select_device_a2a(const epx_net_t *net, const epx_plan_config_t *cfg, const epx_a2a_t **out) {
    const epx_a2a_t *a;
    int any = cfg->backend == NULL || strcmp(cfg->backend, "auto") == 0;
    for (int i = 0; (a = epx_device_a2a_at(i)) != NULL; i++) {
        if (!any && strcmp(a->name, cfg->backend) != 0) continue;
        EPX_TRY(a->can(net, cfg));
        *out = a;
        return EPX_OK;
    }
    return epx_fail(EPX_ERR_UNSUPPORTED, "backend %s is not built for groups on devices; built: onesided", cfg->backend);
}

static epx_status_t best_score(const epx_net_t *net, const epx_plan_config_t *cfg, epx_choice_t *out) {
    const epx_a2a_t *best = NULL, *a;
    for (int i = 0; (a = epx_a2a_at(i)) != NULL; i++) {
        if (a->can(net, cfg) < 0) epx_log(EPX_LOG_DEBUG, "backend %s not used: %s", a->name, epx_error_message());
        else if (best != NULL && a->score <= best->score)
            epx_log(EPX_LOG_DEBUG, "backend %s not used: score %d, %s has %d", a->name, a->score, best->name, best->score);
        else best = a;
    }
    if (best == NULL) return epx_fail_context(EPX_ERR_UNSUPPORTED, "no backend can run this plan");
    out->a2a = best;
    snprintf(out->why, sizeof out->why, "first in order of those that can run");
    return EPX_OK;
}

/* The measured choice, where it was measured: all ranks mapped. */
static epx_status_t measured(const epx_net_t *net, int n_ranks, const epx_plan_config_t *cfg, epx_choice_t *out) {
    epx_crossover_t c;
    EPX_TRY(epx_crossover(n_ranks, (uint64_t)cfg->hidden * epx_dtype_bytes(cfg->wire_dtype), cfg->max_tokens, &c));
    const epx_a2a_t *a = epx_a2a_named(c.backend);
    if (a == NULL || a == out->a2a || a->can(net, cfg) < 0) {
        if (a == out->a2a) snprintf(out->why, sizeof out->why, "%s", c.why);
        return EPX_OK;
    }
    epx_log(EPX_LOG_DEBUG, "backend %s not used: %s is faster by the %s", out->a2a->name, a->name, c.why);
    out->a2a = a;
    snprintf(out->why, sizeof out->why, "%s", c.why);
    return EPX_OK;
}

epx_status_t epx_select_a2a(const epx_net_t *net, int n_ranks, int n_far, const epx_plan_config_t *cfg, epx_choice_t *out) {
    int any = cfg->backend == NULL || strcmp(cfg->backend, "auto") == 0;
    epx_choice_t c = {NULL, "named in the config"};
    if (net != NULL && net->device != NULL) {
        EPX_TRY(select_device_a2a(net, cfg, &c.a2a));
        if (any) snprintf(c.why, sizeof c.why, "the one for devices");
    } else if (!any) {
        c.a2a = epx_a2a_named(cfg->backend);
        if (c.a2a == NULL) return epx_component_refuse("backend", cfg->backend, strlen(cfg->backend));
        EPX_TRY(c.a2a->can(net, cfg));
    } else {
        EPX_TRY(best_score(net, cfg, &c));
        if (n_far == 0) EPX_TRY(measured(net, n_ranks, cfg, &c));
    }
    *out = c;
    return EPX_OK;
}
