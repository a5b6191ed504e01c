/* Fuzz: config.json. Whatever is accepted must have sizes that the model can trust. */
#include <stddef.h>
#include <stdint.h>

#include "engine/model/model.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    epx_model_config_t c;
    if (epx_model_config_parse("fuzz", (const char *)data, n_bytes, &c) != EPX_OK) return 0;
    EPX_ASSERT(c.hidden >= 1 && c.n_layers >= 1 && c.n_heads >= 1 && c.n_kv_heads >= 1 && c.head_dim >= 2 && c.vocab >= 1);
    EPX_ASSERT(c.head_dim % 2 == 0 && c.n_heads % c.n_kv_heads == 0 && c.top_k >= 1 && c.top_k <= c.n_experts &&
               c.max_position >= 1);
    for (int i = 0; i < c.n_eos; i++) EPX_ASSERT(c.eos_ids[i] >= 0 && c.eos_ids[i] < c.vocab);
    return 0;
}
