/* The pages of the manual, one a command: what --help prints, and what the man page and the completions of shells are made of. */
#ifndef EPX_APP_PAGE_H
#define EPX_APP_PAGE_H

#include "app/options.h"

typedef struct {
    const char *name; /* "epx bench serve" */
    const char *purpose, *synopsis, *description, *examples;
    const char *environment; /* beside EPX_LOG: paragraphs "NAME  text", separated by newlines; NULL: none */
    const char *exit_status; /* lines; NULL: the usual ones */
    const char *words;       /* "a|b|c" that may follow the name; NULL: none */
    const epx_option_table_t *table;
    int command_idx; /* in the table */
} epx_page_t;

extern const char *const epx_page_exit_status; /* the usual ones */
extern const epx_page_t epx_page_bench_a2a, epx_page_bench_ops, epx_page_bench_serve, epx_page_plan;

/* The i-th page in the order of the manual; NULL past the end. */
const epx_page_t *epx_page_at(int i);
/* The whole --help text. EPX_ERR_NOMEM. */
epx_status_t epx_page_help(const epx_page_t *p, epx_str_t *out);
/* Print it; returns the exit code. */
int epx_page_print_help(const epx_page_t *p);
/* epx(1) in roff's man macros, all commands on one page. */
epx_status_t epx_manual_roff(epx_str_t *out);
/* Completion script; shell is "bash", "zsh" or "fish", another is EPX_ERR_ARG. */
epx_status_t epx_manual_completion(const char *shell, epx_str_t *out);

#endif
