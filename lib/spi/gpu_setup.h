/* From a plan's config to the numbers of the CUDA exchange: what it can run, how many blocks, how many tokens travel as packets.
 * Pure, host only. */
#ifndef EPX_SPI_GPU_SETUP_H
#define EPX_SPI_GPU_SETUP_H

#include "epx/epx.h"
#include "spi/gpu_plan.h"

/* max_blocks: multiprocessors of a rank. */
/* Is this normalised config built for GPUs? EPX_OK, or EPX_ERR_UNSUPPORTED naming field, value and what is built. */
epx_status_t epx_gpu_check_config(const epx_plan_config_t *cfg, int n_ranks, int max_blocks);
/* Fill capacities, dtypes, n_blocks, packet_tokens and the layout of *out from a checked config; the rest is zero.
 * n_local: experts of this rank. packets 0: the link does not carry them. */
void epx_gpu_setup(const epx_plan_config_t *cfg, int rank, int n_ranks, int n_local, int max_blocks, int packets,
                   epx_gpu_plan_t *out);

#endif
