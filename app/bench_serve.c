/* `epx bench serve`: options and course of a run. Names and defaults are those of SGLang's bench_serving; differences are in
 * docs/benchmarks.md. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "app/bench_report.h"
#include "app/commands.h"
#include "app/page.h"
#include "base/clock.h"

enum { WARM_UP_TOKENS = 32, URL_BYTES = 1024 };

typedef struct {
    int help, output_details, disable_tqdm, disable_stream, disable_ignore_eos, flush_cache, tokenize_prompt, return_logprob,
        profile;
    const char *backend, *base_url, *host, *dataset_name, *dataset_path, *model, *served_model_name, *tokenizer, *request_rate,
        *output_file, *extra_request_body, *tag;
    int64_t port, num_prompts, sharegpt_output_len, sharegpt_context_len, random_input_len, random_output_len, max_concurrency,
        seed, warmup_requests;
    double random_range_ratio, rate; /* rate 0: inf */
} settings_t;

#define AT(field) offsetof(settings_t, field)
#define I31 2147483647.0
static const epx_option_t options[] = {
    {"backend", NULL, EPX_OPTION_CHOICE, AT(backend), 0, -1,
     "sglang|sglang-native|sglang-oai|sglang-oai-chat|vllm|vllm-chat|lmdeploy|lmdeploy-chat", "trt|gserver|truss", 1, NULL,
     "How to ask. sglang (default), sglang-native: POST /generate. sglang-oai, vllm, lmdeploy: POST /v1/completions; any server "
     "that has "
     "OpenAI's API, llama-server too. The names with -chat: POST /v1/chat/completions."},
    {"base-url", NULL, EPX_OPTION_TEXT, AT(base_url), 0, -1, NULL, NULL, 1, "URL",
     "http://HOST:PORT instead of --host and --port."},
    {"host", NULL, EPX_OPTION_TEXT, AT(host), 0, -1, NULL, NULL, 1, "ADDRESS", "Where the server is. Default 127.0.0.1."},
    {"port", NULL, EPX_OPTION_INT, AT(port), 1, 65535, NULL, NULL, 1, "N", "Default: 30000; of vllm 8000, of lmdeploy 23333."},
    {"dataset-name", NULL, EPX_OPTION_CHOICE, AT(dataset_name), 0, -1, "random-ids|random|sharegpt|jsonl",
     "generated-shared-prefix|mmmu|image|mooncake", 1, NULL,
     "random-ids (default): random tokens as text. random: texts of --dataset-path, repeated or cut to the length drawn. "
     "sharegpt: "
     "the first question of each conversation of --dataset-path, and as many tokens as its answer has. jsonl: lines "
     "{\"prompt\": TEXT, \"output_len\": N} of --dataset-path, in their order."},
    {"dataset-path", NULL, EPX_OPTION_TEXT, AT(dataset_path), 0, -1, NULL, NULL, 1, "FILE",
     "The data set; for random and sharegpt a JSON list of {\"conversations\": [{\"value\": TEXT}, ...]}. Nothing is "
     "downloaded."},
    {"model", NULL, EPX_OPTION_TEXT, AT(model), 0, -1, NULL, NULL, 1, "NAME", "Default: the first id of /v1/models."},
    {"served-model-name", NULL, EPX_OPTION_TEXT, AT(served_model_name), 0, -1, NULL, NULL, 1, "NAME",
     "The model's name in requests, if it is not --model."},
    {"tokenizer", NULL, EPX_OPTION_TEXT, AT(tokenizer), 0, -1, NULL, NULL, 1, "DIR",
     "Directory with the model's tokenizer.json. Default: what the server's /get_model_info says, or --model, if it is a "
     "directory here."},
    {"num-prompts", NULL, EPX_OPTION_INT, AT(num_prompts), 1, 10000000, NULL, NULL, 1, "N", "Requests. Default 1000."},
    {"sharegpt-output-len", NULL, EPX_OPTION_INT, AT(sharegpt_output_len), 1, I31, NULL, NULL, 1, "N",
     "sharegpt, jsonl: tokens of every answer, instead of the file's."},
    {"sharegpt-context-len", NULL, EPX_OPTION_INT, AT(sharegpt_context_len), 1, I31, NULL, NULL, 1, "N",
     "sharegpt, jsonl: leave out prompts that are longer together with their answer."},
    {"random-input-len", NULL, EPX_OPTION_INT, AT(random_input_len), 1, I31, NULL, NULL, 1, "N",
     "random-ids, random: most tokens of a prompt. Default 1024."},
    {"random-output-len", NULL, EPX_OPTION_INT, AT(random_output_len), 1, I31, NULL, NULL, 1, "N",
     "random-ids, random: most tokens of an answer. Default 1024."},
    {"random-range-ratio", NULL, EPX_OPTION_REAL, AT(random_range_ratio), 0, 1, NULL, NULL, 1, "X",
     "random-ids, random: lengths are drawn from X times the most to the most. Default 0; 1: all have the most."},
    {"request-rate", NULL, EPX_OPTION_TEXT, AT(request_rate), 0, -1, NULL, NULL, 1, "X",
     "Requests a second, at the random times of a Poisson process. Default inf: all at once."},
    {"max-concurrency", NULL, EPX_OPTION_INT, AT(max_concurrency), 1, 1000000, NULL, NULL, 1, "N",
     "Requests on their way at a time; the next waits, and its time begins when it is sent. Default: no limit."},
    {"output-file", NULL, EPX_OPTION_TEXT, AT(output_file), 0, -1, NULL, NULL, 1, "FILE",
     "Append the result as one line of JSON; - for standard output (the table then goes to standard error)."},
    {"output-details", NULL, EPX_OPTION_FLAG, AT(output_details), 0, -1, NULL, NULL, 1, NULL,
     "With times, lengths, texts and errors of every request in that line."},
    {"disable-tqdm", NULL, EPX_OPTION_FLAG, AT(disable_tqdm), 0, -1, NULL, NULL, 1, NULL,
     "No progress bar. Without a terminal there is none anyway."},
    {"disable-stream", NULL, EPX_OPTION_FLAG, AT(disable_stream), 0, -1, NULL, NULL, 1, NULL,
     "Ask for answers in one piece: the time to first token is then that of the answer."},
    {"return-logprob", NULL, EPX_OPTION_FLAG, AT(return_logprob), 0, -1, NULL, NULL, 1, NULL, "Ask for logprobs."},
    {"seed", NULL, EPX_OPTION_INT, AT(seed), 0, I31, NULL, NULL, 1, "N", "Of prompts, lengths and times. Default 1."},
    {"disable-ignore-eos", NULL, EPX_OPTION_FLAG, AT(disable_ignore_eos), 0, -1, NULL, NULL, 1, NULL,
     "Let answers end where the model ends them."},
    {"extra-request-body", NULL, EPX_OPTION_TEXT, AT(extra_request_body), 0, -1, NULL, NULL, 1, "JSON",
     "An object whose members are added to every request, or replace them."},
    {"flush-cache", NULL, EPX_OPTION_FLAG, AT(flush_cache), 0, -1, NULL, NULL, 1, NULL,
     "POST /flush_cache after the warm-up, so that no prompt is in the server's cache."},
    {"warmup-requests", NULL, EPX_OPTION_INT, AT(warmup_requests), 0, 100000, NULL, NULL, 1, "N",
     "Send the first prompt N times before, for at most 32 tokens. If all fail the run ends. Default 1."},
    {"tokenize-prompt", NULL, EPX_OPTION_FLAG, AT(tokenize_prompt), 0, -1, NULL, NULL, 1, NULL,
     "Send token ids instead of text, so that lengths are exact. Not with the names with -chat."},
    {"profile", NULL, EPX_OPTION_FLAG, AT(profile), 0, -1, NULL, NULL, 1, NULL,
     "POST /start_profile before and /stop_profile after, where the server has them; else the run ends."},
    {"tag", NULL, EPX_OPTION_TEXT, AT(tag), 0, -1, NULL, NULL, 1, "TEXT", "Goes into the line of JSON."},
    {"help", NULL, EPX_OPTION_FLAG, AT(help), 0, -1, NULL, NULL, 1, NULL, "Print this text."},
};
static const char *const commands[] = {"epx bench serve", NULL};
static const epx_option_table_t table = {options, sizeof options / sizeof options[0], commands};

