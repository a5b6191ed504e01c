/* All pages, and epx(1) in roff made from them. */
#include <stdio.h>
#include <string.h>

#include "app/commands.h"
#include "app/page.h"
#include "epx/epx.h"

const epx_page_t *epx_page_at(int i) {
    static const epx_page_t *const others[] = {&epx_page_bench_a2a, &epx_page_bench_ops, &epx_page_bench_serve, &epx_page_plan};
    if (i < EPX_CMD_COUNT) return epx_settings_page((epx_command_t)i);
    i -= EPX_CMD_COUNT;
    return i < (int)(sizeof others / sizeof others[0]) ? others[i] : NULL;
}

int epx_page_print_help(const epx_page_t *p) {
    epx_str_t text = {0};
    if (epx_page_help(p, &text) < 0) return epx_print_error();
    fputs(text.data, stdout);
    epx_str_fini(&text);
    return 0;
}

/* Text that roff takes as it stands: no control lines, no hyphens of another kind. */
static epx_status_t roff_text(epx_str_t *out, const char *text) {
    int at_start = 1;
    for (; *text; text++) {
        if (at_start && (*text == '.' || *text == '\'')) EPX_TRY(epx_str_append_z(out, "\\&"));
        if (*text == '\\') EPX_TRY(epx_str_append_z(out, "\\e"));
        else if (*text == '-') EPX_TRY(epx_str_append_z(out, "\\-"));
        else EPX_TRY(epx_str_append(out, text, 1));
        at_start = *text == '\n';
    }
    return EPX_OK;
}

static epx_status_t roff_line(epx_str_t *out, const char *macro, const char *text) {
    EPX_TRY(epx_str_printf(out, "%s", macro));
    EPX_TRY(roff_text(out, text));
    return epx_str_append_z(out, "\n");
}

static epx_status_t roff_block(epx_str_t *out, const char *text) {
    EPX_TRY(epx_str_append_z(out, ".nf\n"));
    EPX_TRY(roff_text(out, text));
    return epx_str_append_z(out, text[0] && text[strlen(text) - 1] == '\n' ? ".fi\n" : "\n.fi\n");
}

static epx_status_t roff_option(epx_str_t *out, const epx_option_t *o) {
    epx_str_t line = {0};
    epx_status_t s = epx_option_usage(&line, o);
    if (s >= 0) s = roff_line(out, ".TP\n.B ", line.data);
    if (s >= 0) s = roff_line(out, "", o->help);
    epx_str_fini(&line);
    return s;
}

static epx_status_t roff_page(epx_str_t *out, const epx_page_t *p) {
    EPX_TRY(roff_line(out, ".SH ", p->name));
    EPX_TRY(roff_line(out, "", p->purpose));
    EPX_TRY(roff_line(out, ".SS ", "Synopsis"));
    EPX_TRY(roff_block(out, p->synopsis));
    EPX_TRY(roff_line(out, ".SS ", "Description"));
    EPX_TRY(roff_line(out, "", p->description));
    EPX_TRY(roff_line(out, ".SS ", "Options"));
    for (size_t i = 0; i < p->table->n_options; i++)
        if ((p->table->options[i].commands >> p->command_idx) & 1u) EPX_TRY(roff_option(out, &p->table->options[i]));
    EPX_TRY(roff_line(out, ".SS ", "Examples"));
    EPX_TRY(roff_block(out, p->examples));
    if (p->environment) {
        EPX_TRY(roff_line(out, ".SS ", "Environment"));
        EPX_TRY(roff_block(out, p->environment));
    }
    if (!p->exit_status) return EPX_OK;
    EPX_TRY(roff_line(out, ".SS ", "Exit status"));
    return roff_block(out, p->exit_status);
}

epx_status_t epx_manual_roff(epx_str_t *out) {
    EPX_TRY(
        epx_str_printf(out,
                       ".TH EPX 1 \"\" \"epx %s\" \"User Commands\"\n.SH NAME\nepx \\- Mixture\\-of\\-Experts language models "
                       "on expert\\-parallel ranks\n.SH SYNOPSIS\n.B epx\n.I COMMAND\n[\\fIOPTION\\fR]...\n.SH DESCRIPTION\n",
                       epx_version()));
    EPX_TRY(
        roff_line(out, "",
                  "A server for Mixture-of-Experts models whose experts are spread over several ranks, and the tools around it. "
                  "Values of options follow as --name VALUE or --name=VALUE; unambiguous beginnings of names are accepted."));
    for (int i = 0; epx_page_at(i); i++) {
        EPX_TRY(roff_line(out, ".TP\n.B ", epx_page_at(i)->name));
        EPX_TRY(roff_line(out, "", epx_page_at(i)->purpose));
    }
    EPX_TRY(roff_line(out, ".TP\n.B ", "epx completion bash|zsh|fish"));
    EPX_TRY(roff_line(out, "", "print the completion script of a shell"));
    EPX_TRY(roff_line(out, ".TP\n.B ", "epx man"));
    EPX_TRY(roff_line(out, "", "print this page"));
    for (int i = 0; epx_page_at(i); i++) EPX_TRY(roff_page(out, epx_page_at(i)));
    EPX_TRY(epx_str_append_z(out,
                             ".SH ENVIRONMENT\n.TP\n.B EPX_LOG\nerror, warning, info or debug: log lines of that level and above "
                             "go to standard error.\n.SH EXIT STATUS\n"));
    return roff_block(out, epx_page_exit_status);
}
