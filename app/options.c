/* Parsing of the command line. */
#include "app/options.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_LIST = 64 };

typedef struct {
    const epx_option_table_t *t;
    int command;
    void *settings;
    epx_str_t *problems;
} parse_t;

/* ---- lists "a|b|c" ---- */

static size_t element_bytes(const char *list) { return strcspn(list, "|"); }

int epx_options_element(const char *list, int i, char *out, size_t cap) {
    while (i-- > 0) {
        list = strchr(list, ',');
        if (list == NULL) return 0;
        list++;
    }
    snprintf(out, cap, "%.*s", (int)strcspn(list, ","), list);
    return 1;
}

int epx_options_in_list(const char *list, const char *word) {
    size_t n = strlen(word);
    while (list && *list) {
        size_t k = element_bytes(list);
        if (k == n && memcmp(list, word, n) == 0) return 1;
        list += k + (list[k] == '|');
    }
    return 0;
}

static epx_status_t append_list(epx_str_t *out, const char *list) {
    for (int i = 0; *list; i++) {
        size_t k = element_bytes(list);
        EPX_TRY(epx_str_printf(out, "%s%.*s", i ? ", " : "", (int)k, list));
        list += k + (list[k] == '|');
    }
    return EPX_OK;
}

const char *epx_options_nearest(const char *const *names, const char *word) {
    const char *best = NULL;
    int best_distance = 0;
    for (; *names; names++) {
        int d = epx_edit_distance(word, *names);
        if (best && d >= best_distance) continue;
        best = *names;
        best_distance = d;
    }
    return best;
}

/* ---- finding an option ---- */

static int belongs(const parse_t *p, const epx_option_t *o) { return (o->commands >> p->command) & 1u; }

static int has_prefix(const char *name, const char *word, size_t n) { return name && strncmp(name, word, n) == 0; }

static int is_name(const char *name, const char *word, size_t n) { return has_prefix(name, word, n) && name[n] == 0; }

/* An exact name of any command, else the only option of this command with that prefix. *out_n: how many have it. */
static const epx_option_t *find(const parse_t *p, const char *word, size_t n, int *out_n) {
    const epx_option_t *found = NULL;
    *out_n = 0;
    for (size_t i = 0; i < p->t->n_options; i++) {
        const epx_option_t *o = &p->t->options[i];
        if (is_name(o->name, word, n) || is_name(o->alias, word, n)) {
            *out_n = 1;
            return o;
        }
        if (!belongs(p, o) || (!has_prefix(o->name, word, n) && !has_prefix(o->alias, word, n))) continue;
        found = o;
        ++*out_n;
    }
    return *out_n == 1 ? found : NULL;
}

static epx_status_t report_ambiguous(const parse_t *p, const char *word, size_t n) {
    int k = 0;
    EPX_TRY(epx_str_printf(p->problems, "--%.*s is the beginning of more than one flag:", (int)n, word));
    for (size_t i = 0; i < p->t->n_options; i++) {
        const epx_option_t *o = &p->t->options[i];
        if (belongs(p, o) && (has_prefix(o->name, word, n) || has_prefix(o->alias, word, n)))
            EPX_TRY(epx_str_printf(p->problems, "%s --%s", k++ ? "," : "", has_prefix(o->name, word, n) ? o->name : o->alias));
    }
    return epx_str_append_z(p->problems, "\n");
}

static epx_status_t report_unknown(const parse_t *p, const char *word, size_t n) {
    const char *names[2 * MAX_LIST + 1], *nearest;
    char text[65];
    int k = 0;
    for (size_t i = 0; i < p->t->n_options && k < 2 * MAX_LIST - 1; i++) {
        if (!belongs(p, &p->t->options[i])) continue;
        names[k++] = p->t->options[i].name;
        if (p->t->options[i].alias) names[k++] = p->t->options[i].alias;
    }
    names[k] = NULL;
    snprintf(text, sizeof text, "%.*s", (int)n, word);
    nearest = epx_options_nearest(names, text);
    EPX_TRY(epx_str_printf(p->problems, "unknown flag --%.*s", (int)n, word));
    /* a name of which most letters differ is no help */
    if (nearest && (size_t)epx_edit_distance(text, nearest) <= n / 2)
        EPX_TRY(epx_str_printf(p->problems, "; did you mean --%s?", nearest));
    return epx_str_append_z(p->problems, "\n");
}

static epx_status_t report_foreign(const parse_t *p, const epx_option_t *o) {
    int k = 0;
    EPX_TRY(epx_str_printf(p->problems, "--%s is not a flag of this command; it belongs to", o->name));
    for (int c = 0; p->t->commands[c]; c++)
        if ((o->commands >> c) & 1u) EPX_TRY(epx_str_printf(p->problems, "%s `%s`", k++ ? "," : "", p->t->commands[c]));
    return epx_str_append_z(p->problems, "\n");
}

/* ---- values ---- */

static epx_status_t set_choice(const parse_t *p, const epx_option_t *o, const char *value) {
    if (epx_options_in_list(o->choices, value)) {
        memcpy((char *)p->settings + o->offset, &value, sizeof value);
        return EPX_OK;
    }
    EPX_TRY(epx_str_printf(p->problems, "--%s %s: %s; legal values: ", o->name, value,
                           epx_options_in_list(o->unbuilt, value) ? "known, but not built yet" : "unknown value"));
    EPX_TRY(append_list(p->problems, o->choices));
    return epx_str_append_z(p->problems, "\n");
}

