/* Life of calls, the table of choices by cluster id, events in and wake-ups out. The event sink runs on the cluster's reader
 * thread and only takes h->lock for a few steps; everything else runs on the MHD thread of the connection. */
#include "server/http/call.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"

/* ---- life ---- */

static epx_status_t init_choices(epx_call_t *c, const epx_api_request_t *each) {
    c->n_choices = (c->req.is_chat ? 1 : c->req.n_prompts) * c->req.n;
    c->choices = calloc((size_t)c->n_choices, sizeof *c->choices);
    if (!c->choices) return EPX_ERR_NOMEM;
    for (int i = 0; i < c->n_choices; i++) {
        epx_choice_t *ch = &c->choices[i];
        ch->call = c;
        ch->idx = i;
        ch->req = each ? &each[i / c->req.n] : &c->req;
        EPX_TRY(epx_text_stream_init(&ch->stream, (const char *const *)ch->req->stop, ch->req->stop_bytes, ch->req->n_stop));
    }
    return EPX_OK;
}

static void free_call(epx_call_t *c) {
    for (int i = 0; c->choices && i < c->n_choices; i++) {
        epx_tokens_free(c->choices[i].tokens, c->choices[i].n_tokens);
        epx_logprobs_fini(&c->choices[i].logprobs);
        epx_tool_calls_fini(&c->choices[i].tool_calls);
        json_decref(c->choices[i].calls);
        epx_str_fini(&c->choices[i].text);
        epx_text_stream_fini(&c->choices[i].stream);
    }
    free(c->choices);
    epx_str_fini(&c->out);
    epx_api_request_fini(&c->req);
    if (c->own) c->format->free_own(c->own);
    free(c);
}

