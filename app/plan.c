/* `epx plan`: bytes, memory and times of a model's exchange for numbers of ranks and tokens, as a table, JSON lines or SVG. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "app/chart.h"
#include "app/commands.h"
#include "app/page.h"
#include "app/plan_model.h"
#include "engine/model/common/json_doc.h"

enum { MAX_LIST = 32 };

typedef struct {
    int help;
    const char *model_path, *ranks, *tokens, *dtype, *combine, *json, *svg;
    int64_t hidden, experts, top_k, layers;
    double link_gbs, latency_us, overhead_us, efficiency;
} settings_t;

#define AT(field) offsetof(settings_t, field)
static const epx_option_t options[] = {
    {"model-path", NULL, EPX_OPTION_TEXT, AT(model_path), 0, -1, NULL, NULL, 1, "DIR",
     "Take hidden size, experts, top-k and layers from DIR/config.json."},
    {"hidden", NULL, EPX_OPTION_INT, AT(hidden), 1, 1048576, NULL, NULL, 1, "N", "Hidden size; over --model-path."},
    {"experts", NULL, EPX_OPTION_INT, AT(experts), 1, 65536, NULL, NULL, 1, "N", "Routed experts of a layer."},
    {"top-k", NULL, EPX_OPTION_INT, AT(top_k), 1, EPX_MAX_TOP_K, NULL, NULL, 1, "N", "Experts of a token."},
    {"layers", NULL, EPX_OPTION_INT, AT(layers), 1, 65536, NULL, NULL, 1, "N",
     "Layers with experts; default 1: figures of one layer."},
    {"ranks", NULL, EPX_OPTION_TEXT, AT(ranks), 0, -1, NULL, NULL, 1, "LIST",
     "Numbers of ranks, 1 to 4096. Default 2,4,8,16,32,64,128,256."},
    {"tokens", NULL, EPX_OPTION_TEXT, AT(tokens), 0, -1, NULL, NULL, 1, "LIST", "Tokens a rank. Default 1,8,32,128,512."},
    {"dtype", NULL, EPX_OPTION_CHOICE, AT(dtype), 0, -1, "bf16|fp8", NULL, 1, NULL, "Rows on the wire at dispatch. Default fp8."},
    {"combine", NULL, EPX_OPTION_CHOICE, AT(combine), 0, -1, "exact|prereduced", NULL, 1, NULL, "Default prereduced."},
    {"link-gbs", NULL, EPX_OPTION_REAL, AT(link_gbs), 0.001, 1e6, NULL, NULL, 1, "X",
     "Bandwidth of a rank's link each way, GB/s. Default 370 (NVLink between two H200, measured)."},
    {"latency-us", NULL, EPX_OPTION_REAL, AT(latency_us), 0, 1e6, NULL, NULL, 1, "X",
     "Least time of one phase, microseconds. Default 3.9 (two H200: kernel, store, flag, wait in a graph)."},
    {"overhead-us", NULL, EPX_OPTION_REAL, AT(overhead_us), 0, 1e6, NULL, NULL, 1, "X",
     "What the expected times add to that for each phase. Default 2.4 (launch and routing of this library, as measured there)."},
    {"efficiency", NULL, EPX_OPTION_REAL, AT(efficiency), 0.01, 1, NULL, NULL, 1, "X",
     "Share of the link that the expected times assume. Default 0.45, as measured there."},
    {"json", NULL, EPX_OPTION_TEXT, AT(json), 0, -1, NULL, NULL, 1, "FILE",
     "Write one JSON object a line; - for standard output instead of the table."},
    {"svg", NULL, EPX_OPTION_TEXT, AT(svg), 0, -1, NULL, NULL, 1, "FILE", "Draw time against ranks."},
    {"help", NULL, EPX_OPTION_FLAG, AT(help), 0, -1, NULL, NULL, 1, NULL, "Print this text."},
};
static const char *const commands[] = {"epx plan", NULL};
static const epx_option_table_t table = {options, sizeof options / sizeof options[0], commands};

typedef struct {
    const settings_t *o;
    int n_ranks, n_tokens, ranks[MAX_LIST], tokens[MAX_LIST];
} job_t;

/* ---- input ---- */

