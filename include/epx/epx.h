/* libepx: expert-parallel exchange for Mixture-of-Experts layers.
 *
 * world -> group -> plan -> dispatch / combine. Set-up is collective and done once, with fixed capacities; the step path
 * then allocates nothing. dispatch sends each token to the ranks that own its top-k experts; combine brings the weighted
 * sum of the experts' answers back.
 *
 * Letters: T tokens of this rank in this step, H hidden size, E experts, El experts of this rank, K top-k, W ranks of the
 * group. Contracts are in docs/api.md, memory ordering and arithmetic in docs/protocol.md.
 *
 * Threads: different worlds, groups and plans may be used from different threads; one handle from one thread at a time,
 * except epx_plan_poll() and epx_plan_abort(), which may be called from any thread until epx_plan_destroy() is. */
#ifndef EPX_H
#define EPX_H

#include <stddef.h>
#include <stdint.h>

#include "epx/epx_device.h"
#include "epx/epx_status.h"

#if defined(__GNUC__)
#define EPX_API __attribute__((visibility("default")))
#else
#define EPX_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define EPX_VERSION_MAJOR 0
#define EPX_VERSION_MINOR 1
#define EPX_VERSION_PATCH 0
#define EPX_MAX_TOP_K 64
#define EPX_MAX_RANKS 4096

typedef struct epx_world epx_world_t; /* this process (or thread) among its peers; several may exist */
typedef struct epx_group epx_group_t; /* any rank list; several per world, may overlap */
typedef struct epx_plan epx_plan_t;   /* one exchange shape; several per group */

/* "0.1.0" of the library at run time. Static string. */
EPX_API const char *epx_version(void);
/* Text of a status from epx_status.h; "unknown status" for other numbers. Static string. */
EPX_API const char *epx_status_text(epx_status_t s);
/* Message of the last failing call of this thread: field, value and legal values; or phase, peer, epoch, expected and
 * seen. "" before the first failure. Borrowed until the thread's next failing call. */
EPX_API const char *epx_last_error(void);

/* Where log lines go; NULL (the default): nowhere. The library never prints. level: 0 error, 1 warning, 2 info, 3 debug. */
typedef void (*epx_log_fn)(void *ctx, int level, const char *message);
EPX_API void epx_set_log(epx_log_fn fn, void *ctx);

/* ---- world ---- */

typedef struct {
    uint32_t size;         /* sizeof(epx_world_config_t), set by epx_world_config_init() */
    int rank, n_ranks;     /* -1: take from the bootstrap */
    const char *bootstrap; /* NULL with the two callbacks; "self" (one rank); "tcp:HOST:PORT" (rank 0 listens there, rank and
                              n_ranks are given, EPX_JOIN_TOKEN is the shared secret); "env" (a launcher's variables) */
    /* Every rank gives n_bytes (at most 2 KiB); out_all receives n_ranks * n_bytes in rank order. EPX_OK or a negative
     * status. Called by world and group creation only. */
    epx_status_t (*allgather)(void *ctx, const void *mine, size_t n_bytes, void *out_all);
    epx_status_t (*barrier)(void *ctx);
    void *ctx;
    const char *transports; /* allowed, in order, comma separated ("shm,self"); NULL: all, by capability and score */
    uint64_t timeout_ns;    /* of set-up calls; 0: 30 s */
} epx_world_config_t;

/* Defaults: rank and n_ranks -1, everything else zero. */
EPX_API void epx_world_config_init(epx_world_config_t *cfg);
/* Meet the other ranks.
 * Collective over all ranks: one all-gather, after the ranks of "tcp" and "env" have joined. *cfg and its strings are borrowed
 * during the call only; ctx until epx_world_destroy().
 * Returns EPX_ERR_ARG, _UNSUPPORTED (a name that is not built), EPX_ERR_MISMATCH on all ranks when n_ranks or transports
 * differ, or the failure of another rank with its message; with "tcp" and "env" also _TIMEOUT naming the missing ranks,
 * _MISMATCH (token, size, a rank that joined twice), _PEER. *out_world is written on success only; owned by the caller. */
EPX_API epx_status_t epx_world_create(const epx_world_config_t *cfg, epx_world_t **out_world);
/* n_ranks worlds whose ranks are threads of this process: no bootstrap is needed. Not collective: one thread makes them all and
 * hands each to the thread that will be that rank; every other collective call is made by each rank's own thread.
 * out_worlds  [n_ranks], rank i in place i; owned by the caller, each ended by epx_world_destroy()
 * Returns     EPX_ERR_ARG, EPX_ERR_NOMEM: out_worlds untouched */