epx_call_t *epx_call_create(epx_http_t *h, struct MHD_Connection *conn, epx_api_request_t *req, const epx_call_extra_t *extra) {
    epx_call_t *c = calloc(1, sizeof *c);
    if (!c) {
        epx_api_request_fini(req);
        if (extra->own) extra->format->free_own(extra->own);
        return NULL;
    }
    c->http = h;
    c->format = extra->format;
    c->own = extra->own;
    c->dp_rank = extra->dp_rank_plus_1 - 1;
    c->started_ns = epx_now_ns();
    c->deadline_ns = extra->timeout_ns ? c->started_ns + extra->timeout_ns : 0;
    c->conn = conn;
    c->fd = MHD_get_connection_info(conn, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
    c->refs = 1;
    c->req = *req;
    c->quiet_since_ns = epx_now_ns();
    memset(req, 0, sizeof *req);
    if (init_choices(c, extra->each) < 0) {
        free_call(c);
        return NULL;
    }
    pthread_mutex_lock(&h->lock);
    uint64_t number = h->next_call++;
    c->next = h->calls;
    if (c->next) c->next->prev = c;
    h->calls = c;
    pthread_mutex_unlock(&h->lock);
    snprintf(c->id, sizeof c->id, "%s-%08llx%08llx", c->req.is_chat ? "chatcmpl" : "cmpl",
             (unsigned long long)(h->started_s & 0xffffffff), (unsigned long long)number);
    c->head = (epx_api_head_t){.is_chat = c->req.is_chat,
                               .include_usage = c->req.stream && c->req.include_usage,
                               .id = c->id,
                               .model = h->model_name,
                               .created = (int64_t)time(NULL)};
    return c;
}

void epx_call_ref(epx_call_t *c) {
    pthread_mutex_lock(&c->http->lock);
    c->refs++;
    pthread_mutex_unlock(&c->http->lock);
}

void epx_call_unref(epx_call_t *c) {
    epx_http_t *h = c->http;
    pthread_mutex_lock(&h->lock);
    int last = --c->refs == 0;
    pthread_mutex_unlock(&h->lock);
    if (last) free_call(c);
}

void epx_call_detach(epx_call_t *c) {
    epx_http_t *h = c->http;
    pthread_mutex_lock(&h->lock);
    if (c->prev) c->prev->next = c->next;
    else h->calls = c->next;
    if (c->next) c->next->prev = c->prev;
    c->conn = NULL;
    c->suspended = 0;
    pthread_cond_broadcast(&h->changed);
    pthread_mutex_unlock(&h->lock);
    epx_call_cancel(c);
}

void epx_call_cancel(epx_call_t *c) {
    for (int i = 0; i < c->n_choices; i++) {
        epx_choice_t *ch = &c->choices[i];
        pthread_mutex_lock(&c->http->lock);
        int runs = ch->id != 0 && ch->finish == EPX_FINISH_NONE && !ch->cancel_sent;
        ch->cancel_sent |= runs;
        ch->closed = 1;
        pthread_mutex_unlock(&c->http->lock);
        if (runs) epx_cluster_cancel(c->http->cluster, ch->id);
    }
}

enum { ABORT_BATCH = 64 };

/* Mark up to ABORT_BATCH choices that run and go by this name. h->lock held. */
static int mark_aborted(epx_http_t *h, const char *rid, uint64_t *out_ids) {
    int n = 0;
    for (epx_call_t *c = h->calls; c; c = c->next)
        for (int i = 0; i < c->n_choices && n < ABORT_BATCH; i++) {
            epx_choice_t *ch = &c->choices[i];
            int is_it = !rid || strcmp(rid, ch->rid ? ch->rid : c->id) == 0;
            if (!is_it || ch->id == 0 || ch->finish != EPX_FINISH_NONE || ch->cancel_sent) continue;
            ch->aborted = ch->cancel_sent = 1;
            out_ids[n++] = ch->id;
        }
    return n;
}

int epx_call_abort(epx_http_t *h, const char *rid) {
    uint64_t ids[ABORT_BATCH];
    int n, all = 0;
    do {
        pthread_mutex_lock(&h->lock);
        n = mark_aborted(h, rid, ids);
        pthread_mutex_unlock(&h->lock);
        for (int i = 0; i < n; i++) epx_cluster_cancel(h->cluster, ids[i]);
        all += n;
    } while (n == ABORT_BATCH);
    return all;
}

/* ---- suspend and wake ---- */

/* Is there something that the connection's thread would act on? An answer without stop strings is wanted only when it is whole.
 */
static int has_news(const epx_call_t *c) {
    int n_ended = 0, n_open = 0, n_news = 0, n_stop = 0;
    for (int i = 0; i < c->n_choices; i++) {
        const epx_choice_t *ch = &c->choices[i];
        if (ch->closed) continue;
        n_open++;
        n_stop += ch->req->n_stop;
        n_news += ch->n_tokens >= (ch->n_taken && c->req.stream ? (size_t)c->http->cfg.stream_interval : 1) ||
                  ch->finish != EPX_FINISH_NONE;
        n_ended += ch->finish != EPX_FINISH_NONE;
        if (ch->finish == EPX_FINISH_ERROR || ch->finish == EPX_FINISH_CANCELLED) return 1;
    }
    return c->req.stream || n_stop ? n_news > 0 : n_ended == n_open;
}

void epx_call_wake_locked(epx_call_t *c) {
    if (!c->suspended) return;
    c->suspended = 0;
    MHD_resume_connection(c->conn);
}

int epx_call_suspend(epx_call_t *c) {
    epx_http_t *h = c->http;
    pthread_mutex_lock(&h->lock);
    int wait = !c->gone && !c->tick && !h->stopping && !has_news(c);
    if (wait) {
        if (c->wrote) c->quiet_since_ns = epx_now_ns();
        c->wrote = 0;
        c->suspended = 1;
        MHD_suspend_connection(c->conn);
    }
    pthread_mutex_unlock(&h->lock);
    return wait;
}

/* ---- events ---- */

void epx_tokens_free(epx_token_news_t *tokens, size_t n) {
    for (size_t i = 0; i < n; i++) free(tokens[i].top);
    free(tokens);
}

static void no_room(epx_choice_t *ch) {
    ch->finish = EPX_FINISH_ERROR;
    snprintf(ch->error, sizeof ch->error, "out of memory for the answer");
}

static void add_token(epx_choice_t *ch, const epx_event_t *ev) {
    epx_token_news_t news = {.token = ev->token, .logprob = ev->logprob, .n_top = ev->n_top, .is_prompt = ev->prompt_idx > 0};
    if (ch->n_tokens == ch->cap_tokens) {
        size_t cap = ch->cap_tokens ? 2 * ch->cap_tokens : 16;
        epx_token_news_t *grown = realloc(ch->tokens, cap * sizeof *grown);
        if (!grown) {
            no_room(ch);
            return;
        }
        ch->tokens = grown;
        ch->cap_tokens = cap;
    }
    if (ev->n_top > 0) {
        news.top = malloc((size_t)ev->n_top * sizeof *news.top);
        if (!news.top) {
            no_room(ch);
            return;
        }
        memcpy(news.top, ev->top, (size_t)ev->n_top * sizeof *news.top);
    }
    ch->tokens[ch->n_tokens++] = news;
}

/* h->lock held. Returns 1 when the choice ended and its reference must be given back. */
static int deliver(epx_choice_t *ch, const epx_event_t *ev) {
    epx_http_t *h = ch->call->http;
    if (ev->prompt_idx == 0) epx_metrics_on_event(&h->metrics, ev, ch->stopped, ch->start_ns, &ch->last_ns);
    ch->n_cached = ev->n_cached;
    if (ch->finish == EPX_FINISH_NONE && !ch->closed && ev->token >= 0) add_token(ch, ev);
    if (ev->finish != EPX_FINISH_NONE) {
        epx_choice_t **at = &h->table[ch->id % EPX_HTTP_N_BUCKETS];
        while (*at != ch) at = &(*at)->next_in_table;
        *at = ch->next_in_table;
        h->n_live--;
        pthread_cond_broadcast(&h->changed);
        if (ch->finish == EPX_FINISH_NONE) {
            ch->finish = ev->finish;
            ch->end_token = ev->finish == EPX_FINISH_STOP && ev->token >= 0 && !ev->token_is_text;
            snprintf(ch->error, sizeof ch->error, "%s", ev->error ? ev->error : "");
        }
    }
    if (has_news(ch->call)) epx_call_wake_locked(ch->call);
    return ev->finish != EPX_FINISH_NONE;
}

static void keep_early(epx_http_t *h, const epx_event_t *ev) {
    epx_http_early_t *e = calloc(1, sizeof *e), **at = &h->early;
    if (!e) return;
    e->ev = *ev;
    snprintf(e->error, sizeof e->error, "%s", ev->error ? ev->error : "");
    e->ev.error = e->error;
    if (ev->n_top > 0) memcpy(e->top, ev->top, (size_t)ev->n_top * sizeof *e->top);
    e->ev.top = e->top;
    while (*at) at = &(*at)->next;
    *at = e;
}

void epx_call_on_event(epx_http_t *h, const epx_event_t *ev) {
    int ended = 0;
    pthread_mutex_lock(&h->lock);
    epx_choice_t *ch = h->table[ev->id % EPX_HTTP_N_BUCKETS];
    while (ch && ch->id != ev->id) ch = ch->next_in_table;
    if (ch) ended = deliver(ch, ev);
    else if (h->n_submitting > 0) keep_early(h, ev);
    pthread_mutex_unlock(&h->lock);
    if (ended) epx_call_unref(ch->call);
}

/* h->lock held. */
static int deliver_early(epx_choice_t *ch) {
    epx_http_early_t **at = &ch->call->http->early;
    int ended = 0;
    while (*at) {
        epx_http_early_t *e = *at;
        if (e->ev.id != ch->id) {
            at = &e->next;
            continue;
        }
        ended |= deliver(ch, &e->ev);
        *at = e->next;
        free(e);
    }
    return ended;
}

/* h->lock held. */
static void drop_early(epx_http_t *h) {
    while (h->early) {
        epx_http_early_t *e = h->early;
        h->early = e->next;
        free(e);
    }
}

epx_status_t epx_call_submit_choice(epx_choice_t *ch, const epx_request_t *req) {
    epx_http_t *h = ch->call->http;
    uint64_t id = 0, now = epx_now_ns();
    int ended = 0;
    pthread_mutex_lock(&h->lock);
    h->n_submitting++;
    pthread_mutex_unlock(&h->lock);
    epx_status_t s = epx_cluster_submit(h->cluster, req, ch->call->dp_rank, &id);
    pthread_mutex_lock(&h->lock);
    if (s >= 0) {
        ch->id = id;
        ch->start_ns = now;
        ch->next_in_table = h->table[id % EPX_HTTP_N_BUCKETS];
        h->table[id % EPX_HTTP_N_BUCKETS] = ch;
        ch->call->refs++;
        ended = deliver_early(ch);
    }
    if (--h->n_submitting == 0) drop_early(h);
    pthread_mutex_unlock(&h->lock);
    if (ended) epx_call_unref(ch->call);
    return s;
}
