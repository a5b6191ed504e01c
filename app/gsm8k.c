/* Prompts and scorers of GSM8K. */
#include "app/gsm8k.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

enum { MAX_FILE_BYTES = 256 << 20, MAX_NUMBER_BYTES = 64 };

static int is_digit(char c) { return c >= '0' && c <= '9'; }

/* ---- the file ---- */

static epx_status_t check_answer(const char *path, int number, const epx_gsm8k_item_t *it) {
    epx_str_t digits = {0};
    double value;
    int found = 0;
    epx_status_t s = epx_gsm8k_loose(epx_str_z(&it->answer), it->answer.n_bytes, &digits, &found);
    epx_str_fini(&digits);
    if (s < 0) return s;
    if (found && epx_gsm8k_strict(epx_str_z(&it->answer), it->answer.n_bytes, &value)) return EPX_OK;
    return epx_fail(EPX_ERR_FORMAT, "%s: line %d: \"answer\" has no number", path, number);
}

static epx_status_t read_line(const char *path, int number, const char *line, size_t n, epx_gsm8k_item_t *out) {
    json_error_t e;
    json_t *o = json_loadb(line, n, JSON_REJECT_DUPLICATES, &e);
    const json_t *q = json_object_get(o, "question"), *a = json_object_get(o, "answer");
    epx_status_t s = EPX_OK;
    if (!json_is_string(q) || !json_is_string(a))
        s = epx_fail(EPX_ERR_FORMAT, "%s: line %d: legal: {\"question\": TEXT, \"answer\": TEXT}%s%s", path, number,
                     o ? "" : ": ", o ? "" : e.text);
    if (s >= 0) s = epx_str_append(&out->question, json_string_value(q), json_string_length(q));
    if (s >= 0) s = epx_str_append(&out->answer, json_string_value(a), json_string_length(a));
    json_decref(o);
    return s < 0 ? s : check_answer(path, number, out);
}

static epx_status_t add_item(epx_gsm8k_t *d, const char *path, int number, const char *line, size_t n) {
    epx_gsm8k_item_t *more = realloc(d->items, (d->n + 1) * sizeof *more);
    if (!more) return epx_fail(EPX_ERR_NOMEM, "%s: no memory for %zu questions", path, d->n + 1);
    d->items = more;
    d->items[d->n] = (epx_gsm8k_item_t){0};
    return read_line(path, number, line, n, &d->items[d->n++]);
}

epx_status_t epx_gsm8k_load(const char *path, epx_gsm8k_t *out) {
    char *text = NULL;
    size_t n = 0;
    epx_gsm8k_t d = {0};
    EPX_TRY(epx_read_file(path, MAX_FILE_BYTES, &text, &n));
    epx_status_t s = EPX_OK;
    int number = 1;
    for (char *p = text, *end = text + n; p < end && s >= 0; number++) {
        char *stop = memchr(p, '\n', (size_t)(end - p));
        size_t k = stop ? (size_t)(stop - p) : (size_t)(end - p);
        if (strspn(p, " \t\r") < k && *p != '#') s = add_item(&d, path, number, p, k);
        p += k + 1;
    }
    free(text);
    if (s >= 0 && d.n == 0) s = epx_fail(EPX_ERR_FORMAT, "%s: no question in it", path);
    if (s < 0) epx_gsm8k_fini(&d);
    else *out = d;
    return s;
}

void epx_gsm8k_fini(epx_gsm8k_t *d) {
    for (size_t i = 0; i < d->n; i++) {
        epx_str_fini(&d->items[i].question);
        epx_str_fini(&d->items[i].answer);
    }
    free(d->items);
    *d = (epx_gsm8k_t){0};
}

static epx_status_t append_question(const epx_gsm8k_item_t *it, epx_str_t *out) {
    EPX_TRY(epx_str_append_z(out, "Question: "));
    EPX_TRY(epx_str_append(out, epx_str_z(&it->question), it->question.n_bytes));
    return epx_str_append_z(out, "\nAnswer:");
}

