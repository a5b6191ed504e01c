/* What an architecture is: how to read its config.json, a table of its tensors, and a forward function over shared blocks.
 * The loader reads the table and has no case for any architecture. Private to engine/model. */
#ifndef EPX_ENGINE_MODEL_COMMON_ARCH_H
#define EPX_ENGINE_MODEL_COMMON_ARCH_H

#include "engine/model/model.h"
#include "engine/model/model_test.h"

/* A dimension of a tensor, by meaning. */
typedef enum {
    EPX_DIM_NONE = 0,
    EPX_DIM_HIDDEN,
    EPX_DIM_VOCAB,
    EPX_DIM_Q,
    EPX_DIM_KV,
    EPX_DIM_HEAD,
    EPX_DIM_EXPERTS,
    EPX_DIM_FFN,
    EPX_DIM_FFN_TWICE,
    EPX_DIM_DENSE_FFN,
    EPX_DIM_SHARED_FFN,
    EPX_DIM_ONE,
    EPX_DIM_HEADS,  /* n_heads */
    EPX_DIM_Q_LORA, /* the rest: latent attention */
    EPX_DIM_KV_LORA,
    EPX_DIM_KV_A,     /* kv_lora + rope */
    EPX_DIM_MLA_Q,    /* n_heads (nope + rope) */
    EPX_DIM_MLA_KV_B, /* n_heads (nope + v) */
    EPX_DIM_MLA_OUT   /* n_heads v */
} epx_dim_t;

/* Who holds a tensor. */
typedef enum {
    EPX_PLACE_REPLICATED = 0, /* every rank */
    EPX_PLACE_BY_EXPERT       /* the rank that owns the expert */
} epx_place_t;

/* When a checkpoint has a tensor. */
typedef enum {
    EPX_WHEN_ALWAYS = 0,
    EPX_WHEN_UNTIED,  /* the output matrix is not the embedding */
    EPX_WHEN_DENSE,   /* layers without experts */
    EPX_WHEN_EXPERTS, /* layers with experts */
    EPX_WHEN_SHARED,  /* layers with experts, of a model with a shared one */
    EPX_WHEN_ATTENTION_BIAS,
    EPX_WHEN_QK_NORM,
    EPX_WHEN_Q_LORA,
    EPX_WHEN_NO_Q_LORA
} epx_when_t;

/* Where a loaded view goes, shared words for all architectures. */
typedef enum {
    /* once */
    EPX_SLOT_EMBED,
    EPX_SLOT_FINAL_NORM,
    EPX_SLOT_LM_HEAD,
    EPX_N_MODEL_SLOTS,
    /* per layer */
    EPX_SLOT_ATTN_NORM = 0,
    EPX_SLOT_Q,
    EPX_SLOT_K,
    EPX_SLOT_V,
    EPX_SLOT_O,
    EPX_SLOT_Q_NORM,
    EPX_SLOT_K_NORM,
    EPX_SLOT_FFN_NORM,
    EPX_SLOT_ROUTER,
    EPX_SLOT_Q_BIAS,
    EPX_SLOT_K_BIAS,
    EPX_SLOT_V_BIAS,
    EPX_SLOT_O_BIAS,
    EPX_SLOT_SINKS,
    EPX_SLOT_ROUTER_BIAS,     /* added to the logits */
    EPX_SLOT_CORRECTION_BIAS, /* added to the scores for the choice */
    EPX_SLOT_SHARED_GATE,     /* [1, hidden]: how much of the shared expert a token takes */
    EPX_SLOT_Q_A,
    EPX_SLOT_Q_A_NORM,
    EPX_SLOT_KV_A,
    EPX_SLOT_KV_A_NORM,
    EPX_SLOT_KV_B,
    EPX_SLOT_FFN_GATE, /* dense feed-forward, or the shared expert */
    EPX_SLOT_FFN_UP,
    EPX_SLOT_FFN_DOWN,
    EPX_N_LAYER_SLOTS,
    /* per expert */
    EPX_SLOT_GATE = 0,
    EPX_SLOT_UP,
    EPX_SLOT_DOWN,
    EPX_SLOT_GATE_BIAS,
    EPX_SLOT_DOWN_BIAS,
    EPX_N_EXPERT_SLOTS
} epx_slot_t;

