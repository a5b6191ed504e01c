/* The CUDA exchange against a sequential oracle, then timed. One process, W ranks as W slabs on the devices present (rank r on device
 * r % n). Usage: exchange_gpu check | few | bench | quick [LEAST_T] | stamps. Exit 0 when every bit agrees. */
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include <cuda_runtime.h>

#include "lib/a2a/onesided/cuda/launch.h"
extern "C" {
#include "base/half.h"
#include "base/philox.h"
}
#include "lib/spi/gpu_layout.h"

#define CK(x) do { cudaError_t e_ = (cudaError_t)(x); if (e_ != cudaSuccess) { fprintf(stderr, "%s:%d %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_)); exit(1); } } while (0)

struct Case { int W, T, H, K, E, token, wire, combine, exact, packets, blocks; };
static int n_dev = 1, early = 1;
static uint64_t timeout_ns = 2000000000u;

struct Rank {
    epx_gpu_plan_t p; epx_gpu_io_t io; int dev; cudaStream_t s;
    char *slab; uint32_t *home; epx_gpu_error_t *err_host;
    void *x, *out_x, *y, *res; float *out_scale, *w; int32_t *ids, *counts, *off; void *entries;
    int n_local;
};
static size_t db(int d) { return d == EPX_F32 ? 4 : d == EPX_FP8_E4M3 ? 1 : 2; }
static float rd(int d, float v) { return d == EPX_F32 ? v : d == EPX_BF16 ? epx_bf16_to_f32(epx_f32_to_bf16(v)) : epx_f16_to_f32(epx_f32_to_f16(v)); }
static void put(void *p, int d, size_t i, float v) { if (d == EPX_F32) ((float *)p)[i] = v; else ((uint16_t *)p)[i] = d == EPX_BF16 ? epx_f32_to_bf16(v) : epx_f32_to_f16(v); }
static float get(const void *p, int d, size_t i) { if (d == EPX_F32) return ((const float *)p)[i]; uint16_t h = ((const uint16_t *)p)[i]; return d == EPX_BF16 ? epx_bf16_to_f32(h) : epx_f16_to_f32(h); }

