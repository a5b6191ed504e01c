/* Random weights for load format "dummy": runs without a checkpoint, of the rank's share only. Not trained: text is noise. */
#ifndef EPX_ENGINE_MODEL_LOAD_DUMMY_H
#define EPX_ENGINE_MODEL_LOAD_DUMMY_H

#include "engine/model/load/want.h"

/* bf16 for every want: norms are 1, other vectors (biases) 0, matrices uniform with standard deviation 0.02, drawn from Philox
 * keyed by (seed, tensor name), so a tensor is the same on every rank and for every number of ranks. *out_block is one allocation
 * of *out_bytes holding all of them in the order of the wants, owned by the caller (epx_ops_free). */
epx_status_t epx_dummy_weights(epx_ops_t *ops, uint64_t seed, const epx_want_t *wants, size_t n_wants,
                               epx_load_progress_t progress, void **out_block, size_t *out_bytes);

#endif
