/* Requests with a grammar: what they need, and masks on their logits. The thread of the rank.
 * The vocabulary is made with the first of them, which takes a moment (below 1 s for 150 thousand tokens). */
#include <math.h>
#include <stdlib.h>

#include "engine/runtime/rank_internal.h"

static epx_status_t need_vocab(epx_rank_t *r) {
    size_t n_words = ((size_t)r->info.vocab + 31) / 32;
    if (!r->grammar_bits) r->grammar_bits = calloc(n_words, sizeof *r->grammar_bits);
    if (!r->grammar_bits) return epx_fail(EPX_ERR_NOMEM, "grammar: no memory");
    if (r->grammar_vocab) return EPX_OK;
    return epx_grammar_vocab_load(r->model_dir, r->info.vocab, &r->grammar_vocab);
}

epx_status_t epx_rank_begin_grammar(epx_rank_t *r, const epx_request_t *req, epx_rank_request_t *own) {
    if (!req->grammar) return EPX_OK;
    EPX_TRY(need_vocab(r));
    EPX_TRY(epx_grammar_create(req->grammar, req->grammar_bytes, &own->grammar));
    return epx_grammar_state_create(own->grammar, r->grammar_vocab, &own->grammar_state);
}

static int is_eos(const epx_rank_t *r, int32_t id) {
    for (int32_t i = 0; i < r->gen.n_eos; i++)
        if (r->gen.eos_ids[i] == id) return 1;
    return 0;
}

epx_status_t epx_rank_mask(epx_rank_t *r, const epx_rank_request_t *q, float *logits) {
    int32_t n;
    EPX_TRY(epx_grammar_mask(q->grammar_state, r->grammar_bits, &n));
    int may_end = epx_grammar_can_end(q->grammar_state);
    for (int32_t id = 0; id < r->info.vocab; id++) {
        int allowed = (int)((r->grammar_bits[id / 32] >> (id % 32)) & 1u);
        if (!allowed && !(may_end && is_eos(r, id))) logits[id] = -INFINITY;
    }
    return EPX_OK;
}

void epx_rank_request_free(epx_rank_request_t *q) {
    if (!q) return;
    epx_grammar_state_destroy(q->grammar_state);
    epx_grammar_destroy(q->grammar);
    free(q);
}
