/* A small set of tuples in which every pair of values of any two dimensions occurs. Pure. */
#ifndef EPX_TESTS_HARNESS_PAIRWISE_H
#define EPX_TESTS_HARNESS_PAIRWISE_H

enum { TH_MAX_DIMS = 8 };

typedef struct {
    int v[TH_MAX_DIMS];
} th_tuple_t;

/* sizes[n_dims] values of each dimension. Writes at most max_tuples; returns how many were written, -1 when they do not suffice.
 */
int th_pairwise(int n_dims, const int *sizes, th_tuple_t *out, int max_tuples);
/* 1 when every pair occurs. */
int th_pairwise_covers(int n_dims, const int *sizes, const th_tuple_t *tuples, int n);

#endif