static const settings_t defaults = {.backend = "sglang",
                                    .host = "127.0.0.1",
                                    .dataset_name = "random-ids",
                                    .num_prompts = 1000,
                                    .random_input_len = 1024,
                                    .random_output_len = 1024,
                                    .request_rate = "inf",
                                    .seed = 1,
                                    .warmup_requests = 1};

const epx_page_t epx_page_bench_serve = {
    "epx bench serve",
    "measure a server of language models: throughput and latencies",
    "epx bench serve [OPTION]...",
    "Sends prompts to a running server and reports what SGLang's bench_serving reports, by the same definitions: tokens a "
    "second, time to "
    "first token, time per output token, time between tokens, end-to-end latency. Answers are streamed and greedy; they do not "
    "end before "
    "the length asked for unless --disable-ignore-eos is given. docs/benchmarks.md has the definitions.",
    "    epx bench serve --num-prompts 64 --random-input-len 256 \\\n"
    "        --random-output-len 128 --random-range-ratio 1 --max-concurrency 16\n"
    "    epx bench serve --backend vllm --port 8080 --tokenizer models/tinymoe-math \\\n"
    "        --request-rate 4 --output-file runs.jsonl\n",
    "OPENAI_API_KEY  sent as Authorization: Bearer; EPX_API_KEY if that is not set.",
    "0  done, every request was answered\n1  failed: requests that failed are counted and the first is shown\n"
    "2  wrong settings: every wrong one is named, nothing was sent\n",
    NULL,
    &table,
    0};