typedef struct {
    const char *name;  /* "%L" stands for the layer, "%E" for the expert; their presence says how often the tensor exists */
    epx_dim_t dims[3]; /* up to the first EPX_DIM_NONE */
    epx_place_t place; /* BY_EXPERT without "%E": one tensor for all experts, dims[0] counts them; a rank maps its slices */
    epx_slot_t slot;
    epx_when_t when;
    int transposed; /* 1: the file holds [in, out] */
} epx_tensor_rule_t;

struct epx_arch {
    const char *architecture; /* as in config.json "architectures" */
    const char *model_type;
    epx_status_t (*read_config)(const epx_json_doc_t *doc, epx_model_config_t *cfg);
    const epx_tensor_rule_t *rules;
    int n_rules;
    epx_status_t (*forward)(epx_model_t *m, const epx_batch_t *b);
};

typedef struct {
    epx_weight_t w[EPX_N_LAYER_SLOTS];
    epx_expert_weights_t *experts; /* [n_local_experts]; NULL in a dense layer */
} epx_layer_t;

/* Which heads this rank computes, and what gathering them needs (attention_tp.c). */
typedef struct {
    int tp, rank; /* ranks that share the heads of a row; 1: this one has all */
    int n_q, n_kv, first_q, first_kv;
    epx_plan_t *plan; /* borrowed; its "experts" are the ranks */
    int32_t *ids;     /* [max_rows, tp]: 0, 1, .. */
    float *weights;   /* [max_rows, tp]: 1 */
    float *all;       /* [max_rows, n_heads * head_dim] */
    float *columns;   /* [tp * max_rows, row width]: this rank's columns, zeros elsewhere */
    float *sum;       /* [max_rows, row width] */
} epx_heads_t;

struct epx_model {
    epx_model_config_t cfg;
    int rank, n_ranks, max_rows;
    int halves, max_part; /* steps may run in two halves; most rows that are exchanged at once */
    int first_expert, n_local_experts;
    epx_ops_t *ops;                     /* borrowed */
    epx_plan_t *plans[EPX_N_EXCHANGES]; /* borrowed */
    int contiguous[EPX_N_EXCHANGES];    /* layout of the plan */

    epx_weight_t w[EPX_N_MODEL_SLOTS];
    epx_layer_t *layers;
    epx_expert_weights_t *experts; /* [n_layers, n_local_experts] */
    struct epx_checkpoint *ck;     /* NULL with dummy weights */
    void *weights_block; /* dummy weights, or a copy of the checkpoint's in the ops' memory; NULL: mapped files are used */
    size_t weights_bytes;
    uint64_t mapped_bytes;
    epx_meter_t meter;
    epx_heads_t heads;

    /* scratch in the ops' memory, [max_rows, ...]; operand rows: see ops.h */
    struct {
        void *p;
        size_t n_bytes;
    } owned[16];
    int n_owned;
    float *h;       /* residual stream, hidden */
    void *norm;     /* hidden, operand rows */
    float *qkv;     /* q heads, k heads, v heads; latent attention: absorbed q heads, then the new key */
    void *attn;     /* q heads, operand rows; latent attention: kv_lora of each head */
    float *q;       /* latent attention: compressed q, and q heads of nope + rope (later heads of v) */
    float *proj;    /* hidden: output of attention; operand rows: of the exchange */
    float *shared;  /* hidden: output of the shared expert, and its gate */
    float *router;  /* n_experts */
    int32_t *ids;   /* top_k */
    float *weights; /* top_k */
    /* operand rows in the ops' memory, [most rows that a plan brings, hidden] */
    void *expert_in; /* of contiguous plans; NULL: none is */
    void *expert_out;
    size_t expert_in_bytes, expert_out_bytes;
    int32_t *expert_counts; /* [n_local_experts] */
    float *logits;          /* [logits_rows, vocab] in the ops' memory; NULL: the batch's own are written */
    int logits_rows;
    int32_t *best;   /* [logits_rows] */
    float *inv_freq; /* [rope_dim / 2] */

    epx_model_probe_fn probe;
    void *probe_ctx;
};

/* The architecture whose HF name this is, or NULL. */
const epx_arch_t *epx_arch_find(const char *architecture);
/* The i-th, or NULL past the end. */
const epx_arch_t *epx_arch_at(int i);

