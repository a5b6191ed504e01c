/* Radix tree of cached prefixes. See prefix.h.
 * Children are found through one hash table over (parent, first page of tokens). Unlocked leaves are in a list ordered by last
 * use. Invariants: a node holds at least one page; siblings differ in their first page; a locked node's parent is locked. */
#include "engine/kv/prefix.h"

#include <stdlib.h>
#include <string.h>

enum { FIRST_BUCKETS = 256 };

struct epx_prefix_node {
    epx_prefix_node_t *parent; /* the root for the first ones */
    epx_prefix_node_t *hash_next;
    epx_prefix_node_t *older, *newer; /* in the list of unlocked leaves */
    int32_t *tokens;                  /* [n_pages * page_size], owned */
    int32_t *pages;                   /* [n_pages], owned */
    int32_t n_pages, n_children, n_locks;
    int listed;
    uint64_t used; /* when, by the tree's running number */
};

struct epx_prefix {
    epx_kv_pool_t *pool;
    int32_t page_size;
    epx_prefix_node_t root;
    epx_prefix_node_t ends; /* of the list: ends.newer is the oldest */
    epx_prefix_node_t **buckets;
    size_t n_buckets, n_nodes; /* buckets: a power of two */
    int32_t n_pages, n_locked_pages;
    uint64_t now;
};

/* ---- children ---- */

static size_t bucket_of(const epx_prefix_node_t *parent, const int32_t *page, int32_t page_size, size_t n_buckets) {
    uint64_t h = (uint64_t)(uintptr_t)parent * 0x9E3779B97F4A7C15u;
    for (int32_t i = 0; i < page_size; i++) h = (h ^ (uint32_t)page[i]) * 0x100000001B3u + (h >> 29);
    return (size_t)(h ^ (h >> 32)) & (n_buckets - 1);
}

static epx_prefix_node_t *child(const epx_prefix_t *t, const epx_prefix_node_t *parent, const int32_t *page) {
    epx_prefix_node_t *n = t->buckets[bucket_of(parent, page, t->page_size, t->n_buckets)];
    while (n && (n->parent != parent || memcmp(n->tokens, page, (size_t)t->page_size * sizeof *page) != 0)) n = n->hash_next;
    return n;
}

static void hash_add(epx_prefix_t *t, epx_prefix_node_t *n) {
    epx_prefix_node_t **b = &t->buckets[bucket_of(n->parent, n->tokens, t->page_size, t->n_buckets)];
    n->hash_next = *b;
    *b = n;
}

static void hash_remove(epx_prefix_t *t, const epx_prefix_node_t *n) {
    epx_prefix_node_t **b = &t->buckets[bucket_of(n->parent, n->tokens, t->page_size, t->n_buckets)];
    while (*b != n) b = &(*b)->hash_next;
    *b = n->hash_next;
}

/* Twice the buckets; without memory the chains only get longer. */
static void hash_grow(epx_prefix_t *t) {
    size_t n_old = t->n_buckets;
    epx_prefix_node_t **old = t->buckets, **bigger = calloc(2 * n_old, sizeof *bigger);
    if (!bigger) return;
    t->buckets = bigger;
    t->n_buckets = 2 * n_old;
    for (size_t i = 0; i < n_old; i++)
        for (epx_prefix_node_t *n = old[i], *next; n; n = next) {
            next = n->hash_next;
            hash_add(t, n);
        }
    free(old);
}

/* ---- unlocked leaves by last use ---- */

static void unlist(epx_prefix_node_t *n) {
    if (!n->listed) return;
    n->older->newer = n->newer;
    n->newer->older = n->older;
    n->listed = 0;
}

/* Ordered from the old end, where a parent belongs that has just lost its last child; `recent`: it was used just now. */
static void list(epx_prefix_t *t, epx_prefix_node_t *n, int recent) {
    if (n == &t->root || n->listed || n->n_locks || n->n_children) return;
    epx_prefix_node_t *at = recent ? &t->ends : t->ends.newer;
    while (at != &t->ends && at->used <= n->used) at = at->newer;
    n->newer = at;
    n->older = at->older;
    n->older->newer = n;
    at->older = n;
    n->listed = 1;
}

/* ---- nodes ---- */

