/* An explicit-state model checker of the exchange protocol (docs/protocol.md sections 2 to 4 and 6): every interleaving of W
 * ranks, N channels and E epochs, with and without a rank that dies at any point, is visited by breadth-first search.
 *
 * Usage: model_check [MISTAKE]   Without an argument: the correct protocol must have no bad state, then each planted mistake must
 * have one. Exit 0: both hold.
 *
 * Memory model. Stores of a rank to one peer's slab may become visible in any order, except that a flag store (release) waits for
 * all earlier stores to that slab. Each rank therefore has, for every peer and channel, pending stores: a table/row store and the
 * flags; a pending store lands at any later step. This is weaker than x86 and is what a release store promises. Reads of a slab
 * take effect where the rank makes them (acquire loads of the flags keep them behind the flag).
 *
 * What is abstracted: payloads are the epoch that they were written for (2 bits); X, stage, D, ids, weights and count are one
 * datum per source, since they are written and read between the same two waits; C is one datum per source. In-place readers read
 * the source's own slab (X); that is the datum x[src] of the source. The halves are what the library calls them.
 *
 * Bad states: a read that finds another epoch's datum (early overwrite or missing data), and a state without a successor in which
 * a living rank is neither finished nor in an error (deadlock). */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "tests/model_check/search.h"

enum { MAX_W = 3, MAX_N = 2, N_EPOCHS = 2 };

/* Where a rank is on a channel. Order of one epoch: */
typedef enum {
    WRITE_TABLES, /* dispatch_send: epx_exchange_push_routing(), epx_exchange_stage() */
    FLAG_D,       /* epx_exchange_flag_dispatch() */
    WAIT_D,       /* dispatch_recv: epx_exchange_wait_dispatch(), one peer at a time */
    READ_ROWS,    /* lists, expert rows read in place; until combine_send */
    WRITE_C,      /* combine_send: epx_exchange_send_rows() */
    FLAG_C,       /* epx_exchange_flag_combine() */
    WAIT_C,       /* combine_recv: epx_exchange_wait_combine() */
    READ_C,       /* epx_exchange_sum() */
    FINISHED
} place_t;

/* One byte a field: states are compared and hashed as bytes. */
typedef struct {
    uint8_t place, epoch, waited; /* waited: peers whose flag this half has seen */
    uint8_t x;                    /* own rows: the epoch they are of */
    /* In this rank's slab, by source: */
    uint8_t table[MAX_W], c[MAX_W], flag_d[MAX_W], flag_c[MAX_W];
    /* On the way to this rank's slab, by source; 0: nothing. */
    uint8_t p_table[MAX_W], p_c[MAX_W], p_flag_d[MAX_W], p_flag_c[MAX_W];
} channel_t;

typedef struct {
    channel_t ch[MAX_W][MAX_N];
    uint8_t dead[MAX_W], failed[MAX_W], aborted; /* aborted: bit of each rank that has seen or set the abort word */
    uint8_t n_deaths;
} state_t;

#define MISTAKES(X)                                                                         \
    X(NONE, "the protocol as it is")                                                        \
    X(FLAG_D_BEFORE_DATA, "the dispatch flag is set before tables and rows are written")    \
    X(FLAG_C_BEFORE_DATA, "the combine flag is set before the rows back are written")       \
    X(RELAXED_FLAG, "flags are relaxed stores: data may land after them")                   \
    X(NO_WAIT_D, "dispatch_recv does not wait")                                             \
    X(NO_WAIT_C, "combine_recv does not wait: tables and C are reused early")               \
    X(WAIT_ONE_D, "dispatch_recv waits for one peer only")                                  \
    X(WAIT_ONE_C, "combine_recv waits only for the ranks that own an expert of the tokens") \
    X(SKIP_FLAG_AT_ZERO, "a rank that sends no rows sets no dispatch flag")                 \
    X(STALE_EPOCH, "a wait accepts the flag of the epoch before")                           \
    X(FLAG_C_BEFORE_READ, "the combine flag is set before the rows of the peers were read") \
    X(SHARED_C, "both channels use the C region of channel 0")                              \
    X(SHARED_FLAGS, "both channels use the flags of channel 0")                             \
    X(NO_DEATH_CHECK, "waits do not look for dead peers nor at the abort word")             \
    X(NO_ABORT_WORD, "who finds a dead peer tells nobody, and only the awaited peer is looked at")

