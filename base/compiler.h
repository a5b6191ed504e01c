/* The only place for compiler extensions. */
#ifndef EPX_BASE_COMPILER_H
#define EPX_BASE_COMPILER_H

#if defined(__GNUC__)
#define EPX_PRINTF(fmt_idx, arg_idx) __attribute__((format(printf, fmt_idx, arg_idx)))
#define EPX_LIKELY(x) __builtin_expect(!!(x), 1)
#define EPX_UNLIKELY(x) __builtin_expect(!!(x), 0)
#define EPX_PREFETCH_R(p) __builtin_prefetch((p), 0, 3)
#define EPX_PREFETCH_R2(p) \
    __builtin_prefetch((p), 0, 2) /* into the second level only: does not take up the first's few buffers */
#define EPX_UNUSED __attribute__((unused))
#define EPX_ALIGNED(n) __attribute__((aligned(n)))
#define EPX_NOINLINE __attribute__((noinline))
#else
#error "epx needs gcc or clang"
#endif

/* Take a line for writing. Without -mprfchw compilers make a read prefetch of __builtin_prefetch(p, 1), which then costs a second
 * trip to the other core. Every x86-64 processor takes the instruction; old ones do nothing. */
#if defined(__x86_64__)
#define EPX_PREFETCH_W(p) __asm__ volatile("prefetchw %0" : : "m"(*(const char *)(p)))
#else
#define EPX_PREFETCH_W(p) __builtin_prefetch((p), 1, 3)
#endif

#if defined(__x86_64__) || defined(__i386__)
#define EPX_CPU_RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define EPX_CPU_RELAX() __asm__ volatile("yield" ::: "memory")
#else
#define EPX_CPU_RELAX() ((void)0)
#endif

#endif
