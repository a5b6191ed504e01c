/* `epx bench ops`: cases of the engine's operations, each measured against the machine's roofs. Private to the app. */
#ifndef EPX_APP_BENCH_OPS_H
#define EPX_APP_BENCH_OPS_H

#include "engine/ops/ops.h"

typedef struct {
    int64_t threads, hidden, ffn, experts, top_k, heads, kv_heads, head_dim, context, ms, footprint_mib, seed;
    const char *rows, *dtypes, *isa, *json;
    int help;
} bench_ops_settings_t;

/* One operation of one shape. run() does it once; `turn` counts calls, so that weights can be taken in rotation. */
typedef struct {
    const char *op, *dtype;
    int64_t n_rows;
    double flops, bytes; /* of one call: multiply-adds count two; weights and KV that must be read, once */
    void (*run)(void *ctx, int64_t turn);
    void *ctx;
} bench_ops_case_t;

/* Calls `each` for every case of a dtype and number of rows; stops at the first negative status. */
typedef epx_status_t (*bench_ops_each_fn)(void *ctx, const bench_ops_case_t *c);
epx_status_t bench_ops_cases(const bench_ops_settings_t *o, epx_ops_t *ops, epx_wtype_t dtype, int64_t n_rows,
                             bench_ops_each_fn each, void *ctx);
/* "f32", "bf16", "fp8". */
const char *bench_ops_dtype_name(epx_wtype_t dtype);

#endif
