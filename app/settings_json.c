/* Settings as JSON, for /get_server_info. */
#include "app/settings_json.h"

#include <inttypes.h>
#include <string.h>

static epx_status_t append_text(epx_str_t *out, const char *text) {
    if (!text) return epx_str_append_z(out, "null");
    EPX_TRY(epx_str_append_z(out, "\""));
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\') EPX_TRY(epx_str_printf(out, "\\%c", c));
        else if (c < 0x20) EPX_TRY(epx_str_printf(out, "\\u%04x", c));
        else EPX_TRY(epx_str_append(out, text, 1));
    }
    return epx_str_append_z(out, "\"");
}

epx_status_t epx_options_value(const epx_option_t *o, const void *settings, epx_str_t *out) {
    const char *at = (const char *)settings + o->offset, *text;
    int64_t number;
    double real;
    int on;
    switch (o->kind) {
    case EPX_OPTION_FLAG:
    case EPX_OPTION_NOTED_FLAG:
    case EPX_OPTION_NOTED_VALUE:
    case EPX_OPTION_NOTED_LIST:
        memcpy(&on, at, sizeof on);
        return epx_str_append_z(out, on ? "true" : "false");
    case EPX_OPTION_INT:
        memcpy(&number, at, sizeof number);
        return epx_str_printf(out, "%" PRId64, number);
    case EPX_OPTION_REAL:
        memcpy(&real, at, sizeof real);
        return epx_str_printf(out, "%.15g", real);
    default:
        memcpy(&text, at, sizeof text);
        return append_text(out, text);
    }
}

epx_status_t epx_options_json(const epx_option_table_t *t, int command_idx, const void *settings, epx_str_t *out) {
    int n = 0;
    EPX_TRY(epx_str_append_z(out, "{"));
    for (size_t i = 0; i < t->n_options; i++) {
        const epx_option_t *o = &t->options[i];
        if (((o->commands >> command_idx) & 1u) == 0 || strcmp(o->name, "help") == 0 || strstr(o->name, "key")) continue;
        EPX_TRY(epx_str_append_z(out, n++ ? ",\"" : "\""));
        for (const char *c = o->name; *c; c++) EPX_TRY(epx_str_append(out, *c == '-' ? "_" : c, 1));
        EPX_TRY(epx_str_append_z(out, "\":"));
        EPX_TRY(epx_options_value(o, settings, out));
    }
    return epx_str_append_z(out, "}");
}
