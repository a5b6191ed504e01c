/* See cuda_driver.h. */
#include "app/cuda_driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "base/status.h"

enum { NON_BLOCKING = 1, THREAD_LOCAL_CAPTURE = 1 };

/* X(member, symbol, arguments): the driver's C ABI; device pointers are 64-bit numbers there. */
#define CALLS(X)                                                                         \
    X(init, "cuInit", (unsigned))                                                        \
    X(count, "cuDeviceGetCount", (int *))                                                \
    X(name, "cuDeviceGetName", (char *, int, int))                                       \
    X(total, "cuDeviceTotalMem_v2", (size_t *, int))                                     \
    X(retain, "cuDevicePrimaryCtxRetain", (void **, int))                                \
    X(release, "cuDevicePrimaryCtxRelease_v2", (int))                                    \
    X(use, "cuCtxSetCurrent", (void *))                                                  \
    X(priorities, "cuCtxGetStreamPriorityRange", (int *, int *))                         \
    X(alloc, "cuMemAlloc_v2", (uint64_t *, size_t))                                      \
    X(dealloc, "cuMemFree_v2", (uint64_t))                                               \
    X(to_device, "cuMemcpyHtoDAsync_v2", (uint64_t, const void *, size_t, void *))       \
    X(to_host, "cuMemcpyDtoHAsync_v2", (void *, uint64_t, size_t, void *))               \
    X(fill, "cuMemsetD8Async", (uint64_t, unsigned char, size_t, void *))                \
    X(stream, "cuStreamCreateWithPriority", (void **, unsigned, int))                    \
    X(stream_end, "cuStreamDestroy_v2", (void *))                                        \
    X(sync, "cuStreamSynchronize", (void *))                                             \
    X(capture, "cuStreamBeginCapture_v2", (void *, int))                                 \
    X(capture_end, "cuStreamEndCapture", (void *, void **))                              \
    X(instantiate, "cuGraphInstantiateWithFlags", (void **, void *, unsigned long long)) \
    X(upload, "cuGraphUpload", (void *, void *))                                         \
    X(launch, "cuGraphLaunch", (void *, void *))                                         \
    X(graph_end, "cuGraphDestroy", (void *))                                             \
    X(exec_end, "cuGraphExecDestroy", (void *))                                          \
    X(event, "cuEventCreate", (void **, unsigned))                                       \
    X(event_end, "cuEventDestroy_v2", (void *))                                          \
    X(record, "cuEventRecord", (void *, void *))                                         \
    X(elapsed, "cuEventElapsedTime", (float *, void *, void *))                          \
    X(text, "cuGetErrorString", (int, const char **))

static struct {
#define MEMBER(member, symbol, arguments) int(*member) arguments;
    CALLS(MEMBER)
#undef MEMBER
    int n_devices;
    const char *missing; /* symbol or library; NULL: all there */
    int error;
} cu;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void open_once(void) {
    void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *symbol;
    cu.missing = lib == NULL ? "libcuda.so.1" : NULL;
    if (lib == NULL) return;
#define LOOK_UP(member, name, arguments)   \
    symbol = dlsym(lib, name);             \
    if (symbol == NULL) cu.missing = name; \
    memcpy(&cu.member, &symbol, sizeof cu.member);
    CALLS(LOOK_UP)
#undef LOOK_UP
    if (cu.missing != NULL) return;
    cu.error = cu.init(0);
    if (cu.error == 0) cu.error = cu.count(&cu.n_devices);
}

static epx_status_t check(int e, const char *what) {
    const char *text = NULL;
    if (e == 0) return EPX_OK;
    if (cu.text(e, &text) != 0 || text == NULL) text = "unknown error";
    return epx_fail(e == 2 ? EPX_ERR_NOMEM : EPX_ERR_OS, "CUDA driver, %s: %s (%d)", what, text, e);
}

epx_status_t cu_open(int *out_n_devices) {
    pthread_once(&once, open_once);
    if (cu.missing != NULL) return epx_fail(EPX_ERR_UNSUPPORTED, "the CUDA driver cannot be used: %s is not found", cu.missing);
    EPX_TRY(check(cu.error, "start"));
    if (cu.n_devices == 0) return epx_fail(EPX_ERR_UNSUPPORTED, "there is no CUDA device");
    *out_n_devices = cu.n_devices;
    return EPX_OK;
}

