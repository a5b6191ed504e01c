/* SVG line charts. Pure but for epx_chart_write(). */
#include "app/chart.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>

enum { PANEL_W = 420, PANEL_H = 300, LEFT = 58, RIGHT = 14, TOP = 34, BOTTOM = 46, TITLE_H = 34, ROW_H = 15, PER_ROW = 3 };

/* Colours that differ for colour-blind readers too: Okabe and Ito 2008, and grey. */
static const char *const colours[] = {"#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9",
                                      "#000000", "#888888", "#7F3C00", "#5B2A86", "#6B8E23", "#B0A000"};
enum { N_COLOURS = sizeof colours / sizeof colours[0] };

typedef struct {
    double lo, hi; /* decades */
} axis_t;

static axis_t axis_of(const epx_chart_panel_t *p, int y) {
    axis_t a = {1e9, -1e9};
    for (int l = 0; l < p->n_lines; l++) {
        for (int i = 0; i < p->lines[l].n; i++) {
            double v = log10(y ? p->lines[l].y[i] : p->lines[l].x[i]);
            a.lo = v < a.lo ? v : a.lo;
            a.hi = v > a.hi ? v : a.hi;
        }
    }
    if (a.hi < a.lo) a = (axis_t){0, 1};
    if (y) a = (axis_t){floor(a.lo), ceil(a.hi)};
    if (a.hi - a.lo < 0.3) a = (axis_t){a.lo - 0.3, a.hi + 0.3};
    return a;
}

static double at_x(axis_t a, double v) { return LEFT + (log10(v) - a.lo) / (a.hi - a.lo) * (PANEL_W - LEFT - RIGHT); }
static double at_y(axis_t a, double v) { return PANEL_H - BOTTOM - (log10(v) - a.lo) / (a.hi - a.lo) * (PANEL_H - TOP - BOTTOM); }

/* "<" and "&" must not reach the document as they are. */
static epx_status_t text(epx_str_t *out, const char *s) {
    for (; *s; s++)
        EPX_TRY(*s == '&'   ? epx_str_append_z(out, "&amp;")
                : *s == '<' ? epx_str_append_z(out, "&lt;")
                            : epx_str_append(out, s, 1));
    return EPX_OK;
}

static epx_status_t label(epx_str_t *out, double x, double y, const char *extra, const char *s) {
    EPX_TRY(epx_str_printf(out, "<text x=\"%.1f\" y=\"%.1f\"%s>", x, y, extra));
    EPX_TRY(text(out, s));
    return epx_str_append_z(out, "</text>\n");
}

static epx_status_t y_grid(epx_str_t *out, axis_t a) {
    for (int d = (int)ceil(a.lo); d <= (int)floor(a.hi); d++) {
        char name[32];
        double y = at_y(a, pow(10, d));
        EPX_TRY(epx_str_printf(out, "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>\n", LEFT,
                               PANEL_W - RIGHT, y, y));
        snprintf(name, sizeof name, d > 5 || d < -2 ? "1e%d" : "%.*f", d > 5 || d < -2 ? d : d < 0 ? -d : 0, pow(10, d));
        if (d > 5 || d < -2) snprintf(name, sizeof name, "1e%d", d);
        EPX_TRY(label(out, LEFT - 6, y + 4, " text-anchor=\"end\"", name));
    }
    return EPX_OK;
}

/* Ticks are the points of the longest line. */
static epx_status_t x_ticks(epx_str_t *out, const epx_chart_panel_t *p, axis_t a) {
    const epx_chart_line_t *most = &p->lines[0];
    double last = -100;
    for (int l = 1; l < p->n_lines; l++)
        if (p->lines[l].n > most->n) most = &p->lines[l];
    for (int i = 0; p->n_lines && i < most->n; i++) {
        char name[32];
        double x = at_x(a, most->x[i]);
        if (x - last < 28) continue;
        last = x;
        snprintf(name, sizeof name, "%g", most->x[i]);
        EPX_TRY(epx_str_printf(out, "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%d\" y2=\"%d\" stroke=\"#888\"/>\n", x, x,
                               PANEL_H - BOTTOM, PANEL_H - BOTTOM + 4));
        EPX_TRY(label(out, x, PANEL_H - BOTTOM + 16, " text-anchor=\"middle\"", name));
    }
    return EPX_OK;
}

