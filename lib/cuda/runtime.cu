/* Devices, memory and streams for libepx: thin wrappers of the CUDA runtime, and of the driver's cuMem calls, which are looked up
 * at run time so that the module loads on a machine without a driver. Host code only. */
#include "cuda/runtime.cuh"

#include <cuda.h>
#include <cuda_runtime.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

namespace epx_cuda {

/* ---- the driver ---- */

#define DRIVER_CALLS(X)                                                                                                        \
    X(cuGetErrorString) X(cuDeviceGet) X(cuDeviceGetAttribute) X(cuMemGetAllocationGranularity) X(cuMemCreate) X(cuMemRelease)  \
    X(cuMemAddressReserve) X(cuMemAddressFree) X(cuMemMap) X(cuMemUnmap) X(cuMemSetAccess) X(cuMemExportToShareableHandle)      \
    X(cuMemImportFromShareableHandle)

static struct {
#define MEMBER(name) decltype(&::name) name;
    DRIVER_CALLS(MEMBER)
#undef MEMBER
    int n_devices, error;
    char why[256];
} driver;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void *entry(const char *name) {
    void *f = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion(name, &f, 12000, cudaEnableDefault, &found) != cudaSuccess) return nullptr;
    return found == cudaDriverEntryPointSuccess ? f : nullptr;
}

