/* Reads /proc/meminfo and the cgroup files. Any thread; not for step paths. */
#include "base/memory.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { PATH_BYTES = 1024 };

/* The number after `key` in a file of "key number" lines; key "" reads the first number. 1 when found. */
static int read_number(const char *path, const char *key, uint64_t *out) {
    char line[256];
    int found = 0;
    FILE *f = fopen(path, "re");
    if (f == NULL) return 0;
    while (!found && fgets(line, sizeof line, f) != NULL)
        found = strncmp(line, key, strlen(key)) == 0 && sscanf(line + strlen(key), "%" SCNu64, out) == 1;
    fclose(f);
    return found;
}

/* Room left in the group at `dir`: limit - use + cache that can be dropped. UINT64_MAX: no limit. */
static uint64_t group_room(const char *dir, const char *limit_file, const char *use_file, const char *cache_key) {
    char path[PATH_BYTES + 64];
    uint64_t limit, use, cache = 0;
    snprintf(path, sizeof path, "%s/%s", dir, limit_file);
    if (!read_number(path, "", &limit) || limit >= UINT64_C(1) << 60) return UINT64_MAX; /* "max" is not a number */
    snprintf(path, sizeof path, "%s/%s", dir, use_file);
    if (!read_number(path, "", &use)) return UINT64_MAX;
    snprintf(path, sizeof path, "%s/memory.stat", dir);
    (void)read_number(path, cache_key, &cache);
    use = use > cache ? use - cache : 0;
    return limit > use ? limit - use : 0;
}

/* Least room over a group and all that enclose it. `dir` is cut in place, down to the length of `root`. */
static uint64_t least_room(char *dir, size_t root_len, int v2) {
    uint64_t least = UINT64_MAX;
    for (;;) {
        uint64_t room = v2 ? group_room(dir, "memory.max", "memory.current", "inactive_file ")
                           : group_room(dir, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ");
        if (room < least) least = room;
        char *slash = strrchr(dir, '/');
        if (slash == NULL || (size_t)(slash - dir) < root_len) return least;
        *slash = '\0';
    }
}

static uint64_t cgroup_room(void) {
    char line[PATH_BYTES], dir[PATH_BYTES + 64];
    uint64_t least = UINT64_MAX;
    FILE *f = fopen("/proc/self/cgroup", "re");
    if (f == NULL) return UINT64_MAX;
    while (fgets(line, sizeof line, f) != NULL) { /* "0::/path" (v2) or "4:memory:/path" (v1) */
        char *first = strchr(line, ':'), *second = first == NULL ? NULL : strchr(first + 1, ':');
        if (second == NULL) continue;
        *second = '\0';
        int v2 = first[1] == '\0';
        if (!v2 && strcmp(first + 1, "memory") != 0) continue;
        const char *root = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
        second[1 + strcspn(second + 1, "\n")] = '\0';
        snprintf(dir, sizeof dir, "%s%s", root, strcmp(second + 1, "/") == 0 ? "" : second + 1);
        uint64_t room = least_room(dir, strlen(root), v2);
        if (room < least) least = room;
    }
    fclose(f);
    return least;
}

uint64_t epx_memory_free_bytes(void) {
    uint64_t kib, avail = UINT64_MAX, room = cgroup_room();
    if (read_number("/proc/meminfo", "MemAvailable:", &kib)) avail = kib * 1024;
    return avail < room ? avail : room;
}
