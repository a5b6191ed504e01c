/* The real HTTP server, tokenizer and chat template over a cluster that only plays: it answers every prompt with the prompt's own
 * tokens. A seed below 2^24 is a script: bits 0-15 milliseconds between tokens, bits 16-23 what goes wrong (the enum).
 * Prints "port N", then a line for each submit, cancel and end; stops when stdin ends. Driven by http_test.py. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "server/http/http_server.h"

enum {
    PLAY = 0,
    DIE_AFTER_3 = 1,
    SUBMIT_FULL = 2,
    ERROR_AT_ONCE = 3,
    SILENT = 4,
    SLOW_SUBMIT = 5,
    SUBMIT_PEER = 6,
    END_TOKEN = 7,
    MAX_REQUESTS = 4096,
};

typedef struct {
    uint64_t id, due_ns, step_ns;
    int mode, cancelled;
    int32_t *tokens;
    int32_t n_prompt, max_new, n_done, stop_ids[8], n_stop_ids;
    int want_logprobs;
    int32_t n_prompt_told; /* prompt tokens whose logprobs are out; n_prompt: none wanted */
    int32_t n_top;
    epx_top_t top[EPX_SAMPLE_MAX_TOP];
} play_t;

struct epx_cluster {
    pthread_mutex_t lock;
    pthread_t thread;
    play_t live[MAX_REQUESTS];
    int n_live, quit, failed;
    int32_t *answer; /* owned; what every request is answered with, NULL: its prompt */
    size_t n_answer;
    uint64_t next_id;
    epx_http_t *http;
};

static const char death[] = "rank 1 (process 4242) was killed by signal 9";

/* ---- the cluster's interface ---- */

epx_status_t epx_cluster_submit(epx_cluster_t *c, const epx_request_t *req, int dp_rank, uint64_t *out_id) {
    uint64_t script = req->sampling.seed >> 24 ? 0 : req->sampling.seed; /* a drawn seed is no script */
    int mode = (int)(script >> 16);
    (void)dp_rank;
    if (mode == SUBMIT_FULL) return epx_fail(EPX_ERR_CAPACITY, "rank 0: 8 requests wait already");
    pthread_mutex_lock(&c->lock);
    if (mode == SUBMIT_PEER || c->failed || c->n_live == MAX_REQUESTS) {
        pthread_mutex_unlock(&c->lock);
        return epx_fail(EPX_ERR_PEER, "%s", death);
    }
    play_t *p = &c->live[c->n_live++];
    *p = (play_t){.id = ++c->next_id, .mode = mode, .n_prompt = req->n_prompt, .max_new = req->max_new_tokens};
    p->step_ns = (script & 0xffff) * 1000000u;
    p->due_ns = epx_now_ns() + p->step_ns;
    if (c->answer) p->n_prompt = (int32_t)c->n_answer;
    p->tokens = malloc((size_t)p->n_prompt * sizeof *p->tokens);
    memcpy(p->tokens, c->answer ? c->answer : req->prompt, (size_t)p->n_prompt * sizeof *p->tokens);
    p->want_logprobs = req->want_logprobs;
    p->n_top = req->n_top;
    p->n_prompt_told = req->want_prompt_logprobs && !c->answer ? 1 : p->n_prompt;
    p->n_stop_ids = req->n_stop_ids < 8 ? req->n_stop_ids : 8;
    for (int i = 0; i < p->n_stop_ids; i++) p->stop_ids[i] = req->stop_ids[i];
    *out_id = p->id;
    printf("submit %llu prompt=%d max_new=%d temperature=%g top_p=%g top_k=%d min_p=%g seed=%llu ignore_eos=%d stop_ids=%d ",
           (unsigned long long)p->id, req->n_prompt, req->max_new_tokens, (double)req->sampling.temperature,
           (double)req->sampling.top_p, req->sampling.top_k, (double)req->sampling.min_p, (unsigned long long)req->sampling.seed,
           req->ignore_eos, req->n_stop_ids);
    printf("presence=%g frequency=%g repetition=%g min_new=%d bias=", (double)req->adjust.presence_penalty,
           (double)req->adjust.frequency_penalty, (double)req->adjust.repetition_penalty, req->min_new_tokens);
    for (int i = 0; i < req->adjust.n_bias; i++) printf("%d:%g,", req->adjust.bias[i].token, (double)req->adjust.bias[i].bias);
    printf(" grammar=%.*s\n", (int)req->grammar_bytes, req->grammar ? req->grammar : "");
    pthread_mutex_unlock(&c->lock);
    if (mode == SLOW_SUBMIT) usleep(50000); /* all events come before the caller knows the id */
    return EPX_OK;
}

