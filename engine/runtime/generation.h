/* What a model directory says about generation: end tokens and sampling defaults. Reads files; no state. */
#ifndef EPX_ENGINE_RUNTIME_GENERATION_H
#define EPX_ENGINE_RUNTIME_GENERATION_H

#include "base/status.h"
#include "engine/model/common/json_doc.h"
#include "engine/sample/sample.h"

typedef struct {
    epx_sampling_t
        sampling; /* fields of generation_config.json over epx_sampling_init(); "do_sample": false gives temperature 0 */
    int32_t eos_ids[EPX_MAX_EOS];
    int n_eos;
} epx_generation_defaults_t;

/* From DIR/generation_config.json where present; end tokens from DIR/config.json when the former names none. The model itself is
 * not checked here. EPX_ERR_FORMAT names file, field, value and legal values. */
epx_status_t epx_generation_defaults(const char *model_dir, epx_generation_defaults_t *out);

#endif
