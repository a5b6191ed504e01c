/* What libepx_cuda.so gives to the library: one table of functions with C linkage. The library itself links no CUDA.
 * Every function returns 0 or an error for error_text(): a cudaError_t, or minus a CUresult. `device` is made current for the
 * call and the caller's device restored. Streams are cudaStream_t of any CUDA runtime of the process. Any thread. */
#ifndef EPX_CUDA_API_H
#define EPX_CUDA_API_H

#include <stdint.h>

#include "spi/gpu_plan.h"

enum { EPX_CUDA_ABI = 2, EPX_CUDA_MAX_DEVICES = 64, EPX_CUDA_IPC_BYTES = 64 };

typedef struct {
    char name[96];
    uint64_t total_bytes, free_bytes;
    int32_t n_sm, major, minor;
    int32_t can_pass_fds; /* its memory can be given to other processes as file descriptors */
    uint8_t uuid[16];
} epx_cuda_device_t;

typedef enum { EPX_CUDA_MAPPED = 1, EPX_CUDA_PLAIN = 2, EPX_CUDA_IPC = 3 } epx_cuda_memory_kind_t;

/* Device memory: mapped (cuMem, own or a peer's), plain (cudaMalloc), or a peer's plain memory by cudaIpc. */
typedef struct {
    char *ptr;
    uint64_t bytes, handle;
    int32_t device, kind;
} epx_cuda_memory_t;

/* Result bits of link_test. */
enum { EPX_CUDA_LINK_PACKETS = 1, EPX_CUDA_LINK_FLAGS = 2, EPX_CUDA_LINK_TIMEOUT = 4 };
enum { EPX_CUDA_LINK_STRIDE = 8192 }; /* bytes of the slab per source in link_test */

typedef struct {
    uint32_t abi, size;
    /* Start the driver and count devices. On failure *out_why tells in words. Makes no context. */
    int (*init)(int *out_n_devices, const char **out_why);
    const char *(*error_text)(int e);
    int (*device_info)(int device, epx_cuda_device_t *out);
    int (*peer_access)(int device, int peer, int *out_access, int *out_atomics);
    /* Does a stream of this thread, or a blocking stream of the device, capture a graph? */
    int (*capturing)(int device, int *out_capturing);
    /* Zeroed memory of `device`; mapped: may be exported as a descriptor, and is readable and writable from all devices of this
     * process that can reach it. Else plain, reachable after peer_enable(). */
    int (*memory_alloc)(int device, uint64_t bytes, int mapped, epx_cuda_memory_t *out);
    int (*memory_export_fd)(const epx_cuda_memory_t *m, int *out_fd);
    int (*memory_import_fd)(int device, int fd, uint64_t bytes, epx_cuda_memory_t *out);
    int (*memory_export_ipc)(const epx_cuda_memory_t *m, void *out_handle);
    int (*memory_import_ipc)(int device, const void *handle, uint64_t bytes, epx_cuda_memory_t *out);
    int (*memory_free)(epx_cuda_memory_t *m);
    int (*peer_enable)(int device, int peer);
    /* Zeroed host memory that devices of the process can read and write. */
    int (*host_alloc)(int device, uint64_t bytes, void **out_host, void **out_device);
    int (*host_free)(int device, void *host);
    int (*stream_create)(int device, void **out_stream); /* never waits for the legacy stream */
    int (*stream_destroy)(int device, void *stream);
    int (*stream_sync)(int device, void *stream);
    int (*device_sync)(int device);
    int (*copy)(int device, void *dst, const void *src, uint64_t bytes, void *stream);
    /* Every rank runs it at once on slabs of n_ranks * EPX_CUDA_LINK_STRIDE zeroed bytes: packets and flagged rows, `rounds`
     * times between all pairs. *out_bad: EPX_CUDA_LINK_* of what failed here. Waits for the result. */
    int (*link_test)(int device, char *const *base, int rank, int n_ranks, int rounds, uint64_t timeout_ns, void *stream,
                     uint32_t *out_bad);
    /* The exchange; see a2a/onesided/cuda/launch.h. */
    int (*dispatch)(int device, const epx_gpu_plan_t *p, const epx_gpu_io_t *io, int halves, void *stream);
    int (*combine)(int device, const epx_gpu_plan_t *p, const epx_gpu_io_t *io, int halves, int fused_rows, void *stream);
} epx_cuda_api_t;

/* The one symbol that libepx_cuda.so exports. NULL: it was built for another ABI number. */
#define EPX_CUDA_ENTRY "epx_cuda_module"
typedef const epx_cuda_api_t *(*epx_cuda_entry_t)(uint32_t abi);

#endif
