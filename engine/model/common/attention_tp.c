/* Attention divided over the ranks of a group that run the same rows (attention tensor parallelism). Each rank computes its
 * heads, the heads' outputs are gathered, and each rank computes its columns of the output projection with the whole sum over
 * heads; the columns are gathered in turn. So no partial sum crosses a rank, and the bits are those of one rank.
 *
 * Both gathers are one exchange: every rank is an "expert" that gets every token's rows from all ranks, which are the heads; what
 * it sends back are its columns, zeros elsewhere. Combine adds them: one term of each sum is not zero. */
#include <stdlib.h>
#include <string.h>

#include "engine/model/common/arch.h"

/* The heads of this rank; attention stays whole where it cannot be cut by heads. */
void epx_heads_init(epx_model_t *m, int tp, int rank) {
    const epx_model_config_t *c = &m->cfg;
    const epx_weight_t *w = m->layers[0].w;
    const int group = c->n_heads / c->n_kv_heads;
    m->heads = (epx_heads_t){.tp = 1, .n_q = c->n_heads, .n_kv = c->n_kv_heads};
    if (tp <= 1 || c->mla.kv_lora || c->n_heads % tp || (c->n_kv_heads % tp && tp % c->n_kv_heads)) return;
    if (w[EPX_SLOT_Q].scale || w[EPX_SLOT_O].scale || w[EPX_SLOT_Q].transposed || w[EPX_SLOT_O].transposed) return;
    if (w[EPX_SLOT_Q_NORM].data && w[EPX_SLOT_Q_NORM].k != c->head_dim) return;
    m->heads.tp = tp;
    m->heads.rank = rank;
    m->heads.n_q = c->n_heads / tp;
    m->heads.first_q = rank * m->heads.n_q;
    m->heads.first_kv = m->heads.first_q / group;
    m->heads.n_kv = c->n_kv_heads % tp ? 1 : c->n_kv_heads / tp;
}

/* Rows [first, first + n) of a matrix, or elements of a vector; an absent one stays absent. */
epx_weight_t epx_weight_part(const epx_weight_t *w, int64_t first, int64_t n) {
    epx_weight_t part = *w;
    const int64_t elem = w->type == EPX_W_F32 ? 4 : 2, per_row = w->n == 1 ? 1 : w->k;
    if (!w->data) return part;
    part.data = (const char *)w->data + first * per_row * elem;
    if (w->n == 1) part.k = n;
    else part.n = n;
    return part;
}

static int64_t row_width(const epx_model_t *m) {
    const int64_t heads = (int64_t)m->heads.n_q * m->cfg.head_dim;
    return heads > m->cfg.hidden ? heads : m->cfg.hidden;
}

int epx_model_attention_plan_config(const epx_model_t *m, epx_plan_config_t *out) {
    if (m->heads.tp == 1) return 0;
    out->max_tokens = m->max_rows;
    out->hidden = (int)row_width(m);
    out->top_k = out->n_experts = m->heads.tp;
    out->token_dtype = out->wire_dtype = out->expert_dtype = out->combine_dtype = EPX_F32;
    out->layout = EPX_LAYOUT_LISTS;
    out->combine = EPX_COMBINE_EXACT;
    return 1;
}

epx_status_t epx_model_set_attention_plan(epx_model_t *m, epx_plan_t *plan) {
    const size_t rows = (size_t)m->max_rows, tp = (size_t)m->heads.tp, width = (size_t)row_width(m);
    epx_heads_t *h = &m->heads;
    h->ids = malloc(rows * tp * sizeof *h->ids);
    h->weights = malloc(rows * tp * sizeof *h->weights);
    h->all = malloc(rows * (size_t)m->cfg.n_heads * (size_t)m->cfg.head_dim * sizeof *h->all);
    h->columns = calloc(rows * tp * width, sizeof *h->columns);
    h->sum = malloc(rows * width * sizeof *h->sum);
    if (!h->ids || !h->weights || !h->all || !h->columns || !h->sum)
        return epx_fail(EPX_ERR_NOMEM, "divided attention: %zu rows of %zu values from each of %zu ranks", rows, width, tp);
    for (size_t i = 0; i < rows * tp; i++) {
        h->ids[i] = (int32_t)(i % tp);
        h->weights[i] = 1.0f;
    }
    h->plan = plan;
    return EPX_OK;
}

