/* See node_facts.h. */
#include "app/node_facts.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "app/settings_json.h"
#include "base/sha256.h"
#include "epx/epx.h"

enum { BLOCK = 4096, N_BLOCKS = 64, MAX_HEADER = 100 << 20, SHOWN_DIGEST = 8 };

/* Of node 0 alone, or of this host. */
static const char *const not_compared[] = {"node-rank",         "host",           "port", "model-path",
                                           "served-model-name", "log-level",      "help", "dist-timeout",
                                           "shutdown-timeout",  "enable-metrics", NULL};

static int is_compared(const char *name) {
    for (int i = 0; not_compared[i]; i++)
        if (strcmp(not_compared[i], name) == 0) return 0;
    return strstr(name, "key") == NULL;
}

static epx_status_t add_flags(const epx_settings_t *s, epx_str_t *out) {
    for (size_t i = 0; i < epx_settings_table.n_options; i++) {
        const epx_option_t *o = &epx_settings_table.options[i];
        if (((o->commands >> EPX_CMD_SERVE) & 1u) == 0 || o->kind >= EPX_OPTION_NOTED_FLAG || !is_compared(o->name)) continue;
        EPX_TRY(epx_str_printf(out, "--%s\t", o->name));
        EPX_TRY(epx_options_value(o, s, out));
        EPX_TRY(epx_str_append_z(out, "\n"));
    }
    const char *transports = getenv("EPX_TRANSPORTS");
    EPX_TRY(epx_str_printf(out, "epx\t%s\nEPX_TRANSPORTS\t%s\n", epx_version(), transports ? transports : "unset"));
    return epx_str_printf(out, "EPX_NUM_MAX_DISPATCH_TOKENS_PER_RANK\t%" PRId64 "\n", epx_settings_token_cap(NULL));
}

/* ---- files ---- */

static epx_status_t hash_range(int fd, uint64_t from, uint64_t n, epx_sha256_t *h) {
    char block[16 * BLOCK];
    while (n > 0) {
        ssize_t k = pread(fd, block, n < sizeof block ? (size_t)n : sizeof block, (off_t)from);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) return epx_fail_errno(EPX_ERR_IO, k < 0 ? errno : EIO, "reading");
        epx_sha256_update(h, block, (size_t)k);
        from += (uint64_t)k;
        n -= (uint64_t)k;
    }
    return EPX_OK;
}

/* The header says which tensors there are; the blocks tell other weights of the same shapes apart. */
static epx_status_t hash_weights(int fd, uint64_t size, epx_sha256_t *h) {
    uint64_t header = 0, rest;
    if (size < sizeof header || pread(fd, &header, sizeof header, 0) != sizeof header || header > MAX_HEADER ||
        header > size - sizeof header)
        return hash_range(fd, 0, size < MAX_HEADER ? size : MAX_HEADER, h); /* not a safetensors file; the loader will say so */
    header += sizeof header;
    EPX_TRY(hash_range(fd, 0, header, h));
    rest = size - header;
    if (rest <= (uint64_t)BLOCK * N_BLOCKS) return hash_range(fd, header, rest, h);
    for (uint64_t i = 0; i < N_BLOCKS; i++) EPX_TRY(hash_range(fd, header + (rest - BLOCK) * i / (N_BLOCKS - 1), BLOCK, h));
    return EPX_OK;
}

static int ends_with(const char *name, const char *end) {
    size_t n = strlen(name), k = strlen(end);
    return n >= k && strcmp(name + n - k, end) == 0;
}

static epx_status_t add_file(int dir, const char *name, epx_str_t *out) {
    uint8_t digest[EPX_SHA256_BYTES];
    epx_sha256_t h;
    struct stat st;
    int fd = openat(dir, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    epx_status_t s = EPX_OK;
    if (fd < 0 || fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        if (fd >= 0) close(fd);
        return epx_str_printf(out, "%s\tunreadable\n", name);
    }
    epx_sha256_init(&h);
    if (ends_with(name, ".safetensors")) s = hash_weights(fd, (uint64_t)st.st_size, &h);
    else s = hash_range(fd, 0, (uint64_t)st.st_size, &h);
    close(fd);
    if (s < 0) return epx_fail_context(s, "%s", name);
    epx_sha256_final(&h, digest);
    EPX_TRY(epx_str_printf(out, "%s\t", name));
    for (int i = 0; i < SHOWN_DIGEST; i++) EPX_TRY(epx_str_printf(out, "%02x", digest[i]));
    return epx_str_printf(out, "... of %" PRId64 " bytes\n", (int64_t)st.st_size);
}

static int is_model_file(const struct dirent *e) {
    static const char *const names[] = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", NULL};
    for (int i = 0; names[i]; i++)
        if (strcmp(names[i], e->d_name) == 0) return 1;
    return strncmp(e->d_name, "model", 5) == 0 &&
           (ends_with(e->d_name, ".safetensors") || ends_with(e->d_name, ".safetensors.index.json"));
}

static epx_status_t add_files(const epx_settings_t *s, epx_str_t *out) {
    struct dirent **list = NULL;
    int n = scandir(s->model_path, &list, is_model_file, alphasort);
    int is_dummy = strcmp(s->load_format, "dummy") == 0, dir = open(s->model_path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    epx_status_t st = EPX_OK;
    if (n < 0 || dir < 0) st = epx_fail_errno(EPX_ERR_NOT_FOUND, errno, "--model-path %s", s->model_path);
    for (int i = 0; i < n; i++) {
        int skipped = is_dummy && ends_with(list[i]->d_name, ".safetensors");
        if (st >= 0 && !skipped) st = add_file(dir, list[i]->d_name, out);
        free(list[i]);
    }
    free(list);
    if (dir >= 0) close(dir);
    return st;
}

epx_status_t epx_node_facts(const epx_settings_t *s, epx_str_t *out) {
    EPX_TRY(add_flags(s, out));
    return add_files(s, out);
}
