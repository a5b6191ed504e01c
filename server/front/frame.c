/* Frames: one header, one payload. */
#include "server/front/frame.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

static epx_status_t read_full(int fd, void *data, size_t n) {
    char *p = data;
    while (n) {
        ssize_t k = recv(fd, p, n, 0);
        if (k == 0) return epx_fail(EPX_ERR_PEER, "the other end of the socket is closed");
        if (k < 0 && errno == EINTR) continue;
        if (k < 0) return epx_fail_errno(EPX_ERR_PEER, errno, "reading a frame");
        p += k;
        n -= (size_t)k;
    }
    return EPX_OK;
}

epx_status_t epx_frame_write(int fd, uint32_t kind, const void *payload, size_t n_bytes) {
    epx_frame_header_t h = {kind, (uint32_t)n_bytes};
    struct iovec iov[2] = {{&h, sizeof h}, {(void *)(uintptr_t)payload, n_bytes}};
    struct msghdr m = {.msg_iov = iov, .msg_iovlen = n_bytes ? 2 : 1};
    if (n_bytes > EPX_FRAME_MAX_BYTES)
        return epx_fail(EPX_ERR_CAPACITY, "frame of %zu bytes; the limit is %d", n_bytes, (int)EPX_FRAME_MAX_BYTES);
    while (m.msg_iovlen) {
        ssize_t k = sendmsg(fd, &m, MSG_NOSIGNAL);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0) return epx_fail_errno(EPX_ERR_PEER, errno, "writing a frame");
        while (m.msg_iovlen && (size_t)k >= m.msg_iov->iov_len) {
            k -= (ssize_t)m.msg_iov->iov_len;
            m.msg_iov++;
            m.msg_iovlen--;
        }
        if (m.msg_iovlen) {
            m.msg_iov->iov_base = (char *)m.msg_iov->iov_base + k;
            m.msg_iov->iov_len -= (size_t)k;
        }
    }
    return EPX_OK;
}

epx_status_t epx_frame_read(int fd, uint32_t *out_kind, void **out_payload, size_t *out_bytes) {
    epx_frame_header_t h;
    void *p = NULL;
    EPX_TRY(read_full(fd, &h, sizeof h));
    if (h.n_bytes > EPX_FRAME_MAX_BYTES)
        return epx_fail(EPX_ERR_FORMAT, "frame of %u bytes; the limit is %d", h.n_bytes, (int)EPX_FRAME_MAX_BYTES);
    if (h.n_bytes) {
        p = malloc(h.n_bytes);
        if (p == NULL) return epx_fail(EPX_ERR_NOMEM, "frame: %u bytes wanted", h.n_bytes);
        epx_status_t s = read_full(fd, p, h.n_bytes);
        if (s < 0) {
            free(p);
            return s;
        }
    }
    *out_kind = h.kind;
    *out_payload = p;
    *out_bytes = h.n_bytes;
    return EPX_OK;
}
