/* A plan's config as numbers that ranks compare. Pure. */
#include <inttypes.h>
#include <string.h>

#include "base/status.h"
#include "core/core.h"
#include "spi/mutant.h"

static const char *const names[EPX_CONFIG_FIELDS] = {
    "max_tokens",        "hidden",      "top_k",      "n_experts",    "n_slots",        "slot_rank",   "slot_expert",
    "placement_version", "token_dtype", "wire_dtype", "expert_dtype", "combine_dtype",  "scale_block", "scale_format",
    "scale_layout",      "layout",      "align",      "combine",      "replicate",      "n_channels",  "n_blocks",
    "renormalize",       "backend",     "timeout_ns", "debug",        "chosen backend",
};

/* FNV-1a, 64 bits. */
static uint64_t fnv(uint64_t h, const void *data, size_t n) {
    for (size_t i = 0; i < n; i++) h = (h ^ ((const uint8_t *)data)[i]) * UINT64_C(1099511628211);
    return h;
}
static const uint64_t FNV_BASIS = UINT64_C(14695981039346656037);

enum { TABLE_UNREAD = 0, TABLE_DEFAULT = 1 };

uint64_t epx_table_hash(const int *table, int n) {
    return table == NULL ? TABLE_DEFAULT : fnv(FNV_BASIS, table, (size_t)n * sizeof *table);
}

void epx_config_fields(const epx_plan_config_t *c, int with_tables, const char *chosen, uint64_t f[EPX_CONFIG_FIELDS]) {
    const char *backend = c->backend == NULL ? "auto" : c->backend;
    int n_slots = c->n_slots == 0 ? c->n_experts : c->n_slots;
    uint64_t v[EPX_CONFIG_FIELDS] = {
        (uint64_t)c->max_tokens,
        (uint64_t)c->hidden,
        (uint64_t)c->top_k,
        (uint64_t)c->n_experts,
        (uint64_t)n_slots,
        with_tables ? epx_table_hash(c->slot_rank, n_slots) : TABLE_UNREAD,
        with_tables ? epx_table_hash(c->slot_expert, n_slots) : TABLE_UNREAD,
        c->placement_version,
        (uint64_t)c->token_dtype,
        (uint64_t)c->wire_dtype,
        (uint64_t)c->expert_dtype,
        (uint64_t)c->combine_dtype,
        (uint64_t)c->scale_block,
        (uint64_t)c->scale_format,
        (uint64_t)c->scale_layout,
        (uint64_t)c->layout,
        (uint64_t)c->align,
        (uint64_t)c->combine,
        (uint64_t)c->replicate,
        (uint64_t)c->n_channels,
        (uint64_t)c->n_blocks,
        (uint64_t)c->renormalize,
        0,
        c->timeout_ns,
        (uint64_t)epx_debug_wanted(c),
        0,
    };
    strncpy((char *)&v[22], backend, sizeof v[22]); /* eight letters tell the built ones apart */
    if (chosen != NULL) memcpy(&v[25], chosen, strnlen(chosen, sizeof v[25]));
    if (EPX_MUTANT(hash_skips_field)) v[2] = 0;
    memcpy(f, v, sizeof v);
}

uint64_t epx_config_hash(const uint64_t f[EPX_CONFIG_FIELDS]) { return fnv(FNV_BASIS, f, EPX_CONFIG_FIELDS * sizeof *f); }

static int is_table(int i) { return strcmp(names[i], "slot_rank") == 0 || strcmp(names[i], "slot_expert") == 0; }

/* Do two ranks agree in field i, as far as it is known? */
static int same(int i, uint64_t a, uint64_t b) {
    int may_be_unknown = is_table(i) || i == EPX_CONFIG_FIELDS - 1; /* unknown (0): that rank has an error of its own to tell */
    return a == b || (may_be_unknown && (a == TABLE_UNREAD || b == TABLE_UNREAD));
}

static epx_status_t mismatch(int i, const int rank[2], const uint64_t value[2]) {
    if (strcmp(names[i], "backend") == 0)
        return epx_fail(EPX_ERR_MISMATCH, "backend is \"%.8s\" on rank %d and \"%.8s\" on rank %d", (const char *)&value[0],
                        rank[0], (const char *)&value[1], rank[1]);
    if (i == EPX_CONFIG_FIELDS - 1)
        return epx_fail(EPX_ERR_MISMATCH,
                        "backend \"auto\" is \"%.8s\" on rank %d and \"%.8s\" on rank %d: EPX_A2A_TABLE must be the same on all "
                        "ranks",
                        (const char *)&value[0], rank[0], (const char *)&value[1], rank[1]);
    if (is_table(i))
        return epx_fail(EPX_ERR_MISMATCH, "%s tables differ: hash %016" PRIx64 " on rank %d and %016" PRIx64 " on rank %d",
                        names[i], value[0], rank[0], value[1], rank[1]);
    return epx_fail(EPX_ERR_MISMATCH, "%s is %lld on rank %d and %lld on rank %d", names[i], (long long)value[0], rank[0],
                    (long long)value[1], rank[1]);
}

epx_status_t epx_config_compare(const uint64_t *(*fields_of)(const void *ctx, int rank), const void *ctx, int n_ranks) {
    int first = 0;
    while (first < n_ranks && fields_of(ctx, first) == NULL) first++;
    for (int i = 0; i < EPX_CONFIG_FIELDS; i++) {
        for (int r = first + 1; r < n_ranks; r++) {
            const uint64_t *f = fields_of(ctx, r);
            if (f != NULL && !same(i, fields_of(ctx, first)[i], f[i]))
                return mismatch(i, (const int[2]){first, r}, (const uint64_t[2]){fields_of(ctx, first)[i], f[i]});
        }
    }
    return EPX_OK;
}
