/* Ranks on several hosts ("nodes"). Node 0 has the front and its share of the ranks; every other node runs epx_node_run(), which
 * joins node 0, starts the ranks of its host with a connection to the front each, tells the front when one of them ends, and ends
 * when the server does. Ranks are numbered node by node, the same number on each. Nothing is encrypted (docs/multi-host.md). */
#ifndef EPX_SERVER_FRONT_NODES_H
#define EPX_SERVER_FRONT_NODES_H

#include <stdint.h>

#include "base/status.h"

typedef struct {
    int n_nodes;              /* 0 and 1: this host alone */
    int node;                 /* this one; the front is on node 0 */
    const char *address;      /* HOST:PORT or [IPV6]:PORT where node 0 listens */
    uint64_t join_timeout_ns; /* how long nodes wait for each other at the start; 0: 300 s */
    const char *facts;        /* lines "name\tvalue\n" that must be the same on all nodes; NULL: none */
} epx_nodes_config_t;

typedef struct {
    uint32_t size;
    epx_nodes_config_t nodes; /* node 1 or above */
    int n_ranks;              /* of all nodes; a multiple of n_nodes, at most 64 */
    const char *model_path;   /* where this host has the model */
    const char *program;      /* executable to spawn; NULL: /proc/self/exe */
    uint64_t timeout_ns;      /* longest silence of node 0; 0: 10 s */
} epx_node_config_t;

/* Be a node until the server ends. Blocks; what happens is said on standard error. No process of this node is left afterwards.
 * EPX_OK: the server was stopped in order. EPX_ERR_MISMATCH: other settings than node 0, by name with both values;
 * EPX_ERR_TIMEOUT, EPX_ERR_PEER: node 0 is not there or no more; else what ended the server, in the front's words. */
epx_status_t epx_node_run(const epx_node_config_t *cfg);

#endif
