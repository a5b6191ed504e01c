/* A model on one rank: what config.json says, the rank's share of the weights, and the forward pass over a batch of rows.
 * Attention weights are on every rank; expert e lives on one rank (epx_model_expert_range). Knows nothing of requests,
 * schedulers or files other than the checkpoint. The exchange goes through libepx's public API.
 * One thread per model; all ranks call epx_model_forward() the same number of times (it is collective through the plan). */
#ifndef EPX_ENGINE_MODEL_MODEL_H
#define EPX_ENGINE_MODEL_MODEL_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "engine/model/common/json_doc.h"
#include "engine/model/load/want.h"
#include "engine/model/meter.h"
#include "engine/ops/ops.h"
#include "epx/epx.h"

typedef struct epx_arch epx_arch_t;
typedef struct epx_model epx_model_t;

enum { EPX_MAX_LAYERS = 4096 };

/* YaRN (arXiv:2309.00071): rotary frequencies for contexts longer than those of training. factor 0: not used. */
typedef struct {
    double factor, original_positions, beta_fast, beta_slow;
    int truncate;            /* bounds of the ramp rounded to whole dimensions */
    double attention_factor; /* of cosine and sine */
} epx_yarn_t;

/* Multi-head latent attention (arXiv:2405.04434). kv_lora 0: ordinary grouped-query attention. */
typedef struct {
    int q_lora; /* 0: queries are projected directly */
    int kv_lora, nope, rope, v;
} epx_mla_t;

/* Of config.json, checked: every size that is used is at least 1 and products of two sizes fit 63 bits. */
typedef struct {
    const epx_arch_t *arch; /* static */
    int n_layers, hidden, n_heads;
    int n_kv_heads, head_dim; /* of the KV cache; with latent attention one head of kv_lora + rope */
    int n_experts, top_k, moe_ffn, vocab, max_position;
    int n_dense_layers, dense_ffn; /* the first layers have one feed-forward of this size and no experts */
    int shared_ffn;                /* beside the routed experts every token passes this one; 0: none */
    int norm_topk_prob, tie_embeddings;
    epx_score_t score;
    double routed_factor;
    int n_groups, top_groups, group_best; /* as in epx_router_t */
    int attention_bias, qk_norm;
    float rms_eps, attn_scale;
    double rope_theta;
    int rope_first, rope_dim, rope_interleaved; /* as in epx_rope_t */
    epx_yarn_t yarn;
    epx_mla_t mla;
    int window; /* of the layers in `sliding` */
    uint64_t sliding[EPX_MAX_LAYERS / 64];
    epx_act_t act;
    double act_limit;
    int fp8; /* block-scaled e4m3 matrices are accepted */
    int32_t eos_ids[EPX_MAX_EOS];
    int n_eos;
} epx_model_config_t;

/* Read DIR/config.json. EPX_ERR_UNSUPPORTED: an architecture or a feature that is not implemented, by name and value, so that a
 * model never runs wrong; EPX_ERR_FORMAT: a malformed or out-of-range field. */
epx_status_t epx_model_config_load(const char *dir, epx_model_config_t *out_cfg);
/* The same from memory; name is for messages. */
epx_status_t epx_model_config_parse(const char *name, const char *json, size_t n_bytes, epx_model_config_t *out_cfg);
/* Comma-separated architectures that can be loaded ("Qwen3MoeForCausalLM"). Static string. */
const char *epx_model_architectures(void);
/* "Qwen3MoeForCausalLM". Static string. */
const char *epx_model_architecture(const epx_model_config_t *cfg);

/* Experts of `rank` among n_ranks: [first, first + n); the first (E mod n_ranks) ranks have one more, as libepx splits by
 * default. */
void epx_model_expert_range(int n_experts, int rank, int n_ranks, int *out_first, int *out_n);

typedef struct {
    uint32_t size;
    const char *dir;   /* checkpoint directory; borrowed during create */
    int dummy;         /* 1: random weights instead of the files */
    uint64_t seed;     /* of dummy weights */
    int rank, n_ranks; /* whose experts */
    int attn_tp;       /* ranks that run the same rows and may share the heads of attention; 0 and 1: none */
    int attn_rank;     /* among them */
    int max_rows;      /* largest n_rows of a batch of any rank, >= 1 */
    int halves;        /* 1: every batch in which a rank has 2 rows or more is run in_halves, so the exchange has two channels of
                          half the rows */
    epx_load_progress_t progress;
} epx_model_load_t;

