/* What an op backend provides. Only engine/ops sees this; models use ops.h. The meaning of every function is that of the
 * epx_ops_ function of the same name. */
#ifndef EPX_ENGINE_OPS_OPS_SPI_H
#define EPX_ENGINE_OPS_OPS_SPI_H

#include "engine/ops/ops.h"

typedef struct {
    void (*destroy)(epx_ops_t *ops);
    const char *(*isa)(const epx_ops_t *ops);
    int (*n_threads)(const epx_ops_t *ops);
    epx_status_t (*accept)(epx_ops_t *ops, const epx_ops_needs_t *needs);
    epx_status_t (*reserve)(epx_ops_t *ops, int64_t max_rows, int64_t max_k, int n_heads, int64_t max_ffn);
    epx_status_t (*alloc)(epx_ops_t *ops, size_t n_bytes, void **out);
    void (*free)(epx_ops_t *ops, void *p, size_t n_bytes);
    epx_status_t (*upload)(epx_ops_t *ops, void *to, const void *from, size_t n_bytes);
    epx_status_t (*download)(epx_ops_t *ops, void *to, const void *from, size_t n_bytes);
    epx_status_t (*sync)(epx_ops_t *ops);
    uint64_t (*free_bytes)(const epx_ops_t *ops);
    void (*random)(epx_ops_t *ops, uint64_t seed, float half_width, size_t n, uint16_t *out);
    void (*fill)(epx_ops_t *ops, uint16_t value, size_t n, uint16_t *out);
    epx_status_t (*begin)(epx_ops_t *ops, const epx_ops_step_t *step);
    void (*embed)(epx_ops_t *ops, const epx_weight_t *table, const int32_t *ids, int64_t n_rows, float *out);
    void (*rmsnorm)(epx_ops_t *ops, const float *x, const epx_weight_t *w, float eps, int64_t n_rows, int64_t width, void *out);
    void (*gather)(epx_ops_t *ops, const float *x, const int32_t *rows, int64_t n_rows, int64_t width, float *out);
    void (*linears)(epx_ops_t *ops, const void *x, int64_t ldx, const epx_linear_t *parts, int n, int64_t n_rows, int64_t ldo);
    void (*argmax)(epx_ops_t *ops, const float *x, int64_t n_rows, int64_t width, int32_t *out);
    void (*add)(epx_ops_t *ops, float *out, const float *add, int64_t n_rows, int64_t width);
    void (*add_rows)(epx_ops_t *ops, float *out, const void *add, int64_t n_rows, int64_t width);
    void (*add_gated)(epx_ops_t *ops, float *out, const float *add, const float *gate, int64_t n_rows, int64_t width);
    void (*qk_norm_rope_store)(epx_ops_t *ops, float *q, float *k, const float *v, int64_t ldqkv, int n_heads,
                               const epx_weight_t *q_norm, const epx_weight_t *k_norm, float eps, const epx_rope_t *rope,
                               const epx_attn_row_t *rows, int64_t n_rows, const epx_kv_layer_t *kv);
    void (*attention)(epx_ops_t *ops, const epx_attn_t *attn, const float *q, int64_t ldq, const epx_attn_row_t *rows,
                      int64_t n_rows, const epx_kv_layer_t *kv, void *out, int64_t ldo);
    void (*router)(epx_ops_t *ops, const epx_router_t *router, const float *logits, int64_t n_rows, int32_t *out_ids,
                   float *out_weights);
    void (*experts)(epx_ops_t *ops, const epx_lists_t *lists, const epx_expert_weights_t *experts, int64_t hidden, int64_t ffn,
                    void *out);
    void (*ffn)(epx_ops_t *ops, const void *x, const epx_expert_weights_t *w, int64_t n_rows, int64_t hidden, int64_t ffn,
                float *out);
    epx_status_t (*roofs)(epx_ops_t *ops, epx_ops_roofs_t *out_roofs); /* NULL: not measured on this device */
} epx_ops_vtbl_t;

/* First member of every backend's object. */
struct epx_ops {
    const epx_ops_vtbl_t *v;
    epx_wtype_t row_type;
    int device_idx; /* -1: CPU, whose ops read any host memory */
    void *stream;
};

/* Signature of each backend's epx_ops_<name>_create. `cfg` is checked. */
typedef epx_status_t (*epx_ops_create_fn)(const epx_ops_config_t *cfg, epx_ops_t **out_ops);
/* And of epx_ops_<name>_available: EPX_OK, or EPX_ERR_UNSUPPORTED with the reason. */
typedef epx_status_t (*epx_ops_available_fn)(void);

#endif
