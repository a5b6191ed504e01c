/* Reference checkpoints on GPUs against the CPU, which tests/model holds to the values of Hugging Face transformers: logits and
 * routing of prompts with their reference answers, greedy text alone and in company, and the same bits whatever the chunks and
 * the ranks. Usage: model_gpu N_RANKS DIR...   Exits 77 when there are fewer GPUs. Budget: products take operands rounded to 8
 * bits in every layer; logits have a spread of about 2.5. A row whose experts are the CPU's in every layer differs by 0.05 rms (2
 * %), 0.5 at most, and has the CPU's best token where its margin is above 0.25. Rounding turns near ties of the router: at most
 * 10 % of the rows may have another expert somewhere. */
#include <math.h>
#include <pthread.h>
#include <string.h>

#include "tests/model/harness.h"

static const double RMS = 0.05, LARGEST = 0.5, MARGIN = 0.25, TURNED = 0.1;
enum { N_GREEDY = 24, MAX_PROMPTS = 16, MAX_TOKENS = 256, MAX_IDS = 1 << 16 };

/* What one run of all prompts gave. */
typedef struct {
    float *logits[MAX_PROMPTS]; /* [n, vocab] */
    int32_t *ids;               /* chosen experts, sorted by row, as the layers come */
    int n_ids;
    uint32_t bits;
} run_t;

typedef struct {
    const char *dir;
    ref_file_t ref;
    json_t *prompts;
    int n_prompts, n[MAX_PROMPTS], vocab, top_k, n_ranks;
    int32_t tokens[MAX_PROMPTS][MAX_TOKENS];
    run_t *out;
    int want_greedy;
    int32_t greedy[MAX_PROMPTS][N_GREEDY];
    int n_out[MAX_PROMPTS];
} check_t;

static int ascending(const void *a, const void *b) { return *(const int32_t *)a - *(const int32_t *)b; }

static void on_layer(void *ctx, int layer, int32_t n_rows, const int32_t *ids, const float *weights, const float *hidden) {
    check_t *c = ctx;
    (void)layer, (void)weights, (void)hidden;
    if (!ids) return;
    CHECK(c->out->n_ids + n_rows * c->top_k <= MAX_IDS, "too many rows");
    memcpy(c->out->ids + c->out->n_ids, ids, (size_t)(n_rows * c->top_k) * sizeof *ids);
    for (int i = 0; i < n_rows; i++) qsort(c->out->ids + c->out->n_ids + i * c->top_k, (size_t)c->top_k, sizeof *ids, ascending);
    c->out->n_ids += n_rows * c->top_k;
}

static void run_prompts(check_t *c, int rank, epx_rank_t *r) {
    uint32_t bits = 2166136261u;
    if (rank == 0) epx_rank_watch_layers(r, on_layer, c);
    for (int i = 0; i < c->n_prompts; i++) {
        const size_t n_bytes = (size_t)c->n[i] * (size_t)c->vocab * 4;
        float *logits = malloc(n_bytes);
        CHECK(logits, "no memory");
        CHECK_OK(epx_rank_logits(r, c->tokens[i], c->n[i], c->n[i], logits));
        for (size_t k = 0; k < n_bytes; k++) bits = (bits ^ ((const uint8_t *)logits)[k]) * 16777619u;
        if (rank == 0) c->out->logits[i] = logits;
        else free(logits);
    }
    if (rank == 0) c->out->bits = bits;
}

/* ---- greedy text ---- */

static void on_token(void *ctx, const epx_event_t *ev) {
    check_t *c = ctx;
    CHECK(ev->finish != EPX_FINISH_ERROR, "%s", ev->error);
    c->greedy[ev->id][c->n_out[ev->id]++] = ev->token;
}

static void submit(check_t *c, epx_rank_t *r, int i) {
    epx_request_t q = {.id = (uint64_t)i, .max_new_tokens = N_GREEDY, .ignore_eos = 1, .prompt = c->tokens[i]};
    epx_sampling_init(&q.sampling);
    q.sampling.temperature = 0;
    q.n_prompt = c->n[i] - N_GREEDY + 1;
    c->n_out[i] = 0;
    CHECK_OK(epx_rank_submit(r, &q));
}

