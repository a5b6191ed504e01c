/* Public entry of the ops: picks a backend from ops.def and forwards. Holds no arithmetic. */
#include "engine/ops/ops.h"

#include "engine/ops/ops_spi.h"

#define EPX_OPS(name)                                                                   \
    epx_status_t epx_ops_##name##_create(const epx_ops_config_t *cfg, epx_ops_t **out); \
    const char *epx_ops_##name##_isa_available(void);
#include "engine/ops/ops.def"
#undef EPX_OPS

#define EPX_OPS(name) {#name, epx_ops_##name##_create, epx_ops_##name##_isa_available},
static const struct {
    const char *name;
    epx_ops_create_fn create;
    const char *(*isa_available)(void);
} g_backends[] = {
#include "engine/ops/ops.def"
};
#undef EPX_OPS

enum { N_BACKENDS = sizeof g_backends / sizeof g_backends[0] };

epx_status_t epx_ops_create(const epx_ops_config_t *cfg, epx_ops_t **out_ops) {
    if (cfg == NULL || out_ops == NULL) return epx_fail(EPX_ERR_ARG, "epx_ops_create: cfg or out_ops is NULL");
    if (cfg->size != sizeof *cfg) return epx_fail(EPX_ERR_ARG, "epx_ops_config_t.size is %u; legal: %zu", cfg->size, sizeof *cfg);
    if (cfg->n_threads < 1 || cfg->n_threads > EPX_OPS_MAX_THREADS)
        return epx_fail(EPX_ERR_ARG, "epx_ops_config_t.n_threads is %d; legal: 1 to %d", cfg->n_threads, EPX_OPS_MAX_THREADS);
    epx_status_t st = EPX_ERR_UNSUPPORTED;
    for (int i = 0; i < N_BACKENDS; i++) {
        st = g_backends[i].create(cfg, out_ops);
        if (st != EPX_ERR_UNSUPPORTED) break;
    }
    return st;
}

void epx_ops_destroy(epx_ops_t *ops) {
    if (ops != NULL) ops->v->destroy(ops);
}

const char *epx_ops_isa(const epx_ops_t *ops) { return ops->v->isa(ops); }
int epx_ops_n_threads(const epx_ops_t *ops) { return ops->v->n_threads(ops); }
const char *epx_ops_isa_available(void) { return g_backends[0].isa_available(); }

epx_status_t epx_ops_reserve(epx_ops_t *ops, int64_t max_rows, int64_t max_k, int n_heads, int64_t max_ffn) {
    if (max_rows < 1 || max_k < 1 || n_heads < 0 || max_ffn < 0)
        return epx_fail(EPX_ERR_ARG, "epx_ops_reserve: max_rows %lld, max_k %lld, n_heads %d, max_ffn %lld; legal: >= 1, 1, 0, 0",
                        (long long)max_rows, (long long)max_k, n_heads, (long long)max_ffn);
    return ops->v->reserve(ops, max_rows, max_k, n_heads, max_ffn);
}

void epx_ops_embed(epx_ops_t *ops, const epx_weight_t *table, const int32_t *ids, int64_t n_rows, float *out) {
    ops->v->embed(ops, table, ids, n_rows, out);
}

void epx_ops_rmsnorm(epx_ops_t *ops, const float *x, const epx_weight_t *w, float eps, int64_t n_rows, int64_t width,
                     float *out) {
    ops->v->rmsnorm(ops, x, w, eps, n_rows, width, out);
}

void epx_ops_linear(epx_ops_t *ops, const float *x, int64_t ldx, const epx_weight_t *w, const epx_weight_t *bias, int64_t n_rows,
                    float *out, int64_t ldo) {
    ops->v->linear(ops, x, ldx, w, bias, n_rows, out, ldo);
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
                       int64_t n_rows, const epx_kv_layer_t *kv, float *out, int64_t ldo) {
    ops->v->attention(ops, attn, q, ldq, rows, n_rows, kv, out, ldo);
}

void epx_ops_router(epx_ops_t *ops, const epx_router_t *router, const float *logits, int64_t n_rows, int32_t *out_ids,
                    float *out_weights) {
    ops->v->router(ops, router, logits, n_rows, out_ids, out_weights);
}

void epx_ops_experts(epx_ops_t *ops, const epx_lists_t *lists, const epx_expert_weights_t *experts, int64_t hidden, int64_t ffn,
                     float *out) {
    ops->v->experts(ops, lists, experts, hidden, ffn, out);
}

/* One expert that owns every row, in the order of x. Entries would be the identity, so the backend takes a NULL entries
 * pointer as row i = (row_base[0], i). */
void epx_ops_ffn(epx_ops_t *ops, const float *x, const epx_expert_weights_t *w, int64_t n_rows, int64_t hidden, int64_t ffn,
                 float *out) {
    const int32_t off[2] = {0, (int32_t)n_rows};
    const void *base[1] = {x};
    const epx_lists_t one = {.n_local_experts = 1,
                             .n_rows = (int32_t)n_rows,
                             .expert_off = off,
                             .entries = NULL,
                             .row_base = base,
                             .row_stride_bytes = (uint64_t)hidden * sizeof(float)};
    ops->v->experts(ops, &one, w, hidden, ffn, out);
}
