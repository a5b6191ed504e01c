/* Bootstrap "env": rank, size and meeting place from a launcher's variables. Reads the environment; connects nothing. */
#ifndef EPX_BOOT_ENV_H
#define EPX_BOOT_ENV_H

#include <stddef.h>

#include "epx/epx_status.h"

enum { EPX_BOOT_ADDRESS_BYTES = 128 };

typedef struct {
    const char *launcher; /* static: "Open MPI", "PMI", "Slurm" */
    int rank, n_ranks, one_host;
    char address[EPX_BOOT_ADDRESS_BYTES]; /* HOST:PORT for the tcp bootstrap */
} epx_boot_env_t;

/* Returns EPX_ERR_ARG when no launcher's variables are there, when they are malformed, or when the ranks are on several hosts
 * and nothing says where rank 0 is (EPX_INIT_ADDR does). */
epx_status_t epx_boot_env_read(epx_boot_env_t *out);

#endif
