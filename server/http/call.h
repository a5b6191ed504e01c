/* A call: one accepted generation request of a client, its choices (each one request of the cluster) and what is to be sent.
 *
 * Who touches what: h->lock guards everything marked [lock]. The rest belongs to the MHD thread that serves the connection, which
 * is one thread at a time. Lifetime by references: one of the connection's exchange, one of the streaming response, one of each
 * choice that the cluster still owes an end. A suspended connection is never closed by MHD, so `conn` and `fd` are good while
 * `suspended` is set. Order of locks: h->lock, then MHD's own; the cluster is never called with h->lock held. */
#ifndef EPX_SERVER_HTTP_CALL_H
#define EPX_SERVER_HTTP_CALL_H

#include "server/http/http_impl.h"
#include "server/http/logprobs.h"
#include "server/http/openai_write.h"
#include "server/http/text_stream.h"
#include "server/http/tool_calls.h"

typedef struct epx_choice {
    epx_call_t *call;
    struct epx_choice *next_in_table; /* [lock] */
    uint64_t id;                      /* [lock] of the cluster; 0: not submitted */
    epx_token_news_t *tokens;         /* [lock] owned: arrived, not yet taken; at most max_new */
    size_t n_tokens, cap_tokens;      /* [lock] */
    size_t n_taken;                   /* [lock] tokens that were taken */
    epx_finish_t finish;              /* [lock] EPX_FINISH_NONE while it runs */
    int end_token;                    /* [lock] the last token ended the text and is no part of it */
    int cancel_sent, closed;          /* [lock] closed: nobody wants what may still come */
    int32_t n_cached;                 /* [lock] prompt tokens found in the prefix cache */
    int aborted;                      /* [lock] ended by /abort_request */
    int stopped;                      /* [lock] ended by a stop string, which the ranks do not know */
    const char *rid;                  /* [lock] name for /abort_request; lies in call->own; NULL: call->id */
    uint64_t start_ns, last_ns;       /* [lock] when it was submitted, when its last token came; 0: none yet */
    char error[256];                  /* [lock] of EPX_FINISH_ERROR */
    int idx;
    int32_t n_prompt, n_completion;
    const epx_api_request_t *req; /* its parameters: call->req, or one of the format's */
    epx_text_stream_t stream;
    epx_str_t text; /* without stream: the whole; else what the next chunk carries */
    epx_logprobs_t logprobs;
    epx_tool_calls_t tool_calls;
    json_t *calls; /* owned: calls found and not yet sent; NULL: none */
    int done, role_sent;
    const char *finish_reason;
} epx_choice_t;

/* How a call's answer looks, where that is not OpenAI's form. All run on the MHD thread of the connection. */
typedef struct {
    /* Tokens of a choice arrived; called before they become text. */
    epx_status_t (*on_tokens)(epx_choice_t *ch, const epx_token_news_t *tokens, size_t n);
    /* Stream: append what is new of a choice to call->out. */
    epx_status_t (*write_events)(epx_choice_t *ch);
    /* Stream: append what comes before "data: [DONE]". */
    epx_status_t (*write_end)(epx_call_t *c);
    /* Answer a call whose choices are all done. */
    enum MHD_Result (*answer)(epx_call_t *c);
    void (*free_own)(void *own);
} epx_call_format_t;

struct epx_call {
    epx_http_t *http;
    epx_call_t *prev, *next;     /* [lock] list of all calls with a connection */
    int refs;                    /* [lock] */
    struct MHD_Connection *conn; /* [lock] NULL once the connection is gone */
    int fd;                      /* [lock] */
    int suspended, gone, tick;   /* [lock] tick: a keep-alive comment is due */
    uint64_t quiet_since_ns;     /* [lock] since when nothing was sent */
    epx_api_request_t req;
    const epx_call_format_t *format;  /* NULL: OpenAI's */
    void *own;                        /* of the format, freed by it */
    uint64_t started_ns, deadline_ns; /* deadline 0: none */
    int dp_rank;                      /* -1: any */
    epx_choice_t *choices;            /* owned, [n_choices] */
    int n_choices;
    char id[48];
    epx_api_head_t head;
    epx_str_t out; /* stream bytes to send, from out_off */
    size_t out_off;
    int client_left, wrote, has_error, streaming, ended;
    epx_api_error_t error;
};

/* What a format adds to a new call; zero for OpenAI's. */
typedef struct {
    const epx_call_format_t *format;
    void *own;                     /* taken over */
    const epx_api_request_t *each; /* parameters of each prompt, inside own; NULL: req's for all */
    int dp_rank_plus_1;            /* 0: any */
    uint64_t timeout_ns;           /* 0: none */
} epx_call_extra_t;

/* Takes over the contents of *req and extra->own, also on failure. One reference, the caller's. Adds the call to the server's
 * list. NULL without memory. */
epx_call_t *epx_call_create(epx_http_t *h, struct MHD_Connection *conn, epx_api_request_t *req, const epx_call_extra_t *extra);
void epx_call_ref(epx_call_t *c);
void epx_call_unref(epx_call_t *c);
/* Tokenize and submit every choice (submit.c). On EPX_ERR_ARG *err says why; choices already submitted were cancelled. */
epx_status_t epx_call_submit(epx_call_t *c, epx_api_error_t *err);
/* Hand one choice to the cluster under the id that it gives, and take events that came before the id was known. */
epx_status_t epx_call_submit_choice(epx_choice_t *ch, const epx_request_t *req);
/* The connection ended: forget it, cancel what still runs. */
void epx_call_detach(epx_call_t *c);
/* Take what arrived: text into the choices, for a stream events into c->out; sets done, has_error, ended, client_left. */
void epx_call_pump(epx_call_t *c);
int epx_call_all_done(const epx_call_t *c);
void epx_call_usage(const epx_call_t *c, epx_api_usage_t *out);
/* Suspend the connection until the cluster or the watcher has something. 0: there already is, not suspended. */
int epx_call_suspend(epx_call_t *c);
/* End the choices that go by this name, or all for NULL, as "abort". Returns how many. */
int epx_call_abort(epx_http_t *h, const char *rid);
/* Cancel every choice that runs. */
void epx_call_cancel(epx_call_t *c);

/* Free a list of tokens with what they own. */
void epx_tokens_free(epx_token_news_t *tokens, size_t n);
/* The event sink's part. */
void epx_call_on_event(epx_http_t *h, const epx_event_t *ev);
/* Resume when suspended. h->lock held. */
void epx_call_wake_locked(epx_call_t *c);

#endif
