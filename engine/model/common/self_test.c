/* One MoE layer over all ranks against the same layer put together from single experts: what a double reduction, a wrong owner of
 * an expert or a lost row would change. Run once at the start, with a small plan of its own. */
#include <math.h>
#include <stdlib.h>

#include "base/half.h"
#include "base/philox.h"
#include "engine/model/common/arch.h"

enum { TOKENS = EPX_SELF_TEST_TOKENS, COLUMNS = 56, MAX_RANKS = 64, SEED = 20 };

enum { MAX_ENTRIES_BYTES = 64 };

typedef struct {
    epx_model_t *m;
    const epx_self_test_t *t;
    int group;           /* of ranks that hold the same tokens */
    float *x;            /* [TOKENS, hidden] of one group */
    float *result;       /* [TOKENS, hidden] of the exchange */
    float *row;          /* [hidden] of one expert */
    int32_t *expert_off; /* [n_local_experts + 1] */
    char *tables;        /* in the ops' memory: an entry, a row's address, expert_off */
} check_t;

static size_t tables_bytes(const epx_model_t *m) {
    return MAX_ENTRIES_BYTES + ((size_t)m->n_local_experts + 1) * sizeof(int32_t);
}

/* f32 values to operand rows in the ops' memory, and back. */
static epx_status_t put_rows(epx_model_t *m, void *to, const float *x, size_t n) {
    if (epx_ops_row_type(m->ops) == EPX_W_F32) return epx_ops_upload(m->ops, to, x, n * sizeof *x);
    uint16_t *narrow = malloc(n * sizeof *narrow);
    if (!narrow) return epx_fail(EPX_ERR_NOMEM, "self-test of the exchange: %zu values", n);
    for (size_t i = 0; i < n; i++) narrow[i] = epx_f32_to_bf16(x[i]);
    epx_status_t s = epx_ops_upload(m->ops, to, narrow, n * sizeof *narrow);
    free(narrow);
    return s;
}

static epx_status_t get_rows(epx_model_t *m, float *out, const void *from, size_t n) {
    if (epx_ops_row_type(m->ops) == EPX_W_F32) return epx_ops_download(m->ops, out, from, n * sizeof *out);
    uint16_t *narrow = malloc(n * sizeof *narrow);
    if (!narrow) return epx_fail(EPX_ERR_NOMEM, "self-test of the exchange: %zu values", n);
    epx_status_t s = epx_ops_download(m->ops, narrow, from, n * sizeof *narrow);
    for (size_t i = 0; s >= 0 && i < n; i++) out[i] = epx_bf16_to_f32(narrow[i]);
    free(narrow);
    return s;
}

static void make_tokens(const check_t *c, int group, float *x) {
    uint64_t at = (uint64_t)group * TOKENS * (uint64_t)c->m->cfg.hidden;
    for (int64_t i = 0; i < (int64_t)TOKENS * c->m->cfg.hidden; i++)
        x[i] = (float)epx_philox_u32(SEED, at + (uint64_t)i) * 0x1p-31f - 1.0f;
}

/* Spread over all experts, so over all ranks; distinct for one token. */
static int32_t expert_of(const check_t *c, int group, int token, int k) {
    const epx_model_config_t *cfg = &c->m->cfg;
    return (int32_t)(((int64_t)k * (cfg->n_experts / cfg->top_k) + group * TOKENS + token) % cfg->n_experts);
}

static float weight_of(int k) { return 1.0f / (float)(k + 1); }

static int64_t column(const check_t *c, int i) { return (int64_t)i * c->m->cfg.hidden / COLUMNS; }

/* Choices into the model's scratch, as its router would. */
static epx_status_t choose(const check_t *c) {
    enum { MOST = TOKENS * EPX_MAX_TOP_K };
    epx_model_t *m = c->m;
    const int k_all = m->cfg.top_k;
    int32_t ids[MOST];
    float weights[MOST];
    for (int t = 0; t < TOKENS; t++)
        for (int k = 0; k < k_all; k++) {
            ids[t * k_all + k] = expert_of(c, c->group, t, k);
            weights[t * k_all + k] = weight_of(k);
        }
    EPX_TRY(epx_ops_upload(m->ops, m->ids, ids, (size_t)(TOKENS * k_all) * sizeof *ids));
    return epx_ops_upload(m->ops, m->weights, weights, (size_t)(TOKENS * k_all) * sizeof *weights);
}