EPX_API epx_status_t epx_world_create_local(int n_ranks, epx_world_t **out_worlds);
/* -1 and 0 for NULL. */
EPX_API int epx_world_rank(const epx_world_t *w);
EPX_API int epx_world_size(const epx_world_t *w);
/* Destroys no groups: destroy those first. Not collective. NULL is allowed. */
EPX_API void epx_world_destroy(epx_world_t *w);

/* ---- group ---- */

typedef enum {
    EPX_LINK_SELF = 1u << 0,   /* same rank */
    EPX_LINK_MAPPED = 1u << 1, /* peers' memory is mapped: load/store */
    EPX_LINK_MESSAGE = 1u << 2 /* peers are reached by messages */
} epx_link_t;

typedef struct {
    uint32_t size;            /* sizeof, set by the caller */
    int n_ranks, rank;        /* of the group */
    const char *transport;    /* chosen transport */
    uint32_t links;           /* bits of epx_link_t over all peers */
    int max_top_k, max_ranks; /* limits of the library */
    uint32_t token_dtypes;    /* bit (1 << epx_dtype_t) for each dtype that plans accept */
} epx_group_caps_t;

/* Make a group of the world ranks ranks[0..n_ranks) (distinct, any order; group rank i is ranks[i]). Collective over the
 * world: every world rank makes the same calls in the same order; a rank not listed gets *out_group = NULL and EPX_OK.
 * ranks NULL and n_ranks 0: all ranks. device: -1 on all ranks: CPU; else a CUDA device of this process on each rank; several
 * ranks may share one. Plans of a group on devices take device pointers and work on io->stream (docs/api.md, "GPUs").
 * Connects the ranks and takes one small control slab; a failure on one rank fails the call on all world ranks.
 * Returns EPX_ERR_ARG, _UNSUPPORTED (no allowed transport joins the ranks, with the reason), _MISMATCH (the rank lists differ),
 * _NOMEM, _OS, _TIMEOUT, _PEER. *out_group is owned by the caller and borrows w. */
EPX_API epx_status_t epx_group_create(epx_world_t *w, const int *ranks, int n_ranks, int device, epx_group_t **out_group);
/* -1 and 0 for NULL. */
EPX_API int epx_group_rank(const epx_group_t *g);
EPX_API int epx_group_size(const epx_group_t *g);
/* Strings in *out_caps are static. */
EPX_API epx_status_t epx_group_caps(const epx_group_t *g, epx_group_caps_t *out_caps);

#define EPX_GROUP_RECORD_BYTES 256
/* All-gather of one small record per rank, for step agreement: out_all is [W, n_bytes] in group-rank order.
 * Collective, n_bytes <= EPX_GROUP_RECORD_BYTES and equal on all ranks, no allocation, spins, yields, then parks.
 * timeout_ns 0: wait for ever, but a dead peer still ends it. mine may be the own part of out_all.
 * Returns EPX_ERR_ARG (nothing was sent); EPX_ERR_TIMEOUT or EPX_ERR_PEER naming the peer, EPX_ERR_ABORTED when another rank
 * gave up, EPX_ERR_MISMATCH when n_bytes differ: after those the group is lost and every later call on it fails. */
EPX_API epx_status_t epx_group_allgather(epx_group_t *g, const void *mine, size_t n_bytes, void *out_all, uint64_t timeout_ns);
/* Mark another rank of the group as dead (alive 0) or take that back; it must have stopped for good. Local: every living rank
 * makes the same calls, then epx_plan_recover() on each plan, from where on the plan's exchanges leave the rank out. From now on
 * its death is no news, and epx_group_allgather() gives zeros as its record. EPX_ERR_ARG: rank. */
EPX_API epx_status_t epx_group_mask(epx_group_t *g, int rank, int alive);
/* Which peer this group has found dead (group rank), or -1. Never blocks. Ranks that are threads of one process die together. */
EPX_API int epx_group_dead_rank(epx_group_t *g);
/* Destroy its plans first. Not collective; peers that still wait for this rank get EPX_ERR_PEER ("has left the group"). NULL is
 * allowed. */
EPX_API void epx_group_destroy(epx_group_t *g);

/* ---- plan ---- */

typedef enum { EPX_F32 = 0, EPX_BF16 = 1, EPX_F16 = 2, EPX_FP8_E4M3 = 3, EPX_BYTES = 4 } epx_dtype_t;

