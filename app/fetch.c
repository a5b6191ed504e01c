/* libcurl's multi interface driven by epoll, so that thousands of streams cost what they receive. */
#include "app/fetch.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <curl/curl.h>

#include "base/clock.h"

enum { N_EVENTS = 256, MAX_WAIT_MS = 1000, MAX_TEXT_BYTES = 64 << 20, MAX_SECONDS = 6 * 3600 };
static const uint64_t ms_ns = 1000000u;

struct epx_fetcher {
    CURLM *multi;
    struct curl_slist *headers;
    int epoll_fd, n_live;
    uint64_t timer_ns; /* when curl wants to be called; UINT64_MAX: not */
};

/* ---- what curl asks for ---- */

static int on_socket(CURL *easy, curl_socket_t fd, int what, void *fetcher, void *known) {
    epx_fetcher_t *f = fetcher;
    struct epoll_event ev = {.events = (what & CURL_POLL_IN ? EPOLLIN : 0) | (what & CURL_POLL_OUT ? EPOLLOUT : 0),
                             .data.fd = fd};
    (void)easy;
    if (what == CURL_POLL_REMOVE) {
        (void)epoll_ctl(f->epoll_fd, EPOLL_CTL_DEL, fd, NULL); /* it may be closed already */
        return 0;
    }
    if (epoll_ctl(f->epoll_fd, known ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &ev) != 0) return -1;
    curl_multi_assign(f->multi, fd, f);
    return 0;
}

static int on_timer(CURLM *multi, long ms, void *fetcher) {
    epx_fetcher_t *f = fetcher;
    (void)multi;
    f->timer_ns = ms < 0 ? UINT64_MAX : epx_now_ns() + (uint64_t)ms * ms_ns;
    return 0;
}

/* ---- answers ---- */

static int is_event_stream(CURL *easy) {
    const char *type = NULL;
    curl_easy_getinfo(easy, CURLINFO_CONTENT_TYPE, &type);
    return type && strncmp(type, "text/event-stream", 17) == 0;
}

static void take_line(epx_fetch_t *r, const char *line, size_t n, uint64_t now) {
    while (n && (line[n - 1] == '\r' || line[n - 1] == ' ')) n--;
    if (n < 5 || memcmp(line, "data:", 5) != 0) return; /* blank, a comment, or a field that nobody uses here */
    line += 5, n -= 5;
    if (n && *line == ' ') line++, n--;
    r->last_ns = now;
    r->on_event(r, line, n, now);
}

/* Every data: line is an event: none of the servers breaks one over several lines. */
static int take_events(epx_fetch_t *r, const char *data, size_t n, uint64_t now) {
    while (n) {
        const char *end = memchr(data, '\n', n);
        size_t k = end ? (size_t)(end - data) : n;
        if (!end || r->line.n_bytes) {
            if (r->line.n_bytes + k > MAX_TEXT_BYTES || epx_str_append(&r->line, data, k) < 0) return -1;
        }
        if (!end) return 0;
        if (r->line.n_bytes) take_line(r, r->line.data, r->line.n_bytes, now);
        else take_line(r, data, k, now);
        epx_str_clear(&r->line);
        data += k + 1, n -= k + 1;
    }
    return 0;
}

static size_t on_data(char *data, size_t one, size_t n, void *fetch) {
    epx_fetch_t *r = fetch;
    uint64_t now = epx_now_ns();
    (void)one;
    if (!r->status) {
        long status = 0;
        curl_easy_getinfo(r->handle, CURLINFO_RESPONSE_CODE, &status);
        r->status = (int)status;
        r->is_stream = r->on_event && r->status == 200 && is_event_stream(r->handle);
    }
    if (r->is_stream) return take_events(r, data, n, now) < 0 ? 0 : n;
    return r->text.n_bytes + n > MAX_TEXT_BYTES || epx_str_append(&r->text, data, n) < 0 ? 0 : n;
}

