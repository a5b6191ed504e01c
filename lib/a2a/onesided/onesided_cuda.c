/* Backend "onesided" on GPUs: launches of the kernels of cuda/, and what the host keeps for them. Rows and flags are the kernels'
 * business; here are memory, arguments, errors. The step path is one launch a call on the caller's stream: nothing is allocated
 * and nothing waited for, so it may be captured in a CUDA graph. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "cuda/module.h"
#include "spi/a2a.h"
#include "spi/device.h"
#include "spi/gpu_setup.h"

/* In host memory that the device writes and copies from. */
typedef struct {
    epx_gpu_error_t error;
    uint32_t one; /* source of the stop word */
} pinned_t;

/* Private device memory of a plan; offsets in one allocation. */
typedef struct {
    uint64_t home, terms, blocks, stop, expert_off, entries, row_base, scale_base, total;
} tables_t;

enum { MAX_CHANNELS = 4 };

/* Each channel has a part of the slab and tables of its own, and is a plan of its own to the kernels; stop word, error record and
 * the table of experts are shared. */
typedef struct {
    int device;
    epx_gpu_plan_t gpu[MAX_CHANNELS];
    epx_device_slab_t *slab;
    epx_cuda_memory_t memory;
    tables_t at; /* of channel 0; those of channel c lie c * at.total further */
    pinned_t *pinned;
    void *side; /* stream of stop() */
} state_t;

static state_t *state_of(const epx_plan_t *p) { return p->backend_block; }

/* ---- sizes ---- */

static uint64_t take(uint64_t *at, uint64_t bytes) {
    uint64_t off = *at;
    *at = (off + bytes + 255) / 256 * 256;
    return off;
}

/* n_local_max and rows: of the rank with most experts, so that all ranks take the same. */
static void lay_tables(const epx_gpu_plan_t *g, int n_local_max, uint64_t rows, int lists, tables_t *t) {
    uint64_t w = (uint64_t)g->n_ranks, at = 0;
    t->home = take(&at, (uint64_t)g->n_experts * sizeof(uint32_t));
    t->terms = take(&at, w * (uint64_t)g->max_tokens * (uint64_t)g->top_k * sizeof(epx_gpu_term_t));
    t->blocks = take(&at, (uint64_t)g->n_blocks * sizeof(epx_gpu_block_t));
    t->stop = take(&at, sizeof(uint32_t));
    t->expert_off = take(&at, ((uint64_t)n_local_max + 1) * sizeof(int32_t));
    t->row_base = take(&at, w * sizeof(void *));
    t->scale_base = take(&at, w * sizeof(void *));
    t->entries = take(&at, lists ? rows * sizeof(epx_list_entry_t) : 0);
    t->total = at;
}

static int packets_of(const epx_net_t *net) { return (net->device->wire & EPX_WIRE_PACKETS) != 0; }

static void measure(const epx_net_t *net, const epx_plan_config_t *cfg, int n_local_max, uint64_t rows, epx_gpu_plan_t *g,
                    tables_t *t) {
    epx_gpu_setup(cfg, net->rank, net->n_ranks, n_local_max, net->device->max_blocks, packets_of(net), g);
    lay_tables(g, n_local_max, rows, cfg->layout == EPX_LAYOUT_LISTS, t);
}

static epx_status_t can(const epx_net_t *net, const epx_plan_config_t *cfg) {
    return epx_gpu_check_config(cfg, net->n_ranks, net->device->max_blocks);
}

static epx_status_t private_bytes(const epx_plan_config_t *cfg, int n_ranks, size_t row_max, size_t *out_bytes) {
    (void)cfg, (void)n_ranks, (void)row_max;
    *out_bytes = sizeof(state_t);
    return EPX_OK;
}

static void device_bytes(const epx_net_t *net, const epx_plan_config_t *cfg, int n_local_max, size_t row_max, uint64_t *out_slab,
                         uint64_t *out_private) {
    epx_gpu_plan_t g;
    tables_t t;
    measure(net, cfg, n_local_max, row_max, &g, &t);
    *out_slab = g.l.total_bytes * (uint64_t)cfg->n_channels;
    *out_private = t.total * (uint64_t)cfg->n_channels;
}