epx_status_t cu_device_name(int device, char *out, size_t n_bytes, uint64_t *out_total_bytes) {
    size_t total = 0;
    EPX_TRY(check(cu.name(out, (int)n_bytes, device), "device name"));
    EPX_TRY(check(cu.total(&total, device), "device memory"));
    *out_total_bytes = total;
    return EPX_OK;
}

epx_status_t cu_device_use(int device, cu_device_t *out) {
    cu_device_t d = {.device = device};
    EPX_TRY(check(cu.retain(&d.context, device), "context"));
    epx_status_t s = check(cu.use(d.context), "context");
    if (s >= 0) s = cu_stream_create(1, &d.stream);
    if (s < 0) (void)cu.release(device);
    else *out = d;
    return s;
}

void cu_device_done(cu_device_t *d) {
    if (d->context == NULL) return;
    cu_stream_destroy(d->stream);
    (void)cu.release(d->device);
    memset(d, 0, sizeof *d);
}

void *cu_alloc(size_t n_bytes) {
    uint64_t at = 0;
    if (check(cu.alloc(&at, n_bytes + 256), "memory") < 0) return NULL;
    return (void *)(uintptr_t)at;
}
void cu_free(void *p) {
    if (p != NULL) (void)cu.dealloc((uint64_t)(uintptr_t)p);
}

epx_status_t cu_upload(const cu_device_t *d, void *to, const void *from, size_t n_bytes) {
    EPX_TRY(check(n_bytes ? cu.to_device((uint64_t)(uintptr_t)to, from, n_bytes, d->stream) : 0, "copy to the device"));
    return cu_sync(d->stream);
}
epx_status_t cu_fetch(const cu_device_t *d, void *to, const void *from, size_t n_bytes) {
    EPX_TRY(check(n_bytes ? cu.to_host(to, (uint64_t)(uintptr_t)from, n_bytes, d->stream) : 0, "copy from the device"));
    return cu_sync(d->stream);
}
epx_status_t cu_fill(const cu_device_t *d, void *to, int byte, size_t n_bytes) {
    EPX_TRY(check(n_bytes ? cu.fill((uint64_t)(uintptr_t)to, (unsigned char)byte, n_bytes, d->stream) : 0, "fill"));
    return cu_sync(d->stream);
}
epx_status_t cu_sync(void *stream) { return check(cu.sync(stream), "stream"); }

epx_status_t cu_stream_create(int high_priority, void **out) {
    int least = 0, greatest = 0;
    EPX_TRY(check(cu.priorities(&least, &greatest), "priorities"));
    return check(cu.stream(out, NON_BLOCKING, high_priority ? greatest : least), "stream");
}
void cu_stream_destroy(void *stream) {
    if (stream != NULL) (void)cu.stream_end(stream);
}

epx_status_t cu_capture_begin(void *stream) { return check(cu.capture(stream, THREAD_LOCAL_CAPTURE), "begin of capture"); }

epx_status_t cu_capture_end(void *stream, void **out_graph) {
    void *graph = NULL, *exec = NULL;
    EPX_TRY(check(cu.capture_end(stream, &graph), "end of capture"));
    epx_status_t s = check(cu.instantiate(&exec, graph, 0), "graph");
    (void)cu.graph_end(graph);
    EPX_TRY(s);
    s = check(cu.upload(exec, stream), "graph upload");
    if (s >= 0) s = cu_sync(stream);
    if (s < 0) (void)cu.exec_end(exec);
    else *out_graph = exec;
    return s;
}
epx_status_t cu_graph_launch(void *graph, void *stream) { return check(cu.launch(graph, stream), "graph launch"); }
void cu_graph_free(void *graph) {
    if (graph != NULL) (void)cu.exec_end(graph);
}

epx_status_t cu_event_create(void **out) { return check(cu.event(out, 0), "event"); }
void cu_event_destroy(void *event) {
    if (event != NULL) (void)cu.event_end(event);
}
epx_status_t cu_event_record(void *event, void *stream) { return check(cu.record(event, stream), "event"); }
epx_status_t cu_event_us(void *from, void *to, double *out_us) {
    float ms = 0;
    EPX_TRY(check(cu.elapsed(&ms, from, to), "event"));
    *out_us = (double)ms * 1000;
    return EPX_OK;
}