/* All prompts in one batch, then each alone: the same tokens. */
static void check_greedy(check_t *c, epx_rank_t *r) {
    int32_t together[MAX_PROMPTS][N_GREEDY];
    int n_same = 0;
    for (int i = 0; i < c->n_prompts; i++) submit(c, r, i);
    run_until_idle(r, on_token, c);
    memcpy(together, c->greedy, sizeof together);
    for (int i = 0; i < c->n_prompts; i++) {
        const int32_t *want = ref_data(&c->ref, N_GREEDY, "greedy.%d", i);
        CHECK(c->n_out[i] == N_GREEDY, "prompt %d: %d tokens", i, c->n_out[i]);
        submit(c, r, i);
        run_until_idle(r, on_token, c);
        CHECK(memcmp(together[i], c->greedy[i], sizeof together[i]) == 0, "prompt %d: other tokens alone than in company", i);
        for (int k = 0; k < N_GREEDY && c->greedy[i][k] == want[k]; k++) n_same++;
    }
    printf("%s: greedy text is the same alone and in company; %d of %d tokens before the first that is not transformers'\n",
           c->dir, n_same, c->n_prompts * N_GREEDY);
}

/* ---- comparing ---- */

/* Has this row the same experts in every layer? Layers follow each other, rows_of_prompt rows each; `at` is the row in the first.
 */
static int same_route(const check_t *c, const run_t *a, const run_t *b, int first, int n_layer_ids, int row, int n_rows) {
    for (int at = first + row * c->top_k; at < first + n_layer_ids; at += n_rows * c->top_k)
        if (memcmp(a->ids + at, b->ids + at, (size_t)c->top_k * sizeof(int32_t)) != 0) return 0;
    return 1;
}

