/* Tokens to a tree. Recursive descent in Jinja2's order of precedence; recursion and the depth of the tree are bounded, so that
 * neither parsing nor evaluating can run out of stack. What Jinja2 has and we do not is refused here, by name. */
#include <stdlib.h>
#include <string.h>

#include "engine/tokenizer/jinja.h"

typedef struct {
    jinja_arena_t *arena;
    const jinja_token_t *tok; /* the present one; the last is TOK_EOF */
    int nesting, loops;
    epx_status_t status;
} parser_t;

typedef struct {
    jinja_ex_t **v;
    const char **keyword;
    size_t n, cap;
} args_t;

/* ---- helpers ---- */

static void *fail_at(parser_t *p, epx_status_t s, const char *what, const char *name, size_t n_bytes) {
    p->status = epx_fail(s, "chat template, line %d: %s%s%.*s%s", p->tok->line, what, n_bytes ? " \"" : "", (int)n_bytes, name,
                         n_bytes ? "\"" : "");
    return NULL;
}
static void *fail_text(parser_t *p, epx_status_t s, const char *what) { return fail_at(p, s, what, "", 0); }

static int is_op(const parser_t *p, int op) { return p->tok->kind == TOK_OP && p->tok->op == op; }
static int is_word_token(const jinja_token_t *t, const char *word) {
    return t->kind == TOK_NAME && t->n_bytes == strlen(word) && memcmp(t->text, word, t->n_bytes) == 0;
}
static int is_word(const parser_t *p, const char *word) { return is_word_token(p->tok, word); }

static int take_op(parser_t *p, int op) {
    int yes = is_op(p, op);
    p->tok += yes;
    return yes;
}
static int take_word(parser_t *p, const char *word) {
    int yes = is_word(p, word);
    p->tok += yes;
    return yes;
}

static const char *describe(const jinja_token_t *t) {
    static const char *const name[] = {
        "the end of the template", "text", "{{", "}}", "{%", "%}", "a name", "a string", "a number", "an operator"};
    return name[t->kind];
}

static void *unexpected(parser_t *p, const char *wanted) {
    char text[128];
    if (p->status < 0) return NULL;
    if (p->tok->kind == TOK_NAME)
        snprintf(text, sizeof text, "%s expected, not \"%.*s\"", wanted, (int)(p->tok->n_bytes < 40 ? p->tok->n_bytes : 40),
                 p->tok->text);
    else if (p->tok->kind == TOK_OP)
        snprintf(text, sizeof text, "%s expected, not '%c'", wanted, p->tok->op > 255 ? p->tok->op >> 8 : p->tok->op);
    else snprintf(text, sizeof text, "%s expected, not %s", wanted, describe(p->tok));
    return fail_text(p, EPX_ERR_FORMAT, text);
}

static int want_op(parser_t *p, int op) {
    char wanted[8] = {'\'', (char)op, '\'', 0};
    if (take_op(p, op)) return 1;
    unexpected(p, wanted);
    return 0;
}

static int enter(parser_t *p) {
    if (++p->nesting <= JINJA_MAX_NESTING) return 1;
    fail_text(p, EPX_ERR_UNSUPPORTED, "nested too deep (about 40 brackets or 120 statements)");
    return 0;
}

static const char *copy_name(parser_t *p, const jinja_token_t *t) {
    char *s = jinja_alloc(p->arena, t->n_bytes + 1);
    if (s == NULL) {
        p->status = EPX_ERR_NOMEM;
        return NULL;
    }
    memcpy(s, t->text, t->n_bytes);
    return s;
}

static const char *take_name(parser_t *p) {
    if (p->tok->kind != TOK_NAME) return unexpected(p, "a name");
    return copy_name(p, p->tok++);
}

static jinja_ex_t *node(parser_t *p, jinja_ex_kind_t kind, size_t n_args) {
    jinja_ex_t *e = jinja_alloc(p->arena, sizeof *e);
    jinja_ex_t **arg = jinja_alloc(p->arena, (n_args + 1) * sizeof *arg);
    if (e == NULL || arg == NULL) {
        p->status = EPX_ERR_NOMEM;
        return NULL;
    }
    *e = (jinja_ex_t){.kind = kind, .line = p->tok->line, .depth = 1, .arg = arg, .n_args = n_args};
    return e;
}

