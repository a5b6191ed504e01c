/* "self" (one rank), the caller's two callbacks, and by name: tcp, env. */
#include "boot/boot.h"

#include <string.h>

#include "base/status.h"
#include "boot/env.h"
#include "boot/tcp.h"

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

/* cfg may leave rank and size to the launcher; if it does not, both must say the same. */
static epx_status_t open_env(const epx_world_config_t *cfg, uint64_t timeout_ns, epx_boot_t *b) {
    epx_boot_env_t e;
    EPX_TRY(epx_boot_env_read(&e));
    if (cfg->rank != -1 && cfg->rank != e.rank)
        return epx_fail(EPX_ERR_ARG, "rank is %d and %s says %d; legal: -1 or the same", cfg->rank, e.launcher, e.rank);
    if (cfg->n_ranks != -1 && cfg->n_ranks != e.n_ranks)
        return epx_fail(EPX_ERR_ARG, "n_ranks is %d and %s says %d; legal: -1 or the same", cfg->n_ranks, e.launcher, e.n_ranks);
    epx_status_t s = epx_boot_tcp_open(e.address, e.rank, e.n_ranks, timeout_ns, b);
    return s >= 0 ? EPX_OK
                  : epx_fail_context(s, "rank %d of %d as %s says (EPX_INIT_ADDR sets another address)", e.rank, e.n_ranks,
                                     e.launcher);
}

epx_status_t epx_boot_open(const epx_world_config_t *cfg, epx_boot_t *out_boot) {
    static const char *const unbuilt[] = {"file:", "mpi", "pmix"};
    static const char legal[] = "\"self\", \"tcp:HOST:PORT\", \"env\", or NULL with callbacks";
    uint64_t timeout_ns = cfg->timeout_ns ? cfg->timeout_ns : EPX_BOOT_TIMEOUT_NS;
    const char *name = cfg->bootstrap;
    epx_boot_t b = {0};
    if (name == NULL) {
        EPX_TRY(open_callbacks(cfg, &b));
    } else if (strcmp(name, "self") == 0) {
        EPX_TRY(open_self(cfg, &b));
    } else if (strncmp(name, "tcp:", 4) == 0) {
        EPX_TRY(epx_boot_tcp_open(name + 4, cfg->rank, cfg->n_ranks, timeout_ns, &b));
    } else if (strcmp(name, "env") == 0) {
        EPX_TRY(open_env(cfg, timeout_ns, &b));
    } else {
        for (size_t i = 0; i < sizeof unbuilt / sizeof unbuilt[0]; i++)
            if (strncmp(name, unbuilt[i], strlen(unbuilt[i])) == 0)
                return epx_fail(EPX_ERR_UNSUPPORTED, "bootstrap \"%s\" is not built yet; built: %s", name, legal);
        return epx_fail(EPX_ERR_ARG, "bootstrap is \"%s\"; legal: %s", name, legal);
    }
    *out_boot = b;
    return EPX_OK;
}

void epx_boot_close(epx_boot_t *b) {
    if (b->close != NULL) b->close(b->ctx);
    memset(b, 0, sizeof *b);
}

epx_status_t epx_boot_allgather(const epx_boot_t *b, const void *mine, size_t n_bytes, void *out_all) {
    epx_status_t s = b->allgather(b->ctx, mine, n_bytes, out_all);
    if (s == EPX_OK) return EPX_OK;
    if (b->close != NULL) return epx_fail_context(s, "bootstrap all-gather on rank %d", b->rank); /* ours: it says why */
    return epx_fail(s < 0 ? s : EPX_ERR_IO, "bootstrap all-gather of %zu bytes on rank %d failed: %s", n_bytes, b->rank,
                    epx_status_text(s));
}
