/* Growable byte string and small string helpers. Not thread-safe per object. */
#ifndef EPX_BASE_STR_H
#define EPX_BASE_STR_H

#include <stddef.h>

#include "base/status.h"

/* Owned, always NUL-terminated once non-empty; zero-initialise with {0}; may hold NUL bytes. */
typedef struct {
    char *data; /* owned; NULL while empty */
    size_t n_bytes;
    size_t cap_bytes;
} epx_str_t;

epx_status_t epx_str_append(epx_str_t *s, const char *data, size_t n_bytes);
epx_status_t epx_str_append_z(epx_str_t *s, const char *text);
epx_status_t epx_str_printf(epx_str_t *s, const char *fmt, ...) EPX_PRINTF(2, 3);
void epx_str_clear(epx_str_t *s);
void epx_str_fini(epx_str_t *s);
/* "" instead of NULL. */
const char *epx_str_z(const epx_str_t *s);

/* Whole regular file into memory, NUL-terminated, at most max_bytes; anything else, a FIFO too, is refused at once.
 *out_data is owned by the caller (free). */
epx_status_t epx_read_file(const char *path, size_t max_bytes, char **out_data, size_t *out_bytes);
/* Edit distance of two short words, for "did you mean". */
int epx_edit_distance(const char *a, const char *b);

#endif
