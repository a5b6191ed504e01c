/* One place for "not built yet" refusals of public calls, so that they read alike. */
#ifndef EPX_SPI_UNSUPPORTED_H
#define EPX_SPI_UNSUPPORTED_H

#include "epx/epx_status.h"

/* "call: what is not built yet; instead". Returns EPX_ERR_UNSUPPORTED. */
epx_status_t epx_unsupported_call(const char *call, const char *instead);
/* "field is value, which is not built yet; built: legal". Returns EPX_ERR_UNSUPPORTED. */
epx_status_t epx_unsupported_value(const char *field, const char *value, const char *legal);

#endif
