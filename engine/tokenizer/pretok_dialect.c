/* Which patterns mean the same to Oniguruma in Ruby syntax, which the tokenizers package uses, and to PCRE2 as we set it.
 * Sources: Oniguruma's doc/RE and doc/SYNTAX.md; pcre2pattern(3). Anything not known to agree is refused, so that a tokenizer
 * either works as published or does not load. One known rest: \s of PCRE2 holds U+180E, Oniguruma's does not. */
#include "engine/tokenizer/tokenizer_internal.h"

#include <string.h>

typedef struct {
    const char *p;
    size_t n, at;
    int in_class;
    const char *why;
} scan_t;

static int starts(const scan_t *s, const char *word) {
    size_t n = strlen(word);
    return s->n - s->at >= n && memcmp(s->p + s->at, word, n) == 0;
}

/* \p{L}, \p{Lu}, \P{..}, \p{^..}: general categories of one or two letters; scripts and binary properties differ in meaning. */
static void check_property(scan_t *s) {
    static const char *const group = "LMNPSZC";
    size_t i = s->at + 2;
    if (i >= s->n || s->p[i] != '{') {
        s->why = "\\p without braces";
        return;
    }
    i++;
    if (i < s->n && s->p[i] == '^') i++;
    if (i >= s->n || s->p[i] == 0 || strchr(group, s->p[i]) == NULL) {
        s->why = "a \\p property that is not a general category";
        return;
    }
    i++;
    if (i < s->n && s->p[i] >= 'a' && s->p[i] <= 'z') i++;
    if (i >= s->n || s->p[i] != '}') {
        s->why = "a \\p property that is not a general category";
        return;
    }
    s->at = i + 1;
}

static void check_escape(scan_t *s) {
    char c = s->at + 1 < s->n ? s->p[s->at + 1] : 0;
    int alnum = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    if (s->at + 1 >= s->n) {
        s->why = "a backslash at the end";
    } else if (c == 'p' || c == 'P') {
        check_property(s);
    } else if (alnum && (strchr("sSdDrntfx", c) == NULL) && (s->in_class || (c != 'A' && c != 'z'))) {
        s->why = "an escape (of letters, \\s \\S \\d \\D \\r \\n \\t \\f \\x \\p \\P \\A \\z are known to agree)";
    } else {
        s->at += 2;
    }
}

static void check_group(scan_t *s) {
    static const char *const ok[] = {"(?:", "(?i:", "(?=", "(?!", "(?<=", "(?<!", "(?>"};
    size_t i;
    if (starts(s, "(*")) {
        s->why = "a (* verb";
        return;
    }
    if (!starts(s, "(?")) {
        s->at++;
        return;
    }
    for (i = 0; i < sizeof ok / sizeof *ok; i++) {
        if (!starts(s, ok[i])) continue;
        s->at += strlen(ok[i]);
        return;
    }
    s->why = "a group other than ( (?: (?i: (?= (?! (?<= (?<! (?>";
}

/* {n,m}+ is possessive in PCRE2 and a repeated repeat in Ruby; {,n} is a literal in PCRE2 10.42. */
static void check_braces(scan_t *s) {
    const char *end = memchr(s->p + s->at, '}', s->n - s->at);
    if (starts(s, "{,")) s->why = "{,n}";
    else if (end && end + 1 < s->p + s->n && end[1] == '+') s->why = "{n,m}+";
    else s->at++;
}

static void check_in_class(scan_t *s) {
    if (starts(s, "&&")) s->why = "&& in a class";
    else if (s->p[s->at] == '[') s->why = "[ in a class";
    else {
        if (s->p[s->at] == ']') s->in_class = 0;
        s->at++;
    }
}

static void check_outside(scan_t *s) {
    char c = s->p[s->at];
    if (c == '(') {
        check_group(s);
    } else if (c == '{') {
        check_braces(s);
    } else if (c == '[') {
        s->in_class = 1;
        s->at += starts(s, "[^") ? 2 : 1;
        if (s->at < s->n && s->p[s->at] == ']') s->why = "] first in a class";
    } else {
        s->at++;
    }
}

const char *epx_pretok_dialect_check(const char *pattern, size_t n_bytes, size_t *out_off) {
    scan_t s = {.p = pattern, .n = n_bytes};
    while (s.at < n_bytes && s.why == NULL) {
        if (pattern[s.at] == '\\') check_escape(&s);
        else if (s.in_class) check_in_class(&s);
        else check_outside(&s);
    }
    *out_off = s.at;
    return s.why;
}
