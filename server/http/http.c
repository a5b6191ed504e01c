/* Create, start, stop, destroy; the listening socket; MHD's settings. Any thread, one at a time; the event sinks run on the
 * cluster's reader thread. */
#include "server/http/http_server.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "server/http/call.h"
#include "server/http/http_impl.h"

static epx_status_t check_config(const epx_http_config_t *cfg) {
    if (cfg->size < sizeof *cfg) return epx_fail(EPX_ERR_ARG, "size: %u, must be at least %zu", cfg->size, sizeof *cfg);
    if (!cfg->tokenizer || !cfg->model_name || !cfg->host)
        return epx_fail(EPX_ERR_ARG, "tokenizer, model_name and host are required");
    if (cfg->api_key && !cfg->api_key[0]) return epx_fail(EPX_ERR_ARG, "api_key: empty, must have at least one character");
    if (cfg->port < 0 || cfg->port > 65535) return epx_fail(EPX_ERR_ARG, "port: %d, must be 0..65535", cfg->port);
    if (cfg->max_context < 2 || cfg->n_vocab < 1)
        return epx_fail(EPX_ERR_ARG, "max_context: %d, must be >= 2; n_vocab: %d, must be >= 1", cfg->max_context, cfg->n_vocab);
    return EPX_OK;
}

static int or_default(int v, int fallback) { return v > 0 ? v : fallback; }

static void fill_defaults(epx_http_t *h) {
    epx_http_config_t *c = &h->cfg;
    c->max_connections = or_default(c->max_connections, EPX_HTTP_MAX_CONNECTIONS);
    c->max_live = or_default(c->max_live, EPX_HTTP_MAX_LIVE);
    c->client_timeout_s = or_default(c->client_timeout_s, EPX_HTTP_CLIENT_TIMEOUT_S);
    c->stream_interval = or_default(c->stream_interval, 1);
    c->keepalive_s = or_default(c->keepalive_s, EPX_HTTP_KEEPALIVE_S);
    h->max_tokens = c->max_context;
    h->longest_token = 1;
    for (int32_t id = 0; id < epx_tokenizer_n_vocab(c->tokenizer); id++) {
        size_t n = 0;
        if (epx_tokenizer_token_bytes(c->tokenizer, id, &n) && n > h->longest_token) h->longest_token = n;
    }
}

epx_status_t epx_http_create(const epx_http_config_t *cfg, epx_http_t **out_h) {
    pthread_condattr_t attr;
    EPX_TRY(check_config(cfg));
    epx_http_t *h = calloc(1, sizeof *h);
    char *name = strdup(cfg->model_name), *key = cfg->api_key ? strdup(cfg->api_key) : NULL;
    if (!h || !name || (cfg->api_key && !key)) {
        free(h);
        free(name);
        free(key);
        return epx_fail(EPX_ERR_NOMEM, "no memory for the HTTP server");
    }
    h->cfg = *cfg;
    h->model_name = name;
    h->api_key = key;
    h->started_s = (int64_t)time(NULL);
    fill_defaults(h);
    pthread_mutex_init(&h->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&h->changed, &attr);
    pthread_condattr_destroy(&attr);
    *out_h = h;
    return EPX_OK;
}

void epx_http_on_event(void *http, const epx_event_t *ev) { epx_call_on_event(http, ev); }

void epx_http_on_failure(void *http, const char *message) {
    epx_http_t *h = http;
    pthread_mutex_lock(&h->lock);
    h->failed = 1;
    snprintf(h->failure, sizeof h->failure, "%s", message);
    pthread_mutex_unlock(&h->lock);
}

typedef union {
    struct sockaddr sa;
    struct sockaddr_in in;
    struct sockaddr_in6 in6;
} address_t;

static epx_status_t parse_address(const char *host, int port, address_t *out, socklen_t *out_bytes) {
    memset(out, 0, sizeof *out);
    if (inet_pton(AF_INET, host, &out->in.sin_addr) == 1) {
        out->in.sin_family = AF_INET;
        out->in.sin_port = htons((uint16_t)port);
        *out_bytes = sizeof out->in;
        return EPX_OK;
    }
    if (inet_pton(AF_INET6, host, &out->in6.sin6_addr) == 1) {
        out->in6.sin6_family = AF_INET6;
        out->in6.sin6_port = htons((uint16_t)port);
        *out_bytes = sizeof out->in6;
        return EPX_OK;
    }
    return epx_fail(EPX_ERR_ARG, "host: \"%s\" is not a numeric address such as 127.0.0.1, 0.0.0.0 or ::1", host);
}

static epx_status_t listen_on(const char *host, int port, int *out_fd, int *out_port) {
    address_t addr;
    socklen_t n_bytes;
    int one = 1;
    EPX_TRY(parse_address(host, port, &addr, &n_bytes));
    int fd = socket(addr.sa.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return epx_fail_errno(EPX_ERR_OS, errno, "socket for host %s", host);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, &addr.sa, n_bytes) != 0 || listen(fd, SOMAXCONN) != 0 || getsockname(fd, &addr.sa, &n_bytes) != 0) {
        epx_status_t s = epx_fail_errno(EPX_ERR_OS, errno, "cannot listen on host %s port %d", host, port);
        close(fd);
        return s;
    }
    *out_port = ntohs(addr.sa.sa_family == AF_INET ? addr.in.sin_port : addr.in6.sin6_port);
    *out_fd = fd;
    return EPX_OK;
}

