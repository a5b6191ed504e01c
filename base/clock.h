/* Monotonic time in nanoseconds. */
#ifndef EPX_BASE_CLOCK_H
#define EPX_BASE_CLOCK_H

#include <stdint.h>

uint64_t epx_now_ns(void);

#endif
