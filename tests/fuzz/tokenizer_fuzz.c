/* Fuzz tokenizer.json: whatever loads must encode any valid text and decode what it made. The input is a tokenizer.json, a
 * newline, and a line of text to encode. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "engine/tokenizer/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void encode_and_decode(const epx_tokenizer_t *t, const char *text, size_t n_bytes) {
    int32_t *ids = NULL;
    size_t n = 0;
    epx_str_t s = {0};
    if (epx_tokenizer_encode(t, text, n_bytes, &ids, &n) != EPX_OK) return;
    if (epx_tokenizer_decode(t, ids, n, 0, &s) != EPX_OK) abort(); /* ids of our own are known */
    if (epx_tokenizer_decode(t, ids, n, 1, &s) != EPX_OK) abort();
    epx_str_fini(&s);
    free(ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char fixed[] = "the  aab\n\n12 e\u0301<x> \u4e2d'll \U0001f600";
    const char *json = (const char *)data, *text = size ? memrchr(data, '\n', size) : NULL;
    size_t n_json = text ? (size_t)(text - json) : size;
    epx_tokenizer_t *t = NULL;
    if (epx_tokenizer_create_from_memory("fuzz", json, n_json, &t) != EPX_OK) return 0;
    encode_and_decode(t, fixed, sizeof fixed - 1);
    if (text) encode_and_decode(t, text + 1, size - n_json - 1);
    epx_tokenizer_destroy(t);
    return 0;
}