/* Load the views of the rank's share (weights.c). */
epx_status_t epx_model_load_weights(epx_model_t *m, const epx_model_load_t *load);

/* The residual stream of the batch's rows. */
static inline float *epx_residual(const epx_model_t *m, const epx_batch_t *b) { return m->h + (int64_t)b->first * m->cfg.hidden; }

/* Receive the rows of an exchange that was begun, run the local experts of a layer on them, and send their answers back
 * (blocks.c). io is that of dispatch_send. */
epx_status_t epx_model_run_experts(epx_model_t *m, epx_plan_t *plan, int contiguous, int layer, epx_io_t *io);

/* ---- blocks (blocks.c): each runs on the batch's rows ---- */

/* The whole forward pass: embedding, layers of `attention` and a dense or MoE feed-forward, logits. */
typedef epx_status_t (*epx_attention_fn)(epx_model_t *m, const epx_batch_t *b, int layer);
epx_status_t epx_forward_decoder(epx_model_t *m, const epx_batch_t *b, epx_attention_fn attention);
/* h = embedding of the tokens. */
void epx_block_embed(epx_model_t *m, const epx_batch_t *b);
/* h += o(attention(norm(h))): grouped-query attention with biases, norms of q and k and sinks where the layer has them, rotary
 * embedding, the layer's window. */
epx_status_t epx_block_gqa(epx_model_t *m, const epx_batch_t *b, int layer);
/* The same with latent attention. The cache holds compressed keys; the up-projections are applied to q and to the result
 * instead ("absorbed"), so keys and values are never expanded. */
epx_status_t epx_block_mla(epx_model_t *m, const epx_batch_t *b, int layer);
/* h += ffn(norm(h)) of a layer without experts. */
void epx_block_dense(epx_model_t *m, const epx_batch_t *b, int layer);
/* h += sum of experts(norm(h)) + the shared expert's part: router, dispatch, local experts, combine. Collective. */
epx_status_t epx_block_moe(epx_model_t *m, const epx_batch_t *b, int layer);
/* logits of b->logit_rows: final norm and output matrix (the embedding when tied). */
epx_status_t epx_block_logits(epx_model_t *m, const epx_batch_t *b);

/* ---- attention over several ranks (attention_tp.c) ---- */
/* Choose m->heads for one of tp ranks; the weights are loaded. */
void epx_heads_init(epx_model_t *m, int tp, int rank);
void epx_heads_fini(epx_model_t *m);
/* Rows [first, first + n) of a matrix, or elements of a vector, f32 or bf16. */
epx_weight_t epx_weight_part(const epx_weight_t *w, int64_t first, int64_t n);
/* m->proj = output projection over the heads of all ranks, from m->attn of each; w are the layer's. Collective over them. */
epx_status_t epx_attention_gather(epx_model_t *m, const epx_weight_t *w, int64_t n);

/* ---- config.json (config_read.c); each refuses what it does not know by name ---- */

/* Sizes that every decoder has, under Hugging Face's usual keys: hidden, layers, heads, head_dim, vocabulary, positions. */
epx_status_t epx_config_sizes(const epx_json_doc_t *d, epx_model_config_t *c);
/* The key as an integer from lo to hi into *out. */
epx_status_t epx_config_int(const epx_json_doc_t *d, const char *key, int lo, int hi, int *out);
/* num_experts_per_tok under `key`, at most n_experts. */
epx_status_t epx_config_top_k(const epx_json_doc_t *d, const char *key, epx_model_config_t *c);
/* rms_norm_eps, tie_word_embeddings, hidden_act "silu". */
epx_status_t epx_config_common(const epx_json_doc_t *d, epx_model_config_t *c);
/* rope_theta at the top or in rope_parameters; no scaling, or also YaRN when `yarn`. *out_mscale_all_dim may be NULL. */
epx_status_t epx_config_rope(const epx_json_doc_t *d, int yarn, epx_model_config_t *c, double *out_mscale_all_dim);
/* No quantisation, or "fp8" (e4m3, 128 x 128 blocks) when `fp8`. */
epx_status_t epx_config_quantisation(const epx_json_doc_t *d, int fp8, epx_model_config_t *c);
/* A boolean or absent key must have this value. */
epx_status_t epx_config_only_bool(const epx_json_doc_t *d, const char *key, int value, const char *why);
/* The key absent or one of the two strings (b may be NULL). */
epx_status_t epx_config_only_string(const epx_json_doc_t *d, const char *key, const char *a, const char *b);
/* n_group, topk_group: a legal cut of n_experts that leaves top_k to choose from. */
epx_status_t epx_config_groups(const epx_json_doc_t *d, epx_model_config_t *c);
/* first_k_dense_replace, intermediate_size of the dense layers. */
epx_status_t epx_config_dense(const epx_json_doc_t *d, epx_model_config_t *c);

