/* How much memory is free for this process: /proc/meminfo and the control groups it is in. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "engine/kv/store.h"

enum { LINE_BYTES = 4096 };

/* Number of the first line that begins with `key`; 1 when found. */
static int read_keyed(const char *path, const char *key, uint64_t *out) {
    char line[LINE_BYTES];
    int found = 0;
    FILE *f = fopen(path, "re");
    while (f && !found && fgets(line, sizeof line, f))
        if (strncmp(line, key, strlen(key)) == 0) found = sscanf(line + strlen(key), "%" SCNu64, out) == 1;
    if (f) fclose(f);
    return found;
}

/* A file holding one number; "max" and anything else: 0 returned. */
static int read_number(const char *dir, const char *name, uint64_t *out) {
    char path[LINE_BYTES + 64];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return read_keyed(path, "", out);
}

/* limit - (use - droppable file cache) of one group, or UINT64_MAX when it has no limit. */
static uint64_t group_free(const char *dir, const char *limit_name, const char *use_name, const char *cache_key) {
    char stat[LINE_BYTES + 64];
    uint64_t limit, use = 0, cache = 0;
    if (!read_number(dir, limit_name, &limit)) return UINT64_MAX;
    read_number(dir, use_name, &use);
    snprintf(stat, sizeof stat, "%s/memory.stat", dir);
    read_keyed(stat, cache_key, &cache);
    use -= cache < use ? cache : use;
    return use < limit ? limit - use : 0;
}

/* The group's path of the line that begins with `prefix` in /proc/self/cgroup; "" when there is none. */
static void group_path(const char *prefix, char out[LINE_BYTES]) {
    char line[LINE_BYTES];
    FILE *f = fopen("/proc/self/cgroup", "re");
    out[0] = 0;
    while (f && fgets(line, sizeof line, f)) {
        char *at = strstr(line, prefix);
        if (!at || out[0]) continue;
        line[strcspn(line, "\n")] = 0;
        snprintf(out, LINE_BYTES, "%s", at + strlen(prefix));
    }
    if (f) fclose(f);
}

/* The smallest over a group and its parents up to the root of the hierarchy at `mount`. */
static uint64_t groups_free(const char *mount, const char *prefix, const char *limit_name, const char *use_name,
                            const char *cache_key) {
    char path[LINE_BYTES], dir[LINE_BYTES + 32];
    uint64_t best = UINT64_MAX;
    group_path(prefix, path);
    for (;;) {
        snprintf(dir, sizeof dir, "%s%s", mount, path);
        uint64_t here = group_free(dir, limit_name, use_name, cache_key);
        if (here < best) best = here;
        char *slash = strrchr(path, '/');
        if (!slash) return best;
        *slash = 0;
    }
}

uint64_t epx_memory_available(void) {
    uint64_t kib, best = 0;
    if (read_keyed("/proc/meminfo", "MemAvailable:", &kib)) best = kib * 1024;
    uint64_t v2 = groups_free("/sys/fs/cgroup", "0::", "memory.max", "memory.current", "inactive_file ");
    uint64_t v1 = groups_free("/sys/fs/cgroup/memory", ":memory:", "memory.limit_in_bytes", "memory.usage_in_bytes",
                              "total_inactive_file ");
    if (v2 < best) best = v2;
    return v1 < best ? v1 : best;
}
