/* Open addressing with linear probing, at most half full; removal shifts entries back, so there are no tombstones. */
#include "server/front/live.h"

#include <stdlib.h>

enum { FIRST_CAP = 64 };

static size_t home(const epx_live_table_t *t, uint64_t id) { return (size_t)((id * 0x9E3779B97F4A7C15u) >> 32) & (t->cap - 1); }

/* Where id is, or the empty slot where it belongs. */
static size_t probe(const epx_live_table_t *t, uint64_t id) {
    size_t i = home(t, id);
    while (t->slots[i].id && t->slots[i].id != id) i = (i + 1) & (t->cap - 1);
    return i;
}

static epx_status_t grow(epx_live_table_t *t) {
    epx_live_table_t bigger = {.n = t->n, .cap = t->cap ? t->cap * 2 : FIRST_CAP};
    bigger.slots = calloc(bigger.cap, sizeof *bigger.slots);
    if (bigger.slots == NULL) return epx_fail(EPX_ERR_NOMEM, "table of %zu live requests", bigger.cap);
    for (size_t i = 0; i < t->cap; i++)
        if (t->slots[i].id) bigger.slots[probe(&bigger, t->slots[i].id)] = t->slots[i];
    free(t->slots);
    *t = bigger;
    return EPX_OK;
}

epx_status_t epx_live_add(epx_live_table_t *t, const epx_live_t *entry) {
    if (2 * (t->n + 1) > t->cap) EPX_TRY(grow(t));
    t->slots[probe(t, entry->id)] = *entry;
    t->n++;
    return EPX_OK;
}

epx_live_t *epx_live_find(epx_live_table_t *t, uint64_t id) {
    size_t i;
    if (t->cap == 0) return NULL;
    i = probe(t, id);
    return t->slots[i].id ? &t->slots[i] : NULL;
}

void epx_live_remove(epx_live_table_t *t, uint64_t id) {
    epx_live_t *at = epx_live_find(t, id);
    size_t hole, i;
    if (at == NULL) return;
    hole = (size_t)(at - t->slots);
    for (i = (hole + 1) & (t->cap - 1); t->slots[i].id; i = (i + 1) & (t->cap - 1)) {
        size_t from_home = (i - home(t, t->slots[i].id)) & (t->cap - 1);
        if (from_home < ((i - hole) & (t->cap - 1))) continue; /* its home lies behind the hole */
        t->slots[hole] = t->slots[i];
        hole = i;
    }
    t->slots[hole].id = 0;
    t->n--;
}

void epx_live_fini(epx_live_table_t *t) {
    free(t->slots);
    *t = (epx_live_table_t){0};
}
