/* The architectures of archs.def. The only file that names them. */
#include <string.h>

#include "engine/model/common/arch.h"

#define EPX_ARCH(name) extern const epx_arch_t epx_arch_##name;
#include "engine/model/archs.def"
#undef EPX_ARCH

static const epx_arch_t *const archs[] = {
#define EPX_ARCH(name) &epx_arch_##name,
#include "engine/model/archs.def"
#undef EPX_ARCH
};

enum { N_ARCHS = sizeof archs / sizeof archs[0] };

const epx_arch_t *epx_arch_at(int i) { return i >= 0 && i < N_ARCHS ? archs[i] : NULL; }

const epx_arch_t *epx_arch_find(const char *architecture) {
    for (int i = 0; i < N_ARCHS; i++)
        if (strcmp(archs[i]->architecture, architecture) == 0) return archs[i];
    return NULL;
}
