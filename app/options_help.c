/* Help text from the option table. */
#include <string.h>

#include "app/options.h"

enum { COLUMNS = 80, NAME_INDENT = 4, HELP_INDENT = 8 };

epx_status_t epx_options_wrap(epx_str_t *out, const char *text, int indent) {
    int column = 0;
    while (*text) {
        int n = (int)strcspn(text, " \n");
        if (column && column + 1 + n > COLUMNS) {
            EPX_TRY(epx_str_append_z(out, "\n"));
            column = 0;
        }
        EPX_TRY(column ? epx_str_append_z(out, " ") : epx_str_printf(out, "%*s", indent, ""));
        column = column ? column + 1 : indent;
        EPX_TRY(epx_str_append(out, text, (size_t)n));
        column += n;
        text += n;
        text += strspn(text, " \n");
    }
    return epx_str_append_z(out, "\n");
}

static epx_status_t append_value(epx_str_t *out, const epx_option_t *o) {
    if (o->kind == EPX_OPTION_FLAG || o->kind == EPX_OPTION_NOTED_FLAG) return EPX_OK;
    if (o->kind == EPX_OPTION_CHOICE) {
        EPX_TRY(epx_str_append_z(out, " {"));
        for (const char *p = o->choices; *p; p++) EPX_TRY(epx_str_append(out, *p == '|' ? "," : p, 1));
        return epx_str_append_z(out, "}");
    }
    return epx_str_printf(out, " %s", o->value ? o->value : "VALUE");
}

epx_status_t epx_option_usage(epx_str_t *out, const epx_option_t *o) {
    EPX_TRY(epx_str_printf(out, "--%s", o->name));
    if (o->alias) EPX_TRY(epx_str_printf(out, ", --%s", o->alias));
    return append_value(out, o);
}

static epx_status_t append_option(epx_str_t *out, const epx_option_t *o) {
    EPX_TRY(epx_str_printf(out, "%*s", NAME_INDENT, ""));
    EPX_TRY(epx_option_usage(out, o));
    EPX_TRY(epx_str_append_z(out, "\n"));
    return epx_options_wrap(out, o->help, HELP_INDENT);
}

epx_status_t epx_options_help(const epx_option_table_t *t, int command_idx, epx_str_t *out) {
    for (size_t i = 0; i < t->n_options; i++)
        if ((t->options[i].commands >> command_idx) & 1u) EPX_TRY(append_option(out, &t->options[i]));
    return EPX_OK;
}
