/* Rank bodies on devices: world, group and device buffers of one rank. */
#ifndef EPX_TESTS_GPU_RANKS_H
#define EPX_TESTS_GPU_RANKS_H

#include "tests/gpu/device.h"
#include "tests/harness/launch.h"

typedef struct {
    epx_world_t *world;
    epx_group_t *group;
    th_device_t *device;
} tg_rank_t;

/* How many devices a test may use: `wanted`, or all for 0. Asked in a child process, so that ranks may be forked later. 0 after
 * printing why none can be used. */
int tg_devices(int wanted);
/* Make a group over all ranks, rank r on device r % n_devices, run the body, and take everything down. */
int tg_with_group(th_rank_t *r, int n_devices, size_t arena_bytes, int (*body)(th_rank_t *r, tg_rank_t *k));

#endif
