/* `epx generate`: one answer on standard output. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "app/answer.h"
#include "app/commands.h"
#include "app/report.h"

/* The model's defaults under what the user gave. */
static epx_sampling_t sampling_of(const epx_settings_t *o, const epx_generation_defaults_t *d) {
    epx_sampling_t s = d->sampling;
    if (o->temperature >= 0) s.temperature = (float)o->temperature;
    if (o->top_p >= 0) s.top_p = (float)o->top_p;
    if (o->min_p >= 0) s.min_p = (float)o->min_p;
    if (o->top_k != INT64_MIN) s.top_k = (int32_t)o->top_k;
    s.seed = (uint64_t)(o->seed >= 0 ? o->seed : o->random_seed);
    return s;
}

static epx_status_t generate(epx_session_t *s) {
    const epx_settings_t *o = s->settings;
    epx_sampling_t sampling;
    epx_answer_t a;
    int32_t *ids = NULL, n = 0;
    epx_status_t st;
    EPX_TRY(epx_session_load_text(s));
    EPX_TRY(epx_answer_encode(s, o->chat ? o->chat : o->prompt, o->chat != NULL, &ids, &n));
    sampling = sampling_of(o, &s->defaults);
    EPX_TRY_GOTO(st, epx_session_start(s), done);
    EPX_TRY_GOTO(st, epx_answer_run(s, ids, n, (int32_t)o->max_tokens, &sampling, stdout, &a), done);
    if (isatty(1)) printf("\n");
    epx_report_speed(&a, stderr);
    epx_report_ranks(s, stderr);
    st = epx_report_rows(s, stderr);
done:
    free(ids);
    return st;
}

int epx_command_generate(const epx_settings_t *o) {
    epx_session_t s;
    epx_status_t st;
    int code;
    epx_session_init(&s, o);
    st = generate(&s);
    code = st < 0 ? epx_print_error() : 0;
    epx_session_close(&s);
    return code;
}
