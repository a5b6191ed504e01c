/* A Hugging Face checkpoint directory on disk: model.safetensors, or model.safetensors.index.json with shards.
 * Maps read-only only the bytes that are wanted, rounded to pages. One thread. The files must not be cut while open. */
#ifndef EPX_ENGINE_MODEL_LOAD_CHECKPOINT_H
#define EPX_ENGINE_MODEL_LOAD_CHECKPOINT_H

#include "engine/model/load/want.h"

typedef struct epx_checkpoint epx_checkpoint_t;

/* Find the files and read the index; shards are opened when a tensor of theirs is first wanted. dir: borrowed during the call.
 * EPX_ERR_NOT_FOUND when the directory has neither file. */
epx_status_t epx_checkpoint_open(const char *dir, epx_checkpoint_t **out_ck);
/* Check that every wanted tensor is there with its shape, as BF16 or F32 (or F8_E4M3 with its factors), and map them. On failure
 * no view is changed. EPX_ERR_FORMAT names file, tensor, value and expected value; EPX_ERR_NOT_FOUND a missing tensor;
 * EPX_ERR_UNSUPPORTED a dtype.
 */
epx_status_t epx_checkpoint_map(epx_checkpoint_t *ck, const epx_want_t *wants, size_t n_wants, epx_load_progress_t progress);
/* Bytes of address space mapped from the files, whole pages. */
uint64_t epx_checkpoint_mapped_bytes(const epx_checkpoint_t *ck);
/* Unmaps: views become invalid. NULL allowed. */
void epx_checkpoint_close(epx_checkpoint_t *ck);

#endif
