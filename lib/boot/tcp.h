/* Bootstrap "tcp:HOST:PORT": rank 0 listens there, the others join and prove that they know EPX_JOIN_TOKEN. A star of
 * connections that lives as long as the world. Nothing is encrypted (docs/multi-host.md). Set-up path only. */
#ifndef EPX_BOOT_TCP_H
#define EPX_BOOT_TCP_H

#include "boot/boot.h"

/* address: HOST:PORT or [IPV6]:PORT. rank and n_ranks are checked here. On success out_boot->close is set.
 * Returns EPX_ERR_ARG (address, rank, no token on an address that is not loopback), EPX_ERR_OS (cannot listen),
 * EPX_ERR_MISMATCH (n_ranks differs, a rank joined twice, another token), EPX_ERR_TIMEOUT naming the missing ranks. */
epx_status_t epx_boot_tcp_open(const char *address, int rank, int n_ranks, uint64_t timeout_ns, epx_boot_t *out_boot);

#endif
