/* Requests and cancellations of an attention group. Its ranks run the same scheduler, which is pure; so they stay in step when
 * each order takes effect in the same step everywhere. The step record says how many orders a rank has; what all have is in force
 * from the next step on. */
#include <stdlib.h>

#include "engine/runtime/rank_internal.h"

epx_status_t epx_rank_add_order(epx_rank_t *r, const epx_sched_request_t *request) {
    epx_rank_order_t *o = malloc(sizeof *o);
    if (!o) return epx_fail(EPX_ERR_NOMEM, "request: no memory");
    *o = (epx_rank_order_t){NULL, *request};
    if (!r->orders) r->orders_tail = &r->orders;
    *r->orders_tail = o;
    r->orders_tail = &o->next;
    r->n_orders_got++;
    return EPX_OK;
}

static epx_rank_order_t *take(epx_rank_t *r) {
    epx_rank_order_t *o = r->orders;
    r->orders = o->next;
    r->n_orders_done++;
    return o;
}

void epx_rank_apply_orders(epx_rank_t *r, void (*refused)(void *ctx, const epx_sched_request_t *q), void *ctx) {
    epx_seq_t *seq;
    while (r->n_orders_done < r->n_orders_all) {
        epx_rank_order_t *o = take(r);
        if (!o->request.user) {
            epx_sched_cancel(r->sched, o->request.id);
        } else if (epx_sched_submit(r->sched, &o->request, &seq) < 0) {
            refused(ctx, &o->request);
            epx_rank_request_free(o->request.user);
        }
        free(o);
    }
}

void epx_rank_drop_orders(epx_rank_t *r) {
    while (r->orders) {
        epx_rank_order_t *o = take(r);
        epx_rank_request_free(o->request.user);
        free(o);
    }
}
