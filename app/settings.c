/* The option table: the only list of flags. Names and meanings are SGLang's where SGLang has the flag. */
#include "app/settings.h"

#include <stddef.h>

#include "engine/ops/ops.h"

#define SERVE (1u << EPX_CMD_SERVE)
#define GENERATE (1u << EPX_CMD_GENERATE)
#define INFO (1u << EPX_CMD_INFO)
#define DEMO (1u << EPX_CMD_DEMO)
#define EVAL (1u << EPX_CMD_EVAL)
#define ALL (SERVE | GENERATE | INFO | DEMO | EVAL)
#define AT(field) offsetof(epx_settings_t, field)
#define NOTED(i) offsetof(epx_settings_t, noted) + (i) * sizeof(int)
#define I31 2147483647.0
#define I53 9007199254740992.0

static const epx_option_t options[] = {
    {"model-path", NULL, EPX_OPTION_TEXT, AT(model_path), 0, -1, NULL, NULL, ALL, "DIR",
     "Directory of a Hugging Face checkpoint: config.json, *.safetensors, tokenizer.json."},
    {"tp-size", "tp", EPX_OPTION_INT, AT(tp), 1, 64, NULL, NULL, ALL, "N",
     "Number of ranks; each is a process. Default 1. --tp-size / --dp-size consecutive ranks share the heads of attention."},
    {"dp-size", "dp", EPX_OPTION_INT, AT(dp), 1, 64, NULL, NULL, ALL, "N",
     "Number of data-parallel ranks: each has its own requests and KV pool. Default 1. With --enable-dp-attention they share "
     "the ranks and experts of --tp-size, which it must divide; without it they are replicas: whole models of --tp-size ranks "
     "each, behind one port."},
    {"enable-dp-attention", NULL, EPX_OPTION_FLAG, AT(enable_dp_attention), 0, -1, NULL, NULL, ALL, NULL,
     "Run attention data-parallel and only the experts across all ranks, instead of --dp-size replicas."},
    {"ep-size", "ep", EPX_OPTION_INT, AT(ep), 1, 64, NULL, NULL, ALL, "N",
     "Ranks that hold all experts together: --tp-size / N groups of N neighbours, tokens stay in their group. Default: "
     "--tp-size."},
    {"nnodes", NULL, EPX_OPTION_INT, AT(nnodes), 1, 64, NULL, NULL, SERVE, "N",
     "Hosts that the ranks are divided among, the same number on each. Start `epx serve` on every one with the same flags but "
     "--node-rank; node 0 answers HTTP. Default 1."},
    {"node-rank", NULL, EPX_OPTION_INT, AT(node_rank), 0, 63, NULL, NULL, SERVE, "R",
     "Which of the hosts this is, from 0. Default 0."},
    {"dist-init-addr", NULL, EPX_OPTION_TEXT, AT(dist_init_addr), 0, -1, NULL, NULL, SERVE, "HOST:PORT",
     "An address of node 0, where it waits for the others. All nodes need the same secret in EPX_JOIN_TOKEN; nothing is "
     "encrypted."},
    {"dist-timeout", NULL, EPX_OPTION_INT, AT(dist_timeout), 1, 86400, NULL, NULL, SERVE, "S",
     "How long the hosts wait for each other at the start. Default 300."},
    {"moe-a2a-backend", NULL, EPX_OPTION_CHOICE, AT(moe_a2a_backend), 0, -1, "auto|none|pplx|deepep",
     "mooncake|nixl|mori|ascend_fuseep|flashinfer|megamoe", ALL, NULL,
     "How tokens travel to their experts. pplx, deepep: each token goes to the ranks that own its experts and the weighted sum "
     "comes back. none: every rank sees all tokens (all-gather and reduce-scatter). auto (default): the library chooses; the "
     "table at the start and `epx info --model-path DIR` say what."},
    {"deepep-mode", NULL, EPX_OPTION_CHOICE, AT(deepep_mode), 0, -1, "auto|low_latency|normal", NULL, ALL, NULL,
     "Of --moe-a2a-backend pplx and deepep. low_latency: the experts read rows where they arrive. normal (deepep): rows of an "
     "expert "
     "lie one after the other. auto (default): pplx low_latency; deepep normal in steps with prompt tokens, else low_latency."},
    {"moe-runner-backend", NULL, EPX_OPTION_CHOICE, AT(moe_runner_backend), 0, -1, "auto|deep_gemm",
     "triton|triton_kernel|cutlass|flashinfer_trtllm|flashinfer_trtllm_routed|flashinfer_cutlass|flashinfer_mxfp4|"
     "flashinfer_cutedsl|marlin|aiter",
     ALL, NULL,
     "Who computes the experts. auto (default) and deep_gemm: this program's grouped products over the rows received."},
    {"a2a-combine", NULL, EPX_OPTION_CHOICE, AT(a2a_combine), 0, -1, "exact|prereduced", NULL, ALL, NULL,
     "exact (default): the answers of a token's experts are added in one order whatever the number of ranks, so results are "
     "bit-identical for any --tp-size. prereduced: each rank sums its own experts first; fewer bytes travel."},
    {"load-format", NULL, EPX_OPTION_CHOICE, AT(load_format), 0, -1, "auto|dummy", "pt|npcache|gguf|bitsandbytes|layered", ALL,
     NULL, "auto (default): safetensors. dummy: random weights of config.json's shapes, from --random-seed."},
    {"device", NULL, EPX_OPTION_CHOICE, AT(device), 0, -1, "auto|cpu|cuda", NULL, ALL, NULL,
     "Where the model runs. cuda: one GPU, bf16, --tp-size 1; what is missing for it stops the program. auto, the default: cuda "
     "when "
     "a "
     "GPU can be used, else cpu; the start-up lines say which."},
    {"threads", NULL, EPX_OPTION_INT, AT(threads), 1, EPX_OPS_MAX_THREADS, NULL, NULL, ALL, "N",
     "Compute threads of each rank. Default: processor cores / --tp-size, at least 1."},
    {"max-running-requests", NULL, EPX_OPTION_INT, AT(max_running_requests), 1, I31, NULL, NULL, ALL, "N",
     "Requests that run at the same time over all DP ranks of a replica; each gets its share. Default: 64 a DP rank."},
    {"chunked-prefill-size", NULL, EPX_OPTION_INT, AT(chunked_prefill_size), -1, I31, NULL, NULL, ALL, "N",
     "Prompt tokens computed in one step over all DP ranks of a replica; each gets its share. -1: prompts are not cut. Default: "
     "256 a DP rank."},
    {"enable-mixed-chunk", NULL, EPX_OPTION_FLAG, AT(enable_mixed_chunk), 0, -1, NULL, NULL, ALL, NULL,
     "Steps with prompt chunks also decode. Without it prompts go before decodes."},
    {"enable-two-batch-overlap", NULL, EPX_OPTION_FLAG, AT(enable_two_batch_overlap), 0, -1, NULL, NULL, ALL, NULL,
     "Run a step in two halves of its tokens: while one half is on its way to or from its experts, the other computes. Same "
     "text; see docs/serving.md for when it pays."},
    {"max-prefill-tokens", NULL, EPX_OPTION_INT, AT(max_prefill_tokens), 1, I31, NULL, NULL, ALL, "N",
     "Prompt tokens that one rank takes up in a step, unless one prompt alone is longer. Default 16384."},
    {"schedule-policy", NULL, EPX_OPTION_CHOICE, AT(schedule_policy), 0, -1, "fcfs|lpm",
     "random|dfs-weight|lof|priority|routing-key|hrrn|shortest-prefill-first", ALL, NULL,
     "Which waiting request is next. fcfs (default): the first. lpm: the one with the longest cached prefix; as fcfs while more "
     "than 128 wait."},
    {"schedule-conservativeness", NULL, EPX_OPTION_REAL, AT(schedule_conservativeness), 0.001, 1000, NULL, NULL, ALL, "X",
     "How much KV is kept free for what running requests may still generate: 0.7 times X of it at first, less with every step. "
     "Default 1; with --enable-dp-attention X is multiplied by 0.3, as in SGLang."},
    {"disable-radix-cache", NULL, EPX_OPTION_FLAG, AT(disable_radix_cache), 0, -1, NULL, NULL, ALL, NULL,
     "Do not keep the KV of earlier requests for later ones with the same beginning."},
    {"enable-priority-scheduling", NULL, EPX_OPTION_FLAG, AT(enable_priority_scheduling), 0, -1, NULL, NULL, SERVE | DEMO, NULL,
     "Requests may carry \"priority\"; the larger goes first."},
    {"mem-fraction-static", NULL, EPX_OPTION_REAL, AT(mem_fraction_static), 0.01, 0.99, NULL, NULL, ALL, "X",
     "Part of the memory that is free at the start (the control group's limit, or MemAvailable) which weights, KV pool and "
     "exchange of all local ranks may take together. Default: 0.4 for the KV pools, no more than the requests can use."},
    {"max-queued-requests", NULL, EPX_OPTION_INT, AT(max_queued_requests), 0, I31, NULL, NULL, SERVE | DEMO, "N",
     "Requests that may wait at one rank beyond those that may run; more are answered with status 429. Default: no limit but the "
     "server's 4096 live requests."},
    {"load-balance-method", NULL, EPX_OPTION_CHOICE, AT(load_balance_method), 0, -1,
     "auto|round_robin|total_requests|total_tokens", "follow_bootstrap_room|minimum_tokens|shortest_queue", SERVE | DEMO, NULL,
     "Which DP rank gets a request: in turn, the one with the fewest live requests (auto, default: the same), or with the fewest "
     "tokens of live requests."},
    {"stream-interval", NULL, EPX_OPTION_INT, AT(stream_interval), 1, I31, NULL, NULL, SERVE | DEMO, "N",
     "A stream sends its first token at once, then after every N tokens, and the rest at the end. Default 1."},
    {"watchdog-timeout", NULL, EPX_OPTION_INT, AT(watchdog_timeout), 1, 86400, NULL, NULL, SERVE | DEMO, "S",
     "A rank that makes no progress for S seconds says where it is and ends, and the server with it. Default 300. When given it "
     "is "
     "also the longest wait of a rank for another, which is 10 s otherwise."},
    {"decode-log-interval", NULL, EPX_OPTION_INT, AT(decode_log_interval), 1, I31, NULL, NULL, SERVE | DEMO, "N",
     "Decode steps between two log lines of a rank. Default 40."},
    {"log-level", NULL, EPX_OPTION_CHOICE, AT(log_level), 0, -1, "debug|info|warning|error", NULL, SERVE | DEMO, NULL,
     "Log lines of this level and above go to standard error; EPX_LOG in the environment goes first. Default of serve: info."},
    {"enable-dp-lm-head", NULL, EPX_OPTION_FLAG, AT(enable_dp_lm_head), 0, -1, NULL, NULL, ALL, NULL,
     "Keep the output matrix within a DP rank's attention group; with one rank in a group, as here, each has the whole matrix."},
    {"moe-dense-tp-size", NULL, EPX_OPTION_INT, AT(moe_dense_tp_size), 1, 64, NULL, NULL, ALL, "N",
     "Ranks that share a dense feed-forward layer. Only 1, which is what happens here."},
    {"disaggregation-mode", NULL, EPX_OPTION_CHOICE, AT(disaggregation_mode), 0, -1, "null|prefill|decode", NULL, ALL, NULL,
     "null (default): one server does everything. The others are not built yet."},
    {"trust-remote-code", NULL, EPX_OPTION_NOTED_FLAG, NOTED(0), 0, -1, NULL, NULL, ALL, NULL,
     "no effect: no code of a checkpoint is ever run"},
    {"skip-server-warmup", NULL, EPX_OPTION_NOTED_FLAG, NOTED(1), 0, -1, NULL, NULL, ALL, NULL,
     "no effect: nothing is compiled at run time, so there is no warm-up"},
    {"cuda-graph-bs", NULL, EPX_OPTION_NOTED_LIST, NOTED(2), 0, -1, NULL, NULL, ALL, "N...", "no effect on the CPU"},
    {"cuda-graph-max-bs", NULL, EPX_OPTION_NOTED_VALUE, NOTED(3), 0, -1, NULL, NULL, ALL, "N", "no effect on the CPU"},
    {"cuda-graph-max-bs-decode", NULL, EPX_OPTION_NOTED_VALUE, NOTED(4), 0, -1, NULL, NULL, ALL, "N", "no effect on the CPU"},
    {"disable-cuda-graph", NULL, EPX_OPTION_NOTED_FLAG, NOTED(5), 0, -1, NULL, NULL, ALL, NULL, "no effect on the CPU"},
    {"disable-cuda-graph-padding", NULL, EPX_OPTION_NOTED_FLAG, NOTED(6), 0, -1, NULL, NULL, ALL, NULL, "no effect on the CPU"},
    {"attention-backend", NULL, EPX_OPTION_NOTED_VALUE, NOTED(7), 0, -1, NULL, NULL, ALL, "NAME",
     "no effect: there is one attention implementation"},
    {"disable-overlap-schedule", NULL, EPX_OPTION_NOTED_FLAG, NOTED(8), 0, -1, NULL, NULL, ALL, NULL,
     "no effect: steps are not overlapped with scheduling"},
    {"context-length", NULL, EPX_OPTION_INT, AT(context_length), 1, I31, NULL, NULL, ALL, "N",
     "Longest prompt plus answer, in tokens. Default: max_position_embeddings of config.json."},
    {"max-total-tokens", NULL, EPX_OPTION_INT, AT(max_total_tokens), 1, I53, NULL, NULL, ALL, "N",
     "Tokens that the KV pool of one rank holds. Default: chosen from the free memory."},
    {"page-size", NULL, EPX_OPTION_INT, AT(page_size), 1, 4096, NULL, NULL, ALL, "N", "Tokens of one KV page. Default 16."},
    {"random-seed", NULL, EPX_OPTION_INT, AT(random_seed), 0, I53, NULL, NULL, ALL, "N",
     "Seed of dummy weights and of requests that give none. Default 0."},
    {"host", NULL, EPX_OPTION_TEXT, AT(host), 0, -1, NULL, NULL, SERVE | DEMO | EVAL, "ADDRESS",
     "Numeric address to listen on. Default 127.0.0.1; 0.0.0.0 for every interface. eval gsm8k: the server to ask."},
    {"port", NULL, EPX_OPTION_INT, AT(port), 0, 65535, NULL, NULL, SERVE | DEMO | EVAL, "N",
     "Port to listen on. Default 30000; 0: any free port. eval gsm8k: of the server to ask."},
    {"served-model-name", NULL, EPX_OPTION_TEXT, AT(served_model_name), 0, -1, NULL, NULL, SERVE | DEMO, "NAME",
     "The model's id in the API. Default: the value of --model-path."},
    {"api-key", NULL, EPX_OPTION_TEXT, AT(api_key), 0, -1, NULL, NULL, SERVE | DEMO, "KEY",
     "Answer only requests with the header Authorization: Bearer KEY, except /health and /metrics. Other users of this machine "
     "can see the command line: the environment variable EPX_API_KEY does the same. Default: none."},
    {"shutdown-timeout", NULL, EPX_OPTION_INT, AT(shutdown_timeout), 0, 86400, NULL, NULL, SERVE | DEMO, "SECONDS",
     "How long SIGTERM or SIGINT waits for live requests to end; new ones are refused meanwhile, a second signal ends at once. "
     "Default 30."},
    {"enable-metrics", NULL, EPX_OPTION_FLAG, AT(enable_metrics), 0, -1, NULL, NULL, SERVE | DEMO, NULL,
     "Accepted for SGLang's sake: /metrics is always served."},
    {"prompt", NULL, EPX_OPTION_TEXT, AT(prompt), 0, -1, NULL, NULL, GENERATE, "TEXT", "Continue this text as it stands."},
    {"chat", NULL, EPX_OPTION_TEXT, AT(chat), 0, -1, NULL, NULL, GENERATE, "TEXT",
     "Send this as a user's message through the model's chat template."},
    {"max-tokens", NULL, EPX_OPTION_INT, AT(max_tokens), 1, I31, NULL, NULL, GENERATE, "N",
     "Longest answer in tokens. Default: what is left of the context."},
    {"temperature", NULL, EPX_OPTION_REAL, AT(temperature), 0, 100, NULL, NULL, GENERATE, "X",
     "0: always the most probable token. This and the next three default to the model's generation_config.json."},
    {"top-p", NULL, EPX_OPTION_REAL, AT(top_p), 0, 1, NULL, NULL, GENERATE, "X",
     "Sample from the smallest set of tokens whose probabilities sum to X."},
    {"top-k", NULL, EPX_OPTION_INT, AT(top_k), -1, I31, NULL, NULL, GENERATE, "N",
     "Sample from the N most probable tokens; -1 or 0: from all."},
    {"min-p", NULL, EPX_OPTION_REAL, AT(min_p), 0, 1, NULL, NULL, GENERATE, "X",
     "Leave out tokens less probable than X times the most probable one."},
    {"seed", NULL, EPX_OPTION_INT, AT(seed), 0, I53, NULL, NULL, GENERATE, "N",
     "Seed of the answer: the same seed gives the same text. Default: --random-seed."},
    {"reference", NULL, EPX_OPTION_TEXT, AT(reference), 0, -1, NULL, NULL, EVAL, "DIR",
     "eval logits: directory with reference.json and reference.safetensors (docs/models.md). Default: --model-path."},
    {"tolerance", NULL, EPX_OPTION_REAL, AT(tolerance), 0, 1000, NULL, NULL, EVAL, "X",
     "eval logits: largest difference of a logit that is not a failure. Default 0.001."},
    {"window", NULL, EPX_OPTION_INT, AT(window), 2, 65536, NULL, NULL, EVAL, "N",
     "eval perplexity: tokens that the model sees at once; windows overlap by half. Default 512, or the context if that is "
     "shorter."},
    {"data-path", "data", EPX_OPTION_TEXT, AT(data_path), 0, -1, NULL, NULL, EVAL, "FILE",
     "eval gsm8k: lines {\"question\": TEXT, \"answer\": TEXT}. Nothing is downloaded."},
    {"num-shots", NULL, EPX_OPTION_INT, AT(num_shots), 0, 1000, NULL, NULL, EVAL, "N",
     "eval gsm8k: questions with answers at the beginning of every prompt: the first of the file. Default 5."},
    {"num-questions", NULL, EPX_OPTION_INT, AT(num_questions), 1, I31, NULL, NULL, EVAL, "N",
     "eval gsm8k: questions asked, from the first of the file on, or as many as it has. Default 200."},
    {"parallel", NULL, EPX_OPTION_INT, AT(parallel), 1, 65536, NULL, NULL, EVAL, "N",
     "eval gsm8k: questions on their way at a time. Default 64."},
    {"max-new-tokens", NULL, EPX_OPTION_INT, AT(max_new_tokens), 1, I31, NULL, NULL, EVAL, "N",
     "eval gsm8k: longest answer in tokens. Default 512."},
    {"compare", NULL, EPX_OPTION_TEXT, AT(compare), 0, -1, NULL, NULL, EVAL, "URL",
     "eval gsm8k: ask the server at URL (http://HOST:PORT) the same and show where its answers differ."},
    {"log-file", NULL, EPX_OPTION_TEXT, AT(log_file), 0, -1, NULL, NULL, EVAL, "FILE",
     "eval gsm8k: write one line of JSON for every question."},
    {"result-file", NULL, EPX_OPTION_TEXT, AT(result_file), 0, -1, NULL, NULL, EVAL, "FILE",
     "eval gsm8k: append the result as one line of JSON."},
    {"help", NULL, EPX_OPTION_FLAG, AT(help), 0, -1, NULL, NULL, ALL, NULL, "Print this text."},
};

static const char *const commands[] = {"epx serve", "epx generate", "epx info", "epx demo", "epx eval", NULL};

const epx_option_table_t epx_settings_table = {options, sizeof options / sizeof options[0], commands};

void epx_settings_init(epx_settings_t *s) {
    *s = (epx_settings_t){.tp = 1,
                          .dp = 1,
                          .nnodes = 1,
                          .dist_timeout = 300,
                          .moe_a2a_backend = "auto",
                          .device = "auto",
                          .a2a_combine = "exact",
                          .load_format = "auto",
                          .schedule_policy = "fcfs",
                          .load_balance_method = "auto",
                          .deepep_mode = "auto",
                          .moe_runner_backend = "auto",
                          .disaggregation_mode = "null",
                          .schedule_conservativeness = 1,
                          .max_queued_requests = -1,
                          .stream_interval = 1,
                          .host = "127.0.0.1",
                          .port = 30000,
                          .shutdown_timeout = 30,
                          .temperature = -1,
                          .top_p = -1,
                          .min_p = -1,
                          .top_k = INT64_MIN,
                          .seed = -1,
                          .tolerance = 1e-3,
                          .num_shots = 5,
                          .num_questions = 200,
                          .parallel = 64,
                          .max_new_tokens = 512};
}
