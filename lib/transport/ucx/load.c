/* Looks in $EPX_MODULE_DIR if that is set and nowhere else; else beside the object that this code is in, in ../lib and
 * ../<libdir> from there, likewise around the program, and where the dynamic loader looks. UCX reads three settings while it is
 * loaded; unless the user has set them, they are set during that time: it must not handle signals, patch memory functions or
 * print. */
#include "transport/ucx/load.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"

#define MODULE_FILE "libepx_ucx.so"
#ifndef EPX_LIBDIR
#define EPX_LIBDIR "lib"
#endif

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const epx_wire_module_t *module;
static char reason[400];

static void *open_file(const char *path) {
    void *h = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (h == NULL) snprintf(reason, sizeof reason, "%s", dlerror());
    return h;
}

/* dir/sub/MODULE_FILE where there is such a file: a missing one must not hide why another one failed. */
static void *open_in(const char *dir, size_t dir_len, const char *sub) {
    char path[1024];
    FILE *f;
    if (snprintf(path, sizeof path, "%.*s%s/%s", (int)dir_len, dir, sub, MODULE_FILE) >= (int)sizeof path) return NULL;
    f = fopen(path, "re");
    if (f == NULL) return NULL;
    fclose(f);
    return open_file(path);
}

/* Around the folder of a file. */
static void *open_around(const char *file) {
    static const char *const places[] = {"", "/../lib", "/../" EPX_LIBDIR, "/../" EPX_LIBDIR "/epx", "/epx"};
    const char *slash = strrchr(file, '/');
    void *h = NULL;
    for (size_t i = 0; slash != NULL && h == NULL && i < sizeof places / sizeof places[0]; i++)
        h = open_in(file, (size_t)(slash - file), places[i]);
    return h;
}

/* Of a program that has libepx in it, the dynamic loader knows only the name by which it was called. */
static void *open_around_program(void) {
    char path[1024];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    if (n < 0) return NULL;
    path[n] = '\0';
    return open_around(path);
}

static void *open_somewhere(void) {
    const char *dir = secure_getenv("EPX_MODULE_DIR");
    Dl_info self;
    void *h = NULL;
    if (dir != NULL) {
        snprintf(reason, sizeof reason, "there is no " MODULE_FILE " in EPX_MODULE_DIR");
        return open_in(dir, strlen(dir), "");
    }
    if (dladdr((const void *)&once, &self) != 0) h = open_around(self.dli_fname);
    if (h == NULL && reason[0] == '\0') h = open_around_program();
    return h != NULL || reason[0] != '\0' ? h : open_file(MODULE_FILE);
}

static void load(void) {
    static const char *const settings[][2] = {{"UCX_MEM_EVENTS", "n"}, {"UCX_ERROR_SIGNALS", ""}, {"UCX_LOG_LEVEL", "fatal"}};
    int ours[3];
    for (int i = 0; i < 3; i++) {
        ours[i] = getenv(settings[i][0]) == NULL;
        if (ours[i]) setenv(settings[i][0], settings[i][1], 1);
    }
    void *h = open_somewhere(); /* stays open: UCX does not like to be unloaded */
    for (int i = 0; i < 3; i++)
        if (ours[i]) unsetenv(settings[i][0]);
    if (h == NULL) return;
    const epx_wire_module_t *(*entry)(void) = NULL;
    *(void **)&entry = dlsym(h, EPX_WIRE_MODULE);
    const epx_wire_module_t *m = entry == NULL ? NULL : entry();
    if (m == NULL || m->abi != EPX_WIRE_ABI)
        snprintf(reason, sizeof reason, MODULE_FILE " is of another version (ABI %u, %u expected)", m == NULL ? 0 : m->abi,
                 EPX_WIRE_ABI);
    else module = m;
}

epx_status_t epx_ucx_load(const epx_wire_module_t **out_module) {
    pthread_once(&once, load);
    if (module == NULL) return epx_fail(EPX_ERR_UNSUPPORTED, "hosts over UCX: %s", reason);
    *out_module = module;
    return EPX_OK;
}
