/* Public entry of the ops: picks a backend from ops.def and forwards. Holds no arithmetic. */
#include "engine/ops/ops.h"

#include <string.h>

#include "engine/ops/ops_spi.h"

#define EPX_OPS(name)                                                                   \
    epx_status_t epx_ops_##name##_create(const epx_ops_config_t *cfg, epx_ops_t **out); \
    epx_status_t epx_ops_##name##_available(void);
#include "engine/ops/ops.def"
#undef EPX_OPS
const char *epx_ops_cpu_isa_available(void);

#define EPX_OPS(name) {#name, epx_ops_##name##_create, epx_ops_##name##_available},
static const struct {
    const char *name;
    epx_ops_create_fn create;
    epx_ops_available_fn available;
} g_backends[] = {
#include "engine/ops/ops.def"
};
#undef EPX_OPS

enum { N_BACKENDS = sizeof g_backends / sizeof g_backends[0] };

/* The place in g_backends of a device, or -1 with the message. */
static int find_device(const char *device) {
    for (int i = 0; i < N_BACKENDS; i++)
        if (strcmp(g_backends[i].name, device) == 0) return i;
    epx_fail(EPX_ERR_ARG, "device is \"%s\"; legal: cpu, cuda", device);
    return -1;
}

epx_status_t epx_ops_available(const char *device) {
    const int i = find_device(device);
    return i < 0 ? EPX_ERR_ARG : g_backends[i].available();
}

epx_status_t epx_ops_create(const epx_ops_config_t *cfg, epx_ops_t **out_ops) {
    if (cfg == NULL || out_ops == NULL) return epx_fail(EPX_ERR_ARG, "epx_ops_create: cfg or out_ops is NULL");
    if (cfg->size != sizeof *cfg) return epx_fail(EPX_ERR_ARG, "epx_ops_config_t.size is %u; legal: %zu", cfg->size, sizeof *cfg);
    if (cfg->n_threads < 1 || cfg->n_threads > EPX_OPS_MAX_THREADS)
        return epx_fail(EPX_ERR_ARG, "epx_ops_config_t.n_threads is %d; legal: 1 to %d", cfg->n_threads, EPX_OPS_MAX_THREADS);
    const int i = find_device(cfg->device != NULL ? cfg->device : "cpu");
    return i < 0 ? EPX_ERR_ARG : g_backends[i].create(cfg, out_ops);
}

void epx_ops_destroy(epx_ops_t *ops) {
    if (ops != NULL) ops->v->destroy(ops);
}

const char *epx_ops_isa(const epx_ops_t *ops) { return ops->v->isa(ops); }
int epx_ops_n_threads(const epx_ops_t *ops) { return ops->v->n_threads(ops); }
const char *epx_ops_isa_available(void) { return epx_ops_cpu_isa_available(); }
int epx_ops_device_idx(const epx_ops_t *ops) { return ops->device_idx; }
void *epx_ops_stream(const epx_ops_t *ops) { return ops->stream; }
epx_wtype_t epx_ops_row_type(const epx_ops_t *ops) { return ops->row_type; }
size_t epx_ops_row_elem_bytes(const epx_ops_t *ops) { return ops->row_type == EPX_W_F32 ? 4 : 2; }
int epx_ops_reads_host(const epx_ops_t *ops) { return ops->device_idx < 0; }
epx_status_t epx_ops_accept(epx_ops_t *ops, const epx_ops_needs_t *needs) { return ops->v->accept(ops, needs); }

epx_status_t epx_ops_alloc(epx_ops_t *ops, size_t n_bytes, void **out) { return ops->v->alloc(ops, n_bytes, out); }
void epx_ops_free(epx_ops_t *ops, void *p, size_t n_bytes) {
    if (p != NULL) ops->v->free(ops, p, n_bytes);
}
epx_status_t epx_ops_upload(epx_ops_t *ops, void *to, const void *from, size_t n_bytes) {
    return ops->v->upload(ops, to, from, n_bytes);
}
epx_status_t epx_ops_download(epx_ops_t *ops, void *to, const void *from, size_t n_bytes) {
    return ops->v->download(ops, to, from, n_bytes);
}
epx_status_t epx_ops_sync(epx_ops_t *ops) { return ops->v->sync(ops); }
uint64_t epx_ops_free_bytes(const epx_ops_t *ops) { return ops->v->free_bytes(ops); }
void epx_ops_random(epx_ops_t *ops, uint64_t seed, float half_width, size_t n, uint16_t *out) {
    ops->v->random(ops, seed, half_width, n, out);
}
void epx_ops_fill(epx_ops_t *ops, uint16_t value, size_t n, uint16_t *out) { ops->v->fill(ops, value, n, out); }
epx_status_t epx_ops_begin(epx_ops_t *ops, const epx_ops_step_t *step) { return ops->v->begin(ops, step); }

