/* Where the experts are: physical slots of ranks, and which of an expert's slots serves a token. Private tables of a rank, equal
 * on all ranks. Pure; built by core, read by backends. */
#ifndef EPX_SPI_PLACE_H
#define EPX_SPI_PLACE_H

#include <stddef.h>
#include <stdint.h>

/* One slot: its rank and its number among the slots of that rank. */
typedef struct {
    int32_t rank, local;
} epx_place_t;

typedef struct {
    uint64_t version, first_epoch; /* in force for exchanges from first_epoch on */
    int n_local;                   /* slots of this rank */
    int32_t *slot_rank;            /* [n_slots] */
    int32_t *slot_expert;          /* [n_slots] */
    int32_t *first;                /* [E + 1] places of expert e: places[first[e] .. first[e + 1]) */
    epx_place_t *places;           /* [n_slots] slots of living ranks, by expert, then in ascending slot */
} epx_placement_t;

/* Which of n slots serves a token: splitmix64 of (source rank, token), scaled to n. The same for every expert of the token. */
static inline uint32_t epx_replica(int src, uint32_t token, uint32_t n) {
    uint64_t z = ((uint64_t)(uint32_t)src << 32 | token) + UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    z ^= z >> 31;
    return (uint32_t)((z >> 32) * n >> 32);
}

/* The place that computes `expert` for a token of source rank src, or NULL when no living rank has the expert. */
static inline const epx_place_t *epx_place_of(const epx_placement_t *pl, int32_t expert, int src, uint32_t token) {
    int32_t first = pl->first[expert], n = pl->first[expert + 1] - first;
    if (n == 0) return NULL;
    return &pl->places[n == 1 ? first : first + (int32_t)epx_replica(src, token, (uint32_t)n)];
}

#endif
