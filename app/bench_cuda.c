/* `epx bench a2a --device cuda`: options and jobs. */
#include "app/bench_cuda.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "app/commands.h"
#include "app/options.h"
#include "base/status.h"

typedef struct {
    int help, overlap;
    int64_t ranks, devices, runs, replays, seed;
    const char *device, *shapes, *tokens, *skews, *combines, *cases, *calls, *dtypes, *blocks, *peers, *json;
} settings_t;

#define AT(field) offsetof(settings_t, field)
static const epx_option_t options[] = {
    {"device", NULL, EPX_OPTION_CHOICE, AT(device), 0, -1, "cpu|cuda", NULL, 1, NULL,
     "cuda: these flags. cpu: see `epx bench a2a --help`."},
    {"ranks", NULL, EPX_OPTION_INT, AT(ranks), 0, BC_MAX_RANKS, NULL, NULL, 1, "N",
     "Ranks; rank r uses GPU r modulo their number. Default 0: the number of GPUs, or 2 on one GPU."},
    {"devices", NULL, EPX_OPTION_INT, AT(devices), 0, BC_MAX_RANKS, NULL, NULL, 1, "N",
     "Use the first N GPUs only. Default 0: all."},
    {"shapes", NULL, EPX_OPTION_TEXT, AT(shapes), 0, -1, NULL, NULL, 1, "LIST",
     "Shapes ExKxH (experts, top-k, hidden), comma separated. Default 128x8x2048,256x8x7168."},
    {"tokens", NULL, EPX_OPTION_TEXT, AT(tokens), 0, -1, NULL, NULL, 1, "LIST", "Tokens a rank. Default 1,8,32,128,256,512."},
    {"skews", NULL, EPX_OPTION_TEXT, AT(skews), 0, -1, NULL, NULL, 1, "LIST",
     "uniform, hot (every token to experts of rank 0). Default uniform."},
    {"combines", NULL, EPX_OPTION_TEXT, AT(combines), 0, -1, NULL, NULL, 1, "LIST", "exact, prereduced. Default prereduced."},
    {"cases", NULL, EPX_OPTION_TEXT, AT(cases), 0, -1, NULL, NULL, 1, "LIST",
     "rows (expert outputs lie expert-major, combine sums them), fused (one weighted row per source and token is given; received "
     "rows "
     "stay in place; prereduced only). Default both."},
    {"calls", NULL, EPX_OPTION_TEXT, AT(calls), 0, -1, NULL, NULL, 1, "LIST",
     "2 (dispatch, combine), 4 (each in halves). Default 2."},
    {"dtypes", NULL, EPX_OPTION_TEXT, AT(dtypes), 0, -1, NULL, NULL, 1, "LIST",
     "Rows on the wire: fp8 (cast by the library), bf16. Default fp8."},
    {"gpu-blocks", NULL, EPX_OPTION_TEXT, AT(blocks), 0, -1, NULL, NULL, 1, "LIST",
     "Blocks a kernel; 0: the library's choice. Default 0."},
    {"overlap", NULL, EPX_OPTION_FLAG, AT(overlap), 0, -1, NULL, NULL, 1, NULL,
     "Also run beside a bf16 matrix product (cuBLAS, opened at run time) and tell how much each slows the other."},
    {"peers", NULL, EPX_OPTION_CHOICE, AT(peers), 0, -1, "auto|none|nccl", NULL, 1, NULL,
     "nccl: NCCL's all-gather and reduce-scatter in the same run. auto (default): where libnccl.so.2 is found."},
    {"runs", NULL, EPX_OPTION_INT, AT(runs), 1, BC_MAX_RUNS, NULL, NULL, 1, "N", "Series of each variant. Default 3."},
    {"replays", NULL, EPX_OPTION_INT, AT(replays), 1, BC_MAX_REPLAYS, NULL, NULL, 1, "N",
     "Graphs of 16 exchanges in a series. Default 20."},
    {"seed", NULL, EPX_OPTION_INT, AT(seed), 0, 2147483647.0, NULL, NULL, 1, "N", "Seed of the routing. Default 1."},
    {"json", NULL, EPX_OPTION_TEXT, AT(json), 0, -1, NULL, NULL, 1, "FILE",
     "Write one JSON object a line for each run; - for standard output."},
    {"help", NULL, EPX_OPTION_FLAG, AT(help), 0, -1, NULL, NULL, 1, NULL, "Print this text."},
};
static const char *const commands[] = {"epx bench a2a --device cuda", NULL};
static const epx_option_table_t table = {options, sizeof options / sizeof options[0], commands};

