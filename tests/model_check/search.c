/* Open addressing over an array of states. */
#include "tests/model_check/search.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_BYTES = 1024 };

static char *states;
static uint32_t *slots;
static size_t bytes, n_states, cap_states, n_slots;
static const char *bad; /* what is wrong with the state that was just made; NULL: nothing */
static int n_successors;

static void die(const char *what) {
    fprintf(stderr, "model check: %s\n", what);
    exit(2);
}

static uint64_t hash(const char *s) {
    uint64_t h = UINT64_C(1469598103934665603), word; /* FNV-1a over words, mixed */
    for (size_t i = 0; i < bytes; i += sizeof word) {
        memcpy(&word, s + i, sizeof word);
        h = (h ^ word) * UINT64_C(1099511628211);
        h ^= h >> 29;
    }
    return h;
}

static void rehash(void) {
    free(slots);
    n_slots = cap_states * 2;
    slots = calloc(n_slots, sizeof *slots);
    if (!slots) die("no memory");
    for (size_t i = 0; i < n_states; i++) {
        size_t at = hash(states + i * bytes) % n_slots;
        while (slots[at]) at = (at + 1) % n_slots;
        slots[at] = (uint32_t)i + 1;
    }
}

void mc_begin(size_t state_bytes) {
    if (state_bytes % 8 != 0 || state_bytes > MOST_BYTES) die("a state must be whole words, at most 1 KiB");
    mc_end();
    bytes = state_bytes;
}

void mc_add(const void *state) {
    if (n_states == cap_states) {
        cap_states = cap_states ? cap_states * 2 : 1024;
        states = realloc(states, cap_states * bytes);
        if (!states) die("no memory");
        rehash();
    }
    size_t at = hash(state) % n_slots;
    for (; slots[at]; at = (at + 1) % n_slots)
        if (memcmp(states + (slots[at] - 1) * bytes, state, bytes) == 0) return;
    memcpy(states + n_states++ * bytes, state, bytes);
    slots[at] = (uint32_t)n_states;
}

size_t mc_count(void) { return n_states; }
void mc_get(size_t i, void *out) { memcpy(out, states + i * bytes, bytes); }

void mc_end(void) {
    free(states);
    free(slots);
    states = NULL;
    slots = NULL;
    n_states = cap_states = n_slots = 0;
}

void mc_bad(const char *what) {
    if (!bad) bad = what;
}

int mc_is_bad(void) { return bad != NULL; }

void mc_emit(const void *state) {
    n_successors++;
    if (!bad) mc_add(state);
}

const char *mc_search(const void *first, size_t state_bytes, void (*successors)(const void *state),
                      int (*is_final)(const void *state), size_t *out_states) {
    static _Alignas(16) char s[MOST_BYTES];
    bad = NULL;
    mc_begin(state_bytes);
    mc_add(first);
    for (size_t i = 0; i < n_states && !bad; i++) {
        mc_get(i, s);
        n_successors = 0;
        successors(s);
        if (!bad && n_successors == 0 && !is_final(s)) bad = "deadlock: nobody can move";
    }
    *out_states = n_states;
    return bad;
}
