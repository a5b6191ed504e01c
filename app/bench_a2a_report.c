/* Output of the exchange bench: JSON lines, a table, an SVG. Reads the finished run only. */
#include <epx_commit.h> /* made by the build */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "app/bench_a2a.h"
#include "app/chart.h"
#include "base/status.h"

const char *bench_skew_name(bench_skew_t s) {
    static const char *const names[] = {"uniform", "zipf", "hot"};
    return names[s];
}

const bench_result_t *bench_find(const bench_run_t *run, int job, const char *name) {
    for (int i = 0; i < run->n_results[job]; i++)
        if (strcmp(run->results[job][i].name, name) == 0) return &run->results[job][i];
    return NULL;
}

static const bench_result_t *best_peer(const bench_run_t *run, int job) {
    const bench_result_t *best = NULL;
    for (int i = 0; i < run->n_results[job]; i++) {
        const bench_result_t *r = &run->results[job][i];
        if (r->kind == BENCH_PEER && (!best || r->us_p50 < best->us_p50)) best = r;
    }
    return best;
}

/* A run on one physical core, or one that was disturbed, is shown but not to be compared. */
static int same_core(const bench_job_t *j) {
    int least = j->flag_ns_before < j->flag_ns_after ? j->flag_ns_before : j->flag_ns_after;
    return least > 0 && least < BENCH_SAME_CORE_NS;
}

/* Two process copies: what the bytes of both phases take on this machine. 0 with one rank. */
static double floor_us(const bench_run_t *run, int job) {
    const bench_result_t *c = bench_find(run, job, "process copy");
    return c ? 2 * c->us_p50 : 0;
}

static double p50_of(const bench_run_t *run, int job, const char *name) {
    const bench_result_t *r = bench_find(run, job, name);
    return r ? r->us_p50 : 0;
}

static void cpu_name(char *out, size_t cap) {
    char line[256];
    FILE *f = fopen("/proc/cpuinfo", "r");
    snprintf(out, cap, "cpu");
    while (f && fgets(line, sizeof line, f)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !colon) continue;
        colon[strcspn(colon, "\n\"\\")] = 0;
        snprintf(out, cap, "cpu:%s", colon + 1);
        break;
    }
    if (f) fclose(f);
}

static void text_field(FILE *out, const char *name, const char *value) {
    if (value[0]) fprintf(out, "\"%s\":\"%s\",", name, value);
    else fprintf(out, "\"%s\":null,", name);
}

/* The arithmetic that a variant does: one pass a (token, rank), or one a (token, expert). */
static double arithmetic_of(const bench_run_t *run, int job, const bench_result_t *r) {
    int by_rows = r->kind == BENCH_OURS && strcmp(r->layout, "fused") != 0;
    return p50_of(run, job, by_rows ? "arithmetic rows" : "arithmetic");
}

/* The all-gather + reduce-scatter to compare with: the peer's, or the library's own in the same mode. 0: not in this run. */
static double gather_of(const bench_run_t *run, int job, const bench_result_t *r) {
    double us = p50_of(run, job, "MPI AG + RS");
    for (int i = 0; us == 0 && r->kind == BENCH_OURS && i < run->n_results[job]; i++) {
        const bench_result_t *c = &run->results[job][i];
        if (strcmp(c->backend, "collective") == 0 && strcmp(c->combine, r->combine) == 0 && strcmp(c->layout, r->layout) == 0 &&
            strcmp(c->input, r->input) == 0 && strcmp(c->dtype, r->dtype) == 0)
            us = c->us_p50;
    }
    return us;
}

static void ratio_field(FILE *out, const char *name, double other, const bench_result_t *r) {
    if (other > 0) fprintf(out, "\"%s\":%.3f,", name, other / r->us_p50);
    else fprintf(out, "\"%s\":null,", name);
}

