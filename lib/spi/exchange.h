/* Parts that slab backends share: routing tables and flags out, waits in, and combine through the C region.
 * Each function works on one channel of one plan; one thread a plan. */
#ifndef EPX_SPI_EXCHANGE_H
#define EPX_SPI_EXCHANGE_H

#include "spi/a2a.h"

/* Bring x into the own slab in wire form: copy, quantise, or nothing when io->x is epx_plan_input() itself. */
void epx_exchange_stage(epx_plan_t *p, int channel, const epx_io_t *io);
/* Rows of `rank` in wire form as this rank reads them, and their scales (NULL without): in place where its slab is mapped, else
 * where its messages put them. */
const void *epx_exchange_rows(const epx_plan_t *p, int channel, int rank);
const float *epx_exchange_scales(const epx_plan_t *p, int channel, int rank);
/* Write ids, weights and count into `dst`'s slab. */
void epx_exchange_push_routing(epx_plan_t *p, int channel, int dst, const epx_io_t *io);
/* Put rows (after epx_exchange_stage()) and scales into D of `dst`: of all tokens, or of those that go there. */
void epx_exchange_push_rows(epx_plan_t *p, int channel, int dst, const epx_io_t *io, int all_tokens);
/* Flag every rank: this rank's part of the phase is done. */
void epx_exchange_flag_dispatch(epx_plan_t *p, int channel);
void epx_exchange_flag_combine(epx_plan_t *p, int channel);
/* Wait for the flags of all ranks. */
epx_status_t epx_exchange_wait_dispatch(epx_plan_t *p, int channel);
epx_status_t epx_exchange_wait_combine(epx_plan_t *p, int channel);
/* Point routes.ids/weights/n_tokens at the tables in the own slab. */
void epx_exchange_open_routing(epx_plan_t *p, int channel);
/* Rows of the combine half into the C regions of their sources, by cfg.combine. all_tokens: partial sums also for tokens
 * that have no expert here (they are zero). */
void epx_exchange_send_rows(epx_plan_t *p, int channel, const void *x, int all_tokens);
/* The same when the caller has written the partial sums of tokens that have experts here: what is left is to count and, with
 * all_tokens, the zeros. */
void epx_exchange_finish_sums(epx_plan_t *p, int channel, int all_tokens);
/* out_x = the sums of the rows in the own C region (+ add). all_tokens: every rank sent a partial sum for every token. Fails in
 * debug mode only. */
epx_status_t epx_exchange_sum(epx_plan_t *p, int channel, const epx_io_t *io, int all_tokens);

#endif