static void make(const Case &c, std::vector<Rank> &R, int n_tables) {
    R.assign(c.W, Rank());
    std::vector<int32_t> er(c.E), el(c.E); std::vector<int> nl(c.W, 0);
    for (int e = 0; e < c.E; e++) { int q = c.E / c.W, m = c.E % c.W, r = e < m * (q + 1) ? e / (q + 1) : m + (e - m * (q + 1)) / q; er[e] = r; el[e] = nl[r]++; }
    std::vector<char *> base(c.W);
    for (int r = 0; r < c.W; r++) {
        Rank &k = R[r]; k.dev = r % n_dev; k.n_local = nl[r]; CK(cudaSetDevice(k.dev)); CK(cudaStreamCreateWithFlags(&k.s, cudaStreamNonBlocking));
        epx_gpu_plan_t &p = k.p; memset(&p, 0, sizeof p);
        p.rank = r; p.n_ranks = c.W; p.hidden = c.H; p.top_k = c.K; p.n_experts = c.E; p.n_local = nl[r]; p.max_tokens = c.T; p.packet_tokens = c.packets; p.n_blocks = c.blocks;
        p.token_dtype = c.token; p.wire_dtype = c.wire; p.combine_dtype = c.combine; p.expert_dtype = p.result_dtype = c.token; p.align = 1; p.exact = c.exact; p.early_launch = early; p.timeout_ns = timeout_ns;
        epx_gpu_layout(&p, 128);
        CK(cudaMalloc(&k.slab, p.l.total_bytes)); CK(cudaMemset(k.slab, 0, p.l.total_bytes)); base[r] = k.slab;
        std::vector<uint32_t> hm(c.E); for (int e = 0; e < c.E; e++) hm[e] = (uint32_t)er[e] << 16 | el[e];
        CK(cudaMalloc(&k.home, c.E * 4)); CK(cudaMemcpy(k.home, hm.data(), c.E * 4, cudaMemcpyHostToDevice));
        CK(cudaMalloc(&p.terms, (size_t)c.W * c.T * c.K * 8)); CK(cudaMalloc(&p.blocks, (c.blocks + 1) * sizeof *p.blocks)); CK(cudaMemset(p.blocks, 0, (c.blocks + 1) * sizeof *p.blocks)); p.stop = (uint32_t *)(p.blocks + c.blocks);
        CK(cudaHostAlloc(&k.err_host, sizeof *k.err_host, cudaHostAllocMapped | cudaHostAllocPortable)); memset(k.err_host, 0, sizeof *k.err_host); p.error = k.err_host;
        p.home = k.home; CK(cudaMalloc(&p.stamps, c.blocks * 128)); CK(cudaMemset(p.stamps, 0, c.blocks * 128));
        size_t rows = (size_t)nl[r] * p.row_cap;
        CK(cudaMalloc(&k.x, (size_t)c.T * c.H * db(c.token) * n_tables + 16)); CK(cudaMalloc(&k.ids, (size_t)c.T * c.K * 4 * n_tables + 16)); CK(cudaMalloc(&k.w, (size_t)c.T * c.K * 4 * n_tables + 16));
        CK(cudaMalloc(&k.out_x, rows * c.H * db(c.wire) + 16)); CK(cudaMalloc(&k.out_scale, rows * (p.l.n_scales + 1) * 4 + 16)); CK(cudaMalloc(&k.counts, (nl[r] + 1) * 4)); CK(cudaMalloc(&k.off, (nl[r] + 1) * 4)); CK(cudaMalloc(&k.entries, (size_t)c.W * c.T * c.K * 8 + 16));
        CK(cudaMalloc(&k.y, rows * c.H * db(c.token) + 16)); CK(cudaMalloc(&k.res, (size_t)c.T * c.H * db(c.token) + 16));
    }
    for (int r = 0; r < c.W; r++) { Rank &k = R[r]; CK(cudaSetDevice(k.dev)); for (int q = 0; q < c.W; q++) k.p.base[q] = base[q];
        k.io = {k.x, nullptr, k.ids, k.w, 0, nullptr, k.out_x, k.out_scale, k.counts}; }
}
static void drop(std::vector<Rank> &R) {
    for (Rank &k : R) { CK(cudaSetDevice(k.dev)); CK(cudaDeviceSynchronize()); for (void *q : {(void *)k.slab, (void *)k.home, (void *)k.p.stamps, (void *)k.p.terms, (void *)k.p.blocks, k.x, (void *)k.ids, (void *)k.w, k.out_x, (void *)k.out_scale, (void *)k.counts, (void *)k.off, k.entries, k.y, k.res}) CK(cudaFree(q)); CK(cudaFreeHost(k.err_host)); CK(cudaStreamDestroy(k.s)); }
}
static int sync_all(std::vector<Rank> &R, const char *what) {
    for (Rank &k : R) { CK(cudaSetDevice(k.dev)); CK(cudaStreamSynchronize(k.s)); }
    for (Rank &k : R) if (k.err_host->code) { printf("  %s: rank %d: code %d phase %d peer %d epoch %llu seen %llu\n", what, k.p.rank, k.err_host->code, k.err_host->phase, k.err_host->peer, (unsigned long long)k.err_host->epoch, (unsigned long long)k.err_host->seen); return 1; }
    return 0;
}

