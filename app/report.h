/* Tables for people: speed of an answer, ranks, rows sent between ranks. */
#ifndef EPX_APP_REPORT_H
#define EPX_APP_REPORT_H

#include <stdio.h>

#include "app/answer.h"

/* Tokens and tokens per second of prompt and answer, one line each. */
void epx_report_speed(const epx_answer_t *a, FILE *out);
/* One line: ranks, layers, experts, backend, transport, instruction set. */
void epx_report_ranks(const epx_session_t *s, FILE *out);
/* The table at the start: what the settings came to. */
void epx_report_start(const epx_session_t *s, FILE *out);
/* Which rank sent how many rows (a row is one token for one rank and layer) to which, since the start. */
epx_status_t epx_report_rows(epx_session_t *s, FILE *out);
/* Process, mapped checkpoint bytes of each rank. */
void epx_report_mapped(const epx_session_t *s, FILE *out);

#endif