/* Set the depth from the arguments; NULL when too deep. */
static jinja_ex_t *finish(parser_t *p, jinja_ex_t *e) {
    size_t i;
    if (e == NULL) return NULL;
    for (i = 0; i < e->n_args; i++) {
        if (e->arg[i] && e->arg[i]->depth >= e->depth) e->depth = e->arg[i]->depth + 1;
    }
    if (e->depth > JINJA_MAX_TREE_DEPTH) return fail_text(p, EPX_ERR_UNSUPPORTED, "expression with more than 200 levels");
    return e;
}

static jinja_ex_t *node1(parser_t *p, jinja_ex_kind_t kind, jinja_ex_t *a) {
    jinja_ex_t *e = a ? node(p, kind, 1) : NULL;
    if (e) e->arg[0] = a;
    return finish(p, e);
}

static jinja_ex_t *node2(parser_t *p, jinja_ex_kind_t kind, int op, jinja_ex_t *a, jinja_ex_t *b) {
    jinja_ex_t *e = a && b ? node(p, kind, 2) : NULL;
    if (e == NULL) return NULL;
    e->op = op;
    e->arg[0] = a;
    e->arg[1] = b;
    return finish(p, e);
}

static jinja_ex_t *literal(parser_t *p, json_t *value) {
    jinja_ex_t *e = node(p, EX_LITERAL, 0);
    if (e) e->literal = value;
    return e;
}

static jinja_ex_t *new_literal(parser_t *p, json_t *value) {
    value = jinja_keep_literal(p->arena, value);
    if (value == NULL) {
        p->status = EPX_ERR_NOMEM;
        return NULL;
    }
    return literal(p, value);
}

static int push_arg(parser_t *p, args_t *a, jinja_ex_t *e, const char *keyword) {
    if (e == NULL) return 0;
    if (a->n == a->cap) { /* the arena frees the old ones at the end */
        size_t cap = a->cap ? a->cap * 2 : 4;
        jinja_ex_t **v = jinja_alloc(p->arena, cap * sizeof *v);
        const char **k = jinja_alloc(p->arena, cap * sizeof *k);
        if (v == NULL || k == NULL) {
            p->status = EPX_ERR_NOMEM;
            return 0;
        }
        if (a->n) {
            memcpy(v, a->v, a->n * sizeof *v);
            memcpy(k, a->keyword, a->n * sizeof *k);
        }
        a->v = v;
        a->keyword = k;
        a->cap = cap;
    }
    a->v[a->n] = e;
    a->keyword[a->n++] = keyword;
    return 1;
}

static jinja_ex_t *from_args(parser_t *p, jinja_ex_kind_t kind, const args_t *a) {
    jinja_ex_t *e = node(p, kind, 0);
    if (e == NULL) return NULL;
    e->arg = a->v;
    e->keyword = a->keyword;
    e->n_args = a->n;
    return finish(p, e);
}

/* ---- expressions ---- */

static jinja_ex_t *parse_expr(parser_t *p);
static jinja_ex_t *parse_unary(parser_t *p, int with_filter);
static jinja_ex_t *parse_primary(parser_t *p);
static jinja_ex_t *parse_postfix(parser_t *p, jinja_ex_t *e);

/* Arguments up to ')', the '(' being read; appended to a. */
static int parse_args(parser_t *p, args_t *a) {
    while (!take_op(p, ')')) {
        const char *keyword = NULL;
        if (is_op(p, '*') || is_op(p, JINJA_OP2('*', '*'))) {
            fail_text(p, EPX_ERR_UNSUPPORTED, "* and ** in a call");
            return 0;
        }
        if (p->tok->kind == TOK_NAME && p->tok[1].kind == TOK_OP && p->tok[1].op == '=') {
            keyword = take_name(p);
            p->tok++;
        }
        if (p->status < 0 || !push_arg(p, a, parse_expr(p), keyword)) return 0;
        if (a->n > JINJA_MAX_ARGS) {
            fail_text(p, EPX_ERR_UNSUPPORTED, "more than 8 arguments");
            return 0;
        }
        if (!is_op(p, ')') && !want_op(p, ',')) return 0;
    }
    return 1;
}

