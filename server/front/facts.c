/* See facts.h. Quadratic, which a hundred lines may be. */
#include "server/front/facts.h"

#include <string.h>

typedef struct {
    const char *name, *value;
    int n_name, n_value;
} fact_t;

/* The line at *at, which moves behind it; 0 at the end. */
static int next_fact(const char **at, fact_t *out) {
    const char *end, *tab;
    if (**at == '\0') return 0;
    end = *at + strcspn(*at, "\n");
    tab = memchr(*at, '\t', (size_t)(end - *at));
    if (!tab) tab = end;
    *out = (fact_t){*at, tab < end ? tab + 1 : end, (int)(tab - *at), tab < end ? (int)(end - tab - 1) : 0};
    *at = *end ? end + 1 : end;
    return 1;
}

static int find(const char *list, const fact_t *wanted, fact_t *out) {
    while (next_fact(&list, out))
        if (out->n_name == wanted->n_name && memcmp(out->name, wanted->name, (size_t)wanted->n_name) == 0) return 1;
    return 0;
}

static int same(const fact_t *a, const fact_t *b) {
    return a->n_value == b->n_value && memcmp(a->value, b->value, (size_t)a->n_value) == 0;
}

static epx_status_t tell(epx_str_t *out, const fact_t *mine, const fact_t *theirs, const char *who) {
    static const fact_t absent = {.value = "absent", .n_value = 6};
    const fact_t *named = mine ? mine : theirs;
    if (!mine) mine = &absent;
    if (!theirs) theirs = &absent;
    return epx_str_printf(out, "%s%.*s is %.*s on node 0 and %.*s on %s", out->n_bytes ? "; " : "", named->n_name, named->name,
                          mine->n_value, mine->value, theirs->n_value, theirs->value, who);
}

epx_status_t epx_facts_compare(const char *node_0, const char *other, const char *who, epx_str_t *out) {
    fact_t mine, theirs;
    for (const char *at = node_0; next_fact(&at, &mine);) {
        int there = find(other, &mine, &theirs);
        if (!there || !same(&mine, &theirs)) EPX_TRY(tell(out, &mine, there ? &theirs : NULL, who));
    }
    for (const char *at = other; next_fact(&at, &theirs);)
        if (!find(node_0, &theirs, &mine)) EPX_TRY(tell(out, NULL, &theirs, who));
    return EPX_OK;
}