struct Host { int T; std::vector<float> x; std::vector<int32_t> ids; std::vector<float> w; };
static void draw(const Case &c, int r, uint64_t seed, int T, Host &h) {
    h.T = T; h.x.resize((size_t)T * c.H); h.ids.resize((size_t)T * c.K); h.w.resize((size_t)T * c.K); uint64_t i = 0, s = seed * 131 + r;
    for (auto &v : h.x) v = rd(c.token, epx_philox_unit(s, i++) * 4 - 2);
    for (int t = 0; t < T; t++) for (int k = 0; k < c.K; k++) { int32_t id; int tries = 0; bool ok; do { id = epx_philox_u32(s, i++) % c.E; ok = true; for (int j = 0; j < k; j++) if (h.ids[t * c.K + j] == id) ok = false; } while (!ok && tries++ < 20);
        if (seed % 3 == 1 && epx_philox_u32(s, i++) % 7 == 0) id = -1; if (seed % 5 == 2) id = 3 % c.E; h.ids[t * c.K + k] = id; h.w[t * c.K + k] = epx_philox_unit(s, i++); }
}
/* One round: draws, runs, compares everything bit for bit. */
static int round_(const Case &c, std::vector<Rank> &R, uint64_t seed, int fused_launch) {
    std::vector<Host> H(c.W);
    for (int r = 0; r < c.W; r++) { int T; switch ((epx_philox_u32(seed, r)) % 5) { case 0: T = 0; break; case 1: T = c.T; break; case 2: T = std::min(1, c.T); break; default: T = epx_philox_u32(seed, 100 + r) % (c.T + 1); }
        draw(c, r, seed, T, H[r]); Rank &k = R[r]; CK(cudaSetDevice(k.dev)); std::vector<char> b(H[r].x.size() * db(c.token) + 1); for (size_t i = 0; i < H[r].x.size(); i++) put(b.data(), c.token, i, H[r].x[i]);
        CK(cudaMemcpy(k.x, b.data(), H[r].x.size() * db(c.token), cudaMemcpyHostToDevice)); CK(cudaMemcpy(k.ids, H[r].ids.data(), H[r].ids.size() * 4, cudaMemcpyHostToDevice)); CK(cudaMemcpy(k.w, H[r].w.data(), H[r].w.size() * 4, cudaMemcpyHostToDevice));
        k.io.n_tokens = T; CK(cudaMemset(k.counts, 0xCC, (k.n_local + 1) * 4)); CK(cudaMemset(k.res, 0xCC, (size_t)c.T * c.H * db(c.token))); }
    for (Rank &k : R) { CK(cudaSetDevice(k.dev)); CK(cudaDeviceSynchronize()); } /* pageable copies may still be in flight */
    for (Rank &k : R) { CK(cudaSetDevice(k.dev)); CK(epx_gpu_dispatch(&k.p, &k.io, fused_launch ? 3 : EPX_GPU_SEND, k.s)); }
    if (!fused_launch) for (Rank &k : R) { CK(cudaSetDevice(k.dev)); CK(epx_gpu_dispatch(&k.p, &k.io, EPX_GPU_RECV, k.s)); }
    if (sync_all(R, "dispatch")) return 1;
    int bad = 0;
    struct Row { int src, t; }; std::vector<std::vector<std::vector<Row>>> L(c.W);
    std::vector<std::vector<float>> Y(c.W);
    for (int r = 0; r < c.W; r++) {
        L[r].resize(R[r].n_local); int e0 = 0; for (int q = 0; q < r; q++) e0 += R[q].n_local;
        for (int e = 0; e < R[r].n_local; e++) for (int s = 0; s < c.W; s++) for (int t = 0; t < H[s].T; t++) { bool has = false; for (int k = 0; k < c.K; k++) has |= H[s].ids[t * c.K + k] == e0 + e; if (has) L[r][e].push_back({s, t}); }
        std::vector<int32_t> counts(R[r].n_local); CK(cudaMemcpy(counts.data(), R[r].counts, counts.size() * 4, cudaMemcpyDeviceToHost));
        size_t rows = (size_t)R[r].n_local * R[r].p.row_cap, ns = R[r].p.l.n_scales; std::vector<char> ox(rows * c.H * db(c.wire)); std::vector<float> os(rows * ns + 1);
        CK(cudaMemcpy(ox.data(), R[r].out_x, ox.size(), cudaMemcpyDeviceToHost)); CK(cudaMemcpy(os.data(), R[r].out_scale, rows * ns * 4, cudaMemcpyDeviceToHost));
        Y[r].assign(rows * c.H, 0); std::vector<char> yb(rows * c.H * db(c.token) + 1);
        for (int e = 0; e < R[r].n_local; e++) {
            if (counts[e] != (int)L[r][e].size()) { if (bad++ < 3) printf("  counts rank %d expert %d: %d want %zu\n", r, e, counts[e], L[r][e].size()); }
            for (size_t i = 0; i < L[r][e].size(); i++) { Row w = L[r][e][i]; const float *x = &H[w.src].x[(size_t)w.t * c.H]; size_t row = (size_t)e * R[r].p.row_cap + i;
                for (int h0 = 0; h0 < c.H; h0 += 128) { int n = std::min(128, c.H - h0); float am = 0; for (int h = 0; h < n; h++) am = std::max(am, fabsf(x[h0 + h])); am = std::max(am, 1e-12f); float sc = am / 448.0f;
                    if (ns && memcmp(&os[row * ns + h0 / 128], &sc, 4)) { if (bad++ < 3) printf("  scale rank %d e %d row %zu: %g want %g\n", r, e, i, os[row * ns + h0 / 128], sc); }
                    for (int h = 0; h < n; h++) { float v; if (ns) { uint8_t q = epx_f32_to_e4m3(x[h0 + h] / sc), g = (uint8_t)ox[row * c.H + h0 + h]; v = epx_e4m3_to_f32(q) * sc; if (q != g && bad++ < 3) printf("  fp8 rank %d e %d row %zu ch %d: %02x want %02x\n", r, e, i, h0 + h, g, q); }
                        else { v = x[h0 + h]; float g = get(ox.data(), c.wire, row * c.H + h0 + h); if (memcmp(&v, &g, 4) && bad++ < 3) printf("  row rank %d e %d i %zu (src %d t %d) ch %d: %g want %g\n", r, e, i, w.src, w.t, h0 + h, g, v); }
                        float y = rd(c.token, v * (1.0f + (float)(e0 + e) / 16)); Y[r][row * c.H + h0 + h] = y; put(yb.data(), c.token, row * c.H + h0 + h, y); } } } }
        CK(cudaMemcpy(R[r].y, yb.data(), rows * c.H * db(c.token), cudaMemcpyHostToDevice));
    }
    if (bad) return bad;
    for (Rank &k : R) { CK(cudaSetDevice(k.dev)); CK(cudaDeviceSynchronize()); }
    for (Rank &k : R) { CK(cudaSetDevice(k.dev)); epx_gpu_io_t io = k.io; io.x = k.y; io.out_x = k.res; CK(epx_gpu_combine(&k.p, &io, fused_launch ? 3 : EPX_GPU_SEND, 0, k.s)); }
    if (!fused_launch) for (Rank &k : R) { CK(cudaSetDevice(k.dev)); epx_gpu_io_t io = k.io; io.x = k.y; io.out_x = k.res; CK(epx_gpu_combine(&k.p, &io, EPX_GPU_RECV, 0, k.s)); }
    if (sync_all(R, "combine")) return 1;
    std::vector<int> owner(c.E), loc(c.E); { int e = 0; for (int r = 0; r < c.W; r++) for (int i = 0; i < R[r].n_local; i++, e++) owner[e] = r, loc[e] = i; }
    std::vector<std::vector<std::vector<int>>> pos(c.W); for (int r = 0; r < c.W; r++) { pos[r].resize(R[r].n_local); for (int e = 0; e < R[r].n_local; e++) { pos[r][e].assign((size_t)c.W * c.T, -1); for (size_t i = 0; i < L[r][e].size(); i++) pos[r][e][(size_t)L[r][e][i].src * c.T + L[r][e][i].t] = i; } }
    for (int r = 0; r < c.W; r++) {
        std::vector<char> res((size_t)c.T * c.H * db(c.token)); CK(cudaMemcpy(res.data(), R[r].res, res.size(), cudaMemcpyDeviceToHost));
        for (int t = 0; t < H[r].T; t++) for (int h = 0; h < c.H; h++) { float acc = 0;
            if (c.exact) { for (int k = 0; k < c.K; k++) { int id = H[r].ids[t * c.K + k]; if (id < 0) continue; int q = owner[id], e = loc[id]; float y = Y[q][((size_t)e * R[q].p.row_cap + pos[q][e][(size_t)r * c.T + t]) * c.H + h]; acc = fmaf(H[r].w[t * c.K + k], rd(c.combine, y), acc); } }
            else for (int q = 0; q < c.W; q++) { float part = 0; bool any = false; for (int k = 0; k < c.K; k++) { int id = H[r].ids[t * c.K + k]; if (id < 0 || owner[id] != q) continue; int e = loc[id]; part = fmaf(H[r].w[t * c.K + k], Y[q][((size_t)e * R[q].p.row_cap + pos[q][e][(size_t)r * c.T + t]) * c.H + h], part); any = true; } if (any) acc += rd(c.combine, part); }
            float want = rd(c.token, acc), g = get(res.data(), c.token, (size_t)t * c.H + h); if (memcmp(&want, &g, 4) && bad++ < 3) printf("  result rank %d t %d ch %d: %g want %g\n", r, t, h, g, want); }
    }
    return bad;
}