/* ---- settings ---- */

static int is(const char *a, const char *b) { return strcmp(a, b) == 0; }

static epx_status_t check_rate(settings_t *o, epx_str_t *problems) {
    char *end;
    double v;
    if (is(o->request_rate, "inf")) return EPX_OK;
    v = strtod(o->request_rate, &end);
    if (end != o->request_rate && !*end && isfinite(v) && v > 0) {
        o->rate = v;
        return EPX_OK;
    }
    return epx_str_printf(problems, "--request-rate %s: legal values: numbers above 0, inf\n", o->request_rate);
}

static epx_status_t check_url(const settings_t *o, epx_str_t *problems) {
    if (!o->base_url) return EPX_OK;
    if (strlen(o->base_url) > URL_BYTES / 2 ||
        (strncmp(o->base_url, "http://", 7) != 0 && strncmp(o->base_url, "https://", 8) != 0))
        return epx_str_printf(problems, "--base-url %.80s: legal: http://HOST:PORT or https://HOST, at most %d bytes\n",
                              o->base_url, URL_BYTES / 2);
    return EPX_OK;
}

static epx_status_t check_extra(const settings_t *o, json_t **out_extra, epx_str_t *problems) {
    json_error_t e;
    if (!o->extra_request_body) return EPX_OK;
    *out_extra = json_loads(o->extra_request_body, 0, &e);
    if (json_is_object(*out_extra)) return EPX_OK;
    return epx_str_printf(problems, "--extra-request-body %s: %s; legal: a JSON object\n", o->extra_request_body,
                          *out_extra ? "no object" : e.text);
}

static epx_status_t check(settings_t *o, json_t **out_extra, epx_str_t *problems) {
    int random_ids = is(o->dataset_name, "random-ids");
    EPX_TRY(check_rate(o, problems));
    EPX_TRY(check_url(o, problems));
    EPX_TRY(check_extra(o, out_extra, problems));
    if (!random_ids && !o->dataset_path)
        EPX_TRY(
            epx_str_printf(problems, "--dataset-name %s needs --dataset-path FILE; random-ids needs no file\n", o->dataset_name));
    if (random_ids && o->dataset_path)
        EPX_TRY(epx_str_append_z(
            problems, "--dataset-path: no effect with --dataset-name random-ids; legal with: random, sharegpt, jsonl\n"));
    if (o->tokenize_prompt && epx_api_of(o->backend)->kind == EPX_API_CHAT)
        EPX_TRY(epx_str_printf(problems, "--tokenize-prompt: --backend %s sends messages, which are text\n", o->backend));
    return EPX_OK;
}

