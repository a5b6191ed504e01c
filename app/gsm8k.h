/* GSM8K: grade-school word problems with one number as the answer. Prompts and the loose scorer are those of SGLang's
 * benchmark/gsm8k/bench_sglang.py; the strict scorer reads signs and decimals, which that one does not. Pure but for reading the
 * file. */
#ifndef EPX_APP_GSM8K_H
#define EPX_APP_GSM8K_H

#include <stddef.h>

#include "base/status.h"
#include "base/str.h"

typedef struct {
    epx_str_t question, answer; /* UTF-8, owned */
} epx_gsm8k_item_t;

typedef struct {
    epx_gsm8k_item_t *items; /* [n], owned */
    size_t n;
} epx_gsm8k_t;

/* A file of lines {"question": TEXT, "answer": TEXT}; lines that begin with # are left out. Every answer must have a number for
 * both scorers. EPX_ERR_FORMAT names the line. */
epx_status_t epx_gsm8k_load(const char *path, epx_gsm8k_t *out);
void epx_gsm8k_fini(epx_gsm8k_t *d);
/* Append the prompt of question i: the first n_shots questions with their answers, then question i without one. */
epx_status_t epx_gsm8k_prompt(const epx_gsm8k_t *d, size_t n_shots, size_t i, epx_str_t *out);
/* The loose value: the last run of ASCII digits after all commas are deleted, as text without superfluous zeros. 0: there is
 * none, or it begins with a 0 that means nothing (Python does not read such a number). EPX_ERR_NOMEM. */
epx_status_t epx_gsm8k_loose(const char *text, size_t n_bytes, epx_str_t *out_digits, int *out_found);
/* The strict value: the last number, with sign, thousands commas and decimals ("-$1,234.50" is -1234.5). A minus is a sign unless
 * something that could be subtracted from stands before it. Values are compared with ==. Returns 0 when there is no number. */
int epx_gsm8k_strict(const char *text, size_t n_bytes, double *out_value);

#endif
