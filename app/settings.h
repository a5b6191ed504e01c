/* What the user asked for: the settings of all commands, their option table and the checks before anything is allocated. */
#ifndef EPX_APP_SETTINGS_H
#define EPX_APP_SETTINGS_H

#include <stdint.h>

#include "app/options.h"
#include "base/str.h"

typedef enum { EPX_CMD_SERVE, EPX_CMD_GENERATE, EPX_CMD_INFO, EPX_CMD_DEMO, EPX_CMD_COUNT } epx_command_t;

/* Unset: NULL, -1 or 0 as said. */
typedef struct {
    int help;
    const char *model_path;
    int64_t tp, dp;
    int64_t ep; /* 0: as tp */
    int enable_dp_attention;
    const char *moe_a2a_backend, *a2a_combine, *load_format;
    const char *host;
    int64_t port;
    const char *api_key;                                 /* NULL: none */
    int64_t shutdown_timeout;                            /* seconds */
    const char *served_model_name;                       /* NULL: model_path */
    int64_t threads;                                     /* of a rank; 0: cores / tp */
    int64_t max_running_requests, chunked_prefill_size;  /* over all DP ranks, as in SGLang; 0: the engine's choice */
    int64_t context_length, max_total_tokens, page_size; /* 0: the engine's choice */
    int64_t random_seed;
    const char *prompt, *chat;
    int64_t max_tokens;               /* 0: as many as fit */
    double temperature, top_p, min_p; /* -1: the model's generation_config.json */
    int64_t top_k;                    /* INT64_MIN: as above */
    int64_t seed;                     /* -1: random_seed */
} epx_settings_t;

extern const epx_option_table_t epx_settings_table;

void epx_settings_init(epx_settings_t *s);
/* Append one line for every setting that cannot work, alone or with the others, naming flag, value and legal values. */
epx_status_t epx_settings_validate(const epx_settings_t *s, epx_command_t command, epx_str_t *problems);
/* The whole --help text of a command. */
epx_status_t epx_settings_help(epx_command_t command, epx_str_t *out);

#endif