/* ---- create and destroy ---- */

static epx_status_t check_no_capture(int device) {
    int capturing = 0;
    EPX_TRY(epx_cuda_check(epx_cuda()->capturing(device, &capturing), "capture state"));
    if (!capturing) return EPX_OK;
    return epx_fail(EPX_ERR_STATE, "a CUDA stream is being captured into a graph: plans are created before the capture");
}

static epx_status_t copy_in(state_t *s, uint64_t off, const void *src, uint64_t bytes) {
    const epx_cuda_api_t *cuda = epx_cuda();
    EPX_TRY(epx_cuda_check(cuda->copy(s->device, s->memory.ptr + off, src, bytes, s->side), "copy of a table"));
    return epx_cuda_check(cuda->stream_sync(s->device, s->side), "copy of a table");
}

static epx_status_t send_home(epx_plan_t *p, state_t *s) {
    size_t n = (size_t)p->cfg.n_experts;
    uint32_t *home = malloc(n * sizeof *home);
    if (home == NULL) return epx_fail(EPX_ERR_NOMEM, "no memory for %zu experts", n);
    for (size_t e = 0; e < n; e++) { /* one slot an expert: epx_gpu_check_config() */
        const epx_place_t *at = &p->placements[0].places[e];
        home[e] = (uint32_t)at->rank << 16 | (uint32_t)at->local;
    }
    epx_status_t st = copy_in(s, s->at.home, home, n * sizeof *home);
    free(home);
    return st;
}

static char *tables_of(const state_t *s, int channel) { return s->memory.ptr + (uint64_t)channel * s->at.total; }

static void point_tables(epx_plan_t *p, state_t *s, int channel) {
    char *base = tables_of(s, channel);
    epx_lists_t *l = &p->channels[channel].lists;
    epx_gpu_plan_t *g = &s->gpu[channel];
    g->home = (const uint32_t *)(const void *)(s->memory.ptr + s->at.home);
    g->terms = (epx_gpu_term_t *)(void *)(base + s->at.terms);
    g->blocks = (epx_gpu_block_t *)(void *)(base + s->at.blocks);
    g->stop = (uint32_t *)(void *)(s->memory.ptr + s->at.stop);
    l->n_local_experts = p->placements[0].n_local;
    l->n_rows = -1;
    l->expert_off = (const int32_t *)(const void *)(base + s->at.expert_off);
    l->entries = (const epx_list_entry_t *)(const void *)(base + s->at.entries);
    l->row_base = (const void *const *)(const void *)(base + s->at.row_base);
    l->scale_base = g->l.n_scales ? (const float *const *)(const void *)(base + s->at.scale_base) : NULL;
    l->row_stride_bytes = g->l.d_row_bytes;
    l->scale_stride = g->l.d_row_bytes / sizeof(float);
}

static epx_status_t open_plan(epx_plan_t *p, int n_local_max) {
    const epx_cuda_api_t *cuda = epx_cuda();
    state_t *s = state_of(p);
    epx_cuda_device_t info;
    void *host, *seen;
    s->device = p->net->device->device;
    EPX_TRY(check_no_capture(s->device));
    EPX_TRY(epx_cuda_check(cuda->device_info(s->device, &info), "device"));
    epx_gpu_plan_t *g = &s->gpu[0];
    measure(p->net, &p->cfg, n_local_max, p->row_max, g, &s->at);
    g->n_local = p->placements[0].n_local;
    g->early_launch = info.major >= 9;
    g->scale_gap = (int64_t)p->scale_gap;
    EPX_TRY(epx_cuda_check(cuda->stream_create(s->device, &s->side), "stream"));
    EPX_TRY(epx_cuda_check(cuda->host_alloc(s->device, sizeof *s->pinned, &host, &seen), "host-mapped memory"));
    s->pinned = host;
    s->pinned->one = 1;
    g->error = &((pinned_t *)seen)->error;
    uint64_t n = (uint64_t)p->cfg.n_channels;
    EPX_TRY(epx_cuda_check(cuda->memory_alloc(s->device, s->at.total * n, 0, &s->memory), "private tables on the device"));
    for (int c = 0; c < p->cfg.n_channels; c++) {
        s->gpu[c] = *g;
        point_tables(p, s, c);
    }
    EPX_TRY(send_home(p, s));
    return p->net->device->link->slab_alloc(p->net, g->l.total_bytes * n, &s->slab);
}

