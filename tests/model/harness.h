/* Thread ranks for model tests: W ranks of one process, bootstrapped over a barrier; and readers of the reference files. */
#ifndef EPX_TESTS_MODEL_HARNESS_H
#define EPX_TESTS_MODEL_HARNESS_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <jansson.h>

#include "engine/model/load/safetensors.h"
#include "engine/runtime/rank.h"
#include "engine/runtime/rank_test.h"

#define TINY EPX_SOURCE_DIR "/models/tinymoe-math"
#define QWEN EPX_REFERENCE_DIR "/qwen3_moe"

/* From any thread: print and end the test program. */
#define CHECK(cond, ...)                                               \
    do {                                                               \
        if (!(cond)) {                                                 \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #cond); \
            fprintf(stderr, __VA_ARGS__);                              \
            fprintf(stderr, "\n");                                     \
            exit(1);                                                   \
        }                                                              \
    } while (0)
#define CHECK_OK(expr)                                                        \
    do {                                                                      \
        epx_status_t check_s_ = (expr);                                       \
        CHECK(check_s_ == EPX_OK, "%d: %s", (int)check_s_, epx_last_error()); \
    } while (0)

/* The directory of a reference checkpoint, as the build has unpacked it. Static buffer. */
const char *reference_model(const char *name);

/* EPX_TEST_SEED or 1; printed once. */
uint64_t test_seed(void);

typedef void (*rank_body_fn)(void *ctx, int rank, epx_rank_t *r);
/* Create base->tp ranks on as many threads, run body on each, destroy them. Failing to create ends the program. */
void with_ranks(const epx_rank_config_t *base, rank_body_fn body, void *ctx);
/* The same without creating: body gets its configuration with the bootstrap filled in. */
typedef void (*config_body_fn)(void *ctx, const epx_rank_config_t *cfg);
void with_configs(const epx_rank_config_t *base, config_body_fn body, void *ctx);
/* Step until all ranks are idle. */
void run_until_idle(epx_rank_t *r, epx_event_fn on_event, void *ctx);
/* tp = dp = ep = w, small KV, default sizes. */
epx_rank_config_t small_config(const char *model, int w);

/* A safetensors file in memory. */
typedef struct {
    char *bytes;
    size_t n_bytes;
    epx_safetensors_t st;
} ref_file_t;
ref_file_t ref_open(const char *path);
/* Data of a tensor that must exist with this many elements of 4 bytes. */
const void *ref_data(const ref_file_t *f, size_t n_elems, const char *fmt, ...) EPX_PRINTF(3, 4);
void ref_close(ref_file_t *f);

/* A JSON list of integers: *out_n of them, owned by the caller (free). */
int32_t *json_ids(const json_t *list, int32_t *out_n);

#endif
