/* Anonymous shared memory: a sealed memfd with its pages reserved, and counted mappings, so that thread ranks may share the
 * owner's mapping and the last user unmaps it. */
#ifndef EPX_SHM_MAP_H
#define EPX_SHM_MAP_H

#include <stddef.h>
#include <stdint.h>

#include "epx/epx_status.h"

typedef struct {
    char *base;
    size_t bytes;
    int fd; /* -1 once closed or when it came from a peer */
    uint32_t refs;
} shm_map_t;

/* New zeroed memory with one reference. EPX_ERR_NOMEM names bytes wanted and free; never SIGBUS later. */
epx_status_t shm_map_create(size_t bytes, shm_map_t **out_map);
/* Map a peer's memfd; checks size and seals. Does not take `fd`. */
epx_status_t shm_map_open(int fd, size_t bytes, shm_map_t **out_map);
void shm_map_ref(shm_map_t *m);
/* Drops one reference; the last unmaps. NULL is allowed. Any thread. */
void shm_map_unref(shm_map_t *m);
/* Close the descriptor once peers have theirs. */
void shm_map_close_fd(shm_map_t *m);

#endif