#define AS_ENUM(name, text) name,
typedef enum { MISTAKES(AS_ENUM) N_MISTAKES } mistake_t;
#define AS_NAME(name, text) #name,
#define AS_TEXT(name, text) text,
static const char *const names[] = {MISTAKES(AS_NAME)};
static const char *const texts[] = {MISTAKES(AS_TEXT)};

typedef struct {
    int w, n_channels, deaths;
    mistake_t mistake;
} config_t;

static config_t cfg;

static int is(mistake_t m) { return cfg.mistake == m; }
static uint8_t all_peers(void) { return (uint8_t)((1u << cfg.w) - 1); }
static int c_channel(int n) { return is(SHARED_C) ? 0 : n; }
static int flag_channel(int n) { return is(SHARED_FLAGS) ? 0 : n; }

/* ---- steps of a rank ---- */

/* A store must not overtake an earlier one to the same place: set when a step would, which is then not possible yet. */
static int blocked;

/* A put into every slab; own stores are visible at once. */
#define PUT(s, r, n, field, value)                              \
    do {                                                        \
        for (int to_ = 0; to_ < cfg.w; to_++) {                 \
            blocked |= (s)->ch[to_][n].p_##field[r] != 0;       \
            if (to_ == (r)) (s)->ch[to_][n].field[r] = (value); \
            else (s)->ch[to_][n].p_##field[r] = (value);        \
        }                                                       \
    } while (0)

/* Rank 1 is the one that sends no rows in epoch 2: what conditional flags and waits would leave out. */
static int sends_rows(const channel_t *c, int r) { return !(r == 1 && c->epoch == 2); }

static void write_tables(state_t *s, int r, int n) {
    channel_t *c = &s->ch[r][n];
    c->epoch++;
    c->x = c->epoch;
    PUT(s, r, n, table, c->epoch);
}

static void flag_d(state_t *s, int r, int n) {
    if (is(SKIP_FLAG_AT_ZERO) && !sends_rows(&s->ch[r][n], r)) return;
    PUT(s, r, flag_channel(n), flag_d, s->ch[r][n].epoch);
}

/* The rows of peers are read in place, the tables in the own slab; both must be of this epoch. */
static void read_rows(state_t *s, int r, int n) {
    const channel_t *c = &s->ch[r][n];
    for (int src = 0; src < cfg.w; src++) {
        if (c->table[src] != c->epoch) mc_bad("tables of another epoch were read");
        if (s->ch[src][n].x != c->epoch) mc_bad("rows of another epoch were read");
    }
}

/* The value carries its channel, so that a shared region shows. */
static uint8_t c_value(int epoch, int n) { return (uint8_t)(epoch * 4 + n); }

static void write_c(state_t *s, int r, int n) { PUT(s, r, c_channel(n), c, c_value(s->ch[r][n].epoch, n)); }
static void flag_c(state_t *s, int r, int n) { PUT(s, r, flag_channel(n), flag_c, s->ch[r][n].epoch); }

static void read_c(state_t *s, int r, int n) {
    channel_t *c = &s->ch[r][n];
    for (int src = 0; src < cfg.w; src++)
        if (s->ch[r][c_channel(n)].c[src] != c_value(c->epoch, n)) mc_bad("rows back of another epoch were summed");
    c->place = c->epoch == N_EPOCHS ? FINISHED : WRITE_TABLES;
}

/* The order of one epoch; mistakes exchange neighbours. */
static void next(channel_t *c) { c->place++; }

