/* `epx serve`: the ranks and the HTTP server until a signal or the loss of a rank. */
#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "app/commands.h"
#include "app/report.h"
#include "app/settings_json.h"
#include "server/http/http_server.h"

enum { SEARCHED_PORTS = 20, ERRORS_OUT_MS = 500 };

static volatile sig_atomic_t stop_signal;
static int stop_fd = -1; /* eventfd written by the signal handler and the failure sink */

static void ring(void) {
    uint64_t one = 1;
    ssize_t k = write(stop_fd, &one, sizeof one);
    (void)k;
}

static void on_signal(int number) {
    int kept = errno;
    stop_signal = number;
    ring();
    errno = kept;
}

/* The second signal of a kind ends the program at once; the ranks die with it. */
static void catch_signals(void) {
    struct sigaction sa = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND | SA_RESTART};
    sigaction(SIGINT, &sa, NULL);
    sigaction(SIGTERM, &sa, NULL);
    signal(SIGPIPE, SIG_IGN);
}

static void pass_event(void *http, const epx_event_t *ev) { epx_http_on_event(http, ev); }

static void pass_failure(void *http, const char *message) {
    epx_http_on_failure(http, message);
    ring();
}

static void pass_failure_only(void *http, const char *message) { epx_http_on_failure(http, message); }

static int port_is_free(const char *host, int port) {
    struct addrinfo hints = {.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV | AI_PASSIVE, .ai_socktype = SOCK_STREAM}, *a;
    char number[16];
    int fd, one = 1, ok = 0;
    snprintf(number, sizeof number, "%d", port);
    if (getaddrinfo(host, number, &hints, &a) != 0) return 1; /* the server says what is wrong with the address */
    fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0) {
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        ok = bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, 1) == 0;
        close(fd);
    }
    freeaddrinfo(a);
    return ok;
}

static int choose_port(const epx_settings_t *o, int search) {
    int first = (int)o->port;
    for (int p = first; search && p && p < first + SEARCHED_PORTS && p < 65536; p++) {
        if (!port_is_free(o->host, p)) continue;
        if (p != first) printf("Port %d is taken; using %d.\n", first, p);
        return p;
    }
    return first;
}

static void announce(const epx_settings_t *o, const char *name, int port) {
    int v6 = strchr(o->host, ':') != NULL;
    const char *host = strcmp(o->host, "0.0.0.0") == 0 ? "127.0.0.1" : strcmp(o->host, "::") == 0 ? "::1" : o->host;
    char url[128];
    snprintf(url, sizeof url, "http://%s%s%s:%d", v6 ? "[" : "", host, v6 ? "]" : "", port);
    printf("The server is fired up and ready to roll!\n%s\n", url);
    printf("Try:\n  curl %s/v1/chat/completions -H 'Content-Type: application/json' \\\n"
           "    -d '{\"model\": \"%s\", \"messages\": [{\"role\": \"user\", \"content\": \"What is 17+25?\"}]}'\n",
           url, name);
    printf("Or open %s in a browser: a chat and a live view of the engine.\n", url);
    fflush(stdout);
}

/* Let live requests end; a second signal of the kind kills the program, the loss of a rank ends the requests. */
static void drain(epx_http_t *h, int ms) {
    int left = epx_http_drain(h, ms);
    if (left) fprintf(stderr, "epx: %d requests did not end within %.3g s\n", left, ms * 1e-3);
}

/* Returns the exit code. */
static int wait_for_end(epx_session_t *s, epx_http_t *h) {
    char why[1024];
    int drain_s = (int)s->settings->shutdown_timeout;
    while (poll(&(struct pollfd){stop_fd, POLLIN, 0}, 1, -1) < 0 && errno == EINTR) {
    }
    if (epx_session_failed(s, why, sizeof why)) {
        fprintf(stderr, "epx: %s; the server ends\n", why);
        if (s->status.n_replicas > 1) fprintf(stderr, "epx: live requests of other replicas may end within %d s\n", drain_s);
        drain(h, s->status.n_replicas > 1 ? drain_s * 1000 : ERRORS_OUT_MS);
        return 1;
    }
    fprintf(stderr, "epx: signal %d (SIG%s): live requests may end within %d s, the same signal again ends at once\n",
            (int)stop_signal, sigabbrev_np(stop_signal), drain_s);
    drain(h, drain_s * 1000);
    return epx_session_failed(s, why, sizeof why) ? 1 : 0;
}

