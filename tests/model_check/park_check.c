/* A model checker of parking (docs/protocol.md section 3, lib/spi/wait.c): one waiter, two peers that signal, one that aborts.
 * Every interleaving is visited; no wake-up may be lost.
 *
 * Usage: park_check: the protocol as it is must have no bad state, then each planted mistake must have one. Exit 0: both hold.
 *
 * Memory model. Sequentially consistent stores are visible at once, in the order of the program. A store that a mistake relaxes
 * waits in the store buffer of its rank and becomes visible at any later step, also after later loads of that rank; a locked
 * instruction (the bell) empties the buffer first. That is x86, and what the C11 orders allow at least.
 *
 * The waiter sleeps without a limit as long as nobody dies: in the library a slice ends after 20 ms at most, which would hide a
 * lost wake-up as a delay. With a death the slice ends, since nobody may be left to ring.
 *
 * Bad state: one without a successor in which the waiter is not done. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "tests/model_check/search.h"

enum { N_PEERS = 2, N_ROUNDS = 2, ABORTER = N_PEERS, N_RINGERS = N_PEERS + 1 };

/* Places of the waiter: epx_wait_slow(). */
typedef enum {
    LOOK,  /* wait_parked(): the word, the abort word, dead peers */
    BELL,  /* park(): load the bell */
    PARK,  /* store parked */
    CHECK, /* load the word and the abort word again */
    SLEEP, /* FUTEX_WAIT: sleeps only if the bell is as it was loaded */
    ASLEEP,
    UNPARK,
    DONE
} place_t;

/* Places of a peer: epx_slab_signal(), epx_slab_abort(); epx_slab_wake(). */
typedef enum { STORE, LOAD_PARKED, RING, WAKE, QUIET } ring_t;

/* One byte a field. */
typedef struct {
    uint8_t place, peer, round, bell_seen, ends_in_error;
    uint8_t parked, bell, abort;
    uint8_t word[N_PEERS];
    uint8_t at[N_RINGERS], sent[N_RINGERS], dead[N_RINGERS];
    uint8_t late_word[N_PEERS], late_parked; /* in a store buffer: value + 1; 0: nothing */
    uint8_t n_deaths, pad;
} state_t;

#define MISTAKES(X)                                                                                \
    X(NONE, "parking as it is")                                                                    \
    X(CHECK_BEFORE_PARK, "the waiter looks at the word before it announces that it parks")         \
    X(BELL_AFTER_CHECK, "the waiter loads the bell after it has looked at the word")               \
    X(RELAXED_PARKED, "the store of parked may become visible after the word was looked at")       \
    X(RELAXED_FLAG, "the store of the flag may become visible after parked was looked at")         \
    X(NO_BELL, "the signaller wakes without changing the bell")                                    \
    X(NO_WAKE, "the signaller changes the bell and does not wake")                                 \
    X(ABORT_DOES_NOT_RING, "who aborts stores its word and wakes nobody")                          \
    X(NO_ABORT_CHECK, "the waiter looks at the word only before it sleeps, not at the abort word") \
    X(NO_SLICE, "a sleep has no limit, so a peer that dies between its store and the bell is fatal")

#define AS_ENUM(name, text) name,
typedef enum { MISTAKES(AS_ENUM) N_MISTAKES } mistake_t;
#define AS_NAME(name, text) #name,
#define AS_TEXT(name, text) text,
static const char *const names[] = {MISTAKES(AS_NAME)};
static const char *const texts[] = {MISTAKES(AS_TEXT)};

static struct {
    int aborts, deaths, silent; /* one rank aborts; a signaller may die; a peer never signals, so only the abort ends the wait */
    mistake_t mistake;
} cfg;

static int is(mistake_t m) { return cfg.mistake == m; }

/* ---- the waiter ---- */

static place_t after(place_t p) {
    static const place_t right[] = {BELL, PARK, CHECK, SLEEP}, early[] = {BELL, CHECK, PARK, SLEEP},
                         late[] = {PARK, CHECK, BELL, SLEEP};
    const place_t *order = is(CHECK_BEFORE_PARK) ? early : is(BELL_AFTER_CHECK) ? late : right;
    if (p == LOOK) return order[0];
    for (int i = 0; i < 3; i++)
        if (order[i] == p) return order[i + 1];
    return p;
}

static int has_come(const state_t *s) { return s->word[s->peer] >= s->round + 1; }

/* Data that has arrived wins over bad news. */
static void look(state_t *s) {
    if (has_come(s)) {
        if (++s->peer == N_PEERS) s->peer = 0, s->round++;
        if (s->round == N_ROUNDS) s->place = DONE, s->peer = 0;
    } else if (s->abort || s->dead[s->peer]) {
        s->ends_in_error = 1;
        s->place = DONE;
    } else {
        s->place = (uint8_t)after(LOOK);
    }
}

static void set_parked(state_t *s, uint8_t value) {
    if (is(RELAXED_PARKED)) s->late_parked = (uint8_t)(value + 1);
    else s->parked = value;
}

