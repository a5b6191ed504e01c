/* Line charts as SVG: one or more panels beside each other, logarithmic axes, a legend. Enough for `epx bench` and `epx plan`.
 * Not a general plotter. */
#ifndef EPX_APP_CHART_H
#define EPX_APP_CHART_H

#include "base/str.h"

enum { EPX_CHART_MAX_POINTS = 64, EPX_CHART_MAX_LINES = 12, EPX_CHART_MAX_PANELS = 12 };

typedef struct {
    char name[64];
    int dashed; /* a bound or an estimate rather than a measurement */
    int n;
    double x[EPX_CHART_MAX_POINTS], y[EPX_CHART_MAX_POINTS]; /* > 0 */
} epx_chart_line_t;

typedef struct {
    char title[96], x_label[48], y_label[48];
    int n_lines;
    epx_chart_line_t lines[EPX_CHART_MAX_LINES];
} epx_chart_panel_t;

/* Append a complete SVG document. At most three panels lie in one row. */
epx_status_t epx_chart_svg(const epx_chart_panel_t *panels, int n_panels, const char *title, epx_str_t *out);
/* The same into a file. */
epx_status_t epx_chart_write(const epx_chart_panel_t *panels, int n_panels, const char *title, const char *path);

#endif