static epx_status_t line(epx_str_t *out, const epx_chart_line_t *l, const char *colour, axis_t ax, axis_t ay) {
    const char *dash = l->dashed ? " stroke-dasharray=\"5 4\"" : "";
    EPX_TRY(epx_str_printf(out, "<polyline fill=\"none\" stroke-width=\"2\" stroke=\"%s\"%s points=\"", colour, dash));
    for (int i = 0; i < l->n; i++) EPX_TRY(epx_str_printf(out, "%.1f,%.1f ", at_x(ax, l->x[i]), at_y(ay, l->y[i])));
    EPX_TRY(epx_str_append_z(out, "\"/>\n"));
    for (int i = 0; i < l->n && !l->dashed; i++)
        EPX_TRY(epx_str_printf(out, "<circle r=\"3\" fill=\"%s\" cx=\"%.1f\" cy=\"%.1f\"/>\n", colour, at_x(ax, l->x[i]),
                               at_y(ay, l->y[i])));
    return EPX_OK;
}

static epx_status_t legend(epx_str_t *out, const epx_chart_panel_t *p) {
    for (int l = 0; l < p->n_lines; l++) {
        double y = PANEL_H + l * ROW_H;
        EPX_TRY(epx_str_printf(out, "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" stroke-width=\"2\" stroke=\"%s\"%s/>\n",
                               LEFT, LEFT + 22, y - 4, y - 4, colours[l % N_COLOURS],
                               p->lines[l].dashed ? " stroke-dasharray=\"5 4\"" : ""));
        EPX_TRY(label(out, LEFT + 28, y, "", p->lines[l].name));
    }
    return EPX_OK;
}

static epx_status_t panel(epx_str_t *out, const epx_chart_panel_t *p, double x, double y) {
    axis_t ax = axis_of(p, 0), ay = axis_of(p, 1);
    EPX_TRY(epx_str_printf(out, "<g transform=\"translate(%.1f %.1f)\">\n", x, y));
    EPX_TRY(label(out, LEFT, TOP - 14, " font-weight=\"bold\"", p->title));
    EPX_TRY(y_grid(out, ay));
    EPX_TRY(epx_str_printf(out, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"none\" stroke=\"#888\"/>\n", LEFT, TOP,
                           PANEL_W - LEFT - RIGHT, PANEL_H - TOP - BOTTOM));
    EPX_TRY(x_ticks(out, p, ax));
    for (int l = 0; l < p->n_lines; l++) EPX_TRY(line(out, &p->lines[l], colours[l % N_COLOURS], ax, ay));
    EPX_TRY(label(out, (LEFT + PANEL_W - RIGHT) / 2.0, PANEL_H - BOTTOM + 32, " text-anchor=\"middle\"", p->x_label));
    EPX_TRY(epx_str_printf(out, "<g transform=\"translate(14 %d) rotate(-90)\">", (TOP + PANEL_H - BOTTOM) / 2));
    EPX_TRY(label(out, 0, 0, " text-anchor=\"middle\"", p->y_label));
    EPX_TRY(epx_str_append_z(out, "</g>\n"));
    EPX_TRY(legend(out, p));
    return epx_str_append_z(out, "</g>\n");
}

epx_status_t epx_chart_svg(const epx_chart_panel_t *panels, int n_panels, const char *title, epx_str_t *out) {
    int columns = n_panels < PER_ROW ? n_panels : PER_ROW, rows = (n_panels + PER_ROW - 1) / PER_ROW, most = 0;
    for (int i = 0; i < n_panels; i++) most = panels[i].n_lines > most ? panels[i].n_lines : most;
    int height = PANEL_H + most * ROW_H + 8, width = columns * PANEL_W;
    EPX_TRY(epx_str_printf(out,
                           "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" font-family=\"sans-serif\" "
                           "font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
                           width, TITLE_H + rows * height));
    EPX_TRY(label(out, 12, 22, " font-size=\"15\"", title));
    for (int i = 0; i < n_panels; i++) EPX_TRY(panel(out, &panels[i], (i % PER_ROW) * PANEL_W, TITLE_H + (i / PER_ROW) * height));
    return epx_str_append_z(out, "</svg>\n");
}

epx_status_t epx_chart_write(const epx_chart_panel_t *panels, int n_panels, const char *title, const char *path) {
    epx_str_t svg = {0};
    epx_status_t s = epx_chart_svg(panels, n_panels, title, &svg);
    FILE *f = s < 0 ? NULL : fopen(path, "w");
    if (s >= 0 && f == NULL) s = epx_fail_errno(EPX_ERR_OS, errno, "%s", path);
    if (s >= 0 && fwrite(svg.data, 1, svg.n_bytes, f) != svg.n_bytes) s = epx_fail_errno(EPX_ERR_OS, errno, "%s", path);
    if (f && fclose(f) != 0 && s >= 0) s = epx_fail_errno(EPX_ERR_OS, errno, "%s", path);
    epx_str_fini(&svg);
    return s;
}