/* ---- talking to the server ---- */

typedef struct {
    const settings_t *o;
    const epx_api_t *api;
    epx_fetcher_t *fetcher;
    char base[URL_BYTES], url[URL_BYTES + 64], model[512], tokenizer_dir[1024];
    epx_tokenizer_t *tokenizer;
    json_t *extra, *server_info; /* owned */
    epx_bench_data_t data;
    epx_load_t load;
    double duration;
} run_t;

/* GET or, with a body, POST. *out: the answer as JSON, NULL if it is none or not 200; *out_status 0: no server. */
static epx_status_t ask(run_t *r, const char *path, const char *body, json_t **out, int *out_status, char *why, size_t n_why) {
    char url[URL_BYTES + 64];
    snprintf(url, sizeof url, "%s%s", r->base, path);
    epx_fetch_t f = {.url = url, .body = body, .n_body = body ? strlen(body) : 0};
    EPX_TRY(epx_fetch_wait(r->fetcher, &f));
    *out_status = f.status;
    *out = f.status == 200 && !f.error[0] ? json_loadb(epx_str_z(&f.text), f.text.n_bytes, 0, NULL) : NULL;
    if (f.error[0]) snprintf(why, n_why, "%s", f.error);
    else epx_reply_error(f.text.data, f.text.n_bytes, why, n_why);
    epx_fetch_fini(&f);
    return EPX_OK;
}

static epx_status_t find_model(run_t *r) {
    json_t *list = NULL;
    char why[256];
    int status = 0;
    const char *given = r->o->served_model_name ? r->o->served_model_name : r->o->model;
    snprintf(r->model, sizeof r->model, "%s", given ? given : "");
    EPX_TRY(ask(r, "/v1/models", NULL, &list, &status, why, sizeof why));
    const char *id = json_string_value(json_object_get(json_array_get(json_object_get(list, "data"), 0), "id"));
    if (!given && id) snprintf(r->model, sizeof r->model, "%s", id);
    json_decref(list);
    if (r->model[0]) return EPX_OK;
    if (!status) return epx_fail(EPX_ERR_PEER, "%s: %s", r->base, why);
    return epx_fail(EPX_ERR_PEER, "%s/v1/models: status %d, no model there (%s); --model NAME says which", r->base, status, why);
}

static int has_tokenizer(const char *dir) {
    char path[1200];
    struct stat st;
    snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    return dir[0] && stat(path, &st) == 0;
}

static epx_status_t find_tokenizer(run_t *r) {
    json_t *info = NULL;
    char why[256], path[1200];
    int status = 0;
    const char *given = r->o->tokenizer;
    if (!given) EPX_TRY(ask(r, "/get_model_info", NULL, &info, &status, why, sizeof why));
    const char *told = json_string_value(json_object_get(info, "tokenizer_path"));
    snprintf(r->tokenizer_dir, sizeof r->tokenizer_dir, "%s", given ? given : told ? told : "");
    if (!given && !has_tokenizer(r->tokenizer_dir)) snprintf(r->tokenizer_dir, sizeof r->tokenizer_dir, "%s", r->model);
    json_decref(info);
    if (!given && !has_tokenizer(r->tokenizer_dir))
        return epx_fail(EPX_ERR_NOT_FOUND,
                        "the tokenizer of model \"%s\" is not on this machine: give --tokenizer DIR, a directory with "
                        "tokenizer.json",
                        r->model);
    snprintf(path, sizeof path, "%s/tokenizer.json", r->tokenizer_dir);
    return epx_tokenizer_create(path, &r->tokenizer);
}

