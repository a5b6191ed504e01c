/* What the CUDA kernels of `onesided` read: slab offsets and one plan of one rank, as plain data. Host and device.
 * Nothing here allocates; docs/protocol.md, "GPU", states the ordering rules. */
#ifndef EPX_SPI_GPU_PLAN_H
#define EPX_SPI_GPU_PLAN_H

#include <stdint.h>

enum {
    EPX_GPU_THREADS = 512, /* of a block: 4 groups of 128 */
    EPX_GPU_GROUPS = 4,
    EPX_GPU_HEAD_BYTES = 4096,
    EPX_GPU_WORD_BYTES = 16,  /* count word and routing entry: written and read as one 128-bit access */
    EPX_GPU_PACKET_WORDS = 3, /* payload words of a packet; the fourth is the epoch tag */
    EPX_GPU_SEG_D = 1536,  /* channels of a dispatch packet segment: whole packets and whole scale blocks in every wire dtype */
    EPX_GPU_SEG_C = 768,   /* channels of a combine packet segment: 128 packets of a 16-bit dtype */
    EPX_GPU_BULK_D = 2048, /* channels of a bulk segment: 16 or 8 for each of 128 threads */
    EPX_GPU_BULK_C = 1024,
    EPX_GPU_MAX_RANKS = 32 /* rank sets are 32-bit masks; kernel parameters hold the bases */
};

/* How a source sent its rows this epoch (in its count word). */
typedef enum { EPX_GPU_PACKETS = 0, EPX_GPU_BULK = 1 } epx_gpu_mode_t;

/* Offsets in bytes from the start of a rank's slab. "[2]" is epoch parity. */
typedef struct {
    uint64_t count_off;   /* [2][W] {n_tokens, mode, 0, tag} */
    uint64_t start_off;   /* [W] {0, 0, 0, tag}: the rank has begun to send the epoch's combine */
    uint64_t ids_off;     /* [2][W][T][id_words] {6 ids of 16 bits, tag}; EPX_GPU_ID_* */
    uint64_t weights_off; /* [2][W][T][weight_words] {3 f32, tag} */
    uint64_t d_off;       /* [2][W][T] rows of d_row_bytes */
    uint64_t dp_off;      /* [2][W][TL] rows of d_packets * 16, segment after segment */
    uint64_t c_off;       /* [P][T] rows of c_row_bytes; P = K (exact) or W (partial) */
    uint64_t cp_off;      /* [P][TL] rows of c_packets * 16 */
    uint64_t flag_d_off;  /* [W][n_blocks] u64 epochs */
    uint64_t flag_c_off;  /* [W][n_blocks] u64 epochs */
    uint64_t total_bytes;
    uint32_t d_row_bytes; /* H in wire dtype, then the words of the scales, padded to 16 */
    uint32_t d_scale_off; /* of the scales in a row; 0: none */
    uint32_t d_packets, c_row_bytes, c_packets;
    uint32_t n_scales;               /* blocks of 128 channels; 0 without an fp8 wire */
    uint32_t scale_words;            /* of a row: an f32 a block, or four UE8M0 codes a word */
    uint32_t id_words, weight_words; /* words a token */
} epx_gpu_layout_t;

/* First error of a plan, in host-mapped memory. code 0: none; written once by the thread that sees it first. */
typedef struct {
    int32_t code;  /* epx_status_t */
    int32_t phase; /* 0 dispatch, 1 combine */
    int32_t rank, peer;
    uint64_t epoch, seen;
} epx_gpu_error_t;

/* Words of device memory that a block keeps between launches: it alone reads and writes its own, so nothing is counted over
 * blocks. */
typedef struct {
    uint64_t done[4]; /* epoch finished in dispatch send, dispatch recv, combine send, combine recv */
} epx_gpu_block_t;

/* One place of a received token's routing: where its row lies here, and its weight. */
typedef struct {
    int32_t slot; /* output row; -1: not ours; EPX_GPU_REPEAT set: an earlier place of the token names the same row */
    float weight;
} epx_gpu_term_t;
enum { EPX_GPU_REPEAT = 1 << 30 };

/* An expert id on the wire: 15 bits, all ones: none; the top bit: an earlier place of the token names the same expert. */
enum { EPX_GPU_ID_MASK = 0x7FFF, EPX_GPU_ID_REPEAT = 0x8000, EPX_GPU_MAX_EXPERTS = 0x7FFF };

typedef struct {
    epx_gpu_layout_t l;
    int32_t rank, n_ranks, hidden, top_k, n_experts, n_local, max_tokens, row_cap;
    int32_t packet_tokens; /* TL: at most this many tokens go as packets */
    int32_t n_blocks;
    int32_t token_dtype, wire_dtype, combine_dtype, expert_dtype, result_dtype; /* epx_dtype_t */
    int32_t ue8m0, scale_by_column; /* scales: powers of two as codes; column-major in the output */
    int32_t contiguous, align;      /* output rows without gaps between experts but for padding to `align` */
    int64_t scale_gap;              /* by column: words from a scale word to the row's next */
    int32_t exact;
    int32_t early_launch;          /* the device lets a launch be placed while the one before ends (compute capability 9.0) */
    char *base[EPX_GPU_MAX_RANKS]; /* slab of each rank as this device sees it */
    const uint32_t *home;          /* device [E] owner << 16 | index at the owner */
    epx_gpu_term_t *terms;         /* device [W][T][K] */
    epx_gpu_block_t *blocks;       /* device [n_blocks] */
    uint32_t *stop;                /* device: set after an error; every later launch returns at once */
    epx_gpu_error_t *error;        /* host-mapped */
    uint64_t timeout_ns;
    int64_t *stamps; /* device [n_blocks][16] of SM clocks when built with EPX_GPU_STAMPS; else unused */
} epx_gpu_plan_t;

/* One call's operands, device pointers; see epx_io_t. */
typedef struct {
    const void *x;
    const uint32_t *x_scale; /* fp8 tokens: [T, scale_words] */
    const int32_t *ids;
    const float *weights; /* combine: NULL, or in place of those that dispatch was given (exact only) */
    int32_t n_tokens;
    const uint32_t *n_tokens_device;
    void *out_x; /* dispatch: expert-major rows; NULL: lists, rows stay in the slab */
    float *out_scale;
    int32_t *out_counts;     /* [El] or NULL */
    int32_t *out_expert_off; /* lists, contiguous: [El + 1] */
    int32_t *out_histogram;  /* [E] or NULL */
    void *out_entries;       /* lists: epx_list_entry_t [rows] */
    const void *add;
    const void **out_row_base;    /* lists: [W] rows of each source of this epoch in the own slab, or NULL */
    const float **out_scale_base; /* lists, fp8 wire: [W] scales of the same rows */
} epx_gpu_io_t;

/* Halves in a launch, bits. */
enum { EPX_GPU_SEND = 1, EPX_GPU_RECV = 2 };

#endif
