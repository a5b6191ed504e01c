/* Times: start just before the request is sent; first event with text; from then on, for every event with text, the time since
 * the one before, shared by the tokens that it brought (native API, which says how many) or taken as one token (OpenAI's). */
#include "app/bench_load.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/philox.h"

enum { STARTS_AT_ONCE = 16, PROGRESS_MS = 100, BAR_COLUMNS = 30 };

/* ---- events ---- */

static epx_status_t add_gaps(epx_load_request_t *r, double gap, int64_t n) {
    if (r->n_itl + (size_t)n > r->cap_itl) {
        size_t cap = 2 * r->cap_itl + (size_t)n;
        double *v = realloc(r->itl, cap * sizeof *v);
        if (!v) return epx_fail(EPX_ERR_NOMEM, "no memory for %zu times", cap);
        r->itl = v;
        r->cap_itl = cap;
    }
    for (int64_t i = 0; i < n; i++) r->itl[r->n_itl++] = gap;
    return EPX_OK;
}

static epx_status_t note_text(epx_load_request_t *r, uint64_t now) {
    int native = r->api->kind == EPX_API_NATIVE;
    if (r->first_ns == 0) {
        r->first_ns = now;
    } else {
        int64_t n_new = native ? r->reply.n_tokens - r->n_prev : 1;
        if (n_new <= 0) return EPX_OK; /* the last event repeats the text */
        EPX_TRY(add_gaps(r, (double)(now - r->prev_ns) * 1e-9 / (double)n_new, n_new));
    }
    r->prev_ns = now;
    r->n_prev = r->reply.n_tokens;
    return EPX_OK;
}

static void keep_status(epx_load_t *l, epx_status_t s) {
    if (l->status >= 0) l->status = s;
}

static void on_event(epx_fetch_t *f, const char *data, size_t n_bytes, uint64_t now) {
    epx_load_request_t *r = f->ctx;
    if (r->reply.error[0]) return;
    epx_status_t s = epx_reply_take(&r->reply, r->api->kind, data, n_bytes);
    int native = r->api->kind == EPX_API_NATIVE;
    if (s >= 0 && (native ? r->reply.text.n_bytes > 0 : r->reply.n_new_bytes > 0)) s = note_text(r, now);
    if (s < 0) keep_status(r->load, s);
}

/* An answer in one piece counts as one event. */
static void take_whole(epx_load_request_t *r) {
    epx_fetch_t *f = &r->fetch;
    on_event(f, epx_str_z(&f->text), f->text.n_bytes, f->last_ns);
    r->reply.is_end = 1;
}

static void on_done(epx_fetch_t *f) {
    epx_load_request_t *r = f->ctx;
    epx_load_t *l = r->load;
    if (f->error[0]) snprintf(r->error, sizeof r->error, "%s", f->error);
    else if (f->status != 200) {
        int n = snprintf(r->error, sizeof r->error, "status %d: ", f->status);
        epx_reply_error(f->text.data, f->text.n_bytes, r->error + n, sizeof r->error - (size_t)n);
    } else {
        if (!f->is_stream) take_whole(r);
        if (r->reply.error[0]) snprintf(r->error, sizeof r->error, "%s", r->reply.error);
        else if (!r->reply.is_end) snprintf(r->error, sizeof r->error, "the stream ended before the answer did");
    }
    r->ok = !r->error[0];
    r->ended = 1;
    free(r->body);
    r->body = NULL;
    epx_fetch_fini(f);
    l->n_ended++;
    l->n_live--;
}

/* ---- sending ---- */

static epx_status_t start(epx_load_t *l, size_t i) {
    epx_load_request_t *r = &l->requests[i];
    const epx_bench_prompt_t *p = r->prompt;
    int64_t n = l->max_output && p->n_output > l->max_output ? l->max_output : p->n_output;
    epx_ask_t ask = {.api = l->api,
                     .model = l->model,
                     .text = epx_str_z(&p->text),
                     .n_text = p->text.n_bytes,
                     .ids = p->ids,
                     .n_ids = p->n_prompt,
                     .max_tokens = n,
                     .stream = l->stream,
                     .ignore_eos = l->ignore_eos,
                     .return_logprob = l->return_logprob,
                     .stop = l->stop,
                     .n_stop = l->n_stop,
                     .extra = l->extra};
    EPX_TRY(epx_api_body(&ask, &r->body));
    r->fetch = (epx_fetch_t){
        .url = l->url, .body = r->body, .n_body = strlen(r->body), .on_event = on_event, .on_done = on_done, .ctx = r};
    EPX_TRY(epx_fetch_start(l->fetcher, &r->fetch));
    l->n_live++;
    return EPX_OK;
}

