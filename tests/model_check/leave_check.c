/* A model checker of the end of a plan and its group (docs/protocol.md sections 3 and 6; epx_plan_destroy(), epx_group_destroy(),
 * look_around()): ranks exchange once, or give an exchange up after dispatch, then destroy, while others lag, leave early or die
 * at any point. Every interleaving of 2 and 3 ranks is visited.
 *
 * Usage: leave_check: the protocol as it is must have no bad state, then each planted mistake must have one. Exit 0: both hold.
 *
 * Memory model: as in model_check.c. Stores to a peer's slab land at any later step; a flag (release) lands after the stores
 * before it to that slab. `left` is a release store, too: who sees it sees all earlier stores of that rank. A closed socket is
 * seen after what the rank did before closing it.
 *
 * Bad states: a rank touches the slab of one that has freed it in order (after a failure slabs are only unmapped by their owner:
 * mappings of others hold the memory); a living rank is taken for dead; a failure without a reason, that is without a death or an
 * early leaver; and a state without a successor in which a living rank is not done. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "tests/model_check/search.h"

enum { MAX_W = 3 };

typedef enum {
    SEND,       /* dispatch_send: data and flag to every rank */
    WAIT_D,     /* dispatch_recv */
    READ,       /* rows in place, in every rank's slab */
    ANSWER,     /* combine_send: data and flag */
    WAIT_C,     /* combine_recv */
    SAY_LEAVE,  /* epx_plan_destroy(): leave(): the flags */
    WAIT_LEAVE, /* the others' */
    FREE,       /* slab_free() */
    SET_LEFT,   /* epx_group_destroy() */
    CLOSE,      /* the sockets */
    GONE
} place_t;

/* Flags of a rank in another's slab, in the order in which they are set. */
enum { FLAG_D, FLAG_C, FLAG_LEAVE, N_FLAGS };

typedef struct {
    uint8_t place, waited, saw_nothing; /* saw_nothing: the flag had not come, and the wait is about to look around */
    uint8_t failed, aborted, dead, left, closed, freed;
    uint8_t flag[N_FLAGS][MAX_W]; /* in this rank's slab, by source */
    uint8_t late_data[MAX_W];     /* on the way to this rank's slab, by source */
    uint8_t late_flag[N_FLAGS][MAX_W];
} rank_t;

typedef struct {
    rank_t r[MAX_W];
    uint8_t n_deaths, pad[16];
} packed_t;

/* Whole words. */
typedef union {
    packed_t s;
    uint64_t words[(sizeof(packed_t) + 7) / 8];
} state_t;

#define MISTAKES(X)                                                                              \
    X(NONE, "leaving as it is")                                                                  \
    X(NO_LEAVE_WAIT, "destroy frees the slab without waiting for the others")                    \
    X(WAIT_ONE_LEAVE, "destroy waits for one other rank only")                                   \
    X(LEAVE_BEFORE_READ, "the leave flags are set before the rows of the others were read")      \
    X(NO_LEFT_CHECK, "waits do not look whether the awaited rank has left")                      \
    X(CLOSE_BEFORE_LEFT, "the sockets are closed before `left` is set")                          \
    X(RELAXED_LEFT, "`left` may be seen before the flags that were set before it")               \
    X(NO_SECOND_LOOK, "who sees `left` does not look again whether the flag has come meanwhile") \
    X(LEFT_IS_DEAD, "a closed socket is a death, whether its rank has left or not")              \
    X(NO_DEATH_CHECK, "the waits of destroy do not look for dead ranks")

#define AS_ENUM(name, text) name,
typedef enum { MISTAKES(AS_ENUM) N_MISTAKES } mistake_t;
#define AS_NAME(name, text) #name,
#define AS_TEXT(name, text) text,
static const char *const names[] = {MISTAKES(AS_NAME)};
static const char *const texts[] = {MISTAKES(AS_TEXT)};

typedef struct {
    int w, gives_up, early, deaths; /* gives_up: all destroy after READ; early: rank 0 destroys the plan before it has sent
                                       anything (1), or leaves the group at once (2) */
    mistake_t mistake;
} config_t;

static config_t cfg;

static int is(mistake_t m) { return cfg.mistake == m; }

/* ---- memory ---- */

static void touch(const state_t *t, int who, int whose) {
    if (who != whose && t->s.r[whose].freed && !t->s.r[whose].failed) mc_bad("a slab was used after its owner had freed it");
}

static void put_flags(state_t *t, int r, int flag) {
    for (int to = 0; to < cfg.w; to++) {
        if (to == r) t->s.r[to].flag[flag][r] = 1;
        else t->s.r[to].late_flag[flag][r] = 1;
    }
}

