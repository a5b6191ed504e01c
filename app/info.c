/* `epx info`: what is there, and for what is not, why. */
#include <dirent.h>
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "app/commands.h"
#include "app/report.h"
#include "engine/ops/ops.h"

static void print_components(const char *kind, const char *title) {
    epx_component_t c;
    printf("%s\n", title);
    for (int i = 0; epx_component(i, &c) == EPX_OK; i++)
        if (strcmp(c.kind, kind) == 0)
            printf("  %-12s %-14s %s\n", c.name, c.available ? "available" : "not available", c.detail ? c.detail : "");
}

static void print_cpu(void) {
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 0;
    printf("processor\n  %-12s %d\n  %-12s %s (best first)\n", "cores", n, "kernels", epx_ops_isa_available());
}

static int count_nvidia_devices(void) {
    DIR *d = opendir("/dev");
    int n = 0;
    if (d == NULL) return 0;
    for (const struct dirent *e; (e = readdir(d)) != NULL;)
        n += strncmp(e->d_name, "nvidia", 6) == 0 && e->d_name[6] >= '0' && e->d_name[6] <= '9';
    closedir(d);
    return n;
}

static int print_devices(void) {
    epx_component_t c;
    int n = 0;
    for (int i = 0; epx_component(i, &c) == EPX_OK; i++) {
        if (strcmp(c.kind, "device") != 0) continue;
        printf("  %-12s %s\n", c.name, c.detail);
        n++;
    }
    return n;
}

static const char *why_no_device(void) {
    epx_component_t c;
    for (int i = 0; epx_component(i, &c) == EPX_OK; i++)
        if (strcmp(c.name, "cuda_ipc") == 0 && !c.available) return c.detail;
    return "no device";
}

static void print_gpus(void) {
    int n = count_nvidia_devices();
    printf("GPUs\n");
    if (print_devices() == 0)
        printf("  none usable: %s; %d NVIDIA device file%s in /dev\n", why_no_device(), n, n == 1 ? "" : "s");
    const int usable = epx_ops_available("cuda") == EPX_OK;
    printf("  %-12s %-14s %s\n", "models", usable ? "available" : "not available",
           usable ? "--device cuda" : epx_error_message());
}

static int print_model(const epx_settings_t *o) {
    epx_session_t s;
    int code = 0;
    epx_session_init(&s, o);
    if (epx_session_start(&s) < 0) {
        code = epx_print_error();
    } else {
        const epx_rank_info_t *i = &s.status.info;
        printf("model %s\n", o->model_path);
        printf("  %d layers, hidden %d, %d experts (top %d), vocabulary %d, context %d\n", i->n_layers, i->hidden, i->n_experts,
               i->top_k, i->vocab, i->max_context);
        printf("  exchange: %s over %s, %s combine; kernels: %s, %d threads a rank\n", i->backend, i->transport, o->a2a_combine,
               i->isa, i->n_threads);
        printf("  rank 0: KV pool of %" PRId64 " tokens, %" PRIu64 " bytes; exchange memory %" PRIu64 " bytes\n", i->kv_tokens,
               i->kv_bytes, i->exchange_bytes);
        epx_report_mapped(&s, stdout);
    }
    epx_session_close(&s);
    return code;
}

int epx_command_info(const epx_settings_t *o) {
    printf("epx %s\n", epx_version());
    print_components("transport", "transports");
    print_components("backend", "exchange backends");
    print_cpu();
    print_gpus();
    fflush(stdout);
    return o->model_path ? print_model(o) : 0;
}
