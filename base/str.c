/* Growable strings, file reading, edit distance. */
#include "base/str.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked.h"

static epx_status_t reserve(epx_str_t *s, size_t more) {
    size_t need, cap = s->cap_bytes ? s->cap_bytes : 64;
    char *p;
    if (!epx_add_size(s->n_bytes, more, &need) || !epx_add_size(need, 1, &need))
        return epx_fail(EPX_ERR_NOMEM, "string of %zu + %zu bytes overflows", s->n_bytes, more);
    if (need <= s->cap_bytes) return EPX_OK;
    while (cap < need) cap = cap > (size_t)-1 / 2 ? need : cap * 2;
    p = realloc(s->data, cap);
    if (p == NULL) return epx_fail(EPX_ERR_NOMEM, "string: %zu bytes wanted", cap);
    s->data = p;
    s->cap_bytes = cap;
    return EPX_OK;
}

epx_status_t epx_str_append(epx_str_t *s, const char *data, size_t n_bytes) {
    EPX_TRY(reserve(s, n_bytes));
    if (n_bytes) memcpy(s->data + s->n_bytes, data, n_bytes);
    s->n_bytes += n_bytes;
    s->data[s->n_bytes] = 0;
    return EPX_OK;
}

epx_status_t epx_str_append_z(epx_str_t *s, const char *text) { return epx_str_append(s, text, strlen(text)); }

epx_status_t epx_str_printf(epx_str_t *s, const char *fmt, ...) {
    va_list ap;
    int n;
    va_start(ap, fmt);
    n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    if (n < 0) return epx_fail(EPX_ERR_INTERNAL, "bad format string");
    EPX_TRY(reserve(s, (size_t)n));
    va_start(ap, fmt);
    vsnprintf(s->data + s->n_bytes, (size_t)n + 1, fmt, ap);
    va_end(ap);
    s->n_bytes += (size_t)n;
    return EPX_OK;
}

void epx_str_clear(epx_str_t *s) {
    s->n_bytes = 0;
    if (s->data) s->data[0] = 0;
}

void epx_str_fini(epx_str_t *s) {
    free(s->data);
    *s = (epx_str_t){0};
}

const char *epx_str_z(const epx_str_t *s) { return s->data ? s->data : ""; }

/* Only regular files: a FIFO would block for ever, in open or in read. */
static epx_status_t open_regular(const char *path, FILE **out_file) {
    struct stat sb;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return epx_fail_errno(EPX_ERR_IO, errno, "%s", path);
    if (fstat(fd, &sb) == 0 && S_ISREG(sb.st_mode) && (*out_file = fdopen(fd, "rb"))) return EPX_OK;
    close(fd);
    return epx_fail(EPX_ERR_IO, "%s: not a regular file", path);
}

epx_status_t epx_read_file(const char *path, size_t max_bytes, char **out_data, size_t *out_bytes) {
    epx_str_t s = {0};
    epx_status_t st = EPX_OK;
    char block[65536];
    size_t n;
    FILE *f;
    EPX_TRY(open_regular(path, &f));
    while (st == EPX_OK && (n = fread(block, 1, sizeof block, f)) > 0) {
        if (n > max_bytes - s.n_bytes) st = epx_fail(EPX_ERR_FORMAT, "%s: larger than the limit of %zu bytes", path, max_bytes);
        else st = epx_str_append(&s, block, n);
    }
    if (st == EPX_OK && ferror(f)) st = epx_fail_errno(EPX_ERR_IO, errno, "%s", path);
    fclose(f);
    if (st == EPX_OK && s.data == NULL) st = epx_str_append(&s, "", 0);
    if (st != EPX_OK) {
        epx_str_fini(&s);
        return st;
    }
    *out_data = s.data;
    *out_bytes = s.n_bytes;
    return EPX_OK;
}

int epx_edit_distance(const char *a, const char *b) {
    int row[65], i, j, n = (int)strlen(b), diag, up;
    if (n > 64) return 1000;
    for (j = 0; j <= n; j++) row[j] = j;
    for (i = 0; a[i]; i++) {
        diag = row[0];
        row[0] = i + 1;
        for (j = 1; j <= n; j++) {
            up = row[j];
            row[j] = diag + (a[i] != b[j - 1]);
            if (up + 1 < row[j]) row[j] = up + 1;
            if (row[j - 1] + 1 < row[j]) row[j] = row[j - 1] + 1;
            diag = up;
        }
    }
    return row[n];
}
