/* How the contract cases reach device memory: the harness itself knows no CUDA. Host buffers stay the truth of a case; each has a
 * copy on the device that is refreshed before a call and fetched after it. */
#ifndef EPX_TESTS_HARNESS_DEVICE_H
#define EPX_TESTS_HARNESS_DEVICE_H

#include <stddef.h>

/* One rank's device, its stream and an arena of device memory that a step fills and resets; nothing is allocated while a peer may
 * spin. Functions return 0, or -1 when CUDA fails. */
typedef struct th_device th_device_t;
struct th_device {
    int ordinal;
    void *stream;
    void *(*take)(th_device_t *d, size_t n_bytes); /* 256-byte aligned; NULL: full */
    void (*reset)(th_device_t *d);
    int (*upload)(th_device_t *d, void *to, const void *from, size_t n_bytes);
    int (*fetch)(th_device_t *d, void *to, const void *from, size_t n_bytes); /* after what is queued on the stream; waits */
    int (*sync)(th_device_t *d);
};

#endif
