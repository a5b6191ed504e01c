/* Template text to tokens, with trim_blocks and lstrip_blocks on: Jinja2's white-space rules (Template Designer Documentation,
 * "Whitespace Control"), checked against Jinja2 by the stored renderings. Also the arena of a template. */
#include <stdlib.h>
#include <string.h>

#include "engine/tokenizer/jinja.h"
#include "engine/tokenizer/utf8.h"

/* ---- arena ---- */

struct jinja_block {
    jinja_block_t *next;
    size_t used, cap;
    char pad[8]; /* keeps data 16-byte aligned */
    char data[];
};

void *jinja_alloc(jinja_arena_t *a, size_t n_bytes) {
    size_t n = (n_bytes + 15) & ~(size_t)15;
    jinja_block_t *b = a->block;
    char *p;
    if (b == NULL || b->cap - b->used < n) {
        size_t cap = n > 8192 ? n : 8192;
        b = calloc(1, sizeof *b + cap);
        if (b == NULL) {
            epx_fail(EPX_ERR_NOMEM, "chat template: %zu bytes", cap);
            return NULL;
        }
        b->cap = cap;
        b->next = a->block;
        a->block = b;
    }
    p = b->data + b->used;
    b->used += n;
    return p;
}

json_t *jinja_keep_literal(jinja_arena_t *a, json_t *literal) {
    if (literal && a->n_literals == a->cap_literals) {
        size_t cap = a->cap_literals ? a->cap_literals * 2 : 32;
        json_t **p = realloc(a->literal, cap * sizeof *p);
        if (p == NULL) {
            json_decref(literal);
            literal = NULL;
        } else {
            a->literal = p;
            a->cap_literals = cap;
        }
    }
    if (literal == NULL) {
        epx_fail(EPX_ERR_NOMEM, "chat template: literal");
        return NULL;
    }
    return a->literal[a->n_literals++] = literal;
}

void jinja_arena_fini(jinja_arena_t *a) {
    while (a->block) {
        jinja_block_t *b = a->block;
        a->block = b->next;
        free(b);
    }
    while (a->n_literals) json_decref(a->literal[--a->n_literals]);
    free(a->literal);
    *a = (jinja_arena_t){0};
}

/* ---- scanning ---- */

typedef struct {
    jinja_arena_t *arena;
    const char *p;
    size_t n, at;
    int line;
    int line_starting; /* what was read last ended a line */
    jinja_tokens_t *out;
} lexer_t;

static epx_status_t push(lexer_t *l, jinja_token_t token) {
    jinja_tokens_t *t = l->out;
    if (t->n == t->cap) {
        size_t cap = t->cap ? t->cap * 2 : 256;
        jinja_token_t *v = realloc(t->v, cap * sizeof *v);
        if (v == NULL) return epx_fail(EPX_ERR_NOMEM, "chat template: %zu tokens", cap);
        t->v = v;
        t->cap = cap;
    }
    token.line = l->line;
    t->v[t->n++] = token;
    return EPX_OK;
}

static void advance(lexer_t *l, size_t to) {
    for (; l->at < to; l->at++) l->line += l->p[l->at] == '\n';
}

static int at(const lexer_t *l, const char *word) {
    size_t n = strlen(word);
    return l->n - l->at >= n && memcmp(l->p + l->at, word, n) == 0;
}

static void skip_space(lexer_t *l) {
    size_t len;
    while (l->at < l->n && jinja_is_space(epx_utf8_decode(l->p + l->at, &len))) advance(l, l->at + len);
}

static size_t rstrip(const char *p, size_t begin, size_t end) {
    size_t len;
    while (end > begin) {
        size_t prev = epx_utf8_back(p, end);
        if (!jinja_is_space(epx_utf8_decode(p + prev, &len))) break;
        end = prev;
    }
    return end;
}

