/* Text of one choice as it grows: bytes of tokens in, whole UTF-8 characters out, cut before the first stop string.
 * Pure. Not thread-safe per object. What comes out does not depend on how the bytes were split into pushes. */
#ifndef EPX_SERVER_HTTP_TEXT_STREAM_H
#define EPX_SERVER_HTTP_TEXT_STREAM_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "base/str.h"

enum { EPX_API_MAX_STOPS = 4, EPX_API_MAX_STOP_BYTES = 1024 };

typedef struct {
    const char *text; /* borrowed for the stream's life */
    uint16_t n_bytes; /* >= 1 */
    uint16_t matched; /* longest suffix of the input that begins this string */
    uint16_t *border; /* owned, [n_bytes]: length of the longest proper border of each prefix */
} epx_text_stop_t;

typedef struct {
    epx_str_t held; /* bytes that came in and are not out yet */
    epx_text_stop_t stops[EPX_API_MAX_STOPS];
    int n_stops;
    size_t n_in, n_out; /* bytes pushed; of these, bytes that are text now */
    int stopped;        /* a stop string was seen: further bytes are dropped */
    int stopped_by;     /* which */
} epx_text_stream_t;

/* s: zeroed. stops [n_stops], each 1..EPX_API_MAX_STOP_BYTES bytes, borrowed until epx_text_stream_fini. */
epx_status_t epx_text_stream_init(epx_text_stream_t *s, const char *const *stops, const size_t *stop_bytes, int n_stops);
/* Add the bytes of a token; append to out what can no longer be part of a stop string or of an unfinished character. The stop
 * string that ends first wins, the longest of those that end together. Invalid UTF-8 comes out as U+FFFD.
 * Sets s->stopped. Returns EPX_OK or EPX_ERR_NOMEM. */
epx_status_t epx_text_stream_push(epx_text_stream_t *s, const char *bytes, size_t n_bytes, epx_str_t *out);
/* No more bytes will come: append what was held back. */
epx_status_t epx_text_stream_finish(epx_text_stream_t *s, epx_str_t *out);
void epx_text_stream_fini(epx_text_stream_t *s);

#endif