static jinja_ex_t *parse_call(parser_t *p, jinja_ex_t *callee) {
    const jinja_fn_t *fn = NULL;
    args_t a = {0};
    jinja_ex_t *e;
    if (callee->kind == EX_NAME) {
        fn = jinja_find_global(callee->name);
    } else if (callee->kind == EX_ATTR) {
        fn = jinja_find_str_method(callee->name);
        if (fn == NULL) fn = jinja_find_dict_method(callee->name);
    } else {
        return fail_text(p, EPX_ERR_UNSUPPORTED, "a call of something other than a named function or method");
    }
    if (fn == NULL)
        return fail_at(p, EPX_ERR_UNSUPPORTED, callee->kind == EX_NAME ? "function" : "method", callee->name,
                       strlen(callee->name));
    if (callee->kind == EX_ATTR && !push_arg(p, &a, callee->arg[0], NULL)) return NULL;
    if (!parse_args(p, &a)) return NULL;
    e = from_args(p, callee->kind == EX_NAME ? EX_CALL : EX_METHOD, &a);
    if (e == NULL) return NULL;
    e->fn = fn;
    e->name = callee->name;
    return e;
}

static jinja_ex_t *parse_attr(parser_t *p, jinja_ex_t *obj) {
    jinja_ex_t *e;
    if (p->tok->kind == TOK_NUMBER && json_is_integer(p->tok->literal)) {
        e = literal(p, p->tok->literal);
        p->tok++;
        return node2(p, EX_ITEM, 0, obj, e);
    }
    if (obj->kind == EX_NAME && strcmp(obj->name, "loop") == 0 && p->tok->kind == TOK_NAME) {
        e = node(p, EX_LOOP_ATTR, 0);
    } else {
        e = node1(p, EX_ATTR, obj);
    }
    if (e == NULL) return NULL;
    e->name = take_name(p);
    return e->name ? e : NULL;
}

/* What stands between [ and ]: an expression or a slice. */
static jinja_ex_t *parse_subscript(parser_t *p, jinja_ex_t *obj) {
    jinja_ex_t *part[3] = {NULL, NULL, NULL}, *e;
    int i = 0, colons = 0;
    while (!is_op(p, ']')) {
        if (take_op(p, ':')) {
            if (++colons > 2) return unexpected(p, "']'");
            i++;
            continue;
        }
        if (part[i]) return unexpected(p, "']'");
        if ((part[i] = parse_expr(p)) == NULL) return NULL;
        if (is_op(p, ',')) return fail_text(p, EPX_ERR_UNSUPPORTED, "a tuple in [ ]");
    }
    p->tok++;
    if (colons == 0) return part[0] ? node2(p, EX_ITEM, 0, obj, part[0]) : unexpected(p, "an expression in [ ]");
    e = node(p, EX_SLICE, 4);
    if (e == NULL) return NULL;
    e->arg[0] = obj;
    memcpy(e->arg + 1, part, sizeof part);
    return finish(p, e);
}

static jinja_ex_t *parse_postfix(parser_t *p, jinja_ex_t *e) {
    while (e) {
        if (take_op(p, '.')) e = parse_attr(p, e);
        else if (take_op(p, '[')) e = parse_subscript(p, e);
        else if (take_op(p, '(')) e = parse_call(p, e);
        else break;
    }
    return e;
}

