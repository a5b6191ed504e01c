/* Which kernel tables this CPU can run. The only place that asks the CPU. */
#include <string.h>

#include "engine/ops/cpu/cpu.h"
#include "engine/ops/cpu/kernels.h"

#ifdef EPX_OPS_X86
#include <cpuid.h>
/* __builtin_cpu_supports() of older compilers does not know "f16c": leaf 1, ecx bit 29. */
static int has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1u);
}
static int has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }
static int has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
}
static const epx_cpu_kernels_t *avx512(void) { return has_avx512() ? &epx_cpu_kernels_avx512 : NULL; }
static const epx_cpu_kernels_t *avx2(void) { return has_avx2() ? &epx_cpu_kernels_avx2 : NULL; }
#else
static const epx_cpu_kernels_t *avx512(void) { return NULL; }
static const epx_cpu_kernels_t *avx2(void) { return NULL; }
#endif

const epx_cpu_kernels_t *epx_cpu_kernels_find(const char *isa) {
    const epx_cpu_kernels_t *all[3] = {avx512(), avx2(), &epx_cpu_kernels_scalar};
    for (int i = 0; i < 3; i++)
        if (all[i] != NULL && (isa == NULL || strcmp(isa, all[i]->name) == 0)) return all[i];
    return NULL;
}

const char *epx_ops_cpu_isa_available(void) {
    if (avx512() != NULL) return "avx512,avx2,scalar";
    return avx2() != NULL ? "avx2,scalar" : "scalar";
}
