/* What a rank shows while it runs: its place in the step, which a watchdog reads from another thread, and SGLang's log lines. */
#include "base/atomic.h"
#include "base/clock.h"
#include "base/log.h"
#include "engine/runtime/rank_internal.h"

/* One word, so that a reader on another thread sees phase, rows and number together: number << 32 | rows << 4 | phase. */
enum { PHASE_BITS = 4, ROWS_BITS = 28 };

void epx_rank_enter(epx_rank_t *r, epx_rank_phase_t phase, int32_t n_rows) {
    uint64_t n = (epx_load_relaxed_u64(&r->position) >> (PHASE_BITS + ROWS_BITS)) + 1;
    epx_store_relaxed_u64(&r->position_step, r->epoch);
    epx_store_release_u64(&r->position, n << (PHASE_BITS + ROWS_BITS) | (uint64_t)n_rows << PHASE_BITS | (uint64_t)phase);
}

void epx_rank_position(const epx_rank_t *r, epx_rank_position_t *out) {
    static const char *const names[] = {"idle", "agreeing on the step", "forward pass", "sampling"};
    uint64_t word = epx_load_acquire_u64(&r->position);
    *out = (epx_rank_position_t){.phase = names[word & ((1u << PHASE_BITS) - 1)],
                                 .step = epx_load_relaxed_u64(&r->position_step),
                                 .is_idle = (word & ((1u << PHASE_BITS) - 1)) == EPX_AT_IDLE,
                                 .n_changes = word >> (PHASE_BITS + ROWS_BITS),
                                 .n_rows = (int)(word >> PHASE_BITS & ((1u << ROWS_BITS) - 1))};
}

static double usage(const epx_rank_t *r, const epx_sched_stats_t *s) {
    return (double)s->n_used_pages / (double)epx_kv_pool_n_pages(r->pool);
}

static int dp_rank(const epx_rank_t *r) { return r->cfg.first_dp_rank + r->cfg.rank / r->attn_size; }

static void log_decode(epx_rank_t *r, const epx_sched_batch_t *b, const epx_sched_stats_t *s) {
    uint64_t now;
    r->n_decode_log_tokens += (uint64_t)b->n_decode_rows;
    if (++r->n_decode_steps < r->cfg.decode_log_interval) return;
    now = epx_now_ns();
    epx_log(EPX_LOG_INFO,
            "[DP%d TP%d] Decode batch. #running-req: %d, #token: %d, token usage: %.2f, cuda graph: False, gen throughput "
            "(token/s): %.2f, #queue-req: %d",
            dp_rank(r), r->cfg.rank, s->n_running, s->n_used_pages * r->cfg.page_size, usage(r, s),
            r->decode_log_ns ? (double)r->n_decode_log_tokens * 1e9 / (double)(now - r->decode_log_ns + 1) : 0.0, s->n_waiting);
    r->decode_log_ns = now;
    r->n_decode_steps = 0;
    r->n_decode_log_tokens = 0;
}

void epx_rank_log_batch(epx_rank_t *r, const epx_sched_batch_t *b) {
    epx_sched_stats_t s;
    if (r->attn_rank) return; /* the others of an attention group would say the same */
    epx_sched_stats(r->sched, &s);
    if (b->n_retracted)
        epx_log(EPX_LOG_INFO, "[DP%d TP%d] KV cache pool is full. Retract requests. #retracted_reqs: %d, #new_token_ratio: %.4f",
                dp_rank(r), r->cfg.rank, b->n_retracted, s.new_token_ratio);
    if (b->n_prefill_rows)
        epx_log(
            EPX_LOG_INFO,
            "[DP%d TP%d] Prefill batch. #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, #running-req: %d, "
            "#queue-req: %d",
            dp_rank(r), r->cfg.rank, b->n_new, b->n_prefill_rows, b->n_cached, usage(r, &s), s.n_running - b->n_new, s.n_waiting);
    if (b->n_decode_rows) log_decode(r, b, &s);
}