/* Sizes, heads and scale of latent attention, YaRN allowed. Needs c->fp8. */
epx_status_t epx_config_mla(const epx_json_doc_t *d, epx_model_config_t *c);
/* Routed and shared experts and dense layers under DeepSeek's keys. */
epx_status_t epx_config_deepseek_experts(const epx_json_doc_t *d, epx_model_config_t *c);

/* inv_freq [rope_dim / 2] of the configuration. */
void epx_rope_frequencies(const epx_model_config_t *c, float *out);
/* 1 when the layer attends to a window only. */
static inline int epx_layer_slides(const epx_model_config_t *c, int layer) {
    return (int)(c->sliding[layer / 64] >> layer % 64 & 1u);
}

/* Rules that most architectures share. */
#define EPX_LAYER "model.layers.%L."
#define EPX_RULES_ENDS                                                                                             \
    {"model.embed_tokens.weight", {EPX_DIM_VOCAB, EPX_DIM_HIDDEN}, EPX_PLACE_REPLICATED, EPX_SLOT_EMBED},          \
        {"model.norm.weight", {EPX_DIM_HIDDEN}, EPX_PLACE_REPLICATED, EPX_SLOT_FINAL_NORM}, {                      \
        "lm_head.weight", {EPX_DIM_VOCAB, EPX_DIM_HIDDEN}, EPX_PLACE_REPLICATED, EPX_SLOT_LM_HEAD, EPX_WHEN_UNTIED \
    }
#define EPX_RULES_NORMS                                                                                        \
    {EPX_LAYER "input_layernorm.weight", {EPX_DIM_HIDDEN}, EPX_PLACE_REPLICATED, EPX_SLOT_ATTN_NORM}, {        \
        EPX_LAYER "post_attention_layernorm.weight", {EPX_DIM_HIDDEN}, EPX_PLACE_REPLICATED, EPX_SLOT_FFN_NORM \
    }
#define EPX_RULES_QKVO                                                                                           \
    {EPX_LAYER "self_attn.q_proj.weight", {EPX_DIM_Q, EPX_DIM_HIDDEN}, EPX_PLACE_REPLICATED, EPX_SLOT_Q},        \
        {EPX_LAYER "self_attn.k_proj.weight", {EPX_DIM_KV, EPX_DIM_HIDDEN}, EPX_PLACE_REPLICATED, EPX_SLOT_K},   \
        {EPX_LAYER "self_attn.v_proj.weight", {EPX_DIM_KV, EPX_DIM_HIDDEN}, EPX_PLACE_REPLICATED, EPX_SLOT_V}, { \
        EPX_LAYER "self_attn.o_proj.weight", {EPX_DIM_HIDDEN, EPX_DIM_Q}, EPX_PLACE_REPLICATED, EPX_SLOT_O       \
    }
