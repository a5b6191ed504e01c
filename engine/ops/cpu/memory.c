/* Memory of the CPU ops: host memory. Large blocks are mapped, so that pages that are never used cost nothing. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/checked.h"
#include "base/memory.h"
#include "base/philox.h"
#include "engine/ops/cpu/cpu.h"

enum { MAP_FROM_BYTES = 1 << 20 };

epx_status_t epx_cpu_alloc(epx_ops_t *ops, size_t n_bytes, void **out) {
    size_t rounded;
    (void)ops;
    if (!epx_round_up_size(n_bytes != 0 ? n_bytes : 1, 64, &rounded)) return epx_fail(EPX_ERR_NOMEM, "%zu bytes wanted", n_bytes);
    if (n_bytes < MAP_FROM_BYTES) {
        void *p = aligned_alloc(64, rounded);
        if (p == NULL) return epx_fail(EPX_ERR_NOMEM, "%zu bytes wanted", n_bytes);
        *out = memset(p, 0, rounded);
        return EPX_OK;
    }
    void *p = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return epx_fail_errno(EPX_ERR_NOMEM, errno, "%zu bytes wanted", n_bytes);
    *out = p;
    return EPX_OK;
}

void epx_cpu_free(epx_ops_t *ops, void *p, size_t n_bytes) {
    (void)ops;
    if (n_bytes < MAP_FROM_BYTES) free(p);
    else munmap(p, n_bytes);
}

epx_status_t epx_cpu_copy(epx_ops_t *ops, void *to, const void *from, size_t n_bytes) {
    (void)ops;
    if (to != from) memcpy(to, from, n_bytes);
    return EPX_OK;
}

uint64_t epx_cpu_free_bytes(const epx_ops_t *ops) {
    (void)ops;
    return epx_memory_free_bytes();
}

void epx_cpu_random(epx_ops_t *ops, uint64_t seed, float half_width, size_t n, uint16_t *out) {
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)}, r[4];
    (void)ops;
    for (size_t i = 0; i < n; i++) {
        uint32_t counter[4] = {(uint32_t)(i / 4), (uint32_t)((uint64_t)i >> 34), 0, 0};
        if (i % 4 == 0) epx_philox4x32(counter, key, r);
        out[i] = epx_f32_to_bf16(((float)(r[i % 4] >> 8) * 0x1p-23f - 1.0f) * half_width);
    }
}

void epx_cpu_fill(epx_ops_t *ops, uint16_t value, size_t n, uint16_t *out) {
    (void)ops;
    for (size_t i = 0; i < n; i++) out[i] = value;
}
