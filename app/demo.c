/* `epx demo`: what `make run` starts. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "app/answer.h"
#include "app/commands.h"
#include "app/report.h"

static const char question[] =
    "Sara has 9 eggs. Priya has twice as many eggs as Sara. What is the total number of eggs they have?";

/* Greedy, so that the answer is the same everywhere. */
static epx_status_t ask(epx_session_t *s) {
    epx_sampling_t greedy = {.temperature = 0, .top_p = 1, .top_k = -1};
    epx_answer_t a;
    int32_t *ids = NULL, n = 0;
    epx_status_t st;
    EPX_TRY(epx_answer_encode(s, question, 1, &ids, &n));
    printf("Question: %s\nAnswer:\n", question);
    fflush(stdout);
    st = epx_answer_run(s, ids, n, 0, &greedy, stdout, &a);
    free(ids);
    if (st < 0) return st;
    printf("\n\n");
    epx_report_speed(&a, stdout);
    epx_report_ranks(s, stdout);
    st = epx_report_rows(s, stdout);
    fflush(stdout);
    return st;
}

int epx_command_demo(const epx_settings_t *o) {
    epx_session_t s;
    int code;
    epx_session_init(&s, o);
    if (epx_session_load_text(&s) < 0 || epx_session_start(&s) < 0 || ask(&s) < 0) {
        code = epx_print_error();
    } else if (isatty(0)) {
        printf("\n");
        code = epx_serve_session(&s, 1);
    } else {
        printf("\nStandard input is not a terminal, so this ends here. To serve: epx serve --model-path %s --tp 2 --dp 2 "
               "--enable-dp-attention\n",
               o->model_path);
        code = 0;
    }
    epx_session_close(&s);
    return code;
}