static jinja_ex_t *parse_filter(parser_t *p, jinja_ex_t *input) {
    const char *name = take_name(p);
    args_t a = {0};
    jinja_ex_t *e;
    const jinja_fn_t *fn = name ? jinja_find_filter(name) : NULL;
    if (name == NULL) return NULL;
    if (fn == NULL) return fail_at(p, EPX_ERR_UNSUPPORTED, "filter", name, strlen(name));
    if (!push_arg(p, &a, input, NULL)) return NULL;
    if (take_op(p, '(') && !parse_args(p, &a)) return NULL;
    e = from_args(p, EX_FILTER, &a);
    if (e) e->fn = fn;
    return e;
}

/* A test may take one argument without parentheses. */
static int begins_test_argument(const parser_t *p) {
    if (p->tok->kind == TOK_STRING || p->tok->kind == TOK_NUMBER || is_op(p, '[') || is_op(p, '{')) return 1;
    return p->tok->kind == TOK_NAME && !is_word(p, "else") && !is_word(p, "or") && !is_word(p, "and") && !is_word(p, "if");
}

static jinja_ex_t *parse_test(parser_t *p, jinja_ex_t *input) {
    int negated = take_word(p, "not");
    const char *name = take_name(p);
    const jinja_fn_t *fn = name ? jinja_find_test(name) : NULL;
    args_t a = {0};
    jinja_ex_t *e;
    if (name == NULL) return NULL;
    if (fn == NULL) return fail_at(p, EPX_ERR_UNSUPPORTED, "test", name, strlen(name));
    if (!push_arg(p, &a, input, NULL)) return NULL;
    if (take_op(p, '(')) {
        if (!parse_args(p, &a)) return NULL;
    } else if (begins_test_argument(p)) {
        if (is_word(p, "is")) return fail_text(p, EPX_ERR_FORMAT, "tests cannot be chained with is");
        if (!push_arg(p, &a, parse_postfix(p, parse_primary(p)), NULL)) return NULL;
    }
    e = from_args(p, EX_TEST, &a);
    if (e == NULL) return NULL;
    e->fn = fn;
    return negated ? node1(p, EX_NOT, e) : e;
}

static jinja_ex_t *parse_filters(parser_t *p, jinja_ex_t *e) {
    while (e) {
        if (take_op(p, '|')) e = parse_filter(p, e);
        else if (take_word(p, "is")) e = parse_test(p, e);
        else if (take_op(p, '(')) e = parse_call(p, e);
        else break;
    }
    return e;
}

/* Items up to the closing bracket, the opening one being read. */
static int parse_items(parser_t *p, int close, args_t *a) {
    while (!take_op(p, close)) {
        if (!push_arg(p, a, parse_expr(p), NULL)) return 0;
        if (!is_op(p, close) && !want_op(p, ',')) return 0;
    }
    return 1;
}

static jinja_ex_t *parse_list(parser_t *p) {
    args_t a = {0};
    return parse_items(p, ']', &a) ? from_args(p, EX_LIST, &a) : NULL;
}

/* ( ... ): an expression, or a tuple, which is a list here. */
static jinja_ex_t *parse_paren(parser_t *p) {
    args_t a = {0};
    jinja_ex_t *e;
    if (take_op(p, ')')) return from_args(p, EX_LIST, &a);
    e = parse_expr(p);
    if (e == NULL) return NULL;
    if (take_op(p, ')')) return e;
    if (!want_op(p, ',') || !push_arg(p, &a, e, NULL) || !parse_items(p, ')', &a)) return NULL;
    return from_args(p, EX_LIST, &a);
}

static jinja_ex_t *parse_dict(parser_t *p) {
    args_t a = {0};
    while (!take_op(p, '}')) {
        if (!push_arg(p, &a, parse_expr(p), NULL) || !want_op(p, ':')) return NULL;
        if (!push_arg(p, &a, parse_expr(p), NULL)) return NULL;
        if (!is_op(p, '}') && !want_op(p, ',')) return NULL;
    }
    return from_args(p, EX_DICT, &a);
}