static void finish(epx_fetcher_t *f, CURLMsg *m) {
    epx_fetch_t *r = NULL;
    CURL *easy = m->easy_handle;
    CURLcode rc = m->data.result;
    long status = 0;
    curl_easy_getinfo(easy, CURLINFO_PRIVATE, &r);
    curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &status);
    r->status = (int)status;
    if (rc != CURLE_OK) snprintf(r->error, sizeof r->error, "%s", curl_easy_strerror(rc));
    if (!r->is_stream) r->last_ns = epx_now_ns();
    curl_multi_remove_handle(f->multi, easy);
    curl_easy_cleanup(easy);
    r->handle = NULL;
    epx_str_fini(&r->line);
    f->n_live--;
    if (r->on_done) r->on_done(r);
}

static void take_finished(epx_fetcher_t *f) {
    int left;
    for (CURLMsg *m; (m = curl_multi_info_read(f->multi, &left)) != NULL;)
        if (m->msg == CURLMSG_DONE) finish(f, m);
}

/* ---- requests ---- */

static epx_status_t add_header(struct curl_slist **list, const char *text) {
    struct curl_slist *longer = curl_slist_append(*list, text);
    if (!longer) return epx_fail(EPX_ERR_NOMEM, "no memory for a header");
    *list = longer;
    return EPX_OK;
}

static epx_status_t set_headers(epx_fetcher_t *f) {
    const char *key = getenv("OPENAI_API_KEY");
    epx_str_t line = {0};
    if (!key || !*key) key = getenv("EPX_API_KEY");
    EPX_TRY(add_header(&f->headers, "Content-Type: application/json"));
    EPX_TRY(add_header(&f->headers, "Expect:")); /* no round before the body */
    if (!key || !*key) return EPX_OK;
    epx_status_t s = epx_str_printf(&line, "Authorization: Bearer %s", key);
    if (s >= 0) s = add_header(&f->headers, line.data);
    epx_str_fini(&line);
    return s;
}

static void raise_file_limit(void) {
    struct rlimit r;
    if (getrlimit(RLIMIT_NOFILE, &r) != 0) return;
    r.rlim_cur = r.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &r);
}

epx_status_t epx_fetcher_create(int max_connections, epx_fetcher_t **out_f) {
    epx_fetcher_t *f = calloc(1, sizeof *f);
    if (!f) return epx_fail(EPX_ERR_NOMEM, "no memory for the HTTP client");
    raise_file_limit();
    f->timer_ns = UINT64_MAX;
    f->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    epx_status_t s = f->epoll_fd < 0 ? epx_fail_errno(EPX_ERR_OS, errno, "epoll_create1") : EPX_OK;
    f->multi = curl_global_init(CURL_GLOBAL_DEFAULT) == CURLE_OK ? curl_multi_init() : NULL;
    if (s >= 0 && !f->multi) s = epx_fail(EPX_ERR_NOMEM, "libcurl cannot start");
    if (s >= 0) s = set_headers(f);
    if (s < 0) {
        epx_fetcher_destroy(f);
        return s;
    }
    curl_multi_setopt(f->multi, CURLMOPT_SOCKETFUNCTION, on_socket);
    curl_multi_setopt(f->multi, CURLMOPT_SOCKETDATA, f);
    curl_multi_setopt(f->multi, CURLMOPT_TIMERFUNCTION, on_timer);
    curl_multi_setopt(f->multi, CURLMOPT_TIMERDATA, f);
    curl_multi_setopt(f->multi, CURLMOPT_MAXCONNECTS, (long)max_connections);
    curl_multi_setopt(f->multi, CURLMOPT_PIPELINING, (long)CURLPIPE_NOTHING);
    *out_f = f;
    return EPX_OK;
}

void epx_fetcher_destroy(epx_fetcher_t *f) {
    if (!f) return;
    if (f->multi) curl_multi_cleanup(f->multi);
    curl_slist_free_all(f->headers);
    if (f->epoll_fd >= 0) close(f->epoll_fd);
    curl_global_cleanup();
    free(f);
}

