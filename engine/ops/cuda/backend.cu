/* The CUDA ops' object: create, limits, scratch, table. The only file of the folder whose symbol is visible. */
#include <new>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/ops/cuda/cuda_ops.cuh"

namespace epx_cuda_ops {

enum { STAGING_BYTES = 1 << 22, MAX_TOP_K = 64, MAX_GROUPS = 256 };

static void destroy(epx_ops_t *ops) {
    Ops *o = of(ops);
    if (o->stream) (void)cudaStreamSynchronize(o->stream);
    (void)cudaFree(o->mid);
    (void)cudaFree(o->partial);
    (void)cudaFree(o->staged);
    (void)cudaFreeHost(o->pinned);
    if (o->stream) (void)cudaStreamDestroy(o->stream);
    free(o->waves);
    delete o;
}

static const char *isa(const epx_ops_t *ops) { return of(ops)->isa; }
static int n_threads(const epx_ops_t *) { return 1; }

static epx_status_t refuse(const Ops *o, const char *field, long long value, const char *legal) {
    char text[256];
    snprintf(text, sizeof text, "device cuda: %s is %lld; legal: %s", field, value, legal);
    return o->fail(EPX_ERR_UNSUPPORTED, text);
}

static epx_status_t accept(epx_ops_t *ops, const epx_ops_needs_t *n) {
    Ops *o = of(ops);
    const struct {
        const char *field;
        int64_t value;
        int bad;
        const char *legal;
    } rules[] = {
        {"latent attention", n->latent_attention, n->latent_attention, "0 (not built)"},
        {"sliding window", n->sliding_window, n->sliding_window, "0 (not built)"},
        {"fp8 weights", n->fp8, n->fp8, "0 (not built)"},
        {"tp / dp, ranks that share the heads of attention,", n->attn_tp, n->attn_tp > 1, "1"},
        {"activation", n->act, n->act != EPX_ACT_SILU_MUL, "0 (silu)"},
        {"head_dim", n->head_dim, n->head_dim != 32 && n->head_dim != 64 && n->head_dim != 128, "32, 64, 128"},
        {"num_attention_heads / num_key_value_heads", n->n_heads / n->n_kv_heads, n->n_heads % n->n_kv_heads != 0, "whole numbers"},
        {"hidden_size", n->hidden, n->hidden % 8 != 0, "multiples of 8"},
        {"moe_intermediate_size", n->moe_ffn, n->moe_ffn % 8 != 0, "multiples of 8"},
        {"intermediate_size", n->dense_ffn, n->dense_ffn % 8 != 0, "multiples of 8"},
        {"the shared expert's size", n->shared_ffn, n->shared_ffn % 8 != 0, "multiples of 8"},
        {"number of experts", n->n_experts, n->n_experts > MAX_EXPERTS, "up to 1024"},
        {"experts per token", n->top_k, n->top_k > MAX_TOP_K, "up to 64"},
        {"groups of experts", n->n_groups, n->n_groups > MAX_GROUPS, "up to 256"},
    };
    for (const auto &r : rules)
        if (r.bad) return refuse(o, r.field, r.value, r.legal);
    o->tile_rows = attention_tile_rows(n->n_heads, n->n_kv_heads);
    return EPX_OK;
}

static epx_status_t grow(Ops *o, void **p, size_t n_bytes, const char *what) {
    void *grown = nullptr;
    const cudaError_t e = cudaMalloc(&grown, n_bytes ? n_bytes : 1);
    if (e != cudaSuccess) {
        char text[160];
        (void)cudaGetLastError();
        snprintf(text, sizeof text, "device cuda: %s: %zu bytes wanted, %llu free", what, n_bytes,
                 (unsigned long long)free_bytes(&o->base));
        return o->fail(EPX_ERR_NOMEM, text);
    }
    (void)cudaStreamSynchronize(o->stream);
    (void)cudaFree(*p);
    *p = grown;
    return EPX_OK;
}

static epx_status_t reserve(epx_ops_t *ops, int64_t max_rows, int64_t, int n_heads, int64_t max_ffn) {
    Ops *o = of(ops);
    const size_t mid = (size_t)max_rows * (size_t)max_ffn * sizeof(__nv_bfloat16);
    const size_t partial = (size_t)MAX_WAVE_UNITS * (size_t)n_heads * (128 + 2) * sizeof(float);
    const epx_status_t s = grow(o, (void **)&o->mid, mid, "scratch of experts");
    if (s < 0) return s;
    o->mid_rows = max_rows, o->mid_width = max_ffn;
    return grow(o, (void **)&o->partial, partial, "scratch of attention");
}

static const epx_ops_vtbl_t table = {
    destroy,     isa,           n_threads,       accept, reserve,  memory_alloc, memory_free,        memory_upload, memory_download,
    sync,        free_bytes,    random_values,   fill_values, begin, embed,     rmsnorm,            gather,        linears,
    argmax,      add,         add_rows,      add_gated,       qk_norm_rope_store, attention, router, experts,   ffn,
};

static epx_status_t available(epx_ops_cuda_fail_fn fail) {
    int n = 0, have = 0;
    char text[256];
    const cudaError_t e = cudaGetDeviceCount(&n);
    (void)cudaDriverGetVersion(&have);
    if (e == cudaSuccess && n > 0) return EPX_OK;
    if (have == 0) snprintf(text, sizeof text, "device cuda: no NVIDIA driver: libcuda.so.1 is not found (%s)", cudaGetErrorString(e));
    else snprintf(text, sizeof text, "device cuda: no GPU can be used: %s", cudaGetErrorString(e));
    return fail(EPX_ERR_UNSUPPORTED, text);
}

static cudaError_t open_device(Ops *o) {
    cudaDeviceProp p;
    cudaError_t e = cudaSetDevice(o->device);
    if (e == cudaSuccess) e = cudaGetDeviceProperties(&p, o->device);
    if (e != cudaSuccess) return e;
    o->n_sm = p.multiProcessorCount;
    snprintf(o->isa, sizeof o->isa, "sm_%d%d", p.major, p.minor);
    e = gemm_prepare();
    if (e == cudaSuccess) e = attention_prepare();
    if (e == cudaSuccess) e = cudaStreamCreateWithFlags(&o->stream, cudaStreamNonBlocking);
    o->base.stream = o->stream;
    return e;
}

/* EPX_OPS_CUDA_SHARE=1: ranks beyond the last GPU share one, so that several can be tested on one GPU. */
static bool may_share() {
    const char *s = getenv("EPX_OPS_CUDA_SHARE");
    return s != nullptr && strcmp(s, "1") == 0;
}

static epx_status_t create(const epx_ops_config_t *cfg, epx_ops_cuda_fail_fn fail, epx_ops_t **out_ops) {
    int n = 0;
    char text[256];
    (void)cudaGetDeviceCount(&n);
    const int device = may_share() && n > 0 && cfg->device_idx >= 0 ? cfg->device_idx % n : cfg->device_idx;
    if (cfg->device_idx < 0 || device >= n) {
        snprintf(text, sizeof text, "device cuda: device_idx is %d; legal here: 0 to %d", cfg->device_idx, n - 1);
        return fail(EPX_ERR_ARG, text);
    }
    Ops *o = new (std::nothrow) Ops();
    if (o == nullptr) return fail(EPX_ERR_NOMEM, "device cuda: ops object");
    o->base.v = &table;
    o->base.row_type = EPX_W_BF16;
    o->base.device_idx = o->device = device;
    o->fail = fail;
    cudaError_t e = open_device(o);
    if (e == cudaSuccess && grow_staging(o, STAGING_BYTES) < 0) e = cudaErrorMemoryAllocation; /* later steps rarely need more */
    if (e != cudaSuccess) {
        snprintf(text, sizeof text, "device cuda:%d cannot be used: %s", o->device, cudaGetErrorString(e));
        destroy(&o->base);
        return fail(EPX_ERR_UNSUPPORTED, text);
    }
    *out_ops = &o->base;
    return EPX_OK;
}

} // namespace epx_cuda_ops

extern "C" __attribute__((visibility("default"))) const epx_ops_cuda_api_t *epx_ops_cuda_module(uint32_t abi, uint32_t vtbl_bytes) {
    static const epx_ops_cuda_api_t api = {EPX_OPS_CUDA_ABI, sizeof(epx_ops_cuda_api_t), epx_cuda_ops::available, epx_cuda_ops::create};
    return abi == EPX_OPS_CUDA_ABI && vtbl_bytes == sizeof(epx_ops_vtbl_t) ? &api : nullptr;
}
