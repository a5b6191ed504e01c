/* Accounting of KV pages: which are free. Pure: holds no keys or values (store.h does). One thread. */
#ifndef EPX_ENGINE_KV_POOL_H
#define EPX_ENGINE_KV_POOL_H

#include <stdint.h>

#include "base/status.h"

typedef struct epx_kv_pool epx_kv_pool_t;

/* n_pages >= 1, page_size >= 1 (tokens). */
epx_status_t epx_kv_pool_create(int32_t n_pages, int32_t page_size, epx_kv_pool_t **out_p);
void epx_kv_pool_destroy(epx_kv_pool_t *p);
int32_t epx_kv_pool_page_size(const epx_kv_pool_t *p);
int32_t epx_kv_pool_n_pages(const epx_kv_pool_t *p);
int32_t epx_kv_pool_n_free(const epx_kv_pool_t *p);
/* Pages that n_tokens need. */
int32_t epx_kv_pool_pages_for(const epx_kv_pool_t *p, int64_t n_tokens);
/* Take n pages into out_pages[n]; 0 and nothing taken when fewer are free, else 1. */
int epx_kv_pool_take(epx_kv_pool_t *p, int32_t n, int32_t *out_pages);
/* Give back pages that were taken; giving a free page back is a broken invariant and aborts. */
void epx_kv_pool_give(epx_kv_pool_t *p, const int32_t *pages, int32_t n);

#endif
