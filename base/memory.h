/* How much memory may still be used here, so that what does not fit is refused before it is touched. */
#ifndef EPX_BASE_MEMORY_H
#define EPX_BASE_MEMORY_H

#include <stdint.h>

/* Least of: MemAvailable, and limit - use of every enclosing memory control group (v1 or v2; file cache that can be dropped is
 * not use). UINT64_MAX: unknown. Any thread. */
uint64_t epx_memory_free_bytes(void);

#endif