static epx_status_t make_data(run_t *r) {
    const settings_t *o = r->o;
    epx_bench_data_config_t c = {.name = o->dataset_name,
                                 .path = o->dataset_path,
                                 .tokenizer = r->tokenizer,
                                 .n = (size_t)o->num_prompts,
                                 .input_len = o->random_input_len,
                                 .output_len = o->random_output_len,
                                 .range_ratio = o->random_range_ratio,
                                 .fixed_output_len = o->sharegpt_output_len,
                                 .context_len = o->sharegpt_context_len,
                                 .seed = (uint64_t)o->seed,
                                 .want_ids = o->tokenize_prompt};
    int64_t in = 0, out = 0;
    EPX_TRY(epx_bench_data(&c, &r->data));
    for (size_t i = 0; i < r->data.n; i++) {
        in += r->data.prompts[i].n_prompt;
        out += r->data.prompts[i].n_output;
    }
    fprintf(stderr, "%zu prompts: %lld tokens, %lld to generate\n", r->data.n, (long long)in, (long long)out);
    if (r->data.n < (size_t)o->num_prompts)
        fprintf(stderr, "epx: note: --num-prompts %lld: the data set has only %zu that can be used\n", (long long)o->num_prompts,
                r->data.n);
    return EPX_OK;
}

/* ---- the run ---- */

static epx_status_t warm_up(run_t *r) {
    int failed = 0;
    epx_load_t *l = &r->load;
    size_t n = (size_t)r->o->warmup_requests;
    if (n == 0) return EPX_OK;
    l->max_output = WARM_UP_TOKENS;
    EPX_TRY(epx_load_warm_up(l, &r->data.prompts[0], n));
    for (size_t i = 0; i < n; i++) failed += !l->requests[i].ok;
    if ((size_t)failed == n) return epx_fail(EPX_ERR_PEER, "the warm-up failed: %s: %s", r->url, l->requests[0].error);
    fprintf(stderr, "warm-up: %zu request%s\n", n, n == 1 ? "" : "s");
    return EPX_OK;
}

static epx_status_t command(run_t *r, const char *path) {
    json_t *answer = NULL;
    char why[256];
    int status = 0;
    EPX_TRY(ask(r, path, "{}", &answer, &status, why, sizeof why));
    json_decref(answer);
    return status == 200 ? EPX_OK : epx_fail(EPX_ERR_PEER, "POST %s%s: status %d: %s", r->base, path, status, why);
}

static epx_status_t measure(run_t *r) {
    char why[256];
    int status;
    epx_load_t *l = &r->load;
    EPX_TRY(warm_up(r));
    if (r->o->flush_cache) EPX_TRY(command(r, "/flush_cache"));
    nanosleep(&(struct timespec){1, 0}, NULL); /* as SGLang's: what the warm-up left behind is over */
    if (r->o->profile) EPX_TRY(command(r, "/start_profile"));
    l->max_output = 0;
    l->requests_per_s = r->o->rate;
    l->max_concurrent = r->o->max_concurrency;
    l->show_progress = !r->o->disable_tqdm && isatty(2);
    uint64_t begin = epx_now_ns();
    EPX_TRY(epx_load_run(l, r->data.prompts, r->data.n));
    if (r->o->profile) EPX_TRY(command(r, "/stop_profile"));
    if (r->api->kind == EPX_API_NATIVE || strncmp(r->o->backend, "sglang", 6) == 0)
        EPX_TRY(ask(r, "/get_server_info", NULL, &r->server_info, &status, why, sizeof why)); /* within the time, as SGLang's */
    r->duration = (double)(epx_now_ns() - begin) * 1e-9;
    return EPX_OK;
}

static int64_t count_tokens(const run_t *r, const epx_str_t *text) {
    int32_t *ids = NULL;
    size_t n = 0;
    if (epx_tokenizer_encode(r->tokenizer, epx_str_z(text), text->n_bytes, &ids, &n) < 0) return -1;
    free(ids);
    return (int64_t)n;
}

static epx_status_t compute(const run_t *r, epx_bench_metrics_t *m) {
    const epx_load_t *l = &r->load;
    epx_bench_sample_t *samples = calloc(l->n, sizeof *samples);
    if (!samples) return epx_fail(EPX_ERR_NOMEM, "no memory for %zu requests", l->n);
    for (size_t i = 0; i < l->n; i++) {
        samples[i] = epx_load_sample(&l->requests[i]);
        samples[i].n_retokens = count_tokens(r, &l->requests[i].reply.text);
    }
    epx_status_t s = epx_bench_metrics(samples, l->n, r->duration, m);
    free(samples);
    return s;
}

