/* Choice of experts: see epx_router_t. One work item is one row; its scores and choice values lie in the thread's scratch. */
#include <math.h>

#include "base/status.h"
#include "engine/ops/cpu/cpu.h"

enum { MAX_GROUPS = 256 };

typedef struct {
    epx_cpu_ops_t *c;
    const epx_router_t *r;
    const float *logits;
    int32_t *ids;
    float *weights;
} job_t;

/* Put (id, value) into a list of at most k, sorted by descending value; equal values keep the earlier id in front. A value that
 * is NaN enters only while the list is short. Returns the new length. */
static int insert(int32_t *ids, float *values, int len, int k, int32_t id, float value) {
    if (len == k && !(value > values[k - 1])) return len;
    int at = len < k ? len : k - 1;
    for (; at > 0 && value > values[at - 1]; at--) {
        ids[at] = ids[at - 1];
        values[at] = values[at - 1];
    }
    ids[at] = id;
    values[at] = value;
    return len < k ? len + 1 : len;
}

static float group_value(const float *choice, int n, int best) {
    float top[2] = {-INFINITY, -INFINITY};
    for (int i = 0; i < n; i++) {
        if (choice[i] > top[0]) top[1] = top[0], top[0] = choice[i];
        else if (choice[i] > top[1]) top[1] = choice[i];
    }
    return best == 2 ? top[0] + top[1] : top[0];
}

/* keep[g] = 1 for the top_groups groups of the largest value. */
static void choose_groups(const epx_router_t *r, const float *choice, uint8_t *keep) {
    int32_t ids[MAX_GROUPS];
    float values[MAX_GROUPS];
    const int size = r->n_experts / r->n_groups;
    int len = 0;
    for (int g = 0; g < r->n_groups; g++) {
        keep[g] = r->top_groups == r->n_groups;
        len = insert(ids, values, len, r->top_groups, g, group_value(choice + g * size, size, r->group_best));
    }
    for (int i = 0; i < len; i++) keep[ids[i]] = 1;
}

static void weigh(const epx_router_t *r, const float *scores, const int32_t *ids, float *weights) {
    float total = 0.0f;
    for (int i = 0; i < r->top_k; i++) {
        weights[i] = scores[ids[i]];
        total += weights[i];
    }
    for (int i = 0; i < r->top_k; i++) {
        if (r->renormalize) weights[i] /= total + 1e-20f; /* the term keeps 0 / 0 out and changes no larger sum */
        weights[i] *= r->factor;
    }
}

static void router_item(void *ctx, int64_t row, int thread) {
    const job_t *j = ctx;
    const epx_router_t *r = j->r;
    const int n = r->n_experts, size = n / r->n_groups;
    float *scores = epx_cpu_scratch(j->c, thread), *choice = scores + n + EPX_OPS_MAX_WIDTH;
    uint8_t keep[MAX_GROUPS] = {1};
    int32_t *ids = j->ids + row * r->top_k;
    int len = 0;
    j->c->k->scores(r->score, j->logits + row * n, n, scores);
    for (int i = 0; i < n; i++) choice[i] = scores[i] + (epx_present(r->bias) ? epx_vector_at(r->bias, i) : 0.0f);
    if (r->n_groups > 1) choose_groups(r, choice, keep);
    for (int i = 0; i < n; i++)
        if (keep[i / size]) len = insert(ids, j->weights + row * r->top_k, len, r->top_k, i, choice[i]);
    weigh(r, scores, ids, j->weights + row * r->top_k);
}

void epx_cpu_router(epx_ops_t *ops, const epx_router_t *router, const float *logits, int64_t n_rows, int32_t *out_ids,
                    float *out_weights) {
    EPX_ASSERT(router->n_experts <= EPX_OPS_MAX_EXPERTS && router->n_groups <= MAX_GROUPS);
    EPX_ASSERT(router->top_k >= 1 && router->top_k <= router->n_experts / router->n_groups * router->top_groups);
    job_t j = {epx_cpu(ops), router, logits, out_ids, out_weights};
    epx_pool_run(j.c->pool, router_item, &j, n_rows, epx_cpu_worth(20.0 * (double)(n_rows * router->n_experts), 0));
}
