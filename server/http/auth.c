/* Who may ask: the API key. Pure. */
#include <string.h>
#include <strings.h>

#include "server/http/http_impl.h"

/* Equal or not in a time that depends on the length of what the client sent only, so that a key cannot be guessed byte by byte.
 */
static int same_secret(const char *given, const char *key) {
    size_t n_key = strlen(key), n = strlen(given);
    unsigned differs = n != n_key;
    for (size_t i = 0; i < n; i++) differs |= (unsigned char)given[i] ^ (unsigned char)key[n_key ? i % n_key : 0];
    return differs == 0;
}

/* The page itself holds nothing secret; what it shows, it asks for with the key. */
static int is_public(const char *url) {
    static const char *const paths[] = {"/health", "/metrics", "/ping", "/"};
    for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++)
        if (strcmp(url, paths[i]) == 0) return 1;
    return strncmp(url, "/web/", 5) == 0;
}

int epx_http_authorised(const epx_http_t *h, const char *url, const char *authorization) {
    static const char scheme[] = "Bearer ";
    if (!h->api_key || is_public(url)) return 1;
    if (!authorization || strncasecmp(authorization, scheme, sizeof scheme - 1) != 0) return 0;
    return same_secret(authorization + sizeof scheme - 1, h->api_key);
}
