/* `epx bench ops`: how near the engine's operations come to what the machine can do. Options, timing, table, JSON lines. */
#include <epx_commit.h> /* made by the build */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "app/bench_ops.h"
#include "app/commands.h"
#include "app/page.h"
#include "base/clock.h"

enum { MAX_SAMPLES = 20000, MAX_LIST = 16 };

#define AT(field) offsetof(bench_ops_settings_t, field)
#define INT(name, field, lo, hi, value, text) \
    { name, NULL, EPX_OPTION_INT, AT(field), lo, hi, NULL, NULL, 1, value, text }
#define TEXT(name, field, value, text) \
    { name, NULL, EPX_OPTION_TEXT, AT(field), 0, -1, NULL, NULL, 1, value, text }
static const epx_option_t options[] = {
    INT("threads", threads, 1, EPX_OPS_MAX_THREADS, "N", "Threads, pinned to the cores in turn. Default: all cores."),
    TEXT("isa", isa, "NAME", "avx512, avx2 or scalar. Default: the best of this CPU."),
    TEXT("dtypes", dtypes, "LIST", "Weights: bf16, f32, fp8 (e4m3, blocks of 128 x 128). Default bf16,fp8."),
    TEXT("rows", rows, "LIST", "Rows of a step, 1 to 4096, comma separated. Default 1,4,16,64,256."),
    INT("hidden", hidden, 8, 65536, "N", "Hidden size. Default 1024."),
    INT("ffn", ffn, 8, 65536, "N", "Inner size of an expert. Default 512."),
    INT("experts", experts, 1, 4096, "N", "Experts. Default 32."),
    INT("top-k", top_k, 1, 64, "N", "Experts of a row. Default 8."),
    INT("heads", heads, 1, 1024, "N", "Query heads. Default 16."),
    INT("kv-heads", kv_heads, 1, 1024, "N", "Key and value heads; a divisor of --heads. Default 4."),
    INT("head-dim", head_dim, 2, EPX_OPS_MAX_HEAD_DIM, "N", "Elements of a head, even. Default 64."),
    INT("context", context, 1, 1 << 20, "N", "Tokens of a sequence in the attention cases. Default 1024."),
    INT("ms", ms, 1, 60000, "N", "Time for each case. Default 300."),
    INT("footprint-mib", footprint_mib, 1, 65536, "N",
        "Copies of the weights are used in turn until they fill this, so that no cache holds them. Default 1024."),
    INT("seed", seed, 0, 2147483647.0, "N", "Seed of the routing. Default 1."),
    TEXT("json", json, "FILE", "Write one JSON object a line; - for standard output instead of the table."),
    {"help", NULL, EPX_OPTION_FLAG, AT(help), 0, -1, NULL, NULL, 1, NULL, "Print this text."},
};
static const char *const commands[] = {"epx bench ops", NULL};
static const epx_option_table_t table = {options, sizeof options / sizeof options[0], commands};

static const bench_ops_settings_t defaults = {.dtypes = "bf16,fp8",
                                              .rows = "1,4,16,64,256",
                                              .hidden = 1024,
                                              .ffn = 512,
                                              .experts = 32,
                                              .top_k = 8,
                                              .heads = 16,
                                              .kv_heads = 4,
                                              .head_dim = 64,
                                              .context = 1024,
                                              .ms = 300,
                                              .footprint_mib = 1024,
                                              .seed = 1};

typedef struct {
    const bench_ops_settings_t *o;
    epx_ops_t *ops;
    epx_ops_roofs_t roofs;
    int64_t rows[MAX_LIST];
    epx_wtype_t dtypes[3];
    int n_rows, n_dtypes;
    FILE *text, *json;
    double *samples; /* [MAX_SAMPLES] */
} bench_t;

/* ---- settings ---- */

static epx_status_t read_rows(bench_t *b, epx_str_t *problems) {
    for (const char *p = b->o->rows; *p;) {
        char *end;
        const long v = strtol(p, &end, 10);
        if (end == p || (*end && *end != ',') || v < 1 || v > 4096 || b->n_rows == MAX_LIST)
            return epx_str_printf(problems, "--rows %s: legal: up to %d integers from 1 to 4096, comma separated\n", b->o->rows,
                                  MAX_LIST);
        b->rows[b->n_rows++] = v;
        p = *end ? end + 1 : end;
    }
    return b->n_rows ? EPX_OK : epx_str_printf(problems, "--rows: an empty list\n");
}

