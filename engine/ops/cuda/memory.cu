/* Device memory, copies, seeded weights, and the step's rows brought to the device in one copy. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/ops/cuda/cuda_ops.cuh"

namespace epx_cuda_ops {

static epx_status_t failed(const Ops *o, epx_status_t s, const char *what, cudaError_t e) {
    char text[256];
    snprintf(text, sizeof text, "device cuda:%d: %s: %s", o->device, what, cudaGetErrorString(e));
    return o->fail(s, text);
}

void note(Ops *o, cudaError_t e, const char *what) {
    if (e == cudaSuccess || o->error != cudaSuccess) return;
    o->error = e;
    snprintf(o->what, sizeof o->what, "%s", what);
}

epx_status_t status_of(Ops *o) { return o->error == cudaSuccess ? EPX_OK : failed(o, EPX_ERR_OS, o->what, o->error); }

epx_status_t memory_alloc(epx_ops_t *ops, size_t n_bytes, void **out) {
    Ops *o = of(ops);
    void *p = nullptr;
    char text[64];
    cudaError_t e = cudaMalloc(&p, n_bytes ? n_bytes : 1);
    if (e == cudaSuccess) e = cudaMemsetAsync(p, 0, n_bytes, o->stream);
    if (e == cudaSuccess) e = cudaStreamSynchronize(o->stream);
    if (e != cudaSuccess) {
        (void)cudaGetLastError();
        (void)cudaFree(p);
        snprintf(text, sizeof text, "%zu bytes wanted, %llu free", n_bytes, (unsigned long long)free_bytes(ops));
        return failed(o, e == cudaErrorMemoryAllocation ? EPX_ERR_NOMEM : EPX_ERR_OS, text, e);
    }
    *out = p;
    return EPX_OK;
}

void memory_free(epx_ops_t *ops, void *p, size_t) {
    (void)cudaStreamSynchronize(of(ops)->stream);
    (void)cudaFree(p);
}

static epx_status_t copy(Ops *o, void *to, const void *from, size_t n_bytes, cudaMemcpyKind kind) {
    note(o, cudaMemcpyAsync(to, from, n_bytes, kind, o->stream), "copy");
    note(o, cudaStreamSynchronize(o->stream), "copy or work before it");
    return status_of(o);
}

epx_status_t memory_upload(epx_ops_t *ops, void *to, const void *from, size_t n_bytes) {
    return copy(of(ops), to, from, n_bytes, cudaMemcpyHostToDevice);
}
epx_status_t memory_download(epx_ops_t *ops, void *to, const void *from, size_t n_bytes) {
    return copy(of(ops), to, from, n_bytes, cudaMemcpyDeviceToHost);
}

epx_status_t sync(epx_ops_t *ops) {
    Ops *o = of(ops);
    note(o, cudaStreamSynchronize(o->stream), "work of the step");
    return status_of(o);
}

uint64_t free_bytes(const epx_ops_t *) {
    size_t n = 0, total = 0;
    return cudaMemGetInfo(&n, &total) == cudaSuccess ? n : 0;
}

/* ---- seeded weights: the words of base/philox.h ---- */

__device__ static void philox(uint32_t c0, uint32_t c1, uint32_t k0, uint32_t k1, uint32_t (&out)[4]) {
    uint32_t c2 = 0, c3 = 0;
    for (int i = 0; i < 10; i++) {
        const uint32_t h0 = __umulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0;
        const uint32_t h1 = __umulhi(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
        c0 = h1 ^ c1 ^ k0, c2 = h0 ^ c3 ^ k1;
        c1 = l1, c3 = l0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

/* Thread: four values, grid-stride. */
__global__ void random_kernel(uint64_t seed, float half_width, size_t n, __nv_bfloat16 *out) {
    const size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t j = (size_t)blockIdx.x * blockDim.x + threadIdx.x; j < (n + 3) / 4; j += step) {
        uint32_t r[4];
        philox((uint32_t)j, (uint32_t)((uint64_t)j >> 32), (uint32_t)seed, (uint32_t)(seed >> 32), r);
        for (int i = 0; i < 4; i++) {
            const float u = __fadd_rn(__fmul_rn((float)(r[i] >> 8), 0x1p-23f), -1.0f);
            if (j * 4 + i < n) out[j * 4 + i] = __float2bfloat16_rn(__fmul_rn(u, half_width));
        }
    }
}

__global__ void fill_kernel(uint16_t value, size_t n, uint16_t *out) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) out[i] = value;
}

