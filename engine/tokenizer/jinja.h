/* Inside of the chat template engine: tokens, tree, run-time values. Private to engine/tokenizer.
 *
 * Values are jansson values. Two sentinels made for each rendering stand for what JSON lacks: undefined, and a function or method
 * that was named without being called. A namespace is a JSON object whose pointer is listed in the rendering; namespaces are
 * refused inside lists, dicts and namespaces, so that no value can contain itself.
 * Values made while rendering go to a pool and are borrowed from there; the pool is cut back after every statement, and variables
 * hold references of their own. A tree is read-only after parsing: several threads may render one template. */
#ifndef EPX_ENGINE_TOKENIZER_JINJA_H
#define EPX_ENGINE_TOKENIZER_JINJA_H

#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

#include "base/status.h"
#include "base/str.h"

#define JINJA_MAX_SOURCE_BYTES ((size_t)4 << 20)
#define JINJA_MAX_STRING_BYTES ((size_t)16 << 20) /* output, and any string or list made on the way */
#define JINJA_MAX_STEPS 10000000
#define JINJA_MAX_NESTING 128    /* of statements, and of brackets and operators while parsing */
#define JINJA_MAX_TREE_DEPTH 200 /* of an expression: chains such as a + b + c count */
#define JINJA_MAX_VALUE_DEPTH 4096
#define JINJA_MAX_ARGS 8
#define JINJA_MAX_NAMESPACES 1000
#define JINJA_BYTES_PER_STEP 32 /* building a string costs one step for so many bytes */

/* ---- memory of one template: freed all at once ---- */

typedef struct jinja_block jinja_block_t;
typedef struct {
    jinja_block_t *block;
    json_t **literal; /* owned references */
    size_t n_literals, cap_literals;
} jinja_arena_t;

/* Zeroed, 16-byte aligned; NULL with the error set when memory is short. */
void *jinja_alloc(jinja_arena_t *a, size_t n_bytes);
/* Keep a literal (reference taken over); NULL in, or no memory: NULL with the error set. */
json_t *jinja_keep_literal(jinja_arena_t *a, json_t *literal);
void jinja_arena_fini(jinja_arena_t *a);

/* ---- tokens ---- */

typedef enum {
    TOK_EOF,
    TOK_DATA,
    TOK_VARIABLE_BEGIN,
    TOK_VARIABLE_END,
    TOK_BLOCK_BEGIN,
    TOK_BLOCK_END,
    TOK_NAME,
    TOK_STRING,
    TOK_NUMBER,
    TOK_OP
} jinja_token_kind_t;

#define JINJA_OP2(a, b) (((a) << 8) | (b))

typedef struct {
    jinja_token_kind_t kind;
    int line;
    int op;           /* TOK_OP: the character, or JINJA_OP2 of two */
    const char *text; /* into the source; DATA and NAME */
    size_t n_bytes;
    json_t *literal; /* STRING and NUMBER; kept by the arena */
} jinja_token_t;

typedef struct {
    jinja_token_t *v; /* owned: free */
    size_t n, cap;
} jinja_tokens_t;

/* source: valid UTF-8 with \n line ends and without its last newline; must outlive the tokens. */
epx_status_t jinja_lex(jinja_arena_t *a, const char *source, size_t n_bytes, jinja_tokens_t *out);

/* ---- tree ---- */

typedef enum {
    EX_LITERAL,
    EX_NAME,      /* name */
    EX_LOOP_ATTR, /* loop.name */
    EX_ATTR,      /* arg[0].name */
    EX_ITEM,      /* arg[0][arg[1]] */
    EX_SLICE,     /* arg[0][arg[1]:arg[2]:arg[3]], NULL where left out */
    EX_CALL,      /* fn(arg[0..]) */
    EX_METHOD,    /* arg[0].name(arg[1..]) */
    EX_FILTER,    /* arg[0] | fn(arg[1..]) */
    EX_TEST,      /* arg[0] is fn(arg[1..]) */
    EX_LIST,
    EX_DICT, /* key, value, key, value... */
    EX_NEG,
    EX_POS,
    EX_NOT,
    EX_AND,
    EX_OR,
    EX_COND,   /* arg[0] if arg[1] else arg[2], NULL where left out */
    EX_BINARY, /* arg[0] op arg[1]; op as in tokens; '~' too */
    EX_COMPARE /* arg[0] ops[0] arg[1] ops[1] arg[2]... */
} jinja_ex_kind_t;

