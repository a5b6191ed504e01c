/* Bodies of the generating endpoints through the parsers, and what they say through the writer. The first byte picks the
 * endpoint: bit 1 means /generate, else bit 0 means chat. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "server/http/native.h"
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

static void check_native(const char *body, size_t n_bytes) {
    epx_api_request_t r;
    epx_api_error_t err = {0};
    epx_native_t *own = NULL;
    if (epx_native_parse(body, n_bytes, &limits, 2, &r, &own, &err) < 0) {
        check_error(&err);
        return;
    }
    EPX_ASSERT(r.n_prompts >= 1 && r.n_prompts == own->n_prompts && r.n * r.n_prompts <= EPX_API_MAX_CHOICES);
    EPX_ASSERT(own->dp_rank_plus_1 >= 0 && own->dp_rank_plus_1 <= 2);
    for (int i = 0; i < own->n_prompts; i++) EPX_ASSERT(own->each[i].max_tokens >= -1 && own->each[i].n == r.n);
    epx_native_free(own);
    epx_api_request_fini(&r);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    epx_api_request_t r;
    epx_api_error_t err = {0};
    if (n_bytes == 0) return 0;
    if (data[0] & 2) {
        check_native((const char *)data + 1, n_bytes - 1);
        return 0;
    }
    if (epx_api_parse((const char *)data + 1, n_bytes - 1, data[0] & 1, &limits, &r, &err) >= 0) {
        check_request(&r);
        epx_api_request_fini(&r);
    } else {
        check_error(&err);
    }
    return 0;
}
