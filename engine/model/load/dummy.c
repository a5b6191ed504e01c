/* Random weights. See dummy.h. */
#include "engine/model/load/dummy.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

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

static void fill(epx_ops_t *ops, uint16_t *out, const epx_want_t *w, uint64_t seed) {
    const float half_width = 0.02f * 1.7320508f; /* uniform in +-a has standard deviation a / sqrt(3) */
    const int vector = w->n_dims - w->sliced == 1, norm = strstr(w->name, "norm.weight") != NULL;
    if (vector) epx_ops_fill(ops, norm ? 0x3F80 : 0, n_elems(w), out); /* 1.0 */
    else epx_ops_random(ops, tensor_seed(seed, w->name) + (uint64_t)w->slice, half_width, n_elems(w), out);
}

epx_status_t epx_dummy_weights(epx_ops_t *ops, uint64_t seed, const epx_want_t *wants, size_t n_wants,
                               epx_load_progress_t progress, void **out_block, size_t *out_bytes) {
    size_t total = 0, at = 0, n_bytes = 0;
    int fits = 1;
    void *block;
    for (size_t i = 0; i < n_wants; i++) fits &= epx_add_size(total, padded(&wants[i]), &total);
    if (!fits || !epx_mul_size(total, sizeof(uint16_t), &n_bytes))
        return epx_fail(EPX_ERR_NOMEM, "dummy weights: %zu tensors overflow the address space", n_wants);
    if (n_bytes > epx_ops_free_bytes(ops)) /* the system would promise it and end this process later */
        return epx_fail(EPX_ERR_NOMEM, "dummy weights: %zu bytes wanted, %" PRIu64 " free", n_bytes, epx_ops_free_bytes(ops));
    epx_status_t s = epx_ops_alloc(ops, n_bytes, &block);
    if (s < 0) return epx_fail_context(s, "dummy weights");
    for (size_t i = 0; i < n_wants; i++) {
        const epx_want_t *w = &wants[i];
        uint16_t *to = (uint16_t *)block + at;
        fill(ops, to, w, seed);
        *w->view = epx_want_view(w);
        w->view->data = to;
        w->view->type = EPX_W_BF16;
        at += padded(w);
        if (progress.fn) progress.fn(progress.ctx, "make dummy weights", (double)(i + 1) / (double)n_wants);
    }
    *out_block = block;
    *out_bytes = n_bytes;
    return epx_ops_sync(ops);
}
