/* Bootstrap of ranks that are threads of this process. */
#ifndef EPX_BOOT_LOCAL_H
#define EPX_BOOT_LOCAL_H

#include "boot/boot.h"

/* n_ranks bootstraps that meet in memory, out_boots[n_ranks]; each is closed by its close(ctx), in any order and thread.
 * timeout_ns bounds every meeting. */
epx_status_t epx_boot_local(int n_ranks, uint64_t timeout_ns, epx_boot_t *out_boots);

#endif
