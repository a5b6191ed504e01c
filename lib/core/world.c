/* The world: who the ranks are. Knows no transport but by the registry. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/status.h"
#include "boot/local.h"
#include "core/core.h"

enum { WORLD_MESSAGE_BYTES = 160 };

/* What ranks exchange when the world is made. */
typedef struct {
    epx_peer_t peer;
    int32_t status, n_ranks;
    char transports[64];
    char message[WORLD_MESSAGE_BYTES];
} world_record_t;

static pthread_once_t token_once = PTHREAD_ONCE_INIT;
static uint8_t process_token[16];
static int token_ok;

static void make_token(void) { token_ok = getrandom(process_token, sizeof process_token, 0) == (ssize_t)sizeof process_token; }

/* EPX_EMULATED_HOSTS=N: ranks of one host act as if they were on N, so that messages can be tested on one machine. */
static uint64_t emulated_host(int rank, int n_ranks) {
    const char *text = getenv("EPX_EMULATED_HOSTS");
    int n = text == NULL ? 1 : atoi(text);
    return n > 1 ? (uint64_t)rank * (uint64_t)n / (uint64_t)n_ranks : 0;
}

/* Boot id and network namespace: abstract sockets reach exactly the ranks that share both. */
static void host_id(int rank, int n_ranks, uint8_t out[16]) {
    char text[64] = "";
    struct stat st = {0};
    uint64_t h = UINT64_C(14695981039346656037);
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (f == NULL || fgets(text, sizeof text, f) == NULL) (void)gethostname(text, sizeof text - 1);
    if (f != NULL) fclose(f);
    for (const char *c = text; *c != '\0'; c++) h = (h ^ (uint8_t)*c) * UINT64_C(1099511628211);
    (void)stat("/proc/self/ns/net", &st);
    uint64_t ns = (uint64_t)st.st_ino ^ emulated_host(rank, n_ranks) << 48;
    memcpy(out, &h, 8);
    memcpy(out + 8, &ns, 8);
}

void epx_world_config_init(epx_world_config_t *cfg) {
    if (cfg == NULL) return;
    memset(cfg, 0, sizeof *cfg);
    cfg->size = sizeof *cfg;
    cfg->rank = -1;
    cfg->n_ranks = -1;
}

static epx_status_t check_own(const epx_world_config_t *cfg) {
    pthread_once(&token_once, make_token);
    if (!token_ok) return epx_fail(EPX_ERR_OS, "getrandom gave no process token");
    if (cfg->transports != NULL && strlen(cfg->transports) >= sizeof((world_record_t *)0)->transports)
        return epx_fail(EPX_ERR_ARG, "transports is longer than 63 letters");
    return epx_select_check_names(cfg->transports);
}

/* The own failure first, then a peer's, then a difference of settings. */
static epx_status_t judge(const world_record_t *all, const epx_boot_t *b, epx_status_t own) {
    if (own < 0) return own;
    for (int r = 0; r < b->n_ranks; r++) {
        if (all[r].status < 0)
            return epx_fail((epx_status_t)all[r].status, "rank %d could not make the world: %.*s", r, WORLD_MESSAGE_BYTES - 1,
                            all[r].message);
        if (all[r].n_ranks != b->n_ranks)
            return epx_fail(EPX_ERR_MISMATCH, "n_ranks is %d on rank %d and %d on rank %d", b->n_ranks, b->rank, all[r].n_ranks,
                            r);
        if (all[r].peer.world_rank != r)
            return epx_fail(EPX_ERR_MISMATCH, "the all-gather gave the record of rank %d in the place of rank %d",
                            all[r].peer.world_rank, r);
        if (strncmp(all[r].transports, all[0].transports, sizeof all[r].transports) != 0)
            return epx_fail(EPX_ERR_MISMATCH, "transports is \"%s\" on rank 0 and \"%s\" on rank %d", all[0].transports,
                            all[r].transports, r);
    }
    return EPX_OK;
}

static void own_peer(int world_rank, int n_ranks, epx_peer_t *out) {
    memset(out, 0, sizeof *out);
    memcpy(out->process, process_token, sizeof process_token);
    host_id(world_rank, n_ranks, out->host);
    (void)gethostname(out->node, sizeof out->node - 1);
    out->pid = getpid();
    out->uid = geteuid();
    out->world_rank = world_rank;
}

