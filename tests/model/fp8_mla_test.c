/* Latent attention on block-scaled FP8 weights: a small DeepSeek-V3 checkpoint with e4m3 matrices, and the same one with these
 * matrices dequantised to f32, give the same logits. (That f32 weights are right is the business of the reference test.) The rows
 * of one head begin inside the matrix, so a wrong factor of a slice would show. */
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "base/half.h"
#include "base/philox.h"
#include "tests/model/harness.h"

enum {
    HIDDEN = 160,
    HEADS = 3,
    NOPE = 128,
    ROPE = 16,
    VDIM = 128,
    KV_LORA = 144,
    Q_LORA = 136,
    FFN = 140,
    EXPERTS = 4,
    VOCAB = 64,
    N_TOKENS = 40
};

#define CONFIG                                                                                                                   \
    "{\"architectures\":[\"DeepseekV3ForCausalLM\"],\"model_type\":\"deepseek_v3\",\"hidden_size\":160,\"num_hidden_layers\":1," \
    "\"num_attention_heads\":3,\"vocab_size\":64,\"max_position_embeddings\":256,\"q_lora_rank\":136,\"kv_lora_rank\":144,"      \
    "\"qk_nope_head_dim\":128,\"qk_rope_head_dim\":16,\"v_head_dim\":128,\"moe_intermediate_size\":140,\"n_routed_experts\":4,"  \
    "\"n_shared_experts\":1,\"num_experts_per_tok\":2,\"first_k_dense_replace\":0,\"intermediate_size\":140,\"n_group\":2,"      \
    "\"topk_group\":1,\"topk_method\":\"noaux_tc\",\"scoring_func\":\"sigmoid\",\"norm_topk_prob\":true,\"rope_theta\":10000.0," \
    "\"eos_token_id\":2,\"quantization_config\":{\"quant_method\":\"fp8\",\"fmt\":\"e4m3\",\"weight_block_size\":[128,128]}}"

typedef struct {
    char dir[64];
    int f8;     /* 1: e4m3 and factors; 0: their products */
    FILE *data; /* tensor bytes */
    char header[32768];
    size_t n_header, at;
} writer_t;

static float unit(uint64_t seed, uint64_t i) { return 2.0f * epx_philox_unit(seed, i) - 1.0f; }

static void entry(writer_t *w, const char *name, const char *suffix, const char *dtype, const char *shape, const void *data,
                  size_t n_bytes) {
    w->n_header += (size_t)snprintf(w->header + w->n_header, sizeof w->header - w->n_header,
                                    "%s\"%s%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%zu,%zu]}",
                                    w->n_header > 1 ? "," : "", name, suffix, dtype, shape, w->at, w->at + n_bytes);
    CHECK(w->n_header < sizeof w->header && fwrite(data, 1, n_bytes, w->data) == n_bytes, "%s", name);
    w->at += n_bytes;
}

static void vector(writer_t *w, const char *name, int n, float mean) {
    float *x = malloc((size_t)n * sizeof *x);
    char shape[32];
    for (int i = 0; i < n; i++) x[i] = mean + 0.1f * unit(strlen(name) * 77, (uint64_t)i);
    snprintf(shape, sizeof shape, "[%d]", n);
    entry(w, name, "", "F32", shape, x, (size_t)n * sizeof *x);
    free(x);
}

/* e4m3 rows are written padded by nothing; all sizes here are multiples of 4, so that the f32 tensors after them stay aligned. */
static void matrix(writer_t *w, const char *name, int n, int k, int quantised) {
    const int cols = (k + 127) / 128, rows = (n + 127) / 128;
    const uint64_t seed = strlen(name) * 1000003u + (uint64_t)n * 131 + (uint64_t)k + (uint64_t)name[strlen(name) - 8];
    uint8_t *codes = malloc((size_t)(n * k));
    float *full = malloc((size_t)(n * k) * sizeof *full), *scale = malloc((size_t)(rows * cols) * sizeof *scale);
    char shape[32];
    CHECK(codes && full && scale, "no memory");
    for (int i = 0; i < rows * cols; i++) scale[i] = (0.2f + 0.15f * unit(seed + 1, (uint64_t)i)) / sqrtf((float)k);
    for (int i = 0; i < n * k; i++) {
        codes[i] = epx_f32_to_e4m3(8.0f * unit(seed, (uint64_t)i));
        full[i] = epx_e4m3_to_f32(codes[i]) * scale[i / k / 128 * cols + i % k / 128];
    }
    snprintf(shape, sizeof shape, "[%d,%d]", n, k);
    if (!quantised || !w->f8) {
        entry(w, name, "", "F32", shape, full, (size_t)(n * k) * sizeof *full);
    } else {
        entry(w, name, "", "F8_E4M3", shape, codes, (size_t)(n * k));
        snprintf(shape, sizeof shape, "[%d,%d]", rows, cols);
        entry(w, name, "_scale_inv", "F32", shape, scale, (size_t)(rows * cols) * sizeof *scale);
    }
    free(codes), free(full), free(scale);
}

static void ffn(writer_t *w, const char *prefix) {
    char name[128];
    snprintf(name, sizeof name, "%sgate_proj.weight", prefix);
    matrix(w, name, FFN, HIDDEN, 1);
    snprintf(name, sizeof name, "%sup_proj.weight", prefix);
    matrix(w, name, FFN, HIDDEN, 1);
    snprintf(name, sizeof name, "%sdown_proj.weight", prefix);
    matrix(w, name, HIDDEN, FFN, 1);
}