epx_status_t epx_gsm8k_prompt(const epx_gsm8k_t *d, size_t n_shots, size_t i, epx_str_t *out) {
    for (size_t k = 0; k < n_shots; k++) {
        EPX_TRY(append_question(&d->items[k], out));
        EPX_TRY(epx_str_append_z(out, " "));
        EPX_TRY(epx_str_append(out, epx_str_z(&d->items[k].answer), d->items[k].answer.n_bytes));
        EPX_TRY(epx_str_append_z(out, "\n\n"));
    }
    return append_question(&d->items[i], out);
}

/* ---- scorers ---- */

epx_status_t epx_gsm8k_loose(const char *text, size_t n_bytes, epx_str_t *out_digits, int *out_found) {
    int after_digit = 0;
    *out_found = 0;
    epx_str_clear(out_digits);
    for (size_t i = 0; i < n_bytes; i++) {
        if (text[i] == ',') continue;
        if (is_digit(text[i])) {
            if (!after_digit) epx_str_clear(out_digits);
            EPX_TRY(epx_str_append(out_digits, text + i, 1));
        }
        after_digit = is_digit(text[i]);
    }
    if (out_digits->n_bytes == 0) return EPX_OK;
    size_t n_zeros = strspn(out_digits->data, "0");
    if (n_zeros == out_digits->n_bytes) {
        epx_str_clear(out_digits);
        EPX_TRY(epx_str_append_z(out_digits, "0"));
    } else if (n_zeros) {
        return EPX_OK;
    }
    *out_found = 1;
    return EPX_OK;
}

/* What a minus right after it subtracts from: "10-5", "x-5", "(2)-5". */
static int is_operand(char c) {
    return is_digit(c) || strchr(")]%", c) != NULL || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c & 0x80);
}

/* A minus right before a number, a currency sign between them or not. Behind a blank it is a sign after a word ("is -5") and none
 * after a number ("10 -5"). */
static int is_negative(const char *text, size_t first) {
    size_t at = first;
    if (at > 0 && text[at - 1] == '$') at--;
    if (at == 0 || text[at - 1] != '-') return 0;
    at--;
    if (at == 0) return 1;
    if (text[at - 1] != ' ') return !is_operand(text[at - 1]);
    while (at > 0 && text[at - 1] == ' ') at--;
    return at == 0 || !(is_digit(text[at - 1]) || strchr(")]%", text[at - 1]) != NULL);
}

/* Digits with commas at thousands and a fraction, from `first` on. Returns the end. */
static size_t number_end(const char *text, size_t n, size_t first) {
    size_t i = first;
    while (i < n && is_digit(text[i])) i++;
    while (i + 3 < n && text[i] == ',' && is_digit(text[i + 1]) && is_digit(text[i + 2]) && is_digit(text[i + 3]) &&
           !(i + 4 < n && is_digit(text[i + 4])))
        i += 4;
    if (i + 1 < n && text[i] == '.' && is_digit(text[i + 1]))
        for (i++; i < n && is_digit(text[i]);) i++;
    return i;
}

int epx_gsm8k_strict(const char *text, size_t n_bytes, double *out_value) {
    char copy[MAX_NUMBER_BYTES];
    int found = 0;
    for (size_t i = 0; i < n_bytes;) {
        int fraction = text[i] == '.' && i + 1 < n_bytes && is_digit(text[i + 1]);
        if (!is_digit(text[i]) && !fraction) {
            i++;
            continue;
        }
        size_t end = number_end(text, n_bytes, i), k = 0;
        for (size_t j = i; j < end && k < sizeof copy - 1; j++)
            if (text[j] != ',') copy[k++] = text[j];
        copy[k] = 0;
        *out_value = (is_negative(text, i) ? -1 : 1) * strtod(copy, NULL);
        found = 1;
        i = end;
    }
    return found;
}
