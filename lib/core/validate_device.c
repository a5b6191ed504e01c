/* Argument checks of the four halves for plans on devices. Pointers are device memory: their values are checked, not what they
 * point to. Ids outside the experts count as -1 on the device. Pure. */
#include "base/status.h"
#include "core/core.h"

/* The kernels move 16 bytes at a time. */
static epx_status_t aligned(const void *ptr, const char *field, size_t bytes) {
    if ((uintptr_t)ptr % bytes == 0) return EPX_OK;
    return epx_fail(EPX_ERR_ARG, "io->%s is %p; legal on devices: multiples of %zu", field, ptr, bytes);
}

static epx_status_t need(const void *ptr, const char *field, size_t bytes) {
    if (ptr == NULL) return epx_fail(EPX_ERR_ARG, "io->%s is NULL; device memory is needed", field);
    return aligned(ptr, field, bytes);
}

epx_status_t epx_validate_device_dispatch_send(const epx_plan_t *p, const epx_io_t *io) {
    int given = p->cfg.token_dtype == EPX_FP8_E4M3;
    if (io->x_scale != NULL && !given)
        return epx_fail(EPX_ERR_ARG, "io->x_scale is set with token_dtype %s; legal: only with fp8_e4m3",
                        epx_dtype_name(p->cfg.token_dtype));
    if (io->n_tokens < 0)
        return epx_fail(EPX_ERR_ARG, "n_tokens is %d; legal: 0 to max_tokens = %d", io->n_tokens, p->cfg.max_tokens);
    if (io->n_tokens > p->cfg.max_tokens)
        return epx_fail(EPX_ERR_CAPACITY, "n_tokens is %d; the plan was created for at most max_tokens = %d", io->n_tokens,
                        p->cfg.max_tokens);
    EPX_TRY(aligned(io->n_tokens_device, "n_tokens_device", sizeof(uint32_t)));
    if (io->n_tokens == 0 && io->n_tokens_device == NULL) return EPX_OK;
    EPX_TRY(need(io->x, "x", 16));
    if (given) EPX_TRY(need(io->x_scale, "x_scale", sizeof(float)));
    EPX_TRY(need(io->ids, "ids", sizeof(int32_t)));
    return need(io->weights, "weights", sizeof(float));
}

epx_status_t epx_validate_device_dispatch_recv(const epx_plan_t *p, const epx_io_t *io) {
    EPX_TRY(aligned(io->out_histogram, "out_histogram", sizeof(int32_t)));
    EPX_TRY(aligned(io->out_counts, "out_counts", sizeof(int32_t)));
    if (p->cfg.layout == EPX_LAYOUT_LISTS) {
        if (io->out_x != NULL) return epx_fail(EPX_ERR_ARG, "io->out_x is set with layout LISTS; rows stay in place, pass NULL");
        if (io->out_scale != NULL) return epx_fail(EPX_ERR_ARG, "io->out_scale is set with layout LISTS; pass NULL");
        return EPX_OK;
    }
    if (p->layout.n_scales == 0 && io->out_scale != NULL)
        return epx_fail(EPX_ERR_ARG, "io->out_scale is set with wire_dtype %s; legal: only with fp8_e4m3",
                        epx_dtype_name(p->cfg.wire_dtype));
    if (epx_plan_place(p, io->channel)->n_local == 0) return EPX_OK;
    EPX_TRY(need(io->out_x, "out_x", 16));
    EPX_TRY(need(io->out_counts, "out_counts", sizeof(int32_t)));
    return p->layout.n_scales ? need(io->out_scale, "out_scale", sizeof(float)) : EPX_OK;
}

epx_status_t epx_validate_device_combine_send(const epx_plan_t *p, const epx_io_t *io) {
    return epx_plan_place(p, io->channel)->n_local == 0 ? EPX_OK : need(io->x, "x", 16);
}

epx_status_t epx_validate_device_combine_recv(const epx_plan_t *p, const epx_io_t *io) {
    EPX_TRY(epx_validate_combine_weights(p, io));
    EPX_TRY(aligned(io->combine_weights, "combine_weights", sizeof(float)));
    EPX_TRY(aligned(io->add, "add", 16));
    return p->channels[io->channel].n_tokens == 0 ? EPX_OK : need(io->out_x, "out_x", 16);
}