/* The first of the keys that is there. */
static epx_status_t read_key(const epx_json_doc_t *doc, const char *const *keys, int64_t most, int64_t *inout) {
    if (*inout) return EPX_OK;
    while (keys[1] && !epx_json_has(doc, keys[0])) keys++;
    return epx_json_int(doc, keys[0], 1, most, inout);
}

static epx_status_t read_model(settings_t *o) {
    static const char *const hidden[] = {"hidden_size", NULL},
                             *const top_k[] = {"num_experts_per_tok", "experts_per_token", NULL},
                             *const layers[] = {"num_hidden_layers", NULL},
                             *const experts[] = {"num_experts", "n_routed_experts", "num_local_experts", NULL};
    char path[4096];
    epx_json_doc_t doc;
    snprintf(path, sizeof path, "%s/config.json", o->model_path);
    EPX_TRY(epx_json_doc_load(path, &doc));
    epx_status_t s = read_key(&doc, hidden, 1048576, &o->hidden);
    if (s >= 0) s = read_key(&doc, experts, 65536, &o->experts);
    if (s >= 0) s = read_key(&doc, top_k, EPX_MAX_TOP_K, &o->top_k);
    if (s >= 0) s = read_key(&doc, layers, 65536, &o->layers);
    epx_json_doc_fini(&doc);
    return s;
}

static epx_status_t read_list(const char *flag, const char *list, int most, int *out, int *out_n, epx_str_t *problems) {
    for (*out_n = 0; *list;) {
        char *end;
        long v = strtol(list, &end, 10);
        if (end == list || (*end && *end != ',') || v < 1 || v > most || *out_n == MAX_LIST)
            return epx_str_printf(problems, "--%s %s: legal: up to %d integers from 1 to %d, comma separated\n", flag, list,
                                  MAX_LIST, most);
        out[(*out_n)++] = (int)v;
        list = *end ? end + 1 : end;
    }
    return *out_n ? EPX_OK : epx_str_printf(problems, "--%s: an empty list\n", flag);
}

static epx_status_t check(settings_t *o, job_t *j, epx_str_t *problems) {
    EPX_TRY(read_list("ranks", o->ranks, EPX_MAX_RANKS, j->ranks, &j->n_ranks, problems));
    EPX_TRY(read_list("tokens", o->tokens, 1 << 20, j->tokens, &j->n_tokens, problems));
    if (o->model_path) {
        if (read_model(o) < 0) return epx_str_printf(problems, "%s\n", epx_error_message());
    } else if (!o->hidden || !o->experts || !o->top_k) {
        return epx_str_printf(problems, "which model? --model-path DIR, or --hidden N --experts N --top-k N\n");
    }
    if (o->top_k > o->experts)
        return epx_str_printf(problems, "--top-k %d: legal values: 1 to the %d experts\n", (int)o->top_k, (int)o->experts);
    if (!o->layers) o->layers = 1;
    return EPX_OK;
}

static void cost_of(const job_t *j, int n_ranks, int n_tokens, epx_cost_t *out) {
    const settings_t *o = j->o;
    epx_cost_in_t in = {.n_experts = (int)o->experts,
                        .top_k = (int)o->top_k,
                        .hidden = (int)o->hidden,
                        .n_tokens = n_tokens,
                        .n_ranks = n_ranks,
                        .fp8 = strcmp(o->dtype, "fp8") == 0,
                        .exact = strcmp(o->combine, "exact") == 0,
                        .link_gbs = o->link_gbs,
                        .latency_us = o->latency_us,
                        .overhead_us = o->overhead_us,
                        .efficiency = o->efficiency};
    epx_cost(&in, out);
}

/* ---- output ---- */

