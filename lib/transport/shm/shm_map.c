/* memfd, not /dev/shm: no name, no size limit of a mount. fallocate() takes the pages now, and the seals forbid a peer to
 * shrink the file, so no access can fault later. */
#include "transport/shm/shm_map.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/atomic.h"
#include "base/memory.h"
#include "base/status.h"
#include "spi/memory.h"

enum { SEALS = F_SEAL_SHRINK | F_SEAL_GROW };

static epx_status_t no_memory(size_t bytes, const char *call) {
    int e = errno;
    return epx_fail_errno(e == ENOMEM || e == ENOSPC || e == EFBIG ? EPX_ERR_NOMEM : EPX_ERR_OS, e,
                          "shm: slab of %zu bytes wanted, %llu bytes free: %s", bytes,
                          (unsigned long long)epx_memory_free_bytes(), call);
}

static epx_status_t reserve(int fd, size_t bytes) {
    int r;
    if (ftruncate(fd, (off_t)bytes) != 0) return no_memory(bytes, "ftruncate");
    do r = fallocate(fd, 0, 0, (off_t)bytes);
    while (r != 0 && errno == EINTR);
    if (r != 0) return no_memory(bytes, "fallocate");
    if (fcntl(fd, F_ADD_SEALS, SEALS | F_SEAL_SEAL) != 0) return epx_fail_errno(EPX_ERR_OS, errno, "shm: F_ADD_SEALS");
    return EPX_OK;
}

static epx_status_t map_fd(int fd, size_t bytes, int flags, shm_map_t **out_map) {
    shm_map_t *m = calloc(1, sizeof *m);
    if (m == NULL) return no_memory(sizeof *m, "calloc");
    m->base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | flags, fd, 0);
    if (m->base == MAP_FAILED) {
        epx_status_t s = no_memory(bytes, "mmap");
        free(m);
        return s;
    }
    m->bytes = bytes;
    m->fd = -1;
    m->refs = 1;
    *out_map = m;
    return EPX_OK;
}

epx_status_t shm_map_create(size_t bytes, shm_map_t **out_map) {
    epx_status_t s;
    EPX_TRY(epx_memory_check(bytes, 1));
    int fd = memfd_create("epx-slab", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return epx_fail_errno(EPX_ERR_OS, errno, "shm: memfd_create");
    EPX_TRY_GOTO(s, reserve(fd, bytes), err_fd);
    EPX_TRY_GOTO(s, map_fd(fd, bytes, MAP_POPULATE, out_map), err_fd);
    (*out_map)->fd = fd;
    return EPX_OK;
err_fd:
    close(fd);
    return s;
}

epx_status_t shm_map_open(int fd, size_t bytes, shm_map_t **out_map) {
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);
    if (fstat(fd, &st) != 0) return epx_fail_errno(EPX_ERR_OS, errno, "shm: fstat of a peer's slab");
    if (st.st_size != (off_t)bytes)
        return epx_fail(EPX_ERR_MISMATCH, "shm: a peer's slab has %lld bytes, %zu expected", (long long)st.st_size, bytes);
    if (seals < 0 || (seals & SEALS) != SEALS)
        return epx_fail(EPX_ERR_FORMAT, "shm: a peer's slab is not sealed against resizing");
    return map_fd(fd, bytes, 0, out_map);
}

void shm_map_ref(shm_map_t *m) { epx_fetch_add_u32(&m->refs, 1); }

void shm_map_unref(shm_map_t *m) {
    if (m == NULL || epx_fetch_add_u32(&m->refs, (uint32_t)-1) != 1) return;
    shm_map_close_fd(m);
    munmap(m->base, m->bytes);
    free(m);
}

void shm_map_close_fd(shm_map_t *m) {
    if (m->fd >= 0) close(m->fd);
    m->fd = -1;
}