/* Operators spelled as words. */
enum { JINJA_OP_IN = 1, JINJA_OP_NOT_IN = 2 };

typedef struct jinja_fn jinja_fn_t;
typedef struct jinja_ex jinja_ex_t;
struct jinja_ex {
    jinja_ex_kind_t kind;
    int line, depth, op;
    const char *name;
    json_t *literal;
    const jinja_fn_t *fn;
    jinja_ex_t **arg;
    const char **keyword; /* of each arg in calls: NULL when positional; NULL as a whole when all are */
    int *ops;
    size_t n_args;
};

typedef enum { ST_DATA, ST_OUTPUT, ST_IF, ST_FOR, ST_SET, ST_SET_BLOCK, ST_BREAK, ST_CONTINUE, ST_GROUP } jinja_st_kind_t;

typedef struct jinja_st jinja_st_t;
typedef struct {
    jinja_st_t **v;
    size_t n, cap;
} jinja_body_t;

struct jinja_st {
    jinja_st_kind_t kind;
    int line;
    const char *text; /* ST_DATA */
    size_t n_bytes;
    jinja_ex_t *expr;   /* value, condition or what is looped over */
    jinja_ex_t *filter; /* for ... if filter */
    const char **name;  /* targets of set and for */
    size_t n_names;
    const char *attr; /* set name.attr = ... */
    jinja_body_t body, other;
    jinja_st_t *elif; /* next branch of an if */
};

epx_status_t jinja_parse(jinja_arena_t *a, const jinja_tokens_t *tokens, jinja_body_t *out_body);

/* ---- run time ---- */

typedef struct {
    const char *name; /* borrowed from the tree or the caller */
    json_t *value;    /* a reference of its own */
} jinja_var_t;

typedef struct {
    json_t *items; /* array */
    size_t at;
} jinja_loop_t;

typedef struct jinja_frame jinja_frame_t;
struct jinja_frame {
    jinja_var_t *var;
    size_t n, cap;
    jinja_loop_t *loop; /* of this frame, or NULL */
    jinja_frame_t *parent;
};

typedef struct {
    json_t *undefined, *function;
    json_t **pool;
    size_t n_pool, cap_pool;
    json_t **ns; /* owned references */
    size_t n_ns, cap_ns;
    jinja_frame_t *top;
    epx_str_t *out;
    int64_t steps_left;
    epx_status_t status; /* negative once something failed */
    enum { JINJA_GO_ON, JINJA_BREAK, JINJA_CONTINUE } flow;
} jinja_run_t;

typedef enum {
    KIND_UNDEFINED,
    KIND_FUNCTION,
    KIND_NONE,
    KIND_BOOL,
    KIND_INT,
    KIND_FLOAT,
    KIND_STRING,
    KIND_LIST,
    KIND_DICT,
    KIND_NAMESPACE
} jinja_kind_t;