static void show(const epx_load_t *l, uint64_t begin, int last) {
    double s = (double)(epx_now_ns() - begin) * 1e-9;
    int n_full = l->n ? (int)((size_t)BAR_COLUMNS * l->n_ended / l->n) : 0;
    char bar[BAR_COLUMNS + 1];
    for (int i = 0; i < BAR_COLUMNS; i++) bar[i] = i < n_full ? '#' : '.';
    bar[BAR_COLUMNS] = 0;
    fprintf(stderr, "\r%3d%% [%s] %zu/%zu, %zu on their way, %.0f s%s", l->n ? (int)(100 * l->n_ended / l->n) : 0, bar,
            l->n_ended, l->n, l->n_live, s, last ? "\n" : " ");
    fflush(stderr);
}

/* Nanoseconds between two requests of a Poisson process. */
static uint64_t gap_ns(const epx_load_t *l, uint64_t i) {
    double u = ((double)epx_philox_u32(l->seed + 1, i) + 0.5) * 0x1p-32;
    return l->requests_per_s > 0 ? (uint64_t)(-log(u) / l->requests_per_s * 1e9) : 0;
}

static int has_room(const epx_load_t *l) { return l->max_concurrent == 0 || (int64_t)l->n_live < l->max_concurrent; }

static epx_status_t run_all(epx_load_t *l) {
    uint64_t begin = epx_now_ns(), due = begin, shown = 0;
    for (size_t next = 0; l->n_ended < l->n;) {
        for (int k = 0; k < STARTS_AT_ONCE && next < l->n && has_room(l) && due <= epx_now_ns(); k++) {
            due += gap_ns(l, next);
            EPX_TRY(start(l, next++));
        }
        EPX_TRY(epx_fetcher_step(l->fetcher, next < l->n && has_room(l) ? due : epx_now_ns() + PROGRESS_MS * 1000000u));
        EPX_TRY(l->status);
        if (!l->show_progress || (epx_now_ns() - shown) / 1000000u < PROGRESS_MS) continue;
        shown = epx_now_ns();
        show(l, begin, 0);
    }
    if (l->show_progress) show(l, begin, 1);
    return EPX_OK;
}

static epx_status_t prepare(epx_load_t *l, size_t n) {
    epx_load_clear(l);
    l->status = EPX_OK;
    l->requests = calloc(n, sizeof *l->requests);
    if (!l->requests) return epx_fail(EPX_ERR_NOMEM, "no memory for %zu requests", n);
    l->n = n;
    for (size_t i = 0; i < n; i++) {
        l->requests[i].api = l->api;
        l->requests[i].load = l;
        epx_reply_init(&l->requests[i].reply);
    }
    return EPX_OK;
}

epx_status_t epx_load_run(epx_load_t *l, const epx_bench_prompt_t *prompts, size_t n) {
    EPX_TRY(prepare(l, n));
    for (size_t i = 0; i < n; i++) l->requests[i].prompt = &prompts[i];
    return run_all(l);
}

epx_status_t epx_load_warm_up(epx_load_t *l, const epx_bench_prompt_t *prompt, size_t n) {
    EPX_TRY(prepare(l, n));
    for (size_t i = 0; i < n; i++) l->requests[i].prompt = prompt;
    return run_all(l);
}

epx_bench_sample_t epx_load_sample(const epx_load_request_t *r) {
    const epx_fetch_t *f = &r->fetch;
    return (epx_bench_sample_t){.done = r->ok,
                                .start = (double)f->start_ns * 1e-9,
                                .ttft = r->first_ns ? (double)(r->first_ns - f->start_ns) * 1e-9 : -1,
                                .latency = (double)(f->last_ns - f->start_ns) * 1e-9,
                                .n_prompt = r->prompt->n_prompt,
                                .n_output = r->reply.n_tokens >= 0 ? r->reply.n_tokens : r->prompt->n_output,
                                .n_retokens = -1,
                                .itl = r->itl,
                                .n_itl = r->n_itl};
}

void epx_load_clear(epx_load_t *l) {
    for (size_t i = 0; i < l->n; i++) {
        free(l->requests[i].itl);
        free(l->requests[i].body);
        epx_str_fini(&l->requests[i].reply.text);
        epx_fetch_fini(&l->requests[i].fetch);
    }
    free(l->requests);
    l->requests = NULL;
    l->n = l->n_ended = l->n_live = 0;
}
