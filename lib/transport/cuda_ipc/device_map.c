/* Device memory by the CUDA module: see device_map.h. */
#include "transport/cuda_ipc/device_map.h"

#include <stdlib.h>

#include "base/atomic.h"
#include "base/status.h"
#include "cuda/module.h"

static epx_status_t new_map(device_map_t **out_map) {
    device_map_t *m = calloc(1, sizeof *m);
    if (m == NULL) return epx_fail(EPX_ERR_NOMEM, "cuda_ipc: no memory for %zu bytes", sizeof *m);
    m->refs = 1;
    *out_map = m;
    return EPX_OK;
}

epx_status_t device_map_create(int device, uint64_t bytes, int mapped, device_map_t **out_map) {
    const epx_cuda_api_t *cuda = epx_cuda();
    epx_cuda_device_t info = {.free_bytes = 0};
    device_map_t *m = NULL;
    EPX_TRY(new_map(&m));
    epx_status_t s = epx_cuda_check(cuda->memory_alloc(device, bytes, mapped, &m->memory), "device memory");
    if (s < 0) {
        (void)cuda->device_info(device, &info);
        s = epx_fail_context(s, "cuda_ipc: slab of %llu bytes wanted on device %d, %llu bytes free", (unsigned long long)bytes,
                             device, (unsigned long long)info.free_bytes);
        free(m);
        return s;
    }
    *out_map = m;
    return EPX_OK;
}

epx_status_t device_map_open(int device, int fd, const void *ipc_handle, uint64_t bytes, device_map_t **out_map) {
    const epx_cuda_api_t *cuda = epx_cuda();
    device_map_t *m = NULL;
    EPX_TRY(new_map(&m));
    epx_status_t s =
        fd >= 0 ? epx_cuda_check(cuda->memory_import_fd(device, fd, bytes, &m->memory), "import of device memory by descriptor")
                : epx_cuda_check(cuda->memory_import_ipc(device, ipc_handle, bytes, &m->memory),
                                 "import of device memory by cudaIpc");
    if (s < 0) free(m);
    else *out_map = m;
    return s;
}

void device_map_ref(device_map_t *m) { epx_fetch_add_u32(&m->refs, 1); }

void device_map_unref(device_map_t *m) {
    if (m == NULL || epx_fetch_add_u32(&m->refs, (uint32_t)-1) != 1) return;
    (void)epx_cuda()->memory_free(&m->memory);
    free(m);
}