static epx_prefix_node_t *node_create(const epx_prefix_t *t, const int32_t *tokens, const int32_t *pages, int32_t n_pages) {
    size_t n_tokens = (size_t)n_pages * (size_t)t->page_size;
    epx_prefix_node_t *n = calloc(1, sizeof *n);
    if (!n) return NULL;
    n->tokens = malloc((n_tokens ? n_tokens : 1) * sizeof *n->tokens);
    n->pages = malloc((size_t)(n_pages ? n_pages : 1) * sizeof *n->pages);
    if (!n->tokens || !n->pages) {
        free(n->tokens);
        free(n->pages);
        free(n);
        return NULL;
    }
    memcpy(n->tokens, tokens, n_tokens * sizeof *tokens);
    memcpy(n->pages, pages, (size_t)n_pages * sizeof *pages);
    n->n_pages = n_pages;
    return n;
}

static void node_free(epx_prefix_node_t *n) {
    free(n->tokens);
    free(n->pages);
    free(n);
}

static void attach(epx_prefix_t *t, epx_prefix_node_t *parent, epx_prefix_node_t *n) {
    n->parent = parent;
    unlist(parent);
    parent->n_children++;
    if (++t->n_nodes > t->n_buckets) hash_grow(t);
    hash_add(t, n);
}

/* The first n_pages of a node become its new parent, with the same locks. NULL without memory. */
static epx_prefix_node_t *split(epx_prefix_t *t, epx_prefix_node_t *n, int32_t n_pages) {
    epx_prefix_node_t *upper = node_create(t, n->tokens, n->pages, n_pages);
    if (!upper) return NULL;
    size_t cut = (size_t)n_pages * (size_t)t->page_size, rest = (size_t)(n->n_pages - n_pages);
    hash_remove(t, n);
    t->n_nodes--;
    upper->n_locks = n->n_locks;
    upper->used = n->used;
    n->parent->n_children--;
    attach(t, n->parent, upper);
    memmove(n->tokens, n->tokens + cut, rest * (size_t)t->page_size * sizeof *n->tokens);
    memmove(n->pages, n->pages + n_pages, rest * sizeof *n->pages);
    n->n_pages -= n_pages;
    attach(t, upper, n);
    return upper;
}

/* Leading pages that a node and tokens[n_pages pages) have in common. */
static int32_t common(const epx_prefix_t *t, const epx_prefix_node_t *n, const int32_t *tokens, int32_t n_pages) {
    int32_t max = n->n_pages < n_pages ? n->n_pages : n_pages, i = 0;
    size_t page = (size_t)t->page_size;
    while (i < max && memcmp(n->tokens + (size_t)i * page, tokens + (size_t)i * page, page * sizeof *tokens) == 0) i++;
    return i;
}

/* ---- public ---- */

epx_status_t epx_prefix_create(epx_kv_pool_t *pool, epx_prefix_t **out_t) {
    epx_prefix_t *t = calloc(1, sizeof *t);
    if (!t || !(t->buckets = calloc(FIRST_BUCKETS, sizeof(epx_prefix_node_t *)))) {
        free(t);
        return epx_fail(EPX_ERR_NOMEM, "prefix cache: no memory");
    }
    t->n_buckets = FIRST_BUCKETS;
    t->pool = pool;
    t->page_size = epx_kv_pool_page_size(pool);
    t->ends.newer = t->ends.older = &t->ends;
    *out_t = t;
    return EPX_OK;
}

void epx_prefix_destroy(epx_prefix_t *t) {
    if (!t) return;
    for (size_t i = 0; i < t->n_buckets; i++)
        for (epx_prefix_node_t *n = t->buckets[i], *next; n; n = next) {
            next = n->hash_next;
            epx_kv_pool_give(t->pool, n->pages, n->n_pages);
            node_free(n);
        }
    free(t->buckets);
    free(t);
}

int32_t epx_prefix_length(const epx_prefix_t *t, const int32_t *tokens, int32_t n_tokens) {
    const epx_prefix_node_t *at = &t->root;
    int32_t n_pages = n_tokens / t->page_size, done = 0;
    while (done < n_pages && (at = child(t, at, tokens + (size_t)done * (size_t)t->page_size))) {
        int32_t k = common(t, at, tokens + (size_t)done * (size_t)t->page_size, n_pages - done);
        done += k;
        if (k < at->n_pages) break;
    }
    return done * t->page_size;
}

static void lock_path(epx_prefix_t *t, epx_prefix_node_t *n) {
    t->now++;
    for (; n != &t->root; n = n->parent) {
        unlist(n);
        n->used = t->now;
        if (n->n_locks++ == 0) t->n_locked_pages += n->n_pages;
    }
}