/* End of the data before a tag at `tag`: '-' strips all space; lstrip_blocks strips the indentation of a block or comment. */
static size_t data_end(const lexer_t *l, size_t begin, size_t tag) {
    char kind = l->p[tag + 1], sign = tag + 2 < l->n ? l->p[tag + 2] : 0;
    size_t line_begin = tag, stripped;
    if (sign == '-') return rstrip(l->p, begin, tag);
    if (sign == '+' || kind == '{') return tag;
    while (line_begin > begin && l->p[line_begin - 1] != '\n') line_begin--;
    if (line_begin == begin && !l->line_starting) return tag;
    stripped = rstrip(l->p, line_begin, tag);
    return stripped == line_begin ? line_begin : tag;
}

static size_t find_tag(const lexer_t *l) {
    size_t i;
    for (i = l->at; i + 1 < l->n; i++) {
        if (l->p[i] == '{' && (l->p[i + 1] == '{' || l->p[i + 1] == '%' || l->p[i + 1] == '#')) return i;
    }
    return l->n;
}

/* What follows the end of a tag: '-' before it eats all space, a block or comment eats one newline (trim_blocks). */
static void after_tag(lexer_t *l, size_t end, char sign, int trims) {
    size_t from = l->at;
    advance(l, end);
    if (sign == '-') skip_space(l);
    else if (sign != '+' && trims && l->at < l->n && l->p[l->at] == '\n') advance(l, l->at + 1);
    l->line_starting = l->at > from && l->p[l->at - 1] == '\n';
}

static epx_status_t lex_comment(lexer_t *l) {
    size_t begin = l->at + 2, i;
    if (begin < l->n && (l->p[begin] == '-' || l->p[begin] == '+')) begin++;
    for (i = begin; i + 1 < l->n; i++) {
        if (l->p[i] != '#' || l->p[i + 1] != '}') continue;
        after_tag(l, i + 2, i > begin ? l->p[i - 1] : 0, 1);
        return EPX_OK;
    }
    return epx_fail(EPX_ERR_FORMAT, "chat template, line %d: {# without #}", l->line);
}

/* ---- inside a tag ---- */

