/* Device link "cuda_ipc": GPUs of one host. A slab is cuMem memory whose descriptor goes over the group's host transport; where
 * that is not to be had, cudaMalloc and a cudaIpc handle; thread ranks of one process use the owner's pointer. Set-up path only:
 * the step path is loads and stores of the kernels. */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/status.h"
#include "cuda/module.h"
#include "spi/device.h"
#include "transport/cuda_ipc/device_map.h"

enum { MESSAGE_BYTES = 160, TEST_ROUNDS = 2000 };

/* What every message of set-up starts with, so that a failure on one rank is everybody's. */
typedef struct {
    int32_t status;
    char message[MESSAGE_BYTES];
} verdict_t;

typedef struct {
    verdict_t verdict;
    int32_t device;
    epx_cuda_device_t info;
} card_t;

typedef struct {
    verdict_t verdict;
    uint64_t bytes;
    device_map_t *map; /* for a rank of the same process, with a reference taken for it; else NULL */
    uint8_t ipc[EPX_CUDA_IPC_BYTES];
} slab_message_t;

typedef struct {
    verdict_t verdict;
    uint32_t bad; /* EPX_CUDA_LINK_* */
} test_message_t;

typedef struct {
    epx_device_net_t net;
    int mapped;
} cuda_net_t;

typedef struct {
    epx_device_slab_t slab;
    int mapped;
    device_map_t **maps; /* [W] */
} cuda_slab_t;

static int same_process(const epx_net_t *host, int r) {
    const epx_peer_t *a = &host->peers[r], *b = &host->peers[host->rank];
    return a->pid == b->pid && memcmp(a->process, b->process, sizeof a->process) == 0;
}

static void set_verdict(verdict_t *v, epx_status_t s) {
    char text[MESSAGE_BYTES] = "";
    if (s < 0) snprintf(text, sizeof text, "%.*s", MESSAGE_BYTES - 1, epx_error_message());
    v->status = s;
    memcpy(v->message, text, sizeof text);
}

/* The own failure, with its message, or the first of a peer. messages: [W] of n_bytes, each starting with a verdict. */
static epx_status_t judge(const epx_net_t *host, const verdict_t *own, const void *messages, size_t n_bytes) {
    if (own->status < 0) return epx_fail((epx_status_t)own->status, "%s", own->message);
    for (int r = 0; r < host->n_ranks; r++) {
        verdict_t v;
        memcpy(&v, (const char *)messages + (size_t)r * n_bytes, sizeof v);
        if (v.status < 0) return epx_fail((epx_status_t)v.status, "cuda_ipc on rank %d: %.*s", r, MESSAGE_BYTES - 1, v.message);
    }
    return EPX_OK;
}

/* Give a message to all; EPX_OK when all have succeeded. */
static epx_status_t round_of(epx_net_t *host, verdict_t *mine, epx_status_t own, size_t n_bytes, int fd, void *all, int *fds,
                             uint64_t timeout_ns) {
    set_verdict(mine, own);
    EPX_TRY(host->transport->pass(host, mine, n_bytes, fd, all, fds, timeout_ns));
    return judge(host, mine, all, n_bytes);
}

static epx_status_t available(void) {
    if (epx_cuda() == NULL) return epx_fail(EPX_ERR_UNSUPPORTED, "%s", epx_cuda_reason());
    if (epx_cuda_n_devices() == 0) return epx_fail(EPX_ERR_UNSUPPORTED, "there is no CUDA device");
    return EPX_OK;
}

static pthread_once_t texts_once = PTHREAD_ONCE_INIT;
static struct { char name[16], detail[320]; } texts[EPX_CUDA_MAX_DEVICES];

static void write_texts(void) {
    const epx_cuda_api_t *cuda = epx_cuda();
    for (int d = 0; d < epx_cuda_n_devices() && d < EPX_CUDA_MAX_DEVICES; d++) {
        epx_cuda_device_t info;
        int n_peers = 0;
        snprintf(texts[d].name, sizeof texts[d].name, "gpu%d", d);
        int e = cuda->device_info(d, &info);
        for (int q = 0; q < epx_cuda_n_devices(); q++) {
            int access = 0, atomics = 0;
            n_peers += q != d && cuda->peer_access(d, q, &access, &atomics) == 0 && access;
        }
        if (e != 0) snprintf(texts[d].detail, sizeof texts[d].detail, "cannot be used: %s", cuda->error_text(e));
        else
            snprintf(texts[d].detail, sizeof texts[d].detail,
                     "%.90s, %.1f GiB (%.1f free), %d SMs, compute %d.%d, reaches %d other GPU%s, memory shared by %s", info.name,
                     (double)info.total_bytes / (1 << 30), (double)info.free_bytes / (1 << 30), info.n_sm, info.major, info.minor,
                     n_peers, n_peers == 1 ? "" : "s", info.can_pass_fds ? "descriptor" : "cudaIpc");
    }
}

