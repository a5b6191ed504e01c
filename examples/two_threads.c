/* Two threads exchange one token: each sends its token to the expert of the other, which doubles it.
 * Build against an installed libepx: cc two_threads.c $(pkg-config --cflags --libs epx) -pthread */
#define _POSIX_C_SOURCE 200809L /* pthread_barrier_t under -std=c11 */
#include <epx/epx.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* How the two ranks find each other: any all-gather and barrier will do; here shared memory and a pthread barrier. */
static pthread_barrier_t both;
static char blobs[2][4096];

static epx_status_t meet(void *rank) {
    (void)rank;
    pthread_barrier_wait(&both);
    return EPX_OK;
}

static epx_status_t gather(void *rank, const void *mine, size_t n_bytes, void *out_all) {
    if (n_bytes > sizeof blobs[0]) return EPX_ERR_CAPACITY;
    memcpy(blobs[*(int *)rank], mine, n_bytes);
    meet(rank);
    for (int r = 0; r < 2; r++) memcpy((char *)out_all + (size_t)r * n_bytes, blobs[r], n_bytes);
    return meet(rank);
}

static void *run(void *arg) {
    int rank = *(int *)arg;
    int32_t expert = 1 - rank; /* of two experts, the other rank owns this one */
    float token[4] = {rank + 1.0f, 0.5f, 0.25f, 0.125f}, weight = 1.0f, row[2][4], answer[4];
    int32_t count = 0;
    epx_world_t *world = NULL;
    epx_group_t *group = NULL;
    epx_plan_t *plan = NULL;
    epx_world_config_t wc;
    epx_plan_config_t pc;
    epx_io_t io;

    epx_world_config_init(&wc);
    wc.rank = rank, wc.n_ranks = 2, wc.allgather = gather, wc.barrier = meet, wc.ctx = arg;
    epx_plan_config_init(&pc);
    pc.max_tokens = 1, pc.hidden = 4, pc.top_k = 1, pc.n_experts = 2, pc.layout = EPX_LAYOUT_EXPERT_MAJOR;
    if (epx_world_create(&wc, &world) || epx_group_create(world, NULL, 0, -1, &group) || epx_plan_create(group, &pc, &plan))
        goto failed;

    epx_io_init(&io);
    io.x = token, io.ids = &expert, io.weights = &weight, io.n_tokens = 1, io.out_x = row, io.out_counts = &count;
    if (epx_dispatch(plan, &io)) goto failed; /* row[0] is now the token of the other thread */
    for (int h = 0; h < 4; h++) row[0][h] *= 2.0f;
    io.x = row, io.out_x = answer;
    if (epx_combine(plan, &io)) goto failed; /* answer is the own token, doubled by the other thread */
    printf("rank %d sent %g and got %g back\n", rank, token[0], answer[0]);
    arg = answer[0] == 2.0f * token[0] && count == 1 ? NULL : arg;
    goto done;
failed:
    fprintf(stderr, "rank %d: %s\n", rank, epx_last_error());
done:
    epx_plan_destroy(plan);
    epx_group_destroy(group);
    epx_world_destroy(world);
    return arg; /* NULL: the answer is right */
}

int main(void) {
    int ranks[2] = {0, 1};
    void *bad[2];
    pthread_t other;
    pthread_barrier_init(&both, NULL, 2);
    pthread_create(&other, NULL, run, &ranks[1]);
    bad[0] = run(&ranks[0]);
    pthread_join(other, &bad[1]);
    return bad[0] || bad[1];
}
