/* Refuses slabs that do not fit. Set-up path only. */
#include "spi/memory.h"

#include <inttypes.h>
#include <sys/resource.h>

#include "base/memory.h"
#include "base/status.h"

epx_status_t epx_memory_check(uint64_t bytes, int n_slabs) {
    struct rlimit lim;
    uint64_t free_bytes = epx_memory_free_bytes(), wanted;
    if (getrlimit(RLIMIT_FSIZE, &lim) == 0 && lim.rlim_cur != RLIM_INFINITY && bytes > lim.rlim_cur)
        return epx_fail(EPX_ERR_NOMEM, "slab: %" PRIu64 " bytes wanted, file size limit (RLIMIT_FSIZE) is %" PRIu64 " bytes",
                        bytes, (uint64_t)lim.rlim_cur);
    if (__builtin_mul_overflow(bytes, (uint64_t)n_slabs, &wanted)) wanted = UINT64_MAX;
    if (wanted > free_bytes)
        return epx_fail(EPX_ERR_NOMEM,
                        "slabs: %" PRIu64 " bytes wanted on this host (%d ranks x %" PRIu64 " bytes), %" PRIu64 " bytes free",
                        wanted, n_slabs, bytes, free_bytes);
    return EPX_OK;
}