/* Set the error "chat template, line L: ..." and return NULL. */
json_t *jinja_fail(jinja_run_t *r, int line, epx_status_t s, const char *fmt, ...) EPX_PRINTF(4, 5);
/* Use up n steps; 0 and the error set when none are left. */
int jinja_spend(jinja_run_t *r, int line, size_t n);
/* Give a new reference to the pool; returns it borrowed. NULL in: NULL out, out of memory. */
json_t *jinja_pool(jinja_run_t *r, json_t *value);
jinja_kind_t jinja_kind(const jinja_run_t *r, const json_t *v);
/* As Python names the type: 'str', 'int'... */
const char *jinja_type_name(const jinja_run_t *r, const json_t *v);
json_t *jinja_bool(int on);
/* New string in the pool, spending steps for its bytes. text must be valid UTF-8. */
json_t *jinja_string(jinja_run_t *r, int line, const char *text, size_t n_bytes);
int jinja_truth(const jinja_run_t *r, const json_t *v);
/* Python's ==. */
int jinja_equal(jinja_run_t *r, const json_t *a, const json_t *b);
/* 1 when v is a bool, int or float. */
int jinja_number(const jinja_run_t *r, const json_t *v, double *out);
/* 1 when v is a bool or int. */
int jinja_integer(const jinja_run_t *r, const json_t *v, json_int_t *out);
/* Append str(v). */
epx_status_t jinja_append_str(jinja_run_t *r, int line, const json_t *v, epx_str_t *out);
/* str(v) in the pool. */
json_t *jinja_to_string(jinja_run_t *r, int line, json_t *v);
size_t jinja_n_chars(const json_t *string);
/* Python's str.isspace() for one character. */
int jinja_is_space(int32_t c);
/* Check that v may be put into a container: no namespace, not too deep. 0 and the error set if not. */
int jinja_may_nest(jinja_run_t *r, int line, const json_t *v);
/* Append a member to a list or dict, taking no reference over. 0 and the error set on failure. */
int jinja_list_add(jinja_run_t *r, int line, json_t *list, json_t *v);

typedef struct {
    int ensure_ascii, sort_keys;
    int indent; /* -1: on one line */
    const char *item_sep, *key_sep;
} jinja_json_style_t;

/* Append json.dumps(v). */
epx_status_t jinja_append_json(jinja_run_t *r, int line, const json_t *v, const jinja_json_style_t *style, epx_str_t *out);
/* Append repr() of a float as Python writes it. */
epx_status_t jinja_append_float(double d, epx_str_t *out);

/* ---- built-in functions ---- */

/* slot[i] belongs to params[i], NULL when not given. self: the piped or owning value; NULL for global functions.
 * Returns borrowed, or NULL with the error set. */
typedef json_t *(*jinja_native_t)(jinja_run_t *r, const jinja_ex_t *at, json_t *self, json_t **slot);

struct jinja_fn {
    const char *name;
    jinja_native_t call;
    int n_required;
    const char *param[JINJA_MAX_ARGS];
};

const jinja_fn_t *jinja_find_filter(const char *name);
const jinja_fn_t *jinja_find_test(const char *name);
const jinja_fn_t *jinja_find_global(const char *name);
const jinja_fn_t *jinja_find_str_method(const char *name);
const jinja_fn_t *jinja_find_dict_method(const char *name);
/* 1 for attributes of Python's dict that hide a member of that name when written with a dot. */
int jinja_is_dict_attribute(const char *name);
/* obj.name with undefined results as Jinja2 has them. */
json_t *jinja_get_attr(jinja_run_t *r, const jinja_ex_t *at, json_t *obj, const char *name);
/* All that can be iterated as an array: list, keys of a dict, characters of a string, nothing of undefined. */
json_t *jinja_iterate(jinja_run_t *r, int line, json_t *v);
/* Call fn with values in place of arguments: for map, select and the like. */
json_t *jinja_call_values(jinja_run_t *r, const jinja_ex_t *at, const jinja_fn_t *fn, json_t *self, json_t **value, size_t n);
/* a < b and the like; op as in tokens. */
json_t *jinja_compare(jinja_run_t *r, int line, int op, json_t *a, json_t *b);
/* Evaluate; borrowed, or NULL with r->status set. */
json_t *jinja_eval(jinja_run_t *r, const jinja_ex_t *e);
/* Run a body, appending to r->out. */
epx_status_t jinja_exec(jinja_run_t *r, const jinja_body_t *body);
/* Set a variable of the innermost frame. */
epx_status_t jinja_assign(jinja_run_t *r, const char *name, json_t *value);

#endif
