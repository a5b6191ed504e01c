/* For tests only: look at the routing and the residual stream of each layer. */
#ifndef EPX_ENGINE_MODEL_MODEL_TEST_H
#define EPX_ENGINE_MODEL_MODEL_TEST_H

#include "engine/model/model.h"

/* Hand every layer's routing and residual stream to fn; NULL ends it. */
void epx_model_set_probe(epx_model_t *m, epx_model_probe_fn fn, void *ctx);

#endif