static epx_status_t check_names(const char *flag, const char *list, const char *legal, epx_str_t *problems) {
    char word[64];
    for (int i = 0; epx_options_element(list, i, word, sizeof word); i++)
        if (!epx_options_in_list(legal, word))
            EPX_TRY(epx_str_printf(problems, "--%s %s: legal values: %s\n", flag, word, legal));
    return EPX_OK;
}

static epx_status_t check_numbers(const char *flag, const char *list, int lo, int hi, epx_str_t *problems) {
    char word[32], end;
    for (int i = 0, v; epx_options_element(list, i, word, sizeof word); i++)
        if (sscanf(word, "%d%c", &v, &end) != 1 || v < lo || v > hi)
            EPX_TRY(epx_str_printf(problems, "--%s %s: legal values: %d to %d\n", flag, word, lo, hi));
    return EPX_OK;
}

static int read_shape(const char *word, bc_job_t *j) {
    char end;
    return sscanf(word, "%dx%dx%d%c", &j->n_experts, &j->top_k, &j->hidden, &end) == 3 && j->n_experts >= BC_MAX_RANKS &&
           j->n_experts <= 32767 && j->top_k >= 1 && j->top_k <= 64 && j->top_k <= j->n_experts / BC_MAX_RANKS &&
           j->hidden >= 16 && j->hidden <= 65536 && j->hidden % 16 == 0;
}

static epx_status_t check(const settings_t *o, epx_str_t *problems) {
    char word[64];
    bc_job_t j;
    EPX_TRY(check_names("skews", o->skews, "uniform|hot", problems));
    EPX_TRY(check_names("combines", o->combines, "exact|prereduced", problems));
    EPX_TRY(check_names("cases", o->cases, "rows|fused", problems));
    EPX_TRY(check_names("calls", o->calls, "2|4", problems));
    EPX_TRY(check_names("dtypes", o->dtypes, "fp8|bf16", problems));
    EPX_TRY(check_numbers("tokens", o->tokens, 1, 65536, problems));
    EPX_TRY(check_numbers("gpu-blocks", o->blocks, 0, 4096, problems));
    for (int i = 0; epx_options_element(o->shapes, i, word, sizeof word); i++)
        if (!read_shape(word, &j))
            EPX_TRY(epx_str_printf(
                problems,
                "--shapes %s: legal: ExKxH with E 8 to 32767, K 1 to E / 8 and at most 64, H a multiple of 16 up to 65536\n",
                word));
    return EPX_OK;
}

/* ---- settings to jobs ---- */

static int add(bc_t *b, bc_job_t j) {
    if (b->n_jobs == BC_MAX_JOBS) return -1;
    b->jobs[b->n_jobs++] = j;
    return 0;
}

/* All variants of one shape, token count, skew and dtype. */
static int add_variants(const settings_t *o, bc_t *b, bc_job_t j) {
    char combine[16], kind[16], calls[8], blocks[16];
    int rc = 0;
    for (int c = 0; epx_options_element(o->combines, c, combine, sizeof combine); c++)
        for (int k = 0; epx_options_element(o->cases, k, kind, sizeof kind); k++)
            for (int n = 0; epx_options_element(o->calls, n, calls, sizeof calls); n++)
                for (int g = 0; epx_options_element(o->blocks, g, blocks, sizeof blocks); g++) {
                    j.exact = strcmp(combine, "exact") == 0, j.fused = strcmp(kind, "fused") == 0,
                    j.separate = strcmp(calls, "4") == 0;
                    j.n_blocks = atoi(blocks), j.overlap = o->overlap;
                    if (!(j.fused && j.exact)) rc |= add(b, j);
                }
    return rc;
}

static int add_jobs(const settings_t *o, bc_t *b, int peers) {
    char shape[64], tokens[32], skew[16], dtype[16];
    int rc = 0;
    for (int s = 0; epx_options_element(o->shapes, s, shape, sizeof shape); s++)
        for (int t = 0; epx_options_element(o->tokens, t, tokens, sizeof tokens); t++)
            for (int k = 0; epx_options_element(o->skews, k, skew, sizeof skew); k++) {
                bc_job_t j = {0};
                (void)read_shape(shape, &j);
                j.n_tokens = atoi(tokens), j.hot = strcmp(skew, "hot") == 0;
                for (int d = 0; epx_options_element(o->dtypes, d, dtype, sizeof dtype); d++) {
                    j.fp8 = strcmp(dtype, "fp8") == 0;
                    rc |= add_variants(o, b, j);
                }
                j.peer = "nccl";
                if (peers && !j.hot) rc |= add(b, j);
            }
    return rc;
}

