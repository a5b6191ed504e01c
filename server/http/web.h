/* The embedded files of the web page; the table is generated from server/web by cmake/EmbedFiles.cmake. */
#ifndef EPX_SERVER_HTTP_WEB_H
#define EPX_SERVER_HTTP_WEB_H

#include <stddef.h>

typedef struct {
    const char *path; /* "/web/app.js" */
    const char *type; /* of the content */
    const unsigned char *data;
    size_t n_bytes;
} epx_web_file_t;

extern const epx_web_file_t epx_web_files[];
extern const int epx_n_web_files;

#endif