static epx_status_t device_text(int i, const char **out_name, const char **out_detail) {
    if (i < 0 || i >= epx_cuda_n_devices() || i >= EPX_CUDA_MAX_DEVICES) return EPX_ERR_NOT_FOUND;
    pthread_once(&texts_once, write_texts);
    *out_name = texts[i].name;
    *out_detail = texts[i].detail;
    return EPX_OK;
}

/* ---- slabs ---- */

static void slab_free(epx_net_t *host, epx_device_slab_t *slab) {
    cuda_slab_t *s = (cuda_slab_t *)slab;
    (void)host;
    if (s == NULL) return;
    for (int r = 0; s->maps != NULL && r < slab->n_ranks; r++) device_map_unref(s->maps[r]);
    free(s->maps);
    free(slab->base);
    free(s);
}

static epx_status_t new_slab(const epx_net_t *host, int device, int mapped, uint64_t bytes, epx_device_slab_t **out_slab) {
    epx_status_t st;
    cuda_slab_t *s = calloc(1, sizeof *s);
    if (s == NULL) return epx_fail(EPX_ERR_NOMEM, "cuda_ipc: no memory for %zu bytes", sizeof *s);
    s->slab.rank = host->rank;
    s->slab.n_ranks = host->n_ranks;
    s->slab.bytes = bytes;
    s->mapped = mapped;
    s->maps = calloc((size_t)host->n_ranks, sizeof *s->maps);
    s->slab.base = calloc((size_t)host->n_ranks, sizeof *s->slab.base);
    if (s->maps == NULL || s->slab.base == NULL) {
        st = epx_fail(EPX_ERR_NOMEM, "cuda_ipc: no memory for %d mappings", host->n_ranks);
        goto err_slab;
    }
    EPX_TRY_GOTO(st, device_map_create(device, bytes, mapped, &s->maps[host->rank]), err_slab);
    s->slab.base[host->rank] = s->maps[host->rank]->memory.ptr;
    *out_slab = &s->slab;
    return EPX_OK;
err_slab:
    slab_free(NULL, &s->slab);
    return st;
}

static epx_status_t slab_alloc(epx_net_t *host, uint64_t bytes, epx_device_slab_t **out_slab) {
    const cuda_net_t *n = (const cuda_net_t *)host->device;
    return new_slab(host, n->net.device, n->mapped, bytes, out_slab);
}

static epx_status_t export_own(const epx_net_t *host, const cuda_slab_t *s, slab_message_t *m, int *out_fd) {
    const device_map_t *own = s->maps[host->rank];
    int others = 0;
    for (int r = 0; r < host->n_ranks; r++) others += !same_process(host, r);
    if (others == 0) return EPX_OK;
    if (s->mapped)
        return epx_cuda_check(epx_cuda()->memory_export_fd(&own->memory, out_fd), "export of device memory by descriptor");
    return epx_cuda_check(epx_cuda()->memory_export_ipc(&own->memory, m->ipc), "export of device memory by cudaIpc");
}

static epx_status_t open_peer(epx_net_t *host, cuda_slab_t *s, int device, int r, const slab_message_t *m, int fd) {
    if (m->bytes != s->slab.bytes)
        return epx_fail(EPX_ERR_MISMATCH, "cuda_ipc: a slab of %" PRIu64 " bytes came from rank %d, %" PRIu64 " expected",
                        m->bytes, r, s->slab.bytes);
    if (same_process(host, r)) {
        s->maps[r] = m->map;
        if (!s->mapped) EPX_TRY(epx_cuda_check(epx_cuda()->peer_enable(device, m->map->memory.device), "peer access"));
    } else {
        if (s->mapped && fd < 0) return epx_fail(EPX_ERR_FORMAT, "cuda_ipc: no descriptor came from rank %d", r);
        EPX_TRY(device_map_open(device, fd, m->ipc, s->maps[host->rank]->memory.bytes, &s->maps[r]));
    }
    s->slab.base[r] = s->maps[r]->memory.ptr;
    return EPX_OK;
}

