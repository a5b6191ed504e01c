/* Tables for people. */
#include "app/report.h"

#include <inttypes.h>
#include <stdlib.h>

#include "engine/runtime/presets.h"

static double rate(double n, double seconds) { return seconds > 0 ? n / seconds : 0; }

static const char *finish_text(epx_finish_t f) {
    return f == EPX_FINISH_STOP ? "end token" : f == EPX_FINISH_LENGTH ? "length limit" : "cancelled";
}

void epx_report_speed(const epx_answer_t *a, FILE *out) {
    fprintf(out, "prompt  %6d tokens  %9.1f tokens/s\n", a->n_prompt, rate(a->n_prompt, a->prefill_s));
    fprintf(out, "answer  %6d tokens  %9.1f tokens/s  (ended by: %s)\n", a->n_generated, rate(a->n_generated - 1, a->decode_s),
            finish_text(a->finish));
}

void epx_report_ranks(const epx_session_t *s, FILE *out) {
    const epx_rank_info_t *i = &s->status.info;
    fprintf(out, "ranks   %6d, %d thread%s each; %d layers, %d experts (top %d); exchange: %s over %s, %s combine; %s\n",
            i->n_ranks, i->n_threads, i->n_threads == 1 ? "" : "s", i->n_layers, i->n_experts, i->top_k, i->backend, i->transport,
            s->settings->a2a_combine, i->isa);
}

static void report_nodes(const epx_session_t *s, FILE *out) {
    int n = s->status.n_nodes, each = s->status.n_ranks / n;
    if (n == 1) return;
    fprintf(out, "nodes      %d:", n);
    for (int i = 0; i < n; i++)
        fprintf(out, "%s ranks %d to %d on %s", i ? "," : "", i * each, (i + 1) * each - 1, s->status.hosts[i]);
    fprintf(out, "; traffic between them is not encrypted\n");
}

void epx_report_start(const epx_session_t *s, FILE *out) {
    const epx_rank_info_t *i = &s->status.info;
    const epx_settings_t *o = s->settings;
    const epx_moe_preset_t *p = epx_moe_preset(o->moe_a2a_backend);
    int n = i->n_ranks;
    report_nodes(s, out);
    if (s->status.n_replicas > 1) fprintf(out, "replicas   %d, each as follows\n", s->status.n_replicas);
    fprintf(out, "layout     world %d, attention-TP %d, DP groups %d, expert groups %d; %d experts, %d to %d a rank, top %d\n", n,
            i->attn_tp, epx_settings_n_dp(o), n / i->ep, i->n_experts, i->n_experts / i->ep, (i->n_experts + i->ep - 1) / i->ep,
            i->top_k);
    fprintf(out, "per rank   prompt chunk %d, running requests %d, tokens of a step (cap) %d; %d threads, %s\n", i->chunk_tokens,
            i->max_running, i->max_tokens, i->n_threads, i->isa);
    fprintf(out,
            "memory     KV pool %" PRId64 " tokens in pages of %d (%" PRIu64 " bytes), exchange %" PRIu64
            " bytes a rank; context %d\n",
            i->kv_tokens, i->page_size, i->kv_bytes, i->exchange_bytes, i->max_context);
    fprintf(out, "scheduler  %s, prompts %s decodes, prefix cache %s, balance %s\n", o->schedule_policy,
            o->enable_mixed_chunk ? "together with" : "before", o->disable_radix_cache ? "off" : "on", o->load_balance_method);
    fprintf(out, "exchange   %s: %s over %s, %s combine (%s); %d channel%s of %d tokens%s", p->name, i->backend, i->transport,
            o->a2a_combine, p->why, i->n_channels, i->n_channels == 1 ? "" : "s", i->channel_tokens,
            !p->deepep_class ? ""
            : i->contiguous  ? ", mode normal"
                             : ", mode low_latency");
    if (i->decode_tokens) fprintf(out, "; steps without prompt tokens: mode low_latency, %d tokens", i->decode_tokens);
    fprintf(out, "\n");
    fflush(out);
}

epx_status_t epx_report_rows(epx_session_t *s, FILE *out) {
    int n = s->status.n_ranks;
    epx_rank_stats_t *stats = calloc((size_t)n, sizeof *stats);
    epx_status_t st;
    if (stats == NULL) return epx_fail(EPX_ERR_NOMEM, "statistics of %d ranks", n);
    st = epx_cluster_stats(s->cluster, stats, n);
    if (st < 0) goto done;
    fprintf(out, "rows sent to experts (one token, one layer, one rank):\n  from \\ to ");
    for (int r = 0; r < n; r++) fprintf(out, "  %7s %2d", "rank", r);
    for (int r = 0; r < n; r++) {
        fprintf(out, "\n  rank %-4d ", r);
        for (int d = 0; d < n; d++) fprintf(out, "  %10" PRIu64, stats[r].rows_sent[d]);
    }
    fprintf(out, "\n");
done:
    free(stats);
    return st;
}

void epx_report_mapped(const epx_session_t *s, FILE *out) {
    fprintf(out, "  rank  process  bytes of checkpoint files mapped\n");
    for (int r = 0; r < s->status.n_ranks; r++)
        fprintf(out, "  %4d  %7d  %" PRIu64 "\n", r, s->status.pids[r], s->status.mapped_bytes[r]);
}
