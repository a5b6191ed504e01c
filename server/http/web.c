/* The web page: files of server/web, embedded into the program when it is built. Nothing is loaded from elsewhere, which the
 * Content-Security-Policy makes sure of. */
#include "server/http/web.h"

#include <string.h>

#include "server/http/native.h"

static const char policy[] = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
                             "base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

static const epx_web_file_t *find(const char *url) {
    const char *name = strcmp(url, "/") == 0 ? "/web/index.html" : url;
    for (int i = 0; i < epx_n_web_files; i++)
        if (strcmp(epx_web_files[i].path, name) == 0) return &epx_web_files[i];
    return NULL;
}

EPX_NATIVE_HANDLER(epx_web_asset) {
    epx_api_error_t err;
    const epx_web_file_t *f = find(url);
    (void)h, (void)body, (void)out_call;
    if (!f) {
        epx_api_fail(&err, 404, "not_found", NULL, "no such path: %.300s", url);
        return epx_http_respond_error(conn, &err);
    }
    struct MHD_Response *r = MHD_create_response_from_buffer(f->n_bytes, (void *)(uintptr_t)f->data, MHD_RESPMEM_PERSISTENT);
    if (!r) return MHD_NO;
    MHD_add_response_header(r, "Content-Type", f->type);
    MHD_add_response_header(r, "Content-Security-Policy", policy);
    MHD_add_response_header(r, "X-Content-Type-Options", "nosniff");
    MHD_add_response_header(r, "Referrer-Policy", "no-referrer");
    MHD_add_response_header(r, "Cache-Control", "no-cache");
    enum MHD_Result ok = MHD_queue_response(conn, 200, r);
    MHD_destroy_response(r);
    return ok;
}
