/* What the front (nodes.c) and another node (node.c) share. */
#ifndef EPX_SERVER_FRONT_NODES_IMPL_H
#define EPX_SERVER_FRONT_NODES_IMPL_H

#include "server/front/frame.h"

#define EPX_NODE_JOIN_NS 300000000000u  /* of epx_nodes_config_t.join_timeout_ns */
#define EPX_NODE_ANSWER_NS 30000000000u /* for one frame during the start */
#define EPX_NODE_RANK_MEMBER "rank connection"

/* The next frame, whatever it is, before the deadline. *out_payload as in epx_pipe_next(). EPX_ERR_TIMEOUT, EPX_ERR_PEER. */
epx_status_t epx_node_await(epx_pipe_t *l, uint64_t deadline_ns, uint32_t *out_kind, const char **out_payload, size_t *out_bytes);
/* How often both sides beat when `limit_ns` of silence is too long. */
uint64_t epx_node_beat_ns(uint64_t limit_ns);

#endif
