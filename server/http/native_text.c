/* /tokenize and /detokenize. */
#include <stdlib.h>
#include <string.h>

#include "server/http/native.h"

static epx_status_t encode(epx_http_t *h, const json_t *text, json_t **out_ids, epx_api_error_t *err) {
    char shown[EPX_API_SHOW_BYTES];
    int32_t *ids = NULL;
    size_t n = 0;
    if (!json_is_string(text))
        return epx_api_fail(err, 400, "invalid_value", "prompt", "prompt: must be a string or a list of strings, got %s",
                            epx_api_show(text, shown));
    if (epx_tokenizer_encode(h->cfg.tokenizer, json_string_value(text), json_string_length(text), &ids, &n) < 0)
        return epx_api_fail(err, 400, "tokenizer", "prompt", "prompt: %s", epx_error_message());
    *out_ids = json_array();
    for (size_t i = 0; i < n; i++) json_array_append_new(*out_ids, json_integer(ids[i]));
    free(ids);
    return EPX_OK;
}

/* add_special_tokens makes no difference: the tokenizers that can be loaded add none. */
static epx_status_t check_flag(const json_t *root, const char *name, epx_api_error_t *err) {
    const json_t *v = json_object_get(root, name);
    char shown[EPX_API_SHOW_BYTES];
    if (!v || json_is_boolean(v) || json_is_null(v)) return EPX_OK;
    return epx_api_fail(err, 400, "invalid_value", name, "%s: must be true, false or null, got %s", name, epx_api_show(v, shown));
}

static epx_status_t tokenize(epx_http_t *h, const json_t *root, json_t **out, epx_api_error_t *err) {
    const json_t *prompt = json_object_get(root, "prompt");
    json_t *tokens = NULL, *count;
    EPX_TRY(check_flag(root, "add_special_tokens", err));
    if (!prompt) return epx_api_fail(err, 400, "missing_parameter", "prompt", "prompt: required, a string or a list of strings");
    if (json_is_array(prompt)) {
        tokens = json_array();
        count = json_array();
        for (size_t i = 0; i < json_array_size(prompt); i++) {
            json_t *ids = NULL;
            if (encode(h, json_array_get(prompt, i), &ids, err) < 0) {
                json_decref(tokens);
                json_decref(count);
                return EPX_ERR_ARG;
            }
            json_array_append_new(count, json_integer((json_int_t)json_array_size(ids)));
            json_array_append_new(tokens, ids);
        }
    } else {
        EPX_TRY(encode(h, prompt, &tokens, err));
        count = json_integer((json_int_t)json_array_size(tokens));
    }
    *out = json_pack("{s:o, s:o, s:i}", "tokens", tokens, "count", count, "max_model_len", h->max_tokens);
    return EPX_OK;
}

EPX_NATIVE_HANDLER(epx_native_tokenize) {
    static const char *const names[] = {"model", "prompt", "add_special_tokens", NULL};
    epx_api_error_t err;
    json_t *root, *out = NULL;
    (void)url, (void)out_call;
    if (epx_native_load(body, names, &root, &err) < 0) return epx_http_respond_error(conn, &err);
    epx_status_t s = tokenize(h, root, &out, &err);
    json_decref(root);
    return s < 0 ? epx_http_respond_error(conn, &err) : epx_native_respond(conn, 200, out);
}

static epx_status_t decode(epx_http_t *h, const json_t *list, int skip_special, json_t **out_text, epx_api_error_t *err) {
    size_t n = json_array_size(list);
    int32_t *ids = calloc(n + 1, sizeof *ids);
    epx_str_t bytes = {0}, text = {0};
    char shown[EPX_API_SHOW_BYTES];
    epx_status_t s = ids ? EPX_OK : epx_api_fail(err, 500, "internal_error", NULL, "out of memory");
    for (size_t i = 0; i < n && s >= 0; i++) {
        const json_t *v = json_array_get(list, i);
        if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) >= h->cfg.n_vocab)
            s = epx_api_fail(err, 400, "invalid_value", "tokens", "tokens: must be token ids from 0 to %d, got %s",
                             h->cfg.n_vocab - 1, epx_api_show(v, shown));
        else ids[i] = (int32_t)json_integer_value(v);
    }
    if (s >= 0 && epx_tokenizer_decode(h->cfg.tokenizer, ids, n, skip_special, &bytes) < 0)
        s = epx_api_fail(err, 400, "tokenizer", "tokens", "tokens: %s", epx_error_message());
    if (s >= 0 && epx_utf8_append_lossy(&text, epx_str_z(&bytes), bytes.n_bytes) < 0)
        s = epx_api_fail(err, 500, "internal_error", NULL, "out of memory");
    if (s >= 0) *out_text = json_stringn(epx_str_z(&text), text.n_bytes);
    free(ids);
    epx_str_fini(&bytes);
    epx_str_fini(&text);
    return s;
}

static epx_status_t detokenize(epx_http_t *h, const json_t *root, json_t **out, epx_api_error_t *err) {
    const json_t *tokens = json_object_get(root, "tokens"), *skip = json_object_get(root, "skip_special_tokens");
    int skip_special = !skip || !json_is_false(skip);
    json_t *text = NULL;
    EPX_TRY(check_flag(root, "skip_special_tokens", err));
    if (!json_is_array(tokens))
        return epx_api_fail(err, 400, "missing_parameter", "tokens", "tokens: required, a list of token ids or of such lists");
    if (!json_is_array(json_array_get(tokens, 0))) {
        EPX_TRY(decode(h, tokens, skip_special, &text, err));
    } else {
        text = json_array();
        for (size_t i = 0; i < json_array_size(tokens); i++) {
            json_t *one = NULL;
            const json_t *ids = json_array_get(tokens, i);
            epx_status_t s = json_is_array(ids)
                                 ? decode(h, ids, skip_special, &one, err)
                                 : epx_api_fail(err, 400, "invalid_value", "tokens", "tokens: lists and ids are mixed");
            if (s < 0) {
                json_decref(text);
                return s;
            }
            json_array_append_new(text, one);
        }
    }
    *out = json_pack("{s:o}", "text", text);
    return EPX_OK;
}

EPX_NATIVE_HANDLER(epx_native_detokenize) {
    static const char *const names[] = {"model", "tokens", "skip_special_tokens", NULL};
    epx_api_error_t err;
    json_t *root, *out = NULL;
    (void)url, (void)out_call;
    if (epx_native_load(body, names, &root, &err) < 0) return epx_http_respond_error(conn, &err);
    epx_status_t s = detokenize(h, root, &out, &err);
    json_decref(root);
    return s < 0 ? epx_http_respond_error(conn, &err) : epx_native_respond(conn, 200, out);
}