static epx_status_t read_dtypes(bench_t *b, epx_str_t *problems) {
    for (const char *p = b->o->dtypes; *p;) {
        const size_t n = strcspn(p, ",");
        int t = EPX_W_F32;
        while (t <= EPX_W_F8_E4M3 &&
               (strlen(bench_ops_dtype_name((epx_wtype_t)t)) != n || strncmp(bench_ops_dtype_name((epx_wtype_t)t), p, n) != 0))
            t++;
        if (t > EPX_W_F8_E4M3 || b->n_dtypes == 3)
            return epx_str_printf(problems, "--dtypes %s: legal: up to three of bf16, f32, fp8, comma separated\n", b->o->dtypes);
        b->dtypes[b->n_dtypes++] = (epx_wtype_t)t;
        p += n + (p[n] == ',');
    }
    return b->n_dtypes ? EPX_OK : epx_str_printf(problems, "--dtypes: an empty list\n");
}

static epx_status_t check(bench_t *b, epx_str_t *problems) {
    const bench_ops_settings_t *o = b->o;
    EPX_TRY(read_rows(b, problems));
    EPX_TRY(read_dtypes(b, problems));
    if (o->heads % o->kv_heads)
        EPX_TRY(epx_str_printf(problems, "--kv-heads %d: legal: a divisor of --heads %d\n", (int)o->kv_heads, (int)o->heads));
    if (o->head_dim % 2) EPX_TRY(epx_str_printf(problems, "--head-dim %d: legal: even numbers\n", (int)o->head_dim));
    if (o->top_k > o->experts)
        EPX_TRY(epx_str_printf(problems, "--top-k %d: legal: 1 to --experts %d\n", (int)o->top_k, (int)o->experts));
    return EPX_OK;
}

/* ---- measuring ---- */

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Two calls to warm up, then calls for o->ms, at least five. Returns their number. */
static int measure(bench_t *b, const bench_ops_case_t *c) {
    int64_t turn = 0;
    int n = 0;
    for (; turn < 2; turn++) c->run(c->ctx, turn);
    const uint64_t start = epx_now_ns(), most_ns = (uint64_t)b->o->ms * 1000000u;
    while (n < MAX_SAMPLES && (n < 5 || epx_now_ns() - start < most_ns)) {
        const uint64_t t0 = epx_now_ns();
        c->run(c->ctx, turn++);
        b->samples[n++] = (double)(epx_now_ns() - t0) * 1e-3;
    }
    qsort(b->samples, (size_t)n, sizeof *b->samples, by_value);
    return n;
}

static void print_json(const bench_t *b, const bench_ops_case_t *c, int n, double p50, double p99, double roof) {
    const bench_ops_settings_t *o = b->o;
    fprintf(
        b->json,
        "{\"bench\":\"ops\",\"device\":\"cpu\",\"commit\":\"%s\",\"isa\":\"%s\",\"threads\":%d,\"op\":\"%s\",\"dtype\":\"%s\","
        "\"rows\":%lld,",
        EPX_COMMIT, epx_ops_isa(b->ops), epx_ops_n_threads(b->ops), c->op, c->dtype, (long long)c->n_rows);
    fprintf(b->json,
            "\"hidden\":%lld,\"ffn\":%lld,\"experts\":%lld,\"top_k\":%lld,\"heads\":%lld,\"kv_heads\":%lld,\"head_dim\":%lld,"
            "\"context\":%lld,",
            (long long)o->hidden, (long long)o->ffn, (long long)o->experts, (long long)o->top_k, (long long)o->heads,
            (long long)o->kv_heads, (long long)o->head_dim, (long long)o->context);
    fprintf(b->json, "\"flops\":%.0f,\"bytes\":%.0f,\"samples\":%d,\"us_p50\":%.3f,\"us_p99\":%.3f,\"roof_us\":%.3f,", c->flops,
            c->bytes, n, p50, p99, roof);
    fprintf(b->json, "\"roof_gflops\":%.1f,\"roof_gbs\":%.2f}\n", b->roofs.flops * 1e-9, b->roofs.read_bytes_per_s * 1e-9);
}

static epx_status_t one_case(void *ctx, const bench_ops_case_t *c) {
    bench_t *b = ctx;
    const int n = measure(b, c);
    const double p50 = b->samples[n / 2], p99 = b->samples[n - 1 - n / 100];
    const double compute = c->flops / b->roofs.flops * 1e6, memory = c->bytes / b->roofs.read_bytes_per_s * 1e6;
    const double roof = compute > memory ? compute : memory;
    fprintf(b->text, "%-19s %-5s %5lld %11.1f %11.1f %9.1f %8.2f %11.1f %6.0f %%  %s\n", c->op, c->dtype, (long long)c->n_rows,
            p50, p99, c->flops / p50 * 1e-3, c->bytes / p50 * 1e-3, roof, 100.0 * roof / p50,
            compute > memory ? "compute" : "memory");
    fflush(b->text);
    if (b->json) print_json(b, c, n, p50, p99, roof);
    return EPX_OK;
}

