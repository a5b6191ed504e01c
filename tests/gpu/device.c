/* Device buffers and graphs for the contract cases: see device.h. */
#include "tests/gpu/device.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct {
    th_device_t d;
    char *arena;
    size_t at, bytes;
} device_t;

static int ok(cudaError_t e, const char *what) {
    if (e == cudaSuccess) return 0;
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(e));
    return -1;
}

static void *take(th_device_t *d, size_t n_bytes) {
    device_t *v = (device_t *)d;
    size_t n = (n_bytes + 255) / 256 * 256 + 256;
    if (v->at + n > v->bytes) {
        fprintf(stderr, "the device arena of %zu bytes is full\n", v->bytes);
        return NULL;
    }
    char *p = v->arena + v->at;
    v->at += n;
    return p;
}

static void reset(th_device_t *d) { ((device_t *)d)->at = 0; }

static int upload(th_device_t *d, void *to, const void *from, size_t n_bytes) {
    return ok(cudaSetDevice(d->ordinal), "cudaSetDevice") ||
                   ok(cudaMemcpyAsync(to, from, n_bytes, cudaMemcpyHostToDevice, d->stream), "upload") ||
                   ok(cudaStreamSynchronize(d->stream), "upload")
               ? -1
               : 0;
}

static int fetch(th_device_t *d, void *to, const void *from, size_t n_bytes) {
    return ok(cudaSetDevice(d->ordinal), "cudaSetDevice") ||
                   ok(cudaMemcpyAsync(to, from, n_bytes, cudaMemcpyDeviceToHost, d->stream), "fetch") ||
                   ok(cudaStreamSynchronize(d->stream), "fetch")
               ? -1
               : 0;
}

static int sync_stream(th_device_t *d) { return ok(cudaStreamSynchronize(d->stream), "cudaStreamSynchronize"); }

void tg_device_close(th_device_t *d) {
    device_t *v = (device_t *)d;
    if (v == NULL) return;
    (void)cudaSetDevice(d->ordinal);
    if (d->stream != NULL) (void)cudaStreamDestroy(d->stream);
    if (v->arena != NULL) (void)cudaFree(v->arena);
    free(v);
}

th_device_t *tg_device_open(int ordinal, size_t arena_bytes) {
    device_t *v = calloc(1, sizeof *v);
    if (v == NULL) return NULL;
    v->d = (th_device_t){ordinal, NULL, take, reset, upload, fetch, sync_stream};
    v->bytes = arena_bytes;
    cudaStream_t s = NULL;
    if (ok(cudaSetDevice(ordinal), "cudaSetDevice") || ok(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "stream") ||
        ok(cudaMalloc((void **)&v->arena, arena_bytes), "arena")) {
        v->d.stream = s;
        tg_device_close(&v->d);
        return NULL;
    }
    v->d.stream = s;
    return &v->d;
}

int tg_capture_begin(th_device_t *d) {
    (void)cudaSetDevice(d->ordinal);
    return ok(cudaStreamBeginCapture(d->stream, cudaStreamCaptureModeThreadLocal), "capture");
}

void *tg_capture_end(th_device_t *d) {
    cudaGraph_t g = NULL;
    cudaGraphExec_t exec = NULL;
    if (ok(cudaStreamEndCapture(d->stream, &g), "end of capture") != 0) return NULL;
    if (ok(cudaGraphInstantiate(&exec, g, 0), "instantiate") != 0) exec = NULL;
    if (exec != NULL &&
        (ok(cudaGraphUpload(exec, d->stream), "graph upload") || ok(cudaStreamSynchronize(d->stream), "graph upload"))) {
        (void)cudaGraphExecDestroy(exec);
        exec = NULL;
    }
    (void)cudaGraphDestroy(g);
    return exec;
}

int tg_graph_launch(th_device_t *d, void *graph) {
    (void)cudaSetDevice(d->ordinal);
    return ok(cudaGraphLaunch(graph, d->stream), "graph launch");
}

void tg_graph_free(void *graph) {
    if (graph != NULL) (void)cudaGraphExecDestroy(graph);
}

int tg_device_usable(th_device_t *d) {
    unsigned in = 0x5EED, out = 0;
    void *at = d->take(d, sizeof in);
    if (at == NULL || d->upload(d, at, &in, sizeof in) || d->fetch(d, &out, at, sizeof out)) return -1;
    return in == out ? 0 : -1;
}
