/* Greedy pairwise covering: see pairwise.h. Each round takes the tuple that covers most new pairs. */
#include "tests/harness/pairwise.h"

#include <string.h>

enum { MAX_VALUES = 16 };
typedef unsigned char seen_t[TH_MAX_DIMS][TH_MAX_DIMS][MAX_VALUES][MAX_VALUES];

static int n_new_pairs(int n_dims, seen_t seen, const th_tuple_t *t) {
    int n = 0;
    for (int a = 0; a < n_dims; a++)
        for (int b = a + 1; b < n_dims; b++) n += !seen[a][b][t->v[a]][t->v[b]];
    return n;
}

static void mark_pairs(int n_dims, seen_t seen, const th_tuple_t *t) {
    for (int a = 0; a < n_dims; a++)
        for (int b = a + 1; b < n_dims; b++) seen[a][b][t->v[a]][t->v[b]] = 1;
}

static int next_tuple(int n_dims, const int *sizes, th_tuple_t *t) {
    for (int d = 0; d < n_dims; d++) {
        if (++t->v[d] < sizes[d]) return 1;
        t->v[d] = 0;
    }
    return 0;
}

int th_pairwise(int n_dims, const int *sizes, th_tuple_t *out, int max_tuples) {
    seen_t seen;
    memset(seen, 0, sizeof seen);
    for (int n = 0;; n++) {
        th_tuple_t t = {{0}}, best = {{0}};
        int best_new = 0;
        do {
            int fresh = n_new_pairs(n_dims, seen, &t);
            if (fresh > best_new) best_new = fresh, best = t;
        } while (next_tuple(n_dims, sizes, &t));
        if (best_new == 0) return n;
        if (n == max_tuples) return -1;
        mark_pairs(n_dims, seen, &best);
        out[n] = best;
    }
}

int th_pairwise_covers(int n_dims, const int *sizes, const th_tuple_t *tuples, int n) {
    seen_t seen;
    memset(seen, 0, sizeof seen);
    for (int i = 0; i < n; i++) mark_pairs(n_dims, seen, &tuples[i]);
    for (int a = 0; a < n_dims; a++)
        for (int b = a + 1; b < n_dims; b++)
            for (int x = 0; x < sizes[a]; x++)
                for (int y = 0; y < sizes[b]; y++)
                    if (!seen[a][b][x][y]) return 0;
    return 1;
}