void bench_print_json(const bench_run_t *run, int job, const char *peers, FILE *out) {
    const bench_job_t *j = &run->jobs[job];
    const bench_result_t *peer = best_peer(run, job);
    char device[128];
    cpu_name(device, sizeof device);
    for (int i = 0; i < run->n_results[job]; i++) {
        const bench_result_t *r = &run->results[job][i];
        static const char *const kinds[] = {"epx", "peer", "bound"};
        double bound = floor_us(run, job);
        fprintf(out, "{\"bench\":\"a2a\",\"device\":\"%s\",\"commit\":\"%s\",\"kind\":\"%s\",\"name\":\"%s\",", device,
                EPX_COMMIT, kinds[r->kind], r->name);
        fprintf(out, "\"E\":%d,\"K\":%d,\"H\":%d,\"T\":%d,\"W\":%d,\"skew\":\"%s\",\"seed\":%llu,", j->n_experts, j->top_k,
                j->hidden, j->n_tokens, run->n_ranks, bench_skew_name(j->skew), (unsigned long long)run->seed);
        text_field(out, "backend", r->backend);
        text_field(out, "dispatch_dtype", r->dtype);
        text_field(out, "combine_mode", r->combine);
        text_field(out, "layout", r->layout);
        text_field(out, "input", r->input);
        fprintf(out, "\"checked\":%s,\"us_p50\":%.3f,\"us_p99\":%.3f,\"samples\":%d,\"blocks\":%d,\"dropped_blocks\":%d,",
                r->checked ? "true" : "false", r->us_p50, r->us_p99, r->n_samples, r->n_blocks, r->n_dropped_blocks);
        if (r->buffer_bytes) fprintf(out, "\"buffer_bytes\":%llu,", (unsigned long long)r->buffer_bytes);
        fprintf(out, "\"logical_bytes\":%llu,\"wire_bytes\":%llu,", (unsigned long long)j->logical_bytes,
                (unsigned long long)r->wire_bytes);
        fprintf(out, "\"floor_us\":%.3f,\"floor_ratio\":%.3f,\"memcpy_ratio\":%.3f,\"arithmetic_us\":%.3f,", bound,
                bound / r->us_p50, p50_of(run, job, "memcpy") / r->us_p50, arithmetic_of(run, job, r));
        ratio_field(out, "best_peer_ratio", peer ? peer->us_p50 : 0, r);
        ratio_field(out, "gather_ratio", gather_of(run, job, r), r);
        ratio_field(out, "row_per_expert_ratio", p50_of(run, job, "MPI_Alltoallv per expert"), r);
        fprintf(out, "\"peers\":\"%s\",", peers);
        if (peer) fprintf(out, "\"best_peer\":\"%s\",\"best_peer_us\":%.3f,", peer->name, peer->us_p50);
        else fprintf(out, "\"best_peer\":null,\"best_peer_us\":null,");
        fprintf(out, "\"flag_ns\":[%d,%d],\"quiet\":%s,\"comparable\":%s}\n", j->flag_ns_before, j->flag_ns_after,
                r->quiet ? "true" : "false", r->quiet && !same_core(j) ? "true" : "false");
    }
}

void bench_print_table(const bench_run_t *run, int job, FILE *out) {
    const bench_job_t *j = &run->jobs[job];
    const bench_result_t *peer = best_peer(run, job);
    fprintf(out, "E %d, K %d, H %d, T %d, W %d, %s: %.1f KiB a rank each way and back, flag %d and %d ns%s\n", j->n_experts,
            j->top_k, j->hidden, j->n_tokens, run->n_ranks, bench_skew_name(j->skew), (double)j->logical_bytes / 1024,
            j->flag_ns_before, j->flag_ns_after, same_core(j) ? " (one physical core: not to be compared)" : "");
    fprintf(out, "  %-46s %9s %9s %11s %9s %9s %9s\n", "", "p50 us", "p99 us", "wire KiB", "2 copies", "memcpy", "best peer");
    for (int i = 0; i < run->n_results[job]; i++) {
        const bench_result_t *r = &run->results[job][i];
        fprintf(out, "  %-46s %9.2f %9.2f ", r->name, r->us_p50, r->us_p99);
        if (r->kind == BENCH_OURS) fprintf(out, "%11.1f", (double)r->wire_bytes / 1024);
        else fprintf(out, "%11s", "");
        fprintf(out, " %9.2f %9.2f", floor_us(run, job) / r->us_p50, p50_of(run, job, "memcpy") / r->us_p50);
        if (peer) fprintf(out, " %9.2f", peer->us_p50 / r->us_p50);
        else fprintf(out, " %9s", "");
        fprintf(out, "%s\n", r->quiet ? "" : "  disturbed");
    }
}

