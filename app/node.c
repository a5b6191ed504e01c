/* `epx serve --node-rank R` with R above 0: this host's ranks for the server on node 0. */
#include <stdio.h>

#include "app/commands.h"
#include "server/front/nodes.h"

static epx_status_t run(const epx_settings_t *o, epx_str_t *facts) {
    epx_node_config_t cfg = {.size = sizeof cfg, .model_path = o->model_path};
    epx_rank_config_t rank = epx_session_rank_config(o);
    cfg.n_ranks = rank.tp * epx_settings_n_replicas(o);
    cfg.timeout_ns = rank.timeout_ns;
    EPX_TRY(epx_session_nodes(o, facts, &cfg.nodes));
    fprintf(stderr, "epx: node %d of %d: joining node 0 at %s, for at most %d s\n", (int)o->node_rank, (int)o->nnodes,
            o->dist_init_addr, (int)o->dist_timeout);
    return epx_node_run(&cfg);
}

int epx_serve_node(const epx_settings_t *o) {
    epx_str_t facts = {0};
    epx_status_t s = run(o, &facts);
    epx_str_fini(&facts);
    if (s < 0) return epx_print_error();
    fprintf(stderr, "epx: node 0 has stopped the server\n");
    return 0;
}
