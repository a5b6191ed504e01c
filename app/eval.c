/* `epx eval`: perplexity of a text, comparison with reference values, or word problems. */
#include "app/eval.h"

#include <string.h>

#include "app/commands.h"

int epx_command_eval(const epx_settings_t *o) {
    int over = 0;
    if (strcmp(o->eval_what, "gsm8k") == 0) return epx_eval_gsm8k(o, &over) < 0 ? epx_print_error() : over;
    epx_status_t s = strcmp(o->eval_what, "logits") == 0 ? epx_eval_logits(o, &over) : epx_eval_perplexity(o);
    return s < 0 ? epx_print_error() : over;
}
