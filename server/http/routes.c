/* The route table and the endpoints that answer at once. */
#include <stdio.h>
#include <string.h>

#include "server/http/call.h"
#include "server/http/http_impl.h"
#include "server/http/native.h"
#include "server/http/openai_write.h"

#define MODELS_PREFIX "/v1/models/"

int epx_http_unavailable(epx_http_t *h, epx_api_error_t *err) {
    pthread_mutex_lock(&h->lock);
    int failed = h->failed, stopping = h->stopping || h->draining;
    if (failed) epx_api_fail(err, 503, "engine_failure", NULL, "%s", h->failure);
    else if (stopping) epx_api_fail(err, 503, "shutting_down", NULL, "the server is shutting down");
    pthread_mutex_unlock(&h->lock);
    return failed || stopping;
}

static enum MHD_Result get_health(epx_http_t *h, struct MHD_Connection *conn, const char *url, const epx_str_t *body,
                                  epx_call_t **out_call) {
    epx_api_error_t err;
    epx_str_t out = {0};
    (void)url, (void)body, (void)out_call;
    if (epx_http_unavailable(h, &err)) return epx_http_respond_error(conn, &err);
    if (epx_str_append_z(&out, "{\"status\":\"ok\"}") < 0) return MHD_NO;
    return epx_http_respond_json(conn, 200, &out);
}

static enum MHD_Result send_model(epx_http_t *h, struct MHD_Connection *conn, int as_list) {
    epx_str_t out = {0};
    if (epx_api_write_model(h->model_name, h->started_s, h->max_tokens, as_list, &out) >= 0)
        return epx_http_respond_json(conn, 200, &out);
    epx_str_fini(&out);
    return MHD_NO;
}

static enum MHD_Result get_models(epx_http_t *h, struct MHD_Connection *conn, const char *url, const epx_str_t *body,
                                  epx_call_t **out_call) {
    (void)url, (void)body, (void)out_call;
    return send_model(h, conn, 1);
}

static enum MHD_Result get_model(epx_http_t *h, struct MHD_Connection *conn, const char *url, const epx_str_t *body,
                                 epx_call_t **out_call) {
    const char *name = url + strlen(MODELS_PREFIX);
    epx_api_error_t err;
    (void)body, (void)out_call;
    if (strcmp(name, h->model_name) == 0) return send_model(h, conn, 0);
    epx_api_fail(&err, 404, "model_not_found", "model", "model: \"%.200s\" does not exist here; the model served is \"%s\"", name,
                 h->model_name);
    return epx_http_respond_error(conn, &err);
}

static const epx_http_route_t routes[] = {
    {"/v1/chat/completions", "POST", 1, epx_http_post_chat},
    {"/v1/completions", "POST", 1, epx_http_post_completions},
    {"/v1/models", "GET, HEAD", 0, get_models},
    {MODELS_PREFIX, "GET, HEAD", 0, get_model},
    {"/health", "GET, HEAD", 0, get_health},
    {"/health_generate", "GET, HEAD", 0, epx_native_health_generate},
    {"/ping", "GET, HEAD", 0, epx_native_ping},
    {"/generate", "POST, PUT", 1, epx_native_generate},
    {"/get_model_info", "GET, HEAD", 0, epx_native_model_info},
    {"/model_info", "GET, HEAD", 0, epx_native_model_info},
    {"/get_server_info", "GET, HEAD", 0, epx_native_server_info},
    {"/server_info", "GET, HEAD", 0, epx_native_server_info},
    {"/get_load", "GET, HEAD", 0, epx_native_load_info},
    {"/flush_cache", "GET, POST", 0, epx_native_flush_cache},
    {"/abort_request", "POST", 1, epx_native_abort},
    {"/tokenize", "POST", 1, epx_native_tokenize},
    {"/v1/tokenize", "POST", 1, epx_native_tokenize},
    {"/detokenize", "POST", 1, epx_native_detokenize},
    {"/v1/detokenize", "POST", 1, epx_native_detokenize},
    {"/start_expert_distribution_record", "GET, POST", 0, epx_native_record_start},
    {"/stop_expert_distribution_record", "GET, POST", 0, epx_native_record_stop},
    {"/dump_expert_distribution_record", "GET, POST", 0, epx_native_record_dump},
    {"/metrics", "GET, HEAD", 0, epx_native_metrics},
    {"/engine/state", "GET, HEAD", 0, epx_native_state},
    {"/web/", "GET, HEAD", 0, epx_web_asset},
    {"/", "GET, HEAD", 0, epx_web_asset},
};

const epx_http_route_t *epx_http_find_route(const char *url) {
    for (size_t i = 0; i < sizeof routes / sizeof routes[0]; i++) {
        size_t n = strlen(routes[i].path);
        int is_prefix = n > 1 && routes[i].path[n - 1] == '/';
        if (is_prefix ? strncmp(url, routes[i].path, n) == 0 && url[n] : strcmp(url, routes[i].path) == 0) return &routes[i];
    }
    return NULL;
}

int epx_http_route_allows(const epx_http_route_t *r, const char *method) {
    size_t n = strlen(method);
    for (const char *at = r->allow; (at = strstr(at, method)) != NULL; at += n) {
        int begins = at == r->allow || at[-1] == ' ', ends = at[n] == '\0' || at[n] == ',';
        if (n > 0 && begins && ends) return 1;
    }
    return 0;
}
