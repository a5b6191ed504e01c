/* For tests only: look inside a rank. */
#ifndef EPX_ENGINE_RUNTIME_RANK_TEST_H
#define EPX_ENGINE_RUNTIME_RANK_TEST_H

#include "engine/model/model_test.h"
#include "engine/runtime/rank.h"

/* Before each token is drawn: logits [vocab] of request `id`, whose token_idx-th generated token it will be. Borrowed during the
 * call. */
typedef void (*epx_rank_logits_hook_fn)(void *ctx, uint64_t id, int32_t token_idx, const float *logits, int32_t vocab);
/* NULL ends it. */
void epx_rank_set_logits_hook(epx_rank_t *r, epx_rank_logits_hook_fn fn, void *ctx);
/* What epx_rank_create() runs with factor 1: the first MoE layer over all ranks against its experts one by one. Collective. */
epx_status_t epx_rank_self_test(epx_rank_t *r, double factor);
epx_model_t *epx_rank_model(epx_rank_t *r);

#endif