static void put_data(state_t *t, int r) {
    for (int to = 0; to < cfg.w; to++)
        if (to != r) t->s.r[to].late_data[r] = 1;
}

static int flag_pending(const rank_t *to, int src, int before) {
    int n = to->late_data[src];
    for (int f = 0; f < before; f++) n += to->late_flag[f][src];
    return n;
}

static void land(const state_t *s) {
    for (int to = 0; to < cfg.w; to++) {
        for (int src = 0; src < cfg.w; src++) {
            state_t t = *s;
            if (s->s.r[to].late_data[src]) {
                touch(&t, src, to);
                t.s.r[to].late_data[src] = 0;
                mc_emit(&t);
            }
            for (int f = 0; f < N_FLAGS; f++) {
                if (!s->s.r[to].late_flag[f][src] || flag_pending(&s->s.r[to], src, f)) continue;
                t = *s;
                touch(&t, src, to);
                t.s.r[to].late_flag[f][src] = 0;
                t.s.r[to].flag[f][src] = 1;
                mc_emit(&t);
            }
        }
    }
}

/* Stores of r that nobody has seen yet. */
static int has_late(const state_t *s, int r) {
    int n = 0;
    for (int to = 0; to < cfg.w; to++) n += flag_pending(&s->s.r[to], r, N_FLAGS);
    return n;
}

/* ---- failures ---- */

/* The wait of r ended in an error; destroy then frees without leave flags. */
static void fail(state_t *t, int r) {
    if (!cfg.early && !t->s.n_deaths) mc_bad("an exchange failed although nobody died or left early");
    t->s.r[r].failed = 1;
    t->s.r[r].place = FREE;
    t->s.r[r].waited = 0;
    for (int to = 0; to < cfg.w; to++) t->s.r[to].aborted = 1;
}

/* A peer whose socket is closed and who has not left. */
static int finds_dead(const state_t *s, int r) {
    for (int p = 0; p < cfg.w; p++) {
        const rank_t *q = &s->s.r[p];
        if (p == r || !(q->closed || q->dead)) continue;
        if (q->left && !is(LEFT_IS_DEAD)) continue;
        if (!q->dead) mc_bad("a living rank was taken for dead");
        return 1;
    }
    return 0;
}

/* look_around() and the second look at the flag. 1: the wait ends in an error. */
static int wait_fails(const state_t *s, int r, int src, int flag) {
    const rank_t *me = &s->s.r[r];
    int checks_death = !(is(NO_DEATH_CHECK) && me->place == WAIT_LEAVE);
    if (me->aborted && checks_death) return 1;
    if (checks_death && finds_dead(s, r)) return 1;
    if (is(NO_LEFT_CHECK) || !s->s.r[src].left) return 0;
    return is(NO_SECOND_LOOK) || !me->flag[flag][src];
}

/* ---- steps ---- */

static place_t after(const rank_t *me) {
    if (me->place == READ && cfg.gives_up) return is(LEAVE_BEFORE_READ) ? WAIT_LEAVE : SAY_LEAVE;
    if (me->place == WAIT_D && is(LEAVE_BEFORE_READ)) return SAY_LEAVE;
    if (me->place == SAY_LEAVE && is(LEAVE_BEFORE_READ)) return READ;
    if (me->place == SAY_LEAVE && is(NO_LEAVE_WAIT)) return FREE;
    if (me->place == FREE && is(CLOSE_BEFORE_LEFT)) return CLOSE;
    if (me->place == CLOSE && is(CLOSE_BEFORE_LEFT)) return SET_LEFT;
    if (me->place == SET_LEFT && is(CLOSE_BEFORE_LEFT)) return GONE;
    return (place_t)(me->place + 1);
}

static int wait_flag(place_t p) { return p == WAIT_D ? FLAG_D : p == WAIT_C ? FLAG_C : FLAG_LEAVE; }

