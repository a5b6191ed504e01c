/* What libepx_ops_cuda.so gives to the engine: one table of functions with C linkage. The engine itself links no CUDA.
 * Seen by C and by nvcc. */
#ifndef EPX_ENGINE_OPS_CUDA_API_H
#define EPX_ENGINE_OPS_CUDA_API_H

#include "engine/ops/ops_spi.h"

enum { EPX_OPS_CUDA_ABI = 1 };

/* Stores the caller's message; as epx_fail(s, "%s", text). */
typedef epx_status_t (*epx_ops_cuda_fail_fn)(epx_status_t s, const char *text);

typedef struct {
    uint32_t abi, size;
    /* EPX_OK when at least one GPU that these kernels were built for is there; else EPX_ERR_UNSUPPORTED through fail. */
    epx_status_t (*available)(epx_ops_cuda_fail_fn fail);
    /* cfg is checked but for device_idx. `fail` is kept for the object's calls. */
    epx_status_t (*create)(const epx_ops_config_t *cfg, epx_ops_cuda_fail_fn fail, epx_ops_t **out_ops);
} epx_ops_cuda_api_t;

/* The one symbol that the module exports. NULL: it was built for another ABI number. */
#define EPX_OPS_CUDA_ENTRY "epx_ops_cuda_module"
typedef const epx_ops_cuda_api_t *(*epx_ops_cuda_entry_t)(uint32_t abi, uint32_t vtbl_bytes);

#endif