static void start() {
    int have = 0, want = 0;
    (void)cudaRuntimeGetVersion(&want);
    (void)cudaDriverGetVersion(&have);
    cudaError_t e = cudaGetDeviceCount(&driver.n_devices);
    driver.error = e;
    if (have == 0) snprintf(driver.why, sizeof driver.why, "no NVIDIA driver: libcuda.so.1 is not found (%s)", cudaGetErrorString(e));
    else if (e == cudaErrorInsufficientDriver)
        snprintf(driver.why, sizeof driver.why, "the NVIDIA driver is for CUDA %d.%d, this module needs %d.%d", have / 1000,
                 have % 1000 / 10, want / 1000, want % 1000 / 10);
    else if (e != cudaSuccess) snprintf(driver.why, sizeof driver.why, "the NVIDIA driver does not start: %s", cudaGetErrorString(e));
    if (e != cudaSuccess) {
        driver.n_devices = 0;
        return;
    }
#define LOOK_UP(name)                                                                                                          \
    driver.name = (decltype(&::name))entry(#name);                                                                             \
    if (!driver.name) driver.error = cudaErrorSymbolNotFound, snprintf(driver.why, sizeof driver.why, "the NVIDIA driver has no %s", #name);
    DRIVER_CALLS(LOOK_UP)
#undef LOOK_UP
}

int init(int *out_n_devices, const char **out_why) {
    pthread_once(&once, start);
    *out_why = driver.why;
    *out_n_devices = driver.n_devices;
    return driver.error;
}

const char *error_text(int e) {
    const char *text = nullptr;
    if (e >= 0) return cudaGetErrorString((cudaError_t)e);
    if (driver.cuGetErrorString && driver.cuGetErrorString((CUresult)-e, &text) == CUDA_SUCCESS) return text;
    return "unknown driver error";
}

Device::Device(int device) : error(cudaSuccess), before_(-1) {
    int now = -1;
    (void)cudaGetDevice(&now);
    if (now == device) return;
    before_ = now;
    error = cudaSetDevice(device);
}
Device::~Device() {
    if (before_ >= 0) (void)cudaSetDevice(before_);
}

/* ---- devices ---- */

static int attribute(int device, CUdevice_attribute a) {
    CUdevice d;
    int v = 0;
    if (driver.cuDeviceGet(&d, device) != CUDA_SUCCESS || driver.cuDeviceGetAttribute(&v, a, d) != CUDA_SUCCESS) return 0;
    return v;
}

int device_info(int device, epx_cuda_device_t *out) {
    cudaDeviceProp p;
    size_t free_bytes = 0, total = 0;
    cudaError_t e = cudaGetDeviceProperties(&p, device);
    if (e != cudaSuccess) return e;
    Device current(device);
    if (current.error) return current.error;
    e = cudaMemGetInfo(&free_bytes, &total);
    if (e != cudaSuccess) return e;
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "%s", p.name);
    memcpy(out->uuid, &p.uuid, sizeof out->uuid);
    out->total_bytes = total, out->free_bytes = free_bytes;
    out->n_sm = p.multiProcessorCount, out->major = p.major, out->minor = p.minor;
    out->can_pass_fds = attribute(device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) &&
                        attribute(device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
    return cudaSuccess;
}

int peer_access(int device, int peer, int *out_access, int *out_atomics) {
    *out_access = *out_atomics = device == peer;
    if (device == peer) return cudaSuccess;
    cudaError_t e = cudaDeviceCanAccessPeer(out_access, device, peer);
    if (e == cudaSuccess) e = cudaDeviceGetP2PAttribute(out_atomics, cudaDevP2PAttrNativeAtomicSupported, device, peer);
    return e;
}

/* A capture of a stream that is not blocking shows itself only by refusing cudaMalloc. */
int capturing(int device, int *out_capturing) {
    Device current(device);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    void *probe = nullptr;
    *out_capturing = 0;
    if (current.error) return current.error;
    cudaError_t e = cudaStreamIsCapturing(cudaStreamLegacy, &status);
    if (e == cudaSuccess && status == cudaStreamCaptureStatusNone) e = cudaMalloc(&probe, 256);
    if (probe) e = cudaFree(probe);
    bool yes = e == cudaErrorStreamCaptureImplicit || e == cudaErrorStreamCaptureUnsupported || status != cudaStreamCaptureStatusNone;
    (void)cudaGetLastError();
    *out_capturing = yes;
    return yes ? cudaSuccess : e;
}

/* ---- memory ---- */

static int fill_zero(const epx_cuda_memory_t *m) {
    cudaStream_t s;
    cudaError_t e = cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
    if (e != cudaSuccess) return e;
    e = cudaMemsetAsync(m->ptr, 0, m->bytes, s);
    if (e == cudaSuccess) e = cudaStreamSynchronize(s);
    (void)cudaStreamDestroy(s);
    return e;
}

static CUmemAllocationProp properties(int device) {
    CUmemAllocationProp p;
    memset(&p, 0, sizeof p);
    p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    p.location.id = device;
    p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return p;
}

static CUresult round_up(int device, uint64_t *bytes) {
    size_t grain = 0;
    CUmemAllocationProp p = properties(device);
    CUresult r = driver.cuMemGetAllocationGranularity(&grain, &p, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (r == CUDA_SUCCESS) *bytes = (*bytes + grain - 1) / grain * grain;
    return r;
}

/* Devices of this process that can reach `device`, itself included. */
static int reachable(int device, CUmemAccessDesc *out) {
    int n = 0;
    for (int d = 0; d < driver.n_devices && n < EPX_CUDA_MAX_DEVICES; d++) {
        int access = 0, atomics = 0;
        if (peer_access(d, device, &access, &atomics) != cudaSuccess || !access) continue;
        out[n].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        out[n].location.id = d;
        out[n++].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    }
    return n;
}

/* Map m->handle for the devices of `access`; releases the handle on failure. */
static int map_handle(epx_cuda_memory_t *m, const CUmemAccessDesc *access, int n_access) {
    CUdeviceptr at = 0;
    CUresult r = driver.cuMemAddressReserve(&at, m->bytes, 0, 0, 0);
    if (r != CUDA_SUCCESS) goto err_handle;
    r = driver.cuMemMap(at, m->bytes, 0, m->handle, 0);
    if (r != CUDA_SUCCESS) goto err_address;
    r = driver.cuMemSetAccess(at, m->bytes, access, (size_t)n_access);
    if (r != CUDA_SUCCESS) goto err_map;
    m->ptr = (char *)at;
    m->kind = EPX_CUDA_MAPPED;
    return 0;
err_map:
    (void)driver.cuMemUnmap(at, m->bytes);
err_address:
    (void)driver.cuMemAddressFree(at, m->bytes);
err_handle:
    (void)driver.cuMemRelease(m->handle);
    return -(int)r;
}

int memory_free(epx_cuda_memory_t *m) {
    Device current(m->device);
    int e = current.error;
    if (m->kind == EPX_CUDA_PLAIN) e = cudaFree(m->ptr);
    else if (m->kind == EPX_CUDA_IPC) e = cudaIpcCloseMemHandle(m->ptr);
    else if (m->kind == EPX_CUDA_MAPPED) {
        CUresult a = driver.cuMemUnmap((CUdeviceptr)m->ptr, m->bytes), b = driver.cuMemAddressFree((CUdeviceptr)m->ptr, m->bytes);
        CUresult c = driver.cuMemRelease(m->handle);
        e = -(int)(a != CUDA_SUCCESS ? a : b != CUDA_SUCCESS ? b : c);
    }
    memset(m, 0, sizeof *m);
    return e;
}

static int alloc_mapped(epx_cuda_memory_t *m) {
    CUmemAccessDesc access[EPX_CUDA_MAX_DEVICES];
    CUmemAllocationProp p = properties(m->device);
    CUmemGenericAllocationHandle h = 0;
    CUresult r = round_up(m->device, &m->bytes);
    if (r == CUDA_SUCCESS) r = driver.cuMemCreate(&h, m->bytes, &p, 0);
    if (r != CUDA_SUCCESS) return -(int)r;
    m->handle = h;
    return map_handle(m, access, reachable(m->device, access));
}

int memory_alloc(int device, uint64_t bytes, int mapped, epx_cuda_memory_t *out) {
    epx_cuda_memory_t m = {nullptr, bytes, 0, device, EPX_CUDA_PLAIN};
    Device current(device);
    void *ptr = nullptr;
    if (current.error) return current.error;
    int e = cudaFree(nullptr); /* the context must exist before cuMem calls */
    if (e == 0) e = mapped ? alloc_mapped(&m) : (int)cudaMalloc(&ptr, bytes);
    if (e != 0) {
        (void)cudaGetLastError();
        return e;
    }
    if (!mapped) m.ptr = (char *)ptr;
    e = fill_zero(&m);
    if (e != 0) (void)memory_free(&m);
    else *out = m;
    return e;
}

int memory_export_fd(const epx_cuda_memory_t *m, int *out_fd) {
    Device current(m->device);
    return -(int)driver.cuMemExportToShareableHandle(out_fd, m->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
}

int memory_import_fd(int device, int fd, uint64_t bytes, epx_cuda_memory_t *out) {
    epx_cuda_memory_t m = {nullptr, bytes, 0, device, 0};
    CUmemAccessDesc access;
    CUmemGenericAllocationHandle h = 0;
    Device current(device);
    if (current.error) return current.error;
    CUresult r = driver.cuMemImportFromShareableHandle(&h, (void *)(uintptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (r == CUDA_SUCCESS) r = round_up(device, &m.bytes);
    if (r != CUDA_SUCCESS) return -(int)r;
    m.handle = h;
    memset(&access, 0, sizeof access);
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    int e = map_handle(&m, &access, 1);
    if (e == 0) *out = m;
    return e;
}

int memory_export_ipc(const epx_cuda_memory_t *m, void *out_handle) {
    Device current(m->device);
    static_assert(sizeof(cudaIpcMemHandle_t) == EPX_CUDA_IPC_BYTES, "handle");
    return cudaIpcGetMemHandle((cudaIpcMemHandle_t *)out_handle, m->ptr);
}

int memory_import_ipc(int device, const void *handle, uint64_t bytes, epx_cuda_memory_t *out) {
    cudaIpcMemHandle_t h;
    void *ptr = nullptr;
    Device current(device);
    memcpy(&h, handle, sizeof h);
    int e = current.error ? current.error : (int)cudaIpcOpenMemHandle(&ptr, h, cudaIpcMemLazyEnablePeerAccess);
    if (e == 0) *out = {(char *)ptr, bytes, 0, device, EPX_CUDA_IPC};
    return e;
}

int peer_enable(int device, int peer) {
    Device current(device);
    if (device == peer) return cudaSuccess;
    cudaError_t e = cudaDeviceEnablePeerAccess(peer, 0);
    if (e != cudaErrorPeerAccessAlreadyEnabled) return e;
    (void)cudaGetLastError();
    return cudaSuccess;
}

int host_alloc(int device, uint64_t bytes, void **out_host, void **out_device) {
    Device current(device);
    if (current.error) return current.error;
    cudaError_t e = cudaHostAlloc(out_host, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
    if (e != cudaSuccess) return e;
    memset(*out_host, 0, bytes);
    e = cudaHostGetDevicePointer(out_device, *out_host, 0);
    if (e != cudaSuccess) (void)cudaFreeHost(*out_host);
    return e;
}

int host_free(int device, void *host) {
    Device current(device);
    return cudaFreeHost(host);
}

/* ---- streams ---- */

int stream_create(int device, void **out_stream) {
    Device current(device);
    cudaStream_t s;
    int e = current.error ? current.error : (int)cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
    if (e == 0) *out_stream = s;
    return e;
}
int stream_destroy(int device, void *stream) {
    Device current(device);
    return cudaStreamDestroy((cudaStream_t)stream);
}
int stream_sync(int device, void *stream) {
    Device current(device);
    return cudaStreamSynchronize((cudaStream_t)stream);
}
int device_sync(int device) {
    Device current(device);
    return current.error ? current.error : (int)cudaDeviceSynchronize();
}
int copy(int device, void *dst, const void *src, uint64_t bytes, void *stream) {
    Device current(device);
    return cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, (cudaStream_t)stream);
}

} // namespace epx_cuda
