/* The tables of what is built, and the list of what is not, with reasons. Any thread. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/status.h"
#include "core/core.h"

#define EPX_TRANSPORT(name) extern const epx_transport_t epx_transport_##name;
#include "core/transports.def"
#include "core/wrappers.def"
#undef EPX_TRANSPORT
#define EPX_A2A(name) extern const epx_a2a_t epx_a2a_##name;
#include "core/a2a.def"
#undef EPX_A2A

static const epx_transport_t *const transports[] = {
#define EPX_TRANSPORT(name) &epx_transport_##name,
#include "core/transports.def"
#undef EPX_TRANSPORT
};
static const epx_transport_t *const wrappers[] = {
#define EPX_TRANSPORT(name) &epx_transport_##name,
#include "core/wrappers.def"
#undef EPX_TRANSPORT
};
static const epx_a2a_t *const backends[] = {
#define EPX_A2A(name) &epx_a2a_##name,
#include "core/a2a.def"
#undef EPX_A2A
};
static const epx_component_t absent[] = {
    {"transport", "cuda_ipc", 0, "GPUs of one host: built without CUDA"},
    {"transport", "nvshmem", 0, "GPUs across hosts: built without CUDA"},
    {"backend", "nccl", 0, "collectives of NCCL: built without CUDA"},
};

enum {
    N_TRANSPORTS = (int)(sizeof transports / sizeof transports[0]),
    N_WRAPPERS = (int)(sizeof wrappers / sizeof wrappers[0]),
    N_BACKENDS = (int)(sizeof backends / sizeof backends[0]),
    N_ABSENT = (int)(sizeof absent / sizeof absent[0])
};

const epx_transport_t *epx_transport_at(int i) { return i >= 0 && i < N_TRANSPORTS ? transports[i] : NULL; }
const epx_a2a_t *epx_a2a_at(int i) { return i >= 0 && i < N_BACKENDS ? backends[i] : NULL; }

const epx_transport_t *epx_transport_named(const char *name, size_t len) {
    for (int i = 0; i < N_TRANSPORTS; i++)
        if (strlen(transports[i]->name) == len && memcmp(transports[i]->name, name, len) == 0) return transports[i];
    for (int i = 0; i < N_WRAPPERS; i++)
        if (strlen(wrappers[i]->name) == len && memcmp(wrappers[i]->name, name, len) == 0) return wrappers[i];
    return NULL;
}

const epx_transport_t *epx_transport_of_host(void) { return epx_transport_named("shm", 3); }

const epx_a2a_t *epx_a2a_named(const char *name) {
    for (int i = 0; i < N_BACKENDS; i++)
        if (strcmp(backends[i]->name, name) == 0) return backends[i];
    return NULL;
}

/* Why a transport is not there; "" when it is. */
static pthread_once_t reasons_once = PTHREAD_ONCE_INIT;
static char reasons[N_TRANSPORTS][256];

static void find_reasons(void) {
    for (int i = 0; i < N_TRANSPORTS; i++)
        if (transports[i]->probe != NULL && transports[i]->probe() < 0)
            snprintf(reasons[i], sizeof reasons[i], "%.*s", (int)sizeof reasons[i] - 1, epx_error_message());
}

static const char *reason_of(int i) {
    pthread_once(&reasons_once, find_reasons);
    return reasons[i];
}

epx_status_t epx_component_refuse(const char *kind, const char *name, size_t len) {
    char legal[256] = "";
    epx_component_t c;
    for (int i = 0; i < N_ABSENT; i++)
        if (strcmp(absent[i].kind, kind) == 0 && strlen(absent[i].name) == len && memcmp(absent[i].name, name, len) == 0)
            return epx_fail(EPX_ERR_UNSUPPORTED, "%s %s is not available: %s", kind, absent[i].name, absent[i].detail);
    for (int i = 0; epx_component(i, &c) == EPX_OK; i++) {
        if (!c.available || strcmp(c.kind, kind) != 0) continue;
        if (legal[0]) strncat(legal, ", ", sizeof legal - strlen(legal) - 1);
        strncat(legal, c.name, sizeof legal - strlen(legal) - 1);
    }
    return epx_fail(EPX_ERR_ARG, "%s \"%.*s\" is unknown; legal: %s", kind, (int)len, name, legal);
}

epx_status_t epx_component(int i, epx_component_t *out) {
    if (out == NULL) return epx_fail(EPX_ERR_ARG, "out is NULL");
    if (i >= 0 && i < N_TRANSPORTS) {
        const char *why = reason_of(i);
        *out = (epx_component_t){"transport", transports[i]->name, !why[0], why[0] ? why : transports[i]->detail};
    } else if (i >= N_TRANSPORTS && i < N_TRANSPORTS + N_BACKENDS) {
        *out = (epx_component_t){"backend", backends[i - N_TRANSPORTS]->name, 1, backends[i - N_TRANSPORTS]->detail};
    } else if (i >= N_TRANSPORTS + N_BACKENDS && i < N_TRANSPORTS + N_BACKENDS + N_ABSENT) {
        *out = absent[i - N_TRANSPORTS - N_BACKENDS];
    } else if (i >= N_TRANSPORTS + N_BACKENDS + N_ABSENT && i < N_TRANSPORTS + N_BACKENDS + N_ABSENT + N_WRAPPERS) {
        const epx_transport_t *w = wrappers[i - N_TRANSPORTS - N_BACKENDS - N_ABSENT];
        *out = (epx_component_t){"wrapper", w->name, 1, w->detail};
    } else {
        return epx_fail(EPX_ERR_NOT_FOUND, "component %d; there are %d", i, N_TRANSPORTS + N_BACKENDS + N_ABSENT + N_WRAPPERS);
    }
    return EPX_OK;
}
