/* The devices of the contract cases, by the CUDA runtime. */
#ifndef EPX_TESTS_GPU_DEVICE_H
#define EPX_TESTS_GPU_DEVICE_H

#include "tests/harness/device.h"

/* NULL with a message on stderr when the device cannot be used. arena_bytes of device memory are taken now. */
th_device_t *tg_device_open(int ordinal, size_t arena_bytes);
void tg_device_close(th_device_t *d);

/* Graphs of one stream: between begin and end, calls are recorded. NULL: CUDA failed. */
int tg_capture_begin(th_device_t *d);
void *tg_capture_end(th_device_t *d);
int tg_graph_launch(th_device_t *d, void *graph);
void tg_graph_free(void *graph);
/* Is a small kernel-free use of the device (copy, fill) still possible? 0: yes. */
int tg_device_usable(th_device_t *d);

#endif
