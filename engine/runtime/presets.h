/* What a value of --moe-a2a-backend means: the only table of serving-level names. Pure. */
#ifndef EPX_ENGINE_RUNTIME_PRESETS_H
#define EPX_ENGINE_RUNTIME_PRESETS_H

#include <stddef.h>

typedef struct {
    const char *name;       /* of --moe-a2a-backend */
    const char *library;    /* backend of libepx; NULL: the library chooses by capability */
    const char *modes;      /* legal values of --deepep-mode besides auto, "a|b" */
    int auto_by_batch;      /* auto: normal for steps in which a rank has prompt tokens, else low_latency; 0: low_latency */
    int deepep_class;       /* tokens travel to the ranks of their experts, in DeepEP's layouts; --deepep-mode applies */
    int complete_output;    /* combine gives the whole sum at the token's rank: no all-reduce may follow */
    int shared_per_rank;    /* a shared expert that is fused as a routed one takes a slot on every rank, not one id */
    int needs_dp_attention; /* in SGLang; here none does, which tests/model/bits_test.c shows with one rank */
    const char *why;        /* for the table at the start */
} epx_moe_preset_t;

/* Is it a legal value of --deepep-mode with that preset? Where the mode has no effect all are. */
int epx_moe_has_mode(const epx_moe_preset_t *p, const char *mode);
/* Can expert groups of `ep` consecutive ranks go with attention groups of `attn` ones? Either must divide the other, so that the
 * ranks of an expert group hold the same tokens in equal parts. */
int epx_ep_fits(int ep, int attn);
/* NULL: no such name. */
const epx_moe_preset_t *epx_moe_preset(const char *name);
/* The i-th, or NULL past the end. */
const epx_moe_preset_t *epx_moe_preset_at(size_t i);

#endif
