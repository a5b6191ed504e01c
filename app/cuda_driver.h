/* The few calls of the CUDA driver that `epx bench a2a --device cuda` makes itself: memory, streams, graphs, events. libcuda.so.1
 * is opened at run time, so the program links no CUDA and has no CUDA header. Handles are the driver's. Any thread, after
 * cu_device_use() in it. */
#ifndef EPX_APP_CUDA_DRIVER_H
#define EPX_APP_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#include "epx/epx_status.h"

typedef struct {
    int device;
    void *context, *stream; /* primary context, owned by the driver; a stream of the highest priority, owned */
} cu_device_t;

/* Open the driver and count devices. EPX_ERR_UNSUPPORTED with the reason. */
epx_status_t cu_open(int *out_n_devices);
epx_status_t cu_device_use(int device, cu_device_t *out);
void cu_device_done(cu_device_t *d);
/* Name of a device, and how much memory it has. */
epx_status_t cu_device_name(int device, char *out, size_t n_bytes, uint64_t *out_total_bytes);
/* NULL after epx_fail(). 256-byte aligned, not zeroed. */
void *cu_alloc(size_t n_bytes);
void cu_free(void *p);
/* Copies between host and device on the stream; wait until done. */
epx_status_t cu_upload(const cu_device_t *d, void *to, const void *from, size_t n_bytes);
epx_status_t cu_fetch(const cu_device_t *d, void *to, const void *from, size_t n_bytes);
epx_status_t cu_fill(const cu_device_t *d, void *to, int byte, size_t n_bytes);
epx_status_t cu_sync(void *stream);
epx_status_t cu_stream_create(int high_priority, void **out);
void cu_stream_destroy(void *stream);
/* What is queued on the stream between the two becomes a graph, made ready for launches. */
epx_status_t cu_capture_begin(void *stream);
epx_status_t cu_capture_end(void *stream, void **out_graph);
epx_status_t cu_graph_launch(void *graph, void *stream);
void cu_graph_free(void *graph);
epx_status_t cu_event_create(void **out);
void cu_event_destroy(void *event);
epx_status_t cu_event_record(void *event, void *stream);
/* Both must have happened. */
epx_status_t cu_event_us(void *from, void *to, double *out_us);

#endif
