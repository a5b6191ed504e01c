/* Command-line options from one table: parsing with getopt_long's habits (--name value, --name=value, unambiguous prefixes) and
 * the OPTIONS part of --help. Knows nothing of what the options mean. Pure; any thread. */
#ifndef EPX_APP_OPTIONS_H
#define EPX_APP_OPTIONS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/status.h"
#include "base/str.h"

typedef enum {
    EPX_OPTION_FLAG,   /* no value; int at offset becomes 1 */
    EPX_OPTION_TEXT,   /* const char *, borrowed from argv */
    EPX_OPTION_CHOICE, /* const char *, one of `choices` */
    EPX_OPTION_INT,    /* int64_t in min..max */
    EPX_OPTION_REAL,   /* double in min..max */
    /* Known elsewhere, without effect here: int at offset becomes 1, values are skipped. */
    EPX_OPTION_NOTED_FLAG,
    EPX_OPTION_NOTED_VALUE,
    EPX_OPTION_NOTED_LIST /* any number of values, up to the next word that begins with "--" */
} epx_option_kind_t;

typedef struct {
    const char *name;  /* without dashes */
    const char *alias; /* a second full name, or NULL */
    epx_option_kind_t kind;
    size_t offset;       /* in the settings */
    double min, max;     /* INT, REAL; max below min: no limit */
    const char *choices; /* CHOICE: "auto|none|pplx" */
    const char *unbuilt; /* CHOICE: values that are known elsewhere but not built here, same form; NULL: none */
    unsigned commands;   /* bit i: belongs to command i */
    const char *value;   /* name of the value in --help; NULL: made from the choices, or none */
    const char *help;
} epx_option_t;

typedef struct {
    const epx_option_t *options;
    size_t n_options;
    const char *const *commands; /* names by bit number, NULL-terminated */
} epx_option_table_t;

/* Read argv[first..argc) of command `command_idx` into settings, whose defaults are set by the caller. Every mistake becomes one
 * line of `problems`, naming flag, value and legal values; parsing goes on after it.
 * Returns EPX_OK, also with problems; negative only without memory. */
epx_status_t epx_options_parse(const epx_option_table_t *t, int command_idx, int first, int argc, char **argv, void *settings,
                               epx_str_t *problems);
/* Append one line for every NOTED option that was given: its name and its help text. */
epx_status_t epx_options_notes(const epx_option_table_t *t, const void *settings, epx_str_t *out);
/* Append names and value of an option: "--tp-size, --tp N". */
epx_status_t epx_option_usage(epx_str_t *out, const epx_option_t *o);
/* Append the options of a command, one paragraph each, wrapped at 80 columns. */
epx_status_t epx_options_help(const epx_option_table_t *t, int command_idx, epx_str_t *out);
/* Append one paragraph, each line indented by `indent`, wrapped at 80 columns. */
epx_status_t epx_options_wrap(epx_str_t *out, const char *text, int indent);
/* The name of the NULL-terminated list that is nearest to `word`; NULL for an empty list. */
const char *epx_options_nearest(const char *const *names, const char *word);
/* Element i of "x,y,z" as a string, cut at cap; 0 past the last. */
int epx_options_element(const char *list, int i, char *out, size_t cap);
/* 1 when `word` is an element of "a|b|c". */
int epx_options_in_list(const char *list, const char *word);

#endif