/* few: for runs under compute-sanitizer. */
static int check(int few) {
    int bad = 0, n = 0;
    const int Ws[] = {1, 2, 3, 4, 8};
    for (int W : Ws) for (int v = 0; v < (few ? W > 4 ? 0 : 3 : 12); v++) {
        Case c = {W, v % 3 == 0 ? 5 : v % 3 == 1 ? 40 : 130, v % 4 == 0 ? 128 : v % 4 == 1 ? 200 : v % 4 == 2 ? 1024 : 2056, v % 5 == 0 ? 1 : v % 5 == 1 ? 8 : v % 5 == 2 ? 3 : 6, v % 2 ? 16 : 13, v % 3 == 1 ? EPX_F32 : v % 3 == 2 ? EPX_F16 : EPX_BF16, 0, 0, v & 1, 8, 8};
        c.wire = v % 2 ? c.token : EPX_FP8_E4M3; c.combine = c.token; if (c.K > c.E) c.K = c.E;
        std::vector<Rank> R; make(c, R, 1); int b = 0; for (uint64_t s = 1; s <= (few ? 2 : 12) && !b; s++) b += round_(c, R, s + 100 * v, (int)(s & 1)), n++;
        if (b) printf("FAIL W %d T %d H %d K %d E %d token %d wire %d exact %d\n", c.W, c.T, c.H, c.K, c.E, c.token, c.wire, c.exact); bad += b; drop(R);
    }
    for (int K : {33, 40, 64}) for (int W : {1, 2, 4}) for (int e = 0; e < 2 && !few; e++) { /* both halves of a warp's places */
        Case c = {W, 20, 256, K, 70, EPX_BF16, EPX_BF16, EPX_BF16, e, e ? 20 : 4, 8}; std::vector<Rank> R; make(c, R, 1); int b = 0;
        for (uint64_t s = 1; s <= 6 && !b; s++) b += round_(c, R, s + 7, (int)(s & 1)), n++;
        if (b) printf("FAIL W %d K %d exact %d\n", W, K, e); bad += b; drop(R); }
    printf("check: %d rounds, %s\n", n, bad ? "DIFFER" : "all bits equal"); return bad != 0;
}