typedef enum {
    EPX_LAYOUT_LISTS = 0,        /* rows stay where the transport put them; epx_plan_lists() tells where */
    EPX_LAYOUT_EXPERT_MAJOR = 1, /* [El, row_cap, H], counts[El]; rows past the count are not written */
    EPX_LAYOUT_CONTIGUOUS = 2    /* [sum of counts rounded up to align, H], at most info.max_rows rows; pad rows are zero;
                                    epx_plan_offsets() tells where each expert starts */
} epx_layout_t;

typedef enum {
    EPX_COMBINE_EXACT = 0,   /* K rows back, summed in k order in f32 at the source: same bits for any W */
    EPX_COMBINE_PARTIAL = 1, /* one weighted partial sum per (token, rank), summed in rank order ("prereduced") */
    EPX_COMBINE_REDUCED = 2  /* groups on devices only: as PARTIAL, but the experts have made the sums already: combine's x is
                                [W, max_tokens, H] of combine dtype, row (src, t) the weighted sum of this rank's experts of
                                token t of rank src; rows of tokens that none of them has are not read */
} epx_combine_t;

/* F32: one word a scale. UE8M0 (OCP MX): scale = 2^(code - 127), four codes a word in order of channels, the first in the lowest
 * byte, unused ones of the last word 0. A row has info.scale_words words. */
typedef enum { EPX_SCALE_F32 = 0, EPX_SCALE_UE8M0 = 1 } epx_scale_format_t;
/* Of io->out_scale. ROW_MAJOR: [rows, scale_words]. COL_MAJOR: [scale_words, info.scale_gap], for EXPERT_MAJOR one such block for
 * each local expert; scale_gap is the number of rows (row_cap, or max_rows with CONTIGUOUS) rounded up to 4. */
typedef enum { EPX_SCALE_ROW_MAJOR = 0, EPX_SCALE_COL_MAJOR = 1 } epx_scale_layout_t;

typedef struct {
    uint32_t size;              /* sizeof(epx_plan_config_t), set by epx_plan_config_init() */
    int max_tokens;             /* largest T of any rank, >= 1 */
    int hidden;                 /* H, >= 1 */
    int top_k;                  /* K, 1 .. EPX_MAX_TOP_K */
    int n_experts;              /* E, logical experts, >= 1 */
    int n_slots;                /* physical slots, >= E; 0: E. With more slots than experts some experts have copies: which of
                                   them serves a token depends on source rank and token only */
    const int *slot_rank;       /* [n_slots] slot -> group rank; NULL: even split, n_slots % W first ranks get one more */
    const int *slot_expert;     /* [n_slots] slot -> logical expert, each at least once; NULL: slot % E */
    uint64_t placement_version; /* of the two tables above */
    epx_dtype_t token_dtype;    /* of io->x at dispatch: f32, bf16, f16, fp8. Also of the result of combine and of io->add;
                                   with fp8 tokens those have combine_dtype, which must then be stated, or, when that is
                                   fp8 too, expert_dtype */
    epx_dtype_t wire_dtype;     /* of rows on the wire and in the output: equal to token_dtype, or fp8 (cast fused) */
    epx_dtype_t expert_dtype;   /* of the expert outputs: f32, bf16, f16; EPX_BYTES: combine_dtype, or token_dtype when
                                   combine_dtype is fp8 */
    epx_dtype_t combine_dtype;  /* of rows on the wire back: f32, bf16, f16, fp8 (with scales); EPX_BYTES: token_dtype */
    int scale_block;            /* channels per fp8 scale, 1 .. 512; 128 */
    epx_scale_format_t scale_format;
    epx_scale_layout_t scale_layout;
    epx_layout_t layout;
    int align; /* CONTIGUOUS: rows of an expert are padded to a multiple of this; else 1 */
    epx_combine_t combine;
    int replicate;       /* this many consecutive ranks hold the same tokens (pplx's dp_size) and all get the
                            results, each row is computed once; divides W; 1: none */
    int n_channels;      /* exchanges in flight (micro-batches), 1 .. 64; each has its own buffers */
    int n_blocks;        /* GPU blocks per kernel; 0: chosen */
    int renormalize;     /* masked peers: scale a token's remaining weights to the old sum; 0 or 1 */
    const char *backend; /* "onesided", "collective", "ref"; NULL or "auto": by a measured table, EPX_A2A_TABLE */
    uint64_t timeout_ns; /* of every wait; 0: 10 s */
    int debug;           /* 1: canaries between slab regions, checksums of rows; also by EPX_DEBUG=1 in the environment */
} epx_plan_config_t;

