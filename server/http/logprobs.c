/* See logprobs.h. */
#include "server/http/logprobs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/http/openai_write.h"

static size_t count_chars(const char *s, size_t n) {
    size_t k = 0;
    for (size_t i = 0; i < n; i++) k += ((unsigned char)s[i] & 0xc0) != 0x80;
    return k;
}

static epx_status_t make_room(epx_logprobs_t *l) {
    if (l->n == l->cap) {
        size_t cap = l->cap ? 2 * l->cap : 16;
        epx_logprob_entry_t *grown = realloc(l->v, cap * sizeof *grown);
        if (!grown) return epx_fail(EPX_ERR_NOMEM, "no memory for logprobs");
        l->v = grown;
        l->cap = cap;
    }
    return EPX_OK;
}

epx_status_t epx_logprobs_add_prompt(epx_logprobs_t *l, epx_token_news_t *news, const char *bytes, size_t n_bytes) {
    EPX_TRY(make_room(l));
    l->v[l->n++] = (epx_logprob_entry_t){*news, l->n_bytes, l->n_bytes, l->n_chars}; /* its text is out */
    news->top = NULL;
    news->n_top = 0;
    l->n_chars += count_chars(bytes, n_bytes);
    return EPX_OK;
}

epx_status_t epx_logprobs_add(epx_logprobs_t *l, epx_token_news_t *news, const char *bytes, size_t n_bytes) {
    EPX_TRY(make_room(l));
    l->v[l->n++] = (epx_logprob_entry_t){*news, l->n_bytes, l->n_bytes + n_bytes, l->n_chars};
    news->top = NULL;
    news->n_top = 0;
    l->n_bytes += n_bytes;
    l->n_chars += count_chars(bytes, n_bytes);
    return EPX_OK;
}

/* ---- chat ---- */

static const char *bytes_of(const epx_tokenizer_t *tok, int32_t id, size_t *out_n) {
    const char *b = epx_tokenizer_token_bytes(tok, id, out_n);
    if (!b) *out_n = 0;
    return b ? b : "";
}

static json_t *chat_token(const epx_tokenizer_t *tok, int32_t id, float logprob) {
    json_t *o = json_object(), *list = json_array();
    size_t n;
    const char *b = bytes_of(tok, id, &n);
    json_object_set_new(o, "token", epx_api_text(b, n));
    json_object_set_new(o, "logprob", json_real((double)logprob));
    for (size_t i = 0; i < n; i++) json_array_append_new(list, json_integer((unsigned char)b[i]));
    json_object_set_new(o, "bytes", list);
    return o;
}

static json_t *chat_form(const epx_logprob_entry_t *v, size_t n, const epx_tokenizer_t *tok) {
    json_t *root = json_object(), *content = json_array();
    for (size_t i = 0; i < n; i++) {
        json_t *o = chat_token(tok, v[i].token.token, v[i].token.logprob), *top = json_array();
        for (int32_t k = 0; k < v[i].token.n_top; k++)
            json_array_append_new(top, chat_token(tok, v[i].token.top[k].token, v[i].token.top[k].logprob));
        json_object_set_new(o, "top_logprobs", top);
        json_array_append_new(content, o);
    }
    json_object_set_new(root, "content", content);
    json_object_set_new(root, "refusal", json_null());
    return root;
}

/* ---- completions: tokens are member names, so parts of characters are written as "bytes:\xe2\x80" as OpenAI does ---- */

static json_t *legacy_text(const epx_tokenizer_t *tok, int32_t id) {
    epx_str_t out = {0};
    size_t n;
    const char *b = bytes_of(tok, id, &n);
    json_t *v = NULL;
    if (epx_utf8_valid(b, n, NULL)) return epx_api_text(b, n);
    epx_status_t s = epx_str_append_z(&out, "bytes:");
    for (size_t i = 0; i < n && s >= 0; i++) s = epx_str_printf(&out, "\\x%02x", (unsigned char)b[i]);
    if (s >= 0) v = json_string(epx_str_z(&out));
    epx_str_fini(&out);
    return v;
}

static void add_legacy(json_t *o, const epx_tokenizer_t *tok, int32_t id, float logprob) {
    json_t *name = legacy_text(tok, id);
    if (name && !json_object_get(o, json_string_value(name)))
        json_object_set_new(o, json_string_value(name), json_real((double)logprob));
    json_decref(name);
}

/* The token itself is always among them, as the last when it is not one of the most probable. */
static json_t *legacy_top(const epx_logprob_entry_t *e, const epx_tokenizer_t *tok) {
    json_t *o = json_object();
    for (int32_t k = 0; k < e->token.n_top; k++) add_legacy(o, tok, e->token.top[k].token, e->token.top[k].logprob);
    if (e->token.n_top > 0) add_legacy(o, tok, e->token.token, e->token.logprob);
    return o;
}

static json_t *legacy_form(const epx_logprob_entry_t *v, size_t n, const epx_tokenizer_t *tok) {
    json_t *root = json_object(), *tokens = json_array(), *values = json_array(), *top = json_array(), *offs = json_array();
    for (size_t i = 0; i < n; i++) {
        json_array_append_new(tokens, legacy_text(tok, v[i].token.token));
        int none = isnan(v[i].token.logprob);
        json_array_append_new(values, none ? json_null() : json_real((double)v[i].token.logprob));
        json_array_append_new(top, none ? json_null() : legacy_top(&v[i], tok));
        json_array_append_new(offs, json_integer((json_int_t)v[i].char_off));
    }
    json_object_set_new(root, "tokens", tokens);
    json_object_set_new(root, "token_logprobs", values);
    json_object_set_new(root, "top_logprobs", top);
    json_object_set_new(root, "text_offset", offs);
    return root;
}

/* Entries whose text is out; behind a stop string an entry counts when some of its text is out. */
static size_t n_ready(const epx_logprobs_t *l, const epx_text_stream_t *s) {
    size_t n = 0;
    while (n < l->n && (l->v[n].end <= s->n_out || (s->stopped && l->v[n].begin < s->n_out))) n++;
    return n;
}

json_t *epx_logprobs_take(epx_logprobs_t *l, const epx_tokenizer_t *tok, int is_chat, const epx_text_stream_t *stream) {
    size_t n = n_ready(l, stream);
    if (n == 0) return NULL;
    json_t *root = is_chat ? chat_form(l->v, n, tok) : legacy_form(l->v, n, tok);
    for (size_t i = 0; i < n; i++) free(l->v[i].token.top);
    l->n -= n;
    memmove(l->v, l->v + n, l->n * sizeof *l->v);
    return root;
}

void epx_logprobs_fini(epx_logprobs_t *l) {
    for (size_t i = 0; i < l->n; i++) free(l->v[i].token.top);
    free(l->v);
    memset(l, 0, sizeof *l);
}