static epx_status_t meet(epx_world_t *w, const epx_world_config_t *cfg) {
    world_record_t mine = {0}, *all = calloc((size_t)w->boot.n_ranks, sizeof *all);
    if (all == NULL) return epx_fail(EPX_ERR_NOMEM, "no memory for %d world records", w->boot.n_ranks);
    epx_status_t s = check_own(cfg), t;
    own_peer(w->boot.rank, w->boot.n_ranks, &mine.peer);
    mine.n_ranks = w->boot.n_ranks;
    mine.status = s;
    if (s < 0) snprintf(mine.message, sizeof mine.message, "%.*s", WORLD_MESSAGE_BYTES - 1, epx_error_message());
    else if (cfg->transports != NULL) memcpy(mine.transports, cfg->transports, strlen(cfg->transports));
    t = epx_boot_allgather(&w->boot, &mine, sizeof mine, all);
    if (t >= 0) t = judge(all, &w->boot, s);
    for (int r = 0; t >= 0 && r < w->boot.n_ranks; r++) w->peers[r] = all[r].peer;
    free(all);
    return t;
}

/* Takes over *boot. NULL without memory; boot is closed then. */
static epx_world_t *new_world(const epx_boot_t *boot, const epx_world_config_t *cfg) {
    epx_boot_t b = *boot;
    epx_world_t *w = calloc(1, sizeof *w);
    if (w == NULL) {
        epx_boot_close(&b);
        return NULL;
    }
    w->boot = b;
    w->timeout_ns = cfg->timeout_ns ? cfg->timeout_ns : EPX_BOOT_TIMEOUT_NS;
    w->peers = calloc((size_t)boot->n_ranks, sizeof *w->peers);
    if (cfg->transports != NULL) w->transports = strdup(cfg->transports);
    if (w->peers == NULL || (cfg->transports != NULL && w->transports == NULL)) {
        epx_world_destroy(w);
        return NULL;
    }
    return w;
}

epx_status_t epx_world_create(const epx_world_config_t *cfg, epx_world_t **out_world) {
    epx_status_t s;
    epx_boot_t boot;
    if (cfg == NULL || out_world == NULL) return epx_fail(EPX_ERR_ARG, "%s is NULL", cfg == NULL ? "cfg" : "out_world");
    if (cfg->size != sizeof *cfg)
        return epx_fail(EPX_ERR_ARG, "cfg->size is %u; legal: %zu, set by epx_world_config_init()", cfg->size, sizeof *cfg);
    EPX_TRY(epx_boot_open(cfg, &boot));
    epx_world_t *w = new_world(&boot, cfg);
    if (w == NULL) return epx_fail(EPX_ERR_NOMEM, "no memory for a world of %d ranks", boot.n_ranks);
    EPX_TRY_GOTO(s, meet(w, cfg), err_world);
    *out_world = w;
    return EPX_OK;
err_world:
    epx_world_destroy(w);
    return s;
}

epx_status_t epx_world_create_local(int n_ranks, epx_world_t **out_worlds) {
    epx_world_config_t cfg;
    epx_peer_t me;
    epx_status_t s = EPX_OK;
    epx_world_config_init(&cfg);
    if (out_worlds == NULL) return epx_fail(EPX_ERR_ARG, "out_worlds is NULL");
    if (n_ranks < 1 || n_ranks > EPX_MAX_RANKS)
        return epx_fail(EPX_ERR_ARG, "n_ranks is %d; legal: 1 to %d", n_ranks, EPX_MAX_RANKS);
    EPX_TRY(check_own(&cfg));
    own_peer(0, 1, &me);
    epx_boot_t *boots = calloc((size_t)n_ranks, sizeof *boots);
    epx_world_t **worlds = calloc((size_t)n_ranks, sizeof *worlds);
    if (boots == NULL || worlds == NULL) {
        s = epx_fail(EPX_ERR_NOMEM, "no memory for %d worlds", n_ranks);
        goto done;
    }
    EPX_TRY_GOTO(s, epx_boot_local(n_ranks, EPX_BOOT_TIMEOUT_NS, boots), done);
    for (int n = 0; n < n_ranks; n++) { /* all boots are taken over, also after a failure */
        worlds[n] = new_world(&boots[n], &cfg);
        if (worlds[n] == NULL) s = epx_fail(EPX_ERR_NOMEM, "no memory for %d worlds", n_ranks);
        for (int r = 0; worlds[n] != NULL && r < n_ranks; r++) worlds[n]->peers[r] = me, worlds[n]->peers[r].world_rank = r;
    }
    if (s == EPX_OK) memcpy(out_worlds, worlds, (size_t)n_ranks * sizeof *worlds);
    for (int n = 0; s < 0 && n < n_ranks; n++) epx_world_destroy(worlds[n]);
done:
    free(worlds);
    free(boots);
    return s;
}

int epx_world_rank(const epx_world_t *w) { return w == NULL ? -1 : w->boot.rank; }

int epx_world_size(const epx_world_t *w) { return w == NULL ? 0 : w->boot.n_ranks; }

void epx_world_destroy(epx_world_t *w) {
    if (w == NULL) return;
    epx_boot_close(&w->boot);
    free(w->transports);
    free(w->peers);
    free(w);
}
