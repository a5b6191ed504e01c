/* Ranks as threads of one process. A rank that fails wakes those that wait for it in the bootstrap; later waits have the engine's
 * own deadlines. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "app/eval.h"
#include "app/session.h"

enum { MAX_RANKS = 64, RECORD_BYTES = 4096 };

typedef struct {
    const epx_settings_t *settings;
    epx_eval_body_fn body;
    void *ctx;
    int n, n_arrived;
    unsigned round;
    epx_status_t failed; /* of the first rank that failed */
    char message[1024];
    pthread_mutex_t lock;
    pthread_cond_t turn;
    char records[MAX_RANKS][RECORD_BYTES];
} meeting_t;

typedef struct {
    meeting_t *m;
    int rank;
} member_t;

/* All ranks have come here once more, or one has failed. The lock is held. */
static epx_status_t wait_all(meeting_t *m) {
    unsigned round = m->round;
    if (m->failed == EPX_OK && ++m->n_arrived == m->n) {
        m->n_arrived = 0;
        m->round++;
        pthread_cond_broadcast(&m->turn);
    }
    while (m->failed == EPX_OK && m->round == round) pthread_cond_wait(&m->turn, &m->lock);
    return m->failed == EPX_OK ? EPX_OK : epx_fail(EPX_ERR_PEER, "another rank failed");
}

static epx_status_t allgather(void *ctx, const void *mine, size_t n_bytes, void *out_all) {
    member_t *a = ctx;
    meeting_t *m = a->m;
    if (n_bytes > RECORD_BYTES)
        return epx_fail(EPX_ERR_CAPACITY, "bootstrap record of %zu bytes, at most %d", n_bytes, RECORD_BYTES);
    pthread_mutex_lock(&m->lock);
    memcpy(m->records[a->rank], mine, n_bytes);
    epx_status_t s = wait_all(m);
    for (int i = 0; s == EPX_OK && i < m->n; i++) memcpy((char *)out_all + (size_t)i * n_bytes, m->records[i], n_bytes);
    if (s == EPX_OK) s = wait_all(m); /* nobody writes the next record before all have read this one */
    pthread_mutex_unlock(&m->lock);
    return s;
}

static epx_status_t barrier(void *ctx) {
    member_t *a = ctx;
    pthread_mutex_lock(&a->m->lock);
    epx_status_t s = wait_all(a->m);
    pthread_mutex_unlock(&a->m->lock);
    return s;
}

static void note_failure(meeting_t *m, epx_status_t s) {
    pthread_mutex_lock(&m->lock);
    if (m->failed == EPX_OK) {
        m->failed = s;
        snprintf(m->message, sizeof m->message, "%s", epx_error_message());
        pthread_cond_broadcast(&m->turn);
    }
    pthread_mutex_unlock(&m->lock);
}

static void *rank_main(void *arg) {
    member_t *a = arg;
    epx_rank_t *r = NULL;
    epx_rank_config_t c = epx_session_rank_config(a->m->settings);
    c.rank = a->rank;
    c.allgather = allgather;
    c.barrier = barrier;
    c.boot_ctx = a;
    epx_status_t s = epx_rank_create(&c, &r);
    if (s == EPX_OK) s = a->m->body(a->m->ctx, a->rank, r);
    if (s < 0) note_failure(a->m, s);
    epx_rank_destroy(r);
    return NULL;
}

epx_status_t epx_eval_ranks(const epx_settings_t *o, epx_eval_body_fn body, void *ctx) {
    pthread_t threads[MAX_RANKS];
    member_t members[MAX_RANKS];
    int n_started = 0;
    meeting_t *m = calloc(1, sizeof *m);
    if (m == NULL) return epx_fail(EPX_ERR_NOMEM, "eval: no memory");
    m->settings = o;
    m->body = body;
    m->ctx = ctx;
    m->n = (int)o->tp;
    pthread_mutex_init(&m->lock, NULL);
    pthread_cond_init(&m->turn, NULL);
    for (; n_started < m->n; n_started++) {
        members[n_started] = (member_t){m, n_started};
        int rc = pthread_create(&threads[n_started], NULL, rank_main, &members[n_started]);
        if (rc == 0) continue;
        note_failure(m, epx_fail_errno(EPX_ERR_NOMEM, rc, "eval: thread of rank %d", n_started));
        break;
    }
    for (int i = 0; i < n_started; i++) pthread_join(threads[i], NULL);
    epx_status_t s = m->failed < 0 ? epx_fail(m->failed, "%s", m->message) : EPX_OK;
    pthread_cond_destroy(&m->turn);
    pthread_mutex_destroy(&m->lock);
    free(m);
    return s;
}
