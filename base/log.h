/* One process-wide log callback. Rooms log once, where an error is first detected; the default drops everything. */
#ifndef EPX_BASE_LOG_H
#define EPX_BASE_LOG_H

#include "base/compiler.h"

enum { EPX_LOG_ERROR = 0, EPX_LOG_WARN = 1, EPX_LOG_INFO = 2, EPX_LOG_DEBUG = 3 };
typedef void (*epx_log_sink_fn)(void *ctx, int level, const char *message);
/* Not thread-safe against concurrent epx_log(): call it at start. */
void epx_log_set_sink(epx_log_sink_fn fn, void *ctx);
void epx_log(int level, const char *fmt, ...) EPX_PRINTF(2, 3);

#endif
