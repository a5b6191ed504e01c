/* Checks of settings against each other, and of what can be seen without loading anything. All are made, none stops the rest. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "app/settings.h"
#include "engine/model/model.h"
#include "engine/runtime/presets.h"

enum { MOST_RANKS = 64 };                           /* of a server */
enum { DEFAULT_RUNNING = 64, DEFAULT_CHUNK = 256 }; /* of the engine */
enum { MOST_PER_RANK = 65536 };                     /* of the engine's step; epx_rank_check_config holds to it */

static int is(const char *a, const char *b) { return strcmp(a, b) == 0; }

static epx_status_t append_divisors(epx_str_t *out, int64_t n) {
    int k = 0;
    for (int64_t d = 1; d <= n; d++)
        if (n % d == 0) EPX_TRY(epx_str_printf(out, "%s%d", k++ ? ", " : "", (int)d));
    return epx_str_append_z(out, "\n");
}

int epx_settings_n_replicas(const epx_settings_t *s) { return s->enable_dp_attention ? 1 : (int)s->dp; }
int epx_settings_n_dp(const epx_settings_t *s) { return s->enable_dp_attention ? (int)s->dp : 1; }

static epx_status_t check_tp_dp(const epx_settings_t *s, epx_str_t *out) {
    int tp = (int)s->tp, dp = epx_settings_n_dp(s);
    if (tp % dp != 0) {
        EPX_TRY(epx_str_printf(out,
                               "--tp-size %d --dp-size %d: the ranks do not divide into %d groups of one size; legal values of "
                               "--dp-size with --tp-size %d: ",
                               tp, dp, dp, tp));
        return append_divisors(out, tp);
    }
    return EPX_OK;
}

static epx_status_t check_replicas(const epx_settings_t *s, epx_str_t *out) {
    if (s->tp * epx_settings_n_replicas(s) <= MOST_RANKS) return EPX_OK;
    return epx_str_printf(
        out,
        "--dp-size %d without --enable-dp-attention: %d replicas of --tp-size %d ranks are %d ranks; legal values "
        "of --dp-size: 1 to %d\n",
        (int)s->dp, (int)s->dp, (int)s->tp, (int)(s->dp * s->tp), MOST_RANKS / (int)s->tp);
}

static epx_status_t check_nodes(const epx_settings_t *s, epx_str_t *out) {
    int n_ranks = (int)s->tp * epx_settings_n_replicas(s);
    if (s->node_rank >= s->nnodes)
        EPX_TRY(epx_str_printf(out, "--node-rank %d: legal values with --nnodes %d: 0 to %d\n", (int)s->node_rank, (int)s->nnodes,
                               (int)s->nnodes - 1));
    if (s->nnodes > 1 && !s->dist_init_addr)
        EPX_TRY(epx_str_printf(out, "--nnodes %d needs --dist-init-addr HOST:PORT, an address of node 0\n", (int)s->nnodes));
    if (n_ranks % s->nnodes == 0) return EPX_OK;
    EPX_TRY(
        epx_str_printf(out, "--nnodes %d: %d ranks do not divide among so many hosts; legal values: ", (int)s->nnodes, n_ranks));
    return append_divisors(out, n_ranks);
}

/* Values of --ep-size that divide --tp-size and go with the ranks that share attention. */
static epx_status_t append_ep_sizes(epx_str_t *out, int tp, int attn) {
    int k = 0;
    for (int e = 1; e <= tp; e++)
        if (tp % e == 0 && epx_ep_fits(e, attn)) EPX_TRY(epx_str_printf(out, "%s%d", k++ ? ", " : "", e));
    return epx_str_append_z(out, "\n");
}

