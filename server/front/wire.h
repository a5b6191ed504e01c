/* What the frames between the front and its workers carry. Both ends are the same program, so plain structs travel as they lie
 * in memory; the configuration frame, which is the first, carries a version and the sizes of those structs. No I/O here. */
#ifndef EPX_SERVER_FRONT_WIRE_H
#define EPX_SERVER_FRONT_WIRE_H

#include "base/status.h"
#include "base/str.h"
#include "engine/runtime/rank.h"

enum { EPX_WIRE_VERSION = 4 };

/* Front to worker, then worker to front. */
typedef enum {
    EPX_MSG_CONFIG = 1,  /* epx_wire_put_config() */
    EPX_MSG_REQUEST,     /* epx_wire_put_request() */
    EPX_MSG_CANCEL,      /* u64 id */
    EPX_MSG_WAKE,        /* u64 running number */
    EPX_MSG_STOP,        /* empty: leave together with the others */
    EPX_MSG_ABORT,       /* empty: leave at once, a rank is lost */
    EPX_MSG_GET_STATS,   /* empty */
    EPX_MSG_BOOT_ALL,    /* the blobs of all ranks in rank order */
    EPX_MSG_FLUSH,       /* empty: forget cached prefixes */
    EPX_MSG_READY = 100, /* epx_rank_info_t */
    EPX_MSG_FAILED,      /* epx_wire_put_failure(): the rank ends */
    EPX_MSG_PROGRESS,    /* f64 fraction, then the name of the phase */
    EPX_MSG_BOOT_MINE,   /* this rank's blob; empty: a barrier */
    EPX_MSG_EVENTS,      /* epx_wire_put_event(), repeated */
    EPX_MSG_STATS,       /* epx_rank_stats_t: the answer to GET_STATS */
    EPX_MSG_REPORT,      /* epx_rank_stats_t, then u64[n_layers * n_experts]: unasked */
    /* Between the front and another node, on a connection of its own. */
    EPX_MSG_NODE_HELLO = 200, /* node: epx_wire_put_hello(), first */
    EPX_MSG_NODE_WELCOME,     /* front, empty: the settings agree; one connection for each rank is expected next */
    EPX_MSG_NODE_STARTED,     /* node: epx_wire_rank_t, a process runs */
    EPX_MSG_NODE_ENDED,       /* node: epx_wire_rank_t, then text: how it ended */
    EPX_MSG_NODE_BEAT,        /* both, u64: bit i of a node: its i-th rank is stopped by a signal */
    EPX_MSG_NODE_KILL,        /* front: epx_wire_rank_t */
    EPX_MSG_NODE_END          /* front: epx_wire_put_failure(), status EPX_OK after an orderly stop: the node ends */
} epx_msg_t;

typedef struct {
    int32_t rank, pid;
} epx_wire_rank_t;

/* What a node says of itself. */
typedef struct {
    const char *host, *model_path, *facts;
} epx_wire_hello_t;

/* Bytes still to be read. A read past the end sets `bad` and gives zeros. */
typedef struct {
    const char *p;
    size_t n_bytes;
    int bad;
} epx_wire_reader_t;

/* Append cfg as rank `rank`; callbacks are left out. */
epx_status_t epx_wire_put_config(epx_str_t *out, const epx_rank_config_t *cfg, int rank);
/* Strings of *out_cfg are borrowed from the frame. EPX_ERR_MISMATCH: another version; EPX_ERR_FORMAT: cut short. */
epx_status_t epx_wire_get_config(const char *data, size_t n_bytes, epx_rank_config_t *out_cfg);
epx_status_t epx_wire_put_request(epx_str_t *out, const epx_request_t *req);
/* Arrays of *out_req are borrowed from the frame. */
epx_status_t epx_wire_get_request(const char *data, size_t n_bytes, epx_request_t *out_req);
epx_status_t epx_wire_put_event(epx_str_t *out, const epx_event_t *ev);
/* Next event of an EVENTS frame; its error and top are borrowed from the frame. EPX_AGAIN at the end. */
epx_status_t epx_wire_get_event(epx_wire_reader_t *r, epx_event_t *out_ev);
epx_status_t epx_wire_put_hello(epx_str_t *out, const epx_wire_hello_t *hello);
/* Strings of *out_hello are borrowed from the frame. EPX_ERR_MISMATCH: another build of the program; EPX_ERR_FORMAT: cut short.
 */
epx_status_t epx_wire_get_hello(const char *data, size_t n_bytes, epx_wire_hello_t *out_hello);
epx_status_t epx_wire_put_failure(epx_str_t *out, epx_status_t status, const char *message);
/* *out_message is borrowed from the frame. */
epx_status_t epx_wire_get_failure(const char *data, size_t n_bytes, epx_status_t *out_status, const char **out_message);

#endif
