/* Rank bootstrap: an all-gather and a barrier of small blobs, by name or by the caller's callbacks. */
#ifndef EPX_BOOT_BOOT_H
#define EPX_BOOT_BOOT_H

#include <stddef.h>

#include "epx/epx.h"

typedef struct {
    int rank, n_ranks;
    epx_status_t (*allgather)(void *ctx, const void *mine, size_t n_bytes, void *out_all);
    epx_status_t (*barrier)(void *ctx);
    void *ctx; /* borrowed */
} epx_boot_t;

/* Resolve rank, number of ranks and callbacks from a config. Refuses names that are not built, by name. */
epx_status_t epx_boot_open(const epx_world_config_t *cfg, epx_boot_t *out_boot);
/* Collective all-gather; turns a positive or odd status of the callback into EPX_ERR_IO. */
epx_status_t epx_boot_allgather(const epx_boot_t *b, const void *mine, size_t n_bytes, void *out_all);

#endif