/* Launch every kernel of the plan with the stop word set: they return at once. This loads their code, which must not happen while
 * a peer spins on the same device, and finds out whether their shared memory fits. */
static epx_status_t rehearse(epx_plan_t *p, state_t *s) {
    const epx_cuda_api_t *cuda = epx_cuda();
    epx_gpu_io_t io = {.n_tokens = 0, .out_histogram = (int32_t *)(void *)s->memory.ptr}; /* it is not written */
    const epx_gpu_plan_t *g = &s->gpu[0];
    const uint32_t off = 0;
    EPX_TRY(copy_in(s, s->at.stop, &s->pinned->one, sizeof off));
    int e = cuda->dispatch(s->device, g, &io, EPX_GPU_SEND | EPX_GPU_RECV, s->side);
    if (e == 0) e = cuda->combine(s->device, g, &io, EPX_GPU_SEND | EPX_GPU_RECV, 0, s->side);
    if (e == 0) e = cuda->dispatch(s->device, g, &io, EPX_GPU_RECV, s->side); /* with its gate */
    if (e != 0)
        return epx_fail(EPX_ERR_UNSUPPORTED,
                        "max_tokens %d on %d ranks with top_k %d, %d experts and n_blocks %d: the kernels do not fit the shared "
                        "memory of device %d (%s); "
                        "fewer tokens or more blocks do",
                        p->cfg.max_tokens, p->n_ranks, p->cfg.top_k, p->cfg.n_experts, g->n_blocks, s->device,
                        cuda->error_text(e));
    EPX_TRY(epx_cuda_check(cuda->stream_sync(s->device, s->side), "first launch of the kernels"));
    return copy_in(s, s->at.stop, &off, sizeof off);
}

static epx_status_t share_plan(epx_plan_t *p, uint64_t timeout_ns) {
    state_t *s = state_of(p);
    EPX_TRY(p->net->device->link->slab_share(p->net, s->slab, timeout_ns));
    for (int c = 0; c < p->cfg.n_channels; c++)
        for (int r = 0; r < p->n_ranks; r++) s->gpu[c].base[r] = s->slab->base[r] + (uint64_t)c * s->gpu[c].l.total_bytes;
    return rehearse(p, s);
}

static void close_plan(epx_plan_t *p) {
    const epx_cuda_api_t *cuda = epx_cuda();
    state_t *s = state_of(p);
    p->net->device->link->slab_free(p->net, s->slab);
    if (s->memory.ptr != NULL) (void)cuda->memory_free(&s->memory);
    if (s->pinned != NULL) (void)cuda->host_free(s->device, s->pinned);
    if (s->side != NULL) (void)cuda->stream_destroy(s->device, s->side);
}

static void drain(epx_plan_t *p) { (void)epx_cuda()->device_sync(state_of(p)->device); }

/* ---- errors ---- */

static epx_status_t check(epx_plan_t *p, int *out_about) {
    static const char *const phases[] = {"dispatch", "combine"};
    const epx_gpu_error_t *e = &state_of(p)->pinned->error;
    epx_status_t code =
        (epx_status_t)(int32_t)epx_load_acquire_u32((const uint32_t *)&e->code); /* partner: the fence in keep_waiting() */
    if (code == EPX_OK) return EPX_OK;
    *out_about = e->peer;
    return epx_fail(code,
                    "%s: rank %d waited %.3f s for rank %d (pid %lld) on device %d: epoch %" PRIu64 ", expected %" PRIu64
                    ", seen %" PRIu64,
                    phases[e->phase == 1], p->rank, (double)p->cfg.timeout_ns * 1e-9, e->peer,
                    (long long)p->net->peers[e->peer].pid, state_of(p)->device, e->epoch, e->epoch, e->seen);
}