static int step_waiter(state_t *s) {
    switch ((place_t)s->place) {
    case LOOK:
        look(s);
        return 1;
    case BELL:
        s->bell_seen = s->bell;
        break;
    case PARK:
        if (s->late_parked) return 0; /* a store does not overtake an earlier one to the same place */
        set_parked(s, 1);
        break;
    case CHECK:
        if (has_come(s) || (s->abort && !is(NO_ABORT_CHECK))) {
            s->place = UNPARK;
            return 1;
        }
        break;
    case SLEEP:
        s->place = s->bell == s->bell_seen ? ASLEEP : UNPARK;
        return 1;
    case UNPARK:
        if (s->late_parked) return 0;
        set_parked(s, 0);
        s->place = LOOK;
        return 1;
    default:
        return 0; /* ASLEEP: others wake it */
    }
    s->place = (uint8_t)after((place_t)s->place);
    return 1;
}

/* ---- the others ---- */

static int step_ringer(state_t *s, int r) {
    int aborts = r == ABORTER;
    switch ((ring_t)s->at[r]) {
    case STORE:
        if (aborts) s->abort = 1;
        else if (is(RELAXED_FLAG) && s->late_word[r]) return 0;
        else if (is(RELAXED_FLAG)) s->late_word[r] = (uint8_t)(s->sent[r] + 2);
        else s->word[r] = (uint8_t)(s->sent[r] + 1);
        s->sent[r]++;
        s->at[r] = aborts && is(ABORT_DOES_NOT_RING) ? QUIET : LOAD_PARKED;
        return 1;
    case LOAD_PARKED:
        s->at[r] = s->parked ? RING : QUIET;
        break;
    case RING: /* locked: the own store buffer is empty first */
        if (!aborts && s->late_word[r]) return 0;
        if (!is(NO_BELL)) s->bell++;
        s->at[r] = WAKE;
        return 1;
    case WAKE:
        if (s->place == ASLEEP && !is(NO_WAKE)) s->place = UNPARK;
        s->at[r] = QUIET;
        break;
    default:
        return 0;
    }
    if (s->at[r] == QUIET && !aborts && s->sent[r] < N_ROUNDS) s->at[r] = STORE;
    return 1;
}

/* Store buffers. */
static void land(const state_t *s) {
    state_t t = *s;
    if (s->late_parked) {
        t.parked = (uint8_t)(s->late_parked - 1);
        t.late_parked = 0;
        mc_emit(&t);
    }
    for (int r = 0; r < N_PEERS; r++) {
        t = *s;
        if (!s->late_word[r]) continue;
        t.word[r] = (uint8_t)(s->late_word[r] - 1);
        t.late_word[r] = 0;
        mc_emit(&t);
    }
}

static void successors(const void *state) {
    const state_t *s = state;
    state_t t = *s;
    if (step_waiter(&t)) mc_emit(&t);
    t = *s;
    if (s->place == ASLEEP && s->n_deaths && !is(NO_SLICE)) {
        t.place = UNPARK; /* the slice ends */
        mc_emit(&t);
    }
    for (int r = 0; r < (cfg.aborts ? N_RINGERS : N_PEERS); r++) {
        t = *s;
        if (!s->dead[r] && step_ringer(&t, r)) mc_emit(&t);
        t = *s;
        if (r == 0 && s->n_deaths < cfg.deaths && s->at[r] != QUIET) {
            t.dead[r] = 1;
            t.n_deaths++;
            mc_emit(&t);
        }
    }
    land(s);
}

static int is_final(const void *state) { return ((const state_t *)state)->place == DONE; }

enum { N_MODELS = 5 };

/* The i-th model: with and without an abort and a death; then an abort and a silent peer. */
static const char *search(int i, mistake_t m, size_t *out_states) {
    state_t first;
    _Static_assert(sizeof first % 8 == 0, "whole words");
    memset(&first, 0, sizeof first);
    cfg.silent = i == 4;
    cfg.aborts = (i & 1) || cfg.silent;
    cfg.deaths = i >> 1 & 1;
    cfg.mistake = m;
    if (cfg.silent) first.at[0] = QUIET, first.sent[0] = N_ROUNDS;
    return mc_search(&first, sizeof first, successors, is_final, out_states);
}

int main(void) {
    int n_bad = 0;
    size_t n;
    for (int i = 0; i < N_MODELS; i++) {
        const char *what = search(i, NONE, &n);
        printf("parking%s%s%s: %zu states, %s\n", cfg.aborts ? ", one rank aborts" : "", cfg.deaths ? ", one may die" : "",
               cfg.silent ? ", one is silent" : "", n, what ? what : "no bad state");
        n_bad += what != NULL;
    }
    for (int m = 1; m < N_MISTAKES; m++) {
        const char *what = NULL;
        for (int i = 0; i < N_MODELS && !what; i++) what = search(i, (mistake_t)m, &n);
        printf("%s (%s): %s\n", names[m], texts[m], what ? "found" : "NOT FOUND");
        n_bad += what == NULL;
    }
    mc_end();
    return n_bad != 0;
}
