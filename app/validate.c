/* Checks of settings against each other, and of what can be seen without loading anything. All are made, none stops the rest. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "app/settings.h"

enum { MOST_PER_RANK = 65536 }; /* of the engine's step; epx_rank_check_config holds to it */

static int is(const char *a, const char *b) { return strcmp(a, b) == 0; }

static epx_status_t append_divisors(epx_str_t *out, int64_t n) {
    int k = 0;
    for (int64_t d = 1; d <= n; d++)
        if (n % d == 0) EPX_TRY(epx_str_printf(out, "%s%d", k++ ? ", " : "", (int)d));
    return epx_str_append_z(out, "\n");
}

static epx_status_t check_tp_dp(const epx_settings_t *s, epx_str_t *out) {
    int tp = (int)s->tp, dp = (int)s->dp;
    if (tp % dp != 0) {
        EPX_TRY(epx_str_printf(out,
                               "--tp-size %d --dp-size %d: the ranks do not divide into %d groups of one size; legal values of "
                               "--dp-size with --tp-size %d: ",
                               tp, dp, dp, tp));
        return append_divisors(out, tp);
    }
    if (tp != dp)
        return epx_str_printf(
            out,
            "--tp-size %d --dp-size %d: %d ranks would share one attention group, and attention tensor parallelism "
            "is not built yet; legal: --dp-size %d --enable-dp-attention\n",
            tp, dp, tp / dp, tp);
    return EPX_OK;
}

static epx_status_t check_dp_attention(const epx_settings_t *s, epx_str_t *out) {
    if (s->dp >= 2 && !s->enable_dp_attention)
        return epx_str_printf(
            out,
            "--dp-size %d needs --enable-dp-attention: without it SGLang runs %d whole replicas of the model, and "
            "replicas are not built yet\n",
            (int)s->dp, (int)s->dp);
    return EPX_OK;
}

static epx_status_t check_backend(const epx_settings_t *s, epx_str_t *out) {
    if (s->ep && s->ep != s->tp)
        EPX_TRY(epx_str_printf(out, "--ep-size %d: the experts are spread over all ranks; legal value with --tp-size %d: %d\n",
                               (int)s->ep, (int)s->tp, (int)s->tp));
    if (is(s->moe_a2a_backend, "pplx") && (s->dp < 2 || !s->enable_dp_attention))
        EPX_TRY(epx_str_printf(
            out,
            "--moe-a2a-backend pplx with --dp-size %d%s: it exchanges tokens between data-parallel attention ranks "
            "and needs --enable-dp-attention with --dp-size 2 or more; legal here: auto, none\n",
            (int)s->dp, s->enable_dp_attention ? "" : " and no --enable-dp-attention"));
    return EPX_OK;
}

/* Flags that SGLang counts over all DP ranks must leave every rank at least one, and no more than a rank takes. */
static epx_status_t check_share(const char *flag, int64_t value, int64_t dp, epx_str_t *out) {
    if (value && (value < dp || value / dp > MOST_PER_RANK))
        return epx_str_printf(out, "--%s %lld: it is shared by %d DP rank%s; legal values: %d to %d\n", flag, (long long)value,
                              (int)dp, dp == 1 ? "" : "s", (int)dp, MOST_PER_RANK * (int)dp);
    return EPX_OK;
}

static epx_status_t check_model(const epx_settings_t *s, epx_command_t command, epx_str_t *out) {
    struct stat st;
    if (s->model_path == NULL && command == EPX_CMD_INFO) return EPX_OK;
    if (s->model_path == NULL)
        return epx_str_printf(out, "--model-path is missing: the directory of a Hugging Face checkpoint\n");
    if (stat(s->model_path, &st) != 0) return epx_str_printf(out, "--model-path %s: %s\n", s->model_path, strerror(errno));
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

epx_status_t epx_settings_validate(const epx_settings_t *s, epx_command_t command, epx_str_t *problems) {
    EPX_TRY(check_tp_dp(s, problems));
    EPX_TRY(check_dp_attention(s, problems));
    EPX_TRY(check_backend(s, problems));
    EPX_TRY(check_share("max-running-requests", s->max_running_requests, s->dp, problems));
    EPX_TRY(check_share("chunked-prefill-size", s->chunked_prefill_size, s->dp, problems));
    EPX_TRY(check_key(s, problems));
    EPX_TRY(check_model(s, command, problems));
    return command == EPX_CMD_GENERATE ? check_generate(s, problems) : EPX_OK;
}
