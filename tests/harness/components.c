/* What the library offers, and the seed: see components.h. */
#include "tests/harness/components.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "epx/epx.h"

/* Ranks that act as if they were on several hosts can only be joined by messages, and the oracle needs mapped peers.
 * Devices have programs of their own (tests/gpu). */
static int fits_here(const epx_component_t *c) {
    if (strcmp(c->name, "cuda_ipc") == 0) return 0;
    int over_hosts = getenv("EPX_EMULATED_HOSTS") != NULL;
    if (strcmp(c->name, "ucx") == 0) return over_hosts;
    return !over_hosts || (strcmp(c->name, "ref") != 0 && strcmp(c->name, "shm") != 0);
}

int th_components(const char *kind, const char *out_names[TH_MAX_COMPONENTS]) {
    int n = 0;
    epx_component_t c;
    for (int i = 0; n < TH_MAX_COMPONENTS && epx_component(i, &c) == EPX_OK; i++)
        if (strcmp(c.kind, kind) == 0 && c.available && fits_here(&c)) out_names[n++] = c.name;
    return n;
}

/* The oracle reads its peers' private memory. */
int th_needs_one_process(const char *backend) { return strcmp(backend, "ref") == 0; }

unsigned long long th_seed(void) {
    const char *text = getenv("EPX_CONTRACT_SEED");
    return text ? strtoull(text, NULL, 0) : 20261130u;
}

void th_print_seed(void) { fprintf(stderr, "EPX_CONTRACT_SEED=%llu\n", th_seed()); }
