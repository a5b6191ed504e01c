/* Thread ranks and reference readers. See harness.h. */
#include "tests/model/harness.h"

#include <pthread.h>
#include <stdarg.h>
#include <string.h>

#include "base/str.h"

enum { MAX_W = 8, BOOT_BYTES = 1 << 16 };

typedef struct {
    int w;
    pthread_barrier_t barrier;
    char buffer[BOOT_BYTES];
    const epx_rank_config_t *base;
    rank_body_fn body;
    config_body_fn config_body;
    void *ctx;
} boot_t;

typedef struct {
    boot_t *boot;
    int rank;
} member_t;

const char *reference_model(const char *name) {
    static char dir[512];
    snprintf(dir, sizeof dir, "%s/%s", EPX_REFERENCE_DIR, name);
    return dir;
}

uint64_t test_seed(void) {
    static uint64_t seed;
    if (seed) return seed;
    const char *s = getenv("EPX_TEST_SEED");
    seed = s ? strtoull(s, NULL, 10) : 1;
    printf("EPX_TEST_SEED=%llu\n", (unsigned long long)seed);
    fflush(stdout);
    return seed;
}

static epx_status_t boot_allgather(void *ctx, const void *mine, size_t n_bytes, void *out_all) {
    member_t *m = ctx;
    CHECK(n_bytes * (size_t)m->boot->w <= BOOT_BYTES, "bootstrap record of %zu bytes", n_bytes);
    memcpy(m->boot->buffer + (size_t)m->rank * n_bytes, mine, n_bytes);
    pthread_barrier_wait(&m->boot->barrier);
    memcpy(out_all, m->boot->buffer, n_bytes * (size_t)m->boot->w);
    pthread_barrier_wait(&m->boot->barrier);
    return EPX_OK;
}

static epx_status_t boot_barrier(void *ctx) {
    member_t *m = ctx;
    pthread_barrier_wait(&m->boot->barrier);
    return EPX_OK;
}

static void *rank_main(void *arg) {
    member_t *m = arg;
    epx_rank_config_t cfg = *m->boot->base;
    epx_rank_t *r;
    cfg.rank = m->rank;
    cfg.allgather = boot_allgather;
    cfg.barrier = boot_barrier;
    cfg.boot_ctx = m;
    if (m->boot->config_body) {
        m->boot->config_body(m->boot->ctx, &cfg);
        return NULL;
    }
    CHECK_OK(epx_rank_create(&cfg, &r));
    m->boot->body(m->boot->ctx, m->rank, r);
    epx_rank_destroy(r);
    return NULL;
}

static void run_threads(const epx_rank_config_t *base, rank_body_fn body, config_body_fn config_body, void *ctx) {
    pthread_t threads[MAX_W];
    member_t members[MAX_W];
    boot_t *boot = calloc(1, sizeof *boot);
    CHECK(boot && base->tp <= MAX_W, "%d ranks", base->tp);
    *boot = (boot_t){.w = base->tp, .base = base, .body = body, .config_body = config_body, .ctx = ctx};
    pthread_barrier_init(&boot->barrier, NULL, (unsigned)base->tp);
    for (int i = 0; i < base->tp; i++) {
        members[i] = (member_t){boot, i};
        CHECK(pthread_create(&threads[i], NULL, rank_main, &members[i]) == 0, "thread %d", i);
    }
    for (int i = 0; i < base->tp; i++) pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&boot->barrier);
    free(boot);
}

void with_ranks(const epx_rank_config_t *base, rank_body_fn body, void *ctx) { run_threads(base, body, NULL, ctx); }
void with_configs(const epx_rank_config_t *base, config_body_fn body, void *ctx) { run_threads(base, NULL, body, ctx); }

void run_until_idle(epx_rank_t *r, epx_event_fn on_event, void *ctx) {
    epx_status_t s;
    while ((s = epx_rank_step(r, on_event, ctx)) == EPX_OK) continue;
    CHECK(s == EPX_AGAIN, "%d: %s", (int)s, epx_last_error());
}

epx_rank_config_t small_config(const char *model, int w) {
    epx_rank_config_t c;
    epx_rank_config_init(&c);
    c.model_path = model;
    c.tp = c.dp = c.ep = w;
    c.max_total_tokens = 16384;
    c.timeout_ns = 60u * 1000u * 1000u * 1000ull; /* loaded test machines */
    return c;
}

ref_file_t ref_open(const char *path) {
    ref_file_t f;
    uint64_t n_json;
    CHECK_OK(epx_read_file(path, 1 << 30, &f.bytes, &f.n_bytes));
    CHECK_OK(epx_safetensors_header_bytes(path, (const uint8_t *)f.bytes, f.n_bytes, &n_json));
    CHECK_OK(epx_safetensors_parse(path, f.bytes + 8, n_json, f.n_bytes, &f.st));
    return f;
}

const void *ref_data(const ref_file_t *f, size_t n_elems, const char *fmt, ...) {
    char name[128];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(name, sizeof name, fmt, ap);
    va_end(ap);
    const epx_safetensors_entry_t *e = epx_safetensors_find(&f->st, name);
    CHECK(e && e->tensor.n_bytes == 4 * n_elems, "%s: missing or not of %zu elements", name, n_elems);
    return f->bytes + e->file_off;
}

void ref_close(ref_file_t *f) {
    epx_safetensors_fini(&f->st);
    free(f->bytes);
}

int32_t *json_ids(const json_t *list, int32_t *out_n) {
    size_t n = json_array_size(list);
    int32_t *ids = malloc((n + 1) * sizeof *ids);
    CHECK(ids, "no memory");
    for (size_t i = 0; i < n; i++) ids[i] = (int32_t)json_integer_value(json_array_get(list, i));
    *out_n = (int32_t)n;
    return ids;
}
