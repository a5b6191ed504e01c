/* Fuzz chat templates: any source compiles or is refused, and renders within its limits over a fixed conversation. */
#include <stdint.h>
#include <stdlib.h>

#include <jansson.h>

#include "engine/tokenizer/chat_template.h"
#include "engine/tokenizer/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char messages_json[] =
    "[{\"role\":\"system\",\"content\":\"s\"},{\"role\":\"user\",\"content\":\"a<think>b</think>\\u0000\\u00e9\"},"
    "{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":"
    "{\"x\":[1,-2.5,true,null,{}]}}}]},{\"role\":\"tool\",\"content\":\"r\"}]";
static const char extra_json[] = "{\"tools\":[{\"name\":\"f\"}],\"d\":{\"a\":1,\"b\":[]},\"l\":[3,1,2],\"s\":\"x\\ny\",\"n\":7}";

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static json_t *messages, *extra; /* parsed once */
    epx_chat_template_t *t = NULL;
    epx_str_t out = {0};
    if (messages == NULL) {
        messages = json_loads(messages_json, JSON_ALLOW_NUL, NULL);
        extra = json_loads(extra_json, 0, NULL);
        if (messages == NULL || extra == NULL) abort();
    }
    if (epx_chat_template_create((const char *)data, size, &t) != EPX_OK) return 0;
    if (epx_chat_template_render(t, messages, 1, extra, &out) == EPX_OK && !epx_utf8_valid(epx_str_z(&out), out.n_bytes, NULL))
        abort();
    epx_str_fini(&out);
    epx_chat_template_destroy(t);
    return 0;
}