static epx_status_t create_ops(bench_t *b) {
    const bench_ops_settings_t *o = b->o;
    int cpus[EPX_OPS_MAX_THREADS];
    const long n_cores = sysconf(_SC_NPROCESSORS_ONLN);
    epx_ops_config_t cfg = {.size = sizeof cfg, .n_threads = (int)(o->threads ? o->threads : n_cores), .isa = o->isa};
    if (cfg.n_threads > EPX_OPS_MAX_THREADS) cfg.n_threads = EPX_OPS_MAX_THREADS;
    for (int i = 0; i < cfg.n_threads; i++) cpus[i] = (int)(i % n_cores);
    if (cfg.n_threads <= n_cores) cfg.cpus = cpus;
    EPX_TRY(epx_ops_create(&cfg, &b->ops));
    const int64_t q = o->heads * o->head_dim;
    EPX_TRY(epx_ops_reserve(b->ops, 4096, q > o->hidden ? q : o->hidden, (int)o->heads, o->ffn));
    return epx_ops_roofs(b->ops, &b->roofs);
}

static epx_status_t run_cases(bench_t *b) {
    b->samples = malloc(MAX_SAMPLES * sizeof *b->samples);
    if (b->samples == NULL) return epx_fail(EPX_ERR_NOMEM, "bench ops: samples");
    EPX_TRY(create_ops(b));
    fprintf(b->text, "%s, %d threads; roofs: %.0f GFLOP/s (f32 multiply-add), %.1f GB/s (reading memory)\n", epx_ops_isa(b->ops),
            epx_ops_n_threads(b->ops), b->roofs.flops * 1e-9, b->roofs.read_bytes_per_s * 1e-9);
    fprintf(b->text, "%-19s %-5s %5s %11s %11s %9s %8s %11s %8s\n", "", "", "rows", "p50 us", "p99 us", "GFLOP/s", "GB/s",
            "roof us", "of roof");
    for (int d = 0; d < b->n_dtypes; d++)
        for (int r = 0; r < b->n_rows; r++) EPX_TRY(bench_ops_cases(b->o, b->ops, b->dtypes[d], b->rows[r], one_case, b));
    return EPX_OK;
}

static int run(bench_t *b) {
    const char *path = b->o->json;
    const int to_stdout = path && strcmp(path, "-") == 0;
    b->text = to_stdout ? stderr : stdout;
    b->json = to_stdout ? stdout : path ? fopen(path, "w") : NULL;
    if (path && b->json == NULL) {
        (void)epx_fail_errno(EPX_ERR_OS, errno, "%s", path);
        return epx_print_error();
    }
    epx_status_t s = run_cases(b);
    epx_ops_destroy(b->ops);
    free(b->samples);
    if (b->json && !to_stdout && fclose(b->json) != 0 && s >= 0) s = epx_fail_errno(EPX_ERR_OS, errno, "%s", path);
    return s < 0 ? epx_print_error() : 0;
}

const epx_page_t epx_page_bench_ops = {
    "epx bench ops",
    "measure the engine's operations against the machine's roofs",
    "epx bench ops [OPTION]...",
    "Times matrix products, experts and attention for several numbers of rows, with weights and KV that come from memory, and "
    "prints "
    "each beside its roof: the larger of the time to read its weights or KV once and the time of its multiply-adds, both at the "
    "most "
    "that this machine was just measured to do.",
    "    epx bench ops\n"
    "    epx bench ops --hidden 2048 --ffn 768 --experts 128 --heads 32 --head-dim 128 --rows 1,16,256 --json ops.jsonl\n",
    NULL,
    NULL,
    NULL,
    &table,
    0};

int epx_command_bench_ops(int argc, char **argv) {
    bench_ops_settings_t o = defaults;
    bench_t b = {.o = &o};
    epx_str_t problems = {0};
    int code;
    epx_status_t s = epx_options_parse(&table, 0, 3, argc, argv, &o, &problems);
    if (s >= 0 && o.help) code = epx_page_print_help(&epx_page_bench_ops);
    else if (s < 0 || check(&b, &problems) < 0) code = epx_print_error();
    else if (problems.n_bytes) {
        fprintf(stderr, "%s`epx bench ops --help` lists all flags.\n", problems.data);
        code = 2;
    } else code = run(&b);
    epx_str_fini(&problems);
    return code;
}
