/* "self" (one rank) and the caller's two callbacks. */
#include "boot/boot.h"

#include <string.h>

#include "base/status.h"

static epx_status_t self_allgather(void *ctx, const void *mine, size_t n_bytes, void *out_all) {
    (void)ctx;
    memcpy(out_all, mine, n_bytes);
    return EPX_OK;
}

static epx_status_t self_barrier(void *ctx) {
    (void)ctx;
    return EPX_OK;
}

static epx_status_t open_self(const epx_world_config_t *cfg, epx_boot_t *b) {
    if (cfg->n_ranks != -1 && cfg->n_ranks != 1)
        return epx_fail(EPX_ERR_ARG, "n_ranks is %d with bootstrap \"self\"; legal: 1 or -1", cfg->n_ranks);
    if (cfg->rank != -1 && cfg->rank != 0)
        return epx_fail(EPX_ERR_ARG, "rank is %d with bootstrap \"self\"; legal: 0 or -1", cfg->rank);
    b->rank = 0;
    b->n_ranks = 1;
    b->allgather = self_allgather;
    b->barrier = self_barrier;
    return EPX_OK;
}

static epx_status_t open_callbacks(const epx_world_config_t *cfg, epx_boot_t *b) {
    if (cfg->allgather == NULL || cfg->barrier == NULL)
        return epx_fail(EPX_ERR_ARG, "bootstrap is NULL and %s is NULL; give both callbacks or a name (\"self\")",
                        cfg->allgather == NULL ? "allgather" : "barrier");
    if (cfg->n_ranks < 1 || cfg->n_ranks > EPX_MAX_RANKS)
        return epx_fail(EPX_ERR_ARG, "n_ranks is %d; legal with callbacks: 1 to %d", cfg->n_ranks, EPX_MAX_RANKS);
    if (cfg->rank < 0 || cfg->rank >= cfg->n_ranks)
        return epx_fail(EPX_ERR_ARG, "rank is %d; legal: 0 to n_ranks - 1 = %d", cfg->rank, cfg->n_ranks - 1);
    b->rank = cfg->rank;
    b->n_ranks = cfg->n_ranks;
    b->allgather = cfg->allgather;
    b->barrier = cfg->barrier;
    b->ctx = cfg->ctx;
    return EPX_OK;
}

epx_status_t epx_boot_open(const epx_world_config_t *cfg, epx_boot_t *out_boot) {
    static const char *const unbuilt[] = {"tcp:", "env", "file:", "mpi", "pmix"};
    epx_boot_t b = {0};
    if (cfg->bootstrap == NULL) {
        EPX_TRY(open_callbacks(cfg, &b));
    } else if (strcmp(cfg->bootstrap, "self") == 0) {
        EPX_TRY(open_self(cfg, &b));
    } else {
        for (size_t i = 0; i < sizeof unbuilt / sizeof unbuilt[0]; i++)
            if (strncmp(cfg->bootstrap, unbuilt[i], strlen(unbuilt[i])) == 0)
                return epx_fail(EPX_ERR_UNSUPPORTED, "bootstrap \"%s\" is not built yet; built: \"self\", or NULL with callbacks",
                                cfg->bootstrap);
        return epx_fail(EPX_ERR_ARG, "bootstrap is \"%s\"; legal: \"self\", or NULL with callbacks", cfg->bootstrap);
    }
    *out_boot = b;
    return EPX_OK;
}

epx_status_t epx_boot_allgather(const epx_boot_t *b, const void *mine, size_t n_bytes, void *out_all) {
    epx_status_t s = b->allgather(b->ctx, mine, n_bytes, out_all);
    if (s == EPX_OK) return EPX_OK;
    return epx_fail(s < 0 ? s : EPX_ERR_IO, "bootstrap all-gather of %zu bytes on rank %d failed: %s", n_bytes, b->rank,
                    epx_status_text(s));
}
