/* The loading bar on stderr: one line, redrawn in place. Reader thread. */
#include <stdio.h>

#include "server/front/cluster_impl.h"

enum { BAR_CELLS = 30 };

void epx_cluster_draw_progress(const epx_cluster_t *c, const char *phase) {
    static const char full[BAR_CELLS + 1] = "##############################",
                                       empty[BAR_CELLS + 1] = "..............................";
    double sum = 0;
    int cells;
    if (!c->cfg.show_progress) return;
    for (int r = 0; r < c->n_ranks; r++) sum += c->ranks[r].progress;
    sum /= c->n_ranks;
    cells = sum < 0 ? 0 : sum > 1 ? BAR_CELLS : (int)(sum * BAR_CELLS);
    fprintf(stderr, "\rloading [%.*s%.*s] %3d %% %-24.24s", cells, full, BAR_CELLS - cells, empty, (int)(sum * 100), phase);
    fflush(stderr);
}

void epx_cluster_erase_progress(const epx_cluster_t *c) {
    if (!c->cfg.show_progress) return;
    fprintf(stderr, "\r%72s\r", "");
    fflush(stderr);
}
