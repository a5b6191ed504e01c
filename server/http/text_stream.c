/* Stop strings by Knuth-Morris-Pratt, one automaton a string: the matched length is exactly what must be held back.
 * Pure; not thread-safe per object. */
#include "server/http/text_stream.h"

#include <stdlib.h>
#include <string.h>

#include "engine/tokenizer/tokenizer.h"

static uint16_t advance(const epx_text_stop_t *t, uint16_t matched, char c) {
    while (matched > 0 && (matched == t->n_bytes || t->text[matched] != c)) matched = t->border[matched - 1];
    return (uint16_t)(matched < t->n_bytes && t->text[matched] == c ? matched + 1 : 0);
}

static epx_status_t stop_init(epx_text_stop_t *t, const char *text, size_t n_bytes) {
    EPX_ASSERT(n_bytes >= 1 && n_bytes <= EPX_API_MAX_STOP_BYTES);
    t->border = calloc(n_bytes, sizeof *t->border);
    if (!t->border) return epx_fail(EPX_ERR_NOMEM, "stop string: no memory");
    t->text = text;
    t->n_bytes = (uint16_t)n_bytes;
    for (uint16_t i = 1, k = 0; i < n_bytes; i++) t->border[i] = k = advance(t, k, text[i]);
    return EPX_OK;
}

epx_status_t epx_text_stream_init(epx_text_stream_t *s, const char *const *stops, const size_t *stop_bytes, int n_stops) {
    EPX_ASSERT(n_stops >= 0 && n_stops <= EPX_API_MAX_STOPS);
    for (int i = 0; i < n_stops; i++) {
        epx_status_t st = stop_init(&s->stops[i], stops[i], stop_bytes[i]);
        if (st < 0) return st;
        s->n_stops = i + 1;
    }
    return EPX_OK;
}

/* Feed one byte to every automaton. Returns the length of the longest stop string that ends here, or 0. */
static size_t feed(epx_text_stream_t *s, char c) {
    size_t longest = 0;
    for (int i = 0; i < s->n_stops; i++) {
        epx_text_stop_t *t = &s->stops[i];
        t->matched = advance(t, t->matched, c);
        if (t->matched == t->n_bytes && t->n_bytes > longest) {
            longest = t->n_bytes;
            s->stopped_by = i;
        }
    }
    return longest;
}

static size_t undecided(const epx_text_stream_t *s) {
    size_t n = 0;
    for (int i = 0; i < s->n_stops; i++)
        if (s->stops[i].matched > n) n = s->stops[i].matched;
    return n;
}

/* The first n held bytes go out, the rest stays. */
static epx_status_t release(epx_text_stream_t *s, size_t n, epx_str_t *out) {
    if (n == 0) return EPX_OK;
    EPX_TRY(epx_utf8_append_lossy(out, s->held.data, n));
    s->held.n_bytes -= n;
    s->n_out += n;
    memmove(s->held.data, s->held.data + n, s->held.n_bytes);
    return EPX_OK;
}

epx_status_t epx_text_stream_push(epx_text_stream_t *s, const char *bytes, size_t n_bytes, epx_str_t *out) {
    if (s->stopped || n_bytes == 0) return EPX_OK;
    size_t before = s->held.n_bytes;
    EPX_TRY(epx_str_append(&s->held, bytes, n_bytes));
    s->n_in += n_bytes;
    for (size_t i = 0; i < n_bytes; i++) {
        size_t stop_bytes = feed(s, bytes[i]);
        if (stop_bytes == 0) continue;
        s->stopped = 1;
        EPX_TRY(release(s, before + i + 1 - stop_bytes, out));
        s->held.n_bytes = 0;
        return EPX_OK;
    }
    size_t decided = s->held.n_bytes - undecided(s);
    return release(s, epx_utf8_complete_prefix(s->held.data, decided), out);
}

epx_status_t epx_text_stream_finish(epx_text_stream_t *s, epx_str_t *out) {
    if (s->stopped) return EPX_OK;
    return release(s, s->held.n_bytes, out);
}

void epx_text_stream_fini(epx_text_stream_t *s) {
    for (int i = 0; i < s->n_stops; i++) free(s->stops[i].border);
    epx_str_fini(&s->held);
    memset(s, 0, sizeof *s);
}
