/* The measured choice between backends that give the same bits. */
#ifndef EPX_CORE_CROSSOVER_H
#define EPX_CORE_CROSSOVER_H

#include <stdint.h>

#include "epx/epx_status.h"

typedef struct {
    char backend[16], why[112];
} epx_crossover_t;

/* The backend of the nearest measured point for rows of row_bytes on the wire and at most n_tokens a rank; distances are in
 * doublings of each of the three. Depends on nothing but the arguments and EPX_A2A_TABLE. Errors: EPX_ERR_IO and _FORMAT of that
 * file, with its line. */
epx_status_t epx_crossover(int n_ranks, uint64_t row_bytes, int n_tokens, epx_crossover_t *out);

#endif