static unsigned grid_for(const Ops *o, size_t items) {
    const size_t blocks = (items + 255) / 256, most = (size_t)o->n_sm * 16;
    return (unsigned)(blocks < 1 ? 1 : blocks < most ? blocks : most);
}

void random_values(epx_ops_t *ops, uint64_t seed, float half_width, size_t n, uint16_t *out) {
    Ops *o = of(ops);
    random_kernel<<<grid_for(o, (n + 3) / 4), 256, 0, o->stream>>>(seed, half_width, n, (__nv_bfloat16 *)out);
    launched(o, "random weights");
}

void fill_values(epx_ops_t *ops, uint16_t value, size_t n, uint16_t *out) {
    Ops *o = of(ops);
    fill_kernel<<<grid_for(o, n), 256, 0, o->stream>>>(value, n, out);
    launched(o, "constant weights");
}

/* ---- the step's rows ---- */

epx_status_t grow_staging(Ops *o, size_t n_bytes) {
    if (n_bytes <= o->staging_bytes) return EPX_OK;
    size_t want = o->staging_bytes ? o->staging_bytes : 65536;
    while (want < n_bytes) want *= 2;
    (void)cudaStreamSynchronize(o->stream);
    (void)cudaFreeHost(o->pinned);
    (void)cudaFree(o->staged);
    o->pinned = o->staged = nullptr;
    o->staging_bytes = 0;
    cudaError_t e = cudaMallocHost((void **)&o->pinned, want);
    if (e == cudaSuccess) e = cudaMalloc((void **)&o->staged, want);
    if (e != cudaSuccess) return failed(o, EPX_ERR_NOMEM, "tables of a step", e);
    o->staging_bytes = want;
    return EPX_OK;
}

static int32_t pages_of(const epx_ops_step_t *s, int64_t row) { return s->rows[row].position / s->page_size + 1; }
static int32_t segments_of(const epx_ops_step_t *s, int64_t row) { return s->rows[row].position / KV_SEGMENT + 1; }

/* Rows from `row` on that follow each other in one sequence. */
static int64_t run_length(const epx_ops_step_t *s, int64_t row) {
    int64_t n = 1;
    while (row + n < s->n_rows && s->rows[row + n].block_table == s->rows[row].block_table &&
           s->rows[row + n].position == s->rows[row].position + n)
        n++;
    return n;
}

struct Sizes {
    int64_t n_tables, n_units, n_tiles;
};

static Sizes measure(const Ops *o, const epx_ops_step_t *s) {
    Sizes z = {0, 0, 0};
    for (int64_t r = 0, n; r < s->n_rows; r += n) {
        n = run_length(s, r);
        z.n_tables += pages_of(s, r + n - 1);
        if (n == 1) z.n_units += segments_of(s, r);
        else z.n_tiles += div_up(n, o->tile_rows);
    }
    return z;
}

static int32_t *take(Ops *o, size_t *at, int64_t n) {
    int32_t *p = (int32_t *)(void *)(o->pinned + *at);
    *at += (size_t)div_up(n * 4, 16) * 16;
    return p;
}

template <class T> static const T *on_device(const Ops *o, const int32_t *p) {
    return (const T *)(const void *)(o->staged + ((const char *)p - o->pinned));
}

