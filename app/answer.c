/* One request of the command line. The reader thread leaves tokens in a queue; the caller's thread decodes and writes them. */
#include "app/answer.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int32_t *tokens; /* [cap], written by the reader thread */
    int32_t n_tokens, cap;
    epx_finish_t finish;
    char error[512];
    uint64_t first_ns, last_ns;
} inbox_t;

static void take_event(void *ctx, const epx_event_t *ev) {
    inbox_t *in = ctx;
    pthread_mutex_lock(&in->lock);
    if (ev->token >= 0 && in->n_tokens < in->cap) {
        in->tokens[in->n_tokens++] = ev->token;
        in->last_ns = epx_now_ns();
        if (in->n_tokens == 1) in->first_ns = in->last_ns;
    }
    if (ev->finish != EPX_FINISH_NONE) {
        in->finish = ev->finish;
        snprintf(in->error, sizeof in->error, "%s", ev->error ? ev->error : "");
    }
    pthread_cond_signal(&in->changed);
    pthread_mutex_unlock(&in->lock);
}

static epx_status_t render_chat(const epx_session_t *s, const char *text, epx_str_t *out) {
    json_t *messages;
    epx_status_t st;
    if (s->chat_template == NULL) return epx_fail(EPX_ERR_NOT_FOUND, "it needs a chat template: %s", s->template_error);
    messages = json_pack("[{s:s, s:s}]", "role", "user", "content", text);
    if (messages == NULL) return epx_fail(EPX_ERR_ARG, "the text is not valid UTF-8");
    st = epx_chat_template_render(s->chat_template, messages, 1, NULL, out);
    json_decref(messages);
    return st;
}

epx_status_t epx_answer_encode(const epx_session_t *s, const char *text, int as_chat, int32_t **out_ids, int32_t *out_n) {
    epx_str_t full = {0};
    size_t n = 0;
    epx_status_t st = as_chat ? render_chat(s, text, &full) : epx_str_append_z(&full, text);
    if (st >= 0) st = epx_tokenizer_encode(s->tokenizer, epx_str_z(&full), full.n_bytes, out_ids, &n);
    epx_str_fini(&full);
    if (st < 0) return epx_fail_context(st, as_chat ? "--chat" : "--prompt");
    if (n == 0) return epx_fail(EPX_ERR_ARG, "the prompt is empty: it has no token");
    if (n > INT32_MAX) return epx_fail(EPX_ERR_CAPACITY, "the prompt has %zu tokens", n);
    *out_n = (int32_t)n;
    return EPX_OK;
}

/* Write what is complete of `text`, or all of it at the end. */
static epx_status_t write_text(epx_str_t *text, int at_end, FILE *out) {
    size_t n = at_end ? text->n_bytes : epx_utf8_complete_prefix(epx_str_z(text), text->n_bytes);
    epx_str_t valid = {0};
    epx_status_t s;
    if (n == 0) return EPX_OK;
    s = epx_utf8_append_lossy(&valid, text->data, n);
    if (s >= 0 && (fwrite(valid.data, 1, valid.n_bytes, out) != valid.n_bytes || fflush(out) != 0))
        s = epx_fail_errno(EPX_ERR_IO, errno, "writing the answer");
    memmove(text->data, text->data + n, text->n_bytes - n);
    text->n_bytes -= n;
    epx_str_fini(&valid);
    return s;
}

static int is_end_token(const epx_session_t *s, int32_t token) {
    const epx_rank_info_t *info = &s->status.info;
    for (int i = 0; i < info->n_eos; i++)
        if (info->eos_ids[i] == token) return 1;
    return 0;
}

/* Wait for tokens beyond `n_seen` or the end; returns how many there are. */
static int32_t wait_more(inbox_t *in, int32_t n_seen, epx_finish_t *out_finish) {
    int32_t n;
    pthread_mutex_lock(&in->lock);
    while (in->n_tokens == n_seen && in->finish == EPX_FINISH_NONE) pthread_cond_wait(&in->changed, &in->lock);
    n = in->n_tokens;
    *out_finish = in->finish;
    pthread_mutex_unlock(&in->lock);
    return n;
}