static int is_name_start(char c) { return c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
static int is_digit(char c) { return c >= '0' && c <= '9'; }

static epx_status_t lex_name(lexer_t *l) {
    size_t end = l->at;
    while (end < l->n && (is_name_start(l->p[end]) || is_digit(l->p[end]))) end++;
    EPX_TRY(push(l, (jinja_token_t){.kind = TOK_NAME, .text = l->p + l->at, .n_bytes = end - l->at}));
    l->at = end;
    return EPX_OK;
}

/* Decimal integers and floats; end of the number in *end. */
static int scan_number(const lexer_t *l, size_t *end) {
    size_t i = l->at, j;
    int real = 0;
    while (i < l->n && is_digit(l->p[i])) i++;
    if (i + 1 < l->n && l->p[i] == '.' && is_digit(l->p[i + 1])) {
        real = 1;
        for (i++; i < l->n && is_digit(l->p[i]);) i++;
    }
    if (i < l->n && (l->p[i] == 'e' || l->p[i] == 'E')) {
        j = i + 1;
        if (j < l->n && (l->p[j] == '+' || l->p[j] == '-')) j++;
        if (j < l->n && is_digit(l->p[j])) {
            real = 1;
            for (i = j; i < l->n && is_digit(l->p[i]);) i++;
        }
    }
    *end = i;
    return real;
}

static epx_status_t lex_number(lexer_t *l) {
    char text[64], *digits = text;
    size_t end;
    int real = scan_number(l, &end);
    json_error_t e;
    json_t *j;
    if (end - l->at >= sizeof text || (end < l->n && (is_name_start(l->p[end]))))
        return epx_fail(EPX_ERR_UNSUPPORTED, "chat template, line %d: number \"%.20s\"; decimal numbers are supported", l->line,
                        l->p + l->at);
    memcpy(text, l->p + l->at, end - l->at);
    text[end - l->at] = 0;
    if (!real && text[0] == '0' && strspn(text, "0") != strlen(text))
        return epx_fail(EPX_ERR_FORMAT, "chat template, line %d: number \"%s\" begins with 0", l->line, text);
    while (digits[0] == '0' && is_digit(digits[1])) digits++;
    j = json_loads(digits, JSON_DECODE_ANY, &e);
    if (j == NULL) return epx_fail(EPX_ERR_FORMAT, "chat template, line %d: number \"%s\": out of range", l->line, text);
    if ((j = jinja_keep_literal(l->arena, j)) == NULL) return EPX_ERR_NOMEM;
    EPX_TRY(push(l, (jinja_token_t){.kind = TOK_NUMBER, .literal = j}));
    l->at = end;
    return EPX_OK;
}

static int hex_value(const char *p, size_t n, int32_t *out) {
    size_t i;
    *out = 0;
    for (i = 0; i < n; i++) {
        const char *digits = "0123456789abcdef", *d;
        char c = p[i] >= 'A' && p[i] <= 'F' ? (char)(p[i] + 32) : p[i];
        if (c == 0 || (d = strchr(digits, c)) == NULL || *out > 0x10FFFF) return 0;
        *out = *out * 16 + (int32_t)(d - digits);
    }
    return *out <= 0x10FFFF && !(*out >= 0xD800 && *out <= 0xDFFF);
}

/* One escape of Python's, p[0] being the character behind the backslash. Returns the bytes read, 0 when malformed. */
static size_t unescape(const char *p, size_t n, epx_str_t *out) {
    static const char from[] = "ntr\\'\"abfv0", to[] = "\n\t\r\\'\"\a\b\f\v";
    const char *known = p[0] ? strchr(from, p[0]) : NULL;
    char text[4];
    int32_t c = 0;
    size_t used = 0;
    if (p[0] == '\n') return 1;
    if (p[0] >= '0' && p[0] <= '7') {
        while (used < 3 && used < n && p[used] >= '0' && p[used] <= '7') c = c * 8 + (p[used++] - '0');
    } else if (known) {
        c = to[known - from];
        used = 1;
    } else if (p[0] == 'x' || p[0] == 'u' || p[0] == 'U') {
        used = p[0] == 'x' ? 2 : p[0] == 'u' ? 4 : 8;
        if (n < 1 + used || !hex_value(p + 1, used, &c)) return 0;
        used++;
    } else if (p[0] == 'N') {
        return 0;
    } else {
        return epx_str_append(out, "\\", 1) < 0 ? 0 : (size_t)-1; /* the backslash stays, the character is read as usual */
    }
    return epx_str_append(out, text, epx_utf8_encode(c, text)) < 0 ? 0 : used;
}

static epx_status_t lex_string(lexer_t *l) {
    char quote = l->p[l->at];
    size_t i = l->at + 1, used;
    epx_str_t s = {0};
    epx_status_t st = epx_str_append(&s, "", 0);
    json_t *j = NULL;
    while (st == EPX_OK && i < l->n && l->p[i] != quote) {
        if (l->p[i] != '\\') {
            st = epx_str_append(&s, l->p + i++, 1);
            continue;
        }
        used = i + 1 < l->n ? unescape(l->p + i + 1, l->n - i - 1, &s) : 0;
        if (used == 0) st = epx_fail(EPX_ERR_FORMAT, "chat template, line %d: bad escape in a string", l->line);
        i += used == (size_t)-1 ? 1 : 1 + used;
    }
    if (st == EPX_OK && i >= l->n) st = epx_fail(EPX_ERR_FORMAT, "chat template, line %d: string without its end", l->line);
    if (st == EPX_OK && (j = jinja_keep_literal(l->arena, json_stringn(s.data, s.n_bytes))) == NULL) st = EPX_ERR_NOMEM;
    epx_str_fini(&s);
    EPX_TRY(st);
    EPX_TRY(push(l, (jinja_token_t){.kind = TOK_STRING, .literal = j}));
    advance(l, i + 1);
    return EPX_OK;
}

/* Brackets must close in order: a }} that closes a dict is not the end of the tag. */
typedef struct {
    char open[JINJA_MAX_NESTING * 2];
    size_t n;
} brackets_t;

static epx_status_t lex_operator(lexer_t *l, brackets_t *b) {
    static const char *const two[] = {"==", "!=", "<=", ">=", "//", "**"};
    static const char opening[] = "([{", closing[] = ")]}";
    char c = l->p[l->at];
    const char *k;
    size_t i;
    for (i = 0; i < sizeof two / sizeof *two; i++) {
        if (!at(l, two[i])) continue;
        l->at += 2;
        return push(l, (jinja_token_t){.kind = TOK_OP, .op = JINJA_OP2(two[i][0], two[i][1])});
    }
    if (c == 0 || strchr("+-*/%~=<>.,:|()[]{}", c) == NULL)
        return epx_fail(EPX_ERR_FORMAT, "chat template, line %d: unexpected character 0x%02X in a tag", l->line,
                        (unsigned char)c);
    if (strchr(opening, c)) {
        if (b->n == sizeof b->open)
            return epx_fail(EPX_ERR_UNSUPPORTED, "chat template, line %d: brackets nested too deep", l->line);
        b->open[b->n++] = c;
    } else if ((k = strchr(closing, c)) != NULL) {
        if (b->n == 0 || b->open[--b->n] != opening[k - closing])
            return epx_fail(EPX_ERR_FORMAT, "chat template, line %d: unexpected '%c'", l->line, c);
    }
    l->at++;
    return push(l, (jinja_token_t){.kind = TOK_OP, .op = c});
}

/* 1 at the end of the tag; *sign is its '-' or '+', *end is behind it. */
static int at_tag_end(const lexer_t *l, int block, char *sign, size_t *end) {
    char c = l->p[l->at];
    size_t i = l->at;
    *sign = 0;
    if (c == '-' || (c == '+' && block)) {
        *sign = c;
        i++;
    }
    if (i + 1 >= l->n || l->p[i] != (block ? '%' : '}') || l->p[i + 1] != '}') return 0;
    *end = i + 2;
    return 1;
}

static epx_status_t lex_tag(lexer_t *l) {
    int block = l->p[l->at + 1] == '%', first_line = l->line;
    brackets_t b = {.n = 0};
    char sign;
    size_t end;
    EPX_TRY(push(l, (jinja_token_t){.kind = block ? TOK_BLOCK_BEGIN : TOK_VARIABLE_BEGIN}));
    l->at += 2;
    if (at(l, "-") || at(l, "+")) l->at++;
    for (;;) {
        char c;
        skip_space(l);
        if (l->at >= l->n)
            return epx_fail(EPX_ERR_FORMAT, "chat template, line %d: %s without its end", first_line, block ? "{%" : "{{");
        if (b.n == 0 && at_tag_end(l, block, &sign, &end)) break;
        c = l->p[l->at];
        if (is_name_start(c)) EPX_TRY(lex_name(l));
        else if (is_digit(c)) EPX_TRY(lex_number(l));
        else if (c == '\'' || c == '"') EPX_TRY(lex_string(l));
        else EPX_TRY(lex_operator(l, &b));
    }
    EPX_TRY(push(l, (jinja_token_t){.kind = block ? TOK_BLOCK_END : TOK_VARIABLE_END}));
    after_tag(l, end, sign, block);
    return EPX_OK;
}

epx_status_t jinja_lex(jinja_arena_t *a, const char *source, size_t n_bytes, jinja_tokens_t *out) {
    lexer_t l = {.arena = a, .p = source, .n = n_bytes, .line = 1, .line_starting = 1, .out = out};
    while (l.at < l.n) {
        size_t tag = find_tag(&l), end = tag < l.n ? data_end(&l, l.at, tag) : tag;
        if (end > l.at) EPX_TRY(push(&l, (jinja_token_t){.kind = TOK_DATA, .text = source + l.at, .n_bytes = end - l.at}));
        advance(&l, tag);
        if (l.at >= l.n) break;
        if (source[tag + 1] == '#') EPX_TRY(lex_comment(&l));
        else EPX_TRY(lex_tag(&l));
    }
    return push(&l, (jinja_token_t){.kind = TOK_EOF});
}