static void run_place(state_t *s, int r, int n) {
    channel_t *c = &s->ch[r][n];
    switch ((place_t)c->place) {
    case WRITE_TABLES:
        if (is(FLAG_D_BEFORE_DATA)) {
            PUT(s, r, n, flag_d, (uint8_t)(c->epoch + 1));
            c->place = FLAG_D;
            return;
        }
        write_tables(s, r, n);
        break;
    case FLAG_D:
        if (is(FLAG_D_BEFORE_DATA)) write_tables(s, r, n);
        else flag_d(s, r, n);
        break;
    case READ_ROWS:
        if (is(FLAG_C_BEFORE_READ)) write_c(s, r, n);
        else read_rows(s, r, n);
        break;
    case WRITE_C:
        if (is(FLAG_C_BEFORE_DATA) || is(FLAG_C_BEFORE_READ)) flag_c(s, r, n);
        else write_c(s, r, n);
        break;
    case FLAG_C:
        if (is(FLAG_C_BEFORE_DATA)) write_c(s, r, n);
        else if (is(FLAG_C_BEFORE_READ)) read_rows(s, r, n);
        else flag_c(s, r, n);
        break;
    case READ_C:
        read_c(s, r, n);
        c->waited = 0;
        return;
    default:
        return;
    }
    next(c);
    c->waited = 0;
}

/* ---- waits ---- */

static int waits_for_none(int place) { return (is(NO_WAIT_D) && place == WAIT_D) || (is(NO_WAIT_C) && place == WAIT_C); }

static int may_skip(const state_t *s, int r, int n, int src) {
    const channel_t *c = &s->ch[r][n];
    if (is(WAIT_ONE_D) && c->place == WAIT_D) return src != (r + 1) % cfg.w;
    if (is(WAIT_ONE_C) && c->place == WAIT_C) return src != r && !sends_rows(c, r);
    return 0;
}

/* epx_wait_ge() on the flag of one peer. 1 when the rank moved. */
static int wait_step(state_t *s, int r, int n, int src) {
    channel_t *c = &s->ch[r][n], *f = &s->ch[r][flag_channel(n)];
    uint8_t *flag = c->place == WAIT_D ? &f->flag_d[src] : &f->flag_c[src];
    uint8_t want = is(STALE_EPOCH) && c->epoch > 1 ? (uint8_t)(c->epoch - 1) : c->epoch;
    if (*flag < want && !may_skip(s, r, n, src) && !waits_for_none(c->place)) return 0;
    c->waited |= (uint8_t)(1u << src);
    if (c->waited == all_peers()) {
        c->waited = 0;
        next(c);
    }
    return 1;
}

/* What look_around() finds while rank r waits for src: 1 when the wait ends in an error. */
static int wait_fails(const state_t *s, int r, int src) {
    if (is(NO_DEATH_CHECK)) return 0;
    if (is(NO_ABORT_WORD)) return s->dead[src];
    if (s->aborted & (1u << r)) return 1;
    for (int i = 0; i < cfg.w; i++)
        if (s->dead[i]) return 1;
    return 0;
}

/* epx_plan_fail() and epx_slab_abort(). */
static void fail_rank(state_t *s, int r) {
    s->failed[r] = 1;
    if (!is(NO_ABORT_WORD)) s->aborted = all_peers();
}

/* ---- successors ---- */

/* One pending store of `src` lands in the slab of `to`. A flag waits for the data before it (release). */
static void land(const state_t *s, int to, int n, int src) {
    const channel_t *c = &s->ch[to][n];
    state_t t;
    int data_pending = 0;
    for (int k = 0; k < cfg.n_channels; k++) data_pending |= s->ch[to][k].p_table[src] || s->ch[to][k].p_c[src];
    if (is(RELAXED_FLAG)) data_pending = 0;
#define LAND(field)                                 \
    do {                                            \
        t = *s;                                     \
        t.ch[to][n].field[src] = c->p_##field[src]; \
        t.ch[to][n].p_##field[src] = 0;             \
        mc_emit(&t);                                \
    } while (0)
    if (c->p_table[src]) LAND(table);
    if (c->p_c[src]) LAND(c);
    if (c->p_flag_d[src] && !data_pending) LAND(flag_d);
    if (c->p_flag_c[src] && !data_pending) LAND(flag_c);
}