static void print_row(const job_t *j, int w, int t) {
    epx_cost_t c;
    char buffer[32] = "refused";
    cost_of(j, w, t, &c);
    double layers = (double)j->o->layers;
    if (c.buffer_bytes) snprintf(buffer, sizeof buffer, "%.1f", (double)c.buffer_bytes / 1048576);
    printf("%6d %7d %8.2f %12.1f %12.1f %12s %12.1f %10.1f %10.1f %10.1f %8.2f\n", w, t, c.ranks_reached, c.dispatch_bytes / 1024,
           c.combine_bytes / 1024, buffer, c.major_bytes / 1048576, c.floor_us * layers, c.expected_us * layers,
           c.gather_us * layers, c.expected_us > 0 ? c.gather_us / c.expected_us : 0);
}

static void print_table(const job_t *j) {
    const settings_t *o = j->o;
    printf("hidden %d, %d experts, top %d; dispatch %s, combine %s bf16; link %g GB/s each way, %g us a phase; expected: %g us "
           "more, efficiency %g\n",
           (int)o->hidden, (int)o->experts, (int)o->top_k, o->dtype, o->combine, o->link_gbs, o->latency_us, o->overhead_us,
           o->efficiency);
    printf("bytes and memory are of one rank and layer (memory is shared by all layers); times are of %d layer%s\n\n",
           (int)o->layers, o->layers == 1 ? "" : "s");
    printf("%6s %7s %8s %12s %12s %12s %12s %10s %10s %10s %8s\n", "ranks", "tokens", "ranks a", "dispatch", "combine", "buffers",
           "exp.-major", "floor", "expected", "all-gather", "all-g. /");
    printf("%6s %7s %8s %12s %12s %12s %12s %10s %10s %10s %8s\n", "", "a rank", "token", "KiB", "KiB", "MiB", "MiB", "us", "us",
           "us", "expected");
    for (int w = 0; w < j->n_ranks; w++)
        for (int t = 0; t < j->n_tokens; t++) print_row(j, j->ranks[w], j->tokens[t]);
}

static void print_json_row(const job_t *j, int w, int t, FILE *out) {
    const settings_t *o = j->o;
    epx_cost_t c;
    cost_of(j, w, t, &c);
    fprintf(out,
            "{\"plan\":\"a2a\",\"E\":%d,\"K\":%d,\"H\":%d,\"T\":%d,\"W\":%d,\"layers\":%d,\"dispatch_dtype\":\"%s\",\"combine_"
            "mode\":\"%s\",",
            (int)o->experts, (int)o->top_k, (int)o->hidden, t, w, (int)o->layers, o->dtype, o->combine);
    fprintf(out, "\"ranks_reached\":%.6f,\"dispatch_bytes\":%.1f,\"combine_bytes\":%.1f,\"gather_bytes\":%.1f,", c.ranks_reached,
            c.dispatch_bytes, c.combine_bytes, c.gather_bytes);
    if (c.buffer_bytes) fprintf(out, "\"buffer_bytes\":%zu,", c.buffer_bytes);
    else fprintf(out, "\"buffer_bytes\":null,");
    fprintf(out, "\"expert_major_bytes\":%.0f,\"floor_us\":%.3f,\"expected_us\":%.3f,\"gather_us\":%.3f}\n", c.major_bytes,
            c.floor_us, c.expected_us, c.gather_us);
}

static epx_status_t print_json(const job_t *j) {
    int to_stdout = strcmp(j->o->json, "-") == 0;
    FILE *out = to_stdout ? stdout : fopen(j->o->json, "w");
    if (out == NULL) return epx_fail_errno(EPX_ERR_OS, errno, "%s", j->o->json);
    for (int w = 0; w < j->n_ranks; w++)
        for (int t = 0; t < j->n_tokens; t++) print_json_row(j, j->ranks[w], j->tokens[t], out);
    if (!to_stdout && fclose(out) != 0) return epx_fail_errno(EPX_ERR_OS, errno, "%s", j->o->json);
    return EPX_OK;
}

static void add_point(epx_chart_line_t *l, double x, double y) {
    if (l->n == EPX_CHART_MAX_POINTS || y <= 0) return;
    l->x[l->n] = x;
    l->y[l->n++] = y;
}

