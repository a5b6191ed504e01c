/* Frames: one header, one payload. */
#include "server/front/frame.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* Frames start at 8-byte borders of the stream, so that payloads can be read in place. */
enum { RECEIVE_BYTES = 65536, ALIGN = 8 };

static size_t padding(size_t n_bytes) { return (ALIGN - n_bytes % ALIGN) % ALIGN; }

void epx_pipe_init(epx_pipe_t *l, int fd) { *l = (epx_pipe_t){.fd = fd}; }

void epx_pipe_fini(epx_pipe_t *l) {
    if (l->fd >= 0) close(l->fd);
    epx_str_fini(&l->in);
    epx_str_fini(&l->out);
    *l = (epx_pipe_t){.fd = -1};
}

/* Drop the first *off bytes once they are worth the move. */
static void compact(epx_str_t *s, size_t *off) {
    if (*off == 0 || (*off < s->n_bytes && *off < s->n_bytes / 2)) return;
    memmove(s->data, s->data + *off, s->n_bytes - *off);
    s->n_bytes -= *off;
    *off = 0;
}

epx_status_t epx_pipe_queue(epx_pipe_t *l, uint32_t kind, const void *payload, size_t n_bytes) {
    static const char zeros[ALIGN];
    epx_frame_header_t h = {kind, (uint32_t)n_bytes};
    size_t before = l->out.n_bytes;
    epx_status_t s;
    if (l->fd < 0) return epx_fail(EPX_ERR_PEER, "the socket is closed");
    if (n_bytes > EPX_FRAME_MAX_BYTES)
        return epx_fail(EPX_ERR_CAPACITY, "frame of %zu bytes; the limit is %d", n_bytes, (int)EPX_FRAME_MAX_BYTES);
    EPX_TRY(epx_str_append(&l->out, (const char *)&h, sizeof h));
    s = epx_str_append(&l->out, payload, n_bytes);
    if (s >= 0) s = epx_str_append(&l->out, zeros, padding(n_bytes));
    if (s < 0) l->out.n_bytes = before;
    return s;
}

epx_status_t epx_pipe_flush(epx_pipe_t *l, int block) {
    while (l->out_off < l->out.n_bytes) {
        ssize_t k = send(l->fd, l->out.data + l->out_off, l->out.n_bytes - l->out_off, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (k >= 0) {
            l->out_off += (size_t)k;
            continue;
        }
        if (errno == EINTR) continue;
        if (errno != EAGAIN && errno != EWOULDBLOCK) return epx_fail_errno(EPX_ERR_PEER, errno, "sending a frame");
        if (!block) {
            compact(&l->out, &l->out_off);
            return EPX_AGAIN;
        }
        poll(&(struct pollfd){l->fd, POLLOUT, 0}, 1, -1);
    }
    compact(&l->out, &l->out_off);
    return EPX_OK;
}

epx_status_t epx_pipe_receive(epx_pipe_t *l) {
    char block[RECEIVE_BYTES];
    if (l->fd < 0 || l->at_end) return EPX_OK;
    compact(&l->in, &l->in_off);
    for (;;) {
        ssize_t k = recv(l->fd, block, sizeof block, MSG_DONTWAIT);
        if (k > 0) {
            EPX_TRY(epx_str_append(&l->in, block, (size_t)k));
            if ((size_t)k < sizeof block) return EPX_OK;
            continue;
        }
        if (k < 0 && errno == EINTR) continue;
        if (k < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return EPX_OK;
        l->at_end = 1; /* a reset is an end too: the process behind it is gone */
        if (k < 0 && errno != ECONNRESET) return epx_fail_errno(EPX_ERR_PEER, errno, "receiving a frame");
        return EPX_OK;
    }
}

epx_status_t epx_pipe_next(epx_pipe_t *l, uint32_t *out_kind, const char **out_payload, size_t *out_bytes) {
    epx_frame_header_t h;
    size_t have = l->in.n_bytes - l->in_off;
    if (have < sizeof h) return EPX_AGAIN;
    memcpy(&h, l->in.data + l->in_off, sizeof h);
    if (h.n_bytes > EPX_FRAME_MAX_BYTES)
        return epx_fail(EPX_ERR_FORMAT, "frame of %u bytes; the limit is %d", h.n_bytes, (int)EPX_FRAME_MAX_BYTES);
    if (have - sizeof h < h.n_bytes + padding(h.n_bytes)) return EPX_AGAIN;
    *out_kind = h.kind;
    *out_payload = l->in.data + l->in_off + sizeof h;
    *out_bytes = h.n_bytes;
    l->in_off += sizeof h + h.n_bytes + padding(h.n_bytes);
    return EPX_OK;
}