static void step_rank(const state_t *s, int r, int n) {
    const channel_t *c = &s->ch[r][n];
    state_t t;
    if (c->place == FINISHED) return;
    if (c->place != WAIT_D && c->place != WAIT_C) {
        t = *s;
        blocked = 0;
        run_place(&t, r, n);
        if (!blocked) mc_emit(&t);
        return;
    }
    int src = r;
    do src = (src + 1) % cfg.w; /* the order of nth_dst(): own rank last */
    while (c->waited & (1u << src));
    t = *s;
    if (wait_step(&t, r, n, src)) {
        mc_emit(&t);
    } else if (wait_fails(s, r, src)) {
        fail_rank(&t, r);
        mc_emit(&t);
    }
}

static void successors(const void *state) {
    const state_t *s = state;
    for (int r = 0; r < cfg.w && !mc_is_bad(); r++) {
        for (int n = 0; n < cfg.n_channels && !mc_is_bad(); n++) {
            for (int src = 0; src < cfg.w; src++) land(s, r, n, src); /* also what a dead rank had already stored */
            if (!s->dead[r] && !s->failed[r]) step_rank(s, r, n);
        }
        if (s->n_deaths < cfg.deaths && !s->dead[r] && r == cfg.w - 1 && !mc_is_bad()) {
            state_t t = *s;
            t.dead[r] = 1;
            t.n_deaths++;
            mc_emit(&t);
        }
    }
}

/* Every living rank has finished all channels or has an error. */
static int is_final(const void *state) {
    const state_t *s = state;
    for (int r = 0; r < cfg.w; r++)
        for (int n = 0; n < cfg.n_channels; n++)
            if (!s->dead[r] && !s->failed[r] && s->ch[r][n].place != FINISHED) return 0;
    return 1;
}

/* NULL: no bad state; else what is wrong. */
static const char *search(const config_t *c, size_t *out_states) {
    state_t first;
    _Static_assert(sizeof first % 8 == 0, "whole words");
    cfg = *c;
    memset(&first, 0, sizeof first);
    return mc_search(&first, sizeof first, successors, is_final, out_states);
}

/* ---- main ---- */

/* 2 ranks with 2 channels, 3 ranks with one; with and without a death. */
static const config_t models[] = {{2, 1, 0, NONE}, {2, 1, 1, NONE}, {2, 2, 0, NONE},
                                  {3, 1, 0, NONE}, {3, 1, 1, NONE}, {2, 2, 1, NONE}};
enum { N_MODELS = sizeof models / sizeof models[0] };

static int check_protocol(void) {
    int n_bad = 0;
    for (int i = 0; i < N_MODELS; i++) {
        size_t n;
        const char *what = search(&models[i], &n);
        printf("%d ranks, %d channel%s, %d epochs, %d death%s: %zu states, %s\n", models[i].w, models[i].n_channels,
               models[i].n_channels == 1 ? "" : "s", N_EPOCHS, models[i].deaths, models[i].deaths == 1 ? "" : "s", n,
               what ? what : "no bad state");
        n_bad += what != NULL;
    }
    return n_bad;
}

static int check_mistake(int m) {
    for (int i = 0; i < N_MODELS; i++) {
        config_t c = models[i];
        size_t n;
        c.mistake = (mistake_t)m;
        const char *what = search(&c, &n);
        if (!what) continue;
        printf("%s (%s): found with %d ranks, %d channels, %d deaths after %zu states: %s\n", names[m], texts[m], c.w,
               c.n_channels, c.deaths, n, what);
        return 0;
    }
    printf("%s (%s): NOT FOUND\n", names[m], texts[m]);
    return 1;
}

int main(int argc, char **argv) {
    int n_bad = 0;
    for (int m = 1; argc > 1 && m < N_MISTAKES; m++)
        if (strcmp(argv[1], names[m]) == 0) return check_mistake(m);
    n_bad = check_protocol();
    for (int m = 1; m < N_MISTAKES; m++) n_bad += check_mistake(m);
    mc_end();
    return n_bad != 0;
}
