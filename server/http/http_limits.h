/* The limits of the HTTP face that are not settings. */
#ifndef EPX_SERVER_HTTP_LIMITS_H
#define EPX_SERVER_HTTP_LIMITS_H

enum {
    EPX_HTTP_N_THREADS = 2,
    EPX_HTTP_MAX_CONNECTIONS = 4096, /* the seed's benchmark has 2,048 */
    EPX_HTTP_MAX_LIVE = 4096,
    EPX_HTTP_CLIENT_TIMEOUT_S = 30,
    EPX_HTTP_KEEPALIVE_S = 15,
    EPX_HTTP_SPARE_FDS = 64,              /* descriptors left to the rest of the process */
    EPX_HTTP_CONNECTION_BYTES = 32 << 10, /* request line, headers and write buffer of a connection */
    EPX_HTTP_STREAM_BLOCK_BYTES = 8 << 10,
    EPX_HTTP_MAX_BODY_BYTES = 8 << 20,
    EPX_HTTP_MAX_DRAIN_BYTES = 16 << 20,       /* of a chunked body that is too large, before the connection is closed */
    EPX_HTTP_MAX_ALL_BODIES_BYTES = 128 << 20, /* bodies being received by all connections together */
    EPX_HTTP_WATCH_MS = 125,                   /* a client that left is noticed within 250 ms, also by a machine that is busy */
    EPX_HTTP_STOP_MS = 2000,
    EPX_HTTP_COMPLETION_TOKENS = 16, /* OpenAI's default of max_tokens for /v1/completions */
};

#endif
