/* The log callback. Any thread may log. */
#include "base/log.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

static epx_log_sink_fn sink;
static void *sink_ctx;

void epx_log_set_sink(epx_log_sink_fn fn, void *ctx) {
    sink = fn;
    sink_ctx = ctx;
}

void epx_log(int level, const char *fmt, ...) {
    char text[1024];
    va_list ap;
    if (sink == NULL) return;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    sink(sink_ctx, level, text);
}
