/* A slab that does not fit is refused before it is touched. Any thread. */
#ifndef EPX_SPI_MEMORY_H
#define EPX_SPI_MEMORY_H

#include <stdint.h>

#include "epx/epx_status.h"

/* EPX_OK when n_slabs * bytes fit, one slab also within RLIMIT_FSIZE (a larger memfd would raise SIGXFSZ).
 * EPX_ERR_NOMEM with bytes wanted and free. */
epx_status_t epx_memory_check(uint64_t bytes, int n_slabs);

#endif
