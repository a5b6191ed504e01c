/* For tests only: look at the routing and the residual stream of each layer. */
#ifndef EPX_ENGINE_MODEL_MODEL_TEST_H
#define EPX_ENGINE_MODEL_MODEL_TEST_H

#include "engine/model/model.h"

/* Called after each layer: ids, weights [n_rows, top_k] as the router chose them (NULL in a layer without experts); hidden
 * [n_rows, hidden] after the layer. All borrowed during the call. */
typedef void (*epx_model_probe_fn)(void *ctx, int layer, int32_t n_rows, const int32_t *ids, const float *weights,
                                   const float *hidden);
/* NULL ends it. */
void epx_model_set_probe(epx_model_t *m, epx_model_probe_fn fn, void *ctx);

#endif
