/* Debug mode: canaries between the regions of a slab and checksums of rows. Both cost time; cfg.debug or EPX_DEBUG=1 turns them
 * on. */
#ifndef EPX_SPI_DEBUG_H
#define EPX_SPI_DEBUG_H

#include "spi/a2a.h"

/* Write the canaries of the own slab: before it is shared. */
void epx_debug_plant(epx_plan_t *p);
/* EPX_ERR_INTERNAL naming channel and region when something was written behind a region of the own slab; the plan is then aborted
 * everywhere. EPX_OK without debug mode. */
epx_status_t epx_debug_check_slab(epx_plan_t *p);
/* Checksums of the own rows and scales (after staging) for `dst`. */
void epx_debug_push_sums(epx_plan_t *p, int channel, int dst);
/* Compare every row of the lists with what its sender had. Needs routes, row_base and lists. */
epx_status_t epx_debug_check_rows(epx_plan_t *p, int channel);
/* Checksum of a row that has been written to C of `dst`. */
void epx_debug_push_sum(epx_plan_t *p, int channel, int dst, uint64_t plane, uint64_t token, const char *row);
/* Compare rows of the own C, given as terms of token, with what their senders had. */
epx_status_t epx_debug_check_terms(epx_plan_t *p, int channel, size_t token, const epx_row_term_t *terms, int n);

#endif
