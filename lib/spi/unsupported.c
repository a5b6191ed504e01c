/* Refusals. Any thread. */
#include "spi/unsupported.h"

#include "base/status.h"

epx_status_t epx_unsupported_call(const char *call, const char *instead) {
    return epx_fail(EPX_ERR_UNSUPPORTED, "%s is not built yet; %s", call, instead);
}

epx_status_t epx_unsupported_value(const char *field, const char *value, const char *legal) {
    return epx_fail(EPX_ERR_UNSUPPORTED, "%s is %s, which is not built yet; built: %s", field, value, legal);
}
