/* Finds and opens libepx_cuda.so. It is never closed: a CUDA runtime does not survive that. */
#include "cuda/module.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/module_path.h"
#include "base/status.h"

enum { PATH_BYTES = 4096 };

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const epx_cuda_api_t *module;
static int n_devices;
static char reason[512];

const epx_cuda_api_t *epx_cuda_open(const char *path, int *out_n_devices, char *why, unsigned why_bytes) {
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    const char *text = "";
    *out_n_devices = 0;
    if (lib == NULL) {
        snprintf(why, why_bytes, "the CUDA module cannot be opened: %s", dlerror());
        return NULL;
    }
    void *symbol = dlsym(lib, EPX_CUDA_ENTRY);
    epx_cuda_entry_t entry;
    memcpy(&entry, &symbol, sizeof entry);
    const epx_cuda_api_t *api = symbol == NULL ? NULL : entry(EPX_CUDA_ABI);
    if (api == NULL || api->abi != EPX_CUDA_ABI || api->size != sizeof *api) {
        snprintf(why, why_bytes, "%.300s is not the CUDA module of this libepx (interface %d)", path, EPX_CUDA_ABI);
        dlclose(lib);
        return NULL;
    }
    if (api->init(out_n_devices, &text) == 0) return api;
    snprintf(why, why_bytes, "%s", text);
    return NULL;
}

static void open_once(void) {
    char path[PATH_BYTES];
    epx_module_path("EPX_CUDA_MODULE", "libepx_cuda.so", path, sizeof path);
    module = epx_cuda_open(path, &n_devices, reason, sizeof reason);
}

const epx_cuda_api_t *epx_cuda(void) {
    pthread_once(&once, open_once);
    return module;
}

const char *epx_cuda_reason(void) {
    (void)epx_cuda();
    return reason;
}

int epx_cuda_n_devices(void) { return epx_cuda() == NULL ? 0 : n_devices; }

epx_status_t epx_cuda_check(int e, const char *what) {
    if (e == 0) return EPX_OK;
    epx_status_t s = e == 2 || e == -2 ? EPX_ERR_NOMEM : EPX_ERR_OS; /* cudaErrorMemoryAllocation, CUDA_ERROR_OUT_OF_MEMORY */
    return epx_fail(s, "%s: %s", what, module == NULL ? "no CUDA module" : module->error_text(e));
}