static jinja_ex_t *parse_name(parser_t *p) {
    jinja_ex_t *e;
    if (take_word(p, "true") || take_word(p, "True")) return literal(p, json_true());
    if (take_word(p, "false") || take_word(p, "False")) return literal(p, json_false());
    if (take_word(p, "none") || take_word(p, "None")) return literal(p, json_null());
    e = node(p, EX_NAME, 0);
    if (e) e->name = take_name(p);
    return e && e->name ? e : NULL;
}

/* Strings side by side are one. */
static jinja_ex_t *parse_strings(parser_t *p) {
    epx_str_t s = {0};
    jinja_ex_t *e;
    if (p->tok[1].kind != TOK_STRING) {
        e = literal(p, p->tok->literal);
        p->tok++;
        return e;
    }
    for (; p->tok->kind == TOK_STRING; p->tok++) {
        epx_status_t st = epx_str_append(&s, json_string_value(p->tok->literal), json_string_length(p->tok->literal));
        if (st < 0) p->status = st;
    }
    e = p->status < 0 ? NULL : new_literal(p, json_stringn(epx_str_z(&s), s.n_bytes));
    epx_str_fini(&s);
    return e;
}

static jinja_ex_t *parse_primary(parser_t *p) {
    jinja_ex_t *e = NULL;
    if (!enter(p)) return NULL;
    if (p->tok->kind == TOK_NAME) {
        e = parse_name(p);
    } else if (p->tok->kind == TOK_STRING) {
        e = parse_strings(p);
    } else if (p->tok->kind == TOK_NUMBER) {
        e = literal(p, p->tok->literal);
        p->tok++;
    } else if (take_op(p, '(')) {
        e = parse_paren(p);
    } else if (take_op(p, '[')) {
        e = parse_list(p);
    } else if (take_op(p, '{')) {
        e = parse_dict(p);
    } else {
        unexpected(p, "an expression");
    }
    p->nesting--;
    return e;
}

static jinja_ex_t *parse_unary(parser_t *p, int with_filter) {
    jinja_ex_t *e;
    if (!enter(p)) return NULL;
    if (take_op(p, '-')) e = node1(p, EX_NEG, parse_unary(p, 0));
    else if (take_op(p, '+')) e = node1(p, EX_POS, parse_unary(p, 0));
    else e = parse_primary(p);
    e = parse_postfix(p, e);
    if (with_filter) e = parse_filters(p, e);
    p->nesting--;
    return e;
}

/* Left-associative binary operators by level, loosest first. */
static const int binary_level[4][5] = {{'+', '-'}, {'~'}, {'*', '/', JINJA_OP2('/', '/'), '%'}, {JINJA_OP2('*', '*')}};

static jinja_ex_t *parse_binary(parser_t *p, int level) {
    jinja_ex_t *e = level == 4 ? parse_unary(p, 1) : parse_binary(p, level + 1);
    int i = 0;
    while (level < 4 && e && p->tok->kind == TOK_OP) {
        for (i = 0; i < 5 && binary_level[level][i] && p->tok->op != binary_level[level][i];) i++;
        if (i == 5 || binary_level[level][i] == 0) break;
        p->tok++;
        e = node2(p, EX_BINARY, binary_level[level][i], e, parse_binary(p, level + 1));
    }
    return e;
}

/* The comparison at the present token, or 0; read when there. */
static int take_comparison(parser_t *p) {
    static const int op[] = {JINJA_OP2('=', '='), JINJA_OP2('!', '='), '<', '>', JINJA_OP2('<', '='), JINJA_OP2('>', '=')};
    size_t i;
    for (i = 0; i < sizeof op / sizeof *op; i++) {
        if (take_op(p, op[i])) return op[i];
    }
    if (take_word(p, "in")) return JINJA_OP_IN;
    if (is_word(p, "not") && is_word_token(p->tok + 1, "in")) {
        p->tok += 2;
        return JINJA_OP_NOT_IN;
    }
    return 0;
}

