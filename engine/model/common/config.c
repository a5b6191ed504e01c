/* config.json: which architecture, then that architecture's own reader. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/str.h"
#include "engine/model/common/arch.h"

const char *epx_model_architectures(void) {
    static _Thread_local char text[1024];
    size_t at = 0;
    text[0] = 0;
    for (int i = 0; epx_arch_at(i) && at < sizeof text; i++)
        at += (size_t)snprintf(text + at, sizeof text - at, "%s%s", i ? ", " : "", epx_arch_at(i)->architecture);
    return text;
}

const char *epx_model_architecture(const epx_model_config_t *cfg) { return cfg->arch->architecture; }

static epx_status_t find_arch(const epx_json_doc_t *doc, const epx_arch_t **out) {
    const json_t *list = json_object_get(doc->root, "architectures"), *first = json_array_get(list, 0);
    if (!json_is_string(first))
        return epx_fail(EPX_ERR_FORMAT, "%s: architectures is missing or not a list of names, supported: %s", doc->name,
                        epx_model_architectures());
    *out = epx_arch_find(json_string_value(first));
    if (!*out)
        return epx_fail(EPX_ERR_UNSUPPORTED, "%s: unknown architecture \"%.100s\", supported: %s", doc->name,
                        json_string_value(first), epx_model_architectures());
    const char *type;
    EPX_TRY(epx_json_string_or(doc, "model_type", (*out)->model_type, &type));
    if (strcmp(type, (*out)->model_type) != 0)
        return epx_fail(EPX_ERR_FORMAT, "%s: model_type is \"%.100s\", expected \"%s\" with %s", doc->name, type,
                        (*out)->model_type, (*out)->architecture);
    return EPX_OK;
}

epx_status_t epx_model_config_parse(const char *name, const char *json, size_t n_bytes, epx_model_config_t *out_cfg) {
    epx_json_doc_t doc;
    epx_model_config_t cfg = {0};
    EPX_TRY(epx_json_doc_parse(name, json, n_bytes, &doc));
    epx_status_t s = find_arch(&doc, &cfg.arch);
    if (s == EPX_OK) s = cfg.arch->read_config(&doc, &cfg);
    if (s == EPX_OK) s = epx_json_eos(&doc, cfg.vocab, cfg.eos_ids, &cfg.n_eos);
    epx_json_doc_fini(&doc);
    if (s == EPX_OK) *out_cfg = cfg;
    return s;
}

epx_status_t epx_model_config_load(const char *dir, epx_model_config_t *out_cfg) {
    char path[4096];
    char *text;
    size_t n_bytes;
    if (snprintf(path, sizeof path, "%s/config.json", dir) >= (int)sizeof path)
        return epx_fail(EPX_ERR_ARG, "model path has %zu characters, at most %zu", strlen(dir), sizeof path - 16);
    EPX_TRY(epx_read_file(path, EPX_JSON_FILE_MAX_BYTES, &text, &n_bytes));
    epx_status_t s = epx_model_config_parse(path, text, n_bytes, out_cfg);
    free(text);
    return s;
}