typedef struct {
    /* Inputs are read before the call that takes them returns and may be reused then, except epx_plan_input() itself. */
    uint32_t size;                   /* sizeof(epx_io_t), set by epx_io_init() */
    const void *x;                   /* dispatch: [T, H] token dtype. combine_send: expert outputs in the plan's layout:
                                        LISTS [n_rows, H] in list order, EXPERT_MAJOR [El, row_cap, H], CONTIGUOUS [rows, H];
                                        NULL after epx_plan_partials() */
    const float *x_scale;            /* caller-quantised fp8 only: [T, info.scale_words] words, f32 or UE8M0 codes */
    const int32_t *ids;              /* dispatch: [T, K] logical expert ids; -1: not sent, adds 0. Repeats are allowed */
    const float *weights;            /* dispatch: [T, K] */
    int n_tokens;                    /* T, 0 .. max_tokens; 0 is an ordinary call */
    const uint32_t *n_tokens_device; /* GPU: if set, overrides n_tokens */
    void *out_x;                     /* dispatch_recv: expert rows (NULL with LISTS); combine_recv: [T, H] token dtype */
    float *out_scale;                /* dispatch_recv, fp8 wire, not LISTS: words of the scales, see epx_scale_layout_t */
    int32_t *out_counts;             /* dispatch_recv: [El] rows of each local expert; may be NULL with LISTS */
    int32_t *out_histogram;          /* dispatch_recv: [E] (token, expert) rows over all ranks; NULL: not wanted */
    const void *add;              /* combine_recv: optional [T, H] of the result's dtype, added in f32 before the one rounding */
    void *stream;                 /* CUDA stream; NULL on CPU */
    int channel;                  /* 0 .. n_channels - 1 */
    const float *combine_weights; /* combine_recv, EXACT without renormalize: optional [T, K] in place of the weights that
                                     dispatch was given, for callers who know them only then */
} epx_io_t;

typedef struct {
    uint32_t size;       /* sizeof, set by the caller */
    const char *backend; /* "onesided", ... */
    const char *transport;
    epx_layout_t layout;
    int n_local_experts;        /* El, slots of this rank, of the exchange in flight on channel 0, else of the next */
    uint64_t placement_version; /* of the same */
    int row_cap;                /* rows per expert in EXPERT_MAJOR: W / replicate * max_tokens */
    size_t max_rows;            /* rows that dispatch output and expert outputs can have in the plan's layout */
    size_t scale_words;         /* 32-bit words that hold the scales of a row; 0 without an fp8 wire */
    size_t scale_gap;           /* words between neighbouring scale words of a row in io->out_scale */
    size_t slab_bytes;          /* shared with peers, per rank */
    size_t private_bytes;       /* lists and tables, per rank */
    uint64_t epoch;             /* exchanges completed on channel 0 */
    const char *backend_why;    /* why this backend: for people; borrowed until epx_plan_destroy() */
} epx_plan_info_t;

typedef struct {
    uint32_t size; /* sizeof, set by the caller */
    int n_ranks;   /* W: filled length of the arrays */
    uint64_t n_dispatches, n_combines;
    /* Routed rows, a property of the ids: the same for every backend. */
    uint64_t *rows_sent;     /* [W] caller's array or NULL: (token, rank) pairs to each rank since create, own included; with
                                replicate each pair counts at the rank whose copy is read */
    uint64_t *rows_received; /* [W] caller's array or NULL: the same from each rank */
    /* Logical bytes that this backend moves to other ranks, since create; 0 for "ref". */
    uint64_t dispatch_bytes; /* rows, scales and routing tables; a row read in place by r ranks counts r times */
    uint64_t combine_bytes;  /* rows back */
    uint64_t wait_ns;        /* time spent waiting for peers */
} epx_plan_stats_t;

/* Defaults: f32 tokens and wire, expert and combine dtype EPX_BYTES (same), scale_block 128, align, replicate and n_channels 1,
 * LISTS, EXACT, the rest zero. max_tokens, hidden, top_k and n_experts must be set. */
EPX_API void epx_plan_config_init(epx_plan_config_t *cfg);
/* All zero but size. */
EPX_API void epx_io_init(epx_io_t *io);
/* Bytes that a plan of this shape allocates on each of n_ranks ranks of one host: slab_bytes + private_bytes of epx_plan_info().
 * Allocates nothing that lasts. Returns EPX_ERR_ARG, _UNSUPPORTED, _CAPACITY; *out_bytes is then untouched. */