static epx_status_t share(epx_net_t *host, cuda_slab_t *s, int device, uint64_t timeout_ns) {
    size_t w = (size_t)host->n_ranks;
    slab_message_t mine = {.bytes = s->slab.bytes, .map = s->maps[host->rank]}, *all = calloc(w, sizeof *all);
    int own_fd = -1, *fds = malloc(w * sizeof *fds);
    epx_status_t st;
    if (all == NULL || fds == NULL) {
        free(all);
        free(fds);
        return epx_fail(EPX_ERR_NOMEM, "cuda_ipc: no memory for %zu messages", w);
    }
    for (int r = 0; r < host->n_ranks; r++) {
        fds[r] = -1;
        if (r != host->rank && same_process(host, r)) device_map_ref(mine.map); /* the receiver's reference */
    }
    st = export_own(host, s, &mine, &own_fd);
    st = round_of(host, &mine.verdict, st, sizeof mine, own_fd, all, fds, timeout_ns);
    for (int r = 0; r < host->n_ranks; r++) {
        if (r == host->rank) continue;
        if (st >= 0) st = open_peer(host, s, device, r, &all[r], fds[r]);
        else if (all[r].map != NULL && same_process(host, r) && s->maps[r] == NULL) device_map_unref(all[r].map);
        if (fds[r] >= 0) close(fds[r]);
    }
    if (own_fd >= 0) close(own_fd);
    free(all);
    free(fds);
    return st;
}

static epx_status_t slab_share(epx_net_t *host, epx_device_slab_t *slab, uint64_t timeout_ns) {
    return share(host, (cuda_slab_t *)slab, host->device->device, timeout_ns);
}

/* ---- open ---- */

static epx_status_t own_card(int device, card_t *c) {
    EPX_TRY(available());
    c->device = device;
    if (device >= epx_cuda_n_devices())
        return epx_fail(EPX_ERR_ARG, "device is %d; legal: -1 (CPU), 0 to %d", device, epx_cuda_n_devices() - 1);
    EPX_TRY(epx_cuda_check(epx_cuda()->device_info(device, &c->info), "device"));
    if (c->info.major < 8)
        return epx_fail(EPX_ERR_UNSUPPORTED, "device %d (%s) has compute capability %d.%d; built: 8.0 and later", device,
                        c->info.name, c->info.major, c->info.minor);
    return EPX_OK;
}

/* The own ordinal of a device that a peer names, or -1: not visible here. */
static int ordinal_of(const uint8_t *uuid) {
    epx_cuda_device_t info;
    for (int d = 0; d < epx_cuda_n_devices(); d++)
        if (epx_cuda()->device_info(d, &info) == 0 && memcmp(info.uuid, uuid, sizeof info.uuid) == 0) return d;
    return -1;
}

static epx_status_t check_access(const epx_net_t *host, int device, const card_t *cards) {
    for (int r = 0; r < host->n_ranks; r++) {
        int access = 0, atomics = 0, peer = same_process(host, r) ? cards[r].device : ordinal_of(cards[r].info.uuid);
        if (peer < 0) continue; /* the self-test finds out */
        EPX_TRY(epx_cuda_check(epx_cuda()->peer_access(device, peer, &access, &atomics), "peer access"));
        if (!access)
            return epx_fail(
                EPX_ERR_UNSUPPORTED,
                "device %d of rank %d cannot reach the memory of device %d of rank %d (no NVLink or PCIe peer access)", device,
                host->rank, cards[r].device, r);
    }
    return EPX_OK;
}

/* Ranks that share a GPU share its multiprocessors. */
static int blocks_a_rank(int n_ranks, const card_t *cards) {
    int least = 1 << 20;
    for (int r = 0; r < n_ranks; r++) {
        int sharing = 0;
        for (int q = 0; q < n_ranks; q++)
            sharing += memcmp(cards[q].info.uuid, cards[r].info.uuid, sizeof cards[q].info.uuid) == 0;
        if (cards[r].info.n_sm / sharing < least) least = cards[r].info.n_sm / sharing;
    }
    return least;
}

static epx_status_t meet(epx_net_t *host, int device, uint64_t timeout_ns, cuda_net_t *n) {
    card_t mine = {.device = device}, *all = calloc((size_t)host->n_ranks, sizeof *all);
    int *fds = calloc((size_t)host->n_ranks, sizeof *fds);
    epx_status_t s = EPX_ERR_NOMEM;
    if (all == NULL || fds == NULL) goto done;
    s = own_card(device, &mine);
    EPX_TRY_GOTO(s, round_of(host, &mine.verdict, s, sizeof mine, -1, all, fds, timeout_ns), done);
    n->mapped = 1;
    for (int r = 0; r < host->n_ranks; r++) n->mapped &= all[r].info.can_pass_fds;
    n->net.max_blocks = blocks_a_rank(host->n_ranks, all);
    s = check_access(host, device, all);
    s = round_of(host, &mine.verdict, s, sizeof mine, -1, all, fds, timeout_ns);
done:
    free(all);
    free(fds);
    return s;
}

