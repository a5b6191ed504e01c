/* The standard exchange as a peer: NCCL's all-gather of the tokens and reduce-scatter of bf16 partial sums, in a graph.
 * libnccl.so.2 is opened at run time. Only its own time is measured: no cast, no experts, no routing. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "app/bench_cuda.h"
#include "base/status.h"

enum { NCCL_BF16 = 9, NCCL_SUM = 0 };
typedef struct {
    char bytes[128];
} unique_id_t; /* passed by value */

static struct {
    int (*version)(int *);
    int (*id)(unique_id_t *);
    int (*init)(void **, int, unique_id_t, int);
    int (*destroy)(void *);
    int (*gather)(const void *, void *, size_t, int, void *, void *);
    int (*scatter)(const void *, void *, size_t, int, int, void *, void *);
    const char *(*text)(int);
} nccl;

static int look_up(void *lib, const char *name, void *out) {
    void *symbol = dlsym(lib, name);
    memcpy(out, &symbol, sizeof symbol);
    return symbol != NULL;
}

static epx_status_t check(int e, const char *what) {
    return e == 0 ? EPX_OK : epx_fail(EPX_ERR_OS, "NCCL, %s: %s", what, nccl.text(e));
}

epx_status_t bc_nccl_open(bc_t *b) {
    unique_id_t id;
    int version = 0;
    if (b->n_ranks > b->n_devices)
        return epx_fail(EPX_ERR_UNSUPPORTED, "NCCL needs a device for each rank: %d ranks, %d devices", b->n_ranks, b->n_devices);
    (void)setenv("NCCL_NVLS_ENABLE", "0", 1); /* no NVLink multicast */
    void *lib = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (lib == NULL) return epx_fail(EPX_ERR_UNSUPPORTED, "libnccl.so.2 cannot be opened: %s", dlerror());
    if (!look_up(lib, "ncclGetVersion", &nccl.version) || !look_up(lib, "ncclGetUniqueId", &nccl.id) ||
        !look_up(lib, "ncclCommInitRank", &nccl.init) || !look_up(lib, "ncclCommDestroy", &nccl.destroy) ||
        !look_up(lib, "ncclAllGather", &nccl.gather) || !look_up(lib, "ncclReduceScatter", &nccl.scatter) ||
        !look_up(lib, "ncclGetErrorString", &nccl.text))
        return epx_fail(EPX_ERR_UNSUPPORTED, "libnccl.so.2 lacks a function of version 2");
    EPX_TRY(check(nccl.version(&version), "version"));
    EPX_TRY(check(nccl.id(&id), "unique id"));
    memcpy(b->nccl_id, &id, sizeof id);
    snprintf(b->nccl_text, sizeof b->nccl_text, "NCCL %d.%d.%d", version / 10000, version / 100 % 100, version % 100);
    return EPX_OK;
}

void bc_nccl_close(bc_rank_t *r) {
    if (r->nccl != NULL) (void)nccl.destroy(r->nccl);
    r->nccl = NULL;
}

static epx_status_t join(bc_rank_t *r) {
    unique_id_t id;
    memcpy(&id, r->b->nccl_id, sizeof id);
    return r->nccl != NULL ? EPX_OK : check(nccl.init(&r->nccl, r->b->n_ranks, id, r->rank), "init");
}

static epx_status_t exchange(bc_rank_t *r, char *x, char *all, char *out, size_t n) {
    EPX_TRY(check(nccl.gather(x, all, n, NCCL_BF16, r->nccl, r->dev.stream), "all-gather"));
    return check(nccl.scatter(all, out, n, NCCL_BF16, NCCL_SUM, r->nccl, r->dev.stream), "reduce-scatter");
}

/* Sum over ranks of what all of them gathered: W times the own rows. */
static epx_status_t prepare(bc_rank_t *r, char *x, char *all, char *out, size_t n) {
    const bc_input_t *in = &r->b->in[r->rank];
    uint16_t *got = malloc(n * 2);
    epx_status_t s = got == NULL ? epx_fail(EPX_ERR_NOMEM, "no memory") : cu_upload(&r->dev, x, in->x, n * 2);
    if (s >= 0) s = exchange(r, x, all, out, n);
    if (s >= 0) s = cu_sync(r->dev.stream);
    if (s >= 0) s = cu_fetch(&r->dev, got, out, n * 2);
    for (size_t i = 0; s >= 0 && r->b->n_ranks == 2 && i < n; i++) {
        uint16_t twice = (in->x[i] & 0x7F80) ? (uint16_t)(in->x[i] + 0x80) : in->x[i];
        if (got[i] != twice) s = epx_fail(EPX_ERR_INTERNAL, "NCCL: element %zu is %04x, wanted %04x", i, got[i], twice);
    }
    free(got);
    return s;
}

static epx_status_t record(bc_rank_t *r, char *x, char *all, char *out, size_t n, void **out_graph) {
    EPX_TRY(cu_capture_begin(r->dev.stream));
    epx_status_t s = EPX_OK;
    for (int i = 0; s >= 0 && i < BC_EXCHANGES; i++) s = exchange(r, x, all, out, n);
    epx_status_t end = cu_capture_end(r->dev.stream, out_graph);
    return s < 0 ? s : end;
}

int bc_nccl(bc_rank_t *r, bc_result_t *out) {
    size_t n = (size_t)out->job.n_tokens * (size_t)out->job.hidden;
    double us[BC_MAX_REPLAYS];
    void *graph = NULL;
    char *x = cu_alloc(n * 2), *all = cu_alloc(n * 2 * (size_t)r->b->n_ranks), *result = cu_alloc(n * 2);
    int rc = bc_agree(r, x && all && result ? EPX_OK : EPX_ERR_NOMEM);
    if (rc == 0) rc = bc_agree(r, join(r));
    if (rc == 0) rc = bc_agree(r, prepare(r, x, all, result, n));
    if (rc == 0) rc = bc_agree(r, record(r, x, all, result, n, &graph));
    if (rc == 0 && r->rank == 0) out->checked = 1;
    for (int run = 0; rc == 0 && run < r->b->n_runs; run++) {
        rc = bc_time(r, graph, us, r->b->n_replays);
        if (rc == 0 && r->rank == 0) bc_summary(out, run, us, r->b->n_replays);
    }
    cu_graph_free(graph);
    cu_free(x);
    cu_free(all);
    cu_free(result);
    return rc;
}