void epx_prefix_unlock(epx_prefix_t *t, epx_prefix_node_t *node) {
    t->now++;
    for (epx_prefix_node_t *n = node; n && n != &t->root; n = n->parent) {
        n->used = t->now;
        if (--n->n_locks == 0) t->n_locked_pages -= n->n_pages;
        list(t, n, 1);
    }
}

/* Go down along whole pages, splitting where the tokens leave a node in its middle. *out_done: pages that match. */
static epx_status_t walk(epx_prefix_t *t, const int32_t *tokens, int32_t n_pages, int32_t *pages, epx_prefix_node_t **out_at,
                         int32_t *out_done) {
    epx_prefix_node_t *at = &t->root, *next;
    int32_t done = 0;
    while (done < n_pages && (next = child(t, at, tokens + (size_t)done * (size_t)t->page_size))) {
        int32_t k = common(t, next, tokens + (size_t)done * (size_t)t->page_size, n_pages - done);
        int whole = k == next->n_pages;
        if (!whole && !(next = split(t, next, k))) return epx_fail(EPX_ERR_NOMEM, "prefix cache: no memory to split a node");
        if (pages) memcpy(pages + done, next->pages, (size_t)k * sizeof *pages);
        done += k;
        at = next;
        if (!whole) break;
    }
    *out_at = at;
    *out_done = done;
    return EPX_OK;
}

epx_status_t epx_prefix_lock(epx_prefix_t *t, const int32_t *tokens, int32_t n_tokens, int32_t *out_pages, int32_t *out_n_tokens,
                             epx_prefix_node_t **out_node) {
    epx_prefix_node_t *at;
    int32_t done;
    EPX_TRY(walk(t, tokens, n_tokens / t->page_size, out_pages, &at, &done));
    lock_path(t, at);
    *out_n_tokens = done * t->page_size;
    *out_node = at == &t->root ? NULL : at;
    return EPX_OK;
}

/* Pages [from, to) of the sequence that the tree has too: use the tree's. Those it already uses stay. */
static void exchange(epx_prefix_t *t, const epx_prefix_node_t *end, int32_t n_done, int32_t *pages) {
    int32_t at = n_done;
    for (const epx_prefix_node_t *n = end; n != &t->root; n = n->parent) {
        at -= n->n_pages;
        for (int32_t i = 0; i < n->n_pages; i++) {
            if (pages[at + i] == n->pages[i]) continue;
            epx_kv_pool_give(t->pool, &pages[at + i], 1);
            pages[at + i] = n->pages[i];
        }
    }
}

epx_status_t epx_prefix_insert(epx_prefix_t *t, const int32_t *tokens, int32_t n_tokens, int32_t *pages,
                               epx_prefix_node_t **inout_node, int32_t *out_n_pages) {
    int32_t n_pages = n_tokens / t->page_size, done;
    epx_prefix_node_t *at, *fresh;
    EPX_TRY(walk(t, tokens, n_pages, NULL, &at, &done));
    if (done < n_pages) {
        fresh = node_create(t, tokens + (size_t)done * (size_t)t->page_size, pages + done, n_pages - done);
        if (!fresh) return epx_fail(EPX_ERR_NOMEM, "prefix cache: no memory for %d pages", n_pages - done);
    } else {
        fresh = NULL;
    }
    exchange(t, at, done, pages);
    if (fresh) {
        attach(t, at, fresh);
        t->n_pages += fresh->n_pages;
        at = fresh;
    }
    lock_path(t, at);
    epx_prefix_unlock(t, *inout_node);
    *inout_node = at == &t->root ? NULL : at;
    *out_n_pages = n_pages;
    return EPX_OK;
}

int32_t epx_prefix_n_evictable(const epx_prefix_t *t) { return t->n_pages - t->n_locked_pages; }
int32_t epx_prefix_n_pages(const epx_prefix_t *t) { return t->n_pages; }

void epx_prefix_evict(epx_prefix_t *t, int32_t n) {
    while (n > 0 && t->ends.newer != &t->ends) {
        epx_prefix_node_t *oldest = t->ends.newer, *parent = oldest->parent;
        unlist(oldest);
        hash_remove(t, oldest);
        t->n_nodes--;
        t->n_pages -= oldest->n_pages;
        n -= oldest->n_pages;
        epx_kv_pool_give(t->pool, oldest->pages, oldest->n_pages);
        node_free(oldest);
        parent->n_children--;
        list(t, parent, 0);
    }
}