/* Least time of dispatch + combine at W ranks: two exchanges of 3.9 us (measured: kernel, put, flag, wait, in a graph), plus the rows
 * that leave a rank at 370 GB/s, and in the rows case the reading of the expert rows at 4.3 TB/s. */
static double floor_us(const Case &c, int rows_case) {
    double miss = 1, local = (double)c.E / c.W;
    for (int k = 0; k < c.K; k++) miss *= (c.E - local - k) / (c.E - k);
    double remote = c.T * (c.W - 1) * (1 - miss), row_d = c.wire == EPX_FP8_E4M3 ? c.H + 4.0 * ((c.H + 127) / 128) : c.H * (double)db(c.wire);
    double back = (c.exact ? (double)c.T * c.K * (c.W - 1) / c.W : remote) * c.H * db(c.combine), rows = rows_case ? (double)c.T * c.K * c.H * db(c.token) : 0;
    return 7.8 + (remote * row_d + back) / 370e3 + rows / 4.3e6;
}
static const char *dtype_name(int d) { return d == EPX_F32 ? "f32" : d == EPX_BF16 ? "bf16" : d == EPX_F16 ? "f16" : "fp8_e4m3"; }
static int all_checked;
/* One result for the records of bench/. us: sorted. */
static void print_json(const Case &c, int rows_case, int separate, const std::vector<double> &us, uint64_t slab_bytes) {
    cudaDeviceProp d; CK(cudaGetDeviceProperties(&d, 0));
    printf("{\"bench\": \"exchange_gpu\", \"device\": \"%s\", \"n_devices\": %d, \"commit\": \"%s\", \"E\": %d, \"K\": %d, \"H\": %d, \"T\": %d, \"W\": %d, "
           "\"dispatch_dtype\": \"%s\", \"combine_dtype\": \"%s\", \"combine_mode\": \"%s\", \"layout\": \"%s\", \"case\": \"%s\", \"launches\": %d, \"blocks\": %d, "
           "\"packet_tokens\": %d, \"checked\": %s, \"us_min\": %.2f, \"us_p50\": %.2f, \"us_p99\": %.2f, \"floor_us\": %.2f, \"slab_bytes\": %llu}\n",
           d.name, n_dev, EPX_GPU_COMMIT, c.E, c.K, c.H, c.T, c.W, dtype_name(c.wire), dtype_name(c.combine), c.exact ? "exact" : "partial", rows_case ? "expert_major" : "lists",
           rows_case ? "rows" : "fused", separate ? 4 : 2, c.blocks, c.packets, all_checked ? "true" : "false", us[0], us[us.size() / 2], us[us.size() * 99 / 100], floor_us(c, rows_case),
           (unsigned long long)slab_bytes);
}

