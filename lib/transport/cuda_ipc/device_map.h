/* Counted device memory, so that thread ranks of one process may share the owner's pointer and the last user frees it. */
#ifndef EPX_DEVICE_MAP_H
#define EPX_DEVICE_MAP_H

#include "cuda/api.h"
#include "epx/epx_status.h"

typedef struct {
    epx_cuda_memory_t memory;
    uint32_t refs;
} device_map_t;

/* Zeroed memory of `device`. mapped: by cuMem, else by cudaMalloc. EPX_ERR_NOMEM names bytes wanted and free. */
epx_status_t device_map_create(int device, uint64_t bytes, int mapped, device_map_t **out_map);
/* A peer's memory, from its descriptor or (fd -1) its cudaIpc handle. Does not take `fd`. */
epx_status_t device_map_open(int device, int fd, const void *ipc_handle, uint64_t bytes, device_map_t **out_map);
void device_map_ref(device_map_t *m);
/* Drops one reference; the last frees. NULL is allowed. Any thread. */
void device_map_unref(device_map_t *m);

#endif