static CURL *make_handle(epx_fetcher_t *f, epx_fetch_t *r) {
    CURL *e = curl_easy_init();
    if (!e) return NULL;
    curl_easy_setopt(e, CURLOPT_URL, r->url);
    curl_easy_setopt(e, CURLOPT_HTTPHEADER, f->headers);
    curl_easy_setopt(e, CURLOPT_WRITEFUNCTION, on_data);
    curl_easy_setopt(e, CURLOPT_WRITEDATA, r);
    curl_easy_setopt(e, CURLOPT_PRIVATE, r);
    curl_easy_setopt(e, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(e, CURLOPT_PROXY, ""); /* whatever the environment says: a proxy would be measured too */
    curl_easy_setopt(e, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(e, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    curl_easy_setopt(e, CURLOPT_BUFFERSIZE, 65536L);
    curl_easy_setopt(e, CURLOPT_TIMEOUT, (long)MAX_SECONDS);
    if (r->body) {
        curl_easy_setopt(e, CURLOPT_POSTFIELDS, r->body);
        curl_easy_setopt(e, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)r->n_body);
    }
    return e;
}

epx_status_t epx_fetch_start(epx_fetcher_t *f, epx_fetch_t *r) {
    r->status = r->is_stream = 0;
    r->error[0] = 0;
    r->owner = f;
    epx_str_clear(&r->text);
    CURL *e = make_handle(f, r);
    if (!e) return epx_fail(EPX_ERR_NOMEM, "%s: no memory for a request", r->url);
    r->handle = e;
    r->start_ns = r->last_ns = epx_now_ns();
    CURLMcode rc = curl_multi_add_handle(f->multi, e);
    if (rc != CURLM_OK) {
        curl_easy_cleanup(e);
        r->handle = NULL;
        return epx_fail(EPX_ERR_OS, "%s: %s", r->url, curl_multi_strerror(rc));
    }
    f->n_live++;
    return EPX_OK;
}

/* Rounded up: waking before the time would spin. */
static int wait_ms(const epx_fetcher_t *f, uint64_t now, uint64_t until) {
    uint64_t at = f->timer_ns < until ? f->timer_ns : until;
    if (at <= now) return 0;
    uint64_t ms = (at - now + ms_ns - 1) / ms_ns;
    return ms > MAX_WAIT_MS ? MAX_WAIT_MS : (int)ms;
}

epx_status_t epx_fetcher_step(epx_fetcher_t *f, uint64_t until_ns) {
    struct epoll_event ev[N_EVENTS];
    int running, n = epoll_wait(f->epoll_fd, ev, N_EVENTS, wait_ms(f, epx_now_ns(), until_ns));
    if (n < 0 && errno != EINTR) return epx_fail_errno(EPX_ERR_OS, errno, "epoll_wait");
    CURLMcode rc = CURLM_OK;
    for (int i = 0; i < n && rc == CURLM_OK; i++) {
        int what = (ev[i].events & EPOLLIN ? CURL_CSELECT_IN : 0) | (ev[i].events & EPOLLOUT ? CURL_CSELECT_OUT : 0) |
                   (ev[i].events & (EPOLLERR | EPOLLHUP) ? CURL_CSELECT_ERR : 0);
        rc = curl_multi_socket_action(f->multi, ev[i].data.fd, what, &running);
    }
    if (rc == CURLM_OK && f->timer_ns <= epx_now_ns()) {
        f->timer_ns = UINT64_MAX;
        rc = curl_multi_socket_action(f->multi, CURL_SOCKET_TIMEOUT, 0, &running);
    }
    if (rc != CURLM_OK) return epx_fail(EPX_ERR_INTERNAL, "libcurl: %s", curl_multi_strerror(rc));
    take_finished(f);
    return EPX_OK;
}

int epx_fetcher_n_live(const epx_fetcher_t *f) { return f->n_live; }

epx_status_t epx_fetch_wait(epx_fetcher_t *f, epx_fetch_t *r) {
    EPX_TRY(epx_fetch_start(f, r));
    while (r->handle) EPX_TRY(epx_fetcher_step(f, UINT64_MAX));
    return EPX_OK;
}

void epx_fetch_fini(epx_fetch_t *r) { epx_str_fini(&r->text); }