EPX_API epx_status_t epx_plan_bytes(const epx_plan_config_t *cfg, int n_ranks, size_t *out_bytes);
/* The same on a rank with n_here ranks on its host, itself included (1 .. n_ranks): rows and buffers of messages to the others
 * are counted too. */
EPX_API epx_status_t epx_plan_bytes_hosts(const epx_plan_config_t *cfg, int n_ranks, int n_here, size_t *out_bytes);
/* The same for plans of this group, wherever its ranks are: with a group on devices the bytes of device memory are counted too.
 */
EPX_API epx_status_t epx_group_plan_bytes(const epx_group_t *g, const epx_plan_config_t *cfg, size_t *out_bytes);
/* Collective over the group, in the same order on all ranks. Checks every field, compares all fields over ranks, then takes and
 * shares memory; *cfg and its tables are borrowed during the call only. A failure on one rank fails the call on all.
 * Returns EPX_ERR_ARG (outside the legal values) or _UNSUPPORTED (legal, not built yet), each naming field and value;
 * _MISMATCH on all ranks naming the first field that differs, the values and ranks (a rank whose own config is bad gets that
 * error); _CAPACITY; _NOMEM with bytes wanted and free; _TIMEOUT, _PEER. *out_plan is owned by the caller and borrows g. */
EPX_API epx_status_t epx_plan_create(epx_group_t *g, const epx_plan_config_t *cfg, epx_plan_t **out_plan);
/* Strings in *out_info are static. */
EPX_API epx_status_t epx_plan_info(const epx_plan_t *p, epx_plan_info_t *out_info);
/* Counters since create. On devices the rows and bytes are 0: only the device knows them. Not for use from a second thread while
 * a step runs. */
EPX_API epx_status_t epx_plan_stats(const epx_plan_t *p, epx_plan_stats_t *inout_stats);

/* Rows [max_tokens, H] of token dtype inside the plan's slab, 64-byte aligned. Pass as io->x and dispatch copies nothing
 * where memory is mapped and wire dtype = token dtype. Owned by the plan. Must stay untouched from dispatch_send until
 * combine_recv of that channel returns. */
EPX_API epx_status_t epx_plan_input(epx_plan_t *p, int channel, void **out_x);
/* Legal between dispatch_recv and combine_send of the channel, with EPX_LAYOUT_LISTS; else EPX_ERR_STATE. */
EPX_API epx_status_t epx_plan_lists(epx_plan_t *p, int channel, epx_lists_t *out_lists);

/* What a caller needs that makes the partial sums itself, as the last GEMM of a fused expert layer can: for each token of source
 * `src` with a row here, the sum over k, ascending, of weight * answer from +0 in f32, fused, rounded once to combine_dtype, goes
 * to sums[src] + token * sum_stride_bytes. Tokens without a row here are left alone. Arrays are borrowed until combine_send. */
typedef struct {
    uint32_t size; /* sizeof(epx_partials_t), set by the caller */
    int n_ranks;
    const uint32_t *n_tokens;    /* [W] tokens of each source */
    const int32_t *const *ids;   /* [W] -> [n_tokens, K] logical experts, as the source gave them */
    const float *const *weights; /* [W] -> [n_tokens, K] */
    const int32_t *const *rows;  /* [W] -> [n_tokens, K] row of the dispatch output, or of the lists; -1: not computed here */
    void *const *sums;           /* [W] -> [n_tokens, H] combine_dtype, in the slab of the source: write only */
    size_t sum_stride_bytes;
} epx_partials_t;
/* Promise to write all partial sums of the exchange in flight in place; combine_send then takes io->x NULL and copies nothing.
 * Legal between dispatch_recv and combine_send of the channel (else EPX_ERR_STATE); EPX_ERR_UNSUPPORTED, and nothing promised,
 * unless combine is PARTIAL with a combine_dtype other than fp8, replicate is 1, the plan is on CPUs with a backend that sums at
 * the source (not "ref") and all ranks are mapped. */
EPX_API epx_status_t epx_plan_partials(epx_plan_t *p, int channel, epx_partials_t *out);

/* Where each local expert's rows start in dispatch output and expert outputs, in rows: *out_off is [El + 1], the last entry is
 * the number of rows. Any layout; legal between dispatch_recv and combine_send of the channel, borrowed until then. On devices it
 * is device memory, not with EXPERT_MAJOR. */
