/* Which backend "auto" takes: the one that was faster at the nearest measured point. The points are those of crossover.def, or of
 * the file that EPX_A2A_TABLE names (written by `epx bench a2a --tune FILE`): lines "W ROW_BYTES TOKENS BACKEND", # begins a
 * comment. Read when a plan is made, never on the step path. The backends in question give the same bits. */
#include "core/crossover.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"

typedef struct {
    int n_ranks;
    uint64_t row_bytes;
    int n_tokens;
    char backend[16];
} point_t;

static const point_t built_in[] = {
#define EPX_CROSSOVER(w, row_bytes, tokens, backend) {w, row_bytes, tokens, #backend},
#include "core/crossover.def"
#undef EPX_CROSSOVER
};

/* Sixteenths of a doubling: 16 * log2(v) in integers, so that every machine finds the same nearest point. v >= 1. */
static int steps_of(uint64_t v) {
    int whole = 63 - __builtin_clzll(v);
    uint64_t rest = whole >= 4 ? v >> (whole - 4) : v << (4 - whole); /* 16 .. 31 */
    return 16 * whole + (int)rest - 16;
}

static int apart(uint64_t a, uint64_t b) {
    int d = steps_of(a) - steps_of(b);
    return d < 0 ? -d : d;
}

/* Keep the nearer of *best (distance *d) and p; the first of equals stays. */
static void consider(const point_t *p, const point_t *at, point_t *best, int *d) {
    int mine = apart((uint64_t)p->n_ranks, (uint64_t)at->n_ranks) + apart(p->row_bytes, at->row_bytes) +
               apart((uint64_t)p->n_tokens, (uint64_t)at->n_tokens);
    if (mine >= *d) return;
    *best = *p;
    *d = mine;
}

/* One line of a file; *out_n: points in it, 0 or 1. */
static epx_status_t read_point(const char *path, int line, char *text, point_t *p, int *out_n) {
    char end;
    unsigned long long row = 0;
    text[strcspn(text, "#\r\n")] = 0;
    *out_n = text[strspn(text, " \t")] != 0;
    if (*out_n == 0) return EPX_OK;
    int n = sscanf(text, "%d %llu %d %15s %c", &p->n_ranks, &row, &p->n_tokens, p->backend, &end);
    p->row_bytes = row;
    if (n != 4 || p->n_ranks < 1 || row < 1 || p->n_tokens < 1)
        return epx_fail(EPX_ERR_FORMAT, "EPX_A2A_TABLE=%s, line %d: \"%s\"; legal: W ROW_BYTES TOKENS BACKEND, numbers above 0",
                        path, line, text);
    if (strcmp(p->backend, "onesided") != 0 && strcmp(p->backend, "collective") != 0)
        return epx_fail(EPX_ERR_FORMAT, "EPX_A2A_TABLE=%s, line %d: backend is \"%s\"; legal: onesided, collective", path, line,
                        p->backend);
    return EPX_OK;
}

static epx_status_t nearest_in_file(const char *path, const point_t *at, point_t *best, int *d) {
    char text[256];
    epx_status_t s = EPX_OK;
    FILE *f = fopen(path, "r");
    if (f == NULL) return epx_fail_errno(EPX_ERR_IO, errno, "EPX_A2A_TABLE=%s", path);
    for (int line = 1, n; s >= 0 && fgets(text, sizeof text, f) != NULL; line++) {
        point_t p;
        s = read_point(path, line, text, &p, &n);
        if (s >= 0 && n > 0) consider(&p, at, best, d);
    }
    (void)fclose(f);
    if (s >= 0 && *d == INT_MAX) return epx_fail(EPX_ERR_FORMAT, "EPX_A2A_TABLE=%s has no line W ROW_BYTES TOKENS BACKEND", path);
    return s;
}

epx_status_t epx_crossover(int n_ranks, uint64_t row_bytes, int n_tokens, epx_crossover_t *out) {
    const point_t at = {n_ranks, row_bytes, n_tokens, ""};
    const char *path = getenv("EPX_A2A_TABLE");
    point_t best = {0};
    int d = INT_MAX;
    if (path != NULL && path[0] != 0) EPX_TRY(nearest_in_file(path, &at, &best, &d));
    else
        for (size_t i = 0; i < sizeof built_in / sizeof built_in[0]; i++) consider(&built_in[i], &at, &best, &d);
    memcpy(out->backend, best.backend, sizeof best.backend);
    snprintf(out->why, sizeof out->why, "%s: measured for W %d, rows of %llu bytes, %d tokens",
             path != NULL && path[0] != 0 ? "EPX_A2A_TABLE" : "built-in table", best.n_ranks, (unsigned long long)best.row_bytes,
             best.n_tokens);
    return EPX_OK;
}
