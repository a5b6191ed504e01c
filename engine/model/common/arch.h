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
    EPX_DIM_FFN
} epx_dim_t;

/* Who holds a tensor. */
typedef enum {
    EPX_PLACE_REPLICATED = 0, /* every rank */
    EPX_PLACE_BY_EXPERT       /* the rank that owns the expert */
} epx_place_t;

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
    EPX_N_LAYER_SLOTS,
    /* per expert */
    EPX_SLOT_GATE = 0,
    EPX_SLOT_UP,
    EPX_SLOT_DOWN,
    EPX_N_EXPERT_SLOTS
} epx_slot_t;

typedef struct {
    const char *name;  /* "%L" stands for the layer, "%E" for the expert; their presence says how often the tensor exists */
    epx_dim_t dims[2]; /* dims[1] EPX_DIM_NONE: a vector */
    epx_place_t place;
    epx_slot_t slot;
    int only_untied; /* 1: absent when the embedding is tied */
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
    epx_expert_weights_t *experts; /* [n_local_experts] */
} epx_layer_t;

struct epx_model {
    epx_model_config_t cfg;
    int rank, n_ranks, max_rows;
    int first_expert, n_local_experts;
    epx_ops_t *ops;   /* borrowed */
    epx_plan_t *plan; /* borrowed */

    epx_weight_t w[EPX_N_MODEL_SLOTS];
    epx_layer_t *layers;
    epx_expert_weights_t *experts; /* [n_layers, n_local_experts] */
    struct epx_checkpoint *ck;     /* NULL with dummy weights */
    void *dummy_block;
    uint64_t mapped_bytes;
    epx_meter_t meter;

    /* scratch, [max_rows, ...] */
    float *h;                /* residual stream, hidden */
    float *norm;             /* hidden */
    float *qkv;              /* q heads, k heads, v heads */
    float *attn;             /* q heads */
    float *proj;             /* hidden: output of attention or of the exchange */
    float *router;           /* n_experts */
    int32_t *ids;            /* top_k */
    float *weights;          /* top_k */
    float *expert_out;       /* [n_ranks * max_rows * min(top_k, El), hidden] */
    size_t expert_out_bytes; /* mapped */
    float *inv_freq;         /* [head_dim / 2] */
    float rope_scale;

    epx_model_probe_fn probe;
    void *probe_ctx;
};

/* The architecture whose HF name this is, or NULL. */
const epx_arch_t *epx_arch_find(const char *architecture);
/* The i-th, or NULL past the end. */
const epx_arch_t *epx_arch_at(int i);

/* Load the views of the rank's share (weights.c). */
epx_status_t epx_model_load_weights(epx_model_t *m, const epx_model_load_t *load);

/* ---- blocks (blocks.c): each runs on the first b->n_rows rows of the scratch ---- */

/* h = embedding of the tokens. */
void epx_block_embed(epx_model_t *m, const epx_batch_t *b);
/* h += o(attention(norm(h))): grouped-query attention with per-head q/k norm where the layer has those weights, rotary embedding.
 */
void epx_block_gqa(epx_model_t *m, const epx_batch_t *b, int layer);
/* h += sum of experts(norm(h)): softmax router, dispatch, local experts, combine. Collective. */
epx_status_t epx_block_moe_softmax(epx_model_t *m, const epx_batch_t *b, int layer);
/* logits of b->logit_rows: final norm and output matrix (the embedding when tied). */
void epx_block_logits(epx_model_t *m, const epx_batch_t *b);
/* Hand the layer's routing and residual stream to the probe, if any. */
void epx_block_probe(const epx_model_t *m, const epx_batch_t *b, int layer);

#endif
