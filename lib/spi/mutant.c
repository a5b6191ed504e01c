/* The switch of the planted mistakes. Empty in ordinary builds. */
#include "spi/mutant.h"

#ifdef EPX_MUTANTS
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static char active[64];

static void read_environment(void) {
    const char *s = getenv("EPX_MUTANT");
    if (s != NULL) strncpy(active, s, sizeof active - 1);
}

int epx_mutant_is(const char *name) {
    pthread_once(&once, read_environment);
    return strcmp(active, name) == 0;
}

void epx_mutant_pause(void) {
    struct timespec ts = {0, 3000000};
    nanosleep(&ts, NULL);
}
#else
typedef int epx_mutant_unused_t; /* ISO C wants one declaration in a file */
#endif
