/* The op backend "cuda": opens libepx_ops_cuda.so when it is first asked for, and never closes it, which a CUDA runtime does not
 * survive. The kernels and the object are in the module (backend.cu). */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/module_path.h"
#include "engine/ops/cuda/api.h"

epx_status_t epx_ops_cuda_create(const epx_ops_config_t *cfg, epx_ops_t **out_ops);
epx_status_t epx_ops_cuda_available(void);

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const epx_ops_cuda_api_t *module;
static char reason[512];

static void open_once(void) {
    char path[4096];
    epx_module_path("EPX_OPS_CUDA_MODULE", "libepx_ops_cuda.so", path, sizeof path);
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (lib == NULL) {
        snprintf(reason, sizeof reason, "device cuda: the module cannot be opened: %s", dlerror());
        return;
    }
    void *symbol = dlsym(lib, EPX_OPS_CUDA_ENTRY);
    epx_ops_cuda_entry_t entry;
    memcpy(&entry, &symbol, sizeof entry);
    const epx_ops_cuda_api_t *api = symbol == NULL ? NULL : entry(EPX_OPS_CUDA_ABI, sizeof(epx_ops_vtbl_t));
    if (api != NULL && api->abi == EPX_OPS_CUDA_ABI && api->size == sizeof *api) module = api;
    else
        snprintf(reason, sizeof reason, "device cuda: %.300s is not the module of this build (interface %d)", path,
                 EPX_OPS_CUDA_ABI);
}

static epx_status_t fail(epx_status_t s, const char *text) { return epx_fail(s, "%s", text); }

static epx_status_t open_module(void) {
    pthread_once(&once, open_once);
    return module != NULL ? EPX_OK : epx_fail(EPX_ERR_UNSUPPORTED, "%s", reason);
}

epx_status_t epx_ops_cuda_available(void) {
    EPX_TRY(open_module());
    return module->available(fail);
}

epx_status_t epx_ops_cuda_create(const epx_ops_config_t *cfg, epx_ops_t **out_ops) {
    EPX_TRY(open_module());
    EPX_TRY(module->available(fail));
    return module->create(cfg, fail, out_ops);
}