static jinja_ex_t *parse_compare(parser_t *p) {
    jinja_ex_t *first = parse_binary(p, 0), *e;
    args_t a = {0};
    int ops[32], op;
    size_t n = 0;
    if (first == NULL) return NULL;
    while ((op = take_comparison(p)) != 0) {
        if (n == 32) return fail_text(p, EPX_ERR_UNSUPPORTED, "more than 32 comparisons in a row");
        ops[n++] = op;
        if ((n == 1 && !push_arg(p, &a, first, NULL)) || !push_arg(p, &a, parse_binary(p, 0), NULL)) return NULL;
    }
    if (n == 0) return first;
    e = from_args(p, EX_COMPARE, &a);
    if (e == NULL) return NULL;
    e->ops = jinja_alloc(p->arena, n * sizeof *ops);
    if (e->ops == NULL) {
        p->status = EPX_ERR_NOMEM;
        return NULL;
    }
    memcpy(e->ops, ops, n * sizeof *ops);
    return e;
}

static jinja_ex_t *parse_not(parser_t *p) {
    jinja_ex_t *e;
    if (!is_word(p, "not")) return parse_compare(p);
    p->tok++;
    if (!enter(p)) return NULL;
    e = node1(p, EX_NOT, parse_not(p));
    p->nesting--;
    return e;
}

static jinja_ex_t *parse_and(parser_t *p) {
    jinja_ex_t *e = parse_not(p);
    while (e && take_word(p, "and")) e = node2(p, EX_AND, 0, e, parse_not(p));
    return e;
}

static jinja_ex_t *parse_or(parser_t *p) {
    jinja_ex_t *e = parse_and(p);
    while (e && take_word(p, "or")) e = node2(p, EX_OR, 0, e, parse_and(p));
    return e;
}

static jinja_ex_t *parse_expr(parser_t *p) {
    jinja_ex_t *e, *c;
    if (!enter(p)) return NULL;
    e = parse_or(p);
    while (e && take_word(p, "if")) {
        c = node(p, EX_COND, 3);
        if (c == NULL) return NULL;
        c->arg[0] = e;
        if ((c->arg[1] = parse_or(p)) == NULL) return NULL;
        if (take_word(p, "else") && (c->arg[2] = parse_expr(p)) == NULL) return NULL;
        e = finish(p, c);
    }
    p->nesting--;
    return e;
}

/* An expression, or several with commas: a tuple. */
static jinja_ex_t *parse_tuple(parser_t *p) {
    jinja_ex_t *e = parse_expr(p);
    args_t a = {0};
    if (e == NULL || !is_op(p, ',')) return e;
    if (!push_arg(p, &a, e, NULL)) return NULL;
    while (take_op(p, ',')) {
        if (p->tok->kind == TOK_BLOCK_END || p->tok->kind == TOK_VARIABLE_END) break;
        if (!push_arg(p, &a, parse_expr(p), NULL)) return NULL;
    }
    return from_args(p, EX_LIST, &a);
}

/* ---- statements ---- */

static int parse_body(parser_t *p, jinja_body_t *body, const char *const *end);

static jinja_st_t *new_statement(parser_t *p, jinja_st_kind_t kind) {
    jinja_st_t *s = jinja_alloc(p->arena, sizeof *s);
    if (s == NULL) {
        p->status = EPX_ERR_NOMEM;
        return NULL;
    }
    s->kind = kind;
    s->line = p->tok->line;
    return s;
}

static int push_statement(parser_t *p, jinja_body_t *b, jinja_st_t *s) {
    if (s == NULL) return 0;
    if (b->n == b->cap) {
        size_t cap = b->cap ? b->cap * 2 : 8;
        jinja_st_t **v = jinja_alloc(p->arena, cap * sizeof *v);
        if (v == NULL) {
            p->status = EPX_ERR_NOMEM;
            return 0;
        }
        if (b->n) memcpy(v, b->v, b->n * sizeof *v);
        b->v = v;
        b->cap = cap;
    }
    b->v[b->n++] = s;
    return 1;
}

static int want_block_end(parser_t *p) {
    if (p->tok->kind == TOK_BLOCK_END) {
        p->tok++;
        return 1;
    }
    unexpected(p, "%}");
    return 0;
}

