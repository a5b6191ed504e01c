/* SGLang's native endpoints: what their files share. Handlers run on MHD's threads. */
#ifndef EPX_SERVER_HTTP_NATIVE_H
#define EPX_SERVER_HTTP_NATIVE_H

#include "server/http/call.h"
#include "server/http/openai_parse.h"

enum { EPX_NATIVE_NEW_TOKENS = 128, EPX_NATIVE_MAX_RID = 128, EPX_NATIVE_PROBE_S = 20 };

/* What a choice of /generate has besides its text. */
typedef struct {
    char rid[EPX_NATIVE_MAX_RID + 16];
    int32_t *ids; /* owned: every token that came */
    size_t n_ids, cap_ids;
    int end_written; /* stream */
} epx_native_choice_t;

/* A request of /generate besides the prompts; owned by its call. */
typedef struct {
    int is_list;                          /* the answer is a list */
    int dp_rank_plus_1;                   /* 0: any */
    char (*rids)[EPX_NATIVE_MAX_RID + 1]; /* owned, [n_prompts]; NULL: none given */
    epx_api_request_t *each;              /* owned, [n_prompts] parameters; max_tokens -1: no tokens at all */
    int n_prompts;
    epx_native_choice_t *choices; /* owned, [n_choices]; NULL until the call exists */
    int n_choices;
} epx_native_t;

/* Parse the body of /generate. *out_req receives prompts, n, stream; *out_own the rest. EPX_ERR_ARG: *err says why and nothing is
 * left to free. n_dp: legal DP ranks. */
epx_status_t epx_native_parse(const char *body, size_t n_bytes, const epx_api_limits_t *lim, int n_dp, epx_api_request_t *out_req,
                              epx_native_t **out_own, epx_api_error_t *err);
void epx_native_free(void *own);
/* Events, list or object of answers. */
extern const epx_call_format_t epx_native_format;
/* {"text", "output_ids", "meta_info"} of a choice as it stands. */
epx_status_t epx_native_write_choice(const epx_choice_t *ch, int with_index, epx_str_t *out);

/* A value read from a JSON body that has only these members; anything else is a 400. *out_root is a new reference. */
epx_status_t epx_native_load(const epx_str_t *body, const char *const *names, json_t **out_root, epx_api_error_t *err);
/* A JSON answer; takes the reference of root. */
enum MHD_Result epx_native_respond(struct MHD_Connection *conn, int status, json_t *root);
enum MHD_Result epx_native_respond_text(struct MHD_Connection *conn, int status, const char *type, const char *text);
/* A reading or an error answer: EPX_OK, or *out_result is what the handler returns. */
epx_status_t epx_native_reading(epx_http_t *h, struct MHD_Connection *conn, epx_reading_t *out, enum MHD_Result *out_result);

#define EPX_NATIVE_HANDLER(name)                                                                             \
    enum MHD_Result name(epx_http_t *h, struct MHD_Connection *conn, const char *url, const epx_str_t *body, \
                         epx_call_t **out_call)
EPX_NATIVE_HANDLER(epx_native_generate);
EPX_NATIVE_HANDLER(epx_native_health_generate);
EPX_NATIVE_HANDLER(epx_native_ping);
EPX_NATIVE_HANDLER(epx_native_model_info);
EPX_NATIVE_HANDLER(epx_native_server_info);
EPX_NATIVE_HANDLER(epx_native_load_info);
EPX_NATIVE_HANDLER(epx_native_flush_cache);
EPX_NATIVE_HANDLER(epx_native_abort);
EPX_NATIVE_HANDLER(epx_native_tokenize);
EPX_NATIVE_HANDLER(epx_native_detokenize);
EPX_NATIVE_HANDLER(epx_native_record_start);
EPX_NATIVE_HANDLER(epx_native_record_stop);
EPX_NATIVE_HANDLER(epx_native_record_dump);
EPX_NATIVE_HANDLER(epx_native_metrics);
EPX_NATIVE_HANDLER(epx_native_state);
EPX_NATIVE_HANDLER(epx_web_asset);

#endif
