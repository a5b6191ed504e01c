/* Accounting of KV pages: a stack of free pages and a bit per page. See pool.h. */
#include "engine/kv/pool.h"

#include <stdlib.h>

struct epx_kv_pool {
    int32_t n_pages, page_size, n_free;
    int32_t *free_pages; /* [n_free] used as a stack */
    uint8_t *taken;      /* [n_pages] */
};

epx_status_t epx_kv_pool_create(int32_t n_pages, int32_t page_size, epx_kv_pool_t **out_p) {
    if (n_pages < 1 || page_size < 1)
        return epx_fail(EPX_ERR_ARG, "KV pool: %d pages of %d tokens, both must be at least 1", n_pages, page_size);
    epx_kv_pool_t *p = calloc(1, sizeof *p);
    if (!p) return epx_fail(EPX_ERR_NOMEM, "KV pool: no memory");
    *p = (epx_kv_pool_t){.n_pages = n_pages, .page_size = page_size, .n_free = n_pages};
    p->free_pages = malloc((size_t)n_pages * sizeof *p->free_pages);
    p->taken = calloc((size_t)n_pages, 1);
    if (!p->free_pages || !p->taken) {
        epx_kv_pool_destroy(p);
        return epx_fail(EPX_ERR_NOMEM, "KV pool: no memory for a table of %d pages", n_pages);
    }
    for (int32_t i = 0; i < n_pages; i++) p->free_pages[i] = n_pages - 1 - i; /* low pages first */
    *out_p = p;
    return EPX_OK;
}

void epx_kv_pool_destroy(epx_kv_pool_t *p) {
    if (!p) return;
    free(p->free_pages);
    free(p->taken);
    free(p);
}

int32_t epx_kv_pool_page_size(const epx_kv_pool_t *p) { return p->page_size; }
int32_t epx_kv_pool_n_pages(const epx_kv_pool_t *p) { return p->n_pages; }
int32_t epx_kv_pool_n_free(const epx_kv_pool_t *p) { return p->n_free; }

int32_t epx_kv_pool_pages_for(const epx_kv_pool_t *p, int64_t n_tokens) {
    return (int32_t)((n_tokens + p->page_size - 1) / p->page_size);
}

int epx_kv_pool_take(epx_kv_pool_t *p, int32_t n, int32_t *out_pages) {
    if (n > p->n_free) return 0;
    for (int32_t i = 0; i < n; i++) {
        out_pages[i] = p->free_pages[--p->n_free];
        p->taken[out_pages[i]] = 1;
    }
    return 1;
}

void epx_kv_pool_give(epx_kv_pool_t *p, const int32_t *pages, int32_t n) {
    for (int32_t i = n - 1; i >= 0; i--) { /* last taken first out again */
        EPX_ASSERT(pages[i] >= 0 && pages[i] < p->n_pages && p->taken[pages[i]]);
        p->taken[pages[i]] = 0;
        p->free_pages[p->n_free++] = pages[i];
    }
}