static epx_status_t exchange(const check_t *c) {
    epx_model_t *m = c->m;
    const size_t n = (size_t)TOKENS * (size_t)m->cfg.hidden;
    epx_plan_info_t info = {.size = sizeof info};
    epx_io_t io;
    EPX_TRY(choose(c));
    EPX_TRY(put_rows(m, m->norm, c->x, n));
    epx_io_init(&io);
    io.x = m->norm;
    io.ids = m->ids;
    io.weights = m->weights;
    io.n_tokens = TOKENS;
    io.stream = epx_ops_stream(m->ops);
    EPX_TRY(epx_plan_info(c->t->plan, &info));
    EPX_TRY(epx_dispatch_send(c->t->plan, &io));
    EPX_TRY(epx_model_run_experts(m, c->t->plan, info.layout == EPX_LAYOUT_CONTIGUOUS, m->cfg.n_dense_layers, &io));
    EPX_TRY(epx_combine_recv(c->t->plan, &io));
    EPX_TRY(get_rows(m, c->result, m->proj, n));
    return epx_plan_poll(c->t->plan);
}

/* A local expert on one row: a list of one entry. */
static epx_status_t run_alone(const check_t *c, int local, const float *x) {
    epx_model_t *m = c->m;
    const epx_list_entry_t entry = {0, 0};
    const void *base[1] = {m->norm};
    char *const at = c->tables;
    const size_t off_bytes = ((size_t)m->n_local_experts + 1) * sizeof(int32_t);
    for (int e = 0; e <= m->n_local_experts; e++) c->expert_off[e] = e > local;
    EPX_TRY(put_rows(m, m->norm, x, (size_t)m->cfg.hidden));
    EPX_TRY(epx_ops_upload(m->ops, at, &entry, sizeof entry));
    EPX_TRY(epx_ops_upload(m->ops, at + MAX_ENTRIES_BYTES / 2, base, sizeof base));
    EPX_TRY(epx_ops_upload(m->ops, at + MAX_ENTRIES_BYTES, c->expert_off, off_bytes));
    const epx_lists_t one = {.n_local_experts = m->n_local_experts,
                             .n_rows = 1,
                             .expert_off = (const int32_t *)(const void *)(at + MAX_ENTRIES_BYTES),
                             .entries = (const epx_list_entry_t *)(const void *)at,
                             .row_base = (const void *const *)(const void *)(at + MAX_ENTRIES_BYTES / 2),
                             .row_stride_bytes = (uint64_t)m->cfg.hidden * epx_ops_row_elem_bytes(m->ops)};
    epx_ops_experts(m->ops, &one, m->layers[m->cfg.n_dense_layers].experts, m->cfg.hidden, m->cfg.moe_ffn, m->expert_out);
    return get_rows(m, c->row, m->expert_out, (size_t)m->cfg.hidden);
}

/* The owner of an expert runs it on one token of a group and gives some columns of the result to all. */
static epx_status_t one_expert(const check_t *c, int expert, const float *x, float out[COLUMNS]) {
    epx_model_t *m = c->m;
    const int local = expert - m->first_expert;
    float mine[COLUMNS] = {0}, all[MAX_RANKS][COLUMNS];
    int owner = 0, first, n;
    if (local >= 0 && local < m->n_local_experts) {
        EPX_TRY(run_alone(c, local, x));
        for (int i = 0; i < COLUMNS; i++) mine[i] = c->row[column(c, i)];
    }
    EPX_TRY(c->t->gather(c->t->ctx, mine, sizeof mine, all));
    for (;; owner++) {
        epx_model_expert_range(m->cfg.n_experts, owner, m->n_ranks, &first, &n);
        if (expert < first + n) break;
    }
    for (int i = 0; i < COLUMNS; i++) out[i] = all[owner][i];
    return EPX_OK;
}

