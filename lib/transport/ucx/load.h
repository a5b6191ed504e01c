/* Finds and opens libepx_ucx.so once. */
#ifndef EPX_UCX_LOAD_H
#define EPX_UCX_LOAD_H

#include "epx/epx_status.h"
#include "transport/ucx/wire.h"

/* The module, or EPX_ERR_UNSUPPORTED with the reason. The same answer each time. Any thread. */
epx_status_t epx_ucx_load(const epx_wire_module_t **out_module);

#endif
