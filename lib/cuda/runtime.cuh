/* Functions of lib/cuda that the module's table names. */
#ifndef EPX_CUDA_RUNTIME_CUH
#define EPX_CUDA_RUNTIME_CUH

#include "cuda/api.h"

namespace epx_cuda {

/* Makes a device current and restores the caller's. */
class Device {
  public:
    explicit Device(int device);
    ~Device();
    int error; /* of making it current */

  private:
    int before_;
};

int init(int *out_n_devices, const char **out_why);
const char *error_text(int e);
int device_info(int device, epx_cuda_device_t *out);
int peer_access(int device, int peer, int *out_access, int *out_atomics);
int capturing(int device, int *out_capturing);
int memory_alloc(int device, uint64_t bytes, int mapped, epx_cuda_memory_t *out);
int memory_export_fd(const epx_cuda_memory_t *m, int *out_fd);
int memory_import_fd(int device, int fd, uint64_t bytes, epx_cuda_memory_t *out);
int memory_export_ipc(const epx_cuda_memory_t *m, void *out_handle);
int memory_import_ipc(int device, const void *handle, uint64_t bytes, epx_cuda_memory_t *out);
int memory_free(epx_cuda_memory_t *m);
int peer_enable(int device, int peer);
int host_alloc(int device, uint64_t bytes, void **out_host, void **out_device);
int host_free(int device, void *host);
int stream_create(int device, void **out_stream);
int stream_destroy(int device, void *stream);
int stream_sync(int device, void *stream);
int device_sync(int device);
int copy(int device, void *dst, const void *src, uint64_t bytes, void *stream);
int link_test(int device, char *const *base, int rank, int n_ranks, int rounds, uint64_t timeout_ns, void *stream, uint32_t *out_bad);

} // namespace epx_cuda

#endif