static epx_status_t check_ep(const epx_settings_t *s, epx_str_t *out) {
    int tp = (int)s->tp, dp = epx_settings_n_dp(s), ep = (int)s->ep, attn = tp % dp ? 1 : tp / dp;
    if (ep == 0 || (tp % ep == 0 && epx_ep_fits(ep, attn))) return EPX_OK;
    EPX_TRY(epx_str_printf(out,
                           "--ep-size %d: %d ranks do not divide into groups of %d that each hold all experts and go with the "
                           "groups of %d that share attention; legal values with --tp-size %d: ",
                           ep, tp, ep, attn, tp));
    return append_ep_sizes(out, tp, attn);
}

static epx_status_t check_mode(const epx_settings_t *s, epx_str_t *out) {
    const epx_moe_preset_t *p = epx_moe_preset(s->moe_a2a_backend);
    if (epx_moe_has_mode(p, s->deepep_mode)) return EPX_OK;
    return epx_str_printf(out, "--deepep-mode %s: --moe-a2a-backend %s has no such mode; legal values: %s, auto\n",
                          s->deepep_mode, p->name, p->modes);
}

static epx_status_t check_parts(const epx_settings_t *s, epx_str_t *out) {
    if (s->enable_dp_lm_head && !s->enable_dp_attention)
        EPX_TRY(epx_str_printf(out, "--enable-dp-lm-head needs --enable-dp-attention\n"));
    if (s->moe_dense_tp_size > 1)
        EPX_TRY(epx_str_printf(out, "--moe-dense-tp-size %d: dense layers are not divided over ranks yet; legal value: 1\n",
                               (int)s->moe_dense_tp_size));
    if (is(s->disaggregation_mode, "null")) return EPX_OK;
    return epx_str_printf(out,
                          "--disaggregation-mode %s: serving prompts and answers apart is not built yet; legal value: null\n",
                          s->disaggregation_mode);
}

/* ---- tokens of a step ---- */