static int write_json(const settings_t *o, const bc_t *b) {
    FILE *out = o->json == NULL ? NULL : strcmp(o->json, "-") == 0 ? stdout : fopen(o->json, "w");
    if (o->json == NULL) return 0;
    if (out == NULL) {
        fprintf(stderr, "epx bench: --json %s cannot be written\n", o->json);
        return 1;
    }
    for (int i = 0; i < b->n_jobs; i++) bc_print_json(b, &b->results[i], out);
    return (out == stdout ? fflush(out) : fclose(out)) != 0;
}

static int run(const settings_t *o) {
    uint64_t total = 0;
    int n = 0, peers = 0, code;
    (void)setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1); /* a stream of each rank must not wait for another's */
    if (cu_open(&n) < 0) return epx_print_error();
    bc_t *b = calloc(1, sizeof *b);
    if (b == NULL) return epx_fail(EPX_ERR_NOMEM, "no memory for the jobs") < 0 ? epx_print_error() : 1;
    b->n_devices = o->devices > 0 && o->devices < n ? (int)o->devices : n;
    b->n_ranks = o->ranks > 0 ? (int)o->ranks : b->n_devices > 1 ? b->n_devices : 2;
    if (b->n_ranks > BC_MAX_RANKS) b->n_ranks = BC_MAX_RANKS;
    if (b->n_devices > b->n_ranks) b->n_devices = b->n_ranks;
    b->n_runs = (int)o->runs, b->n_replays = (int)o->replays, b->seed = (uint64_t)o->seed;
    epx_status_t s = cu_device_name(0, b->device, sizeof b->device, &total);
    if (s >= 0 && strcmp(o->peers, "none") != 0) {
        s = bc_nccl_open(b);
        peers = s >= 0;
        if (s == EPX_ERR_UNSUPPORTED && strcmp(o->peers, "auto") == 0) {
            fprintf(stderr, "no NCCL: %s\n", epx_last_error());
            s = EPX_OK;
        }
    }
    if (s >= 0 && add_jobs(o, b, peers) != 0) s = epx_fail(EPX_ERR_ARG, "more than %d variants", BC_MAX_JOBS);
    if (s < 0) code = epx_print_error();
    else if (bc_run(b) == 0) code = write_json(o, b);
    else {
        (void)write_json(o, b);
        (void)epx_fail(EPX_ERR_INTERNAL, "%s", b->error);
        code = epx_print_error();
    }
    free(b);
    return code;
}

static int print_help(void) {
    epx_str_t text = {0};
    if (epx_str_append_z(&text, "NAME\n    epx bench a2a --device cuda - measure dispatch and combine between GPUs\n\nSYNOPSIS\n"
                                "    epx bench a2a --device cuda [OPTION]...\n\nOPTIONS\n") < 0 ||
        epx_options_help(&table, 0, &text) < 0)
        return epx_print_error();
    fputs(text.data, stdout);
    epx_str_fini(&text);
    return 0;
}

int epx_command_bench_cuda(int argc, char **argv) {
    settings_t o = {.runs = 3,
                    .replays = 20,
                    .seed = 1,
                    .device = "cuda",
                    .shapes = "128x8x2048,256x8x7168",
                    .tokens = "1,8,32,128,256,512",
                    .skews = "uniform",
                    .combines = "prereduced",
                    .cases = "rows,fused",
                    .calls = "2",
                    .dtypes = "fp8",
                    .blocks = "0",
                    .peers = "auto"};
    epx_str_t problems = {0};
    int code;
    epx_status_t s = epx_options_parse(&table, 0, 3, argc, argv, &o, &problems);
    if (s >= 0 && o.help) code = print_help();
    else if (s < 0 || check(&o, &problems) < 0) code = epx_print_error();
    else if (problems.n_bytes) {
        fprintf(stderr, "%s`epx bench a2a --device cuda --help` lists all flags.\n", problems.data);
        code = 2;
    } else code = run(&o);
    epx_str_fini(&problems);
    return code;
}