static epx_status_t add_wave(Ops *o, int32_t row, int32_t unit) {
    if (o->n_waves == o->cap_waves) {
        const int32_t cap = o->cap_waves ? 2 * o->cap_waves : 16;
        Wave *grown = (Wave *)realloc(o->waves, (size_t)cap * sizeof *grown);
        if (grown == nullptr) return o->fail(EPX_ERR_NOMEM, "device cuda: tables of a step");
        o->waves = grown, o->cap_waves = cap;
    }
    o->waves[o->n_waves++] = {row, row, unit, unit};
    return EPX_OK;
}

/* Rows that come alone: one unit for each segment of their past. */
static epx_status_t add_alone(Ops *o, const epx_ops_step_t *s, int64_t row, int32_t *units, int32_t *n_units) {
    const int32_t n = segments_of(s, row);
    Wave *w = o->n_waves ? &o->waves[o->n_waves - 1] : nullptr;
    if (w == nullptr || w->unit1 - w->unit0 + n > MAX_WAVE_UNITS) {
        const epx_status_t st = add_wave(o, (int32_t)row, *n_units);
        if (st < 0) return st;
        w = &o->waves[o->n_waves - 1];
    }
    for (int32_t i = 0; i < n; i++, ++*n_units) {
        units[2 * *n_units] = (int32_t)row;
        units[2 * *n_units + 1] = i;
    }
    w->row1 = (int32_t)row + 1;
    w->unit1 = *n_units;
    return EPX_OK;
}

epx_status_t begin(epx_ops_t *ops, const epx_ops_step_t *s) {
    Ops *o = of(ops);
    o->now = *s;
    o->n_waves = o->n_tiles = 0;
    if (s->n_rows == 0) return EPX_OK;
    const Sizes z = measure(o, s);
    const size_t words = (size_t)(4 * s->n_rows + 1 + s->n_logits + z.n_tables + 2 * z.n_units + 2 * z.n_tiles);
    epx_status_t st = grow_staging(o, words * 4 + 8 * 16);
    if (st < 0) return st;
    size_t at = 0;
    int32_t *tokens = take(o, &at, s->n_rows), *positions = take(o, &at, s->n_rows), *table_at = take(o, &at, s->n_rows);
    int32_t *row_units = take(o, &at, s->n_rows + 1), *logit_rows = take(o, &at, s->n_logits), *tables = take(o, &at, z.n_tables);
    int32_t *units = take(o, &at, 2 * z.n_units), *tiles = take(o, &at, 2 * z.n_tiles), n_units = 0, table = 0;
    memcpy(tokens, s->tokens, (size_t)s->n_rows * 4);
    if (s->n_logits) memcpy(logit_rows, s->logit_rows, (size_t)s->n_logits * 4);
    for (int64_t r = 0, n; r < s->n_rows; r += n) {
        n = run_length(s, r);
        for (int64_t i = r; i < r + n; i++) positions[i] = s->rows[i].position, table_at[i] = table, row_units[i] = n_units;
        memcpy(tables + table, s->rows[r].block_table, (size_t)pages_of(s, r + n - 1) * 4);
        table += pages_of(s, r + n - 1);
        if (n == 1 && (st = add_alone(o, s, r, units, &n_units)) < 0) return st;
        for (int64_t i = 0; n > 1 && i < n; i += o->tile_rows) {
            tiles[2 * o->n_tiles] = (int32_t)(r + i);
            tiles[2 * o->n_tiles++ + 1] = (int32_t)(n - i < o->tile_rows ? n - i : o->tile_rows);
        }
    }
    row_units[s->n_rows] = n_units;
    o->step = {on_device<int32_t>(o, tokens),     on_device<int32_t>(o, positions), on_device<int32_t>(o, table_at),
               on_device<int32_t>(o, logit_rows), on_device<int32_t>(o, tables),    on_device<Unit>(o, units),
               on_device<int32_t>(o, row_units),  on_device<Tile>(o, tiles)};
    note(o, cudaMemcpyAsync(o->staged, o->pinned, at, cudaMemcpyHostToDevice, o->stream), "tables of a step");
    return status_of(o);
}

} // namespace epx_cuda_ops