static const char *const cap_names[] = {"EPX_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "SGLANG_PPLX_NUM_MAX_DISPATCH_TOKENS_PER_RANK"};

int64_t epx_settings_token_cap(const char **out_name) {
    for (int i = 0; i < 2; i++) {
        const char *text = getenv(cap_names[i]);
        char *end;
        long long v;
        if (!text || !*text) continue;
        if (out_name) *out_name = cap_names[i];
        errno = 0;
        v = strtoll(text, &end, 10);
        return errno || *end || v < 1 || v > 2 * MOST_PER_RANK ? -1 : v;
    }
    return 0;
}

int64_t epx_settings_step_tokens(const epx_settings_t *s, int64_t context) {
    int64_t running = s->max_running_requests ? s->max_running_requests / epx_settings_n_dp(s) : DEFAULT_RUNNING;
    int64_t chunk = s->chunked_prefill_size ? s->chunked_prefill_size / epx_settings_n_dp(s) : DEFAULT_CHUNK;
    if (s->chunked_prefill_size < 0) chunk = context;
    if (s->enable_mixed_chunk) return chunk + running;
    return chunk > running ? chunk : running;
}

/* The seed's rule, with the numbers: the cap is derived unless it is set, and then it must be enough for every kind of step. */
static epx_status_t check_cap(const epx_settings_t *s, int64_t context, epx_str_t *out) {
    const char *name = NULL;
    int64_t cap = epx_settings_token_cap(&name), need = epx_settings_step_tokens(s, context);
    if (cap == 0 || is(s->disaggregation_mode, "decode")) return EPX_OK;
    if (cap < 0)
        return epx_str_printf(out, "%s=%s: legal values: integers from 1 to %d\n", name, getenv(name), 2 * MOST_PER_RANK);
    if (cap >= need) return EPX_OK;
    return epx_str_printf(
        out,
        "%s=%lld: a step of one rank can have %lld tokens (prompt chunk %s, %lld running requests%s); legal values: "
        "%lld or more, or leave it unset\n",
        name, (long long)cap, (long long)need, s->chunked_prefill_size < 0 ? "uncut" : "as set",
        (long long)(s->max_running_requests ? s->max_running_requests / epx_settings_n_dp(s) : DEFAULT_RUNNING),
        s->enable_mixed_chunk ? ", mixed" : "", (long long)need);
}

/* What config.json says, when it can be read; else the ranks will say what is wrong with it. */
static int64_t read_context(const epx_settings_t *s) {
    epx_model_config_t m;
    if (!s->model_path || epx_model_config_load(s->model_path, &m) < 0) return 0;
    return s->context_length && s->context_length < m.max_position ? s->context_length : m.max_position;
}

static epx_status_t check_chunk(const epx_settings_t *s, int64_t context, epx_str_t *out) {
    if (s->chunked_prefill_size >= 0 || context <= MOST_PER_RANK) return EPX_OK;
    return epx_str_printf(
        out,
        "--chunked-prefill-size -1: a prompt can have %lld tokens, and a step at most %d; set --context-length to that "
        "or less, or a chunk size\n",
        (long long)context, MOST_PER_RANK);
}

/* Flags that SGLang counts over all DP ranks must leave every rank at least one, and no more than a rank takes. */
static epx_status_t check_share(const char *flag, int64_t value, int64_t dp, epx_str_t *out) {
    if (value > 0 && (value < dp || value / dp > MOST_PER_RANK))
        return epx_str_printf(out, "--%s %lld: it is shared by %d DP rank%s; legal values: %d to %d\n", flag, (long long)value,
                              (int)dp, dp == 1 ? "" : "s", (int)dp, MOST_PER_RANK * (int)dp);
    return EPX_OK;
}

static epx_status_t check_model(const epx_settings_t *s, epx_command_t command, epx_str_t *out) {
    struct stat st;
    if (s->model_path == NULL && command == EPX_CMD_INFO) return EPX_OK;
    if (s->model_path == NULL)
        return epx_str_printf(out, "--model-path is missing: the directory of a Hugging Face checkpoint\n");
    if (stat(s->model_path, &st) != 0)
        return epx_str_printf(out, "--model-path %s: %s; models are not downloaded: give the directory of a checkpoint\n",
                              s->model_path, strerror(errno));
    if (!S_ISDIR(st.st_mode)) return epx_str_printf(out, "--model-path %s: not a directory\n", s->model_path);
    return EPX_OK;
}

static epx_status_t check_generate(const epx_settings_t *s, epx_str_t *out) {
    if ((s->prompt == NULL) == (s->chat == NULL))
        EPX_TRY(epx_str_printf(out, "%s of --prompt TEXT and --chat TEXT must be given\n", s->prompt ? "only one" : "one"));
    if (s->top_p == 0) EPX_TRY(epx_str_printf(out, "--top-p 0: legal values: numbers above 0, up to 1\n"));
    return EPX_OK;
}

static epx_status_t check_key(const epx_settings_t *s, epx_str_t *out) {
    if (s->api_key && !s->api_key[0]) return epx_str_printf(out, "--api-key: the key is empty; at least one character\n");
    return EPX_OK;
}

static int is_gsm8k(const epx_settings_t *s, epx_command_t command) {
    return command == EPX_CMD_EVAL && s->eval_what && is(s->eval_what, "gsm8k");
}

static epx_status_t check_gsm8k(const epx_settings_t *s, epx_str_t *out) {
    if (s->eval_file && s->data_path) EPX_TRY(epx_str_append_z(out, "eval gsm8k: only one of FILE and --data-path FILE\n"));
    if (!s->eval_file && !s->data_path)
        EPX_TRY(epx_str_append_z(out, "eval gsm8k: the questions are missing: --data-path FILE\n"));
    if (s->port == 0 && !s->model_path) EPX_TRY(epx_str_append_z(out, "--port 0: legal values with eval gsm8k: 1 to 65535\n"));
    if (s->compare && strncmp(s->compare, "http://", 7) != 0 && strncmp(s->compare, "https://", 8) != 0)
        EPX_TRY(epx_str_printf(out, "--compare %.80s: legal: http://HOST:PORT\n", s->compare));
    return EPX_OK;
}

static epx_status_t check_eval(const epx_settings_t *s, epx_str_t *out) {
    if (is_gsm8k(s, EPX_CMD_EVAL)) return check_gsm8k(s, out);
    if (s->eval_what == NULL || (!is(s->eval_what, "perplexity") && !is(s->eval_what, "logits")))
        return epx_str_printf(out, "%s%s%s; legal: epx eval perplexity FILE, epx eval logits, epx eval gsm8k\n",
                              s->eval_what ? "eval \"" : "what to evaluate is missing", s->eval_what ? s->eval_what : "",
                              s->eval_what ? "\": unknown" : "");
    if (is(s->eval_what, "perplexity") && s->eval_file == NULL)
        EPX_TRY(epx_str_append_z(out, "eval perplexity: the text FILE is missing\n"));
    if (epx_settings_n_replicas(s) > 1)
        return epx_str_printf(out, "--dp-size %d without --enable-dp-attention: eval runs one replica; legal value: 1\n",
                              (int)s->dp);
    return EPX_OK;
}

epx_status_t epx_settings_validate(const epx_settings_t *s, epx_command_t command, epx_str_t *problems) {
    EPX_TRY(check_tp_dp(s, problems));
    EPX_TRY(check_replicas(s, problems));
    EPX_TRY(check_nodes(s, problems));
    int64_t context = read_context(s);
    EPX_TRY(check_ep(s, problems));
    EPX_TRY(check_mode(s, problems));
    EPX_TRY(check_parts(s, problems));
    EPX_TRY(check_chunk(s, context, problems));
    EPX_TRY(check_cap(s, context, problems));
    EPX_TRY(check_share("max-running-requests", s->max_running_requests, epx_settings_n_dp(s), problems));
    EPX_TRY(check_share("chunked-prefill-size", s->chunked_prefill_size, epx_settings_n_dp(s), problems));
    EPX_TRY(check_key(s, problems));
    if (!is_gsm8k(s, command) || s->model_path) EPX_TRY(check_model(s, command, problems));
    if (command == EPX_CMD_EVAL) return check_eval(s, problems);
    return command == EPX_CMD_GENERATE ? check_generate(s, problems) : EPX_OK;
}

epx_status_t epx_settings_notes(const epx_settings_t *s, epx_str_t *out) {
    const epx_moe_preset_t *p = epx_moe_preset(s->moe_a2a_backend);
    if (p->deepep_class && is(s->deepep_mode, "auto"))
        EPX_TRY(epx_str_append_z(out, p->auto_by_batch ? "--deepep-mode auto: normal in steps in which a rank has prompt tokens, "
                                                         "else low_latency; both give the same bits\n"
                                                       : "--deepep-mode auto: low_latency\n"));
    if (!p->deepep_class && !is(s->deepep_mode, "auto"))
        EPX_TRY(epx_str_printf(out, "--deepep-mode %s: no effect with --moe-a2a-backend %s\n", s->deepep_mode, p->name));
    if (p->deepep_class && is(s->moe_runner_backend, "auto"))
        EPX_TRY(epx_str_append_z(out, "--moe-runner-backend auto: deep_gemm, grouped products over the rows received\n"));
    if (s->enable_two_batch_overlap && s->tp == 1)
        EPX_TRY(
            epx_str_append_z(out, "--enable-two-batch-overlap: one rank has nobody to wait for; steps still run in halves\n"));
    if (s->nnodes == 1 && s->dist_init_addr) EPX_TRY(epx_str_append_z(out, "--dist-init-addr: no effect with --nnodes 1\n"));
    if (s->enable_dp_attention && s->dp == 1)
        EPX_TRY(epx_str_append_z(out, "--enable-dp-attention: no effect with --dp-size 1\n"));
    return epx_options_notes(&epx_settings_table, s, out);
}
