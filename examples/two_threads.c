/* Two threads, one expert each: every thread sends its token to the expert of the other, which doubles it.
 * Build against an installed libepx: cc two_threads.c $(pkg-config --cflags --libs epx) -pthread */
#include <epx/epx.h>
#include <pthread.h>
#include <stdio.h>

static void *run(void *world) {
    int rank = epx_world_rank(world);
    int32_t expert = 1 - rank, count = 0; /* expert e is on rank e */
    float token[4] = {rank + 1.0f, 0.5f, 0.25f, 0.125f}, weight = 1.0f, row[2][4], answer[4] = {0};
    epx_group_t *group = NULL;
    epx_plan_t *plan = NULL;
    epx_plan_config_t cfg;
    epx_io_t io;
    epx_plan_config_init(&cfg);
    cfg.max_tokens = 1, cfg.hidden = 4, cfg.top_k = 1, cfg.n_experts = 2, cfg.layout = EPX_LAYOUT_EXPERT_MAJOR;
    epx_io_init(&io);
    io.x = token, io.ids = &expert, io.weights = &weight, io.n_tokens = 1, io.out_x = row, io.out_counts = &count;
    epx_status_t s = epx_group_create(world, NULL, 0, -1, &group);
    if (s == EPX_OK) s = epx_plan_create(group, &cfg, &plan);
    if (s == EPX_OK) s = epx_dispatch(plan, &io);             /* row[0] is now the token of the other thread */
    for (int h = 0; h < 4 && count == 1; h++) row[0][h] *= 2; /* our expert */
    io.x = row, io.out_x = answer;
    if (s == EPX_OK) s = epx_combine(plan, &io); /* answer is our token, doubled by the other thread */
    if (s == EPX_OK) printf("rank %d sent %g and got %g back\n", rank, token[0], answer[0]);
    else fprintf(stderr, "rank %d: %s\n", rank, epx_last_error());
    epx_plan_destroy(plan);
    epx_group_destroy(group);
    return s == EPX_OK && answer[0] == 2 * token[0] && answer[3] == 2 * token[3] ? NULL : world; /* NULL: all is right */
}

int main(void) {
    epx_world_t *worlds[2];
    pthread_t other;
    void *bad[2];
    if (epx_world_create_local(2, worlds) != EPX_OK || pthread_create(&other, NULL, run, worlds[1]) != 0) return 1;
    bad[0] = run(worlds[0]);
    pthread_join(other, &bad[1]);
    for (int r = 0; r < 2; r++) epx_world_destroy(worlds[r]);
    return bad[0] || bad[1];
}