epx_status_t epx_ops_roofs(epx_ops_t *ops, epx_ops_roofs_t *out_roofs) {
    if (ops->v->roofs == NULL) return epx_fail(EPX_ERR_UNSUPPORTED, "roofs are measured on the CPU only");
    return ops->v->roofs(ops, out_roofs);
}

epx_status_t epx_ops_reserve(epx_ops_t *ops, int64_t max_rows, int64_t max_k, int n_heads, int64_t max_ffn) {
    if (max_rows < 1 || max_k < 1 || n_heads < 0 || max_ffn < 0)
        return epx_fail(EPX_ERR_ARG, "epx_ops_reserve: max_rows %lld, max_k %lld, n_heads %d, max_ffn %lld; legal: >= 1, 1, 0, 0",
                        (long long)max_rows, (long long)max_k, n_heads, (long long)max_ffn);
    return ops->v->reserve(ops, max_rows, max_k, n_heads, max_ffn);
}

void epx_ops_embed(epx_ops_t *ops, const epx_weight_t *table, const int32_t *ids, int64_t n_rows, float *out) {
    ops->v->embed(ops, table, ids, n_rows, out);
}

void epx_ops_rmsnorm(epx_ops_t *ops, const float *x, const epx_weight_t *w, float eps, int64_t n_rows, int64_t width, void *out) {
    ops->v->rmsnorm(ops, x, w, eps, n_rows, width, out);
}

void epx_ops_gather(epx_ops_t *ops, const float *x, const int32_t *rows, int64_t n_rows, int64_t width, float *out) {
    ops->v->gather(ops, x, rows, n_rows, width, out);
}

void epx_ops_linears(epx_ops_t *ops, const void *x, int64_t ldx, const epx_linear_t *parts, int n, int64_t n_rows, int64_t ldo) {
    EPX_ASSERT(n >= 1 && n <= EPX_OPS_MAX_LINEARS);
    ops->v->linears(ops, x, ldx, parts, n, n_rows, ldo);
}

void epx_ops_linear(epx_ops_t *ops, const void *x, int64_t ldx, const epx_weight_t *w, const epx_weight_t *bias, int64_t n_rows,
                    float *out, int64_t ldo) {
    const epx_linear_t one = {*w, bias != NULL ? *bias : (epx_weight_t){0}, out};
    ops->v->linears(ops, x, ldx, &one, 1, n_rows, ldo);
}

void epx_ops_argmax(epx_ops_t *ops, const float *x, int64_t n_rows, int64_t width, int32_t *out) {
    ops->v->argmax(ops, x, n_rows, width, out);
}

void epx_ops_add_rows(epx_ops_t *ops, float *out, const void *add, int64_t n_rows, int64_t width) {
    ops->v->add_rows(ops, out, add, n_rows, width);
}

void epx_ops_add(epx_ops_t *ops, float *out, const float *add, int64_t n_rows, int64_t width) {
    ops->v->add(ops, out, add, n_rows, width);
}

void epx_ops_add_gated(epx_ops_t *ops, float *out, const float *add, const float *gate, int64_t n_rows, int64_t width) {
    ops->v->add_gated(ops, out, add, gate, n_rows, width);
}

void epx_ops_qk_norm_rope_store(epx_ops_t *ops, float *q, float *k, const float *v, int64_t ldqkv, int n_heads,
                                const epx_weight_t *q_norm, const epx_weight_t *k_norm, float eps, const epx_rope_t *rope,
                                const epx_attn_row_t *rows, int64_t n_rows, const epx_kv_layer_t *kv) {
    ops->v->qk_norm_rope_store(ops, q, k, v, ldqkv, n_heads, q_norm, k_norm, eps, rope, rows, n_rows, kv);
}

void epx_ops_attention(epx_ops_t *ops, const epx_attn_t *attn, const float *q, int64_t ldq, const epx_attn_row_t *rows,
                       int64_t n_rows, const epx_kv_layer_t *kv, void *out, int64_t ldo) {
    ops->v->attention(ops, attn, q, ldq, rows, n_rows, kv, out, ldo);
}

void epx_ops_router(epx_ops_t *ops, const epx_router_t *router, const float *logits, int64_t n_rows, int32_t *out_ids,
                    float *out_weights) {
    ops->v->router(ops, router, logits, n_rows, out_ids, out_weights);
}

void epx_ops_experts(epx_ops_t *ops, const epx_lists_t *lists, const epx_expert_weights_t *experts, int64_t hidden, int64_t ffn,
                     void *out) {
    ops->v->experts(ops, lists, experts, hidden, ffn, out);
}

void epx_ops_ffn(epx_ops_t *ops, const void *x, const epx_expert_weights_t *w, int64_t n_rows, int64_t hidden, int64_t ffn,
                 float *out) {
    ops->v->ffn(ops, x, w, n_rows, hidden, ffn, out);
}
