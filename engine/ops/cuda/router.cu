/* Choice of experts, one warp a row; see epx_router_t. Equal values go to the lower id. */
#include <math_constants.h>

#include "engine/ops/cuda/cuda_ops.cuh"

namespace epx_cuda_ops {

enum { WARPS = 4, MAX_GROUPS = 256 };

struct Router {
    const float *logits;
    Vector bias;
    int32_t *ids;
    float *weights;
    int n_experts, top_k, sigmoid, renormalize, n_groups, top_groups, group_best;
    float factor;
};

struct Best {
    int id; /* -1: none */
    float value;
};
__device__ static inline bool better(Best a, Best b) {
    if (a.id < 0 || b.id < 0) return a.id >= 0;
    return a.value > b.value || (a.value == b.value && a.id < b.id) || (isnan(b.value) && !isnan(a.value));
}
__device__ static Best warp_best(Best mine) {
    for (int d = 16; d > 0; d /= 2) {
        const Best other = {__shfl_xor_sync(~0u, mine.id, d), __shfl_xor_sync(~0u, mine.value, d)};
        if (better(other, mine)) mine = other;
    }
    return mine;
}
/* The best of values[0 .. n) whose taken[] is 0. */
__device__ static Best best_of(const float *values, const uint8_t *taken, int n, int lane) {
    Best mine = {-1, 0.0f};
    for (int i = lane; i < n; i += 32) {
        const Best here = {i, values[i]};
        if (!taken[i] && better(here, mine)) mine = here;
    }
    return warp_best(mine);
}

__device__ static void make_scores(const Router &r, const float *logits, float *scores, int lane) {
    if (r.sigmoid) {
        for (int i = lane; i < r.n_experts; i += 32) scores[i] = 1.0f / (1.0f + expf(-logits[i]));
        return;
    }
    float most = -CUDART_INF_F, sum = 0.0f;
    for (int i = lane; i < r.n_experts; i += 32) most = fmaxf(most, logits[i]);
    most = warp_max(most);
    for (int i = lane; i < r.n_experts; i += 32) {
        scores[i] = expf(logits[i] - most);
        sum += scores[i];
    }
    sum = warp_sum(sum);
    for (int i = lane; i < r.n_experts; i += 32) scores[i] /= sum;
}

/* taken = 1 for experts of groups that are not kept. Shared: group values and marks of the warp. */
__device__ static void drop_groups(const Router &r, const float *choice, uint8_t *taken, float *values, uint8_t *kept, int lane) {
    const int size = r.n_experts / r.n_groups;
    for (int g = lane; g < r.n_groups; g += 32) {
        float top0 = -CUDART_INF_F, top1 = -CUDART_INF_F;
        for (int i = g * size; i < (g + 1) * size; i++) {
            if (choice[i] > top0) top1 = top0, top0 = choice[i];
            else if (choice[i] > top1) top1 = choice[i];
        }
        values[g] = r.group_best == 2 ? top0 + top1 : top0;
        kept[g] = 0;
    }
    __syncwarp();
    for (int k = 0; k < r.top_groups; k++) {
        const Best b = best_of(values, kept, r.n_groups, lane);
        if (lane == 0 && b.id >= 0) kept[b.id] = 1;
        __syncwarp();
    }
    for (int i = lane; i < r.n_experts; i += 32) taken[i] = !kept[i / size];
}

/* Warp: one row. Shared a warp: scores, choice [E], group values; marks. */
__global__ void router_kernel(Router r, int64_t n_rows) {
    extern __shared__ float shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n = r.n_experts;
    const int64_t row = (int64_t)blockIdx.x * WARPS + warp;
    float *scores = shared + warp * (2 * n + MAX_GROUPS), *choice = scores + n, *values = choice + n;
    uint8_t *taken = (uint8_t *)(shared + WARPS * (2 * n + MAX_GROUPS)) + warp * (n + MAX_GROUPS), *kept = taken + n;
    if (row >= n_rows) return;
    make_scores(r, r.logits + row * n, scores, lane);
    for (int i = lane; i < n; i += 32) {
        choice[i] = scores[i] + (r.bias.data ? at(r.bias, i) : 0.0f);
        taken[i] = 0;
    }
    __syncwarp();
    if (r.n_groups > 1) drop_groups(r, choice, taken, values, kept, lane);
    __syncwarp();
    float total = 0.0f;
    for (int k = 0; k < r.top_k; k++) {
        const Best b = best_of(choice, taken, n, lane);
        const int id = b.id < 0 ? 0 : b.id;
        if (lane == 0) {
            taken[id] = 1;
            r.ids[row * r.top_k + k] = id;
            r.weights[row * r.top_k + k] = scores[id];
        }
        total += scores[id];
        __syncwarp();
    }
    for (int k = lane; k < r.top_k; k += 32) {
        float w = r.weights[row * r.top_k + k];
        if (r.renormalize) w /= total + 1e-20f;
        r.weights[row * r.top_k + k] = w * r.factor;
    }
}

void router(epx_ops_t *ops, const epx_router_t *q, const float *logits, int64_t n_rows, int32_t *out_ids, float *out_weights) {
    Ops *o = of(ops);
    o->top_k = q->top_k;
    if (n_rows == 0) return;
    const Router r = {logits,          vector_of(q->bias), out_ids,     out_weights,   q->n_experts,  q->top_k, q->score == EPX_SCORE_SIGMOID,
                      q->renormalize,  q->n_groups,        q->top_groups, q->group_best, q->factor};
    const size_t n = (size_t)q->n_experts, bytes = WARPS * ((2 * n + MAX_GROUPS) * sizeof(float) + n + MAX_GROUPS);
    router_kernel<<<(unsigned)div_up(n_rows, WARPS), WARPS * 32, bytes, o->stream>>>(r, n_rows);
    launched(o, "router");
}

} // namespace epx_cuda_ops
