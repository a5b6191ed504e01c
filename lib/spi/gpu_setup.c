/* Choices of the CUDA exchange: see gpu_setup.h. */
#include "spi/gpu_setup.h"

#include <stdio.h>
#include <string.h>

#include "base/status.h"
#include "spi/gpu_layout.h"
#include "spi/layout.h"

/* Packets cost a third more bytes, but no flag and no fence: worth it up to this many tokens, while they take little memory. */
enum { MOST_PACKET_TOKENS = 128, PACKET_BYTES = 1800000, PACKET_SHARE = 16 };
/* Shared memory with which two blocks run on one multiprocessor of 164 KB (compute capability 8.0) or more. */
enum { SHARED_OF_TWO = 78 << 10, MOST_CHANNELS = 4 /* as in onesided_cuda.c */ };

static epx_status_t refuse(const char *field, int value, const char *legal) {
    return epx_fail(EPX_ERR_UNSUPPORTED, "%s is %d, which is not built for GPUs; built: %s", field, value, legal);
}

static epx_status_t refuse_dtype(const char *field, epx_dtype_t value, const char *legal) {
    return epx_fail(EPX_ERR_UNSUPPORTED, "%s is %s, which is not built for GPUs; built: %s", field, epx_dtype_name(value), legal);
}

/* Of combine's output: as epx_result_dtype() of core, for what is built here. */
static epx_dtype_t result_of(const epx_plan_config_t *c) {
    return c->token_dtype == EPX_FP8_E4M3 ? c->combine_dtype : c->token_dtype;
}

static void set_capacities(const epx_plan_config_t *c, int n_ranks, epx_gpu_plan_t *p) {
    memset(p, 0, sizeof *p);
    p->n_ranks = n_ranks;
    p->hidden = c->hidden;
    p->top_k = c->top_k;
    p->n_experts = c->n_experts;
    p->max_tokens = c->max_tokens;
    p->token_dtype = (int32_t)c->token_dtype;
    p->wire_dtype = (int32_t)c->wire_dtype;
    p->combine_dtype = (int32_t)c->combine_dtype;
    p->expert_dtype = (int32_t)c->expert_dtype;
    p->result_dtype = (int32_t)result_of(c);
    p->ue8m0 = c->scale_format == EPX_SCALE_UE8M0;
    p->scale_by_column = c->scale_layout == EPX_SCALE_COL_MAJOR;
    p->contiguous = c->layout == EPX_LAYOUT_CONTIGUOUS;
    p->align = c->align;
    p->exact = c->combine == EPX_COMBINE_EXACT;
    p->timeout_ns = c->timeout_ns;
}

/* Blocks that are sure to run at once, for each channel: one or two on a multiprocessor, as their shared memory allows. */
static int most_blocks(const epx_plan_config_t *c, int n_ranks, int max_blocks) {
    epx_gpu_plan_t p;
    int most = 2 * max_blocks / c->n_channels;
    set_capacities(c, n_ranks, &p);
    p.n_blocks = most > 0 ? most : 1;
    if (epx_gpu_dispatch_shared(&p) > SHARED_OF_TWO) most = max_blocks / c->n_channels;
    return most > 0 ? most : 1;
}

epx_status_t epx_gpu_check_config(const epx_plan_config_t *c, int n_ranks, int max_blocks) {
    char legal[48];
    if (n_ranks > EPX_GPU_MAX_RANKS) return refuse("n_ranks", n_ranks, "1 to 32");
    if (c->hidden % 8 != 0) return refuse("hidden", c->hidden, "multiples of 8");
    if (c->n_experts > EPX_GPU_MAX_EXPERTS) return refuse("n_experts", c->n_experts, "1 to 32767");
    if (c->n_channels > MOST_CHANNELS) return refuse("n_channels", c->n_channels, "1 to 4");
    if (c->debug) return refuse("debug", c->debug, "0, also in EPX_DEBUG");
    if (c->renormalize) return refuse("renormalize", c->renormalize, "0 (no masked ranks)");
    if (c->n_slots != c->n_experts) return refuse("n_slots", c->n_slots, "n_experts or 0 (no copies of experts)");
    if (c->replicate != 1) return refuse("replicate", c->replicate, "1");
    if (c->scale_block != 128) return refuse("scale_block", c->scale_block, "128");
    if (c->combine_dtype == EPX_FP8_E4M3 || (c->combine_dtype != result_of(c) && c->combine_dtype != EPX_F32))
        return refuse_dtype("combine_dtype", c->combine_dtype, "token_dtype or f32");
    if (c->expert_dtype != result_of(c) && c->expert_dtype != EPX_F32)
        return refuse_dtype("expert_dtype", c->expert_dtype, "the dtype of the result or f32");
    int most = most_blocks(c, n_ranks, max_blocks);
    snprintf(legal, sizeof legal, "0 (chosen), 1 to %d", most);
    if (c->n_blocks > most) return refuse("n_blocks", c->n_blocks, legal);
    return EPX_OK;
}

/* Few tokens want few blocks, many want two on each multiprocessor. Measured on H200. */
static int choose_blocks(const epx_plan_config_t *c, int most) {
    int n = c->max_tokens <= 1 ? 64 : c->max_tokens <= 32 ? 132 : 264;
    return n < most ? n : most;
}

static uint64_t packet_bytes(const epx_gpu_layout_t *l) { return l->d_off - l->dp_off; } /* D and C packets lie between */

static int fits(const epx_gpu_layout_t *l) {
    uint64_t share = l->total_bytes / PACKET_SHARE;
    return packet_bytes(l) <= (share > PACKET_BYTES ? share : PACKET_BYTES);
}

void epx_gpu_setup(const epx_plan_config_t *c, int rank, int n_ranks, int n_local, int max_blocks, int packets,
                   epx_gpu_plan_t *out) {
    epx_gpu_plan_t p;
    set_capacities(c, n_ranks, &p);
    p.rank = rank;
    p.n_local = n_local;
    p.n_blocks = c->n_blocks ? c->n_blocks : choose_blocks(c, most_blocks(c, n_ranks, max_blocks));
    p.packet_tokens = !packets ? 0 : c->max_tokens < MOST_PACKET_TOKENS ? c->max_tokens : MOST_PACKET_TOKENS;
    epx_gpu_layout(&p, c->scale_block);
    while (p.packet_tokens > 0 && !fits(&p.l)) {
        p.packet_tokens--;
        epx_gpu_layout(&p, c->scale_block);
    }
    *out = p;
}