/* Skip "{% word %}", the present tokens being "{% word". */
static int take_end_tag(parser_t *p) {
    p->tok += 2;
    return want_block_end(p);
}

static jinja_st_t *parse_if(parser_t *p) {
    static const char *const ends[] = {"elif", "else", "endif", NULL};
    static const char *const last[] = {"endif", NULL};
    jinja_st_t *first = new_statement(p, ST_IF), *s = first;
    while (s) {
        s->expr = parse_tuple(p);
        if (s->expr == NULL || !want_block_end(p) || !parse_body(p, &s->body, ends)) return NULL;
        if (!is_word_token(p->tok + 1, "elif")) break;
        p->tok += 2;
        s->elif = new_statement(p, ST_IF);
        s = s->elif;
    }
    if (s == NULL) return NULL;
    if (is_word_token(p->tok + 1, "else") && (!take_end_tag(p) || !parse_body(p, &s->other, last))) return NULL;
    return take_end_tag(p) ? first : NULL;
}

/* name, name, ... with optional parentheses. */
static int parse_targets(parser_t *p, jinja_st_t *s) {
    const char *name[JINJA_MAX_ARGS];
    int paren = take_op(p, '(');
    do {
        if (s->n_names == JINJA_MAX_ARGS) {
            fail_text(p, EPX_ERR_UNSUPPORTED, "more than 8 names to set");
            return 0;
        }
        if ((name[s->n_names] = take_name(p)) == NULL) return 0;
        s->n_names++;
    } while (take_op(p, ','));
    if (paren && !want_op(p, ')')) return 0;
    s->name = jinja_alloc(p->arena, sizeof name);
    if (s->name == NULL) {
        p->status = EPX_ERR_NOMEM;
        return 0;
    }
    memcpy(s->name, name, s->n_names * sizeof *name);
    return 1;
}

static jinja_st_t *parse_for(parser_t *p) {
    static const char *const ends[] = {"else", "endfor", NULL};
    static const char *const last[] = {"endfor", NULL};
    jinja_st_t *s = new_statement(p, ST_FOR);
    args_t a = {0};
    if (s == NULL || !parse_targets(p, s)) return NULL;
    if (!take_word(p, "in")) return unexpected(p, "in");
    s->expr = parse_or(p);
    if (s->expr && is_op(p, ',')) {
        if (!push_arg(p, &a, s->expr, NULL)) return NULL;
        while (take_op(p, ',')) {
            if (!push_arg(p, &a, parse_or(p), NULL)) return NULL;
        }
        s->expr = from_args(p, EX_LIST, &a);
    }
    if (s->expr == NULL) return NULL;
    if (take_word(p, "if") && (s->filter = parse_expr(p)) == NULL) return NULL;
    if (is_word(p, "recursive")) return fail_text(p, EPX_ERR_UNSUPPORTED, "for ... recursive");
    p->loops++;
    if (!want_block_end(p) || !parse_body(p, &s->body, ends)) return NULL;
    p->loops--;
    if (is_word_token(p->tok + 1, "else") && (!take_end_tag(p) || !parse_body(p, &s->other, last))) return NULL;
    return take_end_tag(p) ? s : NULL;
}

static jinja_st_t *parse_set(parser_t *p) {
    static const char *const last[] = {"endset", NULL};
    jinja_st_t *s = new_statement(p, ST_SET);
    if (s == NULL || !parse_targets(p, s)) return NULL;
    if (s->n_names == 1 && take_op(p, '.') && (s->attr = take_name(p)) == NULL) return NULL;
    if (take_op(p, '=')) {
        s->expr = parse_tuple(p);
        return s->expr && want_block_end(p) ? s : NULL;
    }
    if (is_op(p, '|')) return fail_text(p, EPX_ERR_UNSUPPORTED, "a filter on a set block");
    s->kind = ST_SET_BLOCK;
    if (s->n_names != 1) return unexpected(p, "'='");
    if (!want_block_end(p) || !parse_body(p, &s->body, last)) return NULL;
    return take_end_tag(p) ? s : NULL;
}

