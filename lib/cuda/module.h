/* Opens libepx_cuda.so once, when somebody first asks for a GPU. Not here: what is in it (cuda/api.h). Any thread. */
#ifndef EPX_CUDA_MODULE_H
#define EPX_CUDA_MODULE_H

#include "cuda/api.h"
#include "epx/epx_status.h"

/* The table, or NULL when no GPU can be used; then epx_cuda_reason() says why. Looks at EPX_CUDA_MODULE (a path), beside the
 * program or library, and where the loader looks. */
const epx_cuda_api_t *epx_cuda(void);
/* "" when epx_cuda() is there. Static string. */
const char *epx_cuda_reason(void);
/* Devices counted when the module was opened; 0 without it. */
int epx_cuda_n_devices(void);
/* EPX_OK for 0; else the status of a CUDA error with "what: text". */
epx_status_t epx_cuda_check(int e, const char *what);

/* As epx_cuda(), for a file of that name and without remembering: for tests. Writes why not into reason. */
const epx_cuda_api_t *epx_cuda_open(const char *path, int *out_n_devices, char *reason, unsigned reason_bytes);

#endif
