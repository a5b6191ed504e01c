/* The manual's pages of the commands that share the settings. */
#include "app/page.h"
#include "app/settings.h"

static const epx_page_t pages[EPX_CMD_COUNT] = {
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
                       "        --dist-init-addr 10.0.0.1:5000 --node-rank 0\n",
                       "EPX_API_KEY  the same as --api-key, unseen by other users of the machine.\n"
                       "EPX_JOIN_TOKEN  the secret that the hosts of --nnodes share.",
                       NULL, NULL, &epx_settings_table, EPX_CMD_SERVE},
    [EPX_CMD_GENERATE] = {"epx generate", "answer one prompt on standard output",
                          "epx generate --model-path DIR (--prompt TEXT | --chat TEXT) [OPTION]...",
                          "Writes only the generated text to standard output, as it comes and at borders of UTF-8 characters. "
                          "Statistics go to standard "
                          "error: tokens, tokens per second of prompt and answer, and how many rows each rank sent to each.",
                          "    epx generate --model-path models/tinymoe-math --chat \"What is 17+25?\"\n"
                          "    epx generate --model-path models/tinymoe-math --prompt \"1 + 1 =\" \\\n"
                          "        --max-tokens 8 --temperature 0\n",
                          NULL, NULL, NULL, &epx_settings_table, EPX_CMD_GENERATE},
    [EPX_CMD_INFO] = {"epx info", "say what this machine and this build can do", "epx info [--model-path DIR [OPTION]...]",
                      "Lists transports, backends, processor features and GPUs; for each that is not available, why. With "
                      "--model-path the ranks are "
                      "started once and the bytes of checkpoint files that each maps are listed.",
                      "    epx info\n"
                      "    epx info --model-path models/tinymoe-math --tp 2 --dp 2 \\\n"
                      "        --enable-dp-attention\n",
                      NULL, NULL, NULL, &epx_settings_table, EPX_CMD_INFO},
    [EPX_CMD_DEMO] = {"epx demo", "two ranks on one model: a word problem, the traffic between the ranks, then a server",
                      "epx demo --model-path DIR [OPTION]...",
                      "Starts two ranks (--tp 2 --dp 2 --enable-dp-attention --moe-a2a-backend pplx, unless other values are "
                      "given), asks a word problem, "
                      "streams the answer, prints tokens per second and which rank sent how many rows to which, then serves on "
                      "--port or the next "
                      "free one. If standard input is not a terminal it ends after the answer.",
                      "    epx demo --model-path models/tinymoe-math\n", "EPX_API_KEY  the same as --api-key.", NULL, NULL,
                      &epx_settings_table, EPX_CMD_DEMO},
    [EPX_CMD_EVAL] =
        {"epx eval", "measure a model on a text or on questions, or compare it with reference values",
         "epx eval perplexity FILE --model-path DIR [OPTION]...\n    epx eval logits --model-path DIR [--reference "
         "DIR] [OPTION]...\n    epx eval gsm8k --data-path FILE [--host ADDRESS --port N | --model-path DIR] [OPTION]...",
         "perplexity: tokens of FILE (UTF-8 text), their mean negative log-likelihood and its exponential. logits: "
         "compares logits, chosen experts and greedy tokens with those that another program computed, and prints the "
         "largest and mean difference; exit code 1 when a logit is further off than --tolerance, other experts are "
         "chosen, or another token where the reference's margin is above twice the tolerance. gsm8k: word problems, "
         "prompts and scores as SGLang's benchmark/gsm8k, and a strict score that reads signs and decimals; asks the "
         "server at --host and --port, or with --model-path ranks of its own. For perplexity and logits the ranks are "
         "threads of this process.",
         "    epx eval perplexity README.md --model-path models/tinymoe-math\n"
         "    epx eval logits --model-path models/tinymoe-math --tp 2 --dp 2 \\\n"
         "        --enable-dp-attention\n"
         "    epx eval gsm8k --data-path test.jsonl --port 30000 --parallel 128 \\\n"
         "        --compare http://127.0.0.1:8080\n",
         "OPENAI_API_KEY  gsm8k: sent as Authorization: Bearer; EPX_API_KEY if that is not set.", NULL, "perplexity|logits|gsm8k",
         &epx_settings_table, EPX_CMD_EVAL},
};

const epx_page_t *epx_settings_page(epx_command_t command) { return &pages[command]; }
