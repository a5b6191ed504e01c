/* Thread-local error message and invariant failures. Any thread. */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MESSAGE_BYTES = 1024 };

static _Thread_local char message[MESSAGE_BYTES];

epx_status_t epx_fail(epx_status_t s, const char *fmt, ...) {
    char text[MESSAGE_BYTES]; /* the arguments may point into `message` */
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    memcpy(message, text, sizeof message);
    return s;
}

epx_status_t epx_fail_errno(epx_status_t s, int err, const char *fmt, ...) {
    char text[MESSAGE_BYTES];
    char room[128];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return epx_fail(s, "%s: %s", text, strerror_r(err, room, sizeof room)); /* the GNU form: `room` may stay unused */
}

epx_status_t epx_fail_context(epx_status_t s, const char *fmt, ...) {
    char text[MESSAGE_BYTES];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return epx_fail(s, "%s: %s", text, message);
}

const char *epx_error_message(void) { return message; }

void epx_assert_failed(const char *cond, const char *file, int line) {
    fprintf(stderr, "epx: broken invariant: %s (%s:%d)\n", cond, file, line);
    abort();
}