/* epx_wait_ge() for one rank: the flag, or a look around, then again. */
static void step_wait(const state_t *s, int r) {
    state_t t = *s;
    rank_t *me = &t.s.r[r];
    int flag = wait_flag((place_t)me->place), src = r;
    do src = (src + 1) % cfg.w;
    while (me->waited & (1u << src));
    int skip = is(WAIT_ONE_LEAVE) && flag == FLAG_LEAVE && src != (r + 1) % cfg.w;
    if (me->flag[flag][src] || skip) {
        me->saw_nothing = 0;
        me->waited |= (uint8_t)(1u << src);
        if (me->waited == (1u << cfg.w) - 1) {
            me->waited = 0;
            me->place = (uint8_t)after(me);
        }
        mc_emit(&t);
    }
    t = *s;
    if (!me->saw_nothing && !me->flag[flag][src]) {
        me->saw_nothing = 1; /* from here on the flag may come while the rank looks around */
        mc_emit(&t);
    } else if (me->saw_nothing && wait_fails(s, r, src, flag) && (is(NO_SECOND_LOOK) || !me->flag[flag][src])) {
        fail(&t, r);
        mc_emit(&t);
    }
    t = *s;
    if (cfg.early && r == 0 && me->place == WAIT_LEAVE) { /* its deadline */
        fail(&t, r);
        mc_emit(&t);
    }
}

static void step_rank(const state_t *s, int r) {
    state_t t = *s;
    rank_t *me = &t.s.r[r];
    switch ((place_t)me->place) {
    case SEND:
    case ANSWER:
        put_data(&t, r);
        put_flags(&t, r, me->place == SEND ? FLAG_D : FLAG_C);
        break;
    case READ:
        for (int p = 0; p < cfg.w; p++) touch(&t, r, p);
        break;
    case SAY_LEAVE:
        put_flags(&t, r, FLAG_LEAVE);
        break;
    case FREE:
        me->freed = 1;
        break;
    case SET_LEFT:
        if (has_late(s, r) && !is(RELAXED_LEFT)) return; /* release */
        me->left = 1;
        break;
    case CLOSE:
        me->closed = 1;
        break;
    case GONE:
        return;
    default:
        step_wait(s, r);
        return;
    }
    me->place = (uint8_t)after(me);
    mc_emit(&t);
}

static void successors(const void *state) {
    const state_t *s = state;
    land(s);
    for (int r = 0; r < cfg.w && !mc_is_bad(); r++) {
        if (!s->s.r[r].dead) step_rank(s, r);
        if (s->s.n_deaths < cfg.deaths && r == cfg.w - 1 && !s->s.r[r].dead && !s->s.r[r].left) {
            state_t t = *s;
            t.s.r[r].dead = 1;
            t.s.n_deaths++;
            mc_emit(&t);
        }
    }
}

static int is_final(const void *state) {
    const state_t *s = state;
    for (int r = 0; r < cfg.w; r++)
        if (!s->s.r[r].dead && s->s.r[r].place != GONE) return 0;
    return 1;
}

static const char *search(const config_t *c, size_t *out_states) {
    state_t first;
    cfg = *c;
    memset(&first, 0, sizeof first);
    if (c->early) first.s.r[0].place = c->early == 1 ? SAY_LEAVE : SET_LEFT;
    return mc_search(&first, sizeof first, successors, is_final, out_states);
}

static const config_t models[] = {{2, 0, 0, 0, NONE}, {2, 1, 0, 0, NONE}, {2, 0, 1, 0, NONE}, {2, 0, 0, 1, NONE},
                                  {2, 1, 1, 1, NONE}, {3, 1, 0, 0, NONE}, {3, 0, 0, 0, NONE}, {3, 0, 1, 0, NONE},
                                  {2, 0, 2, 0, NONE}, {3, 0, 2, 1, NONE}, {3, 1, 0, 1, NONE}, {3, 0, 0, 1, NONE}};
enum { N_MODELS = sizeof models / sizeof models[0] };

static const char *text_of(const config_t *c, char out[96]) {
    snprintf(out, 96, "%d ranks%s%s%s", c->w, c->gives_up ? ", exchange given up" : "",
             c->early == 1 ? ", one destroys early"
             : c->early    ? ", one leaves the group early"
                           : "",
             c->deaths ? ", one may die" : "");
    return out;
}

int main(void) {
    char text[96];
    int n_bad = 0;
    size_t n;
    for (int i = 0; i < N_MODELS; i++) {
        const char *what = search(&models[i], &n);
        printf("leaving, %s: %zu states, %s\n", text_of(&models[i], text), n, what ? what : "no bad state");
        n_bad += what != NULL;
    }
    for (int m = 1; m < N_MISTAKES; m++) {
        const char *what = NULL;
        int i = 0;
        for (; i < N_MODELS && !what; i++) {
            config_t c = models[i];
            c.mistake = (mistake_t)m;
            what = search(&c, &n);
        }
        printf("%s (%s): %s%s%s%s\n", names[m], texts[m], what ? "found with " : "NOT FOUND",
               what ? text_of(&models[i - 1], text) : "", what ? ": " : "", what ? what : "");
        n_bad += what == NULL;
    }
    mc_end();
    return n_bad != 0;
}
