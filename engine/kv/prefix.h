/* Which prefixes of earlier sequences still have their KV in the pool: a radix tree over token ids, in whole pages. Pure
 * accounting, as pool.h; the same calls give the same tree (time is a running number of calls). One thread.
 *
 * A node is a run of pages. Locked nodes (those of running sequences, and all above them) stay; unlocked leaves are evicted,
 * least recently used first, when pages are wanted. */
#ifndef EPX_ENGINE_KV_PREFIX_H
#define EPX_ENGINE_KV_PREFIX_H

#include <stdint.h>

#include "base/status.h"
#include "engine/kv/pool.h"

typedef struct epx_prefix epx_prefix_t;
typedef struct epx_prefix_node epx_prefix_node_t;

/* pool is borrowed until destroy. */
epx_status_t epx_prefix_create(epx_kv_pool_t *pool, epx_prefix_t **out_t);
/* Gives every page of the tree back. NULL allowed. */
void epx_prefix_destroy(epx_prefix_t *t);
/* Tokens at the beginning of tokens[n_tokens) that are cached: a multiple of the page size. Changes nothing. */
int32_t epx_prefix_length(const epx_prefix_t *t, const int32_t *tokens, int32_t n_tokens);
/* The same prefix, locked: its pages go to out_pages and stay until *out_node is unlocked. *out_node is NULL when nothing
 * matches. Returns the number of tokens; a node may be split, so EPX_ERR_NOMEM is possible: then nothing is locked. */
epx_status_t epx_prefix_lock(epx_prefix_t *t, const int32_t *tokens, int32_t n_tokens, int32_t *out_pages, int32_t *out_n_tokens,
                             epx_prefix_node_t **out_node);
/* NULL allowed. */
void epx_prefix_unlock(epx_prefix_t *t, epx_prefix_node_t *node);
/* The KV of tokens[n_tokens) (whole pages only, a rest is not looked at) lies in pages[]; keep it. A page that the tree has
 * already is exchanged in pages[] for the tree's, and the sequence's own goes back to the pool. The pages then belong to the
 * tree. *inout_node, the sequence's lock, moves to the end of the inserted prefix. EPX_ERR_NOMEM: nothing has changed.
 * *out_n_pages: how many leading pages are the tree's now. */
epx_status_t epx_prefix_insert(epx_prefix_t *t, const int32_t *tokens, int32_t n_tokens, int32_t *pages,
                               epx_prefix_node_t **inout_node, int32_t *out_n_pages);
/* Pages that eviction could give back now. */
int32_t epx_prefix_n_evictable(const epx_prefix_t *t);
/* Pages in the tree. */
int32_t epx_prefix_n_pages(const epx_prefix_t *t);
/* Give back at least n pages, or all that can be. */
void epx_prefix_evict(epx_prefix_t *t, int32_t n);

#endif
