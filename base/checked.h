/* Size arithmetic that says when it overflows. All return 1 on success, 0 on overflow (out untouched). */
#ifndef EPX_BASE_CHECKED_H
#define EPX_BASE_CHECKED_H

#include <stddef.h>
#include <stdint.h>

static inline int epx_mul_size(size_t a, size_t b, size_t *out) {
    size_t r;
    if (__builtin_mul_overflow(a, b, &r)) return 0;
    *out = r;
    return 1;
}
static inline int epx_add_size(size_t a, size_t b, size_t *out) {
    size_t r;
    if (__builtin_add_overflow(a, b, &r)) return 0;
    *out = r;
    return 1;
}
/* align: a power of two. */
static inline int epx_round_up_size(size_t a, size_t align, size_t *out) {
    size_t r;
    if (!epx_add_size(a, align - 1, &r)) return 0;
    *out = r & ~(align - 1);
    return 1;
}

#endif