static epx_status_t draw(const job_t *j) {
    static const char *const names[] = {"floor of the link", "expected", "all-gather + reduce-scatter, expected"};
    epx_chart_panel_t *p = calloc(EPX_CHART_MAX_PANELS, sizeof *p);
    int n = j->n_tokens < EPX_CHART_MAX_PANELS ? j->n_tokens : EPX_CHART_MAX_PANELS;
    char title[200];
    if (p == NULL) return epx_fail(EPX_ERR_NOMEM, "no memory for the chart");
    for (int t = 0; t < n; t++) {
        snprintf(p[t].title, sizeof p[t].title, "%d tokens a rank", j->tokens[t]);
        snprintf(p[t].x_label, sizeof p[t].x_label, "ranks");
        snprintf(p[t].y_label, sizeof p[t].y_label, "microseconds a layer");
        p[t].n_lines = 3;
        for (int i = 0; i < 3; i++) snprintf(p[t].lines[i].name, sizeof p[t].lines[i].name, "%s", names[i]);
        p[t].lines[0].dashed = 1;
        for (int w = 0; w < j->n_ranks; w++) {
            epx_cost_t c;
            cost_of(j, j->ranks[w], j->tokens[t], &c);
            add_point(&p[t].lines[0], j->ranks[w], c.floor_us);
            add_point(&p[t].lines[1], j->ranks[w], c.expected_us);
            add_point(&p[t].lines[2], j->ranks[w], c.gather_us);
        }
    }
    snprintf(title, sizeof title, "epx plan: hidden %d, %d experts, top %d, dispatch %s, combine %s, %g GB/s, %g us",
             (int)j->o->hidden, (int)j->o->experts, (int)j->o->top_k, j->o->dtype, j->o->combine, j->o->link_gbs,
             j->o->latency_us);
    epx_status_t s = epx_chart_write(p, n, title, j->o->svg);
    free(p);
    return s;
}

const epx_page_t epx_page_plan = {"epx plan",
                                  "what an exchange costs by arithmetic: bytes, memory, time",
                                  "epx plan (--model-path DIR | --hidden N --experts N --top-k N) [OPTION]...",
                                  "Bytes, buffers and times of the exchange of one model for numbers of ranks and tokens; "
                                  "docs/benchmarks.md has the formulas. Starts "
                                  "nothing.",
                                  "    epx plan --model-path models/tinymoe-math\n"
                                  "    epx plan --hidden 7168 --experts 256 --top-k 8 --layers 58 --ranks 8,64\n",
                                  NULL,
                                  NULL,
                                  NULL,
                                  &table,
                                  0};

static int run(const job_t *j) {
    epx_status_t s = EPX_OK;
    if (!j->o->json || strcmp(j->o->json, "-") != 0) print_table(j);
    if (j->o->json) s = print_json(j);
    if (s >= 0 && j->o->svg) s = draw(j);
    return s < 0 ? epx_print_error() : 0;
}

int epx_command_plan(int argc, char **argv) {
    settings_t o = {.ranks = "2,4,8,16,32,64,128,256",
                    .tokens = "1,8,32,128,512",
                    .dtype = "fp8",
                    .combine = "prereduced",
                    .link_gbs = 370,
                    .latency_us = 3.9,
                    .overhead_us = 2.4,
                    .efficiency = 0.45};
    job_t j = {.o = &o};
    epx_str_t problems = {0};
    int code = 2;
    epx_status_t s = epx_options_parse(&table, 0, 2, argc, argv, &o, &problems);
    if (s >= 0 && o.help) {
        code = epx_page_print_help(&epx_page_plan);
    } else if (s < 0 || check(&o, &j, &problems) < 0) {
        code = epx_print_error();
    } else if (problems.n_bytes) {
        fprintf(stderr, "epx plan: %s`epx plan --help` lists all flags.\n", problems.data);
    } else {
        code = run(&j);
    }
    epx_str_fini(&problems);
    return code;
}
