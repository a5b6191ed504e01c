/* Breadth-first search over states that are plain bytes, for the checkers of this folder: the set of visited states, and the
 * queue in the order of discovery. One search at a time. */
#ifndef EPX_TESTS_MODEL_CHECK_SEARCH_H
#define EPX_TESTS_MODEL_CHECK_SEARCH_H

#include <stddef.h>

/* Forget all states; from now on a state has state_bytes, a multiple of 8. */
void mc_begin(size_t state_bytes);
/* Queue a state that has not been visited. */
void mc_add(const void *state);
/* How many there are; the i-th is copied to out. */
size_t mc_count(void);
void mc_get(size_t i, void *out);
void mc_end(void);

/* Visit every state that can be reached from `first`. successors(state) calls mc_emit() for each; is_final(state) says whether a
 * state without any may be. Returns NULL, or what is wrong: "deadlock: ...", or the text that mc_bad() was given. */
const char *mc_search(const void *first, size_t state_bytes, void (*successors)(const void *state),
                      int (*is_final)(const void *state), size_t *out_states);
/* For successors(): the state that is made now is wrong. The first text counts. */
void mc_bad(const char *what);
/* Queue a successor, unless something was wrong with it. */
void mc_emit(const void *state);
/* Has mc_bad() been called in this search? */
int mc_is_bad(void);

#endif