#define EPX_RULES_MLA                                                                                                           \
    {EPX_LAYER "self_attn.q_proj.weight",                                                                                       \
     {EPX_DIM_MLA_Q, EPX_DIM_HIDDEN},                                                                                           \
     EPX_PLACE_REPLICATED,                                                                                                      \
     EPX_SLOT_Q,                                                                                                                \
     EPX_WHEN_NO_Q_LORA},                                                                                                       \
        {EPX_LAYER "self_attn.q_a_proj.weight",                                                                                 \
         {EPX_DIM_Q_LORA, EPX_DIM_HIDDEN},                                                                                      \
         EPX_PLACE_REPLICATED,                                                                                                  \
         EPX_SLOT_Q_A,                                                                                                          \
         EPX_WHEN_Q_LORA},                                                                                                      \
        {EPX_LAYER "self_attn.q_a_layernorm.weight",                                                                            \
         {EPX_DIM_Q_LORA},                                                                                                      \
         EPX_PLACE_REPLICATED,                                                                                                  \
         EPX_SLOT_Q_A_NORM,                                                                                                     \
         EPX_WHEN_Q_LORA},                                                                                                      \
        {EPX_LAYER "self_attn.q_b_proj.weight",                                                                                 \
         {EPX_DIM_MLA_Q, EPX_DIM_Q_LORA},                                                                                       \
         EPX_PLACE_REPLICATED,                                                                                                  \
         EPX_SLOT_Q,                                                                                                            \
         EPX_WHEN_Q_LORA},                                                                                                      \
        {EPX_LAYER "self_attn.kv_a_proj_with_mqa.weight", {EPX_DIM_KV_A, EPX_DIM_HIDDEN}, EPX_PLACE_REPLICATED, EPX_SLOT_KV_A}, \
        {EPX_LAYER "self_attn.kv_a_layernorm.weight", {EPX_DIM_KV_LORA}, EPX_PLACE_REPLICATED, EPX_SLOT_KV_A_NORM},             \
        {EPX_LAYER "self_attn.kv_b_proj.weight", {EPX_DIM_MLA_KV_B, EPX_DIM_KV_LORA}, EPX_PLACE_REPLICATED, EPX_SLOT_KV_B}, {   \
        EPX_LAYER "self_attn.o_proj.weight", {EPX_DIM_HIDDEN, EPX_DIM_MLA_OUT}, EPX_PLACE_REPLICATED, EPX_SLOT_O                \
    }
#define EPX_RULES_QKV_BIAS                                                                                                   \
    {EPX_LAYER "self_attn.q_proj.bias", {EPX_DIM_Q}, EPX_PLACE_REPLICATED, EPX_SLOT_Q_BIAS, EPX_WHEN_ATTENTION_BIAS},        \
        {EPX_LAYER "self_attn.k_proj.bias", {EPX_DIM_KV}, EPX_PLACE_REPLICATED, EPX_SLOT_K_BIAS, EPX_WHEN_ATTENTION_BIAS}, { \
        EPX_LAYER "self_attn.v_proj.bias", {EPX_DIM_KV}, EPX_PLACE_REPLICATED, EPX_SLOT_V_BIAS, EPX_WHEN_ATTENTION_BIAS      \
    }
/* A feed-forward of [ffn, hidden] gate and up and [hidden, ffn] down under `prefix`. */
#define EPX_RULES_FFN(prefix, ffn, when)                                                                           \
    {EPX_LAYER prefix "gate_proj.weight", {ffn, EPX_DIM_HIDDEN}, EPX_PLACE_REPLICATED, EPX_SLOT_FFN_GATE, when},   \
        {EPX_LAYER prefix "up_proj.weight", {ffn, EPX_DIM_HIDDEN}, EPX_PLACE_REPLICATED, EPX_SLOT_FFN_UP, when}, { \
        EPX_LAYER prefix "down_proj.weight", {EPX_DIM_HIDDEN, ffn}, EPX_PLACE_REPLICATED, EPX_SLOT_FFN_DOWN, when  \
    }
/* The routed experts; gate, up and down are the names before ".weight". */
#define EPX_RULES_EXPERTS(prefix, gate, up, down)                                                                             \
    {EPX_LAYER prefix gate ".weight", {EPX_DIM_FFN, EPX_DIM_HIDDEN}, EPX_PLACE_BY_EXPERT, EPX_SLOT_GATE, EPX_WHEN_EXPERTS},   \
        {EPX_LAYER prefix up ".weight", {EPX_DIM_FFN, EPX_DIM_HIDDEN}, EPX_PLACE_BY_EXPERT, EPX_SLOT_UP, EPX_WHEN_EXPERTS}, { \
        EPX_LAYER prefix down ".weight", {EPX_DIM_HIDDEN, EPX_DIM_FFN}, EPX_PLACE_BY_EXPERT, EPX_SLOT_DOWN, EPX_WHEN_EXPERTS  \
    }
#define EPX_RULE_ROUTER(name) \
    { EPX_LAYER name, {EPX_DIM_EXPERTS, EPX_DIM_HIDDEN}, EPX_PLACE_REPLICATED, EPX_SLOT_ROUTER, EPX_WHEN_EXPERTS }

#endif
