/* What the user asked for: the settings of all commands, their option table and the checks before anything is allocated. */
#ifndef EPX_APP_SETTINGS_H
#define EPX_APP_SETTINGS_H

#include <stdint.h>

#include "app/options.h"
#include "app/page.h"
#include "base/str.h"

typedef enum { EPX_CMD_SERVE, EPX_CMD_GENERATE, EPX_CMD_INFO, EPX_CMD_DEMO, EPX_CMD_EVAL, EPX_CMD_COUNT } epx_command_t;

enum { EPX_MAX_NOTED = 32 };

/* Unset: NULL, -1 or 0 as said. */
typedef struct {
    int help;
    const char *model_path;
    int64_t tp, dp;
    int64_t nnodes, node_rank;  /* hosts, and which of them this is */
    const char *dist_init_addr; /* NULL: one host */
    int64_t dist_timeout;       /* s */
    int64_t ep;                 /* 0: as tp */
    int enable_dp_attention;
    const char *moe_a2a_backend, *a2a_combine, *load_format, *device;
    const char *host;
    int64_t port;
    const char *api_key;                                /* NULL: none */
    int64_t shutdown_timeout;                           /* seconds */
    int enable_metrics;                                 /* no effect: /metrics is always there */
    const char *served_model_name;                      /* NULL: model_path */
    int64_t threads;                                    /* of a rank; 0: cores / tp */
    int64_t max_running_requests, chunked_prefill_size; /* over all DP ranks, as in SGLang; 0: the engine's choice */
    int64_t max_prefill_tokens, max_queued_requests;    /* of a rank, 0: the engine's choice; -1: no limit */
    int enable_mixed_chunk, disable_radix_cache, enable_priority_scheduling;
    int enable_two_batch_overlap;
    const char *schedule_policy, *load_balance_method;
    double schedule_conservativeness, mem_fraction_static;          /* the latter 0: unset */
    int64_t stream_interval, decode_log_interval, watchdog_timeout; /* the latter in s, 0: unset */
    const char *log_level;                                          /* NULL: the command's */
    const char *deepep_mode, *moe_runner_backend, *disaggregation_mode;
    int enable_dp_lm_head;
    int64_t moe_dense_tp_size;                           /* 0: unset */
    int noted[EPX_MAX_NOTED];                            /* flags without effect that were given */
    int64_t context_length, max_total_tokens, page_size; /* 0: the engine's choice */
    int64_t random_seed;
    const char *prompt, *chat;
    int64_t max_tokens;                /* 0: as many as fit */
    double temperature, top_p, min_p;  /* -1: the model's generation_config.json */
    int64_t top_k;                     /* INT64_MIN: as above */
    int64_t seed;                      /* -1: random_seed */
    const char *eval_what;             /* "perplexity", "logits" or "gsm8k" */
    const char *eval_file, *reference; /* reference NULL: model_path */
    int64_t window;                    /* 0: 512 or the context */
    double tolerance;
    const char *data_path, *compare, *log_file, *result_file; /* of eval gsm8k; NULL: none */
    int64_t num_shots, num_questions, parallel, max_new_tokens;
} epx_settings_t;

extern const epx_option_table_t epx_settings_table;

void epx_settings_init(epx_settings_t *s);
/* Append one line for every setting that cannot work, alone or with the others, naming flag, value and legal values. */
epx_status_t epx_settings_validate(const epx_settings_t *s, epx_command_t command, epx_str_t *problems);
/* Append one line for every setting that was read otherwise than it was given, or that has no effect here. */
epx_status_t epx_settings_notes(const epx_settings_t *s, epx_str_t *out);
/* Whole copies of the model: --dp-size without --enable-dp-attention, else 1. */
int epx_settings_n_replicas(const epx_settings_t *s);
/* DP ranks within a replica, among which flags that count over all DP ranks are divided. */
int epx_settings_n_dp(const epx_settings_t *s);
/* Most tokens of a rank in one step that the user allows, from EPX_NUM_MAX_DISPATCH_TOKENS_PER_RANK or SGLang's
 * SGLANG_PPLX_NUM_MAX_DISPATCH_TOKENS_PER_RANK (then *out_name); 0: not set; -1: not a number. */
int64_t epx_settings_token_cap(const char **out_name);
/* Tokens of a rank in one step by these settings; context 0: unknown. */
int64_t epx_settings_step_tokens(const epx_settings_t *s, int64_t context);
/* The manual's page of a command. */
const epx_page_t *epx_settings_page(epx_command_t command);

#endif
