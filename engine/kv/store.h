/* The keys and values themselves: per layer K and V pages of the ops' row type in one block of the ops' memory.
 * One thread. */
#ifndef EPX_ENGINE_KV_STORE_H
#define EPX_ENGINE_KV_STORE_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "engine/ops/ops.h"

typedef struct epx_kv_store epx_kv_store_t;

typedef struct {
    int n_layers, n_kv_heads, head_dim;
    int32_t n_pages, page_size;
    int32_t elem_bytes; /* epx_ops_row_elem_bytes() */
    int32_t v_in_k;     /* 0: K and V pages; else only K pages, whose heads begin with V of this many floats (latent attention) */
} epx_kv_shape_t;

/* Bytes that one token takes over all layers. */
size_t epx_kv_token_bytes(const epx_kv_shape_t *s);
/* EPX_ERR_NOMEM names the bytes. ops is borrowed until destroy. */
epx_status_t epx_kv_store_create(epx_ops_t *ops, const epx_kv_shape_t *shape, epx_kv_store_t **out_s);
void epx_kv_store_destroy(epx_kv_store_t *s);
/* [n_layers], borrowed until destroy. */
const epx_kv_layer_t *epx_kv_store_layers(const epx_kv_store_t *s);
size_t epx_kv_store_bytes(const epx_kv_store_t *s);

#endif
