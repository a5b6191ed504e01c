/* From routing tables to expert lists, and rows into the packed layouts. Deterministic: order depends on routing only.
 * Used by slab backends; the oracle has its own version. Private to the calling rank. */
#ifndef EPX_SPI_ROUTE_H
#define EPX_SPI_ROUTE_H

#include "spi/a2a.h"

/* (token, rank) rows that io->ids send to each rank, added to rows[W]. Returns their sum over the other ranks. */
uint64_t epx_route_count_sent(epx_plan_t *p, const epx_io_t *io, uint64_t *rows);
/* From routes.ids/weights/n_tokens: entries, entry_k, expert_off, out_off, row_of; adds to rows_received. */
void epx_route_build(epx_plan_t *p, epx_channel_t *ch);
/* Fill ch->lists from routes (after epx_route_build() and row_base/scale_base). */
void epx_route_lists(epx_plan_t *p, epx_channel_t *ch);
/* Write io->out_counts, out_histogram, and out_x and out_scale unless the layout is LISTS. */
void epx_route_output(epx_plan_t *p, epx_channel_t *ch, const epx_io_t *io);
/* Output row of list entry i of local expert e in the plan's layout. */
static inline size_t epx_route_row(const epx_channel_t *ch, int e, int32_t i) {
    return (size_t)(ch->routes.out_off[e] + (i - ch->routes.expert_off[e]));
}

#endif
