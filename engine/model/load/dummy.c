/* Random weights. See dummy.h. */
#include "engine/model/load/dummy.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/half.h"
#include "base/memory.h"
#include "base/philox.h"

static size_t n_elems(const epx_want_t *w) {
    const epx_weight_t v = epx_want_view(w);
    return (size_t)(v.n * v.k);
}

/* Elements of a tensor with its padding: each starts at a multiple of 64 bytes. */
static size_t padded(const epx_want_t *w) { return (n_elems(w) + 31) / 32 * 32; }

/* FNV-1a over the name, mixed with the seed (http://www.isthe.com/chongo/tech/comp/fnv). */
static uint64_t tensor_seed(uint64_t seed, const char *name) {
    uint64_t h = 0xCBF29CE484222325u;
    for (; *name; name++) h = (h ^ (uint8_t)*name) * 0x100000001B3u;
    return h ^ seed;
}

static void fill(uint16_t *out, const epx_want_t *w, uint64_t seed) {
    const float half_width = 0.02f * 1.7320508f; /* uniform in +-a has standard deviation a / sqrt(3) */
    size_t n = n_elems(w);
    uint64_t s = tensor_seed(seed, w->name) + (uint64_t)w->slice;
    const int vector = w->n_dims - w->sliced == 1, norm = strstr(w->name, "norm.weight") != NULL;
    uint32_t key[2] = {(uint32_t)s, (uint32_t)(s >> 32)}, r[4];
    for (size_t i = 0; i < n; i++) {
        if (vector) {
            out[i] = norm ? 0x3F80 : 0; /* 1.0 */
            continue;
        }
        uint32_t counter[4] = {(uint32_t)(i / 4), (uint32_t)((uint64_t)i >> 34), 0, 0};
        if (i % 4 == 0) epx_philox4x32(counter, key, r);
        out[i] = epx_f32_to_bf16(((float)(r[i % 4] >> 8) * 0x1p-23f - 1.0f) * half_width);
    }
}

epx_status_t epx_dummy_weights(uint64_t seed, const epx_want_t *wants, size_t n_wants, epx_load_progress_t progress,
                               void **out_block) {
    size_t total = 0, at = 0, n_bytes = 0;
    int fits = 1;
    for (size_t i = 0; i < n_wants; i++) fits &= epx_add_size(total, padded(&wants[i]), &total);
    if (!fits || !epx_mul_size(total, sizeof(uint16_t), &n_bytes))
        return epx_fail(EPX_ERR_NOMEM, "dummy weights: %zu tensors overflow the address space", n_wants);
    if (n_bytes > epx_memory_free_bytes()) /* the system would promise it and end this process later */
        return epx_fail(EPX_ERR_NOMEM, "dummy weights: %zu bytes wanted, %" PRIu64 " free", n_bytes, epx_memory_free_bytes());
    uint16_t *block = aligned_alloc(64, n_bytes ? n_bytes : 64);
    if (!block) return epx_fail(EPX_ERR_NOMEM, "dummy weights: %zu bytes wanted", n_bytes);
    for (size_t i = 0; i < n_wants; i++) {
        const epx_want_t *w = &wants[i];
        fill(block + at, w, seed);
        *w->view = epx_want_view(w);
        w->view->data = block + at;
        w->view->type = EPX_W_BF16;
        at += padded(w);
        if (progress.fn) progress.fn(progress.ctx, "make dummy weights", (double)(i + 1) / (double)n_wants);
    }
    *out_block = block;
    return EPX_OK;
}
