/* Version, status texts, last error, log sink. Any thread, except epx_set_log(). */
#include "epx/epx.h"

#include <stddef.h>

#include "base/log.h"
#include "base/status.h"

#define STR2(x) #x
#define STR(x) STR2(x)

const char *epx_version(void) { return STR(EPX_VERSION_MAJOR) "." STR(EPX_VERSION_MINOR) "." STR(EPX_VERSION_PATCH); }

const char *epx_status_text(epx_status_t s) {
    static const struct {
        int number;
        const char *text;
    } table[] = {
#define ROW(name, number, text) {number, text},
        EPX_STATUS_LIST(ROW)
#undef ROW
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if (table[i].number == (int)s) return table[i].text;
    return "unknown status";
}

const char *epx_last_error(void) { return epx_error_message(); }

void epx_set_log(epx_log_fn fn, void *ctx) { epx_log_set_sink(fn, ctx); }
