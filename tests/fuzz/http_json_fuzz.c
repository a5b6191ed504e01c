/* Bodies of the two generating endpoints through the parser, and what it says through the writer. The first byte picks the
 * endpoint: odd means chat. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "server/http/openai_request.h"
#include "server/http/openai_write.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static const epx_api_limits_t limits = {.model_name = "m",
                                        .n_vocab = 1000,
                                        .max_context = 128,
                                        .default_sampling = {.temperature = 1.0f, .top_p = 1.0f, .top_k = -1}};

static void check_request(const epx_api_request_t *r) {
    EPX_ASSERT(r->n >= 1 && r->n <= EPX_API_MAX_N);
    EPX_ASSERT(r->max_tokens >= 0);
    EPX_ASSERT(r->sampling.temperature >= 0 && r->sampling.temperature <= 2);
    EPX_ASSERT(r->sampling.top_p > 0 && r->sampling.top_p <= 1);
    EPX_ASSERT(r->sampling.min_p >= 0 && r->sampling.min_p <= 1);
    EPX_ASSERT(r->sampling.top_k >= -1);
    EPX_ASSERT(r->n_stop >= 0 && r->n_stop <= EPX_API_MAX_STOPS);
    for (int i = 0; i < r->n_stop; i++) EPX_ASSERT(r->stop_bytes[i] >= 1 && r->stop_bytes[i] <= EPX_API_MAX_STOP_BYTES);
    for (int i = 0; i < r->n_stop_ids; i++) EPX_ASSERT(r->stop_ids[i] >= 0 && r->stop_ids[i] < limits.n_vocab);
    EPX_ASSERT(r->is_chat ? json_array_size(r->messages) > 0 : r->n_prompts > 0);
}

static void check_error(const epx_api_error_t *err) {
    epx_str_t out = {0};
    EPX_ASSERT(err->status >= 400 && err->status < 600 && err->message[0] && err->type && err->code);
    EPX_ASSERT(epx_api_write_error(err, &out) >= 0);
    json_t *root = json_loadb(out.data, out.n_bytes, 0, NULL);
    EPX_ASSERT(json_is_string(json_object_get(json_object_get(root, "error"), "message")));
    json_decref(root);
    epx_str_fini(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    epx_api_request_t r;
    epx_api_error_t err = {0};
    if (n_bytes == 0) return 0;
    if (epx_api_parse((const char *)data + 1, n_bytes - 1, data[0] & 1, &limits, &r, &err) >= 0) {
        check_request(&r);
        epx_api_request_fini(&r);
    } else {
        check_error(&err);
    }
    return 0;
}