/* {% generation %} of transformers marks the assistant's text and prints its body. */
static jinja_st_t *parse_generation(parser_t *p) {
    static const char *const last[] = {"endgeneration", NULL};
    jinja_st_t *s = new_statement(p, ST_GROUP);
    if (s == NULL || !want_block_end(p) || !parse_body(p, &s->body, last)) return NULL;
    return take_end_tag(p) ? s : NULL;
}

static jinja_st_t *parse_jump(parser_t *p, jinja_st_kind_t kind) {
    jinja_st_t *s = new_statement(p, kind);
    if (s && p->loops == 0) return fail_text(p, EPX_ERR_FORMAT, "break or continue outside a loop");
    return s && want_block_end(p) ? s : NULL;
}

static jinja_st_t *parse_statement(parser_t *p) {
    static const char *const known[] = {"macro", "call", "filter", "block", "extends",    "include", "import",
                                        "from",  "raw",  "with",   "do",    "autoescape", "trans",   "debug"};
    size_t i;
    if (p->tok->kind != TOK_NAME) return unexpected(p, "a statement");
    if (take_word(p, "if")) return parse_if(p);
    if (take_word(p, "for")) return parse_for(p);
    if (take_word(p, "set")) return parse_set(p);
    if (take_word(p, "break")) return parse_jump(p, ST_BREAK);
    if (take_word(p, "continue")) return parse_jump(p, ST_CONTINUE);
    if (take_word(p, "generation")) return parse_generation(p);
    for (i = 0; i < sizeof known / sizeof *known; i++) {
        if (is_word(p, known[i])) return fail_at(p, EPX_ERR_UNSUPPORTED, "statement", known[i], strlen(known[i]));
    }
    return fail_at(p, EPX_ERR_FORMAT, "unknown statement", p->tok->text, p->tok->n_bytes);
}

static jinja_st_t *parse_output(parser_t *p) {
    jinja_st_t *s = new_statement(p, ST_OUTPUT);
    if (s == NULL || (s->expr = parse_tuple(p)) == NULL) return NULL;
    if (p->tok->kind != TOK_VARIABLE_END) return unexpected(p, "}}");
    p->tok++;
    return s;
}

static jinja_st_t *parse_data(parser_t *p) {
    jinja_st_t *s = new_statement(p, ST_DATA);
    if (s == NULL) return NULL;
    s->text = p->tok->text;
    s->n_bytes = p->tok->n_bytes;
    p->tok++;
    return s;
}

static int ends_here(const parser_t *p, const char *const *end) {
    for (; end && *end; end++) {
        if (is_word_token(p->tok + 1, *end)) return 1;
    }
    return 0;
}

/* Statements up to "{% word" with one of the words in end, which is left unread; end NULL: up to the end of the template. */
static int parse_body(parser_t *p, jinja_body_t *body, const char *const *end) {
    int ok = enter(p);
    while (ok && p->tok->kind != TOK_EOF) {
        jinja_st_t *s;
        if (p->tok->kind == TOK_BLOCK_BEGIN) {
            if (ends_here(p, end)) break;
            p->tok++;
            s = parse_statement(p);
        } else if (p->tok->kind == TOK_DATA) {
            s = parse_data(p);
        } else {
            p->tok++; /* {{, the only other token outside a tag */
            s = parse_output(p);
        }
        ok = push_statement(p, body, s);
    }
    if (ok && end && p->tok->kind == TOK_EOF) {
        fail_at(p, EPX_ERR_FORMAT, "the template ends before", *end, strlen(*end));
        ok = 0;
    }
    p->nesting--;
    return ok && p->status == EPX_OK;
}

epx_status_t jinja_parse(jinja_arena_t *a, const jinja_tokens_t *tokens, jinja_body_t *out_body) {
    parser_t p = {.arena = a, .tok = tokens->v};
    if (parse_body(&p, out_body, NULL)) return EPX_OK;
    return p.status < 0 ? p.status : epx_fail(EPX_ERR_INTERNAL, "chat template: parser failed without a reason");
}
