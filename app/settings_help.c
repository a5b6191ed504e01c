/* The --help text of each command: what it does, its options, examples, exit codes. */
#include "app/settings.h"

typedef struct {
    const char *name, *purpose, *synopsis, *description, *examples;
} page_t;

static const page_t pages[EPX_CMD_COUNT] = {
    [EPX_CMD_SERVE] = {"epx serve", "serve a Mixture-of-Experts model over an OpenAI-compatible HTTP API",
                       "epx serve --model-path DIR [OPTION]...",
                       "Starts the ranks as processes, loads the model and answers /v1/chat/completions, /v1/completions, "
                       "/v1/models and /health "
                       "until SIGINT or SIGTERM, which stop it in order. If a rank dies, the requests in work end with an error "
                       "that names it (those of other replicas are finished) and the "
                       "program ends with exit code 1.",
                       "    epx serve --model-path models/tinymoe-math\n"
                       "    epx serve --model-path models/tinymoe-math --tp 2 --dp 2 \\\n"
                       "        --enable-dp-attention --moe-a2a-backend pplx\n"
                       "    EPX_JOIN_TOKEN=secret epx serve --model-path DIR --tp 2 --nnodes 2 \\\n"
                       "        --dist-init-addr 10.0.0.1:5000 --node-rank 0\n"},
    [EPX_CMD_GENERATE] = {"epx generate", "answer one prompt on standard output",
                          "epx generate --model-path DIR (--prompt TEXT | --chat TEXT) [OPTION]...",
                          "Writes only the generated text to standard output, as it comes and at borders of UTF-8 characters. "
                          "Statistics go to standard "
                          "error: tokens, tokens per second of prompt and answer, and how many rows each rank sent to each.",
                          "    epx generate --model-path models/tinymoe-math --chat \"What is 17+25?\"\n"
                          "    epx generate --model-path models/tinymoe-math --prompt \"1 + 1 =\" \\\n"
                          "        --max-tokens 8 --temperature 0\n"},
    [EPX_CMD_INFO] = {"epx info", "say what this machine and this build can do", "epx info [--model-path DIR [OPTION]...]",
                      "Lists transports, backends, processor features and GPUs; for each that is not available, why. With "
                      "--model-path the ranks are "
                      "started once and the bytes of checkpoint files that each maps are listed.",
                      "    epx info\n"
                      "    epx info --model-path models/tinymoe-math --tp 2 --dp 2 \\\n"
                      "        --enable-dp-attention\n"},
    [EPX_CMD_DEMO] = {"epx demo", "two ranks on one model: a word problem, the traffic between the ranks, then a server",
                      "epx demo --model-path DIR [OPTION]...",
                      "Starts two ranks (--tp 2 --dp 2 --enable-dp-attention --moe-a2a-backend pplx, unless other values are "
                      "given), asks a word problem, "
                      "streams the answer, prints tokens per second and which rank sent how many rows to which, then serves on "
                      "--port or the next "
                      "free one. If standard input is not a terminal it ends after the answer.",
                      "    epx demo --model-path models/tinymoe-math\n"},
    [EPX_CMD_EVAL] = {"epx eval", "measure a model on a text, or compare it with reference values",
                      "epx eval perplexity FILE --model-path DIR [OPTION]...\n    epx eval logits --model-path DIR [--reference "
                      "DIR] [OPTION]...",
                      "perplexity: tokens of FILE (UTF-8 text), their mean negative log-likelihood and its exponential. logits: "
                      "compares logits, "
                      "chosen experts and greedy tokens with those that another program computed, and prints the largest and "
                      "mean difference; exit "
                      "code 1 when a logit is further off than --tolerance, other experts are chosen, or another token where the "
                      "reference's margin is "
                      "above twice the tolerance. The ranks are threads of this process.",
                      "    epx eval perplexity README.md --model-path models/tinymoe-math\n"
                      "    epx eval logits --model-path models/tinymoe-math --tp 2 --dp 2 \\\n"
                      "        --enable-dp-attention\n"},
};

epx_status_t epx_settings_help(epx_command_t command, epx_str_t *out) {
    const page_t *p = &pages[command];
    EPX_TRY(epx_str_printf(out, "NAME\n    %s - %s\n\nSYNOPSIS\n    %s\n\nDESCRIPTION\n", p->name, p->purpose, p->synopsis));
    EPX_TRY(epx_options_wrap(out, p->description, 4));
    EPX_TRY(epx_str_append_z(out, "\nOPTIONS\n"));
    EPX_TRY(
        epx_options_wrap(out, "Values follow as --name VALUE or --name=VALUE. Unambiguous beginnings of names are accepted.", 4));
    EPX_TRY(epx_str_append_z(out, "\n"));
    EPX_TRY(epx_options_help(&epx_settings_table, (int)command, out));
    EPX_TRY(epx_str_printf(out, "\nEXAMPLES\n%s\nENVIRONMENT\n", p->examples));
    EPX_TRY(epx_options_wrap(
        out, "EPX_LOG  error, warning, info or debug: log lines of that level and above go to standard error.", 4));
    return epx_str_append_z(out, "\nEXIT STATUS\n    0  done\n    1  failed: the message says what and where\n"
                                 "    2  wrong settings: every wrong one is named, nothing was started\n");
}
