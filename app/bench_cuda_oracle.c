/* Inputs of the CUDA bench, what must come of exchange 0, and the least time. Sequential, by the book; no code of the library but
 * the number formats. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "app/bench_cuda.h"
#include "base/half.h"
#include "base/philox.h"
#include "base/status.h"

int bc_first_expert(const bc_job_t *j, int n_ranks, int rank) {
    int q = j->n_experts / n_ranks, m = j->n_experts % n_ranks;
    return rank * q + (rank < m ? rank : m);
}

int bc_owner(const bc_job_t *j, int n_ranks, int expert) {
    int r = n_ranks - 1;
    while (bc_first_expert(j, n_ranks, r) > expert) r--;
    return r;
}

static void draw_routing(const bc_t *b, const bc_job_t *j, int rank, bc_input_t *in) {
    int n = j->hot ? bc_first_expert(j, b->n_ranks, 1) : j->n_experts;
    uint64_t at = 0, seed = b->seed * 131 + (uint64_t)rank;
    for (int i = 0; i < BC_EXCHANGES * j->n_tokens; i++) {
        int32_t *ids = in->ids + (size_t)i * (size_t)j->top_k;
        for (int k = 0; k < j->top_k; k++) {
            int again = 1;
            while (again) {
                ids[k] = (int32_t)(epx_philox_u32(seed, at++) % (uint32_t)n);
                again = 0;
                for (int q = 0; q < k; q++) again |= ids[q] == ids[k];
            }
            in->weights[(size_t)i * (size_t)j->top_k + (size_t)k] = epx_philox_unit(seed, at++);
        }
    }
}

static void quantise(const bc_job_t *j, bc_input_t *in, int t) {
    const uint16_t *x = in->x + (size_t)t * (size_t)j->hidden;
    uint16_t *seen = in->seen + (size_t)t * (size_t)j->hidden;
    uint8_t *codes = in->wire + (size_t)t * in->wire_bytes;
    for (int c = 0; c < j->hidden; c += 128) {
        int n = j->hidden - c < 128 ? j->hidden - c : 128;
        float amax = 1e-12f;
        for (int h = c; h < c + n; h++) amax = fmaxf(amax, fabsf(epx_bf16_to_f32(x[h])));
        float scale = amax / 448.0f;
        for (int h = c; h < c + n; h++) {
            codes[h] = epx_f32_to_e4m3(epx_bf16_to_f32(x[h]) / scale);
            seen[h] = epx_f32_to_bf16(epx_e4m3_to_f32(codes[h]) * scale);
        }
        memcpy(codes + j->hidden + c / 128 * 4, &scale, sizeof scale);
    }
}

epx_status_t bc_input_make(const bc_t *b, const bc_job_t *j, int rank, bc_input_t *out) {
    size_t T = (size_t)j->n_tokens, H = (size_t)j->hidden, tk = BC_EXCHANGES * T * (size_t)j->top_k;
    bc_input_t in = {.wire_bytes = j->fp8 ? H + (H + 127) / 128 * 4 : 2 * H};
    in.x = malloc((T + BC_EXCHANGES) * H * 2);
    in.ids = malloc(tk * 4);
    in.weights = malloc(tk * 4);
    in.wire = malloc(T * in.wire_bytes);
    in.seen = malloc(T * H * 2);
    if (!in.x || !in.ids || !in.weights || !in.wire || !in.seen) {
        bc_input_free(&in);
        return epx_fail(EPX_ERR_NOMEM, "no memory for the inputs of %d tokens of %d channels", j->n_tokens, j->hidden);
    }
    for (size_t i = 0; i < (T + BC_EXCHANGES) * H; i++) { /* a cheap mix: philox would take longer than the bench */
        uint32_t v = (uint32_t)(i + (uint64_t)rank * 7919u) * 2654435761u;
        v = (v ^ v >> 15) * 2246822519u;
        in.x[i] = epx_f32_to_bf16(((float)(v >> 20) - 2048.0f) / 1024.0f);
    }
    draw_routing(b, j, rank, &in);
    if (!j->fp8) {
        memcpy(in.wire, in.x, T * H * 2);
        memcpy(in.seen, in.x, T * H * 2);
    }
    for (int t = 0; j->fp8 && t < j->n_tokens; t++) quantise(j, &in, t);
    *out = in;
    return EPX_OK;
}

void bc_input_free(bc_input_t *in) {
    free(in->x);
    free(in->ids);
    free(in->weights);
    free(in->wire);
    free(in->seen);
    memset(in, 0, sizeof *in);
}

/* Weighted sum of the places k whose expert lies on `owner` (-1: any) in ascending k; 0: there is none. */
static int sum_places(const bc_t *b, const bc_job_t *j, int owner, int src, int t, float *acc) {
    const bc_input_t *in = &b->in[src];
    const uint16_t *row = in->seen + (size_t)t * (size_t)j->hidden;
    int any = 0;
    memset(acc, 0, (size_t)j->hidden * sizeof *acc);
    for (int k = 0; k < j->top_k; k++) {
        int id = in->ids[t * j->top_k + k];
        float w = in->weights[t * j->top_k + k];
        if (owner >= 0 && bc_owner(j, b->n_ranks, id) != owner) continue;
        for (int h = 0; h < j->hidden; h++) acc[h] = fmaf(w, epx_bf16_to_f32(bc_expert(id, row[h])), acc[h]);
        any = 1;
    }
    return any;
}

int bc_partial_row(const bc_t *b, const bc_job_t *j, int owner, int src, int t, uint16_t *out, float *scratch) {
    if (!sum_places(b, j, owner, src, t, scratch)) return 0;
    for (int h = 0; h < j->hidden; h++) out[h] = epx_f32_to_bf16(scratch[h]);
    return 1;
}

void bc_result_row(const bc_t *b, const bc_job_t *j, int rank, int t, uint16_t *out, float *scratch) {
    float *acc = scratch + j->hidden;
    if (j->exact) {
        (void)sum_places(b, j, -1, rank, t, acc);
    } else {
        memset(acc, 0, (size_t)j->hidden * sizeof *acc);
        for (int q = 0; q < b->n_ranks; q++)
            for (int h = 0, any = bc_partial_row(b, j, q, rank, t, out, scratch); any && h < j->hidden; h++)
                acc[h] += epx_bf16_to_f32(out[h]);
    }
    for (int h = 0; h < j->hidden; h++) out[h] = epx_f32_to_bf16(acc[h]);
}

/* Two exchanges of 3.9 us (measured on two H200: kernel, put, flag, wait, in a graph), the rows that leave a rank at 370 GB/s,
 * and, where combine sums expert rows, reading these at 4.3 TB/s. With one hot rank the busiest direction counts. */
double bc_floor_us(const bc_t *b, const bc_job_t *j, double *out_link_bytes) {
    double W = b->n_ranks, T = j->n_tokens, miss = 1, H = j->hidden, local = (double)j->n_experts / W;
    for (int k = 0; k < j->top_k; k++) miss *= (j->n_experts - local - k) / (j->n_experts - k);
    double remote = j->hot ? T * (W - 1) : T * (W - 1) * (1 - miss);
    double out = remote * (j->fp8 ? H + 4 * ceil(H / 128) : 2 * H);
    double back = (j->exact ? (j->hot ? T * j->top_k * (W - 1) : T * j->top_k * (W - 1) / W) : remote) * 2 * H;
    double rows = j->fused ? 0 : (j->hot ? W : 1) * T * j->top_k * 2 * H;
    *out_link_bytes = out + back;
    return 7.8 + (out + back) / 370e3 + rows / 4.3e6;
}
