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
#include "core/device_a2a.def"
#undef EPX_A2A
#define EPX_DEVICE(name) extern const epx_device_link_t epx_device_##name;
#include "core/devices.def"
#undef EPX_DEVICE

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
static const epx_a2a_t *const device_backends[] = {
#define EPX_A2A(name) &epx_a2a_##name,
#include "core/device_a2a.def"
#undef EPX_A2A
};
static const epx_device_link_t *const links[] = {
#define EPX_DEVICE(name) &epx_device_##name,
#include "core/devices.def"
#undef EPX_DEVICE
};
static const epx_component_t absent[] = {
    {"transport", "nvshmem", 0, "GPUs across hosts: not built yet"},
    {"backend", "nccl", 0, "collectives of NCCL: not built yet"},
};

enum {
    N_TRANSPORTS = (int)(sizeof transports / sizeof transports[0]),
    N_LINKS = (int)(sizeof links / sizeof links[0]),
    N_DEVICE_BACKENDS = (int)(sizeof device_backends / sizeof device_backends[0]),
    N_WRAPPERS = (int)(sizeof wrappers / sizeof wrappers[0]),
    N_BACKENDS = (int)(sizeof backends / sizeof backends[0]),
    N_ABSENT = (int)(sizeof absent / sizeof absent[0])
};

const epx_transport_t *epx_transport_at(int i) { return i >= 0 && i < N_TRANSPORTS ? transports[i] : NULL; }
const epx_a2a_t *epx_a2a_at(int i) { return i >= 0 && i < N_BACKENDS ? backends[i] : NULL; }
const epx_a2a_t *epx_device_a2a_at(int i) { return i >= 0 && i < N_DEVICE_BACKENDS ? device_backends[i] : NULL; }
const epx_device_link_t *epx_device_link_at(int i) { return i >= 0 && i < N_LINKS ? links[i] : NULL; }

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

/* Why a link cannot be used stays the same while the program runs. */
static pthread_once_t links_once = PTHREAD_ONCE_INIT;
static char link_reasons[N_LINKS][256];

static void find_link_reasons(void) {
    for (int i = 0; i < N_LINKS; i++)
        if (links[i]->available() < 0)
            snprintf(link_reasons[i], sizeof link_reasons[i], "%.*s", (int)sizeof link_reasons[i] - 1, epx_error_message());
}

static epx_component_t link_row(int i) {
    pthread_once(&links_once, find_link_reasons);
    const char *why = link_reasons[i];
    return (epx_component_t){"transport", links[i]->name, !why[0], why[0] ? why : links[i]->detail};
}

static epx_component_t transport_row(int i) {
    const char *why = reason_of(i);
    return (epx_component_t){"transport", transports[i]->name, !why[0], why[0] ? why : transports[i]->detail};
}

/* The n-th device over all links. */
static epx_status_t device_row(int n, epx_component_t *out) {
    for (int l = 0; l < N_LINKS; l++) {
        const char *name, *detail;
        if (links[l]->device_text(n, &name, &detail) < 0) continue;
        *out = (epx_component_t){"device", name, 1, detail};
        return EPX_OK;
    }
    return EPX_ERR_NOT_FOUND;
}

epx_status_t epx_component(int i, epx_component_t *out) {
    int n = i;
    if (out == NULL) return epx_fail(EPX_ERR_ARG, "out is NULL");
    if (n >= 0 && n < N_TRANSPORTS) *out = transport_row(n);
    else if ((n -= N_TRANSPORTS) >= 0 && n < N_LINKS) *out = link_row(n);
    else if ((n -= N_LINKS) >= 0 && n < N_BACKENDS)
        *out = (epx_component_t){"backend", backends[n]->name, 1, backends[n]->detail};
    else if ((n -= N_BACKENDS) >= 0 && n < N_ABSENT) *out = absent[n];
    else if ((n -= N_ABSENT) >= 0 && n < N_WRAPPERS)
        *out = (epx_component_t){"wrapper", wrappers[n]->name, 1, wrappers[n]->detail};
    else if ((n -= N_WRAPPERS) < 0 || device_row(n, out) < 0)
        return epx_fail(EPX_ERR_NOT_FOUND, "component %d; there are fewer", i);
    return EPX_OK;
}