/* As many connections as asked for, unless the process may not have that many descriptors. The soft limit is raised for them. */
static unsigned connection_limit(const epx_http_t *h) {
    struct rlimit files;
    unsigned n = (unsigned)h->cfg.max_connections;
    if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur == RLIM_INFINITY) return n;
    rlim_t want = (rlim_t)n + EPX_HTTP_SPARE_FDS;
    if (files.rlim_cur < want) {
        files.rlim_cur = want < files.rlim_max ? want : files.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &files); /* else as many as there are */
        (void)getrlimit(RLIMIT_NOFILE, &files);
    }
    rlim_t room = files.rlim_cur > 2 * EPX_HTTP_SPARE_FDS ? files.rlim_cur - EPX_HTTP_SPARE_FDS : files.rlim_cur / 2;
    return n < room ? n : (unsigned)room;
}

static epx_status_t start_daemon(epx_http_t *h, int fd) {
    unsigned flags = MHD_USE_AUTO_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME;
    h->daemon = MHD_start_daemon(
        flags, 0, NULL, NULL, epx_http_on_access, h, MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_NOTIFY_COMPLETED,
        epx_http_on_completed, h, MHD_OPTION_NOTIFY_CONNECTION, epx_http_on_connection, h, MHD_OPTION_CONNECTION_TIMEOUT,
        (unsigned)h->cfg.client_timeout_s, MHD_OPTION_CONNECTION_LIMIT, connection_limit(h), MHD_OPTION_CONNECTION_MEMORY_LIMIT,
        (size_t)EPX_HTTP_CONNECTION_BYTES, MHD_OPTION_THREAD_POOL_SIZE, (unsigned)EPX_HTTP_N_THREADS, MHD_OPTION_END);
    return h->daemon ? EPX_OK : epx_fail_errno(EPX_ERR_OS, errno, "cannot start the HTTP server on host %s", h->cfg.host);
}

/* Context and KV capacity bound a request together. */
static void learn_limits(epx_http_t *h) {
    epx_cluster_status_t st;
    epx_cluster_status(h->cluster, &st);
    if (st.info.kv_tokens > 0 && st.info.kv_tokens < h->max_tokens) h->max_tokens = (int)st.info.kv_tokens;
    if (st.failed) epx_http_on_failure(h, st.failure);
}

epx_status_t epx_http_start(epx_http_t *h, epx_cluster_t *cluster, int *out_port) {
    int fd = -1, port = 0;
    if (h->daemon) return epx_fail(EPX_ERR_STATE, "the HTTP server was already started");
    h->cluster = cluster;
    learn_limits(h);
    EPX_TRY(epx_metrics_init(&h->metrics, h->cluster));
    EPX_TRY(listen_on(h->cfg.host, h->cfg.port, &fd, &port));
    int e = pthread_create(&h->watcher, NULL, epx_http_watch_main, h);
    if (e != 0) {
        close(fd);
        return epx_fail_errno(EPX_ERR_OS, e, "starting the watcher thread");
    }
    epx_status_t s = start_daemon(h, fd);
    if (s < 0) {
        pthread_mutex_lock(&h->lock);
        h->stop_watcher = 1;
        pthread_cond_broadcast(&h->changed);
        pthread_mutex_unlock(&h->lock);
        pthread_join(h->watcher, NULL);
        return s;
    }
    *out_port = port;
    return EPX_OK;
}

/* Wait for a counter or list to empty, at most ms. h->lock held. */
static void wait_empty(epx_http_t *h, int ms, int (*is_empty)(const epx_http_t *)) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += ms / 1000;
    until.tv_nsec += ms % 1000 * 1000000L;
    until.tv_sec += until.tv_nsec / 1000000000L;
    until.tv_nsec %= 1000000000L;
    while (!is_empty(h) && pthread_cond_timedwait(&h->changed, &h->lock, &until) != ETIMEDOUT) continue;
}
static int no_calls(const epx_http_t *h) { return h->calls == NULL; }
static int none_live(const epx_http_t *h) { return h->n_live == 0; }

int epx_http_drain(epx_http_t *h, int timeout_ms) {
    int left = 0;
    pthread_mutex_lock(&h->lock);
    h->draining = 1;
    wait_empty(h, timeout_ms, no_calls);
    for (const epx_call_t *c = h->calls; c; c = c->next) left++;
    pthread_mutex_unlock(&h->lock);
    return left;
}

void epx_http_stop(epx_http_t *h) {
    if (!h->daemon || h->stopped) return;
    h->stopped = 1;
    pthread_mutex_lock(&h->lock);
    h->stopping = 1; /* from here on nothing is suspended any more */
    for (epx_call_t *c = h->calls; c; c = c->next) epx_call_wake_locked(c);
    wait_empty(h, EPX_HTTP_STOP_MS, no_calls);
    h->stop_watcher = 1;
    pthread_cond_broadcast(&h->changed);
    pthread_mutex_unlock(&h->lock);
    pthread_join(h->watcher, NULL);
    MHD_stop_daemon(h->daemon); /* ends what is left, which cancels it */
    pthread_mutex_lock(&h->lock);
    wait_empty(h, EPX_HTTP_STOP_MS, none_live);
    pthread_mutex_unlock(&h->lock);
}

/* Choices whose end never came (their cluster is gone): each holds a reference of its call. */
static void drop_table(epx_http_t *h) {
    for (int b = 0; b < EPX_HTTP_N_BUCKETS; b++)
        while (h->table[b]) {
            epx_choice_t *ch = h->table[b];
            h->table[b] = ch->next_in_table;
            epx_call_unref(ch->call);
        }
}

void epx_http_destroy(epx_http_t *h) {
    if (!h) return;
    epx_http_stop(h);
    drop_table(h);
    pthread_cond_destroy(&h->changed);
    pthread_mutex_destroy(&h->lock);
    epx_metrics_fini(&h->metrics);
    epx_expert_record_fini(&h->record);
    free(h->model_name);
    free(h->api_key);
    free(h);
}
