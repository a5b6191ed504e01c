/* Driver for a fuzz harness where libFuzzer is not there: replays the seed files given (or found in the directories given), then
 * a few hundred deterministic mutations of them. Not a fuzzer: no coverage feedback; it keeps harness and seeds working under any
 * compiler and sanitizer. EPX_SEED sets the random seed, EPX_FUZZ_RUNS the number of mutations; a failing input is left in
 * PROGRAM-input.bin of the working directory. */
#include <dirent.h>
#include <errno.h> /* program_invocation_short_name */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { MAX_SEEDS = 4096, MAX_SEED_BYTES = 1 << 20, DEFAULT_RUNS = 400, MAX_EDITS = 4 };

typedef struct {
    uint8_t *data;
    size_t n_bytes;
} input_t;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static input_t seeds[MAX_SEEDS];
static size_t n_seeds;
static uint64_t rng_state;
static char input_path[256];

static uint64_t rng(void) { /* xorshift64*: Vigna, "An experimental exploration of Marsaglia's xorshift generators" */
    rng_state ^= rng_state >> 12;
    rng_state ^= rng_state << 25;
    rng_state ^= rng_state >> 27;
    return rng_state * 0x2545F4914F6CDD1DULL;
}
static size_t below(size_t n) { return n ? (size_t)(rng() % n) : 0; }

static void add_file(const char *path) {
    FILE *f = fopen(path, "rb");
    uint8_t *data = malloc(MAX_SEED_BYTES);
    if (!f || !data || n_seeds == MAX_SEEDS) {
        fprintf(stderr, "cannot read seed %s\n", path);
        exit(1);
    }
    seeds[n_seeds].n_bytes = fread(data, 1, MAX_SEED_BYTES, f);
    seeds[n_seeds++].data = data;
    fclose(f);
}

static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* Sorted, so that the runs do not depend on the order of the directory. */
static void add_directory(const char *path) {
    DIR *d = opendir(path);
    char *names[MAX_SEEDS];
    size_t n = 0;
    for (struct dirent *e; d && (e = readdir(d)) != NULL;) {
        char full[4096];
        if (e->d_name[0] == '.' || n == MAX_SEEDS) continue;
        snprintf(full, sizeof full, "%s/%s", path, e->d_name);
        names[n++] = strdup(full);
    }
    if (d) closedir(d);
    qsort(names, n, sizeof names[0], by_name);
    for (size_t i = 0; i < n; i++) {
        add_file(names[i]);
        free(names[i]);
    }
}

static void add_path(const char *path) {
    struct stat st;
    if (stat(path, &st) != 0) {
        fprintf(stderr, "no seed file or directory %s\n", path);
        exit(1);
    }
    if (S_ISDIR(st.st_mode)) add_directory(path);
    else add_file(path);
}

static void keep_for_report(const uint8_t *data, size_t n) {
    FILE *f = fopen(input_path, "wb");
    if (!f) return;
    fwrite(data, 1, n, f);
    fclose(f);
}

/* The harness gets a block of exactly n bytes, so that a sanitizer sees reads past the end. */
static void run(const uint8_t *data, size_t n) {
    uint8_t *exact = malloc(n ? n : 1);
    if (!exact) exit(1);
    if (n) memcpy(exact, data, n);
    keep_for_report(data, n);
    LLVMFuzzerTestOneInput(exact, n);
    free(exact);
}

/* One edit in place; the buffer has room for twice MAX_SEED_BYTES. */
static size_t edit(uint8_t *d, size_t n) {
    static const char *words[] = {"\"",
                                  "{",
                                  "}",
                                  "[",
                                  "]",
                                  ",",
                                  ":",
                                  "\\u0000",
                                  "\\ud800",
                                  "-1",
                                  "1e400",
                                  "null",
                                  "99999999999999999999",
                                  "{%",
                                  "%}",
                                  "{{",
                                  "}}",
                                  "\xff",
                                  "\xe2\x82",
                                  "\0\0\0\0"};
    size_t at = below(n + 1), len;
    switch (rng() % 7) {
    case 0:
        if (n) d[below(n)] ^= (uint8_t)(1u << below(8));
        return n;
    case 1:
        if (n) d[below(n)] = (uint8_t)rng();
        return n;
    case 2:
        return at; /* cut */
    case 3:        /* delete */
        len = below(n - at + 1) % 16;
        memmove(d + at, d + at + len, n - at - len);
        return n - len;
    case 4: /* a word */ {
        const char *w = words[below(sizeof words / sizeof words[0])];
        len = w[0] ? strlen(w) : 4;
        if (n + len > MAX_SEED_BYTES) return n;
        memmove(d + at + len, d + at, n - at);
        memcpy(d + at, w, len);
        return n + len;
    }
    case 5: /* repeat a piece */
        len = below(n - at + 1) % 4096;
        if (n + len > MAX_SEED_BYTES) return n;
        memmove(d + at + len, d + at, n - at);
        return n + len;
    default: /* splice with another seed */ {
        const input_t *o = &seeds[below(n_seeds)];
        size_t from = below(o->n_bytes + 1);
        len = o->n_bytes - from;
        if (at + len > MAX_SEED_BYTES) return n;
        memcpy(d + at, o->data + from, len);
        return at + len;
    }
    }
}

static void run_mutations(long n_runs) {
    uint8_t *buf = malloc(2 * (size_t)MAX_SEED_BYTES);
    if (!buf) exit(1);
    for (long r = 0; r < n_runs; r++) {
        const input_t *s = &seeds[below(n_seeds)];
        size_t n = s->n_bytes, n_edits = 1 + below(MAX_EDITS);
        memcpy(buf, s->data, n);
        for (size_t e = 0; e < n_edits; e++) n = edit(buf, n);
        run(buf, n);
    }
    free(buf);
}

int main(int argc, char **argv) {
    const char *seed = getenv("EPX_SEED"), *runs = getenv("EPX_FUZZ_RUNS");
    rng_state = seed ? strtoull(seed, NULL, 0) : 20261130;
    if (!rng_state) rng_state = 1;
    snprintf(input_path, sizeof input_path, "%s-input.bin", program_invocation_short_name);
    printf("EPX_SEED=%llu\n", (unsigned long long)rng_state);
    for (int i = 1; i < argc; i++) add_path(argv[i]);
    run((const uint8_t *)"", 0);
    for (size_t i = 0; i < n_seeds; i++) run(seeds[i].data, seeds[i].n_bytes);
    long n_runs = runs ? strtol(runs, NULL, 0) : DEFAULT_RUNS;
    if (n_seeds) run_mutations(n_runs);
    printf("%zu seeds, %ld mutations\n", n_seeds, n_seeds ? n_runs : 0);
    remove(input_path);
    for (size_t i = 0; i < n_seeds; i++) free(seeds[i].data);
    return 0;
}
