/* KV storage. See store.h. */
#include "engine/kv/store.h"

#include <stdlib.h>

#include "base/checked.h"

struct epx_kv_store {
    epx_kv_layer_t *layers; /* [n_layers] */
    epx_ops_t *ops;
    void *block;
    size_t n_bytes;
};

size_t epx_kv_token_bytes(const epx_kv_shape_t *s) {
    return (size_t)s->n_layers * (s->v_in_k ? 1 : 2) * (size_t)s->n_kv_heads * (size_t)s->head_dim * (size_t)s->elem_bytes;
}

epx_status_t epx_kv_store_create(epx_ops_t *ops, const epx_kv_shape_t *shape, epx_kv_store_t **out_s) {
    size_t n_bytes, n_tokens = (size_t)shape->n_pages * (size_t)shape->page_size;
    if (!epx_mul_size(n_tokens, epx_kv_token_bytes(shape), &n_bytes))
        return epx_fail(EPX_ERR_CAPACITY, "KV store: %zu tokens of %zu bytes overflow", n_tokens, epx_kv_token_bytes(shape));
    epx_kv_store_t *s = calloc(1, sizeof *s);
    if (!s || !(s->layers = calloc((size_t)shape->n_layers, sizeof *s->layers))) {
        free(s);
        return epx_fail(EPX_ERR_NOMEM, "KV store: no memory for tables");
    }
    s->ops = ops;
    s->n_bytes = n_bytes;
    epx_status_t st = epx_ops_alloc(ops, n_bytes, &s->block);
    if (st < 0) {
        free(s->layers);
        free(s);
        return epx_fail_context(st, "KV store for %zu tokens", n_tokens);
    }
    /* bytes of K, or of V, of one layer */
    size_t half = n_tokens * (size_t)shape->n_kv_heads * (size_t)shape->head_dim * (size_t)shape->elem_bytes;
    for (int l = 0; l < shape->n_layers; l++) {
        char *k = (char *)s->block + (size_t)l * (shape->v_in_k ? 1 : 2) * half;
        s->layers[l] = (epx_kv_layer_t){.k_pages = k,
                                        .v_pages = shape->v_in_k ? k : k + half,
                                        .page_size = shape->page_size,
                                        .n_kv_heads = shape->n_kv_heads,
                                        .head_dim = shape->head_dim,
                                        .v_dim = shape->v_in_k};
    }
    *out_s = s;
    return EPX_OK;
}

void epx_kv_store_destroy(epx_kv_store_t *s) {
    if (!s) return;
    epx_ops_free(s->ops, s->block, s->n_bytes);
    free(s->layers);
    free(s);
}

const epx_kv_layer_t *epx_kv_store_layers(const epx_kv_store_t *s) { return s->layers; }
size_t epx_kv_store_bytes(const epx_kv_store_t *s) { return s->n_bytes; }
