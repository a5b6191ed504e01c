/* Launchers of the exchange kernels. C ABI; return a cudaError_t as int (0: queued). stream: cudaStream_t. */
#ifndef EPX_ONESIDED_LAUNCH_H
#define EPX_ONESIDED_LAUNCH_H

#include "spi/gpu_plan.h"

enum { EPX_GPU_THREADS = 512 };

#ifdef __cplusplus
extern "C" {
#endif

/* halves: EPX_GPU_SEND, EPX_GPU_RECV or both in one launch. */
int epx_gpu_dispatch(const epx_gpu_plan_t *p, const epx_gpu_io_t *io, int halves, void *stream);
/* io->x: expert outputs, expert-major [El, row_cap, H] of expert dtype; io->out_x: [T, H] of token dtype. fused_rows: io->x is
 * [W][max_tokens][H] of combine dtype, already one weighted row per (source, token) (partial only). */
int epx_gpu_combine(const epx_gpu_plan_t *p, const epx_gpu_io_t *io, int halves, int fused_rows, void *stream);

#ifdef __cplusplus
}
#endif

#endif
