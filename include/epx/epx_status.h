/* Status codes of libepx: one X-macro list of name, number and text.
 * Not here: messages with values; those come from epx_last_error(). Plain C; seen by C11, C++17 and nvcc. */
#ifndef EPX_STATUS_H
#define EPX_STATUS_H

/* X(name, number, text). 0 done; positive: not yet; negative by what is lost:
 * -1xx the caller's mistake (nothing was changed), -2xx a resource, -3xx a peer, -4xx the group, -5xx our own bug. */
#define EPX_STATUS_LIST(X)                                           \
    X(EPX_OK, 0, "done")                                             \
    X(EPX_AGAIN, 1, "not finished, try again")                       \
    X(EPX_ERR_ARG, -101, "bad argument")                             \
    X(EPX_ERR_STATE, -102, "call out of order")                      \
    X(EPX_ERR_UNSUPPORTED, -103, "not supported here")               \
    X(EPX_ERR_MISMATCH, -104, "ranks were given different settings") \
    X(EPX_ERR_CAPACITY, -105, "over a capacity fixed at create")     \
    X(EPX_ERR_NOT_FOUND, -106, "no such thing")                      \
    X(EPX_ERR_NOMEM, -201, "not enough memory")                      \
    X(EPX_ERR_OS, -202, "the operating system refused")              \
    X(EPX_ERR_IO, -203, "read or write failed")                      \
    X(EPX_ERR_FORMAT, -204, "malformed input")                       \
    X(EPX_ERR_TIMEOUT, -301, "a peer did not answer in time")        \
    X(EPX_ERR_PEER, -302, "a peer is gone")                          \
    X(EPX_ERR_ABORTED, -401, "the plan was aborted")                 \
    X(EPX_ERR_INTERNAL, -501, "internal error")

typedef enum {
#define EPX_STATUS_ENUM(name, number, text) name = number,
    EPX_STATUS_LIST(EPX_STATUS_ENUM)
#undef EPX_STATUS_ENUM
} epx_status_t;

#endif
