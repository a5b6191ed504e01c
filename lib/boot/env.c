/* Open MPI: OMPI_COMM_WORLD_* and the URI of its head process; MPICH's Hydra and other PMI launchers: PMI_*, MPI_LOCALNRANKS;
 * Slurm's srun: SLURM_* of the step. EPX_INIT_ADDR, where set, is the meeting place under each of them. */
#include "boot/env.h"

#include <errno.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"

/* Chosen ports lie below the ephemeral range of Linux (32768). */
enum { FIRST_PORT = 20000, N_PORTS = 12000 };

typedef struct {
    const char *name, *rank, *size;
    const char *local_size; /* ranks of this host, or NULL */
    const char *n_hosts;    /* hosts, or NULL */
    const char *job[3];     /* variables that tell jobs apart */
} launcher_t;

static const launcher_t launchers[] = {
    {"Open MPI",
     "OMPI_COMM_WORLD_RANK",
     "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_SIZE",
     NULL,
     {"OMPI_MCA_orte_hnp_uri", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"}},
    {"PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", NULL, {"PMI_JOBID", "PMIX_NAMESPACE", "SLURM_JOB_ID"}},
    {"Slurm", "SLURM_PROCID", "SLURM_NTASKS", NULL, "SLURM_NNODES", {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEPID"}},
};

/* A whole number from a variable; EPX_ERR_ARG names the variable and its value. */
static epx_status_t number(const char *name, int lo, int *out) {
    const char *text = getenv(name);
    char *end = NULL;
    if (text == NULL) return epx_fail(EPX_ERR_ARG, "bootstrap env: %s is not set", name);
    errno = 0;
    long v = strtol(text, &end, 10);
    if (end == text || *end != '\0' || errno != 0 || v < lo || v > INT_MAX)
        return epx_fail(EPX_ERR_ARG, "bootstrap env: %s is \"%.40s\"; legal: a whole number, at least %d", name, text, lo);
    *out = (int)v;
    return EPX_OK;
}

static const launcher_t *find_launcher(void) {
    for (size_t i = 0; i < sizeof launchers / sizeof launchers[0]; i++)
        if (getenv(launchers[i].rank) != NULL && getenv(launchers[i].size) != NULL) return &launchers[i];
    return NULL;
}

/* Unknown counts as several hosts: then the address must be said. */
static epx_status_t find_hosts(const launcher_t *l, epx_boot_env_t *e) {
    int n = 0;
    e->one_host = e->n_ranks == 1;
    if (l->local_size != NULL && getenv(l->local_size) != NULL) {
        EPX_TRY(number(l->local_size, 1, &n));
        e->one_host = n == e->n_ranks;
    } else if (l->n_hosts != NULL && getenv(l->n_hosts) != NULL) {
        EPX_TRY(number(l->n_hosts, 1, &n));
        e->one_host = n == 1;
    }
    return EPX_OK;
}

/* The same on all ranks of a job and, very likely, another one for each job. */
static int job_port(const launcher_t *l) {
    uint64_t h = UINT64_C(14695981039346656037);
    int known = 0;
    for (int i = 0; i < 3; i++) {
        const char *text = getenv(l->job[i]);
        known |= text != NULL;
        for (; text != NULL && *text != '\0'; text++) h = (h ^ (uint8_t)*text) * UINT64_C(1099511628211);
    }
    if (!known)
        h = (h ^ (uint64_t)getppid()) * UINT64_C(1099511628211); /* Hydra: the proxy that started the ranks of this host */
    h ^= h >> 32;
    return FIRST_PORT + (int)(h % N_PORTS);
}

/* First host of a Slurm list: "node[01-04,07],x" -> node01, "a,b" -> a. */
static int first_of_list(const char *list, char *out, size_t out_bytes) {
    size_t n = strcspn(list, ",["), m = 0;
    const char *rest = list + n;
    if (*rest == '[') m = strcspn(++rest, ",-]");
    if (n + m == 0 || n + m >= out_bytes) return 0;
    memcpy(out, list, n);
    memcpy(out + n, rest, m);
    out[n + m] = '\0';
    return 1;
}

/* "1234.0;tcp://10.1.2.3,192.168.0.1:4567" -> 10.1.2.3 */
static int host_of_uri(const char *uri, char *out, size_t out_bytes) {
    const char *start = strstr(uri, "tcp://");
    if (start == NULL) return 0;
    start += 6;
    size_t n = strcspn(start, ",:;");
    if (n == 0 || n >= out_bytes) return 0;
    memcpy(out, start, n);
    out[n] = '\0';
    return 1;
}

/* Where rank 0 is, as far as the launcher tells. */
static int host_of_rank_0(const launcher_t *l, char *out, size_t out_bytes) {
    const char *list = getenv("SLURM_STEP_NODELIST"), *uri = getenv("OMPI_MCA_orte_hnp_uri");
    if (list == NULL) list = getenv("SLURM_JOB_NODELIST");
    if (strcmp(l->name, "Open MPI") == 0) return uri != NULL && host_of_uri(uri, out, out_bytes);
    return getenv("SLURM_PROCID") != NULL && list != NULL && first_of_list(list, out, out_bytes);
}

static epx_status_t find_address(const launcher_t *l, epx_boot_env_t *e) {
    const char *given = getenv("EPX_INIT_ADDR");
    char host[EPX_BOOT_ADDRESS_BYTES - 8];
    if (given != NULL && strlen(given) >= sizeof e->address)
        return epx_fail(EPX_ERR_ARG, "EPX_INIT_ADDR is longer than %d letters", EPX_BOOT_ADDRESS_BYTES - 1);
    if (given != NULL) snprintf(e->address, sizeof e->address, "%s", given);
    else if (e->one_host) snprintf(e->address, sizeof e->address, "127.0.0.1:%d", job_port(l));
    else if (host_of_rank_0(l, host, sizeof host)) snprintf(e->address, sizeof e->address, "%s:%d", host, job_port(l));
    else
        return epx_fail(EPX_ERR_ARG,
                        "bootstrap env: the %d ranks are on several hosts and %s does not say where rank 0 is; set "
                        "EPX_INIT_ADDR to HOST:PORT, an address of rank 0's host",
                        e->n_ranks, l->name);
    return EPX_OK;
}

epx_status_t epx_boot_env_read(epx_boot_env_t *out) {
    epx_boot_env_t e = {0};
    const launcher_t *l = find_launcher();
    if (l == NULL)
        return epx_fail(EPX_ERR_ARG, "bootstrap is \"env\" and no launcher has set OMPI_COMM_WORLD_RANK and _SIZE, PMI_RANK and "
                                     "PMI_SIZE, or SLURM_PROCID and SLURM_NTASKS");
    e.launcher = l->name;
    EPX_TRY(number(l->size, 1, &e.n_ranks));
    EPX_TRY(number(l->rank, 0, &e.rank));
    EPX_TRY(find_hosts(l, &e));
    EPX_TRY(find_address(l, &e));
    *out = e;
    return EPX_OK;
}