/* Kernels that wait see it within 256 polls, later ones at their start. Any thread. */
static void stop(epx_plan_t *p) {
    state_t *s = state_of(p);
    if (s->memory.ptr != NULL)
        (void)epx_cuda()->copy(s->device, s->memory.ptr + s->at.stop, &s->pinned->one, sizeof(uint32_t), s->side);
}

/* ---- steps ---- */

static epx_gpu_io_t dispatch_io(const epx_plan_t *p, const epx_io_t *io) {
    const state_t *s = state_of(p);
    char *base = tables_of(s, io->channel);
    epx_gpu_io_t g = {.x = io->x,
                      .x_scale = (const uint32_t *)(const void *)io->x_scale,
                      .ids = io->ids,
                      .weights = io->weights,
                      .n_tokens = io->n_tokens,
                      .n_tokens_device = io->n_tokens_device,
                      .out_x = io->out_x,
                      .out_scale = io->out_scale,
                      .out_counts = io->out_counts,
                      .out_histogram = io->out_histogram};
    if (p->cfg.layout != EPX_LAYOUT_EXPERT_MAJOR) g.out_expert_off = (int32_t *)(void *)(base + s->at.expert_off);
    if (p->cfg.layout == EPX_LAYOUT_LISTS) {
        g.out_entries = base + s->at.entries;
        g.out_row_base = (const void **)(void *)(base + s->at.row_base);
        g.out_scale_base = (const float **)(void *)(base + s->at.scale_base);
    }
    return g;
}

static epx_status_t dispatch_halves(epx_plan_t *p, const epx_io_t *io, int halves) {
    state_t *s = state_of(p);
    epx_gpu_io_t g = dispatch_io(p, io);
    return epx_cuda_check(epx_cuda()->dispatch(s->device, &s->gpu[io->channel], &g, halves, io->stream), "launch of dispatch");
}

static epx_status_t combine_halves(epx_plan_t *p, const epx_io_t *io, int halves) {
    state_t *s = state_of(p);
    epx_gpu_io_t g = {.x = io->x, .weights = io->combine_weights, .out_x = io->out_x, .add = io->add};
    int reduced = p->cfg.combine == EPX_COMBINE_REDUCED;
    return epx_cuda_check(epx_cuda()->combine(s->device, &s->gpu[io->channel], &g, halves, reduced, io->stream),
                          "launch of combine");
}

static epx_status_t dispatch_send(epx_plan_t *p, const epx_io_t *io) { return dispatch_halves(p, io, EPX_GPU_SEND); }
static epx_status_t dispatch_recv(epx_plan_t *p, const epx_io_t *io) { return dispatch_halves(p, io, EPX_GPU_RECV); }
static epx_status_t combine_send(epx_plan_t *p, const epx_io_t *io) { return combine_halves(p, io, EPX_GPU_SEND); }
static epx_status_t combine_recv(epx_plan_t *p, const epx_io_t *io) { return combine_halves(p, io, EPX_GPU_RECV); }
static epx_status_t dispatch(epx_plan_t *p, const epx_io_t *io) { return dispatch_halves(p, io, EPX_GPU_SEND | EPX_GPU_RECV); }
static epx_status_t combine(epx_plan_t *p, const epx_io_t *io) { return combine_halves(p, io, EPX_GPU_SEND | EPX_GPU_RECV); }

static const epx_a2a_device_t device_calls = {device_bytes, open_plan, share_plan, close_plan, drain,
                                              check,        stop,      dispatch,   combine};

extern const epx_a2a_t epx_a2a_onesided_cuda;
const epx_a2a_t epx_a2a_onesided_cuda = {
    "onesided",
    "on GPUs: rows as tagged packets or with flags, one kernel a half",
    100,
    EPX_REGION_NONE,
    0,
    can,
    private_bytes,
    dispatch_send,
    dispatch_recv,
    combine_send,
    combine_recv,
    &device_calls,
};