static int best_of(const float *x, int n, double *out_margin) {
    int best = 0;
    double second = -INFINITY;
    for (int i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    for (int i = 0; i < n; i++)
        if (i != best) second = fmax(second, x[i]);
    *out_margin = x[best] - second;
    return best;
}

static void compare(check_t *c, const run_t *cpu, const run_t *gpu) {
    double square = 0, worst = 0, margin, ignored;
    int n_rows = 0, n_turned = 0, n_other = 0, total = 0, first = 0;
    for (int i = 0; i < c->n_prompts; i++) total += c->n[i];
    CHECK(cpu->n_ids == gpu->n_ids, "%d and %d chosen experts", cpu->n_ids, gpu->n_ids);
    const int n_layers = cpu->n_ids / c->top_k / total;
    for (int i = 0; i < c->n_prompts; first += n_layers * c->n[i] * c->top_k, i++)
        for (int row = 0; row < c->n[i]; row++) {
            const float *want = cpu->logits[i] + (size_t)row * (size_t)c->vocab,
                        *got = gpu->logits[i] + (size_t)row * (size_t)c->vocab;
            if (!same_route(c, cpu, gpu, first, n_layers * c->n[i] * c->top_k, row, c->n[i])) {
                n_turned++;
                continue;
            }
            n_rows++;
            for (int k = 0; k < c->vocab; k++) {
                const double d = fabs((double)got[k] - (double)want[k]);
                if (!(d <= worst)) worst = d;
                square += d * d;
            }
            const int best = best_of(want, c->vocab, &margin);
            n_other += margin > MARGIN && best_of(got, c->vocab, &ignored) != best;
        }
    const double rms = sqrt(square / ((double)n_rows * c->vocab));
    printf("%s: %d rows, logits differ by %.4f rms, at most %.4f; %d rows with another expert somewhere; %d with another best "
           "token\n",
           c->dir, n_rows, rms, worst, n_turned, n_other);
    CHECK(rms <= RMS && worst <= LARGEST && n_other == 0 && n_turned <= TURNED * total, "budget %g, %g, 0, %g", RMS, LARGEST,
          TURNED * total);
}

static void drop(check_t *c, run_t *r) {
    for (int i = 0; i < c->n_prompts; i++) free(r->logits[i]);
    free(r->ids);
}

/* ---- runs ---- */

static void body(void *ctx, int rank, epx_rank_t *r) {
    check_t *c = ctx;
    run_prompts(c, rank, r);
    if (rank == 0) epx_rank_watch_layers(r, NULL, NULL);
    if (c->want_greedy) check_greedy(c, r);
}

static run_t run_on(check_t *c, const char *device, int n_ranks, int chunk, epx_combine_t combine) {
    run_t out = {.ids = malloc(MAX_IDS * sizeof(int32_t))};
    epx_rank_config_t cfg = small_config(c->dir, n_ranks);
    CHECK(out.ids, "no memory");
    cfg.device = device;
    cfg.chunk_tokens = chunk;
    cfg.combine = combine;
    c->out = &out;
    with_ranks(&cfg, body, c);
    return out;
}

static void open_check(check_t *c, const char *dir) {
    char path[1024];
    epx_model_config_t mc;
    *c = (check_t){.dir = dir};
    CHECK_OK(epx_model_config_load(dir, &mc));
    c->vocab = mc.vocab, c->top_k = mc.top_k;
    snprintf(path, sizeof path, "%s/reference.safetensors", dir);
    c->ref = ref_open(path);
    snprintf(path, sizeof path, "%s/reference.json", dir);
    json_t *json = json_load_file(path, 0, NULL);
    CHECK(json, "%s", path);
    c->prompts = json_incref(json_object_get(json, "prompts"));
    json_decref(json);
    c->n_prompts = (int)json_array_size(c->prompts);
    for (int i = 0; i < c->n_prompts; i++) {
        const int32_t *greedy = ref_data(&c->ref, N_GREEDY, "greedy.%d", i);
        int32_t *ids = json_ids(json_array_get(c->prompts, (size_t)i), &c->n[i]);
        CHECK(c->n[i] + N_GREEDY <= MAX_TOKENS, "prompt %d", i);
        memcpy(c->tokens[i], ids, (size_t)c->n[i] * sizeof *ids);
        memcpy(c->tokens[i] + c->n[i], greedy, (N_GREEDY - 1) * sizeof *greedy);
        c->n[i] += N_GREEDY - 1;
        free(ids);
    }
}

static void check_model(const char *dir, int n_ranks) {
    static const int chunks[] = {7, 64};
    check_t c;
    open_check(&c, dir);
    run_t cpu = run_on(&c, "cpu", 1, 256, EPX_COMBINE_EXACT);
    c.want_greedy = 1;
    run_t gpu = run_on(&c, "cuda", 1, 256, EPX_COMBINE_EXACT);
    c.want_greedy = 0;
    compare(&c, &cpu, &gpu);
    for (int i = 0; i < 2 && n_ranks == 1; i++) {
        run_t again = run_on(&c, "cuda", 1, chunks[i], EPX_COMBINE_EXACT);
        CHECK(again.bits == gpu.bits, "%s: bits depend on the chunk size, %d", dir, chunks[i]);
        drop(&c, &again);
    }
    if (n_ranks > 1) {
        run_t spread = run_on(&c, "cuda", n_ranks, 256, EPX_COMBINE_EXACT);
        CHECK(spread.bits == gpu.bits, "%s: %d ranks give other bits than one", dir, n_ranks);
        drop(&c, &spread);
        spread = run_on(&c, "cuda", n_ranks, 256, EPX_COMBINE_PARTIAL);
        printf("%s: exact combine over %d ranks has the bits of one; prereduced: ", dir, n_ranks);
        compare(&c, &cpu, &spread);
        drop(&c, &spread);
    }
    drop(&c, &cpu);
    drop(&c, &gpu);
    json_decref(c.prompts);
    ref_close(&c.ref);
}

int main(int argc, char **argv) {
    const int n_ranks = argc > 1 ? atoi(argv[1]) : 1;
    epx_ops_config_t oc = {.size = sizeof oc, .n_threads = 1, .device = "cuda", .device_idx = n_ranks - 1};
    epx_ops_t *last;
    setvbuf(stdout, NULL, _IOLBF, 0);
    setenv("EPX_OPS_CUDA_RANKS", "1", 1);
    if (n_ranks < 1 || epx_ops_create(&oc, &last) != EPX_OK) {
        printf("skipped: %s\n", epx_error_message());
        return 77;
    }
    epx_ops_destroy(last);
    for (int i = 2; i < argc; i++) check_model(argv[i], n_ranks);
    printf("model_gpu: %d models on %d ranks\n", argc > 2 ? argc - 2 : 0, n_ranks);
    return 0;
}
