/* Offsets of the CUDA exchange's slab from a plan's capacities. Pure, host only. */
#ifndef EPX_SPI_GPU_LAYOUT_H
#define EPX_SPI_GPU_LAYOUT_H

#include "epx/epx.h"
#include "spi/gpu_plan.h"

#ifdef __cplusplus
extern "C" {
#endif
/* Fill p->l and p->row_cap from the capacities and dtypes already set in *p. */
void epx_gpu_layout(epx_gpu_plan_t *p, int scale_block);
#ifdef __cplusplus
}
#endif

#endif
