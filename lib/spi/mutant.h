/* Planted mistakes for the contract suite: each must make a test fail. Compiled only with -DEPX_MUTANTS=ON; otherwise
 * EPX_MUTANT(name) is the constant 0. The environment variable EPX_MUTANT, read once, names the one that is active.
 *
 * | name                 | what it breaks                                                                             |
 * |----------------------|--------------------------------------------------------------------------------------------|
 * | drop_wait_dispatch   | dispatch_recv does not wait for the flags of its peers                                     |
 * | drop_wait_combine    | combine_recv does not wait for the flags of its peers                                      |
 * | flag_before_data     | dispatch_send and combine_send set the flags, pause, and write the data afterwards         |
 * | early_reuse          | combine_recv waits only for ranks that got rows, so a later dispatch overwrites routing that |
 * |                      | a slower (odd) rank still reads; shows when a rank sends a peer nothing, then something      |
 * | wrong_slot           | combine rows go to the slot of the next token                                              |
 * | no_flag_at_zero_rows | dispatch_send does not flag a peer that gets no rows                                       |
 * | stale_routing        | every third exchange keeps the ids of the exchange before                                  |
 * | wrong_k_order        | exact combine adds the rows from the last k to the first                                   |
 * | skip_own_rounding    | rows for the own rank are truncated, not rounded, to a 16-bit combine dtype                |
 * | off_by_one_expert    | rows go to the next local expert                                                           |
 * | list_unordered       | lists start with the rows of the own rank instead of rank 0                                |
 * | wrong_epoch_parity   | epx_group_allgather uses one record buffer instead of two                                  |
 * | hash_skips_field     | top_k is not compared over ranks at create                                                 |
 * | channels_share_rows  | combine rows of every channel go to the region of channel 0                                |
 * | contiguous_unpadded  | CONTIGUOUS ignores align                                                                   |
 * | scales_row_major     | COL_MAJOR scales are written row by row                                                    |
 * | replica_ignores_token | the receiver picks a copy of an expert by another rule than the sender                    |
 * | no_renormalize       | weights of masked tokens stay as they are                                                  |
 * | recover_keeps_epoch  | after a recover each rank goes on with its own epoch                                       |
 * | recover_keeps_messages | messages of before a recover are taken in after it (seen by the late wire only)           |
 * | missing_fence        | a flag does not wait for the data before it (seen by the transport `fault` only)           |
 * | one_member_served    | results go to the first of the ranks that hold a token only                                | */
#ifndef EPX_SPI_MUTANT_H
#define EPX_SPI_MUTANT_H

#ifdef EPX_MUTANTS
/* 1 when the environment names this mutant. Any thread. */
int epx_mutant_is(const char *name);
/* Sleep, so that a planted race is lost reliably. */
void epx_mutant_pause(void);
#define EPX_MUTANT(name) epx_mutant_is(#name)
#define EPX_MUTANT_PAUSE() epx_mutant_pause()
#else
#define EPX_MUTANT(name) 0
#define EPX_MUTANT_PAUSE() ((void)0)
#endif

#endif
