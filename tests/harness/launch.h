/* Rank launchers of the contract suite: W threads of this process or W forked processes, one body each.
 * Not here: anything of the exchange itself (exchange.h) and what is expected of it (oracle.h).
 * A launch always ends: ranks that are not done in time are reported with their last note, and the launch fails (processes
 * are killed; threads cannot be, so the test program ends with exit code 99). */
#ifndef EPX_TESTS_HARNESS_LAUNCH_H
#define EPX_TESTS_HARNESS_LAUNCH_H

#include <stddef.h>
#include <stdint.h>

#include "base/compiler.h"
#include "epx/epx.h"

/* Which sanitizer is on: gcc says so by macros, clang by features. */
#if defined(__has_feature)
#define TH_FEATURE(x) __has_feature(x)
#else
#define TH_FEATURE(x) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || TH_FEATURE(address_sanitizer)
#define TH_ASAN 1
#else
#define TH_ASAN 0
#endif
#if defined(__SANITIZE_THREAD__) || TH_FEATURE(thread_sanitizer)
#define TH_TSAN 1
#else
#define TH_TSAN 0
#endif

enum { TH_MAX_RANKS = 16, TH_TEXT_BYTES = 1024, TH_N_WORDS = 256 };

typedef enum { TH_THREADS, TH_PROCESSES } th_mode_t;
typedef enum { TH_PASS, TH_FAIL, TH_KILLED, TH_HUNG } th_outcome_t;
typedef struct th_meet th_meet_t; /* memory all ranks see: bootstrap blobs, outcomes, notes, words of the test */

typedef struct {
    int rank, n_ranks;
    th_mode_t mode;
    void *arg; /* of th_launch; in processes a private copy as of the fork */
    th_meet_t *meet;
    uint64_t n_meets; /* barriers passed by this rank */
} th_rank_t;

/* The body of a rank. 0: passed. Otherwise the value of th_fail(). */
typedef int (*th_fn_t)(th_rank_t *r);

/* Run fn on n_ranks ranks and wait at most timeout_s. Prints the message of every rank that did not pass.
 * out_outcome  [n_ranks] or NULL
 * Returns the number of ranks that did not pass. */
int th_launch(th_mode_t mode, int n_ranks, th_fn_t fn, void *arg, unsigned timeout_s, th_outcome_t *out_outcome);
/* Run fn as one rank in this process; the other ranks are started elsewhere, so th_barrier(), th_allgather() and th_words() do
 * not reach them. Prints the message; returns 0 or 1. */
int th_run_alone(int rank, int n_ranks, th_fn_t fn, void *arg);
const char *th_mode_name(th_mode_t mode);

/* Store the message of this rank (the first one wins) and return -1. */
int th_fail(th_rank_t *r, const char *fmt, ...) EPX_PRINTF(2, 3);
/* What this rank is doing: shown when it hangs or dies. */
void th_note(th_rank_t *r, const char *fmt, ...) EPX_PRINTF(2, 3);
/* TH_N_WORDS words that all ranks and the launching thread see, zero at launch; use base/atomic.h. */
uint64_t *th_words(th_rank_t *r);
/* Wait until every rank has called it as often; EPX_ERR_PEER when a rank has ended, EPX_ERR_TIMEOUT after 30 s. */
epx_status_t th_barrier(void *rank);
/* All-gather over the ranks. */
epx_status_t th_allgather(void *rank, const void *mine, size_t n_bytes, void *out_all);
/* World config with the two callbacks above; transports may be NULL. */
void th_world_config(th_rank_t *r, const char *transports, epx_world_config_t *out_cfg);
void th_sleep_us(unsigned us);

/* A condition of a rank body: on failure returns from the body with file, line and the library's last error. */
#define TH_CHECK(r, cond, ...)                                                       \
    do {                                                                             \
        if (!(cond)) return th_fail_at((r), __FILE__, __LINE__, #cond, __VA_ARGS__); \
    } while (0)
#define TH_OK(r, call) TH_STATUS(r, call, EPX_OK)
#define TH_STATUS(r, call, wanted)                                                                               \
    do {                                                                                                         \
        epx_status_t th_s_ = (call);                                                                             \
        if (th_s_ != (wanted))                                                                                   \
            return th_fail_at((r), __FILE__, __LINE__, #call, "status %d (%s), wanted %d (%s): %s", (int)th_s_,  \
                              epx_status_text(th_s_), (int)(wanted), epx_status_text(wanted), epx_last_error()); \
    } while (0)
int th_fail_at(th_rank_t *r, const char *file, int line, const char *what, const char *fmt, ...) EPX_PRINTF(5, 6);

#endif
