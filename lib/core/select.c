/* Chooses transport and backend by capability and score. Pure but for log lines; the same answer on every rank. */
#include <string.h>

#include "base/log.h"
#include "base/status.h"
#include "core/core.h"

/* The next name of a comma separated list; *list moves on. 0 at the end. */
static int next_name(const char **list, const char **out_name, size_t *out_len) {
    while (**list == ',' || **list == ' ') (*list)++;
    if (**list == '\0') return 0;
    *out_name = *list;
    *out_len = strcspn(*list, ", ");
    *list += *out_len;
    return 1;
}

epx_status_t epx_select_check_names(const char *transports) {
    const char *list = transports, *name;
    size_t len;
    int n = 0;
    if (transports == NULL) return EPX_OK;
    for (; next_name(&list, &name, &len); n++) {
        const epx_transport_t *t = epx_transport_named(name, len);
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

epx_status_t epx_select_a2a(const epx_net_t *net, const epx_plan_config_t *cfg, const epx_a2a_t **out) {
    const epx_a2a_t *best = NULL, *a;
    if (cfg->backend != NULL && strcmp(cfg->backend, "auto") != 0) {
        a = epx_a2a_named(cfg->backend);
        if (a == NULL) return epx_component_refuse("backend", cfg->backend, strlen(cfg->backend));
        EPX_TRY(a->can(net, cfg));
        *out = a;
        return EPX_OK;
    }
    for (int i = 0; (a = epx_a2a_at(i)) != NULL; i++) {
        if (a->can(net, cfg) < 0) epx_log(EPX_LOG_DEBUG, "backend %s not used: %s", a->name, epx_error_message());
        else if (best != NULL && a->score <= best->score)
            epx_log(EPX_LOG_DEBUG, "backend %s not used: score %d, %s has %d", a->name, a->score, best->name, best->score);
        else best = a;
    }
    if (best == NULL) return epx_fail_context(EPX_ERR_UNSUPPORTED, "no backend can run this plan");
    *out = best;
    return EPX_OK;
}
