/* Multiprocessors that an exchange takes from other work while it waits for a late rank. Rank 0 waits on the device; meanwhile a
 * kernel that needs all multiprocessors runs on another stream. Two block sizes: light ones fit beside waiting blocks, heavy ones
 * (160 KB of shared memory, as matrix products have) do not. */
#include <cuda_runtime_api.h>
#include <stdio.h>

#include "tests/gpu/soak.h"
#include "tests/gpu/soak_kernels.h"

enum { T = 128, H = 2048, K = 8, E = 64, TURNS = 20000, N_SM_BLOCKS = 8, LIGHT_BYTES = 1 << 10, HEAVY_BYTES = 160 << 10 };

typedef struct {
    cudaStream_t stream;
    cudaEvent_t from, to;
    float *out;
    int n_sm;
} busy_t;

static int run_busy(th_rank_t *r, const busy_t *b, int shared_bytes, float *out_ms) {
    int e = cudaEventRecord(b->from, b->stream);
    if (e == 0) e = sk_busy(b->n_sm * N_SM_BLOCKS, shared_bytes, TURNS, b->out, b->stream);
    if (e == 0) e = cudaEventRecord(b->to, b->stream);
    if (e == 0) e = cudaEventSynchronize(b->to);
    if (e == 0) e = cudaEventElapsedTime(out_ms, b->from, b->to);
    TH_CHECK(r, e == 0, "busy kernel: %s", cudaGetErrorString((cudaError_t)e));
    return 0;
}

static int open_busy(th_rank_t *r, th_device_t *d, busy_t *b) {
    float ms;
    int e = cudaSetDevice(d->ordinal);
    if (e == 0) e = cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking);
    if (e == 0) e = cudaEventCreate(&b->from);
    if (e == 0) e = cudaEventCreate(&b->to);
    if (e == 0) e = cudaDeviceGetAttribute(&b->n_sm, cudaDevAttrMultiProcessorCount, d->ordinal);
    TH_CHECK(r, e == 0, "set-up: %s", cudaGetErrorString((cudaError_t)e));
    b->out = d->take(d, 4096);
    return run_busy(r, b, LIGHT_BYTES, &ms) || run_busy(r, b, HEAVY_BYTES, &ms);
}

/* One exchange in which rank 1 comes when rank 0 has measured. halves: two calls a phase. */
static int late_rank(th_rank_t *r, tg_rank_t *k, epx_plan_t *p, const epx_io_t *in, const epx_io_t *back, const busy_t *b,
                     int halves) {
    static const char *const ways[] = {"dispatch in one call", "dispatch_recv on its own"};
    float alone[2] = {0, 0}, beside[2] = {0, 0};
    if (r->rank == 0 && (run_busy(r, b, LIGHT_BYTES, &alone[0]) || run_busy(r, b, HEAVY_BYTES, &alone[1]))) return -1;
    TH_CHECK(r, th_barrier(r) == EPX_OK, "%s", "another rank failed");
    if (r->rank == 0) {
        if (halves) TH_OK(r, epx_dispatch_send(p, in));
        if (halves) TH_OK(r, epx_dispatch_recv(p, in));
        if (!halves) TH_OK(r, epx_dispatch(p, in));
        th_sleep_us(2000);
        if (run_busy(r, b, LIGHT_BYTES, &beside[0])) return -1;
        /* Heavy blocks would wait for a whole exchange in one call, and this rank's measurement for them. */
        if (halves && run_busy(r, b, HEAVY_BYTES, &beside[1])) return -1;
        printf("waiting, %s: light work %.2f ms alone, %.2f beside (%.1f SMs lost)", ways[halves], alone[0], beside[0],
               b->n_sm * (1 - alone[0] / beside[0]));
        if (halves)
            printf("; heavy work %.2f ms alone, %.2f beside (%.1f SMs lost)", alone[1], beside[1],
                   b->n_sm * (1 - alone[1] / beside[1]));
        printf("\n");
        fflush(stdout);
    }
    TH_CHECK(r, th_barrier(r) == EPX_OK, "%s", "another rank failed");
    if (r->rank != 0) TH_OK(r, epx_dispatch(p, in));
    TH_OK(r, epx_combine(p, back));
    TH_CHECK(r, k->device->sync(k->device) == 0, "%s", "stream");
    TH_OK(r, epx_plan_poll(p));
    return 0;
}

int soak_waiting(th_rank_t *r, tg_rank_t *k) {
    epx_plan_config_t c;
    epx_plan_t *p = NULL;
    epx_plan_info_t info = {.size = sizeof info};
    epx_io_t in, back;
    busy_t b = {0};
    th_device_t *d = k->device;
    epx_plan_config_init(&c);
    c.max_tokens = T, c.hidden = H, c.top_k = K, c.n_experts = E;
    c.token_dtype = EPX_BF16, c.wire_dtype = EPX_FP8_E4M3, c.layout = EPX_LAYOUT_EXPERT_MAJOR, c.timeout_ns = 20000000000u;
    TH_OK(r, epx_plan_create(k->group, &c, &p));
    TH_OK(r, epx_plan_info(p, &info));
    size_t slots = (size_t)info.n_local_experts * (size_t)info.row_cap;
    d->reset(d);
    epx_io_init(&in), epx_io_init(&back);
    in.x = d->take(d, (size_t)T * H * 2), in.ids = d->take(d, (size_t)T * K * 4), in.weights = d->take(d, (size_t)T * K * 4);
    in.out_x = d->take(d, slots * H), in.out_scale = d->take(d, slots * (H / 128) * 4);
    in.out_counts = d->take(d, (size_t)info.n_local_experts * 4 + 4);
    back.x = d->take(d, slots * H * 2), back.out_x = d->take(d, (size_t)T * H * 2);
    TH_CHECK(r, back.out_x != NULL, "%s", "arena");
    in.stream = back.stream = d->stream;
    in.n_tokens = T;
    int rc = open_busy(r, d, &b);
    for (int halves = 0; rc == 0 && halves < 2; halves++) rc = late_rank(r, k, p, &in, &back, &b, halves);
    if (rc != 0) epx_plan_abort(p);
    epx_plan_destroy(p);
    return rc;
}