EPX_API epx_status_t epx_plan_offsets(epx_plan_t *p, int channel, const int32_t **out_off);

/* The four halves, in this order on each channel. Collective: every rank makes every call, also with no tokens.
 * dispatch_send checks all arguments and ids before anything is sent: after EPX_ERR_ARG, _STATE or _CAPACITY nothing has
 * changed and the call may be repeated. After EPX_ERR_TIMEOUT or _PEER the plan is aborted on all reachable ranks: every later
 * call returns the first error, other ranks get EPX_ERR_ABORTED, or EPX_ERR_PEER when a process died, and outputs are undefined.
 * Ids must be -1 or 0 .. n_experts - 1; a token that names an expert twice is one row of that expert, and both weights count. */
EPX_API epx_status_t epx_dispatch_send(epx_plan_t *p, const epx_io_t *io);
EPX_API epx_status_t epx_dispatch_recv(epx_plan_t *p, const epx_io_t *io);
EPX_API epx_status_t epx_combine_send(epx_plan_t *p, const epx_io_t *io);
EPX_API epx_status_t epx_combine_recv(epx_plan_t *p, const epx_io_t *io);
/* send + recv in one call; the arguments of both halves are checked before anything is sent. */
EPX_API epx_status_t epx_dispatch(epx_plan_t *p, const epx_io_t *io);
/* x_io: fields of combine_send; the result goes to io->out_x. */
EPX_API epx_status_t epx_combine(epx_plan_t *p, const epx_io_t *io);

/* Has anything gone wrong, here, at a peer or on the device? EPX_OK or the plan's first error. Never blocks. */
EPX_API epx_status_t epx_plan_poll(epx_plan_t *p);
/* Make every pending and later call on this plan fail with EPX_ERR_ABORTED, on all ranks that can be reached. */
EPX_API epx_status_t epx_plan_abort(epx_plan_t *p);
/* Make an aborted plan usable again: open exchanges are forgotten, all channels of all ranks go on with the same epoch, and ranks
 * that epx_group_mask() marks take no part any more. Also ends the loss of the group's all-gather. Collective over the living
 * ranks, which must have left every call of the plan and the group; no other thread uses the plan. Masked ranks cannot come back
 * to it. Returns EPX_ERR_PEER (a dead rank is not masked), _TIMEOUT, _MISMATCH (the ranks masked differ): the plan stays aborted;
 * _UNSUPPORTED on devices. Ranks may be on several hosts: messages of before that are still under way are dropped. */
EPX_API epx_status_t epx_plan_recover(epx_plan_t *p);
/* After masking: how many tokens of the exchange begun last on this channel have places that no living rank computes, and for
 * each token how many ([n_tokens], borrowed until the next dispatch_send; only written once a rank is masked; NULL: not wanted).
 * Such places add nothing to the result. */
EPX_API epx_status_t epx_plan_missing(epx_plan_t *p, int channel, int *out_n_tokens, const uint8_t **out_places);
/* New placement tables [n_slots] (NULL as in the config), in force for exchanges `epoch`, epoch + 1, ... of every channel;
 * earlier ones use the old tables. Collective over the group, at the same place between the calls of all ranks; not on the step
 * path. The caller moves the weights. Returns EPX_ERR_ARG (tables; version not above the present one; an epoch that has begun on
 * some rank), _CAPACITY (more slots on a rank than any had at create), _STATE (the placement before is not in force yet),
 * _MISMATCH (ranks gave different things); the failure of one rank is that of all, and nothing has changed. */
EPX_API epx_status_t epx_plan_set_placement(epx_plan_t *p, const int *slot_rank, const int *slot_expert, uint64_t version,
                                            uint64_t epoch);
/* Collective unless the plan was aborted or a peer died: waits (bounded by timeout_ns) until no peer uses the slab. Before
 * epx_group_destroy(). NULL is allowed. */
EPX_API void epx_plan_destroy(epx_plan_t *p);

/* ---- what is there ---- */

typedef struct {
    const char *kind; /* "transport", "backend", "device" */
    const char *name;
    int available;      /* on this machine, in this build */
    const char *detail; /* what it is, or why it is not available */
} epx_component_t;
/* The i-th built-in component, in order of preference; EPX_ERR_NOT_FOUND past the end. */
EPX_API epx_status_t epx_component(int i, epx_component_t *out);

#ifdef __cplusplus
}
#endif

#endif
