/* See ranks.h. */
#include "tests/gpu/ranks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int count(void) {
    epx_component_t c;
    int n = 0;
    for (int i = 0; epx_component(i, &c) == EPX_OK; i++) {
        if (strcmp(c.name, "cuda_ipc") == 0 && !c.available)
            printf("skipped: transport cuda_ipc is not available: %s\n", c.detail);
        if (strcmp(c.kind, "device") != 0) continue;
        printf("%s: %s\n", c.name, c.detail);
        n++;
    }
    fflush(stdout);
    return n;
}

int tg_devices(int wanted) {
    int status = 0;
    (void)setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1); /* a stream of each rank must not wait for another's */
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) _exit(count());
    if (pid < 0 || waitpid(pid, &status, 0) != pid || !WIFEXITED(status)) return 0;
    int n = WEXITSTATUS(status);
    return wanted > 0 && wanted < n ? wanted : n;
}

int tg_with_group(th_rank_t *r, int n_devices, size_t arena_bytes, int (*body)(th_rank_t *r, tg_rank_t *k)) {
    epx_world_config_t cfg;
    tg_rank_t k = {NULL, NULL, NULL};
    int rc = -1, ordinal = r->rank % n_devices;
    th_world_config(r, NULL, &cfg);
    th_note(r, "group on device %d", ordinal);
    TH_OK(r, epx_world_create(&cfg, &k.world));
    k.device = tg_device_open(ordinal, arena_bytes);
    if (k.device == NULL) th_fail(r, "device %d cannot be used", ordinal);
    else if (epx_group_create(k.world, NULL, 0, ordinal, &k.group) != EPX_OK)
        th_fail(r, "epx_group_create: %s", epx_last_error());
    else rc = body(r, &k);
    (void)th_barrier(r); /* freeing memory waits for the device, so nobody may still spin */
    epx_group_destroy(k.group);
    tg_device_close(k.device);
    epx_world_destroy(k.world);
    return rc;
}
