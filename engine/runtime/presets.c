/* The table of serving-level exchange names. See presets.h. The predicates are SGLang's (moe/utils.py: is_deepep_class_backend
 * and the tests for skipping the all-reduce after the experts). */
#include "engine/runtime/presets.h"

#include <string.h>

static const epx_moe_preset_t presets[] = {
    {"auto", NULL, "low_latency|normal", 0, 0, 1, 0, 0, "chosen by the library: the first backend that the transport can carry"},
    {"none", "collective", "low_latency|normal", 0, 0, 1, 0, 0, "as asked: all-gather of tokens, rows or partial sums back"},
    {"pplx", "onesided", "low_latency", 0, 1, 1, 1, 1,
     "as asked: rows go to the ranks of their experts, weights are applied at combine"},
    {"deepep", "onesided", "low_latency|normal", 1, 1, 1, 1, 0, "as asked: rows go to the ranks of their experts"},
};

int epx_moe_has_mode(const epx_moe_preset_t *p, const char *mode) {
    size_t n = mode ? strlen(mode) : 0;
    if (n == 0) return 0;
    for (const char *m = p->modes; m; m = strchr(m, '|') ? strchr(m, '|') + 1 : NULL)
        if (strncmp(m, mode, n) == 0 && (m[n] == '|' || m[n] == 0)) return 1;
    return strcmp(mode, "auto") == 0;
}

int epx_ep_fits(int ep, int attn) { return ep % attn == 0 || attn % ep == 0; }

const epx_moe_preset_t *epx_moe_preset_at(size_t i) { return i < sizeof presets / sizeof presets[0] ? &presets[i] : NULL; }

const epx_moe_preset_t *epx_moe_preset(const char *name) {
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++)
        if (name && strcmp(presets[i].name, name) == 0) return &presets[i];
    return NULL;
}
