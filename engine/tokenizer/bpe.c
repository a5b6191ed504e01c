/* Byte-pair merging of one piece: lowest rank first, leftmost first among equals.
 * Short pieces scan their ranks; long ones use a heap over a linked list, so that 100 KB of one letter is n log n.
 * Both orders are the same: a heap entry is stale exactly when the pair at its place no longer gives its id. */
#include "base/checked.h"
#include "engine/tokenizer/tokenizer_internal.h"

#include <stdlib.h>
#include <string.h>

#define NO_RANK UINT32_MAX
#define SHORT_PIECE 40
#define NO_NODE UINT32_MAX

typedef struct {
    uint32_t id, prev, next;
} node_t;

typedef struct {
    uint64_t key; /* rank << 32 | position */
    uint32_t id;
} heap_item_t;

struct epx_bpe_scratch {
    node_t *node;
    heap_item_t *heap;
    size_t cap, n_heap;
    char *spelled; /* a piece in the byte-level alphabet */
    size_t spelled_cap;
};

epx_status_t epx_ids_push(epx_ids_t *ids, int32_t id) {
    if (ids->n == ids->cap) {
        size_t cap = ids->cap ? ids->cap * 2 : 64;
        int32_t *p = realloc(ids->v, cap * sizeof *p);
        if (p == NULL) return epx_fail(EPX_ERR_NOMEM, "%zu token ids", cap);
        ids->v = p;
        ids->cap = cap;
    }
    ids->v[ids->n++] = id;
    return EPX_OK;
}

epx_bpe_scratch_t *epx_bpe_scratch_create(void) { return calloc(1, sizeof(epx_bpe_scratch_t)); }

void epx_bpe_scratch_destroy(epx_bpe_scratch_t *s) {
    if (s == NULL) return;
    free(s->node);
    free(s->heap);
    free(s->spelled);
    free(s);
}

epx_status_t epx_bpe_init(epx_bpe_t *b, size_t n_merges) {
    size_t i, n_slots = 16;
    while (n_slots < n_merges * 2) n_slots *= 2;
    b->mask = n_slots - 1;
    b->slot = malloc(n_slots * sizeof *b->slot);
    if (b->slot == NULL) return epx_fail(EPX_ERR_NOMEM, "table of %zu merges", n_merges);
    for (i = 0; i < n_slots; i++) b->slot[i].rank = NO_RANK;
    for (i = 0; i < 256; i++) b->char_bytes[i] = (uint8_t)epx_byte_char((unsigned char)i, b->byte_char[i]);
    return EPX_OK;
}

void epx_bpe_fini(epx_bpe_t *b) {
    free(b->slot);
    b->slot = NULL;
}

static epx_merge_t *find_merge(const epx_bpe_t *b, uint32_t left, uint32_t right) {
    uint64_t h = (((uint64_t)left << 32) | right) * 0x9E3779B97F4A7C15u;
    uint64_t i = (h ^ (h >> 32)) & b->mask;
    while (b->slot[i].rank != NO_RANK && (b->slot[i].left != left || b->slot[i].right != right)) i = (i + 1) & b->mask;
    return &b->slot[i];
}

void epx_bpe_add(epx_bpe_t *b, uint32_t left, uint32_t right, uint32_t rank, uint32_t id) {
    *find_merge(b, left, right) = (epx_merge_t){left, right, rank, id};
}

/* ---- short pieces ---- */

static epx_status_t merge_short(const epx_bpe_t *b, uint32_t *id, size_t n, epx_ids_t *ids) {
    uint32_t rank[SHORT_PIECE], made[SHORT_PIECE];
    size_t i, best;
    for (i = 0; i + 1 < n; i++) {
        const epx_merge_t *m = find_merge(b, id[i], id[i + 1]);
        rank[i] = m->rank;
        made[i] = m->id;
    }
    while (n > 1) {
        for (best = 0, i = 1; i + 1 < n; i++) {
            if (rank[i] < rank[best]) best = i;
        }
        if (rank[best] == NO_RANK) break;
        id[best] = made[best];
        memmove(id + best + 1, id + best + 2, (n - best - 2) * sizeof *id);
        if (best + 2 < n) {
            memmove(rank + best + 1, rank + best + 2, (n - best - 2) * sizeof *rank);
            memmove(made + best + 1, made + best + 2, (n - best - 2) * sizeof *made);
        }
        n--;
        for (i = best ? best - 1 : 0; i <= best && i + 1 < n; i++) {
            const epx_merge_t *m = find_merge(b, id[i], id[i + 1]);
            rank[i] = m->rank;
            made[i] = m->id;
        }
    }
    for (i = 0; i < n; i++) EPX_TRY(epx_ids_push(ids, (int32_t)id[i]));
    return EPX_OK;
}

/* ---- long pieces ---- */

static void heap_push(epx_bpe_scratch_t *s, uint64_t key, uint32_t id) {
    size_t i = s->n_heap++, up;
    for (; i > 0 && s->heap[up = (i - 1) / 2].key > key; i = up) s->heap[i] = s->heap[up];
    s->heap[i] = (heap_item_t){key, id};
}

