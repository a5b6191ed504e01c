/* The live requests of a cluster: which rank has each, how far it is. A hash table; not thread-safe. */
#ifndef EPX_SERVER_FRONT_LIVE_H
#define EPX_SERVER_FRONT_LIVE_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct {
    uint64_t id; /* 0: an empty slot */
    int32_t rank;
    int32_t n_prompt, n_generated;
} epx_live_t;

typedef struct {
    epx_live_t *slots; /* owned, cap of them; cap is a power of two or 0 */
    size_t n, cap;
} epx_live_table_t;

/* Add a request; its id is not 0 and not in the table. */
epx_status_t epx_live_add(epx_live_table_t *t, const epx_live_t *entry);
/* Borrowed until the next add or remove; NULL when absent. */
epx_live_t *epx_live_find(epx_live_table_t *t, uint64_t id);
void epx_live_remove(epx_live_table_t *t, uint64_t id);
/* Free the table; it is empty and usable afterwards. */
void epx_live_fini(epx_live_table_t *t);

#endif
