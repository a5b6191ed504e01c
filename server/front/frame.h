/* Length-prefixed frames over a stream socket between the front and its workers. No threads of its own. */
#ifndef EPX_SERVER_FRONT_FRAME_H
#define EPX_SERVER_FRONT_FRAME_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { EPX_FRAME_MAX_BYTES = 256 << 20 };

typedef struct {
    uint32_t kind;
    uint32_t n_bytes; /* of the payload that follows */
} epx_frame_header_t;

/* Write header and payload whole. Blocking. EPX_ERR_PEER when the other end is closed. */
epx_status_t epx_frame_write(int fd, uint32_t kind, const void *payload, size_t n_bytes);
/* Read one frame. *out_payload is owned by the caller (free), NULL when empty. EPX_ERR_PEER at end of stream. */
epx_status_t epx_frame_read(int fd, uint32_t *out_kind, void **out_payload, size_t *out_bytes);

#endif