static heap_item_t heap_pop(epx_bpe_scratch_t *s) {
    heap_item_t top = s->heap[0], last = s->heap[--s->n_heap];
    size_t i = 0, child;
    for (; (child = 2 * i + 1) < s->n_heap; i = child) {
        if (child + 1 < s->n_heap && s->heap[child + 1].key < s->heap[child].key) child++;
        if (s->heap[child].key >= last.key) break;
        s->heap[i] = s->heap[child];
    }
    s->heap[i] = last;
    return top;
}

static void consider(const epx_bpe_t *b, epx_bpe_scratch_t *s, uint32_t at) {
    const epx_merge_t *m;
    if (at == NO_NODE || s->node[at].next == NO_NODE) return;
    m = find_merge(b, s->node[at].id, s->node[s->node[at].next].id);
    if (m->rank != NO_RANK) heap_push(s, ((uint64_t)m->rank << 32) | at, m->id);
}

/* Each merge removes a node and adds at most 2 entries, so 3 n entries are enough. */
static epx_status_t reserve(epx_bpe_scratch_t *s, size_t n) {
    size_t node_bytes, heap_bytes;
    if (n <= s->cap) return EPX_OK;
    free(s->node);
    free(s->heap);
    s->node = NULL;
    s->heap = NULL;
    s->cap = 0;
    if (!epx_mul_size(n, sizeof *s->node, &node_bytes) || !epx_mul_size(n, 3 * sizeof *s->heap, &heap_bytes))
        return epx_fail(EPX_ERR_NOMEM, "piece of %zu bytes", n);
    s->node = malloc(node_bytes);
    s->heap = malloc(heap_bytes);
    if (s->node == NULL || s->heap == NULL) return epx_fail(EPX_ERR_NOMEM, "piece of %zu bytes", n);
    s->cap = n;
    return EPX_OK;
}

/* A node taken into its left neighbour gets id NO_NODE, which no merge has. */
static void apply(const epx_bpe_t *b, epx_bpe_scratch_t *s, heap_item_t top) {
    uint32_t at = (uint32_t)top.key, right;
    const epx_merge_t *m;
    if (s->node[at].id == NO_NODE || (right = s->node[at].next) == NO_NODE) return;
    m = find_merge(b, s->node[at].id, s->node[right].id);
    if (m->rank == NO_RANK || m->id != top.id) return;
    s->node[at].id = m->id;
    s->node[at].next = s->node[right].next;
    s->node[right].id = NO_NODE;
    if (s->node[at].next != NO_NODE) s->node[s->node[at].next].prev = at;
    consider(b, s, s->node[at].prev);
    consider(b, s, at);
}

static epx_status_t merge_long(const epx_bpe_t *b, epx_bpe_scratch_t *s, const unsigned char *piece, size_t n, epx_ids_t *ids) {
    size_t i;
    uint32_t at;
    EPX_TRY(reserve(s, n));
    s->n_heap = 0;
    for (i = 0; i < n; i++) {
        uint32_t next = i + 1 < n ? (uint32_t)(i + 1) : NO_NODE;
        s->node[i] = (node_t){(uint32_t)b->byte_id[piece[i]], i ? (uint32_t)(i - 1) : NO_NODE, next};
    }
    for (i = 0; i < n; i++) consider(b, s, (uint32_t)i);
    while (s->n_heap) apply(b, s, heap_pop(s));
    for (at = 0; at != NO_NODE; at = s->node[at].next) EPX_TRY(epx_ids_push(ids, (int32_t)s->node[at].id));
    return EPX_OK;
}

/* ---- both ---- */

/* *out_id: the token that is the whole piece, or -1. */
static epx_status_t find_whole(const epx_bpe_t *b, const epx_vocab_t *v, epx_bpe_scratch_t *s, const unsigned char *piece,
                               size_t n_bytes, int32_t *out_id) {
    size_t i, n = 0;
    *out_id = -1;
    if (n_bytes > v->max_text_bytes) return EPX_OK;
    if (s->spelled_cap < 2 * n_bytes) {
        char *p = realloc(s->spelled, 2 * n_bytes);
        if (p == NULL) return epx_fail(EPX_ERR_NOMEM, "piece of %zu bytes", n_bytes);
        s->spelled = p;
        s->spelled_cap = 2 * n_bytes;
    }
    for (i = 0; i < n_bytes; i++) {
        memcpy(s->spelled + n, b->byte_char[piece[i]], 2);
        n += b->char_bytes[piece[i]];
    }
    *out_id = epx_vocab_find(v, s->spelled, n);
    return EPX_OK;
}

epx_status_t epx_bpe_encode(const epx_bpe_t *b, const epx_vocab_t *v, epx_bpe_scratch_t *s, const char *piece, size_t n_bytes,
                            epx_ids_t *ids) {
    const unsigned char *u = (const unsigned char *)piece;
    uint32_t id[SHORT_PIECE];
    int32_t whole = -1;
    size_t i;
    if (b->ignore_merges) EPX_TRY(find_whole(b, v, s, u, n_bytes, &whole));
    if (whole >= 0) return epx_ids_push(ids, whole);
    for (i = 0; i < n_bytes; i++) {
        if (b->byte_id[u[i]] < 0) return epx_fail(EPX_ERR_ARG, "text has byte 0x%02X, which has no token here", u[i]);
        if (i < SHORT_PIECE) id[i] = (uint32_t)b->byte_id[u[i]];
    }
    return n_bytes <= SHORT_PIECE ? merge_short(b, id, n_bytes, ids) : merge_long(b, s, u, n_bytes, ids);
}
