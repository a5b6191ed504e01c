/* Fuzz: a whole safetensors file (length word, header, data) in memory. Whatever is accepted must have ranges inside the file. */
#include <stddef.h>
#include <stdint.h>

#include "engine/model/load/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    uint64_t n_json;
    epx_safetensors_t st;
    uint8_t first[8] = {0};
    for (size_t i = 0; i < 8 && i < n_bytes; i++) first[i] = data[i];
    if (epx_safetensors_header_bytes("fuzz", first, n_bytes, &n_json) != EPX_OK) return 0;
    if (epx_safetensors_parse("fuzz", (const char *)data + 8, n_json, n_bytes, &st) != EPX_OK) return 0;
    for (size_t i = 0; i < st.n; i++) {
        const epx_safetensors_entry_t *e = &st.entries[i];
        EPX_ASSERT(e->file_off >= 8 + n_json && e->file_off <= n_bytes && e->tensor.n_bytes <= n_bytes - e->file_off);
        EPX_ASSERT(epx_safetensors_find(&st, e->tensor.name) == e);
    }
    epx_safetensors_fini(&st);
    return 0;
}
