/* Offsets of the CUDA exchange's slab, and the shared memory of its kernels, from a plan's capacities. Pure, host only. */
#ifndef EPX_SPI_GPU_LAYOUT_H
#define EPX_SPI_GPU_LAYOUT_H

#include "epx/epx.h"
#include "spi/gpu_plan.h"

#ifdef __cplusplus
extern "C" {
#endif
/* Fill p->l and p->row_cap from the capacities and dtypes already set in *p. */
void epx_gpu_layout(epx_gpu_plan_t *p, int scale_block);
/* Received (source, token) pairs that one block may have to place: its share of the units, in the mode with the most pairs a
 * unit. */
int epx_gpu_run_pairs(const epx_gpu_plan_t *p);
/* Bytes of shared memory of a dispatch block. The same on all ranks of a plan. */
uint64_t epx_gpu_dispatch_shared(const epx_gpu_plan_t *p);
#ifdef __cplusplus
}
#endif

#endif