/* A vocabulary of the model larger than the tokenizer's has ids without a text; they add nothing. */
static epx_status_t append_tokens(const epx_session_t *s, const int32_t *ids, int32_t n, epx_str_t *text) {
    for (int32_t i = 0; i < n; i++) {
        size_t n_bytes = 0;
        const char *bytes = epx_tokenizer_token_bytes(s->tokenizer, ids[i], &n_bytes);
        if (bytes && !epx_tokenizer_is_special(s->tokenizer, ids[i])) EPX_TRY(epx_str_append(text, bytes, n_bytes));
    }
    return EPX_OK;
}

/* Until the request has ended. Tokens below n_tokens are not written again, so they are read without the lock. */
static epx_status_t stream(const epx_session_t *s, inbox_t *in, FILE *out) {
    epx_finish_t finish = EPX_FINISH_NONE;
    epx_str_t text = {0};
    epx_status_t st = EPX_OK;
    int32_t seen = 0;
    while (finish == EPX_FINISH_NONE) {
        int32_t n = wait_more(in, seen, &finish);
        int hide_last = finish == EPX_FINISH_STOP && n > 0 && is_end_token(s, in->tokens[n - 1]);
        if (st >= 0) st = append_tokens(s, in->tokens + seen, n - seen - (n > seen && hide_last), &text);
        if (st >= 0) st = write_text(&text, finish != EPX_FINISH_NONE, out);
        seen = n;
        if (st < 0) break;
    }
    epx_str_fini(&text);
    return st;
}

static epx_status_t run_with(epx_session_t *s, const epx_request_t *req, inbox_t *in, FILE *out, epx_answer_t *out_answer) {
    epx_sink_t sink = {take_event, NULL, in};
    uint64_t id, t0 = epx_now_ns();
    epx_status_t st;
    epx_session_set_sink(s, &sink);
    st = epx_cluster_submit(s->cluster, req, -1, &id);
    if (st >= 0) st = stream(s, in, out);
    epx_session_set_sink(s, NULL);
    if (st < 0) return st;
    if (in->finish == EPX_FINISH_ERROR) {
        char why[1024];
        return epx_fail(epx_session_failed(s, why, sizeof why) ? EPX_ERR_PEER : EPX_ERR_ARG, "%s", in->error);
    }
    *out_answer = (epx_answer_t){.n_prompt = req->n_prompt, .n_generated = in->n_tokens, .finish = in->finish};
    if (in->n_tokens) {
        out_answer->prefill_s = (double)(in->first_ns - t0) * 1e-9;
        out_answer->decode_s = (double)(in->last_ns - in->first_ns) * 1e-9;
    }
    return EPX_OK;
}

epx_status_t epx_answer_run(epx_session_t *s, const int32_t *prompt, int32_t n_prompt, int32_t max_tokens,
                            const epx_sampling_t *sampling, FILE *out, epx_answer_t *out_answer) {
    int32_t room = s->status.info.max_context - n_prompt;
    epx_request_t req = {
        .prompt = prompt, .n_prompt = n_prompt, .max_new_tokens = max_tokens ? max_tokens : room, .sampling = *sampling};
    inbox_t in = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER, .cap = req.max_new_tokens};
    epx_status_t st;
    if (room < 1)
        return epx_fail(EPX_ERR_ARG, "the prompt has %d tokens, which leaves no room for an answer in a context of %d tokens",
                        n_prompt, s->status.info.max_context);
    if (req.max_new_tokens > room)
        return epx_fail(EPX_ERR_ARG, "the prompt has %d tokens and --max-tokens is %d; together at most %d (context length)",
                        n_prompt, max_tokens, s->status.info.max_context);
    in.tokens = calloc((size_t)in.cap, sizeof *in.tokens);
    if (in.tokens == NULL) return epx_fail(EPX_ERR_NOMEM, "room for %d tokens", in.cap);
    st = run_with(s, &req, &in, out, out_answer);
    free(in.tokens);
    return st;
}