void epx_heads_fini(epx_model_t *m) {
    free(m->heads.ids);
    free(m->heads.weights);
    free(m->heads.all);
    free(m->heads.columns);
    free(m->heads.sum);
}

int epx_model_attention_tp(const epx_model_t *m) { return m->heads.tp; }
int epx_model_kv_heads(const epx_model_t *m) { return m->heads.n_kv; }

static void put_rows(float *to, int64_t to_ld, const float *from, int64_t from_ld, int64_t n, int64_t width) {
    for (int64_t i = 0; i < n; i++) memcpy(to + i * to_ld, from + i * from_ld, (size_t)width * sizeof *to);
}

/* All heads of the rows, from every rank's rows in place. */
static void collect_heads(const epx_model_t *m, const epx_lists_t *lists, int64_t n) {
    const int64_t part = (int64_t)m->heads.n_q * m->cfg.head_dim, all = part * m->heads.tp;
    for (int s = 0; s < m->heads.tp; s++)
        put_rows(m->heads.all + s * part, all, lists->row_base[s], (int64_t)(lists->row_stride_bytes / sizeof(float)), n, part);
}

/* This rank's columns of the output projection, for every rank that wants them. */
static void project(epx_model_t *m, const epx_weight_t *w, int64_t n) {
    const epx_heads_t *h = &m->heads;
    const int64_t hidden = m->cfg.hidden, width = row_width(m), first = hidden * h->rank / h->tp;
    const int64_t n_columns = hidden * (h->rank + 1) / h->tp - first;
    const epx_weight_t o = epx_weight_part(&w[EPX_SLOT_O], first, n_columns);
    const epx_weight_t bias = epx_weight_part(&w[EPX_SLOT_O_BIAS], first, n_columns);
    epx_ops_linear(m->ops, h->all, (int64_t)m->cfg.n_heads * m->cfg.head_dim, &o, &bias, n, h->columns + first, width);
    for (int s = 1; s < h->tp; s++) /* the rest of the rows stays zero for ever */
        put_rows(h->columns + s * n * width + first, width, h->columns + first, width, n, n_columns);
}

epx_status_t epx_attention_gather(epx_model_t *m, const epx_weight_t *w, int64_t n) {
    const epx_heads_t *h = &m->heads;
    const int64_t part = (int64_t)h->n_q * m->cfg.head_dim;
    epx_lists_t lists;
    epx_io_t io;
    void *x;
    EPX_TRY(epx_plan_input(h->plan, 0, &x));
    put_rows(x, row_width(m), m->attn, part, n, part);
    epx_io_init(&io);
    io.x = x;
    io.ids = h->ids;
    io.weights = h->weights;
    io.n_tokens = (int)n;
    EPX_TRY(epx_dispatch(h->plan, &io));
    EPX_TRY(epx_plan_lists(h->plan, 0, &lists));
    if (lists.n_rows != h->tp * n)
        return epx_fail(EPX_ERR_INTERNAL,
                        "divided attention: %d rows came, %d ranks with %lld each were expected: the ranks' batches differ",
                        lists.n_rows, h->tp, (long long)n);
    collect_heads(m, &lists, n);
    project(m, w, n);
    io.x = h->columns;
    io.out_x = h->sum;
    EPX_TRY(epx_combine(h->plan, &io));
    put_rows(m->proj, m->cfg.hidden, h->sum, row_width(m), n, m->cfg.hidden);
    return EPX_OK;
}
