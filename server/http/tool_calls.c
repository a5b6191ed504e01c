/* See tool_calls.h. */
#include "server/http/tool_calls.h"

#include <string.h>

static const char open_tag[] = "<tool_call>", close_tag[] = "</tool_call>";
enum { OPEN_BYTES = sizeof open_tag - 1, CLOSE_BYTES = sizeof close_tag - 1 };

static const char *find(const char *s, size_t n, const char *what, size_t n_what) {
    for (size_t i = 0; i + n_what <= n; i++)
        if (memcmp(s + i, what, n_what) == 0) return s + i;
    return NULL;
}

static int is_space(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

static void drop(epx_tool_calls_t *t, size_t n) {
    t->held.n_bytes -= n;
    memmove(t->held.data, t->held.data + n, t->held.n_bytes);
}

static epx_status_t to_text(epx_tool_calls_t *t, size_t n, epx_str_t *out) {
    if (n == 0) return EPX_OK;
    EPX_TRY(epx_str_append(out, t->held.data, n));
    drop(t, n);
    return EPX_OK;
}

/* Bytes at the end that may belong to a tag: its beginning, and the white space before it. */
static size_t undecided(const char *s, size_t n) {
    size_t k = n < OPEN_BYTES - 1 ? n : OPEN_BYTES - 1;
    while (k > 0 && memcmp(s + n - k, open_tag, k) != 0) k--;
    while (k < n && is_space(s[n - k - 1])) k++;
    return k;
}

/* The call between the tags, or NULL. */
static json_t *parse_call(const char *s, size_t n) {
    json_t *v = json_loadb(s, n, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, NULL), *call = NULL;
    json_t *name = json_object_get(v, "name"), *arguments = json_object_get(v, "arguments");
    if (json_is_string(name) && json_is_object(arguments)) {
        char *text = json_dumps(arguments, 0);
        call = text ? json_pack("{s:O,s:s}", "name", name, "arguments", text) : NULL;
        free(text);
    }
    json_decref(v);
    return call;
}

/* Outside of a call. Returns 1 when there may be more to do. */
static int outside(epx_tool_calls_t *t, epx_str_t *out, epx_status_t *s) {
    const char *at = find(t->held.data, t->held.n_bytes, open_tag, OPEN_BYTES);
    size_t n = at ? (size_t)(at - t->held.data) : t->held.n_bytes - undecided(t->held.data, t->held.n_bytes), n_text = n;
    while (at && n_text > 0 && is_space(t->held.data[n_text - 1])) n_text--;
    *s = to_text(t, n_text, out);
    if (*s < 0 || !at) return 0;
    t->n_lead = n - n_text;
    t->is_open = 1;
    return 1;
}

/* Inside of a call. */
static int inside(epx_tool_calls_t *t, epx_str_t *out, json_t *calls, epx_status_t *s) {
    const char *at = find(t->held.data, t->held.n_bytes, close_tag, CLOSE_BYTES);
    if (!at) return 0;
    size_t n = (size_t)(at - t->held.data) + CLOSE_BYTES, begin = t->n_lead + OPEN_BYTES;
    json_t *call = parse_call(t->held.data + begin, n - begin - CLOSE_BYTES);
    t->is_open = 0;
    if (call) {
        json_array_append_new(calls, call);
        t->n_calls++;
        drop(t, n);
    } else {
        *s = to_text(t, n, out);
    }
    return *s >= 0;
}

static int is_blank(const epx_str_t *s) {
    for (size_t i = 0; i < s->n_bytes; i++)
        if (!is_space(s->data[i])) return 0;
    return 1;
}

epx_status_t epx_tool_calls_push(epx_tool_calls_t *t, const char *text, size_t n_bytes, int is_last, epx_str_t *out,
                                 json_t *calls) {
    epx_status_t s = EPX_OK;
    if (n_bytes) EPX_TRY(epx_str_append(&t->held, text, n_bytes));
    if (t->held.n_bytes == 0) return EPX_OK;
    while (t->held.n_bytes > 0 && (t->is_open ? inside(t, out, calls, &s) : outside(t, out, &s))) continue;
    if (s < 0 || !is_last) return s;
    if (t->n_calls > 0 && is_blank(&t->held)) return EPX_OK; /* white space behind the last call */
    return to_text(t, t->held.n_bytes, out);
}

void epx_tool_calls_fini(epx_tool_calls_t *t) { epx_str_fini(&t->held); }