void epx_cluster_cancel(epx_cluster_t *c, uint64_t id) {
    pthread_mutex_lock(&c->lock);
    for (int i = 0; i < c->n_live; i++)
        if (c->live[i].id == id) c->live[i].cancelled = 1;
    printf("cancel %llu\n", (unsigned long long)id);
    pthread_mutex_unlock(&c->lock);
}

void epx_cluster_status(epx_cluster_t *c, epx_cluster_status_t *out) {
    (void)c;
    memset(out, 0, sizeof *out);
    out->n_ranks = out->n_dp = 2;
    out->ranks_per_dp = out->n_replicas = 1;
    out->info.kv_tokens = 1 << 20;
}

epx_status_t epx_cluster_reports(epx_cluster_t *c, epx_rank_stats_t *out_stats, uint64_t *out_expert_rows, int n_ranks) {
    (void)c, (void)out_expert_rows;
    for (int r = 0; r < n_ranks; r++) out_stats[r] = (epx_rank_stats_t){.kv_tokens = 1 << 20, .n_steps = 7};
    return EPX_OK;
}

void epx_cluster_flush_cache(epx_cluster_t *c) { (void)c; }

/* ---- its reader thread ---- */

static int is_stop_id(const play_t *p, int32_t token) {
    for (int i = 0; i < p->n_stop_ids; i++)
        if (p->stop_ids[i] == token) return 1;
    return 0;
}

/* Token t has logprob -(t % 8) / 8; the k-th of the most probable is (t + k) % 4080 with -k. */
static void add_logprobs(play_t *p, epx_event_t *ev) {
    ev->logprob = -(float)(ev->token % 8) / 8;
    for (int32_t k = 0; k < p->n_top; k++) p->top[k] = (epx_top_t){(ev->token + k) % 4080, -(float)k};
    ev->top = p->top;
    ev->n_top = p->n_top;
}

/* The next event of a request that is due. */
static epx_event_t next_event(play_t *p) {
    epx_event_t ev = {.id = p->id, .token = -1, .n_prompt = p->n_prompt};
    if (p->cancelled) {
        ev.finish = EPX_FINISH_CANCELLED;
    } else if (p->n_prompt_told < p->n_prompt) {
        ev.prompt_idx = p->n_prompt_told;
        ev.token = p->tokens[p->n_prompt_told++];
    } else if (p->mode == ERROR_AT_ONCE || (p->mode == DIE_AFTER_3 && p->n_done == 3)) {
        ev.finish = EPX_FINISH_ERROR;
        ev.error = death;
    } else if (p->n_done == p->n_prompt) { /* only with END_TOKEN: the whole prompt, then <|im_end|> */
        ev.token = 4082;
        ev.finish = EPX_FINISH_STOP;
    } else {
        ev.token = p->tokens[p->n_done++];
        if (is_stop_id(p, ev.token)) ev.finish = EPX_FINISH_STOP;
        else if (p->n_done == p->max_new || (p->n_done == p->n_prompt && p->mode != END_TOKEN)) ev.finish = EPX_FINISH_LENGTH;
    }
    if (ev.token >= 0 && p->want_logprobs) add_logprobs(p, &ev);
    ev.n_generated = p->n_done;
    return ev;
}

static void step(epx_cluster_t *c, int i) {
    play_t *p = &c->live[i];
    epx_top_t top[EPX_SAMPLE_MAX_TOP];
    epx_event_t ev = next_event(p);
    memcpy(top, p->top, sizeof top); /* *p may be gone when the event is handed on */
    ev.top = top;
    int died = p->mode == DIE_AFTER_3 && ev.finish == EPX_FINISH_ERROR;
    p->due_ns += p->step_ns;
    if (ev.finish != EPX_FINISH_NONE) {
        printf("end %llu\n", (unsigned long long)p->id);
        free(p->tokens);
        *p = c->live[--c->n_live];
    }
    c->failed |= died;
    pthread_mutex_unlock(&c->lock);
    epx_http_on_event(c->http, &ev);
    if (died) epx_http_on_failure(c->http, death);
    pthread_mutex_lock(&c->lock);
}

