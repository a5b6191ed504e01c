/* Weights of a mapped checkpoint into the memory of ops that do not read host memory. */
#ifndef EPX_ENGINE_MODEL_LOAD_UPLOAD_H
#define EPX_ENGINE_MODEL_LOAD_UPLOAD_H

#include "engine/model/load/want.h"

/* Copy every wanted view into one block of *out_bytes, in the order of the wants, each at a multiple of 64 bytes, and let the
 * views point there; the files may be closed then. The block is the caller's (epx_ops_free). Returns EPX_ERR_UNSUPPORTED for a
 * view that device ops do not take: a matrix that is not bf16 or is stored transposed, or a vector that is neither bf16 nor f32;
 * EPX_ERR_NOMEM names the bytes. */
epx_status_t epx_upload_weights(epx_ops_t *ops, const epx_want_t *wants, size_t n_wants, epx_load_progress_t progress,
                                void **out_block, size_t *out_bytes);

#endif