/* Run the torture on slabs of its own. *out_bad: what failed on any rank. */
static epx_status_t test_links(epx_net_t *host, cuda_net_t *n, uint64_t timeout_ns, uint32_t *out_bad) {
    size_t w = (size_t)host->n_ranks;
    test_message_t mine = {.bad = 0}, *all = calloc(w, sizeof *all);
    int *fds = calloc(w, sizeof *fds);
    epx_device_slab_t *slab = NULL;
    void *stream = NULL;
    epx_status_t s = EPX_ERR_NOMEM;
    if (all == NULL || fds == NULL) goto done;
    s = new_slab(host, n->net.device, n->mapped, w * EPX_CUDA_LINK_STRIDE, &slab);
    if (s >= 0) s = epx_cuda_check(epx_cuda()->stream_create(n->net.device, &stream), "stream");
    EPX_TRY_GOTO(s, round_of(host, &mine.verdict, s, sizeof mine, -1, all, fds, timeout_ns), done);
    s = share(host, (cuda_slab_t *)slab, n->net.device, timeout_ns);
    EPX_TRY_GOTO(s, round_of(host, &mine.verdict, s, sizeof mine, -1, all, fds, timeout_ns), done);
    s = epx_cuda_check(
        epx_cuda()->link_test(n->net.device, slab->base, host->rank, host->n_ranks, TEST_ROUNDS, timeout_ns, stream, &mine.bad),
        "self-test of the links");
    s = round_of(host, &mine.verdict, s, sizeof mine, -1, all, fds, timeout_ns);
    for (size_t r = 0; s >= 0 && r < w; r++) *out_bad |= all[r].bad;
done:
    if (stream != NULL) (void)epx_cuda()->stream_destroy(n->net.device, stream);
    slab_free(host, slab);
    free(all);
    free(fds);
    return s;
}

static epx_status_t choose_modes(epx_net_t *host, cuda_net_t *n, uint64_t timeout_ns) {
    uint32_t bad = 0;
    epx_status_t s = test_links(host, n, timeout_ns, &bad);
    if (s < 0 && n->mapped) { /* descriptors may be forbidden here, as in some containers */
        epx_log(EPX_LOG_WARN, "cuda_ipc: cuMem memory cannot be shared (%s); cudaIpc is tried", epx_error_message());
        n->mapped = 0;
        bad = 0;
        s = test_links(host, n, timeout_ns, &bad);
    }
    EPX_TRY(s);
    if (bad & (EPX_CUDA_LINK_TIMEOUT | EPX_CUDA_LINK_FLAGS))
        return epx_fail(EPX_ERR_UNSUPPORTED, "cuda_ipc: the links between the GPUs failed their self-test: %s",
                        bad & EPX_CUDA_LINK_TIMEOUT ? "stores did not arrive in time" : "data arrived after its flag");
    n->net.wire = EPX_WIRE_BULK | (bad & EPX_CUDA_LINK_PACKETS ? 0 : EPX_WIRE_PACKETS);
    n->net.outlives_peer = n->mapped;
    return EPX_OK;
}

static void close_net(epx_device_net_t *d) { free(d); }

extern const epx_device_link_t epx_device_cuda_ipc;

static epx_status_t open_net(epx_net_t *host, int device, uint64_t timeout_ns, epx_device_net_t **out_net) {
    cuda_net_t *n = calloc(1, sizeof *n);
    if (n == NULL) return epx_fail(EPX_ERR_NOMEM, "cuda_ipc: no memory for %zu bytes", sizeof *n);
    n->net.link = &epx_device_cuda_ipc;
    n->net.device = device;
    epx_status_t s = meet(host, device, timeout_ns, n);
    if (s >= 0) s = choose_modes(host, n, timeout_ns);
    if (s < 0) free(n);
    else *out_net = &n->net;
    return s;
}

const epx_device_link_t epx_device_cuda_ipc = {
    "cuda_ipc", "GPUs of one host: memory mapped by descriptor or cudaIpc, links tested when a group is made",
    available,  device_text,
    open_net,   close_net,
    slab_alloc, slab_share,
    slab_free,
};
