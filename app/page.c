/* The --help text of a page. */
#include "app/page.h"

#include <stdio.h>
#include <string.h>

const char *const epx_page_exit_status = "0  done\n1  failed: the message says what and where\n"
                                         "2  wrong settings: every wrong one is named, nothing was started\n";

static epx_status_t append_lines(epx_str_t *out, const char *lines) {
    for (const char *end; *lines && (end = strchr(lines, '\n')); lines = end + 1)
        EPX_TRY(epx_str_printf(out, "    %.*s\n", (int)(end - lines), lines));
    return EPX_OK;
}

static epx_status_t append_paragraphs(epx_str_t *out, const char *text) {
    char line[512];
    while (text && *text) {
        int n = (int)strcspn(text, "\n");
        snprintf(line, sizeof line, "%.*s", n, text);
        EPX_TRY(epx_options_wrap(out, line, 4));
        text += n + (text[n] == '\n');
    }
    return EPX_OK;
}

epx_status_t epx_page_help(const epx_page_t *p, epx_str_t *out) {
    EPX_TRY(epx_str_printf(out, "NAME\n    %s - %s\n\nSYNOPSIS\n    %s\n\nDESCRIPTION\n", p->name, p->purpose, p->synopsis));
    EPX_TRY(epx_options_wrap(out, p->description, 4));
    EPX_TRY(epx_str_append_z(out, "\nOPTIONS\n"));
    EPX_TRY(
        epx_options_wrap(out, "Values follow as --name VALUE or --name=VALUE. Unambiguous beginnings of names are accepted.", 4));
    EPX_TRY(epx_str_append_z(out, "\n"));
    EPX_TRY(epx_options_help(p->table, p->command_idx, out));
    EPX_TRY(epx_str_printf(out, "\nEXAMPLES\n%s\nENVIRONMENT\n", p->examples));
    EPX_TRY(epx_options_wrap(
        out, "EPX_LOG  error, warning, info or debug: log lines of that level and above go to standard error.", 4));
    EPX_TRY(append_paragraphs(out, p->environment));
    EPX_TRY(epx_str_append_z(out, "\nEXIT STATUS\n"));
    return append_lines(out, p->exit_status ? p->exit_status : epx_page_exit_status);
}
