/* Helpers of the front tests: a cluster with a collector of events, process checks. */
#ifndef EPX_TESTS_SERVER_FRONT_UTIL_H
#define EPX_TESTS_SERVER_FRONT_UTIL_H

#include <pthread.h>

#include "server/front/cluster.h"

enum { FRONT_MAX_REQUESTS = 512, FRONT_MAX_TOKENS = 512, FRONT_TEXT = 512 };

typedef struct {
    int n_tokens, n_ends;
    int32_t tokens[FRONT_MAX_TOKENS];
    epx_finish_t finish;
    char error[FRONT_TEXT];
} front_result_t;

typedef struct {
    epx_cluster_t *cluster;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    front_result_t results[FRONT_MAX_REQUESTS]; /* by request id */
    int n_ended, n_failures;
    uint64_t failure_ns;
    char failure[FRONT_TEXT];
} front_t;

/* A cluster of n_ranks over this program's own executable. tp > 1: DP attention with pplx. */
epx_status_t front_open(front_t *f, const char *model_path, int n_ranks);
/* The same with a deadline for every wait of a rank for another. */
epx_status_t front_open_timeout(front_t *f, const char *model_path, int n_ranks, uint64_t timeout_ns);
/* The same with further fields of *base, whose rank is initialised. */
epx_status_t front_open_with(front_t *f, const char *model_path, int n_ranks, const epx_cluster_config_t *base);
void front_close(front_t *f);
/* Greedy; the prompt is n_prompt ids. Returns the id. */
uint64_t front_submit(front_t *f, const int32_t *prompt, int n_prompt, int n_new, int dp_rank);
/* Wait until the request has that many tokens or has ended; 0: 20 s went by. */
int front_wait_tokens(front_t *f, uint64_t id, int n_tokens);
/* Wait until n requests have ended; 0: 20 s went by. */
int front_wait_ends(front_t *f, int n);
/* Wait until on_failure was called; 0: 20 s went by. */
int front_wait_failure(front_t *f);
front_result_t *front_result(front_t *f, uint64_t id);
/* 1 when the process is gone or only waits to be reaped; polls for up to `ms`. */
int front_gone_within(int pid, int ms);
/* Take the exit status of an ended child; 1: it was one. */
int front_reaped(int pid);
/* Number of entries of /dev/shm. */
int front_shm_entries(void);
/* 1 when this process has no child at all. */
int front_no_children(void);
/* Call first in main(): runs the worker or the sacrificed front if the arguments ask for it, else returns -1. */
int front_special_main(int argc, char **argv);
/* Start this program as a front of its own over model_path with 2 ranks and a long generation. Its ranks' pids go to pids;
 * they become this process's children when their front dies. */
int front_spawn_sacrifice(const char *model_path, int pids[2]);

#endif