static epx_status_t output(const run_t *r, const epx_bench_metrics_t *m) {
    const settings_t *o = r->o;
    int to_stdout = o->output_file && is(o->output_file, "-");
    epx_bench_arguments_t a = {o->tag,
                               o->backend,
                               o->dataset_name,
                               o->rate,
                               o->max_concurrency,
                               o->sharegpt_output_len,
                               o->random_input_len,
                               o->random_output_len,
                               o->random_range_ratio,
                               o->output_details};
    epx_bench_print(&a, m, to_stdout ? stderr : stdout);
    if (!o->output_file) return EPX_OK;
    FILE *out = to_stdout ? stdout : fopen(o->output_file, "a");
    if (!out) return epx_fail_errno(EPX_ERR_IO, errno, "--output-file %s", o->output_file);
    epx_status_t s = epx_bench_print_json(&a, m, &r->load, r->server_info, out);
    if (!to_stdout && fclose(out) != 0 && s >= 0) s = epx_fail_errno(EPX_ERR_IO, errno, "--output-file %s", o->output_file);
    return s;
}

static int show_failures(const run_t *r, const epx_bench_metrics_t *m) {
    for (size_t i = 0; i < r->load.n; i++)
        if (!r->load.requests[i].ok) {
            fprintf(stderr, "epx: %lld of %zu requests failed; request %zu: %s\n", (long long)m->n_failed, r->load.n, i,
                    r->load.requests[i].error);
            return 1;
        }
    return 0;
}

static epx_status_t run(run_t *r, int *out_code) {
    const settings_t *o = r->o;
    epx_bench_metrics_t m;
    int64_t at_once = o->max_concurrency && o->max_concurrency < o->num_prompts ? o->max_concurrency : o->num_prompts;
    r->api = epx_api_of(o->backend);
    if (o->base_url) snprintf(r->base, sizeof r->base, "%s", o->base_url);
    else
        snprintf(r->base, sizeof r->base, strchr(o->host, ':') ? "http://[%s]:%d" : "http://%s:%d", o->host,
                 o->port ? (int)o->port : r->api->port);
    while (r->base[0] && r->base[strlen(r->base) - 1] == '/') r->base[strlen(r->base) - 1] = 0;
    snprintf(r->url, sizeof r->url, "%s%s", r->base, r->api->path);
    EPX_TRY(epx_fetcher_create((int)at_once, &r->fetcher));
    EPX_TRY(find_model(r));
    EPX_TRY(find_tokenizer(r));
    EPX_TRY(make_data(r));
    r->load = (epx_load_t){.fetcher = r->fetcher,
                           .url = r->url,
                           .model = r->model,
                           .api = r->api,
                           .extra = r->extra,
                           .stream = !o->disable_stream,
                           .ignore_eos = !o->disable_ignore_eos,
                           .return_logprob = o->return_logprob,
                           .seed = (uint64_t)o->seed};
    EPX_TRY(measure(r));
    EPX_TRY(compute(r, &m));
    EPX_TRY(output(r, &m));
    *out_code = show_failures(r, &m);
    return EPX_OK;
}

static void close_run(run_t *r) {
    epx_load_clear(&r->load);
    epx_bench_data_fini(&r->data);
    epx_tokenizer_destroy(r->tokenizer);
    epx_fetcher_destroy(r->fetcher);
    json_decref(r->server_info);
}

int epx_command_bench_serve(int argc, char **argv) {
    settings_t o = defaults;
    run_t r = {.o = &o};
    epx_str_t problems = {0};
    int code = 2;
    epx_status_t s = epx_options_parse(&table, 0, 3, argc, argv, &o, &problems);
    if (s >= 0 && o.help) {
        code = epx_page_print_help(&epx_page_bench_serve);
    } else if (s < 0 || check(&o, &r.extra, &problems) < 0) {
        code = epx_print_error();
    } else if (problems.n_bytes) {
        fprintf(stderr, "%s`epx bench serve --help` lists all flags.\n", problems.data);
    } else {
        if (run(&r, &code) < 0) code = epx_print_error();
        close_run(&r);
    }
    epx_str_fini(&problems);
    json_decref(r.extra);
    return code;
}
