/* Weights to a device. See upload.h. */
#include "engine/model/load/upload.h"

#include <inttypes.h>

#include "base/checked.h"

enum { ALIGN = 64 };

static size_t view_bytes(const epx_weight_t *v) { return (size_t)(v->n * v->k) * (v->type == EPX_W_F32 ? 4 : 2); }

static epx_status_t check_view(const epx_want_t *w) {
    static const char *const types[] = {[EPX_W_F32] = "F32", [EPX_W_BF16] = "BF16", [EPX_W_F8_E4M3] = "F8_E4M3"};
    const epx_weight_t *v = w->view;
    const int matrix = w->n_dims - w->sliced == 2;
    if (v->type == EPX_W_F8_E4M3 || (matrix && v->type != EPX_W_BF16))
        return epx_fail(EPX_ERR_UNSUPPORTED, "tensor \"%s\" has dtype %s, supported on a GPU: BF16%s", w->name, types[v->type],
                        matrix ? "" : ", F32");
    if (v->transposed)
        return epx_fail(EPX_ERR_UNSUPPORTED, "tensor \"%s\" is stored [in, out], supported on a GPU: [out, in]", w->name);
    return EPX_OK;
}

epx_status_t epx_upload_weights(epx_ops_t *ops, const epx_want_t *wants, size_t n_wants, epx_load_progress_t progress,
                                void **out_block, size_t *out_bytes) {
    size_t total = 0;
    void *block;
    for (size_t i = 0; i < n_wants; i++) {
        EPX_TRY(check_view(&wants[i]));
        total += (view_bytes(wants[i].view) + ALIGN - 1) / ALIGN * ALIGN; /* of mapped files: no overflow */
    }
    if (total > epx_ops_free_bytes(ops))
        return epx_fail(EPX_ERR_NOMEM, "weights: %zu bytes wanted, %" PRIu64 " free on the device", total,
                        epx_ops_free_bytes(ops));
    epx_status_t s = epx_ops_alloc(ops, total, &block);
    if (s < 0) return epx_fail_context(s, "weights");
    size_t at = 0;
    for (size_t i = 0; i < n_wants && s >= 0; i++) {
        const size_t n_bytes = view_bytes(wants[i].view);
        s = epx_ops_upload(ops, (char *)block + at, wants[i].view->data, n_bytes);
        wants[i].view->data = (char *)block + at;
        at += (n_bytes + ALIGN - 1) / ALIGN * ALIGN;
        if (progress.fn) progress.fn(progress.ctx, "copy weights to the device", (double)(i + 1) / (double)n_wants);
    }
    *out_block = block; /* the caller's in any case, so that an error leaves nothing behind */
    *out_bytes = total;
    return s;
}
