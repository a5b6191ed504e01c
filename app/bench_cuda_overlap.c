/* An exchange and a matrix product at the same time: how much each slows the other. The product is cuBLAS's, opened at run time:
 * bf16, SIDE x SIDE x SIDE, as many as take about as long alone as the exchanges do. */
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "app/bench_cuda.h"
#include "base/status.h"

enum { SIDE = 4096, BF16 = 14, COMPUTE_F32 = 68, NO_TRANSPOSE = 0, DEFAULT_ALGORITHM = -1, REPLAYS = 8, LOW_PRIORITY = 0 };

static struct {
    int (*create)(void **);
    int (*destroy)(void *);
    int (*stream)(void *, void *);
    int (*gemm)(void *, int, int, int, int, int, const void *, const void *, int, int, const void *, int, int, const void *,
                void *, int, int, int, int);
    char why[160];
} blas;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static int look_up(void *lib, const char *name, void *out) {
    void *symbol = dlsym(lib, name);
    memcpy(out, &symbol, sizeof symbol);
    if (symbol == NULL) snprintf(blas.why, sizeof blas.why, "cuBLAS has no %s", name);
    return symbol != NULL;
}

static void open_once(void) {
    void *lib = dlopen("libcublas.so.13", RTLD_NOW | RTLD_LOCAL);
    if (lib == NULL) lib = dlopen("libcublas.so.12", RTLD_NOW | RTLD_LOCAL);
    if (lib == NULL) {
        snprintf(blas.why, sizeof blas.why, "libcublas.so.13 and .12 cannot be opened");
        return;
    }
    (void)(look_up(lib, "cublasCreate_v2", &blas.create) && look_up(lib, "cublasDestroy_v2", &blas.destroy) &&
           look_up(lib, "cublasSetStream_v2", &blas.stream) && look_up(lib, "cublasGemmEx", &blas.gemm));
}

typedef struct {
    void *handle, *stream, *from, *to, *x_from, *x_to;
    char *a, *b, *c;
} product_t;

static epx_status_t check(int e, const char *what) {
    return e == 0 ? EPX_OK : epx_fail(EPX_ERR_OS, "cuBLAS, %s: status %d", what, e);
}

static epx_status_t multiply(product_t *p, int n) {
    const float one = 1, zero = 0;
    for (int i = 0; i < n; i++)
        EPX_TRY(check(blas.gemm(p->handle, NO_TRANSPOSE, NO_TRANSPOSE, SIDE, SIDE, SIDE, &one, p->a, BF16, SIDE, p->b, BF16, SIDE,
                                &zero, p->c, BF16, SIDE, COMPUTE_F32, DEFAULT_ALGORITHM),
                      "product"));
    return EPX_OK;
}

static void close_product(product_t *p) {
    if (p->handle != NULL) (void)blas.destroy(p->handle);
    cu_stream_destroy(p->stream);
    void *const events[] = {p->from, p->to, p->x_from, p->x_to}, *const memory[] = {p->a, p->b, p->c};
    for (size_t i = 0; i < sizeof events / sizeof events[0]; i++) cu_event_destroy(events[i]);
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++) cu_free(memory[i]);
}

static epx_status_t open_product(bc_rank_t *r, product_t *p) {
    size_t n = (size_t)SIDE * SIDE * 2;
    EPX_TRY(cu_stream_create(LOW_PRIORITY, &p->stream));
    void **const events[] = {&p->from, &p->to, &p->x_from, &p->x_to};
    for (size_t i = 0; i < sizeof events / sizeof events[0]; i++) EPX_TRY(cu_event_create(events[i]));
    p->a = cu_alloc(n), p->b = cu_alloc(n), p->c = cu_alloc(n);
    if (!p->a || !p->b || !p->c) return EPX_ERR_NOMEM;
    EPX_TRY(cu_fill(&r->dev, p->a, 0x3D, n)); /* 0.046: speed depends on the data, so the ratio is what counts */
    EPX_TRY(cu_fill(&r->dev, p->b, 0x3C, n));
    EPX_TRY(check(blas.create(&p->handle), "create"));
    EPX_TRY(check(blas.stream(p->handle, p->stream), "stream"));
    EPX_TRY(multiply(p, 3));
    return cu_sync(p->stream);
}

/* n_products and (exchange not NULL) REPLAYS graphs, started together. Times of all of them, or 0. */
static epx_status_t beside(bc_rank_t *r, product_t *p, void *exchange, int n_products, double *out_product_us,
                           double *out_exchange_us) {
    *out_product_us = *out_exchange_us = 0;
    EPX_TRY(cu_event_record(p->from, p->stream));
    EPX_TRY(cu_event_record(p->x_from, r->dev.stream));
    for (int i = 0; i < REPLAYS || i < n_products; i++) {
        if (i < n_products) EPX_TRY(multiply(p, 1));
        if (exchange != NULL && i < REPLAYS) EPX_TRY(cu_graph_launch(exchange, r->dev.stream));
    }
    EPX_TRY(cu_event_record(p->to, p->stream));
    EPX_TRY(cu_event_record(p->x_to, r->dev.stream));
    EPX_TRY(cu_sync(p->stream));
    EPX_TRY(cu_sync(r->dev.stream));
    if (n_products) EPX_TRY(cu_event_us(p->from, p->to, out_product_us));
    if (exchange != NULL) EPX_TRY(cu_event_us(p->x_from, p->x_to, out_exchange_us));
    return EPX_OK;
}

epx_status_t bc_overlap(bc_rank_t *r, void *exchange, bc_result_t *out) {
    product_t p = {NULL};
    double product = 0, alone = 0, product_beside = 0, exchange_beside = 0, unused;
    pthread_once(&once, open_once);
    if (blas.why[0]) return epx_fail(EPX_ERR_UNSUPPORTED, "%s", blas.why);
    epx_status_t s = open_product(r, &p);
    if (bc_agree(r, s) != 0) goto done;
    if (bc_agree(r, s = beside(r, &p, exchange, 0, &unused, &alone)) != 0) goto done;
    if (bc_agree(r, s = beside(r, &p, NULL, 8, &product, &unused)) != 0) goto done;
    product /= 8;
    int n = out->n_runs > 0 ? (int)(out->us_p50[0] * BC_EXCHANGES * REPLAYS / product) + 1 : 1;
    if (bc_agree(r, s = beside(r, &p, NULL, n, &product, &unused)) != 0) goto done;
    if (bc_agree(r, s = beside(r, &p, exchange, n, &product_beside, &exchange_beside)) != 0) goto done;
    if (r->rank == 0) {
        out->alone_us = alone / (BC_EXCHANGES * REPLAYS), out->beside_us = exchange_beside / (BC_EXCHANGES * REPLAYS);
        out->gemm_alone_us = product / n, out->gemm_beside_us = product_beside / n;
    }
done:
    close_product(&p);
    return s;
}
