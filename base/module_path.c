/* See module_path.h. */
#include "base/module_path.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PATH_BYTES = 4096 };

/* The folder of the file this code is in: the program, or libepx.so. */
static int beside(char *out, size_t n) {
    Dl_info info;
    const char *slash;
    void *here;
    void (*self)(const char *, const char *, char *, size_t) = epx_module_path;
    memcpy(&here, &self, sizeof here);
    if (dladdr(here, &info) == 0 || info.dli_fname == NULL || (slash = strrchr(info.dli_fname, '/')) == NULL) return -1;
    return snprintf(out, n, "%.*s", (int)(slash - info.dli_fname), info.dli_fname) < (int)n ? 0 : -1;
}

static int readable(const char *path) {
    FILE *f = fopen(path, "re");
    if (f != NULL) fclose(f);
    return f != NULL;
}

void epx_module_path(const char *env, const char *file, char *out, size_t n_out) {
    static const char *const places[] = {"", "/../lib", "/../lib/epx"};
    char folder[PATH_BYTES / 2], path[PATH_BYTES];
    const char *given = getenv(env);
    snprintf(out, n_out, "%s", given != NULL ? given : file);
    if (given != NULL || beside(folder, sizeof folder) != 0) return;
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        const int n = snprintf(path, sizeof path, "%s%s/%s", folder, places[i], file);
        if (n >= (int)sizeof path || n >= (int)n_out || !readable(path)) continue;
        memcpy(out, path, (size_t)n + 1);
        return;
    }
}
