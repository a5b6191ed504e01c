/* Length-prefixed frames over one end of a stream socket, buffered in both directions, so that neither the front nor a worker
 * blocks on the other. No threads and no locks of its own: one thread receives; senders are serialised by the caller. */
#ifndef EPX_SERVER_FRONT_FRAME_H
#define EPX_SERVER_FRONT_FRAME_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "base/str.h"

enum { EPX_FRAME_MAX_BYTES = 256 << 20 };

typedef struct {
    uint32_t kind;
    uint32_t n_bytes; /* of the payload that follows */
} epx_frame_header_t;

typedef struct {
    int fd;       /* owned; -1: closed */
    int at_end;   /* the other end is closed and everything it sent was received */
    epx_str_t in; /* received, not parsed from in_off on */
    size_t in_off;
    epx_str_t out; /* queued, not sent from out_off on */
    size_t out_off;
} epx_pipe_t;

/* Take over fd. */
void epx_pipe_init(epx_pipe_t *l, int fd);
/* Close the socket and free the buffers. Twice is allowed. */
void epx_pipe_fini(epx_pipe_t *l);
/* Queue one frame; nothing is sent before epx_pipe_flush(). EPX_ERR_CAPACITY over EPX_FRAME_MAX_BYTES. */
epx_status_t epx_pipe_queue(epx_pipe_t *l, uint32_t kind, const void *payload, size_t n_bytes);
/* Send what is queued. block 0: EPX_AGAIN when the socket is full and something is left. EPX_ERR_PEER: the other end is closed.
 */
epx_status_t epx_pipe_flush(epx_pipe_t *l, int block);
/* Move what has arrived into the buffer without blocking. At the end of the stream sets at_end. EPX_ERR_PEER: socket error. */
epx_status_t epx_pipe_receive(epx_pipe_t *l);
/* The next whole frame of the buffer. *out_payload is borrowed until the next epx_pipe_receive(). EPX_AGAIN: none is whole;
 * EPX_ERR_FORMAT: a length over the limit. */
epx_status_t epx_pipe_next(epx_pipe_t *l, uint32_t *out_kind, const char **out_payload, size_t *out_bytes);

#endif