static int serve_http(epx_session_t *s, epx_http_t *h, const char *name) {
    epx_sink_t sink = {pass_event, pass_failure, h};
    int port, code;
    epx_session_set_sink(s, &sink);
    if (epx_http_start(h, s->cluster, &port) < 0) return epx_print_error();
    catch_signals();
    announce(s->settings, name, port);
    code = wait_for_end(s, h);
    epx_http_stop(h);
    return code;
}

static const char *api_key(const epx_settings_t *o) {
    const char *key = o->api_key ? o->api_key : getenv("EPX_API_KEY");
    return key && key[0] ? key : NULL;
}

static const char *model_name(const epx_settings_t *o) { return o->served_model_name ? o->served_model_name : o->model_path; }

static epx_http_config_t http_config(const epx_session_t *s) {
    const epx_settings_t *o = s->settings;
    epx_http_config_t cfg = {.size = sizeof cfg,
                             .host = o->host,
                             .port = (int)o->port,
                             .model_name = model_name(o),
                             .model_path = o->model_path,
                             .api_key = api_key(o),
                             .tokenizer = s->tokenizer,
                             .chat_template = s->chat_template,
                             .default_sampling = s->defaults.sampling,
                             .max_context = s->status.info.max_context,
                             .n_vocab = s->status.info.vocab,
                             .by_priority = o->enable_priority_scheduling,
                             .stream_interval = (int)o->stream_interval};
    cfg.default_sampling.seed = (uint64_t)o->random_seed;
    return cfg;
}

int epx_serve_session(epx_session_t *s, int search) {
    const epx_settings_t *o = s->settings;
    epx_http_config_t cfg = http_config(s);
    epx_http_t *h = NULL;
    epx_str_t args = {0};
    int code;
    cfg.port = choose_port(o, search);
    if (s->chat_template == NULL) fprintf(stderr, "epx: chat completions are off: %s\n", s->template_error);
    stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (stop_fd < 0) {
        epx_fail_errno(EPX_ERR_OS, errno, "eventfd");
        return epx_print_error();
    }
    if (epx_options_json(&epx_settings_table, EPX_CMD_SERVE, o, &args) < 0) return epx_print_error();
    cfg.server_args = args.data;
    code = epx_http_create(&cfg, &h) < 0 ? epx_print_error() : serve_http(s, h, cfg.model_name);
    epx_session_stop(s);
    epx_http_destroy(h);
    epx_str_fini(&args);
    return code;
}

epx_status_t epx_serve_open(epx_session_t *s, struct epx_http **out_h, int *out_port) {
    epx_http_config_t cfg = http_config(s);
    epx_http_t *h = NULL;
    cfg.host = "127.0.0.1";
    cfg.port = 0;
    cfg.api_key = NULL;
    EPX_TRY(epx_http_create(&cfg, &h));
    epx_sink_t sink = {pass_event, pass_failure_only, h};
    epx_session_set_sink(s, &sink);
    epx_status_t st = epx_http_start(h, s->cluster, out_port);
    if (st < 0) epx_http_destroy(h);
    else *out_h = h;
    return st;
}

void epx_serve_close(epx_session_t *s, struct epx_http *h) {
    epx_http_stop(h);
    epx_session_stop(s);
    epx_http_destroy(h);
}

int epx_command_serve(const epx_settings_t *o) {
    epx_session_t s;
    int code;
    if (o->node_rank > 0) return epx_serve_node(o);
    epx_session_init(&s, o);
    if (epx_session_load_text(&s) < 0 || epx_session_start(&s) < 0) code = epx_print_error();
    else {
        epx_report_start(&s, stderr);
        code = epx_serve_session(&s, 0);
    }
    epx_session_close(&s);
    return code;
}