static int in_range(const epx_option_t *o, double v) { return o->max < o->min || (v >= o->min && v <= o->max); }

static epx_status_t report_number(const parse_t *p, const epx_option_t *o, const char *value) {
    const char *kind = o->kind == EPX_OPTION_INT ? "integers" : "numbers";
    if (o->max < o->min) return epx_str_printf(p->problems, "--%s %s: not a number; legal values: %s\n", o->name, value, kind);
    return epx_str_printf(p->problems, "--%s %s: legal values: %s from %.16g to %.16g\n", o->name, value, kind, o->min, o->max);
}

static epx_status_t set_int(const parse_t *p, const epx_option_t *o, const char *value) {
    char *end;
    int64_t v;
    errno = 0;
    v = strtoll(value, &end, 10);
    if (errno || end == value || *end || !in_range(o, (double)v)) return report_number(p, o, value);
    memcpy((char *)p->settings + o->offset, &v, sizeof v);
    return EPX_OK;
}

static epx_status_t set_real(const parse_t *p, const epx_option_t *o, const char *value) {
    char *end;
    double v;
    errno = 0;
    v = strtod(value, &end);
    if (errno || end == value || *end || !isfinite(v) || !in_range(o, v)) return report_number(p, o, value);
    memcpy((char *)p->settings + o->offset, &v, sizeof v);
    return EPX_OK;
}

static epx_status_t set_value(const parse_t *p, const epx_option_t *o, const char *value) {
    switch (o->kind) {
    case EPX_OPTION_CHOICE:
        return set_choice(p, o, value);
    case EPX_OPTION_INT:
        return set_int(p, o, value);
    case EPX_OPTION_REAL:
        return set_real(p, o, value);
    default:
        memcpy((char *)p->settings + o->offset, &value, sizeof value);
        return EPX_OK;
    }
}

static void note(const parse_t *p, const epx_option_t *o) {
    int on = 1;
    memcpy((char *)p->settings + o->offset, &on, sizeof on);
}

epx_status_t epx_options_notes(const epx_option_table_t *t, const void *settings, epx_str_t *out) {
    for (size_t i = 0; i < t->n_options; i++) {
        const epx_option_t *o = &t->options[i];
        int on = 0;
        if (o->kind < EPX_OPTION_NOTED_FLAG) continue;
        memcpy(&on, (const char *)settings + o->offset, sizeof on);
        if (on) EPX_TRY(epx_str_printf(out, "--%s: %s\n", o->name, o->help));
    }
    return EPX_OK;
}

static epx_status_t set_flag(const parse_t *p, const epx_option_t *o, const char *value) {
    int on = 1;
    if (value) return epx_str_printf(p->problems, "--%s=%s: this flag takes no value\n", o->name, value);
    memcpy((char *)p->settings + o->offset, &on, sizeof on);
    return EPX_OK;
}

/* ---- the loop ---- */

/* argv[i] begins with "--". *out_used: how many arguments it took. */
static epx_status_t take_option(const parse_t *p, int i, int argc, char **argv, int *out_used) {
    const char *word = argv[i] + 2, *value;
    size_t n = strcspn(word, "=");
    const epx_option_t *o;
    int n_found;
    *out_used = 1;
    value = word[n] == '=' ? word + n + 1 : NULL;
    o = find(p, word, n, &n_found);
    if (o && o->kind == EPX_OPTION_FLAG && belongs(p, o)) return set_flag(p, o, value);
    if (o && o->kind >= EPX_OPTION_NOTED_FLAG && belongs(p, o)) {
        int most = value || o->kind == EPX_OPTION_NOTED_FLAG ? 0 : o->kind == EPX_OPTION_NOTED_VALUE ? 1 : argc;
        while (most-- > 0 && i + *out_used < argc && strncmp(argv[i + *out_used], "--", 2) != 0) ++*out_used;
        note(p, o);
        return EPX_OK;
    }
    if (value == NULL && i + 1 < argc && (o || strncmp(argv[i + 1], "--", 2) != 0)) {
        value = argv[i + 1]; /* what follows a wrong flag is taken for its value, so that it is not reported too */
        *out_used = 2;
    }
    if (n_found > 1) return report_ambiguous(p, word, n);
    if (o == NULL) return report_unknown(p, word, n);
    if (!belongs(p, o)) return report_foreign(p, o);
    if (value == NULL) return epx_str_printf(p->problems, "--%s needs a value\n", o->name);
    return set_value(p, o, value);
}

epx_status_t epx_options_parse(const epx_option_table_t *t, int command_idx, int first, int argc, char **argv, void *settings,
                               epx_str_t *problems) {
    parse_t p = {t, command_idx, settings, problems};
    char help[] = "--help", *as_long[] = {help};
    for (int i = first; i < argc;) {
        int used = 1;
        if (strcmp(argv[i], "-h") == 0) EPX_TRY(take_option(&p, 0, 1, as_long, &used));
        else if (strncmp(argv[i], "--", 2) == 0 && argv[i][2]) EPX_TRY(take_option(&p, i, argc, argv, &used));
        else EPX_TRY(epx_str_printf(problems, "unexpected argument \"%s\": settings are given as --name value\n", argv[i]));
        i += used;
    }
    return EPX_OK;
}
