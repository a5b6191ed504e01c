/* The settings of a command as a JSON object, by the option table. */
#ifndef EPX_APP_SETTINGS_JSON_H
#define EPX_APP_SETTINGS_JSON_H

#include "app/options.h"

/* Append {"model_path": "...", ...}: every option of the command by its name with '_' for '-'; numbers as they are, a text that
 * is not set as null. Left out: help, and what holds a secret (names with "key"). */
epx_status_t epx_options_json(const epx_option_table_t *t, int command_idx, const void *settings, epx_str_t *out);
/* Append the value of one option, as epx_options_json() writes it. */
epx_status_t epx_options_value(const epx_option_t *o, const void *settings, epx_str_t *out);

#endif
