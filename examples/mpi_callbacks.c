/* A program with its own MPI hands libepx two callbacks; libepx itself links no MPI.
 *   mpicc mpi_callbacks.c $(pkg-config --cflags --libs epx) -o mpi_callbacks && mpirun -n 2 ./mpi_callbacks
 * Each rank sends 4 tokens to 2 of 5 experts; expert e multiplies by e + 1. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

#include <epx/epx.h>

enum { T = 4, H = 8, K = 2, E = 5 };

static epx_status_t allgather(void *ctx, const void *mine, size_t n_bytes, void *out_all) {
    MPI_Comm *comm = ctx;
    int rc = MPI_Allgather(mine, (int)n_bytes, MPI_BYTE, out_all, (int)n_bytes, MPI_BYTE, *comm);
    return rc == MPI_SUCCESS ? EPX_OK : EPX_ERR_IO;
}

static epx_status_t barrier(void *ctx) {
    MPI_Comm *comm = ctx;
    return MPI_Barrier(*comm) == MPI_SUCCESS ? EPX_OK : EPX_ERR_IO;
}

#define CHECK(call)                                               \
    do {                                                          \
        if ((call) < 0) {                                         \
            fprintf(stderr, "%s: %s\n", #call, epx_last_error()); \
            MPI_Abort(MPI_COMM_WORLD, 1);                         \
        }                                                         \
    } while (0)

/* rows of y in list order: row times (expert + 1); the experts of this rank start at `first`. */
static void run_experts(const epx_lists_t *l, int first, float *y) {
    for (int e = 0; e < l->n_local_experts; e++)
        for (int i = l->expert_off[e]; i < l->expert_off[e + 1]; i++) {
            const epx_list_entry_t *en = &l->entries[i];
            const float *row = (const float *)((const char *)l->row_base[en->src] + en->token * l->row_stride_bytes);
            for (int j = 0; j < H; j++) y[i * H + j] = row[j] * (float)(first + e + 1);
        }
}

int main(int argc, char **argv) {
    MPI_Comm comm;
    epx_world_config_t wc;
    epx_plan_config_t pc;
    epx_world_t *world = NULL;
    epx_group_t *group = NULL;
    epx_plan_t *plan = NULL;
    epx_lists_t lists;
    epx_io_t io;
    float x[T * H], weights[T * K], out[T * H];
    int32_t ids[T * K];

    MPI_Init(&argc, &argv);
    MPI_Comm_dup(MPI_COMM_WORLD, &comm); /* libepx's messages stay apart from the program's own */
    epx_world_config_init(&wc);
    MPI_Comm_rank(comm, &wc.rank);
    MPI_Comm_size(comm, &wc.n_ranks);
    wc.allgather = allgather;
    wc.barrier = barrier;
    wc.ctx = &comm;
    CHECK(epx_world_create(&wc, &world));
    CHECK(epx_group_create(world, NULL, 0, -1, &group));
    epx_plan_config_init(&pc);
    pc.max_tokens = T, pc.hidden = H, pc.top_k = K, pc.n_experts = E;
    CHECK(epx_plan_create(group, &pc, &plan));

    for (int i = 0; i < T * H; i++) x[i] = (float)(wc.rank * 100 + i);
    for (int i = 0; i < T * K; i++) ids[i] = (wc.rank + i) % E, weights[i] = 0.5f;
    epx_io_init(&io);
    io.x = x, io.ids = ids, io.weights = weights, io.n_tokens = T;
    CHECK(epx_dispatch(plan, &io));
    CHECK(epx_plan_lists(plan, 0, &lists));
    float *y = malloc((size_t)(lists.n_rows + 1) * H * sizeof *y);
    int q = E / wc.n_ranks, more = E % wc.n_ranks; /* experts are split evenly in order, the first ranks get one more */
    run_experts(&lists, wc.rank * q + (wc.rank < more ? wc.rank : more), y);
    io.x = y, io.out_x = out;
    CHECK(epx_combine(plan, &io));
    free(y);

    int bad = 0, worst = 0;
    for (int i = 0; i < T * H; i++) {
        const int32_t *id = ids + i / H * K;
        bad += out[i] != 0.5f * x[i] * (float)(id[0] + 1) + 0.5f * x[i] * (float)(id[1] + 1);
    }
    MPI_Allreduce(&bad, &worst, 1, MPI_INT, MPI_MAX, comm);
    if (wc.rank == 0) printf("%d ranks, %s\n", wc.n_ranks, worst ? "wrong results" : "all results right");
    epx_plan_destroy(plan);
    epx_group_destroy(group);
    epx_world_destroy(world);
    MPI_Comm_free(&comm);
    MPI_Finalize();
    return worst != 0;
}
