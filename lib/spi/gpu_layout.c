/* Slab offsets and shared memory of the CUDA exchange. Pure. */
#include "spi/gpu_layout.h"

static uint64_t up(uint64_t v, uint64_t a) { return (v + a - 1) / a * a; }
static uint64_t take(uint64_t *at, uint64_t bytes) {
    uint64_t off = *at;
    *at = up(off + bytes, 256);
    return off;
}
static uint32_t dtype_bytes(int d) { return d == EPX_F32 ? 4 : d == EPX_FP8_E4M3 ? 1 : 2; }

static uint32_t words_of(uint32_t n_scales, int ue8m0) { return ue8m0 ? (n_scales + 3) / 4 : n_scales; }

/* Packets of a row: each segment of `seg` channels (and its scales) is padded to whole packets by itself. */
static uint32_t packets(int hidden, int seg, uint32_t bytes, int scale_block, int ue8m0) {
    uint32_t n = 0;
    for (int c = 0; c < hidden; c += seg) {
        uint32_t ch = (uint32_t)(hidden - c < seg ? hidden - c : seg),
                 scales = scale_block ? (ch + (uint32_t)scale_block - 1) / (uint32_t)scale_block : 0;
        n += (ch * bytes + words_of(scales, ue8m0) * 4 + 11) / 12;
    }
    return n;
}

void epx_gpu_layout(epx_gpu_plan_t *p, int scale_block) {
    epx_gpu_layout_t *l = &p->l;
    uint64_t W = (uint64_t)p->n_ranks, T = (uint64_t)p->max_tokens, K = (uint64_t)p->top_k, TL = (uint64_t)p->packet_tokens;
    uint64_t planes = p->exact ? K : W, at = EPX_GPU_HEAD_BYTES;
    int fp8 = p->wire_dtype == EPX_FP8_E4M3;
    l->n_scales = fp8 ? (uint32_t)((p->hidden + scale_block - 1) / scale_block) : 0;
    l->scale_words = words_of(l->n_scales, p->ue8m0);
    l->d_scale_off = fp8 ? (uint32_t)up((uint64_t)p->hidden, 16) : 0;
    l->d_row_bytes =
        (uint32_t)up(fp8 ? l->d_scale_off + 4ull * l->scale_words : (uint64_t)p->hidden * dtype_bytes(p->wire_dtype), 16);
    l->c_row_bytes = (uint32_t)up((uint64_t)p->hidden * dtype_bytes(p->combine_dtype), 16);
    l->d_packets = packets(p->hidden, EPX_GPU_SEG_D, fp8 ? 1 : dtype_bytes(p->wire_dtype), fp8 ? scale_block : 0, p->ue8m0);
    l->c_packets = packets(p->hidden, EPX_GPU_SEG_C, dtype_bytes(p->combine_dtype), 0, 0);
    l->count_off = take(&at, 2 * W * EPX_GPU_WORD_BYTES);
    l->start_off = take(&at, W * EPX_GPU_WORD_BYTES);
    l->flag_d_off = take(&at, W * (uint64_t)p->n_blocks * 8);
    l->flag_c_off = take(&at, W * (uint64_t)p->n_blocks * 8);
    l->id_words = (uint32_t)((K + 5) / 6);
    l->weight_words = (uint32_t)((K + 2) / 3);
    l->ids_off = take(&at, 2 * W * T * l->id_words * EPX_GPU_WORD_BYTES);
    l->weights_off = take(&at, 2 * W * T * l->weight_words * EPX_GPU_WORD_BYTES);
    l->dp_off = take(&at, 2 * W * TL * l->d_packets * EPX_GPU_WORD_BYTES);
    l->cp_off = take(&at, planes * TL * l->c_packets * EPX_GPU_WORD_BYTES);
    l->d_off = take(&at, 2 * W * T * l->d_row_bytes);
    l->c_off = take(&at, planes * T * l->c_row_bytes);
    l->total_bytes = at;
    p->row_cap = p->n_ranks * p->max_tokens;
}

int epx_gpu_run_pairs(const epx_gpu_plan_t *p) {
    int few = (p->hidden + EPX_GPU_BULK_D - 1) / EPX_GPU_BULK_D, many = (p->hidden + EPX_GPU_SEG_D - 1) / EPX_GPU_SEG_D;
    int units = p->n_ranks * p->max_tokens * many;
    return (units + p->n_blocks - 1) / p->n_blocks / few + 2;
}

/* The tables in the order in which dispatch_kernel() cuts them. */
uint64_t epx_gpu_dispatch_shared(const epx_gpu_plan_t *p) {
    uint64_t K = (uint64_t)p->top_k, W = (uint64_t)p->n_ranks, E = (uint64_t)p->n_experts, run = (uint64_t)epx_gpu_run_pairs(p);
    uint64_t image = EPX_GPU_SEG_D * (uint64_t)dtype_bytes(p->wire_dtype) + EPX_GPU_SEG_D / 128 * 4 + 16;
    return EPX_GPU_GROUPS * up(image, 16) + up(E * 4, 16) + 2 * up((W + 1) * 4, 16) + up(W * 4, 16) + up(E * 4, 16) +
           up((E + 1) * 4, 16) + up(run * K * 4, 16) + up(run * (K + 1) * 4, 16) + up(W * (uint64_t)p->max_tokens * K * 2, 16);
}