/* Load the rank's share and allocate scratch for max_rows. ops is borrowed until destroy. */
epx_status_t epx_model_create(const epx_model_config_t *cfg, const epx_model_load_t *load, epx_ops_t *ops, epx_model_t **out_m);
/* NULL allowed. */
void epx_model_destroy(epx_model_t *m);
/* Exchanges of the MoE layers: one for every batch, and if set one for batches that the caller says, which may be smaller. */
typedef enum { EPX_EXCHANGE_MAIN = 0, EPX_EXCHANGE_DECODE, EPX_N_EXCHANGES } epx_exchange_t;
/* Borrowed until destroy; its layout is LISTS (rows are read in place) or CONTIGUOUS (copied together). The main one must be set
 * before the first forward. Allocates the buffers of expert inputs and outputs: as many rows as the plan can bring. */
epx_status_t epx_model_set_plan(epx_model_t *m, epx_exchange_t which, epx_plan_t *plan);
/* Fill the fields of a plan configuration that the model determines: hidden, top_k, n_experts, max_tokens, n_channels, f32,
 * lists. */
void epx_model_plan_config(const epx_model_t *m, epx_plan_config_t *out_cfg);
/* 0: this rank computes all heads. 1: *out, which is initialised, is the exchange over the ranks that share them; then
 * epx_model_set_attention_plan() must be called before the first forward. The plan is borrowed until destroy. */
int epx_model_attention_plan_config(const epx_model_t *m, epx_plan_config_t *out);
epx_status_t epx_model_set_attention_plan(epx_model_t *m, epx_plan_t *plan);
/* Ranks that share the heads: attn_tp, or 1 where the architecture's attention is not cut (latent attention, norms over all
 * heads, block-scaled matrices, heads that do not divide). And heads of this rank's KV cache. */
int epx_model_attention_tp(const epx_model_t *m);
int epx_model_kv_heads(const epx_model_t *m);
enum { EPX_SELF_TEST_TOKENS = 2 };
typedef struct {
    epx_plan_t *plan; /* of at least EPX_SELF_TEST_TOKENS tokens, otherwise as the model's own, whose counters it leaves alone */
    int group_size;   /* ranks that hold the same tokens */
    double factor;    /* 1; another value stands for a layer whose sum is wrong by it: for tests */
    epx_status_t (*gather)(void *ctx, const void *mine, size_t n_bytes, void *out_all); /* over all ranks, at most 256 bytes */
    void *ctx;
} epx_self_test_t;
/* Compare the first MoE layer over all ranks with the sum of its experts one by one. Collective; max_rows is at least
 * EPX_SELF_TEST_TOKENS. EPX_ERR_MISMATCH says what differs. */
epx_status_t epx_model_self_test(epx_model_t *m, const epx_self_test_t *t);
const epx_model_config_t *epx_model_config(const epx_model_t *m);
/* Bytes of checkpoint files mapped by this rank; 0 for dummy weights. */
uint64_t epx_model_mapped_bytes(const epx_model_t *m);
/* Counters of the MoE layers since create; borrowed until destroy. */
const epx_meter_t *epx_model_meter(const epx_model_t *m);

/* The rows of one step: any mix of sequences, prefill chunks and decodes. Rows of one sequence come in ascending position. */
typedef struct {
    int32_t n_rows;             /* 0 .. max_rows; 0 takes part in every collective */
    const int32_t *tokens;      /* [n_rows], 0 <= token < vocab */
    const epx_attn_row_t *rows; /* [n_rows] */
    const epx_kv_layer_t *kv;   /* [n_layers] */
    int32_t n_logits;           /* rows that want logits */
    const int32_t *logit_rows;  /* [n_logits] row indices */
    float *logits;              /* out [n_logits, vocab] */
    int32_t *best;              /* NULL; or, with ops of a device only, out [n_logits] as epx_ops_argmax(), and no logits */
    /* 1, on all ranks or on none and only with load->halves: cut the rows in the middle; while one half is in the exchange the
     * other computes. Same bits. */
    int in_halves;
    epx_exchange_t exchange; /* the same on all ranks */
    int32_t first;           /* the model's own: 0. Row of the residual stream at which these rows begin, */
    int channel;             /* and their channel of the exchange: 0 */
} epx_batch_t;

/* Called after each layer, for each half of a batch in halves: ids, weights [n_rows, top_k] as the router chose them (NULL in a
 * layer without experts); hidden [n_rows, hidden] after the layer. All borrowed during the call. */
typedef void (*epx_model_probe_fn)(void *ctx, int layer, int32_t n_rows, const int32_t *ids, const float *weights,
                                   const float *hidden);

/* Run all layers. Collective. Errors are those of the exchange; after one the batch's KV and logits are undefined. */
epx_status_t epx_model_forward(epx_model_t *m, const epx_batch_t *b);

#endif