/* Fresh routing each call: n tables in turn inside one graph of n dispatch + combine calls. */
static void bench_one(Case c, int rows_case, int separate) {
    const int N = 20, REP = 9; std::vector<Rank> R; make(c, R, N);
    for (Rank &k : R) { CK(cudaSetDevice(k.dev)); std::vector<char> xb((size_t)c.T * c.H * 2 * N); std::vector<int32_t> ids; std::vector<float> w; for (size_t i = 0; i < xb.size() / 2; i++) ((uint16_t *)xb.data())[i] = epx_f32_to_bf16(((int)((i * 2654435761u) >> 20 & 1023) - 512) / 256.0f);
        Case cc = c; cc.H = 1; for (int i = 0; i < N; i++) { Host h; draw(cc, k.p.rank, 3 * 5 * (i + 1), c.T, h); ids.insert(ids.end(), h.ids.begin(), h.ids.end()); w.insert(w.end(), h.w.begin(), h.w.end()); }
        CK(cudaMemcpy(k.x, xb.data(), xb.size(), cudaMemcpyHostToDevice)); CK(cudaMemcpy(k.ids, ids.data(), ids.size() * 4, cudaMemcpyHostToDevice)); CK(cudaMemcpy(k.w, w.data(), w.size() * 4, cudaMemcpyHostToDevice)); k.io.n_tokens = c.T;
        CK(cudaMemset(k.y, 0x3c, (size_t)k.n_local * k.p.row_cap * c.H * 2)); }
    std::vector<cudaGraphExec_t> G(c.W); std::vector<cudaEvent_t> A(c.W), B(c.W);
    for (int r = 0; r < c.W; r++) { Rank &k = R[r]; CK(cudaSetDevice(k.dev)); cudaGraph_t g; CK(cudaStreamBeginCapture(k.s, cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < N; i++) { epx_gpu_io_t io = k.io; io.x = (char *)k.x + (size_t)i * c.T * c.H * 2; io.ids = k.ids + (size_t)i * c.T * c.K; io.weights = k.w + (size_t)i * c.T * c.K; epx_gpu_io_t co = io; co.x = k.y; co.out_x = k.res;
            if (!rows_case) io.out_x = nullptr, io.out_expert_off = k.off, io.out_entries = k.entries;
            if (separate) { CK(epx_gpu_dispatch(&k.p, &io, 1, k.s)); CK(epx_gpu_dispatch(&k.p, &io, 2, k.s)); CK(epx_gpu_combine(&k.p, &co, 1, !rows_case, k.s)); CK(epx_gpu_combine(&k.p, &co, 2, !rows_case, k.s)); }
            else { CK(epx_gpu_dispatch(&k.p, &io, 3, k.s)); CK(epx_gpu_combine(&k.p, &co, 3, !rows_case, k.s)); } }
        CK(cudaStreamEndCapture(k.s, &g)); CK(cudaGraphInstantiate(&G[r], g, 0)); CK(cudaGraphDestroy(g)); CK(cudaEventCreate(&A[r])); CK(cudaEventCreate(&B[r])); }
    std::vector<double> us;
    for (int rep = 0; rep < REP + 2; rep++) {
        for (int r = 0; r < c.W; r++) { CK(cudaSetDevice(R[r].dev)); CK(cudaEventRecord(A[r], R[r].s)); CK(cudaGraphLaunch(G[r], R[r].s)); CK(cudaEventRecord(B[r], R[r].s)); }
        if (sync_all(R, "bench")) exit(1);
        double m = 0; for (int r = 0; r < c.W; r++) { float ms; CK(cudaEventElapsedTime(&ms, A[r], B[r])); m = std::max(m, (double)ms * 1000 / N); }
        if (rep >= 2) us.push_back(m);
    }
    std::sort(us.begin(), us.end());
    print_json(c, rows_case, separate, us, R[0].p.l.total_bytes);
    printf("W %d devices %d H %5d E %d K %d T %3d blocks %3d packets %d %s %s: min %.1f median %.1f max %.1f us; slab %.1f MB\n", c.W, n_dev, c.H, c.E, c.K, c.T, c.blocks, c.T <= c.packets, rows_case ? "rows " : "fused", separate ? "4 launches" : "2 launches", us[0], us[us.size() / 2], us.back(), R[0].p.l.total_bytes / 1e6);
#ifdef EPX_GPU_STAMPS
    { std::vector<int64_t> st(c.blocks * 16); CK(cudaSetDevice(R[0].dev)); CK(cudaMemcpy(st.data(), R[0].p.stamps, st.size() * 8, cudaMemcpyDeviceToHost));
      for (int b : {0, 1, c.blocks / 2, c.blocks - 1}) { printf("   block %3d dispatch", b); for (int i : {1, 2, 9, 3, 4, 5, 6, 7, 8}) printf(" %lld", (long long)(st[b * 16 + i] - st[b * 16])); printf("  combine"); for (int i : {11, 14, 12, 13}) printf(" %lld", (long long)(st[b * 16 + i] - st[b * 16 + 10])); printf("  gap %lld\n", (long long)(st[b * 16 + 10] - st[b * 16 + 8])); } }
#endif
    fflush(stdout); for (int r = 0; r < c.W; r++) CK(cudaGraphExecDestroy(G[r])); drop(R);
}
static void stamps() {
    int W = n_dev > 1 ? n_dev : 2;
    for (int H : {2048, 7168}) for (int T : {1, 32, 128, 512}) { Case c = {W, T, H, 8, H == 7168 ? 256 : 128, EPX_BF16, EPX_FP8_E4M3, EPX_BF16, 0, T <= 32 ? T : 0, T == 1 ? 32 : T == 32 ? 64 : 132}; bench_one(c, 1, 0); bench_one(c, 0, 0); }
}
static void bench() {
    int W = n_dev > 1 ? n_dev : 2; const int Ts[] = {1, 8, 32, 128, 256, 512};
    for (int shape = 0; shape < 2; shape++) for (int T : Ts) for (int pk = 0; pk < 2; pk++) for (int blocks : {64, 132, 198, 264}) {
        if (n_dev == 1 && blocks > 132) continue; if (pk && T > 256) continue; if ((T <= 32 && blocks >= 198) || (T <= 1 && blocks >= 132)) continue;
        Case c = {W, T, shape ? 7168 : 2048, 8, shape ? 256 : 128, EPX_BF16, EPX_FP8_E4M3, EPX_BF16, 0, pk ? T : 0, blocks};
        bench_one(c, 1, 0); bench_one(c, 0, 0); }
}
/* The variants that are worth it, rows case; T >= from. */
static void quick(int from) {
    int W = n_dev > 1 ? n_dev : 2; struct { int T, packets, blocks; } v[] = {{1, 1, 64}, {8, 1, 64}, {8, 1, 132}, {32, 1, 132}, {32, 0, 132}, {128, 1, 132}, {128, 1, 264}, {128, 0, 132}, {128, 0, 264}, {256, 1, 264}, {256, 0, 132}, {256, 0, 264}, {512, 0, 132}, {512, 0, 264}};
    for (int shape = 0; shape < 2; shape++) for (auto &q : v) { if (q.T < from || (n_dev == 1 && q.blocks > 132)) continue;
        Case c = {W, q.T, shape ? 7168 : 2048, 8, shape ? 256 : 128, EPX_BF16, EPX_FP8_E4M3, EPX_BF16, 0, q.packets ? q.T : 0, q.blocks}; bench_one(c, 1, 0); }
}
int main(int argc, char **argv) {
    if (cudaError_t e = cudaGetDeviceCount(&n_dev); e != cudaSuccess || n_dev == 0) return printf("skipped: no GPU: %s\n", cudaGetErrorString(e)), 77;
    const char *what = argc > 1 ? argv[1] : "check";
    for (int i = 0; i < n_dev; i++) for (int j = 0; j < n_dev; j++) if (i != j) { CK(cudaSetDevice(i)); CK(cudaDeviceEnablePeerAccess(j, 0)); }
    if (getenv("EPX_GPU_EARLY")) early = atoi(getenv("EPX_GPU_EARLY"));
    if (!strcmp(what, "check")) return check(0); if (!strcmp(what, "few")) return timeout_ns = 60000000000u, check(1);
    if (!strcmp(what, "quick")) return quick(argc > 2 ? atoi(argv[2]) : 1), 0; if (!strcmp(what, "stamps")) return stamps(), 0;
    all_checked = check(0) == 0; if (!all_checked) return 1; /* a result counts only after the check */
    bench(); return 0;
}
