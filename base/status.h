/* Errors: a status code plus one thread-local message. Used by every room; EPX_ERR_* codes come from epx_status.h. */
#ifndef EPX_BASE_STATUS_H
#define EPX_BASE_STATUS_H

#include "base/compiler.h"
#include "epx/epx_status.h"

/* Store the message of this thread and return `s`. Messages name the field, the value and the legal values.
 * Truncated at 1,023 bytes. Never fails. */
epx_status_t epx_fail(epx_status_t s, const char *fmt, ...) EPX_PRINTF(2, 3);
/* As epx_fail, and appends ": " and the text of errno value `err`. */
epx_status_t epx_fail_errno(epx_status_t s, int err, const char *fmt, ...) EPX_PRINTF(3, 4);
/* Put "context: " before the present message, keep the status: for callers that know more, such as a file name. */
epx_status_t epx_fail_context(epx_status_t s, const char *fmt, ...) EPX_PRINTF(2, 3);
/* This thread's message; "" before the first failure. */
const char *epx_error_message(void);

/* Return from the calling function when `expr` is negative. */
#define EPX_TRY(expr)                  \
    do {                               \
        epx_status_t try_s_ = (expr);  \
        if (try_s_ < 0) return try_s_; \
    } while (0)
/* Jump to `label` with `var` set when `expr` is negative. */
#define EPX_TRY_GOTO(var, expr, label) \
    do {                               \
        (var) = (expr);                \
        if ((var) < 0) goto label;     \
    } while (0)

/* Our own invariants only, never for input. Aborts the process in debug and release alike. */
#define EPX_ASSERT(cond)                                                         \
    do {                                                                         \
        if (EPX_UNLIKELY(!(cond))) epx_assert_failed(#cond, __FILE__, __LINE__); \
    } while (0)
void epx_assert_failed(const char *cond, const char *file, int line) __attribute__((noreturn));

#endif
