/* Plain views that kernels read: no functions, no ownership, no C11-only types (nvcc compiles this as C++). */
#ifndef EPX_DEVICE_H
#define EPX_DEVICE_H

#include <stdint.h>

/* One row of an expert's list: the token `token` of group rank `src`. Lists are ordered by (expert, src, token). */
typedef struct {
    uint32_t src;   /* group rank that owns the token */
    uint32_t token; /* its index in that rank's batch */
} epx_list_entry_t;

/* What EPX_LAYOUT_LISTS gives after dispatch_recv. All pointers are borrowed from the plan and stay valid and unchanged
 * until the combine_send of the same channel returns.
 * Row of entry i: (const char *)row_base[entries[i].src] + entries[i].token * row_stride_bytes, [H] of wire dtype.
 * Its scales, fp8 wire only: scale_base[src] + token * scale_stride, words of epx_scale_format_t. */
typedef struct {
    int32_t n_local_experts;
    int32_t n_rows;                  /* expert_off[n_local_experts]; -1 on devices, where all pointers are device memory */
    const int32_t *expert_off;       /* [n_local_experts + 1], expert e owns entries[expert_off[e] .. expert_off[e + 1]) */
    const epx_list_entry_t *entries; /* [n_rows] */
    const void *const *row_base;     /* [W] */
    const float *const *scale_base;  /* [W]; NULL unless the wire dtype is fp8 */
    uint64_t row_stride_bytes;
    uint64_t scale_stride; /* in floats */
} epx_lists_t;

#endif
