/* Helpers of the front tests. */
#include "tests/server/front_util.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"

enum { WAIT_S = 20 };
static const char sacrifice_argument[] = "--sacrificed-front";
extern char **environ;

static void on_event(void *ctx, const epx_event_t *ev) {
    front_t *f = ctx;
    front_result_t *q = &f->results[ev->id % FRONT_MAX_REQUESTS];
    pthread_mutex_lock(&f->lock);
    if (ev->token >= 0 && q->n_tokens < FRONT_MAX_TOKENS) q->tokens[q->n_tokens++] = ev->token;
    if (ev->finish != EPX_FINISH_NONE) {
        q->finish = ev->finish;
        q->n_ends++;
        f->n_ended++;
        snprintf(q->error, sizeof q->error, "%s", ev->error ? ev->error : "");
    }
    pthread_cond_broadcast(&f->changed);
    pthread_mutex_unlock(&f->lock);
}

static void on_failure(void *ctx, const char *message) {
    front_t *f = ctx;
    pthread_mutex_lock(&f->lock);
    f->n_failures++;
    f->failure_ns = epx_now_ns();
    snprintf(f->failure, sizeof f->failure, "%s", message);
    pthread_cond_broadcast(&f->changed);
    pthread_mutex_unlock(&f->lock);
}

epx_status_t front_open(front_t *f, const char *model_path, int n_ranks) { return front_open_timeout(f, model_path, n_ranks, 0); }

epx_status_t front_open_timeout(front_t *f, const char *model_path, int n_ranks, uint64_t timeout_ns) {
    epx_cluster_config_t cfg = {.size = sizeof cfg};
    epx_rank_config_init(&cfg.rank);
    cfg.rank.timeout_ns = timeout_ns;
    return front_open_with(f, model_path, n_ranks, &cfg);
}

epx_status_t front_open_with(front_t *f, const char *model_path, int n_ranks, const epx_cluster_config_t *base) {
    epx_cluster_config_t cfg = *base;
    cfg.on_event = on_event;
    cfg.on_failure = on_failure;
    cfg.ctx = f;
    memset(f, 0, sizeof *f);
    pthread_mutex_init(&f->lock, NULL);
    pthread_cond_init(&f->changed, NULL);
    cfg.rank.model_path = model_path;
    cfg.rank.tp = cfg.rank.dp = cfg.rank.ep = n_ranks;
    cfg.rank.moe_a2a_backend = n_ranks > 1 ? "pplx" : "none";
    cfg.rank.load_format = "auto";
    cfg.rank.n_threads = 1;
    return epx_cluster_create(&cfg, &f->cluster);
}

void front_close(front_t *f) {
    epx_cluster_destroy(f->cluster);
    f->cluster = NULL;
}

uint64_t front_submit(front_t *f, const int32_t *prompt, int n_prompt, int n_new, int dp_rank) {
    epx_request_t req = {.prompt = prompt, .n_prompt = n_prompt, .max_new_tokens = n_new, .ignore_eos = 1};
    uint64_t id = 0;
    req.sampling = (epx_sampling_t){.temperature = 0, .top_p = 1, .min_p = 0, .top_k = -1, .seed = 0};
    if (epx_cluster_submit(f->cluster, &req, dp_rank, &id) < 0) {
        fprintf(stderr, "submit: %s\n", epx_error_message());
        return 0;
    }
    return id;
}

/* One wait of at most a second; counts down *left. lock held. */
static void wait_a_little(front_t *f, int *left) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 1;
    if (pthread_cond_timedwait(&f->changed, &f->lock, &until) == ETIMEDOUT) --*left;
}

int front_wait_tokens(front_t *f, uint64_t id, int n_tokens) {
    front_result_t *q = front_result(f, id);
    int left = WAIT_S;
    pthread_mutex_lock(&f->lock);
    while (q->n_tokens < n_tokens && q->n_ends == 0 && left > 0) wait_a_little(f, &left);
    pthread_mutex_unlock(&f->lock);
    return left > 0;
}

int front_wait_ends(front_t *f, int n) {
    int left = WAIT_S;
    pthread_mutex_lock(&f->lock);
    while (f->n_ended < n && left > 0) wait_a_little(f, &left);
    pthread_mutex_unlock(&f->lock);
    return left > 0;
}

int front_wait_failure(front_t *f) {
    int left = WAIT_S;
    pthread_mutex_lock(&f->lock);
    while (f->n_failures == 0 && left > 0) wait_a_little(f, &left);
    pthread_mutex_unlock(&f->lock);
    return left > 0;
}

front_result_t *front_result(front_t *f, uint64_t id) { return &f->results[id % FRONT_MAX_REQUESTS]; }

static int is_running(int pid) {
    char path[64], state = 'Z';
    FILE *file;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    file = fopen(path, "r");
    if (file == NULL) return 0;
    if (fscanf(file, "%*d (%*[^)]) %c", &state) != 1) state = 'Z';
    fclose(file);
    return state != 'Z' && state != 'X';
}

int front_gone_within(int pid, int ms) {
    for (int waited = 0; is_running(pid); waited += 10) {
        if (waited >= ms) return 0;
        nanosleep(&(struct timespec){0, 10000000}, NULL);
    }
    return 1;
}

int front_shm_entries(void) {
    DIR *d = opendir("/dev/shm");
    int n = 0;
    if (d == NULL) return 0;
    while (readdir(d)) n++;
    closedir(d);
    return n;
}

int front_reaped(int pid) { return waitpid(pid, NULL, 0) == pid; }

int front_no_children(void) { return waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD; }

/* Prints the pids of its ranks and then works until it is killed. */
static int sacrifice_main(const char *model_path) {
    static front_t f;
    epx_cluster_status_t st;
    int32_t prompt[1] = {5};
    if (front_open(&f, model_path, 2) < 0) {
        fprintf(stderr, "%s\n", epx_error_message());
        return 1;
    }
    epx_cluster_status(f.cluster, &st);
    for (int i = 0; i < 2; i++) {
        uint64_t id = front_submit(&f, prompt, 1, 1500, i);
        if (id == 0 || !front_wait_tokens(&f, id, 2)) return 1;
    }
    printf("%d %d\n", st.pids[0], st.pids[1]);
    fflush(stdout);
    for (;;) pause();
}

int front_special_main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], EPX_WORKER_ARGUMENT) == 0) return epx_worker_main(atoi(argv[2]));
    if (argc == 3 && strcmp(argv[1], sacrifice_argument) == 0) return sacrifice_main(argv[2]);
    return -1;
}

int front_spawn_sacrifice(const char *model_path, int pids[2]) {
    char *argv[] = {(char *)(uintptr_t) "front", (char *)(uintptr_t)sacrifice_argument, (char *)(uintptr_t)model_path, NULL};
    posix_spawn_file_actions_t fa;
    pid_t pid = -1;
    int ends[2];
    FILE *from;
    if (prctl(PR_SET_CHILD_SUBREAPER, 1) != 0 || pipe(ends) != 0) return -1;
    posix_spawn_file_actions_init(&fa);
    posix_spawn_file_actions_adddup2(&fa, ends[1], 1);
    posix_spawn_file_actions_addclose(&fa, ends[0]);
    if (posix_spawn(&pid, "/proc/self/exe", &fa, NULL, argv, environ) != 0) pid = -1;
    posix_spawn_file_actions_destroy(&fa);
    close(ends[1]);
    from = fdopen(ends[0], "r");
    if (from == NULL || fscanf(from, "%d %d", &pids[0], &pids[1]) != 2) pids[0] = pids[1] = 0;
    if (from) fclose(from);
    return (int)pid;
}
