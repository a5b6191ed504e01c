/* Rank bootstrap: an all-gather and a barrier of small blobs, by name or by the caller's callbacks. Set-up path only. */
#ifndef EPX_BOOT_BOOT_H
#define EPX_BOOT_BOOT_H

#include <stddef.h>

#include "epx/epx.h"

#define EPX_BOOT_TIMEOUT_NS UINT64_C(30000000000) /* where the config says 0 */

typedef struct {
    int rank, n_ranks;
    epx_status_t (*allgather)(void *ctx, const void *mine, size_t n_bytes, void *out_all);
    epx_status_t (*barrier)(void *ctx);
    void *ctx;                /* the caller's, borrowed; owned by the bootstrap when close is set */
    void (*close)(void *ctx); /* NULL: nothing to close */
} epx_boot_t;

/* Resolve rank, number of ranks and callbacks from a config; "tcp:" and "env" meet the other ranks here, within
 * cfg->timeout_ns. Refuses names that are not built, by name. epx_boot_close() ends it. */
epx_status_t epx_boot_open(const epx_world_config_t *cfg, epx_boot_t *out_boot);
void epx_boot_close(epx_boot_t *b);
/* Collective all-gather; turns a positive or odd status of the callback into EPX_ERR_IO. */
epx_status_t epx_boot_allgather(const epx_boot_t *b, const void *mine, size_t n_bytes, void *out_all);

#endif
