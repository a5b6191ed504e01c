/* The table that libepx_cuda.so exports: its only visible symbol. */
#include <cuda_runtime.h>

#include "a2a/onesided/cuda/launch.h"
#include "cuda/runtime.cuh"

/* The launchers report the last error of the thread: forget one that an earlier call has already returned. */
static void forget() { (void)cudaGetLastError(); }

static int dispatch(int device, const epx_gpu_plan_t *p, const epx_gpu_io_t *io, int halves, void *stream) {
    epx_cuda::Device current(device);
    forget();
    return current.error ? current.error : epx_gpu_dispatch(p, io, halves, stream);
}

static int combine(int device, const epx_gpu_plan_t *p, const epx_gpu_io_t *io, int halves, int fused_rows, void *stream) {
    epx_cuda::Device current(device);
    forget();
    return current.error ? current.error : epx_gpu_combine(p, io, halves, fused_rows, stream);
}

extern "C" __attribute__((visibility("default"))) const epx_cuda_api_t *epx_cuda_module(uint32_t abi) {
    using namespace epx_cuda;
    static const epx_cuda_api_t table = {
        EPX_CUDA_ABI,   sizeof(epx_cuda_api_t), init,          error_text,        device_info,       peer_access,
        capturing,      memory_alloc,           memory_export_fd, memory_import_fd, memory_export_ipc, memory_import_ipc,
        memory_free,    peer_enable,            host_alloc,    host_free,         stream_create,     stream_destroy,
        stream_sync,    device_sync,            copy,          link_test,         dispatch,          combine,
    };
    return abi == EPX_CUDA_ABI ? &table : nullptr;
}