static void *reader_main(void *cluster) {
    epx_cluster_t *c = cluster;
    pthread_mutex_lock(&c->lock);
    while (!c->quit) {
        uint64_t now = epx_now_ns();
        int did = 0;
        for (int i = 0; i < c->n_live; i++) {
            play_t *p = &c->live[i];
            if (!p->cancelled && (p->mode == SILENT || p->due_ns > now)) continue;
            step(c, i);
            did = 1;
            break;
        }
        if (did) continue;
        pthread_mutex_unlock(&c->lock);
        usleep(500);
        pthread_mutex_lock(&c->lock);
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

/* What every request is answered with, instead of its own prompt. */
static int set_answer(epx_cluster_t *c, const epx_tokenizer_t *tok, const char *text) {
    if (!text) return 0;
    return epx_tokenizer_encode(tok, text, strlen(text), &c->answer, &c->n_answer);
}

static int die(const char *what) {
    fprintf(stderr, "%s: %s\n", what, epx_error_message());
    return 1;
}

static const char *text_option(int argc, char **argv, const char *name) {
    for (int i = 1; i + 1 < argc; i += 2)
        if (strcmp(argv[i], name) == 0) return argv[i + 1];
    return NULL;
}

static int option(int argc, char **argv, const char *name) {
    for (int i = 1; i + 1 < argc; i += 2)
        if (strcmp(argv[i], name) == 0) return atoi(argv[i + 1]);
    return 0;
}

int main(int argc, char **argv) {
    static epx_cluster_t cluster;
    epx_http_config_t cfg = {.size = sizeof cfg, .host = "127.0.0.1", .model_name = "tiny", .max_context = 4096, .n_vocab = 4083};
    epx_tokenizer_t *tok;
    epx_chat_template_t *chat;
    char drop[64];
    int port;
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (epx_tokenizer_create(EPX_SOURCE_DIR "/models/tinymoe-math/tokenizer.json", &tok) < 0) return die("tokenizer");
    const char *dir = text_option(argc, argv, "--template-dir");
    if (epx_chat_template_load(dir ? dir : EPX_SOURCE_DIR "/models/tinymoe-math", &chat) < 0) return die("chat template");
    if (set_answer(&cluster, tok, text_option(argc, argv, "--answer")) < 0) return die("answer");
    cfg.tokenizer = tok;
    cfg.chat_template = option(argc, argv, "--no-template") ? NULL : chat;
    epx_sampling_init(&cfg.default_sampling);
    cfg.default_sampling.temperature = 0.25f;
    cfg.default_sampling.top_k = 20;
    cfg.api_key = text_option(argc, argv, "--api-key");
    cfg.client_timeout_s = option(argc, argv, "--timeout");
    cfg.keepalive_s = option(argc, argv, "--keepalive");
    cfg.max_live = option(argc, argv, "--max-live");
    cfg.max_connections = option(argc, argv, "--max-connections");
    if (epx_http_create(&cfg, &cluster.http) < 0) return die("create");
    pthread_mutex_init(&cluster.lock, NULL);
    pthread_create(&cluster.thread, NULL, reader_main, &cluster);
    if (epx_http_start(cluster.http, &cluster, &port) < 0) return die("start");
    printf("port %d\n", port);
    while (read(0, drop, sizeof drop) > 0) continue;
    if (option(argc, argv, "--drain")) printf("left %d\n", epx_http_drain(cluster.http, option(argc, argv, "--drain")));
    epx_http_stop(cluster.http);
    pthread_mutex_lock(&cluster.lock);
    cluster.quit = 1;
    pthread_mutex_unlock(&cluster.lock);
    pthread_join(cluster.thread, NULL);
    epx_http_destroy(cluster.http);
    for (int i = 0; i < cluster.n_live; i++) free(cluster.live[i].tokens);
    free(cluster.answer);
    epx_chat_template_destroy(chat);
    epx_tokenizer_destroy(tok);
    puts("stopped");
    return cluster.n_live == 0 ? 0 : 3; /* every request was ended */
}