#define L "model.layers.0."
static void tensors(writer_t *w) {
    char prefix[96];
    matrix(w, "model.embed_tokens.weight", VOCAB, HIDDEN, 0);
    matrix(w, "lm_head.weight", VOCAB, HIDDEN, 0);
    vector(w, "model.norm.weight", HIDDEN, 1);
    vector(w, L "input_layernorm.weight", HIDDEN, 1);
    vector(w, L "post_attention_layernorm.weight", HIDDEN, 1);
    matrix(w, L "self_attn.q_a_proj.weight", Q_LORA, HIDDEN, 1);
    vector(w, L "self_attn.q_a_layernorm.weight", Q_LORA, 1);
    matrix(w, L "self_attn.q_b_proj.weight", HEADS * (NOPE + ROPE), Q_LORA, 1);
    matrix(w, L "self_attn.kv_a_proj_with_mqa.weight", KV_LORA + ROPE, HIDDEN, 1);
    vector(w, L "self_attn.kv_a_layernorm.weight", KV_LORA, 1);
    matrix(w, L "self_attn.kv_b_proj.weight", HEADS * (NOPE + VDIM), KV_LORA, 1);
    matrix(w, L "self_attn.o_proj.weight", HIDDEN, HEADS * VDIM, 1);
    matrix(w, L "mlp.gate.weight", EXPERTS, HIDDEN, 0);
    vector(w, L "mlp.gate.e_score_correction_bias", EXPERTS, 0);
    for (int e = 0; e < EXPERTS; e++) {
        snprintf(prefix, sizeof prefix, L "mlp.experts.%d.", e);
        ffn(w, prefix);
    }
    ffn(w, L "mlp.shared_experts.");
}

static void path_of(const writer_t *w, const char *name, char out[128]) { snprintf(out, 128, "%s/%s", w->dir, name); }

static void write_model(writer_t *w, int f8) {
    char path[128], buffer[65536];
    *w = (writer_t){.dir = "/tmp/epx-fp8-XXXXXX", .f8 = f8, .header = "{", .n_header = 1, .data = tmpfile()};
    CHECK(mkdtemp(w->dir) && w->data, "temporary files");
    tensors(w);
    while ((w->n_header + 1) % 8) w->header[w->n_header++] = ' ';
    w->header[w->n_header++] = '}';
    path_of(w, "model.safetensors", path);
    FILE *f = fopen(path, "wb");
    uint64_t n = w->n_header;
    CHECK(f && fwrite(&n, 8, 1, f) == 1 && fwrite(w->header, 1, w->n_header, f) == w->n_header, "%s",
          path); /* little-endian machines */
    rewind(w->data);
    for (size_t k; (k = fread(buffer, 1, sizeof buffer, w->data)) > 0;) CHECK(fwrite(buffer, 1, k, f) == k, "%s", path);
    fclose(f);
    fclose(w->data);
    path_of(w, "config.json", path);
    f = fopen(path, "w");
    CHECK(f && fputs(CONFIG, f) >= 0 && fclose(f) == 0, "%s", path);
}

static void remove_model(const writer_t *w) {
    char path[128];
    path_of(w, "model.safetensors", path), unlink(path);
    path_of(w, "config.json", path), unlink(path);
    rmdir(w->dir);
}

static void body(void *ctx, int rank, epx_rank_t *r) {
    int32_t tokens[N_TOKENS];
    for (int i = 0; i < N_TOKENS; i++) tokens[i] = i * 13 % VOCAB;
    CHECK_OK(epx_rank_logits(r, tokens, rank == 0 ? N_TOKENS : 0, N_TOKENS, rank == 0 ? ctx : NULL));
}

static void check(const writer_t *f8, const writer_t *full, int w, const char *isa) {
    static float a[N_TOKENS * VOCAB], b[N_TOKENS * VOCAB];
    epx_rank_config_t c = small_config(f8->dir, w);
    double worst = 0, square = 0;
    c.isa = isa;
    with_ranks(&c, body, a);
    c.model_path = full->dir;
    with_ranks(&c, body, b);
    for (int i = 0; i < N_TOKENS * VOCAB; i++) {
        double d = fabs((double)a[i] - (double)b[i]);
        if (!(d <= worst)) worst = d;
        square += (double)b[i] * (double)b[i];
    }
    printf("%s, %d ranks: largest difference %.2e, logits of magnitude %.2f\n", isa, w, worst, sqrt(square / (N_TOKENS * VOCAB)));
    CHECK(square > 1 && worst <= 1e-4, "fp8 and dequantised weights differ");
}

int main(void) {
    static writer_t f8, full;
    char isas[64], *save = NULL;
    write_model(&f8, 1);
    write_model(&full, 0);
    snprintf(isas, sizeof isas, "%s", epx_ops_isa_available());
    for (char *isa = strtok_r(isas, ",", &save); isa; isa = strtok_r(NULL, ",", &save))
        for (int w = 1; w <= 2; w++) check(&f8, &full, w, isa);
    remove_model(&f8);
    remove_model(&full);
    return 0;
}