/* ---- crossover table ---- */

/* The largest time of collective over that of onesided among the modes of a job; 0: the run has not both. */
static double worst_ratio(const bench_run_t *run, int job) {
    double worst = 0;
    for (int i = 0; i < run->n_results[job]; i++) {
        const bench_result_t *r = &run->results[job][i];
        char other[sizeof r->name + 16];
        if (r->kind != BENCH_OURS || strcmp(r->backend, "onesided") != 0) continue;
        snprintf(other, sizeof other, "collective%s", r->name + strlen("onesided"));
        double us = p50_of(run, job, other);
        if (us / r->us_p50 > worst) worst = us / r->us_p50;
    }
    return worst;
}

int bench_write_tune(const bench_run_t *run, const char *path) {
    FILE *f = fopen(path, "w");
    if (!f) return epx_fail_errno(EPX_ERR_OS, errno, "%s", path);
    fprintf(f, "# W, bytes of a row on the wire, tokens a rank, backend; commit %s\n", EPX_COMMIT);
    for (int i = 0; i < run->n_jobs; i++) {
        const bench_job_t *j = &run->jobs[i];
        double ratio = worst_ratio(run, i);
        if (ratio == 0 || j->skew != BENCH_UNIFORM) continue;
        fprintf(f, "%d %d %d %s # collective / onesided: at most %.2f%s\n", run->n_ranks, j->hidden * 2, j->n_tokens,
                ratio < 0.97 ? "collective" : "onesided", ratio, same_core(j) ? ", on one physical core" : "");
    }
    if (fclose(f) != 0) return epx_fail_errno(EPX_ERR_OS, errno, "%s", path);
    return 0;
}

/* ---- SVG ---- */

static int same_panel(const bench_job_t *a, const bench_job_t *b) {
    return a->n_experts == b->n_experts && a->top_k == b->top_k && a->hidden == b->hidden && a->skew == b->skew;
}

static epx_chart_line_t *line_named(epx_chart_panel_t *p, const char *name) {
    for (int i = 0; i < p->n_lines; i++)
        if (strcmp(p->lines[i].name, name) == 0) return &p->lines[i];
    if (p->n_lines == EPX_CHART_MAX_LINES) return NULL;
    snprintf(p->lines[p->n_lines].name, sizeof p->lines[0].name, "%s", name);
    return &p->lines[p->n_lines++];
}

static void add_points(const bench_run_t *run, int job, epx_chart_panel_t *p) {
    for (int i = 0; i < run->n_results[job]; i++) {
        const bench_result_t *r = &run->results[job][i];
        epx_chart_line_t *l = line_named(p, r->name);
        if (!l || l->n == EPX_CHART_MAX_POINTS) continue;
        l->dashed = r->kind == BENCH_BOUND;
        l->x[l->n] = run->jobs[job].n_tokens;
        l->y[l->n++] = r->us_p50;
    }
}

int bench_write_svg(const bench_run_t *run, const char *path) {
    epx_chart_panel_t *p = calloc(EPX_CHART_MAX_PANELS, sizeof *p);
    int first_job[EPX_CHART_MAX_PANELS], n = 0;
    char title[160];
    if (!p) return epx_fail(EPX_ERR_NOMEM, "no memory for the chart");
    for (int i = 0; i < run->n_jobs; i++) {
        const bench_job_t *j = &run->jobs[i];
        int k = 0;
        while (k < n && !same_panel(j, &run->jobs[first_job[k]])) k++;
        if (k == EPX_CHART_MAX_PANELS) continue;
        if (k == n) {
            first_job[n++] = i;
            snprintf(p[k].title, sizeof p[k].title, "E %d, K %d, H %d, %s", j->n_experts, j->top_k, j->hidden,
                     bench_skew_name(j->skew));
            snprintf(p[k].x_label, sizeof p[k].x_label, "tokens a rank");
            snprintf(p[k].y_label, sizeof p[k].y_label, "microseconds, p50");
        }
        add_points(run, i, &p[k]);
    }
    snprintf(title, sizeof title, "epx bench a2a: dispatch + expert + combine, %d ranks, commit %s", run->n_ranks, EPX_COMMIT);
    epx_status_t s = epx_chart_write(p, n, title, path);
    free(p);
    return s < 0 ? -1 : 0;
}
