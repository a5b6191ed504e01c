/* Prompts of `epx bench serve`: random token ids, or texts of a file. Pure but for reading the file. */
#ifndef EPX_APP_BENCH_DATA_H
#define EPX_APP_BENCH_DATA_H

#include <stddef.h>
#include <stdint.h>

#include "engine/tokenizer/tokenizer.h"

typedef struct {
    epx_str_t text; /* UTF-8; owned; empty when the prompt is sent as ids */
    int32_t *ids;   /* [n_prompt], owned; NULL when it is sent as text */
    int64_t n_prompt, n_output;
} epx_bench_prompt_t;

typedef struct {
    epx_bench_prompt_t *prompts; /* [n], owned */
    size_t n;
} epx_bench_data_t;

typedef struct {
    const char *name; /* "random-ids", "random", "sharegpt", "jsonl" */
    const char *path; /* of the file; NULL for random-ids */
    const epx_tokenizer_t *tokenizer;
    size_t n;                      /* prompts wanted; a file that has fewer gives fewer */
    int64_t input_len, output_len; /* random*: the longest, in tokens */
    double range_ratio;            /* random*: lengths are drawn from [ratio * longest, longest] */
    int64_t fixed_output_len;      /* sharegpt, jsonl; 0: that of the file's answer, of "output_len" */
    int64_t context_len;           /* sharegpt, jsonl: longer ones are left out; 0: no limit */
    uint64_t seed;
    int want_ids;
} epx_bench_data_config_t;

/* EPX_ERR_ARG, _FORMAT (file, place, what), _NOMEM; *out then holds nothing. */
epx_status_t epx_bench_data(const epx_bench_data_config_t *c, epx_bench_data_t *out);
void epx_bench_data_fini(epx_bench_data_t *d);

#endif