/* f32 rows differ by the order of sums only; bf16 ones are rounded on their way. */
static double tolerance(const check_t *c) { return epx_ops_row_type(c->m->ops) == EPX_W_F32 ? 1e-4 : 0.01; }

static epx_status_t compare(const check_t *c, int token, const float sum[COLUMNS], const float size[COLUMNS]) {
    for (int i = 0; i < COLUMNS; i++) {
        const double want = sum[i] * c->t->factor, got = c->result[(int64_t)token * c->m->cfg.hidden + column(c, i)];
        if (fabs(got - want) <= tolerance(c) * size[i] + 1e-9) continue;
        return epx_fail(
            EPX_ERR_MISMATCH,
            "self-test of the exchange: MoE layer %d, token %d, column %lld is %.6g over %d ranks, %.6g from its experts one by "
            "one; refusing to serve",
            c->m->cfg.n_dense_layers, token, (long long)column(c, i), got, c->m->n_ranks, want);
    }
    return EPX_OK;
}

/* Every rank takes part for the tokens of every group; the group that has them compares. */
static epx_status_t check_token(const check_t *c, int group, int token, const float *x, epx_status_t before) {
    float sum[COLUMNS] = {0}, size[COLUMNS] = {0}, part[COLUMNS];
    for (int k = 0; k < c->m->cfg.top_k; k++) {
        EPX_TRY(one_expert(c, expert_of(c, group, token, k), x, part));
        for (int i = 0; i < COLUMNS; i++) {
            sum[i] = fmaf(weight_of(k), part[i], sum[i]);
            size[i] += fabsf(weight_of(k) * part[i]);
        }
    }
    return group == c->group && before >= 0 ? compare(c, token, sum, size) : before;
}

/* A difference does not end the gathers, which all ranks go through together; a lost peer does. */
static epx_status_t run(const check_t *c, float *other) {
    epx_status_t found = EPX_OK;
    EPX_TRY(exchange(c));
    for (int g = 0; g < c->m->n_ranks / c->t->group_size; g++) {
        make_tokens(c, g, other);
        for (int t = 0; t < TOKENS; t++) {
            epx_status_t s = check_token(c, g, t, other + (int64_t)t * c->m->cfg.hidden, found);
            if (s < 0 && s != EPX_ERR_MISMATCH) return s;
            found = s;
        }
    }
    return found;
}

/* Taking or giving memory of a GPU can wait for the kernels of another rank that shares it, which wait for this rank. */
static epx_status_t meet(const check_t *c) {
    char mine = 0, all[MAX_RANKS];
    return c->t->gather(c->t->ctx, &mine, sizeof mine, all);
}

epx_status_t epx_model_self_test(epx_model_t *m, const epx_self_test_t *t) {
    const size_t n = (size_t)TOKENS * (size_t)m->cfg.hidden;
    check_t c = {.m = m, .t = t, .group = m->rank / t->group_size};
    float *other = malloc(n * sizeof *other);
    void *tables = NULL;
    epx_status_t s;
    c.x = malloc(n * sizeof *c.x);
    c.result = malloc(n * sizeof *c.result);
    c.row = malloc((size_t)m->cfg.hidden * sizeof *c.row);
    c.expert_off = malloc(((size_t)m->n_local_experts + 1) * sizeof *c.expert_off);
    if (!other || !c.x || !c.result || !c.row || !c.expert_off) {
        s = epx_fail(EPX_ERR_NOMEM, "self-test of the exchange: no memory for %d tokens", TOKENS);
    } else if ((s = epx_ops_alloc(m->ops, tables_bytes(m), &tables)) >= 0) {
        c.tables = tables;
        make_tokens(&c, c.group, c.x);
        s = meet(&c);
        if (s >= 0) s = run(&c, other);
        if (s >= 0 || s == EPX_ERR_MISMATCH) {
            const epx_status_t met = meet(&c);
            if (met < 0) s = met;
        }
    }
    epx_ops_free(m->ops, tables, tables_bytes(m));
    free(other);
    free(c.x);
    free(c.result);
    free(c.row);
    free(c.expert_off);
    return s;
}
