/* Launchers of the exchange kernels. C ABI; return a cudaError_t as int (0: queued). stream: cudaStream_t. */
#ifndef EPX_ONESIDED_LAUNCH_H
#define EPX_ONESIDED_LAUNCH_H

#include "spi/gpu_plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* halves: EPX_GPU_SEND, EPX_GPU_RECV or both in one launch. */
int epx_gpu_dispatch(const epx_gpu_plan_t *p, const epx_gpu_io_t *io, int halves, void *stream);
/* io->x: expert outputs, expert-major [El, row_cap, H] of expert dtype; io->out_x: [T, H] of token dtype. fused_rows: io->x is
 * [W][max_tokens][H] of combine dtype, already one weighted row per (source, token) (partial only). */
int epx_gpu_combine(const epx_gpu_plan_t *p, const epx_gpu_io_t *io, int halves, int fused_rows, void *stream);

/* Wait, with one warp, until all ranks have begun to send: dispatch, or combine. Called by the two above for a receiving half
 * alone. */
int epx_gpu_gate(const epx_gpu_plan_t *p, int combine, void *stream);

/* What few plans and calls ask for, after a receiving half of dispatch: zeros in the padding of contiguous rows, the histogram.
 */
int epx_gpu_after(const epx_gpu_plan_t *p, const epx_gpu_io_t *io, void *stream);

#ifdef __cplusplus
}
#endif

#endif
